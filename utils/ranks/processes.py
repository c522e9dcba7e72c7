"""Ranks as processes of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..events import Event
from ..timeline import Timeline
from .cores import threads_of_a_rank
from .crew import Crew
from .errors import RankError
from .packing import pack_into, unpack
from .result import Result
from .segment import Segment
from .worker import Job

TRANSPORTS = ("gloo", "shared")


def run_processes(program: Callable, args: tuple, ranks: int, timeout: float | None,
                  transport: str, record: bool, wire: tuple | None = None) -> Result:  # fmt: skip
    """Run a program on processes of this machine; see `run`."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport is {transport!r}; it can be {' or '.join(TRANSPORTS)}")
    with run_folder() as folder:
        _, reports, prints = run_jobs(
            program, args, ranks, folder, timeout, transport, record, wire
        )
    return Result([report[0] for report in reports], measured_timeline(reports), prints)


def run_jobs(program: Callable, args: tuple, ranks: int, folder: str, timeout: float | None,
             transport: str, record: bool,
             wire: tuple | None = None) -> tuple[list[Job], list, list[str]]:  # fmt: skip
    """Run a program in processes; returns their jobs, what they report and what they printed."""
    threads, environment = threads_of_a_rank(ranks), dict(os.environ)
    jobs = [Job(rank, ranks, folder, threads, transport, record, environment, wire)
            for rank in range(ranks)]  # fmt: skip
    with open(jobs[0].path("program"), "wb") as file:
        name = getattr(program, "__name__", program)
        pack_into((program, args), f"{name} or its arguments", file)
    Segment(jobs[0].path("memory"), jobs[0].layout()["end"], create=True)
    crew = Crew(jobs)
    try:
        crew.start()
        crew.reports(timeout)
    except RankError:
        Result([], Timeline(), read_prints(jobs)).replay()
        raise
    finally:
        crew.end()
    reports = [unpack(job.path("value", job.rank).read_bytes()) for job in jobs]
    return jobs, reports, read_prints(jobs)


def read_prints(jobs: list[Job]) -> list[str]:
    """What each rank has printed."""
    paths = [job.path("output", job.rank) for job in jobs]
    return [path.read_text("utf-8") if path.exists() else "" for path in paths]


def measured_timeline(reports: list) -> Timeline:
    """The messages that the ranks measured, and when each of them did not wait: it computed."""
    begin = min(start for *_, (start, _) in reports)
    events = []
    for rank, (_, messages, waits, (start, end)) in enumerate(reports):
        for src, dst, sent, received, nbytes in messages or ():
            wire = (f"rank{src}→rank{dst}",)
            events.append(
                Event("message", "communication", wire, sent - begin, received - sent, (src, dst),
                      nbytes)
            )  # fmt: skip
        at = start
        for wait_start, wait_end in (*sorted(waits), (end, end)) if waits is not None else ():
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


@contextlib.contextmanager
def run_folder() -> Iterator[str]:
    """A fresh folder for a run, in memory where the system has such a place; removed at the end."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2**30
    folder = tempfile.mkdtemp(prefix=f"ranks-{os.getpid()}-", dir=memory if roomy else None)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
