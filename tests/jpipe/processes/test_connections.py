"""Arrays between three real processes: their contents, order and waits. One session runs every scenario."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe.processes._collectives import AXIS, Group
from jpipe.processes._connections import Connection, Reduction

LIMIT = 60  # seconds for everything; only a deadlock comes near
DEVICES = (2, 1, 1)  # of each process


class Message(NamedTuple):
    y: object
    extra: object


MESSAGES = {
    "one array": ((3, 5), "float32"),
    "large and half": [((301, 50), "bfloat16"), ((2000,), "uint16"), ((5000,), "float16"), ((), "bfloat16")],
    "a scalar": ((), "float32"),
    "a named tuple": Message(y=((4, 2, 3), "bfloat16"), extra={"tokens": ((7,), "int32"), "mask": ((2, 3), "bool")}),
    "every width": [((5,), "float64"), ((2, 2), "int64"), ((3,), "uint32"), ((9,), "float16"), ((4,), "int8"), ((), "uint8"), ((), "bool")],
    "many leaves, more than go together": {f"leaf{i}": ((150, 1000 + i), "float32") for i in range(9)},
    "a leaf too large to share": [((3,), "int32"), ((1050, 1001), "float32"), ((3, 1), "float32"), ((), "uint32")],
    "empty leaves": (((0, 4), "float32"), ((2,), "float32"), ((0,), "bool")),
    "only an empty leaf": [((0, 4), "float32")],
    "nothing": (),
}


def is_leaf(node):
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[1], str)


def spec_of(message):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf[0], leaf[1]), message, is_leaf=is_leaf)


def random_bits(spec, seed):
    """Return arrays of random bits, including NaNs with payloads and subnormal numbers, that are equal on both sides."""
    random = np.random.default_rng(seed)

    def leaf(spec):
        if spec.dtype == np.bool_:
            return random.integers(2, size=spec.shape).astype(np.bool_)
        return np.frombuffer(random.bytes(spec.size * spec.dtype.itemsize), spec.dtype).reshape(spec.shape)

    return jax.tree.map(leaf, spec)


def assert_arrived(tree, expected, device):
    chex.assert_trees_all_equal_shapes_and_dtypes(tree, expected)
    for leaf, expected_leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert np.asarray(leaf).tobytes() == expected_leaf.tobytes()
        assert leaf.sharding == jax.sharding.SingleDeviceSharding(device)
        assert leaf.committed


class Processes:
    """The first device of each process, the second device of process 0, and the index of this process."""

    def __init__(self, folder):
        self.folder = folder
        self.process = jax.process_index()
        self.first = [jax.devices()[i] for i in (0, 2, 3)]
        self.second = jax.devices()[1]


def link_of(world, source, to, *specs):
    """Return a connection compiled for the specs, or None if this process is at neither end."""
    if world.process not in (source.process_index, to.process_index):
        return None
    link = Connection(source, to)
    for spec in specs:
        link.compile(spec)
    return link


def device_ids_have_gaps(world):
    ids = [device.id for device in jax.devices()]
    assert ids != list(range(len(ids))), "the other scenarios would not show what they should"
    assert [device.process_index for device in jax.devices()] == [0, 0, 1, 2]


def to_connect_is_to_meet(world):
    link = link_of(world, *world.first[:2])
    reduction = Reduction(world.first)
    for k, connection in enumerate((link, reduction)):
        if connection is not None:
            time.sleep(0.2 * world.process)
            (world.folder / f"{k} of {world.process}").touch()
            connection.connect()
            assert (world.folder / f"{k} of 1").exists()
    assert (world.folder / "1 of 2").exists()


def every_bit_arrives(world):
    source, to = world.second, world.first[1]
    with jax.enable_x64(True):
        specs = [spec_of(message) for message in MESSAGES.values()]
        link = link_of(world, source, to, *specs)
        for seed, spec in enumerate(specs * 2):
            expected = random_bits(spec, seed)
            if world.process == 0:
                sent = jax.device_put(expected, source)
                link.send(sent)
                assert_arrived(sent, expected, source)  # not consumed
            elif world.process == 1:
                assert_arrived(link.receive(spec), expected, to)


def what_arrived_stays(world):
    """Check that a later message does not overwrite an earlier one."""
    spec = jax.ShapeDtypeStruct((1000,), "float32")
    link = link_of(world, world.first[0], world.first[1], spec)
    messages = [random_bits(spec, seed) for seed in range(5)]
    if world.process == 0:
        for message in messages:
            link.send(jax.device_put(message, world.first[0]))
    elif world.process == 1:
        for received, sent in zip([link.receive(spec) for _ in messages], messages, strict=True):
            assert_arrived(received, sent, world.first[1])


def both_ways_at_once(world, count=30):
    spec = {"y": jax.ShapeDtypeStruct((64, 100), "float32"), "n": jax.ShapeDtypeStruct((), "int32")}
    a, b = world.second, world.first[1]
    outbound, inbound = link_of(world, a, b, spec), link_of(world, b, a, spec)
    if world.process == 2:
        return

    def send(link, source, seed):
        for k in range(count):
            link.send(jax.device_put(random_bits(spec, seed + k), source))

    def receive(link, to, seed):
        for k in range(count):
            assert_arrived(link.receive(spec), random_bits(spec, seed + k), to)

    if world.process == 0:
        in_threads(lambda: send(outbound, a, 0), lambda: receive(inbound, a, 1000))
    else:
        in_threads(lambda: receive(outbound, b, 0), lambda: send(inbound, b, 1000))


def a_blocked_receive_delays_nothing(world):
    """Process 0 sends only after it has what process 1 computes and sends while its own receive is pending."""
    spec, large = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((500, 400), "float32")
    a, b = world.first[:2]
    outbound, inbound = link_of(world, b, a, spec), link_of(world, a, b, large)
    if world.process == 1:
        received = []
        waiting = threading.Thread(target=lambda: received.append(inbound.receive(large)), daemon=True)
        waiting.start()
        for k in range(20):  # the receive has begun by one of them
            outbound.send(slow(jax.device_put(np.float32(k), b)))
        waiting.join()
        assert_arrived(received[0], random_bits(large, 7), b)
    elif world.process == 0:
        for k in range(20):
            assert float(outbound.receive(spec)) == k
        inbound.send(jax.device_put(random_bits(large, 7), a))


def a_send_of_what_is_still_computed_delays_nothing(world):
    """Process 0 takes the first message only after the others, whose computations were started later on the same device."""
    spec = jax.ShapeDtypeStruct((), "float32")
    source = world.first[1]  # the one device of its process: all its computations share one thread
    first, second = link_of(world, source, world.first[0], spec), link_of(world, source, world.second, spec)
    if world.process == 1:
        unready = jax.device_put(np.float32(1), source)
        for _ in range(20):
            unready = slow(unready)
        sending = threading.Thread(target=lambda: first.send(unready), daemon=True)
        sending.start()
        for k in range(20):
            second.send(slow(jax.device_put(np.float32(k), source)))
        sending.join()
    elif world.process == 0:
        for k in range(20):
            assert float(second.receive(spec)) == k
        assert float(first.receive(spec)) == 1


@jax.jit
def slow(x):
    """Return x after some milliseconds of computation."""
    return x + jax.lax.fori_loop(0, 30, lambda _, a: a @ a, jnp.zeros((200, 200)))[0, 0]


def in_threads(*functions):
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


GRADIENTS = (
    {
        "few": ((3, 5), "float32"),
        "half": ((4, 7), "bfloat16"),
        "odd": ((20011,), "float32"),
        "alone": ((1051, 1009), "float32"),
        "halves": ((70001,), "bfloat16"),
        "empty": ((0, 2), "float32"),
        "count": ((), "int32"),
    },
    ((), "float32"),
)


def part_of(spec, process):
    """Return numbers of many magnitudes, so that the bits of their sum depend on its order."""
    random = np.random.default_rng(process)
    return jax.tree.map(lambda s: (random.normal(size=s.shape) * np.exp(random.normal(0, 4, size=s.shape))).astype(s.dtype), spec)


def added(spec, order):
    total, *remaining = [part_of(spec, process) for process in order]
    for part in remaining:
        total = jax.tree.map(lambda a, b: np.add(a, b, dtype=a.dtype), total, part)
    return total


def sums_are_in_the_order_of_the_devices(world):
    spec = spec_of(GRADIENTS)
    different = [np.any(x != y) for x, y in zip(*(jax.tree.leaves(added(spec, order)) for order in ((2, 0, 1), (0, 1, 2))), strict=True)]
    assert sum(different) >= 4, "the order should show"
    for order in ((0, 1), (1, 2), (0, 1, 2), (2, 0, 1)):
        if world.process not in order:
            continue  # and needs nothing
        devices = [world.first[process] if process else world.second for process in order]
        device = devices[order.index(world.process)]
        reduction = Reduction(devices)
        reduction.compile(spec)
        reduction.compile(spec[1])
        for _ in range(2):
            assert_arrived(reduction(jax.device_put(part_of(spec, world.process), device)), added(spec, order), device)
            assert_arrived(reduction(jax.device_put(part_of(spec[1], world.process), device)), added(spec[1], order), device)


def links_and_sums_at_once(world, count=20):
    """Use the same two devices for a link each way, for small sums, and for sums that use both directions of the links' connections."""
    spec = jax.ShapeDtypeStruct((40000,), "float32"), jax.ShapeDtypeStruct((100003,), "float32")
    devices = world.first[:2]
    links = [link_of(world, *devices, spec[0]), link_of(world, *devices[::-1], spec[0])]
    if world.process == 2:
        return
    reductions = [Reduction(devices), Reduction(devices[::-1])]  # one after the other, as in one thread
    for reduction in reductions:
        for one in spec:
            reduction.compile(one)
    messages = [random_bits(spec[0], seed) for seed in range(2)]
    parts, totals = part_of(spec, world.process), added(spec, (0, 1))
    device = devices[world.process]

    def link(way):
        for _ in range(count):
            if world.process == way:
                links[way].send(jax.device_put(messages[way], device))
            else:
                assert_arrived(links[way].receive(spec[0]), messages[way], device)

    def sums():
        for _ in range(count):
            for reduction in reductions:
                for part, total in zip(parts, totals, strict=True):
                    assert_arrived(reduction(jax.device_put(part, device)), total, device)

    in_threads(lambda: link(0), lambda: link(1), sums)


def mistakes_are_reported(world):
    spec, other = {"y": jax.ShapeDtypeStruct((2, 3), "float32")}, {"y": jax.ShapeDtypeStruct((3, 2), "bfloat16")}
    a, b, c = world.first[0], world.first[1], world.second
    with pytest.raises(AssertionError, match="not one device in each of several processes"):
        Connection(a, c)
    if world.process == 2:
        with pytest.raises(AssertionError, match="none of the devices is in this process"):
            Connection(a, b)
        return
    link, reduction = link_of(world, a, b), Reduction([a, b])
    use = link.send if world.process == 0 else link.receive
    with pytest.raises(KeyError, match=r"PyTreeDef\(\{'y': \*\}\), \(\(\(2, 3\), dtype\('float32'\)\),\)"):
        use(spec)
    link.compile(spec)
    for call in (use, reduction):
        reduction.compile(spec)
        with pytest.raises(KeyError, match=r"PyTreeDef\(\{'y': \*\}\), \(\(\(3, 2\), dtype\(bfloat16\)\),\)"):
            call(other)
    with pytest.raises(AssertionError, match=r"this process has the (receiving|sending) end"):
        link.receive(spec) if world.process == 0 else link.send(spec)
    with pytest.raises(AssertionError, match=r"not one step but \['(fusion|add)', 'collective-permute'\]: XLA may not run it"):
        Group((a, b)).compile(lambda x: jax.lax.ppermute(x + 1, AXIS, [(0, 1)]), jax.ShapeDtypeStruct((8,), "float32"))


SCENARIOS = (
    device_ids_have_gaps,
    to_connect_is_to_meet,
    every_bit_arrives,
    what_arrived_stays,
    both_ways_at_once,
    a_blocked_receive_delays_nothing,
    a_send_of_what_is_still_computed_delays_nothing,
    sums_are_in_the_order_of_the_devices,
    links_and_sums_at_once,
    mistakes_are_reported,
)


def main(process, port, results):
    """Run all scenarios in one of the processes and write the outcome of each to a file."""
    jax.config.update("jax_num_cpu_devices", DEVICES[process])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", len(DEVICES), process)
    world = Processes(Path(results).parent)
    for scenario in SCENARIOS:
        try:
            scenario(world)
            outcome = "as it should"
        except BaseException:
            outcome = traceback.format_exc()
        with open(results, "a") as file:
            file.write(json.dumps([scenario.__name__, outcome]) + "\n")


@pytest.fixture(scope="module")
def scenario_outcomes(tmp_path_factory):
    """Return the outcomes of all processes for each scenario, and their output."""
    folder = tmp_path_factory.mktemp("links")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    files = [folder / f"{process}.jsonl" for process in range(len(DEVICES))]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    children = []
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    with (folder / "output").open("w") as output:
        try:
            for process, file in enumerate(files):
                if cores:  # a child has the one core it starts with: its computations share one thread, and what blocks that blocks all
                    os.sched_setaffinity(0, {sorted(cores)[process % len(cores)]})
                command = [sys.executable, "-m", "tests.jpipe.processes.test_connections", str(process), str(port), str(file)]
                children.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
            if cores:
                os.sched_setaffinity(0, cores)
            stop = time.monotonic() + LIMIT
            while time.monotonic() < stop and any(child.poll() is None for child in children):
                time.sleep(0.05)
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
            for child in children:
                child.kill()
                child.wait()
    outcomes = [dict(map(json.loads, file.read_text().splitlines())) if file.exists() else {} for file in files]
    by_scenario = {scenario.__name__: [process.get(scenario.__name__, "not over") for process in outcomes] for scenario in SCENARIOS}
    return by_scenario, (folder / "output").read_text()


@pytest.mark.slow
def test_three_processes(scenario_outcomes, subtests):
    outcomes, output = scenario_outcomes
    for scenario in SCENARIOS:
        with subtests.test(scenario.__name__):
            results = outcomes[scenario.__name__]
            assert results == ["as it should"] * len(DEVICES), "\n".join([*results, output[-3000:]])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
