"""Every private name of PyTorch that the virtual GPUs rely on, in one place.

A release that moves one of them breaks this file alone. `TESTED` is the range of releases that the
tests have passed with.
"""

from __future__ import annotations

import ctypes
import functools
import sys

import torch

TESTED = ("2.13.0", "2.14.1")

try:
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _get_current_dispatch_mode_stack,
        _pop_mode,
        _push_mode,
    )
    from torch.utils.flop_counter import flop_registry

    # Whether a tensor is one that `vmap`, `grad` and the like wrap, and what it wraps.
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    unwrapped = torch._C._functorch.get_unwrapped
    # The number of the backward pass that runs in this thread; -1 outside one.
    graph_task_id = torch._C._current_graph_task_id
    no_dispatch = torch._C._DisableTorchDispatch
    _ENGINE = torch.autograd.graph._engine_run_backward.__code__
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"the virtual GPUs rely on private names of PyTorch, and torch {torch.__version__} lacks "
        f"one ({error}); they were tested with torch {TESTED[0]} to {TESTED[1]}"
    ) from error

Generator = torch.Generator  # a class of the core, which `functions` replaces by one of its own


def register_device_module(name: str, module) -> None:
    """Make `torch.device(name)` valid and `torch.<name>` this module."""
    torch.utils.rename_privateuse1_backend(name)
    torch._register_device_module(name, module)


def sees(cls: type) -> bool:
    """Whether a mode of a class is active in this thread."""
    return any(isinstance(mode, cls) for mode in _get_current_dispatch_mode_stack())


def enter_below_others(mode: TorchDispatchMode) -> None:
    """Enter a mode for good: below those that are active now, since each takes off the topmost."""
    above = []
    while (modes := _get_current_dispatch_mode_stack()) and not hasattr(modes[-1], "_mode_key"):
        above.append(_pop_mode())
    mode.__enter__()
    for other in reversed(above):
        _push_mode(other)


def replace_in_core(replacing, **replacements) -> None:
    """Replace functions of `torch._C` by `replacing(original, replacement)`, None if not there."""
    for name, replacement in replacements.items():
        setattr(torch._C, name, replacing(getattr(torch._C, name, None), replacement))


@functools.cache
def leave_uncompiled(mode: type) -> None:
    """Keep `torch.compile` from compiling what a mode does, which runs while its code runs."""
    mode.__torch_dispatch__ = torch._disable_dynamo(mode.__torch_dispatch__, recursive=True)


_LIBRARY = torch.library.Library("aten", "IMPL")


def implement(name: str, kernel) -> None:
    """Make a Python function the kernel of an operation on the device "vgpu"."""
    _LIBRARY.impl(name, kernel, "PrivateUse1")


def is_composite(op) -> bool:
    """Whether an operation is defined by other operations, which do the work."""
    key = "CompositeImplicitAutograd"
    return op.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def flop_formula(packet):
    """PyTorch's FLOP formula for an operation, taking shapes; None where it has none."""
    aten = torch.ops.aten
    # The fused attention of the CPU stands for the GPU's: the same products, the same formula.
    packet = {
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            aten._scaled_dot_product_flash_attention_backward
        ),
    }.get(packet, packet)
    registered = flop_registry.get(packet)
    return None if registered is None else registered.__wrapped__


_BETWEEN = ("_compile.py", "eval_frame.py", "_python_dispatch.py", "dispatch.py")


def called_by_autograd() -> bool:
    """Whether the operation being dispatched was issued by a backward formula of PyTorch's own.

    Then no Python code, such as a hook, stands between it and the autograd engine.
    """
    if graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the elements of one CPU tensor into another, unseen by autograd and by the modes."""
    if source.is_contiguous() and target.is_contiguous():
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return
    with no_dispatch(), torch.no_grad():
        torch.ops.aten.copy_.default(target, source.reshape(target.shape))


def rebuild_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A new storage of the same size, on the CPU, with nothing in it yet."""
    return type(storage)(storage.nbytes(), device=storage.device)
