"""Presets: chips, servers and networks as plain data, each figure with its source.

Where no source was to be had, it says "assumed" or "derived". To try something else, change a copy:

    slow = get_server("dgx1-v100").with_links("NVLink", efficiency=0.4)
"""

import dataclasses

from utils.topology import Chip, Link, Server, node_kind

GB = 10**9  # of memories too, though the makers of memory chips mean 2**30 bytes by it


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
    return Chip(name, fp32 * 1e12, half * 1e12, memory * GB, bandwidth * GB, watts, **more)


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
    "host CPU", 1e12, 1e12, 256 * GB, 100 * GB, 150, launch=1e-6,
    source="assumed: a modest server processor, no particular one; a call on it costs 1 µs",
)  # fmt: skip

# --- links -------------------------------------------------------------------------------------

_BOOK = "Dive into Deep Learning, computational performance: "
_NCCL_HOP = "latency: NCCL's cost model (tuning.cc), ring hop of the Simple protocol, "
_NCCL_SPEED = "effective speed: NCCL's topo.h, "


def _nvlinks(pairs, generation, number, efficiency, latency, source):
    kind = f"NVLink {generation}" + (f" x{number}" if number > 1 else "")
    return tuple(Link(a, b, 25 * GB * number, latency, efficiency, kind, source) for a, b in pairs)


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
    """Eight GPUs on one NVSwitch node; `pcie` is generation and GB/s of their links to the host."""
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
        "the maker's data sheet; simplified: all NVSwitches are one node that never blocks, each "
        "GPU has a PCIe link of its own to one host node",
    )  # fmt: skip


def ideal_server(gpus, alpha, bandwidth):
    """The machine of the α–β model: every message takes alpha + bytes / bandwidth, nothing else.

    Each GPU has a full-duplex link to a switch that never blocks; computing and issuing are free.
    """
    ideal = Chip("ideal chip", 1e30, 1e30, 10**15, 1e30, 0, launch=0, source="the α–β model")
    links = [
        Link(node, "switch0", bandwidth, alpha / 2, kind="ideal link")
        for node in (*(f"gpu{i}" for i in range(gpus)), "cpu0")
    ]
    return Server("the α–β model", (ideal,) * gpus, tuple(links), ideal, "the α–β model")


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


# --- looking up and joining ---------------------------------------------------------------------


def join_machines(server, machines, network):
    """Several machines of one kind on a network; `network` is a name in NETWORKS or a Link.

    GPUs, CPUs and switches are numbered through, machine by machine; the CPU of each machine is
    linked to the node "network". One machine is returned as it is.
    """
    server = get_server(server)
    if machines < 1:
        raise ValueError(f"at least one machine is needed, not {machines}")
    if not isinstance(network, Link):
        network = _look_up(NETWORKS, network, "network", Link)
    if machines == 1:
        return server
    if "network" in server.neighbours:
        raise ValueError(f"{server.name} is on a network already; join its single machines instead")
    numbers = {"gpu": [], "cpu": [0], "switch": []}
    for node in server.neighbours:
        kind, number = node_kind(node)
        numbers[kind].append(number)

    def rename(node, machine):
        kind, number = node_kind(node)
        return f"{kind}{number + machine * (max(numbers[kind]) + 1)}"

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
    return server if isinstance(server, Server) else _look_up(SERVERS, server, "server", Server)


def _look_up(presets, name, what, kind):
    if name not in presets:
        names = ", ".join(presets)
        raise ValueError(
            f"no {what} {name!r}; choose one of {names}, or pass a {kind.__name__} of your own"
        )
    return presets[name]
