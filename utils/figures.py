"""Figures of the chapters: each function draws one figure from a few numbers, and returns nothing.

`describe_…` gives the alt text of what `draw_…` draws. `widgets.py` puts sliders over them.
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from utils import collectives, costs, plots

# --- chapter 03: a ring, step by step -----------------------------------------------------------

PITCH, GAP = 1.3, 0.36  # of the rows of cells, and what is free between two of them, in cells


def ring_states(n):
    """What each part of each device contains before the first and after each of 2(n-1) steps.

    A list of arrays of shape (device, part, contributor): how often a device's own part is in it.
    They come from running the steps of `collectives.py` on such counts.
    """
    counts = torch.eye(n, dtype=torch.int64)  # row i: one contribution, of device i
    parts = [[counts[i].clone() for _ in range(n)] for i in range(n)]
    states = [np.array([[part.tolist() for part in row] for row in parts])]
    for ring_step in (collectives.ring_reduce_step, collectives.ring_gather_step):
        for step in range(n - 1):
            ring_step(parts, step)
            states.append(np.array([[part.tolist() for part in row] for row in parts]))
    return states


def draw_ring(n=4, step=0):
    """The parts of n devices after so many steps of a ring all-reduce, at most 2(n-1).

    Rows are devices, columns parts; the small squares in a cell are the devices in its sum.
    """
    step = min(step, 2 * (n - 1))
    _, ax = plt.subplots(figsize=(5.2, 6.6))
    _draw_parts(ax, n, ring_states(n), step)
    _label_parts(ax, n, rows=True)
    ax.set_title(f"{ring_step_name(n, step)} ({step} of {2 * (n - 1)} steps)", pad=20)


def describe_ring(n=4, step=0):
    """Alt text of `draw_ring`."""
    step = min(step, 2 * (n - 1))
    state = ring_states(n)[step]
    rows = [
        f"gpu{i}: " + ", ".join("+".join(map(str, np.flatnonzero(part))) for part in state[i])
        for i in range(n)
    ]
    return (
        f"Ring all-reduce on {n} devices, {ring_step_name(n, step)}. Devices in the sum of each "
        f"part, part 0 first. {'; '.join(rows)}."
    )


def draw_ring_steps(n=4):
    """All 2(n-1) steps of a ring all-reduce on n devices, a panel each, a row for each phase."""
    states = ring_states(n)
    _, axes = plt.subplots(2, n, figsize=(8, 5.6))
    for step, ax in zip(range(2 * n - 1), axes.flat):
        _draw_parts(ax, n, states, step)
        _label_parts(ax, n, rows=step in (0, n))
        ax.set_title(ring_step_name(n, step), fontsize=8, pad=15)
    _draw_key(axes.flat[-1], n)


def ring_step_name(n, step):
    """What the figures call a step: "reduce-scatter, step 1"."""
    if step == 0:
        return "before the first step"
    phase, step = divmod(step - 1, n - 1)
    return f"{('reduce-scatter', 'all-gather')[phase]}, step {step + 1}"


def _draw_parts(ax, n, states, step):
    """The grid of cells after a step, with an arrow for each part that moved in it."""
    ax.set_xlim(-0.06, n + 0.06)
    ax.set_ylim(n * PITCH + 0.1, -0.4)
    ax.set_aspect("equal")
    ax.axis("off")
    cells = [(states[step][i, j], j, i * PITCH) for i in range(n) for j in range(n)]
    _draw_cells(ax, cells)
    moved = [] if step == 0 else np.argwhere((states[step] != states[step - 1]).any(-1))
    for right, part in moved:
        _arrow(ax, part + 0.5, right * PITCH - GAP, right * PITCH + 0.04)
        if right == 0:  # around: out at the bottom, in at the top
            end = n * PITCH - GAP
            ax.plot([part + 0.5] * 2, [end, end + GAP], color=plots.COMMUNICATION, lw=2)


def _arrow(ax, x, start, end):
    ax.annotate(
        "", (x, end), (x, start), annotation_clip=False,
        arrowprops={"arrowstyle": "-|>", "color": plots.COMMUNICATION, "lw": 2, "shrinkA": 0,
                    "shrinkB": 0, "mutation_scale": 9},
    )  # fmt: skip


def _draw_cells(ax, cells, size=0.86):
    """Parts as (counts, left, top): a small square a device, filled if that device is in the sum.

    Parts that all devices are in get a frame.
    """
    n = len(cells[0][0])
    columns = math.ceil(math.sqrt(n))
    width = size / columns
    height = math.ceil(n / columns) * width
    squares, frames = {}, []
    for counts, left, top in cells:
        for k, count in enumerate(counts):
            x = left + 0.07 + k % columns * width
            y = top + 0.5 - height / 2 + k // columns * width
            colour = plots.rank_colour(k) if count else plots.IDLE
            squares.setdefault(colour, []).append((x, y, width, width))
            if count:
                text = str(k) if count == 1 else f"{count}×{k}"
                digit = ax.text(x + width / 2, y + width / 2, text, ha="center", va="center",
                                fontsize=_digit_size(ax, n), color=_on(colour))  # fmt: skip
                digit.set_in_layout(False)  # it never sticks out, and asking takes time
        if all(counts):
            frames.append((left + 0.05, top + 0.48 - height / 2, size + 0.04, height + 0.04))
    for colour, places in squares.items():
        _draw_boxes(ax, places, facecolor=colour, edgecolor="white", linewidth=0.8)
    _draw_boxes(ax, frames, fill=False, edgecolor=plots.HOST, linewidth=1.8, zorder=3)


def _draw_boxes(ax, boxes, **look):
    """Boxes (left, top, width, height) as one path: quick to draw, and a small file."""
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * len(boxes)
    corners = [
        corner
        for x, y, w, h in boxes
        for corner in ((x, y), (x + w, y), (x + w, y + h), (x, y + h), (x, y))
    ]
    if boxes:
        ax.add_patch(PathPatch(Path(corners, codes), **look))


def _digit_size(ax, n):
    figure = ax.get_figure()
    inches = figure.get_figwidth() / (1 if len(figure.axes) == 1 else n)
    return min(9, 30 * inches / n / math.ceil(math.sqrt(n)))


def _on(colour):
    """Black or white, whichever is readable on a colour."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "black" if 0.3 * red + 0.6 * green + 0.1 * blue > 120 else "white"


def _label_parts(ax, n, rows):
    for i in range(n):
        ax.text(i + 0.5, -0.42, f"part {i}", ha="center", va="bottom", fontsize=6.5)
        if rows:
            ax.text(-0.12, i * PITCH + 0.5, f"gpu{i}", ha="right", va="center", fontsize=8)


def _draw_key(ax, n):
    """What cells, frames and arrows mean."""
    ax.axis("off")
    ax.set_xlim(0, 4)
    ax.set_ylim(4, 0)
    ax.set_aspect("equal")
    some = np.arange(n) < 2
    for top, counts, text in (
        (0.1, some, "the sum of parts\nof devices 0 and 1"),
        (1.4, some | True, "finished: all\ndevices are in it"),
    ):
        _draw_cells(ax, [(counts.astype(int), 0, top)])
        ax.text(1.2, top + 0.5, text, va="center", fontsize=7)
    _arrow(ax, 0.5, 2.7, 3.4)
    ax.text(1.2, 3.05, "sent in this step", va="center", fontsize=7)


# --- chapter 03: the time of each algorithm -----------------------------------------------------

# Colours that neither kinds of work nor ranks have, from Okabe and Ito's palette.
ALGORITHMS = (
    ("CPU", costs.cpu_time, "#56B4E9", ":"),
    ("star", costs.star_time, "#D55E00", "--"),
    ("tree", costs.tree_time, "#009E73", "-."),
    ("in parts, ring", costs.ring_time, "#CC79A7", "-"),
)
ALPHA = 5e-6  # seconds a message


def draw_all_reduce_times(bandwidth=16, n=8):
    """The α–β model's time of each algorithm over the message's size, with the lower bound.

    `bandwidth` in GB/s one way, of every device's wire and of the one link to the CPU; a message
    takes 5 µs besides. Whatever adding and launching cost is left out.
    """
    sizes = np.logspace(3, 9, 97)
    _, ax = plt.subplots(figsize=(7, 3.8))
    bound = [costs.best_time(n, size, bandwidth * 1e9, ALPHA) * 1e3 for size in sizes]
    ax.plot(sizes / 1e6, bound, color="#999999", lw=5, alpha=0.5, label="lower bound")
    for name, time, colour, dashes in ALGORITHMS:
        times = [time(n, size, bandwidth * 1e9, ALPHA) * 1e3 for size in sizes]
        ax.plot(sizes / 1e6, times, dashes, color=colour, label=name)
    ax.set(xscale="log", yscale="log", xlim=(1e-3, 1e3), ylim=(3e-3, 3e5))
    ax.set(xlabel="size of each device's tensor (MB)", ylabel="time (ms)")
    ax.set_title(f"All-reduce on {n} GPUs, {bandwidth:g} GB/s a wire, 5 µs a message (α–β model)")
    ax.legend(loc="upper left")


def describe_all_reduce_times(bandwidth=16, n=8):
    """Alt text of `draw_all_reduce_times`."""
    small, large = (
        ", ".join(
            f"{name} {time(n, size, bandwidth * 1e9, ALPHA) * 1e3:.3g}"
            for name, time, *_ in ALGORITHMS
        )
        for size in (1e4, 1e8)
    )
    return (
        f"Time of all-reduce algorithms over message size, both logarithmic, on {n} GPUs with "
        f"{bandwidth:g} GB/s a wire. Milliseconds at 10 kB: {small}; at 100 MB: {large}."
    )
