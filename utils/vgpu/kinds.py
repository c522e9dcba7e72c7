"""What memory is for: parameters, gradients, activations, optimizer state, buffers or other.

PyTorch does not say, so it is told from the moment at which a tensor is made and from the module,
optimizer or backward pass that holds it. What cannot be told is "other".
"""

from __future__ import annotations

import sys

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import private
from .memory import Block
from .placing import Tensor, block_of, put, state


def kind_of_result(needs_grad: bool) -> str:
    """What a new block is for, told from the moment at which it is made."""
    if private.graph_task_id() != -1:
        return "activations" if torch.is_grad_enabled() else "gradients"
    if needs_grad and torch.is_grad_enabled():
        return "activations"
    return "optimizer" if state.in_optimizer and in_step() else "other"


def in_step() -> bool:
    """Whether the optimizer's step that was begun is under way: one that raised has no end."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is state.in_optimizer:
            return True
        frame = frame.f_back
    state.in_optimizer = None
    return False


def kind_of_copy(tensor: Tensor, block: Block | None) -> str:
    """What a copy is for: parameters and buffers stay what they are."""
    if block is not None and block.kind in ("parameters", "buffers"):
        return block.kind
    if tensor.requires_grad and tensor.is_leaf:
        return "parameters"
    return kind_of_result(tensor.requires_grad)


def label(tensor, kind: str) -> None:
    """Note what a module's tensor is for; on the host too, so that its copies inherit it."""
    if tensor is None or state.machine is None or tensor.layout is not torch.strided:
        return
    if is_lazy(tensor):  # it has no data yet
        return
    block = block_of(tensor)
    if block is None:
        put(tensor, state.machine.host, kind)
    else:
        block.kind = kind


def label_parameter(module, name, parameter):
    label(parameter, "parameters")


def label_buffer(module, name, buffer):
    label(buffer, "buffers")


def step_begins(optimizer, args, kwargs):
    state.in_optimizer = sys._getframe(1).f_code


def step_ends(optimizer, args, kwargs):
    state.in_optimizer = None


def install() -> None:
    """Be told of every module's parameters and buffers, and of every optimizer's step."""
    torch.nn.modules.module.register_module_parameter_registration_hook(label_parameter)
    torch.nn.modules.module.register_module_buffer_registration_hook(label_buffer)
    register_optimizer_step_pre_hook(step_begins)
    register_optimizer_step_post_hook(step_ends)
