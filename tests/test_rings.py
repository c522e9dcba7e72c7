"""Rings through a server's links, and all-reduces over several of them."""

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from utils import costs
from utils.hardware import DGX1_DOUBLE, DGX1_DOUBLE_RING, DGX1_SINGLE_RING, get_server
from utils.ranks import run
from utils.ranks.rings import find_rings, multi_ring_all_reduce

DGX1 = get_server("dgx1-v100")
LINKS = DGX1.link_matrix()


def backwards(ring):
    return (ring[0], *ring[:0:-1])


ALL_SIX = [
    (ring, weight)
    for forward, weight in ((DGX1_DOUBLE_RING, 2), (DGX1_SINGLE_RING, 1))
    for ring in (forward, backwards(forward))
]


def test_all_rings_of_the_dgx1_are_found():
    closed = [
        (0, *rest)
        for rest in permutations(range(1, 8))
        if all(LINKS[a][b] for a, b in zip((0, *rest), (*rest, 0)))
    ]
    assert sorted(find_rings(LINKS)) == sorted(closed)
    assert len(closed) == 60


@pytest.mark.parametrize("count, ring", [(2, DGX1_DOUBLE_RING), (1, DGX1_SINGLE_RING)])
def test_the_double_and_the_single_links_form_one_ring_each(count, ring):
    only = [[int(links == count) for links in row] for row in LINKS]
    assert set(find_rings(only)) == {ring, backwards(ring)}


def test_small_and_broken_rings():
    assert list(find_rings([[0, 1, 1], [1, 0, 1], [1, 1, 0]])) == [(0, 1, 2), (0, 2, 1)]
    assert list(find_rings([[0, 1, 0], [1, 0, 1], [0, 1, 0]])) == []
    assert len(DGX1_DOUBLE) == 8


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(1, 8),
    shape=st.sampled_from([(), (0,), (1,), (7,), (5, 3), (129,)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]),
    transposed=st.booleans(),
    op=st.sampled_from(["sum", "max", "min"]),
    weights=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    data=st.data(),
)
def test_sums_are_right_on_any_rings(ranks, shape, dtype, transposed, op, weights, data):
    orders = [data.draw(st.permutations(range(ranks))) for _ in weights]

    def make(rank):
        generator = torch.Generator().manual_seed(rank)
        values = torch.randint(-9, 9, shape, generator=generator).to(dtype)
        return values.t().contiguous().t() if transposed and values.dim() == 2 else values

    def program(comm):
        tensor = make(comm.rank)
        address = tensor.data_ptr()
        multi_ring_all_reduce(comm, tensor, list(zip(orders, weights)), op)
        assert tensor.data_ptr() == address
        return tensor

    stacked = torch.stack([make(rank) for rank in range(ranks)])
    if op == "sum":
        expected = stacked.any(0) if dtype == torch.bool else stacked.sum(0).to(dtype)
    else:
        expected = stacked.amax(0) if op == "max" else stacked.amin(0)
    for tensor in run(program, ranks, "virtual", server=DGX1, record=False).values:
        assert tensor.shape == shape and torch.equal(tensor, expected)


def test_average_divides_first():
    def program(comm):
        tensor = torch.full((3,), 40000.0, dtype=torch.float16)
        multi_ring_all_reduce(comm, tensor, [((0, 1), 1), ((1, 0), 1)], "avg")
        return tensor

    for tensor in run(program, 2, "virtual", server=DGX1).values:
        assert tensor.dtype == torch.float16 and tensor.tolist() == [40000.0] * 3


def test_the_same_on_processes():
    def program(comm):
        tensor = torch.arange(100.0) * (comm.rank + 1)
        multi_ring_all_reduce(comm, tensor, [((0, 1, 2), 2), ((2, 1, 0), 1)])
        return tensor

    for tensor in run(program, 3, "processes").values:
        assert torch.equal(tensor, torch.arange(100.0) * 6)


def test_six_directed_rings_reach_120_gigabytes_a_second():
    """On the wires within 3 %, latencies included; bytes exactly 2(n-1)/n."""
    size = 19_200_000

    def program(comm):
        multi_ring_all_reduce(comm, torch.ones(size // 4, device=comm.device), ALL_SIX)

    timeline = run(program, 8, "virtual", server=DGX1).timeline
    busy = {}
    for event in timeline.events:
        for wire in event.rows if event.kind == "communication" else ():
            busy[wire] = busy.get(wire, 0) + event.duration
    wires = {f"gpu{a}→gpu{b}" for a in range(8) for b in range(8) if LINKS[a][b]}
    assert set(busy) == wires and len(wires) == 32  # all 24 links, both ways
    formula = costs.ring_time(8, size, 120e9, 0) + 14 * 3.4e-6
    assert all(seconds == pytest.approx(formula, rel=1e-3) for seconds in busy.values())
    assert all(timeline.bytes_sent(i) == 2 * 7 / 8 * size for i in range(8))
