"""Batches that are predicted from a program that repeats, compared with simulations of all instructions."""

import pytest

from jpipe import InputError, Link, Plan, lower, simulate
from jpipe.ops import OPS
from jpipe.programs import StageCost, has_repeated_batches, lower_repeated, simulate_batches, uses_by_costs
from jpipe.schedules import SCHEDULES

FIRST, BATCHES, LATE, MOST, M = 3, 2, 12, 20, 4
ALL = [name for name, rules in SCHEDULES.items() if "order" not in rules.options]


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


def seconds_of_a_batch(plan, prediction, batches):
    """Return the mean time from a forward of a rank to the forward `batches` batches later, at the end of a run, without the drain."""
    row, m = next(filter(None, prediction.timeline)), plan.microbatches
    starts = {span.microbatch: span.start for span in row if OPS[span.op].begins and not span.chunk}
    last = max(starts)
    return (starts[last] - starts[last - batches * m]) / batches


def check_equals_simulation(plan, costs, overlap="transfers and sums", global_norm=False, workers=None, settles=True):
    uses = {"global_norm": global_norm, **uses_by_costs(costs)}
    assert has_repeated_batches(plan, **uses)
    program = lower_repeated(plan, workers=workers, **uses)
    known, _ = simulate_batches(program, FIRST, BATCHES, costs, in_servers, overlap, until_periodic=False)
    lowered = [lower(plan, batches, workers=workers, **uses) for batches in (MOST - 1, MOST)]
    long, longer = (simulate(each, costs, in_servers, overlap, brief=True) for each in lowered)
    assert any(span.microbatch == (FIRST + BATCHES) * plan.microbatches for row in known.timeline for span in row)
    for short, row in zip(known.timeline, longer.timeline, strict=True):
        assert len(short) < len(row) or not row
        assert [span[:4] for span in short] == [span[:4] for span in row[: len(short)]]
    assert (known.held_bytes, known.peak_bytes) == (long.held_bytes, long.peak_bytes)
    each = [after - before for before, after in zip(long.moved_bytes, longer.moved_bytes, strict=True)]
    assert [moved / program.end for moved in known.moved_bytes] == each
    shorter, seconds = simulate_batches(program, FIRST, LATE, costs, in_servers, overlap)
    assert [known.held_bytes, known.peak_bytes, known.moved_bytes] == [shorter.held_bytes, shorter.peak_bytes, shorter.moved_bytes]
    if settles:
        assert seconds == pytest.approx(seconds_of_a_batch(plan, longer, 2), rel=1e-9)


@pytest.mark.thinned
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("schedule", ALL)
def test_batches_are_those_of_a_simulation_of_all(schedule, replicas):
    plan = plan_of(schedule, replicas)
    check_equals_simulation(plan, costs_of(plan))


@pytest.mark.parametrize("overlap", ["none", "transfers"])
@pytest.mark.parametrize("schedule", ["pipedream_flush", "zb_h1", "pipedream", "pipedream_2bw"])
def test_batches_whose_transfers_block_are_those_of_a_simulation(schedule, overlap):
    plan = plan_of(schedule, 2)
    check_equals_simulation(plan, costs_of(plan), overlap)


@pytest.mark.parametrize("options", [{"extra_in_flight": 5}, {"update_every": "replicas"}, {"split_backward": "early"}])
def test_batches_without_a_flush_repeat_with_more_in_flight_than_a_batch_has_microbatches_and_with_several_updates(options):
    plan = Plan.even("abcd", 4, "pipedream", M, replicas=[1, 2, 1, 4] if "update_every" in options else 1, **options)
    check_equals_simulation(plan, costs_of(plan), settles=options != {"extra_in_flight": 5})  # ports are in the way


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_updates_that_wait_for_other_stages_do_so_in_each_batch(schedule):
    plan = plan_of(schedule, 2)
    check_equals_simulation(plan, costs_of(plan), global_norm=True)
    check_equals_simulation(plan, costs_of(plan, shared=(2,)))


@pytest.mark.parametrize("schedule", ["pipedream_flush", "pipedream_2bw"])
def test_sums_in_parts_and_one_of_two_pipelines(schedule):
    plan = Plan.even("abcd", 2, schedule, 2 * M, replicas=2, sum_parts=2)
    check_equals_simulation(plan, costs_of(plan))
    check_equals_simulation(plan, costs_of(plan), workers=[workers[0] for workers in plan.stage_workers])


@pytest.mark.parametrize("num_stages", [1, 2])
def test_sums_in_parts_that_block_are_awaited_in_each_batch(num_stages):
    """The next batch's sum begins before the update that uses the previous one."""
    plan = Plan.even("abcd", num_stages, "pipedream_2bw", 2 * M, replicas=2, sum_parts=2)
    check_equals_simulation(plan, costs_of(plan), "none")


def test_only_plans_with_repeated_batches_are_predicted_so():
    agree = {"every": 2, "fragments": "stages"}
    others = [plan_of("gpipe", 2, shard_optimizer=True), plan_of("gpipe", 2, agree=agree)]
    assert has_repeated_batches(plan_of("gpipe", 2), global_norm=True)
    assert not any(map(has_repeated_batches, others))
    assert not has_repeated_batches(plan_of("pipedream_2bw"), global_norm=True)
    with pytest.raises(InputError, match=r"^simulate_batches: expected a program from lower_repeated, found one from lower; use"):
        simulate_batches(lower(others[0], 1), FIRST, BATCHES, [StageCost()] * others[0].depth)
