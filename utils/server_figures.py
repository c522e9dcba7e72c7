"""Figures of chapter 06: wires and what they carry, links and rings, descent with stale gradients.

`describe_…` gives the alt text of what `draw_…` draws, as in `figures.py`.
"""

import math

import matplotlib.pyplot as plt
import numpy as np

from utils import costs, plots

RING_COLOURS = ("#D55E00", "#009E73", "#CC79A7")  # kinds and ranks have other ones

# --- wires and what they carry ------------------------------------------------------------------


def wire_loads(timeline):
    """Bytes that crossed each wire."""
    loads = {}
    for event in timeline.events:
        for row in event.rows if event.kind == "communication" else ():
            loads[row] = loads.get(row, 0) + event.bytes
    return loads


def draw_wire_loads(timelines, summing):
    """What each wire of a PCIe switch carried, a panel each; MB beside wires as wide as that.

    `timelines` by title; `summing` by title the nodes in whose memory the sum was made.
    """
    _, axes = plt.subplots(1, len(timelines), figsize=(3 * len(timelines), 3.3))
    for ax, (title, timeline) in zip(np.atleast_1d(axes), timelines.items()):
        _draw_switch(ax, wire_loads(timeline), len(timeline.devices), summing[title])
        ax.set_title(title)


def _draw_switch(ax, loads, gpus, summing):
    places = {f"gpu{i}": (i, 0.0) for i in range(gpus)}
    middle = (gpus - 1) / 2
    places |= {"switch0": (middle, 1.0), "cpu0": (middle, 2.0)}
    for node, (x, y) in places.items():
        if node == "switch0":
            ax.plot([-0.3, gpus - 0.7], [y, y], color=plots.HOST, lw=5, solid_capstyle="butt")
            ax.text(gpus - 0.65, y, "switch", fontsize=7.5, va="center")
            continue
        adds = node in summing
        box = {"facecolor": plots.COMPUTE if adds else plots.IDLE, "edgecolor": "none", "pad": 4}
        colour = "white" if adds else "black"
        ax.text(x, y, node, ha="center", va="center", fontsize=8, color=colour, bbox=box, zorder=3)
    for node in [*(f"gpu{i}" for i in range(gpus)), "cpu0"]:
        (x, y), side = places[node], -1
        for wire in (f"{node}→switch0", f"switch0→{node}"):
            up = (y < 1) == wire.startswith(node)
            _draw_wire(ax, x + 0.13 * side, min(y, 1), loads.get(wire, 0) / 1e6, up, side)
            side = 1
    ax.set(xlim=(-0.6, gpus + 0.1), ylim=(-0.25, 2.25))
    ax.axis("off")


def _draw_wire(ax, x, bottom, megabytes, up, side):
    if not megabytes:
        ax.plot([x, x], [bottom + 0.2, bottom + 0.9], color="#BBBBBB", lw=0.8, ls=":")
        return
    low, high = bottom + 0.2, bottom + 0.9
    ax.annotate(
        "", (x, high if up else low), (x, low if up else high),
        arrowprops={"arrowstyle": "-|>", "color": plots.COMMUNICATION, "shrinkA": 0, "shrinkB": 0,
                    "lw": 0.8 + megabytes / 120, "mutation_scale": 7 + megabytes / 80},
    )  # fmt: skip
    ax.text(x + (0.11 + megabytes / 8000) * side, bottom + 0.55, f"{megabytes:.0f}", fontsize=7.5,
            va="center", ha="center", rotation=90)  # fmt: skip


# --- links and rings ----------------------------------------------------------------------------


def draw_link_matrix(links, ax=None, title=None):
    """How many links join each pair of GPUs, as a table: the more, the darker."""
    ax = ax or plt.subplots(figsize=(4, 4))[1]
    n = len(links)
    for a, row in enumerate(links):
        for b, count in enumerate(row):
            shade = (plots.IDLE, "#AAAAAA", plots.HOST)[min(count, 2)]
            square = plt.Rectangle((b - 0.46, a - 0.46), 0.92, 0.92, color=shade)
            ax.add_patch(square)
            if count:
                colour = "black" if count == 1 else "white"
                ax.text(b, a, count, color=colour, ha="center", va="center", fontsize=9)
    ax.set(xlim=(-0.5, n - 0.5), ylim=(n - 0.5, -0.5), xlabel="GPU", ylabel="GPU")
    ax.set_xticks(range(n))
    ax.set_yticks(range(n))
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.set_aspect("equal")
    for spine in ax.spines.values():
        spine.set_visible(False)
    if title:
        ax.set_title(title)


def draw_links(links, order=None, rings=(), ax=None, title=None):
    """GPUs on a circle, in `order`, with a line for each link; `rings` colour the links they use.

    `links` is a matrix, as `Server.link_matrix()` gives. A ring is a sequence of GPUs; each ring
    takes one link of every pair that it passes.
    """
    ax = ax or plt.subplots(figsize=(4.2, 4))[1]
    n = len(links)
    angles = {gpu: math.pi / 2 + 2 * math.pi * i / n for i, gpu in enumerate(order or range(n))}
    spots = {gpu: np.array([math.cos(a), math.sin(a)]) for gpu, a in angles.items()}
    colours = {}
    for ring, colour in zip(rings, RING_COLOURS):
        for a, b in zip(ring, [*ring[1:], ring[0]]):
            colours.setdefault(frozenset((a, b)), []).append(colour)
    for a in range(n):
        for b in range(a):
            lines = [*colours.get(frozenset((a, b)), []), *["#888888"] * links[a][b]]
            _draw_lines(ax, spots[a], spots[b], lines[: links[a][b]])
    for gpu, (x, y) in spots.items():
        ax.plot(x, y, "o", ms=19, color=plots.HOST, zorder=3)
        ax.text(x, y, gpu, color="white", ha="center", va="center", fontsize=9, zorder=4)
    ax.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2))
    ax.set_aspect("equal")
    ax.axis("off")
    if title:
        ax.set_title(title)


def _draw_lines(ax, a, b, colours):
    across = np.array([a[1] - b[1], b[0] - a[0]]) / np.linalg.norm(a - b)
    for i, colour in enumerate(colours):
        shift = across * 0.045 * (i - (len(colours) - 1) / 2)
        (x1, y1), (x2, y2) = a + shift, b + shift
        ax.plot([x1, x2], [y1, y2], color=colour, lw=2)


# --- descent with stale gradients ---------------------------------------------------------------


def stale_descent(rate, delay, steps=60):
    """Gradient descent on x²/2 from x = 1, with gradients that are `delay` updates old: all x."""
    x = [1.0] * (delay + 1)
    for _ in range(steps):
        x.append(x[-1] - rate * x[-1 - delay])
    return x[delay:]


def draw_stale_descent(delay=3, rate=0.4, steps=60):
    """The path of x, on an axis from -2 to 2; the title says on which side of the limit it is."""
    _, ax = plt.subplots(figsize=(7, 2.9))
    path = stale_descent(rate, delay, steps)
    ax.axhline(0, color="#999999", lw=0.8)
    ax.plot(np.clip(path, -10, 10), ".-", color=plots.COMPUTE, lw=1, ms=5)
    ax.set(xlabel="update", ylabel="distance x from the minimum", ylim=(-2, 2), xlim=(0, steps))
    ax.set_title(_stale_title(delay, rate))


def _stale_title(delay, rate):
    limit = costs.largest_stale_rate(delay)
    side = "below" if rate < limit else "not below"
    return f"Delay {delay}, learning rate {rate:.3g}: {side} the limit of {limit:.3g}"


def describe_stale_descent(delay=3, rate=0.4, steps=60):
    """Alt text of `draw_stale_descent`."""
    path = stale_descent(rate, delay, steps)
    first, last = (max(map(abs, part)) for part in (path[:20], path[-20:]))
    return (
        f"Gradient descent with stale gradients. {_stale_title(delay, rate)}. The largest distance "
        f"from the minimum is {first:.2g} in the first 20 updates and {last:.2g} in the last 20."
    )
