"""What pipelines meet in practice: tied and frozen weights, statistics, dropout, NaN, mistakes."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from utils import run
from utils.pipeline import (
    build_layers,
    chunks_of,
    cut_batch,
    cut_network,
    forward_only,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    recomputing,
    run_schedule,
    tied_weights,
    zero_bubble_h1,
)
from utils.ranks import RankError

virtual = functools.partial(run, on="virtual", record=False)
row_loss = functools.partial(F.cross_entropy, reduction="none")
SCHEDULES = [naive, gpipe, one_f_one_b, zero_bubble_h1]


def squared_error(outputs, targets):
    return ((outputs - targets) ** 2).flatten(1).mean(1)


def merged(dictionaries):
    return {name: value for found in dictionaries for name, value in found.items()}


def gradients_of(chunks):
    return {name: p.grad for chunk in chunks for name, p in chunk.named_parameters()}


def state_of(chunks):
    return {name: t.clone() for chunk in chunks for name, t in chunk.state_dict().items()}


def assert_equal(found, expected, atol=1e-6):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol)


# --- training -----------------------------------------------------------------------------------


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 4)
    ).double()


def batch(number):
    generator = torch.Generator().manual_seed(number)
    X = torch.randn(10, 6, generator=generator, dtype=torch.float64)
    return X, torch.randint(4, (10,), generator=generator)


def train(comm, make):
    chunks = chunks_of(comm, cut_network(mlp(), [2, 4][: comm.world_size - 1]))
    optimizer = torch.optim.Adam(chunks.parameters(), lr=0.05)
    losses = []
    for number in range(6):
        parts = cut_batch(*batch(number), 3)
        schedule = make(comm.world_size, 3)
        losses.append(run_schedule(comm, chunks, schedule, parts, row_loss, optimizer).loss)
    return losses, state_of(chunks)


def train_unsplit():
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    losses = []
    for number in range(6):
        X, y = batch(number)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, net.state_dict()


@pytest.mark.parametrize(("p", "on"), [(1, "virtual"), (2, "virtual"), (3, "virtual"),
                                       (3, "processes")])  # fmt: skip
@pytest.mark.parametrize("make", [one_f_one_b, zero_bubble_h1])
def test_training_equals_training_on_one_device(make, p, on):
    losses, state = train_unsplit()
    values = run(train, ranks=p, on=on, args=(make,), record=False).values
    assert values[-1][0] == pytest.approx(losses, abs=1e-6)
    assert_equal(merged(value[1] for value in values), state)


# --- initial weights ----------------------------------------------------------------------------

BUILDERS = [
    lambda: nn.Linear(4, 4), nn.ReLU, lambda: nn.Linear(4, 8), nn.Dropout, lambda: nn.Linear(8, 2)
]  # fmt: skip


def build_share(comm):
    first, end = (comm.rank * 5 // comm.world_size, (comm.rank + 1) * 5 // comm.world_size)
    torch.manual_seed(comm.rank)
    before = torch.initial_seed()
    piece = build_layers(BUILDERS, range(first, end), seed=7)
    assert torch.initial_seed() == before  # the program's own random numbers go on
    return piece.state_dict(), torch.rand(2)


@pytest.mark.parametrize("on", ["virtual", "processes"])
def test_initial_weights_do_not_depend_on_the_number_of_stages(on):
    whole = build_layers(BUILDERS, range(5), seed=7).state_dict()
    for p in (1, 2, 4):
        values = run(build_share, ranks=p, on=on, record=False).values
        assert_equal(merged(state for state, _ in values), whole, atol=0)
        for rank, (_, drawn) in enumerate(values):
            torch.manual_seed(rank)
            assert torch.equal(drawn, torch.rand(2))
    other = build_layers(BUILDERS, range(5), seed=8).state_dict()
    assert not torch.equal(other["0.weight"], whole["0.weight"])
    assert not torch.equal(whole["0.weight"][:2], whole["4.weight"][:, :4])


# --- tied weights -------------------------------------------------------------------------------


def tied_network():
    """The first layer's table of tokens is the last one's weights."""
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Embedding(11, 6), nn.Flatten(), nn.Linear(18, 6), nn.Tanh(), nn.Linear(6, 11, bias=False)
    ).double()
    net[4].weight = net[0].weight
    return net


def token_batch(number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(11, (7, 4), generator=generator)
    return tokens[:, :3], tokens[:, 3]


def train_tied(comm, make, cuts):
    pieces = cut_network(tied_network(), cuts)
    ties = tied_weights(comm, pieces)
    chunks = chunks_of(comm, pieces)
    weights = [{"params": list(chunks.parameters())}]  # a stage may have none
    optimizer = torch.optim.SGD(weights, lr=0.5, momentum=0.9)
    for number in range(3):
        parts = cut_batch(*token_batch(number), 3)
        schedule = make(comm.world_size, 3)
        run_schedule(comm, chunks, schedule, parts, row_loss, optimizer, ties)
    return gradients_of(chunks), state_of(chunks), len(ties)


def train_tied_unsplit():
    net = tied_network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for number in range(3):
        X, y = token_batch(number)
        optimizer.zero_grad()
        F.cross_entropy(net(X), y).backward()
        optimizer.step()
    return net[0].weight.grad, net.state_dict()


@pytest.mark.parametrize(
    ("make", "cuts", "p", "on"),
    [
        (gpipe, [], 1, "virtual"),
        (one_f_one_b, [2], 2, "virtual"),
        (zero_bubble_h1, [1, 3], 3, "virtual"),
        (one_f_one_b, [1, 2, 3], 4, "virtual"),
        (lambda p, m: interleaved(p, m, 2), [1, 2, 3], 2, "virtual"),
        (one_f_one_b, [1, 3], 3, "processes"),
    ],
)
def test_tied_weights_stay_equal_and_right(make, cuts, p, on):
    gradient, state = train_tied_unsplit()
    values = run(train_tied, ranks=p, on=on, args=(make, cuts), record=False).values
    assert [number for *_, number in values] == [1, *[0] * (p - 2), 1][:p] if p > 1 else [0]
    found = merged(value[1] for value in values)
    assert torch.equal(found["0.weight"], found["4.weight"])
    assert_equal(found, state)
    assert_equal({"0.weight": values[0][0]["0.weight"]}, {"0.weight": gradient})


# --- batch normalisation ------------------------------------------------------------------------


def normalised():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4)).double()


def normalised_step(comm, make, again):
    chunks = chunks_of(comm, cut_network(normalised(), [1, 3][: comm.world_size - 1]))
    schedule = make(comm.world_size, 3)
    schedule = recomputing(schedule) if again else schedule
    run_schedule(comm, chunks, schedule, cut_batch(*batch(0), 3), row_loss)
    return gradients_of(chunks), state_of(chunks)


@pytest.mark.parametrize("make", SCHEDULES)
@pytest.mark.parametrize("again", [False, True])
def test_batch_normalisation_sees_micro_batches(make, again):
    """As one device that accumulates gradients does; the whole batch's statistics differ."""
    net, whole = normalised(), normalised()
    for X, y in cut_batch(*batch(0), 3):
        (row_loss(net(X), y) / 10).sum().backward()
    values = virtual(normalised_step, ranks=3, args=(make, again)).values
    assert_equal(merged(value[0] for value in values), gradients_of([net]))
    assert_equal(merged(value[1] for value in values), net.state_dict())
    assert values[1][1]["1.num_batches_tracked"] == 3
    X, y = batch(0)
    F.cross_entropy(whole(X), y).backward()
    assert not torch.allclose(whole[0].weight.grad, net[0].weight.grad, atol=1e-3)


# --- dropout ------------------------------------------------------------------------------------


class Masks(nn.Dropout):
    """Dropout that remembers what it has dropped."""

    def __init__(self, p):
        super().__init__(p)
        self.seen = []

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            self.seen.append((y == 0).clone())
        return y


def dropout_step(comm, make, again, seed):
    torch.manual_seed(2)
    net = nn.Sequential(
        nn.Linear(6, 50), Masks(0.5), nn.Linear(50, 50), Masks(0.5), nn.Linear(50, 4)
    )
    chunks = chunks_of(comm, cut_network(net.double(), [2][: comm.world_size - 1]))
    torch.manual_seed(seed + comm.rank)
    schedule = make(comm.world_size, 4)
    schedule = recomputing(schedule) if again else schedule
    run_schedule(comm, chunks, schedule, cut_batch(*batch(0), 4), row_loss)
    masks = [part.seen for part in chunks.modules() if isinstance(part, Masks)]
    return gradients_of(chunks), masks, torch.rand(1)


def test_all_schedules_drop_the_same_values():
    """One chunk a stage: gradients are equal to the bit, with recomputation too."""
    reference = virtual(dropout_step, ranks=2, args=(naive, False, 0)).values
    for make in SCHEDULES:
        for again in (False, True):
            values = virtual(dropout_step, ranks=2, args=(make, again, 0)).values
            assert_equal(*(merged(v[0] for v in found) for found in (values, reference)), atol=0)
            assert [value[2] for value in values] == [value[2] for value in reference]


def test_masks_differ_between_micro_batches_and_stages_and_repeat_after_seeding():
    first, again, other = (
        virtual(dropout_step, ranks=2, args=(gpipe, False, seed)).values for seed in (0, 0, 9)
    )
    masks = [mask for value in first for seen in value[1] for mask in seen]
    assert len(masks) == 8
    pairs = [(a, b) for i, a in enumerate(masks) for b in masks[:i] if a.shape == b.shape]
    assert pairs and not any(torch.equal(a, b) for a, b in pairs)
    assert_equal(first[0][0], again[0][0], atol=0)
    assert not torch.equal(first[0][0]["0.weight"], other[0][0]["0.weight"])


def test_recomputation_draws_the_masks_again():
    for _, masks, _ in virtual(dropout_step, ranks=2, args=(gpipe, True, 0)).values:
        (seen,) = masks
        assert all(torch.equal(a, b) for a, b in zip(seen[:4], seen[4:], strict=True))


def test_dropout_is_off_in_evaluation_and_modules_are_left_as_they_were():
    def program(comm):
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(6, 50), nn.Dropout(), nn.BatchNorm1d(50), nn.Linear(50, 4))
        net[2].eval()
        chunks = chunks_of(comm, cut_network(net.double(), [2]))
        run_schedule(comm, chunks, gpipe(2, 2), cut_batch(*batch(0), 2), row_loss)
        return [part.training for part in chunks.modules()], state_of(chunks)

    values = virtual(program, ranks=2).values
    assert values[0][0] == [True] * 4 and values[1][0] == [True, True, False, True]
    assert values[1][1]["2.num_batches_tracked"] == 0


# --- frozen, unused and missing weights ---------------------------------------------------------


class IgnoreInput(nn.Module):
    """Gives the same whatever it is given."""

    def __init__(self):
        super().__init__()
        self.row = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return self.row.expand(len(x), 4)


def odd_network(kind):
    torch.manual_seed(4)
    layers = [nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 4)]
    if kind == "frozen in the middle":
        layers[1].requires_grad_(False)
    elif kind == "frozen first":
        layers[0].requires_grad_(False)
    elif kind == "no weights first":
        layers = [nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)]
    elif kind == "all frozen but the last":
        for layer in layers[:3]:
            layer.requires_grad_(False)
    elif kind == "ignores its input":
        layers[3] = IgnoreInput()
    elif kind == "used twice":
        layers[2] = nn.Sequential(layers[1], nn.Tanh(), layers[1])
        layers[1] = nn.Identity()
    elif kind == "normalised weights":
        layers[1] = nn.utils.parametrizations.weight_norm(layers[1])
    elif kind == "one unused":
        layers[1].unused = nn.Parameter(torch.zeros(2))
    elif kind == "branches":
        layers[1] = Residual()
    return nn.Sequential(*layers).double()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5))
        self.norm, self.scale = nn.LayerNorm(5), nn.Parameter(torch.ones(5))

    def forward(self, x):
        y = self.norm(x + self.inner(x) * self.scale)
        return y + self.inner(y) * self.scale


KINDS = [
    "frozen in the middle", "frozen first", "no weights first", "all frozen but the last",
    "ignores its input", "used twice", "normalised weights", "one unused", "branches",
]  # fmt: skip


def odd_step(comm, kind, make, cuts):
    chunks = chunks_of(comm, cut_network(odd_network(kind), cuts))
    run_schedule(comm, chunks, make(comm.world_size, 3), cut_batch(*batch(0), 3), row_loss)
    return gradients_of(chunks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [one_f_one_b, zero_bubble_h1])
def test_weights_of_all_kinds(kind, make):
    net = odd_network(kind)
    X, y = batch(0)
    F.cross_entropy(net(X), y).backward()
    expected = {name: g for name, g in gradients_of([net]).items() if g is not None}
    for cuts in ([], [1, 2, 3], [1]):
        values = virtual(odd_step, ranks=len(cuts) + 1, args=(kind, make, cuts)).values
        found = merged(values)
        nothing = {name for name, g in found.items() if g is None or not g.any()}
        assert_equal({name: found[name] for name in expected}, expected)
        assert set(found) - set(expected) <= nothing


# --- not a number -------------------------------------------------------------------------------


def nan_training(comm):
    """Three steps, of which the second has a row that is not a number."""
    chunks = chunks_of(comm, cut_network(normalised(), [2]))
    optimizer = torch.optim.SGD(chunks.parameters(), lr=0.1)
    for number in range(3):
        X, y = batch(number)
        if number == 1:
            X[4] = float("nan")
        run_schedule(comm, chunks, gpipe(2, 2), cut_batch(X, y, 2), row_loss, optimizer)
    return state_of(chunks)


def test_all_skip_a_step_whose_gradient_is_not_finite():
    net = normalised()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in (0, 2):
        optimizer.zero_grad()
        for X, y in cut_batch(*batch(number), 2):
            (row_loss(net(X), y) / 10).sum().backward()
        optimizer.step()
    for on in ("virtual", "processes"):
        values = run(nan_training, ranks=2, on=on, record=False).values
        assert_equal(merged(values), net.state_dict())


# --- messages -----------------------------------------------------------------------------------


def large_messages(comm):
    """Neighbours send to each other at the same time, far more than any buffer holds."""
    torch.manual_seed(0)
    chunks = chunks_of(comm, [nn.Linear(512, 512, bias=False) for _ in range(comm.world_size)])
    X = torch.randn(6 * 1024, 512)
    outcome = run_schedule(comm, chunks, one_f_one_b(comm.world_size, 6),
                           cut_batch(X, X, 6), squared_error)  # fmt: skip
    return outcome.loss


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_large_messages_in_both_directions(transport):
    values = run(large_messages, ranks=3, on="processes", transport=transport, timeout=60,
                 record=False).values  # fmt: skip
    assert values[2] == pytest.approx(virtual(large_messages, ranks=3).values[2], rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_activations_travel_in_the_dtype_that_they_have(dtype):
    def program(comm):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)).to(dtype)
        X, y = batch(0)
        chunks = chunks_of(comm, cut_network(net, [1, 2]))
        parts = cut_batch(X.to(dtype), y, 2)
        run_schedule(comm, chunks, one_f_one_b(3, 2), parts, row_loss)
        return gradients_of(chunks), run_schedule(comm, chunks, forward_only(3, 2), parts).results

    values = virtual(program, ranks=3).values
    assert all(g.dtype is dtype and g.any() for g in merged(v[0] for v in values).values())
    assert [y.dtype for y in values[2][1]] == [dtype] * 2


def test_a_schedule_can_be_run_again_and_again_and_in_turn_with_others():
    def program(comm):
        chunks = chunks_of(comm, cut_network(mlp(), [2]))
        found = []
        for make in (gpipe, one_f_one_b, gpipe):
            run_schedule(comm, chunks, make(2, 5), cut_batch(*batch(0), 5), row_loss)
            found.append({name: g.clone() for name, g in gradients_of(chunks).items()})
        return found

    for found in virtual(program, ranks=2).values:
        for other in found[1:]:
            assert_equal(other, found[0], atol=1e-12)


# --- mistakes -----------------------------------------------------------------------------------


def call(schedule, chunks=None, parts=3, loss=row_loss, cuts=(2,), net=mlp):
    def program(comm):
        mine = chunks_of(comm, cut_network(net(), cuts))
        run_schedule(comm, list(mine) * (chunks or 1), schedule, cut_batch(*batch(0), parts), loss)

    return virtual(program, ranks=2)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"schedule": gpipe(3, 3)}, "for 3 stages of 1 chunks .* there are 2 ranks"),
        ({"schedule": gpipe(2, 4)}, "for 4 micro-batches.* and 3 micro-batches"),
        ({"schedule": gpipe(2, 3), "chunks": 2}, "of 1 chunks.* 2 chunks on rank"),
        ({"schedule": gpipe(2, 3), "loss": None}, "needs a loss"),
        ({"schedule": gpipe(2, 3), "loss": F.cross_entropy}, 'reduction="none"'),
        ({"schedule": gpipe(2, 3), "cuts": (0,)}, "rising numbers of layers, from 1 to 4"),
        ({"schedule": gpipe(2, 3), "cuts": (1, 2)}, "3 pieces cannot be shared out to 2 ranks"),
    ],
)
def test_mistakes_are_named(arguments, said):
    with pytest.raises(RankError, match=said):
        call(**arguments)


def test_pieces_that_do_not_give_one_tensor_with_the_same_rows():
    for layer, found in ((Pair(), "tuple"), (nn.Flatten(0, 1), r"\(6,\)")):
        net = lambda layer=layer: nn.Sequential(nn.Identity(), copy.copy(layer), nn.Identity())  # noqa: E731
        with pytest.raises(RankError, match=f"piece 0 makes of one row {found}; a piece must give"):
            call(gpipe(2, 3), net=net)


def test_a_piece_that_overwrites_its_input_is_refused():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="layer 1, ReLU.*inplace=False"):
        cut_network(net, [1])
    assert [len(piece) for piece in cut_network(net, [2])] == [2, 1]


def test_a_wrong_schedule_is_a_deadlock_that_is_named():
    """check_schedule says it before; virtual ranks say it at once."""
    schedule = gpipe(2, 2)
    schedule[1] = [job for job in schedule[1] if str(job) != "send gradient 1"]
    with pytest.raises(RankError, match="deadlock"):
        call(schedule, parts=2)
