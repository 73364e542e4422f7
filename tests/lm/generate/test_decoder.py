"""A decoder with a key-value cache equals the whole model, of transformers and of jpipe."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jpipe_lm.config.huggingface import read_config
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.generate import decoder, model_source
from jpipe_lm.generate.continue_prompts import sequences
from jpipe_lm.generate.decoder import Decoder, bytes_of, scratch_of
from jpipe_lm.generate.placement import place
from jpipe_lm.generate.request import Request
from jpipe_lm.generate.sampling import Sampling
from jpipe_lm.models.layers import layers
from tests.lm.checkpoint.families import MODELS
from tests.lm.models.running import LLAMA, SMALL, applied, outputs_of, params_of

GOLDEN = Path(__file__).parents[1] / "checkpoint" / "golden"
SYMBOLS = 50
LENGTHS = 8, 1, 12, 4  # of the prompts in a batch


def of_folder(name: str, devices: int = 1) -> Decoder:
    """Return a decoder of the model of a golden folder, on `devices` devices."""
    source = model_source.find(Request(str(GOLDEN / name)), print)
    placement = place(bytes_of(source.config, len(LENGTHS), 16), jax.devices(), devices)
    assert len(set(placement.values())) == devices
    return Decoder(source.config, model_source.parameters(source, placement, lambda: None), placement)


def all_logits(model: Decoder, tokens: np.ndarray, lengths=LENGTHS) -> np.ndarray:
    """Return the logits of each position from the end of its prompt on, given the next tokens, and NaN before."""
    result = np.full((*tokens.shape, 1), np.nan, np.float32)
    logits = model.begin([row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)], tokens.shape[1])
    for step in range(tokens.shape[1] - min(lengths) + 1):
        result = np.broadcast_to(result, (*tokens.shape, logits.shape[-1])).copy() if step == 0 else result
        following = np.zeros(len(tokens), np.int32)
        for row, length in enumerate(lengths):
            if length + step <= tokens.shape[1]:
                result[row, length + step - 1] = np.asarray(logits[row], np.float32)
            if length + step < tokens.shape[1]:
                following[row] = tokens[row, length + step]
        logits = model.follow(jnp.asarray(following))
    return result


def check(actual: np.ndarray, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    is_computed = ~np.isnan(actual[..., 0])
    assert is_computed.sum() == sum(actual.shape[1] - length + 1 for length in LENGTHS)
    np.testing.assert_allclose(actual[is_computed], expected[is_computed], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "devices"), [("gpt2", 3), ("llama", 1)])
def test_logits_are_those_of_transformers(name, devices, monkeypatch):
    if name == "llama":
        monkeypatch.setattr(decoder, "_SHORTEST", 8)  # longer prompts are seen piece by piece
        monkeypatch.setattr(decoder, "_SCORES", 1)
    golden = load_file(GOLDEN / name / "golden.safetensors")
    check(all_logits(of_folder(name, devices), golden["tokens"]), golden["logits"])


@pytest.mark.parametrize(("rows", "positions", "piece"), [(1, 2048, 1024), (1, 2**15, 128), (3, 2**15, 32), (64, 2**15, 16), (1, 20, 32)])
def test_the_scores_of_a_piece_are_bounded(rows, positions, piece):
    config = ModelConfig(heads=16, seq_len=2**15, width=64)
    assert scratch_of(config, rows, positions) == 2 * 4 * rows * 16 * piece * max(32, positions)


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(
    "keys",
    [
        {},  # the GPT over bytes
        {**LLAMA, "tied": True, "kv_heads": 2, "head_size": 4, "dropout": 0.5},
        {"compute_dtype": "bfloat16"},
    ],
)
def test_logits_are_those_of_the_whole_model(keys):
    config = ModelConfig.model_validate({**SMALL, "heads": 4, "seq_len": 12, "vocab_size": 40} | keys)
    tokens = np.random.default_rng(0).integers(0, 40, (4, 12), dtype=np.int32)
    stack = layers(config)
    with jax.numpy_dtype_promotion("standard"):
        split = params_of(stack, tokens)
    whole = {layer_id: stack.ties.whole(layer_id, split) for layer_id in stack.ids}
    model = Decoder(config, whole, dict.fromkeys(stack.ids, jax.devices()[0]))
    tolerance = 2e-5 if config.compute_dtype == "float32" else 0.05
    with jax.numpy_dtype_promotion("standard"):  # which JAX's attention needs in bfloat16
        expected = np.asarray(outputs_of(config, tokens, split).astype(jnp.float32))
        check(all_logits(model, tokens), expected, tolerance)


def test_the_bytes_of_a_cache_follow_the_window():
    keys = {"heads": 4, "kv_heads": 2, "depth": 3, "seq_len": 4096, "width": 64, "positions": "rope"}
    sizes = {}
    for window in (None, 100):
        config = ModelConfig(**keys, window=window, window_layers=None if window is None else [True, False, True])
        sizes[window] = [[bytes_of(config, 5, positions)[f"block_{i}"] for i in range(3)] for positions in (64, 4096)]
    a_position = 2 * 4 * 5 * 2 * 16
    assert np.subtract(*sizes[None][::-1]).tolist() == 3 * [(4096 - 64) * a_position]
    assert np.subtract(*sizes[100][::-1]).tolist() == [(100 - 64) * a_position, (4096 - 64) * a_position, (100 - 64) * a_position]
    everywhere = ModelConfig(**keys, window=100)
    assert scratch_of(everywhere, 5, 4096) == 2 * 4 * 5 * 4 * 1024 * (1024 + 100)
    assert scratch_of(config, 5, 4096) == 2 * 4 * 5 * 4 * 512 * 4096


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(("name", "piece"), [("gemma3", 2), *((name, 16) for name in MODELS)])
def test_a_greedy_continuation_is_that_of_the_whole_model_at_each_length(name, piece, monkeypatch):
    """Rows exceed windows and the original positions of LongRoPE, each at another step; some prompts are read in pieces."""
    monkeypatch.setattr(decoder, "_PIECE", piece)
    architecture, keys = MODELS[name]
    described = read_config.parse({"architectures": [architecture], **keys})
    config = ModelConfig(**described.keys, seq_len=12)
    stack = layers(config)
    inputs = {"tokens": np.zeros((3, 12), np.int32), "segments": np.ones((3, 12), np.int32)}
    split = spread(params_of(stack, inputs))
    whole = {layer_id: stack.ties.whole(layer_id, split) for layer_id in stack.ids}
    prompts = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3]]
    model = Decoder(config, whole, dict.fromkeys(stack.ids, jax.devices()[0]))
    logits = model.begin(prompts, 12)
    places = {layer_id: cache[0].shape[1] for layer_id, cache in model._caches.items()}
    expected_places = {f"block_{i}": min(block.window or 16, 16) for i, block in enumerate(config.blocks)}
    assert places == expected_places | {f"block_{i}": 2 for i, block in enumerate(config.blocks) if block.delta}  # of the convolution
    forward = jax.jit(lambda params, inputs: applied(stack, params, inputs))
    for step in range(7):
        lengths = [len(prompt) for prompt in prompts]
        for row, prompt in enumerate(prompts):
            inputs["tokens"][row, : len(prompt)] = prompt
            inputs["segments"][row] = np.arange(12) < len(prompt)
        outputs = forward(split, inputs)
        expected = np.asarray(outputs["tokens"] if isinstance(outputs, dict) else outputs)[np.arange(3), np.asarray(lengths) - 1]
        np.testing.assert_allclose(logits, expected, rtol=5e-5, atol=5e-5, err_msg=f"step {step}")
        tokens = np.argmax(expected, axis=-1).astype(np.int32)
        prompts = [[*prompt, int(token)] for prompt, token in zip(prompts, tokens, strict=True)]
        logits = model.follow(jnp.asarray(tokens)) if step < 6 else logits


def spread(params):
    """Return parameters with random changes, so that all of them matter."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: leaf + 0.2 * rng.normal(size=leaf.shape).astype(np.float32), params)


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "rows"), [(2, 3), pytest.param(4, 1, marks=pytest.mark.exhaustive)])
def test_tokens_are_the_same_on_several_devices_and_among_others(devices, rows):
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5]]
    sampling = Sampling(1.0, top_k=20)

    def tokens(devices: int, rows: list[list[int]]) -> np.ndarray:
        model = of_folder("llama", devices)
        return np.stack(list(sequences(model, rows, 16, 9, sampling, 7, np.ones(SYMBOLS, bool))), axis=1)

    together = tokens(1, prompts)
    assert together.shape == (3, 9)
    assert len(set(together[0])) > 3
    assert together.max() < SYMBOLS  # of the others of the model it is not known what they mean
    np.testing.assert_array_equal(tokens(devices, prompts[:rows]), together[:rows])
