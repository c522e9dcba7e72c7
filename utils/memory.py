"""Draw what a device's memory holds, by kind."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from . import plots

# In the order of the bars' parts. From Paul Tol's muted palette, neighbours far apart in lightness;
# none of them is a colour of compute or communication.
KIND_COLOURS = {
    "parameters": "#332288",
    "gradients": "#CC6677",
    "optimizer": "#117733",
    "activations": "#88CCEE",
    "buffers": "#999933",
    "other": "#C8C8C8",
}


def draw_memory(rows: Mapping[str, Mapping[str, float]], capacity=None, ax=None, title=None):
    """Draw a bar for each row, cut into the kinds of memory; returns nothing.

    `rows` maps a label to megabytes by kind, such as a row of `cluster.memory()`; what is no kind
    (peak, capacity, ...) is left out. `capacity`, in megabytes, becomes a line across the bars.
    """
    if not rows:
        raise ValueError("there is nothing to draw: rows is empty")
    if ax is None:
        _, ax = plt.subplots(figsize=(7.5, 0.36 * len(rows) + 1.2))
    largest = max([sum(row.get(kind, 0) for kind in KIND_COLOURS) for row in rows.values()])
    largest = max(largest, capacity or 0)
    unit, scale = ("GB", 1e-3) if largest >= 1000 else ("MB", 1) if largest >= 1 else ("kB", 1e3)
    left = [0.0] * len(rows)
    for kind, colour in KIND_COLOURS.items():
        widths = [row.get(kind, 0) * scale for row in rows.values()]
        if max(widths) >= largest * scale / 1000:  # thinner than a hair otherwise
            ax.barh(range(len(rows)), widths, 0.7, left, color=colour, label=kind,
                    edgecolor="white", linewidth=0.6)  # fmt: skip
        left = [start + width for start, width in zip(left, widths)]
    if capacity:
        ax.axvline(capacity * scale, color=plots.HOST, linestyle="--", linewidth=1.2)
        ax.annotate(
            f"capacity {capacity * scale:g} {unit}", (capacity * scale, 1), (-4, -2),
            xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="right", va="top", fontsize=8,
        )  # fmt: skip
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"memory ({unit})")
    ax.set_title(title or "")
    ax.figure.legend(loc="outside lower center", ncols=6, handlelength=1.2, columnspacing=1.2)
