"""A parameter server written by hand: a key-value store on ranks of its own (chapter 06).

The first ranks of a world are workers: they `push` gradients and `pull` values, by key. The last
ones are servers: server i keeps part i of every value, and applies what is pushed. When it applies
a gradient, and whom it keeps waiting, is its scheme: `Asynchronous`, `StaleSynchronous` or
`Synchronous`. The idea, and keys cut over several servers: Li and others, OSDI 2014; the bound on
staleness: Ho and others, NIPS 2013.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .ranks.collectives import Flat

PUSH, PULL, LEAVE = range(3)  # what a worker asks for
HEADER, VERSION, VALUE = range(3)  # tags of messages

# --- what a server does with the gradients of one value -----------------------------------------


class Asynchronous:
    """One value on a server; `step(value, gradient)` applies every gradient as it comes."""

    def __init__(self, value, workers, step):
        self.value, self.step = value, step
        self.version = 0  # updates so far
        self.pushes = dict.fromkeys(range(workers), 0)
        self.staleness = []  # for each push the updates that its worker had not seen

    def push(self, worker, gradient, version):
        """Take a gradient computed from a version; None counts as a push, but changes nothing."""
        self.pushes[worker] += 1
        self.staleness.append(self.version - version)
        self.take(worker, gradient)

    def take(self, worker, gradient):
        if gradient is not None:
            self.step(self.value, gradient)
            self.version += 1

    def may_pull(self, worker):
        return True

    def leave(self, worker):
        del self.pushes[worker]


class StaleSynchronous(Asynchronous):
    """Asynchronous, but who is more than `bound` pushes ahead of the slowest has to wait."""

    def __init__(self, value, workers, step, bound):
        super().__init__(value, workers, step)
        self.bound = bound

    def may_pull(self, worker):
        return self.pushes[worker] - min(self.pushes.values()) <= self.bound


class Synchronous(Asynchronous):
    """Waits for everyone's gradient, then applies the mean; if one is None, none is applied."""

    def __init__(self, value, workers, step):
        super().__init__(value, workers, step)
        self.round = {}  # the gradients that have come, by worker

    def take(self, worker, gradient):
        if worker in self.round:
            raise ValueError(f"worker {worker} pushed twice in a round; it has to pull in between")
        self.round[worker] = gradient
        self.finish_round()

    def finish_round(self):
        if self.round and self.pushes.keys() <= self.round.keys():
            gradients = [self.round.pop(worker) for worker in sorted(self.round)]
            if all(gradient is not None for gradient in gradients):
                super().take(None, sum(gradient / len(gradients) for gradient in gradients))

    def may_pull(self, worker):
        return worker not in self.round

    def leave(self, worker):
        super().leave(worker)
        self.finish_round()


# --- the two ends -------------------------------------------------------------------------------


def serve(comm, entries: list[Asynchronous], workers: int) -> None:
    """A server's life: answer the pushes and pulls of ranks 0..workers-1 until all have left."""
    pulls, answers = {}, {}
    talks = {worker: conversation(comm, worker, entries, pulls) for worker in range(workers)}
    mail = {worker: next(talk) for worker, talk in talks.items()}
    while mail:
        worker = list(mail)[comm.wait_any(mail.values())]
        mail[worker] = next(talks[worker], None)
        if mail[worker] is None:
            del mail[worker]
        for worker in [worker for worker in pulls if pulls[worker].may_pull(worker)]:
            answers[worker] = answer(comm, worker, pulls.pop(worker))
    for works in answers.values():
        for work in works:
            work.wait()


def conversation(comm, worker: int, entries: list[Asynchronous], pulls: dict):
    """What a server and one worker say to each other; yields each message it has to wait for."""
    header = torch.zeros(4, dtype=torch.int64)
    while True:
        yield comm.irecv(header, worker, HEADER)
        request, key, version, usable = header.tolist()
        if request == LEAVE:
            for entry in entries:
                entry.leave(worker)
            return
        if request == PULL:
            pulls[worker] = entries[key]
        else:
            gradient = torch.empty_like(entries[key].value) if usable else None
            if usable:
                yield comm.irecv(gradient, worker, VALUE)
            entries[key].push(worker, gradient, version)


def answer(comm, worker: int, entry: Asynchronous) -> list:
    """Send a worker the version and a snapshot of the value, which later pushes do not change."""
    version = torch.tensor([entry.version])
    return [comm.isend(version, worker, VERSION), comm.isend(entry.value.clone(), worker, VALUE)]


class KeyValueStore:
    """A worker's end of the store: push gradients, pull values, by key.

    `values` are the values at the start, which tell keys, shapes and dtypes. `servers` are the
    ranks that serve, in the order of the parts that they keep.
    """

    def __init__(self, comm, values: Mapping[str, Tensor], servers: Sequence[int]):
        self.comm = comm
        self.servers = list(servers)
        self.keys = list(values)
        self.like = {key: (value.shape, value.dtype) for key, value in values.items()}
        self.versions = {key: [0] * len(self.servers) for key in values}

    def push(self, key: str, gradient: Tensor | None) -> None:
        """Send each server its part of a gradient, and with it the version it was computed from.

        None says that this worker has no gradient this time. One that is not finite becomes None.
        """
        self.check(key, gradient)
        usable = gradient is not None and bool(gradient.isfinite().all())
        parts = gradient.detach().flatten().tensor_split(len(self.servers)) if usable else ()
        for i in self.turns():
            self.ask(i, PUSH, key, usable)
            if usable:
                self.comm.send(parts[i], self.servers[i], VALUE)

    def pull(self, key: str, value: Tensor) -> None:
        """Overwrite `value` with the store's, in place, as soon as the servers' scheme allows."""
        self.check(key, value)
        flat = Flat(value)
        parts = flat.values.tensor_split(len(self.servers))
        version = torch.zeros(1, dtype=torch.int64)
        for i in self.turns():
            self.ask(i, PULL, key)
            self.comm.recv(version, self.servers[i], VERSION)
            self.comm.recv(parts[i], self.servers[i], VALUE)
            self.versions[key][i] = version.item()
        flat.write_back()

    def leave(self) -> None:
        """Tell the servers that this worker has ended."""
        for i in self.turns():
            self.ask(i, LEAVE, self.keys[0])

    def ask(self, i: int, request: int, key: str, usable: bool = False) -> None:
        """Send a request to server i."""
        header = [request, self.keys.index(key), self.versions[key][i], usable]
        self.comm.send(torch.tensor(header), self.servers[i], HEADER)

    def turns(self) -> list[int]:
        """Every worker begins with another server, so that they do not all queue for one."""
        n = len(self.servers)
        return [(self.comm.rank + i) % n for i in range(n)]

    def check(self, key: str, tensor: Tensor | None) -> None:
        """ValueError for an unknown key, or a tensor that is not like the store's value."""
        if key not in self.like:
            raise ValueError(f"the store has no key {key!r}; it has {', '.join(self.keys)}")
        if tensor is not None and (tensor.shape, tensor.dtype) != self.like[key]:
            shape, dtype = self.like[key]
            raise ValueError(
                f"the store's {key!r} is {tuple(shape)} {dtype}, but this is "
                f"{tuple(tensor.shape)} {tensor.dtype}"
            )


class LocalStore(KeyValueStore):
    """The store of a world of one, which is worker and server at once: nothing is sent."""

    def __init__(self, comm, values: Mapping[str, Tensor], entries: Mapping[str, Asynchronous]):
        super().__init__(comm, values, [0])
        self.entries = entries

    def push(self, key: str, gradient: Tensor | None) -> None:
        self.check(key, gradient)
        usable = gradient is not None and bool(gradient.isfinite().all())
        gradient = gradient.detach().flatten() if usable else None
        self.entries[key].push(0, gradient, self.versions[key][0])

    def pull(self, key: str, value: Tensor) -> None:
        self.check(key, value)
        value.detach().copy_(self.entries[key].value.view(value.shape))
        self.versions[key] = [self.entries[key].version]

    def leave(self) -> None:
        pass


# --- who does what ------------------------------------------------------------------------------


def parameter_server(comm, values: Mapping[str, Tensor], scheme: Callable, work: Callable,
                     servers: int = 1):  # fmt: skip
    """A rank's part in a world of workers and, last, `servers` servers.

    A worker calls `work(workers, store)`, with a handle on the workers' group, and returns what
    that returns. A server returns, by key, its part of the final value, the version and the
    staleness of each gradient. `scheme(value, workers)` makes what a server keeps of each of
    `values`, such as `lambda value, workers: Asynchronous(value, workers, sgd(0.1))`. In a world
    of one, the only rank is both. Raises ValueError if there is no rank left to work.
    """
    alone = comm.world_size == 1
    servers = 1 if alone else servers
    workers = comm.world_size - servers
    if not alone and (servers < 1 or workers < 1):
        raise ValueError(
            f"{comm.world_size} ranks cannot be {servers} servers and at least one worker"
        )
    if comm.rank < workers:
        store = KeyValueStore(comm, values, range(workers, comm.world_size))
        result = work(comm.group(range(workers)), store)
        store.leave()
        return result
    entries = {}
    for key, value in values.items():
        part = value.detach().flatten().tensor_split(servers)[comm.rank - workers]
        entries[key] = scheme(part.to(comm.device, copy=True), max(workers, 1))
    if alone:
        return work(comm, LocalStore(comm, values, entries))
    serve(comm, list(entries.values()), workers)
    return {
        key: {"value": entry.value, "version": entry.version, "staleness": entry.staleness}
        for key, entry in entries.items()
    }


def sgd(rate: float) -> Callable:
    """A step for the servers: value -= rate · gradient."""
    return lambda value, gradient: value.sub_(gradient, alpha=rate)
