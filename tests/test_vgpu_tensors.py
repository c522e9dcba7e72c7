"""Tensors on virtual GPUs do what they do on real ones; values are held against plain CPU tensors.

`Tensor.to` in all its forms has a file of its own, test_vgpu_to.py.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from utils import Cluster


@pytest.fixture(scope="module")
def devices():
    return Cluster(4, server="pcie-switch", quiet=True).devices


FACTORIES = {
    "arange": lambda **k: torch.arange(3, **k),
    "as_tensor": lambda **k: torch.as_tensor([1.0, 2], **k),
    "asarray": lambda **k: torch.asarray(np.ones(3), **k),
    "bartlett_window": lambda **k: torch.bartlett_window(3, **k),
    "empty": lambda **k: torch.empty(2, 3, **k),
    "empty of a tuple": lambda **k: torch.empty((2, 3), **k),
    "empty_permuted": lambda **k: torch.empty_permuted((2, 3), (1, 0), **k),
    "empty_strided": lambda **k: torch.empty_strided((2,), (1,), **k),
    "eye": lambda **k: torch.eye(2, **k),
    "fft.fftfreq": lambda **k: torch.fft.fftfreq(4, **k),
    "fft.rfftfreq": lambda **k: torch.fft.rfftfreq(4, **k),
    "full": lambda **k: torch.full((2,), 1.5, **k),
    "hann_window": lambda **k: torch.hann_window(3, **k),
    "kaiser_window": lambda **k: torch.kaiser_window(3, **k),
    "linspace": lambda **k: torch.linspace(0, 1, 3, **k),
    "logspace": lambda **k: torch.logspace(0, 1, 3, **k),
    "normal": lambda **k: torch.normal(0.0, 1.0, (2,), **k),
    "ones": lambda **k: torch.ones(2, **k),
    "rand": lambda **k: torch.rand(2, **k),
    "randint": lambda **k: torch.randint(3, (2,), **k),
    "randn": lambda **k: torch.randn(2, **k),
    "randperm": lambda **k: torch.randperm(3, **k),
    "scalar_tensor": lambda **k: torch.scalar_tensor(2.0, **k),
    "sparse_coo_tensor": lambda **k: torch.sparse_coo_tensor([[0]], [1.0], (2,), **k),
    "sparse_coo_tensor of a size": lambda **k: torch.sparse_coo_tensor((2, 3), **k),
    "sparse_csr_tensor": lambda **k: torch.sparse_csr_tensor([0, 1], [0], [1.0], **k),
    "tensor": lambda **k: torch.tensor([1.0, 2], **k),
    "tensor, 0-dim": lambda **k: torch.tensor(3, **k),
    "tensor, empty": lambda **k: torch.tensor([], **k),
    "tril_indices": lambda **k: torch.tril_indices(2, 2, **k),
    "triu_indices": lambda **k: torch.triu_indices(2, 2, **k),
    "zeros": lambda **k: torch.zeros(2, **k),
    "zeros of nothing": lambda **k: torch.zeros(0, **k),
    "Linear": lambda **k: nn.Linear(2, 2, **k).weight,
    "BatchNorm1d": lambda **k: nn.BatchNorm1d(2, **k).running_mean,
}
LIKE = {
    "empty_like": torch.empty_like, "full_like": lambda x, **k: torch.full_like(x, 2.0, **k),
    "ones_like": torch.ones_like, "rand_like": torch.rand_like,
    "randint_like": lambda x, **k: torch.randint_like(x, 3, **k), "randn_like": torch.randn_like,
    "zeros_like": torch.zeros_like,
    "new_empty": lambda x, **k: x.new_empty(2, **k),
    "new_empty_strided": lambda x, **k: x.new_empty_strided((2,), (1,), **k),
    "new_full": lambda x, **k: x.new_full((2,), 1.0, **k),
    "new_ones": lambda x, **k: x.new_ones(2, **k),
    "new_tensor": lambda x, **k: x.new_tensor([1.0], **k),
    "new_zeros": lambda x, **k: x.new_zeros(2, **k),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", FACTORIES)
def test_factory_functions(devices, name):
    make = FACTORIES[name]
    torch.manual_seed(0)
    plain = make()
    for device in (devices[1], "vgpu:1", 1):
        torch.manual_seed(0)
        made = make(device=device)
        assert made.device == devices[1] and made.dtype == plain.dtype
        if "empty" not in name.split(",")[0]:
            torch.testing.assert_close(made.cpu(), plain, rtol=0, atol=0, equal_nan=True)
    assert make(device="vgpu").device == devices[0]
    if name == "normal":  # PyTorch does not let it follow the default device
        return
    with torch.device("vgpu:1"):
        assert make().device == devices[1]
        assert make(device="cpu").device == make(device=torch.device("cpu")).device == plain.device
    torch.set_default_device("vgpu:2")
    try:
        assert make().device == devices[2]
    finally:
        torch.set_default_device(None)
    assert make().device == plain.device


@pytest.mark.parametrize("name", LIKE)
def test_functions_like_another_tensor(devices, name):
    x = torch.ones(2, 3, device=devices[1])
    assert LIKE[name](x).device == devices[1]
    assert LIKE[name](x, device=devices[2]).device == devices[2]
    assert LIKE[name](x, device="cpu").device.type == "cpu"
    assert LIKE[name](torch.ones(2, 3), device="vgpu:3").device == devices[3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64,
                                   torch.int8, torch.int64, torch.bool])  # fmt: skip
def test_dtypes(devices, dtype):
    plain = torch.tensor([0, 1, 2]).to(dtype)
    made = torch.tensor([0, 1, 2], dtype=dtype, device=devices[1])
    converted = torch.tensor([0, 1, 2], device=devices[1]).to(dtype)
    for x in (made, converted, made.clone(), made.type(dtype), plain.to(devices[1])):
        assert (x.device, x.dtype) == (devices[1], dtype)
        assert torch.equal(x.cpu(), plain)


def test_default_dtype(devices):
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.ones(2, device=devices[1]).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_a_tensor_says(devices):
    x = torch.ones(2, device=devices[1])
    assert (x.device.type, x.device.index, x.get_device()) == ("vgpu", 1, 1)
    assert not x.is_cpu and not x.is_cuda and not x.is_meta
    assert torch.ones(2).is_cpu and torch.ones(2).get_device() == -1


def test_printing_shows_the_device(devices):
    x = torch.tensor([1.0, 2.0], device=devices[1])
    assert repr(x) == "tensor([1., 2.], device='vgpu:1')"
    assert repr(x.requires_grad_()) == "tensor([1., 2.], device='vgpu:1', requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 4.], device='vgpu:1', grad_fn=<MulBackward0>)"
    assert (
        f"{x[0]:.1f} {x.sum().item()} {[x[1].detach()]}" == "1.0 3.0 [tensor(2., device='vgpu:1')]"
    )
    assert repr(torch.empty(0, 2, device=devices[0])) == "tensor([], device='vgpu:0', size=(0, 2))"
    assert "device='vgpu:2'" in repr(torch.ones(2000, device=devices[2]))
    assert "device='vgpu:2'" in repr(nn.Parameter(torch.ones(2, device=devices[2])))
    assert repr(torch.ones(1)) == "tensor([1.])"


def test_views_share_storage_and_device(devices):
    x = torch.arange(12.0, device=devices[1]).view(3, 4)
    views = [x[1:], x[:, ::2], x.T, x.view(-1), x.reshape(2, 6), x.unsqueeze(0), x.expand(2, 3, 4),
             x.diagonal(), x.detach(), x.data, x[0], x[0, 0], *x.split(2), *x.unbind(),
             x.narrow(0, 0, 2), x.as_strided((2,), (1,)), torch.flatten(x)]  # fmt: skip
    for view in views:
        assert view.device == devices[1]
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x[0, 0] = 7
    assert views[3][0].item() == 7
    views[3].add_(1)
    assert x[0, 0].item() == 8


def test_reading_by_index(devices):
    x = torch.arange(4.0, device=devices[1])
    host, here, there = (torch.tensor([0, 2]).to(d) for d in ("cpu", devices[1], devices[2]))
    for index in (host, here, [0, 2], torch.tensor([True, False, True, False]), slice(0, 3, 2),
                  x % 2 == 0):  # fmt: skip
        assert x[index].device == devices[1] and x[index].tolist() == [0, 2]
    assert x[None, ..., 1].device == x[1].device == devices[1]
    for wrong in (lambda: x[there], lambda: torch.arange(4)[here], lambda: x.gather(0, host),
                  lambda: x.index_select(0, host)):  # fmt: skip
        with pytest.raises(RuntimeError, match="same device"):
            wrong()


def test_assigning_by_index(devices):
    def assigned(index, value):
        x = torch.zeros(4, device=devices[1])
        x[index] = value
        assert x.device == devices[1]
        return x.tolist()

    host, here = torch.tensor([5.0, 6.0]), torch.tensor([5.0, 6.0], device=devices[1])
    assert (
        assigned(0, 5.0) == assigned(0, torch.tensor(5.0)) == assigned(0, here[0]) == [5, 0, 0, 0]
    )
    assert assigned(slice(2), host) == assigned(slice(2), here) == [5, 6, 0, 0]
    assert assigned(torch.tensor([1, 3]), here) == [0, 5, 0, 6]
    assert assigned(torch.tensor([1, 3], device=devices[1]), 1.0) == [0, 1, 0, 1]
    assert assigned(torch.tensor([True, False, False, True]), torch.tensor(2.0)) == [2, 0, 0, 2]
    with pytest.raises(RuntimeError, match="vgpu:1 and cpu"):
        assigned(torch.tensor([1, 3]), host)
    plain = torch.zeros(2)
    plain[:1] = here[:1]  # a slice is copied to, from any device
    assert plain.tolist() == [5, 0]


def test_in_place(devices):
    x = torch.ones(3, device=devices[1])
    alias = x
    x += 1
    x.mul_(2).clamp_(max=3)
    x[0] = -1
    assert x is alias and x.device == devices[1] and x.tolist() == [-1, 3, 3]
    out = torch.empty(0, device=devices[1])
    torch.add(x, 1, out=out)
    assert out.tolist() == [0, 4, 4] and out.device == devices[1]


def test_copies_between_devices(devices):
    x = torch.arange(3.0, device=devices[1])
    for target in ("cpu", devices[1], devices[2]):
        y = torch.zeros(3, device=target)
        assert y.copy_(x) is y and y.tolist() == [0, 1, 2] and y.device == torch.device(target)
        z = torch.zeros(3, dtype=torch.int32, device=target)
        assert z.copy_(x, non_blocking=True).tolist() == [0, 1, 2]
    assert torch.zeros(2, 3, device=devices[2]).copy_(x).sum().item() == 6  # broadcast
    y = [torch.zeros(3, device=d) for d in devices]
    torch._foreach_copy_(y, [x] * 4)
    assert [t.device for t in y] == list(devices) and all(t.tolist() == [0, 1, 2] for t in y)
    leaf = torch.ones(3, device=devices[0], requires_grad=True)
    y = torch.zeros(3, device=devices[2]).copy_(leaf * 2)
    (y * 3).sum().backward()
    assert leaf.grad.device == devices[0] and leaf.grad.tolist() == [6, 6, 6]


def test_numbers_of_the_host_mix_with_device_tensors(devices):
    x = torch.ones(3, device=devices[1])
    number = torch.tensor(2.0)
    for y in (x * 2, 2 * x, x * number, number * x, torch.where(x > 0, x + 1, number), 3 - x,
              x.add(1), x.masked_fill(x > 0, number), 2**x, np.float64(2) * x,
              x * number.double()):  # fmt: skip
        assert y.device == devices[1] and y.dtype == torch.float32 and y.tolist() == [2, 2, 2]
    assert (x.half() * number).dtype == torch.float16
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3) * torch.tensor(2.0, device=devices[1])  # the other way round


def test_numpy(devices):
    array = np.arange(6.0).reshape(2, 3)
    x = torch.from_numpy(array).to(devices[1])
    assert np.array_equal(x.cpu().numpy(), array)
    assert np.array_equal(x.numpy(force=True), array)
    assert torch.as_tensor(array, device=devices[1]).device == devices[1]
    for wrong in (x.numpy, lambda: np.asarray(x), lambda: x + array):
        with pytest.raises(TypeError, match="can't convert vgpu:1 device type tensor to numpy"):
            wrong()
    with pytest.raises(BufferError, match="vgpu:1"):
        np.from_dlpack(x)
    with pytest.raises(ValueError, match="vgpu"):
        torch.from_dlpack(x)


def test_pinned_memory(devices):
    x = torch.ones(3)
    pinned = x.pin_memory()
    assert pinned.is_pinned() and not x.is_pinned() and pinned.device.type == "cpu"
    assert pinned.pin_memory() is pinned and pinned[1:].is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.tensor([1.0], pin_memory=True).is_pinned()
    assert pinned.to(devices[1], non_blocking=True).tolist() == [1, 1, 1]
    assert not x.to(devices[1]).is_pinned()
    with pytest.raises(RuntimeError, match="cannot pin vgpu:1"):
        x.to(devices[1]).pin_memory()


def test_generators(devices):
    generator = torch.Generator("vgpu:1").manual_seed(3)
    plain = torch.Generator().manual_seed(3)
    assert generator.device == devices[1] and plain.device.type == "cpu"
    draw = torch.randn(2, generator=generator, device=devices[1])
    assert torch.equal(draw.cpu(), torch.randn(2, generator=plain))
    twin = copy.deepcopy(generator)
    assert twin.device == pickle.loads(pickle.dumps(twin)).device == devices[1]
    assert twin.clone_state().device == devices[1]
    x = torch.empty(2, device=devices[1])
    assert torch.equal(x.normal_(generator=generator), torch.empty_like(x).normal_(generator=twin))
    for wrong in (
        lambda: torch.rand(2, device=devices[1], generator=plain),
        lambda: torch.rand(2, generator=generator),
        lambda: x.normal_(generator=plain),
    ):
        with pytest.raises(RuntimeError, match="device type for generator"):
            wrong()
    assert isinstance(torch.default_generator, torch.Generator)
    torch.manual_seed(5)
    seeded = torch.rand(3, device=devices[1])
    torch.manual_seed(5)
    assert torch.equal(seeded.cpu(), torch.rand(3))
