"""All-reduce by one program that drives several devices, written by hand (chapter 03).

Each all-reduce takes a list of tensors, one a device, of one shape and dtype, and leaves the sum in
every one of them: in place, so that the caller's own tensors change; nothing is returned. The
tensors may be non-contiguous, empty or 0-dimensional. Sums are made in the tensors' own dtype: bool
tensors are combined by "or", which is what adding them means, and float16 and bfloat16 round after
each addition; integers narrower than 32 bits are refused, since their sums overflow.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

# --- reduce, then broadcast ---------------------------------------------------------------------


def reduce_to_root(tensors: list[Tensor], root: int = 0) -> None:
    """Add all tensors to that of the root, in place; the others keep their values."""
    total = tensors[root]
    for i, tensor in enumerate(tensors):
        if i != root:
            total += tensor.to(total.device)


def broadcast_from_root(tensors: list[Tensor], root: int = 0) -> None:
    """Overwrite all tensors with that of the root, in place."""
    for i, tensor in enumerate(tensors):
        if i != root:
            tensor.copy_(tensors[root])


def star_all_reduce(tensors: list[Tensor]) -> None:
    """Sum on the first device, then send the sum back to the others. In place."""
    check_tensors(tensors)
    reduce_to_root(tensors)
    broadcast_from_root(tensors)


def cpu_all_reduce(tensors: list[Tensor]) -> None:
    """Sum in the host's memory, then send the sum back to every device. In place."""
    check_tensors(tensors)
    total = tensors[0].to("cpu", copy=True)
    for tensor in tensors[1:]:
        total += tensor.cpu()
    for tensor in tensors:
        tensor.copy_(total)


def tree_all_reduce(tensors: list[Tensor]) -> None:
    """Sum along a binomial tree to the first device, then send the sum down the tree. In place."""
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


# --- in parts -----------------------------------------------------------------------------------


@contextlib.contextmanager
def cut(tensors: list[Tensor]):
    """`with cut(tensors) as parts:` parts[i][j] is part j of tensor i, for n tensors in n parts.

    Parts are 1-dimensional and differ by at most one element; some are empty where there are fewer
    elements than parts. They are views of a contiguous tensor. A non-contiguous one is copied and
    gets the parts' values at the end of the block.
    """
    flat = [tensor.contiguous().view(-1) for tensor in tensors]
    yield [list(torch.tensor_split(values, len(tensors))) for values in flat]
    for tensor, values in zip(tensors, flat):
        if not tensor.is_contiguous():
            tensor.copy_(values.view(tensor.shape))


def sharded_all_reduce(tensors: list[Tensor]) -> None:
    """Cut in n parts; device i sums part i, then sends it to the others. In place.

    In step s device i receives from device i + s: every device sends one part and receives one.
    """
    n = check_tensors(tensors)
    with cut(tensors) as parts:
        for step in range(1, n):
            for i in range(n):
                parts[i][i] += parts[(i + step) % n][i].to(parts[i][i].device)
        for step in range(1, n):
            for i in range(n):
                parts[(i + step) % n][i].copy_(parts[i][i])


# --- around a ring ------------------------------------------------------------------------------


def ring_reduce_step(parts: list[list[Tensor]], step: int) -> None:
    """Every device sends part i - step to its right neighbour, which adds it to its own."""
    n = len(parts)
    for i in range(n):
        right, part = (i + 1) % n, (i - step) % n
        parts[right][part] += parts[i][part].to(parts[right][part].device)


def ring_reduce_scatter(parts: list[list[Tensor]]) -> None:
    """After n - 1 steps `parts[i][(i + 1) % n]` holds the sum of everyone's part (i + 1) % n.

    In place; `parts[i]` are the n parts of device i. All other parts hold partial sums afterwards.
    """
    for step in range(len(parts) - 1):
        ring_reduce_step(parts, step)


def ring_gather_step(parts: list[list[Tensor]], step: int) -> None:
    """Every device sends part i + 1 - step to its right neighbour, which keeps it."""
    n = len(parts)
    for i in range(n):
        right, part = (i + 1) % n, (i + 1 - step) % n
        parts[right][part].copy_(parts[i][part])


def ring_all_gather(parts: list[list[Tensor]]) -> None:
    """Pass each finished part `parts[i][(i + 1) % n]` around the ring until all have it. In place.

    This is where `ring_reduce_scatter` leaves off.
    """
    for step in range(len(parts) - 1):
        ring_gather_step(parts, step)


def ring_all_reduce(tensors: list[Tensor]) -> None:
    """Reduce-scatter, then all-gather around the ring in which the tensors are listed. In place.

    Each device sends 2(n-1) parts of 1/n. In no algorithm does the busiest device send less
    (Patarasuk & Yuan, 2009).
    """
    check_tensors(tensors)
    with cut(tensors) as parts:
        ring_reduce_scatter(parts)
        ring_all_gather(parts)


# --- besides ------------------------------------------------------------------------------------


def all_gather(tensors: list[Tensor]) -> list[Tensor]:
    """Everyone's tensors, joined along the first dimension, on every device: a new list.

    0-dimensional tensors, such as losses, become one vector. Lengths may differ.
    """
    rows = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]
    return [torch.cat([row.to(tensor.device) for row in rows]) for tensor in tensors]


def check_tensors(tensors: list[Tensor]) -> int:
    """The number of tensors, if they can be summed; else a ValueError or TypeError says why not.

    Checked before anything is sent, so that nothing is modified by a call that fails.
    """
    if not tensors:
        raise ValueError("an all-reduce needs at least one tensor; the list is empty")
    for position, tensor in enumerate(tensors):
        _check_one(position, tensor)
    for what in ("shape", "dtype"):
        found = [tuple(t.shape) if what == "shape" else t.dtype for t in tensors]
        if len(set(found)) > 1:
            listed = ", ".join(f"{position}: {value}" for position, value in enumerate(found))
            raise ValueError(f"all tensors need one {what}, but they have {listed}")
    places = [(id(t.untyped_storage()), t.storage_offset()) for t in tensors]
    for position, place in enumerate(places):
        if (first := places.index(place)) < position and tensors[position].numel():
            raise ValueError(
                f"tensors {first} and {position} are the same memory, so that one overwrites the "
                "other; `.to` makes no copy where the tensor already is: use .to(device, copy=True)"
            )
    return len(tensors)


def _check_one(position, tensor):
    if tensor is None:
        raise ValueError(f"tensor {position} is None: was backward() called on every replica?")
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"tensor {position} is sparse; these collectives sum dense tensors. Build the "
            "embedding with sparse=False, or call .to_dense() on its gradient"
        )
    if tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16):
        raise TypeError(
            f"tensor {position} is {tensor.dtype}, whose sums overflow silently; convert all to "
            "torch.int32 first"
        )
    if tensor.requires_grad:
        raise TypeError(
            f"tensor {position} requires a gradient, as parameters do; pass its .grad, or its "
            ".detach(), which is the same memory, if you mean the tensor itself"
        )
    strides = zip(tensor.shape, tensor.stride())
    if tensor.numel() and any(size > 1 and stride == 0 for size, stride in strides):
        raise ValueError(
            f"tensor {position} is expanded: several of its elements are one place in memory and "
            "cannot be written one by one; pass its .clone()"
        )
