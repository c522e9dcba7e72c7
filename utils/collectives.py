"""All-reduce by one program that drives several devices, written by hand (chapter 03).

Each function takes a list of tensors, one a device, of one shape and dtype, and leaves the sum in
every one of them: in place, so that the caller's own tensors change; nothing is returned. The
tensors may be non-contiguous, empty or 0-dimensional. bool tensors are combined by "or", which is
what adding them means; integers narrower than 32 bits are refused, since their sums overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor


def star_all_reduce(tensors: list[Tensor]) -> None:
    """Sum on the first device, then send the sum back to the others."""
    check_tensors(tensors)
    total = tensors[0]
    for tensor in tensors[1:]:
        total += tensor.to(total.device)
    for tensor in tensors[1:]:
        tensor.copy_(total)


def cpu_all_reduce(tensors: list[Tensor]) -> None:
    """Sum in the host's memory, then send the sum back to every device."""
    check_tensors(tensors)
    total = tensors[0].to("cpu", copy=True)
    for tensor in tensors[1:]:
        total += tensor.cpu()
    for tensor in tensors:
        tensor.copy_(total)


def sharded_all_reduce(tensors: list[Tensor]) -> None:
    """Cut in as many parts as devices; device i sums part i, then sends it to the others.

    In step s device i receives from device i + s, so that in each step every device sends one part
    and receives one.
    """
    n = check_tensors(tensors)
    parts, finish = cut(tensors)
    for step in range(1, n):
        for i in range(n):
            parts[i][i] += parts[(i + step) % n][i].to(parts[i][i].device)
    for step in range(1, n):
        for i in range(n):
            parts[(i + step) % n][i].copy_(parts[i][i])
    finish()


def tree_all_reduce(tensors: list[Tensor]) -> None:
    """Sum along a binomial tree to the first device, then send the sum down the same tree."""
    n = check_tensors(tensors)
    distance = 1
    while distance < n:
        for i in range(0, n - distance, 2 * distance):
            tensors[i] += tensors[i + distance].to(tensors[i].device)
        distance *= 2
    while distance > 1:
        distance //= 2
        for i in range(0, n - distance, 2 * distance):
            tensors[i + distance].copy_(tensors[i])


def ring_all_reduce(tensors: list[Tensor]) -> None:
    """Reduce-scatter, then all-gather around the ring in which the tensors are listed.

    Each device sends 2(n-1) parts of 1/n, which no algorithm can undercut (Patarasuk & Yuan).
    """
    check_tensors(tensors)
    parts, finish = cut(tensors)
    ring_reduce_scatter(parts)
    ring_all_gather(parts)
    finish()


def ring_reduce_scatter(parts: list[list[Tensor]]) -> None:
    """After n-1 steps `parts[i][(i + 1) % n]` holds the sum of everyone's part (i + 1) % n.

    `parts[i]` are the n parts of device i. In each step every device sends one part to its right
    neighbour, which adds it to its own; the other parts hold partial sums afterwards.
    """
    n = len(parts)
    for step in range(n - 1):
        for i in range(n):
            right, part = (i + 1) % n, (i - step) % n
            parts[right][part] += parts[i][part].to(parts[right][part].device)


def ring_all_gather(parts: list[list[Tensor]]) -> None:
    """Pass each finished part `parts[i][(i + 1) % n]` around the ring until all have it."""
    n = len(parts)
    for step in range(n - 1):
        for i in range(n):
            right, part = (i + 1) % n, (i + 1 - step) % n
            parts[right][part].copy_(parts[i][part])


def cut(tensors: list[Tensor]):
    """Each tensor's elements in as many parts as there are tensors: (parts, finish).

    The parts are views wherever the tensor is contiguous; `finish()` writes the others back. Parts
    differ by at most one element; some are empty if there are fewer elements than parts.
    """
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    parts = [list(torch.tensor_split(values, len(tensors))) for values in flat]

    def finish() -> None:
        for tensor, values in zip(tensors, flat):
            if not tensor.is_contiguous():
                tensor.copy_(values.view(tensor.shape))

    return parts, finish


def check_tensors(tensors: list[Tensor]) -> int:
    """The number of tensors, if they can be summed; else a ValueError or TypeError says why not.

    Checked before anything is sent, so that nothing is modified by a call that fails.
    """
    if not tensors:
        raise ValueError("an all-reduce needs at least one tensor; the list is empty")
    for position, tensor in enumerate(tensors):
        if tensor is None:
            raise ValueError(f"tensor {position} is None: was backward() called on every replica?")
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"tensor {position} is sparse; these collectives sum dense tensors. Build the "
                "embedding with sparse=False, or call .to_dense() on its gradient"
            )
        if tensor.dtype in (torch.uint8, torch.int8, torch.int16):
            raise TypeError(
                f"sums of {tensor.dtype} overflow silently; convert to torch.int32 first"
            )
    for what in ("shape", "dtype"):
        found = [tuple(t.shape) if what == "shape" else t.dtype for t in tensors]
        if len(set(found)) > 1:
            listed = ", ".join(f"{position}: {value}" for position, value in enumerate(found))
            raise ValueError(f"all tensors need one {what}, but they have {listed}")
    return len(tensors)
