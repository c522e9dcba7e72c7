"""What runs in the process of a rank. The parent's side is `processes.py` and `crew.py`."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .control import Board, Doing, State
from .errors import story
from .mail import Mail
from .nccl import NcclTransport
from .packing import pack_into, unpack
from .pipes import SharedTransport
from .process import Lane, Process
from .process_comm import ProcessComm
from .segment import LINE, WORD, Segment, offsets, wait_until
from .shared import SharedAllReduce
from .transports import GlooTransport
from .wire import Wire
from .work import check_gradients_arrived

LANES = 2  # the program and its background


@dataclass(frozen=True)
class Job:
    """What a process needs to know to become a rank."""

    rank: int
    ranks: int
    folder: str
    threads: int
    transport: str
    record: bool
    environment: dict[str, str]
    wire: tuple[float, float] | None = None

    @property
    def slot(self) -> int:
        """Bytes of a slot of the shared-memory transport; many ranks have smaller ones."""
        return max(4096, min(2**19, 2**24 // (self.ranks * self.ranks)))

    def layout(self) -> dict[str, int]:
        """Where in the shared segment what begins; its "end"."""
        sizes = {"start": LINE * WORD, "states": self.ranks * LANES * State.SIZE}
        sizes["mail"] = Mail.size(self.ranks)
        for lane in range(LANES):
            sizes[f"board{lane}"] = Board.size(self.ranks)
            sizes[f"all_reduce{lane}"] = SharedAllReduce.size(self.ranks)
        if self.transport == "shared":
            sizes["pipes"] = SharedTransport.size(self.ranks, self.slot)
        return dict(zip([*sizes, "end"], offsets(list(sizes.values()))))

    def states(self, segment: Segment) -> list[list[State]]:
        """For each rank the states of its lanes."""
        start = self.layout()["states"]
        return [
            [State(segment, start + (rank * LANES + lane) * State.SIZE) for lane in range(LANES)]
            for rank in range(self.ranks)
        ]

    def path(self, what: str, rank: int | None = None) -> Path:
        """A file of the run: "program", "memory", or this (or a) rank's "output" and the like."""
        return Path(self.folder, what if rank is None else f"{what}{rank}")


def make_process(job: Job) -> Process:
    """Take this process's place in the shared memory."""
    at = job.layout()
    segment = Segment(job.path("memory"), at["end"])
    mail = Mail(segment, at["mail"], job.rank, job.ranks)
    if job.transport == "shared":
        transport = SharedTransport(segment, at["pipes"], job.rank, job.ranks, job.slot)
    elif job.transport == "nccl":
        transport = NcclTransport(mail, job.rank)
    else:
        transport = GlooTransport(mail)
    process = Process(job.rank, job.ranks, mail, transport, patience(job))
    process.wire = Wire(*job.wire) if job.wire else None
    states = job.states(segment)[job.rank]
    for lane in range(LANES):
        board = Board(segment, at[f"board{lane}"], job.rank, job.ranks)
        shared = SharedAllReduce(segment, at[f"all_reduce{lane}"], job.rank, job.ranks)
        process.lanes.append(Lane(process, lane, states[lane], board, shared))
    states[1].set(Doing.IDLE)
    if not job.record or job.transport == "nccl":  # the profiler records then
        process.messages = process.lanes[0].waits = None
    return process


def patience(job: Job) -> tuple[int, int]:
    """How often a rank that waits looks without a break, then gives way, until it sleeps.

    It must not take the processor from those whom it waits for: other ranks, where there are more
    of them than cores, and the threads of gloo.
    """
    alone = job.transport == "shared"
    crowded = job.ranks > (os.cpu_count() or 1)
    return (2000 if alone and not crowded else 20), (100 if crowded else 2000)


class Report:
    """Tells the parent how the rank ended, once: what comes later is not heard any more."""

    def __init__(self, connection):
        self.connection = connection
        self.lock = threading.Lock()

    def send(self, *message) -> None:
        with self.lock, contextlib.suppress(OSError):
            sys.stdout.flush()
            self.connection.send(message)

    def failure(self, error: BaseException) -> None:
        self.send("error", story(error), "".join(traceback.format_exception(error)))


def main(job: Job, connection, lifeline) -> None:
    """The life of a process rank: take up the job, report, and stay until all have reported."""
    with contextlib.suppress(OSError):
        os.setsid()  # so that the parent can end this process with all that it starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(lifeline, job.folder), daemon=True).start()
    errors = redirect(job)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=errors, all_threads=True)
    report = Report(connection)
    process = None
    try:
        os.environ.update(job.environment)
        settle(job)
        process = make_process(job)
        process.failed = report.failure
        play(job, process)
        report.send("value")
    except BaseException as error:
        report.failure(error)
    linger(connection, process)
    os._exit(0)


def settle(job: Job) -> None:
    """Make this process one of the ranks' own: threads, random numbers, the group of all."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.rank)
    np.random.seed(job.rank)
    random.seed(job.rank)
    register_optimizer_step_pre_hook(check_gradients_arrived)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback()
    backend = "gloo"
    if job.transport == "nccl":
        torch.cuda.set_device(job.rank)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(job.path("store")), job.ranks)
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.ranks)


def play(job: Job, process: Process) -> None:
    """Run the program as a rank; leaves its report in a file.

    The report is (value, messages, waits, (start, end)); on a GPU its peak memory for messages.
    ."""
    program, args = unpack(job.path("program").read_bytes())
    on_gpu = job.transport == "nccl"
    device = torch.device("cuda", job.rank) if on_gpu else torch.device("cpu")
    comm = ProcessComm(process, process.lanes[0], job.rank, range(job.ranks), device)
    with profiled(job) if on_gpu else contextlib.nullcontext():
        process.start = begin_together(job)
        value = program(comm, *args)
        process.finish()
        if on_gpu:
            torch.cuda.synchronize()
        took = process.start, time.perf_counter()
    messages = torch.cuda.max_memory_allocated() if on_gpu else process.messages
    report = value, messages, process.lanes[0].waits, took
    with open(job.path("value", job.rank), "wb") as file:
        pack_into(report, "the value that the program returned", file)


def begin_together(job: Job) -> float:
    """When the run began: the moment at which rank 0 came here, on the clock that all share."""
    start = Segment(job.path("memory"), job.layout()["end"]).words(job.layout()["start"], 1)
    if job.rank == 0:
        start[0] = time.perf_counter_ns()
    wait_until(lambda: start[0], 0)
    return start[0] * 1e-9


@contextlib.contextmanager
def profiled(job: Job) -> Iterator[None]:
    """Let PyTorch's profiler write what the GPU does to a file of the run."""
    if not job.record:
        yield
        return
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield
    profile.export_chrome_trace(str(job.path("trace", job.rank)))


def linger(connection, process: Process | None) -> None:
    """Stay until all have reported: what this rank has sent may be still on its way."""
    with contextlib.suppress(EOFError, OSError):
        while not connection.poll(0.001 if process is not None else None):
            process.transport.progress()
            process.mail.read()


def loopback() -> str:
    """The network interface that leads to this machine only."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "lo")


def redirect(job: Job):
    """Send what is printed, and what libraries complain of, to files in the run's folder."""
    mode = {"mode": "w", "buffering": 1, "encoding": "utf-8", "errors": "replace"}
    sys.stdout = open(job.path("output", job.rank), **mode)
    errors = open(job.path("errors", job.rank), **mode)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    return errors


def end_with_parent(lifeline, folder: str) -> None:
    """End at once when the parent has gone, and clear away what it cannot clear any more."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)  # with all that this rank has started
    os._exit(1)
