"""Lazy modules, whose parameters have no data until the first batch."""

import pytest
import torch
from torch import nn

from utils import Cluster


@pytest.fixture
def device():
    return Cluster(2, quiet=True).devices[1]


def test_lazy_modules_are_built_on_the_host_and_moved_after_their_first_batch(device):
    net = nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.LazyLinear(2))
    net(torch.ones(1, 1, 5, 5))
    net.to(device)
    assert net(torch.ones(1, 1, 5, 5, device=device)).device == device


def test_a_lazy_module_that_was_moved_gets_its_parameters_there(device):
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2)).to(device)
    net(torch.ones(4, 5, device=device)).sum().backward()
    for tensor in (*net.parameters(), *net.buffers()):
        assert tensor.device == device
    assert net[0].weight.shape == (3, 5) and net[0].weight.grad.device == device


def test_a_lazy_module_built_on_a_device(device):
    net = nn.LazyLinear(3, device=device)
    assert net(torch.ones(4, 5, device=device)).device == device
    assert net.weight.device == device
