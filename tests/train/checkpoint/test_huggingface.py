"""Folders in Hugging Face's layout read and written: numbers as transformers has them, each process reads its layers, bit for bit back."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

import jpipe
from jpipe.checkpoints import files as checkpoint_files
from jpipe.runtime._plain import to_plain
from tests.train.checkpoint import folders
from tests.train.checkpoint.folders import GOLDEN, NAMES
from tests.train.models.running import applied
from train import cli
from train.assemble.build import build
from train.assemble.model import layers
from train.checkpoint import huggingface, warm_start
from train.checkpoint.export import by_path
from train.checkpoint.huggingface import writing
from train.checkpoint.huggingface.folder import Folder
from train.checkpoint.huggingface.names import layout
from train.config import config_file
from train.config import huggingface as config_json
from train.config.config import Config, ModelConfig
from train.console.progress import Reporter
from train.launch.together import Together
from train.models import cross_entropy
from train.run import loop

ROOT = Path(__file__).parents[3]


def loaded(config: Config) -> tuple[jpipe.Pipeline, Any, dict[str, Any], list[str]]:
    """What a run would begin with: the pipeline, a batch, the parameters, what is said."""
    pipe, batches = build(config, Reporter(1, 1, "", Console(quiet=True)))
    said: list[str] = []
    return pipe, batches.train[0], warm_start.load(config.warm_start, pipe, batches.train[0], Together(None), said.append), said


def read(folder: Path, **options: Any) -> tuple[jpipe.LayerStack, dict[str, Any]]:
    """The model that a folder describes, and its parameters by name."""
    stack = layers(ModelConfig(**config_json.read(folder).keys, seq_len=folders.LENGTH))
    source = huggingface.source(folder, **options)
    names = {layer_id: [name for name in source.specs if name.startswith(f"{layer_id}/")] for layer_id in stack.ids}
    return stack, {name: array for part in source.read(names) for name, array in part.items()}


def nested(stack: jpipe.LayerStack, arrays: dict[str, Any], inputs: Any) -> Any:
    """Arrays by name as the parameters of the model."""
    specs = {layer_id: layer.params for layer_id, layer in stack.specs(inputs).items()}
    (first, second) = (("embed", "token", "embedding"), ("head", "token", "embedding"))

    def array(layer_id: str, path: Any) -> Any:
        name = f"{layer_id}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
        return jnp.asarray(arrays["/".join(first) if name == "/".join(second) else name])

    return {i: jax.tree_util.tree_map_with_path(lambda path, _, i=i: array(i, path), tree) for i, tree in specs.items()}


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_a_step_of_sgd_are_those_of_transformers(name):
    stack, arrays = read(GOLDEN / name)
    golden = folders.computed(name)
    inputs, labels = jax.tree.map(jnp.asarray, folders.batch(golden))
    params = stack.ties.split(nested(stack, arrays, inputs))

    @jax.jit
    def both(params: Any) -> Any:
        def mean(params: Any) -> Any:
            outputs = applied(stack, params, inputs)
            total, number = cross_entropy.loss(outputs, labels)
            return total / number, outputs

        (loss, outputs), gradients = jax.value_and_grad(mean, has_aux=True)(params)
        return loss, outputs, jax.tree.map(lambda old, gradient: old - folders.RATE * gradient, params, gradients)

    loss, outputs, after = both(params)
    close(loss, golden["loss"])
    kept = golden.get("mask", np.ones_like(golden["tokens"])) > 0
    close(np.asarray(outputs["tokens"] if name == "bert" else outputs)[kept], golden["logits"][kept])
    if name == "bert":
        close(outputs["next"], golden["next_logits"])
    check_after({layer_id: stack.ties.whole(layer_id, after) for layer_id in stack.ids}, name, golden)


def check_after(params: Any, name: str, golden: dict[str, np.ndarray]) -> None:
    """The parameters are those after the step."""
    found = {f"{layer_id}/{path}": leaf for layer_id, tree in params.items() for path, leaf in by_path(tree).items()}
    rows = list(layout(config_json.read(GOLDEN / name)))
    for row in rows:
        for theirs, tensor in zip(row.theirs, row.split(np.asarray(found[row.ours])), strict=True):
            close(tensor, golden[f"after/{theirs}"])
    assert sum(len(row.theirs) for row in rows) == sum(key.startswith("after/") for key in golden)


def check_folder(folder: Path, name: str, expected: dict[str, np.ndarray], same: Any = np.testing.assert_array_equal) -> None:
    """It describes the model of a golden folder, and its files have these tensors."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    found = {key: tensor for file in files for key, tensor in load_file(folder / file).items()}
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        same(found[key], tensor, err_msg=key, strict=True)
    assert config_json.read(folder) == config_json.read(GOLDEN / name)
    theirs, ours = (json.loads((place / "config.json").read_text()) for place in (GOLDEN / name, folder))
    assert [ours[key] for key in SPECIAL] == [theirs.get(key) for key in SPECIAL]


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def written(config: Config, arrays: dict[str, Any], stack: jpipe.LayerStack) -> Path:
    """A run with these parameters in its only checkpoint, as a pipeline would have left it."""
    folder = Path(config.run.dir)
    params = stack.ties.split(nested(stack, arrays, jnp.zeros((1, config.model.seq_len), jnp.int32)))
    entries = {name: to_plain({"params": {"0": jax.tree.map(np.asarray, tree)}}) for name, tree in params.items()}
    checkpoint_files.write_layers(folder, 7, entries, 0)
    checkpoint_files.complete(folder, 7, 1, {})
    (folder / "config.yaml").write_text(config_file.to_yaml(config))
    return folder


@pytest.mark.parametrize("limit", [10**9, 4000])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_read_it_writes_bit_for_bit(name, limit, tmp_path, monkeypatch, capsys):
    """In one file, or in several with an index, which are written and read alike."""
    begin = folders.in_shards(name, tmp_path / "begin")
    config = folders.config(tmp_path, name, file=begin)
    stack, arrays = read(begin)
    run, out = written(config, arrays, stack), tmp_path / "out"
    monkeypatch.setattr(writing, "LIMIT", limit)
    assert cli.main(["export", str(run), str(out), "--layout", "huggingface"]) == 0
    expected = load_file(GOLDEN / name / "model.safetensors")
    size = sum(tensor.nbytes for tensor in expected.values())
    assert capsys.readouterr().out == f"{out}: {len(expected)} tensors, {size:,} bytes, step 7 of {run}\n"
    check_folder(out, name, expected)
    files = sorted(path.name for path in out.iterdir() if path.name != "config.json")
    if limit > size:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        names = [f"model-{i + 1:05d}-of-{len(files) - 1:05d}.safetensors" for i in range(len(files) - 1)]
        assert files == [*names, "model.safetensors.index.json"]
        assert {file: set(load_file(out / file)) for file in names} == {
            file: {key for key, place in index["weight_map"].items() if place == file} for file in names
        }
        assert index["metadata"] == {"total_size": size}
        assert all(sum(tensor.nbytes for tensor in load_file(out / file).values()) <= max(limit, 64 * 16 * 4) for file in names)
    _, again = read(out)
    assert all(np.array_equal(again[key], array) for key, array in arrays.items())


def test_the_config_of_a_run_has_all_keys_and_is_read_without_the_folder(tmp_path):
    config = folders.config(tmp_path, "llama", file=folders.copied("llama", tmp_path / "begin"))
    (tmp_path / "resolved.yaml").write_text(config_file.to_yaml(config))
    shutil.rmtree(tmp_path / "begin")
    assert config_file.load_resolved(tmp_path / "resolved.yaml") == config
    keys = config.model.model_dump()
    assert keys["rope_scaling"] == {"factor": 4.0, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0, "original_positions": 16}
    shown = ("vocab_size", "depth", "width", "heads", "kv_heads", "head_size", "mlp_width", "seq_len", "max_positions", "norm_epsilon")
    assert [keys[key] for key in shown] == [64, 2, 16, 4, 2, 8, 24, 12, 32, 1e-5]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule", "stages"), [("llama", "pipedream_2bw", 4), ("bert", "pipedream_flush", 3)])
def test_a_run_learns_in_a_pipeline_what_transformers_learns(name, schedule, stages, tmp_path, monkeypatch, capsys):
    """From a folder to another one, a step of SGD between them."""
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    plan = f"plan={{schedule: {schedule}, num_stages: {stages}, microbatches: 4}}"
    rate = f"optimizer={{name: sgd, learning_rate: {folders.RATE}, lr_schedule: constant, warmup_steps: 0}}"
    config = folders.config(tmp_path, name, plan, rate, "train.steps=1", "loss.chunk=5", "checkpoint.every=1")
    run = loop.main(config).folder
    assert "warm start: 4 of 4 layers from '" in capsys.readouterr().out.replace("\n", "")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    golden = folders.computed(name)
    close(row["loss"], golden["loss"])
    out = tmp_path / "out"
    assert cli.main(["export", str(run), str(out), "--layout", "huggingface"]) == 0
    after = {key.removeprefix("after/"): tensor for key, tensor in golden.items() if key.startswith("after/")}
    check_folder(out, name, after, lambda found, expected, **_: close(found, expected))


@pytest.mark.slow
def test_processes_read_their_layers_and_write_them_bit_for_bit(tmp_path):
    """Two processes of two stages each; the embeddings are in the first and in the last stage. Steps that small change nothing."""
    folders.config(tmp_path, "gpt2", "plan.num_stages=4")
    words = ["launch", "-n", "2", "--", "train", str(tmp_path / "config.yaml"), "--allow-code", "--set", "plan.num_stages=4"]
    command = [sys.executable, "-m", "jpipe_command", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    writing.main(str(tmp_path / "run"), str(tmp_path / "out"), None, print)
    check_folder(tmp_path / "out", "gpt2", load_file(GOLDEN / "gpt2" / "model.safetensors"))


@pytest.mark.parametrize(("name", "expected"), [("gpt2", [2, 12, 12, 2]), ("llama", [1, 9, 9, 2])])
def test_each_process_reads_the_tensors_of_its_own_layers(name, expected, tmp_path, monkeypatch):
    """Each once. Names of processes are those that they would have in a run of four."""
    taken: list[str] = []
    whole = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, names: taken.extend(names) or whole(self, names))
    config = folders.config(tmp_path, name, "plan.num_stages=4")
    for layer_id, number in zip(("embed", "block_0", "block_1", "head"), expected, strict=True):
        monkeypatch.setattr(warm_start, "own_layers", lambda pipe, own=layer_id: [own])
        taken.clear()
        _, _, given, _ = loaded(config)
        assert list(given) == [layer_id]
        assert len(taken) == len(set(taken)) == number, taken
