"""Topologies: the shipped ones load with the papers' numbers; invalid ones are refused with the key."""

import pathlib
import re

import numpy as np
import pytest

import jpipe
from jpipe import InputError
from jpipe_planner.machine.targets import find_target
from jpipe_planner.machine.topology import Level, Topology

FILES = sorted((pathlib.Path(__file__).parents[3] / "configs" / "topologies").glob("*.yaml"))
WORKERS = {
    "a100-v100-12": 12,
    "cluster-a": 16,
    "cluster-b": 16,
    "cluster-c": 4,
    "dgx-h100-2": 16,
    "dgx-h100-4": 32,
    "dgx-h200-2": 16,
    "gtx-1080ti-32": 32,
    "v100-16gb-64": 64,
    "v100-16gb-8": 8,
}
GOOD = """
format: jpipe-topology/1
name: two servers
levels:
  - {name: NVLink, count: 8, bandwidth: 30 GB/s, latency: 5 us}
  - {name: Ethernet, count: 2, bandwidth: 25 Gbit/s}
device: {name: V100, memory: 16 GB, flops: {float32: 15.7 TFLOP/s}, efficiency: 0.4, memory_bandwidth: 900 GB/s}
cores: 2
"""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_topologies_that_come_with_it_load(file):
    topology = Topology.from_yaml(file.read_text(), str(file))
    assert topology.num_devices == WORKERS[file.stem]
    assert topology.name
    assert topology.device.memory is not None
    assert topology.device.flops["float32"] > 1e12
    bandwidths = [level.bandwidth for level in topology.levels]
    assert bandwidths == sorted(bandwidths, reverse=True)  # each level is slower than the one inside it
    assert file.read_text().startswith("# "), "say where the numbers are from"


def test_the_topologies_name_targets_and_those_of_the_papers_reserve_nothing():
    devices = {file.stem: Topology.from_yaml(file.read_text(), str(file)).device for file in FILES}
    assert all(device.compiles_for is not None for device in devices.values())
    reserving = {name for name, device in devices.items() if device.limit < device.memory}
    assert reserving == {"a100-v100-12", "dgx-h100-2", "dgx-h100-4", "dgx-h200-2"}
    figures = {
        name: (device.memory, device.flops["float32"], device.efficiency, device.memory_bandwidth) for name, device in devices.items()
    }
    assert figures["cluster-a"] == (16e9, 14e12, 0.7, 900e9)
    assert figures["cluster-b"] == (16e9, 15.7e12, 0.7, 900e9)
    assert figures["cluster-c"] == (12e9, 11e12, 0.5, 480e9)
    assert figures["gtx-1080ti-32"] == (11e9, 11.3e12, 0.7, 484e9)
    assert figures["v100-16gb-8"] == figures["v100-16gb-64"] == (16e9, 15.7e12, 0.36, 900e9)


def test_numbers_with_units_are_converted():
    topology = Topology.from_yaml(GOOD)
    assert [level.bandwidth for level in topology.levels] == [30e9, 25e9 / 8]
    assert [level.latency for level in topology.levels] == [pytest.approx(5e-6), 0.0]
    assert (topology.device.memory, topology.device.flops, topology.device.memory_bandwidth) == (16e9, {"float32": 15.7e12}, 900e9)
    assert Topology.from_yaml(GOOD.replace("16 GB", "16 GiB")).device.memory == 16 * 2**30
    assert Topology.from_yaml(GOOD.replace("16 GB", "17000")).device.memory == 17000


def test_numbers_may_be_those_of_numpy():
    levels = [{"count": np.int64(2), "bandwidth": np.float32(1e9), "latency": np.float32(0)}]
    device = {"memory": np.int64(8), "flops": {"float32": np.float32(1e12)}, "efficiency": np.float32(0.5)}
    given = Topology(levels=levels, device=device, differing=[{"devices": np.int64(1), "speed": np.float32(0.5)}])
    device = {"memory": 8.0, "flops": {"float32": float(np.float32(1e12))}, "efficiency": 0.5}
    assert given == Topology(levels=[{"count": 2, "bandwidth": 1e9}], device=device, differing=[{"devices": [1], "speed": 0.5}])
    with pytest.raises(InputError, match=r"levels\.0\.count: expected a valid integer"):
        Topology(levels=[{"count": np.bool_(True), "bandwidth": 1e9}])


def test_a_message_costs_the_highest_level_that_it_crosses():
    topology = Topology.from_yaml(GOOD)
    assert [topology.level(0, other) for other in (0, 7, 8)] == [-1, 0, 1]
    assert topology.link(0, 1) == jpipe.Link(30e9, topology.levels[0].latency, (("out", 0, 0), ("in", 0, 1)))
    assert topology.link(1, 9).ports == (("out", 1, 0), ("in", 1, 1))  # a server has one port for all its devices


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("count: 8", "count: 0", "levels.0.count: expected greater than or equal to 1, found 0"),
        ("count: 8", "count: -1", "levels.0.count: expected greater than or equal to 1, found -1"),
        ("count: 8", "count: 8.5", "levels.0.count: expected a valid integer, found 8.5"),
        ("count: 8", "count: true", "levels.0.count: expected a valid integer, found True"),
        ("count: 8", "count: 1048576", "levels: expected at most 1,048,576 devices in all, found 2,097,152"),
        ("30 GB/s", "0", "levels.0.bandwidth: expected greater than 0, found 0"),
        ("30 GB/s", "-30 GB/s", "levels.0.bandwidth: expected greater than 0, found '-30 GB/s'"),
        ("30 GB/s", ".nan", "levels.0.bandwidth: expected greater than 0, found nan"),
        ("30 GB/s", ".inf", "levels.0.bandwidth: expected a finite number, found inf"),
        ("30 GB/s", "30 GB", "levels.0.bandwidth: expected bytes per second, such as 25 Gbit/s or 30 GB/s, found '30 GB'"),
        ("30 GB/s", "30 Gbps", "levels.0.bandwidth: expected bytes per second, such as 25 Gbit/s or 30 GB/s, found '30 Gbps'"),
        ("30 GB/s", "3-0 GB/s", "levels.0.bandwidth: expected a number and a unit, such as 25 Gbit/s or 30 GB/s, found '3-0 GB/s'"),
        ("5 us", "-5 us", "levels.0.latency: expected greater than or equal to 0, found '-5 us'"),
        ("5 us", "5 m", "levels.0.latency: expected seconds, such as 5 us or 0.1 ms, found '5 m'"),
        ("16 GB,", "16 GB/s,", "device.memory: expected bytes, such as 16 GB or 16 GiB, found '16 GB/s'"),
        ("16 GB,", "0,", "device.memory: expected greater than 0, found 0"),
        ("15.7 TFLOP/s", "15.7 TFLOP", "device.flops.float32: expected FLOP/s, such as 125 TFLOP/s, found '15.7 TFLOP'"),
        ("efficiency: 0.4", "efficiency: 40", "device.efficiency: expected less than or equal to 1, found 40"),
        ("efficiency: 0.4", "efficiency: 0", "device.efficiency: expected greater than or equal to 0.000001, found 0"),
        ("cores: 2", "cores: 0", "cores: expected greater than or equal to 1, found 0"),
    ],
)
def test_impossible_numbers_in_a_profile_are_refused(old, new, message):
    assert old in GOOD
    with pytest.raises(jpipe.InputError) as error:
        Topology.from_yaml(GOOD.replace(old, new, 1), "t.yaml")
    assert str(error.value) == f"t.yaml: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("count: 8", "count: 8, cuont: 8"), "unknown key 'levels.0.cuont'; did you mean 'levels.0.count'?"),
        (GOOD.replace("levels:", "level:"), "unknown key 'level'; did you mean 'levels'?"),
        ("format: jpipe-topology/1", "key 'levels' is missing; add it"),
        (
            "format: jpipe-topology/2",
            "expected YAML with 'format: jpipe-topology/1', found 'jpipe-topology/2'; is this a topology of jpipe?",
        ),
        ("- a\n- b", "expected YAML with 'format: jpipe-topology/1', found 'list'; is this a topology of jpipe?"),
    ],
)
def test_text_that_is_not_a_topology_is_refused(text, message):
    with pytest.raises(jpipe.InputError) as error:
        Topology.from_yaml(text, "t.yaml")
    assert str(error.value.args[0]) == f"t.yaml: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("levels: 1\nlevels: 2", "line 2, column 1: .* the key 'levels' occurs twice"),
        ("!!python/object/apply:os.getcwd []", "line 1, column 1: .* found a tag"),
        ("a: [1,\nb: {", "line 2, column 5: "),
        ("[" * 3000, "nested too deeply"),
        ("a: 2026-99-99", "can be read in two ways"),
        (f"a: {'9' * 5000}", "expected a number of at most 64 bits"),
    ],
)
def test_invalid_yaml_is_refused(text, message):
    with pytest.raises(jpipe.InputError, match=r"^t\.yaml, line") as error:
        Topology.from_yaml(text, "t.yaml")
    assert re.search(message, str(error.value))


def test_a_number_with_an_exponent_is_a_number():
    assert Topology.from_yaml("{format: jpipe-topology/1, levels: [{count: 2, bandwidth: 3e9}]}").levels[0].bandwidth == 3e9


def test_invalid_dtypes_are_refused():
    with pytest.raises(jpipe.InputError, match="unknown dtype 'fp16'; did you mean 'float16'"):
        Topology(levels=({"count": 2, "bandwidth": 1},), device={"flops": {"fp16": 1e12}})


def servers(cores=None):
    """Return four servers of eight devices."""
    levels = {"count": 8, "bandwidth": 450.0, "latency": 3.0}, {"count": 4, "bandwidth": 400.0, "latency": 10.0}
    return Topology(levels=levels, cores=cores)


@pytest.mark.parametrize(
    ("size", "counts", "bandwidths"),
    [(1, (8, 4), (450, 400)), (2, (4, 4), (450, 200)), (8, (1, 4), (450, 50)), (16, (1, 2), (450, 50)), (32, (1, 1), (450, 50))],
)
def test_a_mesh_is_a_device_with_its_share_of_the_links(size, counts, bandwidths):
    grouped = servers(cores=16.0).groups(size)
    assert tuple(level.count for level in grouped.levels) == counts
    assert tuple(level.bandwidth for level in grouped.levels) == bandwidths
    assert grouped.num_devices == 32 // size
    assert grouped.cores == max(16 / size, 1)


def test_no_mesh_changes_nothing():
    assert servers().groups(1) == servers()


@pytest.mark.parametrize("size", [3, 6, 12, 24, 64])
def test_a_mesh_fills_the_machine(size):
    with pytest.raises(jpipe.InputError, match=f"evenly, of 1, 2, 4, 8, 16, 32 devices, found one of {size}"):
        servers().groups(size)


def test_a_mesh_over_servers_has_the_slower_links():
    assert servers().mesh_link(1) == jpipe.Link()
    assert servers().mesh_link(8) == jpipe.Link(450.0, 3.0)
    assert servers().mesh_link(16) == jpipe.Link(50.0, 10.0)


def test_a_copy_with_other_levels_counts_its_own_devices():
    topology = Topology(levels=[{"count": 4, "bandwidth": 1e9}])
    assert topology.sizes == (4,)
    copied = topology.model_copy(update={"levels": (*topology.levels, Level(count=2, bandwidth=1e8))})
    assert copied.sizes == (4, 8)
    assert copied.link(0, 7).bandwidth == 1e8


DIFFERING = """
format: jpipe-topology/1
levels:
  - {name: NVLink, count: 4, bandwidth: 8e9, latency: 5 us}
  - {name: Ethernet, count: 2, bandwidth: 4e9}
device: {name: A100, memory: 40 GB}
differing:
  - {devices: 0-3, name: V100, speed: 0.5, memory: 32 GB, bandwidth: {Ethernet: 1e9}}
  - {devices: 6, speed: 0.8}
"""


def test_devices_and_ports_may_differ():
    topology = Topology.from_yaml(DIFFERING)
    assert topology.slowness.tolist() == [2, 2, 2, 2, 1, 1, 1.25, 1]
    assert topology.limits.tolist() == 4 * [32e9] + 4 * [40e9]
    assert [device.name for device in topology.devices] == 4 * ["V100"] + ["A100", "A100", "A100 at 0.8", "A100"]
    assert [topology.link(*ends).bandwidth for ends in ((0, 4), (4, 0), (0, 1), (4, 5))] == [1e9, 1e9, 8e9, 8e9]
    assert topology.orders() == [(0, 1, 2, 3, 4, 5, 6, 7), (4, 5, 7, 6, 0, 1, 2, 3), (0, 1, 2, 3, 6, 4, 5, 7)]
    ordered = topology.ordered((4, 5, 7, 6, 0, 1, 2, 3))
    assert ordered.slowness.tolist() == [1, 1, 1, 1.25, 2, 2, 2, 2]
    assert [ordered.ports(k).tolist() for k in (0, 1)] == [8 * [8e9], [4e9, 1e9]]
    whole = Topology.from_yaml(DIFFERING.replace("  - {devices: 6, speed: 0.8}", ""))
    assert (whole.groups(2).slowness.tolist(), whole.groups(2).ports(1).tolist()) == ([2, 2, 1, 1], [0.5e9, 2e9])
    assert whole.mesh_link(8).bandwidth == 1e9 / 4
    assert [size for size in range(1, 9) if whole.can_group(size)] == [1, 2, 4]
    with pytest.raises(jpipe.InputError, match=r"^mesh: .* of 1 devices, found one of 2$"):
        topology.groups(2)
    assert Topology.from_yaml(GOOD).orders() == [tuple(range(16))]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0-3", "0-8", "differing.0.devices: expected numbers from 0 to 7, found 8; levels have 8 devices"),
        ("0-3", "3-0", "differing.0.devices: expected a range from its first to its last device, below 16,384, found '3-0'"),
        ("0-3", "0-9999999", "differing.0.devices: expected a range from its first to its last device, below 16,384, found '0-9999999'"),
        ("0-3", "all", "differing.0.devices: expected numbers of devices, such as 3 or 8-11, found 'all'"),
        ("0-3", "[]", "differing.0.devices: expected at least 1 of them, found 0"),
        (
            "0-3",
            "0-2",
            "differing.0.bandwidth.Ethernet: expected whole components of 4 devices, which share a port, found device 0 without all of "
            "0-3; name them all",
        ),
        (
            "Ethernet: 1e9",
            "Infiniband: 1e9",
            "differing.0.bandwidth: expected the name of a level, NVLink, Ethernet, or a number from 0 to 1, found 'Infiniband'",
        ),
        ("speed: 0.5", "speed: 0", "differing.0.speed: expected greater than or equal to 0.001, found 0"),
        (
            "speed: 0.5",
            "target: h200",
            "differing.0.speed: expected the speed relative to A100, because their flops have no dtype in common, found no speed; "
            "set speed",
        ),
        (
            "memory: 40 GB",
            "flops: {float32: 1e12}",
            "differing.0.memory: expected the memory of all devices, or of none, found none for device.memory; add it",
        ),
        ("memory: 32 GB", "reserved: 41 GB", "differing.0.reserved: expected less than the memory, found 1,000,000,000 bytes more"),
    ],
)
def test_impossible_differences_are_refused(old, new, message):
    assert old in DIFFERING
    with pytest.raises(jpipe.InputError) as error:
        Topology.from_yaml(DIFFERING.replace(old, new, 1), "t.yaml")
    assert str(error.value) == f"t.yaml: {message}"


def test_the_speed_of_a_target_follows_from_flops_of_the_same_dtype():
    text = DIFFERING.replace("memory: 40 GB", "memory: 40 GB, flops: {float32: 67 TFLOP/s}, efficiency: 0.45")
    v100 = find_target("v100-32gb")
    topology = Topology.from_yaml(text.replace("name: V100, speed: 0.5, memory: 32 GB", "target: v100-32gb"))
    assert topology.slowness[0] == pytest.approx(67e12 * 0.45 / (v100.flops["float32"] * v100.efficiency))
    assert topology.devices[0].name == v100.name
    assert topology.limits[0] == v100.memory - sum(v100.reserved.values())


def test_the_link_to_host_memory_is_that_of_the_target_unless_it_is_given_and_may_differ():
    target = find_target("h100-80gb").host
    usual = GOOD.replace("{name: V100,", "{host: {memory: 100 GB}, target: h100-80gb, name: V100,")
    differing = usual + "differing:\n  - {devices: 8-15, host: {bandwidth: 2 GB/s}}\n"
    machine, slow = Topology.from_yaml(usual), Topology.from_yaml(differing)
    assert Topology.from_yaml(GOOD).device.host.link == jpipe.Link(8e9, 1e-5)
    assert (machine.device.host.bandwidth, machine.device.host.limit) == (target.bandwidth, 100e9)
    assert [(device.host.bandwidth, device.host.limit) for device in slow.devices[7:9]] == [(target.bandwidth, 100e9), (2e9, 100e9)]
