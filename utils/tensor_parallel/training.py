"""What training with split layers needs besides: two streams of random numbers, one global norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def dropout_streams(comm, seed: int) -> tuple[torch.Generator, torch.Generator]:
    """Two generators: one that draws the same on all ranks, one that draws different numbers.

    The first is for what every rank has whole, which must stay equal; the second for what each has
    a part of, whose masks must not repeat. Neither is moved on by what else draws random numbers.
    """
    alike, own = (torch.Generator(comm.device) for _ in range(2))
    return alike.manual_seed(seed), own.manual_seed(seed + 1 + comm.rank)


class Dropout(nn.Module):
    """Dropout whose mask comes from a generator of its own, on x's device."""

    def __init__(self, p: float, generator: torch.Generator):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout drops a share of at least 0 and less than 1, not {p}")
        self.p, self.generator = p, generator

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = torch.rand(x.shape, generator=self.generator, device=x.device) >= self.p
        return x * kept / (1 - self.p)


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, comm) -> Tensor:
    """Scale gradients down, in place, so that the norm of all of them is at most `max_norm`.

    The same as `torch.nn.utils.clip_grad_norm_` on the unsplit model: the squares of split
    parameters (`is_split`) are summed over the ranks, those that every rank has count once.
    Returns the norm before.
    """
    parameters = [p for p in parameters if p.grad is not None]
    split = torch.zeros((), device=comm.device)
    whole = torch.zeros((), device=comm.device)
    for p in parameters:
        square = p.grad.float().pow(2).sum()
        if getattr(p, "is_split", False):
            split += square
        else:
            whole += square
    comm.all_reduce(split)
    norm = (split + whole).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1)
    for p in parameters:
        p.grad.mul_(scale.to(p.grad.dtype))
    return norm
