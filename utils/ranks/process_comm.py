"""The handle of a rank that is a process, and what it stands on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .comm import OTHER_HANDLE, Comm, words_of
from .control import Board, Doing, State
from .mail import Mail, number_of, shorten
from .nccl import OnStream
from .process_work import Launched, RecvWork, SendWork
from .segment import wait_until
from .transports import End
from .work import Work

if TYPE_CHECKING:
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
        self.patience = (process.spins, 2000) if number == 0 else (10, 50)

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

    def __init__(self, rank: int, ranks: int, mail: Mail, transport, spins: int):
        self.rank, self.ranks = rank, ranks
        self.mail, self.transport = mail, transport
        self.spins = spins
        self.wire: Wire | None = None
        self.lanes: list[Lane] = []
        self.pool: ThreadPoolExecutor | None = None
        self.stream: torch.cuda.Stream | None = None  # of what is launched, on a GPU
        self.start = time.perf_counter()
        self.messages: list[tuple] | None = []
        self.failed: Callable[[BaseException], None] = lambda error: None

    def passes(self, way: str, start: int, end: End) -> float:
        """When a message has passed the wire (ns); without a limit it starts and has passed."""
        return start if self.wire is None else self.wire.book(way, start, end.nbytes)

    def note_message(self, src: int, end: End, asked_at: int) -> None:
        if self.messages is not None:
            start = max(asked_at, end.sent_at) * NANO
            self.messages.append((src, self.rank, start, time.perf_counter(), end.nbytes))

    def launch(self, comm: ProcessComm, function: Callable, args: tuple) -> Future:
        """Run a function in the background, with the handle that it gets."""
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, "background", setattr, (here, "lane", 1))
        return self.pool.submit(self.run_launched, comm, function, args)

    def run_launched(self, comm: ProcessComm, function: Callable, args: tuple):
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


class ProcessComm(Comm):
    """The handle of a rank that is a process."""

    def __init__(self, process: Process, lane: Lane, rank, ranks, device, channel=()):
        super().__init__(rank, ranks, device, channel)
        self._process, self._lane = process, lane
        self._whole = self.ranks == tuple(range(process.ranks))
        self.shared_all_reduce = lane.all_reduce if self._whole else None
        self._numbers: dict = {}

    def _number(self, key) -> int:
        """A number for a key, equal on every rank, remembered."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = number_of((self._channel, key))
        return number

    def _check_owner(self) -> None:
        """A handle belongs to the program, or to the launched function that was given it."""
        if getattr(here, "lane", 0) != self._lane.number:
            raise RuntimeError(OTHER_HANDLE)

    def _post_send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self._check_owner()
        return SendWork(self, tensor, dst, self._number(tag))

    def _post_recv(self, tensor: Tensor, src: int, tag: int) -> Work:
        self._check_owner()
        return RecvWork(self, tensor, src, self._number(tag))

    def _wait_any(self, works: list[RecvWork]) -> int:
        come: list[int] = []

        def look() -> bool:
            come[:] = [i for i, work in enumerate(works) if work.end.begun]
            return bool(come)

        peer = works[0].src if len(works) == 1 else -1
        self._lane.wait(look, Doing.RECEIVE, peer)
        come.sort(key=lambda i: works[i].start)  # in this order they take the wire
        return min(come, key=lambda i: works[i].due())

    def time(self) -> float:
        return time.perf_counter() - self._process.start

    def _meet(self, description: tuple) -> dict[int, tuple | str]:
        self._check_owner()
        if self._whole and self._meet_on_board(description):
            return {}
        return self._meet_by_mail(description)

    def _meet_on_board(self, description: tuple) -> bool:
        """Meet where the whole world meets; whether all said the same."""
        board, state = self._lane.board, self._lane.state
        number = self._number(description)
        board.say(number)

        def ready() -> bool:
            missing = board.missing()
            state.words[2] = missing or 0  # for the parent, if this lasts
            return missing is None

        self._lane.wait(ready, Doing.MEET)
        return board.all_said(number)

    def _meet_by_mail(self, description: tuple) -> dict[int, tuple | str]:
        """Tell each rank of the group what this one is about to do, and hear what they are."""
        process, about = self._process, self._number("meeting") + self._calls
        mine = shorten(words_of(description).encode())
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank in others:
            process.mail.post(self.ranks[rank], about, mine)
        said = {self.rank: description}
        for rank in others:
            member = self.ranks[rank]
            letters: list[bytes] = []

            def come(member=member, letters=letters) -> bool:
                letter = process.mail.take(member, about)
                letters.extend([] if letter is None else [letter])
                return letter is not None

            self._lane.wait(come, Doing.MEET, member)
            same = letters[0] == mine
            said[rank] = description if same else letters[0].decode(errors="replace")
        return said if any(other != description for other in said.values()) else {}

    def _launch(self, channel, function: Callable, args: tuple) -> Work:
        self._check_owner()
        process = self._process
        own = type(self)(process, process.lanes[1], self.rank, self.ranks, self.device, channel)
        if self.device.type == "cuda":
            process.stream = process.stream or torch.cuda.Stream()
            function = OnStream(function, process.stream)
        return Launched(self._lane, process.launch(own, function, args), function)

    def _sub_comm(self, rank: int, ranks, channel) -> Comm:
        return type(self)(self._process, self._lane, rank, ranks, self.device, channel)
