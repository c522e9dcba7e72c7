"""The gradients that are needed first travel first: those of the first layers (chapter 07).

In the order of the backward pass, the first layers' gradients come last, and the next forward pass
needs them first. So the gradients are cut into parts; whenever the wire is free, the most urgent
part that is there travels; and a layer's forward pass waits for its own gradient only. (The idea is
that of P3 and ByteScheduler.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ..ranks.collectives import ring_all_reduce
from .buckets import Bucket, MiB, make_buckets
from .together import broadcast_module


def first_layers_first(layer: int, arrival: int) -> tuple:
    """Urgency by the number of the layer: what the next forward pass needs first."""
    return layer, arrival


def first_come(layer: int, arrival: int) -> tuple:
    """Urgency by arrival: the order of the backward pass."""
    return (arrival,)


class Layer:
    """A layer with its gradients as parts, and the optimizer of its parameters."""

    def __init__(self, number: int, module: nn.Module, parameters: list, part: int, make_optimizer):
        self.number, self.module = number, module
        self.optimizer = make_optimizer(parameters) if parameters else None
        groups = make_buckets(parameters, 2**63, 2**63)  # one for each dtype
        self.buckets = [Bucket(group) for group in groups]
        self.parts = [
            piece
            for bucket in self.buckets
            for piece in bucket.flat.split(max(1, part // bucket.flat.itemsize))
        ]
        self.travelling = 0  # parts that have been sent and have not arrived
        self.sent = False

    @property
    def complete(self) -> bool:
        """Whether all gradients are there."""
        return not any(bucket.missing for bucket in self.buckets)

    def step(self) -> None:
        """The optimizer's step with the gradients that have arrived."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        for bucket in self.buckets:
            bucket.restart()
        self.sent = False


class Queue:
    """Parts that wait for the wire. Every rank fills it in the same order, at its own times."""

    def __init__(self, urgency: Callable):
        self.urgency = urgency
        self.times: list[float] = []
        self.waiting: dict[int, tuple[Layer, Tensor]] = {}

    def put(self, layer: Layer, part: Tensor, time: float) -> None:
        """Add a part, which is there from a time on."""
        self.waiting[len(self.times)] = layer, part
        self.times.append(time)

    def come(self, now: float) -> int:
        """How many parts have come until a time."""
        return sum(time <= now for time in self.times)

    def take(self, come: int) -> tuple[Layer, Tensor]:
        """The most urgent among the first `come` parts, of those that still wait."""
        arrivals = [arrival for arrival in self.waiting if arrival < come]
        first = min(arrivals, key=lambda a: self.urgency(self.waiting[a][0].number, a))
        return self.waiting.pop(first)


def send_most_urgent(comm, queue: Queue, all_reduce: Callable) -> None:
    """All-reduce the most urgent of the parts that are there on every rank."""
    come = torch.tensor([queue.come(comm.time())])
    ring_all_reduce(comm, come, "min")
    layer, part = queue.take(come.item())
    all_reduce(comm, part)
    layer.travelling -= 1


class PriorityDataParallel(nn.Module):
    """A rank's replica of an nn.Sequential, whose layers wait for their own gradients only.

    A backward pass sends; the next forward pass takes each layer's optimizer step just before it
    needs the layer, and `finish` takes all that are left. `make_optimizer(parameters)` builds the
    optimizer of a layer, `part` is the size of parts in bytes, `urgency` one of the functions
    above. Every parameter needs a gradient in every backward pass; a missing one is a RuntimeError.
    """

    def __init__(self, module: nn.Sequential, comm, make_optimizer: Callable, part: int = 4 * MiB,
                 urgency: Callable = first_layers_first,
                 all_reduce: Callable = ring_all_reduce):  # fmt: skip
        super().__init__()
        if not isinstance(module, nn.Sequential):
            name = type(module).__name__
            raise TypeError(f"priorities need layers in order: an nn.Sequential, not a {name}")
        self.module, self.comm, self.all_reduce = module, comm, all_reduce
        broadcast_module(comm, module)
        self.layers, taken = [], set()
        for number, child in enumerate(module):
            own = [p for p in child.parameters() if p.requires_grad and p not in taken]
            taken.update(own)
            self.layers.append(Layer(number, child, own, part, make_optimizer))
        for layer in self.layers:
            for bucket in layer.buckets:
                for position, parameter in enumerate(bucket.parameters):
                    hook = partial(self.arrived, bucket, position)
                    parameter.register_post_accumulate_grad_hook(hook)
        self.urgency = urgency
        self.restart()

    def restart(self) -> None:
        """Before a backward pass: nothing is sent."""
        self.to_send = [layer for layer in self.layers if layer.parts]
        self.queue, self.works = Queue(self.urgency), deque()

    def forward(self, X):
        """The layers one after the other, each after the step that its gradients allow."""
        self.check_complete()
        for layer in self.layers:
            self.arrive(layer)
            X = layer.module(X)
        self.restart()
        return X

    def finish(self) -> None:
        """Take all steps that are left: after the last backward pass."""
        self.check_complete()
        for layer in self.layers:
            self.arrive(layer)
        self.restart()

    def arrived(self, bucket: Bucket, position: int, parameter: nn.Parameter) -> None:
        """Autograd calls this when a gradient is there: send the layers that are complete."""
        bucket.fill(position, 1 / self.comm.world_size)
        while self.to_send and self.to_send[-1].complete:
            self.send(self.to_send.pop())

    def send(self, layer: Layer) -> None:
        """Put a layer's parts in the queue, and launch the sending of as many."""
        for bucket in layer.buckets:
            torch.equal(bucket.flags, bucket.flags)  # waits: what counts is there, not only issued
        layer.sent, layer.travelling = True, len(layer.parts)
        for part in layer.parts:
            self.queue.put(layer, part, self.comm.time())
        for _ in layer.parts:
            work = self.comm.launch(send_most_urgent, self.queue, self.all_reduce)
            self.works.append(work)

    def arrive(self, layer: Layer) -> None:
        """Wait until all of a layer's gradients are there, and take the step."""
        if layer.sent:
            while layer.travelling:
                self.works.popleft().wait()
            layer.step()

    def check_complete(self) -> None:
        """RuntimeError if the backward pass has left out some parameter."""
        buckets = [bucket for layer in self.layers for bucket in layer.buckets]
        filled = sum(len(bucket.parameters) - len(bucket.missing) for bucket in buckets)
        missing = sum(len(bucket.missing) for bucket in buckets)
        sent = any(layer.sent for layer in self.layers)
        if missing and (filled or sent):
            raise RuntimeError(
                f"{missing} parameters got no gradient in the last backward pass, and the layers "
                "before them wait for it: use every parameter, or DistributedDataParallel"
            )
