"""Which devices there are: the one door to real GPUs and virtual ones."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch

from . import vgpu
from .hardware import Server, get_server, join_machines
from .timeline import Timeline

CHOICES = ("virtual", "cpu", "cuda")
PROFILER = threading.Lock()  # held while a recording on real devices is under way
DEFAULT_SERVER = "dgx1-v100"


class Cluster:
    """A number of devices to train on: this machine's GPUs, or virtual ones.

    `Cluster(4)` takes this machine's GPUs if it has four, else makes four virtual ones, and says
    which. `Cluster(8, server="dgx1-v100")` makes virtual ones with that server's chips and wires;
    `server` is a preset's name or a `Server` of your own. More devices than the server holds make
    several machines, joined by `network` (a preset's name). Making a cluster replaces the one
    before; tensors move over to the device of the same number.

    The environment variable COURSE_DEVICES (virtual, cpu or cuda) overrides the automatic choice.
    Raises ValueError for a count below 1, an unknown preset, or GPUs that are not there.
    """

    def __init__(self, count: int, server: str | Server | None = None, network: str | None = None,
                 quiet: bool = False):  # fmt: skip
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"a cluster needs a whole number of devices, at least 1, not {count!r}"
            )
        kind = choose(count, server)
        if kind == "virtual" and count > vgpu.MOST_DEVICES:
            raise ValueError(
                f"one process can name {vgpu.MOST_DEVICES} devices, not {count}; for more GPUs run "
                "one rank for each, with run(program, ranks=…)"
            )
        self.machine = None
        if kind == "virtual":
            self.server = place_on_machines(count, get_server(server or DEFAULT_SERVER), network)
            self.machine = vgpu.start(self.server)
            self.devices = [device.torch_device for device in self.machine.devices]
        else:
            vgpu.stop()
            self.server = None
            self.devices = [
                torch.device("cuda", i) if kind == "cuda" else torch.device("cpu")
                for i in range(count)
            ]
        if not quiet:
            print(self)

    @property
    def simulated(self) -> bool:
        """Whether the devices are virtual, so that times are simulated."""
        return self.machine is not None

    @property
    def name(self) -> str:
        """The number of devices and what they are, such as `4 × V100 on pcie-switch`."""
        if self.simulated:
            chip = self.server.chips[0].name
            return f"{len(self)} × {chip} on {self.server.name}"
        if self.devices[0].type == "cuda":
            return f"{len(self)} × {torch.cuda.get_device_name(0)}"
        return f"{len(self)} × this machine's CPU"

    def __len__(self) -> int:
        return len(self.devices)

    def __repr__(self) -> str:
        first, last = self.devices[0], self.devices[-1]
        names = f"{first}" if first == last else f"{first} to {last}"
        return f"{self.name}: {names} ({'simulated' if self.simulated else 'real'})"

    def synchronize(self) -> None:
        """Wait until every device has done everything that was issued."""
        if self.simulated:
            self.machine.synchronize()
        elif self.devices[0].type == "cuda":
            for device in self.devices:
                torch.cuda.synchronize(device)

    @contextlib.contextmanager
    def record(self) -> Iterator[Timeline]:
        """Record what runs inside: the `Timeline` is filled when the block ends.

        The recording begins and ends with all devices at rest. Times of virtual devices are
        simulated; on real ones PyTorch's profiler measures them.
        """
        names = [f"gpu{index}" for index in range(len(self))]
        timeline = Timeline([], names, self.simulated, self.name)
        if self.simulated:
            self._check_current()
            recording = vgpu.Recording(self.machine)
            try:
                with recording:
                    yield timeline
            finally:
                timeline.events = recording.events
                timeline.duration = recording.duration
                timeline.peak_memory = [
                    dict(device.ledger.peak_by_kind) for device in self.machine.devices
                ]
        else:
            with measured(self, timeline):
                yield timeline

    def memory(self) -> pd.DataFrame:
        """What each device's memory holds now, in MB: a row a device, a column a kind, the peak.

        On real GPUs PyTorch knows the total and the peak only.
        """
        if self.simulated:
            self._check_current()
            rows = [
                {**device.ledger.by_kind, "in use": device.ledger.used,
                 "peak": device.ledger.peak, "capacity": device.ledger.capacity}
                for device in self.machine.devices
            ]  # fmt: skip
        elif self.devices[0].type == "cuda":
            rows = [
                {"in use": torch.cuda.memory_allocated(device),
                 "peak": torch.cuda.max_memory_allocated(device),
                 "capacity": torch.cuda.get_device_properties(device).total_memory}
                for device in self.devices
            ]  # fmt: skip
        else:
            raise RuntimeError(
                "memory is counted on virtual devices and real GPUs; these devices are the CPU"
            )
        table = pd.DataFrame(rows, index=[str(device) for device in self.devices]) / 1e6
        table.columns.name = "MB"
        return table

    def reset_peak_memory(self) -> None:
        """Start the search for every device's peak again from what is in use now."""
        for index, device in enumerate(self.devices):
            if self.simulated:
                self.machine.devices[index].ledger.reset_peak()
            elif device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

    def _check_current(self) -> None:
        if vgpu.state.machine is not self.machine:
            raise RuntimeError(
                f"this cluster ({self.name}) has been replaced by a later one; use that, or make "
                "this one anew"
            )


def choose(count: int, server) -> str:
    """Which kind of devices a cluster gets: "virtual", "cpu" or "cuda"."""
    asked = os.environ.get("COURSE_DEVICES", "").strip().lower()
    if asked and asked not in CHOICES:
        raise ValueError(f"COURSE_DEVICES is {asked!r}; it can be {', '.join(CHOICES)} or unset")
    if server is not None:
        return "virtual"
    found = torch.cuda.device_count()
    if asked == "cuda" and found < count:
        raise ValueError(
            f"COURSE_DEVICES=cuda, but {count} GPUs were asked for and this machine has {found}; "
            "ask for fewer, or unset COURSE_DEVICES to get virtual ones"
        )
    return asked or ("cuda" if found >= count else "virtual")


def place_on_machines(count: int, server: Server, network: str | None) -> Server:
    """The first `count` GPUs of a server, or of as many servers as hold them."""
    machines = -(-count // server.gpus)
    if network is not None:
        return join_machines(server, machines, network).take(count)
    if machines == 1:
        return server.take(count)
    raise ValueError(
        f"{count} GPUs were asked for and {server.name} holds {server.gpus}: say how several of "
        f'them are connected, such as Cluster({count}, server="{server.name}", '
        'network="ethernet-100g")'
    )


@contextlib.contextmanager
def measured(cluster: Cluster, timeline: Timeline) -> Iterator[None]:
    """Fill a timeline with what PyTorch's profiler measures on the real devices inside.

    Raises RuntimeError inside another such recording: the profiler can make one at a time.
    """
    if not PROFILER.acquire(blocking=False):
        raise RuntimeError(
            "a recording is under way, and real devices can be recorded once at a time; end that "
            "one first"
        )
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its messages would land in the notebook
    on_gpu = cluster.devices[0].type == "cuda"
    activity = torch.profiler.ProfilerActivity
    try:
        cluster.synchronize()
        cluster.reset_peak_memory()
        profile = torch.profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU])
        try:
            with profile:
                yield
                cluster.synchronize()
        finally:
            fill(timeline, profile, timeline.devices if on_gpu else ["cpu"])
            if on_gpu:
                timeline.peak_memory = [
                    {"other": torch.cuda.max_memory_allocated(device)} for device in cluster.devices
                ]
    finally:
        PROFILER.release()


def fill(timeline: Timeline, profile, devices: list[str]) -> None:
    """Take over what a profile has recorded."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        found = Timeline.from_profiler(path, devices=devices)
    timeline.events, timeline.devices = found.events, found.devices
    timeline.duration = found.duration
