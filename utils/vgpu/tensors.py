"""What tensors answer: `.device`, `.to`, `.cpu`, `.numpy`, … know the virtual GPUs.

Operations are seen by the dispatch mode. A few questions never become operations, or are answered
by PyTorch before the mode is asked, because to PyTorch the tensor *is* on the CPU. They are replaced
here, on `torch.Tensor` itself rather than by a function mode, since function modes are not active
in autograd hooks and in custom backward functions, where `.device` and `.to` are needed too.
"""

from __future__ import annotations

import functools

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from . import dispatch, private
from .dispatch import (
    CPU, block_of, device_at, fetch, place_of, place_of_device, put, state
)  # fmt: skip
from .memory import Block

Tensor = torch.Tensor
aten = torch.ops.aten


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on a virtual GPU."""
    block = block_of(tensor)
    return block is not None and block.place.index >= 0


class Move(torch.autograd.Function):
    """A copy to another place; the gradient takes the way back."""

    @staticmethod
    def forward(ctx, tensor, target, dtype, non_blocking, memory_format):
        ctx.source = place_of(tensor), tensor.dtype, non_blocking
        return move(tensor, target, dtype, non_blocking, memory_format)

    @staticmethod
    def backward(ctx, gradient):
        source, dtype, non_blocking = ctx.source
        return Move.apply(gradient, source, dtype, non_blocking, None), None, None, None, None


def move(tensor, target, dtype=None, non_blocking=False, memory_format=None):
    """Copy a tensor to a place, outside autograd."""
    state.target = target
    try:
        return aten._to_copy.default(
            tensor, dtype=dtype, non_blocking=non_blocking, memory_format=memory_format
        )
    finally:
        state.target = None


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
    except (AttributeError, NotImplementedError):
        block = block_of(self)
    if block is None or block.place.index < 0 or state.computing:
        return _device.__get__(self)
    return block.place.torch_device


@replaces(Tensor.to)
def to(original, self, *args, **kwargs):
    wanted, dtype, non_blocking, copy, memory_format = parse_to(*args, **kwargs)
    if wanted is None or not (wanted.type == "vgpu" or (wanted == CPU and on_device(self))):
        if isinstance(args[0] if args else kwargs.get("other"), Tensor):
            return original(self, dtype, non_blocking, copy, memory_format=memory_format)
        return original(self, *args, **kwargs)
    target = place_of_device(wanted)
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
    if dispatch.is_pinned(self):
        return self
    pinned = self.clone()
    put(pinned, state.machine.host, "other").pinned = True
    return pinned


@replaces(Tensor.is_pinned)
def is_pinned(original, self, device=None):
    return dispatch.is_pinned(self)


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


def one_hot(original):
    """`one_hot`, whose zeros PyTorch would make on the CPU."""

    @functools.wraps(original)
    def one_hot(tensor, num_classes=-1):
        if not on_device(tensor):
            return original(tensor, num_classes)
        classes = num_classes if num_classes >= 0 else int(tensor.max()) + 1
        return (tensor.unsqueeze(-1) == torch.arange(classes, device=tensor.device)).long()

    return one_hot


def attention(original):
    """`scaled_dot_product_attention`, whose causal mask PyTorch would make on the CPU."""

    @functools.wraps(original)
    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        if is_causal and dropout_p > 0 and attn_mask is None and on_device(query):
            size = query.shape[-2], key.shape[-2]
            attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
            is_causal = False
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    return attention


def from_data(original):
    """Wrap a function that makes a tensor from data, such as `torch.tensor`."""

    @functools.wraps(original)
    def make(*args, device=None, requires_grad=False, pin_memory=False, **kwargs):
        if state.machine is None:
            if device is not None:
                kwargs["device"] = device
            if pin_memory:
                kwargs["pin_memory"] = True
            if requires_grad:
                kwargs["requires_grad"] = True
            return original(*args, **kwargs)
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if device is None:
            device = data.device if isinstance(data, Tensor) else torch.get_default_device()
        device = torch.device(device) if not isinstance(device, torch.device) else device
        if isinstance(data, Tensor) and on_device(data):
            if original.__name__ == "tensor":
                result = data.detach().clone().to(device, kwargs.get("dtype"))
            else:
                result = data.to(device, kwargs.get("dtype"))
        elif device.type == "vgpu":
            result = original(*args, device=CPU, **kwargs).to(device)
        else:
            result = original(*args, device=device, **kwargs)
        if pin_memory:
            result = result.pin_memory()
        return result.requires_grad_() if requires_grad else result

    return make


class Generator(torch.Generator):
    """`torch.Generator` that can also belong to a virtual GPU; it draws the CPU's numbers."""

    def __new__(cls, device="cpu"):
        wanted = torch.device(device)
        virtual = wanted.type == "vgpu"
        if virtual:
            wanted = device_at(state.current if wanted.index is None else wanted.index).torch_device
        generator = super().__new__(cls, CPU if virtual else wanted)
        generator._virtual = wanted if virtual else None
        return generator

    @property
    def device(self):
        return self._virtual or super().device


def clone_storage(original):
    """`UntypedStorage.clone`, which `copy.deepcopy` uses: the copy is where the original is."""

    @functools.wraps(original)
    def clone(storage):
        block = getattr(storage, "block", None)
        if block is None or state.machine is None:
            return original(storage)
        new = private.rebuild_storage(storage)
        new.block = Block(block.place, block.nbytes, block.kind, block.label)
        return new.copy_(storage)

    return clone


def tag_storage(storage) -> str | None:
    """Where `torch.save` notes that a storage was."""
    block = getattr(storage, "block", None)
    return None if block is None or block.place.index < 0 else str(block.place.torch_device)


def restore_storage(storage, location):
    """Put a storage that `torch.load` has read on the virtual GPU it was saved from."""
    if not location.startswith("vgpu"):
        return None
    if state.machine is None:
        raise RuntimeError(
            f"this file's tensors were saved from {location}, and there is no virtual cluster now: "
            'make a Cluster first, or load with map_location="cpu"'
        )
    place = place_of_device(torch.device(location))
    storage.block = block = Block(place, storage.nbytes(), "other", ("loaded",))
    state.machine.copy("load", storage.nbytes(), state.machine.host, place, None, block, waits=True)
    return storage


def label_parameter(module, name, parameter):
    label(parameter, "parameters")


def label_buffer(module, name, buffer):
    label(buffer, "buffers")


def label(tensor, kind: str) -> None:
    """Note what a module's tensor is for; on the host too, so that its copies inherit it."""
    if tensor is None or state.machine is None or tensor.layout is not torch.strided:
        return
    block = block_of(tensor)
    if block is None:
        put(tensor, state.machine.host, kind)
    else:
        block.kind = kind


def optimizer_begins(optimizer, args, kwargs):
    state.in_optimizer = True


def optimizer_ends(optimizer, args, kwargs):
    state.in_optimizer = False


def install() -> None:
    """Replace what must be replaced, once."""
    Tensor.device = property(device)
    Tensor.is_cpu = property(lambda self: self.device.type == "cpu")
    for method in (
        to, cpu, copy_, numpy, tolist, __repr__, get_device, pin_memory, is_pinned, requires_grad_,
        new_tensor,
    ):  # fmt: skip
        setattr(Tensor, method.__name__, method)
    for name in ("tensor", "as_tensor", "asarray", "sparse_coo_tensor"):
        setattr(torch, name, from_data(getattr(torch, name)))
    functional = torch.nn.functional
    functional.one_hot = one_hot(functional.one_hot)
    functional.scaled_dot_product_attention = attention(functional.scaled_dot_product_attention)
    torch.Generator = Generator
    torch.UntypedStorage.clone = clone_storage(torch.UntypedStorage.clone)
    torch.serialization.register_package(0, tag_storage, restore_storage)
    torch.nn.modules.module.register_module_parameter_registration_hook(label_parameter)
    torch.nn.modules.module.register_module_buffer_registration_hook(label_buffer)
    register_optimizer_step_pre_hook(optimizer_begins)
    register_optimizer_step_post_hook(optimizer_ends)
