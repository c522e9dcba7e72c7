"""The scheduler of virtual ranks: threads of which exactly one runs at a time.

A rank runs until it has to wait. Then whatever comes first in simulated time goes on: a message
that both sides have posted, or the rank with the earliest clock. So a run is deterministic, the
messages of all ranks queue for the wires in the order of their times, and a deadlock is known at
once: nothing is left that could go on.
"""

from __future__ import annotations

import ctypes
import heapq
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..vgpu import Machine, VirtualGPUMode, state
from ..vgpu.machine import Device, Host
from .cores import stay_on_core
from .errors import Aborted, DeadlockError, describe_stack, failure, story

PATIENCE = 5  # seconds for the ranks of a failed run to end


class Rank:
    """What one rank has of its own besides its threads: what it printed and returned, and more."""

    def __init__(self, number: int, node: str, visible: Sequence[Device]):
        self.number = number
        self.node = node
        self.visible = visible  # the devices of its own machine
        self.random_state: Tensor | None = None
        self.default_dtype = torch.float32
        self.prints: list[str] = []
        self.value = b""
        self.ended = False
        self.end = 0
        self.sent = 0  # messages so far


class Fiber:
    """A thread of a rank with its own clock: its program, or what it launched."""

    def __init__(self, scheduler: Scheduler, rank: Rank, row: str, idle: bool = False):
        self.scheduler = scheduler
        self.rank = rank
        self.host = Host(scheduler.machine, rank.node, row)
        self.turn = threading.Lock()
        self.turn.acquire()
        self.blocked = self.ended = False
        self.since = self.order = 0  # the clock when it began to wait; its place in the queue
        self.missing = 0  # messages that it waits for; 0 if it waits for any one of several
        self.idle = idle  # waits for launched functions, and may wait for ever
        self.why: tuple | Callable[[], str] | str = ""  # messages, or words
        self.current = scheduler.machine.devices[rank.number].number
        self.in_optimizer, self.latest = False, self.host
        self.thread = threading.Thread(daemon=True, name=f"rank {rank.number}")

    def start(self, body: Callable[[], None]) -> None:
        self.thread.run = lambda: self._run(body)
        self.thread.start()

    def _run(self, body: Callable[[], None]) -> None:
        scheduler = self.scheduler
        if scheduler.core is not None:
            stay_on_core(scheduler.core)
        self.turn.acquire()
        try:
            with VirtualGPUMode():
                if scheduler.error is None:
                    body()
        except Aborted:
            pass
        except BaseException as error:
            scheduler.fail(failure(self.rank.number, story(error)), error)
        self.blocked, self.ended = False, True
        scheduler.fibers.discard(self)
        scheduler.hand_over(self, ended=True)

    def describe(self) -> str:
        """Who it is, what it waits for, and at which line."""
        if isinstance(self.why, tuple):
            waits = [message.describe() for message in self.why if not message.done]
            why = "waits to " + " and to ".join(waits)
        else:
            why = self.why() if callable(self.why) else self.why
        return f"  rank {self.rank.number} {why}{describe_stack(self.thread.ident)}"


class Queue:
    """Items by time, then turn; those with both equal in the order of arrival, which are many."""

    def __init__(self):
        self.keys: list[tuple[int, int]] = []  # a heap
        self.items: dict[tuple[int, int], deque] = {}

    def push(self, time: int, turn: int, item) -> None:
        key = (time, turn)
        items = self.items.get(key)
        if items is None:
            self.items[key] = deque((item,))
            heapq.heappush(self.keys, key)
        else:
            items.append(item)

    def pop(self):
        """The first item."""
        items = self.items[self.keys[0]]
        item = items.popleft()
        if not items:
            del self.items[heapq.heappop(self.keys)]
        return item


class Scheduler:
    """Decides who runs: the earliest in simulated time, one at a time."""

    def __init__(self, machine: Machine, ranks: Sequence[Rank]):
        self.machine = machine
        machine.before_copy = self.let_others_catch_up
        self.ranks = ranks
        self.fibers: set[Fiber] = set()
        self.threads: list[threading.Thread] = []
        self.ready = Queue()  # (order, fiber)
        self.transfers = Queue()  # (sending end, receiving end) of messages that both have posted
        self.posted: dict[tuple, list] = {}  # ends that wait for the other one, in order
        self.lanes: dict = {}  # the background of each rank that has launched something
        self.closing = False  # all programs have ended: the backgrounds may end too
        self.abandoned = False  # the run is over, though a rank would not end
        self.meetings: dict = {}  # collective calls to which not all ranks have come yet
        self.order = 0
        self.current: Fiber | None = None
        self.error: BaseException | None = None
        self.cause: BaseException | None = None
        self.finished = threading.Event()
        self.core: int | None = None  # where all threads stay, so that handing over is quick

    def add(self, fiber: Fiber, body: Callable[[], None]) -> None:
        self.fibers.add(fiber)
        self.threads.append(fiber.thread)
        self.wake(fiber)
        fiber.start(body)

    def wake(self, fiber: Fiber) -> None:
        """Let a fiber go on when its time comes."""
        if fiber.ended:  # of a failed run, while a message for it was on its way
            return
        fiber.blocked = False
        self.order += 1
        fiber.order = self.order
        self.ready.push(fiber.host.clock, 0, (self.order, fiber))

    def arrive(self, fiber: Fiber, time: int) -> None:
        """A message that a fiber waits for ends at a time (ps); it goes on if that was enough."""
        if fiber.missing:  # it waits for all of several, and so for the last one
            fiber.missing -= 1
            if time > fiber.host.clock:
                fiber.host.clock = time
            if not fiber.missing:
                self.wake(fiber)
            return
        time = max(time, fiber.since)  # it waits for the first one: this may come before others
        if fiber.blocked or time < fiber.host.clock:
            fiber.host.clock = time
            self.wake(fiber)

    def block(self, why, until: int | None = None) -> None:
        """The running fiber waits until it is woken, at the latest at the time `until`.

        `why` is the messages that it waits for, or words for an error message. Raises if the run
        has failed meanwhile.
        """
        fiber = self.current
        fiber.blocked, fiber.why, fiber.since = True, why, fiber.host.clock
        if until is not None:
            self.arrive(fiber, until)
        self.hand_over(fiber)
        if self.error is not None:
            raise Aborted

    def let_others_catch_up(self) -> None:
        """Before the running fiber takes wires: those with an earlier clock may want them first."""
        clock = self.machine.host.clock
        if any(keys and keys[0][0] < clock for keys in (self.ready.keys, self.transfers.keys)):
            self.wake(self.current)
            self.hand_over(self.current)
            if self.error is not None:
                raise Aborted

    def hand_over(self, fiber: Fiber | None, ended: bool = False) -> None:
        """Let the next one run, and wait for the next turn unless the fiber has ended."""
        if self.abandoned:
            return
        successor = self.next()
        if successor is None and self.fibers:
            self.stop_waiting()
            successor = self.next()
        if successor is None:
            self.finished.set()
            return
        if successor is fiber:
            return
        if fiber is not None:
            fiber.current, fiber.in_optimizer = state.current, state.in_optimizer
            fiber.latest = state.latest
            fiber.rank.default_dtype = torch.get_default_dtype()
        self.current = successor
        self.machine.host = successor.host
        state.current, state.in_optimizer = successor.current, successor.in_optimizer
        state.visible = successor.rank.visible
        state.latest = successor.latest
        if successor.rank.default_dtype is not torch.get_default_dtype():
            torch.set_default_dtype(successor.rank.default_dtype)
        successor.turn.release()
        if fiber is not None and not ended:
            fiber.turn.acquire()

    def next(self) -> Fiber | None:
        """Carry out the messages that come first; the fiber whose turn it is, if any."""
        ready, transfers = self.ready.keys, self.transfers.keys
        while ready or transfers:
            if transfers and (not ready or transfers[0][0] <= ready[0][0]):
                send, recv = self.transfers.pop()
                send.deliver(recv)
            else:
                order, fiber = self.ready.pop()
                if order == fiber.order:  # it has not been called to an earlier time meanwhile
                    return fiber
        return None

    # Ends, good and bad

    def stop_waiting(self) -> None:
        """Nothing can go on: all have ended, or it is a deadlock. Wake everyone to leave."""
        self.closing = all(fiber.idle for fiber in self.fibers)
        if self.error is None and not self.closing:
            self.error = self.deadlock()
        for fiber in sorted(self.fibers, key=lambda fiber: fiber.rank.number):
            self.wake(fiber)

    def fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        """End the run: the first error counts."""
        if self.error is None:
            self.error, self.cause = error, cause
        for fiber in list(self.fibers):
            if fiber.blocked:
                self.wake(fiber)

    def deadlock(self) -> DeadlockError:
        """Who waits for whom, for what, at which line."""
        waiting = sorted(
            (fiber for fiber in self.fibers if not fiber.idle),
            key=lambda fiber: (fiber.rank.number, fiber.host.rows),
        )
        return DeadlockError(
            "deadlock: every rank that has not ended waits, and nothing can go on\n"
            + "\n".join(fiber.describe() for fiber in waiting)
        )

    def name(self, rank: int) -> str:
        """A rank in an error message."""
        return f"rank {rank}" + (", which has ended" if self.ranks[rank].ended else "")

    def stop(self, error: BaseException) -> None:
        """End every rank from outside: those that wait are woken, the one that runs interrupted.

        A rank that stays in a call of C code, which nothing interrupts, is left behind; it ends as
        soon as it comes back from there.
        """
        self.error = self.error or error
        report, sys.unraisablehook = sys.unraisablehook, lambda _: None  # Aborted in a finalizer
        try:
            self._interrupt()
        finally:
            sys.unraisablehook = report
        self.abandoned = True

    def _interrupt(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.finished.wait(0.05) and time.monotonic() < deadline:
            fiber = self.current
            if fiber is None:
                self.hand_over(None)
            elif not fiber.thread.is_alive():  # it fell between two of our own lines
                fiber.ended = True
                self.fibers.discard(fiber)
                self.hand_over(None)
            else:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(fiber.thread.ident), ctypes.py_object(Aborted)
                )
