"""The rules that every chapter keeps: each takes (path, notebook) and yields problems as text.

`check` runs them all. Cells are counted from 1, as an editor shows them.
"""

import json
import re
from collections import Counter
from urllib.parse import unquote

from utils.notebooks import TAGS, frame, numbered, prose, tags
from utils.notebooks.pictures import Pictures

LONGEST_CELL = 25  # lines
LARGEST_FILE = 1_000_000  # bytes
# /home/me and the like, on any system; nothing that a reader's machine has too
MACHINE = re.compile(
    r"/(?:root|work|tmp|home|mnt|Users|private/var)/|[A-Z]:\\+Users|/site-packages/"
)
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}|\b0x7f[0-9a-f]{6,}")
INDEX = re.compile(r"https?://[^\s\"')]*/(?:whl|simple)/|--(?:extra-)?index-url")
INSTALL = re.compile(r"^\s*[!%]\s*(?:pip|conda|mamba|apt\S*)\b|\bpip\W+install\b", re.MULTILINE)
PORT = re.compile(r"(?<![\d.])(?:29500|12355)(?!\d)")


def outputs(notebook):
    """(number of the cell, cell, output)."""
    for number, cell in numbered(notebook):
        for output in cell["outputs"]:
            yield number, cell, output


def text_of(output):
    """Everything a reader sees of an output, pictures' data left out."""
    parts = [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
    data = output.get("data", {})
    parts += [data[kind] for kind in data if kind.startswith("text/") or kind == "image/svg+xml"]
    return "\n".join("".join(part) for part in parts)


# One clean run


def execution_counts(path, notebook):
    expected = 0
    for number, cell in numbered(notebook):
        if not cell["source"].strip():
            yield f"cell {number} is empty"
            continue
        skipped = "skip-execution" in tags(cell)
        expected += not skipped
        if cell["execution_count"] != (None if skipped else expected):
            yield f"cell {number} has execution count {cell['execution_count']}, not {expected}"
            return


def errors(path, notebook):
    announced = set()
    for number, cell, output in outputs(notebook):
        if output["output_type"] == "error":
            announced.add(number)
            if "raises-exception" not in tags(cell):
                yield f"cell {number} ended in {output['ename']} and is not tagged raises-exception"
    for number, cell in numbered(notebook):
        if "raises-exception" in tags(cell) and number not in announced:
            yield f"cell {number} is tagged raises-exception and raised none"


def stderr(path, notebook):
    for number, _, output in outputs(notebook):
        if output.get("name") == "stderr":
            yield f"cell {number} wrote to stderr: {text_of(output)[:80]!r}"


def addresses(path, notebook):
    for number, _, output in outputs(notebook):
        if found := ADDRESS.search(text_of(output)):
            yield f"cell {number} shows a memory address, which differs every run: {found[0]}"


def machine_paths(path, notebook):
    for number, cell in enumerate(notebook["cells"], start=1):
        if found := MACHINE.search(json.dumps(cell, ensure_ascii=False)):
            yield f"cell {number} holds a path of a machine: {found[0]}"


# Size and shape


def cell_length(path, notebook):
    for number, cell in numbered(notebook):
        if (lines := len(cell["source"].splitlines())) > LONGEST_CELL:
            yield f"cell {number} has {lines} lines, at most {LONGEST_CELL}"


def file_size(path, notebook):
    size = path.stat().st_size
    if size >= LARGEST_FILE:
        yield f"{size / 1e6:.1f} MB, should be under {LARGEST_FILE / 1e6:.0f} MB"


def metadata(path, notebook):
    known = notebook["metadata"]
    if known.get("kernelspec", {}).get("name") != "python3":
        yield "metadata: kernelspec is not python3"
    if "version" in known.get("language_info", {}):
        yield "metadata: names a Python version; `run` saves without"
    if extra := set(known) - {"kernelspec", "language_info", "widgets"}:
        yield f"metadata: {', '.join(sorted(extra))}; `run` saves without"
    for number, cell in enumerate(notebook["cells"], start=1):
        if extra := set(cell["metadata"]) - {"tags"}:
            yield f"cell {number}: metadata {', '.join(sorted(extra))}; `run` saves without"


def widget_state(path, notebook):
    for kind, content in notebook["metadata"].get("widgets", {}).items():
        if not content.get("state"):
            yield f"metadata: widgets {kind} without their state; the page would not render"


def cell_ids(path, notebook):
    ids = Counter(cell.get("id") for cell in notebook["cells"])
    if None in ids:
        yield "cells without an id; `run` saves with"
    for name, times in ids.items():
        if name is not None and times > 1:
            where = [str(n) for n, c in enumerate(notebook["cells"], 1) if c.get("id") == name]
            yield f"cells {' and '.join(where)} have the same id {name}"


def known_tags(path, notebook):
    for number, cell in enumerate(notebook["cells"], start=1):
        if unknown := tags(cell) - set(TAGS):
            yield f"cell {number}: unknown tag {', '.join(sorted(unknown))}"
        skips = {"nbval-skip", "skip-execution"} & tags(cell)
        if len(skips) == 1:
            yield f"cell {number}: nbval-skip and skip-execution only go together"
        if cell["cell_type"] == "code" and re.search(r"^\s*#\s*NBVAL_", cell["source"], re.M):
            yield f"cell {number}: an NBVAL_ comment; use a tag"


# What the text and the code say


def alt_text(path, notebook):
    advice = "show figures with utils.plots.show(alt=...)"
    for number, _, output in outputs(notebook):
        data = output.get("data", {})
        if raster := sorted(kind for kind in data if re.match("image/(?!svg)", kind)):
            yield f"cell {number} shows {raster[0]}, which has no alt text: {advice}"
        markup = "".join(data.get("image/svg+xml", "")) + "".join(data.get("text/html", ""))
        if Pictures(markup).bare:
            yield f"cell {number} shows a picture without alt text: {advice}"
    for number, cell in numbered(notebook, "markdown"):
        if re.search(r"!\[\s*\]", prose(cell)) or Pictures(prose(cell)).bare:
            yield f"cell {number}: a picture without alt text"


def relative_links(path, notebook):
    """Links to files of the course lead somewhere."""
    for number, cell in numbered(notebook, "markdown"):
        for target in re.findall(r"\]\(([^)\s]+)", prose(cell)):
            file = unquote(target.partition("#")[0])
            if file and ":" not in file and not (path.parent / file).exists():
                yield f"cell {number} links to {file}, which is not there"


def package_indexes(path, notebook):
    for number, cell in enumerate(notebook["cells"], start=1):
        if found := INDEX.search(json.dumps(cell, ensure_ascii=False)):
            yield f"cell {number} names a package index: {found[0]}"
        if cell["cell_type"] == "code" and "colab" not in tags(cell):
            if found := INSTALL.search(cell["source"]):
                yield f"cell {number} installs something: {found[0].strip()}"


def fixed_ports(path, notebook):
    for number, cell in enumerate(notebook["cells"], start=1):
        if found := PORT.search(cell["source"]):
            yield f"cell {number} names the fixed port {found[0]}; a second run would not start"


def clear_output(path, notebook):
    for number, cell in numbered(notebook):
        if "clear_output" in cell["source"]:
            yield f"cell {number} uses clear_output, which nbval does not understand"


RULES = (
    *frame.RULES,
    execution_counts,
    errors,
    stderr,
    addresses,
    machine_paths,
    cell_length,
    file_size,
    metadata,
    widget_state,
    cell_ids,
    known_tags,
    alt_text,
    relative_links,
    package_indexes,
    fixed_ports,
    clear_output,
)


def check(path, notebook=None):
    """All problems of one notebook."""
    if notebook is None:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
    return [problem for rule in RULES for problem in rule(path, notebook)]


def main(paths):
    failed = 0
    for path in paths:
        for problem in check(path):
            failed += 1
            print(f"{path.name}: {problem}")
    print(f"{len(paths)} notebooks, {failed} problems")
    return bool(failed)
