"""What virtual GPUs cost: the same steps on them and in plain PyTorch, in turns.

Two processes run the same code, one with a Cluster and one without, since a Cluster leaves its mode
switched on in its process. They are asked for one step each, alternately, so that both meet the
same machine; the medians and their ratio are printed. The limits are goals, for a machine with
nothing else to do.
"""

import statistics
import subprocess
import sys
import time

REPEATS = {"LeNet": 25, "ResNet-18": 5, "addition": 9}
ADDITIONS = 2000
LIMITS = {"LeNet": "at most 1.5", "ResNet-18": "at most 1.2", "addition": "at most 30 µs more"}
NAMES = {
    "LeNet": "LeNet step, batch 256, 4 devices (ms)",
    "ResNet-18": "ResNet-18 step, 32 x 32, batch 64 (ms)",
    "addition": "addition of 4 numbers (µs)",
}


def work(kind, threads):
    """Answer each name on stdin with the seconds that one run of it took."""
    import torch
    from torch import nn

    from utils import Cluster, models
    from utils.collectives import star_all_reduce
    from utils.data_parallel import compute_gradients
    from utils.parameters import replicate

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    devices = Cluster(4, quiet=True).devices if kind == "virtual" else [torch.device("cpu")] * 4
    row_loss = nn.CrossEntropyLoss(reduction="none")

    def training_step(net, devices, *shape):
        replicas = replicate(net, devices)
        optimizers = [torch.optim.SGD(replica.parameters(), lr=0.01) for replica in replicas]
        X, y = torch.randn(shape), torch.randint(10, shape[:1])

        def step():
            compute_gradients(replicas, [(X, y)], row_loss, star_all_reduce)
            for optimizer in optimizers:
                optimizer.step()

        return step

    def additions():
        for _ in range(ADDITIONS):
            small + small

    small = torch.ones(4, device=devices[0])
    runs = {
        "LeNet": training_step(models.lenet(), devices, 256, 1, 28, 28),
        "ResNet-18": training_step(models.resnet18(channels=3), devices[:1], 64, 3, 32, 32),
        "addition": additions,
    }
    for name in sys.stdin:
        start = time.perf_counter()
        runs[name.strip()]()
        print(time.perf_counter() - start, flush=True)


class Worker:
    """A process that does `work`."""

    def __init__(self, *arguments):
        command = [sys.executable, __file__, *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def seconds(self, name):
        self.process.stdin.write(name + "\n")
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended with code {self.process.wait()}")
        return float(answer)

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)


def measure(name, workers):
    """The medians of both workers, after two runs to warm up."""
    times = [[worker.seconds(name) for worker in workers] for _ in range(2 + REPEATS[name])][2:]
    scale = 1e6 / ADDITIONS if name == "addition" else 1e3
    return [scale * statistics.median(column) for column in zip(*times)]


def main(thread_numbers):
    print(f"{'':40} {'threads':>7} {'plain':>9} {'virtual':>9} {'reached':>14}   limit")
    for threads in thread_numbers:
        workers = [Worker("plain", threads), Worker("virtual", threads)]
        try:
            for name, title in NAMES.items():
                plain, virtual = measure(name, workers)
                reached = f"{virtual / plain:.2f} times"
                if name == "addition":
                    reached = f"{virtual - plain:.1f} µs more"
                print(f"{title:40} {threads:7} {plain:9.2f} {virtual:9.2f} {reached:>14}   "
                      f"{LIMITS[name]}", flush=True)  # fmt: skip
        finally:
            for worker in workers:
                worker.end()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        work(sys.argv[1], int(sys.argv[2]))
    else:
        import os

        main(sorted({1, os.cpu_count()}))
