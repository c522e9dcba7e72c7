"""What a run brings back."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..timeline import Timeline


@dataclass
class Result:
    """`values` and `prints` (a text a rank) in rank order, and the run's `timeline`."""

    values: list
    timeline: Timeline = field(repr=False)
    prints: list[str] = field(repr=False)

    def replay(self) -> None:
        """Print what the ranks printed, in rank order, each line with its rank."""
        for rank, text in enumerate(self.prints):
            for line in text.splitlines():
                print(f"[rank {rank}] {line}")
