"""Training on virtual GPUs: bit for bit the same operations on plain CPU tensors."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from utils import Cluster

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
}


@pytest.fixture(scope="module")
def devices():
    return Cluster(4, quiet=True).devices


def lenet():
    """The book's: 129,068 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
        nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def resnet():
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    return models.resnet18(num_classes=10)


def train(model, optimizer, device, shape, steps=3):
    """Losses of some steps; then parameters, gradients, buffers and optimizer state, on the CPU."""
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        X, y = torch.randn(shape), torch.randint(10, shape[:1])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [p.grad for p in model.parameters()]
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    assert {t.device for t in [*model.state_dict().values(), *gradients]} == {torch.device(device)}
    found = [*model.state_dict().values(), *gradients, *filter(torch.is_tensor, states)]
    return losses, [t.cpu() for t in found]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("make, shape", [(lenet, (16, 1, 28, 28)), (resnet, (4, 3, 32, 32))],
                         ids=["LeNet", "ResNet-18"])  # fmt: skip
def test_training_steps_are_bit_for_bit_those_of_the_cpu(devices, make, shape, optimizer):
    torch.manual_seed(0)
    plain = make()
    twin = copy.deepcopy(plain).to(devices[1])
    losses, tensors = train(plain, OPTIMIZERS[optimizer](plain.parameters()), "cpu", shape)
    same_losses, same_tensors = train(
        twin, OPTIMIZERS[optimizer](twin.parameters()), devices[1], shape
    )
    assert same_losses == losses and len(same_tensors) == len(tensors)
    for a, b in zip(tensors, same_tensors):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_lenet_is_the_books():
    assert sum(p.numel() for p in lenet().parameters()) == 129_068


def test_stages_on_several_devices(devices):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    stages = [copy.deepcopy(plain[i : i + 2]).to(d) for i, d in zip((0, 2, 4), devices)]
    x = torch.randn(7, 6)
    plain(x).square().sum().backward()
    y = x
    for stage, device in zip(stages, devices):
        y = stage(y.to(device))
    y.square().sum().backward()
    found = [p.grad for stage in stages for p in stage.parameters()]
    assert {g.device for g in found} == set(devices[:3])
    assert all(torch.equal(p.grad, g.cpu()) for p, g in zip(plain.parameters(), found))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("host_input", [False, True])
def test_pytorchs_data_parallel(devices, count, host_input):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
    model = nn.DataParallel(copy.deepcopy(plain).to(devices[0]), list(devices[:count]))
    x = torch.randn(7, 6)
    expected = torch.cat([plain(part) for part in x.chunk(count)])
    expected.square().sum().backward()
    y = model(x if host_input else x.to(devices[0]))
    assert y.device == devices[0] and torch.equal(y.cpu(), expected)
    y.square().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters()):
        assert q.grad.device == devices[0]
        torch.testing.assert_close(q.grad.cpu(), p.grad)


def test_data_parallel_moves_its_bytes():
    """A copy of the parameters to each other device, and their gradients back."""
    cluster = Cluster(4, server="pcie-switch", quiet=True)
    model = nn.DataParallel(nn.Linear(1000, 1000, bias=False).to("vgpu:0"), [0, 1, 2, 3])
    x = torch.randn(8, 1000, device="vgpu:0")
    with cluster.record() as timeline:
        model(x).sum().backward()
    copies = [event for event in timeline.events if event.kind == "communication"]
    large = [event.devices for event in copies if event.bytes >= 4_000_000]
    assert large == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)]
    assert {event.devices for event in timeline.events if event.name == "mm"} == {
        (i,) for i in range(4)
    }


def test_data_parallel_updates_buffers_of_the_first_device(devices):
    norm = nn.BatchNorm1d(2, momentum=1.0).to(devices[0])
    nn.DataParallel(norm, devices[:2])(torch.arange(8.0, device=devices[0]).view(4, 2))
    assert norm.running_mean.tolist() == [1, 2]  # of its own half of the batch
    with pytest.raises(RuntimeError, match="parameters and buffers on device vgpu:0"):
        nn.DataParallel(norm.to(devices[1]), [0, 1])(torch.ones(4, 2, device=devices[0]))
