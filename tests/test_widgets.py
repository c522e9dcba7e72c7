"""Interactive views: sliders redraw the figure, the figure is there without them."""

import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from IPython.core import formatters

from utils import costs, figures, plots, widgets

WIDGET = "application/vnd.jupyter.widget-view+json"
VIEWS = (widgets.ring_view, widgets.all_reduce_view)


@pytest.fixture(autouse=True)
def no_open_figures():
    plt.close("all")
    yield
    assert not plt.get_fignums()


def view_of(make, monkeypatch):
    """The object that a view displays."""
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    assert make() is None
    [view] = shown
    return view


@pytest.mark.parametrize("make", VIEWS)
def test_a_view_holds_sliders_and_the_figure(make, monkeypatch):
    view = view_of(make, monkeypatch)
    data = view._repr_mimebundle_()
    assert {WIDGET, "text/html", "text/plain"} <= set(data)
    assert data["text/html"].startswith("<img alt=") and data["text/html"] == view.first.html
    assert data["text/plain"] == view.first.alt
    *sliders, image = view.widget.children
    assert len(sliders) == 2 and image.value == view.first.html


@pytest.mark.parametrize("make", VIEWS)
def test_a_view_without_ipywidgets_is_the_figure(make, monkeypatch):
    expected = view_of(make, monkeypatch).first
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    plain = view_of(make, monkeypatch)
    assert isinstance(plain, plots.Picture) and plain.alt == expected.alt
    assert set(plain._repr_mimebundle_()) == {"text/html", "text/plain"}


@pytest.mark.parametrize("make", VIEWS)
def test_outside_of_a_notebook_a_view_is_its_alt_text(make, monkeypatch, capsys):
    alt = view_of(make, monkeypatch).first.alt
    monkeypatch.undo()
    make()
    assert capsys.readouterr().out == alt + "\n"


def test_ipython_formats_a_view(monkeypatch):
    view = view_of(widgets.ring_view, monkeypatch)
    data, _ = formatters.DisplayFormatter().format(view)
    assert WIDGET in data and data["text/plain"] == view.first.alt


def test_moving_a_slider_draws_the_figure_again(monkeypatch):
    view = view_of(widgets.ring_view, monkeypatch)
    devices, steps, image = view.widget.children
    steps.value = 3
    assert figures.describe_ring(4, 3) in image.value
    steps.value = 6
    assert "all-gather, step 3" in image.value
    devices.value = 3  # has 4 steps, so that step 6 becomes the last of them
    assert steps.max == steps.value == 4
    assert "on 3 devices, all-gather, step 2" in image.value
    devices.value = 8
    assert steps.max == 14 and "on 8 devices, reduce-scatter, step 4" in image.value
    steps.value = 0
    devices.value = 4
    assert image.value == view.first.html  # the same picture, byte for byte


def test_bandwidth_and_number_of_gpus_change_the_times(monkeypatch):
    view = view_of(widgets.all_reduce_view, monkeypatch)
    bandwidth, gpus, image = view.widget.children
    bandwidth.value = 100
    assert "8 GPUs with 100 GB/s" in image.value
    gpus.value = 64
    assert "64 GPUs with 100 GB/s" in image.value


@pytest.mark.parametrize("n", range(1, 9))
def test_ring_states_follow_the_definition(n):
    states = figures.ring_states(n)
    assert len(states) == 2 * (n - 1) + 1
    start = np.repeat(np.eye(n, dtype=int)[:, None], n, axis=1)
    assert (states[0] == start).all()
    for step, state in enumerate(states):
        assert state.max() == 1, "nobody is counted twice"
        complete = state.all(-1)  # (device, part)
        if step < n - 1:
            assert not complete.any()
            # what has moved step times is the sum of the step + 1 devices that it passed
            lengths = [state[i, (i - step) % n].sum() for i in range(n)]
            assert lengths == [step + 1] * n
        else:
            assert (complete.sum(1) == step - (n - 1) + 1).all()
    assert states[-1].all()


@pytest.mark.parametrize("n", (2, 3, 4))
def test_ring_figures_are_the_same_each_time(n):
    def draw(step):
        figures.draw_ring(n, step)
        return plots.picture("ring").html

    assert draw(1) == draw(1) != draw(0)
    assert draw(2 * (n - 1)) == draw(1000)
    assert figures.describe_ring(n, 1000) == figures.describe_ring(n, 2 * (n - 1))
    figures.draw_ring_steps(n)
    axes = plt.gcf().axes
    assert len(axes) == 2 * n
    titles = [ax.get_title(loc="left") for ax in axes if ax.get_title(loc="left")]
    assert titles == [figures.ring_step_name(n, step) for step in range(2 * n - 1)]
    plots.picture("all steps")


def test_ring_step_names():
    assert [figures.ring_step_name(3, step) for step in range(5)] == [
        "before the first step",
        "reduce-scatter, step 1",
        "reduce-scatter, step 2",
        "all-gather, step 1",
        "all-gather, step 2",
    ]


def test_times_that_the_figure_shows_are_the_models():
    figures.draw_all_reduce_times(bandwidth=16, n=8)
    ax = plt.gca()
    lines = {line.get_label(): line.get_xydata() for line in ax.get_lines()}
    assert set(lines) == {"lower bound", "CPU", "star", "tree", "in parts, ring"}
    for megabytes, milliseconds in lines["star"][::20]:
        expected = costs.message_time(megabytes * 1e6, 5e-6, 16e9) * 14 * 1e3
        assert milliseconds == pytest.approx(expected)
    for line in lines.values():
        assert (line[:, 1] >= lines["lower bound"][:, 1] * (1 - 1e-9)).all()
    plots.picture(figures.describe_all_reduce_times(16, 8))


def test_descriptions_say_what_can_be_seen():
    text = figures.describe_ring(4, 1)
    assert "reduce-scatter, step 1" in text and "gpu1: 0+1, 1, 1, 1" in text
    assert "100 GB/s" in figures.describe_all_reduce_times(100, 2)
