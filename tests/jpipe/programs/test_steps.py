"""The programs that a process repeats: of its own workers, derived from one replica where all do the same, and verified."""

import dataclasses
import itertools
import math

import pytest

from jpipe import InputError, Plan, lower, simulate
from jpipe.capabilities.registry import uses_of
from jpipe.plan import excluded
from jpipe.programs import ProgramError, _steps
from jpipe.programs._instructions import Compute, Receive, Send, shifted
from jpipe.programs._simulate import verify
from jpipe.programs._steps import Steps
from jpipe.programs.lowering import Run, lower_evaluation
from jpipe.schedules import SCHEDULES
from tests.jpipe.models import VARIANTS, WITHOUT_VARIANTS

REPLICAS = ((2, 2), (3, 3, 3), (2, 2, 2, 2), (2, 1))
ORDER = ["F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 F1.1 B1.0 I1.1 W1.1"]
OPTIONS = (
    {},
    {"sum_parts": 2, "recompute": "full"},
    {"shard_optimizer": True},
    {"flush_first": 2},
    {"split_backward": "early", "extra_in_flight": 1},
    {"update_every": "replicas"},
    {"agree": {"every": 2}},
    {"agree": {"every": 3, "fragments": "stages", "delay": 2}, "offload": {"optimizer": "all", "versions": "all"}},
)


def plans(name, all_replicas=REPLICAS, options=OPTIONS, with_options=REPLICAS[:1], times=None):
    """Yield the legal plans of a schedule for numbers of replicas, some of them also with each option; in chunks, too."""
    fields = VARIANTS.get(name, {"schedule": name}) | {"order": ORDER if name == "auto_zero_bubble" else None}
    kinds = [*((replicas, {}) for replicas in all_replicas), *itertools.product(with_options, options[1:])]
    for (replicas, more), chunks in itertools.product(kinds, (None, 2)):
        m = math.lcm(*replicas) * (2 if fields["order"] else times or len(replicas) + 1)
        try:
            yield Plan.even("abcdef", len(replicas), microbatches=m, replicas=replicas, chunks_per_rank=chunks, **fields | more)
        except InputError:
            continue


def uses(plan):
    """Yield whether there is a global norm, and the groups of shared parameters."""
    yield False, ()
    if plan.agree is not None and SCHEDULES[plan.schedule].flushes:
        yield True, ()
    elif plan.agree is None and not excluded(plan, skip_nonfinite=True):
        yield True, ((0, plan.depth - 1),)


def by_rank(program):
    """Return the instructions of each rank; between two computations, where several may begin at the same time, in alphabetical order."""
    rows = {}
    for i in program.instructions:
        row = rows.setdefault(program.plan.rank_of[i.worker], [[]])
        row += [i, []] if isinstance(i, Compute) else []
        row[-1] += [] if isinstance(i, Compute) else [repr(i)]
    return {rank: [sorted(each) if isinstance(each, list) else each for each in row] for rank, row in rows.items()}


NAMES = (*VARIANTS, *WITHOUT_VARIANTS)
EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])


def some(plans, name, every):
    """Return one of so many plans, others for the next schedule."""
    return itertools.islice(plans, NAMES.index(name) % every, None, every)


@EVERY
@pytest.mark.parametrize("name", NAMES)
def test_the_first_replicas_tell_what_all_do(name, every):
    """Instruction for instruction on each rank, from batch to batch; a total order of all ranks that extends data order."""
    derived = 0
    for plan in some(plans(name), name, every):
        for norm, shared in uses(plan):
            full, alike = (Run(plan, 1, 3, uses_of(global_norm=norm, shared_parameters=shared), alike=alike) for alike in (False, True))
            assert alike.alike == (len({*plan.replicas}) == 1 and not (norm and not SCHEDULES[plan.schedule].flushes))
            derived += alike.alike
            for batches, drain in ((2, False), (3, False), (3, True)):
                expected, found = (run.program(batches, drain) for run in (full, alike))
                assert by_rank(found) == by_rank(expected)
                assert dataclasses.replace(found, instructions=()) == dataclasses.replace(expected, instructions=())
            simulate(lower(plan, 2, begin=1, start=1, global_norm=norm, shared_parameters=shared))
    assert derived


def joined_steps(plan, norm, shared, batches):
    """Return the instructions of the programs of so many steps from an empty pipeline, and of a drain, one after the other."""
    steps, written, start = Steps(plan, uses_of(global_norm=norm, shared_parameters=shared)), [], 0
    for batch in range(batches + 1):
        drains = batch == batches
        if not drains or start < batch:
            program, shift = steps.program(batch - start, batch, drains)
            written += [shifted(i, plan, shift) for i in program.instructions]
        start = batch + 1 if SCHEDULES[plan.schedule].flushes_after(plan, batch) else start
    return tuple(written)


UNEQUAL = ((1, 1, 1), (1, 2), (1, 3), (3, 1, 2), (2, 3, 1))
MORE = (*OPTIONS, {"max_in_flight": 2}, {"extra_in_flight": 1}, {"recompute": "full"})


@EVERY
@pytest.mark.parametrize("name", NAMES)
def test_steps_do_what_one_long_run_does(name, every):
    """Instruction for instruction in one total order, although few steps are lowered, each by itself."""
    compared, unequal = 0, plans(name, UNEQUAL, times=1, with_options=[])
    for plan in some(itertools.chain(plans(name, (*REPLICAS, *UNEQUAL), MORE, ((2, 2), (1, 2))), unequal), name, every):
        for norm, shared in uses(plan):
            compared += 1
            assert joined_steps(plan, norm, shared, 9) == lower(plan, 9, global_norm=norm, shared_parameters=shared).instructions
    assert compared


SOME = [
    Plan.even("abcd", 4, "pipedream_2bw", 16, replicas=2),
    Plan.even("abcd", 4, "interleaved_1f1b", 8, replicas=2, chunks_per_rank=2),
    Plan.even("abc", 3, "pipedream", 6, replicas=(2, 1, 3), flush_first=2),
    Plan.even("abc", 3, "pipedream_flush", 6, replicas=2, shard_optimizer=True),
]


@pytest.mark.thinned
@pytest.mark.parametrize("most", [0, 10**9], ids=["own", "all"])
@pytest.mark.parametrize("plan", SOME, ids=lambda plan: plan.schedule)
def test_a_process_has_the_instructions_of_its_workers(plan, most, monkeypatch):
    monkeypatch.setattr(_steps, "MOST_VERIFIED", most)
    whole, flushes = Steps(plan, uses_of(global_norm=plan.shard_optimizer)), SCHEDULES[plan.schedule].flushes
    for rank in range(len(plan.rank_workers)):
        workers = {w for other in (rank, (rank + 3) % len(plan.rank_workers)) for w in plan.rank_workers[other]}
        own = whole.of(workers)
        assert own is whole.of(workers)
        for of_all, of_some in zip(whole.verified_runs, own.verified_runs, strict=True):
            assert of_some == of_all.of(workers)
        for batch in range(9):
            for drain in (False,) if flushes else (False, True):
                since = 0 if flushes or batch < plan.flush_first else batch - plan.flush_first
                (of_all, shift), (of_some, same) = (steps.program(since, batch, drain) for steps in (whole, own))
                assert (of_some, same) == (of_all.of(workers), shift)
                assert own.common_version(since, batch) == whole.common_version(since, batch)


@pytest.mark.parametrize("plan", SOME, ids=lambda plan: plan.schedule)
def test_a_process_has_its_part_of_an_evaluation(plan):
    whole = lower_evaluation(plan, 7, 2, first=3)
    for w in range(len(plan.workers)):
        assert lower_evaluation(plan, 7, 2, first=3, workers=[w]) == whole.of([w])


def test_a_schedule_that_flushes_repeats_one_batch():
    steps = Steps(Plan.even("abcd", 4, "pipedream_flush", 8), uses_of(global_norm=True))
    (run,) = steps.verified_runs
    assert (run.begin, run.end) == (0, 1)
    for batch in (0, 1, 7, 1000):
        program, shift = steps.program(0, batch, False)
        assert (program.instructions, shift) == (run.instructions, batch)


@pytest.mark.parametrize("plan", SOME, ids=lambda plan: plan.schedule)
def test_a_part_with_an_error_is_refused(plan):
    """Without any one of its instructions, with one twice, or with a transfer to another worker."""
    run = lower(plan, 2, begin=1, start=1)
    workers = {0, *plan.rank_workers[-1]}
    part = run.of({w for rank, of_rank in enumerate(plan.rank_workers) for w in of_rank if workers & {*of_rank}})
    verify(part)
    items, other = list(part.instructions), len(plan.workers) // 2
    for n, i in enumerate(items):
        if isinstance(i, (Send, Receive)) and i.message == "weights":
            continue  # only the part of the other worker tells
        changed = [[], [i, i]]
        changed += [[dataclasses.replace(i, **{name: other})] for name in ("to", "source") if getattr(i, name, other) != other]
        for those in changed:
            with pytest.raises(ProgramError, match=plan.schedule):
                verify(dataclasses.replace(part, instructions=(*items[:n], *those, *items[n + 1 :])))


def test_simulation_needs_the_workers_that_send_to_each_other_and_lowering_those_of_the_plan():
    with pytest.raises(InputError, match="expected the program of all workers, or of some that send messages only to each other"):
        simulate(lower(SOME[0], 1, workers=[0]))
    alike = Plan.even("ab", 1, "pipedream", 12, replicas=4)
    assert simulate(lower(alike, 3, workers=[0, 3])).seconds == simulate(lower(alike, 3)).seconds
    assert not simulate(lower(alike, 3), brief=True).transfers
    with pytest.raises(InputError, match="workers: expected numbers of workers of the plan, below 8, found"):
        lower(SOME[0], 1, workers=[8])
