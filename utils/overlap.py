"""What can hide behind the backward pass: when gradients get ready, and when they travel.

The model of chapter 07: one step of one rank, whose buckets take turns on one wire. `NETWORKS` are
the networks that the chapter compares, as functions that build one and give its loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from .data_parallel import bucket_schedule, make_buckets
from .measure import now
from .ranks import run


@dataclass(frozen=True)
class Gradient:
    """The gradient of a parameter, and when it is there: seconds from the start of the step."""

    name: str
    ready: float
    nbytes: int
    dtype: torch.dtype
    device: torch.device


def gradient_times(comm, make: Callable) -> tuple[float, list[Gradient]]:
    """When the forward pass ends, and when each gradient is ready; in the order of parameters.

    `make()` returns a network and a function that computes its loss; in shapes only.
    """
    with FakeTensorMode(), torch.device(comm.device):
        model, loss = make()
        ready = {}

        def note(parameter):
            ready[parameter] = now(comm) - start

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note)
        start = now(comm)
        result = loss()
        forward = now(comm) - start
        result.backward()
    named = model.named_parameters()
    return forward, [Gradient(name, ready[p], p.nbytes, p.dtype, p.device) for name, p in named]


@dataclass(frozen=True)
class Trip:
    """A bucket on its way: `start` and `end` on the wire, and `ready` before, in seconds."""

    nbytes: int
    ready: float
    start: float
    end: float


def travel(buckets: Sequence[Sequence[Gradient]], seconds: Callable) -> list[Trip]:
    """The trips of buckets, where `seconds(bytes)` is the time of an all-reduce."""
    sizes = [sum(gradient.nbytes for gradient in bucket) for bucket in buckets]
    ready = [max(gradient.ready for gradient in bucket) for bucket in buckets]
    spans = bucket_schedule(ready, [seconds(size) for size in sizes])
    return [Trip(size, complete, *span) for size, complete, span in zip(sizes, ready, spans)]


# --- networks --------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """A transformer whose first and last layer share their weights: 124 million parameters."""

    def __init__(self, words: int = 50_257, width: int = 768, layers: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True)
              for _ in range(layers))
        )  # fmt: skip
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, text):
        return self.head(self.layers(self.embedding(text)))


def of_images(name: str, rows: int) -> Callable:
    """How to make one of torchvision's networks, and the loss of some images of 224 x 224."""

    def make():
        import torchvision  # takes a second, and few need it

        model = getattr(torchvision.models, name)()
        X, y = torch.empty(rows, 3, 224, 224), torch.zeros(rows, dtype=torch.int64)
        return model, lambda: F.cross_entropy(model(X), y)

    return make


def of_words(rows: int, length: int = 512) -> Callable:
    """How to make the language model, and the loss of some texts."""

    def make():
        model, text = LanguageModel(), torch.zeros(rows, length, dtype=torch.int64)
        return model, lambda: F.cross_entropy(model(text).flatten(0, 1), text.flatten())

    return make


NETWORKS = {
    "ResNet-18": of_images("resnet18", 16),
    "VGG-16": of_images("vgg16", 16),
    "transformer": of_words(4),
}


@functools.cache
def recorded(network: str) -> tuple[float, list[Gradient]]:
    """`gradient_times` of one of `NETWORKS`, on a virtual V100."""
    return run(gradient_times, 1, "virtual", (NETWORKS[network],), server="dgx1-v100").values[0]


def predict(network: str, first_cap: float, cap: float, seconds: Callable):
    """The forward pass's end, the backward pass's end and the trips of the buckets."""
    forward, gradients = recorded(network)
    trips = travel(make_buckets(gradients, first_cap, cap), seconds)
    return forward, max(gradient.ready for gradient in gradients), trips
