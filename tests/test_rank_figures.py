"""Figures of ranks: drawn without leftovers, described, and right in what they say."""

import re
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from utils import costs, plots, rank_figures, run, widgets
from utils.hardware import ideal_server
from utils.measure import Line
from utils.ranks import collectives


@pytest.fixture(autouse=True)
def no_open_figures():
    plt.close("all")
    yield
    plt.close("all")


def timeline(all_reduce, n, values=840):
    def program(comm):
        all_reduce(comm, torch.zeros(values, device=comm.device))

    return run(program, n, "virtual", server=ideal_server(n, 1e-6, 1e9)).timeline


def test_rounds_of_a_tree():
    rounds = rank_figures.rounds_of(timeline(collectives.tree_all_reduce, 5))
    pairs = [[message[:2] for message in messages] for messages in rounds]
    assert pairs == [
        [(1, 0), (3, 2)], [(2, 0)], [(4, 0)], [(0, 4)], [(0, 2)], [(0, 1), (2, 3)]
    ]  # fmt: skip


def test_rounds_of_halving_and_doubling():
    rounds = rank_figures.rounds_of(timeline(collectives.halving_doubling_all_reduce, 4))
    assert [{abs(src - dst) for src, dst, _ in messages} for messages in rounds] == [
        {2}, {1}, {1}, {2}
    ]  # fmt: skip
    assert [{nbytes for *_, nbytes in messages} for messages in rounds] == [
        {1680}, {840}, {840}, {1680}
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_rounds_are_drawn(n):
    runs = {"ring": timeline(collectives.ring_all_reduce, n),
            "tree": timeline(collectives.tree_all_reduce, n)}  # fmt: skip
    rank_figures.draw_rounds(runs, n, 3360)
    assert len(plt.gcf().axes) == 2
    first, second = plots.svg(), None
    plt.close("all")
    rank_figures.draw_rounds(runs, n, 3360)
    second = plots.svg()
    assert first == second


def test_predictions_state_their_error():
    sizes = [1000, 10**6, 10**8]
    measured = {name: [1e-3, 2e-3, 3e-3] for name in ("star", "tree", "ring", "halving-doubling")}
    half = {name: [time / 2 for time in times] for name, times in measured.items()}
    near = {name: [time * 1.1 for time in times] for name, times in measured.items()}
    predicted = {"first": half, "second": near}
    assert rank_figures.overall_error(measured, half) == pytest.approx(0.5)
    alt = rank_figures.describe_predictions(sizes, measured, predicted)
    assert "first 50%" in alt and "second 10%" in alt
    rank_figures.draw_predictions(sizes, measured, predicted, "a title")
    figure = plt.gcf()
    assert "first 50%, second 10%" in figure.get_suptitle()
    assert {ax.get_title(loc="left") for ax in figure.axes} == {
        f"{name}: median error 10%" for name in measured
    }


def test_sweeps_state_their_worst_error():
    sweeps = {"one": {2**15: 1e-4, 2**20: 2e-4, 2**30: 1e-2}, "two": {2**15: 1e-4, 2**20: 1e-4}}
    lines = {"one": Line(1e-4, 1e-11), "two": Line(1e-4, 0.0)}
    size, error = rank_figures.worst_error(sweeps["one"], lines["one"])
    assert size == 2**20 and error == pytest.approx((1e-4 + 2**20 * 1e-11) / 2e-4 - 1)
    rank_figures.draw_sweeps(sweeps, lines, 8, {"one": [(240, "limit")], "two": []})
    first, second = plt.gcf().axes
    assert {"45% too short", "limit"} == {text.get_text() for text in first.texts}
    assert {"0% too long"} == {text.get_text() for text in second.texts}
    labels = [label.get_text() for label in first.get_xticklabels()]
    assert labels == ["32 KiB", "1 MiB", "32 MiB", "1 GiB"]
    [dots] = [line for line in first.get_lines() if line.get_label() == "published"]
    assert dots.get_ydata()[-1] == pytest.approx(2**30 / 1e-2 * 2 * 7 / 8 / 1e9)


# Algorithm, size, ranks and wires


@pytest.mark.parametrize("n", rank_figures.RANKS)
@pytest.mark.parametrize("wires", rank_figures.WIRES)
def test_crossings_are_where_two_times_are_equal(n, wires):
    alpha, bandwidth = rank_figures.WIRES[wires]
    for algorithm in rank_figures.COLOURS:
        for size, other, faster in rank_figures.crossings(algorithm, n, alpha, bandwidth):
            before, after = (
                rank_figures.all_reduce_times(n, size * step, alpha, bandwidth)
                for step in (0.95, 1.05)
            )
            assert (before[algorithm] > before[other]) == faster
            assert (after[algorithm] < after[other]) == faster


def test_the_ring_beats_the_tree_where_algebra_says_so():
    """2(n-1)α + 2((n-1)/n)Sβ = 2·log2(n)(α + Sβ), solved for S."""
    alpha, bandwidth = rank_figures.WIRES["PCIe 3"]
    expected = (7 - 3) * alpha / (3 - 7 / 8) * bandwidth
    found = {other: size for size, other, faster in
             rank_figures.crossings("ring", 8, alpha, bandwidth) if faster}  # fmt: skip
    assert found["tree"] == pytest.approx(expected, rel=0.01)
    assert "star" not in found and "halving-doubling" not in found


def test_halving_and_doubling_loses_to_the_ring_where_ranks_are_no_power_of_two():
    crossed = rank_figures.crossings("halving-doubling", 6, 14e-6, 12e9)
    assert [(other, faster) for _, other, faster in crossed] == [("ring", False)]


def test_wires_are_the_presets():
    assert rank_figures.WIRES["PCIe 3"] == (5e-6, 16e9)  # the book's
    assert rank_figures.WIRES["100 Gb/s Ethernet"] == (14e-6, pytest.approx(12e9))
    assert rank_figures.WIRES["NVLink 4 (H200)"][1] == pytest.approx(18 * 20.6e9)


def test_the_figure_says_what_the_formula_says():
    rank_figures.draw_algorithms("tree", 10, 8, "PCIe 3")
    time = costs.tree_time(8, 10e6, 16e9, 5e-6)
    assert f"tree, 10 MB on 8 ranks: {time * 1e3:.3g} ms" in plt.gca().get_title(loc="left")
    alt = rank_figures.describe_algorithms("tree", 10, 8, "PCIe 3")
    assert f"tree {time * 1e3:.3g} ms" in alt and re.search("loses to ring from 0.15 MB", alt)
    assert np.isfinite(plt.gca().get_ylim()).all()


def test_code_in_two_columns():
    side = rank_figures.SideBySide(
        {"list": [collectives.star_reduce], "rank": [collectives.tree_all_reduce]}
    )
    page = side._repr_html_()
    assert page.count("<td") == 2 and "def tree_all_reduce(comm" in page and '"""' not in page
    assert "&quot;sum&quot;" in page  # escaped
    assert repr(side).startswith("list\n\ndef star_reduce")


# The view


@pytest.fixture
def view(monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    widgets.algorithms_view()
    return shown[0]


def test_the_view_holds_the_figure_and_four_controls(view):
    data = view._repr_mimebundle_()
    assert data["text/plain"] == rank_figures.describe_algorithms() == view.first.alt
    *controls, image = view.widget.children
    assert len(controls) == 4 and image.value == view.first.html


def test_moving_the_view_draws_it_again(view):
    algorithm, megabytes, n, wires, image = view.widget.children
    algorithm.value, megabytes.value, n.value = "halving-doubling", 0.1, 6
    wires.value = "100 Gb/s Ethernet"
    expected = rank_figures.describe_algorithms("halving-doubling", 0.1, 6, "100 Gb/s Ethernet")
    assert expected in image.value
    assert not plt.get_fignums()
    for control, value in zip(view.widget.children, ("ring", 1.0, 8, "PCIe 3")):
        control.value = value
    assert image.value == view.first.html


def test_without_ipywidgets_the_view_is_the_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    widgets.algorithms_view()
    assert isinstance(shown[0], plots.Picture)
    assert shown[0].alt == rank_figures.describe_algorithms()
