"""The simulated step without a program agrees with the simulated step of the program."""

import sys

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from utils import Cluster, plots, step_time, vgpu, widgets
from utils.data_parallel import compute_gradients
from utils.hardware import get_server
from utils.step_time import NETWORKS, ring_order, simulate_step


@pytest.fixture(autouse=True)
def clean_up():
    plt.close("all")
    yield
    vgpu.stop()
    assert not plt.get_fignums()


def run_program(network, rows, gpus, server):
    """The timeline of the chapter's own code."""
    cluster = Cluster(get_server(server).gpus, server=server, quiet=True)
    build, image = NETWORKS[network]
    replicas = []
    with FakeTensorMode():
        for i in ring_order(server, gpus):
            with torch.device(cluster.devices[i]):
                replicas.append(build())
        optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]
        X, y = torch.empty(rows, *image), torch.empty(rows, dtype=torch.int64)
        with cluster.record() as timeline:
            compute_gradients(replicas, [(X, y)], nn.CrossEntropyLoss(reduction="none"))
            for optimizer in optimizers:
                optimizer.step()
    return timeline


@pytest.mark.parametrize(
    "network, rows, gpus, server",
    [
        ("LeNet", 256, 1, "pcie-switch"),
        ("LeNet", 250, 8, "dgx1-v100"),
        ("LeNet", 8191, 3, "pcie-switch"),
        ("ResNet-18", 256, 4, "dgx1-v100"),
        ("ResNet-18", 512, 2, "hgx-h200"),
    ],
)
def test_it_agrees_with_the_program(network, rows, gpus, server):
    program, model = (
        run_program(network, rows, gpus, server),
        simulate_step(network, rows, gpus, server),
    )
    assert model.duration == pytest.approx(program.duration, rel=0.015)
    for i in ring_order(server, gpus):
        assert model.busy(i) == pytest.approx(program.busy(i), rel=0.01)
        assert model.exposed(i) == pytest.approx(program.exposed(i), rel=0.1, abs=5e-6)
        assert model.bytes_sent(i) == program.bytes_sent(i)
    launches = [sum(e.kind == "host" for e in t.events) for t in (program, model)]
    assert abs(launches[0] - launches[1]) <= 1
    assert model.simulated and str(gpus) in model.title and server in model.title


@pytest.mark.parametrize("network", NETWORKS)
def test_work_is_a_fixed_part_and_a_part_for_every_row(network):
    recorded = step_time.record_kernels(network, 37)
    for phase, kernels in step_time.kernels_of(network).items():
        expected = [(e.name, e.flops, e.bytes) for e in recorded[phase]]
        assert [(k[0], k[1] + 37 * k[2], k[3] + 37 * k[4]) for k in kernels] == expected


def test_parameters_are_those_of_the_networks():
    assert step_time.parameter_count("LeNet") == 129_068
    assert step_time.parameter_count("ResNet-18") == 11_175_818 + 2 * 64 * 9  # three channels


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_parts_make_up_the_step(network, gpus):
    time = step_time.step_time(network, 64, gpus, "dgx1-v100")
    assert time.compute + time.exposed + time.waiting == pytest.approx(time.duration)
    assert min(time.compute, time.exposed, time.waiting) >= 0


def test_more_work_takes_longer_and_more_gpus_have_less_each():
    def compute(rows, gpus):
        return step_time.step_time("ResNet-18", rows, gpus, "hgx-h200").compute

    assert compute(1024, 1) > compute(512, 1) > compute(512, 2) > compute(512, 8)


def test_rings_of_the_dgx1_follow_its_double_links():
    assert ring_order("dgx1-v100", 8) == [0, 3, 2, 1, 5, 6, 7, 4]
    assert ring_order("hgx-h200", 3) == [0, 1, 2]


@pytest.mark.parametrize("gpus", [0, 5])
def test_more_gpus_than_there_are(gpus):
    with pytest.raises(ValueError, match=f"pcie-switch has 1 to 4 GPUs to use, not {gpus}"):
        simulate_step("LeNet", 8, gpus, "pcie-switch")


def test_the_cluster_in_use_stays_in_use():
    step_time.kernels_of.cache_clear()
    cluster = Cluster(2, quiet=True)
    x = torch.ones(3, device=cluster.devices[1])
    simulate_step("LeNet", 8, 4, "pcie-switch")
    assert x.device == cluster.devices[1] and vgpu.state.machine is cluster.machine
    with cluster.record() as timeline:
        x + x
    assert [e.name for e in timeline.events if e.kind == "compute"] == ["add"]


def test_without_a_cluster_there_is_none_afterwards():
    step_time.kernels_of.cache_clear()
    simulate_step("LeNet", 8, 2, "pcie-switch")
    assert vgpu.state.machine is None and torch.ones(2).device.type == "cpu"


@pytest.mark.parametrize(
    "gpus, server, expected",
    [
        (1, "dgx1-v100", [1]),
        (8, "dgx1-v100", [1, 2, 4, 8]),
        (6, "dgx1-v100", [1, 2, 4, 6]),
        (8, "pcie-switch", [1, 2, 4]),
    ],
)
def test_numbers_of_gpus_in_the_figure(gpus, server, expected):
    assert step_time.gpu_numbers(gpus, server) == expected


def test_the_figure_shows_the_parts():
    step_time.draw_step_times("LeNet", 512, 4, "pcie-switch")
    ax = plt.gca()
    widths = [[bar.get_width() for bar in container] for container in ax.containers]
    for column, n in zip(zip(*widths, strict=True), (1, 2, 4), strict=True):
        time = step_time.step_time("LeNet", 512, n, "pcie-switch")
        parts = [time.compute, time.exposed, time.waiting]
        assert list(column) == pytest.approx([1e3 * part for part in parts])
    first, *_, last = [text.get_text() for text in ax.texts if "×" in text.get_text()]
    assert first.endswith("1.00 ×") and last.startswith(" ")
    assert any(text.get_text() == "simulated: pcie-switch" for text in ax.texts)
    alt = step_time.describe_step_times("LeNet", 512, 4, "pcie-switch")
    assert "4 GPUs" in alt and "Simulated" in alt
    assert plots.picture(alt).html.startswith("<img alt=")


@pytest.fixture
def view(monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    widgets.step_time_view("LeNet", 256, 4, "pcie-switch")
    return shown[0]


def test_moving_sliders_draws_the_figure_again(view):
    network, rows, gpus, server, image = view.widget.children
    assert image.value == view.first.html and "LeNet with a batch of 256" in image.value
    rows.value = 8192
    assert "LeNet with a batch of 8,192 on pcie-switch" in image.value
    server.value = "hgx-h200"
    gpus.value = 8
    assert "hgx-h200" in image.value and "8 GPUs" in image.value
    network.value = "ResNet-18"
    assert "ResNet-18 with a batch of 8,192" in image.value
    network.value, rows.value, gpus.value, server.value = "LeNet", 256, 4, "pcie-switch"
    assert image.value == view.first.html


def test_without_ipywidgets_there_is_the_figure(view, monkeypatch):
    expected, shown = view.first, []
    monkeypatch.setattr(widgets, "display", shown.append)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    widgets.step_time_view("LeNet", 256, 4, "pcie-switch")
    [plain] = shown
    assert isinstance(plain, plots.Picture) and plain.html == expected.html
