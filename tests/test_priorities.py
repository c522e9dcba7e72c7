"""The first layers' gradients first: the published toy, and the same training as without."""

import functools
import sys
import time

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from utils.data_parallel import (
    DistributedDataParallel,
    PriorityDataParallel,
    first_come,
    first_layers_first,
)
from utils.data_parallel.priorities import Queue
from utils.hardware import ideal_server
from utils.ranks import run
from utils.ranks.collectives import ring_all_reduce

PLACES = {
    "virtual": {"on": "virtual", "server": "dgx1-v100"},
    "gloo": {"on": "processes", "transport": "gloo"},
    "shared": {"on": "processes", "transport": "shared"},
}
URGENCIES = (first_come, first_layers_first)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Slow(torch.autograd.Function):
    """X times the first weight; takes a given time, forward and backward."""

    @staticmethod
    def forward(ctx, X, weights, seconds):
        ctx.seconds = seconds
        ctx.save_for_backward(X, weights)
        time.sleep(seconds)
        return X * weights[0]

    @staticmethod
    def backward(ctx, gradient):
        X, weights = ctx.saved_tensors
        time.sleep(ctx.seconds)
        grads = torch.zeros_like(weights)
        grads[0] = (gradient * X).sum()
        return gradient * weights[0], grads, None


class SlowLayer(nn.Module):
    def __init__(self, size, seconds):
        super().__init__()
        self.weights, self.seconds = nn.Parameter(torch.ones(size)), seconds

    def forward(self, X):
        return Slow.apply(X, self.weights, self.seconds)


SIZE = 1_000_000  # float32 values, with one flag: one unit of communication


def toy(comm, part, urgency, unit):
    """Time from the start of a backward pass to the end of the next forward pass, in units."""
    layers = [SlowLayer(k * SIZE - 1, unit) for k in (1, 3, 3)]
    model = nn.Sequential(*layers).to(comm.device)
    order = []

    def all_reduce(comm, tensor):
        order.append(tensor.numel())
        ring_all_reduce(comm, tensor)

    ddp = PriorityDataParallel(
        model, comm, functools.partial(torch.optim.SGD, lr=0.1), part, urgency, all_reduce
    )
    X = torch.ones(1, device=comm.device)
    result = ddp(X)
    comm.barrier()
    start = comm.time()
    result.backward()
    ddp(X)
    return (comm.time() - start) / unit, [round(count / SIZE) for count in order]


def all_parts(urgency, part):
    server = ideal_server(2, 0.0, 4.0 * SIZE)
    return run(toy, 2, "virtual", (part, urgency, 1.0), server=server).values


@pytest.mark.parametrize(
    "urgency, units, expected, order",
    [
        (first_come, 3, 11, [3, 3, 1]),
        (first_come, 1, 11, [1] * 7),
        (first_layers_first, 3, 10, [3, 1, 3]),
        (first_layers_first, 1, 9, [1] * 7),
    ],
)
def test_toy(urgency, units, expected, order):
    """3 layers, 1 unit forward and backward each, 1, 3 and 3 units of communication."""
    for took, sent in all_parts(urgency, units * 4 * SIZE):
        assert took == pytest.approx(expected, abs=1e-4)
        assert sent == order


def test_toy_in_real_time():
    """On processes the unit is 0.1 s; priorities win there too."""
    took = {}
    for urgency in URGENCIES:
        values = run(toy, 2, "processes", (4 * SIZE, urgency, 0.1), bandwidth=40.0 * SIZE).values
        took[urgency] = max(seconds for seconds, _ in values)
    assert took[first_layers_first] > 8.9 and took[first_come] > 10.9
    assert took[first_layers_first] < took[first_come] - 1


def test_queue_looks_only_at_what_has_come():
    class Numbered:
        def __init__(self, number):
            self.number = number

    layers = [Numbered(2), Numbered(2), Numbered(0)]
    queue = Queue(first_layers_first)
    for layer, when in zip(layers, (1.0, 1.5, 3.0)):
        queue.put(layer, None, when)
    assert [queue.come(now) for now in (0.5, 1.0, 2.0, 3.0)] == [0, 1, 2, 3]
    assert queue.take(2)[0] is layers[0]
    assert queue.take(3)[0] is layers[2]
    assert queue.take(3)[0] is layers[1]


# --- the same training ----------------------------------------------------------------------------


def network(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 30), nn.Tanh(), nn.Sequential(nn.Linear(30, 30), nn.Tanh()),
        nn.Linear(30, 30), nn.Linear(30, 4, bias=False),
    ).double()  # fmt: skip
    model[3].weight = model[2][0].weight
    model[3].bias.requires_grad_(False)
    return model


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def data(step):
    generator = torch.Generator().manual_seed(step)
    X = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    return X, torch.randint(4, (12,), generator=generator)


def shard(comm, step):
    return (t.tensor_split(comm.world_size)[comm.rank].to(comm.device) for t in data(step))


def train(comm, urgency):
    model = network(comm.rank).to(comm.device)
    ddp = PriorityDataParallel(model, comm, sgd, 500, urgency)
    for step in range(4):
        X, y = shard(comm, step)
        F.cross_entropy(ddp(X), y).backward()
    ddp.finish()
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        ddp(X)  # takes no further step
    ddp.finish()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    return [p.cpu() for p in before]


def train_without(comm):
    model = network(comm.rank).to(comm.device)
    ddp, optimizer = DistributedDataParallel(model, comm), sgd(model.parameters())
    for step in range(4):
        X, y = shard(comm, step)
        optimizer.zero_grad()
        F.cross_entropy(ddp(X), y).backward()
        ddp.wait()
        optimizer.step()
    return [p.detach().cpu() for p in model.parameters()]


@functools.cache
def whole():
    model = network(0)
    optimizer = sgd(model.parameters())
    for step in range(4):
        X, y = data(step)
        optimizer.zero_grad()
        F.cross_entropy(model(X), y).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def all_ways(comm):
    return [train_without(comm), *(train(comm, urgency) for urgency in URGENCIES)]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_training_is_the_same(place, n):
    values = run(all_ways, n, timeout=60, **PLACES[place]).values
    for ways in values:
        for parameters, first in zip(ways, values[0]):
            torch.testing.assert_close(parameters, whole())
            assert all(torch.equal(a, b) for a, b in zip(parameters, first))


class Half(nn.Module):
    """Uses one of its two layers."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, X):
        return self.used(X)


def wrong_uses(comm):
    texts = []
    try:
        PriorityDataParallel(Half(), comm, sgd)
    except TypeError as error:
        texts.append(str(error))
    for last in ([], [nn.Linear(3, 3)]):
        ddp = PriorityDataParallel(nn.Sequential(Half(), *last).to(comm.device), comm, sgd)
        ddp(torch.ones(1, 3, device=comm.device)).sum().backward()
        for again in (ddp.finish, lambda ddp=ddp: ddp(torch.ones(1, 3, device=comm.device))):
            try:
                again()
            except RuntimeError as error:
                texts.append(str(error))
    ddp = PriorityDataParallel(nn.Sequential(nn.Linear(3, 3)).to(comm.device), comm, sgd)
    result = ddp(torch.ones(1, 3, device=comm.device)).sum()
    result.backward(retain_graph=True)
    try:
        result.backward()
    except RuntimeError as error:
        texts.append(str(error))
    ddp.finish()
    return texts


@pytest.mark.parametrize("place", ["virtual", "gloo"])
def test_wrong_uses(place):
    for texts in run(wrong_uses, 2, **PLACES[place]).values:
        assert len(texts) == 6
        assert "an nn.Sequential, not a Half" in texts[0]
        assert all("2 parameters got no gradient" in text for text in texts[1:5])
        assert "second gradient" in texts[5]
