"""The mode through which every PyTorch operation passes: it places results and charges time.

Tensors of a virtual GPU are ordinary CPU tensors; the `Block` on their storage says where they
"are". For each operation, forward and backward, the mode checks that its operands are on one
device, lets PyTorch compute the result on the CPU, puts the result on that device, and charges the
work to it. Nothing is changed in the arithmetic, so results are bit for bit those of the CPU.
"""

from __future__ import annotations

import math

import torch

from . import private
from .kinds import kind_of_result
from .placing import (
    CPU,
    GENERATORS,
    Tensor,
    block_of,
    here,
    is_virtual,
    nbytes_of,
    no_cluster,
    place_of,
    place_of_device,
    put,
    rehome,
    span_of,
    state,
)
from .work import Work

HALF = (torch.float16, torch.bfloat16)


class VirtualGPUMode(private.TorchDispatchMode):
    """Sees every operation of its thread, in the forward and in the backward pass."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # costs seconds at the start; `private.leave_uncompiled` does it when needed

    def __init__(self):
        super().__init__()
        self.nested = []

    def __enter__(self):
        """Begin to see; once is enough for a thread that is inside already."""
        self.nested.append(private.sees(VirtualGPUMode))
        return self if self.nested[-1] else super().__enter__()

    def __exit__(self, *error):
        if not self.nested.pop():
            super().__exit__(*error)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        machine = state.machine
        if machine is None:
            if is_virtual(kwargs.get("device")):
                raise no_cluster()
            return op(*args, **kwargs)
        work = WORKS.get(op)
        if work is None:
            work = WORKS[op] = Work(op)
        if work.composite:  # reached whole only in inference mode: take it apart
            with self:
                return op.decompose(*args, **kwargs)
        if work.random and state.before_random is not None:
            state.before_random()
        special = SPECIAL.get(work.name)
        if special is not None:
            return special(machine, op, work, args, kwargs)
        if "device" in kwargs:
            return create(machine, op, work, args, kwargs)
        return compute(machine, op, work, args, kwargs)


WORKS: dict[object, Work] = {}
SPECIAL = {}  # operations that need care of their own, by name (see `special`)


def compute(machine, op, work, args, kwargs):
    """Run an operation where its operands are and charge it there."""
    place, stranger = None, None
    reads, writes, nbytes, needs_grad = [], [], 0, False
    for key, tensor in operands(args, kwargs):
        block = block_of(tensor)
        written = key in work.writes
        size = nbytes_of(tensor)
        if block is not None:
            if block.place.machine is not machine:
                rehome(block, machine)
            size = min(size, block.nbytes)
            (writes if written else reads).append(span_of(tensor, block, size))
        if block is None or block.place.index < 0:
            if (tensor.dim() or written or listed(args, key)) and not tensor._is_zerotensor():
                stranger = key
        elif place is None:
            place = block.place
        elif place is not block.place:
            raise different_devices(work, op, key, place, block.place)
        if tensor.requires_grad:
            needs_grad = True
            if block is not None and block._kind == "other" and tensor.is_leaf:
                block.kind = "parameters"
        if not (work.gathers or (written and work.overwrites)):
            nbytes += size
    if place is None:
        place = machine.host
    elif stranger is not None and stranger != work.from_host:
        raise different_devices(work, op, stranger, place, machine.host)
    if "generator" in kwargs:
        check_generator(kwargs["generator"], place)
    state.latest = place
    result = run(op, args, kwargs)
    for tensor in results(result):
        nbytes += nbytes_of(tensor) * (2 if work.gathers else 1)
        if place.index >= 0:
            block = block_of(tensor)
            if block is None:
                writes.append(put(tensor, place, kind_of_result(needs_grad)))
            elif work.resizes:
                block.resize(tensor.untyped_storage().nbytes())
    if work.kernel and (reads or writes or nbytes):  # else it asks PyTorch, not a processor
        flops = work.flops(args, kwargs, result)
        half = bool(flops) and args[0].dtype in HALF
        machine.compute(place, work.name, flops, nbytes, half, reads, writes)
        if work.synchronises and place.index >= 0:
            machine.advance_host(machine.host.streams[place.index])
    return result


def create(machine, op, work, args, kwargs):
    """Run an operation that takes `device=`: the virtual device gets the result."""
    kwargs = dict(kwargs)
    device = kwargs["device"]
    pinned = kwargs.pop("pin_memory", False)
    tensors = [tensor for _, tensor in operands(args, kwargs)]
    if device is None:
        place = place_of(tensors[0]) if tensors else machine.host
    elif device.type == "cpu" and here.home is not None:
        place = here.home
    elif device.type == "cpu" and private.called_by_autograd():
        # A backward formula asks for the device that PyTorch believes its tensors to be on.
        place = place_of(tensors[0]) if tensors else latest_place(machine)
    else:
        place = place_of_device(device)
    kwargs["device"] = CPU if device is None or device.type == "vgpu" else device
    if "generator" in kwargs:
        check_generator(kwargs["generator"], place)
    if place.index >= 0 and args and isinstance(args[0], (list, tuple)):
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        place.ledger.check_room(math.prod(args[0]) * dtype.itemsize)
    like = [span for tensor in tensors if (span := span_of(tensor))]
    result = run(op, args, kwargs)
    if place.index >= 0:
        blocks = [put(result, place, kind_of_result(False))]
    else:
        blocks = [put(result, place, "other")] if pinned else []
        for block in blocks:
            block.pinned = True
    if work.kernel:
        machine.compute(place, work.name, 0, nbytes_of(result), False, like, blocks)
    return result


def run(op, args, kwargs):
    """Let PyTorch work out the result, on the CPU or, in shape-only mode, without data."""
    outer, here.computing = here.computing, True
    try:
        return op(*args, **kwargs)
    finally:
        here.computing = outer


def operands(args, kwargs):
    """The tensors among an operation's arguments, each with its position or name."""
    found = []
    for key, value in enumerate(args):
        if isinstance(value, Tensor):
            found.append((key, value))
        elif isinstance(value, (list, tuple)):
            found.extend((key, item) for item in value if isinstance(item, Tensor))
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            found.append((key, value))
        elif isinstance(value, (list, tuple)):
            found.extend((key, item) for item in value if isinstance(item, Tensor))
    return found


def results(result):
    """The tensors that an operation returned."""
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in results(item)]
    return ()


def listed(args, key) -> bool:
    """Whether an operand stands in a list, where numbers of the host are not let pass."""
    return isinstance(key, int) and isinstance(args[key], (list, tuple))


def latest_place(machine):
    """Where the latest operation ran, on the machine that is now in use."""
    place = state.latest
    if place is None or place.machine is not machine:
        return machine.host
    return place


def check_generator(generator, place) -> None:
    """Raise PyTorch's error for a generator of another device type than that of the result."""
    if generator is None:
        return
    wanted = "cpu" if place.index < 0 else "vgpu"
    found = "vgpu" if generator._cdata in GENERATORS else generator.device.type
    if found != wanted:
        raise RuntimeError(
            f"Expected a '{wanted}' device type for generator but found '{found}': make it with "
            f'torch.Generator("{wanted}")'
        )


def different_devices(work, op, key, place, other) -> RuntimeError:
    """PyTorch's error for operands on two devices, naming both and the operand."""
    name = op._schema.arguments[key].name if isinstance(key, int) else key
    first, second = (p.torch_device or CPU for p in (place, other))
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}! (argument '{name}' of aten::{work.name}). "
        "Bring one to the other's device with .to()."
    )
