"""What each virtual rank has of its own though all are threads of one process.

Random numbers (PyTorch's, NumPy's and Python's), what is printed, `time.sleep`, the number of
threads: as in a process of its own. All is as before when the run has ended.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from ..vgpu import state
from ..vgpu.machine import PICOSECONDS
from .scheduler import Fiber, Rank, Scheduler


@contextlib.contextmanager
def own_surroundings(scheduler: Scheduler) -> Iterator[None]:
    """Give each rank its own surroundings while a run lasts."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept(torch.get_default_dtype, torch.set_default_dtype))
        stack.enter_context(kept(torch.get_num_threads, torch.set_num_threads))
        stack.enter_context(own_random_numbers(scheduler))
        stack.enter_context(contextlib.redirect_stdout(Output(scheduler, sys.stdout)))
        stack.enter_context(replaced(time, "sleep", sleeping(scheduler, time.sleep)))
        yield


@contextlib.contextmanager
def kept(get: Callable, put: Callable) -> Iterator[None]:
    """A setting of PyTorch's that is put back in the end."""
    before = get()
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def replaced(owner, name: str, replacement) -> Iterator[None]:
    """An attribute that has another value for a while."""
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)


def rank_of_thread(scheduler: Scheduler) -> Fiber | None:
    """The fiber that runs, if this is its thread."""
    fiber = scheduler.current
    return fiber if fiber and fiber.thread is threading.current_thread() else None


class Output:
    """Stands for `sys.stdout`: what a rank prints goes to that rank's list."""

    def __init__(self, scheduler: Scheduler, original):
        self.scheduler, self.original = scheduler, original

    def write(self, text: str) -> int:
        fiber = rank_of_thread(self.scheduler)
        if fiber is None:
            return self.original.write(text)
        fiber.rank.prints.append(text)
        return len(text)

    def flush(self) -> None:
        self.original.flush()

    def __getattr__(self, name):
        return getattr(self.original, name)


def sleeping(scheduler: Scheduler, original: Callable) -> Callable:
    """`time.sleep`, which in a rank takes simulated time."""

    @functools.wraps(original)
    def sleep(seconds):
        fiber = rank_of_thread(scheduler)
        if fiber is None:
            return original(seconds)
        host, machine = fiber.host, scheduler.machine
        start = host.clock
        host.clock += round(seconds * PICOSECONDS)
        machine.note("sleep", "host", host.rows, start, host.clock)

    return sleep


# Random numbers


@contextlib.contextmanager
def own_random_numbers(scheduler: Scheduler) -> Iterator[None]:
    """Let each rank draw its own numbers, beginning from a seed that is the rank's number.

    PyTorch's generator is handed from rank to rank, but only when one of them needs it; NumPy and
    Python's `random` get a generator for each rank.
    """
    before = torch.get_rng_state()
    generators = RandomGenerators(scheduler)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_rng_state, before)
        stack.enter_context(replaced(state, "before_random", generators.claim))
        for name in ("get_rng_state", "set_rng_state", "initial_seed", "seed"):
            function = generators.claiming(getattr(torch, name))
            stack.enter_context(replaced(torch, name, function))
            stack.enter_context(replaced(torch.random, name, function))
        for module, kind in ((random, random.Random), (np.random, np.random.RandomState)):
            for name in own_functions(module):
                function = generators.drawing(module, kind, name)
                stack.enter_context(replaced(module, name, function))
        yield


def own_functions(module) -> list[str]:
    """The functions of a module that are methods of one generator, which all share."""
    shared = module.random.__self__
    names = [n for n in vars(module) if getattr(getattr(module, n), "__self__", None) is shared]
    return [*names, "seed"]  # NumPy's is a function of its own


class RandomGenerators:
    """The random numbers of all ranks."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.holder: Rank | None = None  # whose state PyTorch's generator holds
        self.others: dict = {}

    def claim(self) -> None:
        """Let PyTorch's generator hold the state of the rank that runs."""
        rank = self.scheduler.current.rank
        if rank is self.holder:
            return
        generator = torch.default_generator
        if self.holder is not None:
            self.holder.random_state = generator.get_state()
        self.holder = rank
        if rank.random_state is None:
            generator.manual_seed(rank.number)
        else:
            generator.set_state(rank.random_state)

    def claiming(self, original: Callable) -> Callable:
        """A function of `torch.random` that finds the state of the rank that calls it."""

        @functools.wraps(original)
        def function(*args, **kwargs):
            self.claim()
            return original(*args, **kwargs)

        return function

    def drawing(self, module, kind, name: str) -> Callable:
        """A function of `random` or `np.random` that uses the generator of the rank."""
        original = getattr(module, name)

        @functools.wraps(original)
        def function(*args, **kwargs):
            fiber = rank_of_thread(self.scheduler)
            if fiber is None:
                return original(*args, **kwargs)
            number = fiber.rank.number
            generator = self.others.get((module, number))
            if generator is None:
                generator = self.others[module, number] = kind(number)
            return getattr(generator, name)(*args, **kwargs)

        return function
