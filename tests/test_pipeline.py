"""Schedules carried out: equal to the unsplit network, on virtual ranks and on processes."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from utils import run
from utils.hardware import ideal_server
from utils.pipeline import (
    agree_on_shapes,
    bubble,
    chunks_of,
    cut_batch,
    cut_network,
    forward_only,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    peak_in_flight,
    recomputing,
    run_schedule,
    time_schedule,
    unit_cost,
    zero_bubble_h1,
)
from utils.timeline import Timeline

PLAIN = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "zero bubble": zero_bubble_h1}
row_loss = functools.partial(F.cross_entropy, reduction="none")


def network(seed=0):
    """Eight layers: a convolution, a normalisation over features, some without weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 10), nn.LayerNorm(10),
        nn.Linear(10, 7), nn.GELU(), nn.Linear(7, 5),
    ).double()  # fmt: skip


def rows(number, seed=1):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(number, 1, 6, 6, generator=generator, dtype=torch.float64)
    return X, torch.randint(5, (number,), generator=generator)


def last_one_short(m, size=2):
    """m micro-batches of `size` rows, the last of one row."""
    X, y = rows(size * m - size + 1)
    return list(zip(X.split(size), y.split(size)))


def even_cuts(pieces, layers=8):
    return [piece * layers // pieces for piece in range(1, pieces)]


def gradients_of(modules):
    """Gradients by the names that they have in the unsplit network."""
    return {name: p.grad for module in modules for name, p in module.named_parameters()}


def unsplit(micro_batches):
    """Loss, outputs and gradients of the whole batch at once."""
    net = network()
    X, y = (torch.cat(parts) for parts in zip(*micro_batches))
    outputs = net(X)
    loss = F.cross_entropy(outputs, y)
    loss.backward()
    return loss.item(), outputs.detach(), gradients_of([net])


def step_of(comm, schedule, micro_batches, **options):
    """This rank's loss, outputs and gradients from a schedule."""
    v = 1 + max(getattr(job, "chunk", 0) for job in schedule[0])
    pieces = cut_network(network(), even_cuts(comm.world_size * v))
    chunks = chunks_of(comm, pieces)
    shapes = agree_on_shapes(comm, chunks, micro_batches[0][0])
    outcome = run_schedule(
        comm, chunks, schedule, micro_batches, row_loss, shapes=shapes, **options
    )
    evaluate = forward_only(comm.world_size, len(micro_batches))
    outputs = []
    if v == 1:
        outputs = run_schedule(comm, chunks, evaluate, micro_batches, shapes=shapes).results
    return outcome.loss, outputs, gradients_of(chunks)


def check_equal_to_unsplit(values, micro_batches):
    loss, outputs, gradients = unsplit(micro_batches)
    assert values[-1][0] == pytest.approx(loss, abs=1e-6)
    assert all(value[0] == 0 for value in values[:-1])
    if values[-1][1]:
        torch.testing.assert_close(torch.cat(values[-1][1]), outputs, rtol=0, atol=1e-6)
    found = {name: gradient for value in values for name, gradient in value[2].items()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6)


# --- equal to the unsplit network ---------------------------------------------------------------


def all_schedules(comm):
    """Every schedule for 1 to 8 micro-batches, with and without recomputation."""
    torch.set_num_threads(1)
    found = {}
    for m in range(1, 9):
        for name, make in PLAIN.items():
            schedule = make(comm.world_size, m)
            found[m, name] = step_of(comm, schedule, last_one_short(m))
            if m in (1, 5):
                again = step_of(comm, recomputing(schedule), last_one_short(m))
                found[m, name + ", recomputed"] = again
    return found


def check_all(values):
    for key in values[0]:
        check_equal_to_unsplit([value[key] for value in values], last_one_short(key[0]))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_schedule_equals_the_unsplit_network(p):
    check_all(run(all_schedules, ranks=p, on="virtual", record=False).values)


@pytest.mark.parametrize("transport", ["gloo", "shared"])
@pytest.mark.parametrize("p", [1, 3])
def test_the_same_on_processes(p, transport):
    program = all_schedules if transport == "gloo" else some_schedules
    check_all(run(program, ranks=p, on="processes", transport=transport, record=False).values)


def some_schedules(comm):
    return {
        (m, name): step_of(comm, make(comm.world_size, m), last_one_short(m))
        for m in (1, 4)
        for name, make in PLAIN.items()
    }


def interleaved_schedules(comm):
    p = comm.world_size
    return {
        (m, v): step_of(comm, wrap(interleaved(p, m, v)), last_one_short(m))
        for v in (1, 2, 3, 4) if p * v <= 8
        for m, wrap in ((1, list), (3, list), (6, recomputing), (8, list))
    }  # fmt: skip


@pytest.mark.parametrize(("p", "on"), [(1, "virtual"), (2, "virtual"), (3, "virtual"),
                                       (4, "virtual"), (2, "processes")])  # fmt: skip
def test_interleaved_equals_the_unsplit_network(p, on):
    check_all(run(interleaved_schedules, ranks=p, on=on, record=False).values)


def test_virtual_ranks_and_processes_agree_to_the_bit():
    """The same kernels in the same order."""
    on = [
        run(some_schedules, ranks=2, on=on, record=False).values for on in ("virtual", "processes")
    ]
    for key in on[0][0]:
        for virtual, process in zip(*([value[key] for value in values] for values in on)):
            assert virtual[0] == process[0]
            for name, gradient in virtual[2].items():
                assert torch.equal(gradient, process[2][name])


# --- micro-batches of unequal size --------------------------------------------------------------


def unequal(comm, sizes):
    X, y = rows(sum(sizes))
    micro_batches = list(zip(X.split(sizes), y.split(sizes)))
    return step_of(comm, one_f_one_b(comm.world_size, len(sizes)), micro_batches)


@pytest.mark.parametrize("sizes", [[1, 9, 2], [5, 1], [3, 0, 4]])
def test_micro_batches_weigh_by_their_rows(sizes):
    """One may even be empty. The plain mean of the micro-batches' gradients would be wrong."""
    X, y = rows(sum(sizes))
    values = run(unequal, ranks=2, on="virtual", args=(sizes,), record=False).values
    micro_batches = list(zip(X.split(sizes), y.split(sizes)))
    check_equal_to_unsplit(values, micro_batches)
    gradient = unsplit(micro_batches)[2]["7.bias"]
    parts = [unsplit([part])[2]["7.bias"] for part in micro_batches if len(part[0])]
    assert not torch.allclose(sum(parts) / len(parts), gradient, atol=1e-3)


def test_a_batch_is_cut_into_parts_that_differ_by_one_row():
    X, y = rows(7)
    assert [len(part) for part, _ in cut_batch(X, y, 3)] == [3, 2, 2]
    assert torch.equal(torch.cat([part for _, part in cut_batch(X, y, 7)]), y)
    for m in (0, 8):
        with pytest.raises(ValueError, match=f"cannot cut 7 rows with 7 labels into {m}"):
            cut_batch(X, y, m)


# --- figures, from running the schedules --------------------------------------------------------

WIDTH, ROWS = 8, 2
LAYER = 2 * ROWS * WIDTH * WIDTH  # FLOPs of a layer's forward pass for one micro-batch


def ideal_machine(p, flops):
    """p chips of so many FLOP/s, on which nothing but products takes time."""
    server = ideal_server(p, 0.0, 1e30)
    chip = dataclasses.replace(server.chips[0], fp32=flops, half=flops, compute_efficiency=1.0)
    return server.replace(chips=(chip,) * p)


def squared_error(outputs, targets):
    return ((outputs - targets) ** 2).mean(1)


def linear_program(comm, layers, v, schedule):
    """A step of equal linear layers, without biases; the input's gradient counts everywhere."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    chunks = chunks_of(comm, cut_network(net, even_cuts(comm.world_size * v, layers)))
    m = 1 + max(job.micro for job in schedule[0] if hasattr(job, "micro"))
    X = torch.randn(m * ROWS, WIDTH)
    parts = [(x.detach().requires_grad_(), x) for x in X.split(ROWS)]
    began = comm.time()
    shapes = [((WIDTH,), torch.float32)] * (comm.world_size * v + 1)
    outcome = run_schedule(comm, chunks, schedule, parts, squared_error, shapes=shapes, record=True)
    return comm.time() - began, outcome.events


def makespan(schedule, p, v=1):
    """Seconds of a step, where a stage's forward pass for a micro-batch takes one, and its events.

    What the backward pass takes, whole or in halves, is up to PyTorch.
    """
    layers = p * v
    server = ideal_machine(p, LAYER * layers / p)
    result = run(linear_program, ranks=p, on="virtual", server=server, args=(layers, v, schedule))
    times, events = zip(*result.values)
    assert result.timeline.duration == max(times)
    return max(times), [event for own in events for event in own]


@pytest.mark.parametrize(
    ("p", "m", "expected"), [(4, 4, 21), (4, 8, 33), (4, 16, 57), (8, 8, 45), (8, 32, 117)]
)
@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_run_gpipe_and_1f1b(make, p, m, expected):
    took, events = makespan(make(p, m), p)
    assert took == expected
    share = bubble(Timeline(events, [f"gpu{stage}" for stage in range(p)]))
    assert share == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(
    ("p", "m", "v", "expected"),
    [(4, 8, 2, 28.5), (4, 8, 4, 26.25), (4, 16, 2, 52.5), (8, 32, 2, 106.5)],
)
def test_run_interleaved(p, m, v, expected):
    assert makespan(interleaved(p, m, v), p, v)[0] == expected


@pytest.mark.parametrize(
    ("p", "m", "expected"), [(4, 8, 27), (4, 16, 51), (8, 16, 55), (8, 24, 79)]
)
def test_run_zero_bubble(p, m, expected):
    assert makespan(zero_bubble_h1(p, m), p)[0] == expected


def test_run_naive():
    assert makespan(naive(4, 2), 4)[0] == 4 * 2 * 3


@pytest.mark.parametrize("make", PLAIN.values())
@pytest.mark.parametrize("recompute", [False, True])
def test_what_runs_is_what_was_drawn(make, recompute):
    """Every instruction begins and ends where the schedule alone says."""
    schedule = recomputing(make(3, 5)) if recompute else make(3, 5)
    drawn = time_schedule(schedule, unit_cost(1, 2, 1))
    _, events = makespan(schedule, 3)
    key = lambda event: (event.rows, event.start, event.name)  # noqa: E731
    assert sorted(events, key=key) == sorted(drawn.events, key=key)


# --- memory -------------------------------------------------------------------------------------


WIDE, MANY = 32, 1024  # so that activations are large and weights small
ACTIVATION = MANY * WIDE * 4  # bytes of a layer's input for a micro-batch
KEPT = 5  # what four layers keep of it: input, three between them, output


def memory_program(comm, make, m):
    """A step of equal linear layers, four a stage."""
    torch.manual_seed(0)
    p = comm.world_size
    net = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(4 * p)))
    chunks = chunks_of(comm, cut_network(net, even_cuts(p, 4 * p)))
    X = torch.randn(m * MANY, WIDE)
    parts = [(x, x) for x in X.split(MANY)]
    run_schedule(comm, chunks, make(p, m), parts, squared_error)
    return comm.time()


def activations(make, p=4, m=8):
    """For each stage the peak by the ledger, in activations."""
    peaks = run(memory_program, ranks=p, on="virtual", args=(make, m)).timeline.peak_memory
    return [sum(peak.values()) / ACTIVATION for peak in peaks]


@pytest.mark.parametrize("make", [naive, gpipe, one_f_one_b])
def test_memory_by_the_ledger_is_what_is_in_flight(make):
    """Five activations a micro-batch, and a few more on their way or being worked with."""
    for found, peak in zip(activations(make), peak_in_flight(make(4, 8))):
        assert KEPT * peak <= found <= KEPT * peak + 7


def test_zero_bubble_keeps_gradients_as_well():
    """A micro-batch that waits for its weight half keeps the gradients of four outputs too."""
    for stage, found in enumerate(activations(zero_bubble_h1)):
        assert KEPT * 4 + 3 * stage <= found <= KEPT * 4 + 4 * stage + 8


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_recomputing_keeps_inputs_only(make):
    """Of all micro-batches in flight their inputs, of one everything."""
    again = activations(lambda p, m: recomputing(make(p, m)))
    for found, peak in zip(again, peak_in_flight(make(4, 8))):
        assert peak + KEPT - 1 <= found <= peak + KEPT + 7


def test_recomputing_costs_a_forward_pass():
    """As soon as the chips compute and nothing else takes time."""
    took = [makespan(wrap(gpipe(2, 8)), 2)[0] for wrap in (list, recomputing)]
    assert took == [27, time_schedule(recomputing(gpipe(2, 8))).duration]
