"""Figures of chapter 05: who talks to whom, and times of all-reduces, predicted and measured.

As in `figures.py`, each function draws one figure from a few numbers and returns nothing;
`describe_…` gives the alt text of what `draw_…` draws.
"""

import html
import inspect
import math
import re

import matplotlib.pyplot as plt
import numpy as np

from utils import costs, plots
from utils.hardware import NETWORKS, SERVERS
from utils.measure import relative_errors

# As in figures.py, from Okabe and Ito's palette: neither kinds of work nor ranks have these.
COLOURS = {
    "star": "#D55E00", "tree": "#009E73", "ring": "#CC79A7", "halving-doubling": "#56B4E9",
    "double tree": "#7A7A00",
}  # fmt: skip
DASHES = {"star": "--", "tree": "-.", "ring": "-", "halving-doubling": (0, (5, 1)),
          "double tree": ":"}  # fmt: skip


# --- code in two columns ------------------------------------------------------------------------


class SideBySide:
    """Sources of functions in columns, without their docstrings: {title: [functions]}."""

    def __init__(self, columns):
        self.columns = {
            title: "\n\n".join(_source(function) for function in functions)
            for title, functions in columns.items()
        }

    def _repr_html_(self):
        left = 'style="text-align:left;vertical-align:top"'
        heads = "".join(f"<th {left}>{html.escape(title)}</th>" for title in self.columns)
        code = "".join(
            f'<td {left}><pre style="font:85% monospace">{html.escape(text)}</pre></td>'
            for text in self.columns.values()
        )
        return f"<table><tr>{heads}</tr><tr>{code}</tr></table>"

    def __repr__(self):
        return "\n\n".join(f"{title}\n\n{text}" for title, text in self.columns.items())


def _source(function):
    text = inspect.getsource(function).rstrip()
    return re.sub(r'\n\s*""".*?"""(?=\n)', "", text, count=1, flags=re.DOTALL)


# --- who talks to whom --------------------------------------------------------------------------


def rounds_of(timeline):
    """The messages of a run in the order of their starts: a list of [(src, dst, bytes), …].

    Messages that start at the same time are one round.
    """
    rounds = {}
    for event in timeline.events:
        if event.kind == "communication":
            start = round(event.start * 1e9)
            rounds.setdefault(start, []).append((*event.devices, event.bytes))
    return [sorted(rounds[start]) for start in sorted(rounds)]


def draw_rounds(runs, n, size):
    """Who sends to whom in each round: a panel for each of `runs`, {title: timeline}.

    Rows are ranks, columns rounds; an arrow is as thick as its message is long, and below each
    round stands its share of the tensor of `size` bytes.
    """
    found = {title: rounds_of(timeline) for title, timeline in runs.items()}
    width = sum(len(rounds) + 1 for rounds in found.values())
    fig = plt.figure(figsize=(min(10, 0.48 * width), 0.32 * n + 0.9))
    ratios = [len(rounds) + 0.4 for rounds in found.values()]
    axes = fig.subplots(1, len(found), sharey=True, width_ratios=ratios, squeeze=False)[0]
    for ax, (title, rounds) in zip(axes, found.items()):
        _draw_arrows(ax, rounds, n, size)
        ax.set_title(title, fontsize=9)
    axes[0].set_yticks(range(n), [f"rank {rank}" for rank in range(n)])


def _draw_arrows(ax, rounds, n, size):
    ax.set_xlim(-0.2, len(rounds) + 0.2)
    ax.set_ylim(n + 0.1, -0.5)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    ax.set_xticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)
    for rank in range(n):
        ax.axhline(rank, color=plots.IDLE, lw=1.5, zorder=0)
    for number, messages in enumerate(rounds):
        for src, dst, nbytes in messages:
            ax.annotate(
                "", (number + 0.92, dst), (number + 0.08, src),
                arrowprops={"arrowstyle": "-|>", "color": plots.COMMUNICATION, "shrinkA": 0,
                            "shrinkB": 0, "lw": 0.8 + 2 * nbytes / size, "mutation_scale": 8},
            )  # fmt: skip
        share = size / max(nbytes for *_, nbytes in messages)
        text = "S" if share < 1.01 else f"S/{share:.0f}"
        ax.text(number + 0.5, n - 0.1, text, ha="center", va="center", fontsize=7)
    for number in range(len(rounds) + 1):
        ax.plot([number] * n, range(n), "o", color=plots.HOST, ms=2.5)


# --- predicted and measured ---------------------------------------------------------------------


def draw_predictions(sizes, measured, predicted, title):
    """Measured times as dots, predictions as lines: a panel for each algorithm.

    `measured` is {algorithm: seconds for each size}, `predicted` {label: {algorithm: seconds}}; the
    last label's median error is written in each panel, and that of all algorithms in the title.
    """
    sizes, last = np.asarray(sizes, float), list(predicted)[-1]
    fig, axes = plt.subplots(2, 2, figsize=(8, 6), sharex=True, sharey=True)
    for ax, (name, times) in zip(axes.flat, measured.items()):
        for label, lines in predicted.items():
            dashes, width = ("-", 1.8) if label == last else ("--", 1.2)
            colour = COLOURS[name] if label == last else "#888888"
            ax.plot(sizes, np.array(lines[name]) * 1e3, dashes, color=colour, lw=width, label=label)
        ax.plot(sizes, np.array(times) * 1e3, "o", color=plots.HOST, ms=4, label="measured")
        ax.legend(loc="upper left")
        error = np.median(abs(relative_errors(predicted[last][name], times)))
        ax.set_title(f"{name}: median error {error:.0%}")
    for ax in axes.flat:
        ax.set(xscale="log", yscale="log", xlim=(sizes[0] / 1.5, sizes[-1] * 1.5))
        ax.set_xticks(10.0 ** np.arange(3, 9), ["1 KB", "10", "100", "1 MB", "10", "100"])
    for ax in axes[:, 0]:
        ax.set_ylabel("time (ms)")
    for ax in axes[1]:
        ax.set_xlabel("size of each rank's tensor", loc="left")
    errors = {label: overall_error(measured, lines) for label, lines in predicted.items()}
    text = ", ".join(f"{label} {error:.0%}" for label, error in errors.items())
    fig.suptitle(f"{title}\nmedian error of all: {text}", x=0.01, ha="left", fontsize=10)


def describe_predictions(sizes, measured, predicted):
    """Alt text of `draw_predictions`."""
    errors = "; ".join(
        f"{label} {overall_error(measured, lines):.0%}" for label, lines in predicted.items()
    )
    return (
        f"Times of {', '.join(measured)} all-reduces for {len(sizes)} sizes, both logarithmic: "
        f"measured dots and predicted lines. Median relative error: {errors}."
    )


def overall_error(measured, lines):
    """Median of the relative errors of all algorithms and sizes, without sign."""
    errors = [relative_errors(lines[name], times) for name, times in measured.items()]
    return float(np.median(np.abs(np.concatenate(errors))))


# --- published sweeps ---------------------------------------------------------------------------


def draw_sweeps(sweeps, lines, n, limits):
    """Bus bandwidth of all-reduces over their size: published dots, and the curve of an α–β line.

    A panel for each of `sweeps`, {title: {bytes: seconds}}, on `n` GPUs; `lines[title](bytes)`
    gives seconds, and its worst error is written in the panel. `limits[title]` are (GB/s, label).
    """
    _, axes = plt.subplots(1, len(sweeps), figsize=(4 * len(sweeps), 3.4), squeeze=False)
    for ax, (title, sweep) in zip(axes[0], sweeps.items()):
        sizes, line = list(sweep), lines[title]
        many = np.logspace(math.log2(sizes[0] / 2), math.log2(sizes[-1] * 2), 100, base=2)
        modelled = [costs.bus_bandwidth(size, line(size), n) / 1e9 for size in many]
        published = [costs.bus_bandwidth(size, sweep[size], n) / 1e9 for size in sizes]
        ax.plot(many, modelled, color=plots.COMMUNICATION, label="one α–β line")
        ax.plot(sizes, published, "o", color=plots.HOST, ms=4, label="published")
        size, error = worst_error(sweep, line)
        at = size, published[sizes.index(size)]
        text = f"{abs(error):.0%} too {'short' if error < 0 else 'long'}"
        ax.annotate(text, at, (8, -5), textcoords="offset points", fontsize=8)
        for value, label in limits[title]:
            ax.axhline(value, color="#888888", lw=1, ls="--", zorder=0)
            ax.text(many[0] * 1.2, value, label, fontsize=7.5, va="bottom", color="#444444")
        top = max([*published, *(value for value, _ in limits[title])])
        ax.set(xscale="log", xlim=(many[0], many[-1]), ylim=(0, 1.1 * top), title=title)
        ticks = [2**power for power in (15, 20, 25, 30, 34) if sizes[0] <= 2**power <= sizes[-1]]
        ax.set_xticks(ticks, [binary(size) for size in ticks])
        ax.minorticks_off()
        ax.set_xlabel("size of each GPU's tensor")
    axes[0, 0].set_ylabel("bus bandwidth (GB/s)")
    axes[0, -1].legend(loc="lower right")


def worst_error(sweep, line):
    """Where a line misses a sweep most: (bytes, relative error of the line's time)."""
    errors = relative_errors([line(size) for size in sweep], list(sweep.values()))
    worst = int(np.argmax(np.abs(errors)))
    return list(sweep)[worst], float(errors[worst])


def binary(size):
    """A number of bytes in KiB, MiB or GiB, as text."""
    unit, scale = next((u, s) for u, s in (("G", 30), ("M", 20), ("K", 10)) if size >= 2**s)
    return f"{size / 2**scale:.0f} {unit}iB"


# --- algorithm × size × ranks × wires -----------------------------------------------------------


def _wire(server):
    """Latency and bytes/s of a message between two GPUs of a preset."""
    links = [link for link, _ in SERVERS[server].route("gpu0", "gpu1")]
    return sum(link.latency for link in links), min(link.effective for link in links)


def _network(name):
    return 2 * NETWORKS[name].latency, NETWORKS[name].effective


WIRES = {  # α in seconds, bytes/s
    "10 Gb/s Ethernet": _network("ethernet-10g"),
    "100 Gb/s Ethernet": _network("ethernet-100g"),
    "InfiniBand NDR": _network("infiniband-ndr"),
    "PCIe 3": _wire("pcie-switch"),
    "NVLink 3 (A100)": _wire("dgx-a100"),
    "NVLink 4 (H200)": _wire("hgx-h200"),
}
RANKS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512)


def all_reduce_times(n, size, alpha, bandwidth):
    """The α–β model's seconds of each algorithm, by name."""

    def message(nbytes, at_once):
        return costs.message_time(nbytes, alpha, bandwidth)

    halving = costs.halving_doubling_rounds(n)
    return {
        "star": costs.star_time(n, size, bandwidth, alpha),
        "tree": costs.tree_time(n, size, bandwidth, alpha),
        "ring": costs.ring_time(n, size, bandwidth, alpha),
        "halving-doubling": costs.rounds_time(halving, size, message),
        "double tree": costs.double_tree_time(n, size, bandwidth, alpha),
    }


def crossings(algorithm, n, alpha, bandwidth):
    """Sizes from which `algorithm` is faster, or slower, than another: [(bytes, other, faster)]."""
    sizes = np.logspace(2, 10, 4001)
    times = all_reduce_times(n, sizes, alpha, bandwidth)
    found = []
    for other, seconds in times.items():
        gain = seconds - times[algorithm]
        close = np.abs(gain) < 1e-9 * seconds
        sign = np.where(close, 0, np.sign(gain))
        for i in np.flatnonzero(sign[1:] * sign[:-1] < 0):
            found.append((float(sizes[i]), other, bool(sign[i + 1] > 0)))
    return sorted(found)


def draw_algorithms(algorithm="ring", megabytes=1.0, n=8, wires="PCIe 3"):
    """The α–β model's times over the message's size; one algorithm, one size stand out.

    Numbered dots mark the sizes at which that algorithm overtakes, or is overtaken by, another one.
    """
    alpha, bandwidth = WIRES[wires]
    sizes = np.logspace(3, 9, 121)
    _, ax = plt.subplots(figsize=(7, 4))
    for name, times in all_reduce_times(n, sizes, alpha, bandwidth).items():
        width = 3.2 if name == algorithm else 1.3
        ax.plot(sizes / 1e6, times * 1e3, ls=DASHES[name], color=COLOURS[name], lw=width,
                label=name)  # fmt: skip
    shown = [c for c in crossings(algorithm, n, alpha, bandwidth) if sizes[0] < c[0] < sizes[-1]]
    for number, (size, other, _) in enumerate(shown, start=1):
        y = all_reduce_times(n, size, alpha, bandwidth)[other] * 1e3
        ax.plot(size / 1e6, y, "o", color=plots.HOST, ms=9, zorder=4)
        ax.text(size / 1e6, y, number, color="white", fontsize=7, ha="center", va="center",
                zorder=5)  # fmt: skip
    listed = [f"{number}  {_crossing(*c)}" for number, c in enumerate(shown, start=1)]
    ax.text(0.98, 0.04, "\n".join(listed), transform=ax.transAxes, ha="right", fontsize=8)
    chosen = all_reduce_times(n, megabytes * 1e6, alpha, bandwidth)[algorithm]
    ax.axvline(megabytes, color="#888888", lw=1, zorder=0)
    ax.plot(megabytes, chosen * 1e3, "s", color=COLOURS[algorithm], ms=7, zorder=3)
    ax.set(xscale="log", yscale="log", xlim=(1e-3, 1e3), xlabel="size of each rank's tensor (MB)",
           ylabel="time (ms)")  # fmt: skip
    ax.set_title(
        f"{algorithm}, {megabytes:.3g} MB on {n} ranks: {_milliseconds(chosen)}\n"
        f"{wires}, {alpha * 1e6:.3g} µs + {bandwidth / 1e9:.3g} GB/s (α–β model)"
    )
    ax.legend(loc="upper left")


def describe_algorithms(algorithm="ring", megabytes=1.0, n=8, wires="PCIe 3"):
    """Alt text of `draw_algorithms`."""
    alpha, bandwidth = WIRES[wires]
    times = all_reduce_times(n, megabytes * 1e6, alpha, bandwidth)
    listed = ", ".join(f"{name} {_milliseconds(time)}" for name, time in times.items())
    crossed = "; ".join(
        f"{algorithm} {_crossing(*c)}" for c in crossings(algorithm, n, alpha, bandwidth)
    )
    return (
        f"Times of all-reduce algorithms over size, both logarithmic, on {n} ranks with {wires}. "
        f"At {megabytes:.3g} MB: {listed}. {crossed or 'No crossover of ' + algorithm}."
    )


def _crossing(size, other, faster):
    return f"{'beats' if faster else 'loses to'} {other} from {size / 1e6:.2g} MB"


def _milliseconds(seconds):
    unit, scale = plots.time_unit(seconds)
    return f"{seconds * scale:.3g} {unit}"
