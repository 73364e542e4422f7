"""A simulation of one group of pipelines that do the same as the others equals that of all."""

import pytest

import jpipe
from jpipe_planner.cost import simulated
from jpipe_planner.cost.bound import has_bounds, unhindered_seconds
from jpipe_planner.cost.copies import ALL, Copies, copies_of
from jpipe_planner.cost.simulated import network, simulate_plan, window
from jpipe_planner.machine.topology import Topology
from tests.planner.invented import invented_profile

FLAT, SERVERS = Topology.flat(8, 2e9, latency=1e-5), Topology(levels=({"count": 4, "bandwidth": 1e10}, {"count": 2, "bandwidth": 2e9}))
SLOW = Topology(levels=({"count": 2, "bandwidth": 2e9}, {"count": 8, "bandwidth": 2e9, "latency": 1e-4}))

BLOCKING = FLAT.model_copy(update={"device": FLAT.device.model_copy(update={"overlap": "none"})})


def even(replicas, schedule="pipedream", **fields):
    return jpipe.Plan.even([f"layer_{n}" for n in range(8)], len(replicas), schedule, 16, replicas=list(replicas), **fields)


def in_parts(plan):
    return plan.model_copy(update={"stages": tuple(stage.model_copy(update={"sum_parts": (3, 5)}) for stage in plan.stages)})


@pytest.mark.parametrize(
    ("plan", "topology", "copies"),
    [
        (even([8]), FLAT, Copies(8, 1)),
        (even([4, 4], "pipedream_2bw"), FLAT, Copies(4, 1)),
        (even([4, 4], "gpipe", keep_together="stages"), FLAT, Copies(4, 1)),
        (even([4, 4], "zb_h1"), FLAT, Copies(4, 1)),
        (even([4, 4, 4, 4], "interleaved_1f1b", ranks=((0, 2), (1, 3))), FLAT, Copies(4, 1)),
        (even([8, 4, 4]), Topology.flat(16, 2e9), Copies(4, 1)),
        (in_parts(even([8], "pipedream_flush")), SERVERS, Copies(8, 1)),
        (even([4, 4]), SERVERS, Copies(4, 4)),  # all go through one port
        (even([4, 4], keep_together="stages"), SERVERS, Copies(4, 2)),  # two in each server; only one of them is at its beginning
        (even([8, 8]), SLOW, Copies(8, 2)),  # two share the port of a server
        (even([8, 8], "pipedream_2bw"), SLOW, Copies(8, 2)),
        (even([4, 4], "pipedream_2bw", max_in_flight=2), BLOCKING, Copies(4, 1)),
        (even([4, 2, 1]), FLAT, Copies(1, 1)),
    ],
)
def test_one_group_of_pipelines_is_simulated_for_all(monkeypatch, plan, topology, copies):
    profile = invented_profile(3)
    costs, link = profile.stage_costs(plan, 1), network(plan, topology)
    assert copies_of(plan, topology, waits=False) == copies
    assert copies_of(plan, topology, waits=True) == Copies(copies.pipelines, copies.pipelines)
    some = simulate_plan(plan, costs, topology)
    if has_bounds(plan):
        bounds = [unhindered_seconds(plan, costs, link, *window(plan), those) for those in (copies, ALL)]
        assert bounds[0] == pytest.approx(bounds[1], rel=1e-12)
    monkeypatch.setattr(simulated, "copies_of", lambda *_, **__: ALL)
    every = simulate_plan(plan, costs, topology)
    assert some == every
