"""Messages through shared memory: a ring of slots for each ordered pair of ranks.

A message goes in pieces of at most a slot. Whoever waits moves whatever can be moved, this rank's
other messages too, so that two ranks that send to each other at once go on.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque

import torch
from torch import Tensor

from .process import Lane
from .segment import LINE, PAGE, Segment, publish
from .transports import End

SLOTS = 4


class SharedTransport:
    """All pipes of a rank."""

    def __init__(self, segment: Segment, offset: int, rank: int, ranks: int, slot: int):
        def pipe(src: int, dst: int) -> Pipe:
            return Pipe(segment, offset + (src * ranks + dst) * Pipe.size(slot), slot)

        others = [other for other in range(ranks) if other != rank]
        self.outgoing = {other: Outgoing(pipe(rank, other)) for other in others}
        self.incoming = {other: Incoming(pipe(other, rank)) for other in others}
        self.lock = threading.Lock()

    @staticmethod
    def size(ranks: int, slot: int) -> int:
        """Bytes of shared memory for the pipes of all ordered pairs."""
        return ranks * ranks * Pipe.size(slot)

    def send(self, data: Tensor, dst: int, number: int) -> SharedEnd:
        end = SharedEnd(self, data, dst, number)
        end.begun, end.sent_at = True, time.perf_counter_ns()
        outgoing = self.outgoing[dst]
        with self.lock:
            outgoing.queue.append(end)
            outgoing.push()
        return end

    def recv(self, data: Tensor, src: int, number: int) -> SharedEnd:
        end = SharedEnd(self, data, src, number)
        incoming = self.incoming[src]
        with self.lock:
            incoming.ask(end)
            incoming.pull()
        return end

    def progress(self) -> None:
        """Move every message of this rank as far as it goes now."""
        if not self.lock.acquire(blocking=False):
            return  # this rank's other thread is at it
        try:
            for outgoing in self.outgoing.values():
                if outgoing.queue:
                    outgoing.push()
            for incoming in self.incoming.values():
                if incoming.asked:
                    incoming.pull()
        finally:
            self.lock.release()


class SharedEnd(End):
    """One end of a message through shared memory."""

    def __init__(self, transport: SharedTransport, data: Tensor, peer: int, number: int):
        super().__init__(data)
        self.transport, self.peer, self.number = transport, peer, number
        self.address = data.data_ptr()
        self.at = 0  # bytes moved so far
        self.last = 0  # a sender's: the number of its last piece
        self.asked = False  # a receiver's: somebody wants it (it did not come early)

    def is_completed(self) -> bool:
        """Whether it is done, after `progress`."""
        return self.done

    def wait_in(self, lane: Lane, doing: int) -> None:
        lane.wait(lambda: self.done, doing, self.peer, self.kind, self.nbytes)


class Outgoing:
    """What goes to one rank, in the order of sending."""

    def __init__(self, pipe: Pipe):
        self.pipe = pipe
        self.queue: deque[SharedEnd] = deque()
        self.writing = 0  # the position in the queue of what is not all written yet

    def push(self) -> None:
        """Write what there is room for; what has been read at the other end is done."""
        pipe, queue = self.pipe, self.queue
        free = pipe.free()
        while free and self.writing < len(queue):
            end = queue[self.writing]
            pipe.write(end)
            free -= 1
            if end.at >= end.nbytes:
                end.last = pipe.count
                self.writing += 1
        read = pipe.words[LINE]
        while self.writing and queue[0].last <= read:
            queue.popleft().done = True
            self.writing -= 1


class Incoming:
    """What comes from one rank: found by its number, in the order of sending."""

    def __init__(self, pipe: Pipe):
        self.pipe = pipe
        self.posted: dict[int, deque[SharedEnd]] = {}
        self.early: dict[int, deque[SharedEnd]] = {}  # what came before it was asked for
        self.arriving: SharedEnd | None = None
        self.asked = 0  # receivers that have not got all yet

    def ask(self, end: SharedEnd) -> None:
        """A receiver looks for its message among those that came early, or waits for it."""
        end.asked = True
        self.asked += 1
        early = self.early.get(end.number)
        if not early:
            self.posted.setdefault(end.number, deque()).append(end)
            return
        came = early.popleft()
        if not early:
            del self.early[end.number]
        end.begun = True
        if not end.matches(came.kind, came.nbytes, came.sent_at):
            self.asked -= 1
            return
        ctypes.memmove(end.address, came.address, came.at)
        end.at = came.at
        if came is self.arriving:
            self.arriving = end
        else:
            self.finish(end)

    def pull(self) -> None:
        """Take in everything that has come."""
        for _ in range(self.pipe.coming()):
            end = self.arriving
            if end is None:
                end = self.arriving = self.receiver(*self.pipe.head())
            self.pipe.read(end)
            if end.at >= end.nbytes:
                self.arriving = None
                self.finish(end)

    def finish(self, end: SharedEnd) -> None:
        end.done = True
        self.asked -= end.asked

    def receiver(self, number: int, nbytes: int, kind: int, sent_at: int) -> SharedEnd:
        """Who gets the next message: the first who asked, or memory where it can stay."""
        posted = self.posted.get(number)
        if posted:
            end = posted.popleft()
            if not posted:
                del self.posted[number]
            end.begun = True
            if end.matches(kind, nbytes, sent_at):
                return end
            self.asked -= 1  # it gets an error, and what comes is lost
            return self.memory(number, nbytes, kind, sent_at)
        end = self.memory(number, nbytes, kind, sent_at)
        self.early.setdefault(number, deque()).append(end)
        return end

    @staticmethod
    def memory(number: int, nbytes: int, kind: int, sent_at: int) -> SharedEnd:
        """An end for a message that nobody asked for."""
        end = SharedEnd(None, torch.empty(nbytes, dtype=torch.uint8), -1, number)
        end.kind, end.sent_at = kind, sent_at
        return end


class Pipe:
    """The slots from one rank to another: written by one, read by the other."""

    def __init__(self, segment: Segment, offset: int, slot: int):
        self.slot = slot
        self.words = segment.words(offset, PAGE // 8)  # [0] written, [LINE] read, then headers
        self.address = segment.address + offset + PAGE
        self.count = 0  # pieces written, or read, at this end

    @staticmethod
    def size(slot: int) -> int:
        return PAGE + SLOTS * slot

    def free(self) -> int:
        return SLOTS - self.count + self.words[LINE]

    def coming(self) -> int:
        return self.words[0] - self.count

    def head(self) -> tuple[int, int, int, int]:
        """What the next piece belongs to: number, bytes, kind and time of sending."""
        at = 2 * LINE + self.count % SLOTS * 4
        return tuple(self.words[at : at + 4])

    def write(self, end: SharedEnd) -> None:
        """Put the next piece of a message in a free slot."""
        i = self.count % SLOTS
        size = min(self.slot, end.nbytes - end.at)
        if size:
            ctypes.memmove(self.address + i * self.slot, end.address + end.at, size)
        words, at = self.words, 2 * LINE + i * 4
        words[at], words[at + 1], words[at + 2] = end.number, end.nbytes, end.kind
        words[at + 3] = end.sent_at
        end.at += size
        self.count += 1
        publish(words, 0, self.count)

    def read(self, end: SharedEnd) -> None:
        """Take the next piece of a message."""
        size = min(self.slot, end.nbytes - end.at)
        if size:
            source = self.address + self.count % SLOTS * self.slot
            ctypes.memmove(end.address + end.at, source, size)
        end.at += size
        self.count += 1
        publish(self.words, LINE, self.count)
