"""Tensor partitioning: one layer on several ranks (chapter 09).

operators.py    what travels: functions of a tensor with a forward and a backward message
linear.py       linear layers cut by columns and by rows, an MLP of both
attention.py    attention with the heads shared out; block.py a transformer block, and the same with
                the rows of what lies between its layers shared out too
vocabulary.py   embedding and cross entropy over a vocabulary that is shared out
convolution.py  convolutions cut by channels
training.py     dropout, and clipping by the norm of all gradients
grid.py         groups for tensor parallelism one way and data parallelism the other
alexnet.py      AlexNet's two towers, and one weird trick
"""

from .alexnet import OneWeirdTrick, all_at_once, in_slices, one_after_another, tower
from .attention import ParallelAttention
from .block import ParallelBlock, ParallelNorm, SequenceParallelBlock
from .convolution import InputParallelConv2d, OutputParallelConv2d
from .grid import grid
from .linear import ColumnParallelLinear, ParallelMLP, RowParallelLinear
from .operators import (
    all_gather_reduce_scatter,
    all_gather_split,
    all_reduce_identity,
    broadcast_reduce,
    identity_all_reduce,
    own_part,
    part_sizes,
    reduce_scatter_all_gather,
    split_all_gather,
)
from .training import Dropout, clip_gradients, dropout_streams
from .vocabulary import ParallelEmbedding, parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "InputParallelConv2d",
    "OneWeirdTrick",
    "OutputParallelConv2d",
    "ParallelAttention",
    "ParallelBlock",
    "ParallelEmbedding",
    "ParallelMLP",
    "ParallelNorm",
    "RowParallelLinear",
    "SequenceParallelBlock",
    "all_at_once",
    "all_gather_reduce_scatter",
    "all_gather_split",
    "all_reduce_identity",
    "broadcast_reduce",
    "clip_gradients",
    "dropout_streams",
    "grid",
    "identity_all_reduce",
    "in_slices",
    "one_after_another",
    "own_part",
    "parallel_cross_entropy",
    "part_sizes",
    "reduce_scatter_all_gather",
    "split_all_gather",
    "tower",
]
