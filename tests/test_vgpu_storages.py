"""Storages of virtual GPUs are copied, saved, loaded, resized and shared with their device."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from utils import Cluster


@pytest.fixture(scope="module")
def devices():
    return Cluster(4, server="pcie-switch", quiet=True).devices


def test_copying_and_pickling(devices):
    x = torch.arange(4.0, device=devices[2])
    pair = [x, x[:2]]
    twin = copy.deepcopy(pair)
    assert [t.device for t in twin] == [devices[2]] * 2
    twin[0][0] = 9
    assert twin[1][0].item() == 9 and x[0].item() == 0  # one storage, but not the first one
    twin = pickle.loads(pickle.dumps(pair))
    assert [t.device for t in twin] == [devices[2]] * 2 and twin[1].tolist() == [0, 1]
    leaf = torch.ones(2, device=devices[1], requires_grad=True)
    (leaf * 2).sum().backward()
    twin = copy.deepcopy(leaf)
    assert twin.is_leaf and twin.grad.device == devices[1] and twin.grad.tolist() == [2, 2]


def test_saving_and_loading(devices):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(devices[1])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "x": torch.ones(2)}, file)

    def load(**options):
        file.seek(0)
        return torch.load(file, **options)

    assert load()["x"].device.type == "cpu"
    for options, device in (({}, devices[1]), ({"map_location": "vgpu:3"}, devices[3]),
                            ({"map_location": "cpu"}, torch.device("cpu")),
                            ({"map_location": {"vgpu:1": "vgpu:2"}}, devices[2])):  # fmt: skip
        found = load(**options)["model"]
        assert {t.device for t in found.values()} == {device}
        twin = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(devices[0])
        twin.load_state_dict(found)
        for a, b in zip(model.state_dict().values(), twin.state_dict().values()):
            assert b.device == devices[0] and torch.equal(a.cpu(), b.cpu())
    with io.BytesIO() as whole:
        torch.save(model, whole)
        whole.seek(0)
        assert torch.load(whole, weights_only=False)[0].weight.device == devices[1]


def test_resizing_counts(devices):
    before = torch.vgpu.memory_allocated(1)
    x = torch.ones(100, device=devices[1])
    for size in (1000, 10, 0, 5000):
        x.untyped_storage().resize_(4 * size)  # how FSDP frees and takes back its parameters
        assert torch.vgpu.memory_allocated(1) - before == 4 * size
    y = torch.empty(0, device=devices[1])
    y.resize_(300)
    out = torch.empty(0, device=devices[1])
    torch.add(y, 1, out=out)
    assert torch.vgpu.memory_allocated(1) - before == 20_000 + 2 * 1200
    with pytest.raises(torch.OutOfMemoryError, match="asked for 16.00 GB"):
        x.untyped_storage().resize_(16 * 10**9 + 20_000)
    del x, y, out
    assert torch.vgpu.memory_allocated(1) == before


def test_exchanging_data(devices):
    x, y = torch.zeros(2), torch.ones(3, device=devices[1])
    x.data = y
    assert x.device == devices[1] and x.tolist() == [1, 1, 1]
    w = nn.Parameter(torch.ones(2))
    w.data = w.data.to(devices[2])
    (w * w.to(devices[2])).sum().backward()
    assert w.device == w.grad.device == devices[2]
    z = torch.ones(4, device=devices[1]).set_(torch.ones(3, device=devices[3]))
    assert z.device == devices[3]
    shared = torch.ones(4, device=devices[1]).share_memory_()
    assert shared.is_shared() and shared.device == devices[1]


def test_a_file_from_a_device_without_a_cluster_of_that_size(devices):
    file = io.BytesIO()
    torch.save(torch.ones(2, device=devices[3]), file)
    Cluster(2, quiet=True)
    file.seek(0)
    with pytest.raises(RuntimeError, match=r"vgpu:3 was asked for.*2 devices"):
        torch.load(file)
    file.seek(0)
    assert torch.load(file, map_location="vgpu:1").device.index == 1
