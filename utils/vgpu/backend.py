"""`torch.vgpu`: the device module that PyTorch asks about virtual GPUs, like `torch.cuda`."""

from __future__ import annotations

import types

import torch

from .placing import device_at, no_cluster, state


def _machine():
    if state.machine is None:
        raise no_cluster()
    return state.machine


def _device(device=None):
    _machine()
    if device is None:
        return device_at(state.current)
    index = device if isinstance(device, int) else torch.device(device).index
    return device_at(state.current if index is None else index)


def is_available() -> bool:
    """Whether a virtual cluster is in use."""
    return state.machine is not None


def is_initialized() -> bool:
    return state.machine is not None


def device_count() -> int:
    """The number of virtual GPUs."""
    return 0 if state.machine is None else len(state.visible)


def current_device() -> int:
    """The index of the device that "vgpu" without an index means."""
    return state.current


def set_device(device) -> None:
    """Choose the device that "vgpu" without an index means."""
    state.current = _device(device).number


class device:
    """Context manager: another current device inside."""

    def __init__(self, device):
        self.number = _device(device).number

    def __enter__(self):
        self.previous, state.current = state.current, self.number

    def __exit__(self, *_):
        state.current = self.previous


def synchronize(device=None) -> None:
    """The host waits for everything issued so far on one device (the current one if None)."""
    _machine().synchronize([_device(device)])


def memory_allocated(device=None) -> int:
    """Bytes in use on a device."""
    return _device(device).ledger.used


def max_memory_allocated(device=None) -> int:
    """The most bytes in use on a device since its peak was last reset."""
    return _device(device).ledger.peak


def reset_peak_memory_stats(device=None) -> None:
    """Start the search for the peak again from what is in use now."""
    _device(device).ledger.reset_peak()


def empty_cache() -> None:
    """Nothing to do: freed memory is free at once."""


def get_device_name(device=None) -> str:
    """The chip's name, marked as simulated."""
    return f"{_device(device).chip.name} (simulated)"


def get_device_properties(device=None) -> types.SimpleNamespace:
    """`name` and `total_memory` in bytes."""
    return types.SimpleNamespace(
        name=get_device_name(device), total_memory=_device(device).chip.memory
    )


def manual_seed(seed: int) -> None:
    """The virtual GPUs draw from the CPU's generator, which `torch.manual_seed` seeds."""
    if state.before_random is not None:
        state.before_random()


manual_seed_all = manual_seed


def get_rng_state(device=None) -> torch.Tensor:
    """The state of the generator that the virtual GPUs draw from: the CPU's."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device=None) -> None:
    torch.set_rng_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes of `torch.autocast("vgpu")`."""
    return [torch.bfloat16, torch.float16]


def _lazy_init() -> None:
    _machine()


def _is_in_bad_fork() -> bool:
    return False
