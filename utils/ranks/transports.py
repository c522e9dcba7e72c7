"""How the messages of process ranks travel: through sockets (gloo), or through shared memory.

Both give the same thing to `ProcessComm`: an object whose `wait` returns when the message has been
received at the other end.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .control import number_of
from .shared import Segment, publish, wait_until


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as bytes, so that any dtype can travel."""
    return tensor.detach().reshape(-1).view(torch.uint8)


class GlooTransport:
    """Messages over sockets, by torch.distributed's gloo."""

    def __init__(self, rank: int, ranks: int):
        self.nothing = torch.zeros(1, dtype=torch.uint8)  # what an empty message sends

    def send(self, tensor: Tensor, dst: int, key):
        data = flat_bytes(tensor) if tensor.numel() else self.nothing
        return dist.isend(data, dst, tag=number_of(key) % 2**31)

    def recv(self, tensor: Tensor, src: int, key):
        data = flat_bytes(tensor) if tensor.numel() else torch.empty_like(self.nothing)
        return dist.irecv(data, src, tag=number_of(key) % 2**31)


class SharedTransport:
    """Messages through a ring of slots in shared memory for each ordered pair of ranks.

    A message goes in pieces of at most a slot. `wait` moves whatever can be moved, this rank's
    other messages too, so that two ranks that send to each other at once go on.
    """

    SLOTS = 4

    def __init__(self, segment: Segment, offset: int, rank: int, ranks: int, slot: int):
        self.rank, self.ranks, self.slot = rank, ranks, slot
        self.pipes = {}
        for src in range(ranks):
            for dst in range(ranks):
                if src != dst and rank in (src, dst):
                    start = offset + (src * ranks + dst) * self.pipe_size(slot)
                    self.pipes[src, dst] = Pipe(segment, start, slot)
        self.lock = threading.Lock()
        self.sending: dict[int, deque[Sending]] = {dst: deque() for dst in range(ranks)}
        self.posted: dict[int, list[Receiving]] = {src: [] for src in range(ranks)}
        self.arriving: dict[int, Receiving | None] = dict.fromkeys(range(ranks))
        self.unexpected: dict[int, list[Receiving]] = {src: [] for src in range(ranks)}

    @classmethod
    def pipe_size(cls, slot: int) -> int:
        return 4096 + cls.SLOTS * (slot + Pipe.HEADER)

    @classmethod
    def size(cls, ranks: int, slot: int) -> int:
        """Bytes of shared memory for the pipes of all ordered pairs."""
        return ranks * ranks * cls.pipe_size(slot)

    def send(self, tensor: Tensor, dst: int, key):
        work = Sending(self, dst, number_of(key), flat_bytes(tensor))
        with self.lock:
            self.sending[dst].append(work)
            self.push(dst)
        return work

    def recv(self, tensor: Tensor, src: int, key):
        work = Receiving(self, number_of(key), flat_bytes(tensor))
        with self.lock:
            for early in self.unexpected[src]:
                if early.number == work.number:
                    self.unexpected[src].remove(early)
                    work.take(early)
                    break
            else:
                self.posted[src].append(work)
        return work

    def progress(self) -> None:
        """Move every message of this rank as far as it goes now."""
        if not self.lock.acquire(blocking=False):
            return  # this rank's other thread is at it
        try:
            for dst, queue in self.sending.items():
                if queue:
                    self.push(dst)
            for src in range(self.ranks):
                if src != self.rank and (self.posted[src] or self.arriving[src]):
                    self.pull(src)
        finally:
            self.lock.release()

    def push(self, dst: int) -> None:
        pipe, queue = self.pipes[self.rank, dst], self.sending[dst]
        for work in queue:
            while not work.written and pipe.has_room():
                work.at += pipe.write(work.number, work.data, work.at)
                work.written = work.at >= work.data.numel()
                work.end = pipe.sent
            if not work.written:
                break
        while queue and queue[0].written and pipe.received() >= queue[0].end:
            queue.popleft().done = True

    def pull(self, src: int) -> None:
        pipe = self.pipes[src, self.rank]
        while pipe.has_message():
            work = self.arriving[src]
            if work is None:
                number, total = pipe.head()
                work = next((w for w in self.posted[src] if w.number == number), None)
                if work is None:
                    work = Receiving(self, number, torch.empty(total, dtype=torch.uint8))
                    self.unexpected[src].append(work)
                else:
                    self.posted[src].remove(work)
                work.total = total
                self.arriving[src] = work
            work.at += pipe.read(work.data, work.at)
            if work.at >= work.total:
                work.done, self.arriving[src] = True, None


class Pipe:
    """The slots from one rank to another: written by one, read by the other."""

    HEADER = 64

    def __init__(self, segment: Segment, offset: int, slot: int):
        self.slot = slot
        self.counts = segment.words(offset, (2, 64))[:, 0]  # pieces sent, pieces received
        stride = slot + self.HEADER
        first = offset + 4096
        self.headers = [
            segment.words(first + i * stride, (4,)) for i in range(SharedTransport.SLOTS)
        ]
        self.addresses = [
            segment.address + first + i * stride + self.HEADER for i in range(SharedTransport.SLOTS)
        ]

    @property
    def sent(self) -> int:
        return int(self.counts[0])

    def received(self) -> int:
        return int(self.counts[1])

    def has_room(self) -> bool:
        return self.counts[0] - self.counts[1] < SharedTransport.SLOTS

    def has_message(self) -> bool:
        return self.counts[0] > self.counts[1]

    def head(self) -> tuple[int, int]:
        """The next message's number, and its size in bytes."""
        header = self.headers[self.received() % SharedTransport.SLOTS]
        return int(header[0]), int(header[1])

    def write(self, number: int, data: Tensor, at: int) -> int:
        """Put the next piece of a message in a free slot; returns its size."""
        i = self.sent % SharedTransport.SLOTS
        size = min(self.slot, data.numel() - at)
        if size > 0:
            ctypes.memmove(self.addresses[i], data.data_ptr() + at, size)
        self.headers[i][:3] = np.array([number, data.numel(), size], np.int64)
        publish(self.counts, 0, self.sent + 1)
        return size

    def read(self, data: Tensor, at: int) -> int:
        """Take the next piece of a message; more than fits is dropped. Returns its size."""
        i = self.received() % SharedTransport.SLOTS
        size = int(self.headers[i][2])
        room = min(size, data.numel() - at)
        if room > 0:
            ctypes.memmove(data.data_ptr() + at, self.addresses[i], room)
        publish(self.counts, 1, self.received() + 1)
        return size


class Sending:
    """A message on its way out."""

    def __init__(self, transport: SharedTransport, dst: int, number: int, data: Tensor):
        self.transport, self.dst, self.number, self.data = transport, dst, number, data
        self.at, self.end, self.written, self.done = 0, 0, False, False

    def is_completed(self) -> bool:
        self.transport.progress()
        return self.done

    def wait(self) -> None:
        wait_until(self.is_completed)


class Receiving:
    """A message on its way in, or one that came before it was asked for."""

    def __init__(self, transport: SharedTransport, number: int, data: Tensor):
        self.transport, self.number, self.data = transport, number, data
        self.at, self.total, self.done = 0, 0, False
        self.early: Receiving | None = None

    def take(self, early: Receiving) -> None:
        """Get the bytes from a message that came early, as soon as all of it is there."""
        self.early = early

    def is_completed(self) -> bool:
        self.transport.progress()
        if self.early is not None and self.early.done:
            size = min(self.data.numel(), self.early.data.numel())
            self.data[:size] = self.early.data[:size]
            self.early, self.done = None, True
        return self.done

    def wait(self) -> None:
        wait_until(self.is_completed)
