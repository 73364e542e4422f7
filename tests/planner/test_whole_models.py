"""The planner profiles and plans layers that were cut from a whole model, and such a plan trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe_planner import Topology, analyze
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.search.candidates import find_candidates
from jpipe_train.assemble.build import make_plan
from jpipe_train.config.config import PlanConfig

WORDS, WIDTH, LENGTH = 12, 4, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.linear = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x))))


class Words(nnx.Module):
    """One table for the tokens and for the logits."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def loss(y, labels):
    return optax.softmax_cross_entropy_with_integer_labels(y, labels).sum(), labels.size


def batch(rows):
    return jax.ShapeDtypeStruct((rows, LENGTH), np.int32), jax.ShapeDtypeStruct((rows, LENGTH), np.int32)


@pytest.fixture(scope="module")
def stack():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jpipe.LayerStack.from_model(Words, batch(2)[0])


@pytest.fixture(autouse=True)
def lenient():
    """Mix ranks and dtypes, as users' code may."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def train(stack, plan):
    """Return the loss of a batch, and that after an update with it."""
    tokens = np.random.default_rng(0).integers(0, WORDS, (8, LENGTH)).astype(np.int32)
    pipe = jpipe.Pipeline(stack, plan, loss, optax.adam(1e-3))
    state, metrics = pipe.step(pipe.init(jax.random.key(0), (tokens, tokens)), (tokens, tokens))
    return [float(metrics.losses[0]), float(pipe.evaluate(state, (tokens, tokens)).loss)], pipe.costs((tokens, tokens))


@pytest.mark.exhaustive
def test_a_whole_model_is_profiled_planned_simulated_and_trained(stack):
    topology = Topology(levels=({"count": 2, "bandwidth": 1e9},), device={"flops": {"float32": 1e9}, "memory": 1e9})
    profile = analyze(stack, batch, loss, optax.adam(1e-3), [2, 4], topology.device, policies=("none",))
    assert profile.ids == stack.ids == ("embed", "blocks.0", "blocks.1", "blocks.2", "embed_2")
    assert [parameter.layers for parameter in profile.shared] == [("embed", "embed_2")]
    assert profile.layers[1].model_copy(update={"id": "blocks.1"}) == profile.layers[2], "equal blocks are profiled once"
    candidates = find_candidates(profile, topology, 8, schedules=["pipedream_flush"])
    plan = next(plan for plan in (candidate.plan(stack.ids) for candidate in candidates) if plan.depth == 2)
    costs = profile.stage_costs(plan, 8 // plan.microbatches)
    simulated = simulate_plan(plan, costs, topology)
    assert simulated is not None
    assert simulated.batch_seconds > 0
    losses, exact = train(stack, plan)
    assert [cost.weights for cost in costs] == [cost.weights for cost in exact]
    expected, _ = train(stack, jpipe.Plan.even(stack.ids, 1, "gpipe", plan.microbatches))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_costs_of_layers_name_the_layers_of_a_whole_model(stack):
    plan = make_plan(PlanConfig(num_stages=2, layer_costs={"blocks.2": 9.0}), stack.ids)
    assert [stage.layers for stage in plan.stages] == [stack.ids[:3], stack.ids[3:]]
    with pytest.raises(jpipe.InputError, match=r"plan\.layer_costs: layer 'blocks/2' is not in the model; .*blocks\.2"):
        make_plan(PlanConfig(num_stages=2, layer_costs={"blocks/2": 9.0}), stack.ids)
