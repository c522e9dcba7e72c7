"""Published times, from running the hand-written code on virtual GPUs: within 2 % on the wires.

What adding costs on the chips and what launching costs on the host is checked on its own.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from utils import Cluster, collectives, costs, vgpu
from utils.hardware import DGX1_DOUBLE_RING, DGX1_SINGLE_RING

SIZE = 160_000_000  # bytes of gradients a GPU: Dive into Deep Learning, parameter servers
ADD = 3 * SIZE / (900e9 * 4.3 / 4.8)  # seconds to add as many bytes on a V100: two reads, one write


@pytest.fixture(autouse=True)
def leave_no_cluster():
    yield
    vgpu.stop()


def record(all_reduce, cluster, order=None):
    tensors = [torch.full((SIZE // 4,), 1.0, device=cluster.devices[i]) for i in order or range(4)]
    with cluster.record() as timeline:
        all_reduce(tensors)
    return timeline, tensors


def launches(timeline):
    """Seconds that the host spends issuing kernels and copies."""
    return sum(event.duration for event in timeline.events if event.name.startswith("launch"))


@pytest.mark.parametrize(
    ("all_reduce", "wires", "adding", "launched"),
    [
        (collectives.star_all_reduce, 60e-3, [3 * ADD, 0, 0, 0], 9),
        (collectives.cpu_all_reduce, 80e-3, [0, 0, 0, 0], 8),
        (collectives.sharded_all_reduce, 15e-3, [3 / 4 * ADD] * 4, 36),
    ],
)
def test_the_books_times_on_a_pcie_switch(all_reduce, wires, adding, launched):
    timeline, tensors = record(all_reduce, Cluster(4, server="pcie-switch", quiet=True))
    assert all((tensor == 4).all() for tensor in tensors)  # the sum of four ones, for real
    assert timeline.wire_time() == pytest.approx(wires, rel=0.02)
    assert [timeline.busy(i) for i in range(4)] == pytest.approx(adding)
    assert launches(timeline) == pytest.approx(launched * 10e-6)
    host_adds = sum(event.duration for event in timeline.events if event.name == "add_")
    rest = timeline.duration - timeline.wire_time()
    assert 0 <= rest <= max(adding) + host_adds + launches(timeline)


def wire_times(timeline):
    """Seconds in which each wire is busy."""
    found = {}
    for event in timeline.events:
        for row in event.rows if event.kind == "communication" else ():
            found[row] = found.get(row, 0.0) + event.duration
    return found


@pytest.mark.parametrize(
    ("ring", "bandwidth"), [(DGX1_DOUBLE_RING, 2 * 20e9), (DGX1_SINGLE_RING, 20e9)]
)
def test_the_dgx1_rings_against_their_formula(ring, bandwidth):
    cluster = Cluster(8, server="dgx1-v100", quiet=True)
    with FakeTensorMode():  # 8 × 160 MB without the data
        timeline, _ = record(collectives.ring_all_reduce, cluster, ring)
    found = wire_times(timeline)
    neighbours = {f"gpu{a}→gpu{b}" for a, b in zip(ring, ring[1:] + ring[:1])}
    assert set(found) == neighbours
    expected = 2 * 7 / 8 * SIZE / bandwidth
    assert list(found.values()) == pytest.approx([expected] * 8, rel=0.02)
    assert expected == pytest.approx(costs.ring_time(8, SIZE, bandwidth))
    assert [timeline.bytes_sent(i) for i in range(8)] == [costs.least_bytes(8, SIZE)] * 8
    # Adding 7/8 of the data; one launch for each of 2 · 7 · 8 copies and 7 · 8 additions.
    assert [timeline.busy(i) for i in range(8)] == pytest.approx([7 / 8 * ADD] * 8)
    assert launches(timeline) == pytest.approx(168 * 10e-6)
    assert expected < timeline.duration < expected + 7 / 8 * ADD + launches(timeline)


def test_the_books_ring_estimate_and_what_it_leaves_out():
    assert 2 * SIZE / 54e9 == pytest.approx(5.93e-3, abs=5e-6)
    assert costs.ring_time(8, SIZE, 54e9) == pytest.approx(5.19e-3, abs=5e-6)
    assert costs.unchunked_ring_time(8, SIZE, 54e9) == pytest.approx(41.5e-3, abs=5e-5)
