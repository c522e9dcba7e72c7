"""Ranks on GPUs, as far as can be tried without any: what is refused, the order of messages, the
timeline."""

import collections
import contextlib
import itertools
import json

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from utils import ranks
from utils.ranks import gpus, nccl, run
from utils.ranks.result import Result
from utils.timeline import Timeline


@pytest.mark.parametrize("found, words", [(0, "has none"), (1, "has 1"), (3, "has 3")])
def test_too_few_gpus(monkeypatch, found, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    with pytest.raises(RuntimeError) as caught:
        run(print, ranks=4, on="gpus")
    text = str(caught.value)
    assert "4 ranks need 4 GPUs, and this machine " + words in text
    assert "on='virtual'" in text and "on='processes'" in text


def test_no_nccl(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(RuntimeError, match="built without NCCL"):
        run(print, ranks=2, on="gpus")


@pytest.mark.parametrize(
    "asked, found, place",
    [(None, 4, "gpus"), (None, 1, "virtual"), ("virtual", 4, "virtual"), ("cpu", 4, "processes")],
)
def test_where_auto_runs(monkeypatch, asked, found, place):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.delenv("COURSE_DEVICES", raising=False)
    if asked:
        monkeypatch.setenv("COURSE_DEVICES", asked)
    for name in ("gpus", "processes", "virtual"):
        monkeypatch.setattr(
            ranks, f"run_{name}", lambda *args, name=name: Result([name], Timeline(), [])
        )
    assert run(print, ranks=4).values == [place]


# --- the order in which messages are given to NCCL ----------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Letters:
    """Both ends' mail in one process; letters arrive when they are read."""

    def __init__(self):
        self.boxes = collections.defaultdict(collections.deque)

    def of(self, rank, other):
        return _Mail(self.boxes, rank, other)


class _Mail:
    def __init__(self, boxes, rank, other):
        self.boxes, self.rank = boxes, rank
        self.incoming = {other: None}
        self.came = 0

    def post(self, dst, number, text):
        self.boxes[self.rank, dst, number].append(text)

    def take(self, src, number):
        box = self.boxes[src, self.rank, number]
        return box.popleft() if box else None

    def read(self):
        self.came += 1


class Stream:
    def wait_event(self, event):
        assert event.recorded


class Event:
    recorded = False

    def record(self):
        self.recorded = True


@pytest.fixture(scope="module")
def two_ends():
    """Makes two transports whose NCCL calls are noted: (rank, function, peer, size, channel)."""
    patch = pytest.MonkeyPatch()
    calls = []

    def note(name):
        def call(data, peer, group):
            calls.append((name, data.numel() // 4, group))
            return None

        return call

    counter = itertools.count()
    patch.setattr(dist, "new_group", lambda backend: ("upward", "downward")[next(counter) % 2])
    patch.setattr(dist, "isend", note("isend"))
    patch.setattr(dist, "irecv", note("irecv"))
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "current_stream", Stream)

    def make():
        calls.clear()
        letters = Letters()
        return [nccl.NcclTransport(letters.of(rank, 1 - rank), rank) for rank in (0, 1)], calls

    yield make
    patch.undo()


def on_gpu(size):
    return torch.zeros(size).as_subclass(OnGpu)


@given(
    tags=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(0, 3), max_size=40),
)
def test_both_sides_start_messages_in_one_order(two_ends, tags, order, steps):
    (first, second), calls = two_ends()
    sends = list(enumerate(tags, start=1))  # message i has i values
    by_tag = {tag: [i for i, t in sends if t == tag] for tag in tags}
    shuffled = tags[:]
    order.shuffle(shuffled)
    receives = [(by_tag[tag].pop(0), tag) for tag in shuffled]
    ends = []
    for step in [*steps, *[0] * len(tags), *[1] * len(tags), 2, 3, 2]:
        if step == 0 and sends:
            size, tag = sends.pop(0)
            ends.append(first.send(on_gpu(size), 1, tag))
        elif step == 1 and receives:
            size, tag = receives.pop(0)
            ends.append(second.recv(on_gpu(size), 0, tag))
        elif step == 2:
            first.progress()
        elif step == 3:
            second.progress()
    assert all(end.begun and end.is_completed() and not end.error for end in ends)
    sent = [size for name, size, _ in calls if name == "isend"]
    received = [size for name, size, _ in calls if name == "irecv"]
    assert sent == received and sorted(sent) == list(range(1, len(tags) + 1))
    assert {group for *_, group in calls} == {"upward"}


def test_each_direction_has_a_channel_of_its_own(two_ends):
    (first, second), calls = two_ends()
    first.send(on_gpu(1), 1, 7), second.send(on_gpu(2), 0, 7)
    first.recv(on_gpu(2), 1, 7), second.recv(on_gpu(1), 0, 7)
    for _ in range(2):
        first.progress(), second.progress()
    assert sorted(calls) == [
        ("irecv", 1, "upward"), ("irecv", 2, "downward"),
        ("isend", 1, "upward"), ("isend", 2, "downward"),
    ]  # fmt: skip


def test_sizes_that_differ_are_an_error_and_empty_messages_need_no_nccl(two_ends):
    (first, second), calls = two_ends()
    sending, empty = first.send(on_gpu(3), 1, 1), first.send(on_gpu(0), 1, 2)
    wrong, right = second.recv(on_gpu(2), 0, 1), second.recv(on_gpu(0), 0, 2)
    second.progress(), first.progress()
    assert wrong.error == "3 float32 values" and not sending.begun
    assert right.begun and empty.begun and not calls


def test_tensors_in_host_memory_go_by_gloo(two_ends):
    (first, _), calls = two_ends()
    with pytest.raises(TypeError):  # the real isend has a tag, the noted one has none
        first.send(torch.zeros(2), 1, 1)
    assert not calls


# --- the timeline -------------------------------------------------------------------------------


def profile(base, slices):
    return {
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": device, "tid": 7,
             "args": {"device": device}}
            for cat, name, ts, dur, device in slices
        ],
    }  # fmt: skip


def test_profiles_of_several_ranks_become_one_timeline(tmp_path):
    traces = [
        profile(10**18, [("kernel", "gemm", 100.0, 50.0, 0), ("kernel", "ncclSend", 160.0, 20, 0)]),
        profile(10**18 + 10**6, [("kernel", "gemm", -880.0, 30.0, 1)]),  # a ms later as its zero
    ]
    paths = [tmp_path / f"trace{rank}" for rank in range(3)]
    for path, trace in zip(paths, [*traces, {"traceEvents": []}]):
        path.write_text(json.dumps(trace))
    timeline = gpus.merge(paths, "3 × H200", 3)
    assert timeline.devices == ["gpu0", "gpu1", "gpu2"] and not timeline.simulated
    assert timeline.title == "measured on 3 × H200"
    assert [(e.name, e.devices) for e in timeline.events] == [
        ("gemm", (0,)), ("gemm", (1,)), ("ncclSend", (0,)),
    ]  # fmt: skip
    assert [e.start for e in timeline.events] == pytest.approx([0, 20e-6, 60e-6], abs=1e-6)
    assert timeline.busy("gpu0") == pytest.approx(50e-6) and timeline.busy("gpu2") == 0
    assert timeline.communication("gpu0") == pytest.approx(20e-6)
    assert gpus.merge([], "none", 2).events == []


def test_what_is_launched_has_a_stream_of_its_own(monkeypatch):
    """It comes after what was issued before the launch, and before what follows the wait."""
    log, current = [], ["main"]

    class LoggingStream:
        def __init__(self, name):
            self.name = name

        def wait_event(self, event):
            log.append((self.name, "waits for", event.where))

    class LoggingEvent:
        def record(self):
            self.where = current[-1], len(log)
            log.append((current[-1], "records"))

    @contextlib.contextmanager
    def stream(chosen):
        current.append(chosen.name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Event", LoggingEvent)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: LoggingStream(current[-1]))
    launched = nccl.OnStream(lambda *args: (current[-1], *args), LoggingStream("side"))
    assert launched(1, 2) == ("side", 1, 2) and current == ["main"]
    launched.join()
    assert log == [
        ("main", "records"),
        ("side", "waits for", ("main", 0)),
        ("side", "records"),
        ("main", "waits for", ("side", 2)),
    ]
