"""The model: closed formulas for what communication and memory cost, to hold measurements against.

Sizes are bytes, times seconds, bandwidths bytes/s one way, alpha the latency in seconds of one
message. `n` is the number of ranks or devices; with one, nothing is sent and every time is 0.
"""

import math
from dataclasses import dataclass


def message_time(size, alpha, bandwidth):
    """The α–β model: one message of `size` bytes takes alpha + size / bandwidth seconds."""
    return alpha + size / bandwidth


def _check(n):
    if n < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {n}")
    return n


def _rounds(n):
    """⌈log2 n⌉: how often a tree of two branches doubles until it has n leaves."""
    return (_check(n) - 1).bit_length()


# --- all-reduce by hand, as chapter 03 writes it -----------------------------------------------


def star_time(n, size, bandwidth, alpha=0.0):
    """Sum on one device and send back: n-1 copies in, one after another, then n-1 copies out.

    All of them share the wires of the summing device.
    """
    return 2 * (_check(n) - 1) * message_time(size, alpha, bandwidth)


def cpu_time(n, size, bandwidth, alpha=0.0):
    """Sum on the CPU: n copies up the one link that all devices share, then n copies down."""
    return 2 * n * message_time(size, alpha, bandwidth) if _check(n) > 1 else 0.0


def sharded_time(n, size, bandwidth, alpha=0.0):
    """Cut in n parts, part i summed on device i: 2(n-1) parts in and out over every device's wires.

    All wires are busy in both directions all the time, so it takes as long as the ring.
    """
    return ring_time(n, size, bandwidth, alpha)


# --- all-reduce algorithms in the α–β model ----------------------------------------------------


def ring_time(n, size, bandwidth, alpha=0.0):
    """Ring all-reduce of n parts: 2(n-1) steps, each a message of size / n.

    Patarasuk and Yuan, 2009: no algorithm sends fewer bytes a rank.
    """
    return 2 * (_check(n) - 1) * message_time(size / n, alpha, bandwidth)


def unchunked_ring_time(n, size, bandwidth, alpha=0.0):
    """A ring that passes whole tensors on: one rank sends at a time, 2(n-1) messages of `size`."""
    return 2 * (_check(n) - 1) * message_time(size, alpha, bandwidth)


def halving_doubling_time(n, size, bandwidth, alpha=0.0):
    """Recursive halving, then doubling: 2 log2(n) messages and the bytes of the ring.

    Raises ValueError if n is no power of two.
    """
    if _check(n) & (n - 1):
        raise ValueError(f"recursive halving needs a power of two of ranks, not {n}")
    return 2 * _rounds(n) * alpha + 2 * (n - 1) / n * size / bandwidth


def tree_time(n, size, bandwidth, alpha=0.0):
    """Reduce, then broadcast, whole tensors on a binomial tree: 2⌈log2 n⌉ messages of `size`."""
    return 2 * _rounds(n) * message_time(size, alpha, bandwidth)


def double_tree_time(n, size, bandwidth, alpha=0.0):
    """Two pipelined binary trees, each for half of the data.

    About 2 log2(n) alpha + 2 size / bandwidth: Sanders, Speck and Träff, 2009; the cost of filling
    the pipeline is left out.
    """
    if _check(n) == 1:
        return 0.0
    return 2 * _rounds(n) * alpha + 2 * size / bandwidth


def hierarchical_time(machines, per_machine, size, inside, network, alpha=0.0):
    """Reduce-scatter in each machine, all-reduce between machines, all-gather in each machine.

    All ranks of a machine share its link of `network` bytes/s, each with its part of the tensor;
    alpha is the latency of every message.
    """
    return ring_time(per_machine, size, inside, alpha) + ring_time(machines, size, network, alpha)


def least_messages(n):
    """⌈log2 n⌉: no all-reduce gets by with fewer messages in a row."""
    return _rounds(n)


def least_bytes(n, size):
    """2 (n-1)/n size: no all-reduce sends fewer bytes a rank."""
    return 2 * (_check(n) - 1) / n * size


def best_time(n, size, bandwidth, alpha=0.0):
    """Lower bound of any all-reduce: the larger of its bounds for messages and for bytes."""
    return max(least_messages(n) * alpha, least_bytes(n, size) / bandwidth)


# --- all-reduce algorithms, round by round -----------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One round of an algorithm: `messages` ranks send `share` of the tensor, all at once.

    `adds` says whether those who receive add it to their own values.
    """

    messages: int
    share: float
    adds: bool


def star_rounds(n):
    """Everyone to rank 0 in turn, and back."""
    return [Round(1, 1, True)] * (n - 1) + [Round(1, 1, False)] * (n - 1)


def tree_rounds(n):
    """Up a binomial tree, where pairs of ranks lie 1, 2, 4, … apart, and down again."""
    pairs = [len(range(0, n - 2**k, 2 ** (k + 1))) for k in range(least_messages(n))]
    return [Round(p, 1, True) for p in pairs] + [Round(p, 1, False) for p in reversed(pairs)]


def ring_rounds(n):
    """Everyone to its neighbour: n - 1 rounds of adding, n - 1 of passing on."""
    return [Round(n, 1 / n, True)] * (n - 1) + [Round(n, 1 / n, False)] * (n - 1)


def halving_doubling_rounds(n):
    """Halves, quarters, … are exchanged and added, then passed back.

    The ranks above the largest power of two hand theirs to another first and get the sum last.
    """
    power = 1 << (n.bit_length() - 1)
    shares = [2.0**-k for k in range(1, power.bit_length())]
    halving = [Round(power, share, True) for share in shares]
    doubling = [Round(power, share, False) for share in reversed(shares)]
    extra = n - power
    before, after = ([Round(extra, 1, adds)] if extra else [] for adds in (True, False))
    return before + halving + doubling + after


def rounds_time(rounds, size, message, add=None):
    """Seconds of an algorithm, round after round.

    `message(bytes, at_once)` and `add(bytes, at_once)` give the seconds of a message and of an
    addition while so many ranks do the same; additions are free without `add`.
    """
    total = 0.0
    for r in rounds:
        total += message(r.share * size, r.messages)
        if r.adds and add is not None:
            total += add(r.share * size, r.messages)
    return total


# --- parameter server ---------------------------------------------------------------------------


def parameter_server_time(workers, servers, size, bandwidth):
    """Every worker pushes `size` bytes, then every worker pulls them: O(workers / servers).

    Each server keeps 1/servers of the values, and all workers share its wire. Beyond as many
    servers as workers the workers' own wires decide.
    """
    return 2 * max(_check(workers) / _check(servers), 1) * size / bandwidth


def largest_stale_rate(delay):
    """2 sin(π / (2(2d + 1))): gradient descent with gradients d updates old is stable below it.

    The learning rate times the curvature must be less: 2, 1, .618, .445, … for d = 0, 1, 2, 3, …
    """
    if delay < 0:
        raise ValueError(f"a delay is a number of updates, at least 0, not {delay}")
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


# --- pipelines ---------------------------------------------------------------------------------

# Of p equal stages and m equal micro-batches; `forward` and `backward` are a stage's seconds for
# one micro-batch, and messages take no time.


def naive_pipeline_time(p, m, forward, backward):
    """One micro-batch at a time through p stages, of which one works at a time."""
    return _check(p) * m * (forward + backward)


def pipeline_time(p, m, forward, backward, chunks=1):
    """GPipe and 1F1B: m rounds, and p - 1 to fill and drain; a chunk's rounds are that shorter.

    With several chunks a stage (interleaved 1F1B) m must be a multiple of p.
    """
    return (m + (_check(p) - 1) / chunks) * (forward + backward)


def pipeline_bubble(p, m, chunks=1):
    """The bubble of GPipe, 1F1B and interleaved 1F1B over the ideal time: (p - 1) / (v m)."""
    return (_check(p) - 1) / (chunks * m)


def zero_bubble_time(p, m, forward, backward_input, backward_weight):
    """ZB-H1 for m ≥ p and three equal parts: a bubble of (p - 1)(F + B - W), a third of 1F1B's."""
    work = m * (forward + backward_input + backward_weight)
    return work + (_check(p) - 1) * (forward + backward_input - backward_weight)


# --- reporting bandwidth -----------------------------------------------------------------------

# Bytes that each rank must at least send (or receive), as a multiple of the algorithm's size:
# nccl-tests, PERFORMANCE.md. The size is that of the whole tensor, not of a rank's share.
BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def algorithm_bandwidth(size, seconds):
    """algbw: bytes of the tensor per second, whatever the wires did."""
    return size / seconds


def bus_bandwidth(size, seconds, n, collective="all_reduce"):
    """busbw: algbw times the collective's factor; comparable with the wires' speed for any n.

    Raises ValueError for an unknown collective.
    """
    if collective not in BUS_FACTORS:
        raise ValueError(f"no collective {collective!r}; known are {', '.join(BUS_FACTORS)}")
    return algorithm_bandwidth(size, seconds) * BUS_FACTORS[collective](_check(n))


# --- memory ------------------------------------------------------------------------------------

# Values of optimizer state a parameter: momentum's running mean, Adam's two moments.
OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2}


def bytes_per_parameter(optimizer="sgd", bytes_per_value=4):
    """Bytes a trained parameter takes with its gradient and optimizer state: 8, 12 or 16 in fp32.

    `optimizer` is "sgd", "momentum" or "adam", else ValueError. Activations come on top.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise ValueError(f"no optimizer {optimizer!r}; known are {', '.join(OPTIMIZER_STATES)}")
    return bytes_per_value * (2 + OPTIMIZER_STATES[optimizer])


def training_bytes(parameters, optimizer="sgd", bytes_per_value=4):
    """Bytes of so many parameters, their gradients and optimizer state; activations on top."""
    return parameters * bytes_per_parameter(optimizer, bytes_per_value)


# --- issuing work ------------------------------------------------------------------------------


def blocking_time(n, issue, execute, fetch):
    """n operations, each issued, run and its result fetched before the next: n(t1 + t2 + t3)."""
    return n * (issue + execute + fetch)


def asynchronous_time(n, issue, execute, fetch):
    """The same, issued ahead and fetched once at the end: t1 + n·t2 + t3 where t2 ≥ t1."""
    if n == 0:
        return 0.0
    return issue + (n - 1) * max(issue, execute) + execute + fetch
