"""The machine at hand as a topology."""

import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jpipe
from jpipe.runtime import OverlapTimes
from jpipe.runtime._transport import arrived
from jpipe.runtime.timing._overlap import _Moves
from jpipe_planner.cost.price import all_reduce_seconds
from jpipe_planner.machine import local


def test_the_devices_here_and_their_links():
    topology = local.local_topology(cores=1.5)
    assert topology.num_devices == len(jax.devices())
    assert topology.levels[0].bandwidth > 0
    assert topology.levels[0].latency >= 0
    assert topology.cores == 1.5
    assert topology.device.memory == local.host_memory() / len(jax.devices())
    assert local.local_topology(3).num_devices == 3
    assert local.local_topology(1).levels[0].latency == 0


def machine(monkeypatch, transfer, sums, ends=2, processes=1, latency=3e-5, platform="cpu", overlaps=True):
    """Replace the measurements by a machine's with these bandwidths of transfers and sums, between devices of so many processes.

    They overlap with a computation of 9 seconds, or not.
    """

    def time_overlap(devices, elements):
        hops, bytes_ = 2 * (ends - 1), 4 * elements
        moved = {"transfer": hops * (latency + bytes_ / transfer), "sum": hops * (latency + bytes_ / ends / sums)}
        return {name: OverlapTimes(9.0, seconds, 9.0 if overlaps else 9.0 + seconds) for name, seconds in moved.items()}

    monkeypatch.setattr(local.jpipe.runtime, "time_overlap", time_overlap)
    facts = {"platform": platform, "device_kind": platform, "memory_stats": lambda: None}
    devices = [SimpleNamespace(**facts, process_index=n if processes > 1 else 0) for n in range(max(processes, 2))]
    monkeypatch.setattr(local.jax, "devices", lambda: devices)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(("transfer", "sums", "ends"), [(2e9, 5e9, 2), (5e9, 2e9, 2), (2e9, 2e9, 4), (5e9, 2e9, 8)])
def test_a_link_is_as_fast_as_the_slower_one_of_transfers_and_sums(monkeypatch, transfer, sums, ends, platform, overlaps):
    machine(monkeypatch, transfer, sums, ends, processes=ends if ends > 2 else 1, platform=platform, overlaps=overlaps)
    topology = local.local_topology()
    level = topology.levels[0]
    assert topology.device.overlap == ("transfers and sums" if overlaps else "none")
    assert level.bandwidth == pytest.approx(2e9, rel=1e-6)
    assert level.latency == pytest.approx(3e-5, rel=1e-3)  # and 4 bytes
    # So the price of a sum in a ring is what was measured of sums, where these are slower.
    if sums <= transfer:
        expected = 2 * (ends - 1) * (3e-5 + 4 * 1000 / ends / sums)
        assert all_reduce_seconds(4000, ends, jpipe.Link(level.bandwidth, level.latency)) == pytest.approx(expected, rel=1e-3)


def test_links_between_some_of_the_processes_are_measured_between_these(monkeypatch):
    machine(monkeypatch, 2e9, 2e9, ends=3, processes=8)
    assert local.local_topology(3).levels[0].bandwidth == pytest.approx(2e9, rel=1e-6)


def test_a_process_uses_the_cores_it_is_pinned_to(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    assert local.usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert local.usable_cores() == 32


@pytest.mark.parametrize(
    ("computation", "moved", "both", "hidden"),
    [
        (3.0, 1.0, 3.0, True),
        (3.0, 1.0, 3.4, True),
        (3.0, 1.0, 3.6, False),
        (3.0, 1.0, 4.0, False),
        (1.0, 3.0, 3.1, True),
        (3.0, 1.0, 9.0, False),
        (3.0, 1.0, 2.5, True),
        (0.0, 1.0, 1.0, False),
    ],
)
def test_more_than_half_of_the_shorter_one_has_to_be_hidden(computation, moved, both, hidden):
    times = OverlapTimes(computation, moved, both)
    assert local.overlap_of({"transfer": times, "sum": times}) == ("transfers and sums" if hidden else "none")


@pytest.mark.parametrize(
    ("platform", "transfer", "sums", "expected"),
    [
        ("gpu", True, True, "transfers and sums"),
        ("gpu", True, False, "transfers"),
        ("gpu", False, True, "none"),
        ("gpu", None, None, "none"),
        ("cpu", True, True, "transfers and sums"),
        ("cpu", False, False, "none"),
    ],
)
def test_what_was_measured_decides(monkeypatch, platform, transfer, sums, expected):
    both = {True: 3.0, False: 4.0}
    times = (
        None
        if transfer is None
        else {name: OverlapTimes(3.0, 1.0, both[is_hidden]) for name, is_hidden in (("transfer", transfer), ("sum", sums))}
    )
    monkeypatch.setattr(local.jpipe.runtime, "time_overlap", lambda devices, elements: times)
    device = SimpleNamespace(platform=platform, device_kind=platform, memory_stats=lambda: None, process_index=0)
    monkeypatch.setattr(local.jax, "devices", lambda: [device])
    lines = []
    assert local.local_topology(2, report=lines.append).device.overlap == expected
    assert lines == ([] if times is None else [local.overlap_words(times)])
    assert all(line.startswith("overlap: a computation hides ") and line.endswith(f"assume: {expected}") for line in lines)


def test_a_transfer_and_a_sum_are_timed_and_arrive_whole():
    times = local.jpipe.runtime.time_overlap(jax.devices()[:2])
    assert list(times) == ["transfer", "sum"]
    assert all(seconds > 0 for each in times.values() for seconds in each)
    moves = _Moves(jax.devices()[:2], 200)
    assert np.array_equal(arrived(moves.transfer()), np.ones(200))
    sums = list(map(arrived, moves.sum()))
    assert len(sums) == 2
    assert all(np.array_equal(each, np.full(200, 2.0)) for each in sums)
    assert local.jpipe.runtime.time_overlap(jax.devices()[:1]) is None
