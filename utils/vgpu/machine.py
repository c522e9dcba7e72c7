"""The simulated machine: a host, devices and wires, each with a clock.

The program's arithmetic runs at once, on the CPU; what this module works out is *when* it would
have happened. Times are whole picoseconds, so that a timeline does not depend on when it began.

- The **host** pays a launch for every kernel and every copy that it issues, and runs ahead of the
  devices. It waits where it needs a value: `item`, printing, a copy to ordinary host memory.
- A **device** has one compute stream. An operation starts when the host has issued it, the stream
  is free and its operands are ready; it takes the longer of FLOPs / peak and bytes / bandwidth,
  each times the chip's documented efficiency.
- A **copy** needs no compute stream (a copy engine does it). It starts when its source is ready,
  its destination is no longer in use and *every* wire of its route is free, and holds all of them
  for bytes / bandwidth + latency. Copies over one wire therefore queue in the order of issue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..events import Event
from ..hardware import Chip, Server
from .memory import Block, Ledger, Span

PICOSECONDS = 10**12


class Host:
    """A process that runs the program: its clock (ps), and its stream on each device.

    `streams[index]` is the time at which the stream of its kernels on a device is free.
    """

    index = -1
    ledger = None  # host memory is not counted
    torch_device = None

    def __init__(self, machine: Machine, node: str = "cpu0", row: str = "host"):
        chip = machine.server.host
        self.machine = machine
        self.node = node
        self.rows = (row,)
        self.clock = 0
        self.streams = [0] * machine.server.gpus
        self.launch = round(chip.launch * PICOSECONDS)
        self.cost = Cost(chip)


class Device:
    """A virtual GPU: its chip's costs, its compute stream, its memory."""

    def __init__(self, machine, index: int, chip: Chip, torch_device, out_of_memory):
        self.machine = machine
        self.index = index  # in the machine
        self.number = index if torch_device is None else torch_device.index  # in its process
        self.chip = chip
        self.node = f"gpu{index}"
        self.torch_device = torch_device
        self.launch = round(chip.launch * PICOSECONDS)
        self.cost = Cost(chip)
        self.end = 0  # when everything issued so far has ended, copies included
        name = str(torch_device if torch_device is not None else self.node)
        self.ledger = Ledger(name, chip.memory, out_of_memory)


class Cost:
    """How long a chip takes: the roofline max(FLOPs / peak, bytes / bandwidth), in ps."""

    def __init__(self, chip: Chip):
        self.flop = PICOSECONDS / (chip.fp32 * chip.compute_efficiency)
        self.half_flop = PICOSECONDS / (chip.half * chip.compute_efficiency)
        self.byte = PICOSECONDS / (chip.bandwidth * chip.memory_efficiency)

    def __call__(self, flops: float, nbytes: int, half: bool = False) -> int:
        return round(max(flops * (self.half_flop if half else self.flop), nbytes * self.byte))


class Wire:
    """One direction of a link, with the time at which it is free."""

    __slots__ = ("name", "free")

    def __init__(self, name: str):
        self.name = name
        self.free = 0


class Route:
    """The wires from one node to another, with the cost of a copy over all of them."""

    def __init__(self, wires: Sequence[Wire], latency: float, bandwidth: float):
        self.wires = tuple(wires)
        self.names = tuple(wire.name for wire in wires)
        self.latency = round(latency * PICOSECONDS)
        self.byte = PICOSECONDS / bandwidth


class Machine:
    """A server whose devices and wires keep simulated time."""

    def __init__(self, server: Server, torch_devices=None, out_of_memory=MemoryError):
        self.server = server
        self.host = Host(self)
        torch_devices = torch_devices or [None] * server.gpus
        self.devices = [
            Device(self, index, chip, torch_device, out_of_memory)
            for index, (chip, torch_device) in enumerate(zip(server.chips, torch_devices))
        ]
        self._wires: dict[str, Wire] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        self.recordings: list[Recording] = []
        self.before_copy: Callable[[], None] | None = None  # lets hosts that are behind go first

    def route(self, source: str, target: str) -> Route:
        """The route between two nodes, found once."""
        route = self._routes.get((source, target))
        if route is None:
            steps = self.server.route(source, target)
            if not steps:  # within a host's memory: read once, written once
                rate = self.server.host.bandwidth * self.server.host.memory_efficiency / 2
                return self._routes.setdefault((source, target), Route((), 0.0, rate))
            wires = [self._wires.setdefault(name, Wire(name)) for _, name in steps]
            route = self._routes[source, target] = Route(
                wires,
                latency=sum(link.latency for link, _ in steps),
                bandwidth=min(link.effective for link, _ in steps),
            )
        return route

    def compute(self, device, name, flops, nbytes, half, reads, writes) -> None:
        """Run a kernel that reads and writes these blocks, on a device or on the host."""
        host = self.host
        if device is host:
            self._host_compute(name, flops, nbytes, half, reads, writes)
            return
        issued = host.clock
        host.clock = start = issued + device.launch
        free = host.streams[device.index]
        if free > start:
            start = free
        for block in reads:
            if block.ready > start:
                start = block.ready
        for block in writes:
            if block.used > start:
                start = block.used
            if block.ready > start:
                start = block.ready
        end = start + device.cost(flops, nbytes, half)
        for block in reads:
            if end > block.used:
                block.used = end
        for block in writes:
            block.ready = end
        host.streams[device.index] = end
        if end > device.end:
            device.end = end
        if self.recordings:
            self.note("launch " + name, "host", host.rows, issued, issued + device.launch)
            self.note(name, "compute", (device.node,), start, end, (device.index,), nbytes, flops)

    def _host_compute(self, name, flops, nbytes, half, reads, writes) -> None:
        host = self.host
        for block in (*reads, *writes):
            self.wait(block)
        start = host.clock
        host.clock = end = start + host.launch + host.cost(flops, nbytes, half)
        for block in writes:
            block.ready = end
        if self.recordings:
            self.note(name, "host", host.rows, start, end, (), nbytes, flops)

    def copy(self, name, nbytes, source, target, src: Block | Span | None,
             dst: Block | Span | None, waits: bool = False) -> None:  # fmt: skip
        """Issue a copy of bytes between two places; the host waits for its end if `waits`."""
        host = self.host
        issued = host.clock
        launch = max(source.launch, target.launch)
        host.clock = issued + launch
        if self.recordings:
            self.note("launch " + name, "host", host.rows, issued, issued + launch)
        if self.before_copy is not None:
            self.before_copy()
        end = self.transfer(name, nbytes, source, target, src, dst, host.clock)
        if waits:
            self.advance_host(end)

    def transfer(self, name, nbytes, source, target, src, dst, start: int) -> int:
        """Move bytes between two places, not before `start`; returns when it ends (ps)."""
        route = self.route(source.node, target.node)
        if src is not None and src.ready > start:
            start = src.ready
        if dst is not None:
            if dst.ready > start:
                start = dst.ready
            if dst.used > start:
                start = dst.used
        for wire in route.wires:
            if wire.free > start:
                start = wire.free
        end = start + route.latency + round(nbytes * route.byte)
        for wire in route.wires:
            wire.free = end
        if src is not None and end > src.used:
            src.used = end
        if dst is not None:
            dst.ready = end
        if source.index >= 0 and end > source.end:
            source.end = end
        if target.index >= 0 and end > target.end:
            target.end = end
        if self.recordings:
            devices = tuple(place.index for place in (source, target) if place.index >= 0)
            self.note(name, "communication", route.names, start, end, devices, nbytes)
        return end

    def wait(self, block: Block | Span) -> None:
        """The host waits until the bytes of a block are there."""
        self.advance_host(block.ready)

    def advance_host(self, time: int) -> None:
        """The host waits until a time (ps); going back is not possible."""
        if time > self.host.clock:
            self.host.clock = time

    def synchronize(self, devices: Iterable[Device] | None = None) -> None:
        """The host waits until these devices (all of them) have done everything issued so far."""
        for device in self.devices if devices is None else devices:
            self.advance_host(device.end)

    def note(self, name, kind, rows, start, end, devices=(), nbytes=0, flops=0) -> None:
        """Enter an event in every recording that is under way."""
        for recording in self.recordings:
            recording.add(name, kind, rows, start, end, devices, nbytes, flops)


class Recording:
    """Collects the events of a machine from one moment on, with times in seconds from then."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.events: list[Event] = []

    def __enter__(self) -> Recording:
        machine = self.machine
        machine.synchronize()
        if not machine.recordings:
            for device in machine.devices:
                device.ledger.reset_peak()
        self.start = machine.host.clock
        machine.recordings.append(self)
        return self

    def __exit__(self, *_) -> None:
        machine = self.machine
        machine.recordings.remove(self)
        machine.synchronize()
        self.duration = (machine.host.clock - self.start) / PICOSECONDS

    def add(self, name, kind, rows, start, end, devices, nbytes, flops) -> None:
        seconds = (start - self.start) / PICOSECONDS
        self.events.append(
            Event(name, kind, rows, seconds, (end - start) / PICOSECONDS, devices, nbytes, flops)
        )
