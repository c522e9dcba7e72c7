"""What follows from a schedule alone: whether it is right, how long it takes, what it keeps.

`play` carries a schedule out on paper: a stage does its instructions in order and waits only for
messages that have not been sent. Times, deadlocks and figures all come from that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ..events import Event
from ..timeline import Timeline
from .schedules import (
    BACKWARD,
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
    messages_after,
    messages_before,
    pieces,
)

Schedule = Sequence[Sequence]
RECEIVES = (ReceiveActivation, ReceiveGradient)

# --- who waits for whom -------------------------------------------------------------------------


def sent_message(job, piece: int) -> tuple | None:
    """The message that an instruction of a piece sends: (what, to which piece, micro-batch)."""
    if isinstance(job, SendActivation):
        return "activation", piece + 1, job.micro
    if isinstance(job, SendGradient):
        return "gradient", piece - 1, job.micro
    return None


def awaited_message(job, piece: int, last: int) -> tuple | None:
    """The message for which an instruction of a piece waits; a receive only begins, and waits not.

    `last` is the network's last piece, whose gradient comes from the loss.
    """
    if isinstance(job, Forward) and piece > 0:
        return "activation", piece, job.micro
    if isinstance(job, (Backward, BackwardInput)) and piece < last:
        return "gradient", piece, job.micro
    return None


def play(schedule: Schedule) -> Iterator[tuple]:
    """Yield (stage, instruction, piece, message it waited for) in an order that is possible.

    Raises ValueError, saying who waits for what, if the stages come to wait for one another.
    """
    p, last = len(schedule), pieces(schedule) - 1
    done, sent = [0] * p, set()
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(schedule):
            while done[stage] < len(instructions):
                job = instructions[done[stage]]
                piece = -1 if isinstance(job, Step) else job.chunk * p + stage
                message = awaited_message(job, piece, last)
                if message is not None and message not in sent:
                    break
                yield stage, job, piece, message
                sent.add(sent_message(job, piece))
                done[stage] += 1
                moved = True
    if any(number < len(jobs) for number, jobs in zip(done, schedule)):
        raise ValueError("deadlock: " + waiting(schedule, done))


def waiting(schedule: Schedule, done: Sequence[int]) -> str:
    """Where each stage stands that cannot go on."""
    return "; ".join(
        f"stage {stage} waits for the {'activation' if isinstance(job, Forward) else 'gradient'} "
        f"that {job} needs"
        for stage, job in (
            (stage, jobs[number])
            for stage, (number, jobs) in enumerate(zip(done, schedule))
            if number < len(jobs)
        )
    )


# --- time ---------------------------------------------------------------------------------------


def unit_cost(forward=1.0, backward=2.0, weight=None, chunks=1) -> Callable:
    """Costs in units of time, the same for all stages: a function of (piece, instruction).

    `backward` is the whole backward pass, `weight` (half of it by default) its weight half. A
    stage's time is divided evenly among its chunks.
    """
    weight = backward / 2 if weight is None else weight
    costs = {Forward: forward, Recompute: forward, Backward: backward,
             BackwardInput: backward - weight, BackwardWeight: weight}  # fmt: skip
    return lambda piece, job: costs[type(job)] / chunks


def time_schedule(schedule: Schedule, cost: Callable | None = None, message=0.0) -> Timeline:
    """When everything happens if an instruction takes cost(piece, job) seconds: a `Timeline`.

    A message takes `message` seconds from the moment at which it is sent and asked for, whatever
    else travels. By default F = 1, B = 2, and a message takes no time.
    """
    cost = cost or unit_cost(chunks=pieces(schedule) // len(schedule))
    clocks = [0.0] * len(schedule)
    sent, asked, events = {}, {}, []
    for stage, job, piece, awaited in play(schedule):
        if isinstance(job, RECEIVES):
            what = "activation" if isinstance(job, ReceiveActivation) else "gradient"
            asked[what, piece, job.micro] = clocks[stage]
        elif isinstance(job, COMPUTE):
            start = clocks[stage]
            if awaited is not None:
                start = max(start, max(sent[awaited], asked[awaited]) + message)
            clocks[stage] = start + cost(piece, job)
            events.append(event(stage, job, start, clocks[stage]))
        else:
            sent[sent_message(job, piece)] = clocks[stage]
    names = [f"gpu{stage}" for stage in range(len(schedule))]
    return Timeline(events, names, simulated=True, machine="the schedule alone")


def event(stage: int, job, start: float, end: float) -> Event:
    """An instruction as an event of a timeline."""
    return Event(str(job), "compute", (f"gpu{stage}",), start, end - start, (stage,))


def bubble(timeline: Timeline) -> float:
    """Share of the stages' time in which they do not compute, from 0 to 1."""
    busy = sum(timeline.busy(device) for device in timeline.devices)
    return 1 - busy / (len(timeline.devices) * timeline.duration)


# --- memory -------------------------------------------------------------------------------------


def peak_in_flight(schedule: Schedule) -> list[int]:
    """For each stage the most pairs of micro-batch and chunk whose activations it keeps at a time.

    They are kept from the forward pass to the end of the backward pass, its weight half included.
    """
    peaks = []
    for instructions in schedule:
        kept = peak = 0
        for job in instructions:
            kept += isinstance(job, Forward) - isinstance(job, (Backward, BackwardWeight))
            peak = max(peak, kept)
        peaks.append(peak)
    return peaks


# --- is it right? -------------------------------------------------------------------------------


def check_schedule(schedule: Schedule, in_flight: Sequence[int] | None = None) -> None:
    """Raise ValueError, saying which stage and instruction, unless a schedule does its work.

    Every piece goes forward once with every micro-batch, and back once, whole or in halves, or
    never; every message that is sent is asked for, once, and everything that is used has arrived;
    nobody waits for ever; one step ends the work. `in_flight`, if given, is the most that each
    stage may keep.
    """
    work = [job for jobs in schedule for job in jobs if isinstance(job, COMPUTE)]
    micros = sorted({job.micro for job in work})
    chunks = pieces(schedule) // len(schedule)
    back = [Recompute] * any(isinstance(job, Recompute) for job in work)
    ways = [[Forward, *back, Backward], [Forward, *back, BackwardInput, BackwardWeight]]
    if not any(isinstance(job, BACKWARD) for job in work):
        ways = [[Forward]]
    for stage, jobs in enumerate(schedule):
        check_work(
            jobs, stage, [(micro, chunk) for micro in micros for chunk in range(chunks)], ways
        )
        check_messages(jobs, stage, len(schedule), chunks)
    list(play(schedule))
    for stage, (limit, peak) in enumerate(zip(in_flight or [], peak_in_flight(schedule))):
        if peak > limit:
            raise ValueError(f"stage {stage} keeps {peak} micro-batches in flight, not {limit}")


def check_work(jobs, stage, work, ways) -> None:
    """Each (micro-batch, chunk) passes in one of the ways, in that order; one step ends it all."""
    place = {job: position for position, job in enumerate(jobs)}
    for job, times in Counter(jobs).items():
        if times > 1:
            raise ValueError(f"stage {stage} does {job} {times} times")
    if not jobs or not isinstance(jobs[-1], Step):
        raise ValueError(f"stage {stage} does not end with a step")
    for micro, chunk in work:
        done = [kind(micro, chunk) for kind in COMPUTE if kind(micro, chunk) in place]
        in_order = [type(job) for job in sorted(done, key=place.get)]
        if in_order not in ways:
            raise ValueError(
                f"stage {stage}, chunk {chunk}, micro-batch {micro}: {names(in_order)}; this "
                f"schedule needs {' or '.join(map(names, ways))}, in this order"
            )


def names(kinds) -> str:
    """The names of kinds of instructions."""
    return ", ".join(kind.__name__ for kind in kinds) or "nothing"


def check_messages(jobs, stage, p, chunks) -> None:
    """Each piece asks for what it uses before it does, and sends what it has after it has it.

    If all pieces do, every message has its two ends.
    """
    place = {job: position for position, job in enumerate(jobs)}
    messages = [job for job in jobs if not isinstance(job, (*COMPUTE, Step))]
    for job in [job for job in jobs if isinstance(job, COMPUTE)]:
        before, after = (
            messages_before(job, stage, p, chunks),
            messages_after(job, stage, p, chunks),
        )
        for message in [*before, *after]:
            if message not in place:
                raise ValueError(f"stage {stage} does {job}, but never {message}")
            messages.remove(message)
            if (place[message] < place[job]) != (message in before):
                raise ValueError(f"stage {stage} does {job} on the wrong side of {message}")
    if messages:
        raise ValueError(f"stage {stage} has nothing to do with {messages[0]}")
