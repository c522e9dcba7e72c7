"""Data parallelism against one device: PyTorch on the whole batch, and closed formulas."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from utils import Cluster, vgpu
from utils.collectives import (
    cpu_all_reduce,
    ring_all_reduce,
    sharded_all_reduce,
    star_all_reduce,
    tree_all_reduce,
)
from utils.data import batches, digits
from utils.data_parallel import (
    accumulated_step,
    accuracy,
    compute_gradients,
    evaluate,
    in_groups,
    pool_statistics,
    split_batch,
    sum_gradients,
    sync_buffers,
    train_step,
    weighted_average,
)
from utils.models import lenet, mlp, resnet18
from utils.parameters import replicate

WORLDS = (1, 2, 3, 4, 5, 8)
every_world = pytest.mark.parametrize("k", WORLDS)
row_loss = nn.CrossEntropyLoss(reduction="none")


@pytest.fixture(autouse=True)
def leave_no_cluster():
    yield
    vgpu.stop()


def devices_for(k):
    return Cluster(k, server="hgx-h200", quiet=True).devices


def make(build, k, optimizer=torch.optim.SGD, **options):
    """(the unsplit model, its optimizer, k replicas of it, their optimizers); double precision."""
    devices = devices_for(k)
    torch.manual_seed(0)
    model = build().double()
    replicas = replicate(model, devices)
    options = {"lr": 0.1, **options}
    return (
        model,
        optimizer(model.parameters(), **options),
        replicas,
        [optimizer(replica.parameters(), **options) for replica in replicas],
    )


def small_net():
    return mlp((6, 5, 4))


def data(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return X, torch.randint(4, (rows,), generator=generator)


def plain_step(model, optimizer, X, y):
    """What PyTorch's documentation tells one to do on one device."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(X), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def state_of(module):
    return {name: tensor.cpu() for name, tensor in module.state_dict().items()}


def assert_same_as_unsplit(model, replicas):
    """Replicas are equal bit for bit, and equal to the unsplit model up to rounding."""
    first = state_of(replicas[0])
    for replica in replicas[1:]:
        for name, tensor in state_of(replica).items():
            assert torch.equal(tensor, first[name]), name
    torch.testing.assert_close(first, state_of(model), rtol=1e-10, atol=1e-12)


# --- splitting ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(0, 20), k=st.integers(1, 8))
def test_shards_are_even_in_order_and_as_many_as_devices(rows, k):
    devices = devices_for(k)
    X, y = torch.randn(rows, 2, 3), torch.arange(rows)
    X_shards, y_shards = split_batch(X, y, devices)
    assert [x.device for x in X_shards] == devices == [t.device for t in y_shards]
    sizes = [len(x) for x in X_shards]
    assert sizes == [len(t) for t in y_shards] and max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([x.cpu() for x in X_shards]), X)
    assert torch.equal(torch.cat([t.cpu() for t in y_shards]), y)


def test_five_rows_reach_all_of_four_devices():
    X_shards, _ = split_batch(torch.ones(5, 3), torch.ones(5), devices_for(4))
    assert [len(x) for x in X_shards] == [2, 1, 1, 1]  # torch.chunk makes 2, 2, 1


@pytest.mark.parametrize("rows, labels, k", [(3, 2, 2), (0, 1, 1), (2, 2, 0)])
def test_a_batch_that_cannot_be_split(rows, labels, k):
    devices = devices_for(2)[:k]
    with pytest.raises(ValueError, match=f"{rows} rows with {labels} labels to {k} devices"):
        split_batch(torch.ones(rows, 2), torch.ones(labels), devices)


# --- accuracy -----------------------------------------------------------------------------------


def outputs_of(correct, rows, classes=3):
    """Outputs and labels of so many rows, the first ones correct."""
    labels = torch.arange(rows) % classes
    said = torch.where(torch.arange(rows) < correct, labels, (labels + 1) % classes)
    return F.one_hot(said, classes).double() if rows else torch.empty(0, classes), labels


@pytest.mark.parametrize(
    "shards, expected",
    [
        ([(3, 4), (1, 2)], 4 / 6),  # not .625, the mean of the ratios, nor .5
        ([(3, 4), (1, 2), (0, 0)], 4 / 6),
        ([(0, 1), (5, 5), (0, 3)], 5 / 9),
        ([(2, 2)], 1.0),
        ([(0, 0), (0, 1)], 0.0),
    ],
)
def test_accuracy_sums_counts(shards, expected):
    devices = devices_for(len(shards))
    pairs = [outputs_of(*shard) for shard in shards]
    outputs = [output.to(device) for (output, _), device in zip(pairs, devices)]
    labels = [label.to(device) for (_, label), device in zip(pairs, devices)]
    assert accuracy(outputs, labels) == pytest.approx(expected, abs=1e-15)


def test_accuracy_of_nothing():
    with pytest.raises(ValueError, match="no rows"):
        accuracy([torch.empty(0, 3)], [torch.empty(0)])


@every_world
@pytest.mark.parametrize("rows", [1, 7, 30])
def test_evaluating_on_any_number_of_devices(k, rows):
    def with_all():
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 4))

    model, _, replicas, _ = make(with_all, k)
    X, y = data(rows)
    expected = (model.eval()(X).argmax(1) == y).double().mean().item()
    replicas[-1].eval()
    before = [state_of(replica) for replica in replicas]
    assert evaluate(replicas, X, y) == pytest.approx(expected, abs=1e-15)
    assert [replica.training for replica in replicas] == [True] * (k - 1) + [False]
    for replica, state in zip(replicas, before):
        torch.testing.assert_close(state_of(replica), state, rtol=0, atol=0)


# --- averages -----------------------------------------------------------------------------------


@every_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_weighted_average_against_its_formula(k, dtype):
    devices = devices_for(k)
    values = torch.randn(k, 3, 5, generator=torch.Generator().manual_seed(k)).to(dtype)
    weights = [1 + i % 3 for i in range(k)]
    tensors = [value.to(device, copy=True) for value, device in zip(values, devices)]
    places = [tensor.data_ptr() for tensor in tensors]
    assert weighted_average(tensors, weights) is None
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(w * v.to(wide) for w, v in zip(weights, values)) / sum(weights)
    for tensor, place in zip(tensors, places):
        assert tensor.dtype == dtype and tensor.data_ptr() == place
        tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(tensor.cpu().to(wide), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_halves_are_divided_before_they_are_added(k):
    tensors = [torch.full((3,), 40_000.0, dtype=torch.float16, device=d) for d in devices_for(k)]
    weighted_average(tensors, [1] * k)
    for tensor in tensors:
        assert tensor.dtype == torch.float16
        torch.testing.assert_close(tensor.cpu(), torch.full((3,), 40_000.0, dtype=torch.float16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 7.0])
def test_weight_zero_does_not_count(bad):
    tensors = [
        torch.full((2,), value, device=d) for value, d in zip((1.0, bad, 4.0), devices_for(3))
    ]
    weighted_average(tensors, [1, 0, 2])
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 3.0]] * 3


@pytest.mark.parametrize(
    "values, weights, error",
    [
        ([[1.0], [3.0]], [1], ValueError),
        ([[1.0], [3.0]], [0, 0], ValueError),
        ([[1.0], [3.0]], [-1, 2], ValueError),
        ([[1.0], [3.0]], [1, float("nan")], ValueError),
        ([[1.0], [3.0, 4.0]], [1, 1], ValueError),
        ([[1], [3]], [1, 1], TypeError),
        ([[True], [False]], [1, 1], TypeError),
        ([], [], ValueError),
    ],
)
def test_averages_that_do_not_exist_change_nothing(values, weights, error):
    tensors = [torch.tensor(value, device=d) for value, d in zip(values, devices_for(2))]
    with pytest.raises(error):
        weighted_average(tensors, weights)
    assert [tensor.tolist() for tensor in tensors] == values


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,), (7,)])
def test_averages_of_any_shape(shape):
    tensors = [torch.full(shape, float(i), device=d) for i, d in enumerate(devices_for(3))]
    weighted_average(tensors, [1, 1, 1])
    for tensor in tensors:
        torch.testing.assert_close(tensor.cpu(), torch.ones(shape))


# --- training equals one device -----------------------------------------------------------------


@every_world
@pytest.mark.parametrize(
    "optimizer, options",
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.Adam, {"lr": 0.01}),
    ],
)
def test_any_number_of_devices_gives_the_parameters_of_one(k, optimizer, options):
    """Odd batches, and one with fewer rows than devices."""
    model, plain, replicas, optimizers = make(small_net, k, optimizer, **options)
    for step, rows in enumerate((13, 8, 1, 5, 3)):
        X, y = data(rows, seed=step)
        loss = train_step(replicas, optimizers, X, y, row_loss)
        assert loss == pytest.approx(plain_step(model, plain, X, y), rel=1e-12)
    assert_same_as_unsplit(model, replicas)


@pytest.mark.parametrize(
    "all_reduce",
    [star_all_reduce, cpu_all_reduce, sharded_all_reduce, tree_all_reduce, ring_all_reduce],
)
def test_any_all_reduce_will_do(all_reduce):
    model, plain, replicas, optimizers = make(small_net, 3)
    for step in range(3):
        X, y = data(7, seed=step)
        train_step(replicas, optimizers, X, y, row_loss, all_reduce)
        plain_step(model, plain, X, y)
    assert_same_as_unsplit(model, replicas)


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 12), k=st.integers(1, 6), seed=st.integers(0, 99))
def test_gradients_of_any_split(rows, k, seed):
    model, plain, replicas, _ = make(small_net, k)
    X, y = data(rows, seed)
    shares, finite = compute_gradients(replicas, [(X, y)], row_loss)
    plain_step(model, plain, X, y)
    assert finite.item() and len(shares) == min(rows, k)
    for replica in replicas:
        for mine, its in zip(replica.parameters(), model.parameters()):
            torch.testing.assert_close(mine.grad.cpu(), its.grad, rtol=1e-10, atol=1e-13)


def test_gradients_of_the_last_step_do_not_stay():
    _, _, replicas, _ = make(small_net, 2)
    for _ in range(2):
        compute_gradients(replicas, [data(5)], row_loss)
        total = [p.grad.clone() for p in replicas[1].parameters()]
    once = make(small_net, 2)[2]
    compute_gradients(once, [data(5)], row_loss)
    assert all(torch.equal(a.cpu(), p.grad.cpu()) for a, p in zip(total, once[1].parameters()))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_reduced_already_is_refused(reduction):
    """Whether to sum or to average over the devices would depend on it: a factor of k."""
    _, _, replicas, optimizers = make(small_net, 2)
    before = state_of(replicas[0])
    with pytest.raises(ValueError, match='reduction="none"'):
        train_step(replicas, optimizers, *data(4), nn.CrossEntropyLoss(reduction=reduction))
    torch.testing.assert_close(state_of(replicas[0]), before, rtol=0, atol=0)


def test_a_loss_of_another_shape_is_refused():
    """(rows, 1) - (rows,) broadcasts to (rows, rows), a classic."""
    _, _, replicas, optimizers = make(lambda: mlp((6, 1)), 2)
    X, y = data(4)
    with pytest.raises(ValueError, match=r"shape \(2, 1\)"):
        train_step(replicas, optimizers, X, y, lambda out, y: (out - y[:, None]) ** 2)
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        train_step(replicas, optimizers, X, y, lambda out, y: (out - y) ** 2)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_pairings_of_loss_and_learning_rate(k, reduction):
    """The rule by hand, and what its violation costs: exactly a factor k, for even shards."""
    model, plain, replicas, _ = make(small_net, k)
    X, y = data(8)
    for replica, x, t in zip(replicas, *split_batch(X, y, [p.device for p in firsts(replicas)])):
        F.cross_entropy(replica(x), t, reduction=reduction).backward()
    sum_gradients(replicas)
    plain_step(model, plain, X, y)
    too_much = {"sum": 8, "mean": k}[reduction]
    for mine, its in zip(replicas[0].parameters(), model.parameters()):
        torch.testing.assert_close(mine.grad.cpu() / too_much, its.grad, rtol=1e-10, atol=1e-13)


def firsts(replicas):
    return [next(replica.parameters()) for replica in replicas]


@pytest.mark.parametrize("k", [2, 3, 4])
def test_means_of_uneven_shards_need_weights(k):
    """Weighted by rows, the mean losses' gradients are the batch's; the plain mean is not."""
    model, plain, replicas, _ = make(small_net, k)
    X, y = data(2 * k - 1)
    X_shards, y_shards = split_batch(X, y, [p.device for p in firsts(replicas)])
    for replica, x, t in zip(replicas, X_shards, y_shards):
        F.cross_entropy(replica(x), t).backward()
    plain_step(model, plain, X, y)
    for *mine, its in zip(*(replica.parameters() for replica in replicas), model.parameters()):
        gradients = [p.grad for p in mine]
        simple = sum(g.cpu() for g in gradients) / k
        weighted_average(gradients, [len(t) for t in y_shards])
        torch.testing.assert_close(gradients[-1].cpu(), its.grad, rtol=1e-10, atol=1e-13)
        assert not torch.allclose(simple, its.grad, rtol=1e-3)


def test_a_batch_without_rows():
    _, _, replicas, optimizers = make(small_net, 2)
    with pytest.raises(ValueError, match="no rows"):
        train_step(replicas, optimizers, *data(0), row_loss)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_float16_does_not_overflow_on_the_way(k):
    """The mean loss is 30,000; the sum over the rows would not fit."""
    model = nn.Linear(1, 1, bias=False).half()
    nn.init.constant_(model.weight, 30_000.0)
    replicas = replicate(model, devices_for(k))
    X = torch.ones(6, 1, dtype=torch.float16)
    shares, finite = compute_gradients(replicas, [(X, X)], lambda out, y: out[:, 0])
    assert finite.item() and sum(s.item() for s in shares) == pytest.approx(30_000, rel=2e-3)
    assert replicas[0].weight.grad.item() == pytest.approx(1, rel=2e-3)


# --- parameters that are special ----------------------------------------------------------------


class Special(nn.Module):
    """Tied, frozen, unused, sometimes used, 0-dimensional and empty parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.large = nn.Parameter(torch.zeros(6))  # used where a shard has more than one row
        self.scale, self.empty = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(0))

    def forward(self, X):
        X = self.scale * self.second(self.first(X)) + self.empty.sum()
        return (X + self.large if len(X) > 1 else X)[:, :4]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_special_parameters(k):
    model, plain, replicas, optimizers = make(Special, k, weight_decay=0.1)
    reference = copy.deepcopy(state_of(model))
    for step in range(2):
        X, y = data(2 * k, seed=step)
        train_step(replicas, optimizers, X, y, row_loss)
        plain_step(model, plain, X, y)
    assert_same_as_unsplit(model, replicas)
    assert torch.equal(state_of(replicas[-1])["second.bias"], reference["second.bias"])
    assert torch.equal(state_of(replicas[-1])["unused"], reference["unused"])  # no decay either
    for replica in replicas:
        assert replica.first.weight is replica.second.weight and replica.unused.grad is None


def test_a_parameter_that_only_one_replica_has_used():
    _, _, replicas, _ = make(Special, 2)
    compute_gradients(replicas, [data(3)], row_loss)  # shards of 2 and 1
    first, second = (replica.large.grad.cpu() for replica in replicas)
    assert torch.equal(first, second) and first.abs().sum() > 0


def test_dtypes_are_not_mixed():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4).half()
            self.c = nn.Linear(4, 4)

        def forward(self, X):
            return self.c(self.b(self.a(X).half()).float())

    seen = []

    def counting(tensors):
        seen.append([tensor.dtype for tensor in tensors])
        ring_all_reduce(tensors)

    replicas = replicate(Mixed(), devices_for(2))
    X, y = data(6)
    compute_gradients(replicas, [(X.float(), y)], row_loss, counting)
    assert seen == [[torch.float32] * 2, [torch.float16] * 2]
    for replica in replicas:
        assert all(
            p.grad.dtype == p.dtype and p.grad.shape == p.shape for p in replica.parameters()
        )


def test_sparse_gradients_are_refused_with_a_way_out():
    replicas = replicate(nn.Embedding(3, 2, sparse=True), devices_for(2))
    X = torch.tensor([0, 1])
    with pytest.raises(TypeError, match="sparse=False"):
        compute_gradients(replicas, [(X, X)], row_loss)


def test_a_model_without_trained_parameters():
    model = nn.Linear(6, 4).requires_grad_(False)
    replicas = replicate(model, devices_for(2))
    assert sum_gradients(replicas).item()


def test_one_message_for_all_gradients():
    sizes = []

    def counting(tensors):
        sizes.append([tensor.numel() for tensor in tensors])
        ring_all_reduce(tensors)

    replicas = replicate(lenet(), devices_for(2))
    compute_gradients(
        replicas, [(torch.zeros(2, 1, 28, 28), torch.tensor([0, 1]))], row_loss, counting
    )
    assert sizes == [[129_068] * 2]


# --- accumulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("micro_steps, collectives", [(4, 2), (5, 3), (1, 1)])
def test_accumulation_sends_once_a_step_and_equals_the_big_batch(k, micro_steps, collectives):
    model, plain, replicas, optimizers = make(small_net, k, momentum=0.9)
    calls = []

    def counting(tensors):
        calls.append(len(tensors))
        ring_all_reduce(tensors)

    rows = [3, 4, 2, 5, 1][:micro_steps]
    micro_batches = [data(n, seed=step) for step, n in enumerate(rows)]
    for group in in_groups(micro_batches, 2):
        loss = accumulated_step(replicas, optimizers, group, row_loss, counting)
        X, y = (torch.cat(parts) for parts in zip(*group))
        assert loss == pytest.approx(plain_step(model, plain, X, y), rel=1e-12)
        for replica in replicas:
            for mine, its in zip(replica.parameters(), model.parameters()):
                torch.testing.assert_close(mine.grad.cpu(), its.grad, rtol=1e-10, atol=1e-13)
    assert calls == [k] * collectives
    assert_same_as_unsplit(model, replicas)


@pytest.mark.parametrize(
    "size, expected", [(1, [[0], [1], [2]]), (2, [[0, 1], [2]]), (5, [[0, 1, 2]])]
)
def test_groups(size, expected):
    assert list(in_groups(iter(range(3)), size)) == expected
    assert list(in_groups([], size)) == []


def test_groups_are_not_empty():
    with pytest.raises(ValueError, match="at least one"):
        list(in_groups([1], 0))


# --- NaN ----------------------------------------------------------------------------------------


def with_batch_norm():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("build", [small_net, with_batch_norm])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_all_devices_skip_a_bad_step_together(k, build, bad):
    """Row 0 or the last row is bad in step 2 of 3: two updates everywhere, nothing poisoned."""
    _, _, replicas, optimizers = make(build, k, momentum=0.9)
    _, _, others, other_optimizers = make(build, k, momentum=0.9)
    for step in range(3):
        X, y = data(8, seed=step)
        if step != 1:
            train_step(others, other_optimizers, X, y, row_loss)
        X[-1 if step == 1 else 0, 2] *= bad if step == 1 else 1
        loss = train_step(replicas, optimizers, X, y, row_loss)
        assert (loss != loss or loss == float("inf")) == (step == 1)
    for replica, other in zip(replicas, others):
        torch.testing.assert_close(state_of(replica), state_of(other), rtol=0, atol=0)
        assert all(tensor.isfinite().all() for tensor in state_of(replica).values())


def test_a_finite_loss_with_a_bad_gradient_is_skipped_too():
    _, _, replicas, optimizers = make(lambda: nn.Linear(6, 1, bias=False), 2)
    before = state_of(replicas[0])
    X, y = data(4)
    X[3] = 0  # the root of 0 has no slope; on the second device only
    loss = train_step(replicas, optimizers, X, y, lambda out, y: out[:, 0].abs().sqrt())
    assert loss == loss and loss < float("inf")
    for replica in replicas:
        assert torch.equal(state_of(replica)["weight"], before["weight"])


def test_a_nan_in_one_of_several_micro_batches_skips_the_step():
    _, _, replicas, optimizers = make(small_net, 2)
    before = state_of(replicas[0])
    good, bad = data(4), data(4, seed=1)
    bad[0][0, 0] = float("nan")
    accumulated_step(replicas, optimizers, [good, bad, good], row_loss)
    torch.testing.assert_close(state_of(replicas[1]), before, rtol=0, atol=0)


# --- buffers ------------------------------------------------------------------------------------


def batch_norms(values, momentum=1.0):
    """A BatchNorm1d(1) a device that has seen its values once."""
    replicas = replicate(nn.BatchNorm1d(1, momentum=momentum), devices_for(len(values)))
    for replica, seen in zip(replicas, values):
        if seen:
            replica(torch.tensor(seen, device=replica.weight.device)[:, None])
    return replicas


def test_pooled_statistics_of_the_textbook_case():
    replicas = batch_norms([[0.0, 2.0], [10.0, 12.0]])
    assert [replica.running_mean.item() for replica in replicas] == [1, 11]
    assert [replica.running_var.item() for replica in replicas] == [2, 2]
    sync_buffers(replicas, [2, 2])
    for replica in replicas:
        assert replica.running_mean.item() == 6
        assert replica.running_var.item() == pytest.approx(104 / 3, rel=1e-6)  # 34.667


@settings(deadline=None, max_examples=25)
@given(counts=st.lists(st.integers(2, 6) | st.just(0), min_size=1, max_size=5))
def test_pooled_statistics_are_those_of_all_values(counts):
    if not any(counts):
        return
    generator = torch.Generator().manual_seed(sum(counts))
    values = [(3 * torch.randn(n, generator=generator) + i).tolist() for i, n in enumerate(counts)]
    replicas = batch_norms(values)
    sync_buffers(replicas, counts)
    together = torch.tensor([value for group in values for value in group])
    for replica in replicas:
        torch.testing.assert_close(replica.running_mean.cpu(), together.mean()[None])
        torch.testing.assert_close(replica.running_var.cpu(), together.var()[None])


@pytest.mark.parametrize(
    "layer, shape", [(nn.BatchNorm2d(3), (3, 4, 5)), (nn.BatchNorm3d(2), (2, 2, 3, 2))]
)
def test_pooled_statistics_after_convolutions(layer, shape):
    layer.momentum = 1.0
    rows = (2, 1, 3)
    replicas = replicate(layer, devices_for(3))
    parts = [torch.randn(n, *shape, generator=torch.Generator().manual_seed(n)) for n in rows]
    for replica, part in zip(replicas, parts):
        replica(part.to(replica.weight.device))
    positions = torch.Size(shape[1:]).numel()
    sync_buffers(replicas, [n * positions for n in rows])
    unsplit = copy.deepcopy(layer)
    unsplit(torch.cat(parts))
    for replica in replicas:
        torch.testing.assert_close(state_of(replica), state_of(unsplit))


def test_running_means_over_many_steps_are_those_of_the_whole_batch():
    """With momentum too, for equal shards: the mean of running means is the running mean."""
    model, plain, replicas, optimizers = make(with_batch_norm, 2)
    for step in range(4):
        X, y = data(8, seed=step)
        with torch.no_grad():
            model(X)
            for replica, x in zip(
                replicas, split_batch(X, y, [p.device for p in firsts(replicas)])[0]
            ):
                replica(x)
    sync_buffers(replicas, [4, 4])
    torch.testing.assert_close(replicas[1][1].running_mean.cpu(), model[1].running_mean)


def test_counters_stay_integers_and_become_the_largest():
    replicas = batch_norms([[0.0, 2.0], [1.0, 3.0]], momentum=0.1)
    replicas[1](torch.ones(2, 1, device=replicas[1].weight.device))
    sync_buffers(replicas, [2, 2])
    for replica in replicas:
        assert replica.num_batches_tracked.dtype == torch.int64
        assert replica.num_batches_tracked.item() == 2


def test_other_buffers_are_the_first_replica_s():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("table", torch.tensor([3, 1]))
            self.register_buffer("nothing", None)
            self.norm = nn.BatchNorm1d(2, track_running_stats=False)

    replicas = replicate(Buffers(), devices_for(3))
    replicas[2].table.fill_(9)
    replicas[2].flags.fill_(True)
    sync_buffers(replicas, [1, 0, 2])
    for replica in replicas:
        assert replica.mask.tolist() == [0.0, float("-inf")]
        assert replica.flags.tolist() == [True, False] and replica.table.tolist() == [3, 1]


@every_world
def test_one_replica_or_equal_ones_are_left_as_they_are(k):
    model, _, replicas, _ = make(with_batch_norm, k)
    X, _ = data(6)
    for replica in [model, *replicas]:
        replica(X.to(firsts([replica])[0].device))
    if k == 1:
        sync_buffers(replicas, [6])
        assert_same_as_unsplit(model, replicas)
    evaluated = evaluate(replicas, *data(9))
    assert evaluated == pytest.approx(
        (model.eval()(data(9)[0]).argmax(1) == data(9)[1]).double().mean().item()
    )


def test_pool_statistics_of_single_values():
    one, five = torch.tensor([1.0]), torch.tensor([5.0])
    nan = torch.tensor([float("nan")])
    mean, variance = pool_statistics([one, five], [nan, nan], [1, 1])
    assert mean.item() == 3 and variance.item() == 8
    mean, variance = pool_statistics([one, nan], [nan, nan], [1, 0])
    assert mean.item() == 1 and variance.item() == 0


# --- golden, shape-only, and other devices ------------------------------------------------------


def test_the_book_s_lenet_reaches_the_same_accuracy_on_one_and_two_devices():
    """Batch 256, learning rate 0.2, as in the book; its digits are clothes.

    In double precision: at that rate the rounding of single precision, which differs with the order
    of sums, grows to whole percents in 20 steps.
    """
    X, y, X_test, y_test = digits()
    X, X_test = X.double(), X_test.double()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reached = []
    try:
        for k in (1, 2):
            generator = torch.Generator().manual_seed(0)
            model = lenet().double()
            for layer in model:
                if hasattr(layer, "weight"):
                    nn.init.kaiming_normal_(layer.weight, generator=generator)
                    nn.init.zeros_(layer.bias)
            replicas = replicate(model, devices_for(k))
            optimizers = [torch.optim.SGD(r.parameters(), lr=0.2) for r in replicas]
            for epoch in range(2):
                for batch in batches(X[:2048], y[:2048], 256, seed=epoch):
                    train_step(replicas, optimizers, *batch, row_loss)
            reached.append(evaluate(replicas, X_test, y_test))
    finally:
        torch.set_num_threads(threads)
    assert reached[0] > 0.6 and abs(reached[0] - reached[1]) <= 0.001


def test_shape_only_mode():
    cluster = Cluster(2, server="dgx1-v100", quiet=True)
    replicas = []
    with FakeTensorMode():
        for device in cluster.devices:
            with torch.device(device):
                replicas.append(resnet18())
        X, y = torch.empty(1024, 1, 28, 28), torch.zeros(1024, dtype=torch.int64)
        with cluster.record() as timeline:
            compute_gradients(replicas, [(X, y)], row_loss)
    assert timeline.busy(0) > timeline.exposed(0) > 0
    # Forward and backward are some 3 x 0.9 GFLOP for each of 512 images (28 x 28 pixels)
    flops = sum(e.flops for e in timeline.events if e.devices == (0,))
    assert 512 * 3 * 0.8e9 < flops < 512 * 3 * 1.1e9


def test_on_the_cpu_itself(monkeypatch):
    monkeypatch.setenv("COURSE_DEVICES", "cpu")
    devices = Cluster(3, quiet=True).devices
    assert {device.type for device in devices} == {"cpu"}
    torch.manual_seed(0)
    model = small_net().double()
    replicas = replicate(model, devices)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.1) for r in replicas]
    X, y = data(7)
    train_step(replicas, optimizers, X, y, row_loss)
    plain_step(model, plain, X, y)
    assert_same_as_unsplit(model, replicas)
