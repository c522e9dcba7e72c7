"""DistributedDataParallel by hand: beside PyTorch's, and over a wire that is slow enough to matter.

Limits: with gloo's own all-reduce a step takes no longer than with PyTorch's class over gloo, and
clearly less through shared memory. Where communication takes 80 % of the backward pass, at least
90 % of what can be hidden is hidden, and the virtual ranks predict the step within 15 %.
"""

import dataclasses
import sys
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from utils.data_parallel import DistributedDataParallel, bucket_schedule
from utils.hardware import ideal_server
from utils.models import mlp, resnet18
from utils.ranks import run
from utils.ranks.collectives import ring_all_reduce
from utils.ranks.shared import shared_memory_all_reduce
from utils.topology import Chip

RATIO = {"gloo": 1.0, "shared memory": 0.95}
HIDDEN, PREDICTED, SHARE = 0.9, 0.15, 0.8
LATENCY = 1e-4


def small_resnet(rows):
    return resnet18(10, 3), torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))


def large_mlp(rows):
    """20,193,792 parameters."""
    sizes = (1024, 2560, 2560, 2560, 1536)
    return mlp(sizes), torch.randn(rows, sizes[0]), torch.randint(sizes[-1], (rows,))


MODELS = {"ResNet-18": small_resnet, "MLP 20 M": large_mlp}
ROWS = {"ResNet-18": 4, "MLP 20 M": 32}  # few, so that communication weighs
LIMITED_ROWS = {"ResNet-18": 32, "MLP 20 M": 1024}  # many, so that its processor time does not


def gloo_all_reduce(comm, tensor, op="sum"):
    """gloo's own, which PyTorch's class uses."""
    dist.all_reduce(tensor)


class Trainee:
    """A model with what trains it."""

    def __init__(self, build, rows, wrap, device="cpu"):
        torch.manual_seed(0)
        model, X, y = build(rows)
        self.model, self.X, self.y = model.to(device), X.to(device), y.to(device)
        self.ddp = wrap(self.model)
        self.loss = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self):
        self.optimizer.zero_grad()
        loss = self.loss(self.ddp(self.X), self.y)
        loss.backward()
        if hasattr(self.ddp, "wait"):
            self.ddp.wait()
        self.optimizer.step()
        torch.equal(loss, loss)  # waits until a GPU, a virtual one too, has done all of it

    def step_in_sequence(self):
        """The same without overlap: communication begins when the backward pass has ended."""
        self.optimizer.zero_grad()
        loss = self.loss(self.ddp(self.X), self.y)
        with self.ddp.no_sync():
            loss.backward()
        self.ddp.wait()
        self.optimizer.step()
        torch.equal(loss, loss)


def in_turns(comm, steps, rounds):
    """Seconds of each step, by name, all of them again and again, there and back."""
    took = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name in list(steps)[:: 1 if number % 2 else -1]:
            comm.barrier()
            start = comm.time()
            steps[name]()
            comm.barrier()
            if number > 1:
                took[name].append(comm.time() - start)
    return took


# --- beside PyTorch's -----------------------------------------------------------------------------


def side_by_side(comm, build, rows, rounds):
    ways = {
        "PyTorch": nn.parallel.DistributedDataParallel,
        "gloo": lambda model: DistributedDataParallel(model, comm, gloo_all_reduce),
        "ring": lambda model: DistributedDataParallel(model, comm, ring_all_reduce),
        "shared memory": lambda model: DistributedDataParallel(
            model, comm, shared_memory_all_reduce
        ),
        "no communication": lambda model: model,
    }
    steps = {name: Trainee(build, rows, wrap).step for name, wrap in ways.items()}
    return in_turns(comm, steps, rounds)


def compare():
    missed = []
    print("2 ranks, milliseconds a step (ratio to PyTorch's DistributedDataParallel over gloo)\n")
    for name, build in MODELS.items():
        for transport in ("gloo", "shared"):
            took = run(side_by_side, 2, "processes", (build, ROWS[name], 15), transport=transport,
                       record=False).values[0]  # fmt: skip
            print(f"{name}, {ROWS[name]} rows a rank, messages over {transport}")
            for way, seconds in took.items():
                ratio = median(a / b for a, b in zip(seconds, took["PyTorch"]))
                print(f"  {way:18}{median(seconds) * 1e3:9.1f} ({ratio:5.2f})")
                if ratio > RATIO.get(way, float("inf")):
                    missed.append(f"{name}, {way}: {ratio:.2f} times PyTorch's")
    return missed


# --- over a slow wire -----------------------------------------------------------------------------


def measure_backward(comm, build, rows):
    """Seconds of the quickest backward pass, and the bytes of its gradients."""
    trainee, took = Trainee(build, rows, lambda model: model), []
    for _ in range(5):
        loss = trainee.loss(trainee.model(trainee.X), trainee.y)
        comm.barrier()
        start = comm.time()
        loss.backward()
        took.append(comm.time() - start)
    return min(took), sum(p.nbytes for p in trainee.model.parameters())


def over_a_wire(comm, build, rows, rounds):
    """Seconds of a step with overlap, without, and with an all-reduce that does nothing.

    And of the last: when each bucket was complete, and when the backward pass had ended.
    """
    ready = []

    def nothing(comm, tensor):
        pass

    class Noting(DistributedDataParallel):
        def launch_complete(self):
            before = self.launched
            super().launch_complete()
            ready[-1] += [comm.time()] * (self.launched - before)

        def wait(self):
            ready[-1].append(comm.time())
            super().wait()

        def forward(self, X):
            ready.append([])
            return super().forward(X)

    def ours(model):
        return DistributedDataParallel(model, comm)

    overlapping = Trainee(build, rows, ours, comm.device)
    alone = Trainee(build, rows, lambda model: Noting(model, comm, nothing), comm.device)
    steps = {
        "overlapped": overlapping.step,
        "in sequence": overlapping.step_in_sequence,
        "alone": alone.step,
    }
    sizes = [bucket.flat.nbytes for bucket in overlapping.ddp.buckets]
    ready.append([])
    return in_turns(comm, steps, rounds), ready[2:], sizes


def best_possible(alone, ready, sizes, bandwidth):
    """Seconds of steps whose buckets travel from when they are complete, one after the other."""
    seconds = [2 * LATENCY + size / bandwidth for size in sizes]
    return [
        step + max(0.0, bucket_schedule(complete, seconds)[-1][1] - backward)
        for step, (*complete, backward) in zip(alone, ready)
    ]


def predict(build, rows, alone, bandwidth):
    """The same steps on virtual ranks, whose chip is as fast as this processor without wires."""
    chip = Chip("this processor", 2e10, 2e10, 10**12, 1e10, 0, 1.0, 1.0, launch=0)
    for _ in range(2):
        server = ideal_server(2, LATENCY, bandwidth)
        server = dataclasses.replace(server, chips=(chip, chip))
        took, *_ = run(over_a_wire, 2, "virtual", (build, rows, 1), server=server).values[0]
        factor = took["alone"][0] / alone
        chip = dataclasses.replace(
            chip, fp32=chip.fp32 * factor, half=chip.half * factor,
            bandwidth=chip.bandwidth * factor,
        )  # fmt: skip
    return took


def hide():
    missed = []
    print(
        f"\na wire on which communication takes {SHARE:.0%} of the backward pass, 2 ranks; ms, "
        "the quickest of several steps\n"
    )
    for name, build in MODELS.items():
        rows = LIMITED_ROWS[name]
        backward, nbytes = run(measure_backward, 2, "processes", (build, rows)).values[0]
        bandwidth = nbytes / (SHARE * backward)
        took, ready, sizes = run(
            over_a_wire, 2, "processes", (build, rows, 6), transport="shared",
            bandwidth=bandwidth, latency=LATENCY, record=False,
        ).values[0]  # fmt: skip
        best = min(best_possible(took["alone"], ready, sizes, bandwidth))
        took = {way: min(seconds) for way, seconds in took.items()}  # the least disturbed
        alone, sequence = took["alone"], took["in sequence"]
        hidden = (sequence - took["overlapped"]) / (sequence - best)
        predicted = predict(build, rows, alone, bandwidth)
        print(f"{name}, {rows} rows a rank, {bandwidth / 1e6:.0f} MB/s")
        print(f"  backward pass         {backward * 1e3:7.0f}")
        print(f"  without communication {alone * 1e3:7.0f}")
        print(f"  the best possible     {best * 1e3:7.0f}")
        for way in ("overlapped", "in sequence"):
            error = predicted[way][0] / took[way] - 1
            print(f"  {way:22}{took[way] * 1e3:7.0f}   predicted {predicted[way][0] * 1e3:7.0f} "
                  f"({error:+.0%})")  # fmt: skip
            if abs(error) > PREDICTED:
                missed.append(f"{name}, {way}: the prediction is off by {error:+.0%}")
        print(f"  hidden of what can be hidden {hidden:.0%}")
        if hidden < HIDDEN:
            missed.append(f"{name}: {hidden:.0%} hidden")
    return missed


def main():
    missed = compare() + hide()
    print()
    for what in missed:
        print("missed:", what)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
