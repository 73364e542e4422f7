"""Clipping by the global norm of all stages: exact, whatever the cut; refused where it is not there."""

import jax
import numpy as np
import optax
import pytest

from jpipe import InputError, Pipeline, Plan, ProgramError, StageCost, lower, simulate
from jpipe._program import SumSquares, Update
from tests.jpipe import models
from tests.jpipe.running import check_close, check_equal, train, train_as_one_function

pytestmark = pytest.mark.usefixtures("compiled_once")

STACK = models.rich_stack()
M = 3
FLUSHING = ["naive", "gpipe", "pipedream_flush"]
NORM = 3.0  # clips some batches of this model, not all


def pipeline(sizes, schedule, optimizer):
    plan = models.cut(STACK.ids, sizes, microbatches=M, schedule=schedule)
    return Pipeline(STACK, plan, models.masked_squares, optimizer, clip_global_norm=NORM)


def norms_of(pipe, batches):
    state, norms = pipe.init(jax.random.key(11), batches[0]), {}
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        norms |= metrics.norms
    return norms


@pytest.mark.newest
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("inner", [lambda: optax.sgd(0.3, momentum=0.9), lambda: optax.adam(0.05)], ids=["momentum", "adam"])
def test_equals_optax_on_the_whole_tree(schedule, inner):
    batches = models.masked_batches(6, M, dtype=np.float64)
    norms = norms_of(pipeline((1, 2, 1), schedule, inner()), batches)
    assert sorted(norms) == list(range(6))
    assert min(norms.values()) < NORM < max(norms.values())  # else this would test half of it
    pipe = pipeline((1, 2, 1), schedule, inner())
    check_close(train(pipe, batches), train_as_one_function(pipe, batches))


@pytest.mark.parametrize("schedule", FLUSHING)
@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (1, 2, 1), (1, 1, 1, 1)])
def test_the_cut_changes_no_bit_of_the_norm(sizes, schedule):
    """Of the first batch; later ones meet the rounding of each stage's own program."""
    batches = models.masked_batches(1, M)
    expected = norms_of(pipeline((4,), "pipedream_flush", models.momentum()), batches)
    check_equal(norms_of(pipeline(sizes, schedule, models.momentum()), batches), expected)


def test_a_norm_that_is_no_number_spares_no_layer():
    """As with optax: one layer's NaN reaches all of them."""
    batches = models.masked_batches(1, M)
    batches[0][0].fill(np.nan)
    pipe = pipeline((2, 2), "gpipe", optax.sgd(0.1))
    state, metrics = pipe.step(pipe.init(jax.random.key(0), batches[0]), batches[0])
    assert np.isnan(metrics.norms[0])
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(pipe.params(state)))


@pytest.mark.parametrize("schedule", FLUSHING)
def test_no_stage_updates_before_the_norm_is_there(schedule):
    plan = Plan.even("abcd", 4, schedule, M)
    prediction = simulate(lower(plan, 3, clips=True), [StageCost(update=1.0)] * 4)
    for batch in range(3):
        first = [span for span in prediction.timeline[0] if span.updates][batch]
        for spans in prediction.timeline:
            assert [span for span in spans if span.updates][batch].update_start >= first.end


def damaged(spoil):
    program = lower(Plan.even("abc", 3, "gpipe", 2), 2, clips=True)
    instructions = list(program.instructions)
    spoil(instructions)
    return program.__class__(
        **{**{name: getattr(program, name) for name in program.__dataclass_fields__}, "instructions": tuple(instructions)}
    )


def first(instructions, kind, worker):
    return next(i for i, x in enumerate(instructions) if isinstance(x, kind) and x.worker == worker)


@pytest.mark.parametrize("worker", [0, 1, 2])
@pytest.mark.parametrize("kind", [SumSquares, Update])
def test_a_program_without_its_sums_or_updates_is_refused(kind, worker):
    with pytest.raises(ProgramError):
        simulate(damaged(lambda instructions: instructions.pop(first(instructions, kind, worker))))


def test_a_program_that_updates_too_early_is_refused():
    def spoil(instructions):
        update = instructions.pop(first(instructions, Update, 2))
        instructions.insert(first(instructions, SumSquares, 2) + 1, update)

    with pytest.raises(ProgramError, match="norm of microbatch 1 used before it was there"):
        simulate(damaged(spoil))


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            "pipedream",
            "weight stashing cannot clip: .*; use a schedule that flushes \\('naive', 'gpipe', 'pipedream_flush'\\), or leave it",
        ),
        ("pipedream_vertical_sync", "clipping with the asynchronous schedule 'pipedream' is not there yet; use a schedule that flushes"),
        ("pipedream_2bw", "clipping with the asynchronous schedule 'pipedream_2bw' is not there yet; use a schedule that flushes"),
    ],
)
def test_asynchronous_schedules_say_that_they_do_not_clip(variant, message):
    plan = Plan.even(STACK.ids, 2, microbatches=2, **models.VARIANTS[variant])
    with pytest.raises(InputError, match=f"clip_global_norm: {message}"):
        Pipeline(STACK, plan, models.masked_squares, optax.sgd(0.1), clip_global_norm=1.0)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_norm_to_clip_to_is_a_number_above_zero(norm):
    with pytest.raises(InputError, match="clip_global_norm: expected a finite number above 0, found"):
        Pipeline(STACK, Plan.even(STACK.ids, 2, "gpipe", 2), models.masked_squares, optax.sgd(0.1), clip_global_norm=norm)
