"""Built-in decoders in slices have the numbers of whole rows."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

import jpipe
from jpipe import InputError
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.tune_config import LoraConfig, TuneConfig
from jpipe_lm.models import attention
from jpipe_lm.models.layers import layers
from jpipe_train.assemble.frozen import trains_part
from jpipe_train.losses.cross_entropy import loss
from tests.jpipe.running import check_close
from tests.lm.models.running import LLAMA, SMALL

LENGTH = 12


def LENIENT():
    return jax.numpy_dtype_promotion("standard")


def wide(layer):
    """Return a layer with parameters in float64."""

    def init(key, x):
        params, state = layer.init(key, x)
        return jax.tree.map(lambda leaf: leaf.astype("float64"), params), state

    return replace(layer, init=init)


def trained(config, chunk=None, tune=None, m=2, **fields):
    """Return the losses of some batches, the weights after them, and an evaluation. With `tune` only adapters are trained."""
    stack, random = layers(config, chunk, tune), np.random.default_rng(0)
    stack = stack.with_layers({layer_id: wide(layer) for layer_id, layer in stack.layers.items()})
    plan = jpipe.Plan.even(stack.ids, 2, "pipedream_flush", m, **fields)
    rule = optax.adam(0.01)
    if tune is not None:
        specs = stack.specs(jax.ShapeDtypeStruct((2, LENGTH), np.int32))
        rule = trains_part(rule, tune, {layer_id: spec.params for layer_id, spec in specs.items()})
    pipe = jpipe.Pipeline(stack, plan, loss, rule)
    rows = random.integers(0, 11, (2, 2 * m, LENGTH + 1)).astype(np.int32)
    batches = [(each[:, :-1], each[:, 1:]) for each in rows]
    state, losses = pipe.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses += metrics.losses.values()
    return losses, pipe.params(state), pipe.evaluate(state, batches[0]).loss


def of(**fields):
    """Return a config that computes in float64, which no file can ask for."""
    return ModelConfig(**{**SMALL, "seq_len": LENGTH, "vocab_size": 11, **fields}).model_copy(update={"compute_dtype": "float64"})


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"tied": True, "dropout": 0.2}, {"slices": (1, 7, 4)}),
        ({**LLAMA, "window": 5}, {"slices": 3, "recompute": "full"}),
    ],
)
def test_numbers_are_those_of_whole_rows(config, options):
    with jax.enable_x64(True), LENIENT():
        whole = trained(of(**config), **{name: value for name, value in options.items() if name != "slices"})
        check_close(trained(of(**config), **options), whole, 1e-10)


def test_adapters_are_trained_as_with_whole_rows():
    tune = TuneConfig(lora=LoraConfig(rank=2, targets=["q_proj", "v_proj", "down_proj"]))
    with jax.enable_x64(True), LENIENT():
        whole = trained(of(**LLAMA), None, tune)
        check_close(trained(of(**LLAMA), None, tune, slices=3), whole, 1e-10)


def test_long_rows_are_computed_in_blocks_and_the_loss_in_chunks(monkeypatch):
    monkeypatch.setattr(attention, "queries_of_block", lambda keys: 3)
    with jax.enable_x64(True), LENIENT():
        check_close(trained(of(), 5, slices=2), trained(of(), 5), 1e-10)


def test_several_documents_in_a_row_are_refused():
    stack = layers(ModelConfig(**{**SMALL, "seq_len": LENGTH, "vocab_size": 11}))
    plan = jpipe.Plan.even(stack.ids, 2, "gpipe", 2, slices=2)
    tokens = np.zeros((4, LENGTH), np.int32)
    pipe = jpipe.Pipeline(stack, plan, loss, optax.sgd(0.1))
    with pytest.raises(InputError, match="found layer 'embed', which mixes positions"):
        pipe.init(jax.random.key(0), ({"tokens": tokens, "segments": tokens + 1}, tokens))
