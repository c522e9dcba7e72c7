"""What tensors answer: `.device`, `.to`, `.cpu`, `.numpy`, … know the virtual GPUs.

Operations are seen by the dispatch mode. A few questions never become operations, or are answered
by PyTorch before the mode is asked, because to PyTorch the tensor *is* on the CPU. They are
replaced here, on `torch.Tensor` itself rather than by a function mode, since function modes are not
active in autograd hooks and in custom backward functions, where `.device` and `.to` are needed too.
"""

from __future__ import annotations

import functools

import torch

from . import placing
from .placing import CPU, Tensor, block_of, here, on_device, place_of, place_of_device, put, state
from .special import fetch


class Move(torch.autograd.Function):
    """A copy to another place; the gradient takes the way back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor, target, dtype, non_blocking, memory_format):
        return move(tensor, target, dtype, non_blocking, memory_format)

    @staticmethod
    def setup_context(ctx, inputs, output):
        tensor, _, _, ctx.non_blocking, _ = inputs
        ctx.source, ctx.dtype = place_of(tensor), tensor.dtype

    @staticmethod
    def backward(ctx, gradient):
        back = Move.apply(gradient, ctx.source, ctx.dtype, ctx.non_blocking, None)
        return back, None, None, None, None


def move(tensor, target, dtype=None, non_blocking=False, memory_format=None):
    """Copy a tensor to a place, outside autograd."""
    here.target = target
    try:
        return torch.ops.aten._to_copy.default(
            tensor, dtype=dtype, non_blocking=non_blocking, memory_format=memory_format
        )
    finally:
        here.target = None


def moved(tensor, target, dtype=None, non_blocking=False, memory_format=None):
    """Copy a tensor to a place, with autograd where it needs a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        return Move.apply(tensor, target, dtype, non_blocking, memory_format)
    return move(tensor, target, dtype, non_blocking, memory_format)


def replaces(original):
    """The replacement steps aside while no virtual cluster is in use."""

    def decorate(replacement):
        @functools.wraps(original)
        def method(*args, **kwargs):
            if state.machine is None:
                return original(*args, **kwargs)
            return replacement(original, *args, **kwargs)

        return method

    return decorate


_device = Tensor.device


def device(self) -> torch.device:
    """The device a tensor is on: a virtual GPU where its storage says so."""
    try:
        block = self.untyped_storage().block
    except (AttributeError, NotImplementedError, ValueError):
        block = block_of(self)
    if block is None or block.place.index < 0 or here.computing or state.machine is None:
        return _device.__get__(self)
    return block.place.torch_device


_grad = Tensor.grad


def set_grad(self, grad) -> None:
    """`x.grad = gradient`, which has to be on the device of `x`."""
    if isinstance(grad, Tensor) and state.machine is not None and grad.device != self.device:
        raise RuntimeError(
            "assigned grad has data located on a different device: the tensor is on "
            f"{self.device}, its gradient on {grad.device}"
        )
    _grad.__set__(self, grad)


def lazy_moved(tensor, target):
    """Move what a lazy module's parameter or buffer has so far: the place where it will be."""
    with torch._C.DisableTorchFunctionSubclass():
        copy = move(tensor.detach().as_subclass(Tensor), target)
        is_buffer = isinstance(tensor, torch.nn.parameter.UninitializedBuffer)
        return copy.as_subclass(type(tensor)) if is_buffer else copy


@replaces(Tensor.to)
def to(original, self, *args, **kwargs):
    wanted, dtype, non_blocking, copy, memory_format = parse_to(*args, **kwargs)
    if wanted is None or not (wanted.type == "vgpu" or (wanted == CPU and on_device(self))):
        if isinstance(args[0] if args else kwargs.get("other"), Tensor):
            return original(self, dtype, non_blocking, copy, memory_format=memory_format)
        return original(self, *args, **kwargs)
    target = place_of_device(wanted)
    if torch.nn.parameter.is_lazy(self):
        return lazy_moved(self, target)
    same_dtype = dtype is None or dtype == self.dtype
    same_layout = memory_format in (None, torch.preserve_format) or self.is_contiguous(
        memory_format=memory_format
    )
    if place_of(self) is target:
        if same_dtype and same_layout and not copy:
            return self
        return original(self, dtype or self.dtype, non_blocking, True, memory_format=memory_format)
    return moved(self, target, dtype, non_blocking, memory_format)


def parse_to(*args, device=None, dtype=None, non_blocking=False, copy=False, memory_format=None,
             other=None):  # fmt: skip
    """`Tensor.to`'s arguments, in any of its three forms: (device, dtype, non_blocking, copy, …).

    The last one is the memory format.
    """
    if args and isinstance(args[0], Tensor):
        other, args = args[0], args[1:]
    if other is not None:
        device, dtype, args = other.device, other.dtype, (None, None, *args)
    elif args and isinstance(args[0], torch.dtype):
        args = (None, *args)
    given = dict(zip(("device", "dtype", "non_blocking", "copy"), args))
    device = device if given.get("device") is None else given["device"]
    dtype = dtype if given.get("dtype") is None else given["dtype"]
    non_blocking = given.get("non_blocking", non_blocking)
    copy = given.get("copy", copy)
    if isinstance(device, int):
        device = torch.device("vgpu", device)
    if isinstance(device, str):
        device = torch.device(device)
    return device, dtype, non_blocking, copy, memory_format


@replaces(Tensor.cpu)
def cpu(original, self, memory_format=torch.preserve_format):
    return self.to(CPU, memory_format=memory_format)


@replaces(Tensor.copy_)
def copy_(original, self, other, non_blocking=False):
    if isinstance(other, Tensor) and other.requires_grad and torch.is_grad_enabled():
        target = place_of(self)
        if place_of(other) is not target:
            other = moved(other, target, non_blocking=non_blocking)
    return original(self, other, non_blocking)


@replaces(Tensor.numpy)
def numpy(original, self, *, force=False):
    if on_device(self):
        if not force:
            raise TypeError(
                f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        self = self.detach().cpu()
    elif not isinstance(self, torch.nn.Parameter):
        fetch(self)
    return original(self, force=force)


@replaces(Tensor.__dlpack__)
def __dlpack__(original, self, **kwargs):
    if on_device(self):
        raise BufferError(f"cannot export {self.device} memory: use Tensor.cpu() first")
    return original(self, **kwargs)


@replaces(Tensor.tolist)
def tolist(original, self):
    fetch(self)
    return original(self)


@replaces(Tensor.__repr__)
def __repr__(original, self, *, tensor_contents=None):
    if on_device(self):
        fetch(self)
    return original(self, tensor_contents=tensor_contents)


@replaces(Tensor.get_device)
def get_device(original, self):
    return block_of(self).place.number if on_device(self) else original(self)


@replaces(Tensor.pin_memory)
def pin_memory(original, self, device=None):
    """A copy in page-locked host memory, from which copies to a device are asynchronous."""
    if on_device(self):
        raise RuntimeError(f"cannot pin {self.device}: only dense CPU tensors can be pinned")
    if placing.is_pinned(self):
        return self
    pinned = self.clone()
    put(pinned, state.machine.host, "other").pinned = True
    return pinned


@replaces(Tensor.is_pinned)
def is_pinned(original, self, device=None):
    return placing.is_pinned(self)


@replaces(Tensor.requires_grad_)
def requires_grad_(original, self, requires_grad=True):
    block = block_of(self)
    if requires_grad and block is not None and block.kind == "other" and self.is_leaf:
        block.kind = "parameters"
    return original(self, requires_grad)


@replaces(Tensor.new_tensor)
def new_tensor(original, self, data, *, device=None, requires_grad=False, **kwargs):
    target = self.device if device is None else torch.device(device)
    result = original(self, data, device=CPU, **kwargs).to(target)
    return result.requires_grad_(requires_grad)


def install() -> None:
    """Replace what must be replaced, once."""
    Tensor.device = property(device)
    Tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    Tensor.grad = property(_grad.__get__, set_grad, _grad.__delete__, _grad.__doc__)
    for method in (
        to, cpu, copy_, numpy, __dlpack__, tolist, __repr__, get_device, pin_memory, is_pinned,
        requires_grad_, new_tensor,
    ):  # fmt: skip
        setattr(Tensor, method.__name__, method)
