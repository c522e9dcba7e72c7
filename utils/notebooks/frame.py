"""The frame of a chapter: how it opens and closes. Rules as in rules.py."""

import re

from utils.notebooks import links, markdown_cells, numbered, prose, tags

OPENING = {  # what the cells before the first code say, and how it is recognised
    "what the reader will be able to do": r"you(’|'| wi)ll be able to",
    "the time it takes": r"\d+ minutes",
    "the prerequisites": r"prerequisite",
}
CLOSING = ("Summary", "What the simulation left out", "Exercises", "Further reading")


def headings(notebook):
    """(level, text) of the headings, in order."""
    for cell in markdown_cells(notebook):
        for marks, text in re.findall(r"^(#+)\s+(.+?)\s*#*$", prose(cell), re.MULTILINE):
            yield len(marks), text


def title(path, notebook):
    titles = [text for level, text in headings(notebook) if level == 1]
    first = notebook["cells"][0] if notebook["cells"] else {"cell_type": "", "source": ""}
    if first["cell_type"] != "markdown" or not first["source"].startswith("# "):
        yield "the first cell does not begin with a title (# ...)"
    if len(titles) > 1:
        yield f"{len(titles)} titles (# ...), should be one: {', '.join(titles)}"


def opening(path, notebook):
    text = ""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code" and "colab" not in tags(cell):
            break
        if cell["cell_type"] == "markdown":
            text += cell["source"] + "\n"
    for what, pattern in OPENING.items():
        if not re.search(pattern, text, re.IGNORECASE):
            yield f"the opening does not say {what} (looked for: {pattern})"


def closing(path, notebook):
    """The four closing sections, in order, none empty."""
    source = "\n".join(prose(cell) for cell in markdown_cells(notebook))
    sections = re.split(r"^##\s+", source, flags=re.MULTILINE)[1:]
    found = []
    for section in sections:
        heading, _, body = section.partition("\n")
        for name in CLOSING:
            if name.lower() in heading.lower():
                found.append(name)
                if not body.strip():
                    yield f"the section {name} is empty"
    for name in CLOSING:
        if name not in found:
            yield f"no section: ## {name}"
    if found != sorted(found, key=CLOSING.index):
        yield f"sections in the order {', '.join(found)}; should be {', '.join(CLOSING)}"


def colab(path, notebook):
    """Badge and Colab cell are those that `links` writes."""
    if not notebook["cells"] or links.badge(path.name) not in notebook["cells"][0]["source"]:
        yield "no Colab badge with the course's address: python -m utils.notebooks links"
    marked = [n for n, cell in numbered(notebook) if "colab" in tags(cell)]
    if marked != [2]:
        yield "cell 2 is not the Colab cell: python -m utils.notebooks links"
    elif notebook["cells"][1]["source"] != links.colab_cell():
        yield "cell 2 is not the current Colab cell: python -m utils.notebooks links"


RULES = (title, opening, closing, colab)
