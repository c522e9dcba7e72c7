"""The processes of one run: started, listened to, watched and ended by the parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import wait

from .errors import DeadlockError, RankError, failure
from .watch import POLL, Watch
from .worker import Job, main

GRACE = 0.5  # seconds for the other ranks to report, once one has failed

starting = threading.Lock()


def context():
    """How processes are started: by a server that has PyTorch loaded, where there is one.

    `fork` alone would hang in products (the parent's OpenMP threads are not there) and could not
    use CUDA after the parent has; `spawn` takes seconds to load PyTorch each time.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    chosen = multiprocessing.get_context("forkserver")
    # Without torch._dynamo, the first optimizer in each process would take seconds to load it.
    chosen.set_forkserver_preload(["utils.ranks.worker", "torch._dynamo"])
    return chosen


class Crew:
    """The processes of one run, in rank order."""

    def __init__(self, jobs: list[Job]):
        self.jobs = jobs
        self.processes: list = []
        self.connections: list = []
        self.lifelines: list = []

    def start(self) -> None:
        chosen = context()
        with starting, hidden_main():
            for job in self.jobs:
                ours, theirs = chosen.Pipe()
                lifeline, held = chosen.Pipe()
                process = chosen.Process(target=main, args=(job, theirs, held), daemon=False)
                self.connections.append(ours)
                self.lifelines.append(lifeline)
                process.start()
                self.processes.append(process)
                theirs.close()
                held.close()

    def reports(self, timeout: float | None) -> None:
        """Wait until each rank has reported; RankError if one fails, all wait, or time runs out."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        watch = Watch(self.jobs[0])
        reported: set[int] = set()
        failures: list[RankError] = []
        waiting = set(range(len(self.processes)))
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                if not failures:
                    failures.append(self.late(timeout, watch, waiting, reported))
                break
            things = {self.connections[rank]: rank for rank in waiting}
            things |= {self.processes[rank].sentinel: rank for rank in waiting}
            for rank in {things[thing] for thing in wait(list(things), min(left, POLL))}:
                waiting.discard(rank)
                error = self.hear(rank)
                if error is None:
                    reported.add(rank)
                else:
                    failures.append(error)
                    deadline = min(deadline, time.monotonic() + GRACE)
            stuck = [] if failures else watch.stuck(reported)
            if stuck:
                failures.append(self.deadlock(watch, stuck, reported))
                break
        if failures:
            raise min(failures, key=lambda error: (error.consequence, error.rank))

    def hear(self, rank: int) -> RankError | None:
        """The error that a rank ended with, if it did."""
        try:
            if not self.connections[rank].poll():
                return self.dead(rank)
            kind, *content = self.connections[rank].recv()
        except (EOFError, OSError):
            return self.dead(rank)
        if kind == "value":
            return None
        raised, text = content
        error = failure(rank, raised)
        if hasattr(error, "add_note"):
            error.add_note(text)
        # gloo's complaints about another rank that has gone are not what went wrong first
        error.consequence = int("onnection" in raised[0][1] or "gloo" in text.splitlines()[-1])
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
        tail = self.said(rank)[-1000:]
        error = RankError(f"rank {rank} {how}" + (f"; it last said:\n{tail}" if tail else ""))
        error.rank = rank
        return error

    def said(self, rank: int) -> str:
        """What a rank's process wrote as errors."""
        path = self.jobs[rank].path("errors", rank)
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def late(self, timeout: float, watch: Watch, waiting: set[int], reported: set[int]):
        """The error for ranks that did not end in time."""
        pids = {rank: self.processes[rank].pid for rank in sorted(waiting)}
        return RankError(
            f"the run did not end within {timeout:g} s; it has been ended. Not done:\n"
            + watch.report(pids, reported)
        )

    def deadlock(self, watch: Watch, stuck: list[int], reported: set[int]) -> DeadlockError:
        """The error for ranks that wait for what will not come."""
        pids = {rank: self.processes[rank].pid for rank in stuck}
        return DeadlockError(
            "deadlock: these ranks wait for what cannot come any more\n"
            + watch.report(pids, reported)
        )

    def end(self) -> None:
        """Leave no process behind: those that have reported may go, the others are killed."""
        for connection, process in zip(self.connections, self.processes):
            with contextlib.suppress(OSError):
                connection.send("done")
            process.join(0.02)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
                os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.kill()
            process.join()
        for connection in (*self.connections, *self.lifelines):
            connection.close()


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep the processes from running the parent's script again, which they do not need."""
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main_module
