"""Figures of chapter 09: matrices cut by columns and rows, AlexNet's towers, a layer's time.

As in `figures.py`, each function draws one figure from a few numbers and returns nothing;
`describe_…` gives the alt text of what `draw_…` draws.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from utils import costs, plots
from utils.hardware import CHIPS
from utils.rank_figures import WIRES

WHOLE = "#D9D9D9"  # what every rank has


# --- matrices, cut ------------------------------------------------------------------------------


def draw_cuts(n=2):
    """x · W = y with W cut by columns, and by rows, over n ranks: what each rank has of each."""
    _, axes = plt.subplots(2, 1, figsize=(8, 4.2))
    for ax in axes:
        _empty(ax, 14.6, 3.7)
    axes[0].set_title("W by columns: all of x on every rank, columns of y")
    _matrix(axes[0], 0.3, 2.0, 2, "x")
    _matrix(axes[0], 3.4, 4.0, 2, "W", n, "columns", height=2.0)
    _matrix(axes[0], 8.3, 4.0, 2, "y", n, "columns")
    axes[1].set_title("W by rows: columns of x on every rank, summands of y")
    _matrix(axes[1], 0.3, 2.0, 2, "x", n, "columns")
    _matrix(axes[1], 3.4, 4.0, 2, "W", n, "rows", height=2.0)
    _summands(axes[1], 8.3, 4.0, n)
    for ax in axes:
        ax.text(2.85, 2.0, "·", fontsize=16, ha="center", va="center")
        ax.text(7.85, 2.0, "=", fontsize=13, ha="center", va="center")
    _ranks_key(axes[0], 13.6, n)


def draw_mlp(n=2):
    """A column-cut and a row-cut layer behind each other: what is whole, what is in parts."""
    _, ax = plt.subplots(figsize=(8, 2.5))
    _empty(ax, 18.4, 4.6)
    _matrix(ax, 0.2, 1.4, 2, "x")
    _matrix(ax, 2.6, 3.6, 2, "A", n, "columns", height=1.4)
    _matrix(ax, 7.2, 3.6, 2, "gelu(x A)", n, "columns")
    _matrix(ax, 11.8, 1.4, 2, "B", n, "rows", height=3.6)
    _summands(ax, 14.2, 1.4, n)
    for x, sign in ((2.1, "·"), (6.7, "→"), (11.3, "·"), (13.7, "=")):
        ax.text(x, 2.0, sign, fontsize=13, ha="center", va="center")
    _ranks_key(ax, 17.5, n)


def _empty(ax, width, height):
    ax.set(xlim=(0, width), ylim=(height, -0.2), aspect="equal")
    ax.axis("off")


def _matrix(ax, x, width, middle, name, n=1, cut=None, height=1.4):
    """A rectangle around the line `middle`, in one colour a rank where it is cut."""
    top = middle - height / 2
    _part(ax, x, top, width, cut, n, height)
    ax.text(x + width / 2, top + height + 0.32, name, ha="center", va="center", fontsize=9)


def _summands(ax, x, width, n, height=1.4):
    """n whole results, one behind the other, and their sum."""
    step = 0.28
    for rank in range(n):
        corner = (x + rank * step, 2 - height / 2 + (rank - (n - 1) / 2) * step)
        ax.add_patch(Rectangle(corner, width, height, facecolor=plots.rank_colour(rank),
                               edgecolor="white", lw=1.5))  # fmt: skip
    bottom = 2 + height / 2 + (n - 1) / 2 * step
    ax.text(x + (width + (n - 1) * step) / 2, bottom + 0.32, "y = sum", ha="center", va="center",
            fontsize=9)  # fmt: skip


def _ranks_key(ax, x, n):
    names = [(WHOLE, "all ranks"), *((plots.rank_colour(r), f"rank {r}") for r in range(n))]
    for row, (colour, name) in enumerate(names):
        y = 0.1 + 0.5 * row
        ax.add_patch(Rectangle((x - 0.8, y), 0.3, 0.3, facecolor=colour, clip_on=False))
        ax.text(x - 0.4, y + 0.15, name, va="center", fontsize=8)


def draw_block(n=2):
    """A transformer block, with whole rows between its layers, and with rows shared out (below)."""
    _, ax = plt.subplots(figsize=(8, 3.3))
    ax.set(xlim=(-1.7, 11.2), ylim=(4.5, -0.5))
    ax.axis("off")
    parts = ((0, "norm", 1.3), (2.3, "attention:\nheads", 2.0), (5.3, "norm", 1.3),
             (7.6, "MLP: columns,\nthen rows", 2.0))  # fmt: skip
    lanes = (("x whole on\nevery rank", None, "", "all-\nreduce"),
             ("x in rows", "rows", "all-\ngather", "reduce-\nscatter"))  # fmt: skip
    for lane, (name, cut, before, after) in enumerate(lanes):
        top = 2.4 * lane
        ax.text(-1.65, top + 0.7, name, va="center", fontsize=8.5)
        for x, text, width in parts:
            _part(ax, x, top, width, cut if text == "norm" else "columns", n)
            ax.text(x + width / 2, top + 1.68, text, ha="center", va="center", fontsize=8)
        for x, words in ((1.8, before), (4.8, after), (7.1, before), (10.1, after)):
            if words:
                ax.text(x, top + 0.7, words, ha="center", va="center", fontsize=7.5,
                        bbox={"facecolor": plots.COMMUNICATION, "edgecolor": "none", "pad": 1.5},
                        )  # fmt: skip
    _ranks_key(ax, 11.4, n)


def _part(ax, x, top, width, cut, n, height=1.4):
    if cut is None:
        ax.add_patch(Rectangle((x, top), width, height, facecolor=WHOLE))
        return
    for rank in range(n):
        corner = (x, top + rank * height / n) if cut == "rows" else (x + rank * width / n, top)
        size = (width, height / n) if cut == "rows" else (width / n, height)
        ax.add_patch(Rectangle(corner, *size, facecolor=plots.rank_colour(rank),
                               edgecolor="white", lw=1.5))  # fmt: skip


# --- AlexNet ------------------------------------------------------------------------------------


def layers_of_tower(tower):
    """What `draw_towers` draws of one tower: (name, width, whether it reads both) a layer."""
    found, names, before = [], {"Conv2d": "conv", "Linear": "linear"}, None
    for layer in tower:
        if type(layer).__name__ in names:
            name = f"{names[type(layer).__name__]} {len(found) + 1}"
            found.append((name, layer.weight.shape[0], type(before).__name__ == "ReadAll"))
        before = layer
    return found


def draw_towers(layers):
    """Two towers of layers, and which of them read both: `layers` are (name, width, reads both)."""
    _, ax = plt.subplots(figsize=(8, 2.7))
    ax.set(xlim=(-0.9, len(layers) - 0.3), ylim=(2.0, -0.85))
    ax.axis("off")
    for column, (name, width, both) in enumerate(layers):
        ax.text(column, -0.7, name, ha="center", fontsize=8.5, weight="bold" if both else "normal")
        for rank in range(2):
            for source in range(2) if both else [rank]:
                crosses = source != rank
                colour = plots.COMMUNICATION if crosses else "#888888"
                if column:
                    ax.annotate(
                        "", (column - 0.31, rank * 1.3), (column - 0.69, source * 1.3),
                        arrowprops={"arrowstyle": "-|>", "color": colour, "mutation_scale": 9,
                                    "lw": 1.8 if crosses else 1.1, "shrinkA": 0, "shrinkB": 0},
                    )  # fmt: skip
            corner = (column - 0.3, rank * 1.3 - 0.35)
            ax.add_patch(Rectangle(corner, 0.6, 0.7, facecolor=plots.rank_colour(rank)))
            ax.text(column, rank * 1.3, width, ha="center", va="center", color="white", fontsize=9)
    for rank in range(2):
        ax.text(-0.85, rank * 1.3, f"gpu{rank}", va="center", fontsize=9)


# --- width × GPUs × wires -----------------------------------------------------------------------

TOKENS = 16_384  # in a batch: the crossing hardly depends on it
CHIP = CHIPS["a100-80gb"]
GPUS = (1, 2, 4, 8, 16, 32, 64)
WIDTHS = np.logspace(8, 16, 161, base=2)


def computing_time(width, n):
    """Seconds of a transformer block's products with its weights, forward and backward, in bf16.

    12 width² weights, 6 FLOPs a weight and token. The products of attention, which have no weights,
    and what is done element by element are left out.
    """
    return 6 * 12 * width**2 * TOKENS / n / (CHIP.half * CHIP.compute_efficiency)


def communication_time(width, n, wires):
    """Seconds of a block's four all-reduces of (tokens, width) in bf16, around a ring."""
    alpha, bandwidth = WIRES[wires]
    return 4 * costs.ring_time(n, TOKENS * width * 2, bandwidth, alpha)


def crossing_width(n, wires):
    """The width from which n GPUs compute longer than they communicate; 0 for one GPU.

    Without latency it is (n - 1) · 2 bytes · FLOP/s / (9 · bytes/s), for any number of tokens.
    """
    if n == 1:
        return 0.0
    # computing = a width², communicating = b width + c
    a, c = computing_time(1, n), communication_time(0, n, wires)
    b = communication_time(1, n, wires) - c
    return (b + (b * b + 4 * a * c) ** 0.5) / (2 * a)


def draw_layer_times(width=4096, n=8, wires="NVLink 3 (A100)"):
    """A block's time over its width on n GPUs, and at one width over the number of GPUs."""
    _, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), width_ratios=(1.25, 1))
    lines = {
        "one GPU, computing": (computing_time(WIDTHS, 1), "#888888", ":"),
        f"{n} GPUs, computing": (computing_time(WIDTHS, n), plots.COMPUTE, "-"),
        f"{n} GPUs, all-reduces": (communication_time(WIDTHS, n, wires), plots.COMMUNICATION, "--"),
    }
    for label, (times, colour, dashes) in lines.items():
        left.plot(WIDTHS, times * 1e3, dashes, color=colour, label=label)
    crossing = crossing_width(n, wires)
    if WIDTHS[0] < crossing < WIDTHS[-1]:
        left.plot(crossing, computing_time(crossing, n) * 1e3, "o", color=plots.HOST, ms=6)
    left.axvline(width, color="#888888", lw=1, zorder=0)
    left.set(xscale="log", yscale="log", xlabel="width", ylabel="time of a block (ms)",
             xlim=(WIDTHS[0], WIDTHS[-1]))  # fmt: skip
    left.set_xticks([256, 1024, 4096, 16384, 65536], ["256", "1k", "4k", "16k", "64k"])
    left.minorticks_off()
    left.legend(loc="upper left", fontsize=7.5)
    left.set_title(_crossing_words(crossing))
    _draw_bars(right, width, n, wires)


def _draw_bars(ax, width, n, wires):
    computing = [computing_time(width, gpus) * 1e3 for gpus in GPUS]
    sending = [communication_time(width, gpus, wires) * 1e3 for gpus in GPUS]
    places = range(len(GPUS))
    ax.bar(places, computing, 0.7, color=plots.COMPUTE, label="computing")
    ax.bar(places, sending, 0.7, computing, color=plots.COMMUNICATION, label="all-reduces")
    ax.axhline(computing[0], color="#888888", lw=1, ls=":")
    ax.set_xticks(places, GPUS)
    ax.get_xticklabels()[GPUS.index(n)].set_weight("bold")
    ax.grid(axis="x", visible=False)
    top = 1.15 * max(map(sum, zip(computing, sending)))  # room for the legend
    ax.set(xlabel="GPUs", ylabel="time of a block (ms)", ylim=(0, top))
    ax.set_title(f"width {width:,}: {speedup(width, n, wires):.2g} times as fast on {n}")
    ax.legend(loc="upper center", ncols=2, fontsize=7.5)


def speedup(width, n, wires):
    """How many times as fast n GPUs are as one."""
    together = computing_time(width, n) + communication_time(width, n, wires)
    return computing_time(width, 1) / together


def _crossing_words(crossing):
    if not crossing:
        return "nothing to communicate"
    if crossing > WIDTHS[-1]:
        return f"more communication below width {crossing:,.0f}"
    return f"more computing from width {crossing:,.0f}"


def describe_layer_times(width=4096, n=8, wires="NVLink 3 (A100)"):
    """Alt text of `draw_layer_times`."""
    computing, sending = computing_time(width, n), communication_time(width, n, wires)
    return (
        f"Time of a transformer block on {n} A100s with {wires}, modelled, over its width: "
        f"{_crossing_words(crossing_width(n, wires))}. At width {width:,} it computes for "
        f"{computing * 1e3:.3g} ms and communicates for {sending * 1e3:.3g} ms, "
        f"{speedup(width, n, wires):.2g} times as fast as one."
    )
