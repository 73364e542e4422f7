"""Every kind of program of a stage compiles for GPUs and TPUs, and writes its results into the memory of what it is given to consume."""

import optax
import pytest

from jpipe import Pipeline, Plan, Precision
from tests.jpipe import models
from tests.targets.compiled import compile_pipeline, programs_of

pytestmark = pytest.mark.targets
UPDATES = {"in_place", "into_new", "into_retired"}

CASES = {
    "flush": ({"schedule": "gpipe"}, {}, {"forward", "backward", "in_place"}),
    "fused": ({"schedule": "pipedream_flush"}, {"clip_global_norm": 1.0}, {"forward_backward", "sum_squares", "norm"}),
    "recomputed": ({"schedule": "pipedream_flush", "recompute": "full"}, {"skip_nonfinite": True}, {"backward"}),
    "halves": ({"schedule": "zb_h1", "num_stages": 3}, {}, {"backward_input", "backward_weight", "forward_backward_input"}),
    "stashed": ({"schedule": "pipedream"}, {"clip_stage_norm": 1.0}, {"into_new", "stage_norm"}),
    "two versions": ({"schedule": "pipedream_2bw"}, {"delay_correction": "predict", "ema_decay": 0.9}, {"into_retired"}),
    "replicas": ({"schedule": "pipedream_2bw", "replicas": 2}, {}, {"add", "finish", "add_state", "mean_state"}),
    "shares": ({"schedule": "gpipe", "replicas": 2, "shard_optimizer": True}, {"clip_global_norm": 1.0}, {"add", "sum_squares", "norm"}),
    "masters": ({"schedule": "gpipe"}, {"precision": Precision(params="bfloat16")}, {"in_place"}),
    "scaled": ({"schedule": "gpipe"}, {"precision": Precision(params="float16", loss_scale="dynamic")}, {"next_scale"}),
    "tied": ({"schedule": "pipedream_flush", "tied": True}, {}, {"forward_backward", "take_shared", "add_shared 0", "in_place shared 0"}),
}


SELDOM = ("flush", "fused")
"""Their programs are among those of the other cases: only `make test-targets PYTEST_ARGS="-m targets"` runs these."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.exhaustive) if case in SELDOM else case for case in CASES])
def test_compiles(case, devices):
    fields, options, expected = CASES[case]
    fields = {"microbatches": 4, "num_stages": 2, **fields}
    stack = models.tied_stack() if fields.pop("tied", False) else models.rich_stack()
    plan = Plan.even(stack.ids, **fields)
    pipe = Pipeline(stack, plan, models.masked_squares, optax.sgd(0.05, momentum=0.9), **options)
    (batch,) = models.masked_batches(1, plan.microbatches)
    programs = programs_of(compile_pipeline(pipe, batch, devices, start=case in ("masters", "flush")))
    assert expected | {"evaluate"} <= programs.keys()
