"""Memory that the ranks of one machine share: a file that all of them map, and how to wait for it.

Nothing here needs a lock: each word has one writer, which stores its data first and the word that
announces it last; readers look at that word first. Processors that keep stores in order (x86) keep
this order by themselves; `publish` adds the barrier that others (Arm) need.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

WORD = 8  # bytes of a word
LINE = 8  # words of a cache line: what different ranks write should not share one
PAGE = 4096

_fence = threading.Lock()


class Segment:
    """Shared memory of a size in bytes, as words, bytes and tensors."""

    def __init__(self, path: Path, size: int, create: bool = False):
        if create:
            with open(path, "wb") as file:
                file.truncate(size)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def words(self, offset: int, count: int) -> memoryview:
        """A view as 64-bit integers."""
        return self._view[offset : offset + count * WORD].cast("q")

    def bytes(self, offset: int, size: int) -> memoryview:
        return self._view[offset : offset + size]

    def tensor(self, offset: int, dtype: torch.dtype, count: int) -> Tensor:
        """A view as a tensor."""
        if count == 0:
            return torch.empty(0, dtype=dtype)  # torch.frombuffer takes none
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)


def publish(words: memoryview, index: int, value: int) -> None:
    """Set a word after everything that was stored before it."""
    with _fence:  # taking and giving back a lock is a memory barrier
        pass
    words[index] = value


def wait_until(ready: Callable[[], bool], spins: int, yields: int = 2000) -> None:
    """Look again and again: at first without a break, then politely, soon with little sleeps."""
    for _ in range(spins):
        if ready():
            return
    for _ in range(yields):
        give_way()
        if ready():
            return
    pause = 2e-5
    while not ready():
        time.sleep(pause)
        pause = min(pause * 1.1, 1e-3)


def give_way() -> None:
    """Let another process have the processor."""
    os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where regions of these sizes begin, each on a memory page of its own; the end comes last."""
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // PAGE) * PAGE
    return [*starts, at]
