"""The memory ledger against counts by hand."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from utils import Cluster

KINDS = ("parameters", "gradients", "activations", "optimizer", "buffers", "other")


@pytest.fixture
def cluster():
    return Cluster(2, server="pcie-switch", quiet=True)


def held(cluster, device=0):
    """The bytes of each kind that a device holds, without those that hold nothing."""
    row = cluster.memory().iloc[device] * 1e6
    assert sum(row[list(KINDS)]) == pytest.approx(row["in use"])
    return {kind: round(row[kind]) for kind in KINDS if row[kind]}


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


P = 4 * (4 * 8 + 8 + 8 * 2 + 2)  # bytes of its parameters


@pytest.mark.parametrize("make, states", [
    (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    (lambda p: torch.optim.Adam(p), 2),
    (lambda p: torch.optim.AdamW(p, foreach=False), 2),
    (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
], ids=["SGD", "momentum", "Adam", "AdamW", "AMSGrad"])  # fmt: skip
def test_a_training_step(cluster, make, states):
    model = mlp().to("vgpu:0")
    assert held(cluster) == {"parameters": P}
    optimizer = make(model.parameters())
    x = torch.ones(3, 4, device="vgpu:0")
    for step in range(2):
        state = {"optimizer": states * P} if states and step else {}
        loss = model(x).sum()
        # the ReLU's result, which the second product keeps, and the loss
        activations = 4 * (3 * 8 + 1)
        assert held(cluster) == {
            "parameters": P, "activations": activations, "other": 4 * 12, **state
        }  # fmt: skip
        loss.backward()
        assert held(cluster) == {
            "parameters": P, "gradients": P, "activations": 4, "other": 4 * 12, **state
        }  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        del loss
        state = {"optimizer": states * P} if states else {}
        assert held(cluster) == {"parameters": P, "other": 4 * 12, **state}
    del model, optimizer, x
    gc.collect()
    assert held(cluster) == {}


def test_activations_by_hand(cluster):
    model = mlp().to("vgpu:0")
    x = torch.ones(3, 4, device="vgpu:0")
    hidden = model[0](x)
    assert held(cluster)["activations"] == 4 * 3 * 8
    rectified = model[1](hidden)
    assert held(cluster)["activations"] == 2 * 4 * 3 * 8
    del hidden  # a ReLU keeps its result only
    assert held(cluster)["activations"] == 4 * 3 * 8
    y = model[2](rectified)
    del rectified  # the product keeps it
    assert held(cluster)["activations"] == 4 * (3 * 8 + 3 * 2)
    del y
    assert "activations" not in held(cluster)
    with torch.no_grad():
        z = model(x)
    assert z.requires_grad is False
    assert "activations" not in held(cluster) and held(cluster)["other"] == 4 * (12 + 6)


def test_buffers_and_copies_of_modules(cluster):
    plain = nn.BatchNorm1d(5)
    module = plain.to("vgpu:0")
    expected = {"parameters": 4 * 2 * 5, "buffers": 4 * 2 * 5 + 8}
    assert held(cluster) == expected
    copies = [p.detach().to("vgpu:1", copy=True).requires_grad_() for p in module.parameters()]
    assert held(cluster, 1) == {"parameters": 4 * 2 * 5} and len(copies) == 2
    made = nn.BatchNorm1d(5, device="vgpu:1")
    assert held(cluster, 1) == {"parameters": 2 * 4 * 2 * 5, "buffers": 4 * 2 * 5 + 8}
    module.cpu()
    assert held(cluster) == {} and made.weight.device.index == 1


def test_views_share_and_the_last_one_frees(cluster):
    x = torch.ones(1000, device="vgpu:0")
    part = x[10:20]
    views = [x.view(10, 100).T, x.detach(), part[1:]]
    assert held(cluster) == {"other": 4000}
    del x, views
    assert held(cluster) == {"other": 4000}  # ten numbers keep all thousand
    part = part.clone()
    assert held(cluster) == {"other": 40}
    cycle = [part]
    cycle.append(cycle)
    del part, cycle
    gc.collect()
    assert held(cluster) == {}


def test_the_peak(cluster):
    a = torch.ones(250, device="vgpu:0")
    b = a + 1
    del a
    c = b + 1  # the place of a
    assert torch.vgpu.max_memory_allocated(0) == 2000 == torch.vgpu.memory_allocated(0)
    del c
    assert cluster.memory()["peak"].iloc[0] == pytest.approx(0.002)
    with cluster.record() as timeline:  # looks for a peak of its own
        d = b + 1
        del d
        e = torch.ones(1000, device="vgpu:1", requires_grad=True)
        (e * 2).sum().backward()
    assert (
        timeline.peak_memory[0]["other"] == 2000 and sum(timeline.peak_memory[0].values()) == 2000
    )
    peak = timeline.peak_memory[1]
    assert peak["parameters"] == 4000 and 4000 <= sum(peak.values()) - 4000 <= 8004 + 4
    torch.vgpu.reset_peak_memory_stats(0)
    cluster.reset_peak_memory()
    assert torch.vgpu.max_memory_allocated(0) == 1000


def test_checkpointing_lowers_the_peak(cluster):
    def peak(run):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
        layers.to("vgpu:0")
        with cluster.record() as timeline:
            x = torch.ones(256, 64, device="vgpu:0", requires_grad=True)
            for layer in layers:
                x = run(layer, x)
            x.sum().backward()
        return timeline.peak_memory[0]["activations"]

    kept = peak(lambda layer, x: layer(x))
    recomputed = peak(lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    one = 256 * 64 * 4
    assert kept >= 8 * one and recomputed >= 7 * one
    assert kept - recomputed >= 0 and kept <= 18 * one


def test_out_of_memory_lists_what_is_resident(cluster):
    weight = nn.Parameter(torch.empty(1000, 1000)).to("vgpu:1")
    nn.Linear(2, 2).to("vgpu:1")  # gone at once
    with FakeTensorMode():
        big = torch.empty(3_000_000_000, device="vgpu:1")
        for make in (
            lambda x: torch.empty(10**9, 2, device="vgpu:1"),
            lambda x: torch.ones(2 * 10**9, device="vgpu:0").to("vgpu:1"),
            lambda x: x + 1,
            lambda x: x.double(),
            torch.clone,
            torch.zeros_like,
        ):
            with pytest.raises(torch.OutOfMemoryError) as error:
                make(big)
            text = str(error.value)
            assert "vgpu:1 is out of memory: asked for" in text
            assert (
                "12.00 GB of its 16.00 GB are in use (parameters 4.00 MB, other 12.00 GB)" in text
            )
            assert "12.00 GB other float32 (3000000000,)" in text
            assert "4.00 MB parameters float32 (1000, 1000)" in text
        assert torch.vgpu.memory_allocated(1) == 12_004_000_000  # nothing was entered
        del big, error  # an error keeps the tensors of the functions it came through
        gc.collect()
        assert torch.empty(3_900_000_000, device="vgpu:1").numel() == 3_900_000_000
    assert weight.device.index == 1


def test_memory_that_real_data_does_not_fit_either(cluster):
    with pytest.raises(torch.OutOfMemoryError, match="asked for 4000.00 GB"):
        torch.empty(10**12, device="vgpu:0")  # refused before the host tries
    with pytest.raises(torch.OutOfMemoryError, match="0 B of its 16.00 GB.*nothing"):
        torch.ones(5 * 10**9, device="vgpu:0")


def test_an_optimizer_whose_step_failed_does_not_own_what_follows(cluster):
    class Failing(torch.optim.SGD):
        def step(self):
            raise KeyError("in the step")

    w = torch.ones(10, device="vgpu:0", requires_grad=True)
    with pytest.raises(KeyError):
        Failing([w], lr=0.1).step()
    x = torch.ones(5, device="vgpu:0")
    assert held(cluster) == {"other": 60} and (w * x[0]).requires_grad
    assert held(cluster) == {"parameters": 40, "other": 20}  # known by its use


def test_a_hundred_thousand_tensors(cluster):
    many = [torch.empty(1, device="vgpu:0") for _ in range(100_000)]
    assert held(cluster) == {"other": 400_000}
    del many
    assert held(cluster) == {}


def test_gradients_in_a_hook_and_accumulated(cluster):
    w = torch.ones(100, device="vgpu:0", requires_grad=True)
    (w * 2).sum().backward()
    (w * 3).sum().backward()
    assert held(cluster) == {"parameters": 400, "gradients": 400}
    w.grad = None
    assert held(cluster) == {"parameters": 400}
