"""Memory that the ranks of one machine share: a file mapped by all, flags, and an all-reduce.

A flag has one writer, and is a whole machine word, so that no lock is needed: the writer stores its
data first and the flag last, readers look at the flag first. That order is kept by processors whose
memory model keeps stores in order (x86); `publish` adds the barrier that others (Arm) need.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .collectives import Flat, check_tensor, combine, divide_first

WORD = 8
SPINS = 200  # looks before the processor is given away

_fence = threading.Lock()


class Segment:
    """A piece of memory in a file that several processes map: `address`, and views of it."""

    def __init__(self, path: Path, size: int, create: bool = False):
        if create:
            with open(path, "wb") as file:
                file.truncate(size)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def words(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """A view as 64-bit integers."""
        count = int(np.prod(shape))
        return np.frombuffer(self._map, np.int64, count, offset).reshape(shape)

    def bytes(self, offset: int, size: int) -> memoryview:
        return memoryview(self._map)[offset : offset + size]

    def tensor(self, offset: int, dtype: torch.dtype, count: int) -> Tensor:
        """A view as a tensor."""
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)


def publish(flags: np.ndarray, index, value: int) -> None:
    """Set a flag after everything that was stored before it."""
    with _fence:  # taking and giving back a lock is a memory barrier
        pass
    flags[index] = value


def wait_until(ready: Callable[[], bool]) -> None:
    """Look again and again, politely: soon give the processor to the other ranks."""
    for _ in range(SPINS):
        if ready():
            return
    while not ready():
        os.sched_yield() if hasattr(os, "sched_yield") else time.sleep(0)
        if ready():
            return
        time.sleep(2e-5)


class SharedAllReduce:
    """An all-reduce through shared memory, for float tensors of any size, in chunks.

    Of each chunk every rank reduces its own n-th part. It copies the other parts to where their
    ranks can see them, adds what the others left for its part to its own values, leaves the sum,
    and fetches the other sums: 4(n-1)/n copies a byte, none through a socket.
    """

    def __init__(self, segment: Segment, offset: int, ranks: int, rank: int, chunk: int):
        self.ranks, self.rank, self.chunk = ranks, rank, chunk
        self.flags = segment.words(offset, (3, ranks, WORD))[:, :, 0]  # a cache line for each
        self.segment = segment
        self.data = offset + 3 * ranks * WORD * WORD
        self.round = 0
        self.views: dict = {}

    @staticmethod
    def size(ranks: int, chunk: int) -> int:
        """Bytes that it needs: flags, and two buffers of a chunk for each rank."""
        return 3 * ranks * WORD * WORD + 2 * ranks * chunk

    def slots(self, half: int, dtype: torch.dtype, count: int) -> list[list[Tensor]]:
        """The buffers of all ranks, each cut into the parts of all ranks."""
        found = self.views.get((half, dtype, count))
        if found is None:
            if len(self.views) > 64:
                self.views.clear()
            starts = [self.data + (2 * r + half) * self.chunk for r in range(self.ranks)]
            buffers = [self.segment.tensor(start, dtype, count) for start in starts]
            found = [list(buffer.tensor_split(self.ranks)) for buffer in buffers]
            self.views[half, dtype, count] = found
        return found

    def __call__(self, values: Tensor, op: str) -> None:
        """Reduce a contiguous 1-dimensional tensor in place; ranks must agree on size and dtype."""
        arrived, reduced, fetched = self.flags
        for piece in values.split(self.chunk // values.itemsize):
            self.round += 1
            now, half = self.round, self.round % 2
            parts = piece.tensor_split(self.ranks)
            slots = self.slots(half, piece.dtype, piece.numel())
            wait_until(lambda now=now: fetched.min() >= now - 2)
            for part in range(self.ranks):
                if part != self.rank:
                    slots[self.rank][part].copy_(parts[part])
            publish(arrived, self.rank, now)
            wait_until(lambda now=now: arrived.min() >= now)
            total = parts[self.rank]
            for rank in range(self.ranks):
                if rank != self.rank:
                    combine(total, slots[rank][self.rank], op)
            slots[self.rank][self.rank].copy_(total)
            publish(reduced, self.rank, now)
            wait_until(lambda now=now: reduced.min() >= now)
            for part in range(self.ranks):
                if part != self.rank:
                    parts[part].copy_(slots[part][part])
            publish(fetched, self.rank, now)


def shared_memory_all_reduce(comm, tensor: Tensor, op: str = "sum") -> None:
    """All-reduce through the memory that the ranks of one machine share (on="processes")."""
    if comm.world_size == 1:
        check_tensor(tensor)
        return
    if comm.shared_all_reduce is None:
        raise RuntimeError(
            "these ranks share no memory: shared_memory_all_reduce needs run(…, on='processes') "
            "and the whole world, not a group"
        )
    comm._begin("shared_memory_all_reduce", tensor, op=op)
    flat = Flat(tensor)
    divide_first(flat.values, comm.world_size, op)
    comm.shared_all_reduce(flat.values, op)
    flat.write_back()


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where regions of these sizes begin, each on a memory page of its own; the end comes last."""
    page, starts, at = 4096, [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // page) * page
    return [*starts, at]
