"""Ranks as processes of this machine: started, watched and ended by the parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path

from ..timeline import Event, Timeline
from .errors import RankError, is_ours, quote
from .packing import pack, unpack
from .result import Result
from .shared import Segment
from .worker import Job, main

TRANSPORTS = ("gloo", "shared")
GRACE = 0.5  # seconds for the other ranks to report, once one has failed


def context():
    """How processes are started: by a server that has PyTorch loaded, where there is one.

    `fork` alone would hang in products (the parent's OpenMP threads are not there) and could not
    use CUDA after the parent has; `spawn` takes seconds to load PyTorch each time.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload(["utils.ranks.worker"])
    return chosen


def run_processes(program: Callable, args: tuple, ranks: int, timeout: float | None,
                  transport: str) -> Result:  # fmt: skip
    """Run a program on processes of this machine; see `run`."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; it can be {' or '.join(TRANSPORTS)}")
    what = f"{getattr(program, '__name__', program)} or its arguments"
    payload = pack((program, args), what)
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with run_folder() as folder:
        jobs = [Job(rank, ranks, folder, payload, threads, transport) for rank in range(ranks)]
        Segment(Path(folder, "memory"), jobs[0].layout()[-1], create=True)
        crew = Crew(folder)
        try:
            crew.start(jobs)
            reports = crew.reports(timeout)
        finally:
            crew.end()
        prints = [Path(folder, f"output{rank}").read_text() for rank in range(ranks)]
    values = [report[0] for report in reports]
    return Result(values, measured_timeline(reports), prints)


def measured_timeline(reports: list) -> Timeline:
    """The messages that the ranks measured, and when each of them did not wait: it computed."""
    begin = min(start for *_, (start, _) in reports)
    events = []
    for rank, (_, messages, waits, (start, end)) in enumerate(reports):
        for src, dst, sent, received, nbytes in messages:
            wire = (f"rank{src}→rank{dst}",)
            events.append(
                Event("message", "communication", wire, sent - begin, received - sent, (src, dst),
                      nbytes)
            )  # fmt: skip
        at = start
        for wait_start, wait_end in (*sorted(waits), (end, end)):
            if wait_start > at:
                row = (f"rank{rank}",)
                events.append(
                    Event("program", "compute", row, at - begin, wait_start - at, (rank,))
                )
            at = max(at, wait_end)
    events.sort(key=lambda event: event.start)
    names = [f"rank{rank}" for rank in range(len(reports))]
    duration = max(end for *_, (_, end) in reports) - begin
    return Timeline(events, names, False, "processes of this machine's CPU", duration=duration)


class Crew:
    """The processes of one run."""

    def __init__(self, folder: str):
        self.folder = folder
        self.processes: list = []
        self.connections: list = []
        self.lifelines: list = []

    def start(self, jobs: list[Job]) -> None:
        chosen = context()
        with hidden_main():
            for job in jobs:
                ours, theirs = chosen.Pipe()
                lifeline, held = chosen.Pipe()
                process = chosen.Process(target=main, args=(job, theirs, held), daemon=True)
                process.start()
                theirs.close()
                held.close()
                self.processes.append(process)
                self.connections.append(ours)
                self.lifelines.append(lifeline)

    def reports(self, timeout: float | None) -> list:
        """What each rank reports, in rank order; RankError if one fails or time runs out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        reports: dict[int, tuple] = {}
        failures: dict[int, RankError] = {}
        while len(reports) + len(failures) < len(self.processes):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if failures:
                    break
                raise self.late(timeout, reports)
            waiting = [rank for rank in range(len(self.processes))
                       if rank not in reports and rank not in failures]  # fmt: skip
            things = {self.connections[rank]: rank for rank in waiting}
            things |= {self.processes[rank].sentinel: rank for rank in waiting}
            for thing in wait(list(things), left):
                rank = things[thing]
                if rank in reports or rank in failures:
                    continue
                outcome = self.hear(rank)
                if isinstance(outcome, RankError):
                    failures[rank] = outcome
                    deadline = min(deadline or float("inf"), time.monotonic() + GRACE)
                elif outcome is not None:
                    reports[rank] = outcome
        if failures:
            raise min(failures.values(), key=lambda error: error.consequence)
        return [unpack(reports[rank]) for rank in range(len(reports))]

    def hear(self, rank: int):
        """A rank's report, or the error it ended with."""
        try:
            kind, *content = self.connections[rank].recv()
        except (EOFError, OSError):
            return self.dead(rank)
        if kind == "value":
            return content[0]
        name, message, frames, text = content
        where = f"\n{quote(*frames[-1])}" if frames else ""
        error = RankError(f"rank {rank} raised {name}: {message}{where}")
        error.add_note(text)
        # gloo's complaints about another rank that has gone are not what went wrong first
        error.consequence = int("onnection" in message or "gloo" in text.splitlines()[-1])
        return error

    def dead(self, rank: int) -> RankError:
        """The error of a rank that ended without a report."""
        process = self.processes[rank]
        process.join(GRACE)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended without a report (exit code {code})"
        tail = Path(self.folder, f"errors{rank}").read_text()[-1000:]
        return RankError(f"rank {rank} {how}" + (f"; it last said:\n{tail}" if tail else ""))

    def late(self, timeout: float, reports: dict) -> RankError:
        """The error for ranks that did not end in time, with the line at which each one is."""
        late = [rank for rank in range(len(self.processes)) if rank not in reports]
        for rank in late:
            with contextlib.suppress(ProcessLookupError, AttributeError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        lines = []
        for rank in late:
            trace = Path(self.folder, f"errors{rank}").read_text()
            frames = re.findall(r'File "(.+)", line (\d+) in (.+)', trace)
            own = [frame for frame in frames if not is_ours(frame[0])]
            where = f" is at\n{quote(own[0][0], int(own[0][1]), own[0][2])}" if own else ""
            lines.append(f"  rank {rank}{where}")
        return RankError(
            f"the run did not end within {timeout:g} s; it has been ended. Not done:\n"
            + "\n".join(lines)
        )

    def end(self) -> None:
        """Leave no process behind: those that have reported may go, the others are killed."""
        for connection, process in zip(self.connections, self.processes):
            with contextlib.suppress(OSError):
                connection.send("done")
            if process.is_alive():
                process.join(0.02)
        for process in self.processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
        for connection in (*self.connections, *self.lifelines):
            connection.close()


@contextlib.contextmanager
def run_folder() -> Iterator[str]:
    """A fresh folder for a run, in memory where the system has such a place; removed at the end."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**30
    folder = tempfile.mkdtemp(prefix="ranks-", dir=memory if roomy else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep the processes from running the parent's script again, which they do not need."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module
