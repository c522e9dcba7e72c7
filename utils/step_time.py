"""How long a data-parallel step takes on any server, without running it (chapter 04).

What `data_parallel.compute_gradients` and an SGD optimizer launch on one device is recorded once
for a network, in shape-only mode. Each kernel's work is a fixed part and a part for every row. The
simulated machine then runs these kernels on as many devices as asked for, with a ring all-reduce
between them. That agrees with the real program's timeline (a test sees to it), and takes
milliseconds instead of seconds.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from . import data_parallel, plots, vgpu
from .devices import Cluster
from .hardware import DGX1_DOUBLE_RING, get_server
from .models import lenet, resnet18
from .timeline import Timeline
from .vgpu.memory import Block

NETWORKS = {  # how to build them, and the shape of an image
    "LeNet": (lenet, (1, 28, 28)),
    "ResNet-18": (functools.partial(resnet18, channels=3), (3, 32, 32)),
}

PARTS = (  # of a step: label, colour, attribute of StepTime
    ("compute", plots.COMPUTE, "compute"),
    ("exposed communication", plots.COMMUNICATION, "exposed"),
    ("waiting for launches", plots.IDLE, "waiting"),
)


@dataclass(frozen=True)
class StepTime:
    """A step's simulated seconds, and what a GPU does in them, on average over the GPUs.

    It computes; or it communicates without computing (exposed); or it waits, for the host to launch
    something or for another GPU.
    """

    duration: float
    compute: float
    exposed: float

    @property
    def waiting(self) -> float:
        return self.duration - self.compute - self.exposed


@functools.lru_cache(maxsize=1000)
def step_time(network: str, rows: int, gpus: int, server: str) -> StepTime:
    """A training step of one of `NETWORKS` with a batch of `rows` on GPUs of a preset server."""
    timeline = simulate_step(network, rows, gpus, server)
    devices = ring_order(server, gpus)
    return StepTime(
        timeline.duration,
        sum(timeline.busy(i) for i in devices) / gpus,
        sum(timeline.exposed(i) for i in devices) / gpus,
    )


def draw_step_times(network="ResNet-18", rows=256, gpus=8, server="dgx1-v100"):
    """Where a step's simulated time goes with 1, 2, 4, … GPUs, up to as many as asked for.

    A server with fewer GPUs shows what it has. The numbers beside the bars are the speed-up.
    """
    numbers = gpu_numbers(gpus, server)
    times = [step_time(network, rows, n, server) for n in numbers]
    _, ax = plt.subplots(figsize=(7.5, 0.36 * len(numbers) + 1.15))
    left = [0.0] * len(times)
    for label, colour, part in PARTS:
        widths = [getattr(time, part) * 1e3 for time in times]
        ax.barh(range(len(times)), widths, 0.7, left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths)]
    for y, time in enumerate(times):
        text = f" {time.duration * 1e3:.3g} ms, {times[0].duration / time.duration:.2f} ×"
        ax.text(left[y], y, text, va="center", fontsize=8)
    ax.set_yticks(range(len(times)), [f"{n} GPU" + "s" * (n > 1) for n in numbers])
    ax.set(ylim=(len(times) - 0.5, -0.5), xlim=(0, 1.22 * max(left)), xlabel="time of a step (ms)")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    ax.legend(ncols=3, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1)
    ax.set_title(f"{network}, batch of {rows:,}", pad=20)
    ax.text(0, 1.02, f"simulated: {server}", transform=ax.transAxes, fontsize=8, color="#444444")


def describe_step_times(network="ResNet-18", rows=256, gpus=8, server="dgx1-v100"):
    """Alt text of `draw_step_times`."""
    parts = []
    for n in gpu_numbers(gpus, server):
        time = step_time(network, rows, n, server)
        of = ", ".join(f"{label} {getattr(time, part) * 1e3:.3g}" for label, _, part in PARTS)
        parts.append(f"{n} GPU{'s' * (n > 1)}: {time.duration * 1e3:.3g} ms ({of})")
    return (
        f"Simulated time of a training step of {network} with a batch of {rows:,} on {server}, in "
        f"all and by what a GPU does, on average. {'; '.join(parts)}."
    )


def gpu_numbers(gpus: int, server: str) -> list[int]:
    """1, 2, 4, … up to the number of GPUs asked for, or to what the server has."""
    most = min(gpus, get_server(server).gpus)
    return [n for n in (1, 2, 4, 8) if n < most] + [most]


def simulate_step(network: str, rows: int, gpus: int, server: str) -> Timeline:
    """The simulated timeline of that step. Raises ValueError if the server has fewer GPUs."""
    order = ring_order(server, gpus)
    machine = vgpu.Machine(get_server(server))
    devices = [machine.devices[i] for i in order]
    shards = [rows // gpus + (i < rows % gpus) for i in range(gpus)]  # as tensor_split does
    image_bytes = 4 * torch.Size(NETWORKS[network][1]).numel()
    kernels = kernels_of(network)
    with vgpu.Recording(machine) as recording:
        for nbytes in (image_bytes, 8):  # the images of all devices, then the labels
            for device, shard in zip(devices, shards):
                machine.copy("copy", nbytes * shard, machine.host, device, None, None, waits=True)
        for phase in ("forward", "backward", "pack"):
            for device, shard in zip(devices, shards):
                if shard or phase == "pack":
                    launch(machine, device, kernels[phase], shard)
        run_ring(machine, devices, parameter_count(network))
        launch(machine, devices[0], kernels["check"], 0)
        for device in devices:
            launch(machine, device, kernels["step"], 0)
    names = [device.node for device in machine.devices]
    title = f"{gpus} × {devices[0].chip.name} on {server}"
    return Timeline(recording.events, names, True, title, duration=recording.duration)


def ring_order(server: str, gpus: int) -> list[int]:
    """Numbers of the GPUs to use, in an order in which neighbours have fast wires."""
    order = list(range(get_server(server).gpus))
    if server == "dgx1-v100":
        order = list(DGX1_DOUBLE_RING)
    if not 1 <= gpus <= len(order):
        raise ValueError(f"{server} has 1 to {len(order)} GPUs to use, not {gpus}")
    return order[:gpus]


def launch(machine, device, kernels, rows: int) -> None:
    """Run kernels (name, FLOPs, FLOPs a row, bytes, bytes a row) on a device."""
    for name, flops, flops_a_row, nbytes, bytes_a_row in kernels:
        machine.compute(
            device, name, flops + flops_a_row * rows, nbytes + bytes_a_row * rows, False, (), ()
        )


def run_ring(machine, devices, values: int) -> None:
    """`collectives.ring_all_reduce` of so many float32 values on every device."""
    n = len(devices)
    sizes = [4 * (values // n + (i < values % n)) for i in range(n)]
    parts = [[Block(device, size) for size in sizes] for device in devices]
    for device, row in zip(devices, parts):
        for part in row:
            part.ready = machine.host.streams[device.index]  # packed by what was launched last
    for step in range(n - 1):
        for i in range(n):
            right, part = (i + 1) % n, (i - step) % n
            mine, theirs = parts[right][part], parts[i][part]
            received = Block(devices[right], sizes[part])
            machine.copy("copy", sizes[part], devices[i], devices[right], theirs, received)
            machine.compute(devices[right], "add_", 0, 3 * sizes[part], False, (received,), (mine,))
    for step in range(n - 1):
        for i in range(n):
            right, part = (i + 1) % n, (i + 1 - step) % n
            machine.copy(
                "copy", sizes[part], devices[i], devices[right], parts[i][part], parts[right][part]
            )
    for device, row in zip(devices, parts):  # what follows needs all parts
        machine.host.streams[device.index] = max(part.ready for part in row)


@functools.cache
def parameter_count(network: str) -> int:
    """The number of parameters of one of `NETWORKS`."""
    with torch.device("meta"):
        return sum(p.numel() for p in NETWORKS[network][0]().parameters())


@functools.cache
def kernels_of(network: str) -> dict[str, list[tuple]]:
    """What one device runs in a step, by phase: forward, backward, pack, check, step.

    Of the all-reduce only the packing of all gradients into one tensor is in there.
    """
    two, three = (record_kernels(network, rows) for rows in (2, 3))
    return {
        phase: [
            (a.name, 3 * a.flops - 2 * b.flops, b.flops - a.flops,
             3 * a.bytes - 2 * b.bytes, b.bytes - a.bytes)
            for a, b in zip(two[phase], three[phase], strict=True)
        ]
        for phase in two
    }  # fmt: skip


def record_kernels(network: str, rows: int) -> dict[str, list]:
    """The compute events of one replica's step with so many rows, by phase."""
    build, image = NETWORKS[network]
    loss = nn.CrossEntropyLoss(reduction="none")
    with current_cluster_kept(), FakeTensorMode():
        cluster = Cluster(1, server="hgx-h200", quiet=True)
        with torch.device(cluster.devices[0]):
            model, X = build(), torch.empty(rows, *image)
            y = torch.empty(rows, dtype=torch.int64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with cluster.record() as forward:
            share = data_parallel.share_of_loss(model, X, y, loss, rows)
        with cluster.record() as backward:
            share.backward()
        with cluster.record() as packing:
            data_parallel.sum_gradients([model])
        with cluster.record() as step:
            optimizer.step()
    found = {"forward": forward, "backward": backward, "pack": packing, "step": step}
    found = {
        phase: [event for event in timeline.events if event.kind == "compute"]
        for phase, timeline in found.items()
    }
    found["pack"], found["check"] = found["pack"][:1], found["pack"][1:]
    return found


@contextlib.contextmanager
def current_cluster_kept():
    """Let another cluster be used inside, then go on with the one before."""
    before = dict(vars(vgpu.state))
    try:
        yield
    finally:
        vars(vgpu.state).clear()
        vars(vgpu.state).update(before)
