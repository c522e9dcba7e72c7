"""What every kind of rank must do alike: the collectives' small print, data types and shapes.

All cases run as one program, so that processes are started once for each number of ranks.
"""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from utils.ranks import RankError, run
from utils.ranks.collectives import ring_all_reduce

PLACES = {
    "virtual": {"on": "virtual", "server": "dgx1-v100"},
    "gloo": {"on": "processes", "transport": "gloo"},
    "shared": {"on": "processes", "transport": "shared"},
}
CASES = {}


def case(program):
    """A program that every rank runs; `check_<name>` looks at the values of all ranks."""
    CASES[program.__name__] = program
    return program


def message(action):
    """The text of the error that an action raises."""
    try:
        action()
    except (ValueError, TypeError) as error:
        return str(error)
    return None


@case
def random_streams(comm):
    """Initial values equal on all ranks, data different, both repeatable. (Nothing drawn yet.)"""
    weights = torch.rand(5, generator=torch.Generator().manual_seed(7))
    return weights.tolist(), torch.rand(5).tolist(), torch.initial_seed()


def check_random_streams(values, n):
    for rank, (weights, data, seed) in enumerate(values):
        assert weights == values[0][0] and seed == rank
        assert data == torch.rand(5, generator=torch.Generator().manual_seed(rank)).tolist()


@case
def ring_of_known_sums(comm):
    """Inputs that should be kept are kept; results are the same whatever was there before."""
    mine = torch.tensor([comm.rank + 1.0, 10.0 * (comm.rank + 1)], device=comm.device)
    kept = mine.clone()
    total = mine.clone()
    ring_all_reduce(comm, total)
    gathered = [torch.full((2,), -9.0, device=comm.device) for _ in range(comm.world_size)]
    comm.all_gather(gathered, mine)
    return total, torch.equal(mine, kept), gathered


def check_ring_of_known_sums(values, n):
    total = n * (n + 1) / 2
    for result, kept, gathered in values:
        assert result.tolist() == [total, 10 * total] and kept
        assert [g.tolist() for g in gathered] == [[r + 1.0, 10.0 * (r + 1)] for r in range(n)]


@case
def neighbours(comm):
    """Both send first: with `exchange` it cannot deadlock, at any size."""
    n, sums = comm.world_size, []
    for size in (0, 1, 4, 300_000):
        mine, theirs = torch.full((size,), comm.rank + 1.0), torch.zeros(size)
        if n > 1:
            comm.exchange(mine, (comm.rank + 1) % n, theirs, (comm.rank - 1) % n)
            sums.append(theirs.unique().tolist())
    return sums


def check_neighbours(values, n):
    for rank, sums in enumerate(values):
        left = float((rank - 1) % n + 1)
        assert sums == ([[], [left], [left], [left]] if n > 1 else [])


@case
def receive_first_then_send(comm):
    """An irecv goes on by itself while its rank sends."""
    n, rank = comm.world_size, comm.rank
    if n == 1:
        return None
    box = torch.zeros(70_000)
    work = comm.irecv(box, (rank - 1) % n)
    comm.send(torch.full((70_000,), float(rank)), (rank + 1) % n)
    work.wait()
    return box[-1].item()


def check_receive_first_then_send(values, n):
    assert values == ([None] if n == 1 else [float((rank - 1) % n) for rank in range(n)])


@case
def tags_out_of_order(comm):
    if comm.world_size == 1:
        return None
    if comm.rank == 0:
        works = [comm.isend(torch.tensor([tag]), 1, tag=tag) for tag in range(5)]
        works += [comm.isend(torch.tensor([10 + i]), 1, tag=9) for i in range(3)]
        for work in reversed(works):
            work.wait()
    elif comm.rank == 1:
        order = [9, 4, 0, 9, 2, 1, 3, 9]
        boxes = [torch.zeros(1, dtype=torch.int64) for _ in order]
        for box, tag in zip(boxes, order):
            comm.recv(box, 0, tag=tag)
        return [box.item() for box in boxes]


def check_tags_out_of_order(values, n):
    assert n == 1 or values[1] == [10, 4, 0, 11, 2, 1, 3, 12]


@case
def reduce_leaves_the_others_alone(comm):
    tensor = torch.tensor([[1, 2], [3, 4]]) + 3 * comm.rank
    comm.reduce(tensor, dst=0)
    return tensor


def check_reduce_leaves_the_others_alone(values, n):
    assert torch.equal(values[0], sum(torch.tensor([[1, 2], [3, 4]]) + 3 * r for r in range(n)))
    for rank in range(1, n):
        assert torch.equal(values[rank], torch.tensor([[1, 2], [3, 4]]) + 3 * rank)


@case
def in_place_or_not_at_all(comm):
    tensor = torch.ones(2)
    returned = comm.all_reduce(tensor.double())  # a copy: its sum is lost
    kept = tensor.tolist()
    return returned, kept, comm.all_reduce(tensor), tensor.tolist()


def check_in_place_or_not_at_all(values, n):
    assert values == [(None, [1.0, 1.0], None, [float(n)] * 2)] * n


@case
def data_types(comm):
    first = comm.rank == 0
    logical = torch.tensor([first, False])
    comm.all_reduce(logical)
    narrow = message(lambda: comm.all_reduce(torch.full((1,), 200, dtype=torch.uint8)))
    brain = torch.tensor([256.0 if first else 1.0], dtype=torch.bfloat16)
    comm.all_reduce(brain)
    half = torch.full((3,), 40000.0, dtype=torch.float16)
    comm.all_reduce(half, op="avg")
    counts = torch.tensor([2**40 + comm.rank])
    comm.all_reduce(counts)
    moved = []
    for dtype in (torch.uint8, torch.int16, torch.complex64, torch.float8_e5m2, torch.bool):
        tensor = torch.tensor([comm.rank + 1.0, 0.0]).to(dtype)
        comm.broadcast(tensor, src=comm.world_size - 1)
        moved.append((tensor.dtype, tensor.to(torch.complex64).real.tolist()))
    return logical, narrow, brain, half, counts, moved


def check_data_types(values, n):
    for logical, narrow, brain, half, counts, moved in values:
        assert logical.tolist() == [True, False]
        assert "overflow silently" in narrow
        # Between 256 and 512, bfloat16 has even numbers only: of the ones, what is added to 256
        # singly is lost, and the order of the ring decides. All ranks have the same.
        assert brain.dtype == torch.bfloat16 and 256 <= brain.item() <= 256 + n
        assert torch.equal(brain, values[0][2])
        assert half.tolist() == [40000.0] * 3 and half.dtype == torch.float16
        assert counts.item() == n * 2**40 + n * (n - 1) // 2
        assert [type_ for type_, _ in moved] == [
            torch.uint8, torch.int16, torch.complex64, torch.float8_e5m2, torch.bool,
        ]  # fmt: skip
        assert [m for _, m in moved[:-1]] == [[float(n), 0.0]] * 4 and moved[-1][1] == [1.0, 0.0]


@case
def empty_tensors(comm):
    n, shapes = comm.world_size, []
    for shape in ((0,), (2, 0)):
        tensor = torch.ones(shape)
        gathered = [torch.ones(shape) for _ in range(n)]
        comm.all_reduce(tensor)
        comm.broadcast(tensor)
        comm.reduce(tensor)
        comm.all_gather(gathered, tensor)
        comm.reduce_scatter(tensor, [torch.ones(shape) for _ in range(n)])
        comm.all_to_all(gathered, [torch.ones(shape) for _ in range(n)])
        shapes += [tensor.shape, *(g.shape for g in gathered)]
    return [tuple(shape) for shape in shapes]


def check_empty_tensors(values, n):
    assert values == [[(0,)] * (n + 1) + [(2, 0)] * (n + 1)] * n


@case
def single_numbers(comm):
    """A loss has no dimension."""
    loss = torch.tensor(comm.rank + 1.0)
    gathered = [torch.tensor(0.0) for _ in range(comm.world_size)]
    comm.all_gather(gathered, loss)
    comm.all_reduce(loss)
    return loss, torch.stack(gathered).tolist()


def check_single_numbers(values, n):
    for loss, gathered in values:
        assert loss.shape == () and loss.item() == n * (n + 1) / 2
        assert gathered == [r + 1.0 for r in range(n)]


@case
def sizes_that_differ(comm):
    tensor = torch.ones(2 + comm.rank)
    long = [torch.ones(3 + comm.rank, 5) for _ in range(50)]
    return (
        message(lambda: comm.all_reduce(tensor)),
        tensor.tolist(),
        message(lambda: comm.all_gather([torch.empty(2)] * comm.world_size, torch.ones(3)))
        or message(lambda: comm.all_gather([torch.empty(2)], torch.ones(3))),
        message(lambda: comm._begin("many", *long)),
        message(lambda: comm.barrier()),  # after a refused call all goes on
    )


def check_sizes_that_differ(values, n):
    for rank, (said, tensor, gather, many, barrier) in enumerate(values):
        assert tensor == [1.0] * (2 + rank) and barrier is None
        assert "the same memory" in gather or "but outputs" in gather
        if n == 1:
            assert said is None and many is None
            continue
        for other in range(n):
            assert f"rank {other}: all_reduce(({2 + other},) float32, op='sum')" in said
        assert all(f"rank {r}: many(({3 + r}, 5) float32, " in many for r in range(n))


@case
def calls_that_differ(comm):
    def differ():
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.broadcast(torch.ones(1))

    return message(differ), message(comm.barrier)


def check_calls_that_differ(values, n):
    for said, after in values:
        assert after is None
        if n == 1:
            assert said is None
        else:
            assert "rank 0: barrier()" in said and "broadcast((1,) float32, src=0)" in said


@case
def groups_that_differ(comm):
    group = comm.group(range(comm.world_size))
    said = message(lambda: group.all_reduce(torch.ones(1 + comm.rank)))
    tensor = torch.ones(1)
    group.all_reduce(tensor)
    return said, tensor.item()


def check_groups_that_differ(values, n):
    for said, total in values:
        assert total == n
        assert n == 1 or f"rank {n - 1}: all_reduce(({n},) float32, op='sum')" in said


@case
def sparse_gradients(comm):
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([comm.rank % 3])).sum().backward()
    sparse = message(lambda: comm.all_reduce(table.weight.grad))
    dense = nn.Embedding(3, 2)
    dense(torch.tensor([comm.rank % 3])).sum().backward()
    comm.all_reduce(dense.weight.grad)
    return sparse, dense.weight.grad


def check_sparse_gradients(values, n):
    for sparse, dense in values:
        assert "sparse=False" in sparse
        expected = [[float(sum(r % 3 == row for r in range(n)))] * 2 for row in range(3)]
        assert dense.tolist() == expected


@case
def stop_together(comm):
    """Rank 0 wants to stop after one epoch: all leave at the same one."""
    for epoch in range(5):
        stop = torch.tensor([float(comm.rank == 0 and epoch == 1)])
        comm.all_reduce(stop, op="max")
        if stop.item():
            return epoch


def check_stop_together(values, n):
    assert values == [1] * n


@case
def skip_a_bad_step_together(comm):
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    updates = 0
    for step in range(3):
        bad = comm.rank == comm.world_size - 1 and step == 1
        loss = parameter.sum() * (float("nan") if bad else 1.0)
        optimizer.zero_grad()
        loss.backward()
        comm.all_reduce(parameter.grad, op="avg")
        if parameter.grad.isfinite().all():
            optimizer.step()
            updates += 1
    return updates, parameter.tolist()


def check_skip_a_bad_step_together(values, n):
    assert values == [(2, [-2.0, -2.0])] * n


@case
def order_of_additions(comm):
    """Sums of 1e8, 1, -1e8 and 1 in float32 are 0, 1 or 2 by their order; ranks agree."""
    tensor = torch.tensor([[1e8, 1.0, -1e8, 1.0][comm.rank % 4]])
    whole = torch.tensor([[1e8, 1.0, -1e8, 1.0][comm.rank % 4]], dtype=torch.float64)
    comm.all_reduce(tensor)
    comm.all_reduce(whole)
    return tensor, whole


def check_order_of_additions(values, n):
    exact = sum([1e8, 1.0, -1e8, 1.0][:n])
    for tensor, whole in values:
        assert torch.equal(tensor, values[0][0]) and whole.item() == exact
        assert abs(tensor.item() - exact) <= 8


@case
def strided_and_last_channels(comm):
    wide = torch.zeros(3, 4)
    column = wide[:, 1]
    column += comm.rank + 1
    comm.all_reduce(column)  # its neighbours stay as they are
    image = torch.full((2, 3, 4, 5), 1.0).to(memory_format=torch.channels_last)
    comm.all_reduce(image)
    turned = (torch.arange(6.0).view(2, 3) * (comm.rank == 0)).t()
    comm.broadcast(turned)
    return wide, image, turned


def check_strided_and_last_channels(values, n):
    for wide, image, turned in values:
        expected = torch.zeros(3, 4)
        expected[:, 1] = n * (n + 1) / 2
        assert torch.equal(wide, expected)
        assert torch.equal(image, torch.full_like(image, n))
        assert torch.equal(turned, torch.arange(6.0).view(2, 3).t())


@case
def in_the_background(comm):
    x, y = torch.full((1000,), comm.rank + 1.0), torch.full((7,), 2.0)
    works = [comm.launch(ring_all_reduce, tensor) for tensor in (x, y)]
    comm.barrier()
    result = comm.launch(lambda own, a: (own.rank, a), 5).wait()
    for work in works:
        work.wait()
    nested = comm.launch(lambda own: message_of_launch(own)).wait()
    other = comm.launch(lambda own: message_of_barrier(comm)).wait()
    return x[0].item(), y[0].item(), result, nested, other


def message_of_launch(comm):
    try:
        comm.launch(print)
    except RuntimeError as error:
        return str(error)


def message_of_barrier(comm):
    try:
        comm.group(range(comm.world_size)).send(torch.ones(1), (comm.rank + 1) % comm.world_size)
    except (RuntimeError, ValueError) as error:
        return str(error)


def check_in_the_background(values, n):
    for rank, (x, y, result, nested, other) in enumerate(values):
        assert (x, y, result) == (n * (n + 1) / 2, 2.0 * n, (rank, 5))
        assert "cannot launch another" in nested
        assert ("belongs to another thread" if n > 1 else "itself") in other


@case
def gradients_under_way(comm):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.Adam([parameter])
    work = comm.launch(ring_all_reduce, parameter.grad)
    try:
        optimizer.step()
    except RuntimeError as error:
        said = str(error)
    work.wait()
    optimizer.step()
    return said


def check_gradients_under_way(values, n):
    for said in values:
        assert "gradient of parameter 0, shape (2,), is still being communicated" in said


@case
def one_rank_far_ahead(comm):
    """Messages between two ranks do not depend on whether a third one looks."""
    if comm.rank < 2 <= comm.world_size:
        x = torch.zeros(1)
        for i in range(700):
            comm.exchange(torch.tensor([float(i)]), 1 - comm.rank, x, 1 - comm.rank)
    sent = []
    if comm.rank == 0 and comm.world_size > 1:
        sent = [comm.isend(torch.tensor([float(i)]), 1, tag=i) for i in range(300)]
    if comm.rank == 1:
        boxes = [torch.zeros(1) for _ in range(300)]
        works = [comm.irecv(box, 0, tag=i) for i, box in enumerate(boxes)][::-1]
        for work in works:
            work.wait()
        assert [box.item() for box in boxes] == list(range(300))
    for work in sent:
        work.wait()
    total = torch.ones(1)
    comm.all_reduce(total)
    return total.item()


def check_one_rank_far_ahead(values, n):
    assert values == [float(n)] * n


def all_cases(comm, names):
    return {name: CASES[name](comm) for name in names}


@functools.cache
def outcome(place, ranks):
    """The values of all cases, run as one program."""
    values = run(all_cases, ranks=ranks, args=(list(CASES),), timeout=60, **PLACES[place]).values
    return {name: [value[name] for value in values] for name in CASES}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_case(name, ranks, place):
    globals()[f"check_{name}"](outcome(place, ranks)[name], ranks)


# --- the same training everywhere ---------------------------------------------------------------


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(48, 10, generator=generator), torch.randint(3, (48,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 33), nn.ReLU(), nn.Linear(33, 3))


def train(comm, steps=20):
    """Data-parallel: each rank takes its rows, gradients are averaged as one flat tensor."""
    model = network().to(comm.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x, y = (part.tensor_split(comm.world_size)[comm.rank].to(comm.device) for part in data())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        comm.all_reduce(flat, op="avg")
        sizes = [p.numel() for p in model.parameters()]
        for parameter, part in zip(model.parameters(), flat.split(sizes)):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()
        mean = loss.detach().clone()
        comm.all_reduce(mean, op="avg")
        losses.append(mean.item())
    return losses


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_training_is_the_same_on_virtual_ranks_and_on_processes(ranks):
    found = {place: run(train, ranks=ranks, **options).values for place, options in PLACES.items()}
    assert all(losses == found["virtual"][0] for losses in found["virtual"])
    assert found["virtual"] == found["gloo"] == found["shared"]  # bit for bit

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    x, y = data()
    for expected in found["virtual"][0]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_a_size_that_differs_names_both_ranks_and_the_line(place):
    def program(comm):
        if comm.rank == 0:
            comm.isend(torch.ones(3), 1)
        else:
            comm.recv(torch.ones(5), 0)

    with pytest.raises(RankError) as caught:
        run(program, ranks=2, timeout=30, **PLACES[place])
    text = str(caught.value)
    assert "rank 0 sends 3 float32 values to rank 1, which receives 5 float32 values" in text
    assert "of program in test_ranks_cases.py: comm.recv(torch.ones(5), 0)" in text
