"""What travels between the ranks of a split layer: operators named by their forward and backward.

Each of them is a function of a tensor that autograd can go back through. The two that a split
layer needs first are conjugate: the one's forward is the other's backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function


def part_sizes(size: int, n: int) -> list[int]:
    """How many of `size` rows each of n ranks has: as equal as they can be, the first ones more."""
    return [size // n + (rank < size % n) for rank in range(n)]


def own_part(tensor: Tensor, comm, dim: int) -> Tensor:
    """This rank's part of a tensor that all ranks have, cut along a dimension."""
    return tensor.split(part_sizes(tensor.shape[dim], comm.world_size), dim)[comm.rank]


def summed(tensor: Tensor, comm) -> Tensor:
    """A new tensor: the sum of everyone's."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total)
    return total


def gathered(part: Tensor, comm, dim: int, sizes: Sequence[int]) -> Tensor:
    """A new tensor: everyone's parts beside each other along a dimension."""
    part = part.contiguous()
    shapes = [(*part.shape[:dim], size, *part.shape[dim + 1 :]) for size in sizes]
    parts = [part.new_empty(shape) for shape in shapes]
    comm.all_gather(parts, part)
    return torch.cat(parts, dim)


def sum_of_parts(tensor: Tensor, comm, dim: int, sizes: Sequence[int]) -> Tensor:
    """A new tensor: this rank's part of the sum of everyone's."""
    parts = [part.contiguous() for part in tensor.split(list(sizes), dim)]
    total = torch.empty_like(parts[comm.rank])
    comm.reduce_scatter(total, parts)
    return total


class IdentityAllReduce(Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.comm), None


class AllReduceIdentity(Function):
    @staticmethod
    def forward(ctx, x, comm):
        return summed(x, comm)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class AllGatherSplit(Function):
    @staticmethod
    def forward(ctx, x, comm, dim, sizes):
        ctx.arguments = comm, dim
        return gathered(x, comm, dim, sizes)

    @staticmethod
    def backward(ctx, gradient):
        comm, dim = ctx.arguments
        return own_part(gradient, comm, dim).contiguous(), None, None, None


class SplitAllGather(Function):
    @staticmethod
    def forward(ctx, x, comm, dim):
        ctx.arguments = comm, dim, part_sizes(x.shape[dim], comm.world_size)
        return own_part(x, comm, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, *ctx.arguments), None, None


class AllGatherReduceScatter(Function):
    @staticmethod
    def forward(ctx, x, comm, dim, sizes):
        ctx.arguments = comm, dim, sizes
        return gathered(x, comm, dim, sizes)

    @staticmethod
    def backward(ctx, gradient):
        return sum_of_parts(gradient, *ctx.arguments), None, None, None


class ReduceScatterAllGather(Function):
    @staticmethod
    def forward(ctx, x, comm, dim):
        ctx.arguments = comm, dim, part_sizes(x.shape[dim], comm.world_size)
        return sum_of_parts(x, *ctx.arguments)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, *ctx.arguments), None, None


class BroadcastReduce(Function):
    @staticmethod
    def forward(ctx, x, comm, src):
        ctx.arguments = comm, src
        copy = x.clone(memory_format=torch.contiguous_format)
        comm.broadcast(copy, src)
        return copy

    @staticmethod
    def backward(ctx, gradient):
        comm, src = ctx.arguments
        total = gradient.clone(memory_format=torch.contiguous_format)
        comm.reduce(total, src)
        return (total if comm.rank == src else torch.zeros_like(total)), None, None


def identity_all_reduce(x: Tensor, comm) -> Tensor:
    """Hand x on to what each rank has of a layer; the gradients that come back are summed.

    It stands before a column-parallel layer: every rank reads all of x.
    """
    return IdentityAllReduce.apply(x, comm)


def all_reduce_identity(x: Tensor, comm) -> Tensor:
    """The sum of everyone's x; each gets the sum's gradient. Stands after a row-parallel layer."""
    return AllReduceIdentity.apply(x, comm)


def all_gather_split(x: Tensor, comm, dim: int, sizes: Sequence[int]) -> Tensor:
    """Everyone's x side by side, for ranks that all go on to do the same with it.

    `sizes` are the ranks' sizes along `dim`. Going back, each takes its own part of the gradient,
    which is the same on all.
    """
    return AllGatherSplit.apply(x, comm, dim % x.dim(), sizes)


def split_all_gather(x: Tensor, comm, dim: int) -> Tensor:
    """This rank's part of an x that all have; going back, the parts' gradients side by side."""
    return SplitAllGather.apply(x, comm, dim % x.dim())


def all_gather_reduce_scatter(x: Tensor, comm, dim: int, sizes: Sequence[int]) -> Tensor:
    """Everyone's x side by side, for ranks that each go on to do something else with it.

    So their gradients differ: going back they are summed, and each gets its own part.
    """
    return AllGatherReduceScatter.apply(x, comm, dim % x.dim(), sizes)


def reduce_scatter_all_gather(x: Tensor, comm, dim: int) -> Tensor:
    """This rank's part of the sum of everyone's x; going back, the gradients side by side."""
    return ReduceScatterAllGather.apply(x, comm, dim % x.dim())


def broadcast_reduce(x: Tensor, comm, src: int) -> Tensor:
    """Rank `src`'s x on all ranks, which each do something else with it; the sum goes back to it.

    The others pass a tensor of the same shape and dtype, whose values do not count.
    """
    return BroadcastReduce.apply(x, comm, src)
