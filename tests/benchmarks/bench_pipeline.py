"""Our executor on processes: what it adds to computing, and beside torch.distributed.pipelining.

Limits, for stages of about 50 ms: in the naive schedule, where one stage computes at a time, a step
takes at most 5 % longer than the sum of its stages' computing; and our step takes no longer than
that of torch.distributed.pipelining over gloo, for GPipe and 1F1B, in the same processes, in turns,
with equal gradients. Ours is measured with its messages over gloo too, and with stages of 5 ms,
where messages and waking up count; there is no limit for those. Medians; a ratio is the median of
the ratios of neighbouring steps.
"""

import os
import sys
import time
from statistics import median

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from utils.pipeline import agree_on_shapes, cut_batch, gpipe, naive, one_f_one_b, run_schedule
from utils.ranks import run
from utils.ranks.transports import GlooTransport

WIDTH, ROWS = 512, 256
STAGE = 0.05  # seconds of a stage's forward and backward pass for one micro-batch
OVERHEAD, RATIO = 0.05, 1.0
WAYS = ("torch", "shared", "gloo")


def squared_error(outputs, targets):
    return ((outputs - targets) ** 2).mean(1)


def piece_of(rank, layers):
    """A rank's layers, with weights that keep activations in size."""
    torch.manual_seed(rank)
    return nn.Sequential(
        *(layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    )


def layers_for(comm, seconds):
    """So many layers that a forward and a backward pass take about so long, equal on all ranks."""
    piece, x = piece_of(0, 8), torch.randn(ROWS, WIDTH)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        piece(x.requires_grad_()).sum().backward()
        times.append(time.perf_counter() - began)
    layers = torch.tensor([max(1, round(8 * seconds / median(times)))])
    comm.broadcast(layers)
    return int(layers)


def timed(comm, step):
    """When a step began and ended here, by the clock that all processes share, and its result."""
    comm.barrier()
    began = time.perf_counter()
    result = step()
    return began, time.perf_counter(), result


def duration(turn):
    """Seconds of a step, which begins with the first stage, from (began, ended, …) of all ranks."""
    return max(ended for _, ended, *_ in turn) - turn[0][0]


def overhead(comm, m, repeats):
    """When naive steps began and ended, and the seconds of this rank's instructions in each."""
    chunks = [piece_of(comm.rank, layers_for(comm, STAGE))]
    X = torch.randn(m * ROWS, WIDTH)
    parts = cut_batch(X, X, m)
    shapes = agree_on_shapes(comm, chunks, X)

    def step():
        schedule = naive(comm.world_size, m)
        return run_schedule(
            comm, chunks, schedule, parts, squared_error, shapes=shapes, record=True
        ).events

    steps = [timed(comm, step) for _ in range(2 + repeats)][2:]
    return [(*times, sum(event.duration for event in events)) for *times, events in steps]


def beside_torch(comm, m, seconds, repeats):
    """Times of steps by both, in turns, for each schedule; checks that gradients are equal."""
    p = comm.world_size
    module = piece_of(comm.rank, layers_for(comm, seconds))
    X = torch.randn(m * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    parts = cut_batch(X, X, m)
    shapes = agree_on_shapes(comm, [module], X)
    process = comm._process
    pipes, sockets = process.transport, GlooTransport(process.mail)
    # Ours divides by the rows of the batch; theirs by the number of equal micro-batches.
    mean_error = lambda outputs, targets: squared_error(outputs, targets).mean()  # noqa: E731
    found = {}
    for name, make, theirs in (
        ("GPipe", gpipe, ScheduleGPipe),
        ("1F1B", one_f_one_b, Schedule1F1B),
    ):
        stage = PipelineStage(module, comm.rank, p, torch.device("cpu"))
        schedule = theirs(stage, m, loss_fn=mean_error)

        def step_by_torch(schedule=schedule):
            module.zero_grad()
            first = [X] if comm.rank == 0 else []
            last = {"target": X, "losses": []} if comm.rank == p - 1 else {}
            schedule.step(*first, **last)

        def our_step(plan=make(p, m)):  # noqa: B008
            run_schedule(comm, [module], plan, parts, squared_error, shapes=shapes)

        def our_step_over_gloo():
            process.transport = sockets
            our_step()
            process.transport = pipes

        ways = {"torch": step_by_torch, "shared": our_step, "gloo": our_step_over_gloo}
        gradients = []
        for step in ways.values():
            step()
            gradients.append([parameter.grad.clone() for parameter in module.parameters()])
            for other, own in zip(gradients[0], gradients[-1]):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-7)
        for number in range(2 + repeats):
            order = list(ways) if number % 2 else reversed(ways)
            turn = {way: timed(comm, ways[way])[:2] for way in order}
            found.setdefault(name, []).append(turn)
        found[name] = found[name][2:]
    return found


def main():
    missed = []
    print("Naive schedule: a step against the sum of its stages' computing (ms)\n")
    print(f"{'stages':>6} {'micro-batches':>14} {'step':>8} {'computing':>10} {'overhead':>9}")
    for p, m in ((2, 1), (2, 4), (4, 2)):
        ranks = run(overhead, ranks=p, on="processes", args=(m, 9), transport="shared",
                    record=False).values  # fmt: skip
        steps = [duration(turn) for turn in zip(*ranks)]
        computing = [sum(own for *_, own in turn) for turn in zip(*ranks)]
        share = median(step / own - 1 for step, own in zip(steps, computing))
        print(
            f"{p:6} {m:14} {median(steps) * 1e3:8.1f} {median(computing) * 1e3:10.1f} {share:9.2%}"
        )
        if share > OVERHEAD:
            missed.append(f"overhead of {share:.1%} with {p} stages and {m} micro-batches")
    print("\nA step beside torch.distributed.pipelining over gloo (ms, and times torch's)\n")
    print(f"{'':6} {'stages':>6} {'micro-batches':>14} {'stage':>6} {'torch':>8}", end="")
    print(f" {'ours, shared memory':>21} {'ours, gloo':>16}")
    for p, m, seconds, repeats in ((2, 4, STAGE, 9), (2, 8, 0.005, 25), (4, 8, 0.005, 25)):
        ranks = run(beside_torch, ranks=p, on="processes", args=(m, seconds, repeats),
                    transport="shared", record=False).values  # fmt: skip
        for name in ranks[0]:
            turns = list(zip(*(rank[name] for rank in ranks)))
            took = {way: [duration([own[way] for own in turn]) for turn in turns] for way in WAYS}
            ratio = {
                way: median(own / other for own, other in zip(took[way], took["torch"]))
                for way in WAYS
            }
            times = {way: median(took[way]) * 1e3 for way in WAYS}
            print(f"{name:6} {p:6} {m:14} {seconds * 1e3:6.0f} {times['torch']:8.1f}", end="")
            for way, width in (("shared", 13), ("gloo", 8)):
                print(f" {times[way]:{width}.1f} ({ratio[way]:.2f})", end="")
            print()
            if seconds == STAGE and ratio["shared"] > RATIO:
                missed.append(f"{name} with {p} stages: {ratio['shared']:.3f} times torch's")
    cores = os.cpu_count()
    print(f"\n{cores} cores: more stages than that share them")
    for what in missed:
        print("missed:", what)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
