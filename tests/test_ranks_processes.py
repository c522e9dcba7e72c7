"""Ranks as processes: how they start, what comes back, and that every failure leaves nothing."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cloudpickle
import nbformat
import psutil
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from torch.utils.data import DataLoader, TensorDataset

from utils.ranks import DeadlockError, RankError, run
from utils.ranks.shared import shared_memory_all_reduce

SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
TRANSPORTS = ("gloo", "shared")

# Ranks get these programs as they get those of a notebook, and import nothing that only tests need.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def on_ranks(program, ranks=2, *args, **options):
    return run(program, ranks=ranks, on="processes", args=args, **{"timeout": 60, **options})


def traces():
    """The processes that runs of this process have now."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            own_server = process.parent().pid == os.getpid()
            if process.status() != psutil.STATUS_ZOMBIE and not (
                own_server and any(name in command for name in SERVERS)
            ):
                found.add((process.pid, command[:80]))
    return found


def folders(pid):
    """The folders that runs of a process have now."""
    places = "/dev/shm", tempfile.gettempdir()
    return [path for place in places for path in Path(place).glob(f"ranks-{pid}-*")]


@contextlib.contextmanager
def ends(within=5, after=0):
    """What happens inside takes so long at most, and leaves no process and no folder."""
    slow = slowness()
    before = traces()
    began = time.perf_counter()
    yield
    took = time.perf_counter() - began - after
    assert took < within * max(slow, slowness()), f"took {took:.1f} s"
    deadline = time.monotonic() + 5
    while (left := traces() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left
    assert not folders(os.getpid())


def slowness():
    """How many times as long as on a machine with nothing else to do things take: at least 1."""
    on_ranks(lambda comm: None, 2)  # the server of processes is up
    began = time.perf_counter()
    on_ranks(lambda comm: None, 2)
    return max(1, (time.perf_counter() - began) / 0.2)


# --- values -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    number: int
    tensor: torch.Tensor


def test_values_of_all_sizes_come_back():
    def program(comm, size):
        big = torch.arange(size, dtype=torch.float32) + comm.rank
        return {"big": big, "pair": Pair(comm.rank, big[:3]), "list": [(1, None), {"a": big[-1:]}]}

    for rank, value in enumerate(on_ranks(program, 2, 2_500_000).values):  # 10 MB each
        assert value["big"].numel() == 2_500_000 and value["big"][-1] == 2_499_999 + rank
        assert isinstance(value["pair"], Pair) and value["pair"].number == rank
        assert value["list"][1]["a"].item() == 2_499_999 + rank
    huge = on_ranks(lambda comm: torch.ones(50_000_000 * comm.rank), 2).values  # 200 MB
    assert [tensor.numel() for tensor in huge] == [0, 50_000_000] and huge[1][-1] == 1


def test_large_arguments_are_copies():
    given = torch.ones(5_000_000)

    def program(comm, tensor):
        tensor += comm.rank
        return tensor[0].item()

    assert on_ranks(program, 3, given).values == [1.0, 2.0, 3.0]
    assert given.unique().tolist() == [1.0]


def test_what_cannot_be_copied_is_named():
    with pytest.raises(RankError, match="rank 0 raised TypeError: the value that the program"):
        on_ranks(lambda comm: threading.Lock(), 1)
    lock = threading.Lock()
    with ends(), pytest.raises(TypeError, match="<lambda> or its arguments cannot be copied"):
        on_ranks(lambda comm: lock, 2)


def test_prints_in_rank_order_and_nothing_else(capfd):
    def program(comm, later):
        time.sleep(0.1 * (comm.world_size - comm.rank))
        print("rank", comm.rank, "ä")
        subprocess.run(["echo", f"echo {comm.rank}"], check=True)
        print(end="no newline")

    result = on_ranks(program, 3, None)
    assert result.prints == [f"rank {r} ä\necho {r}\nno newline" for r in range(3)]
    output = capfd.readouterr()
    assert output.err == ""
    lines = [(r, line) for r in range(3) for line in (f"rank {r} ä", f"echo {r}", "no newline")]
    assert output.out.splitlines() == [f"[rank {rank}] {line}" for rank, line in lines]


def test_prints_before_a_failure_are_shown(capsys):
    def program(comm):
        print("before")
        comm.barrier()
        raise ValueError

    with pytest.raises(RankError):
        on_ranks(program, 2)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] before", "[rank 1] before"]


def test_ranks_share_the_cores_and_leave_the_parents_threads():
    before = torch.get_num_threads()
    for ranks in (1, 2, 4):
        threads = on_ranks(lambda comm: torch.get_num_threads(), ranks).values
        assert sum(threads) <= max(len(os.sched_getaffinity(0)), ranks)
    assert torch.get_num_threads() == before


def test_one_rank():
    def program(comm):
        x = torch.ones(2)
        comm.all_reduce(x)
        shared_memory_all_reduce(comm, x)
        comm.barrier()
        return comm.rank, comm.world_size, x

    for transport in TRANSPORTS:
        (value,) = on_ranks(program, 1, transport=transport).values
        assert value[:2] == (0, 1) and value[2].tolist() == [1.0, 1.0]


# --- starting -----------------------------------------------------------------------------------


def total(comm):
    x = torch.tensor([comm.rank + 1.0])
    comm.all_reduce(x)
    return x.item()


def test_again_and_again_and_beside_each_other():
    with ends(20):
        for _ in range(3):
            assert on_ranks(total, 2).values == [3.0, 3.0]
        results = {}
        threads = [
            threading.Thread(target=lambda n=n: results.update({n: on_ranks(total, n).values}))
            for n in (2, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {2: [3.0] * 2, 3: [6.0] * 3}
    assert sys.modules["__main__"].__name__ == "__main__" and not torch.distributed.is_initialized()


def test_default_ports_that_are_taken_do_not_matter():
    with contextlib.ExitStack() as stack:
        for port in (29500, 12355):
            taken = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # taken by somebody else: as good
                taken.bind(("127.0.0.1", port))
                taken.listen()
        assert on_ranks(total, 2).values == [3.0, 3.0]


def test_only_this_machine_can_connect(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    monkeypatch.setenv("HOSTNAME", "no-such-host")

    def program(comm):
        comm.barrier()
        connections = psutil.Process().net_connections(kind="inet")
        return {connection.laddr.ip for connection in connections}, os.environ["MASTER_ADDR"]

    for addresses, environment in on_ranks(program, 2).values:
        assert addresses <= {"127.0.0.1", "::1"} and addresses
        assert environment == "no.such.host.invalid"  # the parent's environment is there


def test_after_work_that_a_fork_does_not_survive(monkeypatch):
    """OpenMP threads in the parent, CUDA in use: a forked process would hang, or refuse CUDA."""
    (torch.randn(600, 600) @ torch.randn(600, 600)).sum()
    monkeypatch.setattr(torch.cuda, "_initialized", True)

    def program(comm):
        product = (torch.randn(600, 600) @ torch.randn(600, 600)).sum()
        return product.isfinite().item(), torch.cuda.is_initialized()

    assert on_ranks(program, 2).values == [(True, False)] * 2


def test_a_run_inside_a_rank_is_possible_on_virtual_ranks():
    def program(comm):
        return run(total, ranks=3, on="virtual").values

    assert on_ranks(program, 2).values == [[6.0] * 3] * 2


def test_torch_distributed_is_there():
    def program(comm):
        x = torch.ones(3)
        torch.distributed.all_reduce(x)
        return x.tolist(), torch.distributed.get_rank()

    assert on_ranks(program, 2).values == [([2.0] * 3, rank) for rank in range(2)]


# --- failing ------------------------------------------------------------------------------------


def raises(comm):
    comm.barrier()
    if comm.rank == 1:
        raise KeyError("lost")
    comm.barrier()


def is_killed(comm):
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.recv(torch.ones(1), 1)


def exits(comm):
    if comm.rank == 1:
        sys.exit(3)
    comm.barrier()


def exits_at_once(comm):
    if comm.rank == 1:
        print("going", flush=True)
        os._exit(4)
    comm.barrier()


def fails_in_a_hook(comm):
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: 1 / 0)
    (x * 2).backward()


def fails_in_the_background(comm):
    def stumble(own):
        own.barrier()
        raise OSError("in the background")

    comm.launch(stumble if comm.rank else lambda own: own.barrier())
    comm.recv(torch.ones(1), 1 - comm.rank)


def cleans_up(comm):
    try:
        raises(comm)
    finally:
        comm.barrier()


FILE = "test_ranks_processes.py"
FAILURES = [
    (raises, ["rank 1 raised KeyError: 'lost'", f'of raises in {FILE}: raise KeyError("lost")']),
    (is_killed, ["rank 1 was killed by SIGKILL"]),
    (exits, ["rank 1 raised SystemExit: 3", f"of exits in {FILE}: sys.exit(3)"]),
    (exits_at_once, ["rank 1 ended without a report (exit code 4)"]),
    (fails_in_a_hook, ["raised ZeroDivisionError", "of <lambda> in", "gradient: 1 / 0"]),
    (fails_in_the_background, ["rank 1 raised OSError: in the background", "of stumble in"]),
    (cleans_up, ["rank 1 raised KeyError: 'lost'", "of raises in"]),
]


@pytest.mark.parametrize("program, words", FAILURES, ids=[f.__name__ for f, _ in FAILURES])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_fails_ends_all(program, words, transport):
    with ends(), pytest.raises(RankError) as caught:
        on_ranks(program, 3 if program is not fails_in_the_background else 2, transport=transport)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "onnection" not in str(caught.value)


def test_a_rank_that_hangs_is_ended_at_the_timeout():
    def program(comm):
        if comm.rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(0.01)
        comm.barrier()

    with ends(after=1), pytest.raises(RankError) as caught:
        on_ranks(program, 2, timeout=1)
    text = str(caught.value)
    assert "did not end within 1 s" in text and not isinstance(caught.value, DeadlockError)
    assert "rank 0 waits in a collective call for rank 1" in text
    assert "rank 1 is at\n" in text and "of program in test_ranks_processes.py: time.sleep" in text


def test_a_rank_stopped_by_a_signal_is_ended_at_the_timeout():
    def program(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with ends(after=1), pytest.raises(RankError, match="did not end within 1 s"):
        on_ranks(program, 2, timeout=1)


def polite(comm):
    comm.send(torch.ones(4), 1 - comm.rank)
    comm.recv(torch.ones(4), 1 - comm.rank)


def ends_early(comm):
    if comm.rank:
        comm.recv(torch.ones(2, dtype=torch.int64), 0)


def is_missing(comm):
    if comm.rank == 0:
        comm.barrier()


def waits_for_any(comm):
    if comm.rank == 0:
        comm.wait_any([comm.irecv(torch.ones(1), 1), comm.irecv(torch.ones(1), 1, tag=1)])


def waits_in_the_background(comm):
    comm.launch(lambda own: own.recv(torch.ones(1), 1 - own.rank)).wait()


STUCK = [
    (polite, ["rank 0 waits to send 4 float32 values to rank 1\n", "of polite in"]),
    (ends_early, ["rank 1 waits to receive 2 int64 values from rank 0, which has ended\n"]),
    (is_missing, ["rank 0 waits in a collective call for rank 1, which has ended", "comm.barrier"]),
    (waits_for_any, ["rank 0 waits for the first message from any of several ranks"]),
    (waits_in_the_background, ["rank 0 waits for what it launched", "rank 1 waits to receive 1 "]),
]


@pytest.mark.parametrize("program, words", STUCK, ids=[f.__name__ for f, _ in STUCK])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_deadlock_is_seen(program, words, transport):
    with ends(), pytest.raises(DeadlockError) as caught:
        on_ranks(program, 2, transport=transport)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_slow_rank_is_no_deadlock():
    def program(comm):
        if comm.rank == 0:
            time.sleep(5)
        comm.barrier()
        return True

    assert on_ranks(program, 2).values == [True, True]


@pytest.mark.parametrize("fail", [False, True])
def test_what_a_rank_has_started_ends_with_it(fail):
    def program(comm):
        data = TensorDataset(torch.arange(64.0))
        loader = DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True)
        found = sum(batch.sum().item() for (batch,) in loader)
        subprocess.Popen(["sleep", "1000"])
        comm.barrier()
        if fail and comm.rank == 0:
            raise ValueError("after loading")
        return found

    with ends(20):
        if fail:
            with pytest.raises(RankError, match="after loading"):
                on_ranks(program, 2)
        else:
            assert on_ranks(program, 2).values == [2016.0] * 2
    commands = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])]
    assert ["sleep", "1000"] not in commands


# --- the parent is interrupted, or killed --------------------------------------------------------

PARENT = """
import os, signal, sys, threading, time
import torch
from utils.ranks import run

def stubborn(comm, path):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(120)

def total(comm):
    x = torch.ones(1)
    comm.all_reduce(x)
    return x.item()

if __name__ == "__main__":
    how, path = sys.argv[1:]
    run(total, ranks=2, on="processes")
    if how == "interrupt":
        def interrupt():
            while not os.path.exists(path) or open(path).read().count("\\n") < 2:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            print(time.time(), flush=True)
        threading.Thread(target=interrupt, daemon=True).start()
    try:
        run(stubborn, ranks=2, on="processes", args=(path,))
    except KeyboardInterrupt:
        print(time.time(), flush=True)
        print(run(total, ranks=2, on="processes").values)
"""


def gone(pids):
    """Wait until processes have ended; whether they have within 5 seconds."""
    deadline = time.monotonic() + 5 * slowness()
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(psutil.pid_exists, pids))


def test_an_interrupt_ends_ranks_that_ignore_it(tmp_path):
    script, path = tmp_path / "parent.py", tmp_path / "pids"
    script.write_text(PARENT)
    done = subprocess.run(
        [sys.executable, script, "interrupt", path], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    sent, ended, values = done.stdout.splitlines()
    assert float(ended) - float(sent) < 5 * slowness() and values == "[2.0, 2.0]"
    assert gone([int(pid) for pid in path.read_text().split()])


def test_when_the_parent_is_killed_its_ranks_end(tmp_path):
    script, path = tmp_path / "parent.py", tmp_path / "pids"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script, "kill", path])
    deadline = time.monotonic() + 100
    while not path.exists() or path.read_text().count("\n") < 2:
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.05)
    assert folders(parent.pid)
    family = [parent.pid, *(child.pid for child in psutil.Process(parent.pid).children(True))]
    parent.kill()
    parent.wait()
    assert gone([*family, *(int(pid) for pid in path.read_text().split())])
    assert not folders(parent.pid)


# --- in notebooks -------------------------------------------------------------------------------

CELLS = [
    "import torch, time, os, signal, threading\nfrom utils.ranks import run, RankError",
    "SCALE = 10\nclass Thing:\n    def __init__(self, x):\n        self.x = x\n"
    "def helper(x):\n    return Thing(x * SCALE)",
    "def program(comm, k):\n    x = torch.ones(2) * k\n    comm.all_reduce(x)\n"
    "    print('rank', comm.rank)\n    return helper(x)",
    "for _ in range(3):\n    result = run(program, ranks=2, on='processes', args=(3,))\n"
    "    print([value.x.tolist() for value in result.values], type(result.values[0]) is Thing)",
    "def make(n):\n    return lambda comm: (n, comm.rank)\n"
    "print(run(make(7), ranks=2, on='processes').values)\n"
    "print(run(make(7), ranks=2, on='virtual').values)",
    "(torch.randn(600, 600) @ torch.randn(600, 600)).sum().item() > 0\nfound = {}\n"
    "threads = [threading.Thread(target=lambda n=n: found.update("
    "{n: run(make(n), ranks=2, on='processes').values})) for n in range(2)]\n"
    "[t.start() for t in threads], [t.join() for t in threads]\nprint(sorted(found.items()))",
    "def wrong(comm):\n    comm.barrier()\n    if comm.rank == 1:\n        y = 1 / 0\n"
    "    comm.barrier()\n"
    "for on in ('processes', 'virtual'):\n    try:\n        run(wrong, ranks=2, on=on)\n"
    "    except RankError as error:\n        print(error)",
    "def stubborn(comm):\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    time.sleep(100)\n"
    "threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()\ntry:\n"
    "    run(stubborn, ranks=2, on='processes')\n"
    "except KeyboardInterrupt:\n    print('interrupted')\n"
    "print(run(make(1), ranks=2, on='processes').values)",
    "def endless(comm):\n    comm.barrier()\n    while True:\n        pass\n"
    "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\ntry:\n"
    "    run(endless, ranks=2, on='virtual')\n"
    "except KeyboardInterrupt:\n    print('interrupted')\n"
    "print([t.name for t in threading.enumerate() if t.name.startswith('rank')])",
]
FAILED = "rank 1 raised ZeroDivisionError: division by zero\n    line 4 of wrong: y = 1 / 0\n"
OUTPUTS = [
    "", "", "",
    "[rank 0] rank 0\n[rank 1] rank 1\n[[60.0, 60.0], [60.0, 60.0]] True\n" * 3,
    "[(7, 0), (7, 1)]\n" * 2,
    "[(0, [(0, 0), (0, 1)]), (1, [(1, 0), (1, 1)])]\n",
    FAILED * 2,
    "interrupted\n[(1, 0), (1, 1)]\n",
    "interrupted\n[]\n",
]  # fmt: skip


def execute(number, found):
    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS])
    client = NotebookClient(notebook, timeout=120, kernel_name="python3")
    with contextlib.suppress(Exception) if number < 0 else contextlib.nullcontext():
        client.execute()
    found[number] = nbformat.from_dict(client.nb)


def test_programs_typed_in_cells_of_two_notebooks_at_once():
    found = {}
    threads = [threading.Thread(target=execute, args=(number, found)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for notebook in found.values():
        for cell, expected in zip(notebook.cells, OUTPUTS):
            outputs = [o for o in cell.outputs if o.output_type == "stream"]
            assert [o for o in cell.outputs if o.get("name") == "stderr"] == []
            assert "".join(o.text for o in outputs) == expected, cell.source
    assert len(found) == 2


# --- messages of every kind ---------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8]
LAYOUTS = ["contiguous", "column", "transposed", "reversed"]
messages = st.fixed_dictionaries(
    {
        "size": st.sampled_from([0, 1, 2, 3, 5, 63, 64, 4095, 4097, 131_073, 600_001]),
        "dtype": st.integers(0, len(DTYPES) - 1),
        "send": st.sampled_from(LAYOUTS),
        "recv": st.sampled_from(LAYOUTS[:3]),
        "tag": st.integers(0, 3),
    }
)
rounds = st.lists(messages, min_size=1, max_size=6).flatmap(
    lambda sent: st.tuples(st.just(sent), st.permutations(range(len(sent))), st.booleans())
)


def laid_out(values, layout):
    """The same values in a row, a column of a matrix, or a turned matrix."""
    if layout == "column":
        return torch.stack([values, values], dim=1)[:, 1]
    if layout == "transposed" and values.numel() % 3 == 0:
        return values.view(3, -1).t().contiguous().t()
    if layout == "reversed":
        return values.flip(0)
    return values.clone()


def values_of(message, rank, number):
    base = torch.arange(message["size"]) * 7 + 3 * rank + number
    return (base % 11).to(DTYPES[message["dtype"]])


def exchange_all(comm, plan):
    """Each rank sends every message to the next one and gets those of the one before."""
    n, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    wrong = []
    for number, (sent, order, receive_first) in enumerate(plan):
        boxes = [
            laid_out(torch.zeros(m["size"], dtype=DTYPES[m["dtype"]]), m["recv"]) for m in sent
        ]

        def send(sent=sent, number=number):
            return [
                comm.isend(laid_out(values_of(m, rank, number), m["send"]), right, tag=m["tag"])
                for m in sent
            ]

        def receive(sent=sent, boxes=boxes, order=order):
            # In any order among tags; messages with one tag come in the order of sending.
            by_tag = {}
            for i, m in enumerate(sent):
                by_tag.setdefault(m["tag"], []).append(i)
            works = []
            for i in order:
                first = by_tag[sent[i]["tag"]].pop(0)
                works.append(comm.irecv(boxes[first], left, tag=sent[i]["tag"]))
            return works

        works = [*receive(), *send()] if receive_first else [*send(), *receive()]
        for work in reversed(works):
            work.wait()
        for m, box in zip(sent, boxes):
            expected = laid_out(values_of(m, left, number), m["send"])
            if not torch.equal(box.reshape(-1), expected.reshape(-1)):
                wrong.append((number, m))
        total = torch.full((len(sent),), rank + 1.0)
        shared_memory_all_reduce(comm, total)
        if total.unique().tolist() != [n * (n + 1) / 2]:
            wrong.append((number, "shared_memory_all_reduce", total))
    return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 3])
@settings(
    max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large,
                           HealthCheck.large_base_example],
)  # fmt: skip
@given(plan=st.lists(rounds, min_size=15, max_size=25))
def test_messages_of_every_kind(transport, ranks, plan):
    assert on_ranks(exchange_all, ranks, plan, transport=transport).values == [[]] * ranks


def reduce_all(comm, cases):
    """The shared-memory all-reduce against a plain sum; returns what was wrong."""
    wrong = []
    for size, dtype, op, layout in cases:

        def make(rank, size=size, dtype=dtype, layout=layout):
            generator = torch.Generator().manual_seed(rank)
            values = torch.randint(-5, 6, (size,), generator=generator).to(dtype)
            return laid_out(values, layout)

        tensor = make(comm.rank)
        shared_memory_all_reduce(comm, tensor, op)
        stacked = torch.stack([make(rank) for rank in range(comm.world_size)])
        if op == "sum":
            expected = stacked.any(0) if dtype == torch.bool else stacked.sum(0).to(dtype)
        elif op == "avg":
            expected = (stacked / comm.world_size).sum(0)
        else:
            expected = stacked.amax(0) if op == "max" else stacked.amin(0)
        if not torch.allclose(tensor.double(), expected.double(), atol=0.1):
            wrong.append((size, dtype, op, layout))
        same = tensor.contiguous().view(-1).clone().double()
        comm.all_reduce(same, op="max")
        if not torch.equal(same, tensor.contiguous().view(-1).double()):
            wrong.append(("ranks differ", size, dtype, op))
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shared_memory_all_reduce(ranks):
    sizes = [0, 1, 2, 3, 7, 1000, 524_288, 524_289, 1_700_003]
    cases = [(size, torch.float32, op, "contiguous") for size in sizes for op in ("sum", "max")]
    cases += [(size, dtype, "sum", layout) for size in (0, 3, 1001)
              for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool)
              for layout in ("contiguous", "column")]  # fmt: skip
    cases += [(6, torch.float32, op, "transposed") for op in ("avg", "min")]
    assert on_ranks(reduce_all, ranks, cases).values == [[]] * ranks


def test_shared_memory_all_reduce_refuses():
    def sizes(comm):
        shared_memory_all_reduce(comm, torch.ones(2 + comm.rank))

    with pytest.raises(RankError, match=r"rank 0: shared_memory_all_reduce\(\(2,\) float32"):
        on_ranks(sizes, 2)

    def group(comm):
        shared_memory_all_reduce(comm.group([0, 1]) if comm.rank < 2 else comm, torch.ones(2))

    with pytest.raises(RankError, match="needs run.*on='processes'.*the whole world"):
        on_ranks(group, 3)
    with pytest.raises(RankError, match="these ranks share no memory"):
        run(lambda comm: shared_memory_all_reduce(comm, torch.ones(1)), ranks=2, on="virtual")


# --- time ---------------------------------------------------------------------------------------


def test_the_timeline_is_measured():
    def program(comm):
        began = time.perf_counter()
        while time.perf_counter() < began + 0.2:  # computes
            pass
        if comm.rank == 0:
            time.sleep(0.3)  # the others wait for it
        comm.barrier()
        comm.all_reduce(torch.ones(250_000))

    for transport in TRANSPORTS:
        timeline = on_ranks(program, 2, transport=transport).timeline
        assert not timeline.simulated and timeline.devices == ["rank0", "rank1"]
        assert "processes" in timeline.title
        for rank in (0, 1):
            busy, exposed = timeline.busy(rank), timeline.exposed(rank)
            idle = timeline.idle(rank)
            assert busy + exposed + idle == pytest.approx(timeline.duration, rel=1e-6)
            assert timeline.bytes_sent(rank) >= 1_000_000
            assert all(0 <= e.start and e.end <= timeline.duration + 1e-3 for e in timeline.events)
        assert timeline.busy(0) > 0.45
        assert 0.15 < timeline.busy(1) < timeline.duration - 0.2
        assert 0.5 < timeline.duration < 5 * slowness()


def test_without_a_record_there_are_no_events():
    result = on_ranks(total, 2, record=False)
    assert result.values == [3.0, 3.0] and result.timeline.events == []
    assert result.timeline.duration > 0


def test_wrong_transport():
    with pytest.raises(ValueError, match="it can be gloo or shared"):
        on_ranks(total, 2, transport="pigeon")


def test_all_ranks_have_one_clock():
    def program(comm):
        if comm.rank == 1:
            time.sleep(0.2)
        comm.barrier()
        return comm.time()

    times = on_ranks(program, 3).values
    assert min(times) > 0.2 and max(times) - min(times) < 0.05 * slowness()
