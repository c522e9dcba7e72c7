"""What ranks do alike around a training step: start equal, stop together, pool statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..parameters import tensors_of
from ..ranks.collectives import ring_all_reduce
from .one_process import pool_statistics


def broadcast_module(comm, module: nn.Module, src: int = 0) -> None:
    """Make a module equal to rank `src`'s: parameters, frozen ones too, and buffers, in place.

    Raises ValueError on every rank where the ranks' tensors do not match.
    """
    for tensor in tensors_of(module).values():
        comm.broadcast(tensor, src)


def any_rank(comm, flag: bool) -> bool:
    """Whether `flag` is true on any rank. All get the same answer, so all can do the same."""
    vote = torch.tensor(float(flag))
    comm.all_reduce(vote, "max")
    return vote.item() > 0


def in_step(comm, batches: Iterable) -> Iterator:
    """This rank's batches, and then None for as long as another rank still has some."""
    batches = iter(batches)
    while True:
        batch = next(batches, None)
        if not any_rank(comm, batch is not None):
            return
        yield batch


@torch.no_grad()
def pool_buffers(comm, module: nn.Module, count: int) -> None:
    """Make the buffers of all ranks equal, in place: chapter 04's rule, with messages.

    Running means and variances are pooled, where `count` is the number of values a channel that
    this rank's statistics stand for; numbers of batches become the largest; all other buffers are
    rank 0's.
    """
    counts = [int(n) for n in gathered(comm, torch.tensor([count]))]
    for layer in module.modules():
        buffers = dict(layer.named_buffers(recurse=False))
        if buffers.get("running_mean") is not None:
            means, variances = (
                [value.double() for value in gathered(comm, buffers.pop(name))]
                for name in ("running_mean", "running_var")
            )
            mean, variance = pool_statistics(means, variances, counts)
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)
        if "num_batches_tracked" in buffers:
            ring_all_reduce(comm, buffers.pop("num_batches_tracked"), "max")
        for buffer in buffers.values():
            comm.broadcast(buffer)


def gathered(comm, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, in rank order."""
    found = [torch.empty_like(tensor) for _ in range(comm.world_size)]
    comm.all_gather(found, tensor)
    return found
