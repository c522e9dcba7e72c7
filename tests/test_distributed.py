"""DistributedDataParallel by hand against PyTorch's, and against one process with the whole batch.

The cases run as one program for each kind and number of ranks, so that processes start once.
"""

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
    any_rank,
    broadcast_module,
    in_half,
    in_step,
    pool_buffers,
)
from utils.hardware import ideal_server
from utils.ranks import run
from utils.ranks.collectives import ring_all_reduce, tree_all_reduce
from utils.ranks.shared import shared_memory_all_reduce

PLACES = {
    "virtual": {"on": "virtual", "server": "dgx1-v100"},
    "gloo": {"on": "processes", "transport": "gloo"},
    "shared": {"on": "processes", "transport": "shared"},
}
WORLDS = (1, 2, 3, 4)
CASES = {}

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def case(program):
    """A program of every rank; `check_<name>(values, n)` looks at what the ranks return."""
    CASES[program.__name__] = program
    return program


def everything(comm):
    return {name: program(comm) for name, program in CASES.items()}


@functools.cache
def results(place, n):
    return run(everything, ranks=n, timeout=120, **PLACES[place]).values


def error_of(kind, action):
    """The text of the error that an action raises."""
    try:
        action()
    except kind as error:
        return str(error)
    return None


class Counted:
    """An all-reduce that counts its calls and the bytes that it was given."""

    def __init__(self, all_reduce=ring_all_reduce):
        self.all_reduce, self.calls = all_reduce, []

    def __call__(self, comm, tensor, op="sum"):
        self.calls.append(tensor.nbytes)
        self.all_reduce(comm, tensor, op)


def all_reduces(comm):
    found = [ring_all_reduce, tree_all_reduce]
    return [*found, shared_memory_all_reduce] if hasattr(comm, "shared_all_reduce") else found


def small_buckets(model, comm, all_reduce=ring_all_reduce):
    """Several buckets for a small model."""
    return DistributedDataParallel(model, comm, all_reduce, first_cap=100, cap=400)


# --- five steps -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Tied layers, a frozen one, one that is never used, one that only some batches use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 9)
        self.frozen = nn.Linear(9, 9)
        self.tied = nn.Linear(9, 9)
        self.unused = nn.Linear(5, 5)
        self.sometimes = nn.Linear(9, 9)
        self.last = nn.Linear(9, 4)
        self.tied.weight = self.second.weight
        self.frozen.bias.requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def forward(self, X, sometimes):
        H = self.second(torch.tanh(self.first(X)))
        H = self.tied(torch.tanh(self.frozen(H)))
        if sometimes:
            H = H + self.sometimes(H)
        return self.last(torch.tanh(H))


def batch(step, rows):
    generator = torch.Generator().manual_seed(step)
    X = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return X, torch.randint(4, (rows,), generator=generator)


def own_rows(tensors, comm, step):
    """An uneven cut that differs from step to step; every rank has at least one row."""
    cuts = [1 + step % 3 + 2 * rank for rank in range(comm.world_size - 1)]
    cuts = [sum(cuts[: i + 1]) for i in range(len(cuts))]
    return [tensor.tensor_split(cuts)[comm.rank].to(comm.device) for tensor in tensors]


def seeded(build, seed=0):
    torch.manual_seed(seed)
    return build().double()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def report(model):
    """What a step has left: gradients and parameters, by name."""
    grads = {name: p.grad if p.grad is None else p.grad.cpu().clone()
             for name, p in model.named_parameters()}  # fmt: skip
    return grads, {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


ROWS, STEPS = 17, 5


@functools.cache
def five_steps_of_one():
    """The unsplit model with the whole batch."""
    model, found = seeded(Net), []
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        X, y = batch(step, ROWS)
        F.cross_entropy(model(X, step % 2), y).backward()
        optimizer.step()
        found.append(report(model))
    return found


@case
def five_steps(comm):
    """By weights of rows, over each all-reduce."""
    found = []
    for all_reduce in all_reduces(comm):
        model = seeded(Net, comm.rank).to(comm.device)
        ddp = small_buckets(model, comm, all_reduce)
        optimizer, steps = sgd(model), []
        for step in range(STEPS):
            optimizer.zero_grad()
            X, y = own_rows(batch(step, ROWS), comm, step)
            ddp.weigh(len(y))
            F.cross_entropy(ddp(X, step % 2), y).backward()
            ddp.wait()
            optimizer.step()
            steps.append(report(model))
        found.append(steps)
    return found


def check_five_steps(values, n):
    for value in values:
        for steps, first in zip(value, values[0]):
            for (grads, parameters), (same_grads, same), (whole_grads, whole) in zip(
                steps, first, five_steps_of_one()
            ):
                torch.testing.assert_close(parameters, whole)
                for name, grad in grads.items():
                    assert (grad is None) == (whole_grads[name] is None), name
                    if grad is not None:
                        torch.testing.assert_close(grad, whole_grads[name])
                        assert torch.equal(grad, same_grads[name])  # on all ranks bit for bit
                    assert torch.equal(parameters[name], same[name])


@case
def beside_pytorchs(comm):
    """PyTorch's class and ours on the same shards; it takes the plain mean of the ranks."""
    if comm.device.type != "cpu":
        return []
    differences = []
    ours, theirs = seeded(Net, comm.rank), seeded(Net, comm.rank)
    ddp = small_buckets(ours, comm)
    peer = nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    optimizers = sgd(ours), sgd(theirs)
    for step in range(STEPS):
        X, y = own_rows(batch(step, ROWS), comm, step)
        for model, optimizer in zip((ddp, peer), optimizers):
            optimizer.zero_grad()
            F.cross_entropy(model(X, step % 2), y).backward()
        ddp.wait()
        for optimizer in optimizers:
            optimizer.step()
        pairs = list(zip(ours.parameters(), theirs.parameters()))
        assert all((a.grad is None) == (b.grad is None) for a, b in pairs)
        pairs += [(a.grad, b.grad) for a, b in pairs if a.grad is not None]
        differences += [(a - b).abs().max().item() for a, b in pairs]
    return differences


def check_beside_pytorchs(values, n):
    assert all(difference < 1e-12 for value in values for difference in value)


# --- starting, counting, accumulating -------------------------------------------------------------


def normalized():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@case
def equal_start(comm):
    """Different weights, frozen ones and buffers too, on every rank before; rank 0's after."""
    model = seeded(normalized, comm.rank).to(comm.device)
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[1].running_mean += comm.rank
        model[1].num_batches_tracked += comm.rank
    DistributedDataParallel(model, comm)
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def check_equal_start(values, n):
    expected = seeded(normalized, 0).state_dict()
    for value in values:
        assert value.keys() == expected.keys()
        assert all(torch.equal(value[name], expected[name]) for name in value)
        assert value["1.num_batches_tracked"].dtype == torch.int64


@case
def different_models(comm):
    """Refused by every rank, with both shapes."""
    model = nn.Linear(3, 2 + comm.rank % 2).to(comm.device)
    return error_of(ValueError, lambda: DistributedDataParallel(model, comm))


def check_different_models(values, n):
    for text in values:
        assert text is None if n == 1 else "(2, 3)" in text and "(3, 3)" in text


@case
def accumulation(comm):
    """4 micro-steps in groups of 2, and 5: one collective a group; gradients of the big batch."""
    found = []
    for number in (4, 5):
        counted = Counted()
        model = seeded(lambda: nn.Linear(6, 4)).to(comm.device)
        ddp = DistributedDataParallel(model, comm, counted)
        grads = []
        for start in range(0, number, 2):
            group = range(start, min(start + 2, number))
            model.zero_grad()
            for micro in group:
                X, y = (part.tensor_split(comm.world_size)[comm.rank].to(comm.device)
                        for part in batch(micro, 12))  # fmt: skip
                loss = F.cross_entropy(ddp(X), y) / len(group)
                if micro == group[-1]:
                    loss.backward()
                else:
                    with ddp.no_sync():
                        loss.backward()
            ddp.wait()
            grads.append([p.grad.cpu().clone() for p in model.parameters()])
        found.append((len(counted.calls), grads))
    return found


def check_accumulation(values, n):
    for value in values:
        assert [calls for calls, _ in value] == [2, 3]
        for number, (_, grads) in zip((4, 5), value):
            for start, grad in zip(range(0, number, 2), grads):
                micros = [batch(micro, 12) for micro in range(start, min(start + 2, number))]
                X, y = (torch.cat(parts) for parts in zip(*micros))
                model = seeded(lambda: nn.Linear(6, 4))
                F.cross_entropy(model(X), y).backward()
                torch.testing.assert_close(grad, [p.grad for p in model.parameters()])
        assert all(torch.equal(a, b) for (_, mine), (_, first) in zip(value, values[0])
                   for group, other in zip(mine, first) for a, b in zip(group, other))  # fmt: skip


@case
def partly_accumulated(comm):
    """A parameter that only a micro-batch under no_sync has used travels all the same."""
    model = seeded(lambda: nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    model.to(comm.device)
    ddp = small_buckets(model, comm)
    X = torch.full((1, 2), comm.rank + 1.0, dtype=torch.float64, device=comm.device)
    with ddp.no_sync():
        model["b"](X).sum().backward()
    model["a"](X).sum().backward()
    ddp.wait()
    return [p.grad.cpu() for p in model.parameters()]


def check_partly_accumulated(values, n):
    mean = (n + 1) / 2
    weight, bias = torch.full((2, 2), mean).double(), torch.ones(2).double()
    for value in values:
        torch.testing.assert_close(value, [weight, bias, weight, bias])


@case
def second_backward(comm):
    """After wait() it adds up rightly; before, it is an error. Each tensor travels once a round."""
    counted = Counted()
    model = seeded(Net).to(comm.device)
    ddp = DistributedDataParallel(model, comm, counted)
    X, y = own_rows(batch(0, ROWS), comm, 0)
    for _ in range(2):
        F.cross_entropy(ddp(X, True), y, reduction="sum").backward()
        ddp.wait()
    twice = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.requires_grad
             and p.grad is not None}  # fmt: skip
    bytes_sent, frozen = list(counted.calls), [model.frozen.bias.grad, model.last.bias.grad]
    model.zero_grad()
    F.cross_entropy(ddp(X, True), y).backward()
    text = error_of(RuntimeError, lambda: F.cross_entropy(ddp(X, True), y).backward())
    ddp.wait()
    return twice, bytes_sent, frozen, text, comm.world_size


def check_second_backward(values, n):
    model = seeded(Net)
    F.cross_entropy(model(batch(0, ROWS)[0], True), batch(0, ROWS)[1], reduction="sum").backward()
    trainable = [p for p in model.parameters() if p.requires_grad]  # the tied one is there once
    length = sum(p.numel() for p in trainable) + len(trainable)
    for twice, bytes_sent, frozen, text, _ in values:
        for name, p in model.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(twice[name], 2 * p.grad / n)
        assert "unused.weight" not in twice and bytes_sent == [8 * length] * 2
        assert frozen == [None, None]
        assert "second gradient" in text and "wait()" in text


@case
def thawed(comm):
    """A parameter that was frozen at the start cannot be trained by it."""
    model = nn.Linear(2, 2).to(comm.device)
    model.bias.requires_grad_(False)
    ddp = DistributedDataParallel(model, comm)
    model.bias.requires_grad_(True)
    ddp(torch.ones(1, 2, device=comm.device)).sum().backward()
    return error_of(RuntimeError, ddp.wait)


def check_thawed(values, n):
    assert all("(2,)" in text and "build it again" in text for text in values)


# --- uneven data ----------------------------------------------------------------------------------


@case
def ran_out(comm):
    """Rank r has 3, 2, 1, 1, … batches: those that have run out keep answering."""
    model = seeded(lambda: nn.Linear(6, 4), comm.rank).to(comm.device)
    ddp, counted = small_buckets(model, comm), 0
    optimizer = sgd(model)
    batches = [batch(10 * comm.rank + k, 3 + k) for k in range(max(3 - comm.rank, 1))]
    for found in in_step(comm, batches):
        optimizer.zero_grad()
        ddp.weigh(0 if found is None else len(found[1]))
        if found is not None:
            X, y = (tensor.to(comm.device) for tensor in found)
            F.cross_entropy(ddp(X), y).backward()
        ddp.wait()
        optimizer.step()
        counted += 1
    return counted, [p.detach().cpu() for p in model.parameters()]


def check_ran_out(values, n):
    model = seeded(lambda: nn.Linear(6, 4))
    optimizer = sgd(model)
    for k in range(3):
        here = [batch(10 * rank + k, 3 + k) for rank in range(n) if k < max(3 - rank, 1)]
        assert k < 2 or len(here) == 1  # the third update is rank 0's alone
        X, y = (torch.cat(parts) for parts in zip(*here))
        optimizer.zero_grad()
        F.cross_entropy(model(X), y).backward()
        optimizer.step()
    for counted, parameters in values:
        assert counted == 3
        torch.testing.assert_close(parameters, [p.detach() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(parameters, values[0][1]))


@case
def nobody_has_rows(comm):
    ddp = DistributedDataParallel(nn.Linear(2, 2).to(comm.device), comm)
    ddp.weigh(0)
    return error_of(ValueError, ddp.wait)


def check_nobody_has_rows(values, n):
    assert all("no rank has any rows" in text for text in values)


@case
def empty_shard(comm):
    """The mean over no rows is NaN; with weight 0 it does no harm."""
    model = seeded(lambda: nn.Linear(6, 4)).to(comm.device)
    ddp = DistributedDataParallel(model, comm)
    X, y = (t.to(comm.device) for t in batch(0, 5 if comm.rank == 0 else 0))
    ddp.weigh(len(y))
    F.cross_entropy(ddp(X), y).backward()
    ddp.wait()
    return [p.grad.cpu() for p in model.parameters()]


def check_empty_shard(values, n):
    model = seeded(lambda: nn.Linear(6, 4))
    X, y = batch(0, 5)
    F.cross_entropy(model(X), y).backward()
    for value in values:
        torch.testing.assert_close(value, [p.grad for p in model.parameters()])


@case
def stop_together(comm):
    """Rank 0 wants to stop at epoch 1, the last one at epoch 2; rank 0 alone saves."""
    epochs, saved = 0, None
    model = nn.Linear(2, 2).to(comm.device)
    ddp = DistributedDataParallel(model, comm)
    for epoch in range(5):
        ddp(torch.ones(1, 2, device=comm.device)).sum().backward()
        ddp.wait()
        epochs += 1
        if comm.rank == 0:
            saved = sorted(ddp.module.state_dict())
        if any_rank(comm, epoch == 1 if comm.rank == 0 else epoch == 2):
            break
    return epochs, saved


def check_stop_together(values, n):
    assert [epochs for epochs, _ in values] == [2] * n
    assert [saved for _, saved in values] == [["bias", "weight"]] + [None] * (n - 1)


@case
def bad_loss(comm):
    """The last rank's loss is NaN at step 2 of 3: all skip it together."""
    model = seeded(lambda: nn.Linear(6, 4)).to(comm.device)
    ddp, updates = small_buckets(model, comm), 0
    optimizer = sgd(model)
    for step in range(3):
        X, y = own_rows(batch(step, ROWS), comm, step)
        loss = F.cross_entropy(ddp(X), y)
        if step == 1 and comm.rank == comm.world_size - 1:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        ddp.wait()
        if ddp.finite():
            optimizer.step()
            updates += 1
    return updates, [p.detach().cpu() for p in model.parameters()]


def check_bad_loss(values, n):
    for updates, parameters in values:
        assert updates == 2
        assert all(p.isfinite().all() for p in parameters)
        assert all(torch.equal(a, b) for a, b in zip(parameters, values[0][1]))


# --- kinds of tensors -----------------------------------------------------------------------------


@case
def sparse(comm):
    """Refused in the backward pass by every rank, also by one with only the padding row."""
    texts = []
    for row in (comm.rank % 3, 2):
        table = nn.Embedding(3, 2, sparse=True, padding_idx=2).to(comm.device)
        ddp = DistributedDataParallel(nn.Sequential(table, nn.Linear(2, 2)).to(comm.device), comm)
        loss = ddp(torch.tensor([row], device=comm.device)).sum()
        texts.append(error_of(TypeError, loss.backward))
    dense = nn.Embedding(3, 2).to(comm.device)
    ddp = DistributedDataParallel(dense, comm)
    row = comm.rank % 2
    ddp(torch.tensor([row], device=comm.device)).sum().backward()
    ddp.wait()
    return texts, dense.weight.grad.cpu()


def check_sparse(values, n):
    rows = torch.tensor([[(n + 1) // 2 / n] * 2, [n // 2 / n] * 2, [0.0] * 2])
    for texts, grad in values:
        assert all("(3, 2)" in text and "sparse=False" in text for text in texts)
        torch.testing.assert_close(grad, rows)


class Mixed(nn.Module):
    """Parameters of three dtypes, empty ones and one without dimensions."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3))
        self.b = nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.none = nn.Parameter(torch.ones(0))
        self.no_rows = nn.Parameter(torch.ones(2, 0))
        self.c = nn.Parameter(torch.ones(4))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.d = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))

    def forward(self, factor):
        parts = [self.a, self.b, self.none, self.no_rows, self.c, self.scale, self.d]
        return sum((p.float() * factor).sum() for p in parts)


@case
def dtypes_and_shapes(comm):
    """40,000 on each rank is no overflow in float16; every gradient keeps dtype and shape."""
    model = Mixed().to(comm.device)
    ddp = DistributedDataParallel(model, comm, first_cap=16, cap=16)
    kinds = [{p.dtype for p in bucket.parameters} for bucket in ddp.buckets]
    places = [id(p) for bucket in ddp.buckets for p in bucket.parameters]
    ddp(40000.0).backward()
    ddp.wait()
    every = sorted(places) == sorted(id(p) for p in model.parameters())
    grads = [p.grad.cpu() for p in model.parameters()]
    return grads, [p.dtype for p in model.parameters()], [p.shape for p in model.parameters()], (
        every and all(len(kind) == 1 for kind in kinds)
    )  # fmt: skip


def check_dtypes_and_shapes(values, n):
    for grads, dtypes, shapes, pure in values:
        assert pure
        for grad, dtype, shape in zip(grads, dtypes, shapes):
            assert grad.dtype == dtype and grad.shape == shape
            expected = torch.full(shape, 40000.0)
            tolerance = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6)
            torch.testing.assert_close(grad.float(), expected, rtol=tolerance, atol=0)


@case
def half_on_the_wire(comm):
    """float32 that travels as float16: half the bytes, equal on all ranks, nearly exact."""
    counted = Counted()
    model = nn.Linear(6, 4).to(comm.device)
    ddp = DistributedDataParallel(model, comm, in_half(counted))
    X, y = batch(0, 4 * comm.world_size)
    X, y = (t.tensor_split(comm.world_size)[comm.rank].to(comm.device) for t in (X.float(), y))
    F.cross_entropy(ddp(X), y).backward()
    ddp.wait()
    grads = [p.grad.cpu() for p in model.parameters()]
    return grads, counted.calls, {k: v.detach().cpu() for k, v in model.state_dict().items()}


def check_half_on_the_wire(values, n):
    model = nn.Linear(6, 4)
    model.load_state_dict(values[0][2])
    X, y = batch(0, 4 * n)
    F.cross_entropy(model(X.float()), y).backward()
    for grads, nbytes, _ in values:
        assert nbytes == [2 * (28 + 2)]
        for grad, first, p in zip(grads, values[0][0], model.parameters()):
            assert grad.dtype == torch.float32 and torch.equal(grad, first)
            torch.testing.assert_close(grad, p.grad, rtol=4e-3, atol=1e-4)
            assert not torch.equal(grad, p.grad) or grad.numel() < 24


# --- buffers --------------------------------------------------------------------------------------


@case
def statistics(comm):
    """Rank r sees 10 r and 10 r + 2: its own mean before, the pooled one after."""
    model = nn.BatchNorm1d(1, momentum=1.0).to(comm.device)
    model.register_buffer("seed", torch.tensor([comm.rank + 7]).to(comm.device))
    ddp = DistributedDataParallel(model, comm)
    ddp(torch.tensor([[10.0 * comm.rank], [10.0 * comm.rank + 2]], device=comm.device))
    before = model.running_mean.item()
    model.num_batches_tracked += comm.rank
    pool_buffers(comm, model, 2)
    return before, {name: buffer.cpu() for name, buffer in model.named_buffers()}


def check_statistics(values, n):
    pooled = torch.cat([torch.tensor([10.0 * r, 10.0 * r + 2]) for r in range(n)])
    for rank, (before, after) in enumerate(values):
        assert before == 10 * rank + 1
        assert after["running_mean"].item() == pytest.approx(pooled.mean().item())
        assert after["running_var"].item() == pytest.approx(pooled.var().item())
        assert after["num_batches_tracked"].item() == n and after["seed"].item() == 7
        assert after["num_batches_tracked"].dtype == torch.int64
    if n == 2:
        assert values[1][1]["running_mean"].item() == 6
        assert values[1][1]["running_var"].item() == pytest.approx(34.6667, abs=1e-4)


@case
def without_statistics(comm):
    """Layers that keep none, and modules without buffers, are no trouble."""
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 1))
    pool_buffers(comm, model.to(comm.device), 4)
    broadcast_module(comm, nn.ReLU())
    return True


def check_without_statistics(values, n):
    assert all(values)


# --- late results ---------------------------------------------------------------------------------


def late_all_reduce(comm, tensor, op="sum"):
    ring_all_reduce(comm, tensor, op)
    time.sleep(0.05)


@case
def late(comm):
    """A step before wait() is an error; after it, the result is the one without background."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)).double().to(comm.device)
    ddp = small_buckets(model, comm, late_all_reduce)
    optimizer = sgd(model)
    X, y = own_rows(batch(0, ROWS), comm, 0)
    F.cross_entropy(ddp(X), y).backward()
    text = error_of(RuntimeError, optimizer.step)
    ddp.wait()
    optimizer.step()
    launched = [bucket.work for bucket in ddp.buckets]
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with ddp.no_sync():
        torch.manual_seed(3)
        again = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4)).double().to(comm.device)
        F.cross_entropy(again(X), y).backward()
    for p in again.parameters():
        comm.all_reduce(p.grad, "avg")
    grads = [p.grad for p in again.parameters()]
    return text, launched, [t.cpu() for t in expected], [t.cpu() for t in grads]


def check_late(values, n):
    for text, launched, found, expected in values:
        assert "call wait()" in text
        assert launched == [None, None]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", WORLDS)
@pytest.mark.parametrize("place", PLACES)
def test(place, n, name):
    globals()[f"check_{name}"]([value[name] for value in results(place, n)], n)


# --- overlap --------------------------------------------------------------------------------------


class Work(torch.autograd.Function):
    """Takes a second, forward and backward."""

    @staticmethod
    def forward(ctx, X):
        time.sleep(1.0)
        return X.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(1.0)
        return gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1_000_000))

    def forward(self, X):
        return Work.apply(X) * self.scale[0]


def backward_time(comm, caps, overlaps):
    """Seconds of a backward pass through 4 layers, of 1 s and 4 MB each, and of its all-reduces."""
    model = nn.Sequential(*(Layer() for _ in range(4))).to(comm.device)
    ddp = DistributedDataParallel(model, comm, first_cap=caps, cap=caps)
    result = ddp(torch.ones(1, device=comm.device, requires_grad=True)).sum()
    comm.barrier()
    start = comm.time()
    if overlaps:
        result.backward()
    else:
        with ddp.no_sync():
            result.backward()
    ddp.wait()
    return comm.time() - start


@pytest.mark.parametrize(
    "caps, overlaps, seconds",
    [
        # A layer's gradient is there before its second of work, and travels in 0.5 s.
        (4_000_000, True, 4.0),
        (8_000_000, True, 4.0),
        (2**40, True, 3.0 + 2.0),
        (4_000_000, False, 4.0 + 2.0),
        (2**40, False, 4.0 + 2.0),
    ],
)
def test_what_is_hidden(caps, overlaps, seconds):
    """On wires of 8 MB/s; latency 0, so that a cut costs nothing."""
    server = ideal_server(2, 0.0, 8e6)
    for took in run(backward_time, 2, "virtual", (caps, overlaps), server=server).values:
        assert took == pytest.approx(seconds, abs=1e-3)


def test_what_is_hidden_on_processes():
    """A unit of a second for each, really: sleeping costs nothing."""
    options = {"bandwidth": 8e6, "record": False}
    took = [max(run(backward_time, 2, "processes", (4_000_000, overlaps), **options).values)
            for overlaps in (True, False)]  # fmt: skip
    assert took[0] > 4.0 and took[1] > 6.0
    assert took[1] - took[0] > 0.9 * 2.0  # at least 90 % of what can be hidden
