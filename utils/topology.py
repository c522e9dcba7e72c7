"""What machines are made of: chips, links and the servers that they form, with the ways between.

Rates are per second (FLOP/s, bytes/s), times in seconds, sizes in bytes. Link bandwidths are one
way: every link is full duplex, one wire in each direction. The presets stand in `hardware.py`.
"""

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Chip:
    """One processor with its memory, at the speed its maker states.

    `fp32` and `half` (fp16/bf16 with tensor cores; equal to fp32 where there are none) are dense
    FLOP/s, `memory` bytes, `bandwidth` bytes/s, `watts` the maximum. `compute_efficiency` and
    `memory_efficiency` are the shares of the peaks that real kernels reach; `launch` is the time in
    seconds that the host spends issuing one kernel (10 µs: Dive into Deep Learning).
    """

    name: str
    fp32: float
    half: float
    memory: int
    bandwidth: float
    watts: float
    compute_efficiency: float = 0.8
    memory_efficiency: float = 0.9
    launch: float = 10e-6
    source: str = field(default="", repr=False)


@dataclass(frozen=True)
class Link:
    """A full-duplex connection of two nodes: `bandwidth` bytes/s each way, `latency` seconds.

    Nodes are called gpu0.., cpu0.., switch0.. and network. `efficiency` is the share of the
    bandwidth that data gets after protocol overheads. Several links between the same two nodes are
    one Link with the sum of their bandwidths and the number in its kind, such as "NVLink 2 x2".
    """

    a: str
    b: str
    bandwidth: float
    latency: float
    efficiency: float = 1.0
    kind: str = ""
    source: str = field(default="", repr=False)

    @property
    def effective(self):
        """Bytes/s that reach the other end, one way."""
        return self.bandwidth * self.efficiency


def node_kind(node):
    """The kind and the number of a node: ("gpu", 3) for "gpu3", ("network", 0) for "network"."""
    kind, number = re.fullmatch(r"(\D*)(\d*)", node).groups()
    return kind, int(number or 0)


def node_order(node):
    """Sort key for node names: GPUs, then CPUs, switches and the network, each by number."""
    kind, number = node_kind(node)
    return ("gpu", "cpu", "switch", "network").index(kind), number


@dataclass(frozen=True)
class Server:
    """One machine, or several joined by a network: chips, links and the host processor.

    `chips` has one entry a GPU, in the order of their numbers; `host` is the chip of every cpu
    node. Raises ValueError if links and chips do not fit together.
    """

    name: str
    chips: tuple[Chip, ...]
    links: tuple[Link, ...]
    host: Chip
    source: str = field(default="", repr=False)

    def __post_init__(self):
        object.__setattr__(self, "chips", tuple(self.chips))
        object.__setattr__(self, "links", tuple(self.links))
        joined = set()
        for link in self.links:
            if problem := self._problem(link, joined):
                raise ValueError(f"{self.name}, link {link.a} - {link.b}: {problem}")
            joined.add(frozenset((link.a, link.b)))

    def _problem(self, link, joined):
        for node in (link.a, link.b):
            if not re.fullmatch(r"(gpu|cpu|switch)\d+|network", node):
                return f"{node!r} is no node name; use gpu0, cpu0, switch0, … or network"
            if node.startswith("gpu") and int(node[3:]) >= self.gpus:
                return f"it ends at {node}, but there are {self.gpus} GPUs"
        if link.a == link.b:
            return "it leads from a node to itself"
        if frozenset((link.a, link.b)) in joined:
            return "it is the second one; make it one Link with the sum of the bandwidths"
        if not (link.bandwidth > 0 and link.efficiency > 0 and link.latency >= 0):
            return "it needs bandwidth and efficiency above 0 and a latency of at least 0"
        return None

    @property
    def gpus(self):
        """Number of GPUs."""
        return len(self.chips)

    @cached_property
    def neighbours(self):
        """For each node the list of (neighbour, link), in node order."""
        found = {f"gpu{i}": [] for i in range(self.gpus)}
        for link in self.links:
            found.setdefault(link.a, []).append((link.b, link))
            found.setdefault(link.b, []).append((link.a, link))
        return {
            node: sorted(found[node], key=lambda pair: node_order(pair[0]))
            for node in sorted(found, key=node_order)
        }

    def route(self, a, b):
        """The links from node a to node b in order, each with the name of the wire that is used.

        The route is the one with the widest bottleneck (effective bandwidth), then with the fewest
        links, then the first in node order. GPUs pass nothing on. From a node to itself: no links.
        Returns a tuple of (Link, "gpu0→switch0") pairs. Raises ValueError if there is no such node
        or no route.
        """
        found = self._routes.get((a, b))
        if found is None:
            for node in (a, b):
                if node not in self.neighbours:
                    nodes = ", ".join(self.neighbours)
                    raise ValueError(f"{self.name} has no node {node!r}; it has {nodes}")
            found = self._routes[a, b] = self._find_route(a, b)
        return found

    @cached_property
    def _routes(self):
        return {}

    @cached_property
    def _widths(self):
        return sorted({link.effective for link in self.links}, reverse=True)

    @cached_property
    def _joining(self):
        """For each two nodes (in either order) the link that joins them, if there is one."""
        return {(node, o): link for node, pairs in self.neighbours.items() for o, link in pairs}

    @cached_property
    def _passing(self):
        """For each node the (neighbour, link, effective bandwidth) of those that pass things on."""
        return {
            node: [(o, link, link.effective) for o, link in pairs if not o.startswith("gpu")]
            for node, pairs in self.neighbours.items()
        }

    def _find_route(self, a, b):
        if a == b:
            return ()
        for width in self._widths:
            came_from = {a: None}
            queue = [a]
            for node in queue:  # breadth first: the list grows while it is walked
                link = self._joining.get((node, b))
                if link is not None and link.effective >= width:
                    came_from[b] = node, link
                    return self._walk_back(came_from, b)
                for other, link, effective in self._passing[node]:
                    if effective >= width and other not in came_from:
                        came_from[other] = node, link
                        queue.append(other)
        raise ValueError(f"{self.name}: no links lead from {a} to {b}")

    @staticmethod
    def _walk_back(came_from, node):
        steps = []
        while came_from[node]:
            previous, link = came_from[node]
            steps.append((link, f"{previous}→{node}"))
            node = previous
        return tuple(reversed(steps))

    def take(self, n):
        """A server of the first n GPUs, without the switches and CPUs that then lead nowhere."""
        if not 1 <= n <= self.gpus:
            raise ValueError(f"{self.name} has {self.gpus} GPUs; {n} cannot be taken")
        if n == self.gpus:
            return self
        gone = {f"gpu{i}" for i in range(n, self.gpus)}
        links = self.links
        while gone:
            links = tuple(link for link in links if not gone & {link.a, link.b})
            ends = Counter(node for link in links for node in (link.a, link.b))
            gone = {
                node
                for node, count in ends.items()
                if count == 1 and node != "cpu0" and not node.startswith("gpu")
            }
        return self.replace(chips=self.chips[:n], links=links)

    def replace(self, **changes):
        """A copy with other fields, such as replace(name="mine", chips=(chip,) * 4)."""
        return dataclasses.replace(self, **changes)

    def with_chip(self, gpu, chip):
        """A copy in which the GPU of that number is another chip."""
        self._check_gpu(gpu)
        return self.replace(chips=(*self.chips[:gpu], chip, *self.chips[gpu + 1 :]))

    def slow_down(self, gpu, factor):
        """A copy in which one GPU, a straggler, is `factor` times slower in all that it does."""
        self._check_gpu(gpu)
        chip = self.chips[gpu]
        slow = dataclasses.replace(
            chip,
            name=f"{chip.name}, {factor:g} times slower",
            fp32=chip.fp32 / factor,
            half=chip.half / factor,
            bandwidth=chip.bandwidth / factor,
        )
        return self.with_chip(gpu, slow)

    def _check_gpu(self, gpu):
        if not 0 <= gpu < self.gpus:
            raise ValueError(f"{self.name} has the GPUs 0 to {self.gpus - 1}, not {gpu}")

    def with_links(self, kind_prefix, **changes):
        """A copy in which all links whose kind starts with `kind_prefix` have other figures.

        `changes`: bandwidth (bytes/s one way, of the whole Link), latency (s), efficiency. Raises
        ValueError if no link is of that kind.
        """
        if not any(link.kind.startswith(kind_prefix) for link in self.links):
            kinds = ", ".join(sorted({link.kind for link in self.links}))
            raise ValueError(f"{self.name} has no link of a kind {kind_prefix!r}…; it has {kinds}")
        links = tuple(
            dataclasses.replace(link, **changes) if link.kind.startswith(kind_prefix) else link
            for link in self.links
        )
        return self.replace(links=links)

    def link_matrix(self):
        """How many NVLinks join each pair of GPUs, directly or through a switch: list of lists."""
        counts = {
            (node, other): int((re.search(r" x(\d+)$", link.kind) or [0, 1])[1])
            for node, pairs in self.neighbours.items()
            for other, link in pairs
            if link.kind.startswith("NVLink")
        }
        switches = {other for _, other in counts if other.startswith("switch")}

        def links_between(a, b):
            if a == b:
                return 0
            through = [min(counts.get((a, s), 0), counts.get((s, b), 0)) for s in switches]
            return max([counts.get((a, b), 0), *through])

        names = [f"gpu{i}" for i in range(self.gpus)]
        return [[links_between(a, b) for b in names] for a in names]
