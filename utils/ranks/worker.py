"""What runs in the process of a rank. The parent's side is `processes.py`."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .comm import Comm, Work
from .control import ENTRIES, ENTRY, Log, number_of, shorten
from .errors import is_ours
from .packing import pack, unpack
from .shared import Segment, SharedAllReduce, offsets, wait_until
from .transports import GlooTransport, SharedTransport

CHUNK = 2 * 2**20  # bytes of a chunk of the shared-memory all-reduce
LANES = 2  # the program and its background


@dataclass(frozen=True)
class Job:
    """What a process needs to know to become a rank."""

    rank: int
    ranks: int
    folder: str
    payload: bytes
    threads: int
    transport: str

    @property
    def slot(self) -> int:
        """Bytes of a slot of the shared-memory transport; many ranks have smaller ones."""
        return max(4096, min(2**19, 2**26 // (self.ranks * self.ranks * SharedTransport.SLOTS)))

    def layout(self) -> list[int]:
        """Where the logs, the all-reduces and the pipes lie in the shared segment; its size."""
        all_reduce = SharedAllReduce.size(self.ranks, CHUNK)
        pipes = SharedTransport.size(self.ranks, self.slot) if self.transport == "shared" else 0
        logs = [ENTRIES * ENTRY] * (self.ranks * LANES)
        return offsets([*logs, *[all_reduce] * LANES, pipes])


class SendWork(Work):
    """A message on its way out."""

    def __init__(self, comm: ProcessComm, data: Tensor, dst: int, key):
        self.comm = comm
        self.work = comm._process.transport.send(data, dst, key)
        self.data = data

    def is_completed(self) -> bool:
        return self.work.is_completed()

    def _wait(self) -> None:
        with self.comm._process.waiting(self.comm._lane):
            self.work.wait()


class RecvWork(Work):
    """A message on its way in: looked for in the sender's log first, and checked, then received.

    gloo ends the process if more bytes come than were asked for.
    """

    def __init__(self, comm: ProcessComm, tensor: Tensor, src: int, key, about: int):
        self.comm, self.src, self.key, self.about = comm, src, key, about
        self.target = tensor.detach()
        self.data = self.target.contiguous()
        self.start = time.perf_counter()
        self.work = None
        self.log = comm._process.log(src, comm._lane)
        found = self.log.find(about)
        if found is not None:
            self.begin(found)

    def begin(self, entry: str) -> None:
        """Receive what the sender's log says is coming, if it is what was asked for."""
        sent_at, sent = entry.split(" ", 1)
        wanted = describe(self.data)
        if sent != wanted:
            raise ValueError(
                f"rank {self.src} sends {sent} to rank {self.comm._number}, which receives "
                f"{wanted}; make the two equal"
            )
        self.start = max(self.start, float(sent_at))
        self.work = self.comm._process.transport.recv(self.data, self.src, self.key)

    def has_been_sent(self) -> bool:
        """Whether the sender has begun: gloo does not tell when all has come, before `wait`."""
        if self.work is None and (found := self.log.find(self.about)) is not None:
            self.begin(found)
        return self.work is not None

    def is_completed(self) -> bool:
        return self.has_been_sent() and self.work.is_completed()

    def _wait(self) -> None:
        process = self.comm._process
        with process.waiting(self.comm._lane):
            if self.work is None:
                self.begin(self.log.wait_for(self.about))
            self.work.wait()
        if self.data.data_ptr() != self.target.data_ptr():
            self.target.copy_(self.data)
        process.note_message(self.src, self.comm._number, self.start, self.data.nbytes)


class ProcessComm(Comm):
    """The handle of a rank that is a process."""

    def __init__(self, process: Process, lane: int, rank, ranks, channel=()):
        super().__init__(rank, ranks, torch.device("cpu"), channel)
        self._process, self._lane = process, lane
        self._number = self.ranks[rank]
        self._counts: dict = {}
        whole = self.ranks == tuple(range(process.job.ranks))
        self.shared_all_reduce = process.all_reduces[lane] if whole else None

    def _about(self, src: int, dst: int, key) -> int:
        """A number for the next message with this key between two ranks, equal on both."""
        count = self._counts[src, dst, key] = self._counts.get((src, dst, key), 0) + 1
        return number_of((src, dst, key, count))

    def _post_send(self, tensor: Tensor, dst: int, key) -> Work:
        data = tensor.detach().contiguous()
        about = self._about(self._number, dst, key)
        entry = f"{time.perf_counter()} {describe(data)}"
        self._process.log(self._number, self._lane).write(about, entry, dst)
        return SendWork(self, data, dst, key)

    def _post_recv(self, tensor: Tensor, src: int, key) -> Work:
        return RecvWork(self, tensor, src, key, self._about(src, self._number, key))

    def _wait_any(self, works: list[Work]) -> int:
        come: list[int] = []

        def look() -> bool:
            come[:] = [i for i, work in enumerate(works) if work.has_been_sent()]
            return bool(come)

        with self._process.waiting(self._lane):
            wait_until(look)
        return min(come, key=lambda position: works[position].start)

    def time(self) -> float:
        return time.perf_counter() - self._process.start

    def _meet(self, key, description: tuple) -> dict[int, tuple]:
        about = number_of(key)
        mine = repr(description)
        self._process.log(self._number, self._lane).write(about, mine)
        said = {}
        with self._process.waiting(self._lane):
            for rank, number in enumerate(self.ranks):
                if rank == self.rank:
                    said[rank] = description
                    continue
                text = self._process.log(number, self._lane).wait_for(about)
                said[rank] = description if text == shorten(mine) else parse(text)
        return said

    def _launch(self, channel, function: Callable, args: tuple) -> Work:
        return self._process.launch(self, channel, function, args)

    def _sub_comm(self, rank: int, ranks, channel) -> Comm:
        return ProcessComm(self._process, self._lane, rank, ranks, channel)


def describe(tensor: Tensor) -> str:
    return f"{tensor.numel()} {str(tensor.dtype)[6:]} value{'s' * (tensor.numel() != 1)}"


def parse(text: str) -> tuple:
    """What another rank said, for an error message; as it stands if it was too long to keep."""
    import ast

    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text, (), ()


class Launched(Work):
    """A function that runs in the background thread of a process."""

    def __init__(self, process: Process, lane: int, future):
        self.process, self.lane, self.future = process, lane, future

    def is_completed(self) -> bool:
        return self.future.done()

    def _wait(self):
        with self.process.waiting(self.lane):
            return self.future.result()


class Process:
    """A process that is a rank: its shared memory, its transport, its background."""

    def __init__(self, job: Job):
        self.job = job
        layout = job.layout()
        segment = Segment(Path(job.folder, "memory"), layout[-1])
        self.logs = [Log(segment, start, job.rank) for start in layout[: job.ranks * LANES]]
        self.all_reduces = [
            SharedAllReduce(segment, layout[job.ranks * LANES + lane], job.ranks, job.rank, CHUNK)
            for lane in range(LANES)
        ]
        if job.transport == "shared":
            self.transport = SharedTransport(segment, layout[-2], job.rank, job.ranks, job.slot)
        else:
            self.transport = GlooTransport(job.rank, job.ranks)
        self.pool: ThreadPoolExecutor | None = None
        self.start = time.perf_counter()
        self.messages: list[tuple] = []
        self.waits: list[tuple[float, float]] = []

    def log(self, rank: int, lane: int) -> Log:
        return self.logs[rank * LANES + lane]

    @contextlib.contextmanager
    def waiting(self, lane: int):
        """Note that the program (not its background) waits: it does not compute then."""
        start = time.perf_counter()
        yield
        if lane == 0:
            self.waits.append((start, time.perf_counter()))

    def note_message(self, src: int, dst: int, start: float, nbytes: int) -> None:
        self.messages.append((src, dst, start, time.perf_counter(), nbytes))

    def launch(self, comm: ProcessComm, channel, function: Callable, args: tuple) -> Work:
        if self.pool is None:
            self.pool = ThreadPoolExecutor(1, thread_name_prefix="background")
        own = ProcessComm(self, 1, comm.rank, comm.ranks, channel)
        return Launched(self, comm._lane, self.pool.submit(function, own, *args))


def main(job: Job, connection, lifeline) -> None:
    """The life of a process rank: take up the job, report, and stay until all have reported."""
    with contextlib.suppress(OSError):
        os.setsid()  # so that the parent can end this process with all that it starts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, args=(lifeline, job.folder), daemon=True).start()
    errors = redirect(job)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=errors, all_threads=False)
    try:
        report = pack(play(job), "the value that the program returned")
        message = ("value", report)
    except BaseException as error:
        message = ("error", *describe_error(error))
    sys.stdout.flush()
    connection.send(message)
    with contextlib.suppress(EOFError, OSError):
        connection.recv()  # all have reported: nobody needs this rank any more
    os._exit(0)


def play(job: Job):
    """Run the program as a rank; returns (value, messages, waits, (start, end))."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.FileStore(str(Path(job.folder, "store")), job.ranks)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.ranks)
    process = Process(job)
    program, args = unpack(job.payload)
    comm = ProcessComm(process, 0, job.rank, range(job.ranks))
    start = time.perf_counter()
    value = program(comm, *args)
    return value, process.messages, process.waits, (start, time.perf_counter())


def redirect(job: Job):
    """Send what is printed, and what libraries complain of, to files in the run's folder."""
    sys.stdout = open(Path(job.folder, f"output{job.rank}"), "w", buffering=1)
    errors = open(Path(job.folder, f"errors{job.rank}"), "w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    return errors


def end_with_parent(lifeline, folder: str) -> None:
    """End at once when the parent has gone, and clear away what it cannot clear any more."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def describe_error(error: BaseException) -> tuple[str, str, list, str]:
    """Type, message, the program's lines (the last one where it was raised), whole traceback."""
    frames = [
        (frame.filename, frame.lineno, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_ours(frame.filename)
    ]
    text = "".join(traceback.format_exception(error))
    return type(error).__name__, str(error), frames, text
