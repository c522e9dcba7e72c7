"""One thing that ran, and the arithmetic of the times at which things ran."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One thing that ran: `start` and `duration` in seconds from the start of the recording.

    `kind` is "compute", "communication" or "host". `rows` says where it is drawn: ("gpu0",) for
    compute, ("host",), or the wires it occupies, ("gpu0→switch0", "switch0→gpu1"). `devices` are
    the indices of the GPUs concerned, both ends of a copy; `bytes` moved and `flops` computed.
    """

    name: str
    kind: str
    rows: tuple[str, ...]
    start: float
    duration: float
    devices: tuple[int, ...] = ()
    bytes: int = 0
    flops: int = 0

    @property
    def end(self):
        """Seconds from the start of the recording."""
        return self.start + self.duration


def union(intervals):
    """The (start, end) pairs that cover the same points, in order, without overlaps or contacts."""
    merged = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def difference(intervals, others):
    """The parts of `intervals` that no pair of `others` covers, in order, without overlaps."""
    left = []
    others = union(others)
    first = 0
    for start, end in union(intervals):
        while first < len(others) and others[first][1] <= start:
            first += 1
        i = first
        while start < end and i < len(others) and others[i][0] < end:
            if others[i][0] > start:
                left.append((start, others[i][0]))
            start = others[i][1]
            i += 1
        if start < end:
            left.append((start, end))
    return left


def total(intervals):
    """Length of the union of (start, end) pairs."""
    return math.fsum(end - start for start, end in union(intervals))
