"""A transformer block split over ranks; and the same with what is between its layers split too."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ..models import TransformerBlock
from .attention import ParallelAttention
from .linear import ParallelMLP, own_parameter
from .operators import (
    all_gather_reduce_scatter,
    identity_all_reduce,
    part_sizes,
    reduce_scatter_all_gather,
)


class ParallelNorm(nn.Module):
    """A layer norm that every rank has whole."""

    def __init__(self, norm: nn.LayerNorm, comm):
        super().__init__()
        self.comm, self.shape, self.eps = comm, norm.normalized_shape, norm.eps
        self.weight = own_parameter(norm.weight, comm)
        self.bias = own_parameter(norm.bias, comm)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def of_rows(self, x: Tensor) -> Tensor:
        """The same for this rank's rows of x: the gradients of all rows are summed."""
        weight, bias = (identity_all_reduce(p, self.comm) for p in (self.weight, self.bias))
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


class ParallelBlock(nn.Module):
    """A `TransformerBlock` split over ranks: two all-reduces forward, two backward.

    x (batch, length, width) is whole on every rank, before, between and after the layers.
    """

    def __init__(self, block: TransformerBlock, comm):
        super().__init__()
        self.comm = comm
        self.norm1, self.norm2 = ParallelNorm(block.norm1, comm), ParallelNorm(block.norm2, comm)
        self.attention = ParallelAttention(block.attention, comm)
        self.mlp = ParallelMLP(block.up, block.down, comm)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SequenceParallelBlock(ParallelBlock):
    """The same with each rank keeping only its rows (positions) of x between the layers.

    An all-reduce is a reduce-scatter and an all-gather: here the norms and the additions stand
    between the two, so that no row is normalised twice, as many bytes travel, and x takes 1/n of
    the memory. x (batch, this rank's rows, width) in and out; `length` counts all rows.
    """

    def forward(self, x: Tensor, length: int) -> Tensor:
        x = x + self.of_rows(self.attention, self.attention.out_bias, self.norm1, x, length)
        return x + self.of_rows(self.mlp, self.mlp.down.bias, self.norm2, x, length)

    def of_rows(self, layer, bias, norm: ParallelNorm, x: Tensor, length: int) -> Tensor:
        sizes = part_sizes(length, self.comm.world_size)
        whole = all_gather_reduce_scatter(norm.of_rows(x), self.comm, 1, sizes)
        rows = reduce_scatter_all_gather(layer.partial(whole), self.comm, 1)
        return rows + identity_all_reduce(bias, self.comm)
