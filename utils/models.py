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


def attend(qkv, heads: int):
    """Causal attention of some heads: queries, keys and values (batch, length, 3 · heads · size).

    Returns the heads' results side by side, (batch, length, heads · size).
    """
    batch, length, _ = qkv.shape
    q, k, v = qkv.view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return result.transpose(1, 2).reshape(batch, length, -1)


class Attention(nn.Module):
    """Causal self-attention with several heads; (batch, length, width) in and out.

    `factory` may hold a device and a dtype, as for PyTorch's own layers.
    """

    def __init__(self, width: int, heads: int, **factory):
        super().__init__()
        if width % heads:
            raise ValueError(f"a width of {width} does not divide into {heads} heads")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, **factory)
        self.out = nn.Linear(width, width, **factory)

    def forward(self, x):
        return self.out(attend(self.qkv(x), self.heads))


class TransformerBlock(nn.Module):
    """Attention, then an MLP of four times the width, each normalised before and added after."""

    def __init__(self, width: int, heads: int, **factory):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, **factory)
        self.attention = Attention(width, heads, **factory)
        self.norm2 = nn.LayerNorm(width, **factory)
        self.up = nn.Linear(width, 4 * width, **factory)
        self.down = nn.Linear(4 * width, width, **factory)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def alexnet(classes: int = 1000, filters: Sequence[int] = (96, 256, 384, 384, 256),
            hidden: int = 4096, size: int = 6, towers: int = 2) -> nn.Sequential:  # fmt: skip
    """AlexNet with its two towers as groups: 60,965,224 parameters.

    In the second, fourth and fifth convolution each half of the filters reads its own half of the
    channels (cuda-convnet2's configuration: 48, 128, 192, 192 and 128 filters a tower); with one
    tower they read all. Images (n, 3, 224, 224), which the convolutions bring down to `size` times
    `size`; returns logits.
    """
    a, b, c, d, e = filters
    return nn.Sequential(
        nn.Conv2d(3, a, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(a, b, 5, padding=2, groups=towers), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(b, c, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c, d, 3, padding=1, groups=towers), nn.ReLU(),
        nn.Conv2d(d, e, 3, padding=1, groups=towers), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(e * size * size, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip
