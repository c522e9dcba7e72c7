"""Programs, arguments and results as bytes, so that each rank has a copy of its own."""

from __future__ import annotations

import io
import types
from collections import ChainMap
from collections.abc import Callable
from typing import IO

import cloudpickle
import torch

from ..vgpu import private


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, which takes functions and classes typed in cells; keeps their file names.

    With the file name an error in a rank can show the line of the cell. Tensors travel in host
    memory, since the GPUs of one process, virtual or not, mean nothing to another.
    """

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor) and value.device.type in ("vgpu", "cuda"):
            return in_host_memory(value).__reduce_ex__(4)
        return super().reducer_override(value)


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in ordinary memory, at no simulated cost."""
    with private.no_dispatch(), torch.no_grad():
        plain = tensor.detach().cpu() if tensor.is_cuda else tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(plain, tensor.requires_grad)
    return plain.requires_grad_(tensor.requires_grad)


def reduce_code(code: types.CodeType):
    """A code object with the name of its file, which cloudpickle leaves out."""
    build, args, *_ = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return build_code, (build, args, code.co_filename)


def build_code(build: Callable, args: tuple, filename: str) -> types.CodeType:
    return build(*args).replace(co_filename=filename)


Pickler.dispatch_table = ChainMap({types.CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)


def pack(value, what: str) -> bytes:
    """A value as bytes; TypeError that names `what` if it cannot be copied."""
    buffer = io.BytesIO()
    pack_into(value, what, buffer)
    return buffer.getvalue()


def pack_into(value, what: str, file: IO[bytes]) -> None:
    """Write a value to a file; TypeError that names `what` if it cannot be copied."""
    try:
        Pickler(file).dump(value)
    except OSError:
        raise
    except Exception as error:
        raise TypeError(
            f"{what} cannot be copied to or from a rank: {error}. Make such objects inside the "
            "program, and pass and return plain data and tensors"
        ) from error


unpack = cloudpickle.loads
