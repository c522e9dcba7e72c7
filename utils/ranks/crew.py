"""The processes of one run: started, listened to, watched and ended by the parent."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from multiprocessing.connection import wait

from .errors import RankError, is_ours, quote
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
    chosen.set_forkserver_preload(["utils.ranks.worker"])
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
        """Wait until each rank has reported; RankError if one fails or time runs out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        reported: set[int] = set()
        failures: dict[int, RankError] = {}
        while len(reported) + len(failures) < len(self.processes):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                if failures:
                    break
                raise self.late(timeout, reported)
            waiting = set(range(len(self.processes))) - reported - failures.keys()
            things = {self.connections[rank]: rank for rank in waiting}
            things |= {self.processes[rank].sentinel: rank for rank in waiting}
            for rank in {things[thing] for thing in wait(list(things), left)}:
                error = self.hear(rank)
                if error is None:
                    reported.add(rank)
                else:
                    failures[rank] = error
                    soon = time.monotonic() + GRACE
                    deadline = soon if deadline is None else min(deadline, soon)
        if failures:
            raise min(failures.values(), key=lambda error: (error.consequence, error.rank))

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
        name, message, frames, text = content
        where = f"\n{quote(*frames[-1])}" if frames else ""
        error = RankError(f"rank {rank} raised {name}: {message}{where}")
        error.rank, error.text = rank, text
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
        tail = self.said(rank)[-1000:]
        error = RankError(f"rank {rank} {how}" + (f"; it last said:\n{tail}" if tail else ""))
        error.rank = rank
        return error

    def said(self, rank: int) -> str:
        """What a rank's process wrote as errors."""
        path = self.jobs[rank].path("errors", rank)
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def late(self, timeout: float, reported: set[int]) -> RankError:
        """The error for ranks that did not end in time, with the line at which each one is."""
        late = [rank for rank in range(len(self.processes)) if rank not in reported]
        where = self.lines(late)
        lines = [f"  rank {rank}" + (f" is at\n{where[rank]}" if rank in where else "")
                 for rank in late]  # fmt: skip
        return RankError(
            f"the run did not end within {timeout:g} s; it has been ended. Not done:\n"
            + "\n".join(lines)
        )

    def lines(self, ranks: list[int]) -> dict[int, str]:
        """The line of the program at which ranks are now, where that can be found out."""
        if not hasattr(signal, "SIGUSR1"):
            return {}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        found = {}
        for rank in ranks:
            frames = re.findall(r'File "(.+)", line (\d+) in (.+)', self.said(rank))
            own = [frame for frame in frames if not is_ours(frame[0])]
            if own:
                name, line, function = own[0]
                found[rank] = quote(name, int(line), function)
        return found

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
