"""Copies of the parameters on many devices (chapter 02)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def get_params(params: Iterable[Tensor], device) -> list[Tensor]:
    """Independent copies of parameters on a device, each a leaf that collects its own gradient.

    Copies are made even where the parameters already are on that device; `.to` alone would return
    the very same tensors.
    """
    return [p.detach().to(device, copy=True).requires_grad_() for p in params]


def replicate(module: nn.Module, devices: Sequence) -> list[nn.Module]:
    """A copy of a module for each device, all equal to it and independent of it."""
    return [copy.deepcopy(module).to(device) for device in devices]


@torch.no_grad()
def broadcast_parameters(replicas: Sequence[nn.Module]) -> None:
    """Make all replicas equal to the first, in place: parameters, frozen ones too, and buffers."""
    source = replicas[0].state_dict()
    for replica in replicas[1:]:
        for name, tensor in replica.state_dict().items():
            tensor.copy_(source[name])
