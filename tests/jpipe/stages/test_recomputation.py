"""Recomputation changes the stored residuals but not the numbers, and does not advance the layer state."""

import jax
import numpy as np
import pytest

from jpipe import Pipeline, Plan
from jpipe.context import tracing_for
from tests.jpipe import models
from tests.jpipe.running import check_close, train, train_as_one_function

STACK = models.rich_stack()
M = 3
POLICIES = ("full", "elementwise", "dots_saveable", "nothing_saveable", "everything_saveable", "dots_with_no_batch_dims_saveable")


def pipeline(recompute: str, variant: str = "pipedream", stack=STACK) -> Pipeline:
    plan = models.cut(stack.ids, (1, 2, 1), microbatches=M, recompute=recompute, **models.VARIANTS[variant])
    return Pipeline(stack, plan, models.masked_squares, models.momentum())


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("recompute", POLICIES)
@pytest.mark.parametrize("variant", ["gpipe", "pipedream", "pipedream_2bw"])
def test_equals_no_recomputation_to_rounding(recompute, variant, float64):
    batches = models.masked_batches(6, M, dtype=np.float64)
    actual = train(pipeline(recompute, variant), batches)
    check_close(actual, train(pipeline("none", variant), batches))
    assert actual.layer_state["track"]["count"] == 6 * M, "a recomputed forward does not advance the layer state"


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("recompute", [pytest.param("full", marks=pytest.mark.oldest), *POLICIES[1:]])
@pytest.mark.slow
def test_recomputes_with_the_weights_and_the_layer_state_of_the_first_forward(recompute, float64):
    """With stashing, both have changed by the time of the backward, and the recomputed forward must read the old ones."""
    batches = models.masked_batches(6, M, dtype=np.float64)
    check_close(train(pipeline(recompute), batches), train_as_one_function(pipeline("none"), batches))


@pytest.mark.slow
def test_stages_may_recompute_differently(float64):
    batches = models.masked_batches(4, M, dtype=np.float64)
    plan = pipeline("none").plan
    mixed = plan.model_copy(
        update={
            "stages": tuple(
                s.model_copy(update={"recompute": r}) for s, r in zip(plan.stages, ("full", "none", "dots_saveable"), strict=True)
            )
        }
    )
    pipe = Pipeline(STACK, mixed, models.masked_squares, models.momentum())
    check_close(train(pipe, batches), train(pipeline("none"), batches))


@pytest.mark.parametrize(("platform", "policy"), [("cpu", "none"), ("gpu", "elementwise"), ("tpu", "elementwise")])
def test_the_default_depends_on_the_platform_and_named_policies_stay(platform, policy):
    plan = Plan(schedule="gpipe", microbatches=2, stages=[{"layers": STACK.ids[:1]}, {"layers": STACK.ids[1:], "recompute": "full"}])
    assert [stage.recompute for stage in Plan.from_json(plan.to_json()).stages] == ["auto", "full"]
    with tracing_for(platform):
        pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum())
        functions = pipe.stage_functions(models.masked_batches(1, 2)[0])
    assert [stage.recompute for stage in pipe.plan.stages] == [f.stage.recompute for f in functions] == [policy, "full"]
    assert Plan.from_json(pipe.plan.to_json()) == pipe.plan


def test_the_devices_of_a_pipeline_decide_before_the_platform_of_the_process(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    plan = Plan.even(STACK.ids, 1, "gpipe", 2)
    pipes = [Pipeline(STACK, plan, models.masked_squares, models.momentum(), devices) for devices in (None, jax.devices()[:1])]
    assert [pipe.plan.stages[0].recompute for pipe in pipes] == ["elementwise", "none"]


def test_one_program_for_forward_and_backward_repeats_no_elementwise_operation():
    batch = models.masked_batches(1, M)[0]
    last = [pipeline(recompute, "gpipe").stage_functions(batch)[-1] for recompute in ("none", "elementwise")]
    texts = [str(jax.make_jaxpr(f.forward_backward)(f.specs.params, *f.specs.arguments, f.accumulators_spec, f.specs.rng)) for f in last]
    assert texts[0] == texts[1]
