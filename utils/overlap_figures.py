"""Figures of chapter 07: steps under each other, buckets on the wire, where parameters sit.

`describe_…` gives the alt text of what `draw_…` draws, as in `figures.py`.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from utils import costs, overlap, plots
from utils.events import difference, total, union

MiB = 2**20
COLOURS = {"ResNet-18": "#D55E00", "VGG-16": "#009E73", "transformer": "#CC79A7"}
DASHES = {"ResNet-18": "-", "VGG-16": "--", "transformer": "-."}
RANKS = 4
MESSAGE = 49e-6  # s: 14 µs of the network and, on a virtual GPU, 35 to issue, receive and add

# --- steps under each other ---------------------------------------------------------------------


def draw_steps(steps, title, device=0):
    """One device's part of several timelines, {label: timeline}, on a common time axis.

    Computing above, communication below, idle in light grey; the end's time stands behind it. A
    rank that sleeps stands for one that computes.
    """
    _, ax = plt.subplots(figsize=(8, 0.52 * len(steps) + 1.15))
    longest = max(timeline.duration for timeline in steps.values())
    unit, scale = plots.time_unit(longest)
    for row, timeline in enumerate(steps.values()):
        ax.barh(row, timeline.duration * scale, 0.8, color=plots.IDLE)
        for kind, place, height in (("compute", -0.15, 0.5), ("communication", 0.26, 0.28)):
            bars = closed_up(work(timeline, device, kind), longest / 800)
            widths = [((start * scale), (end - start) * scale) for start, end in bars]
            colour = plots.KIND_COLOURS[kind]
            ax.broken_barh(widths, (row + place - height / 2, height), color=colour, lw=0)
        ax.text(timeline.duration * scale, row, f" {timeline.duration * scale:.3g} {unit}",
                va="center", fontsize=8)  # fmt: skip
    ax.set_yticks(range(len(steps)), list(steps))
    ax.set(ylim=(len(steps) - 0.5, -0.5), xlim=(0, 1.13 * longest * scale))
    label_steps(ax, unit, title)


def label_steps(ax, unit, title, pad=8):
    """Axis, legend and title of rows over time."""
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"time ({unit})")
    colours = {**plots.KIND_COLOURS, "idle": plots.IDLE}
    patches = [Patch(color=colours[name], label=name) for name in colours if name != "host"]
    ax.legend(handles=patches, ncols=3, loc="lower right", bbox_to_anchor=(1, 1),
              borderaxespad=0.2, handlelength=1.2, columnspacing=1.2)  # fmt: skip
    ax.set_title(title, pad=pad)


def work(timeline, device, kind):
    """When a device had work of a kind, where sleeping counts as computing: (start, end)."""
    asleep = [
        (event.start, event.end)
        for event in timeline.events
        if kind == "compute" and event.name == "sleep" and event.rows == (f"host{device}",)
    ]
    return timeline.intervals(device, kind) + asleep


def closed_up(intervals, gap):
    """Sorted intervals, those with less than `gap` between them as one."""
    closed = []
    for start, end in union(intervals):
        if closed and start - closed[-1][1] < gap:
            closed[-1] = closed[-1][0], end
        else:
            closed.append((start, end))
    return closed


def describe_steps(steps, device=0):
    """Alt text of `draw_steps`."""
    parts = []
    for label, timeline in steps.items():
        exposed = total(
            difference(*(work(timeline, device, k) for k in ("communication", "compute")))
        )
        unit, scale = plots.time_unit(timeline.duration)
        parts.append(
            f"{label}: {timeline.duration * scale:.3g} {unit}, {exposed * scale:.3g} of it "
            "communication without computing"
        )
    return f"Timelines of one rank under each other. {'; '.join(parts)}."


# --- buckets on the wire ------------------------------------------------------------------------


def plan(network, megabytes, bandwidth):
    """What `draw_overlap` draws: ends of forward and backward pass, and the buckets' trips.

    Buckets of so many MiB (the first of one, or less), and `bandwidth` GB/s of each rank's wire.
    """
    cap = megabytes * MiB
    return overlap.predict(
        network, min(cap, MiB), cap,
        lambda nbytes: costs.ring_time(RANKS, nbytes, bandwidth * 1e9, MESSAGE),
    )  # fmt: skip


def draw_overlap(network="ResNet-18", megabytes=25.0, bandwidth=3.0):
    """A step's predicted timeline: the passes, and the buckets on the wire, hidden and exposed."""
    forward, backward, trips = plan(network, megabytes, bandwidth)
    end = max(backward, trips[-1].end)
    unit, scale = plots.time_unit(end)
    _, ax = plt.subplots(figsize=(8, 2.4))
    for start, stop, name in ((0, forward, "forward"), (forward, backward, "backward")):
        ax.barh(0, (stop - start) * scale, 0.6, left=start * scale, color=plots.COMPUTE,
                edgecolor="white", lw=0.7)  # fmt: skip
        if stop - start > 0.08 * end:
            ax.text((start + stop) / 2 * scale, 0, name, color="white", ha="center", va="center",
                    fontsize=8)  # fmt: skip
    for trip in trips:
        draw_trip(ax, trip, backward, end, scale)
    ax.axvline(backward * scale, color=plots.HOST, lw=0.8, ls=":")
    ax.set_yticks([0, 1], ["GPU", "wire"])
    ax.set(ylim=(1.5, -0.5), xlim=(0, 1.02 * end * scale))
    label_steps(ax, unit, title_of(network, megabytes, bandwidth, end - backward), 20)
    handles = [Patch(color=plots.COMMUNICATION, label="hidden"),
               Patch(facecolor=plots.COMMUNICATION, hatch="////", label="exposed")]  # fmt: skip
    ax.legend(handles=handles, ncols=2, loc="lower right", bbox_to_anchor=(1, 1),
              borderaxespad=0.2)  # fmt: skip
    text = f"predicted: {len(trips)} buckets, {RANKS} V100s, step {end * scale:.3g} {unit}"
    ax.text(0, 1.02, text, transform=ax.transAxes, fontsize=8, color="#444444")


def draw_trip(ax, trip, backward, end, scale):
    """A bucket's bar, and a line to it from the moment at which its last gradient was ready."""
    hair = 0.001 * end * scale
    for start, stop, hatch in (
        (trip.start, min(trip.end, backward), None),
        (max(trip.start, backward), trip.end, "////"),
    ):
        if stop > start:
            width = max((stop - start) * scale - hair, hair)
            ax.barh(1, width, 0.6, left=start * scale, color=plots.COMMUNICATION, hatch=hatch,
                    edgecolor="white", lw=0.4)  # fmt: skip
    line = [trip.ready * scale, trip.start * scale]
    ax.plot(line, [0.3, 0.7], color=plots.HOST, lw=0.7)
    if trip.end - trip.start > 0.075 * end:
        ax.text((trip.start + trip.end) / 2 * scale, 1, f"{trip.nbytes / 1e6:.3g} MB", ha="center",
                va="center", fontsize=8, bbox={"facecolor": plots.COMMUNICATION, "pad": 1.5,
                                               "edgecolor": "none"})  # fmt: skip


def title_of(network, megabytes, bandwidth, exposed):
    """What stays exposed with these settings."""
    return f"{network}, buckets of {megabytes:.3g} MiB, {bandwidth:.3g} GB/s: " + (
        f"{max(exposed, 0) * 1e3:.3g} ms exposed"
    )


def describe_overlap(network="ResNet-18", megabytes=25.0, bandwidth=3.0):
    """Alt text of `draw_overlap`."""
    forward, backward, trips = plan(network, megabytes, bandwidth)
    title = title_of(network, megabytes, bandwidth, trips[-1].end - backward)
    listed = "; ".join(
        f"{trip.nbytes / 1e6:.3g} MB ready at {trip.ready * 1e3:.3g}, on the wire from "
        f"{trip.start * 1e3:.3g} to {trip.end * 1e3:.3g} ms"
        for trip in trips[:4]
    )
    return (
        f"Predicted timeline. {title}. Forward pass until {forward * 1e3:.3g} ms, backward pass "
        f"until {backward * 1e3:.3g}; {len(trips)} buckets{', first' * (len(trips) > 4)}: {listed}."
    )


# --- where the parameters sit -------------------------------------------------------------------


def arrived(network):
    """Shares of the backward pass, and the shares of all bytes that are ready then."""
    forward, gradients = overlap.recorded(network)
    gradients = sorted(gradients, key=lambda gradient: gradient.ready)
    end = gradients[-1].ready
    passed = [(gradient.ready - forward) / (end - forward) for gradient in gradients]
    nbytes = np.cumsum([gradient.nbytes for gradient in gradients])
    return np.array([0, *passed]), np.array([0, *nbytes / nbytes[-1]])


def draw_arrivals(networks=tuple(overlap.NETWORKS)):
    """How much of all gradients is ready, over the backward pass, a line for each network."""
    _, ax = plt.subplots(figsize=(7, 3.2))
    for network in networks:
        passed, ready = arrived(network)
        ax.step(100 * passed, 100 * ready, where="post", color=COLOURS[network],
                ls=DASHES[network], label=network)  # fmt: skip
    ax.set(xlabel="backward pass (% of its time)", ylabel="gradients ready (% of bytes)")
    ax.set(xlim=(0, 101), ylim=(0, 103), title="When the gradients get ready (simulated)")
    ax.legend(loc="lower right", bbox_to_anchor=(0.93, 0.02))


def describe_arrivals(networks=tuple(overlap.NETWORKS)):
    """Alt text of `draw_arrivals`."""
    parts = []
    for network in networks:
        passed, ready = arrived(network)
        shares = ", ".join(f"{100 * ready[passed <= at][-1]:.0f}" for at in (0.1, 0.5, 0.99))
        parts.append(f"{network} {shares}")
    return (
        "Share of all bytes of gradients that are ready, over the backward pass. After 10, 50 and "
        f"99 % of its time, in %: {'; '.join(parts)}."
    )
