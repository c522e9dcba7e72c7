"""The course's address, from pyproject.toml into the notebooks and the README."""

import re

import nbformat

from utils.notebooks import COURSE, setting, tags

BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)")
COLAB = "https://colab.research.google.com"
ON_COLAB = re.compile(re.escape(COLAB) + r"/github/[^/\s]+/[^/\s]+/blob/[^/\s]+/")

# The first code cell of every chapter. It must leave Colab's torch alone, hence --no-deps.
COLAB_CELL = """\
# On Colab, this cell fetches the course and what Colab lacks. Anywhere else it does nothing.
import sys

if "google.colab" in sys.modules:
    import importlib.util
    import os
    import subprocess

    course = "/content/{name}"
    if not os.path.isdir(course + "/utils"):
        repository = "{repository}"
        clone = ["git", "clone", "--quiet", "--depth=1", repository]
        subprocess.run([*clone, course], check=True)
    packages = {{"d2l": "d2l==1.0.3", "mlxtend": "mlxtend"}}
    missing = [packages[name] for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *missing], check=True)
    if course not in sys.path:
        sys.path.insert(0, course)
    os.chdir(course + "/chapters")"""


def repository():
    return setting(r'^Repository = "([^"]+)"').rstrip("/")


def badge(name):
    """The Colab badge of the chapter in file `name`."""
    target = repository().replace("https://github.com/", f"{COLAB}/github/")
    picture = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]"
    return f"{picture}({target}/blob/main/chapters/{name})"


def colab_cell():
    address = repository()
    return COLAB_CELL.format(repository=address, name=address.rsplit("/", 1)[1])


def stamp_notebook(notebook, name):
    """Write badge and Colab cell in place; makes them where they are missing."""
    title = notebook["cells"][0]
    if BADGE.search(title["source"]):
        title["source"] = BADGE.sub(lambda _: badge(name), title["source"])
    else:
        title["source"] = title["source"].rstrip() + "\n\n" + badge(name)
    for cell in notebook["cells"]:
        if "colab" in tags(cell):
            cell["source"] = colab_cell()
            return
    made = nbformat.v4.new_code_cell(
        colab_cell(), id="colab", metadata={"tags": ["colab", "hide-input"]}
    )
    notebook["cells"].insert(1, made)


def stamp_text(text):
    """The course's links in a text, with its current address.

    Known by their form: links that open a notebook on Colab, the argument of `git clone`, and
    repositories of the course's name, whoever owns them.
    """
    address = repository()
    on_colab = address.replace("https://github.com/", f"{COLAB}/github/") + "/blob/main/"
    text = ON_COLAB.sub(lambda _: on_colab, text)
    text = re.sub(r"(git clone )https://\S+?(?=(\.git)?\s)", lambda m: m[1] + address, text)
    names = {address.rsplit("/", 1)[1], setting(r'^name = "([^"]+)"')}
    pattern = rf"https://github\.com/[\w.-]+/(?:{'|'.join(map(re.escape, names))})(?![\w-])"
    return re.sub(pattern, lambda _: address, text)


def main(paths):
    for path in paths:
        before = path.read_text(encoding="utf-8")
        notebook = nbformat.reads(before, as_version=4)
        stamp_notebook(notebook, path.name)
        after = nbformat.writes(notebook) + "\n"
        if after != before:
            path.write_text(after, encoding="utf-8")
            print("stamped", path.name)
    readme = COURSE / "README.md"
    if readme.exists():
        before = readme.read_text(encoding="utf-8")
        if stamp_text(before) != before:
            readme.write_text(stamp_text(before), encoding="utf-8")
            print("stamped README.md")
    return 0
