"""A process that is a rank, and how each of its threads waits."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from .comm import Comm
from .control import Board, Doing, State
from .mail import Mail
from .segment import wait_until
from .shared import SharedAllReduce
from .wire import Wire

NANO = 1e-9
NAP = 5e-3  # seconds for which a rank that sleeps leaves its other messages alone
here = threading.local()  # `lane`: the lane that this thread is; the program's is 0


class Lane:
    """What a thread of a rank waits with: lane 0 is its program, lane 1 its background."""

    def __init__(self, process: Process, number: int, state: State, board: Board,
                 all_reduce: SharedAllReduce):  # fmt: skip
        self.process, self.number = process, number
        self.state, self.board, self.all_reduce = state, board, all_reduce
        self.waits: list[tuple[float, float]] | None = [] if number == 0 else None
        self.patience = process.patience if number == 0 else (10, 50)

    def wait(self, ready: Callable[[], bool], doing: int, peer=0, kind=0, nbytes=0) -> None:
        """Wait, so that it is known outside what for; the program does not compute then.

        Meanwhile all messages of this rank go on.
        """
        progress, mail = self.process.transport.progress, self.process.mail

        def look() -> bool:
            progress()
            if mail.overflow:
                mail.flush()
            return ready()

        if not look():
            with self.waiting(doing, peer, kind, nbytes):
                wait_until(look, *self.patience)

    def wait_blocking(self, finish: Callable, doing: int):
        """The same with a function that returns when the wait is over."""
        with self.waiting(doing):
            return finish()

    def sleep_until(self, due: float) -> None:
        """Sleep until a time (ns): a limited wire has not let a message pass yet."""
        if time.perf_counter_ns() >= due:
            return
        with self.waiting(Doing.NOTHING):
            while (left := due - time.perf_counter_ns()) > 0:
                self.process.transport.progress()
                time.sleep(min(left * NANO, NAP))

    def wait_for_others(self, ready: Callable[[], bool]) -> None:
        self.wait(ready, Doing.MEET, -1)

    @contextlib.contextmanager
    def waiting(self, doing: int, peer=0, kind=0, nbytes=0) -> Iterator[None]:
        start = time.perf_counter()
        self.state.set(doing, peer, kind, nbytes)
        try:
            yield
        finally:
            self.state.clear()
            if self.waits is not None:
                self.waits.append((start, time.perf_counter()))


class Process:
    """A process that is a rank: what it shares with the others, its background, its record."""

    def __init__(self, rank: int, ranks: int, mail: Mail, transport, patience: tuple[int, int]):
        self.rank, self.ranks = rank, ranks
        self.mail, self.transport = mail, transport
        self.patience = patience
        self.wire: Wire | None = None
        self.lanes: list[Lane] = []
        self.pool: ThreadPoolExecutor | None = None
        self.stream: torch.cuda.Stream | None = None  # of what is launched, on a GPU
        self.start = time.perf_counter()
        self.messages: list[tuple] | None = []
        self.failed: Callable[[BaseException], None] = lambda error: None

    def passes(self, way: str, start: int, nbytes: int) -> float:
        """When a message has passed the wire (ns); without a limit it starts and has passed."""
        return start if self.wire is None else self.wire.book(way, start, nbytes)

    def note_message(self, src: int, start: int, nbytes: int) -> None:
        """Enter a message that has come in the record; it could start at a time (ns)."""
        if self.messages is not None:
            times = start * NANO, time.perf_counter()
            self.messages.append((src, self.rank, *times, nbytes))

    def launch(self, comm: Comm, function: Callable, args: tuple) -> Future:
        """Run a function in the background, with the handle that it gets."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, "background", setattr, (here, "lane", 1))
        return self.pool.submit(self.run_launched, comm, function, args)

    def run_launched(self, comm: Comm, function: Callable, args: tuple):
        state = self.lanes[1].state
        state.clear()
        try:
            return function(comm, *args)
        except BaseException as error:
            self.failed(error)
            raise
        finally:
            state.set(Doing.IDLE)

    def finish(self) -> None:
        """Let the background end what was launched."""
        if self.pool is not None:
            self.lanes[0].wait_blocking(self.pool.shutdown, Doing.LAUNCHED)
