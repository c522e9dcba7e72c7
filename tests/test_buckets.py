"""Buckets against PyTorch's own, and a transport that completes late and out of order."""

import threading

import pytest
import torch
import torch.distributed as dist
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from utils.data_parallel import Bucket, DistributedDataParallel, bucket_schedule, make_buckets
from utils.ranks import Work, run
from utils.ranks.work import check_gradients_arrived

MiB = 2**20
RESNET = {25: [2_052_000, 28_852_224, 15_853_824], 35: [2_052_000, 38_297_600, 6_408_448]}


def sizes(buckets):
    return [sum(p.nbytes for p in bucket) for bucket in buckets]


@pytest.mark.parametrize("cap", RESNET)
def test_buckets_of_resnet18(cap):
    with torch.device("meta"):
        parameters = list(torchvision.models.resnet18().parameters())
    assert sum(p.numel() for p in parameters) == 11_689_512
    assert sizes(make_buckets(parameters, cap=cap * MiB)) == RESNET[cap]
    indices, _ = dist._compute_bucket_assignment_by_size(parameters[::-1], [MiB, cap * MiB])
    assert sizes([[parameters[::-1][i] for i in bucket] for bucket in indices]) == RESNET[cap]


def buckets_of_pytorch(comm):
    """What PyTorch's class really sends, from the second backward pass on."""
    model, sent = torchvision.models.resnet18(), []

    def hook(state, bucket):
        sent.append(bucket.buffer().nbytes)
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        sent.clear()
        ddp(torch.randn(2, 3, 32, 32)).sum().backward()
    ours = DistributedDataParallel(model, comm)
    return sent, [bucket.nbytes for bucket in ours.buckets]


def test_pytorch_sends_the_same_buckets():
    for sent, ours in run(buckets_of_pytorch, 2, "processes", timeout=60).values:
        assert sent == ours == RESNET[25]


DTYPES = (torch.float32, torch.float16, torch.float64)
shapes = st.tuples(st.integers(0, 40), st.sampled_from(DTYPES))


@given(st.lists(shapes, min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 400))
def test_buckets_are_pytorchs(made, first_cap, cap):
    parameters = [torch.empty(count, dtype=dtype) for count, dtype in made]
    buckets = make_buckets(parameters, first_cap, cap)
    assert sorted(map(id, parameters)) == sorted(id(p) for bucket in buckets for p in bucket)
    indices, _ = dist._compute_bucket_assignment_by_size(parameters[::-1], [first_cap, cap])
    theirs = [[id(parameters[::-1][i]) for i in bucket] for bucket in indices]
    assert sorted(theirs) == sorted([id(p) for p in bucket] for bucket in buckets)


@given(st.lists(shapes, min_size=1, max_size=30), st.integers(1, 200), st.integers(1, 400))
def test_rule_of_buckets(made, first_cap, cap):
    """In reverse order, of one dtype, full but for the last; complete ones as they complete."""
    parameters = [torch.empty(count, dtype=dtype) for count, dtype in made]
    place = {id(p): -i for i, p in enumerate(parameters)}
    seen = dict.fromkeys(DTYPES, 0)
    ends, rest = [], []
    for bucket in make_buckets(parameters, first_cap, cap):
        (dtype,) = {p.dtype for p in bucket}
        limit = cap if seen[dtype] else first_cap
        seen[dtype] += 1
        places = [place[id(p)] for p in bucket]
        assert places == sorted(places)
        assert sum(p.nbytes for p in bucket[:-1]) < limit
        full = sum(p.nbytes for p in bucket) >= limit
        assert not rest or not full
        (ends if full else rest).append(places[-1])
    assert ends == sorted(ends) and len(rest) <= len(DTYPES)


def test_mixed_dtypes_and_one_larger_than_the_cap():
    a, b, c = torch.ones(3), torch.ones(2, dtype=torch.float16), torch.ones(4)
    buckets = make_buckets([a, b, c], 16, 16)  # full ones first
    assert [list(map(id, bucket)) for bucket in buckets] == [[id(c)], [id(b)], [id(a)]]
    large, small = torch.ones(100), torch.ones(1)
    assert sizes(make_buckets([small, large, large, small], 8, 16)) == [404, 400, 4]
    assert make_buckets([]) == []


def test_devices_do_not_mix():
    here, there = torch.ones(2), torch.ones(2, device="meta")
    assert sizes(make_buckets([here, there, here, there])) == [16, 16]


def test_gradients_are_views_of_the_bucket():
    parameters = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))]
    bucket = Bucket(parameters)
    for p in parameters:
        p.grad = torch.full_like(p, 8.0)
    bucket.fill(1, 0.25)
    assert bucket.missing == {0} and bucket.flat[:6].tolist() == [0] * 6
    bucket.fill(0, 0.5)
    assert not bucket.missing and bucket.nbytes == 40
    assert bucket.flat[:10].tolist() == [4] * 6 + [2] * 4
    bucket.flat += 1
    assert all(p.grad.untyped_storage().data_ptr() == bucket.flat.data_ptr() for p in parameters)
    assert parameters[0].grad.tolist() == [[5] * 3] * 2 and parameters[1].grad.tolist() == [3] * 4


# --- a transport that completes late and out of order ---------------------------------------------


class LateWork(Work):
    """The sum with another rank's equal tensor, which is there in the end, all at once."""

    def __init__(self, comm, tensor):
        self.comm, self.tensor = comm, tensor.detach()
        self.waits, self.done = 0, threading.Event()

    def _wait(self):
        self.waits += 1
        self.comm.complete_later()
        self.done.wait()


class LateComm:
    """Rank 0 of 2 with equal gradients. Launched last is done first, all when one is waited for."""

    rank, world_size, device = 0, 2, torch.device("cpu")

    def __init__(self):
        self.works, self.completed, self.timer = [], [], None

    def broadcast(self, tensor, src=0):
        pass

    def launch(self, function, tensor):
        work = LateWork(self, tensor).keep([tensor])
        self.works.append(work)
        return work

    def complete_later(self):
        if self.timer is None:
            self.timer = threading.Timer(0.2, self.complete)
            self.timer.start()

    def complete(self):
        for work in reversed(self.works):
            work.tensor.mul_(2)
            self.completed.append(work.tensor.numel())
            work.done.set()


@pytest.fixture
def steps_are_checked():
    hook = register_optimizer_step_pre_hook(check_gradients_arrived)
    yield
    hook.remove()


def test_late_and_out_of_order(steps_are_checked):
    torch.manual_seed(0)
    model, comm = nn.Sequential(*(nn.Linear(k, k + 1) for k in range(3, 7))), LateComm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    X = torch.randn(5, 3)
    expected = torch.autograd.grad(model(X).square().sum(), list(model.parameters()))
    ddp = DistributedDataParallel(model, comm, first_cap=1, cap=100)
    before = [p.detach().clone() for p in model.parameters()]

    ddp(X).square().sum().backward()
    assert [work.waits for work in comm.works] == [0] * 5  # the backward pass waits for nothing
    order = [sum(p.numel() + 1 for p in bucket.parameters) for bucket in ddp.buckets]
    assert [work.tensor.numel() for work in comm.works] == order
    with pytest.raises(RuntimeError, match="still being communicated"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))
    ddp.wait()
    assert comm.completed == order[::-1]
    assert [work.waits for work in comm.works] == [1] * 5
    for p, grad in zip(model.parameters(), expected):
        torch.testing.assert_close(p.grad, grad)
    optimizer.step()
    for p, old, grad in zip(model.parameters(), before, expected):
        torch.testing.assert_close(p.detach(), old - 0.1 * grad)


def test_schedule():
    """A bucket waits for its gradients and for the wire."""
    assert bucket_schedule([1, 2, 3], [3, 3, 1]) == [(1, 4), (4, 7), (7, 8)]
    assert bucket_schedule([1, 5, 5.5], [3, 1, 2]) == [(1, 4), (5, 6), (6, 8)]
    assert bucket_schedule([], []) == []
