"""Measuring on processes, lines through times, and predictions round by round."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from utils import costs, measure, run
from utils.hardware import ideal_server
from utils.ranks import collectives

ALPHA, BANDWIDTH = 5e-6, 10e9
ROUNDS = {
    "star": (costs.star_rounds, costs.star_time, collectives.star_all_reduce),
    "tree": (costs.tree_rounds, costs.tree_time, collectives.tree_all_reduce),
    "ring": (costs.ring_rounds, costs.ring_time, collectives.ring_all_reduce),
    "halving-doubling": (
        costs.halving_doubling_rounds,
        costs.halving_doubling_time,
        collectives.halving_doubling_all_reduce,
    ),
}


def message(size, at_once):
    return costs.message_time(size, ALPHA, BANDWIDTH)


# Lines


@given(
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-11, 1e-8),
    sizes=st.lists(st.integers(1, 10**9), min_size=3, max_size=12, unique=True),
)
def test_a_line_through_its_own_points_is_found(alpha, beta, sizes):
    times = [alpha + beta * size for size in sizes]
    line = measure.fit_line(sizes, times)
    assert [line(size) for size in sizes] == pytest.approx(times, rel=1e-6)


def test_every_size_counts_alike_in_a_fit():
    """Four times off at the small end must matter as much as at the large end."""
    sizes = np.array([1e3, 1e4, 1e5, 1e6, 1e7, 1e8])
    times = 1e-4 + sizes * 1e-9
    line = measure.fit_line(sizes, times * [1.1, 0.9, 1.1, 0.9, 1.1, 0.9])
    assert line.alpha == pytest.approx(1e-4, rel=0.1)
    assert line.beta == pytest.approx(1e-9, rel=0.1)
    plain = np.polyfit(sizes, times * [1.1, 0.9, 1.1, 0.9, 1.1, 0.9], 1)
    assert not plain[1] == pytest.approx(1e-4, rel=0.5)  # what relative errors are for


def test_neither_alpha_nor_beta_is_negative():
    falling = measure.fit_line([1e3, 1e6, 1e8], [3e-3, 2e-3, 1e-3])
    assert falling.beta == 0 and falling.alpha > 0
    steep = measure.fit_line([1e3, 1e6], [1e-9, 2e-3])
    assert steep.alpha >= 0 and steep.beta > 0


@given(st.lists(st.tuples(st.floats(1e2, 1e9), st.floats(1e-6, 1e1)), min_size=2, max_size=9))
def test_the_fit_is_that_of_non_negative_least_squares(points):
    sizes, times = np.array(points).T
    assume(len(set(sizes)) > 1)
    line = measure.fit_line(sizes, times)
    rows = np.stack([1 / times, sizes / times], axis=1)
    scale = np.linalg.norm(rows, axis=0)
    expected, _ = nnls(rows / scale, np.ones(len(sizes)))
    assert line.alpha >= 0 and line.beta >= 0
    found = rows @ (line.alpha, line.beta)
    assert np.linalg.norm(found - 1) <= np.linalg.norm(rows / scale @ expected - 1) + 1e-6


def test_the_published_a100_sweep_fits_no_line():
    sizes = np.array([2**15, 2**20, 2**23, 2**26, 2**29, 2**30])
    seconds = np.array([43.8, 101.9, 133.5, 684.6, 4218, 8204]) * 1e-6
    line = measure.fit_line(sizes, seconds)
    errors = measure.relative_errors([line(size) for size in sizes], seconds)
    assert line.alpha == pytest.approx(52.5e-6, rel=0.01)
    assert costs.BUS_FACTORS["all_reduce"](8) / line.beta == pytest.approx(211e9, rel=0.01)
    assert np.argmax(abs(errors)) == 1 and errors[1] == pytest.approx(-0.40, abs=0.005)
    for alpha in np.linspace(0, 150e-6, 76):  # no line is within 30 % everywhere
        for beta in np.linspace(5e-12, 12e-12, 71):
            assert max(abs(measure.relative_errors(alpha + beta * sizes, seconds))) > 0.3


def test_crowded_work_lies_between_alone_and_together():
    crowded = measure.Crowded(measure.Line(1, 2), measure.Line(3, 8), 4)
    assert crowded(10, 1) == 21 and crowded(10, 4) == 83
    assert crowded(10, 2) == pytest.approx(21 + (83 - 21) / 3)


# Rounds


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_add_up_to_the_formula(name):
    rounds, formula, _ = ROUNDS[name]
    powers, others = (1, 2, 4, 8, 64, 512), (3, 5, 9, 100)
    for n in powers if name == "halving-doubling" else powers + others:
        for size in (0, 1, 10**6, 10**8):
            expected = formula(n, size, BANDWIDTH, ALPHA)
            assert costs.rounds_time(rounds(n), size, message) == pytest.approx(expected)


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8])
def test_rounds_say_what_virtual_ranks_do(name, n):
    """Time, number of messages and bytes of a run on the machine of the α–β model."""
    rounds, _, all_reduce = ROUNDS[name]

    def program(comm):
        all_reduce(comm, torch.zeros(840 * 64, device=comm.device))

    timeline = run(program, n, "virtual", server=ideal_server(n, ALPHA, BANDWIDTH)).timeline
    size = 840 * 64 * 4
    messages = [event for event in timeline.events if event.kind == "communication"]
    assert len(messages) == sum(r.messages for r in rounds(n))
    assert sum(event.bytes for event in messages) == sum(r.messages * r.share * size
                                                         for r in rounds(n))  # fmt: skip
    expected = costs.rounds_time(rounds(n), size, message)
    assert timeline.duration == pytest.approx(expected, rel=1e-6)


def test_the_golden_times():
    """1 MB, 5 µs, 10 GB/s; milliseconds."""
    expected = {8: (0.245, 0.205, 0.630), 512: (5.310, 0.290, 1.890)}
    for n, times in expected.items():
        found = [
            costs.rounds_time(ROUNDS[name][0](n), 1e6, message) * 1e3
            for name in ("ring", "halving-doubling", "tree")
        ]
        assert found == pytest.approx(times, abs=6e-4)
        assert costs.double_tree_time(n, 1e6, BANDWIDTH, ALPHA) * 1e3 == pytest.approx(
            {8: 0.230, 512: 0.290}[n]
        )


def test_additions_and_crowds_cost():
    rounds = costs.ring_rounds(4)

    def at_once(size, ranks):
        assert ranks == 4
        return size * ranks

    assert costs.rounds_time(rounds, 8, at_once) == 6 * 2 * 4
    assert costs.rounds_time(rounds, 8, at_once, at_once) == 9 * 2 * 4
    tree = costs.tree_rounds(8)
    assert [r.messages for r in tree] == [4, 2, 1, 1, 2, 4]
    assert costs.rounds_time(tree, 1, lambda size, ranks: 0, lambda size, ranks: ranks) == 7


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 600))
def test_rounds_send_no_less_than_the_bounds(n):
    for rounds, *_ in ROUNDS.values():
        total = sum(r.messages * r.share for r in rounds(n))
        assert total >= n * costs.least_bytes(n, 1) * (1 - 1e-9)
        assert len(rounds(n)) >= costs.least_messages(n)
        assert all(r.messages <= n and 0 < r.share <= 1 for r in rounds(n))
        assert sum(r.adds for r in rounds(n)) >= math.ceil(math.log2(n))


# Measuring


def test_best_time_is_the_slowest_ranks(capfd):
    def program(comm):
        import time

        def call():
            calls.append(None)
            time.sleep(0.02 if comm.rank == 1 else 0.001)

        calls = []
        return measure.best_time(comm, call, 0.1), len(calls)

    values = run(program, 3, "processes").values
    assert len({seconds for seconds, _ in values}) == 1  # all ranks agree, and made as many calls
    assert len({calls for _, calls in values}) == 1
    assert 0.02 <= values[0][0] < 2  # the sleeping rank, even on a busy machine
    assert capfd.readouterr() == ("", "")


def test_a_long_call_is_made_twice():
    def program(comm):
        calls = []
        measure.best_time(comm, lambda: calls.append(torch.ones(10**6).sum()), 0.0)
        return len(calls)

    assert run(program, 1, "processes").values == [2]


@pytest.mark.parametrize(
    ("make", "ranks"),
    [
        (measure.ping_pong, 2), (measure.shift, 2), (measure.shift, 3),
        (measure.addition, 1), (measure.addition, 2), (measure.copying, 1),
    ],
)  # fmt: skip
def test_measuring_on_processes(make, ranks):
    sizes = [0, 4, 40_000]
    result = run(measure.measure, ranks, "processes", args=(make, sizes, 0.01))
    assert all(times == result.values[0] for times in result.values)
    assert len(result.values[0]) == 3 and all(time > 0 for time in result.values[0])


def test_measuring_an_all_reduce_typed_anywhere():
    def mine(comm, tensor):
        comm.all_reduce(tensor)

    make = measure.calls_of(mine)
    for transport in ("gloo", "shared"):
        [times, *_] = run(
            measure.measure, 2, "processes", args=(make, [8, 4000], 0.01), transport=transport
        ).values
        assert len(times) == 2 and all(0 < time < 1 for time in times)
