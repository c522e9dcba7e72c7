"""Figures of chapter 09: what they show comes from the numbers, and the numbers from the model."""

import matplotlib.pyplot as plt
import pytest
import torch
from torch._subclasses import FakeTensorMode

from utils import plots, run, tensor_figures, widgets
from utils.hardware import ideal_server
from utils.models import TransformerBlock, alexnet
from utils.tensor_parallel import ParallelBlock, tower


@pytest.fixture(autouse=True)
def no_open_figures():
    plt.close("all")
    yield
    plt.close("all")


def colours(ax):
    return [plt.matplotlib.colors.to_hex(patch.get_facecolor()).upper() for patch in ax.patches]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_rank_has_its_part_of_what_is_cut(n):
    tensor_figures.draw_cuts(n)
    by_columns, by_rows = plt.gcf().axes
    for rank in range(n):  # W and y, and its square in the key; x, W and its summand of y
        assert colours(by_columns).count(plots.rank_colour(rank)) == 3
        assert colours(by_rows).count(plots.rank_colour(rank)) == 3
    assert colours(by_columns).count(tensor_figures.WHOLE) == 2
    assert colours(by_rows).count(tensor_figures.WHOLE) == 0
    plots.picture("cuts")
    tensor_figures.draw_mlp(n)
    [ax] = plt.gcf().axes
    for rank in range(n):  # A, hidden, B, summand, key
        assert colours(ax).count(plots.rank_colour(rank)) == 5
    plots.picture("mlp")


def test_rows_between_the_layers():
    """Norms are whole above and cut below; the words say what travels before and after a layer."""
    tensor_figures.draw_block(2)
    [ax] = plt.gcf().axes
    assert colours(ax).count(tensor_figures.WHOLE) == 2 + 1  # two norms, and the key
    for rank in range(2):  # two layers above, two layers and two norms below, the key
        assert colours(ax).count(plots.rank_colour(rank)) == 2 + 4 + 1
    words = [text.get_text().replace("\n", "") for text in ax.texts]
    counts = [words.count(name) for name in ("all-reduce", "all-gather", "reduce-scatter")]
    assert counts == [2, 2, 2]
    plots.picture("block")


def test_which_layers_of_alexnet_read_both_towers():
    def program(comm):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return tensor_figures.layers_of_tower(tower(alexnet(), comm))

    for layers in run(program, 2, "virtual", server="two-gtx-580").values:
        assert layers == [
            ("conv 1", 48, False), ("conv 2", 128, False), ("conv 3", 192, True),
            ("conv 4", 192, False), ("conv 5", 128, False), ("linear 6", 2048, True),
            ("linear 7", 2048, True), ("linear 8", 500, True),
        ]  # fmt: skip


def test_towers_cross_where_a_layer_reads_both():
    tensor_figures.draw_towers([("a", 2, False), ("b", 3, False), ("c", 4, True)])
    ax = plt.gca()
    arrows = [text.arrow_patch for text in ax.texts if hasattr(text, "arrow_patch")]
    crossing = [a for a in arrows if a.get_linewidth() > 1.5]
    assert len(arrows) == 2 + 4 and len(crossing) == 2
    assert [text.get_text() for text in ax.texts].count("4") == 2
    plots.picture("towers")


@pytest.mark.parametrize("wires", tensor_figures.WIRES)
@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_computing_and_communicating_take_equally_long_at_the_crossing(n, wires):
    width = tensor_figures.crossing_width(n, wires)
    computing = tensor_figures.computing_time(width, n)
    assert computing == pytest.approx(tensor_figures.communication_time(width, n, wires))
    _, bandwidth = tensor_figures.WIRES[wires]
    law = (n - 1) * 2 * 271e12 / (9 * bandwidth)
    assert law < width < 1.7 * law  # latency counts on fast wires only


def test_one_gpu_has_nothing_to_communicate():
    assert tensor_figures.crossing_width(1, "PCIe 3") == 0
    assert tensor_figures.speedup(1024, 1, "PCIe 3") == 1


@pytest.mark.parametrize("n", [2, 4])
def test_the_model_counts_what_a_block_sends_and_computes(n, monkeypatch):
    """Against a split block on virtual ranks: four all-reduces, 12 width² weights."""
    monkeypatch.setattr(tensor_figures, "TOKENS", 2 * 6)
    monkeypatch.setitem(tensor_figures.WIRES, "test", (5e-6, 1e9))

    def program(comm):
        block = TransformerBlock(32, 4, dtype=torch.bfloat16)
        block = ParallelBlock(block, comm)
        x = torch.zeros(2, 6, 32, dtype=torch.bfloat16, device=comm.device).requires_grad_()
        comm.barrier()
        start = comm.time()
        block(x).sum().backward()
        torch.vgpu.synchronize()
        weights = sum(p.numel() for p in block.parameters() if p.dim() > 1)
        return comm.time() - start, weights

    result = run(program, n, "virtual", server=ideal_server(n, 5e-6, 1e9))
    seconds, weights = result.values[0]
    assert seconds == pytest.approx(tensor_figures.communication_time(32, n, "test"), rel=1e-3)
    flops = 6 * weights * n * tensor_figures.TOKENS
    peak = tensor_figures.CHIP.half * tensor_figures.CHIP.compute_efficiency
    assert tensor_figures.computing_time(32, 1) == pytest.approx(flops / peak)


def test_the_figure_shows_the_model():
    tensor_figures.draw_layer_times(4096, 4, "PCIe 3")
    left, right = plt.gcf().axes
    lines = {line.get_label(): line.get_xydata() for line in left.get_lines()}
    for width, milliseconds in lines["4 GPUs, all-reduces"][::40]:
        expected = tensor_figures.communication_time(width, 4, "PCIe 3") * 1e3
        assert milliseconds == pytest.approx(expected)
    heights = [bar.get_height() for bar in right.patches]
    assert heights[2] == pytest.approx(heights[0] / 4)
    text = tensor_figures.describe_layer_times(4096, 4, "PCIe 3")
    assert "more computing from width 11,301" in text and "on 4 A100s with PCIe 3" in text
    plots.picture(text)


def test_moving_the_sliders(monkeypatch):
    shown = []
    monkeypatch.setattr(widgets, "display", shown.append)
    widgets.layer_view()
    width, gpus, wires, image = shown[0].widget.children
    for wire in tensor_figures.WIRES:
        wires.value = wire
        for gpus.value in tensor_figures.GPUS[1:]:
            assert f"on {gpus.value} A100s with {wire}" in image.value
    width.value = 16384
    assert "At width 16,384" in image.value
