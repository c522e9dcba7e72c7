"""Virtual ranks: one program on many ranks in simulated time, on virtual GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import vgpu
from ..hardware import Server
from ..timeline import Timeline
from ..vgpu import dispatch, private, state
from .comm import Comm, Work
from .errors import Aborted, RankError, describe_stack
from .packing import pack, unpack
from .result import Result
from .scheduler import Fiber, Message, Rank, Scheduler


class Meeting:
    """What the ranks of a group said when they came to a collective call; takes no time."""

    def __init__(self, comm: VirtualComm):
        self.comm = comm
        self.said: dict[int, tuple] = {}
        self.waiting: list[Fiber] = []


class VirtualComm(Comm):
    """A virtual rank's handle."""

    def __init__(self, scheduler: Scheduler, rank: int, ranks, device, channel=()):
        super().__init__(rank, ranks, device, channel)
        self._scheduler = scheduler
        self._number = self.ranks[rank]

    def _post_send(self, tensor: Tensor, dst: int, key) -> Work:
        return Message(self._scheduler, tensor, self._number, dst, key, sends=True)

    def _post_recv(self, tensor: Tensor, src: int, key) -> Work:
        return Message(self._scheduler, tensor, self._number, src, key, sends=False)

    def _wait_any(self, works: list[Work]) -> int:
        scheduler, clock = self._scheduler, self._scheduler.machine.host.clock
        ends = [work.end for work in works if work.done]
        if not ends or min(ends) > clock:
            under_way = [work for work in works if not work.done]
            for work in under_way:
                work.waiter = scheduler.current

            def why() -> str:
                peers = [f"{work.peer}{scheduler.ended(work.peer)}" for work in under_way]
                return f"waits for the first message from any of ranks {'; '.join(peers)}"

            scheduler.block(why, min(ends, default=None))
            for work in under_way:
                work.waiter = None
        done = [position for position, work in enumerate(works) if work.done]
        return min(done, key=lambda position: works[position].end)

    def time(self) -> float:
        return self._scheduler.machine.host.clock / vgpu.machine.PICOSECONDS

    def _meet(self, key, description: tuple) -> dict[int, tuple]:
        scheduler = self._scheduler
        meeting = scheduler.meetings.setdefault(key, Meeting(self))
        meeting.said[self.rank] = description
        if len(meeting.said) < self.world_size:
            meeting.waiting.append(scheduler.current)

            def why() -> str:
                missing = [rank for rank in range(self.world_size) if rank not in meeting.said]
                which = ", ".join(f"{r}{scheduler.ended(self.ranks[r])}" for r in missing)
                return f"waits in {description[0]} for rank{'s' * (len(missing) > 1)} {which}"

            scheduler.block(why)
        else:
            del scheduler.meetings[key]
            for fiber in meeting.waiting:
                scheduler.wake(fiber)
        return meeting.said

    def _launch(self, function: Callable, args: tuple) -> Work:
        lanes = self._scheduler.lanes
        if self._number not in lanes:
            lanes[self._number] = Lane(self._scheduler, self._number)
        return lanes[self._number].launch(self, function, args)

    def _sub_comm(self, rank: int, ranks, channel) -> Comm:
        return VirtualComm(self._scheduler, rank, ranks, self.device, channel)


class Job(Work):
    """A launched function: under way until its lane has run it."""

    def __init__(self, scheduler: Scheduler, comm: Comm, function: Callable, args: tuple):
        self.scheduler, self.comm, self.function, self.args = scheduler, comm, function, args
        self.time = scheduler.machine.host.clock
        self.done, self.end, self.result = False, 0, None
        self.waiter: Fiber | None = None

    def is_completed(self) -> bool:
        return self.done

    def _wait(self):
        scheduler = self.scheduler
        if not self.done:
            self.waiter = scheduler.current
            name = getattr(self.function, "__name__", "a function")
            scheduler.block(f"waits for {name}, which it launched")
        scheduler.machine.advance_host(self.end)
        return self.result


class Lane:
    """The background of a rank: runs what was launched, one function after the other."""

    def __init__(self, scheduler: Scheduler, number: int):
        self.scheduler = scheduler
        self.jobs: deque[Job] = deque()
        self.count = 0
        rank = scheduler.ranks[number]
        self.fiber = Fiber(scheduler, rank, f"background {number}", idle=True)
        scheduler.add(self.fiber, self.serve)

    def launch(self, comm: VirtualComm, function: Callable, args: tuple) -> Job:
        self.count += 1
        channel = (*comm._channel, "launch", self.count)
        own = VirtualComm(self.scheduler, comm.rank, comm.ranks, comm.device, channel)
        job = Job(self.scheduler, own, function, args)
        self.jobs.append(job)
        if self.fiber.blocked and self.fiber.idle:
            self.fiber.host.clock = max(self.fiber.host.clock, job.time)
            self.scheduler.wake(self.fiber)
            self.fiber.idle = False
        return job

    def serve(self) -> None:
        """Run jobs until the run ends."""
        scheduler, fiber = self.scheduler, self.fiber
        while True:
            while self.jobs:
                fiber.idle = False
                job = self.jobs.popleft()
                fiber.host.clock = max(fiber.host.clock, job.time)
                job.result = job.function(job.comm, *job.args)
                scheduler.machine.synchronize([scheduler.machine.devices[fiber.rank.number]])
                job.done, job.end = True, fiber.host.clock
                if job.waiter is not None:
                    waiter, job.waiter = job.waiter, None
                    waiter.host.clock = max(waiter.host.clock, job.end)
                    scheduler.wake(waiter)
            fiber.idle = True
            scheduler.block("has nothing launched to do")
            if scheduler.closing:
                return


class RankOutput:
    """Stands for `sys.stdout` during a run: each rank's prints go to that rank's list."""

    def __init__(self, scheduler: Scheduler, original):
        self.scheduler, self.original = scheduler, original

    def write(self, text: str) -> int:
        fiber = self.scheduler.current
        if fiber is None or threading.current_thread() is not fiber.thread:
            return self.original.write(text)
        fiber.rank.prints.append(text)
        return len(text)

    def flush(self) -> None:
        self.original.flush()

    def __getattr__(self, name):
        return getattr(self.original, name)


def run_virtual(program: Callable, args: tuple, ranks: int, server: Server, name: str,
                timeout: float | None, record: bool) -> Result:  # fmt: skip
    """Run a program on virtual ranks; see `run`."""
    payload = pack((program, args), f"{getattr(program, '__name__', program)} or its arguments")
    hosts = [node_of_host(server, rank) for rank in range(ranks)]
    with simulated_server(server, hosts) as (machine, visible):
        scheduler = Scheduler(machine, [Rank(r, hosts[r], visible[r]) for r in range(ranks)])
        for number, rank in enumerate(scheduler.ranks):
            device = machine.devices[number].torch_device
            comm = VirtualComm(scheduler, number, range(ranks), device)
            fiber = Fiber(scheduler, rank, f"host{number}")
            scheduler.add(fiber, lambda rank=rank, comm=comm: play(scheduler, rank, comm, payload))
        recording = vgpu.Recording(machine)
        random_state = torch.get_rng_state()
        output, sys.stdout = sys.stdout, RankOutput(scheduler, sys.stdout)
        state.before_random = scheduler.claim_random_state
        try:
            with recording if record else contextlib.nullcontext():
                begin_and_wait(scheduler, timeout)
                machine.host.clock = max(
                    [rank.end for rank in scheduler.ranks]
                    + [device.end for device in machine.devices]
                )
        finally:
            sys.stdout, state.before_random = output, None
            torch.set_rng_state(random_state)
        if scheduler.error is not None:
            raise scheduler.error from scheduler.cause
        values = [to_host(rank.value) for rank in scheduler.ranks]
    timeline = Timeline(
        recording.events if record else [],
        [f"gpu{number}" for number in range(ranks)],
        True,
        name,
        [dict(device.ledger.peak_by_kind) for device in machine.devices],
        machine.host.clock / vgpu.machine.PICOSECONDS,
    )
    return Result(values, timeline, ["".join(rank.prints) for rank in scheduler.ranks])


def play(scheduler: Scheduler, rank, comm: Comm, payload: bytes) -> None:
    """A rank's life: its own copy of the program, as in a process of its own."""
    program, args = unpack(payload)
    rank.value = program(comm, *args)
    device = scheduler.machine.devices[rank.number]
    scheduler.machine.synchronize([device])
    rank.end = scheduler.machine.host.clock
    rank.ended = True


def begin_and_wait(scheduler: Scheduler, timeout: float | None) -> None:
    """Let the first rank run, and wait until all have ended; ends them on time-out or interrupt."""
    scheduler.hand_over(None)
    try:
        if not scheduler.finished.wait(timeout):
            thread = scheduler.current.thread
            error = RankError(
                f"the run did not end within {timeout:g} s; rank {scheduler.current.rank.number} "
                f"is still running{describe_stack(thread.ident)}"
            )
            stop(scheduler, error)
    except KeyboardInterrupt:
        stop(scheduler, KeyboardInterrupt("the run was interrupted; all its ranks have ended"))


def stop(scheduler: Scheduler, error: BaseException) -> None:
    """End every rank: those that wait are woken, the one that runs is interrupted."""
    scheduler.error = error
    for _ in range(100):
        fiber = scheduler.current
        if scheduler.finished.is_set():
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(fiber.thread.ident), ctypes.py_object(Aborted)
        )
        if scheduler.finished.wait(0.05):
            return


@contextlib.contextmanager
def simulated_server(server: Server, hosts: Sequence[str]):
    """Put a fresh simulated machine in the place of the current cluster for the time of a run.

    Yields it, and for each rank the devices that it sees: those of its own machine.
    """
    groups: dict[tuple, list[int]] = {}
    for rank, host in enumerate(hosts):
        seen = hosts[:rank].count(host) if len(set(hosts)) > 1 else rank
        groups.setdefault((host, seen // vgpu.MOST_DEVICES), []).append(rank)
    numbers = {rank: number for group in groups.values() for number, rank in enumerate(group)}
    before = state.machine, state.visible, state.current, state.latest
    try:
        machine = vgpu.start(server, [numbers[rank] for rank in range(len(hosts))])
        visible = {
            rank: [machine.devices[member] for member in group]
            for group in groups.values()
            for rank in group
        }
        yield machine, visible
    finally:
        state.machine, state.visible, state.current, state.latest = before


def node_of_host(server: Server, rank: int) -> str:
    """The host processor nearest to a GPU: that of its own machine."""
    hosts = [node for node in server.neighbours if node.startswith("cpu")]
    return min(hosts, key=lambda node: (len(server.route(f"gpu{rank}", node)), hosts.index(node)))


def to_host(value):
    """The values with their tensors as plain CPU tensors, as they come back from a process."""

    def plain(tensor: Tensor) -> Tensor:
        with private.no_dispatch(), torch.no_grad():
            return tensor.detach().clone() if dispatch.block_of(tensor) is not None else tensor

    return tree_map_only(Tensor, plain, value)
