"""A convolution cut by its channels: those that it makes, or those that it reads."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .linear import own_parameter, split_parameter
from .operators import all_gather_split, all_reduce_identity, identity_all_reduce, part_sizes


class SplitConv2d(nn.Module):
    """What both have in common: a part of the weight, along a dimension."""

    def __init__(self, conv: nn.Conv2d, comm, dim: int):
        super().__init__()
        if conv.groups != 1:
            raise ValueError(f"a convolution with groups={conv.groups} is split already")
        self.comm = comm
        self.options = {"stride": conv.stride, "padding": conv.padding, "dilation": conv.dilation}
        self.weight = split_parameter(conv.weight, comm, dim)


class OutputParallelConv2d(SplitConv2d):
    """All channels of x (n, channels, height, width) in; this rank's filters' channels out.

    With `gather` every rank gets the channels of all.
    """

    def __init__(self, conv: nn.Conv2d, comm, gather: bool = False):
        super().__init__(conv, comm, 0)
        self.gather = gather
        self.sizes = part_sizes(conv.out_channels, comm.world_size)
        self.bias = None if conv.bias is None else split_parameter(conv.bias, comm, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = identity_all_reduce(x, self.comm)
        y = F.conv2d(x, self.weight, self.bias, **self.options)
        return all_gather_split(y, self.comm, 1, self.sizes) if self.gather else y


class InputParallelConv2d(SplitConv2d):
    """This rank's channels of x in; all channels out, on every rank."""

    def __init__(self, conv: nn.Conv2d, comm):
        super().__init__(conv, comm, 1)
        self.bias = own_parameter(conv.bias, comm)

    def forward(self, x: Tensor) -> Tensor:
        y = all_reduce_identity(F.conv2d(x, self.weight, **self.options), self.comm)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1)
