"""The built-in models: their layers, the positions that each position reads, separate documents in a row, and parameter counts."""

import re
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe_lm.config.model.presets import PRESETS
from jpipe_lm.config.model.rope_section import RopeScaling
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import transformer
from jpipe_lm.models.attention import attend
from jpipe_lm.models.layers import layers
from jpipe_lm.models.rope import attention_factor, frequencies, lengths_of, positions_of, rotated
from tests.lm.models.running import LLAMA, SMALL, outputs_of


def test_layers_in_order():
    stack = layers(ModelConfig(depth=2))
    assert stack.ids == ("embed", "block_0", "block_1", "head")
    assert not stack.ties.first


@pytest.mark.parametrize(("name", "count"), [
    ("gpt2-124m", 124_439_808), ("gpt2-355m", 354_823_168), ("gpt2-774m", 774_030_080), ("gpt2-1.5b", 1_557_611_200),
    ("llama-3.2-1b", 1_235_814_400), ("llama-3-8b", 8_030_261_248), ("llama-3-70b", 70_553_706_496),
    ("bert-110m", 110_106_428), ("bert-355m", 336_226_108),
])  # fmt: skip
def test_presets_have_as_many_parameters_as_published(name, count):
    assert count_of(name) == count


@pytest.mark.parametrize(("name", "billions"), [("gpt-355m", 0.355), ("gpt-1.3b", 1.3), ("gpt-2.2b", 2.2), ("gpt-3.8b", 3.9)])
def test_presets_of_the_paper_have_about_as_many_as_it_says(name, billions):
    assert count_of(name) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.exhaustive
def test_the_page_has_every_preset_with_its_parameters():
    page = Path(__file__).parents[3] / "docs" / "how-to" / "models.md"
    rows = re.findall(r"^\| `([\w.-]+)` \|[^|]*\| ([\d,]+) \|$", page.read_text(), re.MULTILINE)
    assert {name: int(count.replace(",", "")) for name, count in rows} == {name: count_of(name) for name in PRESETS}


@cache
def count_of(name: str) -> int:
    """Count the parameters of a preset from shapes alone."""
    stack = layers(ModelConfig(preset=name))
    specs = stack.specs(jax.ShapeDtypeStruct((1, 8), np.int32))
    return sum(leaf.size for leaf in jax.tree.leaves(stack.ties.split({i: spec.params for i, spec in specs.items()})))


def test_the_keys_given_beside_a_preset_replace_its_own():
    config = ModelConfig(preset="llama-tiny", depth=3, kv_heads=None)
    assert (config.depth, config.kv_heads_used, config.norm) == (3, 4, "rms")
    assert ModelConfig.model_validate(config.model_dump()) == config
    assert {"depth", "width", "heads"} <= set(PRESETS["llama-tiny"])  # so the 3 is not a default


@pytest.mark.exhaustive
@pytest.mark.thinned(most=0, most_slow=2)
@pytest.mark.parametrize(("compute_dtype", "promotion"), [("float32", "strict"), ("bfloat16", "standard")])
@pytest.mark.parametrize("keys", [{}, LLAMA], ids=["gpt", "llama"])
def test_a_symbol_changes_no_logits_before_it(keys, compute_dtype, promotion):
    config = ModelConfig(**SMALL, **keys, compute_dtype=compute_dtype)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    with jax.numpy_dtype_promotion(promotion):  # JAX's own attention promotes bfloat16 to float32 inside
        before, after = outputs_of(config, tokens), outputs_of(config, tokens.at[0, 5].set(99))
    assert before.dtype == compute_dtype
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    for position in (5, 6, 7):
        assert not np.array_equal(before[:, position], after[:, position])


@pytest.mark.parametrize("preset", ["gpt2-tiny", "bert-tiny"])
def test_attention_computes_in_float16_on_cpus(preset):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 8, 4, 16))
    actual, exact = (attend(*(x.astype(dtype) for x in (q, k, v)), None, ModelConfig(preset=preset)) for dtype in ("float16", "float32"))
    assert actual.dtype == "float16"
    np.testing.assert_allclose(actual.astype("float32"), exact, atol=5e-3)


@pytest.mark.parametrize("preset", ["llama-tiny", "bert-tiny"])
def test_activations_have_the_compute_dtype_and_parameters_are_float32(preset):
    stack = layers(ModelConfig(preset=preset, compute_dtype="bfloat16"))
    with jax.numpy_dtype_promotion("standard"):
        specs = stack.specs({"tokens": jax.ShapeDtypeStruct((2, 8), np.int32), "segments": jax.ShapeDtypeStruct((2, 8), np.int32)})
    for spec in specs.values():
        assert {leaf.dtype for leaf in jax.tree.leaves(spec.params)} == {jnp.dtype("float32")}
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(spec.output)} <= {"bfloat16", "int32"}


def test_equal_symbols_at_different_positions_differ():
    logits = outputs_of(ModelConfig(**SMALL), jnp.zeros((1, 8), jnp.int32))
    assert not np.allclose(logits[0, 0], logits[0, 1])


@pytest.mark.slow
def test_dropout_acts_where_it_is_asked_for():
    x = jax.random.normal(jax.random.key(0), (1, 8, 16))
    for rate in (0.0, 0.5):
        block = transformer.Block(ModelConfig(**SMALL, dropout=rate), rngs=nnx.Rngs(0))
        assert np.array_equal(block(x), block(x)) == (rate == 0)


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(
        jpipe.InputError, match="model: expected sequences of at most 8 positions, found 9; make the sequences shorter, or raise"
    ):
        layers(ModelConfig(**SMALL)).specs(jax.ShapeDtypeStruct((1, 9), np.int32))


# Positions ----------------------------------------------------------------------------------------------------------------


def test_positions_restart_with_each_segment():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2]], jnp.int32)
    np.testing.assert_array_equal(positions_of(segments), [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]])


def test_turned_numbers_are_complex_products():
    config = ModelConfig(width=16, heads=2, seq_len=8, positions="rope", rope_base=100.0)
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 8, 2, 8)))
    pairs = x[..., :4] + 1j * x[..., 4:]
    turned = pairs * np.exp(1j * np.arange(8)[:, None, None] * 100.0 ** (-np.arange(4) / 4))
    expected = np.concatenate([turned.real, turned.imag], -1)
    np.testing.assert_allclose(rotated(jnp.asarray(x), jnp.arange(8)[None], jnp.full((1, 1), 8), config), expected, atol=1e-5)


def test_low_frequencies_are_stretched_and_high_ones_unchanged():
    scaling = {"factor": 8.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_positions": 64}
    keys = {"width": 32, "heads": 1, "seq_len": 8, "positions": "rope"}
    plain, scaled = (frequencies(ModelConfig(**keys, rope_scaling=rope_scaling))[0] for rope_scaling in (None, RopeScaling(**scaling)))
    turns = 64 * plain / (2 * np.pi)
    np.testing.assert_allclose(scaled[turns > 4], plain[turns > 4], rtol=1e-12)
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-12)
    between = (turns >= 1) & (turns <= 4)
    smooth = (turns[between] - 1) / 3
    np.testing.assert_allclose(scaled[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between], rtol=1e-12)
    assert between.sum() == 3


@pytest.mark.parametrize(
    ("scaling", "short", "long", "factor"),
    [
        (
            {"kind": "yarn", "factor": 4.0, "original_positions": 64},
            *[[1.0, 0.4779901, 0.2213594, 0.09780537, 0.04, 0.01405853, 0.007905695, 0.004445699]] * 2,
            1.138629436111989,
        ),
        (
            {
                **{"kind": "yarn", "factor": 4.0, "original_positions": 64, "truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
                "attention_factor": 0.5,
            },
            *[[1.0, 0.4607027, 0.1605892, 0.04445698, 0.025, 0.01405853, 0.007905695, 0.004445699]] * 2,
            0.5,
        ),
        (
            {"kind": "linear", "factor": 4.0},
            *[[0.25, 0.1405853, 0.07905694, 0.04445698, 0.025, 0.01405853, 0.007905695, 0.004445699]] * 2,
            1.0,
        ),
        (
            {"kind": "longrope", "original_positions": 64, "short_factors": [1.0, 1.25], "long_factors": [2.0, 4.0]},
            [1.0, 0.08],
            [0.5, 0.025],
            1.1547005383792517,
        ),
    ],
    ids=["yarn", "yarn with all keys", "linear", "longrope"],
)
def test_scaled_frequencies_are_those_of_transformers(scaling, short, long, factor):
    keys = {"width": 32, "heads": 2, "seq_len": 8, "max_positions": 256, "positions": "rope", "rope_base": 100.0}
    share = 0.25 if scaling["kind"] == "longrope" else 1.0
    config = ModelConfig(**keys, rope_share=share, rope_scaling=RopeScaling(**scaling))
    np.testing.assert_allclose(frequencies(config), [short, long], rtol=1e-6)
    assert attention_factor(config) == pytest.approx(factor)


def test_positions_have_the_length_of_their_segment():
    segments = jnp.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [1, 2, 2, 2, 2, 2, 2, 2]], jnp.int32)
    np.testing.assert_array_equal(lengths_of(segments), [[3, 3, 3, 2, 2, 1, 2, 2], [1, 7, 7, 7, 7, 7, 7, 7]])


def test_equal_blocks_share_one_constructor():
    config = ModelConfig(**SMALL | {"depth": 6}, positions="rope", window=4, window_layers=[True, True, False], window_rope_base=50.0)
    specs = layers(config).specs(jax.ShapeDtypeStruct((1, 8), np.int32))
    kinds = [[i for i in range(6) if specs[f"block_{i}"] is specs[f"block_{j}"]] for j in range(6)]  # a spec for each constructor
    assert kinds == [[0, 1, 3, 4], [0, 1, 3, 4], [2, 5]] * 2
    assert [(block.window, block.rope_base) for block in config.blocks] == [(4, 50.0), (4, 50.0), (None, 10000.0)] * 2
