"""Batches that are predicted from the program of the first one, compared with simulations of all instructions."""

import pytest

from jpipe import InputError, Link, Plan, lower, simulate
from jpipe.programs import StageCost, has_equal_batches, simulate_batches, uses_by_costs
from jpipe.schedules import SCHEDULES

BATCHES, MOST, M = 2, 8, 4
FLUSHING = [name for name, rules in SCHEDULES.items() if rules.flushes and "order" not in rules.options]


def plan_of(schedule, replicas=1, **fields):
    chunks = {"v": 2, "looped": 2}.get(SCHEDULES[schedule].layout, 1)
    return Plan.even(
        "abcd", 2 * chunks, schedule, M * replicas, replicas=replicas, **({"chunks_per_rank": 2} if chunks > 1 else {}), **fields
    )


def costs_of(plan, shared=()):
    last = plan.depth - 1
    ends = [{"outputs": 3, "kept_outputs": 1, "message": 4}] * last + [{"labels": 2}]
    sizes = [{"inputs": 3, "gradient": 4 * (s > 0), **end} for s, end in enumerate(ends)]
    times = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.5, "update": 0.5}
    held = {
        "weights": 5,
        "frozen": 1,
        "accumulators": 4,
        "optimizer": 8,
        "residuals": 5,
        "stash": 2,
        "state": 1,
        "temporary": 7,
        "squares": 1,
    }
    return [StageCost(**times, **held, **size, shared=shared) for size in sizes]


def in_servers(source, target):
    """Return a link between ranks of which two share the ports of a server."""
    return Link(bandwidth=2.0, latency=0.25, ports=(("out", source // 2), ("in", target // 2)))


def seconds_of_a_batch(program, costs, overlap):
    """Return the time between the first computations of a rank in two batches, at the end of a long run."""
    row = next(filter(None, simulate(program, costs, in_servers, overlap, brief=True).timeline))
    each = len(row) // program.end
    return (row[-each].start - row[-4 * each].start) / 3


def check_equals_simulation(plan, costs, overlap="transfers and sums", global_norm=False, workers=None):
    options = {"global_norm": global_norm, **uses_by_costs(costs), "workers": workers}
    program = lower(plan, 1, **options)
    known, _ = simulate_batches(program, BATCHES, costs, in_servers, overlap, until_periodic=False)
    # Sends of a batch that is not over are counted in a simulation of one batch more: two simulations show what each batch adds.
    long, longer = (simulate(lower(plan, BATCHES + more, **options), costs, in_servers, overlap, brief=True) for more in (1, 2))
    for short, row, workers_of_rank in zip(known.timeline, longer.timeline, plan.rank_workers, strict=True):
        if row:
            each = len(row) // (BATCHES + 2)
            assert len(short) > each * BATCHES, f"workers {workers_of_rank} have begun the next batch"
            assert short[:-1] == row[: len(short) - 1]
            assert short[-1].start == row[len(short) - 1].start
    assert (known.held_bytes, known.peak_bytes) == (long.held_bytes, long.peak_bytes)
    each = [after - before for before, after in zip(long.moved_bytes, longer.moved_bytes, strict=True)]
    assert known.moved_bytes == tuple(each)
    shorter, period = simulate_batches(program, MOST, costs, in_servers, overlap)
    if period is not None:
        assert period == pytest.approx(seconds_of_a_batch(lower(plan, MOST, **options), costs, overlap), rel=1e-9)
    assert [known.held_bytes, known.peak_bytes, known.moved_bytes] == [shorter.held_bytes, shorter.peak_bytes, shorter.moved_bytes]
    return period


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", FLUSHING)
def test_batches_are_those_of_a_simulation_of_all(schedule, replicas):
    plan = plan_of(schedule, replicas)
    assert check_equals_simulation(plan, costs_of(plan)) is not None, "it comes to equal batches"


@pytest.mark.parametrize("overlap", ["none", "transfers"])
@pytest.mark.parametrize("schedule", ["pipedream_flush", "zb_h1"])
def test_batches_whose_transfers_block_are_those_of_a_simulation(schedule, overlap):
    plan = plan_of(schedule, 2)
    check_equals_simulation(plan, costs_of(plan), overlap)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_updates_that_wait_for_other_stages_do_so_in_each_batch(schedule):
    plan = plan_of(schedule, 2)
    check_equals_simulation(plan, costs_of(plan), global_norm=True)
    check_equals_simulation(plan, costs_of(plan, shared=(2,)))


def test_sums_in_parts_and_one_of_two_pipelines():
    plan = Plan.even("abcd", 2, "pipedream_flush", 2 * M, replicas=2, sum_parts=2)
    check_equals_simulation(plan, costs_of(plan))
    check_equals_simulation(plan, costs_of(plan), workers=[workers[0] for workers in plan.stage_workers])


def test_only_plans_with_equal_batches_are_predicted_so():
    flushes = plan_of("gpipe", 2)
    agree = {"every": 2, "fragments": "stages"}
    others = [plan_of("pipedream_2bw", 1), plan_of("gpipe", 2, shard_optimizer=True), plan_of("gpipe", 2, agree=agree)]
    assert has_equal_batches(flushes)
    assert not any(map(has_equal_batches, others))
    for program in (*(lower(plan, 1) for plan in others), lower(flushes, 2)):
        with pytest.raises(InputError, match=r"^simulate_batches: expected the program of the first batch .* use jpipe\.simulate$"):
            simulate_batches(program, BATCHES, [StageCost()] * program.plan.depth)
