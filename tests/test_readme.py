"""The README says what is there: its picture, its chapters, its commands."""

import re

import nbformat
import pytest

from utils import notebooks
from utils.notebooks import COURSE, cover, links

README = (COURSE / "README.md").read_text(encoding="utf-8")
CHAPTERS = notebooks.chapters()


def test_the_picture_is_what_the_course_draws_today():
    assert cover.PICTURE.read_text(encoding="utf-8") == cover.draw(), (
        "draw it again: python -m utils.notebooks cover"
    )


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_each_chapter_is_in_the_table_with_its_title_time_and_link(path):
    notebook = nbformat.read(path, as_version=4)
    opening = "\n".join(cell["source"] for cell in notebook["cells"][:2])
    title = re.search(r"^# \d+ · (.+)$", opening, re.MULTILINE)[1]
    minutes = re.search(r"(\d+) minutes", opening)[1]
    row = next(line for line in README.splitlines() if f"(chapters/{path.name})" in line)
    assert title in row, f"the row of {path.name} does not have its title, {title}"
    assert f"| {minutes} min |" in row
    assert links.badge(path.name).rsplit("(", 1)[1].rstrip(")") in row


def test_the_targets_it_names_exist():
    targets = re.findall(r"^([a-z-]+):", (COURSE / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"`?make ([a-z-]+)", README))
    assert named <= set(targets), named - set(targets)


def test_its_links_to_files_lead_somewhere():
    for target in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (COURSE / target).exists(), target
