"""What simulating many ranks takes: messages a second, and a training step of 1,024 ranks.

Limits: 50,000 messages a second among 256 ranks; the step in 30 s and 4 GB.
"""

import resource
import sys
import time

import torch
from torch.nn import functional as F

from utils.hardware import ideal_server
from utils.models import mlp
from utils.ranks import run

MESSAGES = 80_000
MESSAGES_A_SECOND, SECONDS, GIGABYTES = 50_000, 30, 4


def around_the_ring(comm):
    mine, theirs = torch.zeros(1), torch.zeros(1)
    for _ in range(MESSAGES // comm.world_size):
        comm.exchange(
            mine, (comm.rank + 1) % comm.world_size, theirs, (comm.rank - 1) % comm.world_size
        )


def training_step(comm):
    torch.manual_seed(0)
    net = mlp((784, 64, 10)).to(comm.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(8, 784, generator=data).to(comm.device)
    y = torch.randint(10, (8,), generator=data).to(comm.device)
    F.cross_entropy(net(x), y).backward()
    for parameter in net.parameters():
        comm.all_reduce(parameter.grad, "avg")
    optimizer.step()
    return sum(parameter.sum().item() for parameter in net.parameters())


def main():
    missed = False
    for ranks in (2, 32, 256):
        server, rates = ideal_server(ranks, 5e-6, 10e9), []
        for _ in range(5):
            began = time.perf_counter()
            run(around_the_ring, ranks, "virtual", server=server, record=False)
            rates.append(MESSAGES / (time.perf_counter() - began))
        print(f"{ranks:5} ranks {max(rates):10,.0f} messages a second, the best of 5 runs")
    missed |= max(rates) < MESSAGES_A_SECOND
    began = time.perf_counter()
    network = {"server": "dgx1-v100", "network": "infiniband-edr"}
    result = run(training_step, 1024, "virtual", record=False, **network)
    took = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f" 1024 ranks {took:10.1f} s for a training step of an MLP, {memory:.2f} GB at the peak")
    assert len(set(result.values)) == 1
    return missed or took > SECONDS or memory > GIGABYTES


if __name__ == "__main__":
    sys.exit(main())
