"""The small networks that the course trains, each by a function that builds it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn import functional as F


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


class Residual(nn.Module):
    """Two 3x3 convolutions, each with batch normalisation, around which the input is added back.

    Where the block changes the number of channels or halves the image (`stride=2`), a 1x1
    convolution brings the input to the same shape.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        same = inputs == outputs and stride == 1
        self.conv3 = None if same else nn.Conv2d(inputs, outputs, 1, stride)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.bn2 = nn.BatchNorm2d(outputs)

    def forward(self, X):
        Y = F.relu(self.bn1(self.conv1(X)))
        Y = self.bn2(self.conv2(Y))
        return F.relu(Y + (X if self.conv3 is None else self.conv3(X)))


def resnet18(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """The ResNet-18 of Dive into Deep Learning's multi-GPU chapter: 11,175,818 parameters.

    (With one channel.) Smaller first layers than the ImageNet network, for small images (n,
    channels, height, width). The layers have the names of the book's, so that states can be
    exchanged, but their sizes are known from the start: the book's appear in the first forward
    pass, too late for an optimizer or for a count.
    """
    net = nn.Sequential(nn.Conv2d(channels, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
    sizes = (64, 64, 128, 256, 512)
    for number, (inputs, outputs) in enumerate(zip(sizes, sizes[1:]), start=1):
        first = Residual(inputs, outputs, stride=1 if number == 1 else 2)
        net.add_module(f"resnet_block{number}", nn.Sequential(first, Residual(outputs, outputs)))
    net.add_module("global_avg_pool", nn.AdaptiveAvgPool2d((1, 1)))
    net.add_module("fc", nn.Sequential(nn.Flatten(), nn.Linear(512, classes)))
    return net
