"""Autograd, modules and optimizers on virtual GPUs, against the same on plain CPU tensors."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from utils import Cluster

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(scope="module")
def devices():
    return Cluster(4, server="pcie-switch", quiet=True).devices


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
    )


def test_a_graph_over_several_devices(devices):
    a, b = (torch.full((3,), 2.0, device=d, requires_grad=True) for d in devices[:2])
    y = (a * b.to(devices[0])).to(devices[2]).double().sum() + (b**2).cpu().sum().to("vgpu:2")
    y.backward()
    assert (a.grad.device, b.grad.device) == (devices[0], devices[1])
    assert a.grad.tolist() == [2, 2, 2] and b.grad.tolist() == [6, 6, 6]
    assert torch.autograd.grad((a.to(devices[3]) * 5).sum(), a)[0].device == devices[0]
    (twice,) = torch.autograd.grad((a.to(devices[1]) ** 3).sum(), a, create_graph=True)
    twice.sum().backward()
    assert a.grad.tolist() == [14, 14, 14]  # 2 + 6a


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_gradients_through_conversions(devices, dtype):
    x = torch.ones(2, device=devices[1], requires_grad=True)
    (x.to(dtype) * 2).sum().backward()
    (x.to(devices[2], dtype) * 2).sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.device == devices[1]
    assert x.grad.tolist() == [4, 4]


def test_where_hooks_find_themselves(devices):
    seen = []

    def note(*tensors):
        seen.extend(t.device for t in tensors if t is not None)
        moved = tensors[0].to("vgpu:2").to(tensors[0].device)
        made = torch.ones_like(moved) + torch.zeros(1, device=moved.device)
        assert moved.device == made.device and torch.zeros(1).device.type == "cpu"
        assert torch.tensor([1.0], device="cpu").device.type == "cpu"

    w = torch.ones(2, device=devices[1], requires_grad=True)
    w.register_hook(lambda gradient: note(gradient))
    w.register_post_accumulate_grad_hook(lambda p: note(p, p.grad))
    y = w * 2
    y.register_hook(lambda gradient: gradient * 3)
    y.grad_fn.register_hook(lambda before, after: note(*before, *after))
    y.sum().backward()
    assert w.grad.tolist() == [6, 6]
    layer = nn.Linear(2, 2).to(devices[1])
    layer.register_forward_pre_hook(lambda module, args: note(*args))
    layer.register_forward_hook(lambda module, args, output: note(output))
    layer.register_full_backward_hook(lambda module, before, after: note(*before, *after))
    layer(y.detach().requires_grad_()).sum().backward()
    assert len(seen) == 9 and set(seen) == {devices[1]}


def test_an_error_in_a_hook_leaves_everything_working(devices):
    def fail(gradient):
        raise ValueError("in the hook")

    w = torch.ones(2, device=devices[1], requires_grad=True)
    w.register_hook(fail)
    with pytest.raises(ValueError, match="in the hook"):
        (w * 2).sum().backward()
    assert (w + 1).device == devices[1] and torch.zeros(2).device.type == "cpu"
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3, device=devices[1]) @ torch.ones(2, 3, device=devices[1])
    assert w.device == devices[1] and (w * 2).device == devices[1]


def test_custom_functions(devices):
    class Send(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, target):
            ctx.save_for_backward(x)
            return x.to(target) * torch.ones(2, device=target)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            assert (gradient.device, x.device) == (devices[2], devices[1])
            return gradient.to(x.device) * torch.full((2,), 3.0, device=x.device), None

    x = torch.ones(2, device=devices[1], requires_grad=True)
    Send.apply(x, devices[2]).sum().backward()
    assert x.grad.device == devices[1] and x.grad.tolist() == [3, 3]


def test_a_gradient_has_to_be_where_its_tensor_is(devices):
    w = torch.ones(2, device=devices[1], requires_grad=True)
    for wrong in (torch.ones(2), torch.ones(2, device=devices[2])):
        with pytest.raises(RuntimeError, match="different device.*vgpu:1, its gradient on"):
            w.grad = wrong
    w.grad = torch.ones(2, device=devices[1])
    w.grad = None
    plain = torch.ones(2, requires_grad=True)
    plain.grad = torch.ones(2)
    del plain.grad
    assert plain.grad is None and w.grad is None


def test_modules_move(devices):
    model = network()
    parameters = list(model.parameters())
    assert model.to(devices[1]) is model
    assert [a is b for a, b in zip(parameters, model.parameters())] == [True] * 6
    assert {t.device for t in model.state_dict().values()} == {devices[1]}
    model(torch.ones(3, 4, device=devices[1])).sum().backward()
    model.to(devices[2])
    assert {p.grad.device for p in model.parameters()} == {devices[2]}
    twin = copy.deepcopy(model).to("vgpu:3", torch.float64)
    assert {t.device for t in twin.state_dict().values()} == {devices[3]}
    assert twin[1].num_batches_tracked.dtype == torch.int64
    assert {t.device for t in model.state_dict().values()} == {devices[2]}
    with pytest.raises(RuntimeError, match="vgpu:2 and cpu"):
        model(torch.ones(3, 4))
    assert {p.device.type for p in model.cpu().parameters()} == {"cpu"}
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    assert empty.to_empty(device=devices[1]).weight.device == devices[1]
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        nn.Linear(2, 2, device="meta").to(devices[1])


OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam",
                 "RAdam", "RMSprop", "Rprop", "SGD")
}  # fmt: skip


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(devices, name, foreach):
    def train(first, second):
        head, tail = network()[:1].to(first), nn.Linear(8, 2).requires_grad_(False).to(second)
        with torch.no_grad():
            for value, p in enumerate(tail.requires_grad_().parameters()):
                p.fill_(0.1 * value + 0.2)
        parameters = [*head.parameters(), *tail.parameters()]
        optimizer = OPTIMIZERS[name](parameters, lr=0.05, foreach=foreach)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.linspace(-1, 1 + step, 12).view(3, 4).to(first)
            tail(head(x).to(second)).pow(2).sum().backward()
            nn.utils.clip_grad_norm_(parameters, 5.0)
            optimizer.step()
        return parameters, optimizer

    plain, _ = train("cpu", "cpu")
    one, optimizer = train(devices[1], devices[1])
    two, _ = train(devices[1], devices[2])
    for p, q, r in zip(plain, one, two):
        assert (q.device, torch.equal(p, q.cpu())) == (devices[1], True)
        torch.testing.assert_close(r.cpu(), p)
    states = [value for p in one for value in optimizer.state[p].values() if torch.is_tensor(value)]
    assert {value.device for value in states if value.dim()} <= {devices[1]}


def test_optimizer_state_is_saved_and_loaded(devices):
    w = torch.ones(3, device=devices[1], requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1)
    (w * 2).sum().backward()
    optimizer.step()
    twin = torch.ones(3, device=devices[2], requires_grad=True)
    other = torch.optim.Adam([twin], lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[twin]["exp_avg"].device == devices[2]
    assert optimizer.state[w]["exp_avg"].device == devices[1]


def test_lbfgs_and_fused(devices):
    for make in (lambda p: torch.optim.LBFGS(p), lambda p: torch.optim.Adam(p, fused=True),
                 lambda p: torch.optim.SGD(p, lr=0.1, fused=True)):  # fmt: skip
        found = []
        for device in ("cpu", devices[1]):
            w = torch.ones(3, device=device, requires_grad=True)
            optimizer = make([w])

            def loss(optimizer=optimizer, w=w):
                optimizer.zero_grad()
                value = ((w - 2) ** 2).sum()
                value.backward()
                return value

            optimizer.step(loss)
            found.append(w.detach().cpu())
        assert torch.equal(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(devices, reentrant):
    gradients = []
    for device in ("cpu", devices[1]):
        model = network().to(device)
        x = torch.linspace(-1, 1, 12, device=device).view(3, 4).requires_grad_()
        torch.manual_seed(1)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        checkpoint_sequential(model, 2, x, use_reentrant=reentrant).sum().backward()
        gradients.append([x.grad.cpu(), *(p.grad.cpu() for p in model.parameters())])
        assert x.grad.device == torch.device(device)
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_saving_activations_on_the_host(devices):
    x = torch.ones(3, device=devices[1], requires_grad=True)
    for pin in (False, True):
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            y = (x * x).sum()
        y.backward()
    assert x.grad.device == devices[1] and x.grad.tolist() == [4, 4, 4]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention(devices, dropout, mask, grad):
    found = []
    for device in ("cpu", devices[1]):
        torch.manual_seed(0)
        qkv = [torch.randn(2, 3, 5, 8).to(device).requires_grad_(grad) for _ in range(3)]
        keep = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
        options = {
            "attn_mask": keep if mask == "bool" else keep.float() if mask == "float" else None,
            "is_causal": mask == "causal",
        }
        y = F.scaled_dot_product_attention(*qkv, dropout_p=dropout, **options)
        if grad:
            y.square().sum().backward()
        found.append([y.detach(), *(t.grad for t in qkv if grad)])
        assert {t.device for t in found[-1]} == {torch.device(device)}
    assert all(torch.equal(a, b.cpu()) for a, b in zip(*found))


def test_sparse_embedding(devices):
    found = []
    for device in ("cpu", devices[1]):
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=True).to(device)
        rows = torch.tensor([1, 2, 1, 4], device=device)
        for make in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
            optimizer = make(table.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                table(rows).square().sum().backward()
                optimizer.step()
        assert table.weight.grad.is_sparse and table.weight.grad.device == table.weight.device
        found.append(table.weight.detach().cpu())
    assert torch.equal(*found)


def test_without_gradients(devices):
    w = torch.ones(2, device=devices[1], requires_grad=True)
    with torch.no_grad():
        assert not (w.to(devices[2]) * 2).requires_grad
        w += 1
    with torch.inference_mode():
        y = (
            nn.TransformerEncoderLayer(8, 2, batch_first=True)
            .to(devices[1])
            .eval()(torch.ones(2, 3, 8, device=devices[1]))
        )
        y += 1
        assert y.device == y[0].device == devices[1] and y.to(devices[2]).device == devices[2]
    assert (w * 2).requires_grad
