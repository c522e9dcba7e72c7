"""Letters: what process ranks tell one another beside their messages, through shared memory.

What a message will be (so that wrong use is an error that names the ranks and not a wrong sum), and
which call a rank is about to make with its group.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque

from .segment import LINE, WORD, Segment, publish

ENTRIES = 64  # letters that one rank can have under way to another
ENTRY = 32  # words of a letter: a number that says what it is about, its length, its text
ROOM = (ENTRY - 2) * WORD  # bytes of text


class Box:
    """The letters from one rank to another: a ring in shared memory, and what did not fit yet."""

    SIZE = 2 * LINE * WORD + ENTRIES * ENTRY * WORD

    def __init__(self, segment: Segment, offset: int):
        self.words = segment.words(offset, self.SIZE // WORD)  # [0] written, [LINE] read
        self.text = segment.bytes(offset, self.SIZE)
        self.count = 0  # written, or read, at this end
        self.waiting: deque[tuple[int, bytes]] = deque()
        self.found: dict[int, deque[bytes]] = {}

    def write(self, number: int, text: bytes) -> None:
        at = 2 * LINE + self.count % ENTRIES * ENTRY
        self.words[at], self.words[at + 1] = number, len(text)
        start = (at + 2) * WORD
        self.text[start : start + len(text)] = text
        self.count += 1
        publish(self.words, 0, self.count)

    def flush(self) -> None:
        """Write what waits, as far as there is room."""
        while self.waiting and self.count - self.words[LINE] < ENTRIES:
            self.write(*self.waiting.popleft())

    def read(self) -> int:
        """Take in everything that has come; returns how many letters."""
        before, written = self.count, self.words[0]
        while self.count < written:
            at = 2 * LINE + self.count % ENTRIES * ENTRY
            start = (at + 2) * WORD
            text = bytes(self.text[start : start + self.words[at + 1]])
            self.found.setdefault(self.words[at], deque()).append(text)
            self.count += 1
        publish(self.words, LINE, self.count)
        return self.count - before


class Mail:
    """A rank's letters: to and from every other rank."""

    def __init__(self, segment: Segment, offset: int, rank: int, ranks: int):
        def box(src: int, dst: int) -> Box:
            return Box(segment, offset + (src * ranks + dst) * Box.SIZE)

        others = [other for other in range(ranks) if other != rank]
        self.outgoing = {other: box(rank, other) for other in others}
        self.incoming = {other: box(other, rank) for other in others}
        self.lock = threading.Lock()
        self.overflow = False  # whether some letter waits for room
        self.came = 0  # letters that have come so far

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of shared memory for the boxes of all ordered pairs."""
        return ranks * ranks * Box.SIZE

    def post(self, dst: int, number: int, text: bytes) -> None:
        """Send a letter; it is kept here for as long as there is no room for it."""
        box = self.outgoing[dst]
        with self.lock:
            box.waiting.append((number, shorten(text)))
            box.flush()
            self.overflow = self.overflow or bool(box.waiting)

    def take(self, src: int, number: int) -> bytes | None:
        """The next letter from a rank about something, if it has come."""
        self.read()
        found = self.incoming[src].found
        with self.lock:
            letters = found.get(number)
            if not letters:
                return None
            text = letters.popleft()
            if not letters:
                del found[number]
            return text

    def read(self) -> None:
        """Take in every letter that has come, and send what there is room for now."""
        if self.overflow:
            self.flush()
        for box in self.incoming.values():
            if box.words[0] > box.count:
                with self.lock:
                    self.came += box.read()

    def flush(self) -> None:
        """Send what had to wait, as far as there is room now."""
        with self.lock:
            for box in self.outgoing.values():
                box.flush()
            self.overflow = any(box.waiting for box in self.outgoing.values())


def shorten(text: bytes) -> bytes:
    """A text that fits in a letter; a long one ends with a number that stands for the whole."""
    if len(text) <= ROOM:
        return text
    return text[: ROOM - 15] + b"... #%010d" % zlib.crc32(text)


def number_of(key) -> int:
    """A number that stands for a key made of strings, numbers and tuples: equal on every rank."""
    text = repr(key).encode()
    return (zlib.crc32(text) << 31 | zlib.adler32(text)) & (2**62 - 1)
