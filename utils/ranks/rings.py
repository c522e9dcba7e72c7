"""Rings through a server's links: found by search, and used several at once (chapter 06)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .collectives import Flat, combine, divide_first


def find_rings(links: Sequence[Sequence[int]], path: tuple[int, ...] = (0,)) -> Iterator[tuple]:
    """All rings through all GPUs that begin with `path`, in both directions.

    `links[a][b]` says how many links join GPUs a and b, as `Server.link_matrix()` does.
    """
    if len(path) == len(links):
        if links[path[-1]][path[0]]:
            yield path
        return
    for gpu, count in enumerate(links[path[-1]]):
        if count and gpu not in path:
            yield from find_rings(links, (*path, gpu))


def split_over(values: Tensor, rings: Sequence[tuple], n: int) -> list[tuple[Tensor, ...]]:
    """A flat tensor's share for each ring, in proportion to the weights, cut in n parts."""
    sums = list(accumulate(weight for _, weight in rings))
    cuts = [values.numel() * at // sums[-1] for at in sums[:-1]]
    return [share.tensor_split(n) for share in values.tensor_split(cuts)]


def multi_ring_all_reduce(comm, tensor: Tensor, rings: Sequence[tuple], op: str = "sum") -> None:
    """All-reduce over several directed rings at once, each for its share of the tensor. In place.

    `rings` are pairs (order of the ranks, weight). All rings take step after step together:
    2(n-1) steps, as one ring does.
    """
    n, flat = comm.world_size, Flat(tensor)
    divide_first(flat.values, n, op)
    shares = split_over(flat.values, rings, n)
    places = [order.index(comm.rank) for order, _ in rings]
    for step in range(2 * (n - 1)):
        moving = []
        for tag, ((order, _), place, parts) in enumerate(zip(rings, places, shares)):
            own = parts[(place - step - 1) % n]
            incoming = torch.empty_like(own) if step < n - 1 else own
            sending = comm.isend(parts[(place - step) % n], order[(place + 1) % n], tag)
            receiving = comm.irecv(incoming, order[place - 1], tag)
            moving.append((sending, receiving, own, incoming))
        for sending, receiving, own, incoming in moving:
            receiving.wait()
            if step < n - 1:
                combine(own, incoming, op)
            sending.wait()
    flat.write_back()
