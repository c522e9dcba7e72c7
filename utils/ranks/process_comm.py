"""The handle of a rank that is a process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from .comm import OTHER_HANDLE, Comm, words_of
from .control import Doing
from .mail import number_of, shorten
from .nccl import OnStream
from .process import Lane, Process, here
from .process_work import Launched, RecvWork, SendWork
from .work import Work


class ProcessComm(Comm):
    """The handle of a rank that is a process."""

    def __init__(self, process: Process, lane: Lane, rank, ranks, device, channel=()):
        super().__init__(rank, ranks, device, channel)
        self._process, self._lane = process, lane
        self._whole = self.ranks == tuple(range(process.ranks))
        self.shared_all_reduce = lane.all_reduce if self._whole else None
        self._numbers: dict = {}

    def _number(self, key) -> int:
        """A number for a key, equal on every rank, remembered."""
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = number_of((self._channel, key))
        return number

    def _check_owner(self) -> None:
        """A handle belongs to the program, or to the launched function that was given it."""
        if getattr(here, "lane", 0) != self._lane.number:
            raise RuntimeError(OTHER_HANDLE)

    def _post_send(self, tensor: Tensor, dst: int, tag: int) -> Work:
        self._check_owner()
        return SendWork(self._lane, tensor, dst, self._number(tag))

    def _post_recv(self, tensor: Tensor, src: int, tag: int) -> Work:
        self._check_owner()
        return RecvWork(self._lane, tensor, src, self._number(tag))

    def _wait_any(self, works: list[RecvWork]) -> int:
        come: list[int] = []

        def look() -> bool:
            come[:] = [i for i, work in enumerate(works) if work.end.begun]
            return bool(come)

        peer = works[0].src if len(works) == 1 else -1
        self._lane.wait(look, Doing.RECEIVE, peer)
        come.sort(key=lambda i: works[i].start)  # in this order they take the wire
        return min(come, key=lambda i: works[i].due())

    def time(self) -> float:
        return time.perf_counter() - self._process.start

    def _meet(self, description: tuple) -> dict[int, tuple | str]:
        self._check_owner()
        if self._whole and self._meet_on_board(description):
            return {}
        return self._meet_by_mail(description)

    def _meet_on_board(self, description: tuple) -> bool:
        """Meet where the whole world meets; whether all said the same."""
        board, state = self._lane.board, self._lane.state
        number = self._number(description)
        board.say(number)

        def ready() -> bool:
            missing = board.missing()
            state.words[2] = missing or 0  # for the parent, if this lasts
            return missing is None

        self._lane.wait(ready, Doing.MEET)
        return board.all_said(number)

    def _meet_by_mail(self, description: tuple) -> dict[int, tuple | str]:
        """Tell each rank of the group what this one is about to do, and hear what they are."""
        process, about = self._process, self._number("meeting") + self._calls
        mine = shorten(words_of(description).encode())
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank in others:
            process.mail.post(self.ranks[rank], about, mine)
        said = {self.rank: description}
        for rank in others:
            member = self.ranks[rank]
            letters: list[bytes] = []

            def come(member=member, letters=letters) -> bool:
                letter = process.mail.take(member, about)
                letters.extend([] if letter is None else [letter])
                return letter is not None

            self._lane.wait(come, Doing.MEET, member)
            same = letters[0] == mine
            said[rank] = description if same else letters[0].decode(errors="replace")
        return said if any(other != description for other in said.values()) else {}

    def _launch(self, channel, function: Callable, args: tuple) -> Work:
        self._check_owner()
        process = self._process
        own = type(self)(process, process.lanes[1], self.rank, self.ranks, self.device, channel)
        if self.device.type == "cuda":
            process.stream = process.stream or torch.cuda.Stream()
            function = OnStream(function, process.stream)
        return Launched(self._lane, process.launch(own, function, args), function)

    def _sub_comm(self, rank: int, ranks, channel) -> Comm:
        return type(self)(self._process, self._lane, rank, ranks, self.device, channel)
