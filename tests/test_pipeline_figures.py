"""Figures of chapter 08: what they show comes from the schedules."""

import sys

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch

from utils import pipeline_figures, plots, widgets
from utils.pipeline import gpipe, one_f_one_b, recomputing, time_schedule, zero_bubble_h1
from utils.timeline import Timeline


@pytest.fixture(autouse=True)
def no_open_figures():
    plt.close("all")
    yield
    plt.close("all")


def numbers(ax):
    """Micro-batches by row, from left to right."""
    found = {}
    for text in ax.texts:
        x, row = text.get_position()
        found.setdefault(row, []).append((x, text.get_text()))
    return {row: [number for _, number in sorted(own)] for row, own in found.items()}


def bars(ax, colour):
    """(start, end) of the bars of a colour in the first row, to whole units."""
    found = []
    for patch in ax.patches:
        if isinstance(patch, PathPatch) and to_hex(patch.get_facecolor()) == colour.lower():
            corners = patch.get_path().vertices.reshape(-1, 5, 2)
            found += [(round(c[0, 0]), round(c[1, 0])) for c in corners if c[0, 1] == -0.45]
    return found


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_bars_carry_the_numbers_of_micro_batches_in_order():
    pipeline_figures.draw_pipeline(time_schedule(one_f_one_b(3, 4)), unit="units", title="a title")
    ax = plt.gca()
    assert numbers(ax) == {
        0: list("01203123")[:3] + list("03123"), 1: list("01021323"), 2: list("00112233")
    }  # fmt: skip
    assert ax.get_xlim() == (0, 18) and ax.get_xlabel() == "time (units)"
    assert [label.get_text() for label in ax.get_yticklabels()] == ["gpu0", "gpu1", "gpu2"]
    assert legend(ax) == ["forward", "backward", "idle"]
    assert bars(ax, pipeline_figures.FORWARD)[:4] == [(0, 1), (1, 2), (2, 3), (9, 10)]
    assert bars(ax, pipeline_figures.BACKWARD)[0] == (7, 9)


def test_halves_and_recomputation_have_colours_of_their_own():
    pipeline_figures.draw_pipeline(time_schedule(recomputing(zero_bubble_h1(2, 3))))
    assert legend(plt.gca()) == [
        "forward", "forward again", "input's half", "weights' half", "idle"
    ]  # fmt: skip
    colours = pipeline_figures.COLOURS
    assert len(set(colours.values())) == 4 and colours["F"] == plots.COMPUTE


def test_chunks_differ_in_colour():
    timeline, _ = pipeline_figures.plan("interleaved, 2 chunks", 2, 4, 2.0)
    first, second = (
        pipeline_figures.colour_of(event, 1)
        for name in ("F0", "F0.1")
        for event in timeline.events
        if event.name == name and event.rows == ("gpu0",)
    )
    assert first != second


def test_bars_too_narrow_for_their_numbers_have_none():
    pipeline_figures.draw_pipeline(time_schedule(gpipe(2, 80)))
    assert not plt.gca().texts


def test_nothing_recorded_and_other_units():
    pipeline_figures.draw_pipeline(Timeline([], ["gpu0"]))
    schedule = time_schedule(gpipe(1, 2), cost=lambda piece, job: 2e-6)
    pipeline_figures.draw_pipeline(schedule)
    assert plt.gca().get_xlabel() == "time (µs)" and plt.gca().get_xlim() == (0, 8)


@pytest.mark.parametrize("kept", [None, {"GPipe": [5, 5], "1F1B": [2, 1]}])
def test_several_timelines_share_the_axis_of_time(kept):
    panels = {"GPipe": time_schedule(gpipe(2, 5)), "1F1B": time_schedule(one_f_one_b(2, 2))}
    pipeline_figures.draw_pipelines(panels, kept, unit="a unit")
    axes = plt.gcf().axes
    upper, lower = axes[:: 2 if kept else 1]
    assert upper.get_title(loc="left") == "GPipe: 18 units, 17% idle"
    assert lower.get_title(loc="left") == "1F1B: 9 units, 33% idle"
    assert upper.get_xlim() == lower.get_xlim() == (0, 18)
    assert lower.get_xlabel() == "time (a unit)" and not upper.get_xlabel()
    assert numbers(lower) == {0: list("0101"), 1: list("0011")}
    if kept:
        assert [text.get_text().strip() for text in axes[3].texts] == ["2", "1"]
        assert axes[1].get_xlim() == axes[3].get_xlim()


def test_several_measured_timelines():
    fast, slow = (time_schedule(gpipe(2, 3), cost=lambda piece, job, s=s: s) for s in (1e-3, 2e-3))
    pipeline_figures.draw_pipelines({"fast": fast, "slow": slow})
    first, second = plt.gcf().axes
    assert first.get_title(loc="left").startswith("fast: 8 ms,")
    assert second.get_xlim() == (0, 16) and second.get_xlabel() == "time (ms)"


@pytest.mark.parametrize("schedule", pipeline_figures.SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches", "ratio"), [(1, 1, 0.5), (4, 8, 2), (3, 7, 4)])
def test_every_plan_can_be_drawn_and_described(schedule, stages, micro_batches, ratio):
    pipeline_figures.draw_plan(schedule, stages, micro_batches, ratio)
    timeline, peaks = pipeline_figures.plan(schedule, stages, micro_batches, ratio)
    left, right = plt.gcf().axes
    assert f"{timeline.duration:.4g} units" in left.get_title(loc="left")
    assert [float(text.get_text()) for text in right.texts] == peaks
    alt = pipeline_figures.describe_plan(schedule, stages, micro_batches, ratio)
    assert f"takes {timeline.duration:.4g} forward passes" in alt


def test_a_plan_says_what_is_published():
    alt = pipeline_figures.describe_plan("1F1B", 4, 8, 2)
    assert "takes 33 forward" in alt and "27.3%" in alt and "4, 3, 2, 1 micro-batches" in alt
    assert "takes 28.5" in pipeline_figures.describe_plan("interleaved, 2 chunks", 4, 8, 2)
    assert "takes 27 " in pipeline_figures.describe_plan("zero bubble (ZB-H1)", 4, 8, 2)


def test_the_view_draws_again(monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    widgets.pipeline_view()
    view = shown[0]
    schedule, stages, micro_batches, ratio, image = view.widget.children
    assert image.value == view.first.html
    schedule.value, stages.value, micro_batches.value, ratio.value = "GPipe", 3, 5, 1.5
    assert pipeline_figures.describe_plan("GPipe", 3, 5, 1.5) in image.value


def test_without_ipywidgets_the_view_is_the_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    widgets.pipeline_view()
    assert shown[0].alt == pipeline_figures.describe_plan()
