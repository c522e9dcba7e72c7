"""Memory on a virtual GPU for the C++ of PyTorch that asks for it past the mode.

So `from torch import tensor`, taken before there was a cluster, can still make tensors on a device,
and where there is no cluster the error says so.
"""

from __future__ import annotations

import torch

from . import private
from .placing import CPU, place_of_device, put


def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """`aten::empty.memory_format` of the device "vgpu"."""
    place = place_of_device(device)
    memory_format = memory_format or torch.contiguous_format
    result = torch.empty(size, dtype=dtype, device=CPU, memory_format=memory_format)
    put(result, place, "other")
    return result


def empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    """`aten::empty_strided` of the device "vgpu"."""
    place = place_of_device(device)
    result = torch.empty_strided(size, stride, dtype=dtype, device=CPU)
    put(result, place, "other")
    return result


def install() -> None:
    """Tell PyTorch of them."""
    private.implement("empty.memory_format", empty)
    private.implement("empty_strided", empty_strided)
