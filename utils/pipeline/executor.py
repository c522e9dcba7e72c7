"""Carry out a schedule: the program of one rank, on virtual ranks, processes and GPUs alike.

A rank goes through its list of instructions; each is a function, here or, for messages, in
`stage.py`. Each row's loss is divided by the rows of the whole batch. So micro-batches may differ
in size, and their gradients add up to that of the batch's mean loss.

Two rules follow from cutting a batch. Batch normalisation takes its statistics from each
micro-batch, as in gradient accumulation, and its running statistics see m of them. Dropout draws
from each rank's own generator, anew for each micro-batch in the order of forward passes; so all
schedules of one chunk a stage drop the same values, and other numbers of stages drop others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..data_parallel import share_of_loss
from ..events import Event
from ..measure import now
from ..ranks import Comm
from .checks import Schedule, event
from .gradients import all_finite, sum_tied_gradients
from .halves import input_half
from .schedules import (
    COMPUTE,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    SendActivation,
    SendGradient,
    Step,
    pieces,
)
from .shapes import agree_on_shapes
from .stage import Stage, receive, send, take_message, wait_for_message


@dataclass
class Outcome:
    """What a rank has when a schedule is done.

    `results` are those of the network's last piece, one for each micro-batch: shares of the mean
    loss (their sum is the batch's), or outputs where there is no loss. The other ranks have none.
    `events` are this rank's instructions as they ran, if they were recorded.
    """

    results: list[Tensor] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """The mean loss over all rows, on the rank that has it; waits for it."""
        return sum(share.item() for share in self.results)


def run_schedule(
    comm: Comm,
    chunks: Sequence[nn.Module],
    schedule: Schedule,
    micro_batches: Sequence[tuple[Tensor, Tensor]],
    loss: Callable | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    ties: Sequence[tuple] = (),
    shapes: list | None = None,
    record: bool = False,
) -> Outcome:
    """Carry out this rank's part of a schedule on its chunks of the network.

    The weights' gradients are then those of the mean loss over all rows, in place of earlier ones,
    and the optimizer, if given, has stepped; where a gradient is not finite, no rank steps. Either
    all ranks give one or none (a rank without weights: `SGD([{"params": []}])`).
    `loss(outputs, labels)` gives one value a row. Every rank is given all micro-batches, (X, y),
    but only the first piece uses X and only the last one y. `ties` are from `tied_weights`,
    `shapes` from `agree_on_shapes`, which otherwise is called here each time. `record` waits for
    the device before and after each instruction, and notes when it ran.
    """
    check_call(comm, chunks, schedule, micro_batches)
    if shapes is None:
        shapes = agree_on_shapes(comm, chunks, micro_batches[0][0])
    jobs, chunks = schedule[comm.rank], nn.ModuleList(chunks)
    stage = Stage(comm, chunks, micro_batches, loss, shapes, schedule, optimizer, ties)
    if stage.trains:
        if loss is None:
            raise ValueError("a schedule with backward passes needs a loss")
        chunks.zero_grad()
    events = []
    for job in jobs:
        wait_for_message(stage, job)
        start = now(comm) if record else 0.0
        ACTIONS[type(job)](stage, job)
        if record and isinstance(job, COMPUTE):
            events.append(event(comm.rank, job, start, now(comm)))
    return Outcome([stage.results[micro] for micro in sorted(stage.results)], events)


def check_call(comm, chunks, schedule, micro_batches) -> None:
    """Raise ValueError if a schedule is for other ranks, chunks or micro-batches than there are."""
    micros = {job.micro for job in schedule[0] if isinstance(job, Forward)}
    wanted = len(schedule), pieces(schedule) // len(schedule), len(micros)
    found = comm.world_size, len(chunks), len(micro_batches)
    if wanted != found:
        raise ValueError(
            "the schedule is for {} stages of {} chunks and for {} micro-batches; there are {} "
            "ranks, {} chunks on rank {} and {} micro-batches".format(
                *wanted, *found[:2], comm.rank, found[2]
            )
        )


# --- computing ----------------------------------------------------------------------------------


def forward(stage: Stage, job) -> None:
    """Run a chunk; the last piece goes on to the micro-batch's share of the loss."""
    at = job.chunk, job.micro
    x = input_of(stage, job)
    if stage.recomputes:
        stage.random_states[at] = get_random_state(stage.comm.device)
    with torch.set_grad_enabled(stage.keeps_outputs):
        y = apply(stage, job, stage.chunks[job.chunk], x)
    if stage.trains:
        stage.inputs[at] = x
    if stage.trains or stage.piece(job) < stage.last:
        stage.outputs[at] = y
    if stage.piece(job) == stage.last:
        stage.results[job.micro] = y.detach()


def input_of(stage: Stage, job) -> Tensor:
    """The rows of a micro-batch, or what the previous piece has made of them."""
    x = take_message(stage, "activation", job)
    if x is None:
        X = stage.micro_batches[job.micro][0]
        return X.to(stage.comm.device).detach().requires_grad_(X.requires_grad)
    return x.requires_grad_(x.is_floating_point() or x.is_complex())


def apply(stage: Stage, job, function: Callable, x: Tensor) -> Tensor:
    """What a chunk makes of x; of the last piece its share of the loss, if there is one."""
    if stage.piece(job) < stage.last or stage.loss is None:
        return function(x)
    y = stage.micro_batches[job.micro][1].to(stage.comm.device)
    return share_of_loss(function, x, y, stage.loss, stage.rows)


def recompute(stage: Stage, job) -> None:
    """Run a chunk once more, with a graph: on copies of its buffers, with the same random numbers.

    So running statistics see each micro-batch once, and dropout drops the same values.
    """
    at, device = (job.chunk, job.micro), stage.comm.device
    chunk = stage.chunks[job.chunk]
    copies = {name: buffer.clone() for name, buffer in chunk.named_buffers()}
    after = get_random_state(device)
    set_random_state(device, stage.random_states.pop(at))
    run_again = lambda x: functional_call(chunk, copies, (x,))  # noqa: E731
    stage.outputs[at] = apply(stage, job, run_again, stage.inputs[at])
    set_random_state(device, after)


def backward(stage: Stage, job) -> None:
    """From the gradient of a chunk's output to those of its input and its weights."""
    x, y, gradient = take_back(stage, job)
    if y.requires_grad:
        torch.autograd.backward(y, gradient)
    keep_gradient(stage, job, x, x.grad)


def backward_input(stage: Stage, job) -> None:
    """The input's gradient. The first piece has none to find: its weight half is the whole pass."""
    x, y, gradient = take_back(stage, job)
    found, weight_half = None, lambda: y.requires_grad and torch.autograd.backward(y, gradient)
    if x.requires_grad and y.requires_grad:
        found, weight_half = input_half(y, gradient, x)
    stage.weight_halves[job.chunk, job.micro] = weight_half
    keep_gradient(stage, job, x, found)


def backward_weight(stage: Stage, job) -> None:
    """The weights' gradients, and with them goes what the graph had kept."""
    stage.weight_halves.pop((job.chunk, job.micro))()


def take_back(stage: Stage, job) -> tuple:
    """A chunk's input and output, and the output's gradient, which is None for a loss."""
    at = job.chunk, job.micro
    return stage.inputs.pop(at), stage.outputs.pop(at), take_message(stage, "gradient", job)


def keep_gradient(stage: Stage, job, x: Tensor, gradient: Tensor | None) -> None:
    """Keep the gradient of a chunk's input until it is sent; 0 if the chunk did not use it."""
    if stage.piece(job) > 0:
        stage.gradients[job.chunk, job.micro] = (
            torch.zeros_like(x) if gradient is None else gradient
        )


# --- the end of a batch -------------------------------------------------------------------------


def step(stage: Stage, job) -> None:
    """Wait for what is being sent, sum the gradients of tied weights, let the optimizer step.

    Where a gradient is not finite on any rank, none steps, and buffers are as they were before.
    """
    for work in stage.sending.values():
        work.wait()
    if stage.trains:
        sum_tied_gradients(stage.ties)
    if not stage.trains or stage.optimizer is None:
        return
    if all_finite(stage.comm, stage.chunks):
        stage.optimizer.step()
    else:
        for buffer, before in zip(stage.chunks.buffers(), stage.buffers):
            buffer.copy_(before)


# --- random numbers -----------------------------------------------------------------------------


def get_random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The state of the CPU's generator and of the device's own, if it has one."""
    own = torch.get_device_module(device).get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), own


def set_random_state(device: torch.device, state: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


ACTIONS = {
    Forward: forward,
    Recompute: recompute,
    Backward: backward,
    BackwardInput: backward_input,
    BackwardWeight: backward_weight,
    SendActivation: send,
    ReceiveActivation: receive,
    SendGradient: send,
    ReceiveGradient: receive,
    Step: step,
}
