"""Executing and validating notebooks: clean outputs, the same every time, and always an end."""

import json
import os
import re
import time
from importlib.metadata import version

import nbformat
import psutil
import pytest
from nbformat.v4 import new_output

from utils.notebooks import run

HANG = """\
import signal
import subprocess
import sys
import threading

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids", "w").write(f"{os.getpid()} {worker.pid}")
threading.Event().wait()"""


HTML_REPR = "<IPython.core.display.HTML object>"


def alive(file):
    """Which of the processes that a cell noted are still there."""
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 2
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


# run


def test_run_saves_one_clean_run(course, make_chapter, make_code):
    made = make_chapter(
        make_code("import os\nprint(os.environ['COURSE_DEVICES'], os.path.basename(os.getcwd()))"),
        make_code("print('a')\nprint('b')\n3 * 7"),
        make_code("raise ValueError('7 and 2')", "raises-exception"),
        make_code("import ipywidgets\n\nipywidgets.IntSlider(3)"),
    )
    for cell in made["cells"]:
        cell["metadata"].update(collapsed=True, ExecuteTime={"start": 1})
        if cell["cell_type"] == "code":
            cell["execution_count"] = 77
    made["metadata"].update(colab={}, language_info={"name": "python", "version": "3.9.0"})
    path = course.add(made)
    results = []
    for _ in range(2):
        done = course.run("-m", "utils.notebooks", "run", path)
        assert done.returncode == 0, done.stdout + done.stderr
        results.append(path.read_bytes())
    assert results[0] == results[1]
    assert re.search(r"cell   4 +\d+\.\d\d s +\d\d+ MB", done.stdout)

    saved = json.loads(path.read_text())
    assert set(saved["metadata"]) == {"kernelspec", "language_info"}
    assert saved["metadata"]["language_info"] == {"name": "python"}
    assert all(set(cell["metadata"]) <= {"tags"} for cell in saved["cells"])
    code = [cell for cell in saved["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [1, 2, 3, 4, 5]
    assert code[0]["outputs"] == []
    assert code[1]["outputs"][0]["text"] == ["virtual chapters\n"]
    assert code[2]["outputs"][0]["text"] == ["a\n", "b\n"]
    assert code[2]["outputs"][1]["execution_count"] == 3
    assert code[3]["outputs"][0]["evalue"] == "7 and 2"
    assert list(code[4]["outputs"][0]["data"]) == ["text/plain"]


@pytest.fixture
def execute(tmp_path, capsys):
    """`run` on one notebook: (did it fail?, what it printed, path)."""

    def execute(notebook):
        path = tmp_path / "99_made.ipynb"
        nbformat.write(notebook, path)
        failed = run.main([path])
        return failed, capsys.readouterr().out, path

    return execute


def test_run_leaves_the_file_alone_where_a_cell_fails(execute, make_chapter, make_code):
    made = make_chapter(make_code("x = 1"), make_code("x / 0"), make_code("print(x)"))
    failed, printed, path = execute(made)
    assert failed
    assert "99_made.ipynb: cell 4:" in printed
    assert "ZeroDivisionError" in printed
    assert path.read_text() == nbformat.writes(made) + "\n"


def test_run_reports_broken_rules(execute, make_chapter, make_code):
    failed, printed, _ = execute(make_chapter(make_code("import sys\nprint(file=sys.stderr)")))
    assert failed
    assert "99_made.ipynb: cell 3 wrote to stderr" in printed


def test_run_ends_a_hung_cell_and_its_workers(execute, make_chapter, make_code, monkeypatch):
    monkeypatch.setattr(run, "TIMEOUT", 3)
    started = time.monotonic()
    failed, printed, path = execute(make_chapter(make_code("import os"), make_code(HANG)))
    assert failed and time.monotonic() - started < 30
    assert "99_made.ipynb: cell 4: A cell timed out" in printed
    assert alive(path.parent / "pids") == []


def test_machine_is_taken_out_of_tracebacks():
    line = f"File {run.COURSE}/utils/devices.py:3, in f; {os.path.expanduser('~')}/x"
    assert run.without_machine(line).startswith("File utils/devices.py:3")
    line = "\x1b[32m/a b/.venv/lib/python3.11/site-packages/torch/x.py\x1b[0m"
    assert run.without_machine("File /v/lib/python3.12/site-packages/t.py") == (
        "File site-packages/t.py"
    )
    assert run.without_machine("File /usr/lib/python3.10/ast.py") == "File lib/python3.10/ast.py"
    assert "site-packages/torch" in run.without_machine(line)


# nbval


def executed(course, notebook, name="99_made.ipynb"):
    path = course.add(notebook, name)
    report, problem = run.execute(path)
    assert problem is None
    return path


def test_three_validations_pass(course, make_chapter, make_code):
    """Outputs that differ by nature: a repr, a time, two ranks' prints, a figure."""
    ranks = """\
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        lines = list(pool.map(lambda rank: f"rank {rank} has {rank + 1}", range(4)))
    print("\\n".join(sorted(lines)))"""
    figure = """\
    import io

    import matplotlib
    from IPython.display import SVG, display
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "course"
    figure = Figure()
    figure.subplots().plot([1, 2, 4], label="ring")
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    display(SVG(buffer.getvalue()))"""
    lines = (ranks + "\n" + figure).replace("\n    ", "\n").strip().splitlines()
    split = lines.index("import io")
    made = make_chapter(
        make_code("class Thing:\n    pass\n\n\nThing()"),
        make_code(
            "import time\n\nstart = time.perf_counter()\nassert time.perf_counter() >= start"
        ),
        make_code("print(time.perf_counter())", "nbval-ignore-output"),
        make_code("\n".join(lines[:split])),
        make_code("\n".join(lines[split:])),
    )
    executed(course, made)
    for _ in range(3):
        done = course.validate()
        assert done.returncode == 0, done.stdout
        assert "6 passed" in done.stdout


def test_validation_finds_other_outputs(course, make_chapter, make_code):
    clock = "import time\n\nprint(time.perf_counter())"
    number = new_output("execute_result", {"text/plain": "2"}, execution_count=3)
    picture = new_output("display_data", {"text/html": "<svg><path d='M0 1'/></svg>"})
    show = "from IPython.display import HTML, display\n\n"
    draw = show + "display(HTML(\"<svg><path d='M0 2'/></svg>\"))"
    wrong = [
        make_code("print(3)", outputs=[new_output("stream", text="2\n")]),
        make_code("3", outputs=[number]),
        make_code("print(3)"),
        make_code("3;"),
        make_code("pass", outputs=[new_output("stream", text="2\n")]),
        make_code(clock, outputs=[new_output("stream", text="1.5\n")]),
        make_code(draw, outputs=[picture]),
        make_code("1 / 0"),
    ]
    course.add(make_chapter(*wrong, make_code("pass")))
    done = course.validate()
    assert done.returncode == 1
    for cell in range(1, len(wrong) + 1):
        assert f"FAILED chapters/99_made.ipynb::Cell {cell}" in done.stdout, done.stdout
    assert f"{len(wrong)} failed, 2 passed" in done.stdout


def test_figures_are_compared_where_matplotlib_is_the_same(course, make_chapter, make_code):
    show = "from IPython.display import HTML, display\n\n"
    show += 'display(HTML(\'<img alt="a" src="data:image/svg+xml;base64,QUJD">\'))'
    saved = '<img alt="a" src="data:image/svg+xml;base64,QUJE">'
    output = new_output("display_data", {"text/html": saved, "text/plain": HTML_REPR})
    course.add(make_chapter(make_code(show, outputs=[output])))
    project = course.folder / "pyproject.toml"
    text = project.read_text()
    series = version("matplotlib").rpartition(".")[0]
    project.write_text(re.sub(r"matplotlib \d+\.\d+\.", f"matplotlib {series}.", text))
    assert "FAILED chapters/99_made.ipynb::Cell 1" in course.validate().stdout
    project.write_text(re.sub(r"matplotlib \d+\.\d+\.", "matplotlib 3.1.", text))
    done = course.validate("-v")
    assert done.returncode == 0, done.stdout
    assert "saved figures are of matplotlib 3.1, here is" in done.stdout


def test_validation_ends_a_hung_cell_and_its_workers(course, make_chapter, make_code):
    course.add(make_chapter(make_code("import os"), make_code(HANG), make_code("print(1)")))
    started = time.monotonic()
    done = course.validate("--nbval-cell-timeout=2")
    assert time.monotonic() - started < 60
    assert done.returncode == 1
    assert "FAILED chapters/99_made.ipynb::Cell 2" in done.stdout
    assert "Timeout of 2 seconds exceeded" in done.stdout
    assert "1 failed, 2 passed, 1 xfailed" in done.stdout
    assert alive(course.chapters / "pids") == []


def test_validation_sees_a_killed_kernel(course, make_chapter, make_code):
    die = """\
import os, signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids", "w").write(f"{os.getpid()} {worker.pid}")
os.kill(os.getpid(), signal.SIGKILL)"""
    course.add(make_chapter(make_code(die), make_code("print(1)")))
    started = time.monotonic()
    done = course.validate()
    assert time.monotonic() - started < 40
    assert "FAILED chapters/99_made.ipynb::Cell 1" in done.stdout
    assert "the kernel died in this cell" in done.stdout
    assert "1 failed, 1 passed, 1 xfailed" in done.stdout
    assert alive(course.chapters / "pids") == []


def test_settings_of_nbval_stand_in_one_place():
    text = (run.COURSE / "Makefile").read_text() + (run.COURSE / ".ci" / "run").read_text()
    assert "--nbval" not in text
