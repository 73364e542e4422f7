"""The closed form of a worker's memory agrees with the simulator, which counts the arrays of every instruction."""

import math
import random

import pytest

import jpipe
from benchmarks.papers.partition import Placed, Problem, evaluate_partition
from jpipe_planner.cost.memory import stage_bytes, waiting_gradients, waiting_inputs
from jpipe_planner.machine.topology import Topology


def shares(replicas, rng):
    """Return the memory of each stage of a random pipeline relative to the simulator's."""
    depth = len(replicas)
    layers = [
        jpipe.programs.LayerCost(
            forward=1.0,
            backward=2.0,
            outputs=rng.randint(1, 30),
            weights=rng.choice([1, 20, 400]),
            optimizer=rng.randint(0, 80),
            state=rng.randint(0, 3),
            residuals={"none": rng.randint(20, 60), "dots_saveable": rng.randint(5, 20)},
            temporary=rng.randint(0, 20),
        )
        for _ in range(depth + 2)
    ]
    common = math.lcm(*replicas)
    problem = Problem(
        layers,
        Topology.flat(sum(replicas), bandwidth=1.0),
        microbatches=rng.choice(["replicas", common, 2 * common]),
        inputs=rng.randint(1, 30),
        labels=rng.randint(0, 5),
    )
    sync_state = rng.random() < 0.5
    policy = rng.choice(["none", "full", "dots_saveable"])
    cuts = [0, *sorted(rng.sample(range(1, depth + 2), depth - 1)), depth + 2]
    stages = [Placed(cuts[s], cuts[s + 1], sum(replicas[:s]), replicas[s], policy) for s in range(depth)]
    ids = [f"layer{i}" for i in range(len(layers))]
    partition = evaluate_partition(problem, stages)
    plan = partition.plan(ids, problem).model_copy(update={"sync_state": sync_state})
    costs = jpipe.programs.sum_layer_costs(plan, dict(zip(ids, layers, strict=True)), inputs=problem.inputs, labels=problem.labels)
    prediction = jpipe.simulate(jpipe.lower(plan, batches=max(2, math.ceil(40 / plan.microbatches))), costs)
    peaks = [max(prediction.peak_bytes[w] for w in workers) for workers in plan.stage_workers]
    return [memory / peak for memory, peak in zip(partition.memory, peaks, strict=True)]


@pytest.mark.parametrize(
    ("replicas", "above"),
    [((1,), 1.0), ((1, 1), 1.15), ((1, 1, 1, 1), 1.2), ((2,), 1.15), ((3, 3), 1.15), ((2, 2, 2), 1.2)],
)
def test_equal_stages_never_hold_more_than_counted(replicas, above):
    rng = random.Random(0)
    ratios = [share for _ in range(8) for share in shares(replicas, rng)]
    assert min(ratios) >= 1.0
    assert max(ratios) <= above


@pytest.mark.slow
def test_stages_of_different_replicas_hold_little_more_than_counted():
    rng = random.Random(1)
    ratios = [share for _ in range(25) for share in shares([rng.randint(1, 4) for _ in range(rng.randint(2, 4))], rng)]
    assert min(ratios) >= 0.9
    assert sum(share >= 1.0 for share in ratios) >= 0.95 * len(ratios)


def test_gradients_wait_where_the_next_stage_has_more_replicas():
    assert [int(waiting_gradients(r, after)) for r, after in ((1, 3), (2, 3), (2, 2), (3, 1), (2, 0))] == [2, 1, 0, 0, 0]


def test_inputs_wait_where_the_stage_before_has_more_in_flight():
    assert waiting_inputs(1, 1, 2) == 1  # a straight pipeline
    assert waiting_inputs(1, 2, 9) == 4  # nine in flight are at most five for each of two replicas, one of them computed
    assert waiting_inputs(3, 1, 0) == 0  # nothing before it


@pytest.mark.parametrize("accumulators", [100, 200])  # as large as the weights, and where these are kept in half the bits
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream_flush", "pipedream", "pipedream_2bw"])
def test_weights_gradients_and_optimizer_state_take_what_is_simulated(schedule, accumulators):
    for replicas in ((1, 1, 1), (2, 2, 2), (2, 1, 1), (3, 1, 1)):
        plan, rules = jpipe.Plan.even("abc", 3, schedule, 6, replicas=replicas), jpipe.schedules.SCHEDULES[schedule]
        costs = [jpipe.programs.StageCost(weights=100, accumulators=accumulators, optimizer=50, update=0.01)] * 3
        simulated = jpipe.simulate(jpipe.lower(plan, 8), costs).held_bytes
        for (s, _), expected in zip(plan.workers, simulated, strict=True):
            numbers = {"versions": rules.versions_alive(plan, s), "in_flight": rules.in_flight(plan, s), "replicas": replicas[s]}
            assert stage_bytes(100, 50, 0, 0, 0, 0, 0, 0, **numbers, waiting=0, accumulators=accumulators) == expected
