"""Clipping of each stage by its own norm: equal to optax on each stage alone, for every schedule, also where there is no global norm."""

import jax
import numpy as np
import optax
import pytest

from jpipe import InputError, LayerStack, Pipeline, Plan, Precision, State
from tests.jpipe import models, running

STACK = models.rich_stack()
STATELESS = LayerStack({"first": models.dense(), "noise": models.noisy(), "mix": models.dense(4), "out": models.dense()})
NORM = 0.5  # clips some stages of this model, not all


def pipeline(plan: Plan, stack=STACK, optimizer=None, **options) -> Pipeline:
    return Pipeline(stack, plan, models.masked_squares, optimizer or models.momentum(), **{"clip_stage_norm": NORM} | options)


def batches_for(plan: Plan, count: int = 5, **options) -> list:
    return models.masked_batches(count, plan.microbatches, dtype=np.float64, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_a_stage_is_scaled_down_to_the_norm_if_its_own_is_larger():
    plan = Plan.even(STACK.ids, 4, "gpipe", 3)
    batches, steps = batches_for(plan, 1), []
    for clip in (None, NORM):
        pipe = pipeline(plan, optimizer=optax.sgd(1.0), clip_stage_norm=clip)
        start = pipe.params(running.fresh(pipe, batches))
        state, metrics = pipe.step(running.fresh(pipe, batches), batches[0])
        after = pipe.params(state)
        steps.append([jax.tree.map(lambda a, b: a - b, start[layer], after[layer]) for layer in STACK.ids])
    norms = [float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(step)))) for step in steps[0]]
    assert min(norms) < NORM < max(norms)  # else this would test half of it
    np.testing.assert_allclose([metrics.stage_norms[0, s] for s in range(4)], norms, rtol=1e-12)
    for plain, clipped, norm in zip(*steps, norms, strict=True):
        running.check_close(clipped, jax.tree.map(lambda g, norm=norm: g * min(1.0, NORM / norm), plain))


CASES = {
    "gpipe": {"schedule": "gpipe", "microbatches": 3},
    "2BW": {"schedule": "pipedream_2bw", "microbatches": 3},
    "stashing, an update each microbatch": {"schedule": "pipedream", "microbatches": 1},
    "stashing": {"schedule": "pipedream", "microbatches": 4, "num_stages": 4},
    "vertical sync": {"schedule": "pipedream", "vertical_sync": True, "microbatches": 2},
    "halves": {"schedule": "pipedream", "microbatches": 2, "split_backward": "early"},
    "flush first": {"schedule": "pipedream", "microbatches": 2, "flush_first": 2},
    "chunks": {"schedule": "pipedream", "microbatches": 3, "num_stages": 4, "chunks_per_rank": 2},
    "replicas": {"schedule": "pipedream", "microbatches": 4, "num_stages": 2, "replicas": (1, 2)},
    "shared optimizer state": {"schedule": "gpipe", "microbatches": 4, "num_stages": 2, "replicas": 2, "shard_optimizer": True},
}


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.thinned(most=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", CASES)
def test_equals_optax_on_the_layers_of_each_stage(case):
    fields = {"num_stages": 3} | CASES[case]
    stack = STATELESS if "replicas" in fields else STACK  # the layer state of replicas is not that of one sequence of forwards
    pipe = pipeline(Plan.even(stack.ids, **fields), stack)
    batches = batches_for(pipe.plan)
    running.check_close(running.train(pipe, batches), running.train_as_one_function(pipe, batches))


BIT_FOR_BIT = {
    "stashing": ({"schedule": "pipedream", "microbatches": 1}, {}),
    "2BW, replicas": ({"schedule": "pipedream_2bw", "microbatches": 8, "replicas": 2}, {}),
    "rates of their own": ({"schedule": "pipedream", "microbatches": 2, "replicas": (1, 2), "update_every": "replicas"}, {}),
    "bfloat16": ({"schedule": "pipedream", "microbatches": 2}, {"precision": Precision(params="bfloat16")}),
    "loss scale": ({"schedule": "pipedream_2bw", "microbatches": 2}, {"precision": Precision(params="float16", loss_scale="dynamic")}),
    "skipping": ({"schedule": "gpipe", "microbatches": 2}, {"skip_nonfinite": True}),
}


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("case", BIT_FOR_BIT)
def test_equals_the_sequential_reference_bit_for_bit(case):
    fields, options = BIT_FOR_BIT[case]
    batches = models.masked_batches(running.REFERENCE_BATCHES, fields["microbatches"])
    if "skip_nonfinite" in options:
        batches[3] = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), batches[3][0]), batches[3][1]
    running.check_against_reference(STACK, Plan.even(STACK.ids, 2, **fields), {2}, batches, clip_stage_norm=NORM, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "more",
    [
        {"replicas": 2, "shard_optimizer": True},
        pytest.param({"mesh": {"data": 2, "model": 2}, "fsdp": True}, marks=pytest.mark.exhaustive),
    ],
    ids=["shared optimizer state", "mesh"],
)
def test_shared_optimizer_state_and_meshes_change_no_number(more):
    stack = models.wide_stack()
    fields = {"num_stages": 2, "schedule": "pipedream_flush", "microbatches": 2}
    plain, plan = (Plan.even(stack.ids, **fields, **one) for one in ({"replicas": more.get("replicas", 1)}, more))
    batches = batches_for(plan, 3, rows=4, width=4)
    expected, actual = (running.train(pipeline(one, stack), batches).params for one in (plain, plan))
    running.check_close(actual, models.on_first_device(expected))


def freeze(layer: str) -> optax.GradientTransformation:
    """Return momentum for all layers but this one, which it leaves as it is."""

    def labels(params):
        return jax.tree.map_with_path(lambda path, _: "frozen" if path[0].key == layer else "trained", params)

    return optax.partition({"trained": models.momentum(), "frozen": optax.set_to_zero()}, labels)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_frozen_parameters_do_not_count():
    """The gradient of the trained layer of a stage is clipped as if it were alone in it."""
    plans = [Plan.even(STACK.ids, 2, "gpipe", 2), models.cut(STACK.ids, (1, 1, 2), schedule="gpipe", microbatches=2)]
    batches = batches_for(plans[0])
    actual, expected = (running.train(pipeline(plan, optimizer=freeze("track")), batches).params for plan in plans)
    running.check_close(actual, models.on_first_device(expected))


@pytest.mark.exhaustive
def test_a_state_goes_on_under_another_norm():
    """The norm is no part of a state, and nor is whether there is one."""
    plan, batches = Plan.even(STACK.ids, 2, "pipedream", 2), models.masked_batches(2, 2)
    pipes = [pipeline(plan, clip_stage_norm=clip) for clip in (NORM, 2 * NORM, None)]
    states: list[State] = [running.fresh(pipe, batches) for pipe in pipes]
    state = states[0]
    for pipe in pipes:
        state, _ = pipe.step(state, batches[0])
    assert state.batch == 3


def test_what_cannot_be_clipped_says_why():
    def refused(stack=STACK, plan=None, **options):
        plan = plan or Plan.even(stack.ids, 2, "pipedream", 2)
        pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), **options)
        pipe.check(models.masked_batches(1, 2)[0])

    for norm in (0.0, -1.0, float("nan"), float("inf"), True):
        with pytest.raises(InputError, match="clip_stage_norm: expected a finite number above 0, found"):
            refused(clip_stage_norm=norm)
    with pytest.raises(InputError, match=r"clip_stage_norm: expected no clip_global_norm with 2.0, found 1.0: .*; remove one of them"):
        refused(plan=Plan.even(STACK.ids, 2, "gpipe", 2), clip_global_norm=1.0, clip_stage_norm=2.0)
    with pytest.raises(InputError, match=r"clip_global_norm: expected no early updates .*, or clip_stage_norm, which clips each"):
        refused(clip_global_norm=1.0)
    with pytest.raises(InputError, match=r"skip_nonfinite: expected no early updates .* a schedule that flushes$"):
        refused(clip_stage_norm=1.0, skip_nonfinite=True)
    tied = models.tied_stack()
    with pytest.raises(
        InputError, match=r"clip_stage_norm: expected no ties with 1.0, found \['noise shared w'\]: .* use clip_global_norm, or put"
    ):
        refused(tied, Plan.even(tied.ids, 2, "gpipe", 2), clip_stage_norm=1.0)
    refused(tied, Plan.even(tied.ids, 1, "gpipe", 2), clip_stage_norm=1.0)
