"""Functions of PyTorch's that no mode sees, or whose C++ asks for the CPU, on virtual GPUs.

Makers of tensors from data (`torch.tensor`), `torch.Generator`, `torch.autocast`, the grouping of
an optimizer's tensors by device, and a few functions that make tensors of their own on the way.
"""

from __future__ import annotations

import functools
import sys

import torch

from . import private
from .dispatch import VirtualGPUMode
from .placing import CPU, GENERATORS, Tensor, device_at, here, on_device, place_of, state


def default_device() -> torch.device:
    """Where a new tensor would be now. `torch.get_default_device` may ask `torch.tensor` itself."""
    return torch.empty(0).device


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
            device = data.device if isinstance(data, Tensor) else default_device()
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


def from_parts(original, *names: str):
    """Wrap a maker of sparse tensors from parts of these names, the last being the values."""

    @functools.wraps(original)
    def make(*args, device=None, **kwargs):
        if state.machine is None:
            return original(*args, device=device, **kwargs)
        parts = dict(zip(names, args))
        parts.update((name, kwargs[name]) for name in names if name in kwargs)
        if device is None and isinstance(parts.get("values"), Tensor):
            device = parts["values"].device
        device = default_device() if device is None else torch.device(device)
        if device.type != "vgpu":
            return original(*args, device=device, **kwargs)
        if "values" not in parts:  # an empty one of a given size
            return original(*args, device=CPU, **kwargs).to(device)
        parts = [torch.as_tensor(parts[name], device=device) for name in names]
        others = {name: value for name, value in kwargs.items() if name not in names}
        return original(*parts, *args[len(names) :], **others)

    return make


def at_home(original):
    """Wrap a function whose C++ makes tensors on "the CPU", where it believes its operands are."""

    @functools.wraps(original)
    def function(tensor, *args, **kwargs):
        if state.machine is None or not (isinstance(tensor, Tensor) and on_device(tensor)):
            return original(tensor, *args, **kwargs)
        outer, here.home = here.home, place_of(tensor)
        try:
            return original(tensor, *args, **kwargs)
        finally:
            here.home = outer

    return function


def pad_packed_sequence(original):
    """Wrap it so: the second result, the lengths, stays on the host."""

    @functools.wraps(original)
    def pad(data, *args):
        padded, lengths = at_home(original)(data, *args)
        lengths.untyped_storage().block = None
        return padded, lengths

    return pad


class AnyGenerator(type(private.Generator)):
    """What makes every generator of PyTorch's an instance of the class below."""

    def __instancecheck__(cls, instance):
        return isinstance(instance, private.Generator)


class Generator(private.Generator, metaclass=AnyGenerator):
    """`torch.Generator` that can also belong to a virtual GPU; it draws the CPU's numbers."""

    def __new__(cls, device="cpu"):
        wanted = torch.device("vgpu", device) if isinstance(device, int) else torch.device(device)
        virtual = wanted.type == "vgpu"
        if virtual:
            wanted = device_at(state.current if wanted.index is None else wanted.index).torch_device
        generator = super().__new__(cls, CPU if virtual else wanted)
        generator._virtual = wanted if virtual else None
        if virtual:
            GENERATORS.add(generator._cdata)
        return generator

    @property
    def device(self):
        return self._virtual or super().device

    def clone_state(self):
        return Generator(self.device).set_state(self.get_state())

    def __reduce__(self):
        return Generator, (str(self.device),), super().__reduce__()[2]

    def __del__(self):
        GENERATORS.discard(self._cdata)


def autocast(original):
    """`torch.autocast("vgpu")` casts what `torch.autocast("cpu")` does, to bfloat16 by default."""

    @functools.wraps(original)
    def __init__(self, device_type, *args, **kwargs):
        original(self, "cpu" if device_type == "vgpu" else device_type, *args, **kwargs)

    return __init__


def compile(original):
    """`torch.compile`, which leaves code for virtual GPUs as it is."""

    @functools.wraps(original)
    def compile(model=None, **options):
        if state.machine is None:
            return original(model, **options)
        return (lambda model: model) if model is None else model

    return compile


def group_by_device(original):
    """Group tensors by device and dtype, as optimizers do to update many in one call."""

    @functools.wraps(original)
    def group(tensorlistlist, with_indices=False):
        groups = original(tensorlistlist, True)
        found = {}
        for (_, dtype), (lists, indices) in groups.items():
            for row, tensor in enumerate(lists[0]):
                into, numbers = found.setdefault((tensor.device, dtype), ([[] for _ in lists], []))
                numbers.append(indices[row])
                for tensors, values in zip(into, lists):
                    tensors += values[row : row + 1]
        return found

    return group


def install() -> None:
    """Replace what must be replaced, once."""
    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, from_data(getattr(torch, name)))
    torch.sparse_coo_tensor = from_parts(torch.sparse_coo_tensor, "indices", "values")
    torch.sparse_csr_tensor = from_parts(
        torch.sparse_csr_tensor, "crow_indices", "col_indices", "values"
    )
    functional = torch.nn.functional
    for owner, names in (
        (torch, ("quantile", "nanquantile")),
        (Tensor, ("quantile", "nanquantile")),
        (torch.linalg, ("matrix_rank",)),
        (torch.sparse, ("mm",)),
        (functional, ("one_hot", "scaled_dot_product_attention", "pad")),
    ):
        for name in names:
            setattr(owner, name, at_home(getattr(owner, name)))
    torch._VF._pad_packed_sequence = pad_packed_sequence(torch._VF._pad_packed_sequence)
    torch.Generator = Generator
    torch.compile = compile(torch.compile)
    if "torch._dynamo" in sys.modules:  # there may be compiled functions already
        private.leave_uncompiled(VirtualGPUMode)
    torch.autocast.__init__ = autocast(torch.autocast.__init__)
    private.replace_in_core(
        lambda original, wrap: wrap(original), _group_tensors_by_device_and_dtype=group_by_device
    )
