"""Chips, links and servers as plain data: what the virtual GPUs and the cost formulas are fed with.

Rates are per second (FLOP/s, bytes/s), times in seconds, sizes in bytes. Link bandwidths are one way:
every link is full duplex, one wire in each direction. Each figure names its source; where none was
to be had, the source says "assumed" or "derived". Change a copy to try something else:

    slow = get_server("dgx1-v100").with_links("NVLink", efficiency=0.4)
"""

import dataclasses
import re
from dataclasses import dataclass, field
from functools import cached_property

GB = 10**9  # of bandwidths and file sizes
GIB = 2**30  # what the makers of memory chips call a GB


@dataclass(frozen=True)
class Chip:
    """One processor with its memory, at the speed its maker states.

    `fp32` and `half` (fp16/bf16 with tensor cores; equal to fp32 where there are none) are dense
    FLOP/s, `memory` bytes, `bandwidth` bytes/s, `watts` the maximum. `compute_efficiency` and
    `memory_efficiency` are the shares of the peaks that real kernels reach; `launch` is the time in
    seconds that the host spends issuing one kernel.
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

    Nodes are called gpu0.., cpu0.., switch0.. and network. `efficiency` is the share of the bandwidth
    that data gets after protocol overheads. Several links between the same two nodes are one Link
    with the sum of their bandwidths and the number in its kind, such as "NVLink 2 x2".
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

    @property
    def wires(self):
        """The names of the two wires, a to b first."""
        return f"{self.a}→{self.b}", f"{self.b}→{self.a}"


def node_order(node):
    """Sort key for node names: GPUs, then CPUs, switches and the network, each by number."""
    kind, number = re.fullmatch(r"(\D*)(\d*)", node).groups()
    return ("gpu", "cpu", "switch", "network").index(kind), int(number or 0)


@dataclass(frozen=True)
class Server:
    """One machine, or several joined by a network: chips, links and the host processor.

    `chips` has one entry a GPU, in the order of their numbers; `host` is the chip of every cpu node.
    Raises ValueError if links and chips do not fit together.
    """

    name: str
    chips: tuple[Chip, ...]
    links: tuple[Link, ...]
    host: Chip
    source: str = field(default="", repr=False)

    def __post_init__(self):
        object.__setattr__(self, "chips", tuple(self.chips))
        object.__setattr__(self, "links", tuple(self.links))
        seen = set()
        for link in self.links:
            for node in (link.a, link.b):
                if not re.fullmatch(r"(gpu|cpu|switch)\d+|network", node):
                    raise ValueError(
                        f"{self.name}: {node!r} is no node name; use gpu0, cpu0, switch0, … or network"
                    )
                if node.startswith("gpu") and int(node[3:]) >= self.gpus:
                    raise ValueError(
                        f"{self.name}: a link ends at {node}, but there are {self.gpus} GPUs"
                    )
            if link.a == link.b:
                raise ValueError(f"{self.name}: a link from {link.a} to itself")
            if not (link.bandwidth > 0 and link.efficiency > 0 and link.latency >= 0):
                raise ValueError(
                    f"{self.name}: link {link.a} - {link.b} needs bandwidth and efficiency above 0 "
                    f"and a latency of at least 0"
                )
            ends = frozenset((link.a, link.b))
            if ends in seen:
                raise ValueError(
                    f"{self.name}: two links between {link.a} and {link.b}; "
                    "make them one Link with the sum of their bandwidths"
                )
            seen.add(ends)

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

    def _find_route(self, a, b):
        if a == b:
            return ()
        for width in self._widths:
            came_from = {a: None}
            queue = [a]
            for node in queue:  # breadth first: the list grows while it is walked
                for other, link in self.neighbours[node]:
                    if other in came_from or link.effective < width:
                        continue
                    came_from[other] = node, link
                    if other == b:
                        return self._walk_back(came_from, b)
                    if not other.startswith("gpu"):
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
            ends = [node for link in links for node in (link.a, link.b)]
            gone = {
                node
                for node in ends
                if ends.count(node) == 1 and node != "cpu0" and not node.startswith("gpu")
            }
        return self.replace(chips=self.chips[:n], links=links)

    def replace(self, **changes):
        """A copy with other fields, such as replace(name="mine", chips=(chip,) * 4)."""
        return dataclasses.replace(self, **changes)

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
        """How many NVLinks join each pair of GPUs, directly or through an NVSwitch: list of lists."""
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


def join_machines(server, machines, network):
    """Several machines of one kind on a network; `network` is a name in NETWORKS or a Link.

    GPUs, CPUs and switches are numbered through, machine by machine; the CPU of each machine is
    linked to the node "network". One machine is returned as it is.
    """
    server = get_server(server)
    if machines < 1:
        raise ValueError(f"at least one machine is needed, not {machines}")
    if isinstance(network, str):
        network = _look_up(NETWORKS, network, "network")
    if machines == 1:
        return server
    if "network" in server.neighbours:
        raise ValueError(f"{server.name} is on a network already; join its single machines instead")
    size = {
        kind: sum(node.startswith(kind) for node in server.neighbours)
        for kind in ("gpu", "cpu", "switch")
    }

    def rename(node, machine):
        kind, number = re.fullmatch(r"(\D+)(\d+)", node).groups()
        return f"{kind}{int(number) + machine * size[kind]}"

    links = []
    for machine in range(machines):
        for link in server.links:
            a, b = rename(link.a, machine), rename(link.b, machine)
            links.append(dataclasses.replace(link, a=a, b=b))
        cpu = rename("cpu0", machine)
        links.append(dataclasses.replace(network, a=cpu, b="network"))
    return server.replace(
        name=f"{machines} × {server.name} on {network.kind}",
        chips=server.chips * machines,
        links=tuple(links),
    )


def get_server(server):
    """The preset of that name, or the Server itself. Raises ValueError listing the names."""
    return server if isinstance(server, Server) else _look_up(SERVERS, server, "server")


def _look_up(presets, name, what):
    if name not in presets:
        names = ", ".join(presets)
        raise ValueError(
            f"no {what} {name!r}; choose one of {names}, or pass a {what.capitalize()} of your own"
        )
    return presets[name]


# --- chips -------------------------------------------------------------------------------------

_DATA_SHEET = "peaks, memory and power: the maker's data sheet"
# A bf16 product on one H200 reached 794 of 989 TFLOP/s, a device-to-device copy 4.3 of 4.8 TB/s.
_H200_COMPUTE = 794 / 989
_H200_MEMORY = 4.3 / 4.8
_ASSUMED = "; efficiencies assumed to be those measured on an H200 (794/989, 4.3/4.8)"


def _gpu(name, fp32, half, memory, bandwidth, watts, **more):
    more.setdefault("source", _DATA_SHEET + _ASSUMED)
    more.setdefault("compute_efficiency", _H200_COMPUTE)
    more.setdefault("memory_efficiency", _H200_MEMORY)
    return Chip(name, fp32 * 1e12, half * 1e12, memory * GIB, bandwidth * GB, watts, **more)


_A100 = {
    "compute_efficiency": 271 / 312,
    "source": _DATA_SHEET + "; bf16 products reach 271 of 312 TFLOP/s (stas00/ml-engineering); "
    "memory efficiency assumed to be the H200's (4.3/4.8)",
}
_H100 = _DATA_SHEET + "; bf16 products reach 794 of 989 TFLOP/s (stas00/ml-engineering)"

CHIPS = {
    "gtx-580": _gpu("GTX 580", 1.58, 1.58, 3, 192, 244),
    "k80": _gpu(
        "K80 (one of its two dies)", 4.37, 4.37, 12, 240, 150,
        source="derived: half of the card's figures in the maker's data sheet" + _ASSUMED,
    ),
    "v100-16gb": _gpu("V100 SXM2 16 GB", 15.7, 125, 16, 900, 300),
    "v100-32gb": _gpu("V100 SXM2 32 GB", 15.7, 125, 32, 900, 300),
    "t4": _gpu("T4", 8.1, 65, 16, 320, 70),
    "a100-40gb": _gpu("A100 SXM 40 GB", 19.5, 312, 40, 1555, 400, **_A100),
    "a100-80gb": _gpu("A100 SXM 80 GB", 19.5, 312, 80, 2000, 400, **_A100),
    "h100": _gpu(
        "H100 SXM", 67, 989, 80, 3350, 700,
        source=_H100 + "; memory efficiency assumed to be the H200's (4.3/4.8)",
    ),
    "h200": _gpu(
        "H200 SXM", 67, 989, 141, 4800, 700,
        source=_H100 + "; one H200 measured: 769 to 798 TFLOP/s, 4.3 of 4.8 TB/s in a device copy",
    ),
}  # fmt: skip

HOST = Chip(
    "host CPU", 1e12, 1e12, 256 * GIB, 100 * GB, 150, launch=1e-6,
    source="assumed: a modest server processor, no particular one; a call on it costs 1 µs",
)  # fmt: skip

# --- links -------------------------------------------------------------------------------------

_BOOK = "Dive into Deep Learning, computational performance: "
_NCCL_HOP = "latency: NCCL's cost model (tuning.cc), ring hop of the Simple protocol, "
_NCCL_SPEED = "effective speed: NCCL's topo.h, "


def _nvlinks(pairs, generation, number, efficiency, latency, source):
    kind = f"NVLink {generation}" + (f" x{number}" if number > 1 else "")
    return tuple(
        Link(a, b, 25 * GB * number, latency, efficiency, kind, source) for a, b in pairs
    )


def _pcie(pairs, generation, bandwidth, efficiency, latency, source):
    kind = f"PCIe {generation} x16"
    return tuple(Link(a, b, bandwidth * GB, latency, efficiency, kind, source) for a, b in pairs)


def _network(kind, bandwidth, source="efficiency assumed to be 100 GbE's"):
    """Latency of half a hop on each side, so that machine to machine is one hop of 14 µs."""
    source = f"line rate; {source}; {_NCCL_HOP}network 14 µs, half at each end"
    return Link("cpu0", "network", bandwidth * GB, 7e-6, 12 / 12.5, kind, source)


NETWORKS = {
    "ethernet-10g": _network("10 Gb/s Ethernet", 1.25),
    "ethernet-25g": _network("25 Gb/s Ethernet", 3.125),
    "ethernet-100g": _network("100 Gb/s Ethernet", 12.5, _NCCL_SPEED + "12 of 12.5 GB/s"),
    "infiniband-edr": _network("InfiniBand EDR", 12.5),
    "infiniband-hdr": _network("InfiniBand HDR", 25),
    "infiniband-ndr": _network("InfiniBand NDR", 50),
}

# --- servers -----------------------------------------------------------------------------------

# The eight NVLink pairs of two links and the eight of one in a DGX-1V or p3.16xlarge, and the ring
# that each kind forms (closed: the last GPU is followed by the first).
DGX1_DOUBLE = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
DGX1_SINGLE = ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7))
DGX1_DOUBLE_RING = (0, 3, 2, 1, 5, 6, 7, 4)
DGX1_SINGLE_RING = (0, 1, 3, 7, 5, 4, 6, 2)


def _gpu_pairs(pairs):
    return [(f"gpu{a}", f"gpu{b}") for a, b in pairs]


def _pcie_switch():
    pairs = [*((f"gpu{i}", "switch0") for i in range(4)), ("switch0", "cpu0")]
    source = _BOOK + "16 GB/s, and 5 µs a copy over PCIe, half on each link of its route"
    return Server(
        "pcie-switch",
        (CHIPS["v100-16gb"],) * 4,
        _pcie(pairs, 3, 16, 1.0, 2.5e-6, source),
        HOST,
        _BOOK + "4 GPUs on one PCIe switch, which shares one link to the CPU",
    )


def _two_gtx_580():
    source = "derived: half of PCIe 3's 16 GB/s; latency: " + _BOOK + "5 µs"
    return Server(
        "two-gtx-580",
        (CHIPS["gtx-580"],) * 2,
        _pcie([("gpu0", "cpu0"), ("gpu1", "cpu0")], 2, 8, 1.0, 5e-6, source),
        HOST,
        "AlexNet's two cards of 3 GB; simplified: each on its own PCIe 2 slot, copies between the "
        "cards pass the CPU's root complex at full speed",
    )


def _dgx1_v100():
    nvlink = _NCCL_SPEED + "20 of 25 GB/s a link; " + _NCCL_HOP + "NVLink 3.4 µs"
    pcie = _NCCL_SPEED + "12 of 15.75 GB/s; " + _NCCL_HOP + "PCI 5.7 µs, half on each link"
    pairs = [(f"gpu{i}", f"switch{i // 2}") for i in range(8)]
    pairs += [(f"switch{i}", "cpu0") for i in range(4)]
    return Server(
        "dgx1-v100",
        (CHIPS["v100-16gb"],) * 8,
        _nvlinks(_gpu_pairs(DGX1_DOUBLE), 2, 2, 0.8, 3.4e-6, nvlink)
        + _nvlinks(_gpu_pairs(DGX1_SINGLE), 2, 1, 0.8, 3.4e-6, nvlink)
        + _pcie(pairs, 3, 15.75, 12 / 15.75, 2.85e-6, pcie),
        HOST,
        "link matrix of the DGX-1V and p3.16xlarge (nvidia-smi topo -m); simplified: two GPUs a "
        "PCIe switch, and one host node in place of two processors",
    )


def _nvswitch_server(name, chip, links, efficiency, effective, pcie):
    """Eight GPUs on one NVSwitch node, each with its own PCIe link (bandwidth, kind) to the host."""
    generation, bandwidth = pcie
    nvlink = (
        f"{links} links of 25 GB/s; {_NCCL_SPEED}{effective} of 25 GB/s a link; "
        f"{_NCCL_HOP}NVLink 3.4 µs, half on each side of the switch"
    )
    to_host = (
        f"line rate; efficiency assumed to be that of PCIe 3 in NCCL's topo.h (12 of 15.75 GB/s); "
        f"{_NCCL_HOP}PCI 5.7 µs"
    )
    nvlink_generation = {12: 3, 18: 4}[links]
    return Server(
        name,
        (chip,) * 8,
        _nvlinks([(f"gpu{i}", "switch0") for i in range(8)], nvlink_generation, links,
                 efficiency, 1.7e-6, nvlink)
        + _pcie([(f"gpu{i}", "cpu0") for i in range(8)], generation, bandwidth, 12 / 15.75,
                5.7e-6, to_host),
        HOST,
        "the maker's data sheet; simplified: all NVSwitches are one node that never blocks, each GPU "
        "has a PCIe link of its own to one host node",
    )  # fmt: skip


SERVERS = {
    server.name: server
    for server in (
        _pcie_switch(),
        _two_gtx_580(),
        _dgx1_v100(),
        _nvswitch_server("dgx-a100", CHIPS["a100-80gb"], 12, 20 / 25, 20, (4, 31)),
        _nvswitch_server("hgx-h200", CHIPS["h200"], 18, 20.6 / 25, 20.6, (5, 63)),
    )
}
