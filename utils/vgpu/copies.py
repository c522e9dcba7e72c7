"""What copies cost: between two places, and where the host reads a value."""

from __future__ import annotations

from .placing import Tensor, is_pinned, nbytes_of, place_of, span_of, state


def transfer(machine, source, target, tensor, result, non_blocking) -> None:
    """Charge a copy between two places; a dtype or layout change is made at the source first.

    Ordinary host memory is pageable: the host waits for such a copy whatever `non_blocking` says.
    Between devices it never waits.
    """
    src, dst = span_of(tensor), span_of(result)
    if tensor.dtype != result.dtype or not tensor.is_contiguous():
        blocks = [src] if src is not None else []
        machine.compute(source, "pack", 0, nbytes_of(tensor) + nbytes_of(result), False, blocks, [])
    waits = False
    if target is machine.host or source is machine.host:
        waits = not (non_blocking and is_pinned(result if target is machine.host else tensor))
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
