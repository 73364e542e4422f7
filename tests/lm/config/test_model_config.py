"""Keys of the model that contradict each other, or their readers, are refused."""

import re

import pytest
import yaml

from jpipe import InputError
from jpipe_train.config import config_file

SCALING = "rope_scaling: {factor: 8, low_frequency_factor: 4, high_frequency_factor: 4, original_positions: 64}"

LONG = "kind: longrope, original_positions: 8, short_factors: [1, 2], long_factors: [1, 2]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preset: gpt-2-124m", "model.preset: unknown preset 'gpt-2-124m'; did you mean 'gpt2-124m'?"),
        ("preset: 3", "model.preset: expected a valid string, found 3"),
        ("kind: encoder", "model: unknown kind 'encoder'; did you mean 'decoder'?"),
        ("width: 12, heads: 5", "model: width 12 is not divisible by heads 5; change one of them"),
        ("heads: 4, kv_heads: 3", "model: heads 4 is not divisible by kv_heads 3; change one of them"),
        (
            "width: 12, heads: 4, positions: rope",
            "needs heads of even size, found 3 (width / heads); change the size, or use learned positions",
        ),
        ("head_size: 5, positions: rope", "needs heads of even size, found 5 (head_size)"),
        ("seq_len: 9, max_positions: 8", "model: seq_len 9 is more than max_positions 8; change one of them"),
        ("preset: gpt2-tiny, seq_len: 33", "model: seq_len 33 is more than max_positions 32"),
        ("max_positions: 1000000000", "model: width 128 × max_positions 1000000000 makes a table of positions of more than"),
        ("rope_base: 5.0", "model: rope_base has no effect with learned positions; remove rope_base, or set positions to rope"),
        (SCALING.replace("4, high", "1, high"), "model: rope_scaling has no effect with learned positions"),
        (f"positions: rope, {SCALING}", "model.rope_scaling: expected low_frequency_factor below high_frequency_factor, found 4 and 4"),
        (
            "positions: none, rope_share: 0.5",
            "model: rope_share has no effect with none positions; remove rope_share, or set positions to rope",
        ),
        ("window_layers: [true]", "model: window_layers has no effect without a window; remove window_layers, or set window"),
        ("window: 0", "model.window: expected greater than or equal to 1, found 0"),
        ("bias: mlp", "model.bias"),
        (
            "positions: rope, rope_share: 0.1",
            "needs an even number of each head (rope_share 0.1), found 3 (width / heads); change the size, or use",
        ),
        (
            "positions: rope, rope_scaling: {kind: dynamic}",
            "model.rope_scaling.kind: expected 'llama3', 'linear', 'yarn', 'longrope' or 'proportional', found",
        ),
        (
            "positions: rope, rope_scaling: {kind: yarn, factor: 2}",
            "model.rope_scaling: kind yarn needs original_positions, found none; add original_positions",
        ),
        (
            "positions: rope, rope_scaling: {kind: linear, factor: 2, truncate: true}",
            "truncate has no effect with kind linear; remove truncate",
        ),
        (
            f"positions: rope, rope_scaling: {{{LONG}}}",
            "model: rope_scaling.short_factors: expected 16 factors, one for each pair of a head",
        ),
        (
            "attention: cudnn, attention_soft_cap: 5, compute_dtype: bfloat16",
            "model: attention cudnn cannot compute attention_soft_cap; set",
        ),
        ("attention: splash, sinks: true", "model: attention splash cannot compute sinks; set attention to xla"),
        ("activation: clamped_swiglu", "model: activation clamped_swiglu needs gated_mlp; set gated_mlp to true"),
        (
            "positions: rope, kv_heads: 2, latent: {keys: 8, rotary: 4, values: 8}",
            "model: latent needs rope positions, no kv_heads, no rope_share, and no biases or norms of heads, found bias true",
        ),
        (
            "positions: rope, bias: false, latent: {keys: 8, rotary: 4, values: 64}",
            "model: latent has 64 numbers of a head, more than head_size 32; raise head_size",
        ),
        ("window_kind: chunks", "model: window_kind has no effect without a window"),
        ("full_attention: {head_size: 8, kv_heads: 1}", "model: full_attention has no effect without a window"),
        (
            "window: 8, full_attention: {head_size: 8, kv_heads: 3}",
            "full_attention needs a head_size that is even, and kv_heads that divide",
        ),
        ("delta: {key_heads: 2, value_heads: 3, key_size: 4, value_size: 4}", "model.delta: value_heads 3 is not divisible by key_heads 2"),
        (
            "experts: {count: 6, per_token: 2, mlp_width: 8, groups: 4}",
            "model.experts: groups: expected groups of equally many experts, at least two, of 6 (count), found 4",
        ),
        (
            "experts: {count: 6, per_token: 3, mlp_width: 8, groups: 3}",
            "groups_per_token 1 of 3 groups of 2 experts cannot give 3 experts (per_token)",
        ),
        (
            "depth: 2, experts: {count: 4, per_token: 2, mlp_width: 8, layers: [false, false, true]}",
            "model: experts.layers has experts in none of the 2 blocks (depth); set one of the first entries to true, or remove",
        ),
        (
            "mlp_width: 9, experts: {count: 4, per_token: 2, mlp_width: 8}",
            "model: mlp_width 9 has no effect if all blocks have experts, with experts.mlp_width 8; remove mlp_width",
        ),
        ("kind: bert, window: 4", "model: kind bert needs window null, found 4; leave it out, or set kind to decoder"),
        ("kind: bert, positions: rope", "model: kind bert needs positions learned, found rope; leave it out, or set kind to decoder"),
        ("kind: bert, norm: rms", "model: kind bert needs norm layer, found rms"),
        ("kind: bert, gated_mlp: true", "model: kind bert needs gated_mlp false, found true"),
        ("kind: bert, tied: false", "model: kind bert needs tied true, found false"),
        ("kind: bert, kv_heads: 2", "model: kind bert needs as many kv_heads as heads, 4, found 2; leave it out"),
        ("kind: bert, preset: llama-tiny", "found rope of preset llama-tiny; set another preset, or set kind to decoder"),
        ("preset: llama-tiny, heads: 3, width: 18", "model: heads 3 is not divisible by kv_heads 2; change one of them"),
        ("attention: cudnn", "model.attention cudnn computes in bfloat16 or float16, found float32; set model.compute_dtype to bfloat16"),
        ("products: int8", "model.products: expected 'float8', found 'int8'"),
        ("vocab_size: 100", "model.vocab_size 100 is less than the 256 bytes of a text; raise or remove it"),
        ("vocabulary: 100", "unknown key 'model.vocabulary'; did you mean 'model.vocab_size'?"),
        ("target: 'a:b', preset: gpt2-tiny", "model: preset has no effect with 'a:b'; remove it, or"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(f"model: {{{text}}}")
    with pytest.raises(InputError, match=re.escape(message)):
        config_file.load(tmp_path / "config.yaml")


def test_products_beside_adapters_are_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {products: float8}\ntune: {lora: {}}")
    with pytest.raises(InputError, match=r"model\.products float8 has no effect beside tune\.lora; remove one of them"):
        config_file.load(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss: {chunk: 0}", "loss.chunk"),
        ("loss: {chunk: all}", "loss.chunk"),
        (
            "loss: {chunk: 8, target: 'a:b'}",
            "loss.chunk has no effect with loss.target: it is for built-in models and losses",
        ),
        ("loss: {chunk: 8}\nmodel: {target: 'a:b'}", "loss.chunk has no effect with model.target"),
    ],
)
def test_a_chunk_without_an_effect_is_refused(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(message)):
        config_file.load(tmp_path / "config.yaml", allow_code=True)


def test_a_preset_is_written_with_all_of_its_keys(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {preset: bert-tiny, depth: 3}")
    config = config_file.load(tmp_path / "config.yaml")
    (tmp_path / "config.yaml").write_text(config_file.to_yaml(config))
    assert config_file.load(tmp_path / "config.yaml") == config
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]
    assert {"kind": "bert", "depth": 3, "norm_epsilon": 1e-12, "tied": True}.items() <= written.items()
    assert config_file.load(tmp_path / "config.yaml", ["model.depth=1"]).model.depth == 1


@pytest.mark.parametrize(
    ("symbols", "chunk", "expected"), [(8192, "auto", None), (8193, "auto", 1024), (50257, "null", None), (256, "7", 7)]
)
def test_the_size_of_chunks_follows_the_vocabulary(tmp_path, symbols, chunk, expected):
    (tmp_path / "config.yaml").write_text(f"model: {{vocab_size: {symbols}}}\nloss: {{chunk: {chunk}}}")
    config = config_file.load(tmp_path / "config.yaml")
    assert config.loss.chunk_for(config.model.vocab_size) == expected


def test_a_preset_of_the_command_line_replaces_the_shape_in_the_file(tmp_path):
    """The shipped config sets all keys, which would override the whole preset."""
    (tmp_path / "config.yaml").write_text("model: {depth: 3, seq_len: 9, norm: rms, dropout: 0.5, compute_dtype: bfloat16, heads: 2}")
    model = config_file.load(tmp_path / "config.yaml", ["model.preset=gpt2-tiny", "model.heads=8"]).model
    expected = {"depth": 2, "heads": 8, "seq_len": 16, "norm": "layer", "dropout": 0.5, "compute_dtype": "bfloat16"}
    assert expected.items() <= model.model_dump().items()
    assert config_file.load(tmp_path / "config.yaml", ["model.preset=null"]).model.depth == 3
    assert config_file.load(tmp_path / "config.yaml", ["model={preset: gpt2-tiny}"]).model.dropout == 0


def test_learned_positions_replace_those_of_a_preset(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {preset: llama-3.2-1b, positions: learned, max_positions: 4096, seq_len: 64}")
    model = config_file.load(tmp_path / "config.yaml").model
    assert (model.rope_base, model.rope_scaling) == (10000.0, None)


def test_experts_replace_the_mlps_of_a_preset(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {preset: llama-tiny, experts: {count: 4, per_token: 2, mlp_width: 8}}")
    assert config_file.load(tmp_path / "config.yaml").model.mlp_width is None
    assert config_file.load(tmp_path / "config.yaml", ["model.experts.layers=[true, false]"]).model.mlp_width == 40
