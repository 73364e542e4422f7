"""Hugging Face folders: numbers equal transformers', each process reads its layers, and exports are equal bit for bit."""

import json
import re
import shlex
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

from jpipe_lm.checkpoint.huggingface import tensors_file, write_weights
from jpipe_lm.checkpoint.huggingface.folder import Folder
from jpipe_lm.config.huggingface import read_config
from jpipe_lm.models.layers import layers
from jpipe_train import cli
from jpipe_train.assemble.build import build
from jpipe_train.checkpoint import warm_start
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from jpipe_train.run import loop
from tests.lm.checkpoint import folders
from tests.lm.checkpoint.folders import GOLDEN, NAMES
from tests.train.conftest import SENTENCE

ROOT = Path(__file__).parents[3]


def loaded(config: Config) -> dict[str, Any]:
    """Return the parameters that a run would start with."""
    pipe, batches = build(config, Reporter(1, 1, "", Console(quiet=True)))
    return warm_start.load(config, pipe, batches.train[0], Team(None), print)


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("name", NAMES)
def test_logits_loss_and_a_step_of_sgd_are_those_of_transformers(name):
    folders.check_learned(GOLDEN / name, folders.computed(name))


def check_folder(folder: Path, name: str, expected: dict[str, np.ndarray], same: Any = np.testing.assert_array_equal) -> None:
    """Check that a folder describes the model of a golden folder and that its files have the expected tensors."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    tensors = {key: tensor for file in files for key, tensor in load_file(folder / file).items()}
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        same(tensors[key], tensor, err_msg=key, strict=True)
    assert read_config.read(folder) == read_config.read(GOLDEN / name)
    theirs, ours = (json.loads((place / "config.json").read_text()) for place in (GOLDEN / name, folder))
    assert [ours[key] for key in SPECIAL] == [theirs.get(key) for key in SPECIAL]


SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.thinned
@pytest.mark.parametrize("limit", [10**9, 4000])
@pytest.mark.parametrize("name", NAMES)
def test_an_export_equals_the_imported_folder_bit_for_bit(name, limit, tmp_path, monkeypatch, capsys):
    """The folder has one file, or several with an index, and is written in the same form."""
    begin = folders.in_shards(name, tmp_path / "begin")
    config = folders.config(tmp_path, name, file=begin)
    stack, arrays = folders.read(begin)
    run, out = folders.written(config, arrays, stack), tmp_path / "out"
    monkeypatch.setattr(write_weights, "LIMIT", limit)
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
    _, rewritten = folders.read(out)
    assert all(np.array_equal(rewritten[key], array) for key, array in arrays.items())


def test_the_average_of_the_weights_is_written(tmp_path):
    stack, arrays = folders.read(GOLDEN / "gpt2")
    run = folders.written(folders.config(tmp_path, "gpt2"), arrays, stack, above=0.5)
    write_weights.write_huggingface(ExportRequest(str(run), str(tmp_path / "out"), step=7, weights="ema"), print)
    check_folder(
        tmp_path / "out", "gpt2", {key: w + np.float32(0.5) for key, w in load_file(GOLDEN / "gpt2" / "model.safetensors").items()}
    )


def test_the_config_of_a_run_has_all_keys_and_is_read_without_the_folder(tmp_path):
    config = folders.config(tmp_path, "llama", file=folders.copied("llama", tmp_path / "begin"))
    (tmp_path / "resolved.yaml").write_text(config_file.to_yaml(config))
    shutil.rmtree(tmp_path / "begin")
    assert config_file.load_resolved(tmp_path / "resolved.yaml") == config
    keys = config.model.model_dump()
    assert keys["rope_scaling"] == {
        "kind": "llama3",
        "factor": 4.0,
        "low_frequency_factor": 1.0,
        "high_frequency_factor": 4.0,
        "original_positions": 16,
    }
    names = ("vocab_size", "depth", "width", "heads", "kv_heads", "head_size", "mlp_width", "seq_len", "max_positions", "norm_epsilon")
    assert [keys[key] for key in names] == [64, 2, 16, 4, 2, 8, 24, 12, 32, 1e-5]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "schedule", "stages"), [("llama", "pipedream_2bw", 4)])
def test_a_run_learns_in_a_pipeline_what_transformers_learns(name, schedule, stages, tmp_path, monkeypatch, capsys):
    """Import a folder, take a step of SGD and export another folder."""
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    plan = f"plan={{schedule: {schedule}, num_stages: {stages}, microbatches: 4}}"
    rate = f"optimizer={{name: sgd, learning_rate: {folders.RATE}, lr_schedule: constant, warmup_steps: 0}}"
    config = folders.config(tmp_path, name, plan, rate, "train.steps=1", "loss.chunk=5", "checkpoint.every=1")
    run = loop.main(config).folder
    assert "warm start: 4 of 4 layers from '" in capsys.readouterr().out.replace("\n", "")
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    golden = folders.computed(name)
    folders.close(row["loss"], golden["loss"])
    out = tmp_path / "out"
    assert cli.main(["export", str(run), str(out), "--layout", "huggingface"]) == 0
    after = {key.removeprefix("after/"): tensor for key, tensor in golden.items() if key.startswith("after/")}
    check_folder(out, name, after, lambda actual, expected, **_: folders.close(actual, expected))


@pytest.mark.exhaustive
def test_processes_read_their_layers_and_write_them_bit_for_bit(tmp_path):
    """Two processes have two stages each, with the embeddings in the first and last stage; the steps are too small to change weights."""
    folders.config(tmp_path, "gpt2", "plan.num_stages=4")
    words = ["launch", "-n", "2", "--", "train", str(tmp_path / "config.yaml"), "--allow-code", "--set", "plan.num_stages=4"]
    command = [sys.executable, "-m", "jpipe_train.cli", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    write_weights.write_huggingface(ExportRequest(str(tmp_path / "run"), str(tmp_path / "out")), print)
    check_folder(tmp_path / "out", "gpt2", load_file(GOLDEN / "gpt2" / "model.safetensors"))


@pytest.mark.parametrize(("name", "expected"), [("gpt2", [2, 12, 12, 2]), ("llama", [1, 9, 9, 2])])
def test_each_process_reads_the_tensors_of_its_own_layers(name, expected, tmp_path, monkeypatch):
    """Each tensor is read once; the layers are those of a run with four processes."""
    read_names: list[str] = []
    whole = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, names: read_names.extend(names) or whole(self, names))
    config = folders.config(tmp_path, name, "plan.num_stages=4")
    for layer_id, number in zip(("embed", "block_0", "block_1", "head"), expected, strict=True):
        monkeypatch.setattr(warm_start, "layers_to_read", lambda pipe, read_layer=layer_id: [read_layer])
        read_names.clear()
        params = loaded(config)
        assert list(params) == [layer_id]
        assert len(read_names) == len(set(read_names)) == number, read_names


# Export -------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fresh_weights_equal_the_initial_weights_of_the_run(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("model: {preset: gpt2-tiny, depth: 1}\nseed: 5\n")
    write_weights.write_huggingface(ExportRequest(str(config), str(tmp_path / "out")), print)
    stack, arrays = folders.read(tmp_path / "out")
    settings = config_file.load(config)
    ours = layers(settings.model)
    inputs = jnp.zeros((1, settings.model.seq_len), jnp.int32)
    for layer_id, spec in ours.specs(inputs).items():
        fresh = jax.jit(
            lambda key, i=layer_id, x=spec.x: ours.init_layer(i, key, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), x))[0]
        )
        loaded_params = folders.nested(stack, arrays, inputs)[layer_id]
        fresh_params = fresh(jax.random.key(5))
        for path, leaf in jax.tree_util.tree_leaves_with_path(fresh_params):
            if layer_id != "head" or "token" not in str(path):
                np.testing.assert_array_equal(dict(jax.tree_util.tree_leaves_with_path(loaded_params))[path], leaf)


def test_an_export_has_the_tokenizer_and_the_end_of_text_of_the_run(tmp_path, capsys):
    """The data are tokens, or the tokenizer has been removed."""
    (tmp_path / "text.txt").write_bytes(SENTENCE * 40)
    tokenizer, tokens = tmp_path / "tokenizer.json", tmp_path / "tokens"
    assert cli.main(["data", "tokenizer", str(tmp_path / "text.txt"), "--vocab-size", "300", "--out", str(tokenizer)]) == 0
    assert cli.main(["data", "prepare", str(tmp_path / "text.txt"), "--tokenizer", str(tokenizer), "--out", str(tokens)]) == 0
    (tmp_path / "config.yaml").write_text("model: {preset: gpt2-tiny, vocab_size: 300, depth: 1}\n")
    of_tokens = [f"data={{format: tokens, path: {tokens}}}"]
    of_text = [f"data={{format: text, tokenizer: {tokenizer}}}"]
    out = tmp_path / "out"
    write_weights.write_huggingface(ExportRequest(str(tmp_path / "config.yaml"), str(out), overrides=tuple(of_tokens)), print)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert (out / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    capsys.readouterr()
    tokenizer.unlink()
    write_weights.write_huggingface(
        ExportRequest(str(tmp_path / "config.yaml"), str(tmp_path / "without"), overrides=tuple(of_text)), print
    )
    output = capsys.readouterr().out
    assert f"without: without the run's tokenizer '{tokenizer}', which cannot be read: No such file or directory\n" in output
    assert not (tmp_path / "without" / "tokenizer.json").exists()


@pytest.fixture
def run(tmp_path) -> Path:
    """Return the folder of a run whose parameters come from a golden folder."""
    stack, arrays = folders.read(GOLDEN / "gpt2")
    return folders.written(folders.config(tmp_path, "gpt2"), arrays, stack)


def refused(words: list[str], message: str, capsys, code: int = 2) -> None:
    """Check that `jpipe export` prints this line and exits with this code."""
    assert cli.main(["export", *words, "--layout", "huggingface"]) == code
    assert capsys.readouterr().err.startswith(f"jpipe: {message}")


def test_an_export_creates_its_parent_folders(run, tmp_path):
    out = tmp_path / "new" / "newer" / "out"
    assert cli.main(["export", str(run), str(out), "--layout", "huggingface"]) == 0
    assert (out / "config.json").is_file()


def test_an_impossible_export_is_refused_and_nothing_is_written(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    config = "config.yaml"
    (tmp_path / "mixed.yaml").write_text("model: {positions: rope}\n")
    before = sorted(tmp_path.rglob("*"))
    refused(["run", "there"], "--out: 'there' already exists; choose another name, or remove it first\n", capsys)
    refused(["run", "link"], "--out: 'link' already exists; choose another name, or remove it first\n", capsys)
    refused(["run", "mixed.yaml/out"], "--out: cannot write 'mixed.yaml/out': File exists; choose another folder\n", capsys)
    refused(["run", "out", "--step", "6"], "--step: expected one of 7, the checkpoints in ", capsys)
    refused(["there", "out"], "export: expected checkpoints in 'there/checkpoints', found none", capsys)
    refused(["run"], "export: expected one file or folder to write", capsys)
    refused(["run", "out", "--weights", "ema"], "--weights: the checkpoint of step 7 has no moving average of the weights", capsys)
    refused(["run", "out", "--set", "seed=1"], "--set seed=1 has no effect for a run; leave it out\n", capsys)
    refused(
        [config, "out", "--step", "7"], f"export: expected the folder of a run for --step and --weights, found the file '{config}'", capsys
    )
    (tmp_path / config).write_text(f"warm_start: {{file: {GOLDEN / 'llama'}}}\ndata: {{format: tokens, path: x}}\nmodel: {{seq_len: 8}}\n")
    refused([config, "out"], "export: expected a config of a run with fresh weights, found warm_start.file '", capsys)
    refused(
        ["mixed.yaml", "out"],
        "--layout huggingface: no architecture can express this model; the most similar: GPT2LMHeadModel has model.positions",
        capsys,
    )
    described = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(described.replace("depth: 2", "depth: 3"))
    refused(["run", "out"], "export: expected 'block_2/attention_norm/scale' of shape [16] in step 7 of run, as in its config.yaml", capsys)
    (run / "config.yaml").write_text(described)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensors_file, "_write", full)
    refused(["run", "out"], "--out: cannot write 'out': No space left on device; choose another folder\n", capsys, code=1)
    monkeypatch.setattr(tensors_file, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_weights.write_huggingface(ExportRequest("run", "out"), print)
    assert sorted(tmp_path.rglob("*")) == before


def test_simulations_of_a_config_know_the_model_of_its_folder(tmp_path, capsys):
    folders.config(tmp_path, "llama")
    assert cli.main(["simulate", str(tmp_path / "config.yaml"), "--allow-code", "--batches", "2", "--no-compile"]) == 0
    assert "embed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.exhaustive  # the README's are run in `make check`
def test_the_commands_of_the_page_lead_from_a_folder_to_a_folder(tmp_path, monkeypatch, capsys):
    """Those without a name of the Hub, on a short text, for two steps."""
    page = (ROOT / "docs" / "how-to" / "fine-tune.md").read_text()
    shown = re.findall(r"^    jpipe ((?:[^\n]*\\\n)*[^\n]*)$", page, re.MULTILINE)
    commands = [shlex.split(words.replace("\\\n", " "), comments=True) for words in shown if "hf:" not in words]
    assert [words[0] for words in commands] == ["data", "export", "data", "train", "generate", "export"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    shutil.copytree(ROOT / "configs", "configs")
    (tmp_path / "texts").mkdir()
    for i in range(4):
        (tmp_path / "texts" / f"{i}.txt").write_bytes(SENTENCE * 100)
    sizes = [f"--set={size}" for size in ("train.steps=2", "train.batch_size=4", "train.trace_batches=0", "model.seq_len=16")]
    more = {"train": sizes, "generate": ["--tokens", "3"]}
    for words in commands:
        source = ["texts"] if words[0] == "data" else []
        assert cli.main([*words, *source, *more.get(words[0], [])]) == 0, words
    assert (tmp_path / "my-llama" / "tokenizer.json").read_bytes() == (tmp_path / "tuned-llama" / "tokenizer.json").read_bytes()
    assert read_config.read(tmp_path / "my-llama") == read_config.read(tmp_path / "tuned-llama")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("my-llama", "tuned-llama"))
    assert before.keys() == after.keys()
    assert all((after[key] != tensor).any() for key, tensor in before.items())
    assert "warm start: 4 of 4 layers from 'my-llama'" in capsys.readouterr().out
