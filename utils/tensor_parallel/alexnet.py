"""AlexNet split as its author split it: two towers, and later one weird trick.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional
Neural Networks (2012).
Krizhevsky: One weird trick for parallelizing convolutional neural networks (2014).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linear import split_parameter
from .operators import all_gather_reduce_scatter, all_gather_split, broadcast_reduce, part_sizes
from .vocabulary import parallel_cross_entropy


def own_filters(layer: nn.Conv2d | nn.Linear, comm) -> nn.Module:
    """A layer with this rank's part of the filters only."""
    own = copy.copy(layer)
    own._parameters = {
        name: None if whole is None else split_parameter(whole, comm, 0)
        for name, whole in layer._parameters.items()
    }
    if isinstance(layer, nn.Conv2d) and layer.groups == comm.world_size:
        own.groups = 1
    return own


class ReadAll(nn.Module):
    """Puts the channels of all towers beside each other, for a layer that reads them all."""

    def __init__(self, comm, channels: int):
        super().__init__()
        self.comm, self.sizes = comm, part_sizes(channels, comm.world_size)

    def forward(self, x: Tensor) -> Tensor:
        return all_gather_reduce_scatter(x, self.comm, 1, self.sizes)


class Output(nn.Module):
    """Gives every rank the outputs of all."""

    def __init__(self, comm, classes: int):
        super().__init__()
        self.comm, self.sizes = comm, part_sizes(classes, comm.world_size)

    def forward(self, x: Tensor) -> Tensor:
        return all_gather_split(x, self.comm, 1, self.sizes)


def tower(net: nn.Sequential, comm) -> nn.Sequential:
    """This rank's tower of a network: its part of the filters of every layer.

    A convolution with a group for each rank reads its own tower; any other layer reads all towers
    (the first reads the image). Images in, all outputs out, on every rank.
    """
    layers: list[nn.Module] = []
    first = True
    for layer in net:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            inputs = layer.in_channels if isinstance(layer, nn.Conv2d) else layer.in_features
            if not first and getattr(layer, "groups", 1) == 1:
                layers.append(ReadAll(comm, inputs))
            layers.append(own_filters(layer, comm))
            first, outputs = False, layer.weight.shape[0]
        else:
            layers.append(copy.deepcopy(layer))
    return nn.Sequential(*layers, Output(comm, outputs))


class OneWeirdTrick(nn.Module):
    """Convolutions data-parallel, linear layers model-parallel.

    Each rank has its own images for the convolutions, which have few parameters and much to
    compute. For the linear layers, with many parameters and little to compute, it has its columns,
    and all images. `features` takes images to (images, width), on this rank's device; `linears`, of
    which this rank's part is copied, have ReLU between them.
    """

    def __init__(self, features: nn.Module, linears: list[nn.Linear], comm):
        super().__init__()
        self.comm = comm
        self.features = features
        self.classes = linears[-1].out_features
        self.linears = nn.ModuleList(own_filters(layer, comm) for layer in linears)
        self.widths = [part_sizes(layer.out_features, comm.world_size) for layer in linears]

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of some images' features x, which every rank has."""
        x = self.linears[0](x)
        for linear, sizes in zip(self.linears[1:], self.widths):
            x = linear(all_gather_reduce_scatter(F.relu(x), self.comm, 1, sizes))
        return parallel_cross_entropy(x, labels, self.comm, self.classes).sum()

    def sum_gradients(self) -> None:
        """Data parallelism for the convolutions: sum everyone's gradients, in one message."""
        gradients = [p.grad for p in self.features.parameters()]
        flat = torch.cat([g.flatten() for g in gradients])
        self.comm.all_reduce(flat)
        for g, part in zip(gradients, flat.split([g.numel() for g in gradients])):
            g.copy_(part.view_as(g))


def all_at_once(model: OneWeirdTrick, images: Tensor, labels: list[Tensor]) -> Tensor:
    """Scheme (a): all ranks' features go to all ranks, then the linear layers see the whole batch.

    `images` are this rank's, `labels` a list of everyone's. Returns the summed loss of all.
    """
    counts = [len(part) for part in labels]
    x = all_gather_reduce_scatter(model.features(images), model.comm, 0, counts)
    return model.loss(x, torch.cat(labels))


def one_after_another(model: OneWeirdTrick, images: Tensor, labels: list[Tensor]) -> Tensor:
    """Scheme (b): in round i rank i's features go to all, and all do the linear layers for them."""
    x, comm = model.features(images), model.comm
    losses = []
    for rank, part in enumerate(labels):
        own = x if rank == comm.rank else x.new_zeros(len(part), x.shape[1]).requires_grad_()
        losses.append(model.loss(broadcast_reduce(own, comm, rank), part))
    return torch.stack(losses).sum()


def in_slices(model: OneWeirdTrick, images: Tensor, labels: list[Tensor]) -> Tensor:
    """Scheme (c): in each of n rounds every rank sends an n-th of its features to all."""
    x, comm = model.features(images), model.comm
    n, losses = comm.world_size, []
    slices = [part.tensor_split(n) for part in labels]
    for i, rows in enumerate(x.tensor_split(n)):
        counts = [len(parts[i]) for parts in slices]
        whole = all_gather_reduce_scatter(rows, comm, 0, counts)
        losses.append(model.loss(whole, torch.cat([parts[i] for parts in slices])))
    return torch.stack(losses).sum()
