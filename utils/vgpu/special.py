"""Operations that need care of their own: copies between places, reading a value, resizing."""

from __future__ import annotations

import torch

from .dispatch import SPECIAL, compute, run
from .kinds import kind_of_copy
from .placing import (
    Tensor,
    block_of,
    here,
    is_pinned,
    nbytes_of,
    place_of,
    place_of_device,
    put,
    span_of,
    state,
)
from .work import Work


def to_copy(machine, op, work, args, kwargs):
    """`aten._to_copy`: another dtype on the same device, or a copy to another device."""
    tensor, device = args[0], kwargs.get("device")
    target, here.target = here.target, None
    if not isinstance(tensor, Tensor) or (device and device.type not in ("cpu", "vgpu")):
        return run(op, args, kwargs)
    source = place_of(tensor)
    if target is None:
        target = place_of_device(device) if device and device.type == "vgpu" else source
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if source is target:
        return compute(machine, op, work, args, kwargs)
    if tensor.is_meta:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")
    if target.index >= 0:
        dtype = kwargs.get("dtype") or tensor.dtype
        target.ledger.check_room(tensor.numel() * dtype.itemsize)
    result = run(op, args, kwargs)
    block = put(result, target, kind_of_copy(tensor, block_of(tensor)))
    non_blocking = kwargs.get("non_blocking", False)
    block.pinned = non_blocking and target is machine.host  # as PyTorch makes it
    transfer(machine, source, target, tensor, result, non_blocking)
    return result


def copy_(machine, op, work, args, kwargs):
    """`aten.copy_`: the one operation whose operands may be on two devices."""
    dst, src = args[:2]
    target, source = place_of(dst), place_of(src)
    if source is target or (source is machine.host and src.dim() == 0):
        return compute(machine, op, work, args, kwargs)
    result = run(op, args, kwargs)
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    transfer(machine, source, target, src, dst, non_blocking)
    return result


def foreach_copy_(machine, op, work, args, kwargs):
    """`aten._foreach_copy_`: many copies in one call, each between its own two devices."""
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    for dst, src in zip(*args[:2]):
        copy_(machine, torch.ops.aten.copy_.default, COPY, (dst, src, non_blocking), {})


def local_scalar(machine, op, work, args, kwargs):
    """`item`, `float`, `bool`: the host waits for the value and fetches it."""
    result = run(op, args, kwargs)
    fetch(args[0])
    return result


def resize_(machine, op, work, args, kwargs):
    """`aten.resize_`: the block takes the new size of its storage."""
    result = run(op, args, kwargs)
    block = block_of(result)
    if block is not None:
        block.resize(result.untyped_storage().nbytes())
    return result


def pack_padded_sequence(machine, op, work, args, kwargs):
    """`aten._pack_padded_sequence`: the second result, the batch sizes, stays on the host."""
    result = compute(machine, op, work, args, kwargs)
    result[1].untyped_storage().block = None
    return result


def leave_alone(machine, op, work, args, kwargs):
    """Bookkeeping of PyTorch's own that is no work of the program."""
    return run(op, args, kwargs)


def transfer(machine, source, target, tensor, result, non_blocking) -> None:
    """Charge a copy between two places; a dtype or layout change is made at the source first.

    Ordinary host memory is pageable: the host waits for such a copy whatever `non_blocking` says.
    Between devices it never waits.
    """
    src, dst = span_of(tensor), span_of(result)
    packed = tensor.layout is not torch.strided or tensor.is_contiguous()
    if tensor.dtype != result.dtype or not packed:
        blocks = [src] if src is not None else []
        machine.compute(source, "pack", 0, nbytes_of(tensor) + nbytes_of(result), False, blocks, [])
    waits = False
    if target is machine.host or source is machine.host:
        waits = not (non_blocking and is_pinned(result if target is machine.host else tensor))
    machine.copy("copy", nbytes_of(result), source, target, src, dst, waits)


def fetch(tensor: Tensor) -> None:
    """The host reads a tensor's values: it waits for them and for their copy."""
    span, machine = span_of(tensor), state.machine
    if span is None or machine is None:
        return
    place = place_of(tensor)
    if place is machine.host:
        machine.wait(span)
    else:
        machine.copy("read", nbytes_of(tensor), place, machine.host, span, None, waits=True)


COPY = Work(torch.ops.aten.copy_.default)


def install() -> None:
    """Tell the mode of them."""
    SPECIAL.update(
        _to_copy=to_copy,
        copy_=copy_,
        _foreach_copy_=foreach_copy_,
        _local_scalar_dense=local_scalar,
        _pack_padded_sequence=pack_padded_sequence,
        resize_=resize_,
        resize_as_=resize_,
        _record_function_enter_new=leave_alone,
        _record_function_exit=leave_alone,
        device=leave_alone,
        set_=leave_alone,
    )
