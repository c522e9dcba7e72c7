"""Measure the machine below the ranks: what a message, an addition, a collective takes.

`run(measure, 2, "processes", args=(ping_pong, sizes))` and the like; then straight lines through
the measured times. Sizes are bytes of float32 values, times seconds. Every rank that measures
imports this module, so it imports nothing that takes long to load.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

# --- rank programs -------------------------------------------------------------------------------


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all it was asked to do; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now(comm) -> float:
    """The time at which this rank's device has done all that it was asked to do."""
    torch.get_device_module(comm.device).synchronize()
    return comm.time()


def best_time(comm, call: Callable[[], None], seconds: float = 0.1) -> float:
    """Seconds of `call()`, made by all ranks at once: the fastest of several batches of calls.

    A batch lasts from a barrier until the slowest rank is done; batches are made for `seconds`, two
    at least. Every rank gets the same result.
    """
    best, repeats, batches, spent = math.inf, 1, 0, 0.0
    begin = time.perf_counter()
    while spent < seconds or batches < 2:
        comm.barrier()
        finish(comm.device)
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        finish(comm.device)
        end = time.perf_counter()
        slowest = torch.tensor([end - start, end - begin], device=comm.device)
        comm.all_reduce(slowest, "max")
        took, spent = slowest.tolist()
        best, batches = min(best, took / repeats), batches + 1
        repeats = max(1, min(100, int(seconds / 30 / best)))
    return best


def measure(comm, make: Callable, sizes: Sequence[int], seconds: float = 0.1) -> list[float]:
    """The rank program: seconds of the call `make(comm, size)` for each size."""
    return [best_time(comm, make(comm, size), seconds) for size in sizes]


def ping_pong(comm, size: int) -> Callable[[], None]:
    """A call that sends `size` bytes from rank 0 to rank 1 and back: two messages in turn."""
    x = torch.ones(size // 4, device=comm.device)

    def there_and_back():
        if comm.rank == 0:
            comm.send(x, 1)
            comm.recv(x, 1)
        elif comm.rank == 1:
            comm.recv(x, 0)
            comm.send(x, 0)

    return there_and_back


def shift(comm, size: int) -> Callable[[], None]:
    """A call in which every rank sends `size` bytes to the next one: n messages at once."""
    x, y = (torch.ones(size // 4, device=comm.device) for _ in range(2))
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    return lambda: comm.exchange(x, right, y, left)


def addition(comm, size: int) -> Callable[[], None]:
    """A call in which every rank adds `size` bytes to as many others."""
    x, y = (torch.ones(size // 4, device=comm.device) for _ in range(2))
    return lambda: x.add_(y)


def copying(comm, size: int) -> Callable[[], None]:
    """A call in which every rank copies `size` bytes within its own memory."""
    x, y = (torch.ones(size // 4, device=comm.device) for _ in range(2))
    return lambda: x.copy_(y)


def calls_of(all_reduce: Callable) -> Callable:
    """For `measure`: calls of `all_reduce(comm, tensor)` on a tensor of `size` bytes."""

    def make(comm, size):
        x = torch.full((size // 4,), 0.0, device=comm.device)
        return lambda: all_reduce(comm, x)

    return make


# --- lines through measured times ----------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """`line(size)` is alpha + beta · size seconds, however many are at it at once."""

    alpha: float  # s
    beta: float  # s/byte

    def __call__(self, size: float, at_once: int = 1) -> float:
        return self.alpha + self.beta * size


@dataclass(frozen=True)
class Crowded:
    """Seconds of the same work where 1 of n ranks does it alone, or all, or some: in between."""

    alone: Line
    together: Line
    n: int

    def __call__(self, size: float, at_once: int = 1) -> float:
        crowd = (at_once - 1) / (self.n - 1)
        return (1 - crowd) * self.alone(size) + crowd * self.together(size)


def fit_line(sizes: Sequence[float], times: Sequence[float]) -> Line:
    """The line with the least squares of relative errors, so that every size counts alike.

    Neither alpha nor beta comes out negative.
    """
    a, b = 1 / np.asarray(times, float), np.asarray(sizes, float) / times
    alpha, beta = np.linalg.lstsq(np.stack([a, b], axis=1), np.ones(len(a)))[0]
    if alpha < 0:
        alpha, beta = 0, b.sum() / (b @ b)
    if beta < 0:
        alpha, beta = a.sum() / (a @ a), 0
    return Line(float(alpha), float(beta))


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> np.ndarray:
    """(predicted - measured) / measured."""
    return np.asarray(predicted, float) / np.asarray(measured, float) - 1
