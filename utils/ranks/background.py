"""What a virtual rank runs in the background: the functions that it launches, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .comm import Comm
from .scheduler import Fiber, Scheduler
from .work import Work


class Launched(Work):
    """A launched function: under way until its lane has run it."""

    def __init__(self, lane: Lane, comm: Comm, function: Callable, args: tuple):
        self.lane, self.comm, self.function, self.args = lane, comm, function, args
        self.time = lane.scheduler.machine.host.clock
        self.done, self.end, self.result = False, 0, None
        self.waiter: Fiber | None = None

    def is_completed(self) -> bool:
        return self.done

    def _wait(self):
        scheduler = self.lane.scheduler
        if not self.done:
            self.waiter = scheduler.current
            name = getattr(self.function, "__name__", "a function")
            scheduler.block(f"waits for {name}, which it launched")
        scheduler.machine.advance_host(self.end)
        return self.result

    def run(self) -> None:
        """Run the function, until its kernels have ended too (not those of the program)."""
        lane, host = self.lane, self.lane.fiber.host
        host.clock = max(host.clock, self.time)
        self.result = self.function(self.comm, *self.args)
        host.clock = max(host.clock, *host.streams)
        self.done, self.end, self.args = True, host.clock, ()
        if self.waiter is not None:
            waiter, self.waiter = self.waiter, None
            waiter.host.clock = max(waiter.host.clock, self.end)
            lane.scheduler.wake(waiter)


class Lane:
    """The background of a rank: runs what was launched, in the order of launch."""

    def __init__(self, scheduler: Scheduler, number: int):
        self.scheduler = scheduler
        self.jobs: deque[Launched] = deque()
        self.fiber = Fiber(scheduler, scheduler.ranks[number], f"background {number}", idle=True)
        scheduler.add(self.fiber, self.serve)

    def launch(self, comm: Comm, function: Callable, args: tuple) -> Launched:
        """Put a function in the queue, with the handle that it gets."""
        job = Launched(self, comm, function, args)
        self.jobs.append(job)
        if self.fiber.blocked and self.fiber.idle:
            self.fiber.host.clock = max(self.fiber.host.clock, job.time)
            self.scheduler.wake(self.fiber)
            self.fiber.idle = False
        return job

    def serve(self) -> None:
        """Run jobs until the run ends."""
        while not self.scheduler.closing:
            while self.jobs:
                self.fiber.idle = False
                self.jobs.popleft().run()
            self.fiber.idle = True
            self.scheduler.block("has nothing launched to do")
