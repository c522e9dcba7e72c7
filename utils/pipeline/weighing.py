"""What there is to weigh when a network is cut: each layer's parameters, time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..costs import bytes_per_parameter
from ..ranks import Comm
from .executor import now
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
    for layer in network.to(comm.device):
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
    """What a layer keeps: `parameters` counts them, `kept` has the bytes of each tensor by a key.

    These are the tensors that autograd saves for the backward pass, the layer's input and its
    output. Layers that keep the same tensor have the same key for it: it is in memory once.
    """

    parameters: int
    kept: dict[int, int]


def layer_memory(network: nn.Sequential, X: Tensor) -> list[LayerMemory]:
    """What each layer keeps in memory for the rows X, from one forward pass."""
    own = {storage_of(t): 0 for t in [*network.parameters(), *network.buffers()]}
    alive: list[Tensor] = []  # so that no two tensors get the same memory, and with it the same key
    layers = []
    x = X
    for layer in network:
        kept: dict[int, int] = {}

        def note(tensor, kept=kept):
            if storage_of(tensor) not in own:
                alive.append(tensor)
                kept[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        note(x)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            x = layer(x)
        note(x)
        layers.append(LayerMemory(sum(p.numel() for p in layer.parameters()), kept))
    return layers


def storage_of(tensor: Tensor) -> int:
    """A number for the memory of a tensor, shared by its views."""
    return tensor.untyped_storage().data_ptr()


def activation_bytes(layers: Sequence[LayerMemory], recompute=False) -> int:
    """What a stage of these layers keeps for one micro-batch in flight; only its input if it
    recomputes the rest."""
    if recompute:
        return next(iter(layers[0].kept.values()), 0)
    return sum({key: size for layer in layers for key, size in layer.kept.items()}.values())


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
        return sum(times[first:end]) if fits else float("inf")

    return best_cuts(len(times), len(in_flight), cost)
