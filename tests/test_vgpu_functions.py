"""Common functions on a virtual GPU: values and gradients bit for bit those of the CPU."""

import pytest
import torch
from torch.nn import functional as F

from utils import Cluster


@pytest.fixture(scope="module")
def device():
    return Cluster(2, quiet=True).devices[1]


def t(*shape, low=-2.0, high=2.0):
    """Different values that need a gradient."""
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return (torch.rand(shape, generator=generator) * (high - low) + low).requires_grad_()


def positive(*shape):
    return t(*shape, low=0.1)


CLASSES = torch.tensor([0, 2, 1])
CASES = {
    # one operand, element by element
    "abs": (torch.abs, t(3, 4)), "clamp": (lambda x: x.clamp(-1, 1), t(3, 4)),
    "exp": (torch.exp, t(3, 4)), "log": (torch.log, positive(3, 4)), "pow": (lambda x: x**3, t(4)),
    "rsqrt": (torch.rsqrt, positive(4)), "sigmoid": (torch.sigmoid, t(4)),
    "tanh": (torch.tanh, t(4)), "erf": (torch.erf, t(4)), "cos": (torch.cos, t(4)),
    "relu": (F.relu, t(3, 4)), "gelu": (F.gelu, t(3, 4)), "silu": (F.silu, t(3, 4)),
    "elu": (F.elu, t(3, 4)), "leaky_relu": (F.leaky_relu, t(3, 4)), "softplus": (F.softplus, t(4)),
    "dropout": (F.dropout, t(3, 4)), "round": (torch.round, t(4)),
    # several
    "add": (torch.add, t(3, 4), t(4)), "div": (torch.div, t(3, 4), positive(4)),
    "where": (lambda x, y: torch.where(x > y, x, y), t(3, 4), t(3, 1)),
    "lerp": (torch.lerp, t(4), t(4), t(4)), "addcmul": (torch.addcmul, t(4), t(4), t(4)),
    "matmul": (torch.matmul, t(2, 3, 4), t(4, 5)), "bmm": (torch.bmm, t(2, 3, 4), t(2, 4, 5)),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), t(2, 3, 4), t(2, 5, 4)),
    "addmm": (torch.addmm, t(3, 5), t(3, 4), t(4, 5)), "outer": (torch.outer, t(3), t(4)),
    "cat": (lambda x, y: torch.cat([x, y], 1), t(3, 4), t(3, 2)),
    "stack": (lambda x, y: torch.stack([x, y]), t(3, 4), t(3, 4)),
    "cdist": (torch.cdist, t(3, 4), t(5, 4)),
    # reductions and sorting
    "sum": (lambda x: x.sum(1, keepdim=True), t(3, 4)), "mean": (torch.mean, t(3, 4)),
    "prod": (lambda x: x.prod(1), t(3, 4)), "max": (lambda x: x.max(1), t(3, 4)),
    "amax": (lambda x: x.amax(0), t(3, 4)), "std": (torch.std, t(3, 4)),
    "var_mean": (lambda x: torch.var_mean(x, 0), t(3, 4)), "norm": (torch.linalg.norm, t(3, 4)),
    "logsumexp": (lambda x: x.logsumexp(1), t(3, 4)), "cumsum": (lambda x: x.cumsum(1), t(3, 4)),
    "sort": (torch.sort, t(3, 4)), "topk": (lambda x: x.topk(2), t(3, 4)),
    "argmax": (lambda x: x.argmax(1), t(3, 4)), "median": (torch.median, t(3, 5)),
    "quantile": (lambda x: x.quantile(0.3, dim=1), t(3, 4)),
    "unique": (lambda x: x.detach().round().unique(), t(6)),
    "nonzero": (lambda x: (x > 0).nonzero(), t(3, 4)),
    "bincount": (lambda x: torch.bincount(x.abs().long()), t(6)),
    # shapes and rows
    "permute": (lambda x: x.permute(2, 0, 1), t(2, 3, 4)), "flip": (lambda x: x.flip(0), t(3, 4)),
    "roll": (lambda x: x.roll(1, 0), t(3, 4)), "tile": (lambda x: x.tile(2, 2), t(3, 4)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), t(3, 4)),
    "triu": (torch.triu, t(3, 3)), "diag": (torch.diag, t(3)),
    "expand": (lambda x: x.expand(2, 3), t(3)),
    "gather": (lambda x: x.gather(1, x.argsort(1)), t(3, 4)),
    "scatter_add": (lambda x: torch.zeros_like(x).scatter_add(1, x.argsort(1), x), t(3, 4)),
    "index": (lambda x: x[x[:, 0] > 0], t(5, 4)), "pad": (lambda x: F.pad(x, (1, 2)), t(3, 4)),
    "pad, circular": (lambda x: F.pad(x, (1, 1), mode="circular"), t(2, 3, 4)),
    "pad, reflect": (lambda x: F.pad(x, (1, 1), mode="reflect"), t(2, 3, 4)),
    "unfold": (lambda x: F.unfold(x, 2), t(1, 2, 4, 4)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), t(1, 4, 2, 2)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), t(1, 2, 3, 3)),
    # layers
    "linear": (F.linear, t(3, 4), t(5, 4), t(5)), "conv1d": (F.conv1d, t(2, 3, 8), t(4, 3, 3)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, 2, 1), t(2, 3, 8, 8), t(4, 3, 3, 3), t(4)),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w, groups=2), t(2, 4, 6, 6), t(4, 2, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, t(2, 3, 4, 4), t(3, 2, 3, 3)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), t(2, 3, 4, 4)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), t(2, 3, 4, 4)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), t(2, 3, 4, 4)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), t(5, 3), t(3), t(3)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), t(3, 4), t(4), t(4)),
    "group_norm": (lambda x: F.group_norm(x, 2), t(2, 4, 3)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), t(3, 4), t(4)),
    "embedding": (lambda w, i: F.embedding(i, w), t(5, 4), CLASSES),
    "embedding_bag": (lambda w, i: F.embedding_bag(i[None], w), t(5, 4), CLASSES),
    "one_hot": (lambda y: F.one_hot(y), CLASSES), "softmax": (lambda x: F.softmax(x, 1), t(3, 4)),
    "log_softmax": (lambda x: F.log_softmax(x, 1), t(3, 4)),
    "multi_head_attention": (
        lambda x, w, o: F.multi_head_attention_forward(
            x, x, x, 8, 2, w, None, None, None, False, 0.0, o, None
        )[0], t(5, 2, 8), t(24, 8), t(8, 8),
    ),
    # losses
    "cross_entropy": (F.cross_entropy, t(3, 4), CLASSES),
    "cross_entropy, smoothed": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, ignore_index=1), t(3, 4), CLASSES
    ),
    "nll_loss": (lambda x, y: F.nll_loss(x, y, reduction="sum"), t(3, 4), CLASSES),
    "mse_loss": (F.mse_loss, t(3, 4), t(3, 4)), "l1_loss": (F.l1_loss, t(3, 4), t(3, 4)),
    "huber_loss": (F.huber_loss, t(3, 4), t(3, 4)),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), t(3, 4), t(3, 4)
    ),
    "kl_div": (lambda x, y: F.kl_div(x, y.softmax(1), reduction="batchmean"), t(3, 4), t(3, 4)),
    "cosine_similarity": (F.cosine_similarity, t(3, 4), t(3, 4)),
    # linear algebra, spectra
    "inv": (torch.linalg.inv, t(3, 3)), "svdvals": (torch.linalg.svdvals, t(3, 4)),
    "cholesky": (lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(3, device=x.device)), t(3, 3)),
    "matrix_rank": (lambda x: torch.linalg.matrix_rank(x), t(3, 3)),
    "fft": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), t(3, 4)),
    "complex": (lambda x: torch.view_as_real(torch.polar(x.exp(), x) * 1j), t(3, 4)),
    # nothing, and a single number
    "sum of nothing": (torch.sum, t(0, 3)), "product of nothing": (torch.matmul, t(2, 0), t(0, 3)),
    "number": (lambda x: x * 2 + x.exp(), t()), "linear of nothing": (F.linear, t(0, 4), t(5, 4)),
}  # fmt: skip


def evaluate(function, operands, device):
    """The function's results and its gradients, as CPU tensors, and the devices they were on."""
    operands = [x.detach().to(device).requires_grad_(x.requires_grad) for x in operands]
    torch.manual_seed(0)
    found = function(*operands)
    found = list(found) if isinstance(found, tuple) else [found]
    loss = [x.square().sum() for x in found if x.requires_grad]
    if loss:
        sum(loss).backward()
        found += [x.grad for x in operands if x.grad is not None]
    return [x.detach().cpu() for x in found], {x.device for x in found}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(device, name):
    function, *operands = CASES[name]
    expected, _ = evaluate(function, operands, "cpu")
    found, places = evaluate(function, operands, device)
    assert places == {device}
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case) > 2])
def test_operands_on_two_devices(device, name):
    """As on a real machine: an error that names both, never a result."""
    function, first, *others = CASES[name]
    first = first.detach().to(device)
    others = [x.detach() for x in others]
    with pytest.raises(RuntimeError, match="vgpu:1 and cpu|cpu and vgpu:1"):
        function(first, *others)
    with pytest.raises(RuntimeError, match="vgpu:1 and vgpu:0|vgpu:0 and vgpu:1"):
        function(first, *(x.to("vgpu:0") for x in others))
