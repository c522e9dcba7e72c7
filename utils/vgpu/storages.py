"""What storages answer: they are copied, resized, saved and loaded with the place they are on."""

from __future__ import annotations

import functools

import torch

from . import private
from .memory import Block
from .placing import place_of_device, rehome, state


def clone(original):
    """`UntypedStorage.clone`, which `copy.deepcopy` uses: the copy is where the original is."""

    @functools.wraps(original)
    def clone(storage):
        block = getattr(storage, "block", None)
        if block is None or state.machine is None:
            return original(storage)
        machine = state.machine
        if block.place.machine is not machine:
            rehome(block, machine)
        new = private.rebuild_storage(storage)
        new.block = Block(block.place, block.nbytes, block.kind, block.label)
        if block.place.index >= 0:
            nbytes = 2 * block.nbytes
            machine.compute(block.place, "clone", 0, nbytes, False, [block], [new.block])
        return new.copy_(storage)

    return clone


def resize_(original):
    """`UntypedStorage.resize_`, with which memory is freed and taken back under a tensor."""

    @functools.wraps(original)
    def resize_(storage, size):
        block = getattr(storage, "block", None)
        if block is not None:
            block.resize(int(size))
        return original(storage, size)

    return resize_


def new_shared(original):
    """`UntypedStorage._new_shared`, with which a DataLoader's worker process collects a batch."""

    @functools.wraps(original)
    def new_shared(size, *, device="cpu"):
        if torch.device(device).type == "vgpu":
            raise RuntimeError(
                f"another process cannot make tensors on {device}: keep the data set's tensors on "
                "the CPU and move each batch, or use num_workers=0"
            )
        return original(size, device=device)

    return new_shared


def tag(storage) -> str | None:
    """Where `torch.save` notes that a storage was."""
    block = getattr(storage, "block", None)
    return None if block is None or block.place.index < 0 else str(block.place.torch_device)


def restore(storage, location):
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


def install() -> None:
    """Replace what must be replaced, once."""
    storage = torch.UntypedStorage
    storage.clone = clone(storage.clone)
    storage.resize_ = resize_(storage.resize_)
    storage._new_shared = staticmethod(new_shared(storage._new_shared))
    torch.serialization.register_package(0, tag, restore)
