"""Cut a network into pieces: at which layers each stage begins, and what is there to weigh.

The network is an `nn.Sequential`. A partition is its *cuts*: the numbers of the layers at which a
new piece begins, so that two cuts make three pieces.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..ranks import Comm


def cut_network(network: nn.Sequential, cuts: Sequence[int]) -> list[nn.Sequential]:
    """The pieces of a network: the same layers under the same names, so the same state_dict keys.

    Raises ValueError if a piece would be empty, or would overwrite what it is given.
    """
    layers = list(network.named_children())
    edges = [0, *cuts, len(layers)]
    if any(a >= b for a, b in zip(edges, edges[1:])):
        raise ValueError(
            f"cuts are rising numbers of layers, from 1 to {len(layers) - 1}; {list(cuts)} would "
            "leave a piece without layers"
        )
    for cut in cuts:
        if getattr(layers[cut][1], "inplace", False):
            raise ValueError(
                f"the piece that begins with layer {cut}, {layers[cut][1]}, would overwrite its "
                "input, whose gradient it has to find: cut elsewhere, or use inplace=False"
            )
    return [nn.Sequential(OrderedDict(layers[a:b])) for a, b in zip(edges, edges[1:])]


def chunks_of(comm: Comm, pieces: Sequence[nn.Module]) -> nn.ModuleList:
    """This rank's share of the pieces, on its device: every world_size-th one."""
    if len(pieces) % comm.world_size:
        raise ValueError(f"{len(pieces)} pieces cannot be shared out to {comm.world_size} ranks")
    chunks = nn.ModuleList(pieces[comm.rank :: comm.world_size])
    if all(tensor.device == comm.device for tensor in [*chunks.parameters(), *chunks.buffers()]):
        return chunks  # built there; FakeTensorMode could not move them
    return chunks.to(comm.device)


def build_layers(builders: Sequence[Callable], numbers: Sequence[int], seed=0) -> nn.Sequential:
    """Some layers of a network, built by functions without arguments.

    A layer's initial weights depend on the seed and on its number alone: whoever builds it, and
    with whatever others, they are the same.
    """
    layers = OrderedDict()
    with torch.random.fork_rng(devices=[]):
        for number in numbers:
            torch.manual_seed(seed * 1_000_003 + number)
            layers[str(number)] = builders[number]()
    return nn.Sequential(layers)


def cut_batch(X: Tensor, y: Tensor, m: int) -> list[tuple[Tensor, Tensor]]:
    """m micro-batches (X, y), whose sizes differ by at most one row; ValueError if one is empty."""
    if not 1 <= m <= len(X) or len(X) != len(y):
        raise ValueError(f"cannot cut {len(X)} rows with {len(y)} labels into {m} micro-batches")
    return list(zip(X.tensor_split(m), y.tensor_split(m)))


# --- the best cuts ------------------------------------------------------------------------------


def best_cuts(layers: int, stages: int, cost: Callable[[int, int, int], float]) -> list[int]:
    """The cuts whose most expensive stage is cheapest, among all there are: a dynamic programme.

    `cost(stage, first, end)` is that of layers first to end-1 on a stage. best[end] is the best way
    to give the first `end` layers to the stages so far; each round lets one more stage take the
    last of them. Which of equally good cuts it takes is always the same: those that cut the layers
    before the last stage best, then the most even ones (by the sum of squares), then the latest, so
    that a layer that costs nothing stays with the one before. Raises ValueError if nothing has a
    finite cost.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be given to {stages} stages")
    best = {end: add_stage((0, 0, []), cost(0, 0, end), 0) for end in range(1, layers + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                add_stage(best[first], cost(stage, first, end), first)
                for first in range(stage, end)
            )
            for end in range(stage + 1, layers + 1)
        }
    worst, _, starts = best[layers]
    if math.isinf(worst):
        raise ValueError(
            f"no way to cut {layers} layers into {stages} stages fits: use more stages"
        )
    return [-start for start in starts[1:]]


def add_stage(so_far: tuple, cost: float, first: int) -> tuple:
    """What is compared, with one more stage: worst cost, sum of squares, where stages begin.

    The beginnings are negative, so that later ones are smaller.
    """
    worst, squares, starts = so_far
    return max(worst, cost), squares + cost**2, [*starts, -first]


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """The cuts after which the most expensive stage is cheapest, from the costs of the layers."""
    return best_cuts(len(costs), stages, lambda stage, first, end: math.fsum(costs[first:end]))
