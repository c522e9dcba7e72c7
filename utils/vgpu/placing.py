"""Where tensors are: the block on a tensor's storage says which virtual GPU its bytes are on."""

from __future__ import annotations

import threading

import torch

from . import private
from .machine import Device, Host, Machine
from .memory import Block, Span

Tensor = torch.Tensor
CPU = torch.device("cpu")


class State:
    """What the virtual GPUs know at the moment; there is one, `state`."""

    machine: Machine | None = None  # None while no virtual cluster is in use
    visible: list[Device] = []  # the devices that this process can name
    current = 0  # the device that "vgpu" without an index means
    latest: Device | Host | None = None  # where the latest operation ran
    in_optimizer = None  # the code of the optimizer's step that is under way
    before_random = None  # called before random numbers are drawn or seeded


class Here(threading.local):
    """What each thread knows of the operation that it is issuing; there is one, `here`."""

    computing = False  # PyTorch is working out a result below the mode
    target: Device | Host | None = None  # where the copy that is being issued goes
    home: Device | Host | None = None  # what "the CPU" means inside a function of PyTorch's C++


state = State()
here = Here()
GENERATORS: set[int] = set()  # the `_cdata` of the random generators that are a virtual GPU's


def block_of(tensor: Tensor) -> Block | None:
    """The block on a tensor's storage; None for ordinary host memory."""
    try:
        return getattr(tensor.untyped_storage(), "block", None)
    except ValueError:  # a lazy module's parameter has no data yet
        return None
    except NotImplementedError:
        inner = without_storage(tensor)
        return None if inner is None else block_of(inner)


def without_storage(tensor: Tensor) -> Tensor | None:
    """What holds the data of a tensor that has no storage: `vmap` and `grad` wrap one, a sparse
    tensor has its values."""
    if private.is_wrapped(tensor):
        return private.unwrapped(tensor)
    parts = sparse_parts(tensor)
    return parts[-1] if parts else None


def sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The indices and, last, the values of a sparse tensor."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def nbytes_of(tensor: Tensor) -> int:
    """The bytes of a tensor's elements; of its values where it is sparse."""
    if tensor.layout is torch.strided:
        try:
            return tensor.nbytes
        except RuntimeError:  # a nested tensor has no shape
            return tensor.untyped_storage().nbytes()
    parts = sparse_parts(tensor)
    return parts[-1].nbytes if parts else 0


def span_of(tensor: Tensor, block: Block | None = None, size: int | None = None):
    """The part of its block that a tensor covers: the block itself where that is all of it."""
    block = block_of(tensor) if block is None else block
    if block is None or tensor.layout is not torch.strided:
        return block
    size = nbytes_of(tensor) if size is None else size
    if size >= block.nbytes and block.spans is None:
        return block
    itemsize = tensor.itemsize
    if not tensor.is_contiguous():
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        size = (last + 1) * itemsize if tensor.numel() else 0
    low = tensor.storage_offset() * itemsize
    return Span(block, low, low + size)


def on_device(tensor: Tensor) -> bool:
    """Whether a tensor is on a virtual GPU."""
    block = block_of(tensor)
    return block is not None and block.place.index >= 0


def is_pinned(tensor: Tensor) -> bool:
    """Whether a tensor is in page-locked host memory."""
    block = block_of(tensor)
    return block is not None and block.pinned


def put(tensor: Tensor, place, kind: str) -> Block:
    """Say that a new tensor's bytes are on a place; raises where its memory is full."""
    if tensor.layout is not torch.strided:
        return [put(part, place, kind) for part in sparse_parts(tensor)][-1]
    if type(tensor) not in PLAIN:
        answer_for(type(tensor))
    storage = tensor.untyped_storage()
    shape = "nested" if tensor.is_nested else tuple(tensor.shape)
    storage.block = block = Block(place, storage.nbytes(), kind, (str(tensor.dtype)[6:], shape))
    return block


PLAIN = {Tensor, torch.nn.Parameter, torch.nn.Buffer}


def answer_for(cls: type) -> None:
    """Let a subclass of `Tensor` with a `.device` of its own (`FakeTensor`) answer too."""
    PLAIN.add(cls)
    if "device" not in vars(cls):
        return
    own = cls.device

    def device(self):
        block = None if here.computing else block_of(self)
        if block is None or block.place.index < 0:
            return own.__get__(self)
        return block.place.torch_device

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
    if place.index < 0:
        block.move_to(machine.host)
    elif place.number < len(state.visible):
        block.move_to(state.visible[place.number])
    else:
        raise RuntimeError(
            f"invalid device ordinal: a tensor made with an earlier cluster is on "
            f"vgpu:{place.number}, and this cluster has only {names_of(state.visible)}. Make the "
            "tensor again, or a larger Cluster."
        )


def place_of_device(device: torch.device):
    """The virtual device, or the host, that a `torch.device` names."""
    if state.machine is None:
        raise no_cluster()
    if device.type != "vgpu":
        return state.machine.host
    return device_at(state.current if device.index is None else device.index)


def is_virtual(device) -> bool:
    """Whether `device=` asks for a virtual GPU."""
    return isinstance(device, torch.device) and device.type == "vgpu"


def no_cluster() -> RuntimeError:
    return RuntimeError(
        "there are no virtual GPUs now: make some first, such as `cluster = Cluster(4)`"
    )


def device_at(index: int) -> Device:
    """The virtual device of a number; says how many there are if there is none."""
    devices = state.visible
    if not 0 <= index < len(devices):
        raise RuntimeError(
            f"invalid device ordinal: vgpu:{index} was asked for, but this cluster has "
            f"{names_of(devices)}. Use one of these or make a larger Cluster."
        )
    return devices[index]


def names_of(devices: list[Device]) -> str:
    """How many devices there are and their names, such as `2 devices (vgpu:0 to vgpu:1)`."""
    last = len(devices) - 1
    return "1 device (vgpu:0)" if last == 0 else f"{last + 1} devices (vgpu:0 to vgpu:{last})"
