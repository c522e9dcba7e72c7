"""Programs, arguments and results as bytes, so that each rank has a copy of its own."""

from __future__ import annotations

import io
import types
from collections import ChainMap
from collections.abc import Callable

import cloudpickle


class Pickler(cloudpickle.Pickler):
    """cloudpickle's, which takes functions and classes typed in cells; keeps their file names.

    With the file name an error in a rank can show the line of the cell.
    """


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
    try:
        Pickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be copied to or from a rank: {error}. Make such objects inside the "
            "program, and pass and return plain data and tensors"
        ) from error
    return buffer.getvalue()


unpack = cloudpickle.loads
