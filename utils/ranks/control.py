"""What process ranks show one another, and their parent, in shared memory: where they are."""

from __future__ import annotations

from enum import IntEnum

from .segment import LINE, WORD, Segment, publish


class Board:
    """Where the whole world meets before a collective call: each rank says what it is about to do.

    It has two places for each rank, used in turn. A rank comes to a place again only after all have
    come to the other one, and so have read what it said here.
    """

    def __init__(self, segment: Segment, offset: int, rank: int, ranks: int):
        self.words = segment.words(offset, self.size(ranks) // WORD)
        self.rank, self.ranks = rank, ranks
        self.round = 0

    @staticmethod
    def size(ranks: int) -> int:
        return ranks * LINE * WORD

    def say(self, number: int) -> None:
        """Come to the next meeting with a number that stands for the call."""
        self.round += 1
        at = self.rank * LINE + 2 * (self.round % 2)
        self.words[at + 1] = number
        publish(self.words, at, self.round)

    def missing(self) -> int | None:
        """The first rank that has not come yet."""
        words, at = self.words, 2 * (self.round % 2)
        for rank in range(self.ranks):
            if words[rank * LINE + at] < self.round:
                return rank
        return None

    def all_said(self, number: int) -> bool:
        """Whether all who met said the same."""
        words, at = self.words, 2 * (self.round % 2) + 1
        return all(words[rank * LINE + at] == number for rank in range(self.ranks))


class Doing(IntEnum):
    """What a rank, or its background, waits for; 0 while it computes."""

    NOTHING = 0
    SEND = 1
    RECEIVE = 2  # its sender has not begun yet
    MEET = 3
    LAUNCHED = 4
    IDLE = 5  # a background that has nothing to do


class State:
    """What one thread of a rank waits for, written by it and read by the parent.

    `count` changes with each wait, so that the parent can tell whether anything has moved.
    """

    SIZE = LINE * WORD

    def __init__(self, segment: Segment, offset: int):
        self.words = segment.words(offset, LINE)

    def set(self, doing: int, peer: int = 0, kind: int = 0, nbytes: int = 0) -> None:
        words = self.words
        words[1] += 1
        words[2], words[3], words[4] = peer, kind, nbytes
        words[0] = doing

    def clear(self) -> None:
        self.words[0] = 0

    def read(self) -> tuple[int, ...]:
        """(doing, count, peer, kind of the tensor, its bytes)"""
        return tuple(self.words[:5])
