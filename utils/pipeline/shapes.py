"""What travels between the pieces of a network: found once, before the first batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..ranks import Comm
from ..ranks.transports import CODES, DTYPES

MOST_DIMENSIONS = 8  # of a tensor that travels


@torch.no_grad()
def agree_on_shapes(comm: Comm, chunks: Sequence[nn.Module], X: Tensor) -> list:
    """What travels: for each piece the shape of one row, and the dtype, of what it takes.

    The last entry is what the network gives; a rank knows what concerns its own pieces, the rest is
    None. One row of X, then of zeros, passes through all pieces in evaluation mode. Every rank must
    call it. Raises ValueError where a piece does not give one tensor with as many rows.
    """
    p = comm.world_size
    shapes: list = [None] * (p * len(chunks) + 1)
    shapes[0] = tuple(X.shape[1:]), X.dtype
    for piece, chunk in zip(range(comm.rank, p * len(chunks), p), chunks):
        if piece > 0 and p > 1:
            shapes[piece] = receive_shape(comm, (piece - 1) % p)
        shape, dtype = shapes[piece]
        y = evaluate(chunk, torch.zeros((1, *shape), dtype=dtype, device=comm.device))
        if not isinstance(y, Tensor) or y.shape[:1] != (1,):
            what = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"piece {piece} makes of one row {what}; a piece must give one tensor with as many "
                "rows as it takes: cut the network elsewhere"
            )
        shapes[piece + 1] = tuple(y.shape[1:]), y.dtype
        if piece < p * len(chunks) - 1 and p > 1:
            send_shape(comm, shapes[piece + 1], (piece + 1) % p)
    return shapes


def evaluate(module: nn.Module, x: Tensor) -> Tensor:
    """A module's output without dropout and batch statistics, after which it is as it was."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        return module(x)
    finally:
        for part, mode in modes:
            part.training = mode


def send_shape(comm: Comm, shape_and_dtype: tuple, dst: int) -> None:
    shape, dtype = shape_and_dtype
    numbers = [CODES[dtype], len(shape), *shape]
    numbers += [0] * (MOST_DIMENSIONS + 2 - len(numbers))
    comm.send(torch.tensor(numbers, device=comm.device), dst)


def receive_shape(comm: Comm, src: int) -> tuple:
    numbers = torch.zeros(MOST_DIMENSIONS + 2, dtype=torch.int64, device=comm.device)
    comm.recv(numbers, src)
    code, dimensions, *shape = numbers.tolist()
    return tuple(shape[:dimensions]), DTYPES[code]
