"""On TPUs XLA chooses the layouts of the arrays between two programs. Here it does so on CPUs: no number changes."""

import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout

from jpipe import Layer, LayerStack, Pipeline, Plan
from jpipe.stages import _calls, _compile
from tests.jpipe import models
from tests.jpipe.running import check_equal, train


def wide() -> Layer:
    """Build a dense layer that saves an array with a dim of size one."""
    inner = models.dense()

    def apply(params, state, x, key, train):
        return inner.apply(params, state, jnp.tanh(x[:, None, :]).sum(axis=1), None, train)

    return Layer(inner.init, apply)


STACK = LayerStack({name: wide() for name in "abcd"})


@pytest.mark.parametrize("fields", [
    {"schedule": "zb_h1", "offload": {"residuals": "all", "stash": "all"}},
    {"schedule": "gpipe", "replicas": 2, "sum_parts": 2},
], ids=lambda fields: fields["schedule"])  # fmt: skip
def test_the_layouts_of_residuals_change_no_number(fields, monkeypatch):
    batches, seen = models.batches_of(3, 8), set()
    plan = Plan.even(STACK.ids, num_stages=2, microbatches=2, **fields)
    expected = train(Pipeline(STACK, plan, models.squares, models.momentum()), batches)
    choices, result_of_op = _compile.choices, _calls._result_of_op

    def by_columns(a, op, kind):
        if kind != "residuals" or "saved" in a.chosen:
            return result_of_op(a, op, kind)
        return tuple(Format(Layout(tuple(range(spec.ndim))[::-1]), a.place.sharding()) for spec in a.functions.between_specs[1])

    def noted(*arguments, layouts):
        chosen = choices(*arguments, layouts=layouts)
        seen.update(format.layout.major_to_minor for format in chosen.get("saved", ()) if format is not None)
        return chosen

    monkeypatch.setattr(_compile, "CHOOSING_LAYOUTS", ("cpu",))
    monkeypatch.setattr(_calls, "_result_of_op", by_columns)
    monkeypatch.setattr(_compile, "choices", noted)
    check_equal(train(Pipeline(STACK, plan, models.squares, models.momentum()), batches), expected)
    assert (1, 0) in seen
