"""What travels together: gradients of several parameters as views into one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

MiB = 2**20


def make_buckets(parameters: Iterable[Tensor], first_cap: int = MiB, cap: int = 25 * MiB):
    """Lists of parameters, in the order in which their gradients travel: PyTorch's rule.

    From the last parameter to the first, roughly the order in which gradients get ready. A bucket
    closes when it has reached `cap` bytes, the first one `first_cap`, so that the wire has work
    early. No tensor is split: one larger than the cap closes the bucket that it enters. A bucket
    holds one dtype of one device; those that never close come last.
    """
    closed, filling, sizes, caps = [], {}, {}, {}
    for parameter in reversed(list(parameters)):
        kind = parameter.dtype, parameter.device
        filling.setdefault(kind, []).append(parameter)
        sizes[kind] = sizes.get(kind, 0) + parameter.nbytes
        if sizes[kind] >= caps.get(kind, first_cap):
            closed.append(filling.pop(kind))
            sizes[kind], caps[kind] = 0, cap
    return closed + list(filling.values())


class Bucket:
    """A flat tensor with a view for each parameter's gradient, and one flag for each behind them.

    After the all-reduce a flag tells whether any rank had a gradient for the parameter. `missing`
    are the positions whose gradient is not there yet; `work` is the all-reduce under way.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]):
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        length, first = sum(sizes) + len(sizes), parameters[0]
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        *parts, self.flags = self.flat.split([*sizes, len(sizes)])
        self.views = [part.view(p.shape) for part, p in zip(parts, parameters)]
        self.restart()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return sum(view.nbytes for view in self.views)

    def restart(self) -> None:
        """Nothing is there, nothing is under way."""
        self.missing = set(range(len(self.parameters)))
        self.unused: list[int] = []
        self.work = None

    @torch.no_grad()
    def fill(self, position: int, weight: float) -> None:
        """Put a parameter's gradient, times a weight, in its place; this is its gradient now.

        Without a gradient, or with weight 0 (that hides a NaN), the place is filled with zeros.
        RuntimeError if it is filled already, TypeError if the gradient is sparse.
        """
        self.check(position)
        parameter, view = self.parameters[position], self.views[position]
        if parameter.grad is None:
            self.unused.append(position)
        if parameter.grad is None or weight == 0:
            view.zero_()
        else:
            torch.mul(parameter.grad, weight, out=view)
        parameter.grad = view
        self.missing.discard(position)

    def launch(self, comm, all_reduce: Callable) -> None:
        """Begin the all-reduce in the background."""
        self.flags.fill_(1 / comm.world_size)
        for position in self.unused:
            self.flags[position] = 0
        self.work = comm.launch(all_reduce, self.flat)

    def finish(self) -> None:
        """Wait for the all-reduce. What no rank has used has no gradient."""
        self.work.wait()
        for position in self.unused:
            if self.flags[position] == 0:
                self.parameters[position].grad = None
        self.restart()

    def check(self, position: int) -> None:
        """Refuse a second gradient before the first has arrived, and a sparse one."""
        parameter = self.parameters[position]
        what = f"a parameter of shape {tuple(parameter.shape)}"
        if position not in self.missing:
            raise RuntimeError(
                f"{what} got a second gradient while its first one travels: call wait() before the "
                "next backward pass, or put all backward passes but the last under no_sync()"
            )
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {what} is sparse, and what travels is dense: build the embedding "
                "with sparse=False"
            )


def bucket_schedule(ready: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    """When each bucket sets out and arrives: in order, once it is ready and the wire is free.

    `ready` is when each bucket is complete, `seconds` what its all-reduce takes. What the last one
    arrives after the end of the backward pass is exposed, whatever the program does.
    """
    spans, free = [], 0.0
    for start, duration in zip(ready, seconds):
        start = max(start, free)
        free = start + duration
        spans.append((start, free))
    return spans
