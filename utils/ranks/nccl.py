"""How messages between GPUs travel: by NCCL, which knows no tags and no sizes.

NCCL matches sends with receives by their order alone. So a sender announces its message by a
letter; the receiver, when it has been asked for that message, accepts it by another one and starts
to receive; the sender starts to send when it reads that. Both sides so start in the order of the
receiver's letters, whatever the order of sends and tags. Tensors in host memory go by gloo.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .mail import Mail
from .process import Lane
from .transports import End, GlooTransport

ANNOUNCED, ACCEPTED = 1, 2  # what letters are about


class NcclTransport:
    """Messages between processes with a GPU each; those to higher ranks have channels of their own.

    So what two ranks send to each other at once goes at once: each channel is a stream of its GPU.
    """

    ANNOUNCEMENT = struct.Struct("<qqqq")  # number, kind, bytes, time
    ACCEPTANCE = struct.Struct("<q")  # number

    def __init__(self, mail: Mail, rank: int):
        self.mail, self.rank = mail, rank
        self.gloo = GlooTransport(mail)
        self.upward = dist.new_group(backend="nccl")
        self.downward = dist.new_group(backend="nccl")
        self.lock = threading.Lock()
        self.seen = 0  # letters that had come when they were last looked through
        self.sending: dict[tuple[int, int], deque[NcclEnd]] = {}  # announced, not accepted yet
        self.asked: dict[tuple[int, int], deque[NcclEnd]] = {}  # and not accepted yet
        self.announced: dict[tuple[int, int], deque[tuple]] = {}  # by others, not asked for yet

    def send(self, data: Tensor, dst: int, number: int) -> End:
        if not data.is_cuda:
            return self.gloo.send(data, dst, number)
        end = NcclEnd(data, dst)
        letter = self.ANNOUNCEMENT.pack(number, end.kind, end.nbytes, time.perf_counter_ns())
        with self.lock:
            self.sending.setdefault((dst, number), deque()).append(end)
            self.mail.post(dst, ANNOUNCED, letter)
        return end

    def recv(self, data: Tensor, src: int, number: int) -> End:
        if not data.is_cuda:
            return self.gloo.recv(data, src, number)
        end = NcclEnd(data, src)
        with self.lock:
            self.asked.setdefault((src, number), deque()).append(end)
            self.accept(src, number)
        return end

    def progress(self) -> None:
        """Read letters, accept what has been announced and asked for, send what was accepted."""
        self.gloo.progress()
        if self.seen == self.mail.came or not self.lock.acquire(blocking=False):
            return
        try:
            self.seen = self.mail.came
            for peer in self.mail.incoming:
                while (letter := self.mail.take(peer, ANNOUNCED)) is not None:
                    number, *what = self.ANNOUNCEMENT.unpack(letter)
                    self.announced.setdefault((peer, number), deque()).append(tuple(what))
                    self.accept(peer, number)
                while (letter := self.mail.take(peer, ACCEPTED)) is not None:
                    (number,) = self.ACCEPTANCE.unpack(letter)
                    end = take_first(self.sending, (peer, number))
                    end.start(dist.isend, self.channel(self.rank, peer))
        finally:
            self.lock.release()

    def accept(self, src: int, number: int) -> None:
        """Start to receive the messages with a number that are both announced and asked for."""
        key = (src, number)
        while key in self.asked and key in self.announced:
            end, what = take_first(self.asked, key), take_first(self.announced, key)
            if end.matches(*what):
                self.mail.post(src, ACCEPTED, self.ACCEPTANCE.pack(number))
                end.start(dist.irecv, self.channel(src, self.rank))
            end.begun = True

    def channel(self, src: int, dst: int):
        return self.upward if src < dst else self.downward


def take_first(queues: dict, key):
    """The first in a queue; an empty queue is dropped."""
    first = queues[key].popleft()
    if not queues[key]:
        del queues[key]
    return first


class NcclEnd(End):
    """One end of a message between GPUs. To wait for it makes the GPU wait, not the host."""

    def __init__(self, data: Tensor, peer: int):
        super().__init__(data)
        self.peer = peer
        self.work: dist.Work | None = None
        self.ready = torch.cuda.Event()  # the data's earlier uses, whichever thread goes on
        self.ready.record()

    def start(self, function, channel) -> None:
        """Give the message to NCCL, after what the GPU has to do with its memory before."""
        if self.nbytes:
            torch.cuda.current_stream().wait_event(self.ready)
            self.work = function(self.bytes(), self.peer, group=channel)
        self.begun = True

    def is_completed(self) -> bool:
        return self.begun and (self.work is None or self.work.is_completed())

    def wait_in(self, lane: Lane, doing: int) -> None:
        lane.wait(lambda: self.begun, doing, self.peer, self.kind, self.nbytes)
        if self.work is not None:
            self.work.wait()
        self.done = True


class OnStream:
    """A launched function whose kernels and messages have a stream of their own.

    They come after what the GPU has been given before the launch, and beside what it is given
    later. `join` lets what follows come after them; the host waits for nothing.
    """

    def __init__(self, function: Callable, stream: torch.cuda.Stream):
        self.function, self.stream = function, stream
        self.before, self.after = torch.cuda.Event(), torch.cuda.Event()
        self.before.record()

    def __call__(self, *args):
        with torch.cuda.stream(self.stream):  # and its device: a new thread begins with GPU 0
            self.stream.wait_event(self.before)
            result = self.function(*args)
            self.after.record()
        return result

    def join(self) -> None:
        torch.cuda.current_stream().wait_event(self.after)
