"""Recordings of virtual GPUs: what they hold, that they repeat exactly, and without any data."""

import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from utils import Cluster


@pytest.fixture
def cluster():
    return Cluster(4, server="pcie-switch", quiet=True)


def events(timeline, kind):
    return [event for event in timeline.events if event.kind == kind]


def test_recordings(cluster):
    x = torch.ones(4, device="vgpu:0")
    (x @ x).item()
    with cluster.record() as outer:
        x + 1
        with cluster.record() as inner:
            x + 1
        x + 1
    assert [len(events(t, "compute")) for t in (outer, inner)] == [3, 1]
    assert inner.events[0].start == 0 and inner.duration < outer.duration
    with pytest.raises(ValueError):
        with cluster.record() as broken:
            x + 1
            raise ValueError
    assert len(broken.events) == 2 and broken.duration > 0 and not cluster.machine.recordings
    with cluster.record() as empty:
        pass
    assert (empty.events, empty.duration, empty.simulated) == ([], 0, True)
    x + 1
    assert len(broken.events) == 2


STEP = """
import torch
from torch import nn
from utils import Cluster
cluster = Cluster(2, server="dgx1-v100", quiet=True)
def step():
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).to(d)
            for d in cluster.devices]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    with cluster.record() as timeline:
        for net, device in zip(nets, cluster.devices):
            x = torch.randn(8, 1, 8, 8).to(device)
            nn.functional.cross_entropy(net(x), torch.zeros(8, dtype=torch.long).to(device)).backward()
        for a, b in zip(*(net.parameters() for net in nets)):
            a.grad += b.grad.to(a.device)
            b.grad.copy_(a.grad)
        for optimizer in optimizers:
            optimizer.step()
        nets[0][3].bias.sum().item()
    return timeline
"""  # noqa: E501


def test_the_same_timeline_always():
    names = {}
    exec(STEP, names)
    first = names["step"]()
    assert len(first.events) > 100
    assert names["step"]().events == first.events
    junk = [torch.randn(100, device="vgpu:1").sum().item() for _ in range(7)]  # the clock goes on
    torch.ones(10**6, device="vgpu:0").to("vgpu:1")
    again = names["step"]()
    assert again.events == first.events and again.duration == first.duration and len(junk) == 7
    program = STEP + "\nt = step(); print(hash((tuple(t.events), t.duration)))"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "COURSE_DEVICES": "virtual"}
    fresh = [
        subprocess.run([sys.executable, "-c", program + extra], env=environment, text=True,
                       capture_output=True, timeout=120)
        for extra in ("", "\nprint(hash((tuple(step().events), t.duration)))")
    ]  # fmt: skip
    hashes = [line for run in fresh for line in run.stdout.split()]
    assert len(hashes) == 3 and len(set(hashes)) == 1, fresh


def test_seven_billion_parameters_without_data():
    """A transformer's 32 layers over 8 devices, forward and backward, timed within seconds."""
    cluster = Cluster(8, server="hgx-h200", quiet=True)
    width, batch, length = 4096, 1, 2048
    begin = time.process_time()
    with FakeTensorMode(), torch.device("vgpu:0"):
        layers = [
            nn.TransformerEncoderLayer(
                width, 32, 4 * width, batch_first=True, device=cluster.devices[i // 4],
                dtype=torch.bfloat16,
            )
            for i in range(32)
        ]  # fmt: skip
        x = torch.empty(batch, length, width, dtype=torch.bfloat16)
        with cluster.record() as timeline:
            for layer in layers:
                x = layer(x.to(layer.linear1.weight.device))
            x.sum().backward()
    parameters = sum(p.numel() for layer in layers for p in layer.parameters())
    assert 6.4e9 < parameters < 6.6e9
    assert {p.grad.device for p in layers[9].parameters()} == {cluster.devices[2]}
    assert time.process_time() - begin < 60
    products = 6 * parameters * batch * length  # FLOPs of the weights, the usual estimate
    flops = sum(event.flops for event in timeline.events)
    assert products < flops < 1.2 * products  # and those of attention
    busy = sum(timeline.busy(device) for device in timeline.devices)
    assert flops / 794e12 < busy < timeline.duration
    memory = cluster.memory()
    assert (memory["parameters"] + memory["gradients"]).sum() == pytest.approx(4 * parameters / 1e6)
