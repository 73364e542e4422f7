"""The machine at hand as a topology."""

import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jpipe.runtime import OverlapTimes
from jpipe_planner.machine import local, overlap


def test_the_devices_here_their_links_and_what_they_share(monkeypatch):
    monkeypatch.setattr(local, "STEPS", 4)
    monkeypatch.setattr(local, "_WIDE", 64)
    topology = local.local_topology(dispatch=0.0)
    assert topology.num_devices == len(jax.devices())
    assert topology.levels[0].bandwidth > 0
    assert topology.levels[0].latency >= 0
    assert 1 <= topology.cores <= len(jax.devices())
    assert topology.device.memory == local.host_memory() / len(jax.devices())
    assert local.local_topology(3).num_devices == 3
    assert topology.device.overlap == "transfers and sums"


def test_the_cost_of_computations_is_not_part_of_a_link(monkeypatch):
    monkeypatch.setattr(local, "STEPS", 4)
    monkeypatch.setattr(local, "_WIDE", 64)
    assert local.local_topology(dispatch=10.0).levels[0].latency == 0


class Machine:
    """A machine whose clock only its messages and products move on."""

    def __init__(self, bandwidth, latency, cores, dispatch):
        self.now, self.bandwidth, self.latency, self.cores, self.dispatch = 0.0, bandwidth, latency, cores, dispatch

    def pipeline(self, stack, plan, loss, rule, devices):
        def step(state, batch):
            hops = 2 * (plan.depth - 1)
            self.now += hops * (self.latency + batch[0].nbytes / self.bandwidth) + (hops + 1) * self.dispatch
            return state, SimpleNamespace(losses=np.zeros(local.STEPS))

        return SimpleNamespace(init=lambda key, batch: None, step=step, params=lambda state: ())

    def finish(self, products):
        self.now += len(products) / min(max(len(products), 1), self.cores)


def test_bandwidth_latency_and_cores_are_those_of_the_machine(monkeypatch):
    machine = Machine(bandwidth=2e9, latency=3e-5, cores=2, dispatch=1e-4)
    monkeypatch.setattr(local, "_WIDE", 4)
    monkeypatch.setattr(local, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    monkeypatch.setattr(local.jpipe, "Pipeline", machine.pipeline)
    monkeypatch.setattr(local.jax, "jit", lambda function: lambda x: "a product")
    monkeypatch.setattr(local.jax, "block_until_ready", machine.finish)
    topology = local.local_topology(dispatch=machine.dispatch)
    assert topology.levels[0].bandwidth == pytest.approx(2e9, rel=1e-6)
    assert topology.levels[0].latency == pytest.approx(3e-5, rel=1e-3)  # and 4 bytes
    assert topology.cores == pytest.approx(2)


@pytest.mark.parametrize(("alone", "together", "cores"), [(5.0, 0.1, 8), (0.1, 5.0, 1), (1.0, 2.0, 4)])
def test_cores_are_between_one_and_the_number_of_devices_for_any_measured_times(monkeypatch, alone, together, cores):
    clock = SimpleNamespace(now=0.0)

    def finish(products):
        clock.now += alone if len(products) == 1 else together

    monkeypatch.setattr(local, "_WIDE", 4)
    monkeypatch.setattr(local, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(local.jax, "jit", lambda function: lambda x: x)
    monkeypatch.setattr(local.jax, "block_until_ready", finish)
    assert local._at_once(jax.devices()) == cores


def test_a_process_uses_the_cores_it_is_pinned_to_and_several_share_all(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7}, raising=False)
    assert local.usable_cores() == 3
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert local._at_once(jax.devices()) == 32 / len(jax.local_devices())
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
    assert overlap.overlaps(computation, moved, both) is hidden


@pytest.mark.parametrize(
    ("platform", "transfer", "sums", "expected"),
    [
        ("gpu", True, True, "transfers and sums"),
        ("gpu", True, False, "transfers"),
        ("gpu", False, True, "none"),
        ("gpu", None, None, "none"),
        ("cpu", False, False, "transfers and sums"),
    ],
)
def test_what_was_measured_decides_and_else_what_is_usual(monkeypatch, platform, transfer, sums, expected):
    both = {True: 3.0, False: 4.0}
    times = (
        None
        if transfer is None
        else {name: OverlapTimes(3.0, 1.0, both[is_hidden]) for name, is_hidden in (("transfer", transfer), ("sum", sums))}
    )
    monkeypatch.setattr(local.jpipe.runtime, "time_overlap", lambda devices: times)
    monkeypatch.setattr(local, "_hop_seconds", lambda elements, dispatch: 0.0)
    device = SimpleNamespace(platform=platform, device_kind=platform, memory_stats=lambda: None, process_index=0)
    monkeypatch.setattr(local.jax, "devices", lambda: [device])
    monkeypatch.setattr(local, "_at_once", lambda devices: 1.0)
    lines = []
    assert local.local_topology(report=lines.append).device.overlap == expected
    assert lines == ([] if times is None or platform == "cpu" else [overlap.overlap_words(times)])
    assert all(line.startswith("overlap: a computation hides ") and line.endswith(f"assume: {expected}") for line in lines)


def test_a_transfer_and_a_sum_are_timed_and_arrive_whole():
    times = local.jpipe.runtime.time_overlap(jax.devices()[:2])
    assert list(times) == ["transfer", "sum"]
    assert all(seconds > 0 for each in times.values() for seconds in each)
    assert local.jpipe.runtime.time_overlap(jax.devices()[:1]) is None
