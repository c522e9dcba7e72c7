"""Figures of chapter 08: schedules as bars, and what another number of stages changes.

As in `figures.py`, each function draws one figure and returns nothing; `describe_…` gives the alt
text of what `draw_…` draws.
"""

import functools

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from utils import plots
from utils.pipeline import (
    bubble,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    peak_in_flight,
    time_schedule,
    unit_cost,
    zero_bubble_h1,
)

# All are computing, so all are shades of its colour: forward dark, backward lighter, its weight
# half and what is recomputed apart from them.
FORWARD = plots.COMPUTE
BACKWARD = "#7FB8D8"
WEIGHT = "#C6DFEC"
RECOMPUTE = "#00476B"
COLOURS = {"F": FORWARD, "R": RECOMPUTE, "B": BACKWARD, "W": WEIGHT}
NAMES = {"F": "forward", "R": "forward again", "B": "backward", "W": "weights' half"}
LATER = 0.35  # how far the colours of a stage's last chunk go towards grey

SCHEDULES = {
    "naive": naive,
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "interleaved, 2 chunks": functools.partial(interleaved, v=2),
    "zero bubble (ZB-H1)": zero_bubble_h1,
}


# --- a schedule as bars -------------------------------------------------------------------------


def draw_pipeline(timeline, ax=None, title=None, unit=None):
    """Draw what stages did when: a row a stage, a bar an instruction with its micro-batch's number.

    `timeline` is from `time_schedule`, or has the events that `run_schedule` recorded. Time is in
    seconds or a part of them; `unit` names another one, such as "units of F". Returns nothing.
    """
    rows = rows_of(timeline)
    if ax is None:
        _, ax = plt.subplots(figsize=(8, 0.36 * len(rows) + 1.15))
    name, scale = plots.time_unit(timeline.duration) if unit is None else (unit, 1.0)
    draw_bars(ax, timeline, rows, scale)
    write_numbers(ax, timeline, rows, scale, timeline.duration)
    finish(ax, timeline, name, scale, title)


def rows_of(timeline):
    """The row of each stage."""
    return {name: stage for stage, name in enumerate(timeline.devices)}


def parts_of(event):
    """Letter, micro-batch and chunk of an event's name: ("F", 3, 1) of "F3.1"."""
    micro, _, chunk = event.name[1:].partition(".")
    return event.name[0], int(micro), int(chunk or 0)


def draw_bars(ax, timeline, rows, scale):
    """The instructions, on a ground of idle time; of several chunks the later ones are greyer."""
    ax.barh(range(len(rows)), timeline.duration * scale, 0.9, color=plots.IDLE, zorder=0.5)
    last = max((parts_of(event)[2] for event in timeline.events), default=0)
    hair = timeline.duration / 600
    bars = {}
    for event in timeline.events:
        end = max(event.end - hair, event.start + event.duration / 2)
        key = rows[event.rows[0]], colour_of(event, last)
        bars.setdefault(key, []).append((event.start * scale, end * scale))
    for (row, colour), own in bars.items():
        plots.draw_bars(ax, own, row - 0.45, 0.9, colour)


def colour_of(event, last):
    """The colour of an instruction, of whose stage `last` is the last chunk."""
    letter, _, chunk = parts_of(event)
    grey = LATER * chunk / max(last, 1)
    return tuple((1 - grey) * part + grey * 0.55 for part in to_rgb(COLOURS[letter]))


def write_numbers(ax, timeline, rows, scale, longest):
    """The numbers of micro-batches in their bars: of a kind of instruction all of them, or none.

    The axis is `longest` seconds long.
    """
    inches = 0.9 * ax.get_window_extent().width / ax.figure.dpi / (longest or 1)
    bars = {}
    for event in timeline.events:
        letter, micro, _ = parts_of(event)
        bars.setdefault(letter, []).append((event, str(micro)))
    for letter, own in bars.items():
        narrowest = min(event.duration for event, _ in own) * inches
        if narrowest < 0.05 * max(len(number) for _, number in own) + 0.01:
            continue
        for event, number in own:
            ax.text(
                (event.start + event.duration / 2) * scale, rows[event.rows[0]], number,
                ha="center", va="center_baseline", fontsize=6.5, zorder=3,
                color="white" if letter in "FR" else "black",
            )  # fmt: skip


def finish(ax, timeline, unit, scale, title):
    """Axes, legend and title."""
    letters = {parts_of(event)[0] for event in timeline.events}
    ax.set_xlim(0, timeline.duration * scale or 1)
    ax.set_ylim(len(timeline.devices) - 0.45, -0.55)
    ax.set_yticks(range(len(timeline.devices)), timeline.devices)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(visible=False)
    ax.set_xlabel(f"time ({unit})")
    names = dict(NAMES, B="input's half") if "W" in letters else NAMES
    patches = [Patch(color=COLOURS[key], label=names[key]) for key in COLOURS if key in letters]
    patches.append(Patch(color=plots.IDLE, label="idle"))
    ax.legend(
        handles=patches, ncols=5, loc="lower right", bbox_to_anchor=(1, 1.01), borderaxespad=0,
        borderpad=0, handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
    ax.set_title(title or timeline.title, fontsize=9 if title is None else None)


def draw_pipelines(panels, in_flight=None, unit=None):
    """Several timelines above each other, {title: timeline}, on one axis of time.

    Duration and idle share are added to the titles. `in_flight`, {title: [a number a stage]}, adds
    bars for what each stage keeps at most. `unit` as in `draw_pipeline`; without it, time is in
    seconds or a part of them.
    """
    heights = [len(timeline.devices) for timeline in panels.values()]
    fig = plt.figure(figsize=(9 if in_flight else 8, 0.27 * sum(heights) + 0.75 * len(panels)))
    axes = fig.subplots(len(panels), 2 if in_flight else 1, squeeze=False, height_ratios=heights,
                        width_ratios=[5, 1] if in_flight else [1])  # fmt: skip
    longest = max(timeline.duration for timeline in panels.values())
    name, scale = plots.time_unit(longest) if unit is None else (unit, 1.0)
    for row, (title, timeline) in zip(axes, panels.items()):
        took = f"{timeline.duration * scale:.4g} {name if unit is None else 'units'}"
        draw_bars(row[0], timeline, rows := rows_of(timeline), scale)
        finish(row[0], timeline, name, scale, f"{title}: {took}, {bubble(timeline):.0%} idle")
        row[0].set_xlim(0, longest * scale)
        write_numbers(row[0], timeline, rows, scale, longest)
        if in_flight:
            most = max(map(max, in_flight.values()))
            draw_kept(row[1], in_flight[title], most, row[0].get_ylim())
    for ax in axes[:-1].flat:
        ax.set_xlabel("")
    for ax in axes[1:, -1] if in_flight else []:
        ax.set_title("")


# --- other numbers of stages and micro-batches --------------------------------------------------


@functools.lru_cache(maxsize=200)
def plan(schedule, stages, micro_batches, ratio):
    """The timeline of a schedule and its peaks in flight, in forward passes of a stage.

    `ratio` is how many forward passes a backward pass takes.
    """
    made = SCHEDULES[schedule](stages, micro_batches)
    chunks = 2 if schedule.startswith("interleaved") else 1
    timeline = time_schedule(made, unit_cost(1.0, float(ratio), chunks=chunks))
    return timeline, [peak / chunks for peak in peak_in_flight(made)]


def draw_plan(schedule="1F1B", stages=4, micro_batches=8, ratio=2.0):
    """A schedule's bars, and beside them what each stage keeps in flight at most."""
    timeline, peaks = plan(schedule, stages, micro_batches, ratio)
    fig = plt.figure(figsize=(9, 0.36 * stages + 1.2))
    left, right = fig.subplots(1, 2, width_ratios=[5, 1])
    title = f"{schedule}: {timeline.duration:.4g} units, {bubble(timeline):.0%} idle"
    draw_pipeline(timeline, left, title, unit="forward passes of a stage")
    draw_kept(right, peaks, max(peaks), left.get_ylim())


def draw_kept(ax, peaks, most, ylim):
    """What each stage keeps at most, beside its row; the axis has room for `most`."""
    ax.barh(range(len(peaks)), peaks, 0.7, color=plots.HOST)
    for stage, peak in enumerate(peaks):
        ax.text(peak, stage, f" {peak:g}", va="center", fontsize=8)
    ax.set_xlim(0, 1.25 * most)
    ax.set_ylim(*ylim)
    ax.set_yticks([])
    ax.grid(visible=False)
    ax.set_xlabel("micro-batches")
    ax.set_title("kept at most", fontsize=9)


def describe_plan(schedule="1F1B", stages=4, micro_batches=8, ratio=2.0):
    """Alt text of `draw_plan`."""
    timeline, peaks = plan(schedule, stages, micro_batches, ratio)
    kept = ", ".join(f"{peak:g}" for peak in peaks)
    return (
        f"Schedule {schedule} on {stages} stages with {micro_batches} micro-batches, a backward "
        f"pass as long as {ratio:g} forward passes: it takes {timeline.duration:.4g} forward "
        f"passes of a stage, in {bubble(timeline):.1%} of which the stages are idle. At most "
        f"{kept} micro-batches are kept in flight, by stage."
    )
