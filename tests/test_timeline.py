"""Timelines: interval arithmetic against rasterisation, figures by hand, traces in and out."""

import json
import math

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from utils import traces
from utils.events import Event, difference, total, union
from utils.timeline import Timeline

# --- interval arithmetic

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=12,
)


def cells(pairs):
    """The unit cells that are covered: cell i is from i to i + 1."""
    return {i for start, end in pairs for i in range(start, end)}


@given(intervals)
def test_union_covers_the_same_once(pairs):
    merged = union(pairs)
    assert cells(merged) == cells(pairs)
    assert total(pairs) == len(cells(pairs))
    assert all(start < end for start, end in merged)
    assert all(a[1] < b[0] for a, b in zip(merged, merged[1:], strict=False))


@given(intervals, intervals)
def test_difference_leaves_what_is_not_covered(pairs, others):
    left = difference(pairs, others)
    assert cells(left) == cells(pairs) - cells(others)
    assert union(left) == left
    assert total(left) == len(cells(pairs) - cells(others))


@given(st.lists(st.tuples(st.sampled_from(["compute", "communication"]),
                          st.integers(0, 30), st.integers(0, 10)), max_size=15))  # fmt: skip
def test_busy_exposed_and_idle_make_up_the_duration(work):
    events = [Event("x", kind, ("gpu0",), start, length) for kind, start, length in work]
    timeline = Timeline(events, ["gpu0"])
    compute, sending = (
        cells((e.start, e.end) for e in events if e.kind == kind)
        for kind in ("compute", "communication")
    )
    assert timeline.busy("gpu0") == len(compute)
    assert timeline.communication("gpu0") == len(sending)
    assert timeline.exposed("gpu0") == len(sending - compute)
    assert timeline.idle("gpu0") == timeline.duration - len(compute | sending)


# --- a timeline made by hand: gpu0 computes 0-4 ms, sends 3-7 ms; gpu1 receives and adds 7-8 ms


@pytest.fixture
def timeline():
    wires = ("gpu0→switch0", "switch0→gpu1")
    events = [
        Event("launch", "host", ("host",), 0.0, 0.5e-3),
        Event("mm", "compute", ("gpu0",), 0.0, 4e-3, (0,), flops=10),
        Event("copy", "communication", wires, 3e-3, 4e-3, (0, 1), bytes=2_000_000),
        Event("add", "compute", ("gpu1",), 7e-3, 1e-3, (1,)),
    ]
    memory = [{"parameters": 3_000_000, "gradients": 1_500_000}, {"other": 10}]
    return Timeline(events, ["gpu0", "gpu1"], True, "2 × toy", memory, duration=10e-3)


def test_figures_by_hand(timeline):
    for device, figures in (("gpu0", (4, 4, 3, 3)), ("gpu1", (1, 4, 4, 5))):
        found = (timeline.busy, timeline.communication, timeline.exposed, timeline.idle)
        assert [f(device) * 1e3 for f in found] == pytest.approx(figures)
    assert timeline.busy(1) == timeline.busy("gpu1")
    assert timeline.wire_time() == pytest.approx(4e-3)
    assert (timeline.bytes_sent("gpu0"), timeline.bytes_sent(1)) == (2_000_000, 0)


def test_unknown_device(timeline):
    for device in ("gpu2", 2, "cpu"):
        with pytest.raises(ValueError, match=r"no device .* in this timeline; it has gpu0, gpu1"):
            timeline.busy(device)
    with pytest.raises(ValueError, match="it has no devices"):
        Timeline().busy(0)


def test_devices_of_a_copy_are_found_at_the_ends_of_its_wires():
    wires = ("gpu1→cpu0", "cpu0→gpu10")
    timeline = Timeline([Event("copy", "communication", wires, 0, 1)], ["gpu0", "gpu1", "gpu10"])
    assert [timeline.communication(d) for d in timeline.devices] == [0, 1, 1]


def test_duration():
    event = Event("x", "compute", ("gpu0",), 2.0, 1.5)
    assert event.end == 3.5
    assert Timeline([event], ["gpu0"]).duration == 3.5
    assert Timeline([event], ["gpu0"], duration=9.0).idle(0) == 7.5
    assert Timeline().duration == 0


def test_a_part_of_a_timeline():
    events = [
        Event("before", "compute", ("gpu0",), 0.0, 1.0, (0,)),
        Event("cut", "communication", ("gpu0→gpu1",), 0.5, 2.0, (0, 1), 100),
        Event("inside", "compute", ("gpu0",), 1.5, 0.25, (0,)),
        Event("after", "compute", ("gpu0",), 2.0, 1.0, (0,)),
    ]
    whole = Timeline(events, ["gpu0", "gpu1"], True, "two", [{"other": 1}], 3.0)
    part = whole.between(1.0, 2.0)
    assert [(e.name, e.start, e.end) for e in part.events] == [("cut", 0, 1), ("inside", 0.5, 0.75)]
    assert (part.duration, part.machine, part.peak_memory) == (1.0, "two", [])
    assert part.exposed(0) == 0.75 and len(whole.events) == 4
    assert whole.between(0.0, 3.0).events == events
    with pytest.raises(ValueError, match="begins before it ends"):
        whole.between(2.0, 1.0)


def test_summary(timeline):
    table = timeline.summary()
    assert isinstance(table, pd.DataFrame)
    assert list(table.index) == ["gpu0", "gpu1"]
    assert list(table.columns) == [
        "busy (ms)", "communication (ms)", "exposed communication (ms)", "idle (ms)",
        "peak memory (MB)",
    ]  # fmt: skip
    assert table.loc["gpu0"].tolist() == [4, 4, 3, 3, 4.5]
    assert table.attrs["title"] == "simulated: 2 × toy"
    assert "simulated" in str(table) and "simulated" in table.to_html()
    measured = Timeline([], ["gpu0"], simulated=False, machine="1 × T4").summary()
    assert measured.attrs["title"] == "measured on 1 × T4"
    assert "measured" in str(measured) and "peak memory (MB)" not in measured


def test_summary_of_nothing():
    assert Timeline().summary().empty
    assert Timeline([], ["gpu0"]).summary().loc["gpu0"].tolist() == [0, 0, 0, 0]


# --- to Perfetto


def slices(trace):
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def test_chrome_trace(timeline, tmp_path):
    path = tmp_path / "trace.json"
    assert timeline.to_chrome_trace(path) is None
    trace = json.loads(path.read_text(encoding="utf-8"))
    meta = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert all(e["ph"] in "MX" and {"pid", "tid", "name", "args"} <= set(e) for e in meta)
    processes = {e["pid"]: e["args"]["name"] for e in meta if e["name"] == "process_name"}
    threads = {e["tid"]: e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    assert processes[1] == "devices (simulated: 2 × toy)"
    assert set(threads.values()) == {"gpu0", "gpu1", "host", "gpu0→switch0", "switch0→gpu1"}
    found = {(threads[e["tid"]], e["name"]): e for e in slices(trace)}
    assert len(found) == 5  # the copy on both of its wires
    copy = found["gpu0→switch0", "copy"]
    assert (copy["ts"], copy["dur"]) == pytest.approx((3000, 4000))
    assert copy["cat"] == "communication"
    assert copy["args"] == {"bytes": 2_000_000, "flops": 0, "devices": [0, 1]}
    assert processes[copy["pid"]].startswith("wires")
    assert processes[found["host", "launch"]["pid"]].startswith("host")


def test_slices_of_a_thread_do_not_overlap():
    work = [(0, 5), (1, 2), (3, 4), (4.5, 3), (7.5, 1)]
    events = [Event("k", "compute", ("gpu0",), start, length, (0,)) for start, length in work]
    by_thread = {}
    for s in slices(traces.to_trace(Timeline(events, ["gpu0"]))):
        by_thread.setdefault(s["tid"], []).append((s["ts"], s["ts"] + s["dur"]))
    assert sum(map(len, by_thread.values())) == 5
    for spans in by_thread.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_chrome_trace_of_nothing(tmp_path):
    Timeline().to_chrome_trace(tmp_path / "t.json")
    assert slices(json.loads((tmp_path / "t.json").read_text())) == []


# --- from torch.profiler: a trace as Kineto writes it, two GPUs

T0 = 5_431_000_000_000.0


def kineto(cat, name, ts, dur, pid, tid, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": T0 + ts, "dur": dur,
            "args": args}  # fmt: skip


ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
RANDOM = (
    "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel"
    "<float, 4, at::native::templates::cuda::normal>(long, at::PhiloxCudaState)"
)
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
H2D, D2H = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pageable)"
P2P, D2D = "Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"

KINETO = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": i, "name": "NVIDIA A100-SXM4-80GB"} for i in range(2)],
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans",
         "tid": "PyTorch Profiler", "ts": T0 - 9000, "dur": 90_000, "args": {"Op count": 0}},
        kineto("cpu_op", "aten::mm", 0, 30, 900, 900, **{"External id": 1}),
        kineto("cuda_runtime", "cudaLaunchKernel", 10, 8, 900, 900, cbid=211, correlation=1),
        kineto("cuda_runtime", "cudaMemcpyAsync", 40, 5, 900, 900, cbid=41, correlation=2),
        kineto("cuda_runtime", "cudaDeviceSynchronize", 100, 900, 900, 900, correlation=9),
        {"ph": "s", "id": 1, "pid": 900, "tid": 900, "ts": T0 + 10, "cat": "ac2g", "name": "ac2g"},
        kineto("kernel", ADD, 20, 100, 0, 7, device=0, stream=7, correlation=1, grid=[1, 1, 1]),
        kineto("kernel", RANDOM, 110, 50, 0, 20, device=0, stream=20, correlation=5),
        kineto("kernel", "ampere_sgemm_64x32_sliced1x4_nn", 200, 300, 1, 7, device=1, stream=7),
        kineto("gpu_memcpy", H2D, 130, 40, 0, 14, device=0, stream=14, bytes=4096),
        kineto("gpu_memcpy", P2P, 400, 200, 0, 7, fromDevice=0, inDevice=0, toDevice=1,
               stream=7, bytes=1_000_000),
        kineto("gpu_memcpy", D2D, 700, 10, 1, 7, device=1, stream=7, bytes=64),
        kineto("gpu_memcpy", D2H, 720, 30, 1, 7, device=1, stream=7, bytes=512),
        kineto("gpu_memset", "Memset (Device)", 760, 2, 1, 7, device=1, stream=7, bytes=64),
        kineto("kernel", NCCL, 800, 100, 0, 30, device=0, stream=30),
        kineto("gpu_user_annotation", "step", 20, 800, 0, 7),
    ],
}  # fmt: skip


def test_cuda_profile():
    timeline = Timeline.from_profiler(KINETO, machine="2 × A100", peak_memory=[{"other": 8}] * 2)
    assert timeline.title == "measured on 2 × A100"
    assert timeline.devices == ["gpu0", "gpu1"]
    assert timeline.duration == pytest.approx(1000e-6)  # until the host has waited for the GPUs
    found = {(e.name, e.rows): e for e in timeline.events}
    assert set(found) == {
        ("cudaLaunchKernel", ("host",)),
        ("cudaMemcpyAsync", ("host",)),
        ("cudaDeviceSynchronize", ("host",)),
        ("vectorized_elementwise_kernel", ("gpu0",)),
        ("distribution_elementwise_grid_stride_kernel", ("gpu0",)),
        ("ampere_sgemm_64x32_sliced1x4_nn", ("gpu1",)),
        (H2D, ("cpu0→gpu0",)),
        (P2P, ("gpu0→gpu1",)),
        (D2D, ("gpu1",)),
        (D2H, ("gpu1→cpu0",)),
        ("Memset (Device)", ("gpu1",)),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", ("gpu0→nccl",)),
    }
    copy = found[P2P, ("gpu0→gpu1",)]
    assert (copy.kind, copy.bytes, copy.devices) == ("communication", 1_000_000, (0, 1))
    assert (copy.start, copy.duration) == pytest.approx((400e-6, 200e-6))
    # gpu0: kernels 20-120 and 110-160; copies 130-170, 400-600; NCCL 800-900
    assert timeline.busy(0) * 1e6 == pytest.approx(140)
    assert timeline.communication(0) * 1e6 == pytest.approx(340)
    assert timeline.exposed(0) * 1e6 == pytest.approx(310)
    assert timeline.idle(0) * 1e6 == pytest.approx(550)
    # gpu1: 200-500, 700-710, 760-762; copies 400-600 and 720-750
    assert timeline.busy(1) * 1e6 == pytest.approx(312)
    assert timeline.exposed(1) * 1e6 == pytest.approx(130)
    assert (timeline.bytes_sent(0), timeline.bytes_sent(1)) == (1_000_000, 512)
    assert timeline.summary()["peak memory (MB)"].tolist() == [0, 0]


def test_cuda_profile_shows_devices_that_did_nothing():
    names = [f"gpu{i}" for i in range(4)]
    timeline = Timeline.from_profiler(KINETO, devices=names)
    assert timeline.devices == names
    assert timeline.idle("gpu3") == timeline.duration


def test_empty_profile():
    for trace in ({"traceEvents": []}, {}):
        timeline = Timeline.from_profiler(trace, devices=["gpu0"])
        assert (timeline.events, timeline.duration, timeline.devices) == ([], 0, ["gpu0"])


def test_profile_of_this_cpu(tmp_path):
    x = torch.ones(64, 64, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.nn.functional.linear(x, x).sum().backward()
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    timeline = Timeline.from_profiler(path)
    assert timeline.events == Timeline.from_profiler(json.loads(path.read_text())).events
    assert timeline.devices == ["cpu"]
    assert {e.kind for e in timeline.events} == {"compute"}
    names = [e.name for e in timeline.events]
    assert names[:2] == ["linear", "sum"]
    assert "AddmmBackward0" in names or "MmBackward0" in names
    assert "mm" not in names  # linear calls it
    # outermost operations of a thread do not overlap, and together they are at most the whole
    assert 0 < timeline.busy("cpu") <= timeline.duration * (1 + 1e-9)
    assert math.fsum(e.duration for e in timeline.events) == pytest.approx(timeline.busy(0))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("aten::mm", "mm"),
        ("autograd::engine::evaluate_function: MmBackward0", "MmBackward0"),
        (ADD, "vectorized_elementwise_kernel"),
        (RANDOM, "distribution_elementwise_grid_stride_kernel"),
        (H2D, H2D),
        ("<lambda>", "<lambda>"),
    ],
)
def test_short_names(name, short):
    assert traces.short_name(name) == short
