"""All-reduce by hand: sums, bytes and times against what can be worked out without it."""

import contextlib
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

from utils import Cluster, collectives, costs, vgpu
from utils.collectives import (
    all_gather,
    broadcast_from_root,
    check_tensors,
    cpu_all_reduce,
    cut,
    reduce_to_root,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    sharded_all_reduce,
    star_all_reduce,
    tree_all_reduce,
)
from utils.hardware import get_server

ALGORITHMS = (
    star_all_reduce,
    cpu_all_reduce,
    tree_all_reduce,
    sharded_all_reduce,
    ring_all_reduce,
)
WORLDS = (1, 2, 3, 4, 5, 8)
every_algorithm = pytest.mark.parametrize("all_reduce", ALGORITHMS)
every_world = pytest.mark.parametrize("n", WORLDS)


@pytest.fixture(autouse=True)
def leave_no_cluster():
    yield
    vgpu.stop()


def cluster_of(n, server="hgx-h200"):
    return Cluster(n, server=server, network="infiniband-ndr", quiet=True)


def on_devices(values, cluster):
    """One tensor a device, from one a rank."""
    return [torch.as_tensor(v).to(d) for v, d in zip(values, cluster.devices, strict=True)]


def bits(tensor):
    """The bytes of a tensor's elements, so that NaN equals NaN and 0.0 differs from -0.0."""
    return tensor.detach().cpu().contiguous().numpy(force=True).tobytes()


# --- sums ---------------------------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32, torch.float16, torch.int32, torch.int64, torch.complex64)
LAYOUTS = ("contiguous", "offset", "strided", "transposed", "channels last")


def lay_out(values, layout, device):
    """A tensor with these values on the device, in the layout, and the buffer it is part of."""
    if layout == "strided":
        buffer = torch.full((*values.shape, 2), 7, dtype=values.dtype, device=device)
        view = buffer[..., 0]
    elif layout == "offset":
        buffer = torch.full((values.numel() + 5,), 7, dtype=values.dtype, device=device)
        view = buffer[3 : 3 + values.numel()].view(values.shape)
    elif layout == "transposed":
        shape = values.shape[::-1]
        buffer = torch.full(shape, 7, dtype=values.dtype, device=device)
        view = buffer.permute(list(reversed(range(values.dim()))))
    elif layout == "channels last" and values.dim() == 4:
        buffer = torch.full(values.shape, 7, dtype=values.dtype, device=device)
        buffer = view = buffer.contiguous(memory_format=torch.channels_last)
    else:
        buffer = view = torch.empty(values.shape, dtype=values.dtype, device=device)
    view.copy_(values)
    return view, buffer


shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple) | st.integers(0, 70).map(lambda k: (k,))


@every_algorithm
@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 9), shape=shapes, dtype=st.sampled_from(DTYPES), data=st.data())
def test_any_tensors(all_reduce, n, shape, dtype, data):
    seed = data.draw(st.integers(0, 2**31))
    layouts = data.draw(st.lists(st.sampled_from(LAYOUTS), min_size=n, max_size=n))
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randint(-50, 50, shape, generator=generator).to(dtype) for _ in range(n)]
    cluster = cluster_of(n)
    pairs = [lay_out(v, layout, d) for v, layout, d in zip(values, layouts, cluster.devices)]
    tensors, buffers = zip(*pairs)
    before = [(t.data_ptr(), t.stride(), t.device) for t in tensors]
    others = [int((b == 7).sum()) - int((t == 7).sum()) for t, b in pairs]

    assert all_reduce(list(tensors)) is None

    expected = torch.stack(values).sum(0)  # of small whole numbers: exact in every dtype
    for tensor, buffer, was, other in zip(tensors, buffers, before, others):
        assert tensor.dtype == dtype and tensor.shape == shape
        assert (tensor.data_ptr(), tensor.stride(), tensor.device) == was
        assert torch.equal(tensor.cpu(), expected.to(dtype))
        assert int((buffer == 7).sum()) - int((tensor == 7).sum()) == other  # neighbours untouched


@every_algorithm
@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 9), length=st.integers(0, 40), seed=st.integers(0, 2**31))
def test_all_devices_get_the_same_bits(all_reduce, n, length, seed):
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-6, 7, (n, length), generator=generator)
    values = torch.randn(n, length, generator=generator) * scales
    tensors = on_devices(values, cluster_of(n))
    all_reduce(tensors)
    assert len({bits(t) for t in tensors}) == 1
    exact = values.double().sum(0)
    error = (tensors[0].cpu().double() - exact).abs()
    assert (error <= n * 2**-24 * values.double().abs().sum(0)).all()


@every_algorithm
@every_world
@pytest.mark.parametrize("length", (0, 1, 2, 3, 7, 64, 65))
def test_worlds_and_lengths(all_reduce, n, length):
    """U18, U48, U58: wrong from three ranks on, empty tensors, one rank."""
    tensors = on_devices([torch.arange(length) * 10**r for r in range(n)], cluster_of(n))
    all_reduce(tensors)
    expected = [k * int("1" * n) for k in range(length)]
    assert [t.tolist() for t in tensors] == [expected] * n


@every_algorithm
@pytest.mark.parametrize("n", (2, 3, 4, 5))
def test_u18_ring_of_three_or_more(all_reduce, n):
    values = [torch.tensor([r + 1.0, 10.0 * (r + 1)]) for r in range(n)]
    tensors = on_devices(values, cluster_of(n))
    all_reduce(tensors)
    total = n * (n + 1) / 2
    assert [t.tolist() for t in tensors] == [[total, 10 * total]] * n
    assert [v.tolist() for v in values] == [[r + 1.0, 10.0 * (r + 1)] for r in range(n)]


@every_algorithm
def test_u07_the_callers_own_tensors_change(all_reduce):
    a, b = on_devices([[1.0, 1.0], [2.0, 2.0]], cluster_of(2))
    addresses = a.data_ptr(), b.data_ptr()
    assert all_reduce([a, b]) is None
    assert a.tolist() == b.tolist() == [3.0, 3.0]
    assert (a.data_ptr(), b.data_ptr()) == addresses


@every_algorithm
def test_u45_a_temporary_copy_is_summed_and_lost(all_reduce):
    tensors = on_devices([[1.0, 1.0], [2.0, 2.0]], cluster_of(2))
    result = all_reduce([t.double() for t in tensors])
    assert result is None and tensors[0].tolist() == [1.0, 1.0]
    assert "in place" in all_reduce.__doc__.lower()


@every_algorithm
@pytest.mark.parametrize("shape", ((0,), (2, 0), (0, 3, 1)))
@pytest.mark.parametrize("n", (1, 2, 3, 4))
def test_u48_empty_tensors(all_reduce, shape, n):
    tensors = [torch.empty(shape, device=d) for d in cluster_of(n).devices]
    all_reduce(tensors)
    assert [t.shape for t in tensors] == [shape] * n


@every_algorithm
@every_world
def test_u49_zero_dimensional(all_reduce, n):
    tensors = on_devices([float(2**r) for r in range(n)], cluster_of(n))
    all_reduce(tensors)
    assert [t.shape for t in tensors] == [()] * n
    assert [t.item() for t in tensors] == [2**n - 1] * n


@every_algorithm
def test_u42_dtypes(all_reduce):
    cluster = cluster_of(4)
    tensors = on_devices([[True, False], *[[False, False]] * 3], cluster)
    all_reduce(tensors)  # adding bools is "or"
    assert [t.tolist() for t in tensors] == [[True, False]] * 4 and tensors[0].dtype == torch.bool
    for dtype in (torch.uint8, torch.int8, torch.int16):
        tensors = on_devices([torch.full((5,), 100, dtype=dtype)] * 4, cluster)
        with pytest.raises(TypeError, match=f"{dtype}.*overflow.*int32"):
            all_reduce(tensors)
        assert [t.tolist() for t in tensors] == [[100] * 5] * 4
    tensors = on_devices([torch.tensor(v, dtype=torch.bfloat16) for v in (256, 1, 1, 1)], cluster)
    all_reduce(tensors)  # bfloat16 has no 257: the order decides, as it does in float32
    assert {t.item() for t in tensors} <= {256.0, 258.0, 260.0}


@every_algorithm
def test_u60_order_of_additions(all_reduce):
    values = torch.tensor([1e8, 1, -1e8, 1])
    tensors = on_devices([v.repeat(9) for v in values], cluster_of(4))
    all_reduce(tensors)
    assert len({bits(t) for t in tensors}) == 1
    assert set(tensors[0].tolist()) <= {0.0, 1.0, 2.0}
    if all_reduce in (star_all_reduce, cpu_all_reduce):
        assert set(tensors[0].tolist()) == {1.0}
    if all_reduce is tree_all_reduce:
        assert set(tensors[0].tolist()) == {0.0}


@every_algorithm
def test_equal_to_plain_cpu_tensors(all_reduce):
    """Nothing needs virtual devices: a list of CPU tensors will do, with the same bits."""
    values = torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    virtual = on_devices(values, cluster_of(5))
    all_reduce(virtual)
    vgpu.stop()
    plain = [v.clone() for v in values]
    all_reduce(plain)
    assert {bits(t) for t in plain} == {bits(t) for t in virtual}


# --- gradients ----------------------------------------------------------------------------------


@every_algorithm
@pytest.mark.parametrize("n", (1, 2, 3, 4))
def test_sum_of_shard_gradients_is_the_whole_batchs(all_reduce, n):
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    torch.manual_seed(1)
    X, y = torch.randn(10, 6).double(), torch.randint(3, (10,))
    whole = network()
    nn.functional.cross_entropy(whole(X), y, reduction="sum").backward()
    cluster = cluster_of(n)
    replicas = [network().to(device) for device in cluster.devices]
    for replica, rows in zip(replicas, torch.tensor_split(torch.arange(10), n)):
        device = next(replica.parameters()).device
        output = replica(X[rows].to(device))
        nn.functional.cross_entropy(output, y[rows].to(device), reduction="sum").backward()
    for parameters in zip(*(replica.parameters() for replica in replicas)):
        all_reduce([p.grad for p in parameters])
    for replica in replicas:
        for p, q in zip(replica.parameters(), whole.parameters()):
            torch.testing.assert_close(p.grad.cpu(), q.grad)


@every_algorithm
def test_u51_sparse_gradients_are_refused_and_may_be_made_dense(all_reduce):
    cluster = cluster_of(2)
    tables = [nn.Embedding(3, 2, sparse=True).to(device) for device in cluster.devices]
    for row, (table, device) in enumerate(zip(tables, cluster.devices)):
        table(torch.tensor([row], device=device)).sum().backward()
    gradients = [table.weight.grad for table in tables]
    with pytest.raises(TypeError, match=r"tensor 0 is sparse.*sparse=False"):
        all_reduce(gradients)
    dense = [gradient.to_dense() for gradient in gradients]
    all_reduce(dense)
    assert [t.tolist() for t in dense] == [[[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]] * 2


# --- what is refused, before anything is modified ------------------------------------------------


@every_algorithm
def test_u50_shapes_differ(all_reduce):
    tensors = on_devices([torch.ones(2), torch.ones(3), torch.ones(2)], cluster_of(3))
    with pytest.raises(ValueError, match=r"one shape.*0: \(2,\), 1: \(3,\), 2: \(2,\)"):
        all_reduce(tensors)
    assert [t.tolist() for t in tensors] == [[1.0] * 2, [1.0] * 3, [1.0] * 2]


@every_algorithm
@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda ds: [], ValueError, "the list is empty"),
        (lambda ds: [torch.ones(2, device=ds[0]), None], ValueError, "tensor 1 is None"),
        (lambda ds: [torch.ones(1, 3, device=ds[0]), torch.ones(3, device=ds[1])],
         ValueError, r"0: \(1, 3\), 1: \(3,\)"),
        (lambda ds: [torch.ones(2, device=ds[0]), torch.ones(2, device=ds[1]).double()],
         ValueError, "one dtype.*0: torch.float32, 1: torch.float64"),
        (lambda ds: [torch.ones(2, device=ds[0]), torch.ones((), device=ds[1]).expand(2)],
         ValueError, r"tensor 1 is expanded.*\.clone"),
        (lambda ds: [torch.ones(2, device=d, requires_grad=True) for d in ds],
         TypeError, r"tensor 0 requires a gradient.*\.grad"),
        (lambda ds: [torch.ones(2, device=ds[0])] * 2,
         ValueError, "tensors 0 and 1 are the same memory.*copy=True"),
    ],
    ids=("none", "None", "broadcastable", "dtypes", "expanded", "parameters", "aliases"),
)  # fmt: skip
def test_refused(all_reduce, made, error, message):
    tensors = made(cluster_of(2).devices)
    with pytest.raises(error, match=message):
        all_reduce(tensors)
    assert all(t is None or t.sum().item() in (2, 3) for t in tensors)


def test_replicas_that_share_memory_are_found():
    """`.to` where the tensor already is: two names for one buffer, also by way of a view."""
    cluster = cluster_of(2)
    weight = torch.ones(4, device=cluster.devices[0])
    replicas = [weight.to(cluster.devices[0]), weight.detach()]
    with pytest.raises(ValueError, match="the same memory"):
        check_tensors(replicas)
    rows = torch.ones(2, 3)  # rows of one buffer share no element
    ring_all_reduce(list(rows))
    assert rows.tolist() == [[2.0] * 3] * 2
    assert check_tensors([torch.empty(0)] * 2) == 2


# --- the pieces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("root", (0, 1))
def test_u44_reduce_to_root_leaves_the_others_unchanged(root):
    values = [[[1, 2], [3, 4]], [[4, 5], [6, 7]]]
    tensors = on_devices(values, cluster_of(2))
    assert reduce_to_root(tensors, root) is None
    assert tensors[root].tolist() == [[5, 7], [9, 11]]
    assert tensors[1 - root].tolist() == values[1 - root]


@every_world
def test_reduce_and_broadcast_with_every_root(n):
    cluster = cluster_of(n)
    for root in range(n):
        tensors = on_devices([[10**r] for r in range(n)], cluster)
        reduce_to_root(tensors, root)
        expected = [[10**r] for r in range(n)]
        expected[root] = [int("1" * n)]
        assert [t.tolist() for t in tensors] == expected
        broadcast_from_root(tensors, root)
        assert [t.tolist() for t in tensors] == [[int("1" * n)]] * n


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 9), shape=shapes, layout=st.sampled_from(LAYOUTS))
def test_cut(n, shape, layout):
    cluster = cluster_of(n)
    count = torch.Size(shape).numel()
    values = torch.arange(count).view(shape)
    tensors = [lay_out(values, layout, device)[0] for device in cluster.devices]
    with cut(tensors) as parts:
        assert [len(row) for row in parts] == [n] * n
        sizes = [len(part) for part in parts[0]]
        assert sum(sizes) == count and max(sizes) - min(sizes) <= 1
        for i, row in enumerate(parts):
            assert torch.cat([part.cpu() for part in row]).tolist() == list(range(count))
            assert {part.device for part in row} == {cluster.devices[i]}
            for part in row:
                part += 1000 * i
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor.cpu(), values + 1000 * i)


def test_cut_makes_no_copy_of_contiguous_tensors():
    tensors = [torch.arange(7.0), torch.arange(7.0)]
    with cut(tensors) as parts:
        parts[1][0][0] = 100.0
        assert tensors[1][0] == 100.0
        assert parts[0][1].data_ptr() == tensors[0].data_ptr() + 4 * 4


def test_cut_writes_nothing_back_after_an_error():
    tensors = [torch.zeros(3, 2).t() for _ in range(2)]
    with contextlib.suppress(RuntimeError), cut(tensors) as parts:
        parts[0][0] += 1
        raise RuntimeError
    assert tensors[0].sum() == 0


@every_world
def test_ring_phases(n):
    tensors = on_devices([torch.full((2 * n,), 10**r) for r in range(n)], cluster_of(n))
    with cut(tensors) as parts:
        ring_reduce_scatter(parts)
        everyone = int("1" * n)
        for i in range(n):
            finished = [j for j in range(n) if parts[i][j].tolist() == [everyone] * 2]
            assert finished == [(i + 1) % n]
        ring_all_gather(parts)
    assert [t.tolist() for t in tensors] == [[everyone] * 2 * n] * n


@pytest.mark.parametrize("n", WORLDS)
def test_u49_all_gather(n):
    cluster = cluster_of(n)
    tensors = on_devices([float(r + 1) for r in range(n)], cluster)
    gathered = all_gather(tensors)
    assert [t.tolist() for t in gathered] == [[r + 1.0 for r in range(n)]] * n
    assert [t.device for t in gathered] == cluster.devices
    rows = on_devices([torch.full((r, 2), r) for r in range(n)], cluster)  # of different lengths
    expected = [[r, r] for r in range(n) for _ in range(r)]
    assert [t.tolist() for t in all_gather(rows)] == [expected] * n
    empty = [torch.empty(0, 3, device=device) for device in cluster.devices]
    assert [t.shape for t in all_gather(empty)] == [(0, 3)] * n
    assert [t.tolist() for t in tensors] == [r + 1.0 for r in range(n)]


# --- bytes and times ----------------------------------------------------------------------------


def recorded(all_reduce, cluster, size, dtype=torch.float32, order=None):
    """The timeline of an all-reduce of `size` bytes a device, without data."""
    with FakeTensorMode():
        count = size // dtype.itemsize
        devices = [cluster.devices[i] for i in order or range(len(cluster))]
        tensors = [torch.empty(count, dtype=dtype, device=device) for device in devices]
        with cluster.record() as timeline:
            all_reduce(tensors)
    return timeline


def sent(timeline):
    return [timeline.bytes_sent(device) for device in timeline.devices]


def test_ring_sends_11200_bytes_a_rank():
    for all_reduce in (ring_all_reduce, sharded_all_reduce):
        cluster = cluster_of(8)
        assert sent(recorded(all_reduce, cluster, 6400, torch.float64)) == [11_200] * 8


@every_world
def test_bytes_against_the_lower_bound(n):
    size = 8 * 840  # 840 is divisible by every n
    cluster = cluster_of(n)
    for all_reduce in (ring_all_reduce, sharded_all_reduce):
        assert sent(recorded(all_reduce, cluster, size)) == [costs.least_bytes(n, size)] * n
    for all_reduce in (star_all_reduce, tree_all_reduce):
        found = sent(recorded(all_reduce, cluster, size))
        assert sum(found) == n * costs.least_bytes(n, size)  # as many in all, unevenly spread
        assert max(found) >= costs.least_bytes(n, size)
    assert sent(recorded(star_all_reduce, cluster, size)) == [(n - 1) * size] + [size] * (n - 1)


@every_world
@pytest.mark.parametrize("length", (1, 5, 13, 1001))
def test_no_rank_sends_more_than_a_part_too_many(n, length):
    found = sent(recorded(ring_all_reduce, cluster_of(n), 4 * length))
    assert sum(found) == 2 * (n - 1) * 4 * length
    assert max(found) <= 2 * (n - 1) * 4 * -(-length // n)


def only_wires(name, bandwidth, latency):
    """A switch server on which adding and launching take no time that matters."""
    server = get_server(name)
    chip = dataclasses.replace(server.chips[0], launch=0.0, bandwidth=1e30)
    host = dataclasses.replace(server.host, launch=0.0, bandwidth=1e30)
    links = tuple(
        dataclasses.replace(link, bandwidth=bandwidth, latency=latency / 2, efficiency=1.0)
        for link in server.links
    )
    return server.replace(chips=(chip,) * server.gpus, links=links, host=host)


@pytest.mark.parametrize(
    ("all_reduce", "formula"),
    [
        (star_all_reduce, costs.star_time),
        (tree_all_reduce, costs.tree_time),
        (sharded_all_reduce, costs.sharded_time),
        (ring_all_reduce, costs.ring_time),
    ],
)
@pytest.mark.parametrize("n", (1, 2, 4, 8))
@pytest.mark.parametrize("size", (840, 84_000_000))
def test_times_are_those_of_the_model(all_reduce, formula, n, size):
    cluster = cluster_of(n, only_wires("hgx-h200", 10e9, 5e-6))
    timeline = recorded(all_reduce, cluster, size)
    assert timeline.duration == pytest.approx(formula(n, size, 10e9, 5e-6), rel=1e-3)


def test_time_of_the_cpus_link_is_that_of_the_model():
    cluster = cluster_of(4, only_wires("pcie-switch", 16e9, 5e-6))
    timeline = recorded(cpu_all_reduce, cluster, 160_000_000)
    assert timeline.duration == pytest.approx(costs.cpu_time(4, 160e6, 16e9, 5e-6), rel=1e-3)


@every_algorithm
def test_the_timeline_does_not_depend_on_data(all_reduce):
    cluster = cluster_of(5)
    shape_only = recorded(all_reduce, cluster, 4 * 1001)
    tensors = [torch.randn(1001, device=device) for device in cluster.devices]
    with cluster.record() as real:
        all_reduce(tensors)
    with cluster.record() as again:
        all_reduce(tensors)
    for other in (shape_only, again):
        assert [e.duration for e in other.events] == [e.duration for e in real.events]
        assert other.duration == pytest.approx(real.duration, abs=1e-12)


def test_the_order_of_the_copies_matters():
    """All devices sending to device 0 first makes the wires queue; turning avoids it."""

    def part_after_part(tensors):
        n = check_tensors(tensors)
        with cut(tensors) as parts:
            for i in range(n):
                for j in range(n):
                    if j != i:
                        parts[i][i] += parts[j][i].to(parts[i][i].device)
            for i in range(n):
                for j in range(n):
                    if j != i:
                        parts[j][i].copy_(parts[i][i])

    cluster = cluster_of(4, only_wires("pcie-switch", 16e9, 0.0))
    naive = recorded(part_after_part, cluster, 160_000_000)
    turning = recorded(sharded_all_reduce, cluster, 160_000_000)
    assert sent(naive) == sent(turning)
    assert turning.duration == pytest.approx(15e-3, rel=1e-3)
    assert naive.duration > 1.4 * turning.duration


def test_every_public_function_says_what_it_does():
    for name, value in vars(collectives).items():
        if callable(value) and getattr(value, "__module__", "") == collectives.__name__:
            assert name.startswith("_") or value.__doc__, name
