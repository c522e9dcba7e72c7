"""Virtual ranks: simulated time, what each rank has of its own, and how runs end."""

import ctypes
import dataclasses
import gc
import os
import random
import sys
import threading
import time
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from utils import Cluster
from utils.hardware import get_server, ideal_server
from utils.ranks import DeadlockError, RankError, run
from utils.ranks.collectives import ring_all_reduce

SERVER = ideal_server(16, 1e-6, 1e9)  # a message: 1 µs + 1 ns a byte


def on_ranks(program, ranks=2, *args, **options):
    return run(program, ranks=ranks, on="virtual", args=args, **{"server": SERVER, **options})


def ones(comm, size=4):
    return torch.ones(size, device=comm.device)


# --- time ---------------------------------------------------------------------------------------


def train(comm, steps=3):
    """A few steps of data-parallel training, each bucket's all-reduce in the background."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Dropout(), nn.Linear(30, 5))
    model.to(comm.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * comm.rank + step)
        x = torch.randn(8, 20, device=comm.device)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        works = [comm.launch(ring_all_reduce, p.grad, "avg") for p in model.parameters()]
        for work in works:
            work.wait()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_same_program_gives_the_same_timeline(ranks):
    first = on_ranks(train, ranks, server="pcie-switch")
    cluster = Cluster(2, quiet=True)  # other work in between
    torch.ones(3, device=cluster.devices[1]).sum().item()
    torch.randn(1000)
    second = on_ranks(train, ranks, server="pcie-switch")
    assert first.values == second.values
    assert first.timeline.events == second.timeline.events
    assert first.timeline.duration == second.timeline.duration
    assert first.timeline.peak_memory == second.timeline.peak_memory


def test_a_recording_costs_no_simulated_time():
    with_events = on_ranks(train, 2).timeline
    without = on_ranks(train, 2, record=False).timeline
    assert with_events.events and not without.events
    assert with_events.duration == without.duration


def test_messages_of_two_ranks_queue_for_the_wire_they_share():
    def program(comm):
        if comm.rank == 0:
            for src in (1, 2):
                comm.recv(torch.empty(1000, dtype=torch.uint8, device=comm.device), src)
        else:
            comm.send(torch.zeros(1000, dtype=torch.uint8, device=comm.device), 0)

    # The switch has one wire to GPU 0: the second message waits until the first has passed.
    assert on_ranks(program, 3).timeline.duration == pytest.approx(2 * 2e-6)
    apart = on_ranks(
        lambda comm: comm.exchange(
            ones(comm, 250), comm.rank ^ 1, torch.empty(250, device=comm.device), comm.rank ^ 1
        ),
        4,
    )
    assert apart.timeline.duration == pytest.approx(2e-6)  # four messages at once, own wires


def test_several_machines_are_joined_by_the_network():
    def program(comm):
        for distance in (1, 4):
            before = comm.time()
            tensor = ones(comm, 250_000)
            other = torch.empty_like(tensor)
            if comm.rank == 0:
                comm.send(tensor, distance)
            elif comm.rank == distance:
                comm.recv(other, 0)
            comm.barrier()
            yield comm.time() - before

    def both(comm):
        return list(program(comm)), str(comm.device)

    result = on_ranks(both, 8, server="pcie-switch", network="ethernet-10g")
    (near, far), _ = result.values[0]
    assert 3 * near < far
    wires = {row for event in result.timeline.events for row in event.rows}
    assert {"cpu0→network", "network→cpu1"} <= wires
    # Each rank sees the devices of its own machine only.
    assert [device for _, device in result.values] == [f"vgpu:{i % 4}" for i in range(8)]


def test_a_machine_with_two_processors_is_one_machine():
    def program(comm):
        return torch.vgpu.device_count(), str(comm.device)

    server = get_server("pcie-switch")
    link = dataclasses.replace(server.links[0], a="cpu0", b="cpu1")
    moved = [
        dataclasses.replace(link, a=link.a.replace("gpu3", "cpu1"), b="gpu3")
        if "gpu3" in (link.a, link.b)
        else link
        for link in server.links
    ]
    two = server.replace(links=(*moved, link))
    assert on_ranks(program, 4, server=two).values == [(4, f"vgpu:{i}") for i in range(4)]


def test_a_straggler_keeps_all_waiting():
    def program(comm):
        a = torch.randn(300, 300, device=comm.device)
        for _ in range(20):
            a = a @ a / 300
        torch.vgpu.synchronize()
        computed = comm.time()
        comm.barrier()
        return computed, comm.time()

    server = get_server("dgx-a100")
    fair = on_ranks(program, 4, server=server).values
    slow = on_ranks(program, 4, server=server.slow_down(2, 50)).values
    assert slow[2][0] > 3 * fair[2][0] and slow[0][0] == fair[0][0]
    assert all(end >= slow[2][0] for _, end in slow)  # nobody leaves the barrier before


def test_sleep_takes_simulated_time():
    def program(comm):
        if comm.rank == 1:
            time.sleep(100)
        comm.barrier()
        return comm.time()

    began = time.perf_counter()
    assert all(100 < end < 100.1 for end in on_ranks(program, 2).values)
    assert time.perf_counter() - began < 50
    time.sleep(0)  # real again


def test_memory_is_counted_for_each_rank():
    def program(comm):
        kept = [torch.zeros(2**20, dtype=torch.uint8, device=comm.device)] * 1
        del kept
        return torch.zeros(comm.rank + 1, dtype=torch.float64, device=comm.device)

    peaks = on_ranks(program, 3).timeline.peak_memory
    assert [sum(kinds.values()) for kinds in peaks] == [2**20] * 3

    def one_uses_more(comm):
        x = torch.zeros(1000 * (1 + comm.rank), device=comm.device)
        comm.barrier()
        return x.sum().item()

    peaks = on_ranks(one_uses_more, 3).timeline.peak_memory
    assert [sum(kinds.values()) >= 4000 * (r + 1) for r, kinds in enumerate(peaks)] == [True] * 3
    assert sum(peaks[0].values()) < 8000


# --- random numbers, dtype, modes: each rank has its own -----------------------------------------


def test_random_numbers_are_each_ranks_own():
    def program(comm, meet):
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(1, device=comm.device).item())
            if meet:
                comm.barrier()
        drawn += [random.random(), float(np.random.rand())]
        return drawn

    torch.manual_seed(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    alone = on_ranks(program, 3, False).values
    together = on_ranks(program, 3, True).values  # the ranks take turns in another order
    assert alone == together
    assert len({number for drawn in alone for number in drawn}) == 15
    expected = torch.rand(3, generator=torch.Generator().manual_seed(1)).tolist()
    assert alone[1][:3] == expected  # as in a process that begins with manual_seed(rank)
    assert alone[1][3] == random.Random(1).random()
    assert alone[1][4] == np.random.RandomState(1).rand()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()


def test_seeds_and_states_are_each_ranks_own():
    def program(comm):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        comm.barrier()
        same = torch.rand(1).item(), random.random(), np.random.rand()
        torch.manual_seed(comm.rank)
        state = torch.get_rng_state()
        comm.barrier()  # the others draw here
        first = torch.rand(2)
        comm.barrier()
        torch.set_rng_state(state)
        comm.barrier()
        again = torch.rand(2)
        with torch.random.fork_rng(devices=[]):
            comm.barrier()
            torch.rand(5)
            comm.barrier()
        after = torch.rand(2)
        assert torch.equal(first, again)
        return same, first.tolist(), after.tolist(), torch.initial_seed()

    values = on_ranks(program, 4).values
    assert len({same for same, *_ in values}) == 1
    for rank, (_, first, after, seed) in enumerate(values):
        generator = torch.Generator().manual_seed(rank)
        assert first == torch.rand(2, generator=generator).tolist()
        assert after == torch.rand(2, generator=generator).tolist()
        assert seed == rank


def test_dropout_is_recomputed_alike_in_a_checkpoint():
    def program(comm):
        torch.manual_seed(comm.rank)
        x = torch.ones(200, device=comm.device, requires_grad=True)

        def layer(x):
            comm.barrier()  # in the recomputation too: the others draw between
            return nn.functional.dropout(x * 1.0)

        y = checkpoint(layer, x, use_reentrant=False)
        torch.rand(comm.rank + 1)
        y.sum().backward()
        return torch.equal(x.grad, y.detach()), (y.detach() > 0).sum().item()

    values = on_ranks(program, 3).values
    assert all(same for same, _ in values)
    assert len({kept for _, kept in values}) > 1


def test_default_dtype_and_grad_mode_are_each_ranks_own():
    def program(comm):
        start = torch.get_default_dtype(), torch.is_grad_enabled()
        if comm.rank == 1:
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
        comm.barrier()
        tensor = torch.ones(1, device=comm.device, requires_grad=True)
        comm.barrier()
        return start, tensor.dtype, (tensor * 2).requires_grad

    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad():
            values = on_ranks(program, 3).values
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert [start for start, *_ in values] == [(torch.float32, True)] * 3
    assert [dtype for _, dtype, _ in values] == [torch.float32, torch.float64, torch.float32]
    assert [grad for *_, grad in values] == [True, False, True]


def test_a_large_layer_without_data():
    """A 7B-class transformer layer, tensor-parallel over 8 ranks: 400 MB a matrix, none made."""
    width, hidden, tokens = 4096, 11008, 4096

    def program(comm):
        n = comm.world_size
        with FakeTensorMode():
            a = torch.empty(width, hidden // n, device=comm.device, requires_grad=True)
            b = torch.empty(hidden // n, width, device=comm.device, requires_grad=True)
            x = torch.empty(tokens, width, device=comm.device)
            y = torch.relu(x @ a) @ b
            partial = y.detach()
            comm.all_reduce(partial)
            gathered = [torch.empty(2, 3, device=comm.device) for _ in range(n)]
            comm.all_gather(gathered, torch.empty(2, 3, device=comm.device))
            y.backward(partial)
            return tuple(a.grad.shape), str(a.grad.device), comm.device == a.grad.device

    result = on_ranks(program, 8, server="hgx-h200")
    assert [value[0] for value in result.values] == [(width, hidden // 8)] * 8
    assert all(own for *_, own in result.values)
    ring = 2 * 7 / 8 * tokens * width * 4
    sent = result.timeline.bytes_sent(3)
    assert sent == pytest.approx(ring + 7 * 24, rel=1e-6)
    flops = 6 * tokens * width * hidden / 8 * 2
    chip = get_server("hgx-h200").chips[0]
    assert result.timeline.busy(0) > 0.8 * flops / (chip.fp32 * chip.compute_efficiency) * 5 / 6


# --- deadlocks ----------------------------------------------------------------------------------


def test_two_polite_neighbours():
    def polite(comm):
        x = ones(comm)
        comm.send(x, 1 - comm.rank)  # both send first
        comm.recv(x, 1 - comm.rank)

    began = time.perf_counter()
    with pytest.raises(DeadlockError) as caught:
        on_ranks(polite, 2)
    assert time.perf_counter() - began < 10
    text = str(caught.value)
    for rank in (0, 1):
        assert f"rank {rank} waits to send 4 float32 values to rank {1 - rank}\n" in text
    assert text.count("of polite in test_ranks_virtual.py: comm.send(x, 1 - comm.rank)") == 2


def test_a_ring_of_receivers():
    def ring(comm):
        comm.recv(torch.empty(3, dtype=torch.int64), (comm.rank + 1) % comm.world_size, tag=5)

    with pytest.raises(DeadlockError) as caught:
        on_ranks(ring, 5)
    for rank in range(5):
        peer = (rank + 1) % 5
        assert f"rank {rank} waits to receive 3 int64 values from rank {peer}\n" in str(
            caught.value
        )


def test_other_tags_and_other_groups_do_not_match():
    def program(comm):
        pair = comm.group([0, 1])
        if comm.rank == 0:
            comm.send(torch.ones(1), 1, tag=3)
        else:
            (pair if comm.world_size else comm).recv(torch.ones(1), 0, tag=3)

    with pytest.raises(DeadlockError, match="rank 1 waits to receive 1 float32 value from rank 0"):
        on_ranks(program, 2)


def test_a_rank_that_ended_early():
    def program(comm):
        if comm.rank:
            comm.recv(torch.empty(2), 0)

    with pytest.raises(
        DeadlockError, match="receive 2 float32 values from rank 0, which has ended"
    ):
        on_ranks(program, 3)


def test_a_rank_missing_in_a_barrier():
    def program(comm):
        if comm.rank != 2:
            comm.barrier()

    with pytest.raises(DeadlockError, match="rank 0 waits in barrier for rank 2, which has ended"):
        on_ranks(program, 4)


def test_different_numbers_of_batches():
    """The end of an epoch at which one rank has a batch more than the others."""

    def program(comm):
        for _ in range(3 - (comm.rank == 1)):
            comm.all_reduce(torch.ones(1))

    with pytest.raises(DeadlockError) as caught:
        on_ranks(program, 3)
    assert "rank 0 waits in all_reduce for rank 1, which has ended" in str(caught.value)
    assert "comm.all_reduce(torch.ones(1))" in str(caught.value)


def test_groups_are_named_by_the_ranks_of_the_run():
    def missing(comm):
        group = comm.group([1, 3])
        if comm.rank == 1:
            group.barrier()

    with pytest.raises(DeadlockError, match="rank 1 waits in barrier for rank 3, which has ended"):
        on_ranks(missing, 4)

    def differing(comm):
        group = comm.group([1, 3])
        if group:
            group.all_reduce(torch.ones(comm.rank))

    with pytest.raises(
        RankError, match=r"rank 1: all_reduce\(\(1,\).*\n  rank 3: all_reduce\(\(3,"
    ):
        on_ranks(differing, 4)


def test_mismatched_collectives():
    def program(comm):
        if comm.rank == 1:
            comm.broadcast(torch.ones(2))
        else:
            comm.all_reduce(torch.ones(2))

    with pytest.raises(RankError) as caught:
        on_ranks(program, 3)
    assert "ranks 0, 2: all_reduce((2,) float32, op='sum')" in str(caught.value)
    assert "rank 1: broadcast((2,) float32, src=0)" in str(caught.value)


def test_a_message_of_another_size_is_an_error_at_the_receiver():
    def program(comm, catch):
        if comm.rank == 1:
            comm.isend(torch.ones(3), 0)
            return None
        try:
            comm.recv(torch.empty(2, dtype=torch.int32), 1)
        except ValueError as error:
            if not catch:
                raise
            return str(error)

    words = "rank 1 sends 3 float32 values to rank 0, which receives 2 int32 values"
    assert words in on_ranks(program, 2, True).values[0]
    with pytest.raises(RankError, match=words) as caught:
        on_ranks(program, 2, False)
    assert "comm.recv(torch.empty(2, dtype=torch.int32), 1)" in str(caught.value)


# --- hooks and background -----------------------------------------------------------------------


def test_ranks_wait_inside_autograd_hooks():
    def program(comm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(comm.device)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: comm.all_reduce(p.grad))
        x = torch.arange(8.0).view(2, 4).to(comm.device) * (comm.rank + 1)
        model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    first, *others = on_ranks(program, 3).values
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.arange(8.0).view(2, 4)
    model(torch.cat([x, 2 * x, 3 * x])).sum().backward()
    for mine, expected in zip(first, model.parameters()):
        torch.testing.assert_close(mine, expected.grad)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


def test_a_deadlock_inside_a_hook_names_the_line():
    def program(comm):
        x = torch.ones(1, requires_grad=True, device=comm.device)
        if comm.rank == 0:
            x.register_hook(lambda gradient: comm.barrier())
        (2 * x).backward()

    with pytest.raises(DeadlockError, match="rank 0 waits in barrier for rank 1, which has ended"):
        on_ranks(program, 2)


def test_launched_functions_run_in_order_and_return():
    def program(comm):
        done = []

        def job(own, number):
            assert own is not comm and own.rank == comm.rank
            own.barrier()
            done.append(number)
            return 10 * number + own.rank

        works = [comm.launch(job, number) for number in range(4)]
        assert not works[0].is_completed()
        last = works[3].wait()
        assert all(work.is_completed() for work in works)
        return done, last, [work.wait() for work in works]

    values = on_ranks(program, 3).values
    for rank, (done, last, results) in enumerate(values):
        assert done == [0, 1, 2, 3] and last == 30 + rank
        assert results == [0 + rank, 10 + rank, 20 + rank, 30 + rank]


def test_what_is_launched_and_not_waited_for_ends_all_the_same():
    def program(comm, box):
        comm.launch(lambda own: box.append(own.rank) or print("done"))

    result = on_ranks(program, 2, [])
    assert result.prints == ["done\n"] * 2


@pytest.mark.parametrize("wait", [True, False])
def test_an_error_in_the_background_ends_the_run(wait):
    def fail(comm):
        if comm.rank == 1:
            raise KeyError("lost")
        comm.barrier()

    def program(comm):
        work = comm.launch(fail)
        if wait:
            work.wait()

    with pytest.raises(RankError, match="rank 1 raised KeyError: 'lost'") as caught:
        on_ranks(program, 2)
    assert 'of fail in test_ranks_virtual.py: raise KeyError("lost")' in str(caught.value)


def test_a_launched_function_cannot_launch_another():
    def program(comm):
        comm.launch(lambda own: own.launch(lambda _: None).wait()).wait()

    with pytest.raises(RankError, match="cannot launch another one.*call it instead"):
        on_ranks(program, 2)


@pytest.mark.parametrize("call", ["barrier", "send", "launch", "group"])
def test_a_launched_function_must_use_its_own_handle(call):
    def program(comm):
        def job(own):
            if call == "barrier":
                comm.barrier()
            elif call == "send":
                comm.send(torch.ones(1), 1 - comm.rank)
            elif call == "launch":
                comm.launch(lambda _: None)
            else:
                comm.group([0, 1]).barrier()

        comm.launch(job).wait()

    with pytest.raises(RankError, match="this handle belongs to another thread"):
        on_ranks(program, 2)


def test_groups_in_the_background():
    def program(comm):
        def job(own, tensor):
            own.group([0, 2] if own.rank != 1 else [1]).all_reduce(tensor)

        tensor = torch.tensor([comm.rank + 1.0])
        work = comm.launch(job, tensor)
        comm.barrier()
        work.wait()
        return tensor.item()

    assert on_ranks(program, 3).values == [4.0, 2.0, 4.0]


def test_a_deadlock_between_program_and_background_names_both():
    def stuck(comm):
        comm.recv(torch.ones(1), 1 - comm.rank)

    def program(comm):
        comm.launch(stuck).wait()

    with pytest.raises(DeadlockError) as caught:
        on_ranks(program, 2)
    text = str(caught.value)
    assert "rank 0 waits for stuck, which it launched" in text
    assert "rank 0 waits to receive 1 float32 value from rank 1" in text


def overlapped(comm, in_background):
    """Large products while a message travels."""
    a = torch.ones(500, 500, device=comm.device)
    message = torch.ones(100_000, device=comm.device)
    if in_background:
        works = [comm.launch(ring_all_reduce, part) for part in message.split(50_000)]
    else:
        for part in message.split(50_000):
            ring_all_reduce(comm, part)
        works = []
    for _ in range(20):
        a = a @ a / 500
    torch.vgpu.synchronize()
    for work in works:
        work.wait()
    return message[0].item(), comm.time()


def test_overlap_is_visible_in_the_timeline():
    server = get_server("pcie-switch").with_links("PCIe", bandwidth=1e9)
    after = on_ranks(overlapped, 2, False, server=server)
    beside = on_ranks(overlapped, 2, True, server=server)
    assert beside.values[0][0] == after.values[0][0] == 2.0
    assert after.timeline.exposed(0) == pytest.approx(after.timeline.communication(0))
    assert beside.timeline.exposed(0) < 0.6 * after.timeline.exposed(0)
    saved = after.timeline.duration - beside.timeline.duration
    assert saved > 0.3 * after.timeline.communication(0)


def test_the_background_does_not_wait_for_the_programs_kernels():
    """The second message may go as soon as the first has, whatever the program computes."""

    def program(comm):
        a = torch.ones(1000, 1000, device=comm.device)
        x, y = ones(comm, 1000), ones(comm, 1000)
        works = [comm.launch(ring_all_reduce, tensor) for tensor in (x, y)]
        for _ in range(10):
            a = a @ a
        for work in works:
            work.wait()
        return comm.time()

    result = on_ranks(program, 2, server="pcie-switch")
    ends = [e.end for e in result.timeline.events if e.kind == "communication"]
    busy = result.timeline.busy(0)
    assert len(ends) == 8 and max(ends) < 0.5 * busy


def test_gradients_under_way_are_not_stepped_on():
    def program(comm, how):
        flat = torch.zeros(30, device=comm.device)
        parameters = [nn.Parameter(torch.ones(10, device=comm.device)) for _ in range(3)]
        for parameter, part in zip(parameters, flat.split(10)):
            parameter.grad = part
        first = torch.optim.SGD(parameters[:2], lr=0.1)
        others = torch.optim.SGD(parameters[2:], lr=0.1)
        target = flat[:20] if how != "list" else [flat[:10], flat[10:20]]
        if how == "message":
            work = comm.irecv(flat[5:8], 1 - comm.rank)
            comm.send(torch.ones(3, device=comm.device), 1 - comm.rank)
        elif how == "parameter":
            work = comm.launch(lambda own, t: own.barrier(), parameters[1].data)
        else:
            work = comm.launch(lambda own, t: own.barrier(), target)
        others.step()  # of another part of the same memory: this may go
        if comm.world_size == 2:
            first.step()
        work.wait()

    for how in ("tensor", "list", "message"):
        with pytest.raises(
            RankError, match=r"the gradient of parameter 0, shape \(10,\), is still"
        ):
            on_ranks(program, 2, how)
    with pytest.raises(RankError, match="the value of parameter 1"):
        on_ranks(program, 2, "parameter")

    def waits(comm):
        parameter = nn.Parameter(torch.ones(3, device=comm.device))
        parameter.grad = torch.full((3,), comm.rank + 1.0, device=comm.device)
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        comm.launch(ring_all_reduce, parameter.grad).wait()
        optimizer.step()
        return parameter.tolist()

    assert on_ranks(waits, 2).values == [[-2.0] * 3] * 2


# --- how runs end -------------------------------------------------------------------------------


def ranks_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_rank_that_raises_names_its_line():
    def inner(comm):
        return 1 / (comm.rank - 2)

    def program(comm):
        comm.barrier()
        inner(comm)
        comm.barrier()

    with pytest.raises(RankError) as caught:
        on_ranks(program, 4)
    assert "rank 2 raised ZeroDivisionError: division by zero" in str(caught.value)
    assert "of inner in test_ranks_virtual.py: return 1 / (comm.rank - 2)" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert not ranks_threads()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_a_rank_raises_ends_the_run(error):
    def program(comm):
        if comm.rank:
            raise error
        comm.barrier()

    with pytest.raises(RankError, match=f"rank 1 raised {type(error).__name__}"):
        on_ranks(program, 2)


def test_ranks_that_clean_up_while_the_run_ends():
    def program(comm):
        try:
            comm.barrier()
            if comm.rank == 1:
                raise ValueError("first")
            comm.barrier()
        finally:
            comm.all_reduce(torch.ones(1))  # nobody is there any more

    with pytest.raises(RankError, match="while it handled ValueError: first\n.*raise ValueError"):
        on_ranks(program, 4)
    assert not ranks_threads()


def test_a_rank_that_catches_everything():
    def program(comm):
        for _ in range(100):
            try:
                comm.recv(torch.ones(1), 1 - comm.rank)
            except:  # noqa: E722
                pass

    with pytest.raises(DeadlockError):
        on_ranks(program, 2)
    assert not ranks_threads()


def test_an_endless_loop_ends_at_the_timeout():
    def program(comm):
        comm.barrier()
        while comm.rank == 1:
            torch.ones(1)
        comm.barrier()

    began = time.perf_counter()
    with pytest.raises(
        RankError, match="did not end within 1 s; rank 1 is still running"
    ) as caught:
        on_ranks(program, 3, timeout=1)
    assert "of program in test_ranks_virtual.py" in str(caught.value)
    assert time.perf_counter() - began < 6
    assert not ranks_threads()


def test_endless_messages_end_at_the_timeout():
    def program(comm):
        x = torch.ones(1)
        while True:
            comm.exchange(x, 1 - comm.rank, torch.empty(1), 1 - comm.rank)

    with pytest.raises(RankError, match="did not end within 0.5 s"):
        on_ranks(program, 2, timeout=0.5)
    assert not ranks_threads()


def test_an_interrupt_ends_all_ranks():
    def program(comm):
        comm.barrier()
        while True:
            torch.ones(1)

    def interrupt():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(main), ctypes.py_object(KeyboardInterrupt)
        )

    main = threading.get_ident()
    timer = threading.Timer(1, interrupt)
    timer.start()
    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        # An exception set from outside is seen between waits, as a signal's is in a notebook.
        on_ranks(program, 3, timeout=2)
    assert time.perf_counter() - began < 8
    assert not ranks_threads()
    assert on_ranks(lambda comm: comm.rank, 2).values == [0, 1]


def test_the_parent_is_as_before():
    def program(comm, fail):
        torch.manual_seed(1)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        torch.rand(3, device=comm.device)
        print("said")
        if fail:
            raise ValueError

    cluster = Cluster(3, quiet=True)
    tensor = torch.ones(2, device=cluster.devices[2])
    torch.vgpu.set_device(1)
    threads, stdout, sleep, draw = torch.get_num_threads(), sys.stdout, time.sleep, random.random
    steps = []
    hook = register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    state = torch.get_rng_state()
    for fail in (False, True):
        if fail:
            with pytest.raises(RankError):
                on_ranks(program, 4, fail)
        else:
            on_ranks(program, 4, fail)
        assert (tensor + 1).device == cluster.devices[2]
        assert torch.vgpu.current_device() == 1 and torch.vgpu.device_count() == 3
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
        assert torch.get_default_dtype() == torch.float32
        assert (sys.stdout, time.sleep, random.random) == (stdout, sleep, draw)
        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        torch.optim.SGD([parameter], lr=1).step()
    assert len(steps) == 2
    hook.remove()


def test_a_failed_run_frees_what_its_ranks_had():
    def program(comm):
        big = torch.ones(10_000, device=comm.device)
        weakref.finalize(big, sys.modules["freed"].ranks.append, comm.rank)
        comm.launch(lambda own, tensor: own.recv(tensor, 1 - own.rank), big)
        comm.recv(big, 1 - comm.rank)

    sys.modules["freed"] = types.SimpleNamespace(ranks=[])  # one and the same for all ranks
    try:
        with pytest.raises(DeadlockError):
            on_ranks(program, 2)
        gc.collect()
        assert sorted(sys.modules["freed"].ranks) == [0, 1]
    finally:
        del sys.modules["freed"]


def test_a_run_inside_a_rank_is_refused():
    def program(comm):
        run(lambda inner: None, ranks=2, on="virtual")

    with pytest.raises(RankError, match="a rank cannot call run"):
        on_ranks(program, 2)


def test_runs_of_two_threads_follow_each_other():
    results = {}

    def start(number):
        results[number] = on_ranks(lambda comm: (comm.all_reduce(torch.ones(1)), number)[1], 3)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: result.values for n, result in results.items()} == {n: [n] * 3 for n in range(3)}


# --- what comes back ----------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    number: int
    tensor: torch.Tensor


def test_values_are_copies_in_host_memory():
    def program(comm):
        tensor = torch.full((2,), float(comm.rank), device=comm.device)
        module = nn.Linear(2, 1).to(comm.device)
        return {"a": [tensor, (tensor + 1, None)], "pair": Pair(comm.rank, tensor), "net": module}

    Cluster(2, quiet=True)
    for rank, value in enumerate(on_ranks(program, 3).values):
        assert value["a"][0].device.type == "cpu" and value["pair"].tensor.device.type == "cpu"
        assert value["a"][1][0].tolist() == [rank + 1.0] * 2
        assert isinstance(value["pair"], Pair) and value["pair"].number == rank
        assert value["net"].weight.device.type == "cpu"
        assert isinstance(value["net"].weight, nn.Parameter) and value["net"].weight.requires_grad
        (value["net"].weight + value["a"][0]).sum().backward()


def test_arguments_are_copies_in_host_memory():
    def program(comm, tensor, box):
        box.append(comm.rank)
        tensor += comm.rank
        return str(tensor.device), tensor.tolist(), box

    cluster = Cluster(2, quiet=True)
    given, box = torch.ones(2, device=cluster.devices[1]), []
    values = on_ranks(program, 3, given, box).values
    assert values == [("cpu", [1.0 + r] * 2, [r]) for r in range(3)]
    assert given.tolist() == [1.0, 1.0] and box == []


def test_what_cannot_be_copied_is_named():
    with pytest.raises(
        RankError, match="rank 0 raised TypeError: the value that the program return"
    ):
        on_ranks(lambda comm: threading.Lock(), 1)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="<lambda> or its arguments cannot be copied"):
        on_ranks(lambda comm: lock, 2)

    def fake(comm):
        with FakeTensorMode():
            return torch.ones(2)

    with pytest.raises(RankError, match="cannot be copied"):
        on_ranks(fake, 1)


def test_prints_come_in_the_order_of_ranks(capsys):
    def program(comm):
        print("first", comm.rank)
        comm.barrier()
        print("second\nand third", end="")

    result = on_ranks(program, 2)
    assert result.prints == [f"first {r}\nsecond\nand third" for r in range(2)]
    lines = [f"[rank {r}] {line}" for r in range(2) for line in
             (f"first {r}", "second", "and third")]  # fmt: skip
    assert capsys.readouterr().out.splitlines() == lines


def test_what_was_printed_before_a_failure_is_shown(capsys):
    def program(comm):
        print("before", comm.rank)
        comm.barrier()
        raise ValueError

    with pytest.raises(RankError):
        on_ranks(program, 2)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] before 0", "[rank 1] before 1"]


def test_wrong_arguments_of_run():
    for ranks in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="whole number of ranks"):
            run(print, ranks=ranks, on="virtual")
    with pytest.raises(ValueError, match="it can be auto, virtual, processes, gpus"):
        run(print, on="cloud")
    with pytest.raises(ValueError, match="no server 'dgx'"):
        run(print, on="virtual", server="dgx")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system places threads")
def test_ranks_stay_on_one_core_and_the_parent_does_not():
    before = os.sched_getaffinity(0)
    values = on_ranks(lambda comm: os.sched_getaffinity(0), len(before)).values
    assert all(cores == values[0] and len(cores) == 1 for cores in values)
    assert os.sched_getaffinity(0) == before
