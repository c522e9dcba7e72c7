"""What a rank holds while it carries out a schedule, and how its messages come and go.

A message is known by what it is, the piece that it is for and the micro-batch, so that its two
ends find each other in whatever order they are reached. Sending and receiving only begin: what is
needed is waited for where it is used, so no rank waits in a send while another waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..ranks import Comm
from ..vgpu.kinds import label
from .checks import Schedule, awaited_message, sent_message
from .schedules import BACKWARD, ReceiveGradient, Recompute, SendGradient, Step


@dataclass
class Stage:
    """What a rank holds while it carries out a schedule; dictionaries by (chunk, micro-batch)."""

    comm: Comm
    chunks: nn.ModuleList
    micro_batches: Sequence[tuple[Tensor, Tensor]]
    loss: Callable | None
    shapes: list  # of what each piece takes and, last, what the network gives
    schedule: Schedule
    optimizer: torch.optim.Optimizer | None = None
    ties: Sequence[tuple] = ()
    inputs: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)
    gradients: dict = field(default_factory=dict)  # of inputs, to be sent
    weight_halves: dict = field(default_factory=dict)
    random_states: dict = field(default_factory=dict)
    arriving: dict = field(default_factory=dict)  # tensor and work, by message
    sending: dict = field(default_factory=dict)  # work, by message
    results: dict = field(default_factory=dict)

    def __post_init__(self):
        self.rows = sum(len(X) for X, _ in self.micro_batches)
        self.last = self.comm.world_size * len(self.chunks) - 1
        self.sent, self.used = positions(self.schedule, self.last)
        jobs = self.schedule[self.comm.rank]
        self.trains = any(isinstance(job, BACKWARD) for job in jobs)
        self.recomputes = any(isinstance(job, Recompute) for job in jobs)
        self.keeps_outputs = self.trains and not self.recomputes
        self.buffers = [buffer.clone() for buffer in self.chunks.buffers()]

    def piece(self, job) -> int:
        """The number of the piece of the network that an instruction is about."""
        return job.chunk * self.comm.world_size + self.comm.rank


# --- messages -----------------------------------------------------------------------------------


def tag_of(stage: Stage, message: tuple) -> int:
    """A number of its own for each message of a batch."""
    what, piece, micro = message
    return 2 * (micro * (stage.last + 1) + piece) + (what == "gradient")


def receive(stage: Stage, job) -> None:
    """Begin to receive an activation or a gradient, unless it comes from this rank itself."""
    piece, comm = stage.piece(job), stage.comm
    is_gradient = isinstance(job, ReceiveGradient)
    source = (piece + 1 if is_gradient else piece - 1) % comm.world_size
    if source == comm.rank:
        return
    shape, dtype = stage.shapes[piece + is_gradient]  # a gradient is like what the next one takes
    rows = len(stage.micro_batches[job.micro][0])
    tensor = torch.empty((rows, *shape), dtype=dtype, device=comm.device)
    label(tensor, "gradients" if is_gradient else "activations")
    message = "gradient" if is_gradient else "activation", piece, job.micro
    stage.arriving[message] = tensor, comm.irecv(tensor, source, tag_of(stage, message))


def send(stage: Stage, job) -> None:
    """Begin to send an activation or a gradient."""
    message = sent_message(job, stage.piece(job))
    target = message[1] % stage.comm.world_size
    tensor = take_out(stage, job)
    if not stage.keeps_outputs:  # then what is on its way is all that is left of them
        stage.sending = {m: work for m, work in stage.sending.items() if not work.is_completed()}
    if target == stage.comm.rank:
        stage.arriving[message] = tensor, None
    else:
        stage.sending[message] = stage.comm.isend(tensor, target, tag_of(stage, message))


def take_out(stage: Stage, job) -> Tensor:
    """What an instruction sends; an output is kept as well if the backward pass starts there."""
    at = job.chunk, job.micro
    if isinstance(job, SendGradient):
        return stage.gradients.pop(at)
    return (stage.outputs[at] if stage.keeps_outputs else stage.outputs.pop(at)).detach()


def wait_for_message(stage: Stage, job) -> None:
    """Wait for what an instruction needs, if it needs a message."""
    message = None if isinstance(job, Step) else awaited_message(job, stage.piece(job), stage.last)
    if message is not None:
        tensor, work = stage.arriving[message]
        if work is not None:
            work.wait()
            stage.arriving[message] = tensor, None
            let_go(stage, message)


def let_go(stage: Stage, message: tuple) -> None:
    """Free what the sender of a message must have received, since it had used it before.

    To ask whether something has been received is not free, on sockets least of all.
    """
    what, piece, _ = message
    sender = (piece - 1 if what == "activation" else piece + 1) % stage.comm.world_size
    for other in list(stage.sending):
        is_to_sender = other[1] % stage.comm.world_size == sender
        if is_to_sender and stage.used[other] < stage.sent[message]:
            stage.sending.pop(other).wait()


def positions(schedule: Schedule, last: int) -> tuple[dict, dict]:
    """Where each message is sent in its sender's list, and where it is used in its receiver's."""
    sent, used = {}, {}
    for rank, jobs in enumerate(schedule):
        for position, job in enumerate(jobs[:-1]):  # all but the step
            piece = job.chunk * len(schedule) + rank
            sent[sent_message(job, piece)] = position
            used[awaited_message(job, piece, last)] = position
    return sent, used


def take_message(stage: Stage, what: str, job) -> Tensor | None:
    """An activation or gradient that has arrived; None for what comes from no message."""
    return stage.arriving.pop((what, stage.piece(job), job.micro), (None, None))[0]
