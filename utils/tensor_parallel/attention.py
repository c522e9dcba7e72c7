"""Attention with the heads shared out: they know nothing of each other until the last layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..models import Attention, attend
from .linear import own_parameter
from .operators import all_reduce_identity, identity_all_reduce, part_sizes


class ParallelAttention(nn.Module):
    """An `Attention` of which each rank has some heads; x (batch, length, width) in, the same out.

    Queries, keys and values of a head are columns, so the first layer is cut by columns; the heads'
    results meet in the last layer, which is cut by rows.
    """

    def __init__(self, attention: Attention, comm):
        super().__init__()
        self.comm = comm
        self.heads, parts = own_heads(attention, comm)
        self.qkv_weight, self.qkv_bias, self.out_weight = (
            own_parameter(part, comm, is_split=True) for part in parts
        )
        self.out_bias = own_parameter(attention.out.bias, comm)

    def partial(self, x: Tensor) -> Tensor:
        """What this rank's heads add to the result for all of x, without messages and last bias."""
        heads = attend(F.linear(x, self.qkv_weight, self.qkv_bias), self.heads)
        return F.linear(heads, self.out_weight)

    def forward(self, x: Tensor) -> Tensor:
        partial = self.partial(identity_all_reduce(x, self.comm))
        return all_reduce_identity(partial, self.comm) + self.out_bias


def own_heads(attention: Attention, comm) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
    """How many heads this rank has, and their parts of qkv.weight, qkv.bias and out.weight.

    Raises ValueError where a rank would have no head.
    """
    n, heads, width = comm.world_size, attention.heads, attention.out.in_features
    if heads < n:
        raise ValueError(f"{n} ranks cannot share {heads} heads; use at most {heads} ranks")
    sizes = part_sizes(heads, n)
    first, count = sum(sizes[: comm.rank]), sizes[comm.rank]
    mine = slice(first, first + count)
    weight = attention.qkv.weight.view(3, heads, -1, width)[:, mine].reshape(-1, width)
    bias = attention.qkv.bias.view(3, heads, -1)[:, mine].reshape(-1)
    rows = attention.out.weight.view(width, heads, -1)[:, mine].reshape(width, -1)
    return count, (weight, bias, rows)
