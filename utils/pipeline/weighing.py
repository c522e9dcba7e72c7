"""What there is to weigh when a network is cut: each layer's parameters, time and memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..costs import bytes_per_parameter
from ..measure import now
from ..ranks import Comm
from .partition import best_cuts

WARM_UP, REPEATS = 1, 3


def parameter_counts(network: nn.Sequential) -> list[int]:
    """The number of parameters of each layer."""
    return [sum(p.numel() for p in layer.parameters()) for layer in network]


# --- time ---------------------------------------------------------------------------------------


def layer_times(comm: Comm, network: nn.Sequential, X: Tensor) -> list[tuple[float, float]]:
    """Seconds of each layer's forward and backward pass for the rows X: the program of one rank.

    On a virtual rank that is the model's time, on a process or a GPU a measurement, of which the
    fastest of three counts: `run(layer_times, ranks=1, on=…, args=(network, X)).values[0]`.
    """
    x, times = X.to(comm.device), []
    if any(parameter.device != comm.device for parameter in network.parameters()):
        network.to(comm.device)  # FakeTensorMode could not move it
    for layer in network:
        runs = [time_layer(comm, layer, x) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        times.append(tuple(min(column) for column in zip(*runs)))
        with torch.no_grad():
            x = layer(x)
    return times


def time_layer(comm: Comm, layer: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds of one forward and one backward pass of a layer, the input's gradient included."""
    x = x.detach().requires_grad_(x.is_floating_point())
    begin = now(comm)
    y = layer(x)
    middle = now(comm)
    gradient = torch.ones_like(y)
    start = now(comm)
    if y.requires_grad:
        torch.autograd.backward(y, gradient)
    return middle - begin, now(comm) - start


# --- memory -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerMemory:
    """What a layer has in memory: the number of its parameters, and tensors as {key: bytes}.

    `saved` is what autograd saves for its backward pass, without parameters and buffers. The same
    tensor has the same key wherever it appears, since it is in memory once.
    """

    parameters: int
    input: dict[int, int]
    saved: dict[int, int]
    output: dict[int, int]


def layer_memory(network: nn.Sequential, X: Tensor) -> list[LayerMemory]:
    """What each layer has in memory for the rows X, from one forward pass."""
    own = {storage_of(t) for t in [*network.parameters(), *network.buffers()]}
    alive: list[Tensor] = []  # so that no two tensors get the same memory, and with it the same key
    layers = []
    x = X.clone()  # a view would stand for all that it is a view of
    for layer in network:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            y = layer(x)
        count = sum(p.numel() for p in layer.parameters())
        kept = {key: size for t in saved for key, size in sized(t).items() if key not in own}
        layers.append(LayerMemory(count, sized(x), kept, sized(y)))
        alive += [x, y, *saved]
        x = y
    return layers


def sized(tensor: Tensor) -> dict[int, int]:
    """The bytes of a tensor's memory, by its key."""
    return {storage_of(tensor): tensor.untyped_storage().nbytes()}


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor, shared by its views."""
    return tensor.untyped_storage().data_ptr()


def activation_bytes(layers: Sequence[LayerMemory], recompute=False) -> int:
    """What a stage of these layers keeps of one micro-batch: its input, its output, what is saved.

    With recomputation it is the input alone.
    """
    kept = dict(layers[0].input)
    if not recompute:
        for layer in layers:
            kept |= layer.saved
        kept |= layers[-1].output
    return sum(kept.values())


def stage_bytes(layers: Sequence[LayerMemory], in_flight: int, optimizer="sgd") -> int:
    """The memory of a stage: parameters, gradients, optimizer state, and what is in flight."""
    parameters = sum(layer.parameters for layer in layers)
    return parameters * bytes_per_parameter(optimizer) + in_flight * activation_bytes(layers)


def memory_cuts(layers: Sequence[LayerMemory], in_flight: Sequence[int], optimizer="sgd") -> list:
    """The cuts after which the fullest stage is least full; `in_flight` is each stage's peak."""
    return best_cuts(
        len(layers),
        len(in_flight),
        lambda stage, first, end: stage_bytes(layers[first:end], in_flight[stage], optimizer),
    )


def fastest_cuts_that_fit(
    times: Sequence[float],
    layers: Sequence[LayerMemory],
    in_flight: Sequence[int],
    capacity: float,
    optimizer="sgd",
) -> list[int]:
    """The cuts after which the slowest stage is fastest, of those whose stages all fit in memory.

    Raises ValueError if there are none.
    """

    def cost(stage, first, end):
        fits = stage_bytes(layers[first:end], in_flight[stage], optimizer) <= capacity
        return math.fsum(times[first:end]) if fits else math.inf

    return best_cuts(len(times), len(in_flight), cost)
