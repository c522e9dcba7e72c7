"""`Comm`: what one rank knows and can say, the same on virtual ranks, processes and GPUs.

Names and meanings are torch.distributed's (`wait_any` and `time` are MPI's). A backend supplies
`time`, `_post_send`, `_post_recv`, `_wait_any`, `_meet` and `_launch`; everything else is made of
these, so that what a collective costs is what its messages cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from . import collectives
from .work import Work, overlap

REDUCTIONS = ("sum", "avg", "max", "min")
SHORT = 8192  # bytes: in a ring, a part of less takes mostly latency
OTHER_HANDLE = (
    "this handle belongs to another thread of the rank: a launched function must use the one that "
    "it is given as its first argument, and only the program itself the program's"
)


class Comm:
    """A rank's handle on its group: who it is, who the others are, and how to reach them.

    `rank` and `world_size` are those of the group; `ranks` lists the members by their number in
    the whole run. Tensors are sent and received in place; those received must have the sender's
    number of elements and dtype. Every call that concerns the whole group must be made by each of
    its ranks, in the same order.
    """

    def __init__(self, rank: int, ranks: Sequence[int], device: torch.device, channel=()):
        self.rank = rank
        self.ranks = tuple(ranks)
        self.device = device
        self._channel = channel
        self._calls = 0
        self._groups: dict[tuple[int, ...], int] = {}
        self._launches = 0

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device}"

    # Point to point

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Send to a rank; returns once that rank has received."""
        self._wait_all((self.isend(tensor, dst, tag),))

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> None:
        """Receive from a rank into `tensor`, which must have the sender's size and dtype."""
        self._check_peer(tensor, src, "receive from")
        self._wait_all((self._post_recv(tensor, self.ranks[src], tag),))

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Begin to send; leave the tensor unchanged until `wait` has returned."""
        self._check_peer(tensor, dst, "send to")
        return self._post_send(tensor, self.ranks[dst], tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Begin to receive; the tensor's values are there when `wait` has returned."""
        self._check_peer(tensor, src, "receive from")
        return self._post_recv(tensor, self.ranks[src], tag).keep([tensor])

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int, tag: int = 0) -> None:
        """Send to one rank and receive from another at the same time, which cannot deadlock."""
        self._check_peer(send, dst, "send to")
        self._check_peer(recv, src, "receive from")
        sending = self._post_send(send, self.ranks[dst], tag)
        self._wait_all((self._post_recv(recv, self.ranks[src], tag), sending))

    def wait_any(self, works: Sequence[Work]) -> int:
        """Wait until one of several messages (of `irecv`) has arrived; returns its position.

        Where several have arrived already, it is the earliest. The others stay under way.
        """
        works = list(works)
        if not works:
            raise ValueError(f"rank {self.rank}: wait_any needs at least one message to wait for")
        position = self._wait_any(works)
        works[position].wait()
        return position

    def time(self) -> float:
        """Seconds since the run began: simulated on virtual ranks, else measured."""
        raise NotImplementedError

    # Collectives

    def barrier(self) -> None:
        """Wait until every rank of the group has come here."""
        self._begin("barrier")
        collectives.barrier(self)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Copy rank `src`'s tensor into everyone's, in place."""
        self._begin("broadcast", tensor, src=src)
        collectives.tree_broadcast(self, tensor, src)

    def reduce(self, tensor: Tensor, dst: int = 0, op: str = "sum") -> None:
        """Reduce into rank `dst`'s tensor, in place; the others' tensors stay as they are."""
        self._begin("reduce", tensor, dst=dst, op=op)
        collectives.tree_reduce(self, tensor, dst, op)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Reduce everyone's tensors and leave the result in all of them, in place.

        `op` is "sum", "avg" (divided first, so that half precision does not overflow), "max" or
        "min". bool tensors are combined by "or"; integers narrower than 32 bits are refused.
        It goes around a ring; with more than 16 ranks, whose ring has hundreds of messages, short
        tensors go along a tree.
        """
        self._begin("all_reduce", tensor, op=op)
        if self.world_size > 16 and tensor.nbytes < SHORT * self.world_size:
            collectives.tree_all_reduce(self, tensor, op)
        else:
            collectives.ring_all_reduce(self, tensor, op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: str = "sum") -> None:
        """Reduce everyone's `inputs[i]` into rank i's `output`; the inputs stay as they are."""
        self._check_count(inputs, "inputs")
        self._begin("reduce_scatter", *inputs, op=op)
        self._check_like(output, inputs[self.rank], "output", f"inputs[{self.rank}]")
        collectives.ring_reduce_scatter(self, output, inputs, op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Collect everyone's tensor: rank i's goes to everyone's `outputs[i]`.

        Sizes may differ between ranks if everyone's `outputs` have the right ones.
        """
        self._check_count(outputs, "outputs")
        self._check_own_storage(outputs)
        self._check_like(tensor, outputs[self.rank], "tensor", f"outputs[{self.rank}]")
        self._begin("all_gather", *outputs)
        collectives.ring_all_gather(self, outputs, tensor)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Send `inputs[i]` to rank i, and receive rank i's for this rank into `outputs[i]`."""
        self._check_count(inputs, "inputs")
        self._check_count(outputs, "outputs")
        self._check_own_storage(outputs)
        self._begin("all_to_all")
        collectives.pairwise_all_to_all(self, outputs, inputs)

    # Groups and background work

    def group(self, ranks: Sequence[int]) -> Comm | None:
        """A handle on some of the group's ranks, in this order; None on a rank that is not listed.

        Only the members need to call it, all of them with the same list.
        """
        ranks = tuple(ranks)
        if len(set(ranks)) != len(ranks) or not ranks:
            raise ValueError(f"a group needs different ranks, at least one, not {list(ranks)}")
        for rank in ranks:
            self._check_rank(rank, "be in a group")
        if self.rank not in ranks:
            return None
        count = self._groups[ranks] = self._groups.get(ranks, 0) + 1
        members = [self.ranks[rank] for rank in ranks]
        channel = (*self._channel, "group", ranks, count)
        return self._sub_comm(ranks.index(self.rank), members, channel)

    def launch(self, function: Callable, *args) -> Work:
        """Run `function(comm, *args)` in the background of this rank; `wait` returns its result.

        The function gets a handle of its own, and must use that one. Launched functions run one
        after the other, in the order of launch, which must be the same on every rank; they cannot
        launch others. Leave tensors among `args` alone until `wait` has returned; an optimizer
        that steps on such a gradient raises an error.
        """
        if "launch" in self._channel:
            raise RuntimeError(
                "a launched function cannot launch another one, since both would wait for the one "
                "background that a rank has: call it instead"
            )
        self._launches += 1
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        channel = (*self._channel, "launch", self._launches)
        return self._launch(channel, function, args).keep(tensors)

    # What a backend supplies

    def _post_send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        raise NotImplementedError

    def _post_recv(self, tensor: Tensor, src: int, tag: int) -> Work:
        raise NotImplementedError

    def _wait_all(self, works: tuple[Work, ...]) -> None:
        for work in works:
            work._wait()

    def _wait_any(self, works: list[Work]) -> int:
        raise NotImplementedError

    def _meet(self, description: tuple) -> dict[int, tuple | str]:
        """Tell the group what this rank is about to do; what each rank said, if that differs."""
        raise NotImplementedError

    def _launch(self, channel, function: Callable, args: tuple) -> Work:
        raise NotImplementedError

    def _sub_comm(self, rank: int, ranks: Sequence[int], channel) -> Comm:
        raise NotImplementedError

    # Checks

    def _begin(self, name: str, *tensors: Tensor, **options) -> None:
        """Check a collective call, on this rank and against the other ranks' calls."""
        self._agree(self._describe(name, *tensors, **options))

    def _describe(self, name: str, *tensors: Tensor, **options) -> tuple:
        """Check a collective call on this rank; returns what the others' must be equal to."""
        for option in ("src", "dst"):
            if option in options:
                self._check_rank(options[option], f"be the {option} of {name}")
        if options.get("op", "sum") not in REDUCTIONS:
            raise ValueError(f"{name} knows the reductions {REDUCTIONS}, not {options['op']!r}")
        for tensor in tensors:
            collectives.check_tensor(tensor, reduces="op" in options)
        shapes = tuple((tuple(t.shape), str(t.dtype)[6:]) for t in tensors)
        return name, tuple(options.items()), shapes

    def _agree(self, call: tuple) -> None:
        """Meet the others before a collective call; ValueError if they do not make the same."""
        self._calls += 1
        if self.world_size == 1:
            return
        said = self._meet(call)
        if said:
            raise ValueError(disagreement({self.ranks[rank]: said[rank] for rank in said}))

    def _check_rank(self, rank: int, what: str) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} cannot {what}: this group has the {self.world_size} ranks "
                f"0 to {self.world_size - 1}"
            )

    def _check_peer(self, tensor: Tensor, peer: int, what: str) -> None:
        known = isinstance(peer, int) and 0 <= peer < len(self.ranks)
        if known and peer != self.rank and isinstance(tensor, Tensor):
            return
        if not isinstance(tensor, Tensor):
            raise TypeError(f"a message is a tensor, not {type(tensor).__name__}")
        if known:
            raise ValueError(f"rank {self.rank} cannot {what} itself; copy the tensor instead")
        raise ValueError(
            f"rank {self.rank} cannot {what} rank {peer}: this group has the "
            f"{self.world_size} ranks 0 to {self.world_size - 1}"
        )

    def _check_count(self, tensors: Sequence[Tensor], name: str) -> None:
        if len(tensors) != self.world_size:
            raise ValueError(
                f"rank {self.rank}: {name} needs one tensor a rank, {self.world_size}, but has "
                f"{len(tensors)}"
            )

    def _check_like(self, tensor: Tensor, other: Tensor, name: str, other_name: str) -> None:
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            raise ValueError(
                f"rank {self.rank}: {name} is {tuple(tensor.shape)} {tensor.dtype}, but "
                f"{other_name} is {tuple(other.shape)} {other.dtype}"
            )

    def _check_own_storage(self, tensors: Sequence[Tensor]) -> None:
        """Tensors to be filled must not be the same memory, such as [x] * world_size."""
        for position, tensor in enumerate(tensors):
            for first in range(position):
                if overlap(tensors[first], tensor):
                    raise ValueError(
                        f"rank {self.rank}: outputs[{first}] and outputs[{position}] are the same "
                        "memory, so one would overwrite the other; make a tensor for each rank, "
                        "such as [torch.empty_like(x) for _ in range(comm.world_size)]"
                    )


def disagreement(said: dict[int, tuple | str]) -> str:
    """What the ranks of a group said when they did not say the same."""
    groups: dict[str, list[int]] = {}
    for rank, call in sorted(said.items()):
        groups.setdefault(call if isinstance(call, str) else words_of(call), []).append(rank)
    lines = [
        f"  {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {words}"
        for words, ranks in groups.items()
    ]
    return "the ranks do not make the same call; nothing was sent:\n" + "\n".join(lines)


def words_of(call: tuple) -> str:
    """A call as it was described to `_meet`, such as `all_reduce((2,) float32, op='sum')`."""
    name, options, shapes = call
    settings = ", ".join(f"{key}={value!r}" for key, value in options)
    tensors = ", ".join(f"{shape} {dtype}" for shape, dtype in shapes)
    return f"{name}({', '.join(filter(None, [tensors, settings]))})"
