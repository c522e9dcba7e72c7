"""All-reduces that send less than they are given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_half(all_reduce: Callable, dtype: torch.dtype = torch.float16) -> Callable:
    """The same all-reduce with values that travel, and are added, in half precision.

    What is to be averaged must have been divided before, since float16 ends at 65,504.
    """

    def all_reduce_in_half(comm, tensor: Tensor, op: str = "sum") -> None:
        half = tensor.to(dtype)
        all_reduce(comm, half, op)
        tensor.copy_(half)

    return all_reduce_in_half
