"""Made notebooks and a copy of the course to try them in."""

import os
import shutil
import socket
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from utils.notebooks import COURSE, links, run

OPENING = """\
# 99 · A made chapter

You will be able to tell whether a rule works.

**Time**: 30 minutes. **Prerequisites**: none.
"""
CLOSING = """\
## Summary

One thing was shown.

## What the simulation left out

Everything.

## Exercises

1. Break a rule.

## Further reading

- The rules.
"""
PICTURE = '<svg role="img" aria-label="two bars" viewBox="0 0 2 2"><path d="M0 0h1v1z"/></svg>'


def code(source, *tags, outputs=()):
    metadata = {"tags": list(tags)} if tags else {}
    return new_code_cell(source, metadata=metadata, outputs=list(outputs))


def chapter(*cells, name="99_made.ipynb"):
    """A chapter that keeps all rules, with the given cells in its middle."""
    made = new_notebook(cells=[new_markdown_cell(OPENING), *cells, new_markdown_cell(CLOSING)])
    links.stamp_notebook(made, name)
    count = 0
    for cell in made["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell["execution_count"] = count
    run.clean(made)
    return made


@pytest.fixture
def good():
    """A chapter with an output of each kind that keeps all rules."""
    figure = new_output("display_data", {"text/html": PICTURE, "text/plain": "two bars"})
    error = new_output("error", ename="ValueError", evalue="7 and 2", traceback=["ValueError"])
    return chapter(
        new_markdown_cell("## A question\n\n![a plan](plan.svg)\n\n```python\n# no title\n```"),
        code("print(1 + 1)", outputs=[new_output("stream", text="2\n")]),
        code("show(figure, alt='two bars')", outputs=[figure]),
        code("raise ValueError('7 and 2')", "raises-exception", outputs=[error]),
    )


class Course:
    """A copy of the course without chapters and what they teach, to put made ones in."""

    def __init__(self, folder):
        self.folder = folder
        self.chapters = folder / "chapters"
        self.chapters.mkdir(parents=True)
        (folder / "tests").mkdir()
        for file in ("pyproject.toml", "conftest.py", "tests/nbval.cfg"):
            shutil.copy(COURSE / file, folder / file)
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(COURSE / "utils/notebooks", folder / "utils/notebooks", ignore=skip)
        (folder / "utils/__init__.py").touch()  # the real one imports torch, which takes seconds
        own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        self.environment = {**own, "PYTHONPATH": str(folder)}

    def add(self, notebook, name="99_made.ipynb"):
        path = self.chapters / name
        nbformat.write(notebook, path)
        return path

    def run(self, *arguments, **options):
        """A Python command, in the copy."""
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=150,
            **options,
        )

    def validate(self, *arguments):
        """What `make test` does with notebooks."""
        return self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "chapters", *arguments)


@pytest.fixture
def course(tmp_path):
    return Course(tmp_path / "the course")


@pytest.fixture
def make_chapter():
    return chapter


@pytest.fixture
def make_code():
    return code


@pytest.fixture(scope="session")
def free_port():
    """A function that finds a port of the loopback address on which nothing listens."""

    def find():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find
