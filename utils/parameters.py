"""Copies of the parameters on many devices (chapter 02)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


def get_params(params: Iterable[Tensor], device, dtype=None) -> list[Tensor]:
    """Independent copies of parameters on a device, each a leaf that collects its own gradient.

    A copy is made even where a parameter is there already: `.to` alone would return that very
    tensor. `dtype`, if given, is that of the copies.
    """
    return [p.detach().to(device, dtype, copy=True).requires_grad_() for p in params]


def replicate(module: nn.Module, devices: Sequence) -> list[nn.Module]:
    """A copy of a module for each device, all equal to it, independent, and without gradients."""
    return [copy.deepcopy(module).to(device) for device in devices]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All tensors of a module by name: parameters, frozen ones too, and buffers."""
    return dict([*module.named_parameters(), *module.named_buffers()])


@torch.no_grad()
def broadcast_parameters(replicas: Sequence[nn.Module]) -> None:
    """Make all replicas equal to the first, in place: parameters, frozen ones too, and buffers.

    Gradients and optimizers' states stay as they are. Raises ValueError, and changes nothing, if
    the replicas' tensors do not match.
    """
    check_replicas(replicas)
    source = tensors_of(replicas[0])
    for replica in replicas[1:]:
        for name, tensor in tensors_of(replica).items():
            tensor.copy_(source[name])


def check_replicas(replicas: Sequence[nn.Module]) -> None:
    """Raise ValueError unless all modules have tensors of the same names, shapes and dtypes."""
    if not replicas:
        raise ValueError("there are no replicas: the list is empty")
    first = describe(replicas[0])
    for position, replica in enumerate(replicas):
        found = describe(replica)
        for name in [*first, *found]:
            if first.get(name) != found.get(name):
                raise ValueError(
                    f"replica {position} does not match replica 0: {name} is "
                    f"{found.get(name, 'missing')}, in replica 0 it is {first.get(name, 'missing')}"
                )


def describe(module: nn.Module) -> dict[str, str]:
    """Shape and dtype of each tensor of a module, by name, such as "float32 (10, 128)"."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        for name, tensor in tensors_of(module).items()
    }
