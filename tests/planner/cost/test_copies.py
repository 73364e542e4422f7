"""A simulation of a few pipelines that do the same as the others equals that of all."""

import pytest

import jpipe
from jpipe_planner.cost import simulated
from jpipe_planner.cost.bound import flush_seconds, has_bounds, port_seconds, rank_seconds, unhindered_seconds
from jpipe_planner.cost.copies import Part, part_of
from jpipe_planner.cost.devices import network
from jpipe_planner.cost.simulated import simulate_plan, window
from jpipe_planner.machine.topology import Topology
from tests.planner.invented import invented_profile

FLAT, SERVERS = Topology.flat(8, 2e9, latency=1e-5), Topology(levels=({"count": 4, "bandwidth": 1e10}, {"count": 2, "bandwidth": 2e9}))
SLOW = Topology(levels=({"count": 2, "bandwidth": 2e9}, {"count": 8, "bandwidth": 2e9, "latency": 1e-4}))

BLOCKING_24 = Topology.flat(24, 2e9, latency=1e-5).model_copy(update={"device": FLAT.device.model_copy(update={"overlap": "none"})})
BLOCKING = FLAT.model_copy(update={"device": FLAT.device.model_copy(update={"overlap": "none"})})


def even(replicas, schedule="pipedream", **fields):
    return jpipe.Plan.even([f"layer_{n}" for n in range(8)], len(replicas), schedule, 16, replicas=list(replicas), **fields)


def in_parts(plan):
    return plan.model_copy(
        update={"stages": tuple(stage.model_copy(update={"sum_parts": (1, len(stage.layers) - 1)}) for stage in plan.stages)}
    )


@pytest.mark.parametrize(
    ("plan", "topology", "simulated_replicas"),
    [
        (even([8]), FLAT, (2,)),  # a sum takes two
        (even([4, 4], "pipedream_2bw"), FLAT, (2, 2)),
        (even([4, 4], "gpipe", keep_together="stages"), FLAT, (2, 2)),
        (even([4, 4], "zb_h1"), FLAT, (2, 2)),
        (even([4, 4], update_every="replicas"), FLAT, (2, 2)),
        (even([4, 4, 4, 4], "interleaved_1f1b", ranks=((0, 2), (1, 3))), FLAT, (2, 2, 2, 2)),
        (even([8, 4, 4]), Topology.flat(16, 2e9), (4, 2, 2)),
        (in_parts(even([8], "pipedream_flush")), SERVERS, (2,)),
        (even([4, 4]), SERVERS, (4, 4)),  # all go through one port
        (even([8, 8]), SLOW, (2, 2)),  # two share the port of a server
        (even([8, 8], "pipedream_2bw"), SLOW, (2, 2)),
        (even([8, 8], "pipedream_2bw", max_in_flight=2), SLOW, (2, 2)),
        (even([8, 8], keep_together="stages"), SLOW, (2, 2)),
        (even([4, 4], "pipedream_2bw"), BLOCKING, (2, 2)),
        (even([4, 2, 1]), FLAT, (4, 2, 1)),
        (in_parts(even([4, 4], "pipedream_flush")), BLOCKING, (2, 2)),
        (in_parts(even([8, 16], "pipedream_flush")), BLOCKING_24, (8, 16)),  # the pipelines stop for the sums at different times
    ],
)
def test_a_few_pipelines_are_simulated_for_all(monkeypatch, plan, topology, simulated_replicas):
    costs = invented_profile(3).stage_costs(plan, 1)
    part, whole = part_of(plan, topology, waits=False), Part(plan, network(plan, topology))
    assert part.plan.replicas == simulated_replicas
    assert part_of(plan, topology, waits=True).plan == plan
    some = simulate_plan(plan, costs, topology)
    for bound in (port_seconds, unhindered_seconds) if has_bounds(plan) else (flush_seconds,):
        bounds = [bound(of, costs, link, *(window(of) if bound is unhindered_seconds else ())) for of, link, *_ in (part, whole)]
        assert bounds[0] == pytest.approx(bounds[1], rel=1e-12)
    assert rank_seconds(part.plan, costs, None) == pytest.approx(rank_seconds(plan, costs, None), rel=1e-12)
    monkeypatch.setattr(simulated, "part_of", lambda *_: whole)
    every = simulate_plan(plan, costs, topology)
    assert (some.held_bytes, some.peak_bytes) == (every.held_bytes, every.peak_bytes)
    assert (some.batch_seconds, some.bubble) == pytest.approx((every.batch_seconds, every.bubble), rel=1e-9)
    assert some.sent_bytes == pytest.approx(every.sent_bytes, rel=1e-9, abs=2), "rounded to bytes for each sum"
