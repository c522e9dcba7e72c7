"""Figures of chapter 06: what they show comes from the numbers they are given."""

import matplotlib.pyplot as plt
import pytest
import torch

from utils import plots, run, server_figures, widgets
from utils.hardware import DGX1_DOUBLE_RING, DGX1_SINGLE_RING, get_server

LINKS = get_server("dgx1-v100").link_matrix()


@pytest.fixture(autouse=True)
def no_open_figures():
    plt.close("all")
    yield
    plt.close("all")


def test_wire_loads_are_the_bytes_of_the_messages():
    def program(comm):
        box = torch.zeros(1000, device=comm.device)
        comm.exchange(torch.ones(1000, device=comm.device), 1 - comm.rank, box, 1 - comm.rank)

    timeline = run(program, 2, "virtual", server="pcie-switch").timeline
    loads = server_figures.wire_loads(timeline)
    assert loads == dict.fromkeys(
        ("gpu0→switch0", "switch0→gpu1", "gpu1→switch0", "switch0→gpu0"), 4000
    )
    server_figures.draw_wire_loads({"both": timeline}, {"both": ["gpu0"]})
    words = [text.get_text() for text in plt.gcf().axes[0].texts]
    assert {"gpu0", "gpu1", "cpu0", "switch"} <= set(words)
    plots.picture("loads")


def test_the_matrix_has_a_number_for_each_joined_pair():
    server_figures.draw_link_matrix(LINKS, title="links")
    ax = plt.gca()
    shown = {tuple(map(round, text.get_position())): int(text.get_text()) for text in ax.texts}
    assert shown == {(b, a): LINKS[a][b] for a in range(8) for b in range(8) if LINKS[a][b]}
    assert len(ax.patches) == 64
    shades = {patch.get_facecolor() for patch in ax.patches}
    assert len(shades) == 3
    plots.picture("matrix")


@pytest.mark.parametrize("rings", [(), (DGX1_DOUBLE_RING, DGX1_DOUBLE_RING, DGX1_SINGLE_RING)])
def test_a_line_for_each_link(rings):
    server_figures.draw_links(LINKS, rings=rings, title="links")
    lines = [line for line in plt.gca().get_lines() if len(line.get_xdata()) == 2]
    assert len(lines) == 24
    colours = [line.get_color() for line in lines]
    if rings:
        assert [colours.count(colour) for colour in server_figures.RING_COLOURS] == [8, 8, 8]
    else:
        assert set(colours) == {"#888888"}
    plots.picture("links")


@pytest.mark.parametrize("delay", [0, 1, 3, 8])
def test_stale_descent_follows_its_recursion(delay):
    x = server_figures.stale_descent(0.1, delay, steps=30)
    assert len(x) == 31 and x[0] == 1
    for k in range(30):
        assert x[k + 1] == x[k] - 0.1 * (x[k - delay] if k >= delay else 1.0)


def test_the_title_says_on_which_side_of_the_limit():
    for rate, words in ((0.44, "below the limit of 0.445"), (0.46, "not below the limit of 0.445")):
        server_figures.draw_stale_descent(3, rate)
        assert f": {words}" in plt.gca().get_title(loc="left")
        assert words in server_figures.describe_stale_descent(3, rate)
        plots.picture("path")


def test_the_view_shows_the_figure_and_follows_its_sliders(monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    assert widgets.stale_view() is None
    [view] = shown
    *sliders, image = view.widget.children
    assert len(sliders) == 2 and image.value == view.first.html
    assert view._repr_mimebundle_()["text/html"] == view.first.html
    sliders[0].value, sliders[1].value = 0, 1.0
    server_figures.draw_stale_descent(0, 1.0)
    expected = plots.picture(server_figures.describe_stale_descent(0, 1.0)).html
    assert image.value == expected != view.first.html
