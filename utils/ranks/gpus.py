"""Ranks as processes with a GPU each, their messages by NCCL, their time from the profiler."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ..timeline import Timeline
from ..traces import is_recorded
from .processes import run_folder, run_jobs
from .result import Result


def run_gpus(program: Callable, args: tuple, ranks: int, timeout: float | None,
             record: bool) -> Result:  # fmt: skip
    """Run a program on this machine's GPUs, one process each; see `run`.

    RuntimeError where there are fewer GPUs than ranks, or no NCCL.
    """
    check_gpus(ranks)
    with run_folder() as folder:
        jobs, reports, prints = run_jobs(program, args, ranks, folder, timeout, "nccl", record)
        traces = [job.path("trace", job.rank) for job in jobs] if record else []
        timeline = merge(traces, f"{ranks} × {torch.cuda.get_device_name(0)}", ranks)
    took = [start_and_end for *_, start_and_end in reports]
    timeline.duration = max(end for _, end in took) - min(start for start, _ in took)
    timeline.peak_memory = [{"other": report[1]} for report in reports]
    return Result([report[0] for report in reports], timeline, prints)


def check_gpus(ranks: int) -> None:
    """Say what is missing for so many ranks, and what can be had instead."""
    found = torch.cuda.device_count()
    missing = None
    if found < ranks:
        missing = f"{ranks} ranks need {ranks} GPUs, and this machine has {found or 'none'}"
    elif not (dist.is_available() and dist.is_nccl_available()):
        missing = "this PyTorch was built without NCCL, by which GPUs talk to one another"
    if missing:
        raise RuntimeError(
            f"on='gpus' runs one process on each GPU: {missing}. Use on='virtual' for simulated "
            "GPUs, or on='processes' for real processes that compute on the CPU"
        )


def merge(traces: list[Path], machine: str, ranks: int) -> Timeline:
    """The profiles of all ranks as one timeline: their clock is that of the machine."""
    events, begins = [], []
    for path in traces:
        trace = json.loads(path.read_text())
        begins.append(begin_of(trace))
        events.append(Timeline.from_profiler(trace).events)
    known = [begin for begin in begins if begin is not None]
    merged = [
        dataclasses.replace(event, start=event.start + begin - min(known))
        for begin, own in zip(begins, events)
        for event in own
    ]
    merged.sort(key=lambda event: event.start)
    return Timeline(merged, [f"gpu{rank}" for rank in range(ranks)], False, machine)


def begin_of(trace: dict) -> float | None:
    """When the first thing in a profile began, in seconds of the machine's clock."""
    starts = [slice["ts"] for slice in trace.get("traceEvents", []) if is_recorded(slice)]
    base = trace.get("baseTimeNanoseconds", 0) * 1e-9
    return base + min(starts) * 1e-6 if starts else None
