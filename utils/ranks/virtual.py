"""Virtual ranks: one program on many ranks in simulated time, on virtual GPUs."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import vgpu
from ..hardware import Server
from ..timeline import Timeline
from ..vgpu import state
from ..vgpu.machine import PICOSECONDS, Machine
from .background import Lane
from .comm import OTHER_HANDLE, Comm
from .cores import current_core, threads_of_a_rank
from .errors import RankError, describe_stack
from .messages import Message, wait_for, wait_for_any
from .packing import pack, unpack
from .result import Result
from .scheduler import Fiber, Rank, Scheduler
from .surroundings import own_surroundings
from .work import Work, check_gradients_arrived

alone = threading.Lock()  # there is one simulated machine at a time


class Meeting:
    """What the ranks of a group said when they came to a collective call; takes no time."""

    def __init__(self, comm: VirtualComm, first: tuple):
        self.comm, self.first = comm, first
        self.said: dict[int, tuple] = {}
        self.differ = False
        self.waiting: list[Fiber] = []

    def why(self) -> str:
        missing = [rank for rank in range(self.comm.world_size) if rank not in self.said]
        names = [self.comm._scheduler.name(self.comm.ranks[rank]) for rank in missing]
        return f"waits in {self.first[0]} for {'; '.join(names)}"


class VirtualComm(Comm):
    """A virtual rank's handle."""

    def __init__(self, fiber: Fiber, rank: int, ranks, device, channel=()):
        super().__init__(rank, ranks, device, channel)
        self._fiber = fiber
        self._scheduler = fiber.scheduler
        self._number = self.ranks[rank]

    def _check_owner(self) -> None:
        """A handle belongs to the program, or to the launched function that was given it."""
        if self._scheduler.current is not self._fiber:
            raise RuntimeError(OTHER_HANDLE)

    def _post_send(self, tensor: Tensor, dst: int, tag: int) -> Message:
        self._check_owner()
        key = (tag, self._channel)
        return Message(self._scheduler, tensor, self._number, dst, key, True)

    def _post_recv(self, tensor: Tensor, src: int, tag: int) -> Message:
        self._check_owner()
        key = (tag, self._channel)
        return Message(self._scheduler, tensor, self._number, src, key, False)

    def _wait_all(self, works: tuple[Message, ...]) -> None:
        wait_for(self._scheduler, works)

    def _wait_any(self, works: list[Message]) -> int:
        return wait_for_any(self._scheduler, works)

    def time(self) -> float:
        return self._fiber.host.clock / PICOSECONDS

    def _meet(self, description: tuple) -> dict[int, tuple]:
        self._check_owner()
        scheduler, key = self._scheduler, (self._channel, self._calls)
        meeting = scheduler.meetings.get(key)
        if meeting is None:
            meeting = scheduler.meetings[key] = Meeting(self, description)
        meeting.said[self.rank] = description
        meeting.differ |= description != meeting.first
        if len(meeting.said) < self.world_size:
            meeting.waiting.append(self._fiber)
            scheduler.block(meeting.why)
        else:
            del scheduler.meetings[key]
            for fiber in meeting.waiting:
                scheduler.wake(fiber)
        return meeting.said if meeting.differ else {}

    def _launch(self, channel, function: Callable, args: tuple) -> Work:
        self._check_owner()
        lanes = self._scheduler.lanes
        if self._number not in lanes:
            lanes[self._number] = Lane(self._scheduler, self._number)
        lane = lanes[self._number]
        own = VirtualComm(lane.fiber, self.rank, self.ranks, self.device, channel)
        return lane.launch(own, function, args)

    def _sub_comm(self, rank: int, ranks, channel) -> Comm:
        return VirtualComm(self._fiber, rank, ranks, self.device, channel)


def run_virtual(program: Callable, args: tuple, ranks: int, server: Server, name: str,
                timeout: float | None, record: bool) -> Result:  # fmt: skip
    """Run a program on virtual ranks; see `run`."""
    payload = pack((program, args), f"{getattr(program, '__name__', program)} or its arguments")
    if getattr(threading.current_thread(), "is_rank", False):
        raise RuntimeError("a rank cannot call run: call it outside, or use comm.group for some")
    nodes = nodes_of_hosts(server)
    with alone, simulated_server(server) as (machine, visible):
        scheduler = Scheduler(machine, [Rank(r, nodes[r], visible[r]) for r in range(ranks)])
        recording = vgpu.Recording(machine)
        hook = register_optimizer_step_pre_hook(check_gradients_arrived)
        try:
            with own_surroundings(scheduler), recording if record else contextlib.nullcontext():
                run_all(scheduler, payload, timeout)
                machine.host.clock = max(
                    [rank.end for rank in scheduler.ranks]
                    + [device.end for device in machine.devices]
                )
        finally:
            hook.remove()
            machine.before_copy = None  # what tensors refer to shall not keep the run alive
        prints = ["".join(rank.prints) for rank in scheduler.ranks]
        timeline = Timeline(
            recording.events if record else [],
            [f"gpu{number}" for number in range(ranks)],
            True,
            name,
            [dict(device.ledger.peak_by_kind) for device in machine.devices],
            machine.host.clock / PICOSECONDS,
        )
    if scheduler.error is not None:
        Result([], timeline, prints).replay()
        raise scheduler.error from scheduler.cause
    return Result([unpack(rank.value) for rank in scheduler.ranks], timeline, prints)


def run_all(scheduler: Scheduler, payload: bytes, timeout: float | None) -> None:
    """Let every rank run to its end; ends them on time-out, or when something is raised here."""
    threads = threads_of_a_rank(len(scheduler.ranks))
    if threads == 1:
        scheduler.core = current_core()
    try:
        for number, rank in enumerate(scheduler.ranks):
            fiber = Fiber(scheduler, rank, f"host{number}")
            # A copy for each rank, as in a process of its own. It is made here, since a module that
            # calls `run` while it is imported cannot be imported by another thread.
            program, args = unpack(payload)
            scheduler.add(fiber, partial(play, fiber, program, args, threads))
        scheduler.hand_over(None)
        if not scheduler.finished.wait(timeout):
            late = scheduler.current
            raise RankError(
                f"the run did not end within {timeout:g} s; rank {late.rank.number} is still "
                f"running{describe_stack(late.thread.ident)}"
            )
    except BaseException as error:
        scheduler.stop(error)
    for thread in scheduler.threads:
        thread.join(0.1)


def play(fiber: Fiber, program: Callable, args: tuple, threads: int) -> None:
    """A rank's life."""
    scheduler, rank = fiber.scheduler, fiber.rank
    fiber.thread.is_rank = True
    torch.set_num_threads(threads)
    device = scheduler.machine.devices[rank.number]
    comm = VirtualComm(fiber, rank.number, range(len(scheduler.ranks)), device.torch_device)
    value = program(comm, *args)
    scheduler.machine.synchronize([device])
    rank.value = pack(value, "the value that the program returned")
    rank.end = fiber.host.clock
    rank.ended = True


@contextlib.contextmanager
def simulated_server(server: Server) -> Iterator[tuple[Machine, dict]]:
    """Put a fresh simulated machine in the place of the current cluster for the time of a run.

    Yields it, and for each rank the devices that it sees: those of its own machine.
    """
    groups: dict[tuple, list[int]] = {}
    counts: Counter = Counter()
    for rank, first in enumerate(machines_of_gpus(server)):
        group = (first, counts[first] // vgpu.MOST_DEVICES)
        groups.setdefault(group, []).append(rank)
        counts[first] += 1
    numbers = {rank: number for group in groups.values() for number, rank in enumerate(group)}
    kept = ("machine", "visible", "current", "latest", "in_optimizer")
    before = {name: getattr(state, name) for name in kept}
    try:
        machine = vgpu.start(server, [numbers[rank] for rank in range(server.gpus)])
        visible = {
            rank: [machine.devices[member] for member in group]
            for group in groups.values()
            for rank in group
        }
        yield machine, visible
    finally:
        for name, value in before.items():
            setattr(state, name, value)


def nodes_of_hosts(server: Server) -> list[str]:
    """For each GPU the host processor nearest to it, in its own machine."""
    hosts = [node for node in server.neighbours if node.startswith("cpu")]
    nearest = spread(server, {host: host for host in hosts})
    return [nearest[f"gpu{rank}"] for rank in range(server.gpus)]


def machines_of_gpus(server: Server) -> list[str]:
    """For each GPU the name of its machine's first node: what is linked not by the network only."""
    found: dict[str, str] = {}
    for node in server.neighbours:
        if node != "network" and node not in found:
            found |= spread(server, {node: node})
    return [found[f"gpu{rank}"] for rank in range(server.gpus)]


def spread(server: Server, labels: dict) -> dict:
    """Give each node the label of the nearest one that has a label, not over the network."""
    queue = list(labels)
    for node in queue:  # breadth first: the list grows while it is walked
        for other, _ in server.neighbours[node]:
            if other not in labels and other != "network":
                labels[other] = labels[node]
                queue.append(other)
    return labels
