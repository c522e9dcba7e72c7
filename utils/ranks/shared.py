"""An all-reduce through the memory that the ranks of one machine share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .collectives import Flat, check_tensor, combine, divide_first
from .segment import LINE, WORD, Segment, publish


class SharedAllReduce:
    """An all-reduce through shared memory, for tensors of any size, in chunks.

    Of each chunk every rank reduces its own n-th part. It copies the other parts to where their
    ranks can see them, adds what the others left for its part to its own values, leaves the sum,
    and fetches the other sums: 4(n-1)/n copies a byte, none through a socket.
    """

    CHUNK = 2 * 2**20  # bytes

    def __init__(self, segment: Segment, offset: int, rank: int, ranks: int):
        self.ranks, self.rank = ranks, rank
        count = ranks * LINE
        self.arrived = segment.words(offset, count)
        self.reduced = segment.words(offset + count * WORD, count)
        self.fetched = segment.words(offset + 2 * count * WORD, count)
        self.segment = segment
        self.data = offset + 3 * count * WORD
        self.round = 0
        self.views: dict = {}

    @classmethod
    def size(cls, ranks: int) -> int:
        """Bytes that it needs: flags, and two buffers of a chunk for each rank."""
        return 3 * ranks * LINE * WORD + 2 * ranks * cls.CHUNK

    def slots(self, half: int, dtype: torch.dtype, count: int) -> list[list[Tensor]]:
        """The buffers of all ranks, each cut into the parts of all ranks."""
        found = self.views.get((half, dtype, count))
        if found is None:
            if len(self.views) > 64:
                self.views.clear()
            starts = [self.data + (2 * r + half) * self.CHUNK for r in range(self.ranks)]
            buffers = [self.segment.tensor(start, dtype, count) for start in starts]
            found = [list(buffer.tensor_split(self.ranks)) for buffer in buffers]
            self.views[half, dtype, count] = found
        return found

    def all_at(self, flags: memoryview, round: int) -> bool:
        """Whether every rank has come as far as a round."""
        return all(flags[rank * LINE] >= round for rank in range(self.ranks))

    def __call__(self, values: Tensor, op: str, wait: Callable) -> None:
        """Reduce a contiguous 1-dimensional tensor in place; ranks must agree on size and dtype.

        `wait` is called with a function that tells whether to go on.
        """
        arrived, reduced, fetched, own = self.arrived, self.reduced, self.fetched, self.rank
        for piece in values.split(self.CHUNK // values.itemsize):
            self.round += 1
            now, half = self.round, self.round % 2
            parts = piece.tensor_split(self.ranks)
            slots = self.slots(half, piece.dtype, piece.numel())
            wait(lambda now=now: self.all_at(fetched, now - 2))
            for part in range(self.ranks):
                if part != own:
                    slots[own][part].copy_(parts[part])
            publish(arrived, own * LINE, now)
            wait(lambda now=now: self.all_at(arrived, now))
            total = parts[own]
            for rank in range(self.ranks):
                if rank != own:
                    combine(total, slots[rank][own], op)
            slots[own][own].copy_(total)
            publish(reduced, own * LINE, now)
            wait(lambda now=now: self.all_at(reduced, now))
            for part in range(self.ranks):
                if part != own:
                    parts[part].copy_(slots[part][part])
            publish(fetched, own * LINE, now)


def shared_memory_all_reduce(comm, tensor: Tensor, op: str = "sum") -> None:
    """All-reduce through the memory that the ranks of one machine share (on="processes")."""
    if comm.world_size == 1:
        check_tensor(tensor)
        return
    if getattr(comm, "shared_all_reduce", None) is None:
        raise RuntimeError(
            "these ranks share no memory: shared_memory_all_reduce needs run(…, on='processes') "
            "and the whole world, not a group"
        )
    comm._begin("shared_memory_all_reduce", tensor, op=op)
    flat = Flat(tensor)
    divide_first(flat.values, comm.world_size, op)
    comm.shared_all_reduce(flat.values, op, comm._lane.wait_for_others)
    flat.write_back()
