"""Collectives as a rank's program: each function is what one rank does, made of messages.

All of them work in place on `tensor`, take any shape, dtype and stride, and need no message in a
world of one. `op` is "sum", "avg", "max" or "min". Every rank ends with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NARROW = (torch.uint8, torch.int8, torch.int16)


def combine(total: Tensor, other: Tensor, op: str) -> None:
    """total = total op other, in place; "avg" adds, since it has divided before."""
    if op == "max":
        torch.maximum(total, other, out=total)
    elif op == "min":
        torch.minimum(total, other, out=total)
    else:
        total += other


def divide_first(tensor: Tensor, n: int, op: str) -> None:
    """For "avg", divide by the number of ranks before adding: 40,000 + 40,000 is inf in fp16."""
    if op == "avg":
        tensor /= n


def check_tensor(tensor: Tensor, reduces: bool = True) -> None:
    """TypeError for what these collectives do not take: sparse tensors, sums that overflow."""
    if tensor.layout is not torch.strided:
        raise TypeError(
            "this tensor is sparse, and collectives take dense ones: build the embedding with "
            "sparse=False, or call .to_dense() on its gradient"
        )
    if reduces and tensor.dtype in NARROW:
        raise TypeError(f"sums of {tensor.dtype} overflow silently; convert to torch.int32 first")


class Flat:
    """A tensor's elements in a row: a view where it is contiguous, else a copy written back."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()
        self.values = self.tensor.contiguous().view(-1)

    def write_back(self) -> None:
        if not self.tensor.is_contiguous():
            self.tensor.copy_(self.values.view(self.tensor.shape))


def barrier(comm) -> None:
    """Dissemination: in round k tell rank + 2^k and hear from rank - 2^k; ⌈log2 n⌉ rounds."""
    token, heard = (torch.empty(0, dtype=torch.uint8, device=comm.device) for _ in range(2))
    distance = 1
    while distance < comm.world_size:
        ahead, behind = comm.rank + distance, comm.rank - distance
        comm.exchange(token, ahead % comm.world_size, heard, behind % comm.world_size)
        distance *= 2


def star_reduce(comm, tensor: Tensor, dst: int = 0, op: str = "sum") -> None:
    """Everyone sends to rank `dst`, which adds up in the order of ranks."""
    if comm.rank != dst:
        comm.send(tensor, dst)
        return
    divide_first(tensor, comm.world_size, op)
    received = torch.empty_like(tensor)
    for rank in range(comm.world_size):
        if rank != dst:
            comm.recv(received, rank)
            divide_first(received, comm.world_size, op)
            combine(tensor, received, op)


def star_broadcast(comm, tensor: Tensor, src: int = 0) -> None:
    """Rank `src` sends to everyone, one after the other."""
    if comm.rank != src:
        comm.recv(tensor, src)
        return
    for rank in range(comm.world_size):
        if rank != src:
            comm.send(tensor, rank)


def star_all_reduce(comm, tensor: Tensor, op: str = "sum") -> None:
    """Reduce to rank 0, then broadcast from it."""
    star_reduce(comm, tensor, 0, op)
    star_broadcast(comm, tensor, 0)


def tree_reduce(comm, tensor: Tensor, dst: int = 0, op: str = "sum") -> None:
    """Reduce along a binomial tree: ⌈log2 n⌉ rounds. Only rank `dst`'s tensor changes."""
    n = comm.world_size
    place = (comm.rank - dst) % n  # the root is place 0
    total = tensor.detach() if place == 0 else tensor.detach().clone()
    divide_first(total, n, op)
    received = torch.empty_like(total)
    distance = 1
    while distance < n:
        if place % (2 * distance):
            comm.send(total, (place - distance + dst) % n)
            return
        if place + distance < n:
            comm.recv(received, (place + distance + dst) % n)
            combine(total, received, op)
        distance *= 2


def tree_broadcast(comm, tensor: Tensor, src: int = 0) -> None:
    """Broadcast along a binomial tree: ⌈log2 n⌉ rounds."""
    n = comm.world_size
    place = (comm.rank - src) % n
    distance = 1
    while distance < n:
        distance *= 2
    while distance > 1:
        distance //= 2
        if place % (2 * distance) == distance:
            comm.recv(tensor, (place - distance + src) % n)
        elif place % (2 * distance) == 0 and place + distance < n:
            comm.send(tensor, (place + distance + src) % n)


def tree_all_reduce(comm, tensor: Tensor, op: str = "sum") -> None:
    """Reduce to rank 0, then broadcast, both on a binomial tree: 2⌈log2 n⌉(α + Sβ)."""
    tree_reduce(comm, tensor, 0, op)
    tree_broadcast(comm, tensor, 0)


def ring_all_reduce(comm, tensor: Tensor, op: str = "sum") -> None:
    """Reduce-scatter, then all-gather around the ring: 2(n-1)α + 2((n-1)/n)Sβ."""
    n, rank = comm.world_size, comm.rank
    if n == 1:
        return
    right, left = (rank + 1) % n, (rank - 1) % n
    flat = Flat(tensor)
    divide_first(flat.values, n, op)
    parts = torch.tensor_split(flat.values, n)
    received = torch.empty_like(parts[0])
    for step in range(n - 1):
        mine, theirs = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        incoming = received[: theirs.numel()]
        comm.exchange(mine, right, incoming, left)
        combine(theirs, incoming, op)
    for step in range(n - 1):
        comm.exchange(parts[(rank + 1 - step) % n], right, parts[(rank - step) % n], left)
    flat.write_back()


def ring_reduce_scatter(comm, output: Tensor, inputs: Sequence[Tensor], op: str = "sum") -> None:
    """Rank i ends with the reduction of everyone's inputs[i]: (n-1)α + ((n-1)/n)Sβ."""
    n, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    total = inputs[(rank - 1) % n].detach().clone(memory_format=torch.contiguous_format)
    divide_first(total, n, op)
    for step in range(1, n):
        own = inputs[(rank - 1 - step) % n].detach()
        incoming = torch.empty_like(own, memory_format=torch.contiguous_format)
        comm.exchange(total, right, incoming, left)
        own = own.clone()
        divide_first(own, n, op)
        combine(incoming, own, op)
        total = incoming
    output.detach().copy_(total)


def ring_all_gather(comm, outputs: Sequence[Tensor], tensor: Tensor) -> None:
    """Everyone ends with everyone's tensor: (n-1)α + ((n-1)/n)Sβ."""
    n, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    outputs[rank].detach().copy_(tensor.detach())
    for step in range(n - 1):
        comm.exchange(outputs[(rank - step) % n], right, outputs[(rank - step - 1) % n], left)


def pairwise_all_to_all(comm, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """In round k exchange with rank + k and rank - k, so that no wire is used twice at once."""
    n, rank = comm.world_size, comm.rank
    outputs[rank].detach().copy_(inputs[rank].detach())
    for step in range(1, n):
        dst, src = (rank + step) % n, (rank - step) % n
        comm.exchange(inputs[dst], dst, outputs[src], src)


def halving_doubling_all_reduce(comm, tensor: Tensor, op: str = "sum") -> None:
    """Recursive halving, then doubling: 2·log2(n)·α + 2((n-1)/n)Sβ where n is a power of two.

    Otherwise the ranks beyond the largest power of two first add theirs to a partner's, and get
    the result from it in the end.
    """
    n, rank = comm.world_size, comm.rank
    if n == 1:
        return
    flat = Flat(tensor)
    divide_first(flat.values, n, op)
    power = 1 << (n.bit_length() - 1)
    if rank >= power:
        comm.send(flat.values, rank - power)
        comm.recv(flat.values, rank - power)
    else:
        extra = rank + power if rank + power < n else None
        received = torch.empty_like(flat.values)
        if extra is not None:
            comm.recv(received, extra)
            combine(flat.values, received, op)
        _halve_and_double(comm, flat.values, received, power, op)
        if extra is not None:
            comm.send(flat.values, extra)
    flat.write_back()


def _halve_and_double(comm, values: Tensor, received: Tensor, power: int, op: str) -> None:
    mine, kept = values, []
    distance = power // 2
    while distance:
        partner, middle = comm.rank ^ distance, mine.numel() // 2
        lower, upper = mine[:middle], mine[middle:]
        mine, theirs = (upper, lower) if comm.rank & distance else (lower, upper)
        incoming = received[: mine.numel()]
        comm.exchange(theirs, partner, incoming, partner)
        combine(mine, incoming, op)
        kept.append((partner, mine, theirs))
        distance //= 2
    for partner, mine, theirs in reversed(kept):
        comm.exchange(mine, partner, theirs, partner)


def double_tree_all_reduce(comm, tensor: Tensor, op: str = "sum", pieces: int = 8) -> None:
    """Two binary trees, each for one half of the data, cut in pieces that follow one another.

    A rank that is a leaf of one tree is an inner node of the other (Sanders, Speck and Träff), so
    both directions of its wires are in use all the time: about 2·log2(n)·α + 2Sβ.
    """
    n = comm.world_size
    if n == 1:
        return
    flat = Flat(tensor)
    divide_first(flat.values, n, op)
    halves = [half.tensor_split(pieces) for half in flat.values.tensor_split(2)]
    under_way = []
    for tree, parts in enumerate(halves):  # a leaf offers its values and waits for the sums
        parent, children = in_order_tree(comm.rank, n, tree)
        if not children:
            under_way += [comm.isend(part, parent, tag=tree) for part in parts]
            under_way += [comm.irecv(part, parent, tag=tree) for part in parts]
    for tree, parts in enumerate(halves):
        parent, children = in_order_tree(comm.rank, n, tree)
        if children:
            under_way += _pass_on(comm, parts, parent, children, tree, op)
    for work in under_way:
        work.wait()
    flat.write_back()


def _pass_on(comm, parts, parent: int | None, children: list[int], tree: int, op: str) -> list:
    """An inner node: piece by piece, sums go up and then results come down. Returns the sends."""
    arriving = []
    for part in parts:  # ask for everything at once, so that it flows
        buffers = [torch.empty_like(part) for _ in children]
        works = [comm.irecv(buffer, child, tag=tree) for buffer, child in zip(buffers, children)]
        arriving.append((part, buffers, works))
    sending = []
    for part, buffers, works in arriving:
        for buffer, work in zip(buffers, works):
            work.wait()
            combine(part, buffer, op)
        if parent is not None:
            sending.append(comm.isend(part, parent, tag=tree))
    for part in parts:
        if parent is not None:
            comm.recv(part, parent, tag=tree)
        sending += [comm.isend(part, child, tag=tree) for child in children]
    return sending


def in_order_tree(rank: int, n: int, shift: int) -> tuple[int | None, list[int]]:
    """A rank's parent (None at the root) and children in a binary tree over places 1..n.

    Places are numbered in order, so that odd places are leaves; rank r has place r + 1, moved on
    by `shift`.
    """

    def parent_of(place: int) -> int:
        bit = place & -place
        up = (place ^ bit) | (bit << 1)
        return up if up <= n else place ^ bit

    place = (rank + shift) % n + 1
    reach = place & -place
    near = range(max(1, place - reach), min(n, place + reach) + 1)
    children = [other for other in near if other != place and parent_of(other) == place]
    to_rank = lambda other: (other - 1 - shift) % n  # noqa: E731
    parent = parent_of(place)
    return (to_rank(parent) if parent else None), [to_rank(child) for child in children]


def hierarchical_all_reduce(comm, tensor: Tensor, per_machine: int, op: str = "sum") -> None:
    """Inside each machine, between machines, inside again: the network carries 1/per_machine.

    Reduce-scatter among the ranks of a machine, all-reduce each part among the ranks of equal
    place in all machines, all-gather in the machine. Ranks are numbered machine by machine.
    """
    n = comm.world_size
    if n % per_machine:
        raise ValueError(f"{n} ranks do not fill machines of {per_machine}")
    machine, place = divmod(comm.rank, per_machine)
    inside = comm.group(range(machine * per_machine, (machine + 1) * per_machine))
    across = comm.group(range(place, n, per_machine))
    flat = Flat(tensor)
    divide_first(flat.values, n, op)
    op = "sum" if op == "avg" else op
    parts = torch.tensor_split(flat.values, per_machine)
    part = parts[place].clone()
    ring_reduce_scatter(inside, part, parts, op)
    ring_all_reduce(across, part, op)
    ring_all_gather(inside, parts, part)
    flat.write_back()
