"""How the messages of process ranks travel: here through sockets, in pipes.py in shared memory.

Both give `ProcessComm` the same: `send` and `recv` return an end of the message, which knows
whether the other side has begun, whether all is done, and how to wait for it in a lane.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from .control import Doing
from .mail import Mail
from .process import Lane

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class End:
    """One end of a message: `data` is contiguous. A mismatch with the other end is an `error`."""

    def __init__(self, data: Tensor):
        self.data = data
        self.kind = CODES[data.dtype]
        self.nbytes = data.nbytes
        self.begun = False  # a receiver's: it is known what comes
        self.done = False
        self.sent_at = 0  # ns: when the sender began, by the clock of the machine
        self.error: str | None = None

    def bytes(self) -> Tensor:
        """The data as bytes, also of a single element with a stride, which counts as contiguous."""
        return self.data.as_strided((self.data.numel(),), (1,)).view(torch.uint8)

    def matches(self, kind: int, nbytes: int, sent_at: int) -> bool:
        """Note what comes; whether it is what was asked for."""
        self.sent_at = sent_at
        if kind != self.kind or nbytes != self.nbytes:
            self.error = describe(kind, nbytes)
        return self.error is None


def describe(kind: int, nbytes: int) -> str:
    """A tensor's size in words, such as `3 float32 values`."""
    dtype = DTYPES[kind]
    number = nbytes // dtype.itemsize
    return f"{number} {str(dtype)[6:]} value{'s' * (number != 1)}"


class GlooTransport:
    """Messages over sockets, by torch.distributed's gloo.

    gloo ends the process if more bytes come than were asked for, and tells only who waits when a
    message is done. So the sender announces a message by a letter, and the receiver accepts it by
    another one when it has asked gloo for it; to wait for gloo is safe then.
    """

    LETTER = struct.Struct("<qqq")

    def __init__(self, mail: Mail):
        self.mail = mail
        self.lock = threading.Lock()
        self.announced: dict[tuple[int, int], deque[GlooSend]] = {}  # and not accepted yet
        self.asked: dict[tuple[int, int], deque[GlooRecv]] = {}  # and not announced yet
        self.seen = 0  # letters that had come when these were last looked through

    def send(self, data: Tensor, dst: int, number: int) -> GlooSend:
        end = GlooSend(self, data, dst, number)
        with self.lock:
            self.announced.setdefault((dst, number), deque()).append(end)
        self.mail.post(dst, number, self.LETTER.pack(end.kind, end.nbytes, time.perf_counter_ns()))
        end.work = dist.isend(end.bytes(), dst, tag=number % 2**31)
        return end

    def recv(self, data: Tensor, src: int, number: int) -> GlooRecv:
        end = GlooRecv(self, data, src, number)
        with self.lock:
            self.asked.setdefault((src, number), deque()).append(end)
            self.seen = -1
        self.progress()
        return end

    def progress(self) -> None:
        """Accept what has been announced and asked for; note what others have accepted."""
        self.mail.read()
        if self.seen == self.mail.came or not self.lock.acquire(blocking=False):
            return
        try:
            self.seen = self.mail.came
            for key in list(self.asked):
                ends = self.asked[key]
                while ends and ends[0].begin():  # the first letter is for the first who asked
                    ends.popleft()
                if not ends:
                    del self.asked[key]
            for dst, number in list(self.announced):
                ends = self.announced[dst, number]
                while self.mail.take(dst, ~number) is not None:
                    ends.popleft().begun = True
                if not ends:
                    del self.announced[dst, number]
        finally:
            self.lock.release()


class GlooEnd(End):
    """One end of a message over gloo."""

    def __init__(self, transport: GlooTransport, data: Tensor, peer: int, number: int):
        super().__init__(data)
        self.transport, self.peer, self.number = transport, peer, number
        self.work: dist.Work | None = None
        self.waiter: threading.Thread | None = None

    def bytes(self) -> Tensor:
        """What gloo is to send or to fill; an empty message has one byte all the same."""
        return super().bytes() if self.nbytes else torch.zeros(1, dtype=torch.uint8)

    def is_completed(self) -> bool:
        """Whether it is done, after `progress`."""
        if self.begun and not self.done and self.error is None and self.waiter is None:
            self.waiter = threading.Thread(target=self.finish, daemon=True)
            self.waiter.start()
        return self.done

    def finish(self) -> None:
        self.work.wait()
        self.done = True

    def wait_in(self, lane: Lane, doing: int) -> None:
        lane.wait(lambda: self.begun, doing, self.peer, self.kind, self.nbytes)
        finish = self.finish if self.waiter is None else self.waiter.join
        lane.wait_blocking(finish, Doing.NOTHING)


class GlooSend(GlooEnd):
    """The sending end."""


class GlooRecv(GlooEnd):
    """The receiving end."""

    def begin(self) -> bool:
        """Receive if the message has been announced, and is what was asked for."""
        mail, number = self.transport.mail, self.number
        letter = mail.take(self.peer, number)
        if letter is None:
            return False
        if self.matches(*GlooTransport.LETTER.unpack(letter)):
            self.work = dist.irecv(self.bytes(), self.peer, tag=number % 2**31)
            mail.post(self.peer, ~number, b"")
        self.begun = True
        return True
