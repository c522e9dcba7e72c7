"""Presets against published figures, routes against brute force, errors as a student sees them."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.hardware import (
    CHIPS,
    DGX1_DOUBLE_RING,
    DGX1_SINGLE_RING,
    HOST,
    NETWORKS,
    SERVERS,
    Chip,
    Link,
    Server,
    get_server,
    join_machines,
)

DGX1_MATRIX = [
    [0, 1, 1, 2, 2, 0, 0, 0],
    [1, 0, 2, 1, 0, 2, 0, 0],
    [1, 2, 0, 2, 0, 0, 1, 0],
    [2, 1, 2, 0, 0, 0, 0, 1],
    [2, 0, 0, 0, 0, 1, 1, 2],
    [0, 2, 0, 0, 1, 0, 2, 1],
    [0, 0, 1, 0, 1, 2, 0, 2],
    [0, 0, 0, 1, 2, 1, 2, 0],
]


def wires(server, a, b):
    return [wire for _, wire in server.route(a, b)]


# --- presets


def test_every_figure_names_its_source():
    for preset in (*CHIPS.values(), *NETWORKS.values(), *SERVERS.values(), HOST):
        assert len(preset.source) > 10, preset
    for server in SERVERS.values():
        assert all(len(link.source) > 10 and link.kind for link in server.links)
    assert "assumed" in HOST.source


@pytest.mark.parametrize(
    ("name", "fp32", "half", "memory", "bandwidth", "watts"),
    [
        ("gtx-580", 1.58, 1.58, 3, 192, 244),
        ("v100-16gb", 15.7, 125, 16, 900, 300),
        ("v100-32gb", 15.7, 125, 32, 900, 300),
        ("t4", 8.1, 65, 16, 320, 70),
        ("a100-40gb", 19.5, 312, 40, 1555, 400),
        ("a100-80gb", 19.5, 312, 80, 2000, 400),
        ("h100", 67, 989, 80, 3350, 700),
        ("h200", 67, 989, 141, 4800, 700),
    ],
)
def test_chips(name, fp32, half, memory, bandwidth, watts):
    chip = CHIPS[name]
    assert (chip.fp32, chip.half) == (fp32 * 1e12, half * 1e12)
    assert (chip.memory, chip.bandwidth, chip.watts) == (memory * 1e9, bandwidth * 1e9, watts)
    assert chip.launch == 10e-6


def test_two_dies_make_the_k80():
    die = CHIPS["k80"]
    assert (2 * die.fp32, 2 * die.memory, 2 * die.bandwidth) == (8.74e12, 24e9, 480e9)


def test_measured_efficiencies():
    assert CHIPS["a100-80gb"].half * CHIPS["a100-80gb"].compute_efficiency == pytest.approx(271e12)
    for name in ("h100", "h200"):
        assert CHIPS[name].half * CHIPS[name].compute_efficiency == pytest.approx(794e12)
    assert CHIPS["h200"].bandwidth * CHIPS["h200"].memory_efficiency == pytest.approx(4.3e12)
    for chip in CHIPS.values():
        assert 0 < chip.compute_efficiency <= 1 and 0 < chip.memory_efficiency <= 1


@pytest.mark.parametrize(
    ("name", "gbps"),
    [
        ("ethernet-10g", 1.25),
        ("ethernet-25g", 3.125),
        ("ethernet-100g", 12.5),
        ("infiniband-edr", 12.5),
        ("infiniband-hdr", 25),
        ("infiniband-ndr", 50),
    ],
)
def test_networks(name, gbps):
    assert NETWORKS[name].bandwidth == gbps * 1e9
    two = join_machines("two-gtx-580", 2, name)
    path = [link for link, _ in two.route("cpu0", "cpu1")]
    assert sum(link.latency for link in path) == pytest.approx(14e-6)
    assert NETWORKS["ethernet-100g"].effective == pytest.approx(12e9)


def test_pcie_switch_is_the_books():
    server = get_server("pcie-switch")
    assert server.gpus == 4
    assert all(link.effective == 16e9 for link in server.links)
    assert wires(server, "gpu1", "gpu0") == ["gpu1→switch0", "switch0→gpu0"]
    assert wires(server, "cpu0", "gpu3") == ["cpu0→switch0", "switch0→gpu3"]
    for a, b in [("gpu0", "gpu3"), ("gpu2", "cpu0")]:
        assert sum(link.latency for link, _ in server.route(a, b)) == pytest.approx(5e-6)


def test_two_gtx_580():
    server = get_server("two-gtx-580")
    assert server.gpus == 2
    assert server.chips[0].memory == 3e9
    assert all(link.effective == 8e9 and link.kind == "PCIe 2 x16" for link in server.links)
    assert wires(server, "gpu0", "gpu1") == ["gpu0→cpu0", "cpu0→gpu1"]


def test_dgx1_matrix():
    server = get_server("dgx1-v100")
    matrix = server.link_matrix()
    assert matrix == DGX1_MATRIX
    assert [sum(row) for row in matrix] == [6] * 8
    assert sum(map(sum, matrix)) // 2 == 24
    assert sum(matrix[i][j] for i in range(4) for j in range(4, 8)) == 6
    assert sum(matrix[i][j] == 0 for i, j in itertools.combinations(range(8), 2)) == 12

    def distance(i, j):
        if matrix[i][j]:
            return 1
        return 2 if any(matrix[i][k] and matrix[k][j] for k in range(8)) else 3

    assert max(distance(i, j) for i, j in itertools.combinations(range(8), 2)) == 2


@pytest.mark.parametrize(("ring", "links"), [(DGX1_DOUBLE_RING, 2), (DGX1_SINGLE_RING, 1)])
def test_dgx1_rings(ring, links):
    matrix = get_server("dgx1-v100").link_matrix()
    assert sorted(ring) == list(range(8))
    steps = list(zip(ring, ring[1:] + ring[:1], strict=True))
    assert all(matrix[a][b] == links for a, b in steps)
    edges = {frozenset(step) for step in steps}
    pairs = itertools.combinations(range(8), 2)
    assert edges == {frozenset(pair) for pair in pairs if matrix[pair[0]][pair[1]] == links}


def test_dgx1_links():
    server = get_server("dgx1-v100")
    assert server.chips == (CHIPS["v100-16gb"],) * 8
    for link in server.links:
        if link.kind.startswith("NVLink"):
            number = 2 if link.kind == "NVLink 2 x2" else 1
            assert link.bandwidth == number * 25e9
            assert link.effective == pytest.approx(number * 20e9)
            assert link.latency == 3.4e-6
        else:
            assert link.kind == "PCIe 3 x16"
            assert link.effective == pytest.approx(12e9)
    for gpu in range(8):  # six directed rings: 150 GB/s line rate, 120 at 20 GB/s a link
        mine = [k for node, k in server.neighbours[f"gpu{gpu}"] if node.startswith("gpu")]
        assert sum(link.bandwidth for link in mine) == 150e9
        assert sum(link.effective for link in mine) == pytest.approx(120e9)


def test_dgx1_routes():
    server = get_server("dgx1-v100")
    assert wires(server, "gpu0", "gpu3") == ["gpu0→gpu3"]
    assert wires(server, "gpu3", "cpu0") == ["gpu3→switch1", "switch1→cpu0"]
    # no NVLink joins them, and GPUs pass nothing on
    across = ["gpu0→switch0", "switch0→cpu0", "cpu0→switch3", "switch3→gpu7"]
    assert wires(server, "gpu0", "gpu7") == across


@pytest.mark.parametrize(
    ("name", "links", "line", "effective"),
    [("dgx-a100", 12, 300e9, 240e9), ("hgx-h200", 18, 450e9, 370.8e9)],
)
def test_nvswitch_servers(name, links, line, effective):
    server = get_server(name)
    assert server.link_matrix() == [[links * (i != j) for j in range(8)] for i in range(8)]
    path = server.route("gpu2", "gpu5")
    assert [wire for _, wire in path] == ["gpu2→switch0", "switch0→gpu5"]
    assert all(link.bandwidth == line for link, _ in path)
    assert all(link.effective == pytest.approx(effective) for link, _ in path)
    assert sum(link.latency for link, _ in path) == pytest.approx(3.4e-6)
    assert wires(server, "gpu2", "cpu0") == ["gpu2→cpu0"]


# --- looking up and changing


def test_get_server_lists_the_names():
    server = SERVERS["dgx1-v100"]
    assert get_server("dgx1-v100") is server and get_server(server) is server
    with pytest.raises(ValueError, match="no server 'dgx2'; choose one of pcie-switch, .*hgx-h200"):
        get_server("dgx2")
    with pytest.raises(ValueError, match="no network 'wifi'; .*ethernet-10g, .*a Link of your"):
        join_machines("dgx1-v100", 2, "wifi")


def test_presets_do_not_change():
    server = get_server("dgx1-v100")
    with pytest.raises(dataclasses.FrozenInstanceError):
        server.name = "mine"
    slow = server.with_links("NVLink", bandwidth=1e9, latency=1e-3, efficiency=0.5)
    assert all(k.effective == 0.5e9 for k in slow.links if k.kind.startswith("NVLink"))
    assert all(k.effective == pytest.approx(12e9) for k in slow.links if k.kind.startswith("PCIe"))
    assert get_server("dgx1-v100").route("gpu0", "gpu3")[0][0].effective == pytest.approx(40e9)
    # now the way over PCIe is the wider one
    assert wires(slow, "gpu0", "gpu3")[0] == "gpu0→switch0"
    assert slow.link_matrix() == DGX1_MATRIX
    assert server.replace(name="mine").name == "mine"


def test_with_links_of_a_kind_that_is_not_there():
    with pytest.raises(ValueError, match="no link of a kind 'NVLink'…; it has PCIe 3 x16"):
        get_server("pcie-switch").with_links("NVLink", bandwidth=1e9)


def test_another_chip_and_a_straggler():
    server = get_server("pcie-switch")
    mixed = server.with_chip(1, CHIPS["t4"])
    assert [chip.name for chip in mixed.chips].count("T4") == 1 and mixed.chips[1].name == "T4"
    slow = server.slow_down(3, 2.5)
    assert slow.chips[:3] == server.chips[:3] and slow.links == server.links
    assert slow.chips[3].fp32 * 2.5 == server.chips[3].fp32
    assert slow.chips[3].bandwidth * 2.5 == server.chips[3].bandwidth
    assert slow.chips[3].name == "V100 SXM2 16 GB, 2.5 times slower"
    for gpu in (-1, 4):
        with pytest.raises(ValueError, match="the GPUs 0 to 3"):
            server.slow_down(gpu, 2)


def test_take():
    server = get_server("dgx1-v100")
    two = server.take(2)
    assert two.gpus == 2
    assert list(two.neighbours) == ["gpu0", "gpu1", "cpu0", "switch0"]
    assert two.link_matrix() == [[0, 1], [1, 0]]
    assert server.take(8) is server
    assert get_server("pcie-switch").take(1).route("gpu0", "cpu0")
    for n in (0, 9):
        with pytest.raises(ValueError, match=f"dgx1-v100 has 8 GPUs; {n} cannot be taken"):
            server.take(n)


def test_take_of_several_machines_drops_the_unused():
    joined = join_machines("dgx1-v100", 3, "infiniband-edr")
    assert {"cpu0", "cpu1", "network"} < set(joined.take(9).neighbours)
    assert "cpu2" not in joined.take(9).neighbours
    assert "network" not in joined.take(8).neighbours
    assert wires(joined.take(9), "gpu0", "gpu8")[2:4] == ["cpu0→network", "network→cpu1"]


def test_join_machines():
    joined = join_machines("dgx1-v100", 4, "ethernet-100g")
    assert (joined.gpus, len(joined.chips)) == (32, 32)
    assert joined.name == "4 × dgx1-v100 on 100 Gb/s Ethernet"
    matrix = joined.link_matrix()
    for machine in range(4):
        rows = matrix[8 * machine : 8 * machine + 8]
        assert [row[8 * machine : 8 * machine + 8] for row in rows] == DGX1_MATRIX
        assert sum(map(sum, rows)) == 48
    assert wires(joined, "gpu1", "gpu31") == [
        "gpu1→switch0", "switch0→cpu0", "cpu0→network",
        "network→cpu3", "cpu3→switch15", "switch15→gpu31",
    ]  # fmt: skip
    assert join_machines("dgx1-v100", 1, "ethernet-100g") is get_server("dgx1-v100")
    own = Link("cpu0", "network", 1e9, 1e-3, kind="string")
    assert join_machines("pcie-switch", 2, own).route("cpu0", "cpu1")[0][0].bandwidth == 1e9
    # machines whose switches are not numbered without gaps do not run into each other
    gaps = make([Link(f"gpu{i}", f"switch{2 * i}", 1e9, 0) for i in range(3)])
    assert len({link.b for link in join_machines(gaps, 3, own).links}) == 9 + 1
    with pytest.raises(ValueError, match="at least one machine is needed, not 0"):
        join_machines("dgx1-v100", 0, "ethernet-100g")
    with pytest.raises(ValueError, match="on a network already"):
        join_machines(joined, 2, "ethernet-100g")


# --- routes


def make(links, gpus=3):
    chip = Chip("toy", 1e12, 1e12, 10**9, 1e9, 1)
    return Server("toy", (chip,) * gpus, links, HOST)


def test_route_to_itself_and_nowhere():
    server = make([Link("gpu0", "cpu0", 1e9, 0)])
    assert server.route("gpu1", "gpu1") == ()
    with pytest.raises(ValueError, match="no links lead from gpu0 to gpu2"):
        server.route("gpu0", "gpu2")
    with pytest.raises(ValueError, match="toy has no node 'gpu7'; it has gpu0, gpu1, gpu2, cpu0"):
        server.route("gpu0", "gpu7")


def test_gpus_pass_nothing_on():
    server = make([Link("gpu0", "gpu1", 1e9, 0), Link("gpu1", "gpu2", 1e9, 0)])
    with pytest.raises(ValueError, match="no links lead from gpu0 to gpu2"):
        server.route("gpu0", "gpu2")


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([Link("gpu0", "gpu3", 1e9, 0)], "ends at gpu3, but there are 3 GPUs"),
        ([Link("gpu0", "nic0", 1e9, 0)], "'nic0' is no node name"),
        ([Link("gpu0", "gpu0", 1e9, 0)], "from a node to itself"),
        (
            [Link("gpu0", "cpu0", 1e9, 0), Link("cpu0", "gpu0", 1e9, 0)],
            "toy, link cpu0 - gpu0: it is the second one",
        ),
        ([Link("gpu0", "cpu0", 0, 0)], "needs bandwidth and efficiency above 0"),
        ([Link("gpu0", "cpu0", 1e9, -1)], "latency of at least 0"),
    ],
)
def test_servers_that_cannot_be(links, message):
    with pytest.raises(ValueError, match=message):
        make(links)


def all_paths(server, a, b, seen=()):
    """Every route without repeated nodes and without GPUs on the way."""
    if a == b:
        yield ()
        return
    if a.startswith("gpu") and seen:
        return
    for node, link in server.neighbours[a]:
        if node not in seen:
            for rest in all_paths(server, node, b, (*seen, a)):
                yield ((link, f"{a}→{node}"), *rest)


NODES = ["gpu0", "gpu1", "gpu2", "cpu0", "switch0", "switch1", "network"]


@given(
    st.dictionaries(
        st.sampled_from(list(itertools.combinations(NODES, 2))), st.integers(1, 3), max_size=12
    )
)
def test_routes_are_the_widest_and_then_the_shortest(speeds):
    server = make([Link(a, b, speed, 0) for (a, b), speed in speeds.items()])
    for a, b in itertools.permutations(server.neighbours, 2):
        paths = list(all_paths(server, a, b))
        if not paths:
            with pytest.raises(ValueError, match=f"no links lead from {a} to {b}"):
                server.route(a, b)
            continue
        found = server.route(a, b)
        assert found in paths

        def rank(path):
            return -min(link.effective for link, _ in path), len(path)

        assert rank(found) == min(map(rank, paths))
        assert found == make(server.links[::-1]).route(a, b)  # whatever the order of the links
