"""What notebooks share with the rest: saved code, the course's address, the cell for Colab."""

import json
import subprocess
import sys

import nbformat
import pytest

from utils.notebooks import COURSE, chapters, code_cells, links, saved

# Cells tagged `saved`


def test_saved_cells_are_what_the_library_holds():
    modules = saved.library()
    assert modules
    for path in chapters():
        assert list(saved.drift(nbformat.read(path, as_version=4), path.name, modules)) == []


LIBRARY = '''\
import math


@staticmethod
def mean(values):
    """Plain mean."""
    return sum(values) / len(values)


class Thing:
    size = 2  # cells
'''


@pytest.fixture
def drift(tmp_path, make_chapter, make_code):
    """Problems of a saved cell, held against the modules of a small library."""

    def drift(source, **modules):
        folder = tmp_path / "utils"
        (folder / "deep").mkdir(parents=True)
        for name, text in {"deep/library": LIBRARY, **modules}.items():
            (folder / f"{name}.py").write_text(text)
        made = make_chapter(make_code(source, "saved"), make_code("def mean():\n    pass"))
        return "\n".join(saved.drift(made, "99_made.ipynb", saved.library(folder)))

    return drift


MEAN = LIBRARY[LIBRARY.index("@") : LIBRARY.index("\n\n\nclass")]


def test_equal_sources_pass(drift):
    thing = LIBRARY[LIBRARY.index("class") :]
    assert drift(f"import math\n\n\n{MEAN}\n\n\n{thing}") == ""


@pytest.mark.parametrize(
    "old, new",
    [
        ("sum(values)", "math.fsum(values)"),
        ("Plain mean.", "The mean."),
        ("@staticmethod\n", ""),
        ("len(values)", "len(values)  # rows"),
    ],
)
def test_any_difference_is_shown_as_a_diff(drift, old, new):
    problem = drift(MEAN.replace(old, new))
    assert "99_made.ipynb, code cell 2: mean differs from utils/deep/library.py" in problem
    library_side = [line for line in problem.splitlines() if line.startswith("+")]
    assert any(old.strip() in line for line in library_side)


@pytest.mark.parametrize(
    "source, message",
    [
        ("def other():\n    pass", "other stands in no module of utils/"),
        ("x = 1", "defines no function or class"),
        (MEAN + "\n\n\nprint(mean([1]))", "definitions and imports only"),
    ],
)
def test_what_a_saved_cell_may_hold(drift, source, message):
    assert message in drift(source)


def test_a_saved_name_stands_in_one_module(drift):
    problem = drift(MEAN, again=LIBRARY)
    assert "utils/again.py, utils/deep/library.py; it should be exactly one" in problem


def test_another_module_may_use_a_saved_name_for_something_else(drift):
    assert drift(MEAN, other="def mean():\n    return 0") == ""


def test_a_saved_cell_that_is_like_none_of_several_modules(drift):
    problem = drift(MEAN.replace("Plain", "The"), other="def mean():\n    return 0")
    assert "utils/deep/library.py, utils/other.py; it should be exactly one" in problem


def test_saved_command(tmp_path, capsys, make_chapter, make_code):
    path = tmp_path / "99_made.ipynb"
    nbformat.write(make_chapter(), path)
    assert not saved.main([path])
    nbformat.write(make_chapter(make_code("def no_such_name():\n    pass", "saved")), path)
    assert saved.main([path])
    assert "no_such_name" in capsys.readouterr().out


# The address


@pytest.fixture
def moved(monkeypatch):
    """Another address."""
    monkeypatch.setattr(links, "repository", lambda: "https://github.com/someone/a-course")


def test_no_link_disagrees():
    for path in chapters():
        notebook = nbformat.read(path, as_version=4)
        before = nbformat.writes(notebook)
        links.stamp_notebook(notebook, path.name)
        assert nbformat.writes(notebook) == before, path.name
        for cell in notebook["cells"]:
            assert links.stamp_text(cell["source"]) == cell["source"], path.name
    kinds = ("*.md", "*.yml", "*.cfg", "Makefile", "utils/**/*.py", "chapters/**/*.md")
    for path in (path for kind in kinds for path in COURSE.glob(kind)):
        text = path.read_text(encoding="utf-8")
        assert links.stamp_text(text) == text, path.name


def test_address_stands_in_one_place():
    name = links.repository().partition("github.com/")[2]
    files = [path for kind in ("*.toml", "*.yml", "Makefile") for path in COURSE.glob(kind)]
    files += COURSE.glob("utils/**/*.py")
    assert [path.name for path in files if name in path.read_text()] == ["pyproject.toml"]


def test_stamping_moves_every_link(moved, make_chapter, make_code):
    made = make_chapter(make_code("1"))
    assert "someone/a-course/blob/main/chapters/99_made.ipynb" in made["cells"][0]["source"]
    assert "https://github.com/someone/a-course" in made["cells"][1]["source"]
    assert "parallel-training" not in made["cells"][0]["source"] + made["cells"][1]["source"]
    before = nbformat.writes(made)
    links.stamp_notebook(made, "99_made.ipynb")
    assert nbformat.writes(made) == before


@pytest.mark.parametrize(
    "old, new",
    [
        (
            "[![Open in Colab](x.svg)](https://colab.research.google.com/github/a/b/blob/dev/c.ipynb)",
            "[![Open in Colab](x.svg)](https://colab.research.google.com/github/someone/a-course"
            "/blob/main/c.ipynb)",
        ),
        (
            "git clone https://github.com/a/b.git\n",
            "git clone https://github.com/someone/a-course.git\n",
        ),
        ("git clone https://github.com/a/b\n", "git clone https://github.com/someone/a-course\n"),
        (
            "(https://github.com/a/parallel-training-from-scratch/issues)",
            "(https://github.com/someone/a-course/issues)",
        ),
        ("https://github.com/a/a-course.", "https://github.com/someone/a-course."),
        ("https://github.com/pytorch/pytorch", "https://github.com/pytorch/pytorch"),
        ("https://github.com/a/a-course-of-others", "https://github.com/a/a-course-of-others"),
    ],
)
def test_links_in_text(moved, old, new):
    assert links.stamp_text(old) == new
    assert links.stamp_text(new) == new


def test_links_command_writes_notebooks_and_readme(course, make_chapter, make_code):
    made = make_chapter(make_code("1"))
    made["cells"][0]["source"] = "# 99 · A made chapter"
    del made["cells"][1]
    path = course.add(made)
    readme = course.folder / "README.md"
    readme.write_text("git clone https://github.com/old/place\n")
    assert course.run("-m", "utils.notebooks", "links").returncode == 0
    stamped = json.loads(path.read_text())
    assert links.badge(path.name) in "".join(stamped["cells"][0]["source"])
    assert "".join(stamped["cells"][1]["source"]) == links.colab_cell()
    assert stamped["cells"][1]["metadata"]["tags"] == ["colab", "hide-input"]
    assert readme.read_text() == f"git clone {links.repository()}\n"
    again = course.run("-m", "utils.notebooks", "links")
    assert again.returncode == 0 and again.stdout == ""


# The Colab cell, run with stand-ins for Colab, git and pip

GIT = """\
import os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write("git " + " ".join(sys.argv[1:]) + chr(10))
os.makedirs(sys.argv[-1] + "/utils")
os.makedirs(sys.argv[-1] + "/chapters")
"""
PIP = """\
import os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write("pip " + " ".join(sys.argv[1:]) + chr(10))
"""
ON_COLAB = """\
import importlib.util, os, sys, types

lacks = os.environ["LACKS"].split()
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in lacks else find("json")
sys.modules["google.colab"] = types.ModuleType("google.colab")
cell = sys.argv[1]
exec(cell)
lacks.clear()
exec(cell)
print(os.getcwd(), sys.path[0], sys.path.count(sys.path[0]))
"""


class Colab:
    def __init__(self, folder):
        self.content, self.calls = folder / "content", folder / "calls"
        tools, modules = folder / "bin", folder / "modules"
        tools.mkdir()
        (folder / "git.py").write_text(GIT)
        script = f'#!/bin/sh\nexec "{sys.executable}" "{folder}/git.py" "$@"\n'
        (tools / "git").write_text(script)
        (tools / "git").chmod(0o755)
        (modules / "pip").mkdir(parents=True)
        (modules / "pip" / "__init__.py").touch()
        (modules / "pip" / "__main__.py").write_text(PIP)
        self.environment = {
            "PATH": str(tools),
            "PYTHONPATH": str(modules),
            "CALLS": str(self.calls),
        }

    def run(self, program, lacks=""):
        cell = links.colab_cell().replace("/content", str(self.content))
        done = subprocess.run(
            [sys.executable, "-c", program, cell],
            env={**self.environment, "LACKS": lacks},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return done.stdout, calls


@pytest.fixture
def colab(tmp_path):
    return Colab(tmp_path)


def test_colab_cell_fetches_the_course_once(colab):
    said, calls = colab.run(ON_COLAB, lacks="d2l mlxtend")
    course = colab.content / links.repository().rsplit("/", 1)[1]
    clone, pip = calls
    assert clone == f"git clone --quiet --depth=1 {links.repository()} {course}"
    assert pip == "pip install --quiet --no-deps d2l==1.0.3 mlxtend"
    assert said == f"{course}/chapters {course} 1\n"


@pytest.mark.parametrize("lacks, installed", [("", []), ("mlxtend", ["mlxtend"])])
def test_colab_cell_installs_only_what_is_missing(colab, lacks, installed):
    _, calls = colab.run(ON_COLAB, lacks)
    found = [call.partition("--no-deps ")[2].split() for call in calls if call.startswith("pip")]
    assert found == ([installed] if installed else [])
    assert not any("torch" in name for names in found for name in names)


def test_colab_cell_does_nothing_elsewhere(colab):
    program = """\
import os, sys
state = lambda: (dict(os.environ), list(sys.path), os.getcwd())
before = state()
exec(sys.argv[1])
assert state() == before
print(sorted(globals()))"""
    said, calls = colab.run(program)
    assert calls == [] and not colab.content.exists()
    assert "course" not in said and "subprocess" not in said


def test_colab_cell_is_short_and_first(make_chapter, make_code):
    assert len(links.colab_cell().splitlines()) <= 25
    assert code_cells(make_chapter(make_code("1")))[0]["source"] == links.colab_cell()
