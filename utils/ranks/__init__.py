"""One program on many ranks: virtual ones, processes, or GPUs.

result = run(program, ranks=4, on="virtual")
result.values, result.timeline, result.prints

comm.py         `Comm`, a rank's handle: who it is, and how to reach the others; work.py what is
                under way
collectives.py  the collectives as a rank's program, made of messages; rings.py over several rings
errors.py       errors that name the rank and the line; packing.py programs and values as bytes;
                cores.py how ranks share the processor

virtual.py      ranks in simulated time: scheduler.py decides who runs, messages.py what messages
                take, background.py runs what is launched, surroundings.py keeps ranks apart
processes.py    ranks as processes: crew.py starts and ends them, worker.py is a rank's life,
                process.py how it waits, process_comm.py its handle, process_work.py what it has
                under way, on transports.py (sockets) or pipes.py (shared memory); segment.py,
                mail.py and control.py: what they share besides; shared.py reduces there; wire.py
                slows messages down
gpus.py         ranks as such processes with a GPU each, on nccl.py
"""

from __future__ import annotations

from collections.abc import Callable

from ..devices import DEFAULT_SERVER, choose, place_on_machines
from ..hardware import Server, get_server
from .comm import Comm
from .errors import DeadlockError, RankError
from .gpus import run_gpus
from .processes import run_processes
from .result import Result
from .virtual import run_virtual
from .wire import check_wire
from .work import Work

__all__ = ["Comm", "DeadlockError", "RankError", "Result", "Work", "run"]


PLACES = ("auto", "virtual", "processes", "gpus")


def run(program: Callable, ranks: int = 4, on: str = "auto", args: tuple = (), *,
        server: str | Server | None = None, network: str | None = None, transport: str = "gloo",
        bandwidth: float | None = None, latency: float = 0.0, timeout: float | None = 300,
        record: bool = True) -> Result:  # fmt: skip
    """Call `program(comm, *args)` once a rank; returns their values, timeline and prints.

    `on` is "virtual" (simulated time on `server`, as for `Cluster`), "processes" (of this machine,
    their messages going over `transport` "gloo" or "shared" memory), "gpus" or "auto".
    `bandwidth` (bytes/s) and `latency` (s) slow down the messages of processes. The program gets a
    copy of its own of `args` and of what it refers to, wherever it runs, and returns what can be
    copied back. A rank that raises, is killed, or is not done after `timeout` seconds ends the
    whole run with an error that names it; a deadlock of virtual ranks is an error at once.
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"a run needs a whole number of ranks, at least 1, not {ranks!r}")
    if on not in PLACES:
        raise ValueError(f"on is {on!r}; it can be {', '.join(PLACES)}")
    if on == "auto":
        on = {"cuda": "gpus", "cpu": "processes"}.get(choose(ranks, server), "virtual")
    wire = check_wire(bandwidth, latency, on)
    if on == "gpus":
        result = run_gpus(program, args, ranks, timeout, record)
    elif on == "processes":
        result = run_processes(program, args, ranks, timeout, transport, record, wire)
    else:
        server = place_on_machines(ranks, get_server(server or DEFAULT_SERVER), network)
        name = f"{ranks} × {server.chips[0].name} on {server.name}"
        result = run_virtual(program, args, ranks, server, name, timeout, record)
    result.replay()
    return result
