"""Initialization and dropout depend on (seed, layer id, microbatch) only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe import Layer, LayerStack, Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import check_equal, fresh


def drawing() -> Layer:
    """Adds a random number to its input and has a parameter that does nothing."""

    def apply(params, state, x, key, train):
        return x if key is None else x + jax.random.uniform(key), state

    return Layer(lambda key, x: ({"unused": jnp.zeros(1)}, {}), apply, stochastic=True)


STACK = LayerStack({"a": drawing(), "b": drawing(), "c": drawing()})


def total(y, labels):
    """Of a microbatch of ones: 1 + what was drawn for it."""
    return y[0, 0], 1.0


def losses(sizes, m, count, *, seed=0, stack=STACK, variant="pipedream"):
    plan = models.cut(stack.ids, sizes, microbatches=m, **models.VARIANTS[variant])
    pipe = Pipeline(stack, plan, total, models.momentum())
    batch = (np.ones((m, 1), np.float32), np.ones((m, 1), np.float32))
    state, found = pipe.init(jax.random.key(seed), batch), []
    for _ in range(count):
        state, metrics = pipe.step(state, batch)
        found += [float(loss) for loss in metrics.losses.values()]
    return np.array(found)


@pytest.mark.oldest
def test_every_microbatch_draws_anew():
    found = losses((1, 1, 1), 1, 6)
    assert len(set(found)) == 6


def test_every_layer_draws_for_itself():
    one = LayerStack({"a": drawing()})
    drawn = losses((1,), 1, 1, stack=one) - 1
    assert not np.isclose(losses((3,), 1, 1), 1 + 3 * drawn)


def test_the_seed_decides():
    np.testing.assert_array_equal(losses((1, 2), 1, 3, seed=5), losses((1, 2), 1, 3, seed=5))
    assert not np.any(losses((1, 2), 1, 3, seed=5) == losses((1, 2), 1, 3, seed=6))


@pytest.mark.thinned
@pytest.mark.parametrize("sizes", [(3,), (2, 1), (1, 2), (1, 1, 1)])
@pytest.mark.parametrize("variant", ["gpipe", "pipedream", "pipedream_2bw"])
def test_draws_do_not_depend_on_the_cut_or_the_schedule(sizes, variant):
    np.testing.assert_array_equal(losses(sizes, 3, 4, variant=variant), losses((3,), 3, 4, variant="naive"))


def test_draws_do_not_depend_on_the_number_of_microbatches_in_a_batch():
    """Microbatch k is counted over the whole run: two batches of three draw what six batches of one draw."""
    np.testing.assert_allclose(losses((1, 2), 3, 2), losses((1, 2), 1, 6).reshape(2, 3).mean(1), rtol=1e-6)


def test_a_draw_depends_on_the_id_of_the_layer_and_not_on_its_position():
    key = jax.random.key(0)
    run = jax.jit(
        lambda ids, k: STACK.apply(ids, *({i: {} for i in STACK.ids},) * 2, jnp.ones((1, 1)), key=key, microbatch=k, train=True)[0],
        static_argnums=0,
    )
    alone, after_another = run(("b",), 4), run(("a", "b"), 4) - run(("a",), 4) + 1
    np.testing.assert_allclose(alone, after_another, rtol=1e-6)
    assert run(("a",), 4) != run(("b",), 4)
    assert run(("b",), 4) != run(("b",), 5)


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_cut_the_schedule_or_the_other_layers():
    stack = models.rich_stack()
    found = []
    for sizes, variant in [((4,), "gpipe"), ((1, 3), "gpipe"), ((3, 1), "pipedream"), ((2, 2), "naive"), ((1, 1, 1, 1), "pipedream_2bw")]:
        plan = models.cut(stack.ids, sizes, microbatches=4, **models.VARIANTS[variant])
        pipe = Pipeline(stack, plan, models.masked_squares, models.momentum())
        found.append(pipe.params(fresh(pipe, models.masked_batches(1, 4))))
    for params in found[1:]:
        check_equal(params, found[0])
    assert not np.array_equal(found[0]["track"]["w"], found[0]["mix"]["w"]), "every layer has its own"
    shorter = LayerStack({i: stack.layers[i] for i in ("track", "out")})
    pipe = Pipeline(shorter, Plan.even(shorter.ids, 2, "gpipe", 4), models.masked_squares, models.momentum())
    check_equal(pipe.params(fresh(pipe, models.masked_batches(1, 4))), {i: found[0][i] for i in shorter.ids})
