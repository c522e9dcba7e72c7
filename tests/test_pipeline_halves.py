"""The backward pass in two halves: equal to the whole one, with no product twice."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from utils import Cluster, run, vgpu
from utils.models import Residual, lenet
from utils.pipeline import (
    chunks_of,
    cut_network,
    one_f_one_b,
    recomputing,
    run_schedule,
    zero_bubble_h1,
)
from utils.pipeline.halves import input_half


@pytest.fixture(autouse=True)
def leave_no_cluster():
    yield
    vgpu.stop()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    """The same weights, bias and matrix used again and again."""

    def __init__(self):
        super().__init__()
        self.cell, self.matrix = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.cell(x)) @ self.matrix
        return x


class Shared(nn.Module):
    """One computed weight for two layers, and one weight both with and without a detour."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.ones(5))

    def forward(self, x):
        weight = torch.tanh(self.weight) * self.scale
        return torch.tanh(x @ weight.T * self.scale) @ weight


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, Attention())


CASES = {
    "linear": (lambda: nn.Linear(6, 3), (4, 6)),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)), (4, 6)),
    "lenet": (lambda: lenet()[3:], (3, 20, 13, 13)),
    "residual": (lambda: Residual(3, 4, 2), (3, 3, 8, 8)),
    "transformer": (transformer, (2, 5, 8)),
    "recurrent": (Recurrent, (4, 6)),
    "shared": (Shared, (4, 5)),
    "lstm": (lambda: Last(nn.LSTM(5, 4, batch_first=True)), (2, 3, 5)),
    "no weights": (lambda: nn.Sequential(nn.Tanh(), nn.Flatten()), (3, 2, 2)),
    "identity": (nn.Identity, (3, 2)),
}


class Last(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("frozen", [False, True])
def test_halves_are_the_whole(name, frozen):
    """The input's gradient first, then the weights'; on top of what was there already."""
    build, shape = CASES[name]
    torch.manual_seed(0)
    module = build().double()
    for parameter in list(module.parameters())[:1] if frozen else []:
        parameter.requires_grad_(False)
    twin = copy.deepcopy(module)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for parameter in [*module.parameters(), *twin.parameters()]:
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    y = module(x)
    gradient = torch.randn_like(y)
    found, weight_half = input_half(y, gradient, x)
    assert all((p.grad == 1).all() for p in module.parameters() if p.requires_grad)
    del y
    weight_half()
    whole = x.detach().requires_grad_()
    twin(whole).backward(gradient)
    torch.testing.assert_close(found, whole.grad, rtol=1e-10, atol=1e-12)
    for own, other in zip(module.parameters(), twin.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_an_output_that_does_not_depend_on_the_input():
    layer, x = nn.Linear(2, 2), torch.ones(3, 2, requires_grad=True)
    found, weight_half = input_half(layer(torch.ones(3, 2)), torch.ones(3, 2), x)
    weight_half()
    assert found is None and torch.equal(layer.bias.grad, torch.full((2,), 3.0))


def products(timeline):
    return sum(event.flops for event in timeline.events if event.kind == "compute")


@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer"])
def test_no_product_is_computed_twice(name):
    """FLOPs of both halves together are those of the whole; each has its share."""
    build, shape = CASES[name]
    cluster = Cluster(1, server="dgx1-v100", quiet=True)
    device = cluster.devices[0]
    module, x = build().to(device), torch.randn(shape, device=device, requires_grad=True)
    y = module(x)
    with cluster.record() as whole:
        y.backward(torch.ones_like(y))
    y = module(x)
    with cluster.record() as first:
        _, weight_half = input_half(y, torch.ones_like(y), x)
    with cluster.record() as second:
        weight_half()
    assert products(first) + products(second) == products(whole)
    assert products(first) > 0 and products(second) > 0
    if name == "mlp":
        assert products(first) == products(second)


def test_memory_is_free_after_the_weight_half():
    """By the ledger: what the graph had kept goes with the weight half, not before."""
    device = Cluster(1, server="dgx1-v100", quiet=True).devices[0]
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    x = torch.ones(1000, 4, device=device, requires_grad=True)
    parameters = sum(p.nbytes for p in module.parameters())
    y = module(x)
    found, weight_half = input_half(y, torch.ones_like(y), x)
    del y
    between = torch.vgpu.memory_allocated(device)
    assert between >= parameters + x.nbytes + found.nbytes + 2 * x.nbytes  # tanh, its gradient
    weight_half()
    del weight_half
    assert torch.vgpu.memory_allocated(device) == 2 * parameters + x.nbytes + found.nbytes


# --- shape-only mode ----------------------------------------------------------------------------


def shapes_only(comm, wrap):
    """A step of a network that this machine could not hold, without its data."""
    width, p = 8192, comm.world_size
    with FakeTensorMode(), torch.device(comm.device):
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4 * p)))
        chunks = chunks_of(comm, cut_network(net, [4 * stage for stage in range(1, p)]))
        parts = [(torch.empty(512, width), torch.empty(512, width)) for _ in range(8)]
        loss = lambda outputs, targets: ((outputs - targets) ** 2).mean(1)  # noqa: E731
        shapes = [((width,), torch.float32)] * (p + 1)
        run_schedule(comm, chunks, wrap(p, 8), parts, loss, shapes=shapes)
    return comm.time()


def test_large_networks_in_shape_only_mode():
    """1F1B's first stage has more in flight than the last; zero bubble is faster."""
    results = {
        name: run(shapes_only, ranks=4, on="virtual", server="dgx-a100", args=(make,))
        for name, make in {
            "1f1b": one_f_one_b,
            "zero bubble": zero_bubble_h1,
            "again": lambda p, m: recomputing(one_f_one_b(p, m)),
        }.items()
    }
    took = {name: result.timeline.duration for name, result in results.items()}
    assert took["zero bubble"] < took["1f1b"] < took["again"]
    peaks = [kinds["activations"] for kinds in results["1f1b"].timeline.peak_memory]
    again = [kinds["activations"] for kinds in results["again"].timeline.peak_memory]
    assert peaks == sorted(peaks, reverse=True) and again[0] < peaks[0] / 2
