"""Data parallelism: the finished code of chapters 04 and 07.

one_process.py  one program that drives several devices (chapter 04)
distributed.py  `DistributedDataParallel`: one program a rank, gradients travel while the backward
                pass goes on (chapter 07); buckets.py what travels together
priorities.py   the first layers' gradients first, in parts
wires.py        all-reduces that carry less: `in_half`
together.py     what ranks do alike: start equal, stop together, run out of data, pool statistics
"""

from .buckets import Bucket, bucket_schedule, make_buckets
from .distributed import DistributedDataParallel
from .one_process import (
    accumulated_step,
    accuracy,
    check_weights,
    compute_gradients,
    devices_of,
    evaluate,
    gather,
    in_groups,
    pool_statistics,
    restore_buffers,
    share_of_loss,
    split_batch,
    sum_gradients,
    sync_buffers,
    train_step,
    used_copies,
    weighted_average,
)
from .priorities import PriorityDataParallel, first_come, first_layers_first
from .together import any_rank, broadcast_module, in_step, pool_buffers
from .wires import in_half

__all__ = [
    "Bucket",
    "DistributedDataParallel",
    "PriorityDataParallel",
    "accumulated_step",
    "accuracy",
    "any_rank",
    "broadcast_module",
    "bucket_schedule",
    "check_weights",
    "compute_gradients",
    "devices_of",
    "evaluate",
    "first_come",
    "first_layers_first",
    "gather",
    "in_groups",
    "in_half",
    "in_step",
    "make_buckets",
    "pool_buffers",
    "pool_statistics",
    "restore_buffers",
    "share_of_loss",
    "split_batch",
    "sum_gradients",
    "sync_buffers",
    "train_step",
    "used_copies",
    "weighted_average",
]
