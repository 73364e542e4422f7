"""The bound that walks through the order of a schedule: as long as the simulation where messages do not wait, and never longer."""

import pytest

import jpipe
from jpipe_planner.cost.bound import order_seconds
from jpipe_planner.cost.copies import part_of
from jpipe_planner.cost.simulated import simulate_plan, window
from jpipe_planner.machine.topology import Topology

SCHEDULES = {name: rules for name, rules in jpipe.schedules.SCHEDULES.items() if rules.flushes and "order" not in rules.options}
OVERLAPS = {"memory": 1e12, "overlap": "transfers and sums"}
UPDATE = 0.003
SEPARATE = Topology(levels=[{"count": 8, "bandwidth": 1e9, "latency": 1e-3}], device=OVERLAPS)
SHARED = Topology(levels=[{"count": 2, "bandwidth": 1e9}, {"count": 4, "bandwidth": 2e8, "latency": 1e-3}], device=OVERLAPS)


def plan_and_costs(name, replicas, outputs):
    chunks = 2 if SCHEDULES[name].layout in ("looped", "v") else 1
    depth = 8 // replicas * chunks
    layers = [str(n) for n in range(depth)]
    plan = jpipe.Plan.even(layers, depth, name, 16 * replicas, replicas=replicas, chunks_per_rank=chunks)
    return plan, [cost_of(s, outputs) for s in range(depth)]


def cost_of(s, outputs, update=UPDATE, shared=()):
    return jpipe.programs.StageCost(
        forward=0.01 + 0.001 * s,
        backward=0.02 + 0.001 * s,
        backward_input=0.011,
        backward_weight=0.009 + 0.001 * s,
        update=update,
        outputs=outputs,
        message=outputs,
        gradient=outputs,
        inputs=outputs,
        accumulators=10**6,
        shared=shared,
    )


def bound_and_simulation(plan, costs, topology, *, global_norm=False):
    part = part_of(plan, topology, waits=global_norm or bool(costs[0].shared))
    simulated = simulate_plan(plan, costs, topology, global_norm, least=0.0)
    return order_seconds(part.plan, costs, part.link, *window(part.plan), global_norm), simulated.batch_seconds


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("replicas", [1, 2])
def test_without_waiting_messages_it_is_the_simulation(name, replicas):
    bound, simulated = bound_and_simulation(*plan_and_costs(name, replicas, 1000), SEPARATE)
    several = replicas > 1 and SCHEDULES[name].layout in ("looped", "v")  # stages of a rank, whose sums end at about the same time
    assert simulated - UPDATE * several <= bound * (1 + 1e-9)
    assert bound <= simulated * (1 + 1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("replicas", [1, 4])
def test_it_is_never_longer_than_the_simulation(name, replicas):
    bound, simulated = bound_and_simulation(*plan_and_costs(name, replicas, 4_000_000), SHARED)
    assert 0 < bound <= simulated * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name, rules in SCHEDULES.items() if rules.layout in ("looped", "v")])
@pytest.mark.parametrize(("shared", "global_norm"), [((), True), ((2, 3), False), ((0, 1), False)])
@pytest.mark.parametrize("late", [2, 3])
def test_updates_that_wait_for_other_stages_delay_no_other_chunk(name, shared, global_norm, late):
    """A long update comes after all computations of its rank if it needs the norm, or gradients of a shared parameter."""
    plan = jpipe.Plan.even("abcd", 4, name, 4 if name == "dualpipe_v" else 2, chunks_per_rank=2)
    costs = [cost_of(s, 1000, 0.05 if s == late else UPDATE, (1000 * (s in shared),) if shared else ()) for s in range(4)]
    bound, simulated = bound_and_simulation(plan, costs, SEPARATE, global_norm=global_norm)
    assert 0.85 * simulated <= bound <= simulated * (1 + 1e-9)


def test_a_plan_without_a_flush_has_none():
    plan = jpipe.Plan.even(["a", "b"], 2, "pipedream_2bw", 4)
    assert order_seconds(plan, [jpipe.programs.StageCost()] * 2, lambda *_: jpipe.Link(), 1, 2) == 0
