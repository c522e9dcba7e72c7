"""Schedules are data: for each stage the list of its instructions, in the order of doing them.

A schedule says nothing about time. It is made here by a function of the number of stages p and of
micro-batches m, checked and timed by `checks.py`, drawn by `pipeline_figures.py`, and carried out
by `executor.py`.

A stage is what one rank holds: one chunk of consecutive layers or, interleaved, v chunks. Chunk c
of stage s is *piece* c·p + s of the network: activations go from piece to piece, gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Instruction:
    """What a stage does for one micro-batch, with one of its chunks of layers."""

    micro: int
    chunk: int = 0
    letter: ClassVar[str] = ""

    def __str__(self):
        """Such as F3 for micro-batch 3, F3.1 with chunk 1."""
        return f"{self.letter}{self.micro}" + (f".{self.chunk}" if self.chunk else "")


class Forward(Instruction):
    """Run the chunk on its input, which may have to arrive first."""

    letter = "F"


class Backward(Instruction):
    """From the gradient of the chunk's output, get those of its input and of its weights."""

    letter = "B"


class BackwardInput(Instruction):
    """The half of the backward pass that the previous stage waits for: the input's gradient."""

    letter = "B"


class BackwardWeight(Instruction):
    """The other half, for which nobody waits: the weights' gradients."""

    letter = "W"


class Recompute(Instruction):
    """Run the chunk once more, because its activations were not kept."""

    letter = "R"


class SendActivation(Instruction):
    """Begin to send the chunk's output to the next piece."""

    letter = "send activation "


class ReceiveActivation(Instruction):
    """Begin to receive the chunk's input from the previous piece; `Forward` waits for it."""

    letter = "receive activation "


class SendGradient(Instruction):
    """Begin to send the gradient of the chunk's input to the previous piece."""

    letter = "send gradient "


class ReceiveGradient(Instruction):
    """Begin to receive the gradient of the chunk's output; the backward pass waits for it."""

    letter = "receive gradient "


@dataclass(frozen=True)
class Step:
    """End of the batch: wait for what is still being sent, then let the optimizer step."""

    def __str__(self):
        return "step"


BACKWARD = (Backward, BackwardInput, BackwardWeight)
COMPUTE = (Forward, Recompute, *BACKWARD)


# --- the schedules ------------------------------------------------------------------------------


def naive(p, m):
    """One micro-batch after another goes forward and back: one stage works, the others wait."""
    schedule = []
    for _ in range(p):
        forwards = [Forward(i) for i in range(m)]
        backwards = [Backward(i) for i in range(m)]
        schedule.append(alternate(forwards, backwards))
    return complete(schedule)


def gpipe(p, m):
    """Fill the pipeline with all micro-batches, then drain it (GPipe, Huang et al., 2019)."""
    schedule = []
    for _ in range(p):
        forwards = [Forward(i) for i in range(m)]
        backwards = [Backward(i) for i in range(m)]
        schedule.append(forwards + backwards)
    return complete(schedule)


def one_f_one_b(p, m):
    """One forward, one backward: as long as GPipe, with at most p - stage micro-batches in flight.

    (PipeDream-Flush, Narayanan et al., 2021.)
    """
    schedule = []
    for stage in range(p):
        forwards = [Forward(i) for i in range(m)]
        backwards = [Backward(i) for i in range(m)]
        ahead = p - 1 - stage
        schedule.append(forwards[:ahead] + alternate(forwards[ahead:], backwards))
    return complete(schedule)


def interleaved(p, m, v):
    """1F1B where a stage holds v chunks, far apart in the network: the bubble is v times shorter.

    Micro-batches go in rounds through chunk after chunk, p in a round (Narayanan et al., 2021). If
    m is no multiple of p, rounds are as equal as possible and have more; then it takes longer.
    """
    n = max(1, m // p)
    rounds = [range(i * m // n, (i + 1) * m // n) for i in range(n)]
    forwards = [Forward(i, c) for micros in rounds for c in range(v) for i in micros]
    backwards = [Backward(i, c) for micros in rounds for c in reversed(range(v)) for i in micros]
    schedule = []
    for stage in range(p):
        ahead = 2 * (p - 1 - stage) + (v - 1) * max(map(len, rounds))
        schedule.append(forwards[:ahead] + alternate(forwards[ahead:], backwards))
    return complete(schedule)


def zero_bubble_h1(p, m):
    """1F1B with the backward pass in halves: what nobody waits for fills the bubble.

    Stage s puts each weight half off by s micro-batches, so that all stages have at most p in
    flight, as many as 1F1B's first. (ZB-H1, Qi et al., 2023.)
    """
    schedule = []
    for stage in range(p):
        forwards = [Forward(i) for i in range(m)]
        inputs = [BackwardInput(i) for i in range(m)]
        weights = [BackwardWeight(i) for i in range(m)]
        ahead = p - 1 - stage
        order = alternate(forwards[ahead:], inputs, [None] * stage + weights)
        schedule.append(forwards[:ahead] + [job for job in order if job is not None])
    return complete(schedule)


def forward_only(p, m):
    """What evaluation needs: all micro-batches go forward, and nothing is kept."""
    return complete([[Forward(i) for i in range(m)] for _ in range(p)])


def alternate(*lists):
    """Take from the lists in turn, one item each, until all are used up."""
    longest = max(len(items) for items in lists)
    return [items[k] for k in range(longest) for items in lists if k < len(items)]


def recomputing(schedule):
    """The schedule in which activations are not kept: each backward pass first computes them again.

    Of a micro-batch in flight, a stage keeps only what its chunk took.
    """
    return [
        [step for job in jobs for step in ([again(job), job] if again(job) else [job])]
        for jobs in schedule
    ]


def again(job):
    """What has to be recomputed before an instruction, if anything."""
    if isinstance(job, (Backward, BackwardInput)):
        return Recompute(job.micro, job.chunk)
    return None


# --- messages -----------------------------------------------------------------------------------


def complete(orders):
    """The schedule whose stages compute in these orders: adds the messages, and a step at the end.

    A message is sent as soon as there is something to send, and asked for before the instruction
    that precedes its use, so that it can travel while that one runs.
    """
    chunks = 1 + max((job.chunk for job in orders[0]), default=0)
    return [with_messages(order, stage, len(orders), chunks) for stage, order in enumerate(orders)]


def with_messages(order, stage, p, chunks):
    """The order of computing of one stage of p, with its messages and the step."""
    receives = [messages_before(job, stage, p, chunks) for job in order] + [[]]
    result = list(receives[0])
    for job, next_receives in zip(order, receives[1:]):
        result += [*next_receives, job, *messages_after(job, stage, p, chunks)]
    return [*result, Step()]


def messages_before(job, stage, p, chunks):
    """What has to arrive before a stage can do a job: at most one message, in a list."""
    piece = job.chunk * p + stage
    if isinstance(job, Forward) and piece > 0:
        return [ReceiveActivation(job.micro, job.chunk)]
    if isinstance(job, (Backward, BackwardInput)) and piece < p * chunks - 1:
        return [ReceiveGradient(job.micro, job.chunk)]
    return []


def messages_after(job, stage, p, chunks):
    """What a stage sends when it has done a job."""
    piece = job.chunk * p + stage
    if isinstance(job, Forward) and piece < p * chunks - 1:
        return [SendActivation(job.micro, job.chunk)]
    if isinstance(job, (Backward, BackwardInput)) and piece > 0:
        return [SendGradient(job.micro, job.chunk)]
    return []


def pieces(schedule: Sequence[Sequence]) -> int:
    """In how many pieces a schedule expects the network: stages times chunks."""
    jobs = [job for job in schedule[0] if isinstance(job, COMPUTE)]
    return len(schedule) * (1 + max((job.chunk for job in jobs), default=0))
