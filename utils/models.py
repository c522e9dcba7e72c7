"""The small networks that the course trains, each by a function that builds it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def lenet() -> nn.Sequential:
    """LeNet as the course uses it: 28x28 images, 10 classes, 129,068 parameters.

    20 filters of 3x3 and 50 of 5x5, each followed by ReLU and 2x2 average pooling, then linear
    layers 800-128-10. Takes (n, 1, 28, 28), returns logits (n, 10).
    """
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def mlp(sizes: Sequence[int] = (784, 256, 10)) -> nn.Sequential:
    """Linear layers of the given sizes with ReLU between them, for flattened input."""
    if len(sizes) < 2:
        raise ValueError(f"an MLP needs an input and an output size, not {list(sizes)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def resnet18(classes: int = 10, channels: int = 1) -> nn.Module:
    """The ResNet-18 variant of Dive into Deep Learning: 11,175,818 parameters at one channel

    Smaller first layers than the ImageNet network, for small images (n, channels, height, width).
    """
    from d2l import torch as d2l  # takes seconds to import

    return d2l.resnet18(classes, channels)
