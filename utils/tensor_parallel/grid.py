"""Tensor parallelism in one direction, data parallelism in the other."""

from __future__ import annotations


def grid(comm, width: int):
    """This rank's two groups: `width` ranks in a row share a model; its likes hold the same part.

    With 6 ranks and a width of 2 the rows are 0 1, 2 3 and 4 5, the columns 0 2 4 and 1 3 5.
    Raises ValueError if the ranks do not fill the rows.
    """
    n, rank = comm.world_size, comm.rank
    if width < 1 or n % width:
        raise ValueError(f"{n} ranks do not fill rows of {width}")
    first = rank - rank % width
    return comm.group(range(first, first + width)), comm.group(range(rank % width, n, width))
