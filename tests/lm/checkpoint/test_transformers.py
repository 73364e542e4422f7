"""Folders of transformers give jpipe the same numbers, and folders of jpipe give them to transformers."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpipe_lm.checkpoint.huggingface import write_weights
from jpipe_lm.generate import model_source
from jpipe_lm.generate.decoder import Decoder
from jpipe_lm.generate.request import Request
from jpipe_lm.models.layers import layers
from jpipe_train.checkpoint.export_request import ExportRequest
from tests import torch
from tests.lm.checkpoint import folders
from tests.lm.checkpoint.families import MODELS
from tests.lm.models.running import applied

PROGRAM = "tests.lm.checkpoint.transformers_program"
FEW = ("gemma3", "gpt-oss", "qwen3.5")  # the others only in `make test-all`, but for what is written back

pytestmark = pytest.mark.slow


def run(*words: str | Path) -> str:
    """Run the program and return what it prints, or skip the test if transformers is not installed."""
    return torch.run("-m", PROGRAM, *words)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """Return folders that transformers wrote, each with its computed outputs."""
    folder = tmp_path_factory.mktemp("theirs")
    run("write", folder)
    return folder


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama-tied", marks=pytest.mark.exhaustive), "bert"])
def test_a_folder_of_transformers_computes_and_learns_the_same(name, theirs):
    folders.check_learned(theirs / name, load_file(theirs / name / "golden.safetensors"))


@pytest.mark.parametrize("name", ["masked", "bfloat16"])
def test_logits_of_masked_models_and_of_short_floats(name, theirs):
    """Masked models lack the head for the next sentence; short floats are exact in float32."""
    expected = load_file(theirs / name / "golden.safetensors")
    stack, arrays = folders.read(theirs / name)
    inputs = jnp.asarray(expected["tokens"].astype(np.int32))
    if name == "masked":
        stored_arrays = folders.read(theirs / "bert")[1]
        arrays = {key: arrays.get(key, array) for key, array in stored_arrays.items()}
    params = folders.nested(stack, {key: array.astype(np.float32) for key, array in arrays.items()}, inputs)
    outputs = applied(stack, stack.ties.split(params), inputs)
    folders.close(outputs["tokens"] if name == "masked" else outputs, expected["logits"])


@pytest.mark.exhaustive
def test_folders_of_jpipe_compute_and_learn_the_same_in_transformers(tmp_path, monkeypatch):
    """The weights are fresh, in shards, with a tokenizer, and include the config of `make train`."""
    monkeypatch.setattr(write_weights, "LIMIT", 10_000)
    tokenizer = tmp_path / "tokenizer.json"
    make_tokenizer(tokenizer)
    scaling = "{factor: 4.0, low_frequency_factor: 1.0, high_frequency_factor: 4.0, original_positions: 8}"
    llama = f"tied: true, bias: true, activation: gelu, head_size: 6, heads: 4, kv_heads: 2, rope_scaling: {scaling}"
    models = {
        "bytes": "{depth: 2, width: 16, heads: 2, seq_len: 16, vocab_size: 320}",
        "llama": f"{{preset: llama-tiny, vocab_size: 320, {llama}}}",
        "bert": "{preset: bert-tiny, vocab_size: 320}",
    }
    for name, model in models.items():
        config = tmp_path / f"{name}.yaml"
        objective = "masked" if name.startswith("bert") else "next"
        config.write_text(f"model: {model}\ndata: {{format: text, objective: {objective}, tokenizer: {tokenizer}}}\nseed: 3\n")
        write_weights.write_huggingface(ExportRequest(str(config), str(tmp_path / name)), print)
        arrays = load_file(folders.GOLDEN / ("bert" if name.startswith("bert") else "gpt2") / "golden.safetensors")
        save_file({key: arrays[key] for key in BATCH if key in arrays}, tmp_path / name / "batch.safetensors")
    printed = run("load", *(tmp_path / name for name in models))
    assert printed.count("the quick fox") == len(models)
    for name in models:
        folders.check_learned(tmp_path / name, load_file(tmp_path / name / "results.safetensors"))


@pytest.fixture(scope="module")
def of_families(tmp_path_factory) -> Path:
    """Return folders of each family that transformers wrote, each with its computed outputs."""
    folder = tmp_path_factory.mktemp("families")
    run("families", folder)
    return folder


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS])
def test_a_folder_of_each_family_computes_and_learns_the_same(name, of_families):
    folders.check_learned(of_families / name, load_file(of_families / name / "golden.safetensors"))


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS])
def test_greedy_tokens_are_those_of_transformers(name, of_families):
    source = model_source.find(Request(str(of_families / name)), print)
    devices = dict.fromkeys(layers(source.config).ids, jax.devices()[0])
    expected = load_file(of_families / name / "golden.safetensors")["greedy"]
    decoder = Decoder(source.config, model_source.parameters(source, devices, lambda: None), devices)
    logits, tokens = decoder.begin(expected[:, :5].tolist(), expected.shape[1]), []
    for _ in range(5, expected.shape[1]):
        tokens.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        logits = decoder.follow(tokens[-1])
    np.testing.assert_array_equal(np.stack(tokens, axis=1), expected[:, 5:])


@pytest.mark.exhaustive
def test_folders_of_each_family_are_written_back(of_families, tmp_path):
    for name, (architecture, _) in MODELS.items():
        (tmp_path / name).mkdir()
        config = folders.config(tmp_path / name, "llama", file=of_families / name)
        stack, arrays = folders.read(of_families / name)
        out = tmp_path / name / "out"
        write_weights.write_huggingface(ExportRequest(str(folders.written(config, arrays, stack)), str(out)), print)
        assert json.loads((out / "config.json").read_text())["architectures"] == [architecture]
        tensors, expected = (load_file(folder / "model.safetensors") for folder in (out, of_families / name))
        assert tensors.keys() == expected.keys()
        assert all(np.array_equal(tensors[key], expected[key]) for key in tensors)
        golden = load_file(of_families / name / "golden.safetensors")
        save_file({key: golden[key] for key in ("tokens", "labels")}, out / "batch.safetensors")
    run("load", *(tmp_path / name / "out" for name in MODELS))
    for name in MODELS:
        logits = load_file(tmp_path / name / "out" / "results.safetensors")["logits"]
        folders.close(logits, load_file(of_families / name / "golden.safetensors")["logits"])


@pytest.mark.exhaustive
def test_the_language_model_is_read_of_models_that_also_read_images(tmp_path):
    run("images", tmp_path)
    for name in ("qwen3.5", "gemma3", "gemma4"):
        golden = load_file(tmp_path / name / "golden.safetensors")
        stack, arrays = folders.read(tmp_path / name)
        params = stack.ties.split(folders.nested(stack, arrays, golden["tokens"]))
        folders.close(applied(stack, params, jnp.asarray(golden["tokens"])), golden["logits"])


BATCH = ("tokens", "labels", "types", "mask", "next")


def make_tokenizer(path: Path) -> None:
    from jpipe_train import cli
    from tests.train.conftest import SENTENCE

    text = path.with_name("text.txt")
    text.write_bytes(SENTENCE * 20)
    assert cli.main(["data", "tokenizer", str(text), "--vocab-size", "320", "--out", str(path)]) == 0
