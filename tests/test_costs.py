"""The cost formulas against the figures of the book, of nccl-tests and of the literature."""

import math

import pytest

from utils import costs

MB = 1e6
ALL_REDUCES = [
    costs.star_time,
    costs.cpu_time,
    costs.sharded_time,
    costs.ring_time,
    costs.unchunked_ring_time,
    costs.halving_doubling_time,
    costs.tree_time,
    costs.double_tree_time,
]


def test_book_pcie_times():
    # 160 MB on 4 GPUs, 16 GB/s a wire: 60, 80 and 15 ms
    assert costs.star_time(4, 160 * MB, 16e9) == pytest.approx(60e-3, rel=1e-12)
    assert costs.cpu_time(4, 160 * MB, 16e9) == pytest.approx(80e-3, rel=1e-12)
    assert costs.sharded_time(4, 160 * MB, 16e9) == pytest.approx(15e-3, rel=1e-12)


def test_book_ring_over_nvlink():
    size, three_rings = 160 * MB, 3 * 18e9
    ring = costs.ring_time(8, size, three_rings)
    assert ring * 1e3 == pytest.approx(5.19, abs=0.005)
    assert ring * 8 / 7 * 1e3 == pytest.approx(5.93, abs=0.005)  # the book leaves (n-1)/n out
    assert costs.ring_time(8, size, 2 * three_rings) * 1e3 == pytest.approx(2.59, abs=0.005)
    assert costs.unchunked_ring_time(8, size, three_rings) * 1e3 == pytest.approx(41.5, abs=0.05)


@pytest.mark.parametrize(
    ("n", "size", "ring", "halving", "tree", "double_tree"),
    [
        (8, 1 * MB, 0.245, 0.205, 0.630, 0.230),
        (512, 1 * MB, 5.310, 0.290, 1.890, 0.290),
        (512, 100 * MB, 25.07, 20.05, 180.1, 20.09),
    ],
)
def test_published_alpha_beta_times(n, size, ring, halving, tree, double_tree):
    wires = {"alpha": 5e-6, "bandwidth": 10e9}

    def milliseconds(algorithm):
        return float(f"{algorithm(n, size, **wires) * 1e3:.4g}")

    assert milliseconds(costs.ring_time) == pytest.approx(ring, abs=5e-4)
    assert milliseconds(costs.halving_doubling_time) == pytest.approx(halving, abs=5e-4)
    assert milliseconds(costs.tree_time) == pytest.approx(tree, abs=5e-4)
    assert milliseconds(costs.double_tree_time) == pytest.approx(double_tree, abs=5e-4)


def test_ring_sends_the_least_bytes():
    assert costs.least_bytes(8, 800 * 8) == 11_200
    for n in (1, 2, 3, 5, 8):
        assert costs.ring_time(n, 1000, 1.0) == pytest.approx(costs.least_bytes(n, 1000))


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("n", [1, 2, 4, 8, 64])
def test_no_algorithm_beats_the_lower_bounds(algorithm, n):
    for size in (0, 1, 1000, 1e9):
        for alpha in (0.0, 1e-5, 1.0):
            time = algorithm(n, size, 1e10, alpha)
            assert time >= costs.best_time(n, size, 1e10, alpha) * (1 - 1e-12)
    if n == 1:
        assert algorithm(1, 1e9, 1e10, 1.0) == 0


def test_lower_bounds():
    assert [costs.least_messages(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    assert costs.best_time(8, 0, 1e9, 5e-6) == 3 * 5e-6
    assert costs.best_time(8, 1e9, 1e9) == 1.75


@pytest.mark.parametrize("n", [3, 6, 12])
def test_halving_needs_a_power_of_two(n):
    with pytest.raises(ValueError, match=f"power of two of ranks, not {n}"):
        costs.halving_doubling_time(n, 1, 1)


@pytest.mark.parametrize("algorithm", [*ALL_REDUCES, costs.least_messages])
def test_no_ranks_is_an_error(algorithm):
    with pytest.raises(ValueError, match="at least 1, not 0"):
        algorithm(*(0, 1, 1)[: 1 if algorithm is costs.least_messages else 3])


@pytest.mark.parametrize(
    ("mib", "microseconds", "busbw"),
    [(8, 133.5, 110.0), (64, 684.6, 171.5), (1024, 8204, 229.0)],
)
def test_published_bus_bandwidths_of_eight_a100(mib, microseconds, busbw):
    found = costs.bus_bandwidth(mib * 2**20, microseconds * 1e-6, 8) / 1e9
    assert found == pytest.approx(busbw, abs=0.06)


def test_bus_bandwidth_is_the_wires_speed_for_any_number_of_ranks():
    for n in (2, 3, 8, 100):
        seconds = costs.ring_time(n, 1e9, 20e9)
        assert costs.bus_bandwidth(1e9, seconds, n) == pytest.approx(20e9)
        half = seconds / 2
        for name in ("reduce_scatter", "all_gather", "all_to_all"):
            assert costs.bus_bandwidth(1e9, half, n, name) == pytest.approx(20e9)
        assert costs.bus_bandwidth(1e9, 0.5, n, "broadcast") == costs.algorithm_bandwidth(1e9, 0.5)
    with pytest.raises(ValueError, match="no collective 'gather'; known are all_reduce"):
        costs.bus_bandwidth(1, 1, 2, "gather")


@pytest.mark.parametrize(("optimizer", "size"), [("sgd", 8), ("momentum", 12), ("adam", 16)])
def test_training_memory(optimizer, size):
    assert costs.bytes_per_parameter(optimizer) == size
    assert costs.training_bytes(129_068, optimizer) == 129_068 * size
    assert costs.bytes_per_parameter(optimizer, bytes_per_value=8) == 2 * size


def test_unknown_optimizer():
    with pytest.raises(ValueError, match="no optimizer 'lion'; known are sgd, momentum, adam"):
        costs.bytes_per_parameter("lion")


def test_asynchronous_front_end_against_a_step_by_step_simulation():
    for n, issue, execute, fetch in [(5, 1, 3, 2), (4, 3, 1, 2), (1, 1, 1, 1)]:
        host = device = 0
        for _ in range(n):
            host += issue
            device = max(host, device) + execute
        assert costs.asynchronous_time(n, issue, execute, fetch) == device + fetch
        assert costs.blocking_time(n, issue, execute, fetch) == n * (issue + execute + fetch)
    assert costs.asynchronous_time(5, 1, 3, 2) == 1 + 5 * 3 + 2
    assert costs.asynchronous_time(0, 1, 1, 1) == 0


def test_message_time():
    assert costs.message_time(1e6, 5e-6, 1e9) == pytest.approx(1.005e-3)
    assert math.isclose(costs.message_time(0, 5e-6, 1e9), 5e-6)
