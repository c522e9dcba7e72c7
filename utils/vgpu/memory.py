"""What lies in a device's memory: a block for each storage, a ledger for each device.

A block hangs on the `UntypedStorage` whose bytes it describes, so it lives exactly as long as they
do: the views of a tensor share its block, and the last of them to go frees it. Memory is counted
in the order in which the program runs, as PyTorch's caching allocator does, not in simulated time.
"""

from __future__ import annotations

import weakref

KINDS = ("parameters", "gradients", "activations", "optimizer", "buffers", "other")


class Block:
    """The bytes of one storage on one place (a device or the host), and when they can be used.

    `ready` is the time (ps) at which the last write ends, `used` that at which the last read ends.
    Once views of parts are in use, `spans` keeps these times for each part, and the two `whole_…`
    times are those of the last use of the block as a whole.
    """

    __slots__ = ("place", "nbytes", "_kind", "ready", "used", "whole_ready", "whole_used", "spans",
                 "pinned", "serial", "label", "__weakref__")  # fmt: skip

    def __init__(self, place, nbytes: int, kind: str = "other", label: tuple = ()):
        self.place = place
        self.nbytes = nbytes
        self._kind = kind
        self.ready = self.used = 0
        self.spans: list[list[int]] | None = None  # [low, high, ready, used] of parts
        self.pinned = False
        self.label = label
        self.serial = 0
        if place.ledger is not None:
            place.ledger.allocate(self)

    @property
    def kind(self) -> str:
        """What the bytes are for: one of `KINDS`, as far as can be told."""
        return self._kind

    @kind.setter
    def kind(self, kind: str) -> None:
        if kind != self._kind:
            if self.place.ledger is not None:
                self.place.ledger.relabel(self, kind)
            self._kind = kind

    def move_to(self, place) -> None:
        """Give the bytes to another place, such as the same device of a new cluster."""
        if self.place.ledger is not None:
            self.place.ledger.free(self)
        self.ready = self.used = 0
        self.spans = None
        if place.ledger is not None:
            place.ledger.allocate(self)
        self.place = place

    def resize(self, nbytes: int) -> None:
        """Count another number of bytes, after the storage was resized."""
        if nbytes != self.nbytes:
            if self.place.ledger is not None:
                self.place.ledger.resize(self, nbytes)
            self.nbytes = nbytes
            self.spans = None

    def __del__(self):
        if self.place.ledger is not None:
            self.place.ledger.free(self)


class Span:
    """The bytes from `low` to `high` of a block, with `ready` and `used` of their own.

    So the parts of one buffer can be sent, received and added to at the same time.
    """

    __slots__ = ("block", "low", "high")

    def __init__(self, block: Block, low: int, high: int):
        self.block, self.low, self.high = block, low, high

    def _overlapping(self) -> list[list[int]]:
        return [s for s in self.block.spans if s[0] < self.high and self.low < s[1]]

    @property
    def ready(self) -> int:
        block = self.block
        if block.spans is None:
            return block.ready
        return max([block.whole_ready, *(span[2] for span in self._overlapping())])

    @ready.setter
    def ready(self, time: int) -> None:
        block = self.block
        if self.low <= 0 and self.high >= block.nbytes:
            block.ready, block.spans = time, None
            return
        spans = self._divide()
        spans[:] = [s for s in spans if not (self.low <= s[0] and s[1] <= self.high)]
        spans.append([self.low, self.high, time, time])
        block.ready = max(block.ready, time)

    @property
    def used(self) -> int:
        block = self.block
        if block.spans is None:
            return block.used
        return max([block.whole_used, *(span[3] for span in self._overlapping())])

    @used.setter
    def used(self, time: int) -> None:
        spans = self._divide()
        for span in spans:
            if span[0] == self.low and span[1] == self.high:
                span[3] = max(span[3], time)
                break
        else:
            spans.append([self.low, self.high, 0, time])
        self.block.used = max(self.block.used, time)

    def _divide(self) -> list[list[int]]:
        """The block's spans; those of the past, which nothing can wait for, are dropped."""
        block = self.block
        if block.spans is None:
            block.whole_ready, block.whole_used, block.spans = block.ready, block.used, []
        elif len(block.spans) > 16:
            now = block.place.machine.host.clock
            block.spans[:] = [span for span in block.spans if max(span[2:]) > now]
        return block.spans


class Ledger:
    """The memory of one device in bytes: what is in use, its peak, and what for."""

    def __init__(self, device: str, capacity: int, out_of_memory: type[Exception] = MemoryError):
        self.device = device
        self.capacity = capacity
        self.out_of_memory = out_of_memory
        self.used = 0
        self.by_kind = dict.fromkeys(KINDS, 0)
        self._resident: dict[int, weakref.ref[Block]] = {}
        self._serial = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        """Start the search for the peak again from what is in use now."""
        self.peak = self.used
        self.peak_by_kind = dict(self.by_kind)
        self._peak_serial = self._serial

    def allocate(self, block: Block) -> None:
        """Enter a block; raises `out_of_memory`, and enters nothing, if it does not fit."""
        self.check_room(block.nbytes)
        self._serial += 1
        block.serial = self._serial
        self._resident[id(block)] = weakref.ref(block)
        self._count(block.nbytes, block._kind)

    def resize(self, block: Block, nbytes: int) -> None:
        """Count a block with another size; raises `out_of_memory` if it does not fit."""
        self.check_room(nbytes - block.nbytes)
        self._count(nbytes - block.nbytes, block._kind)

    def _count(self, nbytes: int, kind: str) -> None:
        self.used += nbytes
        self.by_kind[kind] += nbytes
        if self.used > self.peak:
            self.reset_peak()

    def free(self, block: Block) -> None:
        """Strike a block out; one that was refused is not there, and that is fine."""
        if self._resident.pop(id(block), None) is not None:
            self.used -= block.nbytes
            self.by_kind[block._kind] -= block.nbytes

    def relabel(self, block: Block, kind: str) -> None:
        """Count a block as another kind, in the peak too if it was there then."""
        self.by_kind[block._kind] -= block.nbytes
        self.by_kind[kind] += block.nbytes
        if block.serial <= self._peak_serial:
            self.peak_by_kind[block._kind] -= block.nbytes
            self.peak_by_kind[kind] += block.nbytes

    def resident(self) -> list[Block]:
        """The blocks in memory, the largest first."""
        blocks = [block for ref in list(self._resident.values()) if (block := ref()) is not None]
        return sorted(blocks, key=lambda block: (-block.nbytes, block.serial))

    def check_room(self, nbytes: int) -> None:
        """Raise `out_of_memory`, listing what is resident, if so many bytes more do not fit."""
        if self.used + nbytes <= self.capacity:
            return
        blocks = self.resident()
        kinds = ", ".join(f"{kind} {size(n)}" for kind, n in self.by_kind.items() if n)
        largest = "\n".join(f"  {describe(block)}" for block in blocks[:5])
        raise self.out_of_memory(
            f"{self.device} is out of memory: asked for {size(nbytes)}, but {size(self.used)} of "
            f"its {size(self.capacity)} are in use ({kinds or 'nothing'}). "
            + (f"Largest of {len(blocks)} blocks:\n{largest}\n" if blocks else "")
            + "Free tensors that are no longer needed (del x), use a smaller batch or dtype, or "
            "put part of the model on another device."
        )


def describe(block: Block) -> str:
    """One line about a block, such as `4.00 MB parameters float32 (1000, 1000)`."""
    return " ".join([size(block.nbytes), block.kind, *map(str, block.label)])


def size(nbytes: float) -> str:
    """Bytes in the largest decimal unit that keeps at least one digit before the point."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"
