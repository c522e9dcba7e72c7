"""A vocabulary shared out: an embedding cut by words, and cross entropy without all logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .linear import split_parameter
from .operators import all_reduce_identity, part_sizes


class ParallelEmbedding(nn.Module):
    """An embedding of which each rank has the rows of some words: ids (…) → vectors (…, width).

    A rank gives zeros for words that it does not have, and the sum over ranks has them all.
    """

    def __init__(self, embedding: nn.Embedding, comm):
        super().__init__()
        self.comm = comm
        self.first, self.count = own_words(embedding.num_embeddings, comm)
        self.weight = split_parameter(embedding.weight, comm, 0)
        padding = embedding.padding_idx  # its row gets no gradient
        own = padding is not None and self.first <= padding < self.first + self.count
        self.padding = padding - self.first if own else None

    def forward(self, ids: Tensor) -> Tensor:
        here, local = find(ids, self.first, self.count)
        vectors = F.embedding(local, self.weight, self.padding) * here.unsqueeze(-1)
        return all_reduce_identity(vectors, self.comm)


def own_words(size: int, comm) -> tuple[int, int]:
    """The first word that a rank has of a vocabulary, and how many."""
    if size < comm.world_size:
        raise ValueError(f"{comm.world_size} ranks cannot share a vocabulary of {size} words")
    sizes = part_sizes(size, comm.world_size)
    return sum(sizes[: comm.rank]), sizes[comm.rank]


def find(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Which of these words a rank has, and at which of its rows (0 for others)."""
    here = (ids >= first) & (ids < first + count)
    return here, torch.where(here, ids - first, 0)


def parallel_cross_entropy(logits: Tensor, targets: Tensor, comm, size: int) -> Tensor:
    """Cross entropy of each row over a vocabulary of `size` words: (rows,).

    `logits` (rows, this rank's words) are this rank's part, as a column-parallel layer leaves them;
    `targets` (rows,) are the same on all ranks. Three all-reduces of one number a row take the
    place of a gather of all logits.
    """
    first, count = own_words(size, comm)
    check_words(logits, count, size, comm)
    largest = logits.detach().amax(1)
    comm.all_reduce(largest, "max")
    shifted = logits - largest.unsqueeze(1)
    total = all_reduce_identity(shifted.exp().sum(1), comm)
    here, local = find(targets, first, count)
    wanted = shifted.gather(1, local.unsqueeze(1)).squeeze(1) * here
    return total.log() - all_reduce_identity(wanted, comm)


def check_words(logits: Tensor, count: int, size: int, comm) -> None:
    """Raise ValueError if logits are not those of this rank's words."""
    if logits.shape[-1] != count:
        raise ValueError(
            f"rank {comm.rank} of {comm.world_size} has {count} of {size} words, but its logits "
            f"have {logits.shape[-1]}"
        )
