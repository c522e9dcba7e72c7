"""The maintainers' commands: `python -m utils.notebooks run | check | saved | links | cover`.

run     execute notebooks from top to bottom and save clean outputs
check   the rules that every chapter keeps
saved   compare cells tagged `saved` with the functions in utils/
links   write the course's address into the notebooks and the README
cover   draw the README's picture
"""

import re
from pathlib import Path

COURSE = Path(__file__).resolve().parents[2]
CHAPTERS = COURSE / "chapters"

# What notebooks are executed and validated under: virtual GPUs, figures without a date, and one
# thread a process, so that sums come out the same whatever the number of cores, and notebooks that
# are validated side by side do not fight for them.
ENVIRONMENT = {"COURSE_DEVICES": "virtual", "SOURCE_DATE_EPOCH": "0", "OMP_NUM_THREADS": "1"}

# All tags that a cell may carry, and what they do.
TAGS = {
    "saved": "defines functions or classes that also stand in utils/; a test compares the two",
    "colab": "the cell that fetches the course on Colab; written by `links`",
    "raises-exception": "is meant to end in an error; the text announces it",
    "nbval-ignore-output": "runs in `make test`, its output is not compared (timings)",
    "nbval-skip": "is not run in `make test`; needs skip-execution beside it",
    "skip-execution": "is not run by `run` either; needs nbval-skip beside it",
    "hide-input": "a built book folds the code away",
}


def chapters(paths=()):
    """The notebooks named, or all chapters in reading order."""
    return [Path(path) for path in paths] or sorted(CHAPTERS.glob("*.ipynb"))


def setting(pattern):
    """What a pattern with one group finds in pyproject.toml (Python 3.10 has no tomllib)."""
    found = re.search(
        pattern, (COURSE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    if not found:
        raise ValueError(f"pyproject.toml: nothing like {pattern}")
    return found[1]


FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def tags(cell):
    return set(cell["metadata"].get("tags", ()))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def markdown_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


def numbered(notebook, kind="code"):
    """(number in the notebook, cell) of the cells of one kind."""
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] == kind:
            yield number, cell


def prose(cell):
    return FENCED.sub("", cell["source"])
