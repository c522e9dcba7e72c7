"""Virtual GPUs: real PyTorch arithmetic, simulated time.

    machine.py    a host, devices and wires, each with a clock
    memory.py     what lies in each device's memory
    work.py       how many FLOPs and bytes an operation is
    placing.py    which place a tensor is on
    kinds.py      what memory is for: parameters, gradients, activations, …
    dispatch.py   the mode that sees every operation, places its result and charges its time
    special.py    operations that need care of their own: copies, reading a value
    tensors.py    `.device`, `.to` and the other questions that never become operations
    storages.py   copying, resizing, saving and loading storages
    functions.py  functions that ask PyTorch for the CPU
    fallback.py   memory for C++ that asks for it past the mode
    parallel.py   threads, `torch.accelerator`, `nn.DataParallel`
    backend.py    `torch.vgpu`, like `torch.cuda`
    private.py    the private names of PyTorch that all this relies on

What the model leaves out: kernels' own start-up and shapes (one efficiency serves all), caches,
the allocator's fragmentation and rounding, clock speeds that change, wires shared with other
traffic, and copies that slow one another or the kernels beside them.

Known limits: no streams or events of one's own; `torch.compile` leaves code as it is; autocast
casts what it casts on the CPU; the work of several threads is seen, in whatever order they come;
a result too large for its device is computed before it is refused, unless it is a new tensor or a
copy; gradients that a hook returns are not checked for their device. Nested tensors of the jagged
layout, and functions that were taken by name before the first Cluster (`from torch.nn.functional
import one_hot`) and whose C++ makes tensors on the CPU, end in the error of mixed devices.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch

from ..hardware import Server
from . import backend, fallback, functions, kinds, parallel, private, special, storages, tensors
from .dispatch import VirtualGPUMode
from .machine import Machine, Recording
from .placing import state

__all__ = ["Machine", "Recording", "VirtualGPUMode", "start", "state", "stop"]

MOST_DEVICES = 128  # that one process can name: torch.device keeps the number in 8 bits


def start(server: Server, numbers: Sequence[int] | None = None) -> Machine:
    """Make a server's GPUs the devices "vgpu:0", "vgpu:1", …; they replace earlier ones.

    `numbers` gives them other numbers, for ranks that see the devices of their own machine only.
    """
    install()
    if not private.sees(VirtualGPUMode):
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "make the first Cluster outside torch.inference_mode(), which would take the "
                "virtual GPUs along when it ends"
            )
        private.enter_below_others(VirtualGPUMode())  # this thread stays inside, in later cells too
    devices = [torch.device("vgpu", number) for number in numbers or range(server.gpus)]
    state.machine = Machine(server, devices, torch.OutOfMemoryError)
    state.visible = state.machine.devices
    state.latest = state.machine.host
    state.current = 0
    return state.machine


private.register_device_module("vgpu", sys.modules[backend.__name__])
fallback.install()


@functools.cache
def install() -> None:
    """Replace what must be replaced in PyTorch, once."""
    for module in (special, tensors, storages, functions, kinds, parallel):
        module.install()


def stop() -> None:
    """Leave every operation alone again, such as when real GPUs are used."""
    state.machine = None
