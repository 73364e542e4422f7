"""The shards of a layer under tensor parallelism: by hand for a small Llama, and for programs that move sharded dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe_lm.config.model.experts_section import ExpertsConfig
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_planner.machine.device import Device
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.analyze import analyze
from jpipe_planner.profile.sharded import Degrees, shard_profile
from jpipe_planner.profile.tensor import Walk, sharded_params, tensor_profile
from jpipe_train.losses.cross_entropy import loss

CONFIG = ModelConfig(preset="llama-tiny")
ROWS, SEQ, WIDTH, HEADS, KV, INNER = 2, 16, 16, 4, 2, 40


def stages(stack, inputs):
    """Return a function that gives a layer as a stage, by layer id and policy."""
    specs = stack.specs(inputs)
    params = {layer_id: spec.params for layer_id, spec in specs.items()}
    rule = jpipe.model.find_layerwise(optax.sgd(0.1), params, False, stack.ties)
    labels = jax.ShapeDtypeStruct((ROWS, SEQ), np.int32)
    return lambda layer_id, policy: jpipe.stages.StandaloneStage(
        stack, jpipe.Stage(layers=(layer_id,), recompute=policy), specs, labels, loss, rule
    )


@pytest.fixture(scope="module")
def profiles():
    """Return the tensor profiles of three layers of the small Llama."""
    stack = layers(CONFIG)
    stage, device = stages(stack, jax.ShapeDtypeStruct((ROWS, SEQ), np.int32)), jax.devices()[0]
    return {
        i: tensor_profile(lambda policy, i=i: stage(i, policy), i, ROWS, ["none", "full"], device) for i in ("embed", "block_0", "head")
    }


def test_a_block_sums_its_output_twice_and_shards_all_but_its_norms(profiles):
    block = profiles["block_0"]
    assert (block.reductions, block.reduced) == (2, 2 * SEQ * WIDTH * 4)
    kernels = WIDTH * (HEADS + 2 * KV) * 4 + HEADS * 4 * WIDTH + 3 * WIDTH * INNER
    assert block.weights == kernels / (kernels + 2 * WIDTH)
    assert block.compute == 1.0
    assert block.outputs == 0.0
    assert block.divides == KV  # whole heads of keys and values
    assert 0.5 < block.residuals["none"] < 1
    assert block.residuals["full"] == 0  # its input


def test_symbols_are_sharded_in_the_embedding_and_in_the_head(profiles):
    assert (profiles["embed"].weights, profiles["embed"].reductions, profiles["embed"].divides) == (1.0, 1, 256)
    assert profiles["embed"].reduced == SEQ * WIDTH * 4
    assert profiles["head"].weights == 256 / 257
    assert profiles["head"].reduced <= 4 * SEQ * 4  # no logits: a maximum, a sum and a label for each position


def test_tied_embeddings_are_sharded_in_both_places():
    config = CONFIG.model_copy(update={"tied": True})
    stage = stages(layers(config), jax.ShapeDtypeStruct((ROWS, SEQ), np.int32))
    for layer_id in ("embed", "head"):
        profile = tensor_profile(lambda policy, i=layer_id: stage(i, policy), layer_id, ROWS, ["none"], jax.devices()[0])
        assert profile.weights > 0.9


def test_layers_without_names_are_not_sharded():
    stack = jpipe.LayerStack({i: lambda rngs: nnx.Linear(16, 16, rngs=rngs) for i in "ab"})
    spec = stack.specs(jax.ShapeDtypeStruct((2, 16), np.float32))["a"]
    assert not any(any(array.dims) for array in jax.tree.leaves(sharded_params("a", spec)))


W = np.zeros((8, 6), np.float32)


@pytest.mark.parametrize(
    ("program", "sharded", "expected", "reductions"),
    [
        (lambda x, w: x @ w, (False, True), (False, True), 0),  # by columns
        (lambda x, w: (x @ w) @ w.T, (False, True), (False, False), 1),  # then by rows
        (lambda x, w: jnp.tanh(x @ w).reshape(4, 3, 2).transpose(1, 0, 2), (False, True), (True, False, False), 0),
        (lambda x, w: (x @ w).reshape(2, 2, 6)[:, 0], (False, True), (False, True), 0),
        (lambda x, w: jax.nn.softmax(x @ w), (False, True), (False, True), 2),
        (lambda x, w: (x @ w).sum(0), (False, True), (True,), 0),
        (lambda x, w: jnp.concatenate([x @ w, x @ w], 0), (False, True), (False, True), 0),
        (lambda x, w: jnp.split(x @ w, 2, 1)[1], (False, True), (False, True), 0),
        (lambda x, w: w[jnp.zeros(4, int)], (True, False), (False, False), 1),  # rows of a table
        (lambda x, w: w[jnp.zeros(4, int)], (False, True), (False, True), 0),
        (lambda x, w: jax.lax.scan(lambda c, row: (c, (row @ w) @ w.T), 0.0, x)[1], (False, True), (False, False), 4),
        (jax.jit(lambda x, w: jax.nn.relu(x @ w)), (False, True), (False, True), 0),
    ],
)
def test_sharded_dims_are_followed(program, sharded, expected, reductions):
    jaxpr = jax.make_jaxpr(program)(np.zeros((4, 8), np.float32), W).jaxpr
    walk = Walk()
    assert walk.run(jaxpr, [(False, False), sharded]) == [expected]
    assert walk.reductions == reductions


@pytest.mark.slow
def test_bytes_on_a_mesh_are_those_of_the_compiled_stage():
    stack, rule = layers(CONFIG.model_copy(update={"depth": 1})), optax.sgd(0.1, momentum=0.9)
    rows = jax.ShapeDtypeStruct((ROWS, SEQ), np.int32)
    device = Device(name="toy", flops={"float32": 1e9})
    profile = analyze(stack, lambda _: (rows, rows), loss, rule, [ROWS], device, policies=[])
    degrees = Degrees(model=2)
    plan = jpipe.Plan.even(stack.ids, 3, "gpipe", 2, mesh=degrees.mesh)
    costs = shard_profile(profile, degrees, Topology.flat(2, 1e9)).stage_costs(plan, ROWS)
    batch = jax.ShapeDtypeStruct((2 * ROWS, SEQ), np.int32)
    exact = jpipe.Pipeline(stack, plan, loss, rule).costs((batch, batch), compiled_for=jax.devices()[0])
    for part in ("weights", "optimizer", "inputs", "outputs", "residuals"):
        assert getattr(costs[1], part) == getattr(exact[1], part), part  # the block


EXPERTS = {"count": 4, "per_token": 2, "mlp_width": 24}


@pytest.mark.exhaustive
def test_a_mixture_of_experts_counts_the_tokens_that_its_experts_compute():
    """A forward has the FLOPs of the experts of each token alone; all kernels count as bytes."""
    config = CONFIG.model_copy(update={"depth": 1, "gated_mlp": True, "bias": False, "experts": ExpertsConfig(**EXPERTS)})
    dense = config.model_copy(update={"experts": None, "mlp_width": 2 * 24})
    rows = jax.ShapeDtypeStruct((ROWS, SEQ), np.int32)
    device = Device(name="toy", flops={"float32": 1e9})
    mixed, plain = (
        analyze(layers(one), lambda _: (rows, rows), loss, optax.sgd(0.1), [ROWS], device, policies=[]).layers[1] for one in (config, dense)
    )
    router = 2 * ROWS * SEQ * config.width * 4
    assert mixed.at[0].flops == pytest.approx(plain.at[0].flops + router, rel=0.1)
    assert mixed.weights - plain.weights == 4 * (3 * 2 * 24 * config.width + 4 * config.width)  # two more experts, and the router
    assert (mixed.tensor.experts, mixed.tensor.per_token, plain.tensor.per_token) == (4, 2, 0)
    assert mixed.tensor.of_experts == 4 * 3 * 4 * 24 * config.width / mixed.weights
    assert mixed.tensor.exchanged == 4 * SEQ * config.width
    assert 0 < mixed.tensor.chosen["none"] < 1
    extra = mixed.tensor.reduced - plain.tensor.reduced
    assert extra == 0  # one sum of the outputs of each token, as without experts
