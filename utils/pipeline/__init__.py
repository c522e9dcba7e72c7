"""Network partitioning: layers on different devices, micro-batches on their way through them.

schedules.py  what each stage does, in which order: naive, GPipe, 1F1B, interleaved, zero bubble
checks.py     whether a schedule is right, how long it takes, what it keeps in memory
executor.py   carrying one out, with real layers, on virtual ranks, processes and GPUs: with
              halves.py the backward pass in two halves, shapes.py what travels, gradients.py
              what all must agree on before they step
partition.py  where to cut the network; weighing.py what there is to balance
"""

from .checks import bubble, check_schedule, peak_in_flight, time_schedule, unit_cost
from .executor import Outcome, run_schedule
from .gradients import all_finite, sum_tied_gradients, tied_weights
from .partition import (
    balanced_cuts,
    best_cuts,
    build_layers,
    chunks_of,
    cut_batch,
    cut_network,
)
from .schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Recompute,
    Step,
    complete,
    forward_only,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    recomputing,
    zero_bubble_h1,
)
from .shapes import agree_on_shapes
from .weighing import (
    activation_bytes,
    fastest_cuts_that_fit,
    layer_memory,
    layer_times,
    memory_cuts,
    parameter_counts,
    stage_bytes,
)

__all__ = [
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Forward",
    "Outcome",
    "Recompute",
    "Step",
    "activation_bytes",
    "agree_on_shapes",
    "all_finite",
    "balanced_cuts",
    "best_cuts",
    "bubble",
    "build_layers",
    "check_schedule",
    "chunks_of",
    "complete",
    "cut_batch",
    "cut_network",
    "fastest_cuts_that_fit",
    "forward_only",
    "gpipe",
    "interleaved",
    "layer_memory",
    "layer_times",
    "memory_cuts",
    "naive",
    "one_f_one_b",
    "parameter_counts",
    "peak_in_flight",
    "recomputing",
    "run_schedule",
    "stage_bytes",
    "sum_tied_gradients",
    "tied_weights",
    "time_schedule",
    "unit_cost",
    "zero_bubble_h1",
]
