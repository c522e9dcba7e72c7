"""A training step of split layers beside torch.distributed.tensor.parallel, in the same processes.

PyTorch's messages go by gloo. Limit: ours through shared memory take at most as long.
"""

import copy
import sys
import time
from statistics import median

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from utils.ranks import run
from utils.tensor_parallel import ParallelMLP

ROUNDS = 15
SIZES = {"64 rows, 1024 wide": (64, 1024), "256 rows, 2048 wide": (256, 2048)}


def make(width):
    torch.manual_seed(0)
    up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(up, nn.GELU(), down)


def step(net, x):
    """Forward and backward; returns the seconds."""
    x = x.detach().requires_grad_()
    net.zero_grad()
    began = time.perf_counter()
    net(x).square().mean().backward()
    took = time.perf_counter() - began
    return took, x.grad


def measure(comm):
    mesh, found = init_device_mesh("cpu", (comm.world_size,)), {}
    for size, (rows, width) in SIZES.items():
        whole = make(width)
        ours = ParallelMLP(whole[0], whole[2], comm, nn.functional.gelu)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        theirs = parallelize_module(copy.deepcopy(whole), mesh, plan)
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
        for _ in range(ROUNDS + 3):
            gradients = []
            for name, net in (("unsplit", whole), ("torch", theirs), ("ours", ours)):
                comm.barrier()
                took, gradient = step(net, x)
                found.setdefault((size, name), []).append(took)
                gradients.append(gradient)
            for gradient in gradients[1:]:
                torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-7)
    return found


def main():
    missed = False
    print("forward and backward of an MLP of two layers, ms (times PyTorch's tensor parallelism)\n")
    for transport in ("gloo", "shared"):
        for ranks in (2, 4):
            options = {"on": "processes", "transport": transport, "record": False}
            values = run(measure, ranks=ranks, **options).values
            for size in SIZES:
                times = {
                    name: median(max(t) for t in list(zip(*(v[size, name] for v in values)))[3:])
                    for name in ("torch", "ours", "unsplit")
                }
                ratio = times["ours"] / times["torch"]
                row = "".join(f"  {name} {took * 1e3:7.2f}" for name, took in times.items())
                print(f"{ranks} ranks, {transport:6}, {size:20}{row}  ({ratio:.2f})")
                missed |= ratio > 1.0 and transport == "shared"
    return missed


if __name__ == "__main__":
    sys.exit(main())
