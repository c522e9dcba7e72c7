"""Where to cut a network: the best cuts against all cuts, and what layers weigh."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

from utils import Cluster, run, vgpu
from utils.costs import training_bytes
from utils.hardware import get_server
from utils.models import Residual, lenet, mlp
from utils.pipeline import (
    activation_bytes,
    balanced_cuts,
    best_cuts,
    cut_network,
    fastest_cuts_that_fit,
    layer_memory,
    layer_times,
    memory_cuts,
    parameter_counts,
    stage_bytes,
)


@pytest.fixture(autouse=True)
def leave_no_cluster():
    yield
    vgpu.stop()


def all_cuts(layers, stages):
    return [list(cuts) for cuts in itertools.combinations(range(1, layers), stages - 1)]


def worst(cuts, layers, cost):
    edges = [0, *cuts, layers]
    return max(cost(stage, a, b) for stage, (a, b) in enumerate(zip(edges, edges[1:])))


layer_costs = st.lists(st.integers(0, 6), min_size=1, max_size=9)


@settings(deadline=None)
@given(layer_costs, st.integers(1, 5))
def test_balanced_cuts_are_the_best_there_are(costs, stages):
    stages = min(stages, len(costs))
    cuts = balanced_cuts(costs, stages)
    value = lambda cuts: worst(cuts, len(costs), lambda _, a, b: sum(costs[a:b]))  # noqa: E731
    assert value(cuts) == min(map(value, all_cuts(len(costs), stages)))
    assert balanced_cuts([0.25 * cost for cost in costs], stages) == cuts


@settings(deadline=None)
@given(layer_costs, st.integers(2, 4), st.data())
def test_best_cuts_with_stages_that_differ(costs, stages, data):
    stages = min(stages, len(costs))
    factors = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))

    def cost(stage, first, end):
        return factors[stage] * sum(costs[first:end]) + (end - first)

    best = min(worst(cuts, len(costs), cost) for cuts in all_cuts(len(costs), stages))
    assert worst(best_cuts(len(costs), stages, cost), len(costs), cost) == best


@settings(deadline=None)
@given(layer_costs, st.integers(2, 4))
def test_equally_good_cuts(costs, stages):
    """What precedes the last stage is cut best too; then the most even cuts, then the latest."""
    stages = min(stages, len(costs))
    cuts = balanced_cuts(costs, stages)
    for first in range(max(1, stages - 1), len(costs)) if cuts else ():
        other = [*balanced_cuts(costs[:first], stages - 1), first]
        assert rank(cuts, costs) <= rank(other, costs)
        assert other[-1] != cuts[-1] or other == cuts


def rank(cuts, costs):
    edges = [0, *cuts, len(costs)]
    sums = [sum(costs[a:b]) for a, b in zip(edges, edges[1:])]
    return max(sums), sum(cost**2 for cost in sums), [-cut for cut in cuts]


def test_equal_layers_and_ties():
    assert balanced_cuts([1] * 8, 4) == [2, 4, 6]
    assert balanced_cuts([1] * 7, 3) == [3, 5]  # 3 + 2 + 2
    assert balanced_cuts([0, 5, 0, 0, 5, 0], 2) == [4]
    assert balanced_cuts([3], 1) == []


def test_what_cannot_be_cut():
    with pytest.raises(ValueError, match="2 layers cannot be given to 3 stages"):
        balanced_cuts([1, 1], 3)
    with pytest.raises(ValueError, match="2 layers cannot be given to 0 stages"):
        balanced_cuts([1, 1], 0)
    for cuts in ([3], [0], [2, 2], [2, 1]):
        with pytest.raises(ValueError, match="rising numbers of layers, from 1 to 2"):
            cut_network(mlp((4, 4, 2))[1:], cuts)


def test_pieces_are_the_networks_own_layers_under_their_names():
    net = lenet()
    pieces = cut_network(net, [3, 7])
    assert [len(piece) for piece in pieces] == [3, 4, 3]
    names = [name for piece in pieces for name in piece.state_dict()]
    assert names == list(net.state_dict())
    assert pieces[2][0] is net[7]
    named = nn.Sequential()
    named.add_module("first", nn.Linear(2, 2))
    named.add_module("second", nn.Linear(2, 2))
    assert list(cut_network(named, [1])[1].state_dict()) == ["second.weight", "second.bias"]


def test_lenet_by_parameters():
    """A layer with 80 % of the parameters: no cut can make it smaller."""
    counts = parameter_counts(lenet())
    assert sum(counts) == 129_068 and max(counts) == 800 * 128 + 128
    cuts = balanced_cuts(counts, 2)
    assert cuts == [7]
    assert [sum(p.numel() for p in piece.parameters()) for piece in cut_network(lenet(), cuts)] == [
        sum(counts[:7]), sum(counts[7:])
    ]  # fmt: skip


# --- time ---------------------------------------------------------------------------------------


def test_modelled_times_are_the_chips():
    """Large products on one V100, forward and backward: twice as many FLOPs back."""
    net, rows = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 512)), torch.ones(512, 2048)
    times = run(layer_times, ranks=1, on="virtual", args=(net, rows)).values[0]
    chip = get_server("dgx1-v100").chips[0]
    for (forward, backward), width in zip(times, (2048, 512)):
        expected = 2 * 512 * 2048 * width / (chip.fp32 * chip.compute_efficiency)
        assert expected < forward < expected + 2 * chip.launch + 20e-6
        assert 2 * expected < backward < 2 * expected + 6 * chip.launch + 60e-6


def test_times_without_data_are_the_same():
    """A network that is built on the device in shape-only mode, which cannot be moved."""

    def shapes_only(comm):
        with FakeTensorMode(), torch.device(comm.device):
            return layer_times(comm, lenet(), torch.empty(64, 1, 28, 28))

    with_data = run(layer_times, 1, "virtual", (lenet(), torch.ones(64, 1, 28, 28))).values[0]
    for found, expected in zip(run(shapes_only, 1, "virtual").values[0], with_data, strict=True):
        assert found == pytest.approx(expected, abs=1e-12)  # a picosecond


def test_measured_times_find_the_heavy_layer():
    net = nn.Sequential(nn.Linear(64, 1500), nn.Linear(1500, 1500), nn.Linear(1500, 8))
    times = run(layer_times, ranks=1, on="processes", args=(net, torch.ones(256, 64))).values[0]
    assert len(times) == 3 and all(forward > 0 and backward > 0 for forward, backward in times)
    assert sum(times[1]) > sum(times[2])
    assert balanced_cuts([sum(pair) for pair in times], 2) in ([1], [2])


# --- memory -------------------------------------------------------------------------------------

NETWORKS = {
    "LeNet": (lenet, (6, 1, 28, 28)),
    "MLP": (lambda: mlp((20, 30, 10)), (5, 20)),
    "residual": (lambda: nn.Sequential(Residual(3, 4, 2), Residual(4, 4)), (2, 3, 8, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 9), nn.Dropout(), nn.LayerNorm(9)), (4, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_activations_by_the_ledger(name):
    """For every stretch of layers: what a device holds after a forward pass, to the byte."""
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    net = build()
    X = torch.randn(shape)
    layers = layer_memory(net, torch.cat([X, X])[: len(X)])  # a view of more rows counts its own
    device = Cluster(1, server="dgx1-v100", quiet=True).devices[0]
    inputs = [X]
    for layer in net:
        inputs.append(layer(inputs[-1]).detach())
    for first, end in itertools.combinations(range(len(net) + 1), 2):
        piece = nn.Sequential(*net[first:end]).to(device)
        before = torch.vgpu.memory_allocated(device)
        x = inputs[first].to(device).requires_grad_()
        y = piece(x)
        held = torch.vgpu.memory_allocated(device) - before
        assert held == activation_bytes(layers[first:end]), (first, end)
        assert activation_bytes(layers[first:end], recompute=True) == x.nbytes
        del x, y


def test_a_stage_is_parameters_gradients_state_and_what_is_in_flight():
    net = mlp((20, 30, 10))
    layers = layer_memory(net, torch.ones(5, 20))
    parameters = 20 * 30 + 30 + 30 * 10 + 10
    activations = 4 * 5 * (20 + 30 + 10)  # input, ReLU's output, output
    assert stage_bytes(layers, 3, "adam") == training_bytes(parameters, "adam") + 3 * activations
    assert stage_bytes(layers, 0) == training_bytes(parameters)


def test_cuts_by_memory_give_early_stages_less():
    """They have more in flight in 1F1B; GPipe's have all the same."""
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    layers = layer_memory(net, torch.ones(512, 16))
    cuts = memory_cuts(layers, [4, 3, 2, 1])
    edges = [0, *cuts, 12]
    sizes = [b - a for a, b in zip(edges, edges[1:])]
    assert sizes == sorted(sizes) and sizes[0] < 3 < sizes[-1]
    assert memory_cuts(layers, [8, 8, 8, 8]) == [3, 6, 9]
    cost = lambda s, a, b: stage_bytes(layers[a:b], 4 - s)  # noqa: E731
    assert worst(cuts, 12, cost) == min(worst(other, 12, cost) for other in all_cuts(12, 4))


def test_the_fastest_cuts_that_fit():
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    layers = layer_memory(net, torch.ones(64, 16))
    times, in_flight = [5.0, 1, 1, 1, 1, 1], [2, 1]
    cost = lambda s, a, b: stage_bytes(layers[a:b], in_flight[s])  # noqa: E731
    assert (
        fastest_cuts_that_fit(times, layers, in_flight, math.inf) == balanced_cuts(times, 2) == [1]
    )
    tight = worst([2], 6, cost)
    fitting = [cuts for cuts in all_cuts(6, 2) if worst(cuts, 6, cost) <= tight]
    assert [1] not in fitting
    best = min(max(sum(times[: c[0]]), sum(times[c[0] :])) for c in fitting)
    (cut,) = fastest_cuts_that_fit(times, layers, in_flight, tight)
    assert max(sum(times[:cut]), sum(times[cut:])) == best and [cut] in fitting
    with pytest.raises(ValueError, match="no way to cut 6 layers into 2 stages fits"):
        fastest_cuts_that_fit(times, layers, in_flight, 100)
