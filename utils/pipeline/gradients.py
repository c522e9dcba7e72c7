"""What the ranks of a pipeline must agree on before their optimizers step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..ranks import Comm


def tied_weights(comm: Comm, pieces: Sequence[nn.Module]) -> list[tuple]:
    """The weights that this rank shares with others, each with the group of ranks that hold it.

    `pieces` are all of the network's: a weight that stands in two of them is tied. Every rank must
    call it.
    """
    holders: dict[nn.Parameter, set[int]] = {}
    for number, piece in enumerate(pieces):
        for parameter in piece.parameters():
            holders.setdefault(parameter, set()).add(number % comm.world_size)
    return [
        (parameter, comm.group(sorted(ranks)))
        for parameter, ranks in holders.items()
        if len(ranks) > 1 and comm.rank in ranks
    ]


@torch.no_grad()
def sum_tied_gradients(ties: Sequence[tuple]) -> None:
    """Give every rank that holds a tied weight the sum of its gradients over all that do.

    Equal weights that get equal gradients stay equal.
    """
    for parameter, group in ties:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group.all_reduce(parameter.grad)


@torch.no_grad()
def all_finite(comm: Comm, module: nn.Module) -> bool:
    """Whether all gradients on all ranks are finite: the same answer on all of them.

    A sum is not finite if a number in it is not, and takes one look at each.
    """
    found = [p.grad for p in module.parameters() if p.grad is not None]
    dense = [g.coalesce().values() if g.is_sparse else g for g in found]
    sums = [g.sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in dense]
    total = sum(sums[1:], sums[0]) if sums else torch.zeros((), device=comm.device)
    finite = total.isfinite().to(torch.float32)
    comm.all_reduce(finite, op="min")
    return bool(finite.item())
