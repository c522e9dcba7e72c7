"""Waiting for the first of several messages, and a rank's clock."""

import time

import pytest
import torch

from utils.hardware import ideal_server
from utils.ranks import DeadlockError, RankError, run

SERVER = ideal_server(6, 1e-3, 1e9)
PLACES = [
    ("virtual", {"server": SERVER}),
    ("processes", {}),
    ("processes", {"transport": "shared"}),
]


@pytest.mark.parametrize("on, options", PLACES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_each_message_is_taken_once(on, options, ranks):
    def program(comm):
        if comm.rank:
            for k in range(3):
                comm.send(torch.tensor([10.0 * comm.rank + k]), 0)
            return None
        boxes = {peer: torch.zeros(1) for peer in range(1, ranks)}
        works = {peer: comm.irecv(boxes[peer], peer) for peer in boxes}
        found = {peer: [] for peer in boxes}
        while works:
            peer = list(works)[comm.wait_any(works.values())]
            found[peer].append(boxes[peer].item())
            works.pop(peer)
            if len(found[peer]) < 3:
                works[peer] = comm.irecv(boxes[peer], peer)
        return found

    found = run(program, ranks=ranks, on=on, **options).values[0]
    assert found == {r: [10.0 * r, 10.0 * r + 1, 10.0 * r + 2] for r in range(1, ranks)}


def test_the_first_to_arrive_wins_on_processes():
    def program(comm):
        if comm.rank:
            time.sleep(0.3 if comm.rank == 1 else 0)
            comm.send(torch.tensor([float(comm.rank)]), 0)
            return None
        boxes = [torch.zeros(1), torch.zeros(1)]
        works = [comm.irecv(box, peer) for box, peer in zip(boxes, (1, 2))]
        first = comm.wait_any(works)
        works[1 - first].wait()
        return first

    assert run(program, ranks=3, on="processes").values[0] == 1


def test_virtual_ranks_take_messages_in_the_order_of_their_ends():
    def program(comm):
        size = 1_000_000 if comm.rank == 1 else 1
        if comm.rank:
            comm.send(torch.zeros(size, dtype=torch.uint8, device=comm.device), 0)
            return None
        works, seen = {}, []
        for peer, size in ((2, 1), (1, 1_000_000)):
            box = torch.zeros(size, dtype=torch.uint8, device=comm.device)
            works[peer] = comm.irecv(box, peer)
        while works:
            peer = list(works)[comm.wait_any(works.values())]
            works.pop(peer)
            seen.append((peer, comm.time()))
        return seen

    (first, at), (second, later) = run(program, 3, "virtual", server=SERVER).values[0]
    assert (first, second) == (1, 2)  # one wire into rank 0: they queue in the order of ranks
    assert (at, later) == pytest.approx((0.002, 0.003))


def test_a_later_message_over_another_wire_may_come_first():
    def program(comm):
        size = 10_000_000
        if comm.rank == 1:
            comm.send(torch.zeros(size, dtype=torch.uint8, device=comm.device), 0)
        elif comm.rank == 2:
            comm.send(torch.zeros(1, dtype=torch.uint8), 0)  # in host memory: no wire at all
        else:
            large = torch.zeros(size, dtype=torch.uint8, device=comm.device)
            works = [comm.irecv(large, 1), comm.irecv(torch.zeros(1, dtype=torch.uint8), 2)]
            first, at = comm.wait_any(works), comm.time()
            works[0].wait()
            return first, at, comm.time()

    first, at, end = run(program, ranks=3, on="virtual", server=SERVER).values[0]
    assert first == 1 and at < 1e-6
    assert end == pytest.approx(0.011)


def test_of_several_that_have_arrived_the_earliest_is_taken():
    def program(comm):
        if comm.rank:
            comm.send(torch.zeros(1, device=comm.device), 0)
            return None
        works = [comm.irecv(torch.zeros(1, device=comm.device), peer) for peer in (3, 2, 1)]
        works[0].wait()  # the last to arrive
        return comm.wait_any(works), comm.wait_any(works[:2]), comm.time()

    first, second, at = run(program, 4, "virtual", server=SERVER).values[0]
    assert (first, second) == (2, 1) and at == pytest.approx(0.003, rel=1e-4)


@pytest.mark.parametrize("on, options", PLACES)
def test_nothing_to_wait_for(on, options):
    def program(comm):
        comm.wait_any([])

    with pytest.raises(RankError, match="at least one message"):
        run(program, ranks=2, on=on, **options)


def test_nobody_sends():
    def program(comm):
        if comm.rank == 0:
            comm.wait_any([comm.irecv(torch.zeros(1), peer) for peer in (1, 2)])

    with pytest.raises(DeadlockError, match="any of ranks 1, which has ended; 2, which"):
        run(program, ranks=3, on="virtual", server=SERVER)


@pytest.mark.parametrize("on, options", PLACES[:2])
def test_time_runs(on, options):
    def program(comm):
        before = comm.time()
        comm.barrier()
        return before, comm.time()

    for before, after in run(program, ranks=2, on=on, **options).values:
        assert 0 <= before < after
