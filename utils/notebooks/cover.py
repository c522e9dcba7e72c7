"""The README's picture: the timeline of a training step, simulated."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from utils import plots, run
from utils.notebooks import COURSE

PICTURE = COURSE / "chapters" / "images" / "step.svg"
BATCH = 16  # images a GPU


def step(comm):
    """One step of ResNet-18, in shapes only: forward, backward, all-reduce in four buckets."""
    from torchvision.models import resnet18

    with FakeTensorMode(), torch.device(comm.device):
        model = resnet18()
        images, labels = torch.empty(BATCH, 3, 224, 224), torch.zeros(BATCH, dtype=torch.long)
        parameters = list(model.parameters())[::-1]
        size = sum(p.numel() for p in parameters) // 4
        works, bucket = [], []

        def collect(parameter):
            bucket.append(parameter.grad.flatten())
            if sum(map(len, bucket)) > size or parameter is parameters[-1]:
                flat = torch.cat(bucket)
                bucket.clear()
                works.append(comm.launch(lambda comm, tensor: comm.all_reduce(tensor), flat))

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(collect)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        for work in works:
            work.wait()
        torch.optim.SGD(parameters, lr=0.1).step()


def draw():
    """The picture as SVG text."""
    timeline = run(step, ranks=4, on="virtual", server="pcie-switch").timeline
    timeline.events = [event for event in timeline.events if event.kind != "host"]
    timeline.plot(title="One step of ResNet-18 on four GPUs (simulated)")
    return plots.svg()


def main(paths=()):
    """Draw the picture anew."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw())
