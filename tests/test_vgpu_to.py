"""`Tensor.to` in each of its forms, between the host and virtual GPUs."""

import itertools

import pytest
import torch

from utils import Cluster


@pytest.fixture(scope="module")
def devices():
    return Cluster(2, server="pcie-switch", quiet=True).devices


def forms(device, dtype, other, non_blocking, copy):
    """Calls that mean the same: this device, this dtype."""
    flags = {"non_blocking": non_blocking, "copy": copy}
    yield lambda x: x.to(device, dtype, non_blocking, copy)
    yield lambda x: x.to(device, dtype, **flags)
    yield lambda x: x.to(device=device, dtype=dtype, **flags)
    yield lambda x: x.to(str(device), dtype, non_blocking, copy=copy)
    yield lambda x: x.to(other, non_blocking, copy)
    yield lambda x: x.to(other, **flags)
    yield lambda x: x.to(other=other, **flags)
    yield lambda x: x.to(device, **flags).to(dtype, non_blocking, copy)
    yield lambda x: x.to(dtype, **flags).to(device, **flags)


@pytest.mark.parametrize("non_blocking, copy", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("source, target", list(itertools.product([None, 0, 1], repeat=2)))
def test_every_form(devices, source, target, dtype, non_blocking, copy):
    start, end = ("cpu" if i is None else devices[i] for i in (source, target))
    end = torch.device(end)
    x = torch.arange(4.0).to(start)
    other = torch.zeros(2, dtype=dtype).to(end)
    for call in forms(end, dtype, other, non_blocking, copy):
        y = call(x)
        assert (y.device, y.dtype) == (end, dtype)
        assert y.tolist() == [0, 1, 2, 3]
        same = source == target and dtype == torch.float32 and not copy
        assert (y is x) == same
        assert (y.data_ptr() == x.data_ptr()) == same
