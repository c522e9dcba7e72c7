"""Bars of memory, and the books they are drawn from against formulas."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from torch import nn

from utils import Cluster, plots
from utils.costs import training_bytes
from utils.memory import KIND_COLOURS, draw_memory
from utils.models import lenet
from utils.vgpu.memory import KINDS


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def bars(ax):
    """(left, width) of the bars that were drawn, by kind."""
    found = {}
    for container in ax.containers:
        found[container.get_label()] = [(bar.get_x(), bar.get_width()) for bar in container]
    return found


def test_every_kind_has_a_colour_of_its_own():
    assert set(KIND_COLOURS) == set(KINDS)
    taken = set(plots.KIND_COLOURS.values()) | {plots.IDLE}
    assert len(set(KIND_COLOURS.values()) - taken) == len(KINDS)


def test_parts_stand_end_to_end():
    assert draw_memory({"a": {"parameters": 1, "activations": 3}, "b": {"parameters": 2}}) is None
    ax = plt.gca()
    assert bars(ax) == {"parameters": [(0, 1), (0, 2)], "activations": [(1, 3), (2, 0)]}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_xlabel() == "memory (MB)"


@pytest.mark.parametrize(
    "megabytes, capacity, unit, drawn",
    [(2000, None, "GB", 2), (20, None, "MB", 20), (0.02, None, "kB", 20), (20, 16_000, "GB", 0.02)],
)
def test_the_unit_fits_the_largest_value(megabytes, capacity, unit, drawn):
    draw_memory({"a": {"gradients": megabytes}}, capacity)
    ax = plt.gca()
    assert ax.get_xlabel() == f"memory ({unit})"
    assert bars(ax)["gradients"][0][1] == pytest.approx(drawn)
    labels = [text.get_text() for text in ax.texts]
    assert labels == ([] if capacity is None else ["capacity 16 GB"])


def test_rows_of_the_memory_table_fit():
    cluster = Cluster(2, server="pcie-switch", quiet=True)
    kept = torch.ones(250_000, device=cluster.devices[1]).requires_grad_()
    table = cluster.memory()
    draw_memory({name: table.loc[name] for name in table.index})
    assert bars(plt.gca()) == {"parameters": [(0, 0), (0, 1)]}
    del kept


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="rows is empty"):
        draw_memory({})


def test_the_same_drawing_twice():
    rows = {"a": {"parameters": 1.5, "other": 2}, "b": {"optimizer": 3}}
    first, second = (draw_memory(rows, 4) or plots.svg() for _ in range(2))
    assert first == second


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize(
    "optimizer, make",
    [
        ("sgd", lambda params: torch.optim.SGD(params, 0.1)),
        ("momentum", lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)),
        ("adam", lambda params: torch.optim.Adam(params)),
    ],
)
def test_lenet_to_the_byte(optimizer, make, batch):
    """What chapter 02 predicts: 4 bytes a parameter and so on, 21,888 kept values an image."""
    cluster = Cluster(1, server="pcie-switch", quiet=True)
    device = cluster.devices[0]
    net = lenet().to(device)
    stepper = make(net.parameters())
    X = torch.rand(batch, 1, 28, 28, device=device)
    y = torch.zeros(batch, dtype=torch.long, device=device)

    def held():
        return (cluster.memory().loc["vgpu:0"] * 1e6).round()

    with cluster.record() as timeline:
        loss = nn.functional.cross_entropy(net(X), y)
        assert held()["activations"] == 4 * 21_888 * batch + 8
        loss.backward()
        assert held()["gradients"] == 4 * 129_068
        stepper.step()
    after = held()
    trained = after["parameters"] + after["gradients"] + after["optimizer"]
    assert trained == training_bytes(129_068, optimizer)
    peak = pd.Series(timeline.peak_memory[0])
    if batch == 64:  # at the first ReLU: its output, the gradient in and the gradient out
        relu = 4 * 64 * 20 * 26 * 26
        assert peak["activations"] == relu + 8
        assert peak["gradients"] == 2 * relu + 4 * (129_068 - 200)
