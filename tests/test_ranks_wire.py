"""Wires of a chosen speed: messages of processes take what the α–β model says, and cost no CPU."""

import sys
import time

import cloudpickle
import pytest
import torch

from utils.hardware import ideal_server
from utils.ranks import RankError, run
from utils.ranks.collectives import ring_all_reduce
from utils.ranks.shared import shared_memory_all_reduce

TRANSPORTS = ("gloo", "shared")
LATENCY, BANDWIDTH = 0.01, 100e6
every_transport = pytest.mark.parametrize("transport", TRANSPORTS)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def on_wires(program, ranks=2, *args, transport="gloo", **options):
    return run(program, ranks, "processes", args, transport=transport, timeout=60,
               **{"bandwidth": BANDWIDTH, "latency": LATENCY, **options})  # fmt: skip


def timed(comm, what):
    """Seconds, and seconds of processor time, that something took from when all began."""
    comm.barrier()
    start, cpu = comm.time(), time.process_time()
    what()
    return comm.time() - start, time.process_time() - cpu


def several_messages(comm):
    other = 1 - comm.rank
    mine, theirs = torch.ones(1_000_000), torch.zeros(1_000_000)
    short = torch.zeros(1)

    def one_way():
        comm.send(mine, 1) if comm.rank == 0 else comm.recv(theirs, 0)

    def both_ways():
        comm.exchange(mine, other, theirs, other)

    def queue():
        works = [comm.irecv(theirs, other), comm.irecv(short, other)]
        works += [comm.isend(mine, other), comm.isend(torch.ones(1), other)]
        assert not works[0].is_completed()
        for work in works:
            work.wait()
        assert works[0].is_completed() and short.item() == theirs.sum() / 1e6 == 1

    def any_of_two():
        works = [comm.irecv(short, other, tag=2), comm.irecv(theirs, other, tag=1)]
        sending = [comm.isend(torch.ones(1), other, tag=2), comm.isend(mine, other, tag=1)]
        assert comm.wait_any(works[::-1]) == 1
        for work in works + sending:
            work.wait()

    return [timed(comm, what) for what in (one_way, both_ways, queue, any_of_two)]


@every_transport
def test_a_message_takes_its_time_and_no_processor(transport):
    took = on_wires(several_messages, transport=transport).values
    one = LATENCY + 4e6 / BANDWIDTH
    for rank in range(2):
        for (seconds, cpu), messages in zip(took[rank], (one, one, one + LATENCY, one + LATENCY)):
            assert seconds >= 0.99 * messages
            assert cpu < messages / 2
    # that it takes no longer can only be said of the quickest, on a machine that others use
    assert min(took[rank][1][0] for rank in range(2)) < 1.6 * one


def all_reduces(comm):
    tensor = torch.ones(1_000_000, device=comm.device)
    found = min(timed(comm, lambda: ring_all_reduce(comm, tensor))[0] for _ in range(3))
    return found, tensor.unique().tolist()


@every_transport
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_an_all_reduce_takes_what_the_virtual_one_takes(transport, ranks):
    server = ideal_server(ranks, LATENCY, BANDWIDTH)
    expected = run(all_reduces, ranks, "virtual", server=server).values
    for (found, sums), (predicted, same) in zip(
        on_wires(all_reduces, ranks, transport=transport).values, expected
    ):
        assert sums == same == [ranks**3]
        assert 0.99 * predicted <= found < 1.5 * predicted + 0.02


def overlapped(comm):
    tensor = torch.ones(2_000_000)

    def both():
        work = comm.launch(ring_all_reduce, tensor)
        end = time.perf_counter() + 0.08
        while time.perf_counter() < end:
            torch.ones(1000).sum()
        work.wait()

    return timed(comm, both)[0]


def test_what_is_launched_overlaps():
    alone = 2 * LATENCY + 8e6 / BANDWIDTH
    for transport in TRANSPORTS:
        for seconds in on_wires(overlapped, transport=transport).values:
            assert alone * 0.99 <= seconds < alone + 0.06  # one after the other: + 0.08


def test_only_a_latency_or_only_a_bandwidth():
    for options, expected in (({"bandwidth": None}, LATENCY), ({"latency": 0.0}, 0.04)):
        (seconds, _), *_ = on_wires(several_messages, **options).values[1]
        assert 0.99 * expected <= seconds < expected + 0.03


def test_shared_memory_goes_around_the_wire():
    def program(comm):
        shared_memory_all_reduce(comm, torch.ones(3))

    with pytest.raises(RankError, match="sends no messages"):
        on_wires(program)


@pytest.mark.parametrize("on", ["virtual", "auto", "gpus"])
def test_other_ranks_have_other_wires(on):
    with pytest.raises(ValueError, match="ideal_server"):
        run(all_reduces, 2, on, bandwidth=1e6)


@pytest.mark.parametrize("options", [{"bandwidth": 0}, {"bandwidth": -1.0}, {"latency": -1.0}])
def test_wires_that_cannot_be(options):
    with pytest.raises(ValueError, match="a wire has"):
        on_wires(all_reduces, **options)
