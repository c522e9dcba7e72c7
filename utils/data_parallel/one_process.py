"""Data parallelism by one program that drives several devices (chapter 04).

Every device holds a replica of the model and works on its shard of the batch. One rule makes k
devices compute what one would: a row's loss is divided by the rows of the whole *batch*, and the
gradients are summed. Then shards may differ in size, or be empty.
"""

from __future__ import annotations

import itertools

import torch

from ..collectives import check_tensors, ring_all_reduce


def split_batch(X, y, devices):
    """Cut a batch into one shard a device and send them there: (X_shards, y_shards).

    Their sizes differ by at most one row; with fewer rows than devices the last ones are empty.
    Raises ValueError if X and y differ in their number of rows, or if there are no devices.
    """
    n = len(devices)
    if len(X) != len(y) or n == 0:
        raise ValueError(f"cannot give {len(X)} rows with {len(y)} labels to {n} devices")
    X_shards = [part.to(device) for part, device in zip(X.tensor_split(n), devices)]
    y_shards = [part.to(device) for part, device in zip(y.tensor_split(n), devices)]
    return X_shards, y_shards


def accuracy(outputs, labels):
    """Share of correct rows over the shards of all devices, which may differ in size or be empty.

    `outputs` are one tensor a device, (rows, classes), and so are `labels`, (rows,). Counts are
    summed; ratios are not averaged. Raises ValueError if there are no rows at all.
    """
    rows = sum(len(y) for y in labels)
    if rows == 0:
        raise ValueError("there are no rows to take the accuracy of")
    correct = [(output.argmax(1) == y).sum() for output, y in zip(outputs, labels) if len(y)]
    return sum(count.item() for count in correct) / rows


@torch.no_grad()
def evaluate(replicas, X, y):
    """Accuracy of replicas on (X, y), each on its shard, with dropout and batch statistics off."""
    modes = [replica.training for replica in replicas]
    X_shards, y_shards = split_batch(X, y, devices_of(replicas))
    outputs = [replica.eval()(x) for replica, x in zip(replicas, X_shards)]
    for replica, mode in zip(replicas, modes):
        replica.train(mode)
    return accuracy(outputs, y_shards)


def devices_of(replicas):
    """The device of each replica: that of its first parameter."""
    return [next(replica.parameters()).device for replica in replicas]


# --- averages ----------------------------------------------------------------------------------


@torch.no_grad()
def weighted_average(tensors, weights, all_reduce=ring_all_reduce):
    """Replace every tensor, one a device, in place by Σ weight · tensor / Σ weight.

    Each is scaled before it is added, so that float16 does not overflow where the average fits. A
    tensor of weight 0, such as the mean over an empty shard, does not count even if it is NaN.
    """
    check_weights(tensors, weights)
    total = sum(weights)
    for tensor, weight in zip(tensors, weights):
        if weight == 0:
            tensor.zero_()
        else:
            tensor *= weight / total
    all_reduce(tensors)


def check_weights(tensors, weights):
    """Raise ValueError or TypeError, before anything is changed, where there is no average."""
    check_tensors(tensors)
    if len(weights) != len(tensors):
        raise ValueError(f"{len(tensors)} tensors need as many weights, not {len(weights)}")
    if not (min(weights) >= 0 and 0 < sum(weights) < float("inf")):
        raise ValueError(f"weights are at least 0, and not all 0; these are {list(weights)}")
    if not (tensors[0].is_floating_point() or tensors[0].is_complex()):
        raise TypeError(f"the average of {tensors[0].dtype} is no integer; convert to float first")


# --- a training step ---------------------------------------------------------------------------


def train_step(replicas, optimizers, X, y, loss, all_reduce=ring_all_reduce):
    """One step on all devices that does what one device would do: returns the mean loss.

    `loss(outputs, labels)` gives one value a row, such as nn.CrossEntropyLoss(reduction="none").
    Where the gradient is not finite, all devices skip the step together.
    """
    return accumulated_step(replicas, optimizers, [(X, y)], loss, all_reduce)


def accumulated_step(replicas, optimizers, micro_batches, loss, all_reduce=ring_all_reduce):
    """One step for several micro-batches as if they were one batch: one all-reduce, one update."""
    before = [[buffer.clone() for buffer in replica.buffers()] for replica in replicas]
    shares, finite = compute_gradients(replicas, micro_batches, loss, all_reduce)
    if finite.item():
        for optimizer in optimizers:
            optimizer.step()
    else:
        restore_buffers(replicas, before)
    return sum(share.item() for share in shares)


def in_groups(micro_batches, size):
    """Lists of `size` micro-batches, one for each step; the last has what is left."""
    if size < 1:
        raise ValueError(f"a group needs at least one micro-batch, not {size}")
    remaining = iter(micro_batches)
    while group := list(itertools.islice(remaining, size)):
        yield group


def compute_gradients(replicas, micro_batches, loss, all_reduce=ring_all_reduce):
    """Leave in every replica the gradient of the mean loss over all rows, in place of the last one.

    Gradients of micro-batches add up on each device; then one all-reduce sums over the devices.
    Returns each shard's part of the mean loss, and whether all gradients are finite: tensors, for
    which nothing has waited.
    """
    rows = sum(len(y) for _, y in micro_batches)
    if rows == 0:
        raise ValueError("there are no rows to train on")
    for replica in replicas:
        replica.zero_grad()
    shares = []
    for X, y in micro_batches:
        shards = zip(replicas, *split_batch(X, y, devices_of(replicas)))
        here = [share_of_loss(model, x, y, loss, rows) for model, x, y in shards if len(y)]
        for share in here:
            share.backward()
        shares += [share.detach() for share in here]
    return shares, sum_gradients(replicas, all_reduce)


def share_of_loss(model, X, y, loss, rows):
    """What a shard adds to the mean loss over `rows` rows: each row's loss / rows, summed."""
    values = loss(model(X), y)
    if values.shape != (len(y),):
        raise ValueError(
            f"the loss has shape {tuple(values.shape)}, but a shard of {len(y)} rows needs one "
            'value a row: build it with reduction="none", so that every row weighs the same'
        )
    return (values / rows).sum()


@torch.no_grad()
def sum_gradients(replicas, all_reduce=ring_all_reduce):
    """Replace each gradient by its sum over the replicas, with one flat message a dtype.

    A replica without a gradient, such as one with an empty shard, adds 0; a parameter that no
    replica has used keeps none. Returns whether all sums are finite, a tensor on the first device.
    """
    copies = [used_copies(group) for group in zip(*(r.parameters() for r in replicas))]
    finite = [torch.tensor(True, device=devices_of(replicas)[0])]
    for dtype in dict.fromkeys(group[0].dtype for group in copies if group):
        lists = list(zip(*(group for group in copies if group and group[0].dtype is dtype)))
        flat = [torch.cat([p.grad.flatten() for p in parameters]) for parameters in lists]
        all_reduce(flat)
        finite.append(flat[0].isfinite().all())
        for parameters, buffer in zip(lists, flat):
            for p, part in zip(parameters, buffer.split([p.numel() for p in parameters])):
                p.grad = part.view_as(p)
    return torch.stack(finite).all()


def used_copies(group):
    """The copies of one parameter, each with a dense gradient; none if no replica has one."""
    if all(p.grad is None for p in group):
        return ()
    for p in group:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    check_tensors([p.grad for p in group])
    return group


# --- buffers -----------------------------------------------------------------------------------


@torch.no_grad()
def restore_buffers(replicas, before):
    """Undo what a forward pass did to buffers, such as running statistics that have seen a NaN."""
    for replica, tensors in zip(replicas, before):
        for buffer, tensor in zip(replica.buffers(), tensors):
            buffer.copy_(tensor)


def pool_statistics(means, variances, counts):
    """Mean and unbiased variance of all values together, from those of groups of `counts` values.

    Values differ within the groups and between them. Groups of 0 values do not count.
    """
    groups = [group for group in zip(counts, means, variances) if group[0]]
    total = sum(counts)
    mean = sum(n * m for n, m, _ in groups) / total
    within = sum((n - 1) * v for n, _, v in groups if n > 1)
    between = sum(n * (m - mean) ** 2 for n, m, _ in groups)
    return mean, (within + between) / max(total - 1, 1)


@torch.no_grad()
def sync_buffers(replicas, counts):
    """Make the buffers of all replicas equal, in place; integer ones stay integers.

    Running means and variances are pooled, where `counts` are the values a channel that each
    replica's statistics stand for: rows, or rows × height × width after a convolution; where layers
    differ, take the smallest. Numbers of batches become the largest. All other buffers are the
    first replica's.
    """
    for layers in zip(*(replica.modules() for replica in replicas)):
        buffers = [dict(layer.named_buffers(recurse=False)) for layer in layers]
        results = dict(buffers[0])
        if results.get("running_mean") is not None:
            results["running_mean"], results["running_var"] = pool_statistics(
                gather(buffers, "running_mean"), gather(buffers, "running_var"), counts
            )
        if "num_batches_tracked" in results:
            results["num_batches_tracked"] = max(gather(buffers, "num_batches_tracked"))
        for name, result in results.items():
            for copies in buffers:
                copies[name].copy_(result)


def gather(buffers, name):
    """The replicas' values of one buffer on the first one's device, floats in double precision."""
    home = buffers[0][name].device
    values = [copies[name].to(home) for copies in buffers]
    return [value.double() if value.is_floating_point() else value for value in values]
