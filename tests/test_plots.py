"""Figures: what they show, that they are the same in every run, small, quick, and described."""

import base64
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from nbconvert import HTMLExporter

from utils import plots
from utils.events import Event
from utils.timeline import Timeline


@pytest.fixture(autouse=True)
def no_open_figures():
    plt.close("all")
    yield
    plt.close("all")


def make(count=4, seed=0, devices=4):
    """A random timeline of `count` events, a third of them copies over two wires."""
    random = np.random.default_rng(seed)
    clock = [0.0] * devices
    events = []
    for i in range(count):
        a, length = int(random.integers(devices)), float(random.exponential(20e-6))
        b = (a + 1) % devices
        wires = (f"gpu{a}→switch0", f"switch0→gpu{b}")
        if i % 3:
            events.append(Event("mm", "compute", (f"gpu{a}",), clock[a], length, (a,)))
        else:
            events.append(Event("copy", "communication", wires, clock[a], length, (a, b)))
        clock[a] += length * float(random.choice([1, 1, 2]))
    return Timeline(events, [f"gpu{i}" for i in range(devices)], machine="4 × toy")


def texts(ax):
    return [text.get_text() for text in ax.texts]


def labels(ax):
    return [label.get_text() for label in ax.get_yticklabels()]


# --- timelines


def test_rows_are_grouped_and_in_order():
    wires = ("gpu10→gpu2", "gpu2→switch0", "switch0→gpu10", "cpu0→switch0")
    events = [Event("c", "communication", (wire,), 0, 1) for wire in wires]
    events.append(Event("launch", "host", ("host",), 0, 1))
    timeline = Timeline(events, ["gpu0", "gpu2", "gpu10"])
    devices = ["host", "gpu0", "gpu2", "gpu10"]
    links = ["gpu2→switch0", "gpu10→gpu2", "cpu0→switch0", "switch0→gpu10"]
    for rows, expected in (("all", devices + links), ("devices", devices), ("links", links)):
        _, ax = plt.subplots()
        assert timeline.plot(ax=ax, rows=rows) is None
        assert labels(ax) == expected
    with pytest.raises(ValueError, match='rows is "all", "devices" or "links", not \'wires\''):
        timeline.plot(rows="wires")


@pytest.mark.parametrize(
    ("seconds", "unit", "scale"),
    [(0, "ms", 1e3), (5e-5, "µs", 1e6), (2e-3, "ms", 1e3), (0.9, "ms", 1e3), (12, "s", 1)],
)
def test_units_suit_the_duration(seconds, unit, scale):
    assert plots.time_unit(seconds) == (unit, scale)
    _, ax = plt.subplots()
    Timeline([Event("x", "compute", ("gpu0",), 0, seconds)], ["gpu0"]).plot(ax=ax)
    assert ax.get_xlabel() == f"time ({unit})"
    assert ax.get_xlim() == pytest.approx((0, seconds * scale or 1))


def test_figures_say_whether_they_are_simulated():
    for simulated, words in ((True, "simulated: 4 × T4"), (False, "measured on 4 × T4")):
        _, ax = plt.subplots()
        Timeline([], ["gpu0"], simulated, "4 × T4").plot(ax=ax, title="My own title")
        assert words in texts(ax)
        assert ax.get_title(loc="left") == "My own title"


def test_bars_stand_where_the_events_are():
    events = [
        Event("mm", "compute", ("gpu0",), 1e-3, 2e-3, (0,)),
        Event("copy", "communication", ("gpu0→gpu1",), 4e-3, 4e-3, (0, 1)),
    ]
    _, ax = plt.subplots()
    Timeline(events, ["gpu0", "gpu1"], duration=10e-3).plot(ax=ax)

    def spans(colour):
        paths = [p for p in ax.patches if p.get_facecolor()[:3] == to_rgb(colour)]
        return [(p.get_path().get_extents().x0, p.get_path().get_extents().x1) for p in paths]

    assert spans(plots.COMPUTE) == [pytest.approx((1, 3), abs=0.03)]
    sent = pytest.approx((4, 8), abs=0.03)
    assert spans(plots.COMMUNICATION) == [sent] * 3  # on both devices and on the wire
    assert spans(plots.IDLE) == [pytest.approx((0, 10))] * 3
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["compute", "communication", "idle"]


def test_short_events_can_be_seen():
    events = [Event("x", "compute", ("gpu0",), 0.5, 1e-9), Event("y", "compute", ("gpu0",), 1, 0.1)]
    for many in (events, events * 300):
        _, ax = plt.subplots()
        Timeline(many, ["gpu0"]).plot(ax=ax)
        (patch,) = [p for p in ax.patches if p.get_facecolor()[:3] == to_rgb(plots.COMPUTE)]
        at_half = [x for x in patch.get_path().vertices[:, 0] if 0.4e0 < x < 0.9]
        assert max(at_half) - min(at_half) > 1.1 / 2000


def test_nothing_recorded():
    for timeline in (Timeline(), Timeline([], ["gpu0"])):
        _, ax = plt.subplots()
        timeline.plot(ax=ax)
        assert "nothing was recorded" in texts(ax)
        plots.svg()


def test_more_rows_than_bars_may_be():
    wires = [f"gpu0→gpu{i}" for i in range(plots.MAX_BARS + 1)]
    events = [Event("c", "communication", (wire,), 0, 1) for wire in wires]
    _, ax = plt.subplots()
    Timeline(events, ["gpu0"]).plot(ax=ax)
    instants = [Event("c", "compute", ("gpu0",), i, 0) for i in range(500)]
    Timeline(instants, ["gpu0"], duration=0.0).plot(ax=ax)


def test_thousands_of_events_are_quick_and_small():
    timeline = make(5000)
    start = time.perf_counter()
    timeline.plot()
    text = plots.svg()
    assert time.perf_counter() - start < 1.5
    assert len(text) < 100_000


def test_the_dgx1_fits_in_a_small_file():
    pairs = [(a, (a + d) % 8) for a in range(8) for d in (1, 2, 4)]
    events = [
        Event("part", "communication", (f"gpu{a}→gpu{b}",), step * 10e-6, 8e-6, (a, b))
        for step in range(14)
        for a, b in pairs
    ]
    Timeline(events, [f"gpu{i}" for i in range(8)], machine="8 × V100").plot()
    assert len(plt.gca().get_yticklabels()) == 32
    assert len(plots.svg()) < 100_000


# --- style


def lightness(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = float(np.dot(linear, [0.2126, 0.7152, 0.0722]))
    return 116 * np.cbrt(luminance) - 16


def test_colours_differ_in_grey():
    shades = sorted(map(lightness, (plots.HOST, plots.COMPUTE, plots.COMMUNICATION, plots.IDLE)))
    assert min(np.diff(shades)) > 20
    ranks = sorted(lightness(plots.rank_colour(rank)) for rank in range(8))
    assert min(np.diff(ranks)) > 3
    first = sorted(lightness(plots.rank_colour(rank)) for rank in range(4))
    assert min(np.diff(first)) > 12
    assert plots.rank_colour(8) == plots.rank_colour(0)


SCRIPT = """
from utils import plots
from utils.events import Event
from utils.timeline import Timeline
events = [Event(f"mm{i}", "compute", (f"gpu{i % 3}",), i * 1.37e-4, 1e-4) for i in range(9)]
events += [Event("copy", "communication", (f"gpu{i}→gpu{1 - i}",), 0, 1e-3) for i in range(2)]
Timeline(events, ["gpu0", "gpu1", "gpu2"]).plot(title="Ümläute → ok")
"""


def test_the_same_bytes_in_every_process():
    exec(SCRIPT, {})
    here = plots.svg()
    root = str(Path(plots.__file__).parents[1])
    program = SCRIPT + "import sys; sys.stdout.buffer.write(plots.svg().encode())"
    there = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": root, "MPLBACKEND": "agg"},
        cwd=root, check=True, capture_output=True,
    ).stdout.decode()  # fmt: skip
    assert there == here
    assert len(here) > 5000
    assert "<text" not in here  # glyphs are drawn, so that no font need be installed
    assert not re.search(r"20\d\d-|matplotlib\.org", here)


def test_svg_is_well_formed_and_shows_what_matplotlib_drew():
    make(60).plot()
    root = ET.fromstring(plots.svg())
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == namespace + "svg"
    bars = [p.get("d") for p in root.iter(namespace + "path") if "H" in (p.get("d") or "")]
    assert sum(d.count("M") for d in bars) > 60
    assert all(re.fullmatch(r"(M\S+ \S+H\S+V\S+H\S+z)+", d) for d in bars)


# --- showing


@pytest.fixture
def shown(monkeypatch):
    """`plots.show`, returning what it displays: the data by MIME type."""
    displayed = []
    monkeypatch.setattr("IPython.display.display", displayed.append)

    def show(alt, **options):
        assert plots.show(alt, **options) is None
        return displayed.pop()._repr_mimebundle_()

    return show


def test_show_displays_describes_and_closes(shown):
    make(10).plot()
    text = plots.svg()
    data = shown('Four GPUs & <one> switch, "busy"')
    assert not plt.get_fignums()
    assert set(data) == {"text/html", "text/plain"}
    assert data["text/plain"] == 'Four GPUs & <one> switch, "busy"'
    image = ET.fromstring(data["text/html"].replace(">", "/>"))
    assert image.get("alt") == 'Four GPUs & <one> switch, "busy"'
    kind, content = image.get("src").split(",")
    assert kind == "data:image/svg+xml;base64"
    assert base64.b64decode(content).decode() == text


def test_show_of_a_given_figure_leaves_the_others(shown):
    first, _ = plt.subplots()
    second, _ = plt.subplots()
    shown("empty axes", fig=first)
    assert plt.get_fignums() == [second.number]


def test_show_in_a_script_prints_the_description(capsys):
    plt.figure()
    plots.show("an empty figure")
    assert capsys.readouterr().out == "an empty figure\n"


def test_show_wants_a_figure_and_a_description():
    with pytest.raises(ValueError, match="there is no figure to show"):
        plots.show("nothing")
    plt.figure()
    with pytest.raises(ValueError, match="describe the figure"):
        plots.show("  ")


def test_shown_figures_stand_in_the_html_of_a_notebook(shown):
    make(10).plot()
    output = nbformat.v4.new_output("display_data", data=shown("Bars on four rows"))
    cell = nbformat.v4.new_code_cell("plots.show(…)", execution_count=1, outputs=[output])
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert '<img alt="Bars on four rows" src="data:image/svg+xml;base64,' in page
