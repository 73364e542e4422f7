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
from jpipe_lm.models import attention, blockwise
from jpipe_lm.models.layers import layers
from jpipe_train.assemble.frozen import trains_part
from jpipe_train.losses.cross_entropy import loss
from tests.jpipe.running import check_close
from tests.lm.models.running import LLAMA, SMALL

LENGTH = 12
EXPERTS = {"count": 4, "per_token": 2, "mlp_width": 6, "balance_loss": 0.0}
LONGROPE = {"kind": "longrope", "original_positions": 64, "short_factors": [1.0] * 4, "long_factors": [2.0] * 4}


def LENIENT():
    return jax.numpy_dtype_promotion("standard")


def wide(layer):
    """Return a layer with parameters in float64."""

    def init(key, x):
        params, state = layer.init(key, x)
        return jax.tree.map(lambda leaf: leaf.astype("float64"), params), state

    return replace(layer, init=init)


def trained(config, chunk=None, tune=None, m=2, packed=False, evaluates=True, **fields):
    """Return the losses of some batches, the weights after them, and an evaluation unless the schedule is all that differs.

    With `tune` only adapters are trained. With `packed` several documents share a row.
    """
    stack, random = layers(config, chunk, tune), np.random.default_rng(0)
    stack = stack.with_layers({layer_id: wide(layer) for layer_id, layer in stack.layers.items()})
    plan = jpipe.Plan.even(stack.ids, **{"num_stages": 2, "schedule": "pipedream_flush", "microbatches": m, **fields})
    rule = optax.sgd(0.1)
    if tune is not None:
        specs = stack.specs(jax.ShapeDtypeStruct((2, LENGTH), np.int32))
        rule = trains_part(rule, tune, {layer_id: spec.params for layer_id, spec in specs.items()})
    pipe = jpipe.Pipeline(stack, plan, loss, rule)
    rows = random.integers(0, 11, (2, 2 * m, LENGTH + 1)).astype(np.int32)
    batches = [(each[:, :-1], each[:, 1:]) for each in rows]
    if packed:
        documents = np.cumsum(random.random((2, 2 * m, LENGTH)) < 0.3, axis=2).astype(np.int32) + 1
        documents[:, 0, -2:] = 0  # padding
        documents[:, 1] = 1  # one document in all slices
        batches = [
            ({"tokens": tokens, "segments": segments}, np.where(segments, labels, -1))
            for (tokens, labels), segments in zip(batches, documents, strict=True)
        ]
    state, losses = pipe.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses += metrics.losses.values()
    state, metrics = pipe.drain(state, with_metrics=True)
    losses += metrics.losses.values()
    return losses, pipe.params(state), pipe.evaluate(state, batches[0]).loss if evaluates else None


def of(**fields):
    """Return a config that computes in float64, which no file can ask for; its one block is in the first of two stages."""
    return ModelConfig(**{**SMALL, "depth": 1, "seq_len": LENGTH, "vocab_size": 11, **fields}).model_copy(
        update={"compute_dtype": "float64"}
    )


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({"tied": True, "dropout": 0.2}, {"slices": (1, 7, 4)}),
        ({**LLAMA, "window": 5}, {"slices": 3, "recompute": "full"}),
        (LLAMA, {"slices": 2, "mesh": {"data": 2, "model": 2}, "rules": {"vocab": None}}),
    ],
)
def test_numbers_are_those_of_whole_rows(config, options):
    with jax.enable_x64(True), LENIENT():
        whole = trained(of(**config), recompute=options.get("recompute", "auto"))
        check_close(trained(of(**config), **options), whole, 1e-10)


@pytest.mark.slow
def test_adapters_are_trained_as_with_whole_rows():
    tune = TuneConfig(lora=LoraConfig(rank=2, targets=["q_proj", "v_proj", "down_proj"]))
    with jax.enable_x64(True), LENIENT():
        whole = trained(of(**LLAMA), None, tune)
        check_close(trained(of(**LLAMA), None, tune, slices=3), whole, 1e-10)


@pytest.mark.slow
def test_long_rows_are_computed_in_blocks_and_the_loss_in_chunks(monkeypatch):
    monkeypatch.setattr(attention, "LONG", LENGTH)
    monkeypatch.setattr(blockwise, "queries_of_block", lambda keys: 3)
    with jax.enable_x64(True), LENIENT():
        check_close(trained(of(), 5, slices=2), trained(of(), 5), 1e-10)


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.parametrize(
    ("config", "options"),
    [({}, {"slices": (1, 7, 4)}), ({**LLAMA, "window": 5, "dropout": 0.2}, {"slices": 4}), (LLAMA, {"slices": 3, "blocks": 3})],
)
def test_documents_may_cross_slices(config, options, monkeypatch):
    if block := options.pop("blocks", None):
        monkeypatch.setattr(attention, "LONG", LENGTH)
        monkeypatch.setattr(blockwise, "queries_of_block", lambda keys: block)
    with jax.enable_x64(True), LENIENT():
        check_close(trained(of(**config), packed=True, **options), trained(of(**config), packed=True), 1e-10)


@pytest.mark.thinned(most=1, most_slow=2)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("slices", [2, (9, 3)])
@pytest.mark.parametrize("schedule", [name for name, rules in jpipe.schedules.SCHEDULES.items() if rules.takes_slices])
def test_packed_documents_ties_and_dropout_under_every_schedule(schedule, slices, replicas):
    config = of(tied=True, dropout=0.2, depth=2)
    options = {"pipedream": {"m": replicas, "vertical_sync": True}}.get(schedule, {"m": 2 * replicas})
    if "interleaved" in schedule or schedule == "looped_bfs":
        options |= {"num_stages": 4, "chunks_per_rank": 2}
    options |= {"schedule": schedule, "replicas": replicas, "packed": True, "evaluates": False}
    with jax.enable_x64(True), LENIENT():
        check_close(trained(config, slices=slices, **options), trained(config, **options), 1e-10)


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.parametrize("packed", [False, True])
def test_experts_without_losses_of_whole_rows_have_the_numbers_of_whole_rows(packed):
    config = of(**LLAMA, experts=EXPERTS)
    with jax.enable_x64(True), LENIENT():
        check_close(trained(config, packed=packed, slices=(7, 5)), trained(config, packed=packed), 1e-10)


MIXERS = {
    "sinks": {**LLAMA, "sinks": True, "attention_gate": True, "window": 5},
    "chunks": {
        **{**LLAMA, "window": 5, "window_kind": "chunks", "window_layers": [True, False], "rope_layers": [True, False]},
        **{"rope_pairs": "neighbours", "attention_temperature": {"positions": 4, "scale": 0.5}, "qk_norm": "after_rope", "depth": 2},
    },
    "delta": {**LLAMA, "delta": {"key_heads": 2, "value_heads": 4, "key_size": 4, "value_size": 3, "layers": [True, False]}, "depth": 2},
    "latent": {**LLAMA, "kv_heads": None, "latent": {"keys": 6, "queries": 5, "rotary": 4, "values": 6}},
}


@pytest.mark.thinned(most=0, most_slow=4)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MIXERS)
def test_mixers_have_the_numbers_of_whole_rows(name, packed):
    config = of(**MIXERS[name])
    with jax.enable_x64(True), LENIENT():
        check_close(trained(config, packed=packed, slices=(1, 7, 4)), trained(config, packed=packed), 1e-10)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"experts": EXPERTS | {"balance_loss": 0.01}},
            "found experts with balance_loss 0.01 and z_loss 0, which count the tokens of whole",
        ),
        ({"experts": EXPERTS | {"z_loss": 0.1}}, "set balance_loss and z_loss to 0, or remove slices"),
        ({**LLAMA, "rope_scaling": LONGROPE}, "found longrope with several documents in a row: it depends on the length of a document"),
    ],
)
def test_what_needs_whole_rows_is_refused(config, words):
    with pytest.raises(InputError, match=words), jax.enable_x64(True), LENIENT():
        trained(of(**config), packed=True, slices=2)


def test_attention_in_blocks_keeps_only_queries_keys_and_values():
    config = ModelConfig(depth=1, width=8, heads=2, seq_len=64, attention="blockwise")
    q, *slices = (np.ones((1, 16, 2, 4), np.float32) for _ in range(4))
    _, backward = jax.vjp(lambda q, slices: attention.attend_after(q, slices, config), q, tuple((each, each) for each in slices))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(backward)) == (1 + 2 * len(slices)) * q.nbytes
