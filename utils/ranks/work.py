"""Something under way, and what is noted on tensors meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class Work:
    """Something under way: a message or a launched function. Wait before touching its tensors."""

    _tensors: Sequence[Tensor] = ()

    def keep(self, tensors: Sequence[Tensor]) -> Work:
        """Note on tensors that this work fills them, so that nobody steps on them too early."""
        self._tensors = tensors
        for tensor in tensors:
            in_flight(tensor).add(self)
        return self

    def wait(self):
        """Wait until it is done; returns what a launched function returned, else None."""
        result = self._wait()
        if self._tensors:
            for tensor in self._tensors:
                in_flight(tensor).discard(self)
            self._tensors = ()
        return result

    def is_completed(self) -> bool:
        """Whether it is done, without waiting."""
        raise NotImplementedError

    def _wait(self):
        raise NotImplementedError


def in_flight(tensor: Tensor) -> weakref.WeakSet[Work]:
    """The work that fills a tensor's storage and has not been waited for."""
    storage = tensor.untyped_storage()
    works = getattr(storage, "in_flight", None)
    if works is None:
        works = storage.in_flight = weakref.WeakSet()
    return works


def check_gradients_arrived(optimizer, args, kwargs) -> None:
    """Refuse to step on what is still being communicated (an optimizer's pre-hook)."""
    for group in optimizer.param_groups:
        for position, parameter in enumerate(group["params"]):
            for what, tensor in (("gradient", parameter.grad), ("value", parameter)):
                if tensor is not None and is_under_way(tensor):
                    raise RuntimeError(
                        f"the {what} of parameter {position}, shape {tuple(parameter.shape)}, is "
                        "still being communicated: call wait() on its work before optimizer.step()"
                    )


def is_under_way(tensor: Tensor) -> bool:
    """Whether work that has not been waited for fills some of this tensor."""
    if tensor.layout is not torch.strided:
        return False
    return any(overlap(tensor, other) for work in in_flight(tensor) for other in work._tensors)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have elements in the same memory, as far as first and last ones tell."""
    if a.untyped_storage() is not b.untyped_storage() or not a.numel() or not b.numel():
        return False
    (a_first, a_last), (b_first, b_last) = reach(a), reach(b)
    return a_first <= b_last and b_first <= a_last


def reach(tensor: Tensor) -> tuple[int, int]:
    """Where in its storage, in bytes, a tensor's first element begins and its last one ends."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    first = tensor.storage_offset() * tensor.itemsize
    return first, first + (last + 1) * tensor.itemsize - 1
