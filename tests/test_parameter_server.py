"""The parameter server: values against plain sums and unsplit training, staleness, who waits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from utils import costs, run
from utils.data_parallel import any_rank
from utils.hardware import HOST, get_server, ideal_server
from utils.parameter_server import (
    Asynchronous,
    StaleSynchronous,
    Synchronous,
    parameter_server,
    sgd,
)
from utils.ranks import DeadlockError, RankError

SERVER = get_server("hgx-h200")


def add(value, gradient):
    value += gradient


def asynchronous(step):
    return lambda value, workers: Asynchronous(value, workers, step)


def synchronous(step):
    return lambda value, workers: Synchronous(value, workers, step)


def stale(step, bound):
    return lambda value, workers: StaleSynchronous(value, workers, step, bound)


SCHEMES = {"async": asynchronous, "sync": synchronous, "stale": lambda step: stale(step, 1)}


def on_ranks(ranks, values, scheme, work, servers=1, on="virtual", **options):
    """(what the workers returned, what the servers returned)."""

    def program(comm):
        return parameter_server(comm, values, scheme, work, servers)

    if on == "virtual":
        options = {"server": SERVER, **options}
    found = run(program, ranks, on, **options).values
    return found[: len(found) - servers], found[len(found) - servers :]


# --- what a server does with gradients ---------------------------------------------------------


def test_two_pushes_from_version_zero():
    # w = 1, loss w²/2, so the gradient at version 0 is 1
    one = torch.ones(1)
    entry = Asynchronous(torch.ones(1), 2, sgd(0.1))
    entry.push(0, one, 0)
    entry.push(1, one, 0)
    assert entry.value.item() == pytest.approx(0.8)
    assert entry.version == 2 and entry.staleness == [0, 1]

    entry = Synchronous(torch.ones(1), 2, sgd(0.1))
    entry.push(0, one, 0)
    assert entry.value.item() == 1 and not entry.may_pull(0) and entry.may_pull(1)
    entry.push(1, one, 0)
    assert entry.value.item() == pytest.approx(0.9)
    assert entry.version == 1 and entry.staleness == [0, 0] and entry.may_pull(0)


@pytest.mark.parametrize("on", ["virtual", "processes"])
@pytest.mark.parametrize("name, value, version", [("async", 0.8, 2), ("sync", 0.9, 1)])
def test_two_workers_push_from_version_zero(on, name, value, version):
    def work(workers, store):
        gradient, w = torch.ones(1), torch.ones(1)
        store.push("w", gradient)
        workers.barrier()
        store.pull("w", w)
        return w.item()

    scheme = SCHEMES[name](sgd(0.1))
    found, [server] = on_ranks(3, {"w": torch.ones(1)}, scheme, work, on=on)
    assert found == [pytest.approx(value)] * 2
    assert server["w"]["version"] == version
    assert server["w"]["staleness"] == ([0, 1] if name == "async" else [0, 0])


@pytest.mark.parametrize("on", ["virtual", "processes"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_hundred_pushes_of_one(on, servers):
    def work(workers, store):
        x = torch.zeros(3)
        for _ in range(25):
            store.push("x", torch.ones(3))
            store.pull("x", x)
        workers.barrier()
        store.pull("x", x)
        return x

    found, reports = on_ranks(
        4 + servers, {"x": torch.zeros(3)}, asynchronous(add), work, servers, on
    )
    assert all(torch.equal(x, torch.full((3,), 100.0)) for x in found)
    assert all(report["x"]["version"] == 100 for report in reports)
    assert all(len(report["x"]["staleness"]) == 100 for report in reports)


def test_the_mean_does_not_depend_on_who_comes_first():
    gradients = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        entry = Synchronous(torch.zeros(1), 3, add)
        for worker in order:
            entry.push(worker, gradients[worker], 0)
        assert entry.value.item() == (gradients[0] / 3 + gradients[1] / 3 + gradients[2] / 3).item()


def test_nobody_runs_further_ahead_than_the_bound():
    entry = StaleSynchronous(torch.zeros(1), 2, add, bound=2)
    allowed = []
    for _ in range(4):
        entry.push(0, torch.ones(1), 0)
        allowed.append(entry.may_pull(0))
    assert allowed == [True, True, False, False] and entry.may_pull(1)
    entry.push(1, torch.ones(1), 0)
    assert not entry.may_pull(0)
    entry.push(1, torch.ones(1), 0)
    assert entry.may_pull(0)
    entry.leave(1)
    assert entry.may_pull(0)


def test_pushing_twice_in_a_round_is_refused():
    def work(workers, store):
        for _ in range(2 * (workers.rank == 0)):
            store.push("w", torch.ones(1))
        workers.barrier()

    with pytest.raises(RankError, match="rank 2 raised ValueError: worker 0 pushed twice"):
        on_ranks(3, {"w": torch.ones(1)}, synchronous(add), work)


# --- any values, workers and servers ------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    workers=st.integers(1, 5),
    servers=st.integers(1, 3),
    shapes=st.lists(
        st.sampled_from([(), (0,), (1,), (2,), (7,), (3, 5), (2, 0)]), min_size=1, max_size=3
    ),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16]),
    name=st.sampled_from(list(SCHEMES)),
    transposed=st.booleans(),
)
def test_every_push_counts_once(workers, servers, shapes, dtype, name, transposed):
    values = {f"v{i}": torch.ones(shape, dtype=dtype) for i, shape in enumerate(shapes)}

    def work(group, store):
        for count in range(1, 4):
            for key, value in values.items():
                gradient = torch.full_like(value, group.rank + count)
                if transposed and gradient.dim() == 2:
                    gradient = gradient.t().contiguous().t()
                store.push(key, gradient)
                store.pull(key, torch.empty_like(value))
        group.barrier()
        outputs = {key: torch.empty_like(value) for key, value in values.items()}
        if transposed:
            outputs = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in outputs.items()}
        for key, output in outputs.items():
            store.pull(key, output)
        return outputs

    found, reports = on_ranks(workers + servers, values, SCHEMES[name](add), work, servers)
    total = sum(worker + count for worker in range(workers) for count in range(1, 4))
    expected = 1 + total / (workers if name == "sync" else 1)
    for outputs in found:
        for key, output in outputs.items():
            wanted = torch.full_like(values[key], expected)
            torch.testing.assert_close(output, wanted, rtol=2e-3, atol=0)
            assert torch.equal(output, found[0][key])  # all workers have the same bits
    for report in reports:
        for key in values:
            assert report[key]["version"] == 3 * (1 if name == "sync" else workers)
            assert len(report[key]["staleness"]) == 3 * workers
    for key, value in values.items():  # the parts together are the value
        assert sum(report[key]["value"].numel() for report in reports) == value.numel()


@pytest.mark.parametrize("on", ["virtual", "processes"])
@pytest.mark.parametrize("workers, servers", [(1, 1), (2, 1), (3, 2), (4, 1)])
def test_synchronous_training_equals_one_device(on, workers, servers):
    torch.manual_seed(0)
    X, y = torch.randn(12, 5), torch.randn(12, 2)
    net = torch.nn.Linear(5, 2)
    values = {key: value.detach().clone() for key, value in net.named_parameters()}

    def work(group, store):
        local = torch.nn.Linear(5, 2)
        local.load_state_dict(values)
        local = local.to(group.device)
        rows = slice(group.rank * 12 // group.world_size, (group.rank + 1) * 12 // group.world_size)
        for _ in range(5):
            loss = ((local(X[rows].to(group.device)) - y[rows].to(group.device)) ** 2).mean()
            local.zero_grad()
            loss.backward()
            for key, parameter in local.named_parameters():
                store.push(key, parameter.grad)
            for key, parameter in local.named_parameters():
                store.pull(key, parameter)
        return {key: p.detach() for key, p in local.named_parameters()}

    found, reports = on_ranks(workers + servers, values, synchronous(sgd(0.1)), work, servers, on)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        ((net(X) - y) ** 2).mean().backward()
        optimizer.step()
    for result in found:
        for key, parameter in net.named_parameters():
            torch.testing.assert_close(result[key], parameter.detach())
            assert torch.equal(result[key], found[0][key])


@pytest.mark.parametrize("on", ["virtual", "processes"])
def test_a_world_of_one_needs_no_messages(on):
    def work(workers, store):
        assert workers.world_size == 1
        w = torch.ones(2, 2, device=workers.device, requires_grad=True)
        store.push("w", torch.ones_like(w))
        store.pull("w", w)
        store.push("w", torch.full_like(w, math.nan))
        store.pull("w", w)
        return w.detach()

    for servers, scheme in enumerate(SCHEMES.values(), start=1):
        values = {"w": torch.ones(2, 2)}
        result = run(parameter_server, 1, on, (values, scheme(sgd(0.1)), work, servers))
        torch.testing.assert_close(result.values, [torch.full((2, 2), 0.9)])
        sent = [event for event in result.timeline.events if event.name == "message"]
        assert sent == []


# --- staleness and waiting ----------------------------------------------------------------------


def busy(device, n):
    """About n products' time of a chip."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        matrix = torch.empty(2000, 2000, device=device)
        for _ in range(n):
            matrix @ matrix
    torch.vgpu.synchronize(device)


def steps(count, times=lambda worker, step: 1):
    def work(workers, store):
        w = torch.zeros(1, device=workers.device)
        for step in range(count):
            busy(workers.device, times(workers.rank, step))
            store.push("w", torch.zeros_like(w))
            store.pull("w", w)

    return work


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7])
def test_equal_workers_are_stale_by_the_number_of_the_others(workers):
    _, [report] = on_ranks(workers + 1, {"w": torch.zeros(1)}, asynchronous(add), steps(40))
    late = report["w"]["staleness"][workers:]
    assert sum(late) / len(late) == pytest.approx(workers - 1, rel=0.03)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_bound_keeps_the_fast_near_the_slow(bound):
    ahead = []

    class Watched(StaleSynchronous):
        def push(self, worker, gradient, version):
            super().push(worker, gradient, version)
            ahead.append(max(self.pushes.values()) - min(self.pushes.values()))

        def leave(self, worker):
            super().leave(worker)
            if not self.pushes:
                self.staleness = list(ahead)

    scheme = lambda value, workers: Watched(value, workers, add, bound)  # noqa: E731
    times = lambda worker, step: 5 if worker == 0 else 1  # noqa: E731
    _, [report] = on_ranks(4, {"w": torch.zeros(1)}, scheme, steps(12, times))
    before_the_first_leaves = report["w"]["staleness"][:20]
    assert max(before_the_first_leaves) == bound + 1


def test_a_straggler_holds_up_who_waits_for_it():
    server = SERVER.slow_down(3, 4)
    ends = {}
    for name in ("sync", "async"):
        _, [report] = on_ranks(
            5, {"w": torch.zeros(1)}, SCHEMES[name](add), steps(10), server=server
        )
        ends[name] = report["w"]["staleness"]
    assert max(ends["sync"]) == 0
    # While the straggler computes once, three others push four times each.
    assert 9 <= max(ends["async"]) <= 12


def test_time_grows_with_workers_over_servers():
    size = 4_000_000

    def work(workers, store):
        gradient = torch.zeros(size // 4, device=workers.device)
        for _ in range(2):  # the first also waits for the servers to get their values
            workers.barrier()
            start = workers.time()
            store.push("w", gradient)
            store.pull("w", gradient)
        return workers.time() - start

    for workers, servers in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4), (2, 4), (6, 3)):
        server = ideal_server(workers + servers, 1e-6, 1e9).replace(host=HOST)
        found, _ = on_ranks(
            workers + servers, {"w": torch.zeros(size // 4)}, synchronous(add), work, servers,
            server=server,
        )  # fmt: skip
        expected = costs.parameter_server_time(workers, servers, size, 1e9)
        assert max(found) == pytest.approx(expected, rel=0.03), (workers, servers)


@pytest.mark.parametrize("delay, limit", list(enumerate([2, 1, 0.618, 0.445, 0.347])))
def test_largest_rate_of_stale_descent(delay, limit):
    assert costs.largest_stale_rate(delay) == pytest.approx(limit, abs=5e-4)
    for rate, stable in ((0.99, True), (1.01, False)):
        x = [1.0] * (delay + 1)
        for _ in range(6000):
            x.append(x[-1] - rate * costs.largest_stale_rate(delay) * x[-1 - delay])
        assert (max(map(abs, x[-50:])) < 1) == stable
    with pytest.raises(ValueError, match="at least 0"):
        costs.largest_stale_rate(-1)


def test_largest_rate_at_delay_eight():
    assert costs.largest_stale_rate(8) == pytest.approx(0.1845, abs=5e-5)


# --- all or none --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_bad_gradient_is_skipped_by_all_together(bad, servers):
    """Rank 1's loss is not finite at step 2 of 3: two updates, the same on all."""

    def work(workers, store):
        w, seen = torch.ones(3, device=workers.device), []
        for step in range(3):
            gradient = torch.full_like(w, 1.0 + workers.rank)
            if workers.rank == 1 and step == 1:
                gradient = None if bad is None else gradient.index_fill(0, torch.tensor(2), bad)
            store.push("w", gradient)
            store.pull("w", w)
            seen.append(w.clone())
        return seen

    values = {"w": torch.ones(3)}
    found, reports = on_ranks(2 + servers, values, synchronous(sgd(0.1)), work, servers)
    assert found[0][-1].isfinite().all()
    if servers == 1 or bad is None:
        for seen in found:
            torch.testing.assert_close(torch.stack(seen)[:, 0], torch.tensor([0.85, 0.85, 0.7]))
    for seen, others in zip(*found):
        assert torch.equal(seen, others)
    assert [report["w"]["version"] for report in reports] == [2] * servers


def test_asynchronous_servers_drop_a_bad_gradient():
    def work(workers, store):
        store.push("w", torch.tensor([math.nan if workers.rank else 1.0]))
        workers.barrier()
        store.pull("w", w := torch.zeros(1))
        return w.item()

    found, [report] = on_ranks(3, {"w": torch.ones(1)}, asynchronous(sgd(0.1)), work)
    assert found == [pytest.approx(0.9)] * 2 and report["w"]["version"] == 1


@pytest.mark.parametrize("on", ["virtual", "processes"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_one_that_stops_early_stops_all(on, ranks):
    def program(comm):
        for epoch in range(5):
            wants = comm.rank == 0 and epoch == 1
            if any_rank(comm, wants):
                return epoch

    assert run(program, ranks, on).values == [1] * ranks


@pytest.mark.parametrize("name", list(SCHEMES))
@pytest.mark.parametrize("on", ["virtual", "processes"])
def test_workers_of_a_server_stop_together(name, on):
    def work(workers, store):
        w = torch.zeros(1)
        for epoch in range(5):
            store.push("w", torch.ones(1))
            store.pull("w", w)
            if any_rank(workers, workers.rank == 0 and epoch == 1):
                return epoch

    found, [report] = on_ranks(4, {"w": torch.zeros(1)}, SCHEMES[name](add), work, on=on)
    assert found == [1, 1, 1]
    assert report["w"]["version"] == (2 if name == "sync" else 6)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_those_that_have_no_more_batches_are_not_waited_for(name):
    """Rank 0 has 3 batches, rank 1 has 2: the third update is rank 0's alone, at full weight."""

    def work(workers, store):
        w = torch.zeros(1)
        for _ in range(3 - workers.rank):
            store.push("w", torch.full((1,), 1.0 + workers.rank))
            store.pull("w", w)
        return w.item()

    found, [report] = on_ranks(3, {"w": torch.zeros(1)}, SCHEMES[name](add), work)
    assert report["w"]["value"].item() == (1.5 + 1.5 + 1 if name == "sync" else 7)
    assert report["w"]["version"] == (3 if name == "sync" else 5)
    assert found[0] == report["w"]["value"].item()


# --- wrong use, and what is lost ----------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor, key, message",
    [
        (torch.ones(3), "w", r"the store's 'w' is \(2,\) torch.float32, but this is \(3,\)"),
        (torch.ones(2).double(), "w", "torch.float32, but this is .* torch.float64"),
        (torch.ones(2), "v", "no key 'v'; it has w, b"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_use_is_refused_before_anything_is_sent(tensor, key, message, ranks):
    values = {"w": torch.ones(2), "b": torch.ones(1)}
    push = lambda workers, store: store.push(key, tensor)  # noqa: E731
    pull = lambda workers, store: store.pull(key, tensor)  # noqa: E731
    for work in (push, pull):
        with pytest.raises(RankError, match="rank 0 raised ValueError: .*" + message):
            run(parameter_server, ranks, "virtual", (values, asynchronous(add), work))


@pytest.mark.parametrize("ranks, servers", [(2, 2), (2, 0), (3, 5)])
def test_somebody_has_to_work_and_to_serve(ranks, servers):
    with pytest.raises(RankError, match=f"{ranks} ranks cannot be {servers} servers"):
        on_ranks(ranks, {"w": torch.ones(1)}, asynchronous(add), lambda *_: None, servers)


def test_a_server_that_ends_is_named():
    def program(comm):
        if comm.rank == 2:
            return
        parameter_server(comm, {"w": torch.ones(1)}, asynchronous(add), push)

    def push(workers, store):
        store.push("w", torch.ones(1))

    with pytest.raises(DeadlockError, match="rank 1 waits to send .* to rank 2, which has ended"):
        run(program, 3, "virtual")


@pytest.mark.parametrize("on", ["virtual", "processes"])
def test_a_server_that_fails_is_named(on):
    def failing(value, gradient):
        raise OSError("the power is out")

    def work(workers, store):
        store.push("w", torch.ones(1))
        store.pull("w", torch.ones(1))

    with pytest.raises(RankError, match="rank 2 raised OSError: the power is out"):
        on_ranks(3, {"w": torch.ones(1)}, asynchronous(failing), work, on=on)
