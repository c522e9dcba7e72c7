"""Simulated time against sums by hand: launches, kernels, copies, wires, what waits for what."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from utils import Cluster

LAUNCH = 10e-6
FLOPS = 15.7e12 * 794 / 989  # of a V100's peaks what kernels reach
HALF_FLOPS = 125e12 * 794 / 989
BYTES = 900e9 * 4.3 / 4.8
WIRE = 16e9  # PCIe as in the book; 5 µs over two links
LATENCY = 5e-6
N = 4_000_000  # elements: 16 MB, 1 ms over a wire


@pytest.fixture
def cluster():
    return Cluster(4, server="pcie-switch", quiet=True)


def near(value):
    return pytest.approx(value, rel=1e-7)


def events(timeline, kind):
    return [event for event in timeline.events if event.kind == kind]


def spans(timeline, kind="communication"):
    """(start, end) of each event of a kind, in milliseconds, in the order of issue."""
    return [(near(e.start * 1e3), near(e.end * 1e3)) for e in events(timeline, kind)]


def record(cluster, work):
    with cluster.record() as timeline:
        work()
    return timeline


def test_the_host_pays_a_launch_for_each_operation(cluster):
    x = torch.ones(4, device="vgpu:0")
    timeline = record(cluster, lambda: [x + 1 for _ in range(5)])
    launches = events(timeline, "host")
    kernels = events(timeline, "compute")
    assert [e.name for e in launches] == ["launch add"] * 5
    for number, (launch, kernel) in enumerate(zip(launches, kernels)):
        assert (launch.start, launch.duration) == (near(number * LAUNCH), near(LAUNCH))
        assert kernel.start == near(launch.end) and kernel.duration == near(32 / BYTES)
    assert timeline.duration == near(5 * LAUNCH + 32 / BYTES)


def test_operations_that_are_free(cluster):
    x = torch.ones(2, 3, device="vgpu:0")

    def look():
        y = x.T.reshape(2, 3)[0].unsqueeze(0).expand(2, 3).detach()
        torch.empty(5, device="vgpu:0"), x.device, x.shape, y.is_contiguous(), x.view(6)

    assert [e.name for e in record(cluster, look).events] == ["launch clone", "clone"]  # reshape


ROOFLINE = {
    "add: 3 n numbers": (lambda x, y: x + y, (N,), 12 * N / BYTES),
    "add_: the same": (lambda x, y: x.add_(y), (N,), 12 * N / BYTES),
    "times a number: 2 n": (lambda x, y: x * 2, (N,), 8 * N / BYTES),
    "relu: 2 n": (lambda x, y: x.relu(), (N,), 8 * N / BYTES),
    "fill: n, written": (lambda x, y: x.zero_(), (N,), 4 * N / BYTES),
    "copy on the device: 2 n": (lambda x, y: x.copy_(y), (N,), 8 * N / BYTES),
    "sum: n, read": (lambda x, y: x.sum(), (N,), (4 * N + 4) / BYTES),
    "compare: 2 n, and n bytes": (lambda x, y: x > y, (N,), 9 * N / BYTES),
    "rows: read and written": (lambda x, y: x[[0, 1]], (1000, 1000), 2 * 2 * 4000 / BYTES),
    "large product": (lambda x, y: x @ y, (2048, 2048), 2 * 2048**3 / FLOPS),
    "small product": (lambda x, y: x @ y, (64, 64), 3 * 4 * 64**2 / BYTES),
    "batched product": (torch.bmm, (8, 512, 512), 2 * 8 * 512**3 / FLOPS),
    "half a large product": (
        lambda x, y: x @ y, (2048, 2048), 2 * 2048**3 / HALF_FLOPS, torch.float16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROOFLINE)
def test_roofline(cluster, name):
    """The longer of FLOPs / peak and bytes / bandwidth."""
    function, shape, expected, *dtype = ROOFLINE[name]
    with FakeTensorMode():
        x, y = (
            torch.empty(shape, dtype=dtype[0] if dtype else None, device="vgpu:0") for _ in "xy"
        )
        timeline = record(cluster, lambda: function(x, y))
    assert sum(e.duration for e in events(timeline, "compute")) == pytest.approx(expected, rel=0.01)


def test_convolutions_and_attention_count_their_products(cluster):
    with FakeTensorMode():
        x = torch.empty(32, 64, 56, 56, device="vgpu:0", requires_grad=True)
        w = torch.empty(64, 64, 3, 3, device="vgpu:0", requires_grad=True)
        q = torch.empty(8, 16, 512, 64, device="vgpu:0")
        forward = record(cluster, lambda: nn.functional.conv2d(x, w, padding=1))
        both = record(cluster, lambda: nn.functional.conv2d(x, w, padding=1).sum().backward())
        attention = record(cluster, lambda: nn.functional.scaled_dot_product_attention(q, q, q))
    products = 2 * 32 * 56 * 56 * 64 * 64 * 9
    assert sum(e.flops for e in forward.events) == products
    assert sum(e.flops for e in both.events) == 3 * products  # forward, and two of them backward
    assert sum(e.flops for e in attention.events) == 2 * 2 * 8 * 16 * 512 * 512 * 64


def test_a_stream_runs_in_order_and_devices_beside_one_another(cluster):
    with FakeTensorMode():
        a, b = (torch.empty(1024, 1024, device=f"vgpu:{i}") for i in range(2))
        timeline = record(cluster, lambda: (a @ a, a @ a, b @ b))
    product = 2 * 1024**3 / FLOPS * 1e3
    assert spans(timeline, "compute") == [
        (0.01, 0.01 + product), (0.01 + product, 0.01 + 2 * product), (0.03, 0.03 + product),
    ]  # fmt: skip
    assert timeline.busy("gpu0") == near(2 * product * 1e-3)


def test_a_copy_takes_bytes_over_bandwidth_and_latency(cluster):
    x = torch.empty(N, device="vgpu:0")
    timeline = record(cluster, lambda: x.to("vgpu:1"))
    (copy,) = events(timeline, "communication")
    assert copy.duration == near(4 * N / WIRE + LATENCY) and copy.bytes == 4 * N
    assert copy.rows == ("gpu0→switch0", "switch0→gpu1") and copy.devices == (0, 1)
    assert timeline.bytes_sent("gpu0") == 4 * N and timeline.wire_time() == near(copy.duration)


COPY = 1.005  # ms: 16 MB over PCIe
WIRES = {
    "one wire is shared": ([(0, 1), (0, 2)], 2),
    "at its end too": ([(0, 2), (1, 2)], 2),
    "both directions at once": ([(0, 1), (1, 0)], 1),
    "wires of their own": ([(0, 1), (2, 3)], 1),
    "the wire to the host is shared": ([(0, "cpu"), (1, "cpu")], 2),
    "to the host and from it": ([(0, "cpu"), ("cpu", 1)], 1),
    "a queue": ([(0, 1), (0, 1), (2, 1), (3, 2)], 3),
}


@pytest.mark.parametrize("name", WIRES)
def test_wires(cluster, name):
    """Copies over one wire queue; the host issues all of them at once."""
    copies, longest = WIRES[name]

    def place(i):
        return "cpu" if i == "cpu" else f"vgpu:{i}"

    pairs = [
        (torch.empty(N, device=place(a), pin_memory=a == "cpu"),
         torch.empty(N, device=place(b), pin_memory=b == "cpu")) for a, b in copies
    ]  # fmt: skip
    timeline = record(cluster, lambda: [b.copy_(a, non_blocking=True) for a, b in pairs])
    expected = longest * COPY * 1e-3 + LAUNCH
    assert expected <= timeline.duration + 1e-9 < expected + 3 * LAUNCH
    starts = [e.start for e in events(timeline, "communication")]
    assert starts == sorted(starts) or name == "a queue"


def test_copies_run_beside_kernels_and_wait_for_their_data(cluster):
    with FakeTensorMode():
        x, w = (torch.empty(2048, 2048, device="vgpu:0") for _ in "xw")
        y = torch.empty(N, device="vgpu:0")
        timeline = record(cluster, lambda: (x @ w, y.to("vgpu:1"), (x @ w).to("vgpu:2")))
    product, small = 2 * 2048**3 / FLOPS * 1e3, 4 * 2048**2 / WIRE * 1e3 + 0.005
    kernels, copies = spans(timeline, "compute"), spans(timeline)
    assert kernels == [(0.01, 0.01 + product), (0.01 + product, 0.01 + 2 * product)]
    assert copies == [
        (0.02, 0.02 + COPY),  # beside the first product, although that is long
        (0.01 + 2 * product, 0.01 + 2 * product + small),  # behind the second one: its result
    ]
    assert timeline.exposed("gpu0") == near(small * 1e-3)


def test_a_kernel_waits_for_what_it_reads_and_for_what_others_still_read(cluster):
    x, y = torch.ones(N, device="vgpu:0"), torch.ones(N, device="vgpu:1")

    def work():
        z = x.to("vgpu:1")
        y.add_(1)  # needs nothing of the copy
        z.add_(y)  # needs its end
        x.add_(1)  # would change what is still being read

    kernels = spans(record(cluster, work), "compute")
    add = 12 * N / BYTES * 1e3
    copied = 0.01 + COPY
    one = 8 * N / BYTES * 1e3
    assert kernels == [(0.02, 0.02 + one), (copied, copied + add), (copied, copied + one)]


def test_parts_of_a_buffer_travel_at_once(cluster):
    x = [torch.ones(2 * N, device=f"vgpu:{i}") for i in range(2)]
    timeline = record(cluster, lambda: (x[1][:N].copy_(x[0][:N]), x[0][N:].copy_(x[1][N:])))
    assert timeline.duration < 1.1e-3  # one copy's time: other bytes, the other direction
    timeline = record(cluster, lambda: (x[1][:N].copy_(x[0][:N]), x[0][1:].copy_(x[1][1:])))
    assert timeline.duration > 2.9e-3  # overlapping bytes: one after the other


WAITS = {
    "item": (lambda x: x.item(), True), "float": (float, True), "bool": (bool, True),
    "tolist": (lambda x: x.tolist(), True), "print": (repr, True),
    "format": (lambda x: f"{x:.1f}", True), "cpu": (lambda x: x.cpu(), True),
    "to cpu": (lambda x: x.to("cpu"), True), "numpy": (lambda x: x.numpy(force=True), True),
    "nonzero": (lambda x: x.nonzero(), True), "if": (lambda x: 1 if x > 0 else 0, True),
    "copy_": (lambda x: torch.zeros(()).copy_(x, non_blocking=True), True),
    "synchronize": (lambda x: torch.vgpu.synchronize(0), True),
    "another device's": (lambda x: torch.vgpu.synchronize(1), False),
    "not blocking": (lambda x: x.to("cpu", non_blocking=True), False),
    "to a device": (lambda x: x.to("vgpu:1"), False), "shape": (lambda x: x.shape, False),
    "kernel": (lambda x: x + 1, False), "backward": (lambda x: (x * 2).sum().backward(), False),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_what_the_host_waits_for(cluster, name):
    work, waits = WAITS[name]
    a = torch.ones(1024, 1024, device="vgpu:0", requires_grad=name == "backward")
    host = cluster.machine.host
    cluster.synchronize()
    start = host.clock
    result = (a @ a)[0, 0]
    work(result)
    product = 2 * 1024**3 / FLOPS
    assert (host.clock - start > product * 1e12) == waits
    if name == "not blocking":
        y = result.to("cpu", non_blocking=True)
        assert y.is_pinned() and y.item() == 1024  # reading it waits
        assert host.clock - start > product * 1e12


def test_pageable_memory_waits_and_pinned_memory_does_not(cluster):
    pageable, pinned = torch.ones(N), torch.ones(N).pin_memory()
    host = cluster.machine.host
    cluster.synchronize()
    for x, non_blocking, expected in (
        (pageable, False, COPY + 0.01), (pageable, True, COPY + 0.01), (pinned, False, COPY + 0.01),
        (pinned, True, 0.01),
    ):  # fmt: skip
        cluster.synchronize()
        before = host.clock
        x.to("vgpu:0", non_blocking=non_blocking)
        assert (host.clock - before) * 1e-9 == near(expected)


def test_a_question_to_pytorch_costs_nothing():
    """An operation without tensors, such as PyTorch's own for the version of CUDA."""
    library = torch.library.Library("course_questions", "DEF")
    library.define("answer() -> int")
    library.impl("answer", lambda: 42, "CompositeExplicitAutograd")
    cluster = Cluster(2, quiet=True)
    with cluster.record() as timeline:
        assert torch.ops.course_questions.answer() == 42
    assert timeline.events == [] and timeline.duration == 0
