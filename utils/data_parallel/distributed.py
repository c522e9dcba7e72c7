"""DistributedDataParallel by hand: gradients travel while the backward pass goes on (chapter 07).

    ddp = DistributedDataParallel(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for X, y in batches:
        optimizer.zero_grad()
        loss(ddp(X), y).backward()  # launches the all-reduces, bucket by bucket
        ddp.wait()                  # now the gradients are averages over all ranks
        optimizer.step()

`comm` is a rank's handle, whatever the rank runs on. PyTorch's class of this name hides the wait in
the end of the backward pass; here it is a line of the program, so that one sees what it costs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ..ranks.collectives import ring_all_reduce
from .buckets import Bucket, MiB, make_buckets
from .together import broadcast_module


class DistributedDataParallel(nn.Module):
    """A rank's replica of a module, whose gradients become averages over all ranks.

    It starts from rank 0's parameters and buffers. `all_reduce(comm, tensor)` sums in place: one of
    ranks/collectives.py, `shared_memory_all_reduce`, or `in_half` of one. `first_cap` and `cap` are
    bytes, as for `make_buckets`. Every rank must build it, and call `wait` equally often.

    - All ranks count alike, unless `weigh` says how many rows each has. Gradients are scaled before
      they are added, so that half precision does not overflow.
    - A parameter that this rank did not use counts as zeros, and travels when `wait` is called; if
      no rank used it, its gradient is None. Frozen parameters do not travel. A parameter that is
      used in several places has one gradient, which travels once.
    - Sparse gradients are refused with a TypeError.
    - Gradients add up until they are zeroed, as ever: for several micro-batches use `no_sync`. A
      second backward pass after `wait` adds to the average, which gives the right sum; before
      `wait` it is a RuntimeError, since it would write into what travels.
    - Buffers stay each rank's own after the start; `pool_buffers` makes them equal.
    """

    def __init__(self, module: nn.Module, comm, all_reduce: Callable = ring_all_reduce,
                 first_cap: int = MiB, cap: int = 25 * MiB):  # fmt: skip
        super().__init__()
        self.module, self.comm, self.all_reduce = module, comm, all_reduce
        broadcast_module(comm, module)
        self.frozen = [p for p in module.parameters() if not p.requires_grad]
        trainable = [p for p in module.parameters() if p.requires_grad]
        self.buckets = [Bucket(group) for group in make_buckets(trainable, first_cap, cap)]
        for bucket in self.buckets:
            for position, parameter in enumerate(bucket.parameters):
                hook = partial(self.arrived, bucket, position)
                parameter.register_post_accumulate_grad_hook(hook)
        self.synchronizes = True
        self.restart()

    def forward(self, *args, **kwargs):
        """What the module returns."""
        return self.module(*args, **kwargs)

    def restart(self) -> None:
        """Before a round: nothing is launched, and all ranks count alike."""
        self.launched = 0
        self.counting = None
        self.share = 1 / self.comm.world_size

    def arrived(self, bucket: Bucket, position: int, parameter: nn.Parameter) -> None:
        """Autograd calls this when a gradient is there: pack it, send what is complete."""
        if self.synchronizes:
            bucket.fill(position, self.weight())
            self.launch_complete()

    def launch_complete(self) -> None:
        """Launch the complete buckets, in the order of buckets: the same on every rank."""
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self.buckets[self.launched].launch(self.comm, self.all_reduce)
            self.launched += 1

    def wait(self) -> None:
        """Send what has not been sent yet; returns when all gradients are averages."""
        for parameter in self.frozen:
            check_frozen(parameter)
        for bucket in self.buckets:
            for position in sorted(bucket.missing):
                bucket.fill(position, self.weight())
        self.launch_complete()
        for bucket in self.buckets:
            bucket.finish()
        self.restart()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add to this rank's own gradients, and nothing travels."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def weigh(self, rows: int) -> None:
        """Let this rank count by its rows in the round that begins: before its backward pass.

        Every rank must call it; with 0 rows it needs no backward pass, only `wait`. The gradient is
        that of the mean loss over all ranks' rows, if each rank's loss is the mean over its own.
        """
        self.rows, self.total = rows, torch.tensor([rows], dtype=torch.float64)
        self.counting = self.comm.launch(ring_all_reduce, self.total)

    def weight(self) -> float:
        """What this rank's gradients are multiplied by: the weights of all ranks add up to 1."""
        if self.counting is not None:
            self.counting.wait()
            self.counting, total = None, self.total.item()
            if total == 0:
                raise ValueError("no rank has any rows to train on in this round")
            self.share = self.rows / total
        return self.share

    def finite(self) -> bool:
        """Whether all averages are finite, after `wait`: the same answer on every rank."""
        return all(bucket.flat.isfinite().all().item() for bucket in self.buckets)


def check_frozen(parameter: Tensor) -> None:
    """RuntimeError for a parameter that is trainable after all, and in no bucket."""
    if parameter.requires_grad:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} is trainable now, but was frozen when "
            "DistributedDataParallel was built: build it again"
        )
