"""Clusters: which devices there are, and the same recording on real ones."""

import json
import subprocess
import sys

import pytest
import torch

from utils import Cluster
from utils.hardware import get_server


@pytest.fixture
def environment(monkeypatch):
    """Sets COURSE_DEVICES and the number of GPUs that PyTorch seems to find."""

    def set_up(kind=None, gpus=0):
        monkeypatch.delenv("COURSE_DEVICES", raising=False)
        if kind is not None:
            monkeypatch.setenv("COURSE_DEVICES", kind)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: "Made GPU")

    yield set_up
    Cluster(1, server="pcie-switch", quiet=True)  # back to virtual ones


def types(cluster):
    return [device.type for device in cluster.devices]


@pytest.mark.parametrize("kind, gpus, count, server, expected", [
    (None, 0, 4, None, "vgpu"), (None, 1, 4, None, "vgpu"), (None, 4, 4, None, "cuda"),
    (None, 8, 1, None, "cuda"), (None, 8, 4, "dgx1-v100", "vgpu"), ("virtual", 8, 4, None, "vgpu"),
    ("cpu", 8, 4, None, "cpu"), ("cpu", 0, 2, "dgx1-v100", "vgpu"), ("cuda", 4, 4, None, "cuda"),
    (" Virtual ", 4, 2, None, "vgpu"), ("", 0, 2, None, "vgpu"),
])  # fmt: skip
def test_which_devices_a_cluster_takes(environment, kind, gpus, count, server, expected):
    environment(kind, gpus)
    cluster = Cluster(count, server=server, quiet=True)
    assert types(cluster) == [expected] * count
    assert cluster.simulated == (expected == "vgpu") and len(cluster) == count
    if expected != "cpu":
        assert [device.index for device in cluster.devices] == list(range(count))


def test_it_says_once_what_they_are(environment, capsys):
    environment()
    Cluster(4)
    Cluster(2, server="pcie-switch")
    Cluster(1, quiet=True)
    environment(gpus=2)
    Cluster(2)
    environment("cpu")
    Cluster(3)
    assert capsys.readouterr().out.splitlines() == [
        "4 × V100 SXM2 16 GB on dgx1-v100: vgpu:0 to vgpu:3 (simulated)",
        "2 × V100 SXM2 16 GB on pcie-switch: vgpu:0 to vgpu:1 (simulated)",
        "2 × Made GPU: cuda:0 to cuda:1 (real)",
        "3 × this machine's CPU: cpu (real)",
    ]


@pytest.mark.parametrize("count", [0, -1, 2.0, True, None, "4"])
def test_counts_that_are_none(count):
    with pytest.raises(ValueError, match="whole number of devices, at least 1"):
        Cluster(count, quiet=True)


def test_what_is_not_there(environment):
    environment("cuda", gpus=1)
    with pytest.raises(ValueError, match="2 GPUs were asked for and this machine has 1"):
        Cluster(2)
    environment("tpu")
    with pytest.raises(ValueError, match="COURSE_DEVICES is 'tpu'; it can be virtual, cpu, cuda"):
        Cluster(2)
    environment()
    with pytest.raises(ValueError, match="no server 'dgx9'; choose one of pcie-switch"):
        Cluster(2, server="dgx9")
    with pytest.raises(ValueError, match='16 GPUs.*dgx1-v100 holds 8.*network="ethernet-100g"'):
        Cluster(16, server="dgx1-v100")
    for count in (4, 16):  # also where one machine would do
        with pytest.raises(ValueError, match="no network 'token-ring'"):
            Cluster(count, server="dgx1-v100", network="token-ring")
    with pytest.raises(ValueError, match="one process can name 128 devices, not 129"):
        Cluster(129, server="dgx1-v100", network="ethernet-100g")


def test_several_machines():
    cluster = Cluster(12, server="dgx1-v100", network="ethernet-100g", quiet=True)
    assert len(cluster.devices) == 12 and cluster.devices[11] == torch.device("vgpu:11")
    x = torch.ones(1_250_000, device="vgpu:2")
    with cluster.record() as timeline:
        x.to("vgpu:3"), x.to("vgpu:10")
    near, far = (e for e in timeline.events if e.kind == "communication")
    assert near.rows == ("gpu2→gpu3",) and {"cpu0→network", "network→cpu1"} <= set(far.rows)
    assert far.duration > 5e6 / 12e9 > near.duration


def test_a_server_of_ones_own():
    server = get_server("pcie-switch").with_links("PCIe", bandwidth=1e9, latency=0.0)
    cluster = Cluster(2, server=server.replace(name="slow"), quiet=True)
    assert cluster.name == "2 × V100 SXM2 16 GB on slow"
    x = torch.ones(250_000, device="vgpu:0")
    with cluster.record() as timeline:
        x.to("vgpu:1")
    assert timeline.wire_time() == pytest.approx(1e-3)
    assert timeline.machine == cluster.name and timeline.devices == ["gpu0", "gpu1"]


def test_the_table_of_memory():
    cluster = Cluster(2, server="pcie-switch", quiet=True)
    x = torch.ones(1000, 250, device="vgpu:1")
    table = cluster.memory()
    assert list(table.index) == ["vgpu:0", "vgpu:1"] and table.columns.name == "MB"
    assert list(table.columns) == ["parameters", "gradients", "activations", "optimizer",
                                   "buffers", "other", "in use", "peak", "capacity"]  # fmt: skip
    assert table.loc["vgpu:1", ["other", "in use", "capacity"]].tolist() == [1, 1, 16_000]
    del x
    assert cluster.memory()["peak"].tolist() == [0, 1]
    cluster.reset_peak_memory()
    assert cluster.memory()["peak"].tolist() == [0, 0]


def test_recording_on_the_cpu(environment):
    """The profiler of PyTorch, on the device that every machine has."""
    environment("cpu")
    cluster = Cluster(2, quiet=True)
    x = torch.ones(100, 100, device=cluster.devices[1])
    with cluster.record() as timeline:
        (x @ x).sum().item()
    assert [event.name for event in timeline.events] == ["matmul", "sum", "item"]
    assert {event.rows for event in timeline.events} == {("cpu",)} and timeline.devices == ["cpu"]
    assert 0 < timeline.busy("cpu") <= timeline.duration and not timeline.simulated
    assert timeline.title == "measured on 2 × this machine's CPU"
    with cluster.record() as nothing:
        pass
    assert (nothing.events, nothing.devices, nothing.duration) == ([], ["cpu"], 0)
    with pytest.raises(KeyError):
        with cluster.record() as broken:
            x + 1
            raise KeyError
    assert [event.name for event in broken.events] == ["add"]
    with pytest.raises(RuntimeError, match="one first"):
        with cluster.record() as outer:
            x + 1
            with cluster.record():
                pass
    assert [event.name for event in outer.events] == ["add"]
    with cluster.record() as after:
        x + 1
    assert len(after.events) == 1
    cluster.synchronize()
    cluster.reset_peak_memory()
    with pytest.raises(RuntimeError, match="these devices are the CPU"):
        cluster.memory()


def test_recording_writes_nothing_to_the_notebook():
    program = """
import os
os.environ["COURSE_DEVICES"] = "cpu"
import torch
from utils import Cluster
cluster = Cluster(1, quiet=True)
with cluster.record() as timeline:
    torch.ones(3) + 1
assert len(timeline.events) == 2
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def slice_of(name, category, start, duration, **arguments):
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration, "pid": 0,
            "tid": 7, "args": arguments}  # fmt: skip


class Profile:
    """Stands for torch.profiler.profile on a machine with two GPUs."""

    def __init__(self, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def export_chrome_trace(self, path):
        kernel = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>()"
        events = [
            {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
            slice_of("cudaLaunchKernel", "cuda_runtime", 1000, 5),
            slice_of(kernel, "kernel", 1010, 30, device=0, stream=7),
            slice_of(kernel, "kernel", 1020, 30, device=1, stream=7),
            slice_of("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 1050, 40, device=0,
                     fromDevice=0, inDevice=0, toDevice=1, bytes=4000),
            slice_of("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 1100, 10, device=1, bytes=4),
            slice_of("cudaDeviceSynchronize", "cuda_runtime", 1005, 115),
        ]  # fmt: skip
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events}, file)


def test_recording_on_gpus(environment, monkeypatch):
    """What the profiler of CUDA devices writes becomes the same object."""
    environment(gpus=3)
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: calls.append(("wait", d.index)))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: 1000 * (d.index + 1))
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    cluster = Cluster(3, quiet=True)
    with cluster.record() as timeline:
        calls.append("work")
    waits = [("wait", i) for i in range(3)]
    assert calls == [*waits, "reset", "reset", "reset", "work", *waits]
    assert timeline.devices == ["gpu0", "gpu1", "gpu2"] and not timeline.simulated
    assert timeline.title == "measured on 3 × Made GPU"
    assert timeline.duration == pytest.approx(120e-6)
    assert [timeline.busy(d) for d in timeline.devices] == pytest.approx([30e-6, 30e-6, 0])
    assert timeline.bytes_sent("gpu0") == 4000 and timeline.wire_time() == pytest.approx(50e-6)
    assert timeline.peak_memory == [{"other": 1000}, {"other": 2000}, {"other": 3000}]
    table = timeline.summary()
    assert table["peak memory (MB)"].tolist() == [0.001, 0.002, 0.003]
    assert table["exposed communication (ms)"].tolist() == pytest.approx([0.04, 0.05, 0])
    assert table.columns.name == "measured"
