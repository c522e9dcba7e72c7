"""Whether process ranks can still go on: the parent reads what each of them waits for."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

from .control import Doing
from .errors import is_ours, quote
from .segment import Segment
from .transports import describe
from .worker import Job

POLL = 0.25  # seconds from look to look
STILL = 12  # looks in which nothing has moved, until ranks that wait are held to be stuck

WAITING = (Doing.SEND, Doing.RECEIVE, Doing.MEET)


class Watch:
    """What the ranks of one run are doing."""

    def __init__(self, job: Job):
        self.job = job
        self.states = job.states(Segment(job.path("memory"), job.layout()["end"]))
        self.before: dict = {}
        self.still: dict[int, int] = {}  # for how many looks each rank has not moved

    def stuck(self, reported: set[int]) -> list[int]:
        """The ranks that will never go on: all that are left wait, or some for one that has ended.

        To be called again and again.
        """
        now = {rank: [state.read() for state in states] for rank, states in enumerate(self.states)
               if rank not in reported}  # fmt: skip
        for rank, states in now.items():
            same = states == self.before.get(rank) and waits(states)
            self.still[rank] = self.still.get(rank, 0) + 1 if same else 0
        self.before = now
        still = [rank for rank in now if self.still[rank] >= STILL]
        if len(still) == len(now):
            return still
        return [rank for rank in still if any(awaited(state) in reported for state in now[rank])]

    def words(self, rank: int, reported: set[int]) -> list[str]:
        """What a rank's program and its background wait for, where they do."""
        found = []
        for doing, _, peer, kind, nbytes in (state.read() for state in self.states[rank]):
            ended = ", which has ended" if peer in reported else ""
            text = {
                Doing.SEND: f"waits to send {describe(kind, nbytes)} to rank {peer}{ended}",
                Doing.RECEIVE: f"waits to receive {describe(kind, nbytes)} from rank {peer}{ended}",
                Doing.MEET: f"waits in a collective call for rank {peer}{ended}",
                Doing.LAUNCHED: "waits for what it launched",
            }.get(doing)
            if peer < 0 and doing == Doing.RECEIVE:
                text = "waits for the first message from any of several ranks"
            elif peer < 0 and doing == Doing.MEET:
                text = "waits in a collective call for other ranks"
            found.append(text)
        return found

    def report(self, pids: dict[int, int], reported: set[int]) -> str:
        """For each of these ranks what it waits for, and the line of the program."""
        lines = self.lines(pids)
        rows = []
        for rank in pids:
            for text, line in zip(self.words(rank, reported), lines.get(rank, ["", ""])):
                if text or line:
                    rows.append(f"  rank {rank} {text or 'is at'}" + (f"\n{line}" if line else ""))
        return "\n".join(rows)

    def lines(self, pids: dict[int, int]) -> dict[int, list[str]]:
        """The lines at which the program and the background of ranks are, if that can be told."""
        if not hasattr(signal, "SIGUSR1"):
            return {}
        for pid in pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # on which a rank writes where it is
        time.sleep(0.3)
        return {rank: self.read_lines(rank) for rank in pids}

    def read_lines(self, rank: int) -> list[str]:
        text = self.job.path("errors", rank).read_text("utf-8", "replace")
        program, background = "", ""
        for thread in re.split(r"\n(?=Thread |Current thread )", text):
            frames = re.findall(r'File "(.+)", line (\d+) in (.+)', thread)
            own = [frame for frame in frames if not is_ours(frame[0])]
            if own:
                name, number, function = own[0]
                line = quote(name, int(number), function)
                if "Current thread" in thread:
                    program = line
                else:
                    background = line
        return [program, background]


def waits(states: list[tuple]) -> bool:
    """Whether neither a rank's program nor its background computes."""
    (program, *_), (background, *_) = states
    if program == Doing.LAUNCHED:
        return background in WAITING
    return program in WAITING and background in (*WAITING, Doing.IDLE)


def awaited(state: tuple) -> int:
    """The rank that a program or a background waits for; -1 if it is none or several."""
    doing, _, peer, *_ = state
    return peer if doing in WAITING else -1
