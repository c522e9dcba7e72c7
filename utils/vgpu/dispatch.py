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
from .machine import Device, Host, Machine
from .memory import Block, Span
from .work import Work

Tensor = torch.Tensor
CPU = torch.device("cpu")
HALF = (torch.float16, torch.bfloat16)


class State:
    """What the virtual GPUs know at the moment; there is one, `state`."""

    def __init__(self):
        self.machine: Machine | None = None  # None while no virtual cluster is in use
        self.visible: list[Device] = []  # the devices that this process can name
        self.current = 0  # the device that "vgpu" without an index means
        self.target = None  # where the copy that is being issued goes
        self.latest = None  # where the latest operation ran
        self.in_optimizer = False
        self.before_random = None  # called before random numbers are drawn or seeded
        self.computing = False  # PyTorch is working out a result below the mode
        self.mode: VirtualGPUMode | None = None


state = State()


class VirtualGPUMode(private.TorchDispatchMode):
    """Sees every operation of its thread, in the forward and in the backward pass."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        machine = state.machine
        if machine is None:
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


def compute(machine, op, work, args, kwargs, place=None):
    """Run an operation where its operands are (or on the given place) and charge it there."""
    reads, writes, nbytes, needs_grad, stranger = [], [], 0, False, None
    for key, tensor in operands(args, kwargs):
        block = block_of(tensor)
        written = key in work.writes
        size = nbytes_of(tensor)
        if block is None or block.place.index < 0:
            if tensor.dim() or written:
                stranger = key
        else:
            if block.place.machine is not machine:
                rehome(block, machine)
            if place is None:
                place = block.place
            elif place is not block.place:
                raise different_devices(work, op, key, place, block.place)
            size = min(size, block.nbytes)
        if block is not None:
            (writes if written else reads).append(span_of(tensor, block, size))
        if tensor.requires_grad:
            needs_grad = True
            if block is not None and block._kind == "other" and tensor.is_leaf:
                block.kind = "parameters"
        if not (work.gathers or (written and work.overwrites)):
            nbytes += size
    if place is None:
        place = machine.host
    elif stranger is not None and place.index >= 0 and not (work.host_indices and stranger == 1):
        raise different_devices(work, op, stranger, place, machine.host)
    state.latest = place
    result = run(op, args, kwargs)
    for tensor in results(result):
        nbytes += nbytes_of(tensor) * (2 if work.gathers else 1)
        if place.index >= 0:
            block = block_of(tensor)
            if block is None:
                block = put(tensor, place, kind_of_result(needs_grad))
                writes.append(block)
    if work.kernel:
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
    elif device.type == "cpu" and private.called_by_autograd():
        # A backward formula asks for the device that PyTorch believes its tensors to be on.
        place = place_of(tensors[0]) if tensors else state.latest
    else:
        place = place_of_device(device)
    kwargs["device"] = CPU if device is None or device.type == "vgpu" else device
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


def to_copy(machine, op, work, args, kwargs):
    """`aten._to_copy`: another dtype on the same device, or a copy to another device."""
    source = place_of(args[0])
    target, state.target = state.target, None
    device = kwargs.get("device")
    if target is None:
        target = place_of_device(device) if device and device.type == "vgpu" else source
    kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if source is target:
        return compute(machine, op, work, args, kwargs)
    tensor = args[0]
    if target.index >= 0:
        dtype = kwargs.get("dtype") or tensor.dtype
        target.ledger.check_room(tensor.numel() * dtype.itemsize)
    result = run(op, args, kwargs)
    put(result, target, kind_of_copy(tensor, block_of(tensor)))
    transfer(machine, source, target, tensor, result, kwargs.get("non_blocking", False))
    return result


def copy_(machine, op, work, args, kwargs):
    """`aten.copy_`: the one operation whose operands may be on two devices."""
    dst, src = args[:2]
    target, source = place_of(dst), place_of(src)
    if source is target or (source is machine.host and src.dim() == 0):
        return compute(machine, op, work, args, kwargs)
    result = run(op, args, kwargs)
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    transfer(machine, source, target, src, dst, non_blocking)
    return result


def foreach_copy_(machine, op, work, args, kwargs):
    """`aten._foreach_copy_`: many copies in one call, each between its own two devices."""
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    for dst, src in zip(*args[:2]):
        copy_(machine, torch.ops.aten.copy_.default, COPY, (dst, src, non_blocking), {})


def local_scalar(machine, op, work, args, kwargs):
    """`item`, `float`, `bool`: the host waits for the value and fetches it."""
    result = run(op, args, kwargs)
    fetch(args[0])
    return result


def foreach(machine, op, work, args, kwargs):
    """A list operation of an optimizer: one launch for each device that its lists touch."""
    result = run(op, args, kwargs)
    touched: dict[Device | Host, tuple[list, list, list]] = {}
    for key, tensor in operands(args, kwargs):
        place, block = place_of(tensor), block_of(tensor)
        reads, writes, nbytes = touched.setdefault(place, ([], [], []))
        nbytes.append(nbytes_of(tensor))
        if block is not None:
            (writes if key in work.writes else reads).append(span_of(tensor, block))
    for tensor, like in zip(results(result), args[0]):
        place = place_of(like)
        if place.index >= 0 and block_of(tensor) is None:
            touched[place][1].append(put(tensor, place, kind_of_result(False)))
        touched[place][2].append(nbytes_of(tensor))
    for place, (reads, writes, nbytes) in touched.items():
        if not (place is machine.host and len(touched) > 1):
            machine.compute(place, work.name, 0, sum(nbytes), False, reads, writes)
    return result


def leave_alone(machine, op, work, args, kwargs):
    """Bookkeeping of PyTorch's own that is no work of the program."""
    return run(op, args, kwargs)


COPY = Work(torch.ops.aten.copy_.default)
SPECIAL = {
    "_to_copy": to_copy,
    "copy_": copy_,
    "_foreach_copy_": foreach_copy_,
    "_local_scalar_dense": local_scalar,
    "_record_function_enter_new": leave_alone,
    "_record_function_exit": leave_alone,
    "device": leave_alone,
    "set_": leave_alone,
}


def transfer(machine, source, target, tensor, result, non_blocking) -> None:
    """Charge a copy between two places; a dtype or layout change is made at the source first.

    Ordinary host memory is pageable: the host waits for such a copy whatever `non_blocking` says.
    """
    src, dst = span_of(tensor), span_of(result)
    if tensor.dtype != result.dtype or not tensor.is_contiguous():
        blocks = [src] if src is not None else []
        machine.compute(source, "pack", 0, nbytes_of(tensor) + nbytes_of(result), False, blocks, [])
    if target is machine.host:
        waits = not non_blocking
    elif source is machine.host:
        waits = not (non_blocking and is_pinned(tensor))
    else:
        waits = False
    machine.copy("copy", nbytes_of(result), source, target, src, dst, waits)


def fetch(tensor: Tensor) -> None:
    """The host reads a tensor's values: it waits for them and for their copy."""
    span, machine = span_of(tensor), state.machine
    if span is None or machine is None:
        return
    place = place_of(tensor)
    if place is machine.host:
        machine.wait(span)
    else:
        machine.copy("read", nbytes_of(tensor), place, machine.host, span, None, waits=True)


def run(op, args, kwargs):
    """Let PyTorch work out the result, on the CPU or, in shape-only mode, without data."""
    outer, state.computing = state.computing, True
    try:
        return op(*args, **kwargs)
    finally:
        state.computing = outer


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


def block_of(tensor: Tensor) -> Block | None:
    """The block on a tensor's storage; None for ordinary host memory."""
    try:
        return getattr(tensor.untyped_storage(), "block", None)
    except NotImplementedError:  # sparse: its values have the storage
        return block_of(tensor._values()) if tensor.layout is torch.sparse_coo else None


def span_of(tensor: Tensor, block: Block | None = None, size: int | None = None):
    """The part of its block that a tensor covers: the block itself where that is all of it."""
    block = block_of(tensor) if block is None else block
    if block is None or tensor.layout is not torch.strided:
        return block
    size = tensor.nbytes if size is None else size
    if size >= block.nbytes and block.spans is None:
        return block
    itemsize = tensor.itemsize
    if not tensor.is_contiguous():
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        size = (last + 1) * itemsize if tensor.numel() else 0
    low = tensor.storage_offset() * itemsize
    return Span(block, low, low + size)


def is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor is in page-locked host memory."""
    block = block_of(tensor)
    return block is not None and block.pinned


def nbytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's elements; of its values where it is sparse."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return tensor._values().nbytes if tensor.layout is torch.sparse_coo else 0


def put(tensor: Tensor, place, kind: str) -> Block:
    """Say that a new tensor's bytes are on a place; raises where its memory is full."""
    if tensor.layout is torch.sparse_coo:
        put(tensor._indices(), place, kind)
        return put(tensor._values(), place, kind)
    if type(tensor) not in PLAIN:
        answer_for(type(tensor))
    storage = tensor.untyped_storage()
    storage.block = block = Block(
        place, storage.nbytes(), kind, (str(tensor.dtype)[6:], tuple(tensor.shape))
    )
    return block


PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


def answer_for(cls: type) -> None:
    """Let a subclass of `Tensor` with a `.device` of its own (`FakeTensor`) answer too."""
    PLAIN.add(cls)
    if "device" not in vars(cls):
        return
    own = cls.device

    def device(self):
        block = None if state.computing else block_of(self)
        return (
            own.__get__(self)
            if block is None or block.place.index < 0
            else (block.place.torch_device)
        )

    cls.device = property(device, own.__set__)


def place_of(tensor: Tensor):
    """The device or host that a tensor is on."""
    block, machine = block_of(tensor), state.machine
    if block is None:
        return machine.host
    if block.place.machine is not machine:
        rehome(block, machine)
    return block.place


def rehome(block: Block, machine: Machine) -> None:
    """Bring a tensor of an earlier cluster to the device of the same number."""
    place = block.place
    block.move_to(machine.host if place.index < 0 else device_at(place.number))


def place_of_device(device: torch.device):
    """The virtual device, or the host, that a `torch.device` names."""
    if device.type != "vgpu":
        return state.machine.host
    return device_at(state.current if device.index is None else device.index)


def device_at(index: int) -> Device:
    """The virtual device of a number; says how many there are if there is none."""
    devices = state.visible
    if not 0 <= index < len(devices):
        raise RuntimeError(
            f"invalid device ordinal: vgpu:{index} was asked for, but this cluster has "
            f"{len(devices)} device{'s' * (len(devices) != 1)} (vgpu:0 to vgpu:{len(devices) - 1})."
            f" Use one of these or make a larger Cluster."
        )
    return devices[index]


def kind_of_result(needs_grad: bool) -> str:
    """What a new block is for, told from the moment at which it is made."""
    if private.graph_task_id() != -1:
        return "activations" if torch.is_grad_enabled() else "gradients"
    if needs_grad and torch.is_grad_enabled():
        return "activations"
    return "optimizer" if state.in_optimizer else "other"


def kind_of_copy(tensor: Tensor, block: Block | None) -> str:
    """What a copy is for: parameters and buffers stay what they are."""
    if block is not None and block.kind in ("parameters", "buffers"):
        return block.kind
    if tensor.requires_grad and tensor.is_leaf:
        return "parameters"
    return kind_of_result(tensor.requires_grad)


def different_devices(work, op, key, place, other) -> RuntimeError:
    """PyTorch's error for operands on two devices, naming both and the operand."""
    name = op._schema.arguments[key].name if isinstance(key, int) else key
    first, second = (p.torch_device or CPU for p in (place, other))
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}! (argument '{name}' of aten::{work.name}). "
        "Bring one to the other's device with .to()."
    )
