"""The processor's cores: how the ranks of one machine share them."""

from __future__ import annotations

import contextlib
import ctypes
import os


def threads_of_a_rank(ranks: int) -> int:
    """How many threads each rank computes with, so that all together have the processor's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (cores or 1) // ranks)


def current_core() -> int | None:
    """The processor's core that the caller runs on; None where the system does not tell."""
    find = getattr(ctypes.CDLL(None), "sched_getcpu", None) if os.name == "posix" else None
    return None if find is None or not hasattr(os, "sched_setaffinity") else find()


def stay_on_core(core: int) -> None:
    """Keep the calling thread on a core, as far as the system allows it."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {core})
