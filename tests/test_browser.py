"""A chapter in JupyterLab, in a browser: every cell runs, and a slider changes its figure."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request

import nbformat
import psutil
import pytest
from playwright.sync_api import sync_playwright

from utils import rank_figures, server_figures
from utils.notebooks import COURSE, chapters, code_cells, tags

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
WAIT = 120_000  # ms, for a whole chapter on a busy machine
TOKEN = "only-for-this-test"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no Chromium found: install the package chromium to have chapters tested in a browser",
)

SLIDER = """\
import ipywidgets
from IPython.display import HTML, display


def draw(bars=3):
    path = "".join(f"M{i} 0h0.5v{i + 1}" for i in range(bars))
    display(HTML(f'<svg role="img" aria-label="{bars} bars"><path d="{path}"/></svg>'))


ipywidgets.interact(draw, bars=(1, 8));"""
INERT = """\
import ipywidgets

ipywidgets.VBox([ipywidgets.IntSlider(3), ipywidgets.HTML("<svg><path d='M0 0'/></svg>")])"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory, free_port):
    """JupyterLab on a copy of the course: (folder of the copy, address)."""
    copy = tmp_path_factory.mktemp("browser") / "the course"
    shutil.copytree(COURSE / "utils", copy / "utils")
    (copy / "chapters").mkdir()
    for path in chapters():
        shutil.copy(path, copy / "chapters")
    port = free_port()
    settings = tmp_path_factory.mktemp("jupyter")
    every_cell = settings / "@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    every_cell.parent.mkdir(parents=True)
    every_cell.write_text('{"windowingMode": "none"}')  # cells out of sight are drawn too
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
        + ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
        + [f"--ServerApp.root_dir={copy}", f"--IdentityProvider.token={TOKEN}"],
        env={
            **os.environ,
            "PYTHONPATH": str(copy),
            "JUPYTER_CONFIG_DIR": str(settings),
            "JUPYTER_RUNTIME_DIR": str(settings),
            "JUPYTERLAB_SETTINGS_DIR": str(settings),
            "JUPYTERLAB_WORKSPACES_DIR": str(settings),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield copy, f"http://127.0.0.1:{port}"
    finally:
        started = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        server.wait(30)
        _, left = psutil.wait_procs(started, timeout=10)
        for process in left:
            process.kill()
        assert not left, f"JupyterLab left processes behind: {left}"


def state(lab, path="api/sessions"):
    request = urllib.request.Request(
        f"{lab[1]}/{path}", headers={"Authorization": f"token {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def browser(lab):
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        yield chromium
        chromium.close()


class Page:
    """A notebook of the copy, opened in JupyterLab."""

    def __init__(self, lab, browser, name):
        self.lab, self.name = lab, name
        self.file = lab[0] / "chapters" / name
        self.clear_outputs()
        self.page = browser.new_page(viewport={"width": 1400, "height": 1000})
        self.page.set_default_timeout(WAIT)
        self.open()

    def clear_outputs(self):
        notebook = json.loads(self.file.read_text(encoding="utf-8"))
        for cell in code_cells(notebook):
            cell["outputs"], cell["execution_count"] = [], None
        self.file.write_text(json.dumps(notebook), encoding="utf-8")

    def open(self):
        end = time.monotonic() + WAIT / 1000
        while True:  # the server needs a moment to start
            try:
                state(self.lab, "api/status")
                break
            except OSError:
                assert time.monotonic() < end, "JupyterLab does not start"
                time.sleep(0.2)
        self.page.goto(f"{self.lab[1]}/lab/tree/chapters/{self.name}?token={TOKEN}&reset")
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        self.wait(lambda: [s for s in state(self.lab) if s["path"].endswith(self.name)])

    def wait(self, done, step=300):
        end = time.monotonic() + WAIT / 1000
        while not done():
            assert time.monotonic() < end, f"{self.name}: not done in {WAIT / 1000:.0f} s"
            self.page.wait_for_timeout(step)

    def saved(self):
        """The notebook as JupyterLab saves it now."""
        self.page.keyboard.press("Control+s")
        self.page.wait_for_timeout(500)
        try:
            return json.loads(self.file.read_text(encoding="utf-8"))
        except ValueError:  # in the middle of being written
            return self.saved()

    def run_all(self):
        """Run every cell and wait for the last; give the notebook as saved then."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()
        self.wait(self.finished)
        return self.saved()

    def finished(self):
        kernels = [s["kernel"] for s in state(self.lab) if s["path"].endswith(self.name)]
        if any(kernel["execution_state"] != "idle" for kernel in kernels):
            return False
        cells = to_run(self.saved())
        return any(errors(cells)) or all(cell["execution_count"] for cell in cells)

    def figures(self):
        """What the widgets of the notebook show, their controls left out."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll('.jp-Notebook .jupyter-widgets')]
                .filter(widget => !widget.matches('.widget-slider, .widget-slider *'))
                .flatMap(widget => [...widget.querySelectorAll('svg, img, table, pre')])
                .map(figure => figure.outerHTML)"""
        )

    def move_slider(self, number=0, patience=15):
        """Move a slider by keyboard; give whether a figure changed within `patience` seconds."""
        handle = self.page.locator(".jp-Notebook .widget-slider .noUi-handle").nth(number)
        handle.scroll_into_view_if_needed()
        before = self.figures()
        handle.focus()
        for key in ("ArrowRight", "ArrowLeft"):  # it may stand at an end
            self.page.keyboard.press(key)
            for _ in range(5 * patience):
                self.page.wait_for_timeout(200)
                if self.figures() != before:
                    return True
        return False

    def choose(self, number, option):
        """Choose from a drop-down list."""
        self.page.locator(".jp-Notebook .widget-dropdown select").nth(number).select_option(option)

    def close(self):
        self.page.close()
        for session in state(self.lab):
            request = urllib.request.Request(
                f"{self.lab[1]}/api/sessions/{session['id']}",
                method="DELETE",
                headers={"Authorization": f"token {TOKEN}"},
            )
            urllib.request.urlopen(request, timeout=30)


def to_run(notebook):
    """The cells that get an execution count."""
    return [cell for cell in code_cells(notebook) if "".join(cell["source"]).strip()]


def errors(cells):
    """The errors in outputs that were not announced by a tag."""
    for cell in cells:
        if "raises-exception" not in tags(cell):
            for output in cell["outputs"]:
                if output["output_type"] == "error":
                    yield f"{output['ename']}: {output['evalue']}"


@pytest.fixture
def open_page(lab, browser):
    opened = []

    def open_page(name):
        opened.append(Page(lab, browser, name))
        return opened[-1]

    yield open_page
    for page in opened:
        page.close()


def with_slider():
    """The first chapter with a slider, if there is one yet."""
    for path in chapters():
        cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
        if any(re.search(r"widgets|interact\(", "".join(cell["source"])) for cell in cells):
            return [path.name]
    return []


def views(*numbers):
    """The cells of chapters that show one of the course's views."""
    for path in chapters():
        if path.name.startswith(numbers):
            for cell in code_cells(json.loads(path.read_text(encoding="utf-8"))):
                if re.match(r"widgets\.\w+_view\(", source := "".join(cell["source"])):
                    yield source


def add(lab, notebook, name):
    nbformat.write(notebook, lab[0] / "chapters" / name)
    return name


def test_made_chapter_and_its_slider(lab, open_page, make_chapter, make_code):
    cells = make_code("print(1)"), make_code("1 / 0", "raises-exception"), make_code(SLIDER)
    page = open_page(add(lab, make_chapter(*cells), "98_made.ipynb"))
    notebook = page.run_all()
    assert list(errors(code_cells(notebook))) == []
    assert [cell["execution_count"] for cell in code_cells(notebook)] == [1, 2, 3, 4]
    assert any("3 bars" in figure for figure in page.figures())
    assert page.move_slider()
    assert any("4 bars" in figure for figure in page.figures())


def test_errors_and_dead_sliders_are_seen(lab, open_page, make_chapter, make_code):
    cells = make_code(INERT), make_code("int('x')"), make_code("print(1)")
    page = open_page(add(lab, make_chapter(*cells), "97_made.ipynb"))
    notebook = page.run_all()
    assert list(errors(code_cells(notebook))) == [
        "ValueError: invalid literal for int() with base 10: 'x'"
    ]
    assert not page.move_slider(patience=2)


@pytest.mark.parametrize("name", with_slider())
def test_chapter_and_its_sliders(open_page, name):
    page = open_page(name)
    notebook = page.run_all()
    assert list(errors(code_cells(notebook))) == []
    assert [cell["execution_count"] for cell in to_run(notebook)] == list(
        range(1, len(to_run(notebook)) + 1)
    )
    assert page.move_slider()


def test_views_of_chapters_05_and_06(lab, open_page, make_chapter, make_code):
    cells = "from utils import widgets", *views("05", "06")
    assert cells[1:] == ("widgets.algorithms_view()", "widgets.stale_view(delay=1, rate=0.9)")
    page = open_page(add(lab, make_chapter(*map(make_code, cells)), "96_made.ipynb"))
    assert list(errors(code_cells(page.run_all()))) == []

    def shows(text):
        return any(text in figure for figure in page.figures())

    assert shows(rank_figures.describe_algorithms("ring", 1.0, 8, "PCIe 3"))
    assert shows(server_figures.describe_stale_descent(1, 0.9))
    assert all(page.move_slider(number) for number in range(4))  # each one step to the right
    page.choose(1, "NVLink 4 (H200)")
    page.wait(
        lambda: shows(rank_figures.describe_algorithms("ring", 10**0.1, 12, "NVLink 4 (H200)"))
    )
    assert shows(server_figures.describe_stale_descent(2, 0.92))
