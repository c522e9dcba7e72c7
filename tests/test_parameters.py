"""Copies of parameters: leaves with gradients of their own, equal replicas that share nothing."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from utils import Cluster
from utils.data import rank_generators
from utils.models import lenet, mlp
from utils.parameters import broadcast_parameters, check_replicas, get_params, replicate, tensors_of

WORLDS = [1, 2, 3, 4, 5, 8]


@pytest.fixture
def devices():
    return Cluster(8, server="dgx1-v100", quiet=True).devices


class Everything(nn.Module):
    """All that a module can hold: tied, frozen, empty and scalar tensors, buffers of any dtype."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.body[0].weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.randn(0, 2))
        self.small = nn.Parameter(torch.randn(3).half())
        self.columns = nn.Parameter(torch.randn(3, 2).T)
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.register_buffer("unsaved", torch.randn(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, X):
        return self.body(self.tied(X) * self.scale)


def build(seed, make=Everything):
    torch.manual_seed(seed)
    module = make()
    if make is Everything:
        module(torch.randn(8, 4))  # moves BatchNorm's running averages
    return module


def values(module):
    """The module's tensors on the CPU, by name; found without `tensors_of`."""
    found = {}
    for prefix, part in module.named_modules():
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                found[f"{prefix}.{name}"] = tensor.detach().cpu().clone()
    return found


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- get_params ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("target", [0, 1, 7, "cpu"])
@pytest.mark.parametrize("source", [0, 1, "cpu"])
def test_copies_are_leaves_with_their_own_gradient(devices, source, target, dtype):
    place, target = (d if d == "cpu" else devices[d] for d in (source, target))
    wants = torch.arange(6.0).reshape(2, 3).to(place).requires_grad_()
    plain = torch.ones(2, device=place)
    parameter = nn.Parameter(torch.randn((), device=place))
    frozen = nn.Parameter(torch.zeros(0, 3, device=place), requires_grad=False)
    originals = [wants, plain, parameter, frozen, wants.detach().T]
    made = get_params(originals, target, dtype)
    for original, new in zip(originals, made, strict=True):
        assert new.is_leaf and new.requires_grad and new.grad_fn is None
        assert new.device == torch.device(target) and new.dtype == (dtype or torch.float32)
        assert new.shape == original.shape
        assert torch.equal(new.detach().cpu(), original.detach().cpu().to(new.dtype))
        assert new.numel() == 0 or new.data_ptr() != original.data_ptr()
        (new * new).sum().backward()
        assert torch.equal(new.grad.cpu(), 2 * new.detach().cpu())
        assert original.grad is None


def test_copies_of_a_result_do_not_lead_back_to_its_graph(devices):
    w = torch.ones(3, device=devices[0], requires_grad=True)
    [new] = get_params([w * 2], devices[1])
    new.sum().backward()
    assert new.is_leaf and w.grad is None and torch.equal(new.grad.cpu(), torch.ones(3))


@pytest.mark.parametrize("world", WORLDS)
def test_training_one_copy_changes_no_other(devices, world):
    originals = list(build(0, lenet).to(devices[0]).parameters())
    before = [p.detach().cpu().clone() for p in originals]
    copies = [get_params(originals, device) for device in devices[:world]]
    for k, params in enumerate(copies):
        optimizer = torch.optim.SGD(params, lr=k + 1.0)
        sum(p.sum() for p in params).backward()
        optimizer.step()
    for k, params in enumerate(copies):
        for p, old in zip(params, before):
            assert torch.equal(p.detach().cpu(), old - (k + 1.0))
    assert all(torch.equal(p.detach().cpu(), old) for p, old in zip(originals, before))


def test_copies_take_memory_of_their_own():
    cluster = Cluster(2, server="pcie-switch", quiet=True)
    originals = list(lenet().to(cluster.devices[0]).parameters())
    copies = [get_params(originals, device) for device in cluster.devices]
    held = cluster.memory()["parameters"] * 1e6
    assert held.round().tolist() == [2 * 4 * 129_068, 4 * 129_068]
    del copies


def test_without_parameters_there_are_no_copies(devices):
    assert get_params([], devices[0]) == []
    assert get_params(iter([torch.ones(1)]), devices[0])[0].device == devices[0]


def test_integers_cannot_have_gradients(devices):
    with pytest.raises(RuntimeError, match="floating point"):
        get_params([torch.arange(3)], devices[0])


# --- replicate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["cpu", 0, 1])
@pytest.mark.parametrize("world", WORLDS)
def test_replicas_are_equal_and_independent(devices, world, start):
    module = build(0).to(start if start == "cpu" else devices[start])
    before = values(module)
    replicas = replicate(module, devices[:world])
    assert len({id(r) for r in [module, *replicas]}) == world + 1
    for k, (replica, device) in enumerate(zip(replicas, devices)):
        assert same(values(replica), before)
        assert {t.device for t in tensors_of(replica).values()} == {device}
        assert [p.requires_grad for p in replica.parameters()] == [
            p.requires_grad for p in module.parameters()
        ]
        assert replica.tied.weight is replica.body[0].weight
        with torch.no_grad():
            for tensor in tensors_of(replica).values():
                tensor.zero_() if tensor.dtype == torch.bool else tensor.add_(k + 1)
    assert same(values(module), before)
    for k, replica in enumerate(replicas):
        assert torch.equal(replica.frozen.cpu(), before[".frozen"] + (k + 1))


def test_replicas_start_without_gradients(devices):
    module = build(0, mlp)
    module(torch.ones(2, 784)).sum().backward()
    [replica] = replicate(module, devices[1:2])
    assert all(p.grad is None for p in replica.parameters())
    assert all(p.grad is not None for p in module.parameters())


def test_equal_replicas_and_equal_updates_stay_equal_different_starts_keep_their_distance(devices):
    """Why replicas must start equal: averaged gradients never bring different starts together."""

    def distance(replicas):
        pairs = zip(*(r.parameters() for r in replicas))
        return sum((p.cpu() - q.cpu()).square().sum() for p, q in pairs).sqrt().item()

    def train(replicas):
        generator = torch.Generator().manual_seed(0)
        for _ in range(10):
            for replica, device in zip(replicas, devices):
                replica.zero_grad()
                X = torch.randn(8, 6, generator=generator).to(device)
                replica(X).square().mean().backward()
            for params in zip(*(r.parameters() for r in replicas)):
                mean = sum(p.grad.cpu() for p in params) / len(params)
                with torch.no_grad():
                    for p in params:
                        p -= 0.1 * mean.to(p.device)

    apart = [build(seed, lambda: mlp((6, 5, 2))).to(devices[seed]) for seed in range(2)]
    start = distance(apart)
    train(apart)
    assert start > 1 and distance(apart) == pytest.approx(start, rel=1e-5)
    together = [build(seed, lambda: mlp((6, 5, 2))).to(devices[seed]) for seed in range(2)]
    broadcast_parameters(together)
    train(together)
    assert distance(together) == 0


# --- broadcast_parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), lenet, Everything])
@pytest.mark.parametrize("world", WORLDS)
def test_all_replicas_equal_the_first_bit_for_bit(devices, world, make):
    replicas = [build(seed, make).to(devices[seed]) for seed in range(world)]
    first = values(replicas[0])
    addresses = [[t.data_ptr() for t in tensors_of(r).values()] for r in replicas]
    assert broadcast_parameters(replicas) is None
    assert same(values(replicas[0]), first)
    for k, replica in enumerate(replicas):
        assert same(values(replica), first)
        assert {t.device for t in tensors_of(replica).values()} <= {devices[k]}
        assert [t.data_ptr() for t in tensors_of(replica).values()] == addresses[k]
    for replica in replicas[1:]:  # still independent
        with torch.no_grad():
            for p in replica.parameters():
                p.add_(1)
    assert same(values(replicas[0]), first)


def test_special_values_arrive_unchanged(devices):
    replicas = replicate(nn.Linear(4, 1), devices[:2])
    with torch.no_grad():
        special = [float("nan"), float("inf"), -0.0, 1e-45]
        replicas[0].weight.copy_(torch.tensor([special]))
    broadcast_parameters(replicas)
    sent, received = (r.weight.detach().cpu().view(torch.int32) for r in replicas)
    assert torch.equal(sent, received)


def test_gradients_optimizers_and_flags_are_left_alone(devices):
    replicas = [build(seed, lambda: nn.Linear(2, 1)).to(devices[seed]) for seed in range(2)]
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.1, momentum=0.9) for r in replicas]
    for replica, optimizer, device in zip(replicas, optimizers, devices):
        replica(torch.ones(1, 2, device=device)).square().sum().backward()
        optimizer.step()
    replicas[1].bias.requires_grad_(False)
    gradient = replicas[1].weight.grad.cpu().clone()
    momentum = copy.deepcopy(optimizers[1].state[replicas[1].weight]["momentum_buffer"].cpu())
    broadcast_parameters(replicas)
    assert torch.equal(replicas[1].weight.grad.cpu(), gradient)
    state = optimizers[1].state[replicas[1].weight]
    assert torch.equal(state["momentum_buffer"].cpu(), momentum)
    assert not replicas[1].bias.requires_grad
    assert replicas[1].weight.is_leaf and replicas[1].weight.requires_grad


@pytest.mark.parametrize(
    "other, message",
    [
        (lambda: nn.Linear(3, 3), r"weight is float32 \(3, 3\), in replica 0 it is float32 \(2, 3"),
        (lambda: nn.Linear(3, 1), r"replica 2 does not match .*\(1, 3\)"),  # would be broadcastable
        (lambda: nn.Linear(3, 2, bias=False), "bias is missing, in replica 0"),
        (lambda: nn.Linear(3, 2).double(), "weight is float64"),
        (lambda: nn.Sequential(nn.Linear(3, 2)), "weight is missing"),
    ],
)
def test_replicas_that_do_not_match_are_refused_unchanged(devices, other, message):
    replicas = [nn.Linear(3, 2), nn.Linear(3, 2), other()]
    replicas = [replica.to(device) for replica, device in zip(replicas, devices)]
    before = [values(replica) for replica in replicas]
    with pytest.raises(ValueError, match=message):
        broadcast_parameters(replicas)
    assert all(same(values(replica), old) for replica, old in zip(replicas, before))


def test_more_tensors_than_the_first_are_refused():
    with pytest.raises(ValueError, match="replica 1 .* bias is float32 .* in replica 0 it is miss"):
        check_replicas([nn.Linear(3, 2, bias=False), nn.Linear(3, 2)])


def test_no_replicas():
    with pytest.raises(ValueError, match="list is empty"):
        broadcast_parameters([])


def test_on_plain_cpu_tensors_too():
    replicas = [build(seed) for seed in range(3)]
    broadcast_parameters(replicas)
    assert same(values(replicas[2]), values(replicas[0]))


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=4), world=st.integers(1, 4))
def test_any_sizes_any_world(sizes, world):
    cluster = Cluster(world, server="pcie-switch", quiet=True)
    replicas = [build(k, lambda: mlp(sizes)).to(d) for k, d in enumerate(cluster.devices)]
    with cluster.record() as timeline:
        broadcast_parameters(replicas)
    assert all(same(values(replica), values(replicas[0])) for replica in replicas)
    held = sum(t.nbytes for t in tensors_of(replicas[0]).values())
    assert timeline.bytes_sent(0) == (world - 1) * held


# --- seeds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_data_differs_between_ranks_weights_do_not(world):
    def draw():
        pairs = [rank_generators(7, world, rank) for rank in range(world)]
        data = [torch.rand(5, generator=data).tolist() for data, _ in pairs]
        weights = [torch.rand(5, generator=weights).tolist() for _, weights in pairs]
        return data, weights

    data, weights = draw()
    assert len({tuple(numbers) for numbers in data}) == world
    assert len({tuple(numbers) for numbers in weights}) == 1
    assert tuple(weights[0]) not in {tuple(numbers) for numbers in data}
    assert draw() == (data, weights)


def test_drawing_data_does_not_shift_the_weights():
    data, weights = rank_generators(7, 2, 0)
    torch.rand(100, generator=data)
    _, fresh = rank_generators(7, 2, 1)
    assert torch.equal(torch.rand(5, generator=weights), torch.rand(5, generator=fresh))


def test_other_seeds_give_other_numbers_and_the_same_rank_another_seed():
    first, second = (
        [torch.rand(3, generator=g).tolist() for g in rank_generators(seed, 4, 2)]
        for seed in (0, 1)
    )
    assert first[0] != second[0] and first[1] != second[1]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there(rank):
    with pytest.raises(ValueError, match=r"the 4 ranks 0\.\.3"):
        rank_generators(0, 4, rank)
