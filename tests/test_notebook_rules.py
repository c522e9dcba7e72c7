"""Every chapter keeps the rules, and every rule finds what it is there for."""

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from utils.notebooks import TAGS, chapters, rules
from utils.notebooks.pictures import Pictures


@pytest.mark.parametrize("path", chapters(), ids=lambda path: path.name)
def test_chapter_keeps_the_rules(path):
    assert rules.check(path) == []


@pytest.fixture
def check(tmp_path):
    """Problems of a notebook as it would be read from its file."""

    def check(notebook):
        (tmp_path / "plan.svg").touch()
        path = tmp_path / "99_made.ipynb"
        path.write_text(json.dumps(notebook))
        return rules.check(path)

    return check


def test_good_chapter_has_no_problem(good, check):
    assert check(good) == []


def source(number, text):
    """Change the source of a cell."""

    def change(notebook):
        notebook["cells"][number]["source"] = text

    return change


def replace(number, old, new):
    def change(notebook):
        before = notebook["cells"][number]["source"]
        assert old in before
        notebook["cells"][number]["source"] = before.replace(old, new)

    return change


def output(kind, **content):
    """Give the first ordinary code cell another output."""

    def change(notebook):
        notebook["cells"][3]["outputs"] = [new_output(kind, **content)]

    return change


def shows(**data):
    return output("display_data", data={k.replace("_", "/", 1): v for k, v in data.items()})


def tag(number, *names):
    def change(notebook):
        notebook["cells"][number]["metadata"]["tags"] = list(names)

    return change


def insert(cell):
    """Put a cell before the closing one."""

    def change(notebook):
        notebook["cells"].insert(-1, cell)

    return change


def drop(number):
    return lambda notebook: notebook["cells"].pop(number)


def set_metadata(**values):
    return lambda notebook: notebook["metadata"].update(values)


def count(value):
    def change(notebook):
        notebook["cells"][3]["execution_count"] = value

    return change


def cell_metadata(notebook):
    notebook["cells"][3]["metadata"]["collapsed"] = True


def same_id(notebook):
    notebook["cells"][4]["id"] = notebook["cells"][3]["id"]


def no_kernel(notebook):
    notebook["metadata"]["kernelspec"]["name"] = "conda-env-course"


# rule: (change to the good chapter, part of the message), ...
# Cells of the good chapter, from 0: opening, Colab, question, print, figure, error, closing.
CASES = {
    "title": [
        (source(0, "Hello"), "does not begin with a title"),
        (drop(0), "does not begin with a title"),
        (insert(new_markdown_cell("# Another")), "2 titles"),
    ],
    "opening": [
        (replace(0, "You will be able to", "See"), "able to do"),
        (replace(0, "30 minutes", "short"), "the time"),
        (replace(0, "Prerequisites", "Needs"), "prerequisites"),
    ],
    "closing": [
        (replace(-1, "## Summary", "## Sum"), "no section: ## Summary"),
        (replace(-1, "## What the simulation left out", "## Left"), "What the simulation left out"),
        (replace(-1, "## Exercises", "### Exercises"), "no section: ## Exercises"),
        (replace(-1, "- The rules.", ""), "Further reading is empty"),
        (replace(-1, "## Summary", "## Further reading\n\nX.\n\n## Summary"), "in the order"),
    ],
    "colab": [
        (replace(0, "colab.research", "colab.elsewhere"), "no Colab badge"),
        (replace(0, "99_made", "98_other"), "no Colab badge"),
        (drop(1), "cell 2 is not the Colab cell"),
        (replace(1, "--no-deps", "--upgrade"), "not the current Colab cell"),
    ],
    "execution_counts": [
        (count(7), "cell 4 has execution count 7, not 2"),
        (count(None), "cell 4 has execution count None, not 2"),
        (insert(new_code_cell("1 + 1")), "execution count None, not 5"),
        (insert(new_code_cell("")), "cell 7 is empty"),
        (tag(3, "nbval-skip", "skip-execution"), "cell 4 has execution count 2"),
    ],
    "errors": [
        (tag(5), "ValueError and is not tagged"),
        (tag(3, "raises-exception"), "raised none"),
    ],
    "stderr": [(output("stream", name="stderr", text="UserWarning: x"), "stderr: 'UserWarning")],
    "addresses": [
        (output("stream", text="<object object at 0x7f3a2c0>\n"), "0x7f3a2c0"),
        (shows(text_plain="[<Line2D at 0x10c4f1a90>]"), "at 0x10c4f1a90"),
        (shows(text_html="<p>0x7fffe40012ab</p>"), "0x7fffe40012ab"),
    ],
    "machine_paths": [
        (output("stream", text="/home/me/course\n"), "/home/"),
        (output("stream", text="/root/x and /tmp/y\n"), "/root/"),
        (source(3, "open('/Users/me/x')"), "/Users/"),
        (source(3, r"open('C:\\Users\\me')"), "Users"),
        (source(2, "see /tmp/figure.svg"), "/tmp/"),
        (output("error", ename="E", evalue="", traceback=["/x/site-packages/torch"]), "packages"),
    ],
    "cell_length": [(source(3, "\n".join(["x = 1"] * 26)), "26 lines")],
    "file_size": [(output("stream", text="x" * 1_000_000), "1.0 MB")],
    "metadata": [
        (no_kernel, "kernelspec is not python3"),
        (set_metadata(language_info={"name": "python", "version": "3.11.7"}), "Python version"),
        (set_metadata(colab={"provenance": []}), "metadata: colab"),
        (cell_metadata, "cell 4: metadata collapsed"),
    ],
    "widget_state": [(set_metadata(widgets={"application/x+json": {}}), "without their state")],
    "cell_ids": [(same_id, "cells 4 and 5 have the same id")],
    "known_tags": [
        (tag(3, "slow"), "unknown tag slow"),
        (tag(3, "nbval-skip"), "only go together"),
        (tag(3, "skip-execution"), "only go together"),
        (source(3, "# NBVAL_IGNORE_OUTPUT\nprint(2)"), "NBVAL_ comment"),
    ],
    "alt_text": [
        (shows(image_png="iVBORw0KGgo="), "image/png"),
        (shows(image_jpeg="/9j/4AAQ"), "image/jpeg"),
        (shows(**{"image_svg+xml": "<svg><path d='M0 0'/></svg>"}), "without alt text"),
        (shows(text_html="<div><svg aria-label=' '></svg></div>"), "without alt text"),
        (shows(text_html="<img src='data:image/png;base64,iVBO'>"), "without alt text"),
        (source(2, "![](plan.svg)"), "cell 3: a picture"),
        (source(2, '<img src="plan.svg" alt="">'), "cell 3: a picture"),
    ],
    "relative_links": [
        (source(2, "[next](05_ranks.ipynb#start)"), "05_ranks.ipynb"),
        (source(2, "![a plan](no%20plan.svg)"), "no plan.svg"),
    ],
    "package_indexes": [
        (source(3, "index = 'https://mirror.example/simple/torch'"), "package index"),
        (output("stream", text="pip --index-url x"), "package index"),
        (source(3, "%pip install torch"), "%pip"),
        (source(3, "!pip install torch"), "!pip"),
        (source(3, "run([python, '-m', 'pip', 'install', 'x'])"), "pip"),
    ],
    "fixed_ports": [
        (source(3, "init(port=29500)"), "29500"),
        (source(2, "`MASTER_PORT=12355`"), "12355"),
    ],
    "clear_output": [(source(3, "display.clear_output(wait=True)"), "clear_output")],
}


@pytest.mark.parametrize(
    "rule, change, message",
    [(rule, *case) for rule, cases in CASES.items() for case in cases],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rule_finds(good, check, tmp_path, rule, change, message):
    change(good)
    found = check(good)
    assert any(message in problem for problem in found), found
    [the_rule] = [function for function in rules.RULES if function.__name__ == rule]
    own = list(the_rule(tmp_path / "99_made.ipynb", good))
    assert any(message in problem for problem in own), f"{rule} itself gives {own}"


def test_every_rule_has_a_case():
    assert set(CASES) == {rule.__name__ for rule in rules.RULES}


@pytest.mark.parametrize(
    "change",
    [
        tag(3, "nbval-ignore-output", "saved"),
        source(2, "```python\nx = '![](y)'\n# a comment, no title\n```"),
        source(2, "Version 1.29500 of 295001 things, [a source](https://example.org/home/a)"),
        shows(text_html="<div role='img' aria-label='a ring'><svg><g/></svg></div>"),
        set_metadata(widgets={"application/x+json": {"state": {"a": 1}}}),
    ],
)
def test_rules_leave_alone(good, check, change):
    change(good)
    left = [text for text in check(good) if "a path of a machine" not in text]
    assert left == []


def test_pictures_are_counted_one_by_one():
    described = '<div aria-label="a"><svg><g><path/></g></svg></div>'
    assert Pictures(described + "<svg><g/></svg><p><img src='x'></p>" + described).bare == 2
    assert Pictures("<img alt='b' src='x'/><br><p>text</p>").bare == 0


def test_tags_are_explained():
    assert all(len(meaning) > 10 for meaning in TAGS.values())


def test_command_exits_with_the_result(good, tmp_path, capsys):
    (tmp_path / "plan.svg").touch()
    path = tmp_path / "99_made.ipynb"
    nbformat.write(good, path)
    assert not rules.main([path])
    good["cells"][3]["execution_count"] = 9
    nbformat.write(good, path)
    assert rules.main([path])
    assert "99_made.ipynb: cell 4 has execution count 9" in capsys.readouterr().out
