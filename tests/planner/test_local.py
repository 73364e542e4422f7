"""The machine at hand as a topology."""

import jax

from planner import local


def test_the_devices_here_their_links_and_what_they_share(monkeypatch):
    monkeypatch.setattr(local, "STEPS", 4)
    monkeypatch.setattr(local, "_WIDE", 64)
    found = local.local_topology(dispatch=0.0)
    assert found.num_workers == len(jax.devices())
    assert found.levels[0].bandwidth > 0
    assert found.levels[0].latency >= 0
    assert 1 <= found.cores <= 10 * len(jax.devices())
    assert found.device.memory == local.host_memory() / len(jax.devices())
    assert local.local_topology(3).num_workers == 3


def test_what_computations_cost_is_no_part_of_a_link(monkeypatch):
    monkeypatch.setattr(local, "STEPS", 4)
    monkeypatch.setattr(local, "_WIDE", 64)
    assert local.local_topology(dispatch=10.0).levels[0].latency == 0
