"""The course's one figure style: colours, time axis, timelines, and showing figures in a notebook.

Importing this module applies the style. Compute, communication, idle and the host keep one colour
each, and so does every rank; they differ in lightness too, so figures can be read in grey and by
the colour-blind. Functions that draw return nothing, so that a cell may end with them.
"""

import base64
import html
import io
import re
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.transforms import offset_copy

# From Okabe and Ito's colour-blind-safe palette, with greys; lightness 46, 70, 93 and 17 of 100.
COMPUTE = "#0072B2"
COMMUNICATION = "#E69F00"
IDLE = "#EBEBEB"
HOST = "#2B2B2B"
KIND_COLOURS = {"compute": COMPUTE, "communication": COMMUNICATION, "host": HOST}

# Eight steps of viridis, ordered so that the first few ranks lie far apart.
RANK_COLOURS = (
    "#440154", "#1F9E89", "#B5DE2B", "#3E4989", "#6ECE58", "#482878", "#26828E", "#31688E",
)  # fmt: skip

MAX_BARS = 1200  # in one drawing; more would be thinner than a line and make large files


def style():
    """Set matplotlib's defaults: small, plain figures whose SVG is the same in every run."""
    plt.rcParams.update(
        {
            "svg.hashsalt": "course",
            "svg.fonttype": "path",  # looks the same where the font is missing
            "font.family": "DejaVu Sans",  # comes with matplotlib
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.color": "#DDDDDD",
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "lines.linewidth": 1.8,
            "figure.figsize": (7, 3.2),
            "figure.dpi": 96,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
        }
    )


style()


def rank_colour(rank):
    """The colour of a rank or device in the whole course; from rank 8 on they repeat."""
    return RANK_COLOURS[rank % len(RANK_COLOURS)]


def time_unit(seconds):
    """Name and number a second of the unit for a duration: ("µs", 1e6), ("ms", 1e3) or ("s", 1)."""
    if 0 < seconds < 1e-3:
        return "µs", 1e6
    return ("ms", 1e3) if seconds < 1 else ("s", 1.0)


_RECTANGLE = re.compile(r"M (\S+) (\S+) \nL (\S+) \2 \nL \3 (\S+) \nL \1 \4 \n(?:L \1 \2 \n)?z\s*")


def svg(fig=None):
    """The figure (by default the current one) as SVG text: no dates, coordinates to 1/100 point."""
    buffer = io.StringIO()
    (fig or plt.gcf()).savefig(
        buffer,
        format="svg",
        bbox_inches="tight",
        metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
    )
    text = buffer.getvalue()
    text = re.sub(r"<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"\n\s+", "\n", text)

    def shorten(match):
        return re.sub(r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", match[0])

    text = re.sub(r'\b(?:d|x|y)="[^"]*"|translate\([^)]*\)', shorten, text)
    return _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", text)


def picture(alt, fig=None):
    """A figure (by default the current one) as an object that notebooks display; closes the figure.

    `alt` says in a sentence what the figure shows, for those who cannot see it; it is also the
    plain-text output. The figure is an SVG inside an <img>: that is displayed, with its alt text,
    in notebooks that are not trusted yet too. Raises ValueError without alt text or figure.
    """
    if not alt or not alt.strip():
        raise ValueError("describe the figure: show(alt='…')")
    if fig is None and not plt.get_fignums():
        raise ValueError("there is no figure to show; draw one first")
    fig = fig or plt.gcf()
    data = base64.b64encode(svg(fig).encode()).decode()
    plt.close(fig)
    image = f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'
    return Picture(image, alt)


def show(alt, fig=None):
    """Display a figure (by default the current one) as `picture` makes it; returns nothing."""
    from IPython.display import display

    display(picture(alt, fig))


@dataclass(frozen=True)
class Picture:
    """A figure as HTML, and its alt text."""

    html: str
    alt: str

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/html": self.html, "text/plain": self.alt}

    def __repr__(self):  # outside of notebooks
        return self.alt


def draw_timeline(timeline, ax=None, rows="all", title=None):
    """Draw a timeline on `ax`, or on a new figure of a fitting size; returns nothing.

    Rows: the host, the devices (computing above, their communication below, idle in light grey),
    then the wires. `rows` is "all", "devices" or "links"; anything else raises ValueError.
    """
    places = _places(timeline, rows)
    bottom = max([place.top + place.height for place in places], default=1.0)
    if ax is None:
        _, ax = plt.subplots(figsize=(8, min(0.3 * bottom, 12) + 1.1))
    layers = _layers(timeline, places)
    unit, scale = time_unit(timeline.duration)
    for place in places:
        whole = [(0, timeline.duration * scale or 1)]
        draw_bars(ax, whole, place.top, 0.9 * place.height, IDLE, zorder=0.5)
    for colour, top, height, bars in _thin(layers, timeline.duration):
        bars = [(start * scale, end * scale) for start, end in bars]
        draw_bars(ax, bars, top, height, colour)
    _write_names(ax, timeline, places, scale)
    colours = {layer[0] for layer in layers if layer[3]}
    _label(ax, timeline, places, bottom, unit, scale, title, colours)


@dataclass(frozen=True)
class _Place:
    name: str
    top: float
    height: float
    is_device: bool


def _places(timeline, rows):
    """Where each row is drawn, from 0 downwards, in units of a device's row."""
    if rows not in ("all", "devices", "links"):
        raise ValueError(f'rows is "all", "devices" or "links", not {rows!r}')
    names = {row for event in timeline.events for row in event.rows} - set(timeline.devices)
    wires = sorted((name for name in names if "→" in name), key=_natural)
    others = sorted(names.difference(wires, ["host"]), key=_natural)
    devices = ["host"] * ("host" in names) + list(timeline.devices) + others
    places, top = [], 0.0
    for name in devices if rows != "links" else []:
        places.append(_Place(name, top, 1.0, name in timeline.devices))
        top += 1.0
    top += 0.35 * bool(places)
    for name in wires if rows != "devices" else []:
        places.append(_Place(name, top, 0.62, False))
        top += 0.62
    return places


def _natural(name):
    """Sort key: gpu2 before gpu10, and what starts at a GPU before the rest."""
    return not name.startswith("gpu"), [
        (int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
    ]


def _layers(timeline, places):
    """What is drawn on the rows: a list of (colour, top, height, [(start, end), …])."""
    on_row = {}
    for event in timeline.events:
        for row in event.rows:
            on_row.setdefault((row, event.kind), []).append((event.start, event.end))
    layers = []
    for place in places:
        lane = (0.56 if place.is_device else 0.9) * place.height
        for kind, colour in KIND_COLOURS.items():
            if bars := on_row.get((place.name, kind)):
                layers.append((colour, place.top, lane, sorted(bars)))
        if place.is_device:
            bars = timeline.intervals(place.name, "communication")
            layers.append((COMMUNICATION, place.top + 0.6, 0.3, bars))
    return layers


def _thin(layers, duration):
    """The layers with a hair between bars that touch, or merged where they are too many to see."""
    hair = duration / 600  # about a point
    if sum(len(layer[3]) for layer in layers) <= 400:
        return [(*layer[:3], _separate(layer[3], hair)) for layer in layers]
    gap = hair / 8
    while True:
        merged = [(*layer[:3], _merge(layer[3], gap, hair / 2)) for layer in layers]
        if sum(len(layer[3]) for layer in merged) <= MAX_BARS or gap >= duration:
            return merged
        gap *= 2


def _separate(bars, hair):
    shorter = [(start, end - hair if end - start > 4 * hair else end) for start, end in bars]
    return [(start, max(end, start + hair / 2)) for start, end in shorter]


def _merge(bars, gap, shortest):
    merged = []
    for start, end in bars:
        end = max(end, start + shortest)
        if merged and start - merged[-1][1] <= gap:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def draw_bars(ax, bars, top, height, colour, zorder=2):
    """All bars of a layer as one path, which keeps the drawing quick and its file small."""
    if not bars:
        return
    left, right = np.array(bars, dtype=float).T
    corners = [(left, top), (right, top), (right, top + height), (left, top + height), (left, top)]
    points = np.stack([np.stack(np.broadcast_arrays(x, y), -1) for x, y in corners], 1)
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(bars)
    path = Path(points.reshape(-1, 2), codes)
    ax.add_patch(PathPatch(path, facecolor=colour, edgecolor="none", zorder=zorder))


def _write_names(ax, timeline, places, scale):
    """The names of events in their bars, where they fit; none where that would be many."""
    inches = 0.85 * ax.get_window_extent().width / ax.figure.dpi
    place_of = {place.name: place for place in places}
    written = [
        (event, place_of[row])
        for event in timeline.events
        for row in event.rows
        if row in place_of
        and event.duration * inches > (0.075 * len(event.name) + 0.05) * timeline.duration
    ]
    for event, place in written if len(written) <= 60 else []:
        middle = (0.28 if place.is_device else 0.45) * place.height + place.top
        colour = "black" if event.kind == "communication" else "white"
        ax.text(
            (event.start + event.duration / 2) * scale, middle, event.name,
            ha="center", va="center_baseline", fontsize=6.5, color=colour, clip_on=True,
        )  # fmt: skip


def _label(ax, timeline, places, bottom, unit, scale, title, colours):
    ax.set_xlim(0, timeline.duration * scale or 1)
    ax.set_ylim(bottom, -0.1)
    ax.set_yticks([p.top + 0.45 * p.height for p in places], [p.name for p in places])
    for place, label in zip(places, ax.get_yticklabels(), strict=True):
        label.set_fontsize(8.5 if place.height == 1 else 7.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(axis="y", visible=False)
    ax.grid(axis="x", color="white")
    ax.set_axisbelow("line")  # the grid above the idle background and below the bars
    ax.set_xlabel(f"time ({unit})")
    if not timeline.events:
        ax.text(0.5, 0.5, "nothing was recorded", transform=ax.transAxes, ha="center", va="center")
    patches = [Patch(color=c, label=kind) for kind, c in KIND_COLOURS.items() if c in colours]
    patches.append(Patch(color=IDLE, label="idle"))
    above = offset_copy(ax.transAxes, ax.figure, y=5, units="points")
    below = offset_copy(ax.transAxes, ax.figure, y=-30, units="points")
    is_wide = ax.get_window_extent().width / ax.figure.dpi > 5  # room for a legend beside the text
    place = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
    if is_wide:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1), "bbox_transform": above}
    ax.legend(
        handles=patches, ncols=4, borderaxespad=0, borderpad=0, handlelength=1.2, columnspacing=1.2,
        **place,
    )  # fmt: skip
    if title:
        ax.set_title(title, pad=22)
    ax.text(0, 1, timeline.title, transform=above, fontsize=8, color="#444444", va="bottom")
