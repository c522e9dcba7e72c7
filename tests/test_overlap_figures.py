"""Chapter 07's model and figures: against the simulated machine, formulas and sums by hand."""

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from utils import costs, overlap, overlap_figures, plots, run, widgets
from utils.data_parallel import DistributedDataParallel, make_buckets
from utils.events import Event
from utils.hardware import get_server, ideal_server
from utils.models import mlp
from utils.overlap import Gradient, Trip, gradient_times, now, travel
from utils.ranks.collectives import ring_all_reduce
from utils.timeline import Timeline

MiB = 2**20


@pytest.fixture(autouse=True)
def no_open_figures():
    plt.close("all")
    yield
    plt.close("all")


def gradient(ready, nbytes=4):
    return Gradient("", ready, nbytes, torch.float32, torch.device("cpu"))


# --- the model ----------------------------------------------------------------------------------


def test_buckets_take_turns_by_hand():
    buckets = [
        [gradient(1.0, 10), gradient(2.0, 10)],  # leaves at 2, takes 20
        [gradient(3.0, 5)],  # waits until 22
        [gradient(50.0, 1)],  # comes when the wire is free
    ]
    assert travel(buckets, lambda nbytes: nbytes) == [
        Trip(20, 2.0, 2.0, 22.0),
        Trip(5, 3.0, 22.0, 27.0),
        Trip(1, 50.0, 50.0, 51.0),
    ]
    assert travel([], lambda nbytes: nbytes) == []


@pytest.mark.parametrize("cap", [2**10, MiB, 25 * MiB, 2**40])
@pytest.mark.parametrize("network", overlap.NETWORKS)
def test_no_plan_beats_the_bound(network, cap):
    forward, gradients = overlap.recorded(network)
    backward = max(g.ready for g in gradients)
    trips = travel(make_buckets(gradients, min(cap, MiB), cap), lambda nbytes: nbytes / 3e9)
    exposed = trips[-1].end - backward
    last = trips[-1].nbytes / 3e9
    total = sum(trip.nbytes for trip in trips) / 3e9
    assert exposed >= max(last, total - (backward - trips[0].ready)) - 1e-12
    assert sum(trip.nbytes for trip in trips) == sum(g.nbytes for g in gradients)
    assert all(a.end <= b.start for a, b in zip(trips, trips[1:]))


def test_gradients_get_ready_in_the_order_of_use():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(8, 2), nn.Linear(4, 8)

        def forward(self, X):
            return self.last(self.first(X))

    def make():
        model = Odd()
        return model, lambda: model(torch.empty(1000, 4)).sum()

    [(forward, gradients)] = run(gradient_times, 1, "virtual", (make,)).values
    named = {g.name: g for g in gradients}
    assert [g.name for g in gradients] == [name for name, _ in Odd().named_parameters()]
    assert forward < named["last.weight"].ready < named["first.weight"].ready
    assert named["last.weight"].nbytes == 4 * 16 and named["first.bias"].dtype == torch.float32


def test_the_three_networks_are_what_the_chapter_says():
    sizes = {}
    for network in overlap.NETWORKS:
        _, gradients = overlap.recorded(network)
        sizes[network] = sum(g.nbytes for g in gradients)
    assert sizes["ResNet-18"] == 4 * 11_689_512  # torchvision's, as its model zoo says
    assert sizes["VGG-16"] == 4 * 138_357_544
    width, layers, words = 768, 12, 50_257
    block = 12 * width * width + 13 * width
    assert sizes["transformer"] == 4 * (layers * block + words * width)


def test_the_shared_table_is_ready_last():
    passed, ready = overlap_figures.arrived("transformer")
    assert ready[-1] == 1 and 0.3 < ready[-1] - ready[-2] < 0.4
    assert (ready[1:] >= ready[:-1]).all() and (passed[1:] >= passed[:-1]).all()


def program(comm, make, cap):
    with FakeTensorMode(), torch.device(comm.device):
        model, loss = make()
        ddp = DistributedDataParallel(model, comm, first_cap=min(cap, MiB), cap=cap)
        comm.barrier()
        start = now(comm)
        loss().backward()
        ddp.wait()
        return now(comm) - start


def all_reduce_time(comm, nbytes):
    x = torch.zeros(nbytes // 4, device=comm.device)
    comm.barrier()
    start = now(comm)
    ring_all_reduce(comm, x)
    return now(comm) - start


@pytest.mark.parametrize("cap", [2**12, 25 * MiB, 2**40])
def test_prediction_and_simulated_machine_agree(cap):
    """ResNet-18 on 25 Gb/s Ethernet, from a recorded backward pass and two timed all-reduces."""
    wires = {"server": get_server("pcie-switch").take(1), "network": "ethernet-25g"}
    small, large = (
        run(all_reduce_time, 4, "virtual", (nbytes,), **wires).values[0]
        for nbytes in (4_000, 4_000_000)
    )
    byte = (large - small) / (4_000_000 - 4_000)
    _, gradients = overlap.recorded("ResNet-18")
    buckets = make_buckets(gradients, min(cap, MiB), cap)
    predicted = travel(buckets, lambda nbytes: small + byte * nbytes)[-1].end
    arguments = overlap.NETWORKS["ResNet-18"], cap
    simulated = run(program, 4, "virtual", arguments, **wires, record=False).values[0]
    assert predicted == pytest.approx(simulated, rel=0.05)


def test_the_figures_all_reduce_is_the_simulated_one():
    wires = {"server": get_server("pcie-switch").take(1), "network": "ethernet-25g"}
    for nbytes in (4_000, 4_000_000):
        simulated = run(all_reduce_time, 4, "virtual", (nbytes,), **wires).values[0]
        modelled = costs.ring_time(overlap_figures.RANKS, nbytes, 3e9, overlap_figures.MESSAGE)
        assert modelled == pytest.approx(simulated, rel=0.02)


# --- figures ------------------------------------------------------------------------------------


def test_trips_are_drawn_hidden_and_exposed():
    overlap_figures.draw_overlap("ResNet-18", 25, 3)
    ax = plt.gca()
    forward, backward, trips = overlap_figures.plan("ResNet-18", 25, 3)
    bars = [p for p in ax.patches if p.get_y() > 0.5]
    exposed = [p for p in bars if p.get_hatch()]
    assert sum(p.get_width() for p in exposed) == pytest.approx(
        (trips[-1].end - backward) * 1e3, rel=0.01
    )
    assert [trip.nbytes for trip in trips] == [2_052_000, 28_852_224, 15_853_824]
    assert "14 ms exposed" in ax.get_title(loc="left")
    plots.picture(overlap_figures.describe_overlap("ResNet-18", 25, 3))


def test_a_wire_fast_enough_exposes_the_last_bucket_only():
    forward, backward, trips = overlap_figures.plan("ResNet-18", 25, 300)
    assert trips[-1].start == backward
    assert trips[-1].end - backward == pytest.approx(
        costs.ring_time(4, trips[-1].nbytes, 300e9, overlap_figures.MESSAGE)
    )
    text = overlap_figures.describe_overlap("ResNet-18", 25, 300)
    assert f"{(trips[-1].end - backward) * 1e3:.3g} ms exposed" in text


def test_steps_show_each_timeline_to_scale():
    short = Timeline(
        [Event("a", "compute", ("gpu0",), 0.0, 0.002, (0,)),
         Event("m", "communication", ("gpu0→gpu1",), 0.001, 0.002, (0, 1))],
        ["gpu0", "gpu1"],
        duration=0.003,
    )  # fmt: skip
    asleep = Timeline([Event("sleep", "host", ("host0",), 0.0, 0.004)], ["gpu0"], duration=0.004)
    overlap_figures.draw_steps({"short": short, "asleep": asleep}, "steps")
    ax = plt.gca()
    widths = [p.get_width() for p in ax.patches]
    assert widths == pytest.approx([3, 4])  # the grey of the two rows, in ms
    extents = [c.get_paths()[0].get_extents().bounds for c in ax.collections if c.get_paths()]
    assert [x0 for x0, *_ in extents] == pytest.approx([0, 1, 0])
    assert [width for _, _, width, _ in extents] == pytest.approx([2, 2, 4])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["short", "asleep"]
    text = overlap_figures.describe_steps({"short": short, "asleep": asleep})
    assert "short: 3 ms, 1 of it" in text and "asleep: 4 ms, 0 of it" in text
    plots.picture(text)


def test_small_gaps_close():
    assert overlap_figures.closed_up([(0, 1), (1.05, 2), (3, 4)], 0.1) == [(0, 2), (3, 4)]


def test_arrivals_have_a_line_each_and_say_their_shares():
    overlap_figures.draw_arrivals()
    lines = plt.gca().get_lines()
    assert [line.get_label() for line in lines] == list(overlap.NETWORKS)
    for line, network in zip(lines, overlap.NETWORKS):
        passed, ready = overlap_figures.arrived(network)
        assert line.get_ydata()[-1] == pytest.approx(100) and ready[0] == 0
    text = overlap_figures.describe_arrivals(["VGG-16"])
    passed, ready = overlap_figures.arrived("VGG-16")
    assert f"VGG-16 {100 * ready[passed <= 0.1][-1]:.0f}, " in text
    plots.picture(text)


def test_the_view_shows_the_figure_and_follows_its_sliders(monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    assert widgets.overlap_view() is None
    [view] = shown
    network, megabytes, bandwidth, image = view.widget.children
    assert image.value == view.first.html and view.first.alt in view.first.html
    network.value, megabytes.value, bandwidth.value = "VGG-16", 1.0, 100.0
    overlap_figures.draw_overlap("VGG-16", 1.0, 100.0)
    expected = plots.picture(overlap_figures.describe_overlap("VGG-16", 1.0, 100.0)).html
    assert image.value == expected != view.first.html


# --- measured ----------------------------------------------------------------------------------


def test_a_step_on_processes_and_its_part_of_the_timeline():
    """Overlap on a slow wire, measured: messages in the step, none before."""

    def step(comm):
        model = mlp((64, 64, 64))
        ddp = DistributedDataParallel(model, comm, first_cap=1, cap=1)
        comm.barrier()
        start = now(comm)
        ddp(torch.ones(2, 64)).sum().backward()
        ddp.wait()
        return start, now(comm)

    result = run(step, 2, "processes", bandwidth=1e6, latency=1e-3)
    part = result.timeline.between(*max(result.values))
    sent = sum(p.nbytes for p in mlp((64, 64, 64)).parameters())
    assert part.duration > sent / 1e6  # a ring of two sends it once
    assert part.communication(0) > 0.9 * sent / 1e6
    predicted = run(step, 2, "virtual", server=ideal_server(2, 1e-3, 1e6))
    start, end = predicted.values[0]
    assert part.duration > 0.95 * (end - start)
