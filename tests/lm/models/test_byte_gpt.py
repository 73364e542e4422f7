"""The default model is the GPT over bytes of version 0.1: names, shapes, initial weights and losses."""

import jax
import numpy as np
import pytest

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train.losses.cross_entropy import loss
from tests.lm.models.running import SMALL, applied, params_of, trained

SHAPES = {
    "embed": {"position/embedding": (128, 128), "token/embedding": (256, 128)},
    "block_3": {
        **{"attention_norm/bias": (128,), "attention_norm/scale": (128,), "qkv/bias": (384,), "qkv/kernel": (128, 384)},
        **{"project/bias": (128,), "project/kernel": (128, 128), "mlp_norm/bias": (128,), "mlp_norm/scale": (128,)},
        **{"expand/bias": (512,), "expand/kernel": (128, 512), "contract/bias": (128,), "contract/kernel": (512, 128)},
    },
    "head": {"norm/bias": (128,), "norm/scale": (128,), "logits/kernel": (128, 256)},
}
SUMS = {  # of the absolute values of the first weights of the small model
    "embed": {"position/embedding": 35.6645533, "token/embedding": 3275.2087374},
    "block_1": {"qkv/kernel": 153.2159593, "project/kernel": 26.2373008, "expand/kernel": 199.7732608, "contract/kernel": 51.2129954},
    "head": {"logits/kernel": 64.8749772},
}
LOSSES, WITH_DROPOUT = [5.59315681, 5.56487226, 5.57054758], [5.57650709, 5.56235456, 5.57402611]
TOKENS = np.arange(3 * 2 * 9, dtype=np.int32).reshape(3, 2, 9) * 37 % 256


def test_its_layers_have_these_parameters():
    specs = layers(ModelConfig()).specs(jax.ShapeDtypeStruct((1, 128), np.int32))
    assert list(specs) == ["embed", "block_0", "block_1", "block_2", "block_3", "head"]
    for layer_id, shapes in SHAPES.items():
        leaves = named(specs[layer_id].params)
        assert {name: leaf.shape for name, leaf in leaves.items()} == shapes
        assert {leaf.dtype for leaf in leaves.values()} == {jax.numpy.dtype("float32")}
    assert sum(leaf.size for spec in specs.values() for leaf in jax.tree.leaves(spec.params)) == 875_264


@pytest.mark.slow
def test_it_begins_with_these_weights():
    params = params_of(layers(ModelConfig(**SMALL)), TOKENS[0, :, :-1])
    for layer_id, sums in SUMS.items():
        weights = named(params[layer_id])
        np.testing.assert_allclose([np.abs(weights[name]).sum(dtype="float64") for name in sums], list(sums.values()), rtol=1e-6)
    first = named(params["block_1"])["qkv/kernel"][0, :3]
    np.testing.assert_allclose(first, [-0.1958677, -0.3739683, -0.2675280], rtol=1e-5)


BATCHES = [(tokens[:, :-1], tokens[:, 1:]) for tokens in TOKENS]


@pytest.mark.slow
def test_it_learns_these_losses():
    stack = layers(ModelConfig(**SMALL))
    params, losses = params_of(stack, BATCHES[0][0]), []

    @jax.jit
    def step(params, batch):
        def mean(params):
            total, weight = loss(applied(stack, params, batch[0]), batch[1])
            return total / weight

        value, gradients = jax.value_and_grad(mean)(params)
        return value, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)

    for batch in BATCHES:
        value, params = step(params, batch)
        losses.append(float(value))
    np.testing.assert_allclose(losses, LOSSES, rtol=1e-5)


@pytest.mark.exhaustive
def test_a_pipeline_learns_these_losses_with_dropout():
    stack = layers(ModelConfig(**SMALL, dropout=0.25))
    losses, _ = trained(stack, jpipe.Plan.even(stack.ids, 2, "pipedream_flush", 2), BATCHES)
    np.testing.assert_allclose(losses, WITH_DROPOUT, rtol=1e-5)


def named(tree):
    """Return the arrays of a tree by name."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
