"""What a rank that is a process has under way: messages, and functions in its background."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from .control import Doing
from .nccl import OnStream
from .process import Lane
from .transports import describe
from .work import Work


class SendWork(Work):
    """A message on its way out."""

    def __init__(self, lane: Lane, tensor: Tensor, dst: int, number: int):
        self.process, self.lane = lane.process, lane
        data = tensor.detach().contiguous()
        self.end = self.process.transport.send(data, dst, number)
        self.due = self.process.passes("out", time.perf_counter_ns(), self.end.nbytes)

    def is_completed(self) -> bool:
        self.process.transport.progress()
        return self.end.is_completed() and time.perf_counter_ns() >= self.due

    def _wait(self) -> None:
        if not self.end.done:
            self.end.wait_in(self.lane, Doing.SEND)
        self.lane.sleep_until(self.due)


class RecvWork(Work):
    """A message on its way in."""

    def __init__(self, lane: Lane, tensor: Tensor, src: int, number: int):
        self.process, self.lane, self.src = lane.process, lane, src
        self.target = data = tensor.detach()
        if not data.is_contiguous():
            data = torch.empty_like(data, memory_format=torch.contiguous_format)
        self.asked_at = time.perf_counter_ns()
        self.end = self.process.transport.recv(data, src, number)
        self.taken, self._due = False, None

    def is_completed(self) -> bool:
        self.process.transport.progress()
        self.check()
        if self.end.is_completed() and time.perf_counter_ns() >= self.due():
            self.take()
        return self.taken

    def _wait(self) -> None:
        end = self.end
        if not end.done:
            self.lane.wait(lambda: end.begun, Doing.RECEIVE, self.src, end.kind, end.nbytes)
            self.check()
            if not end.done:
                end.wait_in(self.lane, Doing.NOTHING)
        self.lane.sleep_until(self.due())
        self.take()

    @property
    def start(self) -> int:
        """When both ends were there (ns): known once it has begun."""
        return max(self.end.sent_at, self.asked_at)

    def due(self) -> float:
        """When the wire has let the message pass (ns): known once it has begun."""
        if self._due is None:
            self._due = self.process.passes("in", self.start, self.end.nbytes)
        return self._due

    def check(self) -> None:
        """Raise ValueError if what comes is not what was asked for."""
        end = self.end
        if end.error is not None:
            raise ValueError(
                f"rank {self.src} sends {end.error} to rank {self.process.rank}, which receives "
                f"{describe(end.kind, end.nbytes)}; make the two equal"
            )

    def take(self) -> None:
        """Put what has come where it was asked for, once."""
        if not self.taken:
            self.taken = True
            if not self.target.is_contiguous():
                self.target.copy_(self.end.data)
            self.process.note_message(self.src, self.start, self.end.nbytes)


class Launched(Work):
    """A function that runs in the background; on a GPU what follows `wait` is after it, too."""

    def __init__(self, lane: Lane, future: Future, function: Callable):
        self.lane, self.future, self.function = lane, future, function

    def is_completed(self) -> bool:
        return self.future.done()

    def _wait(self):
        result = self.lane.wait_blocking(self.future.result, Doing.LAUNCHED)
        if isinstance(self.function, OnStream):
            self.function.join()
        return result
