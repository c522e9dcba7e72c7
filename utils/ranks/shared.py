"""An all-reduce through the memory that the ranks of one machine share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .collectives import Flat, combine, divide_first
from .segment import LINE, WORD, Segment, publish

BUFFERS = 3


class SharedAllReduce:
    """An all-reduce through shared memory, where each rank has three buffers, used in turn.

    A short tensor everyone leaves in a buffer, and adds up what all have left. A long one goes in
    chunks, of which every rank reduces its own n-th part: it leaves the other parts where their
    ranks see them, adds what the others left for its part, leaves the sum, and fetches the other
    sums: 4(n-1)/n copies a byte, none through a socket. These three steps are a chunk apart, so
    that ranks seldom wait for one another.
    """

    CHUNK = 2**20  # bytes
    SHORT = 2**16

    def __init__(self, segment: Segment, offset: int, rank: int, ranks: int):
        self.ranks, self.rank = ranks, rank
        count = ranks * LINE
        self.left = segment.words(offset, count)
        self.reduced = segment.words(offset + count * WORD, count)
        self.fetched = segment.words(offset + 2 * count * WORD, count)
        self.segment = segment
        self.data = offset + 3 * count * WORD
        self.round = 0
        self.views: dict = {}

    @classmethod
    def size(cls, ranks: int) -> int:
        """Bytes that it needs: flags, and the buffers of each rank."""
        return 3 * ranks * LINE * WORD + BUFFERS * ranks * cls.CHUNK

    def __call__(self, values: Tensor, op: str, meet: Callable, wait: Callable) -> None:
        """Reduce a contiguous 1-dimensional tensor in place.

        `meet` returns when all ranks have called it, and raises if they do not do the same; `wait`
        is called with a function that tells whether to go on.
        """
        if values.nbytes <= self.SHORT:
            self.reduce_short(values, op, meet, wait)
        else:
            meet()
            self.reduce_long(values, op, wait)

    def reduce_short(self, values: Tensor, op: str, meet: Callable, wait: Callable) -> None:
        now = self.round + 1
        self.wait_for(wait, self.fetched, now - BUFFERS)
        buffers = self.buffers(now, values)
        buffers[self.rank].copy_(values)
        divide_first(buffers[self.rank], self.ranks, op)
        meet()  # and so everyone has left theirs
        self.round = now
        values.copy_(buffers[0])
        for other in buffers[1:]:
            combine(values, other, op)
        publish(self.fetched, self.rank * LINE, now)

    def reduce_long(self, values: Tensor, op: str, wait: Callable) -> None:
        size = self.CHUNK // values.itemsize
        chunks = [chunk.tensor_split(self.ranks) for chunk in values.split(size)]
        first = self.round + 1
        self.round += len(chunks)
        for i in range(len(chunks) + 2):
            if i < len(chunks):
                self.leave(first + i, chunks[i], op, wait)
            if 0 <= i - 1 < len(chunks):
                self.reduce(first + i - 1, chunks[i - 1], op, wait)
            if 0 <= i - 2:
                self.fetch(first + i - 2, chunks[i - 2], wait)

    def leave(self, now: int, parts: tuple[Tensor, ...], op: str, wait: Callable) -> None:
        """Put everyone's parts of a chunk where they can see them."""
        self.wait_for(wait, self.fetched, now - BUFFERS)
        divide_first(parts[self.rank], self.ranks, op)
        for part, slot in zip(parts, self.slots(now, parts)[self.rank]):
            if part is not parts[self.rank]:
                slot.copy_(part)
                divide_first(slot, self.ranks, op)
        publish(self.left, self.rank * LINE, now)

    def reduce(self, now: int, parts: tuple[Tensor, ...], op: str, wait: Callable) -> None:
        """Add what the others have left for this rank's part, and leave the sum."""
        self.wait_for(wait, self.left, now)
        total, slots = parts[self.rank], self.slots(now, parts)
        for rank in range(self.ranks):
            if rank != self.rank:
                combine(total, slots[rank][self.rank], op)
        slots[self.rank][self.rank].copy_(total)
        publish(self.reduced, self.rank * LINE, now)

    def fetch(self, now: int, parts: tuple[Tensor, ...], wait: Callable) -> None:
        """Take the sums of the other parts."""
        self.wait_for(wait, self.reduced, now)
        slots = self.slots(now, parts)
        for rank, part in enumerate(parts):
            if rank != self.rank:
                part.copy_(slots[rank][rank])
        publish(self.fetched, self.rank * LINE, now)

    def wait_for(self, wait: Callable, flags: memoryview, now: int) -> None:
        """Wait until every rank has come as far as a round."""

        def ready() -> bool:
            return all(flags[rank * LINE] >= now for rank in range(self.ranks))

        if not ready():
            wait(ready)

    def buffers(self, now: int, values: Tensor) -> list[Tensor]:
        """The buffers of all ranks in a round, with the dtype and length of these values."""
        key = now % BUFFERS, values.dtype, values.numel()
        found = self.views.get(key)
        if found is None:
            if len(self.views) > 64:
                self.views.clear()
            starts = [self.data + (BUFFERS * r + key[0]) * self.CHUNK for r in range(self.ranks)]
            found = [self.segment.tensor(start, values.dtype, key[2]) for start in starts]
            self.views[key] = found
        return found

    def slots(self, now: int, parts: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
        """The buffers of all ranks in a round, each cut into the parts of all ranks."""
        dtype, sizes = parts[0].dtype, tuple(part.numel() for part in parts)
        key = now % BUFFERS, dtype, sizes
        found = self.views.get(key)
        if found is None:
            whole = torch.empty(sum(sizes), dtype=dtype, device="meta")
            found = [buffer.split(sizes) for buffer in self.buffers(now, whole)]
            self.views[key] = found
        return found


def shared_memory_all_reduce(comm, tensor: Tensor, op: str = "sum") -> None:
    """All-reduce through the memory that the ranks of one machine share (on="processes")."""
    call = comm._describe("shared_memory_all_reduce", tensor, op=op)
    if comm.world_size == 1:
        return
    if getattr(comm, "shared_all_reduce", None) is None:
        raise RuntimeError(
            "these ranks share no memory: shared_memory_all_reduce needs run(…, on='processes') "
            "and the whole world, not a group"
        )
    if comm._process.wire is not None:
        raise RuntimeError(
            "shared_memory_all_reduce sends no messages, so that bandwidth and latency would not "
            "count: use an all-reduce of messages, such as ring_all_reduce"
        )
    flat = Flat(tensor)
    comm.shared_all_reduce(flat.values, op, lambda: comm._agree(call), comm._lane.wait_for_others)
    flat.write_back()
