"""What can go wrong in a run, said so that the line to mend is found."""

from __future__ import annotations

import linecache
import os
import sys
import traceback

PACKAGE = os.path.dirname(os.path.abspath(__file__))
UTILS = os.path.dirname(PACKAGE)


class RankError(RuntimeError):
    """A rank raised, was killed, or did not end in time; the whole run has been ended."""

    rank = -1
    consequence = 0  # 1 for an error that another rank's end brings about


class DeadlockError(RankError):
    """Every rank waits for another one."""


class Aborted(BaseException):
    """Ends the other ranks of a run that has failed; programs never see it."""


def story(error: BaseException) -> list[tuple]:
    """What was raised: (type, message, (file, line, function) of the program), the last one first.

    The others are what was being handled when it was raised.
    """
    frames = [
        (frame.filename, frame.lineno, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_ours(frame.filename)
    ]
    before = error.__cause__
    if before is None and not error.__suppress_context__:
        before = error.__context__
    own = (type(error).__name__, str(error), frames[-1] if frames else None)
    return [own, *(story(before) if before is not None else [])]


def failure(rank: int, raised: list[tuple]) -> RankError:
    """The error of a rank from its `story`, with the lines of the program."""
    parts = []
    for name, message, place in raised:
        where = "" if place is None else "\n" + quote(*place)
        parts.append(f"{name}: {message}{where}")
    error = RankError(f"rank {rank} raised " + "\n  while it handled ".join(parts))
    error.rank = rank
    return error


def is_ours(filename: str) -> bool:
    """Whether a line is the course's or a library's machinery rather than the program's."""
    return (
        filename.startswith((UTILS, os.path.dirname(os.__file__)))
        or "site-packages" in filename
        or filename.startswith("<")
    )


def describe_stack(thread: int) -> str:
    """The program's line at which a thread is now."""
    frame = sys._current_frames().get(thread)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return "\n" + quote(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def quote(filename: str, line: int, function: str) -> str:
    """A line of code with where it stands, such as `    line 4 of exchange: comm.send(x, 1)`."""
    code = linecache.getline(filename, line).strip()
    cell = "ipykernel" in filename or filename.startswith("<ipython")
    place = "" if cell else f" in {os.path.basename(filename)}"
    return f"    line {line} of {function}{place}: {code}"
