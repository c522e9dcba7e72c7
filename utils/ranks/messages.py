"""Messages between virtual ranks: two ends that find each other, then take time on the wires."""

from __future__ import annotations

from torch import Tensor

from ..vgpu import private
from ..vgpu.placing import block_of, place_of, span_of
from .scheduler import Fiber, Scheduler
from .work import Work


class Message(Work):
    """One end of a message."""

    __slots__ = ("scheduler", "tensor", "rank", "peer", "sends", "time", "turn", "place",
                 "span", "done", "end", "waiter", "error")  # fmt: skip

    def __init__(
        self, scheduler: Scheduler, tensor: Tensor, rank: int, peer: int, key, sends: bool
    ):
        self.scheduler = scheduler
        self.tensor = tensor
        self.rank, self.peer, self.sends = rank, peer, sends
        host = scheduler.machine.host
        block = block_of(tensor)
        if block is None:
            self.place, self.span = host, None
        else:
            self.place, self.span = place_of(tensor), span_of(tensor, block)
        self.time = host.clock = host.clock + self.place.launch
        self.done, self.end = False, 0
        self.waiter: Fiber | None = None
        self.error: ValueError | None = None
        if sends:
            # Of messages posted at one time, every rank's first goes before anyone's second.
            sender = scheduler.ranks[rank]
            self.turn = sender.sent
            sender.sent += 1
            find_other_end(scheduler, self, (rank, peer, key))
        else:
            find_other_end(scheduler, self, (peer, rank, key))

    def is_completed(self) -> bool:
        return self.done

    def _wait(self) -> None:
        wait_for(self.scheduler, (self,))

    def deliver(self, recv: Message) -> None:
        """Carry out a message: its bytes, its time on the wires, and wake who waits for it."""
        source, target = self.tensor, recv.tensor
        scheduler = self.scheduler
        if source.numel() != target.numel() or source.dtype != target.dtype:
            recv.error = ValueError(
                f"rank {self.rank} sends {words(source)} to rank {recv.rank}, which receives "
                f"{words(target)}; make the two equal"
            )
            if recv.waiter is not None:
                scheduler.wake(recv.waiter)
            return
        end = scheduler.machine.transfer(
            "message", source.nbytes, self.place, recv.place, self.span, recv.span,
            max(self.time, recv.time),
        )  # fmt: skip
        if type(target).__name__ != "FakeTensor":
            private.copy_bytes(source, target)
        for message in (self, recv):
            message.done, message.end = True, end
            fiber = message.waiter
            if fiber is not None:
                message.waiter = None
                scheduler.arrive(fiber, end)

    def describe(self) -> str:
        verb = "send {} to" if self.sends else "receive {} from"
        return f"{verb.format(words(self.tensor))} {self.scheduler.name(self.peer)}"


def wait_for(scheduler: Scheduler, messages: tuple[Message, ...]) -> None:
    """The running fiber waits until all these messages have been received."""
    fiber = scheduler.current
    missing = 0
    for message in messages:
        if message.error is not None:
            raise message.error
        if message.done:
            if message.end > fiber.host.clock:
                fiber.host.clock = message.end
        else:
            message.waiter = fiber
            missing += 1
    if missing:
        fiber.missing = missing
        scheduler.block(messages)
        for message in messages:
            if message.error is not None:
                raise message.error


def wait_for_any(scheduler: Scheduler, messages: list[Message]) -> int:
    """The running fiber waits until the first of these messages arrives; its position."""
    fiber = scheduler.current
    ends = [message.end for message in messages if message.done]
    if not ends or min(ends) > fiber.host.clock:
        under_way = [message for message in messages if not message.done]
        for message in under_way:
            message.waiter = fiber

        def why() -> str:
            peers = [scheduler.name(message.peer).removeprefix("rank ") for message in under_way]
            return f"waits for the first message from any of ranks {'; '.join(peers)}"

        fiber.missing = 0
        scheduler.block(why, min(ends, default=None))
        for message in under_way:
            message.waiter = None
            if message.error is not None:
                raise message.error
    done = [position for position, message in enumerate(messages) if message.done]
    return min(done, key=lambda position: messages[position].end)


def find_other_end(scheduler: Scheduler, message: Message, key: tuple) -> None:
    """Let one end of a message wait for the other or, if that is there, send both on their way."""
    posted = scheduler.posted
    waiting = posted.get(key)
    if waiting is None:
        posted[key] = [message]
        return
    if waiting[0].sends is message.sends:
        waiting.append(message)
        return
    other = waiting.pop(0)
    if not waiting:
        del posted[key]
    send, recv = (message, other) if message.sends else (other, message)
    time = max(send.time, recv.time)
    if send.span is not None and send.span.ready > time:
        time = send.span.ready
    scheduler.transfers.push(time, send.turn, (send, recv))


def words(tensor: Tensor) -> str:
    """A tensor's size in words, such as `3 float32 values`."""
    return f"{tensor.numel()} {str(tensor.dtype)[6:]} value{'s' * (tensor.numel() != 1)}"
