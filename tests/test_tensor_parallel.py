"""Split layers against the unsplit ones: outputs, gradients of inputs and of every parameter."""

import copy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from utils.models import Attention, TransformerBlock, alexnet
from utils.ranks import RankError, run
from utils.tensor_parallel import (
    ColumnParallelLinear,
    Dropout,
    InputParallelConv2d,
    OneWeirdTrick,
    OutputParallelConv2d,
    ParallelAttention,
    ParallelBlock,
    ParallelEmbedding,
    ParallelMLP,
    RowParallelLinear,
    SequenceParallelBlock,
    all_at_once,
    all_gather_reduce_scatter,
    all_gather_split,
    all_reduce_identity,
    broadcast_reduce,
    clip_gradients,
    dropout_streams,
    grid,
    identity_all_reduce,
    in_slices,
    one_after_another,
    own_part,
    parallel_cross_entropy,
    part_sizes,
    reduce_scatter_all_gather,
    split_all_gather,
    tower,
)

WORLDS = [1, 2, 3, 4]


def on_ranks(program, ranks, *args, **options):
    options = {"on": "virtual", "server": "hgx-h200", **options}
    return run(program, ranks=ranks, args=args, **options)


def double(module, seed=0):
    """The same weights wherever it is called, in float64."""
    torch.manual_seed(seed)
    module = module() if callable(module) and not isinstance(module, nn.Module) else module
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module.double()


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b):
    return torch.allclose(a.cpu(), b.cpu(), rtol=1e-9, atol=1e-10)


def part(whole, sizes, rank, dim):
    return whole.split(sizes, dim)[rank]


# --- operators ----------------------------------------------------------------------------------


def test_part_sizes():
    assert part_sizes(7, 2) == [4, 3] and part_sizes(7, 3) == [3, 2, 2]
    assert part_sizes(2, 4) == [1, 1, 0, 0] and part_sizes(0, 3) == [0, 0, 0]


@pytest.mark.parametrize("ranks", WORLDS)
def test_operators_go_forward_and_back(ranks):
    """Against what the names say, with a different gradient on every rank."""

    def program(comm):
        n, rank = comm.world_size, comm.rank
        xs = [data(2, 5, seed=r) for r in range(n)]
        wide = [data(2, 5 * n, seed=50 + r) for r in range(n)]
        sizes = part_sizes(5, n)

        def back(function, x, gradients):
            x = x.to(comm.device).requires_grad_()
            y = function(x)
            y.backward(gradients.to(comm.device))
            return y, x.grad

        y, g = back(lambda x: identity_all_reduce(x, comm), xs[rank], xs[rank])
        assert close(y, xs[rank]) and close(g, sum(xs))
        y, g = back(lambda x: all_reduce_identity(x, comm), xs[rank], xs[rank])
        assert close(y, sum(xs)) and close(g, xs[rank])
        y, g = back(lambda x: all_gather_split(x, comm, -1, [5] * n), xs[rank], wide[0])
        assert close(y, torch.cat(xs, 1)) and close(g, wide[0].split(5, 1)[rank])
        y, g = back(lambda x: split_all_gather(x, comm, 1), xs[0], part(xs[1 % n], sizes, rank, 1))
        assert close(y, part(xs[0], sizes, rank, 1)) and close(g, xs[1 % n])
        y, g = back(
            lambda x: all_gather_reduce_scatter(x, comm, 1, sizes),
            part(xs[0], sizes, rank, 1), xs[rank],
        )  # fmt: skip
        assert close(y, xs[0]) and close(g, part(sum(xs), sizes, rank, 1))
        y, g = back(
            lambda x: reduce_scatter_all_gather(x, comm, 1), xs[rank], part(xs[0], sizes, rank, 1)
        )
        assert close(y, part(sum(xs), sizes, rank, 1)) and close(g, xs[0])
        y, g = back(lambda x: broadcast_reduce(x, comm, n - 1), xs[rank], xs[rank])
        assert close(y, xs[n - 1]) and close(g, sum(xs) if rank == n - 1 else 0 * xs[0])
        return True

    assert all(on_ranks(program, ranks).values)


# --- layers -------------------------------------------------------------------------------------


def compare(comm, whole, split, x, parts, enter=lambda x: x, leave=None):
    """Outputs, input gradient and parameters' gradients of a split layer against the unsplit one.

    `parts` says for each parameter of the split layer which gradient of the unsplit layer it has.
    """
    x_whole = x.clone().requires_grad_()
    y_whole = whole(x_whole)
    gradient = data(*y_whole.shape, seed=9)
    y_whole.backward(gradient)
    x_split = x.to(comm.device).requires_grad_()
    y = split(enter(x_split))
    if leave is not None:
        y_whole, gradient = leave(y_whole), leave(gradient)
    assert close(y, y_whole)
    y.backward(gradient.to(comm.device))
    assert close(x_split.grad, x_whole.grad)
    expected = parts(dict(whole.named_parameters()))
    own = dict(split.named_parameters())
    assert set(expected) == set(own)
    for name, wanted in expected.items():
        assert close(own[name].grad, wanted), name
        if own[name].is_split and comm.world_size > 1:
            assert own[name].numel() < sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("outputs", [7, 8, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel(ranks, outputs, bias):
    def program(comm):
        linear = double(nn.Linear(6, outputs, bias=bias))
        sizes = part_sizes(outputs, comm.world_size)
        for gather in (True, False):
            split = ColumnParallelLinear(linear, comm, gather)
            compare(
                comm, copy.deepcopy(linear), split, data(2, 3, 6),
                lambda p: {name: part(p[name].grad, sizes, comm.rank, 0) for name in p},
                leave=None if gather else lambda y: part(y, sizes, comm.rank, -1),
            )  # fmt: skip
        return [p.numel() for p in split.parameters()]

    values = on_ranks(program, ranks).values
    assert sum(sum(counts) for counts in values) == outputs * (6 + bias)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel(ranks, bias):
    def program(comm):
        linear = double(nn.Linear(7, 5, bias=bias))
        sizes = part_sizes(7, comm.world_size)

        def parts(p):
            own = {"weight": part(p["weight"].grad, sizes, comm.rank, 1)}
            return own | ({"bias": p["bias"].grad} if bias else {})

        split = RowParallelLinear(linear, comm)
        compare(comm, linear, split, data(4, 7), parts, lambda x: split_all_gather(x, comm, -1))

    on_ranks(program, ranks)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def mlp_parts(p, rank, sizes, up="up", down="down", prefix=""):
    return {
        f"{prefix}up.weight": part(p[f"{up}.weight"].grad, sizes, rank, 0),
        f"{prefix}up.bias": part(p[f"{up}.bias"].grad, sizes, rank, 0),
        f"{prefix}down.weight": part(p[f"{down}.weight"].grad, sizes, rank, 1),
        f"{prefix}down.bias": p[f"{down}.bias"].grad,
    }


@pytest.mark.parametrize("ranks", WORLDS)
def test_mlp(ranks):
    def program(comm):
        whole = double(MLP())
        split = ParallelMLP(whole.up, whole.down, comm)
        sizes = part_sizes(7, comm.world_size)
        compare(comm, whole, split, data(4, 5), lambda p: mlp_parts(p, comm.rank, sizes))

    result = on_ranks(program, ranks)
    messages = [event for event in result.timeline.events if event.name == "message"]
    assert len(messages) == 2 * ranks * 2 * (ranks - 1)  # one ring forward, one backward


def attention_parts(p, rank, heads, prefix=""):
    """The gradients of the unsplit attention that belong to a rank's heads."""
    own = slice(sum(heads[:rank]), sum(heads[: rank + 1]))
    weight, bias = p[f"{prefix}qkv.weight"].grad, p[f"{prefix}qkv.bias"].grad
    width, out = weight.shape[1], p[f"{prefix}out.weight"].grad
    return {
        f"{prefix}qkv_weight": weight.view(3, sum(heads), -1, width)[:, own].reshape(-1, width),
        f"{prefix}qkv_bias": bias.view(3, sum(heads), -1)[:, own].reshape(-1),
        f"{prefix}out_weight": out.view(width, sum(heads), -1)[:, own].reshape(width, -1),
        f"{prefix}out_bias": p[f"{prefix}out.bias"].grad,
    }


@pytest.mark.parametrize("ranks", WORLDS)
def test_attention(ranks):
    def program(comm):
        whole = double(Attention(20, 5))  # 5 heads on 2, 3 and 4 ranks: uneven
        split = ParallelAttention(whole, comm)
        heads = part_sizes(5, comm.world_size)
        compare(comm, whole, split, data(2, 6, 20), lambda p: attention_parts(p, comm.rank, heads))
        return split.heads

    assert sum(on_ranks(program, ranks).values) == 5


def test_attention_needs_a_head_for_each_rank():
    with pytest.raises(RankError, match="3 ranks cannot share 2 heads"):
        on_ranks(lambda comm: ParallelAttention(Attention(4, 2), comm), 3)


def test_attention_is_that_of_pytorch():
    whole = double(Attention(12, 3))
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = (
        whole.qkv.weight.data,
        whole.qkv.bias.data,
    )
    theirs.out_proj.load_state_dict(whole.out.state_dict())
    x = data(2, 5, 12)
    mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    assert close(whole(x), theirs(x, x, x, attn_mask=mask)[0])


def block_parts(p, rank, n, heads, hidden):
    norms = {f"norm{i}.{name}": p[f"norm{i}.{name}"].grad for i in (1, 2) for name in
             ("weight", "bias")}  # fmt: skip
    return (
        norms
        | attention_parts(p, rank, part_sizes(heads, n), "attention.")
        | mlp_parts(p, rank, part_sizes(hidden, n), prefix="mlp.")
    )


@pytest.mark.parametrize("ranks", WORLDS)
def test_block(ranks):
    def program(comm):
        whole = double(TransformerBlock(12, 4))
        split = ParallelBlock(whole, comm)
        compare(
            comm, whole, split, data(2, 5, 12),
            lambda p: block_parts(p, comm.rank, comm.world_size, 4, 48),
        )  # fmt: skip

    on_ranks(program, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("length", [8, 7])
def test_sequence_parallel_block(ranks, length):
    """Each rank has its rows only; the norms' gradients are those of all rows."""

    def program(comm):
        whole = double(TransformerBlock(12, 4))
        split = SequenceParallelBlock(whole, comm)
        sizes = part_sizes(length, comm.world_size)
        x = data(2, length, 12)
        x_whole = x.clone().requires_grad_()
        gradient = data(2, length, 12, seed=9)
        whole(x_whole).backward(gradient)
        own = part(x, sizes, comm.rank, 1).to(comm.device).requires_grad_()
        y = split(own, length)
        assert close(y, part(whole(x), sizes, comm.rank, 1))
        y.backward(part(gradient, sizes, comm.rank, 1).to(comm.device))
        assert close(own.grad, part(x_whole.grad, sizes, comm.rank, 1))
        expected = block_parts(dict(whole.named_parameters()), comm.rank, comm.world_size, 4, 48)
        for name, parameter in split.named_parameters():
            assert close(parameter.grad, expected[name]), name

    on_ranks(program, ranks)


def test_sequence_parallel_sends_as_much_and_keeps_less():
    """An all-reduce is a reduce-scatter and an all-gather; norms and biases come on top."""

    def program(comm, kind):
        torch.manual_seed(0)
        block = kind(TransformerBlock(64, 4), comm)
        rows = 256 // comm.world_size if kind is SequenceParallelBlock else 256
        x = torch.randn(4, rows, 64, device=comm.device).requires_grad_()
        comm.barrier()
        y = block(x, 256) if kind is SequenceParallelBlock else block(x)
        y.sum().backward()

    runs = {kind: on_ranks(program, 4, kind) for kind in (ParallelBlock, SequenceParallelBlock)}
    whole, rows = (runs[kind].timeline for kind in (ParallelBlock, SequenceParallelBlock))
    payload = 4 * 2 * 3 / 4 * 4 * 256 * 64 * 4  # four all-reduces
    assert whole.bytes_sent(0) == pytest.approx(payload, rel=1e-3)
    assert rows.bytes_sent(0) == pytest.approx(payload, rel=0.02)
    activations = [timeline.peak_memory[0]["activations"] for timeline in (whole, rows)]
    assert activations[1] < 0.8 * activations[0]


# --- vocabulary ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_embedding(ranks, padding):
    def program(comm):
        whole = double(nn.Embedding(5, 3, padding_idx=padding))
        split = ParallelEmbedding(whole, comm)
        ids = torch.tensor([[0, 4, 2], [3, 3, 1]])
        y_whole, y = whole(ids), split(ids.to(comm.device))
        assert close(y, y_whole)
        y_whole.backward(data(2, 3, 3))
        y.backward(data(2, 3, 3).to(comm.device))
        sizes = part_sizes(5, comm.world_size)
        assert close(split.weight.grad, part(whole.weight.grad, sizes, comm.rank, 0))
        return len(split.weight)

    assert on_ranks(program, ranks).values == part_sizes(5, ranks)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("shift", [0.0, 800.0])
def test_cross_entropy(ranks, shift):
    """A vocabulary of 5 over 2 ranks is 3 and 2; large logits do not overflow."""

    def program(comm):
        logits = data(6, 5) + shift * torch.tensor([0, 1, 0, 0, 1])
        targets = torch.tensor([0, 4, 2, 3, 1, 4])
        whole = logits.clone().requires_grad_()
        loss_whole = F.cross_entropy(whole, targets, reduction="none")
        loss_whole.sum().backward()
        sizes = part_sizes(5, comm.world_size)
        own = part(logits, sizes, comm.rank, 1).to(comm.device).requires_grad_()
        loss = parallel_cross_entropy(own, targets.to(comm.device), comm, 5)
        loss.sum().backward()
        assert close(loss, loss_whole)
        assert close(own.grad, part(whole.grad, sizes, comm.rank, 1))

    on_ranks(program, ranks)


def test_a_vocabulary_that_cannot_be_shared():
    with pytest.raises(RankError, match="4 ranks cannot share a vocabulary of 3 words"):
        on_ranks(lambda comm: ParallelEmbedding(nn.Embedding(3, 2), comm), 4)
    with pytest.raises(RankError, match="rank 0 of 2 has 3 of 5 words, but its logits have 2"):
        on_ranks(
            lambda comm: parallel_cross_entropy(
                torch.zeros(1, 2, device=comm.device), torch.zeros(1, dtype=torch.int64), comm, 5
            ),
            2,
        )


# --- convolutions and AlexNet -------------------------------------------------------------------


@pytest.mark.parametrize("ranks", WORLDS)
def test_convolutions(ranks):
    def program(comm):
        conv = double(nn.Conv2d(5, 7, 3, stride=2, padding=1))
        outputs = part_sizes(7, comm.world_size)
        for gather in (True, False):
            compare(
                comm, copy.deepcopy(conv), OutputParallelConv2d(conv, comm, gather),
                data(2, 5, 6, 5),
                lambda p: {name: part(p[name].grad, outputs, comm.rank, 0) for name in p},
                leave=None if gather else lambda y: part(y, outputs, comm.rank, 1),
            )  # fmt: skip
        inputs = part_sizes(5, comm.world_size)
        compare(
            comm, conv, InputParallelConv2d(conv, comm), data(2, 5, 6, 5),
            lambda p: {"weight": part(p["weight"].grad, inputs, comm.rank, 1),
                       "bias": p["bias"].grad},
            lambda x: split_all_gather(x, comm, 1),
        )  # fmt: skip

    on_ranks(program, ranks)
    with pytest.raises(RankError, match="groups=2 is split already"):
        on_ranks(lambda comm: OutputParallelConv2d(nn.Conv2d(4, 4, 1, groups=2), comm), 2)


def small_alexnet():
    return double(alexnet(7, (4, 8, 6, 6, 4), 10, size=1))


def test_alexnets_parameters():
    with torch.device("meta"):
        net = alexnet()
        counts = [sum(p.numel() for p in layer.parameters()) for layer in net]
    convolutions = sum(count for count, layer in zip(counts, net) if isinstance(layer, nn.Conv2d))
    assert convolutions == 2_334_080 and sum(counts) == 60_965_224
    assert net(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)
    products = multiply_adds(net)
    assert products["Conv2d"] == pytest.approx(665.8e6, rel=1e-4)
    assert products["Conv2d"] / sum(products.values()) == pytest.approx(0.919, abs=5e-4)


def multiply_adds(net):
    found, x = {}, torch.empty(1, 3, 224, 224, device="meta")
    for layer in net:
        x = layer(x)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            kind = type(layer).__name__
            count = layer.weight[0].numel() * x[0].numel()
            found[kind] = found.get(kind, 0) + count
    return found


def test_two_towers_are_one_network():
    def program(comm):
        whole = small_alexnet()
        mine = tower(whole, comm)
        x, targets = data(3, 3, 63, 63), torch.tensor([0, 6, 2])
        F.cross_entropy(whole(x), targets).backward()
        y = mine(x.to(comm.device))
        assert close(y, whole(x))
        F.cross_entropy(y, targets.to(comm.device)).backward()
        layers = [layer for layer in mine if hasattr(layer, "weight")]
        unsplit = [layer for layer in whole if hasattr(layer, "weight")]
        for own, layer in zip(layers, unsplit):
            for name in ("weight", "bias"):
                wanted = own_part(getattr(layer, name).grad, comm, 0)
                assert close(getattr(own, name).grad, wanted)
        return [layer.weight.shape[0] for layer in layers], len(list(mine.parameters()))

    (first, count), second = on_ranks(program, 2, server="two-gtx-580").values
    assert first == [2, 4, 3, 3, 2, 5, 5, 4] and second[0] == [2, 4, 3, 3, 2, 5, 5, 3]
    assert count == 16


def test_a_tower_of_alexnet_fits_where_all_of_it_does_not():
    """48, 128, 192, 192 and 128 filters a GPU; which layers read both towers."""

    def program(comm):
        with FakeTensorMode(allow_non_fake_inputs=True):
            mine = tower(alexnet(), comm)
            names = [type(layer).__name__ for layer in mine]
        filters = [layer.weight.shape[0] for layer in mine if isinstance(layer, nn.Conv2d)]
        readers = [names[i + 1] for i, name in enumerate(names) if name == "ReadAll"]
        return filters, readers

    for filters, readers in on_ranks(program, 2, server="two-gtx-580").values:
        assert filters == [48, 128, 192, 192, 128]
        assert readers == ["Conv2d", "Linear", "Linear", "Linear"]  # the third convolution


@pytest.mark.parametrize("scheme", [all_at_once, one_after_another, in_slices])
@pytest.mark.parametrize("images", [[2, 2], [3, 1], [2, 1, 2], [1, 0, 2, 2], [3]])
def test_one_weird_trick_is_one_network(scheme, images):
    def program(comm):
        torch.manual_seed(0)
        features = double(nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten()))
        linears = [double(nn.Linear(a, b)) for a, b in [(12, 7), (7, 5), (5, 6)]]
        x, y = data(sum(images), 1, 4, 4), torch.arange(sum(images)) % 6
        net = nn.Sequential(features, *[m for linear in linears for m in (linear, nn.ReLU())][:-1])
        expected = F.cross_entropy(net(x), y, reduction="sum")
        expected.backward()
        model = OneWeirdTrick(copy.deepcopy(features).to(comm.device), linears, comm)
        own = x.split(images)[comm.rank].to(comm.device)
        loss = scheme(model, own, [part.to(comm.device) for part in y.split(images)])
        assert close(loss, expected)
        loss.backward()
        model.sum_gradients()
        for own, layer in zip(model.features.parameters(), features.parameters()):
            assert close(own.grad, layer.grad)
        for own, layer in zip(model.linears, linears):
            assert close(own.weight.grad, own_part(layer.weight.grad, comm, 0))
            assert close(own.bias.grad, own_part(layer.bias.grad, comm, 0))

    on_ranks(program, len(images))


ONE_TOWER = {"filters": (64, 192, 384, 256, 256), "towers": 1}


def test_one_weird_trick_moves_a_third():
    """8 GPUs, 128 images each: 427.7 MB a GPU and step become 17.3 and 124.8."""

    def program(comm, whole):
        with FakeTensorMode(allow_non_fake_inputs=True):
            with torch.device(comm.device):
                net = alexnet(**ONE_TOWER)
                x, labels = torch.empty(128, 3, 224, 224), [torch.zeros(128).long()] * 8
            if whole:
                F.cross_entropy(net(x), labels[0]).backward()
                comm.all_reduce(torch.cat([p.grad.flatten() for p in net.parameters()]))
                return
            linears = [layer for layer in net if isinstance(layer, nn.Linear)]
            model = OneWeirdTrick(net[: list(net).index(linears[0])], linears, comm)
            all_at_once(model, x, labels).backward()
            model.sum_gradients()

    convolutions, linears = 2 * 7 / 8 * 2_469_696 * 4, 124.8e6
    assert convolutions == pytest.approx(17.3e6, rel=2e-3)
    for whole, megabytes in ((True, 427.7), (False, 142.1)):
        timeline = on_ranks(program, 8, whole).timeline
        for rank in range(8):
            assert timeline.bytes_sent(rank) / 1e6 == pytest.approx(megabytes, abs=0.05)
    assert convolutions + linears == pytest.approx(142.1e6, abs=0.05e6)


def test_parameters_of_the_one_tower_network():
    with torch.device("meta"):
        net = alexnet(**ONE_TOWER)
    counts = {nn.Conv2d: 0, nn.Linear: 0}
    for layer in net:
        if type(layer) in counts:
            counts[type(layer)] += sum(p.numel() for p in layer.parameters())
    assert list(counts.values()) == [2_469_696, 58_631_144]


# --- dropout, clipping --------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["virtual", "processes"])
def test_dropout_streams(on):
    """Masks are equal where they must be, and different where they must be; both repeat."""

    def masks(comm, draw_first):
        if draw_first:
            torch.rand(1000)
            torch.manual_seed(3)
        streams = dropout_streams(comm, seed=7)
        ones = torch.ones(1000, device=comm.device)
        return [Dropout(0.5, stream)(ones).cpu() for stream in streams]

    runs = [run(masks, ranks=3, on=on, args=(first,)).values for first in (False, True)]
    for values in runs:
        assert all(torch.equal(alike, values[0][0]) for alike, _ in values)
        assert not torch.equal(values[0][1], values[1][1])
        for mask in values[0]:
            assert set(mask.tolist()) == {0.0, 2.0} and 400 < (mask > 0).sum() < 600
    for rank in range(3):
        assert torch.equal(runs[0][rank][0], runs[1][rank][0])
        assert torch.equal(runs[0][rank][1], runs[1][rank][1])


def test_dropout_off():
    x, stream = torch.ones(50), torch.Generator()
    assert torch.equal(Dropout(0.5, stream).eval()(x), x)
    assert torch.equal(Dropout(0.0, stream)(x), x)
    with pytest.raises(ValueError, match="not 1"):
        Dropout(1, stream)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_clipping_by_the_global_norm(ranks, max_norm):
    def program(comm):
        whole = double(TransformerBlock(12, 4))
        split = ParallelBlock(whole, comm)
        x = data(2, 5, 12)
        whole(x).square().sum().backward()
        split(x.to(comm.device)).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm)
        norm = clip_gradients(split.parameters(), max_norm, comm)
        assert torch.allclose(norm.cpu().double(), expected, rtol=1e-5)
        parts = block_parts(dict(whole.named_parameters()), comm.rank, comm.world_size, 4, 48)
        for name, parameter in split.named_parameters():
            assert torch.allclose(parameter.grad.cpu(), parts[name], rtol=1e-5, atol=1e-9)

    on_ranks(program, ranks)


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["virtual", "processes"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_equals_one_device(ranks, on):
    """Embedding, two blocks and a vocabulary of 11, split, for five steps."""

    def build():
        torch.manual_seed(0)
        parts = nn.Embedding(11, 12), TransformerBlock(12, 3), TransformerBlock(12, 3)
        return nn.ModuleList([*parts, nn.Linear(12, 11)]).double()

    ids = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(1))
    x, y = ids[:, :-1], ids[:, 1:].reshape(-1)

    def program(comm):
        embed, first, second, out = build()
        layers = [
            ParallelEmbedding(embed, comm),
            ParallelBlock(first, comm),
            ParallelBlock(second, comm),
            ColumnParallelLinear(out, comm),
        ]
        net = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        losses = []
        for _ in range(5):
            logits = net(x.to(comm.device)).flatten(0, 1)
            loss = parallel_cross_entropy(logits, y.to(comm.device), comm, 11).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    net = build()
    optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.5), []
    for _ in range(5):
        loss = F.cross_entropy(nn.Sequential(*net)(x).flatten(0, 1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in run(program, ranks=ranks, on=on).values:
        assert losses == pytest.approx(expected, rel=1e-10)
    assert expected[-1] < expected[0]


# --- with data parallelism ----------------------------------------------------------------------


@pytest.mark.parametrize("on", ["virtual", "processes"])
@pytest.mark.parametrize(("ranks", "width"), [(4, 2), (6, 2), (6, 3), (3, 1), (3, 3)])
def test_a_grid_equals_one_device(ranks, width, on):
    """Rows share the model, columns the rows of a batch of 7: gradients and three steps of SGD."""
    X, y = data(7, 5, 12), data(7, 5, 12, seed=2)

    def train(block, own, targets, sum_gradients=lambda p: None):
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ((block(own) - targets).square().sum() / X.numel()).backward()
            for p in block.parameters():
                sum_gradients(p.grad)
            optimizer.step()
        return block

    def program(comm):
        row, column = grid(comm, width)
        assert (row.world_size, column.world_size) == (width, ranks // width)
        whole = double(TransformerBlock(12, 4))
        block = ParallelBlock(whole, row)
        own, targets = (t.tensor_split(column.world_size)[column.rank].to(comm.device)
                        for t in (X, y))  # fmt: skip
        train(block, own, targets, column.all_reduce)
        train(whole, X, y)
        sizes = part_sizes(48, width)
        assert close(block.mlp.up.weight, part(whole.up.weight, sizes, row.rank, 0))
        assert close(block.mlp.down.weight, part(whole.down.weight, sizes, row.rank, 1))
        assert close(block.attention.out_bias, whole.attention.out.bias)
        for own_norm, norm in ((block.norm1, whole.norm1), (block.norm2, whole.norm2)):
            assert close(own_norm.weight, norm.weight) and close(own_norm.bias, norm.bias)
        return row.ranks, column.ranks

    values = run(program, ranks=ranks, on=on).values
    rows = [tuple(range(i, i + width)) for i in range(0, ranks, width)]
    assert [own for own, _ in values] == [row for row in rows for _ in row]
    assert [column for _, column in values] == [
        tuple(range(rank % width, ranks, width)) for rank in range(ranks)
    ]


@pytest.mark.parametrize("width", [0, 3, 5])
def test_a_grid_that_is_not_full(width):
    with pytest.raises(RankError, match=f"4 ranks do not fill rows of {width}"):
        on_ranks(grid, 4, width)
