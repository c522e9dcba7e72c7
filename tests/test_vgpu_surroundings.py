"""What readers do around virtual GPUs: clusters come and go, threads, modes, processes, `vmap`."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from utils import Cluster
from utils.vgpu import private


@pytest.fixture
def devices():
    return Cluster(4, server="pcie-switch", quiet=True).devices


def fresh(program, **environment):
    """What a new Python process prints for a program."""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        env={**os.environ, "COURSE_DEVICES": "virtual", **environment},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout.split("\n")[:-1]


def test_the_running_torch_is_one_that_was_tested():
    """Relies on private names: a release outside the range needs a look at `private`."""
    low, high = (tuple(map(int, v.split("."))) for v in private.TESTED)
    here = tuple(map(int, torch.__version__.split("+")[0].split(".")[:3]))
    if not low <= here <= high:
        pytest.skip(f"torch {torch.__version__} is outside the tested range {private.TESTED}")
    assert low <= here <= high


def test_a_torch_that_lacks_a_private_name():
    program = """
import torch
del torch._C._current_graph_task_id
try:
    import utils
except ImportError as error:
    print(error)
"""
    (line,) = fresh(program)
    assert "_current_graph_task_id" in line and torch.__version__ in line
    assert line.endswith(f"tested with torch {private.TESTED[0]} to {private.TESTED[1]}")


def test_no_cluster_yet():
    program = """
import torch
from torch import tensor
from utils import Cluster
for make in (lambda: torch.ones(2, device="vgpu:0"), lambda: torch.ones(2).to("vgpu:0"),
             lambda: tensor([1.0], device="vgpu"), lambda: torch.vgpu.synchronize()):
    try:
        make()
    except RuntimeError as error:
        print(error)
print(torch.vgpu.is_available(), torch.vgpu.device_count())
cluster = Cluster(2, quiet=True)
print(tensor([1.0], device="vgpu:1"))  # taken before, works now
"""
    *errors, count, made = fresh(program)
    assert len(errors) == 4 and set(errors) == {
        "there are no virtual GPUs now: make some first, such as `cluster = Cluster(4)`"
    }
    assert (count, made) == ("False 0", "tensor([1.], device='vgpu:1')")


def test_the_first_cluster_is_made_inside_something():
    program = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from utils import Cluster
with torch.inference_mode():
    try:
        Cluster(2)
    except RuntimeError as error:
        assert "outside torch.inference_mode" in str(error)
with FakeTensorMode(), FlopCounterMode(display=False), torch.device("cpu"), torch.no_grad():
    cluster = Cluster(2, quiet=True)
    x = torch.ones(2, 2, device="vgpu:1")
    print((x @ x).device)
print(torch.ones(2, device="vgpu:1") * 2, torch.nn.Linear(2, 2).to("vgpu:0").weight.device)
"""
    assert fresh(program) == ["vgpu:1", "tensor([2., 2.], device='vgpu:1') vgpu:0"]


def test_an_ordinal_out_of_range_says_what_there_is(devices):
    for wrong in ("vgpu:4", torch.device("vgpu", 9), 7):
        for make in (torch.ones, lambda n, device: torch.ones(n).to(device),
                     lambda n, device: torch.tensor([1.0], device=device)):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"4 devices \(vgpu:0 to vgpu:3\)"):
                make(2, device=wrong)
    Cluster(1, quiet=True)
    with pytest.raises(RuntimeError, match=r"vgpu:1 was asked for.*has 1 device \(vgpu:0\)"):
        torch.ones(2, device="vgpu:1")


def test_a_new_cluster_takes_over(devices):
    old = torch.ones(1000, device=devices[1])
    far = torch.ones(2, device=devices[3])
    plain = nn.Linear(2, 2)
    first = Cluster(2, quiet=True)
    assert first.memory()["in use"].sum() == 0
    assert (old + 1).device == first.devices[1] and old.device == first.devices[1]
    assert first.memory()["in use"].loc["vgpu:1"] == pytest.approx(0.004)
    with pytest.raises(RuntimeError, match="earlier cluster is on vgpu:3, and this cluster has"):
        far + 1
    second = Cluster(4, quiet=True)
    assert (far + 1).device == second.devices[3]
    with pytest.raises(RuntimeError, match="has been replaced by a later one"):
        first.memory()
    with pytest.raises(RuntimeError, match="has been replaced by a later one"):
        with first.record():
            pass
    with second.record() as timeline:  # what the host did in an earlier cluster takes no time here
        plain.weight.sum()
    assert timeline.duration < 1e-4
    del first, second
    assert (old * 2).device.type == "vgpu"


def test_virtual_devices_end_with_a_real_cluster():
    program = """
import os, torch
from utils import Cluster
x = torch.ones(2, device=Cluster(2, quiet=True).devices[1])
os.environ["COURSE_DEVICES"] = "cpu"
cluster = Cluster(2, quiet=True)
print(cluster.devices, cluster.simulated, x.device, (x + 1).tolist())
print(torch.ones(2, device=cluster.devices[1]).to("cpu").numpy().tolist())
try:
    torch.ones(2).to("vgpu:0")
except RuntimeError as error:
    print(error)
"""
    first, second, third = fresh(program)
    assert first == "[device(type='cpu'), device(type='cpu')] False cpu [2.0, 2.0]"
    assert second == "[1.0, 1.0]" and third.startswith("there are no virtual GPUs now")


def test_threads(devices):
    x = torch.ones(3, device=devices[1])
    found = []

    class Doubler(threading.Thread):
        def run(self):
            found.append(x * 2)

    for thread in (Doubler(), threading.Thread(target=lambda: found.append(x.to("vgpu:2") + 1))):
        thread.start()
        thread.join()
    assert [y.device for y in found] == [devices[1], devices[2]]

    def work(number):
        w = torch.full((50,), 2.0, device=devices[number % 4], requires_grad=True)
        for _ in range(20):
            (w.sin() * torch.ones(50, device=w.device)).sum().backward()
        return w.device == w.grad.device == devices[number % 4]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_vmap_grad_and_the_like(devices):
    x = torch.tensor([1.0, 2.0, 3.0], device=devices[1])
    seen = []

    def cube(v):
        seen.append(v.device)
        return (v**3).sum() + torch.zeros((), device=v.device)

    func = torch.func
    for found, expected in (
        (func.vmap(lambda v: v * 2)(x), [2, 4, 6]),
        (func.vmap(cube)(x), [1, 8, 27]),
        (func.grad(cube)(x), [3, 12, 27]),
        (func.vmap(func.grad(cube))(x), [3, 12, 27]),
        (func.jvp(cube, (x,), (torch.ones_like(x),))[1], 42),
        (func.jacrev(lambda v: v**2)(x).diagonal(), [2, 4, 6]),
        (func.hessian(cube)(x).diagonal(), [6, 12, 18]),
        (func.vmap(lambda v: v.to(devices[1]) + v.to("vgpu:2").to("vgpu:1"))(x), [2, 4, 6]),
        (func.grad(lambda v: (v.to("vgpu:2") * 2).sum())(x), [2, 2, 2]),
    ):
        assert found.device == devices[1] and found.tolist() == expected
    assert set(seen) == {devices[1]}


def test_other_modes(devices):
    x = torch.ones(4, 4, device=devices[0])
    with FlopCounterMode(display=False) as counter:
        assert (x @ x).device == devices[0]
    assert counter.get_total_flops() == 2 * 4**3
    assert torch.compile(lambda v: (v * 2).sum())(x).device == devices[0]  # runs as it is


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(devices, dtype):
    layer = nn.Linear(3, 3).to(devices[0])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("vgpu", init_scale=8.0)
    x = torch.ones(2, 3, device=devices[0])
    with torch.autocast("vgpu", dtype=dtype):
        loss = layer(x).sum()
    assert loss.dtype == dtype and layer(x).dtype == torch.float32
    scaler.scale(loss).backward()
    before = layer.weight.clone()
    scaler.step(optimizer)
    scaler.update()
    assert layer.weight.grad.device == devices[0] and not torch.equal(before, layer.weight)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("pin", [False, True])
def test_data_loader(devices, workers, pin):
    data = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
    loader = DataLoader(data, 4, shuffle=True, num_workers=workers, pin_memory=pin)
    seen = []
    for x, y in loader:
        assert x.device.type == "cpu" and x.is_pinned() == pin
        assert (x.to(devices[1]) * 2).device == devices[1]
        seen += y.tolist()
    assert sorted(seen) == list(range(8))


def test_data_sets_on_a_device(devices):
    data = TensorDataset(torch.arange(8.0, device=devices[1]))
    assert [x.device for (x,) in DataLoader(data, 4)] == [devices[1]] * 2
    with pytest.raises(RuntimeError, match="another process cannot make tensors on vgpu:1"):
        list(DataLoader(data, 4, num_workers=1))


def test_devices_that_code_asks_pytorch_about(devices):
    assert torch.accelerator.current_accelerator().type == "vgpu"
    assert torch.accelerator.device_count() == torch.vgpu.device_count() == 4
    with torch.accelerator.device_index(2):
        assert torch.ones(1, device="vgpu").device == devices[2]
        assert torch.accelerator.current_device_index() == torch.vgpu.current_device() == 2
    with torch.vgpu.device("vgpu:3"):
        assert torch.ones(1).to("vgpu").device == devices[3]
    torch.accelerator.set_device_index(1)
    assert torch.vgpu.current_device() == 1
    torch.vgpu.set_device(0)
    torch.accelerator.synchronize()
    assert torch.vgpu.get_device_name() == "V100 SXM2 16 GB (simulated)"
    assert torch.vgpu.get_device_properties(1).total_memory == 16e9
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.vgpu.set_device(4)


def test_subclasses(devices):
    class Named(torch.Tensor):
        pass

    x = torch.ones(3, device=devices[1]).as_subclass(Named)
    y = (x + 1).to(devices[2])
    assert (x.device, y.device, type(y)) == (devices[1], devices[2], Named)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors(devices):
    parts = [torch.ones(2), torch.ones(3)]
    for x in (torch.nested.nested_tensor(parts, device=devices[1]),
              torch.nested.nested_tensor(parts).to(devices[1])):  # fmt: skip
        padded = torch.nested.to_padded_tensor(x * 2, 0.0)
        assert padded.device == x.device == devices[1]
        assert padded.tolist() == [[2, 2, 0], [2, 2, 2]]
    found = []
    for device in ("cpu", devices[1]):  # nested inside
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).to(device).eval()
        mask = torch.tensor([[False, False, True], [False, False, False]], device=device)
        with torch.no_grad():
            found.append(model(torch.ones(2, 3, 8, device=device), src_key_padding_mask=mask).cpu())
    assert torch.equal(*found)
    with pytest.raises(RuntimeError, match="same device"):  # a known limit, said so
        torch.nested.nested_tensor(parts, device=devices[1], layout=torch.jagged)
