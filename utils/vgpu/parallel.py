"""Threads, `torch.accelerator` and `torch.nn.DataParallel` on virtual GPUs.

PyTorch's own versions rest on C++ that only real GPUs have. These do the same in Python, from
copies that the virtual GPUs see; `parallel_apply` runs the replicas one after the other, since the
one simulated host issues their work in that order anyway.
"""

from __future__ import annotations

import functools
import sys
import threading

import torch
from torch._utils import (
    _flatten_dense_tensors,
    _get_device_index,
    _reorder_tensors_as,
    _take_tensors,
    _unflatten_dense_tensors,
)
from torch.cuda import nccl
from torch.nn.parallel import comm
from torch.nn.parallel._functions import Scatter

from . import backend, private
from .dispatch import VirtualGPUMode
from .placing import state


def start(original):
    """`Thread.start`: a mode is a thread's own, so each new thread enters it too."""

    @functools.wraps(original)
    def start(thread):
        if state.machine is not None:
            run = thread.run

            def run_inside():
                with VirtualGPUMode():
                    run()

            thread.run = run_inside
        original(thread)

    return start


def broadcast(tensor, devices):
    return tuple(tensor.to(device) for device in devices)


def broadcast_coalesced(tensors, devices, buffer_size):
    """Copies on each device, sent in buffers of many tensors; the first has the tensors' memory."""
    copies = [[] for _ in devices[1:]]
    for chunk in _take_tensors(tensors, buffer_size):
        flat = _flatten_dense_tensors(chunk)
        for device, found in zip(devices[1:], copies):
            found += _unflatten_dense_tensors(flat.to(device), chunk)
    return [
        [tensor.detach() for tensor in tensors],
        *(list(_reorder_tensors_as(found, tensors)) for found in copies),
    ]


def scatter(tensor, devices, chunk_sizes, dim, streams=None):
    parts = tensor.split(list(chunk_sizes), dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return [part.to(device, non_blocking=True) for part, device in zip(parts, devices)]


def gather(tensors, dim, destination):
    """One tensor on the device of that number, or on the CPU if it is -1 or None."""
    device = "cpu" if destination in (-1, None) else torch.device("vgpu", destination)
    shape = list(tensors[0].shape)
    sizes = [tensor.shape[dim] for tensor in tensors]
    shape[dim] = sum(sizes)
    result = torch.empty(shape, dtype=tensors[0].dtype, device=device)
    for part, tensor in zip(result.split(sizes, dim), tensors):
        part.copy_(tensor, non_blocking=True)
    return result


def scatter_forward(ctx, target_gpus, chunk_sizes, dim, input):
    """`Scatter.forward` without the side streams on which PyTorch copies from the host."""
    ctx.dim = dim
    ctx.input_device = input.get_device() if input.device.type != "cpu" else -1
    return comm.scatter(input, target_gpus, chunk_sizes, dim)


def parallel_apply(modules, inputs, kwargs_tup=None, devices=None):
    """Apply each module to its inputs, on its device."""
    outputs = []
    for i, (module, args) in enumerate(zip(modules, inputs)):
        args = args if isinstance(args, (list, tuple)) else (args,)
        kwargs = kwargs_tup[i] if kwargs_tup else {}
        with torch.accelerator.device_index(_get_device_index(devices[i]) if devices else None):
            outputs.append(module(*args, **kwargs))
    return outputs


def without_nccl(tensors) -> bool:
    """`nccl.is_available`, which would warn on a PyTorch without it."""
    return False


def exchange_device(index: int) -> int:
    previous, state.current = state.current, backend._device(index).number
    return previous


def synchronize(index: int) -> None:
    backend.synchronize(None if index < 0 else index)


def while_virtual(original, replacement):
    """A function that takes the replacement's way while a virtual cluster is in use."""

    @functools.wraps(replacement)
    def function(*args, **kwargs):
        if state.machine is not None:
            return replacement(*args, **kwargs)
        if original is None:
            raise RuntimeError(f"PyTorch has no {replacement.__name__} here: it needs real GPUs")
        return original(*args, **kwargs)

    return function


def install() -> None:
    """Replace what must be replaced, once."""
    threading.Thread.start = start(threading.Thread.start)
    private.replace_in_core(
        while_virtual,
        _broadcast=broadcast,
        _broadcast_coalesced=broadcast_coalesced,
        _scatter=scatter,
        _gather=gather,
        _accelerator_getDeviceIndex=backend.current_device,
        _accelerator_setDeviceIndex=backend.set_device,
        _accelerator_exchangeDevice=exchange_device,
        _accelerator_maybeExchangeDevice=exchange_device,
        _accelerator_synchronizeDevice=synchronize,
    )
    nccl.is_available = while_virtual(nccl.is_available, without_nccl)
    Scatter.forward = staticmethod(while_virtual(Scatter.forward, scatter_forward))
    for name in ("", ".parallel_apply", ".data_parallel"):
        module = sys.modules["torch.nn.parallel" + name]
        module.parallel_apply = while_virtual(torch.nn.parallel.parallel_apply, parallel_apply)
