"""Wires of a chosen speed for ranks that are processes: real messages, held back by sleeping.

Messages of one machine are so fast that there is little to hide behind them. Sleeping takes no
processor time, so that what overlaps with it really does, on any number of cores.
"""

from __future__ import annotations

import threading


class Wire:
    """A rank's wire, out and in: a message holds it for latency + bytes / bandwidth.

    It is the wire of `ideal_server` in real time. Each end of a message takes its turn on its own
    rank's wire, from when both ends are known to be there; neither knows how busy the other one is.
    """

    def __init__(self, latency: float, bandwidth: float):
        self.latency, self.byte = latency * 1e9, 1e9 / bandwidth  # ns
        self.free = {"out": 0.0, "in": 0.0}
        self.lock = threading.Lock()

    def book(self, way: str, start: int, nbytes: int) -> float:
        """When a message that could start at a time has passed: its turn is after the others'."""
        with self.lock:
            begin = max(start, self.free[way])
            self.free[way] = begin + self.latency + nbytes * self.byte
            return self.free[way]


def check_wire(bandwidth: float | None, latency: float, on: str) -> tuple[float, float] | None:
    """(latency, bandwidth) of the wires of processes, None if they have no limit."""
    if bandwidth is None and latency == 0:
        return None
    if on != "processes":
        raise ValueError(
            f"bandwidth and latency slow the messages of processes down, not those of on={on!r}; "
            "virtual ranks have the wires of their server: "
            "server=ideal_server(ranks, latency, bandwidth)"
        )
    bandwidth = float("inf") if bandwidth is None else bandwidth
    if not (bandwidth > 0 and 0 <= latency < float("inf")):
        raise ValueError(
            f"a wire has a bandwidth above 0 bytes/s and a latency of at least 0 s, not "
            f"{bandwidth!r} and {latency!r}"
        )
    return latency, bandwidth
