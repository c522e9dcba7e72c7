"""The course's one figure style, and the drawings that chapters share."""

import matplotlib.pyplot as plt

COMPUTE = "#0072B2"
COMMUNICATION = "#E69F00"
HOST = "#009E73"
IDLE = "#ECECEC"
KIND_COLOURS = {"compute": COMPUTE, "communication": COMMUNICATION, "host": HOST}


def draw_timeline(timeline, ax=None, rows="all", title=None):
    """Draw a Timeline (duck-typed). Draws on `ax` or a new figure; returns nothing."""
    names = list(timeline.devices) if rows != "links" else []
    wires = sorted({r for e in timeline.events for r in e.rows} - set(timeline.devices))
    names += wires if rows != "devices" else []
    if ax is None:
        _, ax = plt.subplots(figsize=(8, 0.3 * len(names) + 1))
    for y, row in enumerate(names):
        ax.broken_barh([(0, timeline.duration)], (y - 0.4, 0.8), color=IDLE)
        for kind, colour in KIND_COLOURS.items():
            bars = [
                (e.start, e.duration) for e in timeline.events if e.kind == kind and row in e.rows
            ]
            ax.broken_barh(bars, (y - 0.4, 0.8), color=colour)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlabel("seconds")
    ax.set_title(title or timeline.title)
