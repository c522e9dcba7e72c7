"""The networks have the sizes that the course states, and are the book's where it says so."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from utils import Cluster, vgpu
from utils.models import lenet, mlp, resnet18


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_lenet_is_the_book_s():
    net = lenet()
    assert count(net) == 129_068
    shapes = [tuple(p.shape) for p in net.parameters()]
    assert shapes[::2] == [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert net(torch.zeros(0, 1, 28, 28)).shape == (0, 10)


@pytest.mark.parametrize("sizes", [(4, 3), (784, 256, 10), (5, 4, 3, 2)])
def test_mlp(sizes):
    net = mlp(sizes)
    assert count(net) == sum((a + 1) * b for a, b in zip(sizes, sizes[1:]))
    assert net(torch.zeros(2, 1, sizes[0])).shape == (2, sizes[-1])
    assert isinstance(net[-1], nn.Linear)  # logits: nothing after the last layer


def test_an_mlp_needs_two_sizes():
    with pytest.raises(ValueError, match="input and an output"):
        mlp((3,))


def test_resnet18_is_the_book_s():
    """Same names, same numbers, same outputs, with batch statistics and with running ones."""
    d2l = pytest.importorskip("d2l.torch")
    theirs, net = d2l.resnet18(10, 1), resnet18()
    X = torch.randn(2, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    theirs(X)  # the book's layers get their sizes now
    assert count(net) == 11_175_818 == count(theirs)
    assert list(net.state_dict()) == list(theirs.state_dict())
    net.load_state_dict(theirs.state_dict())
    assert torch.equal(net(X), theirs(X))
    assert torch.equal(net.eval()(X), theirs.eval()(X))


@pytest.mark.parametrize("channels, classes, size", [(3, 10, 32), (1, 2, 28), (3, 100, 8)])
def test_resnet18_for_other_images(channels, classes, size):
    net = resnet18(classes, channels).eval()
    assert net(torch.zeros(1, channels, size, size)).shape == (1, classes)


def test_resnet18_on_a_virtual_gpu_without_data():
    try:
        cluster = Cluster(2, quiet=True)
        with FakeTensorMode(), torch.device(cluster.devices[1]):
            net = resnet18(channels=3)
            output = net(torch.empty(4, 3, 32, 32))
            output.sum().backward()
        assert {p.grad.device for p in net.parameters()} == {cluster.devices[1]}
    finally:
        vgpu.stop()


@pytest.mark.parametrize("device", ["meta", "vgpu", "vgpu:1", "cpu"])
def test_networks_on_any_default_device_beside_a_cluster(device):
    try:
        cluster = Cluster(2, quiet=True)
        with torch.device(device):
            net = resnet18()  # its layers call torch.tensor
        expected = torch.device("vgpu:0") if device == "vgpu" else torch.device(device)
        assert {t.device for t in (*net.parameters(), *net.buffers())} == {expected}
        assert cluster.memory()["in use"].max() < 50
    finally:
        vgpu.stop()
