"""Adapters: a step equals one of the model without stages, the base stays as it is, and adapters begin as those of PEFT."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe_lm.config.model.experts_section import ExpertsConfig
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.tune_config import LoraConfig, TuneConfig, is_of_adapter
from jpipe_lm.models.layers import layers
from jpipe_train.assemble.frozen import trains_part
from jpipe_train.losses.cross_entropy import loss
from tests.jpipe import running
from tests.jpipe.runtime.test_memory import peaks_of
from tests.lm.models.running import LLAMA, SMALL

CONFIG = ModelConfig(**SMALL, **LLAMA)
EXPERTS = ExpertsConfig(count=4, per_token=2, mlp_width=12, shared_mlp_width=6, shared_gate=True, balance_loss=0.5)
WITH_EXPERTS = CONFIG.model_copy(update={"experts": EXPERTS})
TOKENS = np.arange(5 * 4 * 9, dtype=np.int32).reshape(5, 4, 9) ** 2 % 251
BATCHES = [(tokens[:, :-1], tokens[:, 1:]) for tokens in TOKENS]


def lora(**keys) -> TuneConfig:
    return TuneConfig(lora=LoraConfig(**{"rank": 4, "alpha": 16.0} | keys))


def pipeline(stack, tune, schedule, devices=None, **fields) -> jpipe.Pipeline:
    plan = jpipe.Plan.even(stack.ids, **{"num_stages": 2, "schedule": schedule, "microbatches": 2} | fields)
    rule = optax.chain(optax.clip(0.5), optax.adam(0.05))
    params = {layer_id: spec.params for layer_id, spec in stack.specs(BATCHES[0][0][:2]).items()}
    return jpipe.Pipeline(stack, plan, loss, trains_part(rule, tune, params), devices)


def by_name(params) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(
    ("schedule", "config"),
    [
        pytest.param("pipedream_2bw", CONFIG, id="2bw"),
        pytest.param("pipedream_flush", WITH_EXPERTS, marks=pytest.mark.slow, id="experts"),
        pytest.param("pipedream", CONFIG, marks=pytest.mark.slow, id="pipedream"),
    ],
)
def test_steps_equal_those_of_the_model_without_stages(schedule, config):
    """In the model with experts `down_proj` is in the shared expert; routed ones and routers are frozen."""
    tune = lora(targets=["q_proj", "v_proj", "down_proj"])
    pipe = pipeline(layers(config, None, tune), tune, schedule)
    batches = BATCHES[:4]
    start = by_name(pipe.params(running.fresh(pipe, batches)))
    actual, expected = running.train(pipe, batches), running.train_as_one_function(pipe, batches)
    running.check_close(actual.losses, expected.losses, 1e-5)
    running.check_close(actual.params, expected.params, 2e-4)
    assert sum(map(is_of_adapter, start)) == 2 * 3 * 2
    for name, array in by_name(actual.params).items():
        assert np.array_equal(array, start[name]) != is_of_adapter(name), name


X = np.linspace(-1, 1, 2 * 8 * 64, dtype=np.float32).reshape(2, 8, 64)


@pytest.fixture(scope="module")
def blocks():
    """Return by name, with adapters that have dropout and without, the parameters of two blocks, and what computes the first."""

    def made(tune):
        stack = layers(ModelConfig(**SMALL | {"width": 64}, **LLAMA), None, tune)
        keys = dict(zip(("block_0", "block_1"), jax.random.split(jax.random.key(0)), strict=True))
        params = jax.jit(lambda: {layer_id: stack.init_layer(layer_id, key, X)[0] for layer_id, key in keys.items()})()

        @functools.partial(jax.jit, static_argnums=1)
        def outputs(params, train, seed=0):
            return stack.layers["block_0"].apply(params, {}, jnp.asarray(X), jax.random.key(seed) if train else None, train)[0]

        return params, outputs

    return {"adapted": made(lora(dropout=0.5)), "base": made(None)}


@pytest.mark.slow
def test_adapters_begin_as_those_of_peft_and_change_nothing(blocks):
    (params, outputs), (expected, base) = blocks["adapted"], blocks["base"]
    arrays, weights = by_name(params), by_name(expected)
    assert {name: array.shape for name, array in arrays.items() if not is_of_adapter(name)} == {n: a.shape for n, a in weights.items()}
    for name, array in weights.items():
        np.testing.assert_array_equal(arrays[name], array)
    np.testing.assert_array_equal(outputs(params["block_0"], False), base(expected["block_0"], False))
    a, b = arrays["block_0/qkv/lora/q_proj/a"], arrays["block_0/qkv/lora/q_proj/b"]
    assert (a.shape, b.shape) == ((64, 4), (4, 64))
    assert not b.any()
    assert 0.11 < np.abs(a).max() <= 64**-0.5
    assert abs(a.std() - (3 * 64) ** -0.5) < 0.01
    assert not np.array_equal(a, arrays["block_0/qkv/lora/k_proj/a"])
    assert not np.array_equal(a, arrays["block_1/qkv/lora/q_proj/a"])


@pytest.mark.slow
def test_dropout_is_in_front_of_a_alone(blocks):
    """With B of zeros it changes nothing; with others it does, in training only."""
    params, outputs = blocks["adapted"][0]["block_0"], blocks["adapted"][1]
    np.testing.assert_allclose(outputs(params, True), outputs(params, False), rtol=1e-6, atol=1e-6)
    moved = jax.tree.map(lambda leaf: leaf + 0.1, params)
    assert not np.allclose(outputs(moved, True), outputs(moved, True, 1))
    assert not np.allclose(outputs(moved, True), outputs(moved, False))


@pytest.mark.exhaustive
def test_a_mesh_changes_no_number():
    tune = TuneConfig(lora=LoraConfig(), quantize="int8", base_dtype="bfloat16")
    stack = layers(CONFIG, None, tune)
    plain = running.train(pipeline(stack, tune, "pipedream_2bw", num_stages=1), BATCHES[:3])
    sharded = running.train(pipeline(stack, tune, "pipedream_2bw", num_stages=1, mesh={"data": 2, "model": 2}), BATCHES[:3])
    running.check_close(sharded.losses, plain.losses, 1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["pipedream_flush", "pipedream_2bw"])
def test_measured_memory_is_predicted_and_less_than_two_fifths_of_that_of_full_tuning(schedule):
    wide, totals = CONFIG.model_copy(update={"width": 96, "heads": 4, "kv_heads": 4}), {}
    nf4 = TuneConfig(lora=LoraConfig(), base_dtype="bfloat16", quantize="nf4")
    for name, tune in {"full": TuneConfig(), "lora": lora(), "nf4": nf4}.items():
        devices = jax.devices()[:2]
        measured, predicted = peaks_of(pipeline(layers(wide, None, tune), tune, schedule, devices), BATCHES[0], devices)
        np.testing.assert_allclose(measured, predicted, atol=64)
        totals[name] = sum(measured)
    assert totals["nf4"] < totals["lora"] < 0.4 * totals["full"]
