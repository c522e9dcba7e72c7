"""The scheduler of virtual ranks: threads of which exactly one runs at a time.

A rank runs until it has to wait. Then whatever comes first in simulated time goes on: a message
that both sides have posted, or the rank with the earliest clock. So a run is deterministic, the
messages of all ranks queue for the wires in the order of their times, and a deadlock is known at
once: nothing is left that could go on.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..vgpu import Machine, VirtualGPUMode, dispatch, private, state
from ..vgpu.machine import Device, Host
from .comm import Work
from .errors import Aborted, DeadlockError, describe_stack, failure


class Rank:
    """What one rank has of its own besides its threads: random numbers and what it printed."""

    def __init__(self, number: int, node: str, visible: Sequence[Device]):
        self.number = number
        self.node = node
        self.visible = visible  # the devices of its own machine
        self.random_state: Tensor | None = None
        self.prints: list[str] = []
        self.value = None
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
        self.blocked = False
        self.since = self.order = 0  # the clock when it began to wait; its place in the queue
        self.idle = idle  # waits for launched functions, and may wait for ever
        self.why: Callable[[], str] | str = ""
        self.current = scheduler.machine.devices[rank.number].number
        self.in_optimizer, self.latest = False, self.host
        self.thread: threading.Thread | None = None

    def start(self, body: Callable[[], None]) -> None:
        self.thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self.thread.start()

    def _run(self, body: Callable[[], None]) -> None:
        self.turn.acquire()
        scheduler = self.scheduler
        try:
            with VirtualGPUMode():
                if scheduler.error is None:
                    body()
        except Aborted:
            pass
        except BaseException as error:
            scheduler.fail(failure(self.rank.number, error), error)
        self.blocked = False
        scheduler.fibers.remove(self)
        scheduler.hand_over(self, ended=True)


class Scheduler:
    """Decides who runs: the earliest in simulated time, one at a time."""

    def __init__(self, machine: Machine, ranks: Sequence[Rank]):
        self.machine = machine
        machine.before_copy = self.let_others_catch_up
        self.ranks = ranks
        self.fibers: set[Fiber] = set()
        self.ready: list[tuple[int, int, Fiber]] = []
        self.transfers: list[tuple[int, int, int, Message, Message]] = []
        self.posted: dict[tuple, deque[Message]] = {}
        self.lanes: dict = {}  # the background of each rank that has launched something
        self.closing = False
        self.meetings: dict = {}  # collective calls to which not all ranks have come yet
        self.order = 0
        self.current: Fiber | None = None
        self.drawing: Rank | None = None  # whose random state the generator holds
        self.error: BaseException | None = None
        self.cause: BaseException | None = None
        self.finished = threading.Event()

    def add(self, fiber: Fiber, body: Callable[[], None]) -> None:
        self.fibers.add(fiber)
        self.wake(fiber)
        fiber.start(body)

    def wake(self, fiber: Fiber) -> None:
        """Let a fiber go on when its time comes."""
        fiber.blocked = False
        self.order += 1
        fiber.order = self.order
        heapq.heappush(self.ready, (fiber.host.clock, self.order, fiber))

    def arrive(self, fiber: Fiber, time: int) -> None:
        """Let a fiber that waits go on at a time, or before, if another message comes before."""
        time = max(time, fiber.since)
        if fiber.blocked or time < fiber.host.clock:
            fiber.host.clock = time
            self.wake(fiber)

    def block(self, why: Callable[[], str] | str, until: int | None = None) -> None:
        """The running fiber waits until it is woken, at the latest at the time `until`.

        Raises if the run has failed meanwhile.
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
        if (self.ready and self.ready[0][0] < clock) or (
            self.transfers and self.transfers[0][0] < clock
        ):
            self.wake(self.current)
            self.hand_over(self.current)
            if self.error is not None:
                raise Aborted

    def hand_over(self, fiber: Fiber | None, ended: bool = False) -> None:
        """Let the next one run, and wait for the next turn unless the fiber has ended."""
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
        self.current = successor
        self.machine.host = successor.host
        state.current, state.in_optimizer = successor.current, successor.in_optimizer
        state.visible = successor.rank.visible
        state.latest = successor.latest
        successor.turn.release()
        if fiber is not None and not ended:
            fiber.turn.acquire()

    def next(self) -> Fiber | None:
        """Carry out the messages that come first; the fiber whose turn it is, if any."""
        ready, transfers = self.ready, self.transfers
        while ready or transfers:
            if transfers and (not ready or transfers[0][0] <= ready[0][0]):
                *_, send, recv = heapq.heappop(transfers)
                self.deliver(send, recv)
            else:
                _, order, fiber = heapq.heappop(ready)
                if order == fiber.order:  # it has not been called to an earlier time meanwhile
                    return fiber
        return None

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
        for fiber in self.fibers:
            if fiber.blocked:
                self.wake(fiber)

    def deadlock(self) -> DeadlockError:
        """Who waits for whom, for what, at which line."""
        waiting = sorted(
            (fiber for fiber in self.fibers if not fiber.idle),
            key=lambda fiber: (fiber.rank.number, fiber.host.rows),
        )
        lines = []
        for fiber in waiting:
            why = fiber.why() if callable(fiber.why) else fiber.why
            where = describe_stack(fiber.thread.ident)
            lines.append(f"  rank {fiber.rank.number} {why}{where}")
        return DeadlockError(
            "deadlock: every rank that has not ended waits, and nothing can go on\n"
            + "\n".join(lines)
        )

    def ended(self, rank: int) -> str:
        return ", which has ended" if self.ranks[rank].ended else ""

    # Messages

    def post(self, message: Message, opposite: tuple) -> None:
        """Pair a message's end with the other end, if that has been posted."""
        waiting = self.posted.get(opposite)
        if not waiting:
            self.posted.setdefault(message.key, deque()).append(message)
            return
        other = waiting.popleft()
        if not waiting:
            del self.posted[opposite]
        send, recv = (message, other) if message.sends else (other, message)
        time = max(send.time, recv.time)
        if send.span is not None and send.span.ready > time:
            time = send.span.ready
        self.order += 1
        heapq.heappush(self.transfers, (time, send.turn, self.order, send, recv))

    def deliver(self, send: Message, recv: Message) -> None:
        """Carry out a message: its bytes, its time on the wires, and wake who waits for it."""
        source, target = send.tensor, recv.tensor
        if source.numel() != target.numel() or source.dtype != target.dtype:
            error = ValueError(
                f"rank {send.rank} sends {words(source)} to rank {recv.rank}, which receives "
                f"{words(target)}; make the two equal"
            )
            self.fail(error)
            return
        start = max(send.time, recv.time)
        end = self.machine.transfer(
            "message", source.nbytes, send.place, recv.place, send.span, recv.span, start
        )
        if recv.holds_data:
            private.copy_bytes(source, target)
        for message in (send, recv):
            message.done, message.end = True, end
            if message.waiter is not None:
                fiber, message.waiter = message.waiter, None
                self.arrive(fiber, end)

    # Random numbers

    def claim_random_state(self) -> None:
        """Let the generator hold the state of the rank that runs, as in a process of its own."""
        rank = self.current.rank
        if rank is self.drawing:
            return
        if self.drawing is not None:
            self.drawing.random_state = torch.default_generator.get_state()
        self.drawing = rank
        if rank.random_state is None:
            torch.default_generator.manual_seed(rank.number)
        else:
            torch.default_generator.set_state(rank.random_state)


def words(tensor: Tensor) -> str:
    """A tensor's size in words, such as `3 float32 values`."""
    return f"{tensor.numel()} {str(tensor.dtype)[6:]} value{'s' * (tensor.numel() != 1)}"


class Message(Work):
    """One end of a message."""

    __slots__ = ("scheduler", "tensor", "rank", "peer", "key", "sends", "time", "turn", "place",
                 "span", "done", "end", "waiter", "holds_data")  # fmt: skip

    def __init__(
        self, scheduler: Scheduler, tensor: Tensor, rank: int, peer: int, key, sends: bool
    ):
        self.scheduler = scheduler
        self.tensor = tensor
        self.rank, self.peer, self.sends = rank, peer, sends
        self.key = (sends, rank, peer, key)
        self.place = dispatch.place_of(tensor)
        self.span = dispatch.span_of(tensor)
        self.holds_data = type(tensor).__name__ != "FakeTensor"
        host = scheduler.machine.host
        host.clock += self.place.launch
        self.time = host.clock
        # Of messages posted at one time, every rank's first goes before anyone's second.
        self.turn = scheduler.ranks[rank].sent
        scheduler.ranks[rank].sent += sends
        self.done, self.end = False, 0
        self.waiter: Fiber | None = None
        scheduler.post(self, (not sends, peer, rank, key))

    def is_completed(self) -> bool:
        return self.done

    def _wait(self) -> None:
        scheduler = self.scheduler
        if not self.done:
            self.waiter = scheduler.current
            scheduler.block(self.describe)
        elif self.end > scheduler.machine.host.clock:
            scheduler.machine.host.clock = self.end

    def describe(self) -> str:
        verb = "send {} to" if self.sends else "receive {} from"
        ended = self.scheduler.ended(self.peer)
        return f"waits to {verb.format(words(self.tensor))} rank {self.peer}{ended}"
