"""The machine at hand as a topology."""

import os
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jpipe_planner.machine import local


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
