"""Lowering and simulation: every schedule is verified, every damaged program is rejected, and grids equal the golden files."""

import dataclasses
import inspect
import itertools
import math
import pathlib
import random
import re
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe import InputError, Link, Plan, lower, simulate
from jpipe.capabilities.registry import uses_of
from jpipe.capabilities.sums_in_parts.program import ComputePart, SumPart
from jpipe.plan import excluded
from jpipe.programs import (
    LayerCost,
    Program,
    ProgramError,
    StageCost,
    batches_until_full,
    format_grid,
    predict_window,
    sum_layer_costs,
    to_ticks,
    whole_spans,
)
from jpipe.programs._instructions import AllReduce, Compute, Load, Receive, Release, Send, Update, shifted
from jpipe.programs._steps import Steps
from jpipe.schedules import SCHEDULES, greedy_order
from tests.grid import parse_grid
from tests.jpipe.models import VARIANTS, is_legal

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
LAYERS = tuple("abcdefgh")
OFFLOADS = (None, None, dict.fromkeys(("optimizer", "versions", "residuals", "stash"), "all"))


@st.composite
def plans(draw, most_stages: int = 6, most_microbatches: int = 9) -> dict:
    """Draw the fields of a legal plan; the test builds the plan, so that hypothesis runs no type checks here."""
    fields = dict(VARIANTS[draw(st.sampled_from(sorted(VARIANTS)))])
    depth, m = draw(st.integers(1, most_stages)), draw(st.integers(1, most_microbatches))
    extra = draw(st.integers(0, 2)) if "extra_in_flight" in SCHEDULES[fields["schedule"]].options else 0
    if fields["schedule"] == "pipedream_2bw":
        m = max(m, depth, (1 + extra) * (depth - 1))
    recompute, offload = draw(st.sampled_from(["none", "full"])), draw(st.sampled_from(OFFLOADS))
    return {
        "layers": LAYERS,
        "num_stages": depth,
        "microbatches": m,
        "extra_in_flight": extra,
        "recompute": recompute,
        "offload": offload,
        **fields,
    }


@st.composite
def replicated_plans(draw) -> dict:
    """Draw the fields of a legal plan with replicated stages."""
    fields = dict(VARIANTS[draw(st.sampled_from(sorted(VARIANTS)))])
    replicas = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda counts: math.lcm(*counts) <= 12))
    if fields["schedule"] == "pipedream" and not fields.get("vertical_sync"):
        fields["update_every"] = draw(st.sampled_from(["batch", "replicas"]))
    if "extra_in_flight" in SCHEDULES[fields["schedule"]].options:
        fields["extra_in_flight"] = draw(st.integers(0, 2))
    times = draw(st.integers(1, 4))
    if fields["schedule"] == "pipedream_2bw":  # more than enough in flight
        times += sum(replicas) * (2 + fields.get("extra_in_flight", 0))
    m, offload = times * math.lcm(*replicas), draw(st.sampled_from(OFFLOADS))
    return fields | {"offload": offload, "layers": LAYERS, "num_stages": len(replicas), "replicas": tuple(replicas), "microbatches": m}


def has_norm(plan: Plan) -> bool:
    """Return whether updates of the plan can use the global norm."""
    return not excluded(plan, skip_nonfinite=True)


def versions_alive(plan: Plan, s: int) -> int:
    """Return the number of weight versions alive at stage `s`, in closed form."""
    ahead = 1 + (1 + plan.extra_in_flight) * (plan.depth - 1 - (0 if plan.vertical_sync else s))
    return {"pipedream": -(-(ahead - 1) // plan.microbatches) + 1, "pipedream_2bw": 2}.get(plan.schedule, 1)


@pytest.mark.oldest
@settings(deadline=None, max_examples=150)
@given(fields=plans(), start=st.integers(0, 5), batches=st.integers(1, 5))
def test_every_schedule_is_verified_and_holds_as_many_versions_as_the_table_says(fields, start, batches):
    plan = Plan.even(**fields)
    prediction = simulate(lower(plan, start + batches, begin=start, start=start))
    for s, most in enumerate(prediction.versions_alive):
        assert most <= versions_alive(plan, s)
        if start + batches > plan.depth * (2 + plan.extra_in_flight):  # the pipeline has run full
            assert most == versions_alive(plan, s)


@pytest.mark.thinned
@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (2, 2), (3, 2), (2, 3, 1), (4, 2, 1), (2, 1, 2)])
def test_stages_of_vertical_sync_hold_the_documented_number_of_versions_for_any_replicas(replicas):
    for times in (1, 2, 3):
        m, rule = times * math.lcm(*replicas), SCHEDULES["pipedream"]
        plan = Plan.even(LAYERS, len(replicas), "pipedream", m, replicas=replicas, vertical_sync=True)
        first = (rule.in_flight(plan, 0) - 1 + (replicas[0] > 1)) * replicas[0]
        alive = simulate(lower(plan, 24 // m + 4)).versions_alive
        for s, workers in enumerate(plan.stage_workers):
            assert max(alive[w] for w in workers) == -(-first // m) + 1 == rule.versions_alive(plan, s)


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=100)
@given(fields=plans() | replicated_plans(), batches=st.integers(1, 5), start=st.integers(0, 3), global_norm=st.booleans())
def test_the_programs_of_the_steps_one_after_the_other_are_the_whole_run(fields, batches, start, global_norm):
    plan = Plan.even(**fields)
    options = {"start": start, "global_norm": global_norm and has_norm(plan)}
    end = start + batches
    whole = lower(plan, end, begin=start, **options)
    parts = [lower(plan, t + 1, begin=t, drain=False, **options) for t in range(start, end)]
    parts.append(lower(plan, end, begin=end, **options))
    joined = tuple(i for part in parts for i in part.instructions)
    simulate(whole)
    assert joined == whole.instructions
    if SCHEDULES[plan.schedule].flushes:
        assert not parts[-1].instructions


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(fields=plans() | replicated_plans(), first=st.integers(0, 9), second=st.integers(0, 5), global_norm=st.booleans())
def test_the_few_programs_a_pipeline_repeats_are_one_run_with_a_drain_in_between(fields, first, second, global_norm):
    plan = Plan.even(**fields)
    global_norm = global_norm and has_norm(plan)
    steps = Steps(plan, uses_of(global_norm=global_norm))
    joined = []

    def go_on(since, batch, drain):
        program, shift = steps.program(since, batch, drain)
        joined.extend(shifted(i, plan, shift) for i in program.instructions)

    flushes = SCHEDULES[plan.schedule].flushes
    for start, end in ((0, first), (first, first + second)):
        joined.clear()
        for batch in range(start, end):
            go_on(0 if flushes else batch - start, batch, False)
        if not flushes:
            go_on(end - start, end, True)
        whole = lower(plan, end, begin=start, start=start, global_norm=global_norm)
        simulate(whole)
        assert tuple(joined) == whole.instructions


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("variant", ["pipedream", "pipedream_vertical_sync", "pipedream_2bw"])
@pytest.mark.parametrize("replicas", [(1, 1, 1, 1), (2, 1), (1, 3), (2, 2), (3, 1, 1), (2, 3, 1)])
def test_once_a_pipeline_is_full_every_step_is_the_last_one_a_batch_later(replicas, variant, norm):
    plan = Plan.even(
        LAYERS,
        len(replicas),
        microbatches=12 if variant == "pipedream_2bw" else math.lcm(*replicas),
        replicas=replicas,
        **VARIANTS[variant],
    )
    start, full = 20, batches_until_full(plan)

    def step(since):
        t = start + since
        return lower(plan, t + 1, begin=t, start=start, drain=False, global_norm=norm and has_norm(plan)).instructions

    for since in (full, full + 1):
        assert {shifted(i, plan, 1) for i in step(since)} == set(step(since + 1))
    assert {shifted(i, plan, 1) for i in step(0)} != set(step(1))


@settings(deadline=None, max_examples=60)
@given(fields=replicated_plans(), start=st.integers(0, 3), batches=st.integers(1, 4), global_norm=st.booleans(), seed=st.integers(0, 9))
def test_replicated_plans_are_verified_under_any_costs(fields, start, batches, global_norm, seed):
    plan = Plan.even(**fields)
    program = lower(plan, start + batches, begin=start, start=start, global_norm=global_norm and has_norm(plan))
    rng = random.Random(seed)
    costs = [StageCost(forward=rng.uniform(0.1, 2), backward=rng.uniform(0.1, 4), weights=7, accumulators=5) for _ in plan.stages]
    prediction = simulate(program, costs, Link(bandwidth=rng.choice([3.0, 1e9]), latency=rng.choice([0.0, 0.4])))
    for w, row in enumerate(prediction.timeline):
        s, replica = plan.workers[w]
        assert {span.microbatch % plan.replicas[s] for span in row} == {replica}
    for s, workers in enumerate(plan.stage_workers):
        reads = {span.microbatch: span.version for w in workers for span in prediction.timeline[w]}
        assert [reads[k] for k in sorted(reads)] == sorted(reads.values()), "versions do not decrease from microbatch to microbatch"
        sums = [i for i in program.instructions if isinstance(i, AllReduce) and i.worker in workers]
        updates = batches * plan.microbatches // plan.microbatches_per_update(s)
        assert len(sums) == (updates * len(workers) if len(workers) > 1 else 0)


@pytest.mark.parametrize("replicas", [(2, 1, 1), (3, 2), (2, 3, 1), (15, 1), (1, 3)])
def test_round_robin_keeps_every_worker_busy(replicas):
    """Workers are busy 98.5% of the time, because sums are hidden behind one more microbatch in flight than they compute with."""
    plan = Plan.even(LAYERS, len(replicas), "pipedream", math.lcm(*replicas), replicas=replicas)
    costs = [StageCost(forward=float(count), backward=2.0 * count) for count in replicas]  # each stage's share is equal
    first = 2 * batches_until_full(plan)
    assert predict_window(plan, costs, first, -(-60 // plan.microbatches)).bubble <= 0.015


def damaged(instructions, kind: str, at: int):
    """Change one instruction; return None if that would change nothing."""
    items, i = list(instructions), instructions[at]
    if kind == "lost":
        del items[at]
    elif kind == "twice":
        items.insert(at, i)
    elif kind == "other version":
        if not hasattr(i, "version"):
            return None
        items[at] = dataclasses.replace(i, version=i.version + 1)
    elif kind == "other microbatch":
        if not hasattr(i, "microbatch"):
            return None
        items[at] = dataclasses.replace(i, microbatch=i.microbatch + 1)
    elif kind == "retired early":
        if not isinstance(i, Update) or i.retires is None:
            return None
        items[at] = dataclasses.replace(i, retires=i.retires + 1)
    elif kind == "never retired":
        if not isinstance(i, Update) or i.retires is None:
            return None
        items[at] = dataclasses.replace(i, retires=None)
    elif kind == "swapped on its worker":
        later = next((j for j in range(at + 1, len(items)) if items[j].worker == i.worker), None)
        if later is None or not isinstance(i, Compute) or not isinstance(items[later], Compute):
            return None
        items[at], items[later] = items[later], i
    return tuple(items)


@settings(deadline=None, max_examples=300)
@given(fields=plans(most_stages=4, most_microbatches=4), data=st.data())
def test_a_damaged_program_is_refused_with_the_grid(fields, data):
    plan = Plan.even(**fields)
    program = lower(plan, 3)
    kinds = ["lost", "twice", "other version", "other microbatch", "retired early", "never retired", "swapped on its worker"]
    at, kind = data.draw(st.integers(0, len(program.instructions) - 1)), data.draw(st.sampled_from(kinds))
    instructions = damaged(program.instructions, kind, at)
    if instructions is None:
        return
    with pytest.raises(ProgramError, match=r"(?s)tick +\|.*rank 0 +\|"):
        simulate(dataclasses.replace(program, instructions=instructions))


def test_the_message_of_each_violation():
    kinds = ["lost", "twice", "other version", "other microbatch", "retired early", "never retired", "swapped on its worker"]
    programs = (
        lower(Plan.even("ab", 2, "pipedream", 1), 3),
        lower(Plan.even("ab", 2, "pipedream_2bw", 4, replicas=(2, 1)), 3),
        lower(Plan.even("ab", 2, "gpipe", 2, replicas=(1, 2)), 2, global_norm=True),
        lower(Plan.even("ab", 2, "pipedream_2bw", 2), 3, global_norm=True),
    )
    phrases = set()
    for program in programs:
        items = program.instructions
        changed = [damaged(items, kind, at) for kind in kinds for at in range(len(items))]
        changed += [(*items[:at], items[at + 1], items[at], *items[at + 2 :]) for at in range(len(items) - 1)]
        for instructions in filter(None, changed):
            try:
                simulate(dataclasses.replace(program, instructions=instructions))
            except ProgramError as error:
                what = str(error).splitlines()[0].partition(": ")[2]
                phrases.add(re.sub(r"\w+\([^()]*\)|\[[^]]*\]|\d+|None", "…", what))
    used = ("gradient", "inputs", "labels", "later squares", "message", "output", "residuals", "squares", "summed", "sums")
    assert phrases == {
        *(f"{kind} of microbatch … used before it was made, or twice" for kind in used),
        *(f"{kind} of microbatch … made twice" for kind in ("inputs", "labels", "squares")),
        "norm of microbatch … used before it arrived",
        "deadlock, ranks … wait for each other",
        "left behind: …",
        "update … after … backwards, expected …",
        "versions … are left, expected …",
        "…: the schedule's next computation is …",
        "… at version …, expected version …",
        "… frees version …, but the stage has …",
        "… leaves versions … alive, expected at most …",
        "… reads version …, but the stage has …",
        "… reads version …, the formula says …",
        "… stands before its … in the total order",
        "… stands before the sum of … in the total order",
    }


SUM_PARTS = lower(Plan.even("abc", 1, "pipedream_2bw", 2, replicas=2, sum_parts=3), 3)


def place(kind, **fields) -> int:
    """Return the place of the first instruction of worker 0 in `SUM_PARTS` with these fields."""
    items = enumerate(SUM_PARTS.instructions)
    return next(n for n, i in items if isinstance(i, kind) and i.worker == 0 and all(getattr(i, name) == x for name, x in fields.items()))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (place(ComputePart, part=0), place(ComputePart, part=1), "stash of microbatch 0 used before it was made"),
        (place(ComputePart, part=1), place(ComputePart, part=2), r"ComputePart\(.*part=2.*: the next part is ComputePart\(.*part=1,"),
        (place(ComputePart, part=1), place(SumPart, part=1), "sums of part 1 of microbatch 0 used before it was made"),
        (place(SumPart, part=0), place(SumPart, part=1), "before the sum of part 0: all replicas sum the parts in order"),
        (place(SumPart, part=1), place(AllReduce, following=0), "before the sum of part 1: all replicas sum the parts in order"),
        (place(AllReduce, following=0), place(Update), "summed of microbatch 0 used before it was made"),
    ],
)
def test_the_order_of_sums_in_parts_is_verified(first, second, message):
    simulate(SUM_PARTS)
    items = list(SUM_PARTS.instructions)
    items[first], items[second] = items[second], items[first]
    with pytest.raises(ProgramError, match=message):
        simulate(dataclasses.replace(SUM_PARTS, instructions=tuple(items)))


def test_a_damaged_program_with_sums_in_parts_is_refused():
    items = list(SUM_PARTS.instructions)
    whole = [
        Compute(i.op, i.worker, i.microbatch, i.version) if isinstance(i, ComputePart) else i for i in items if not getattr(i, "part", None)
    ]
    changed = [damaged(items, kind, at) for kind in ("lost", "twice", "other version", "other microbatch") for at in range(len(items))]
    for instructions in (tuple(whole), *filter(None, changed)):
        with pytest.raises(ProgramError):
            simulate(dataclasses.replace(SUM_PARTS, instructions=instructions))


def test_a_deadlock_is_shown():
    # 1F1B with "receive before use, send after compute": worker 0 wants the gradient of 0 before it has sent microbatch 1.
    program = lower(Plan.even("ab", 2, "pipedream", 1), 3)
    items = list(program.instructions)
    receive = next(i for i in items if isinstance(i, Receive) and i.worker == 0)
    sent = next(i for i in items if isinstance(i, Send) and i.worker == 0 and i.microbatch == 1)
    items.remove(receive)
    items.insert(items.index(sent), receive)
    used = next(i for i in items if isinstance(i, Compute) and i.op == "FB" and i.microbatch == 0)
    moved = next(i for i in items if isinstance(i, Receive) and i.worker == 1 and i.microbatch == 1)
    items.remove(moved)
    items.insert(items.index(used) + 1, moved)
    with pytest.raises(ProgramError, match=r"(?s)deadlock, ranks \[0, 1\] wait for each other.*waits at Receive"):
        simulate(dataclasses.replace(program, instructions=tuple(items)))
    lost = tuple(i for i in program.instructions if not isinstance(i, Send) or i.message != "gradient")
    with pytest.raises(ProgramError, match=r"(?s)deadlock, ranks \[0.*<<< waits"):
        simulate(dataclasses.replace(program, instructions=lost), brief=True)


def test_a_receive_before_its_send_in_the_total_order_is_refused():
    program = lower(Plan.even("ab", 2, "gpipe", 1), 1)
    items = list(program.instructions)
    first = next(i for i, item in enumerate(items) if isinstance(item, Send))
    items[first], items[first + 1] = items[first + 1], items[first]
    with pytest.raises(ProgramError, match="stands before its Send"):
        simulate(dataclasses.replace(program, instructions=tuple(items)))


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_golden_grids(name):
    assert grids(name) == (GOLDEN / f"{name}.txt").read_text(), f"python -m {__name__} writes the files anew"


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_timeline_in_a_schedules_docstring_is_what_it_does(name):
    module = next(
        module for module_name, module in sys.modules.items() if re.fullmatch(rf"jpipe\.schedules(\.zero_bubble)?\.{name}", module_name)
    )
    rows = [line for line in inspect.getdoc(module).splitlines() if line.lstrip().startswith(("tick", "rank"))]
    documented = parse_grid("\n".join(rows))
    chunks = 1 + max(span.chunk for spans in documented for span in spans)
    updates = sum(span.updates for span in documented[0]) // chunks
    m = len({span.microbatch for span in documented[0]}) // updates
    fields = {"layers": "abcdef", "num_stages": chunks * len(documented), "microbatches": m, "chunks_per_rank": chunks}
    if name == "auto_zero_bubble":
        fields["order"] = greedy_order(Plan.even(schedule="zb_h1", **fields), [StageCost()] * 3, limits=m)
    assert max(span.version for span in documented[-1]) <= updates
    assert to_ticks(simulate(lower(Plan.even(schedule=name, **fields), updates)).timeline) == documented


@settings(deadline=None, max_examples=60)
@given(fields=plans(), batches=st.integers(1, 3))
def test_grids_round_trip(fields, batches):
    plan = Plan.even(**fields)
    timeline = to_ticks(simulate(lower(plan, batches)).timeline)
    text = format_grid(timeline)
    assert parse_grid(text) == timeline
    assert format_grid(parse_grid(text)) == text


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream_flush"])
@pytest.mark.parametrize(("depth", "m"), [(1, 3), (2, 2), (4, 4), (4, 9)])
def test_the_bubble_of_flushing_schedules(schedule, depth, m):
    prediction = simulate(lower(Plan.even(LAYERS, depth, schedule, m), 3))
    assert prediction.bubble == pytest.approx((depth - 1) / (m + depth - 1))


def test_asynchronous_schedules_have_no_bubble_but_start_and_end():
    prediction = simulate(lower(Plan.even("abcd", 4, "pipedream_2bw", 4), 50))
    assert prediction.seconds == pytest.approx(3 * 200 + 3 * 3)


@pytest.mark.parametrize("depth", [2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_latency_is_exposed_and_extra_in_flight_hides_it(depth):
    """A microbatch returns to stage 0 after d (F + B) + 2 (d - 1) l, and n_0 microbatches share that time."""

    def period(extra):
        plan = Plan.even(LAYERS, depth, "pipedream", 1, extra_in_flight=extra)
        link = Link(latency=1.0)
        return (simulate(lower(plan, 120), link=link).seconds - simulate(lower(plan, 48), link=link).seconds) / 72

    assert period(0) == pytest.approx((3 * depth + 2 * (depth - 1)) / depth)
    assert period(1) == pytest.approx(3.0)


def test_links_take_time_for_their_bytes_and_bytes_are_counted():
    plan = Plan.even("ab", 2, "gpipe", 4)
    costs = (StageCost(outputs=10, message=10), StageCost(inputs=10, gradient=10))
    free, slow = simulate(lower(plan, 2), costs), simulate(lower(plan, 2), costs, Link(bandwidth=2.0))
    assert free.moved_bytes == slow.moved_bytes == (80, 80)
    # a batch: the first forward, four activations of 5 s each, the last forward, the first backward, four gradients, the last backward
    assert slow.seconds == pytest.approx(2 * (1 + 4 * 5 + 1 + 2 + 4 * 5 + 2))


@pytest.mark.parametrize(("bandwidth", "whole", "in_parts"), [(10.0, 4 + 3, 4 + 1), (5.0, 4 + 6, 2 + 3 * 2), (1000.0, 4.03, 4.01)])
def test_sums_in_parts_overlap_with_the_backward(bandwidth, whole, in_parts):
    """Forward and backward take 4 s, of which the parts end after 2, 3 and 4 s; each sends 10 of 30 bytes to the other replica."""
    cost, ends = StageCost(backward=3.0, accumulators=30, update=0.5), []
    for sum_parts in (1, 3):
        program = lower(Plan.even("abc", 1, "pipedream_2bw", 2, replicas=2, sum_parts=sum_parts), 1)
        prediction = simulate(program, [cost], Link(bandwidth=bandwidth))
        assert prediction.moved_bytes == (30, 30)
        ends.append(prediction.seconds)
    assert ends == pytest.approx([whole + 0.5, in_parts + 0.5])
    uneven = dataclasses.replace(cost, part_times=(0.5, 0.25, 0.25), part_accumulators=(5, 5, 20))
    spans = simulate(program, [uneven], Link(bandwidth=10.0)).timeline[0]
    assert [(span.op, span.part, span.end) for span in spans] == [("FB", 0, 2.5), ("B", 1, 3.25), ("B", 2, 4.0)]
    assert spans[-1].update_start == 4 + 2
    assert [(span.op, span.part, span.end) for span in whole_spans(spans)] == [("FB", None, 4.0)]


def test_a_sum_of_a_part_begins_when_the_last_replica_has_it():
    """The replicas of stage 1 have their parts after 3, 4 and 7 s and after 4, 5 and 8 s; each sum takes one second."""
    last = {"layers": ("b", "c", "d"), "replicas": 2, "sum_parts": (1, 1, 1)}
    plan = Plan(schedule="gpipe", microbatches=2, stages=[{"layers": ("a",)}, last])
    costs = StageCost(), StageCost(backward=5.0, accumulators=30, update=1.0, part_times=(0.2, 0.2, 0.6), part_accumulators=(10, 10, 10))
    timeline = simulate(lower(plan, 1), costs, Link(bandwidth=10.0)).timeline
    assert [[span.end for span in spans] for spans in timeline[1:]] == [[3, 4, 7], [4, 5, 8]]
    assert [spans[-1].update_start for spans in timeline[1:]] == [9, 9]


def test_memory_counts_versions_residuals_and_waiting_inputs():
    plan = Plan.even("ab", 2, "pipedream", 1)
    costs = (StageCost(weights=1000, residuals=100, inputs=10, outputs=1), StageCost(weights=2000, inputs=1, labels=3, gradient=1))
    prediction = simulate(lower(plan, 6), costs)
    # stage 0: two versions, two microbatches in flight; the next input is loaded when one of them is done, and its output not yet sent
    assert prediction.held_bytes[0] == 2000 + 200 + 1
    # stage 1: in place; an input and its labels before a computation; while it runs, its gradient on top
    assert prediction.held_bytes[1] == 2000 + 1 + 3
    assert prediction.peak_bytes[1] == 2000 + 1 + 3 + 1


def test_layer_costs_add_up_to_stage_costs():
    layers = {i: LayerCost(1.0, 2.0, outputs=8, weights=100, optimizer=200, residuals={"none": 50, "dots_saveable": 20}) for i in "abc"}
    stages = [{"layers": ("a",)}, {"layers": ("b", "c"), "recompute": "full"}]
    first, second = sum_layer_costs(Plan(schedule="gpipe", microbatches=2, stages=stages), layers, inputs=4, labels=2)
    sizes = {"inputs": 4, "outputs": 8, "residuals": 50, "message": 8, "weights": 100, "optimizer": 200, "accumulators": 100}
    assert first == StageCost(1.0, 2.0, 0.0, 2.0, stash=50 + 8, **sizes)  # without an input gradient all is for the weights
    sizes = {"inputs": 8, "labels": 2, "residuals": 8, "gradient": 8, "weights": 200, "optimizer": 400, "accumulators": 200}
    assert second == StageCost(2.0, 6.0, 4.0, 2.0, stash=2 * (50 + 8), temporary=92, **sizes)
    with pytest.raises(InputError, match="layer 'b' of the plan has none"):
        sum_layer_costs(Plan(schedule="gpipe", microbatches=2, stages=stages), {"a": layers["a"]})


def test_a_forward_and_a_backward_take_the_time_of_one_program_where_they_are_one():
    layers = {
        i: LayerCost(1.0, 2.0, forward_backward=fused, residuals={"none": 50}) for i, fused in zip("abc", (2.1, 2.4, None), strict=True)
    }
    stages = [{"layers": ("a",)}, {"layers": ("b", "c"), "recompute": "full"}]
    times = {
        name: [(cost.forward, cost.backward) for cost in sum_layer_costs(Plan(schedule=name, microbatches=2, stages=stages), layers)]
        for name in ("pipedream_flush", "gpipe")
    }
    share = (2.4 + 3) / 6  # of the time of both programs of both layers
    assert times["pipedream_flush"] == [(1, 2), pytest.approx((2 * share, 4 * share + 2 * share))]
    # all forwards come first, so the last stage has two programs; the second one begins with another forward
    assert times["gpipe"] == [(1, 2), pytest.approx((2, 2.4 + 3))]


def test_a_backward_that_recomputes_takes_the_measured_time_longer():
    layers = {i: LayerCost(1.0, 2.0, forward_backward=2.8, again=0.5, residuals={"none": 50}) for i in "ab"}
    stages = [{"layers": ("a",), "recompute": "full"}, {"layers": ("b",)}]
    first, second = sum_layer_costs(Plan(schedule="gpipe", microbatches=2, stages=stages), layers)
    assert (first.forward, first.backward, second.backward) == (1.0, 2.5, 2.0)


@pytest.mark.parametrize(("measured", "taken"), [(2.4, 2.4), (1.2, 2.0), (4.0, 3.0), (0.0, 2.0)])
def test_one_program_takes_at_least_the_longer_of_both_and_at_most_both(measured, taken):
    assert LayerCost(1.0, 2.0, forward_backward=measured).in_one_program == taken


def test_the_second_half_of_a_backward_is_a_program_of_its_own():
    layers = {i: LayerCost(1.0, 2.0, forward_backward=2.4, residuals={"none": 50}) for i in "ab"}
    _, last = sum_layer_costs(Plan.even("ab", 2, "zb_h1", 4), layers)
    assert (last.forward, last.backward_input, last.backward_weight) == (1, 1, 1)


def test_parts_of_a_backward_in_one_program_have_their_share_of_it():
    layers = {i: LayerCost(1.0, 2.0, forward_backward=2.4, residuals={"none": 50}) for i in "abcd"}
    stages = [{"layers": tuple("abcd"), "replicas": 2, "sum_parts": (1, 1, 1, 1)}]
    (cost,) = sum_layer_costs(Plan(schedule="pipedream_flush", microbatches=2, stages=stages), layers)
    assert cost.backward == pytest.approx(0.8 * 8)
    assert cost.part_times == pytest.approx((0.25,) * 4)


def test_layer_costs_add_up_to_those_of_parts():
    layers = {
        i: LayerCost(1.0, time, weights=size, residuals={"none": 50})
        for i, time, size in zip("abc", (2.0, 4.0, 6.0), (7, 8, 9), strict=True)
    }
    stages = [{"layers": ("a", "b", "c"), "replicas": 2, "sum_parts": (2, 1), "recompute": "full"}]
    (cost,) = sum_layer_costs(Plan(schedule="gpipe", microbatches=2, stages=stages), layers)
    assert cost.part_times == pytest.approx(((6 + 3) / 15, 6 / 15))  # the first part recomputes all three forwards
    assert cost.part_accumulators == (9, 15)


def test_a_part_of_a_program_is_not_simulated():
    plan = Plan.even("ab", 2, "pipedream", 1)
    for part in (lower(plan, 2, drain=False), lower(plan, 2, begin=1)):
        with pytest.raises(InputError, match="expected the program of a whole run"):
            simulate(part)


def test_costs_of_too_few_stages():
    with pytest.raises(InputError, match="expected 2 costs, one for each stage, found 1"):
        simulate(lower(Plan.even("ab", 2, "gpipe", 1), 1), [StageCost()])


def test_a_program_consists_of_commands():
    plan = Plan.even("ab", 2, "pipedream_2bw", 2)
    program = lower(plan, 3)
    assert isinstance(program, Program)
    counts = {kind: sum(type(i) is kind for i in program.instructions) for kind in (Load, Send, Update, Release)}
    assert counts == {Load: 12, Send: 12, Update: 6, Release: 0}
    assert Counter(i.op for i in program.instructions if isinstance(i, Compute)) == {"F": 6, "B": 6, "FB": 6}
    updates = [i.retires for i in program.worker(0) if isinstance(i, Update)]
    assert updates == [None, 0, 1]  # the first retires nothing: shadow and current would be one


def grids(name: str) -> str:
    """Return the grids of one variant for the legal ones of three plans with four stages."""
    texts = []
    for m, batches in ((1, 8), (4, 3), (5, 2)):
        if is_legal(layers="abcd", num_stages=4, microbatches=m, **VARIANTS[name]):
            text = simulate(lower(Plan.even("abcd", 4, microbatches=m, **VARIANTS[name]), batches)).grid()
            texts.append(f"{name}, 4 stages, {m} microbatches a batch, {batches} batches\n{text}\n")
    return "\n".join(texts)


if __name__ == "__main__":  # write the golden grids anew; look at the difference before you commit it
    for variant in VARIANTS:
        (GOLDEN / f"{variant}.txt").write_text(grids(variant))


def test_the_stash_of_a_split_backward_counts_from_its_first_half_to_its_second():
    """The peaks of zb_h1 on three ranks, added up by hand: a forward stores 100 bytes, of which the first half leaves 60 for the second."""
    residuals, stash = 100, 60
    costs = [StageCost(residuals=residuals, stash=stash, weights=7, optimizer=5, accumulators=3)] * 2 + [StageCost(stash=stash, weights=11)]
    prediction = simulate(lower(Plan.even("abc", 3, "zb_h1", 4), 2), costs)
    whole = [residuals] * 3  # rank 0 begins three microbatches and computes backwards whole
    orders = [[f"{span.op}{span.microbatch}" for span in spans[:12]] for spans in prediction.timeline]
    assert orders[1] == ["F0", "F1", "I0", "F2", "I1", "W0", "F3", "I2", "W1", "I3", "W2", "W3"]
    middle = [
        +residuals,
        +residuals,
        stash - residuals,
        +residuals,
        stash - residuals,
        -stash,
        +residuals,
        stash - residuals,
        -stash,
        stash - residuals,
        -stash,
        -stash,
    ]
    assert orders[2][:8] == ["FI0", "FI1", "FI2", "W0", "FI3", "W1", "W2", "W3"]
    last = [+stash, +stash, +stash, -stash, +stash, -stash, -stash, -stash]
    assert [sum(middle), sum(last)] == [0, 0]
    peaks = [max(itertools.accumulate(changes)) for changes in (whole, middle, last)]
    assert peaks == [300, 260, 180]
    assert prediction.held_bytes == (15 + 300, 15 + 260, 11 + 180)
    assert [samples[-1].residuals for samples in prediction.memory] == [0, 0, 0]
    assert [samples[-1].total for samples in prediction.memory] == [15, 15, 11]
