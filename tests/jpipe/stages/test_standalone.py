"""A stage without a pipeline computes what the stages of a pipeline compute."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jpipe import LayerStack
from jpipe.model import LayerwiseOptimizer
from jpipe.plan import Stage
from jpipe.stages import StandaloneStage, _standalone
from tests.jpipe import models

IDS = ("in", "middle", "out")


def drawn(specs):
    """Return random arrays for float specs, and zeros, or a key, for others."""

    def array(spec):
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return (
            jax.random.normal(jax.random.key(1), spec.shape, spec.dtype) if spec.dtype == jnp.float32 else jnp.zeros(spec.shape, spec.dtype)
        )

    return jax.tree.map(array, specs)


@pytest.mark.parametrize("layer_id", IDS)
def test_a_forward_and_a_backward_in_one_program_compute_what_both_compute(layer_id):
    stack, x = LayerStack({name: models.dense() for name in IDS}), jax.ShapeDtypeStruct((4, models.WIDTH), jnp.float32)
    optimizer = LayerwiseOptimizer(optax.sgd(0.1))
    stage = StandaloneStage(stack, Stage(layers=(layer_id,)), stack.specs(x), x, models.squares, optimizer)
    programs = {name: stage.trace(name, jax.devices()[0]).lower().compile() for name in ("forward", "backward", "forward_backward")}
    params, state, x, labels, rng = drawn(programs["forward"].args_info[0])
    message, sums, _, scale = drawn(programs["backward"].args_info[0][3:])
    (y, changed, saved), _ = programs["forward"](params, state, x, labels, rng)
    kept = stage.keep((state, x, labels), (y, changed))
    before = jax.tree.map(jnp.copy, sums)  # it is donated
    received = y if layer_id == "out" else message  # the last stage makes its own message
    (gradient, added), _ = programs["backward"](params, kept, saved, received, sums, rng, scale)
    at_once, _ = programs["forward_backward"](params, state, x, labels, message, before, rng, scale)
    chex.assert_trees_all_close(at_once, (gradient, added, changed, y), rtol=1e-6)


def test_for_analysis_xla_chooses_the_layouts_of_residuals(monkeypatch):
    monkeypatch.setattr(_standalone, "CHOOSING_LAYOUTS", ("cpu",))
    stack, x = LayerStack({name: models.dense() for name in IDS}), jax.ShapeDtypeStruct((4, models.WIDTH), jnp.float32)
    stage = StandaloneStage(stack, Stage(layers=IDS[:2]), stack.specs(x), x, models.squares, LayerwiseOptimizer(optax.sgd(0.1)))

    def chosen(name, **options):
        return stage.trace(name, jax.devices()[0], **options).lower().as_text().count('layout_mode = "auto"')

    assert chosen("forward") == chosen("backward") == 0
    assert chosen("forward", any_layout=True) == chosen("backward", any_layout=True) > 0
