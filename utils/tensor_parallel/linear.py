"""A linear layer cut by columns or by rows, and an MLP made of one of each.

The weight of `nn.Linear` is (outputs, inputs), and y = x Wᵀ + b: what mathematics calls a column of
Wᵀ is a row of the weight. Each layer takes its part of an unsplit one that all ranks have built
alike, so that k ranks start from the weights of one. Widths need not be divisible.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .operators import (
    all_gather_split,
    all_reduce_identity,
    identity_all_reduce,
    own_part,
    part_sizes,
)


def split_parameter(whole: Tensor, comm, dim: int) -> nn.Parameter:
    """This rank's part of a parameter, marked as such by its attribute `is_split`."""
    return own_parameter(own_part(whole.detach(), comm, dim), comm, whole.requires_grad, True)


def own_parameter(
    part: Tensor | None, comm, requires_grad: bool = True, is_split: bool = False
) -> nn.Parameter | None:
    """A parameter with a copy of these values, on this rank's device."""
    if part is None:
        return None
    copy = part.detach().to(comm.device, copy=True, memory_format=torch.contiguous_format)
    parameter = nn.Parameter(copy, requires_grad)
    parameter.is_split = is_split
    return parameter


class ColumnParallelLinear(nn.Module):
    """x (…, inputs), all of it on every rank → this rank's columns of y (…, its outputs).

    With `gather` every rank gets all of y.
    """

    def __init__(self, linear: nn.Linear, comm, gather: bool = False):
        super().__init__()
        self.comm, self.gather = comm, gather
        self.sizes = part_sizes(linear.out_features, comm.world_size)
        self.weight = split_parameter(linear.weight, comm, 0)
        self.bias = None if linear.bias is None else split_parameter(linear.bias, comm, 0)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(identity_all_reduce(x, self.comm), self.weight, self.bias)
        return all_gather_split(y, self.comm, -1, self.sizes) if self.gather else y


class RowParallelLinear(nn.Module):
    """This rank's columns of x (…, its inputs) → all of y (…, outputs) on every rank.

    Every rank has the whole bias, and it is added once: after the sum.
    """

    def __init__(self, linear: nn.Linear, comm):
        super().__init__()
        self.comm = comm
        self.weight = split_parameter(linear.weight, comm, 1)
        self.bias = own_parameter(linear.bias, comm)

    def forward(self, x: Tensor) -> Tensor:
        y = all_reduce_identity(F.linear(x, self.weight), self.comm)
        return y if self.bias is None else y + self.bias


class ParallelMLP(nn.Module):
    """Two linear layers with an activation between them: one all-reduce forward, one backward.

    The first is cut by columns and the second by rows, so that what lies between them, the widest
    tensor of all, is never put together.
    """

    def __init__(self, up: nn.Linear, down: nn.Linear, comm, activation=F.gelu):
        super().__init__()
        self.up = ColumnParallelLinear(up, comm)
        self.down = RowParallelLinear(down, comm)
        self.activation = activation

    def partial(self, x: Tensor) -> Tensor:
        """What this rank adds to the result for all of x, without any message and any bias."""
        hidden = self.activation(F.linear(x, self.up.weight, self.up.bias))
        return F.linear(hidden, self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
