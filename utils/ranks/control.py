"""What process ranks tell one another beside their messages, through shared memory.

Each rank keeps a short log that the others read: the collective calls that it is about to make, and
the size and dtype of each message that it sends. So wrong use becomes an error that names the ranks
instead of a wrong sum.
"""

from __future__ import annotations

import struct
import zlib

from .shared import Segment, publish, wait_until

ENTRY = 256
ENTRIES = 512
ALL = -1
HEADER = struct.Struct("<qqhH")  # number of the entry, what it is about, for whom, length of text


class Log:
    """One rank's log of short texts, each about something: a ring of entries in shared memory.

    Its own rank writes; every other rank reads on from where it was, and keeps what it has not
    been asked for yet.
    """

    def __init__(self, segment: Segment, offset: int, reader: int):
        self._bytes = segment.bytes(offset, ENTRIES * ENTRY)
        self._stamps = segment.words(offset, (ENTRIES, ENTRY // 8))[:, 0]
        self._count = 0  # entries written, or read
        self._reader = reader
        self._read: dict[int, str] = {}

    def write(self, about: int, text: str, to: int = ALL) -> None:
        """Add an entry for one rank, or for all (by the log's own rank)."""
        data = shorten(text).encode()
        at = self._count % ENTRIES * ENTRY
        self._count += 1
        HEADER.pack_into(self._bytes, at, 0, about, to, len(data))
        start = at + HEADER.size
        self._bytes[start : start + len(data)] = data
        publish(self._stamps, at // ENTRY, self._count)

    def find(self, about: int) -> str | None:
        """Take the text of the entry about something, if it has come."""
        while self._stamps[self._count % ENTRIES] > self._count:
            at = self._count % ENTRIES * ENTRY
            self._count += 1
            stamp, subject, to, length = HEADER.unpack_from(self._bytes, at)
            if stamp != self._count:
                raise RuntimeError("a rank is more than 500 calls ahead of another; add a barrier")
            if to in (ALL, self._reader):
                start = at + HEADER.size
                self._read[subject] = str(self._bytes[start : start + length], "utf-8", "replace")
        return self._read.pop(about, None)

    def wait_for(self, about: int) -> str:
        """Take the text of the entry about something, once it has come."""
        found: list[str] = []

        def look() -> bool:
            text = self.find(about)
            if text is not None:
                found.append(text)
            return text is not None

        wait_until(look)
        return found[0]


def shorten(text: str) -> str:
    """A text that fits in an entry; a long one ends with a number that stands for the whole."""
    data, room = text.encode(), ENTRY - HEADER.size
    if len(data) <= room:
        return text
    return data[: room - 10].decode(errors="ignore") + f"{zlib.crc32(data):010d}"


def number_of(key) -> int:
    """A number that stands for a key made of strings, numbers and tuples: equal on every rank."""
    text = repr(key).encode()
    return (zlib.crc32(text) << 31 | zlib.adler32(text)) & (2**62 - 1)
