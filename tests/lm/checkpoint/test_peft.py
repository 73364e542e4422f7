"""Folders in PEFT's layout: what PEFT computes with them, runs that begin with them, and strangers' folders."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jpipe import InputError
from jpipe_lm.checkpoint.huggingface import read_adapters, write_adapters, write_weights
from jpipe_lm.checkpoint.huggingface.names import layout
from jpipe_lm.config.huggingface import adapter_config, read_config
from jpipe_lm.generate import model_source
from jpipe_lm.generate.request import Request
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.checkpoint.weights import by_path
from jpipe_train.config.config import Config
from jpipe_train.losses import cross_entropy
from tests import torch
from tests.lm.checkpoint import folders, test_transformers
from tests.lm.checkpoint.beginnings import begun, written
from tests.lm.models.running import applied

PROGRAM = "tests.lm.checkpoint.peft_program"
LABELS = "data={target: 'tests.lm.checkpoint.test_fresh_heads:labels'}"
TO_CLASSES = ("model.head=classification", "model.labels=3", LABELS)


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> tuple[Path, Config, dict[str, np.ndarray]]:
    """Return the folder of a run and its folder for PEFT, its config, and its arrays by name."""
    folder = tmp_path_factory.mktemp("ours")
    config, _, arrays = written(folder, "llama", "tune.lora={rank: 2, alpha: 6, targets: [q_proj, v_proj, down_proj], dropout: 0.25}")
    write_adapters.write_peft(ExportRequest(str(folder / "run"), str(folder / "peft")), print)
    return folder, config, arrays


@pytest.mark.exhaustive
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama", None),
        ("llama", ("tune={lora: {rank: 2, targets: [q_proj]}, train_only: [head, 'block_*/mlp_norm']}", *TO_CLASSES)),
        ("gpt2", ("tune.lora={rank: 2, targets: [q_proj, k_proj, v_proj, o_proj]}",)),
    ],
    ids=["llama", "head", "gpt2"],
)
def test_a_run_begins_with_the_adapters_that_another_one_exported(name, overrides, ours, tmp_path):
    folder, config, arrays = ours if overrides is None else (tmp_path / "other", None, None)
    if overrides is not None:
        config, _, arrays = written(folder, name, *overrides)
        write_adapters.write_peft(ExportRequest(str(folder / "run"), str(folder / "peft")), print)
    again = [f"warm_start.adapters={folder / 'peft'}"]
    if config.tune.train_only:
        again += [*TO_CLASSES, f"tune.train_only={json.dumps(config.tune.train_only)}"]
    loaded = folders.config(tmp_path, name, *again)
    assert loaded.tune == config.tune.model_copy(update={"lora": loaded.tune.lora})
    assert {**loaded.tune.lora.model_dump(), "targets": set(loaded.tune.lora.targets)} == {
        **config.tune.lora.model_dump(),
        "targets": set(config.tune.lora.targets),
    }
    _, found = begun(loaded)
    assert found.keys() == arrays.keys() - {"head/token/embedding"}  # tied in GPT-2
    for key, array in found.items():
        np.testing.assert_array_equal(array, arrays[key], err_msg=key)
    if overrides is None:
        origin = model_source.find(Request(str(folders.GOLDEN / name), tokenizer="bytes", adapters=str(folder / "peft")), print)
        expected = write_weights.of_run(str(folder / "run"), None, print, "newest").read("block_1")
        for path, array in origin.read("block_1").items():
            np.testing.assert_allclose(array, expected[f"block_1/{path}"], rtol=1e-6, atol=1e-6)


def changed(keys: dict[str, object], tensors=None):
    """Return a function that changes the keys of `adapter_config.json`, and the tensors, of a folder."""

    def change(folder: Path) -> None:
        described = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(described | keys))
        if tensors is not None:
            file = folder / "adapter_model.safetensors"
            save_file(tensors(load_file(file)), file)

    return change


def into_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def out_of(name: str):
    def change(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)

    return change


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
K = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"
REFUSED = {
    "dora": (changed({"use_dora": True}), "use_dora: expected false, found True; jpipe does not support such adapters"),
    "bias": (changed({"bias": "all"}), "bias: expected none, found 'all'"),
    "layers": (changed({"layers_to_transform": [1]}), r"layers_to_transform: expected null, found \[1\]"),
    "initialization": (changed({"init_lora_weights": "pissa"}), "init_lora_weights: expected true, found 'pissa'"),
    "unknown": (changed({"use_xlora": False}), "unknown key 'use_xlora'; jpipe does not know whether this key changes the adapters"),
    "another kind": (changed({"peft_type": "IA3"}), "peft_type: expected \"LORA\", found 'IA3'"),
    "rank": (
        changed({"rank_pattern": {"q_proj": 4}}),
        "rank_pattern, alpha_pattern: expected rank 2 and alpha 6 of .*q_proj, found 4 and 6",
    ),
    "alpha": (changed({"alpha_pattern": {"layers.0.self_attn.q_proj": 8}}), "expected rank 2 and alpha 6 of .*q_proj, found 2 and 8"),
    "a pattern": (changed({"alpha_pattern": {"(a+)+": 8}}), "expected names of modules, found '\\(a\\+\\)\\+'"),
    "patterns of targets": (changed({"target_modules": ".*q_proj"}), "target_modules: expected a list of names, found '.\\*q_proj'"),
    "patterns that exclude": (changed({"exclude_modules": ".*o_proj"}), "exclude_modules: expected a list of names, found '.\\*o_proj'"),
    "excluded in one block": (
        changed({"exclude_modules": ["layers.1.self_attn.q_proj"]}),
        "exclude_modules: expected each module excluded in all blocks or in none, found model.layers.1.self_attn.q_proj excluded, but",
    ),
    "all excluded": (
        changed({"exclude_modules": ["q_proj", "v_proj", "down_proj"]}),
        "exclude_modules: expected it to keep some of target",
    ),
    "logits": (
        changed({"target_modules": ["q_proj", "lm_head"]}),
        "names of linear layers of the blocks, such as .*q_proj, found 'lm_head'",
    ),
    "no rank": (changed({"r": 0}), "r: "),
    "a rank that is too large": (changed({"r": 4}), r"expected '.*lora_A.weight' of shape \[4, 16\], found shape \[2, 16\]"),
    "more": (changed({}, lambda tensors: tensors | {K: tensors[Q.format("A")]}), "found 'base_model.model.model.layers.0.self_attn.k_proj"),
    "less": (
        changed({}, lambda tensors: {key: t for key, t in tensors.items() if key != Q.format("B")}),
        "B.weight' .*, found no such tensor",
    ),
    "saved": (
        changed({}, lambda tensors: tensors | {"base_model.model.model.norm.weight": np.ones(16, np.float32)}),
        "modules_to_save names",
    ),
    "a container": (
        changed({"modules_to_save": ["orm"]}, lambda tensors: tensors | {"base_model.model.model.other.weight": np.ones(16, np.float32)}),
        "jpipe has no adapters for this module, and does not train it",
    ),
    "resized": (
        changed({}, lambda tensors: tensors | {"base_model.model.lm_head.weight": np.ones((70, 16), np.float32)}),
        r"expected 'lm_head.weight' of \d+ tokens as in the model, found 70; the vocabulary was resized",
    ),
    "the scale of rslora": (
        changed({"use_rslora": True, "lora_alpha": 10**6}),
        r"lora_alpha: expected lora_alpha · √r up to 1,000,000 with use_rslora, found 1,414,214",
    ),
    "integers": (changed({}, lambda tensors: tensors | {Q.format("A"): np.ones((2, 16), np.int32)}), "floating-point numbers, found"),
    "a pickle": (into_pickle, "expected adapter_model.safetensors, found adapter_model.bin; jpipe reads no pickle files"),
    "a link": (out_of("adapter_model.safetensors"), "adapter_model.safetensors: expected a file inside the folder, found a link to"),
    "a link of the config": (
        out_of("adapter_config.json"),
        "adapter_config.json: expected a file inside the folder, found a link to",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folders_that_jpipe_cannot_follow_are_refused(case, ours, tmp_path):
    change, message = REFUSED[case]
    folder = shutil.copytree(ours[0] / "peft", tmp_path / "peft")
    change(folder)

    def read() -> None:
        folders.config(tmp_path, "llama", f"warm_start.adapters={folder}")
        base, source = read_config.read(folders.GOLDEN / "llama"), folders.folder_of.source(folders.GOLDEN / "llama")
        read_adapters.with_adapters(source, folder, base, "language")

    with pytest.raises(InputError, match=message):
        read()


def test_excluded_modules_have_no_adapters(ours, tmp_path):
    folder = shutil.copytree(ours[0] / "peft", tmp_path / "peft")
    base = read_config.read(folders.GOLDEN / "llama")
    expected = adapter_config.read_adapters(folder, base)
    excluded = ["o_proj", "gate_proj", "lm_head", "vision_tower", "layers.7.self_attn.q_proj"]
    targets = ["q_proj", "v_proj", "down_proj", "o_proj"]
    changed({"target_modules": targets, "exclude_modules": excluded})(folder)
    assert adapter_config.read_adapters(folder, base) == expected


def test_modules_are_saved_whole_as_peft_matches_them(ours, tmp_path):
    """By the end of the name of the module or of one around it; null is what is left out."""
    folder = shutil.copytree(ours[0] / "peft", tmp_path / "peft")
    names = "model.norm", "model.layers.0.input_layernorm"
    norms = {f"base_model.model.{name}.weight": np.full(16, number, np.float32) for number, name in enumerate(names)}
    changed({"modules_to_save": ["norm", "layers.0"], "bias": None, "init_lora_weights": None}, lambda tensors: tensors | norms)(folder)
    base, source = read_config.read(folders.GOLDEN / "llama"), folders.folder_of.source(folders.GOLDEN / "llama")
    found = read_adapters.with_adapters(source, folder, base, "language")
    read = {
        name: array
        for part in found.read({"head": ["head/norm/scale"], "block_0": ["block_0/attention_norm/scale"]})
        for name, array in part.items()
    }
    assert {float(array.mean()) for array in read.values()} == {0.0, 1.0}


def test_the_a_of_a_part_whose_b_is_zero_is_read(tmp_path):
    """Two of three parts of `c_attn` have learned nothing yet."""
    _, _, arrays = written(tmp_path, "gpt2", "tune.lora={rank: 2, targets: [q_proj, k_proj, v_proj]}")
    names = [f"block_0/qkv/lora/{part}_proj" for part in "qkv"]
    parts = tuple(read_adapters.LinearPart(name, arrays[f"{name}/b"].shape[1], True) for name in names)
    module = read_adapters.Module("attn.c_attn", parts, arrays[f"{names[0]}/a"].shape[0], True)
    expected = {f"{name}/{key}": np.asarray(arrays[f"{name}/{key}"]) for name in names for key in "ab"}
    expected |= {f"{name}/b": np.zeros_like(expected[f"{name}/b"]) for name in (names[0], names[2])}
    found = module.divided(*module.joined(expected), 2, "adapters")
    assert found.keys() == expected.keys()
    for key, array in found.items():
        np.testing.assert_array_equal(array, expected[key], err_msg=key)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tune.lora.rank=4"], "tune.lora.rank: expected 2 as in .*adapter_config.json, found 4; remove rank"),
        (["tune.lora.targets=[q_proj]"], r"tune.lora.targets: expected \['q_proj', 'v_proj', 'down_proj'\] as in"),
        (["warm_start.file=runs/a"], "expected warm_start.file to be a folder in Hugging Face's layout, found 'runs/a'"),
        (["warm_start.file=null"], "adapters has no effect without file"),
    ],
    ids=["rank", "targets", "a run", "no model"],
)
def test_keys_that_contradict_a_folder_are_refused(overrides, message, ours, tmp_path):
    with pytest.raises(InputError, match=message):
        folders.config(tmp_path, "llama", f"warm_start.adapters={ours[0] / 'peft'}", *overrides)


# With PEFT itself -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """Return folders of models with adapters that PEFT wrote, and what it computes from them."""
    folder = tmp_path_factory.mktemp("theirs")
    torch.run("-m", PROGRAM, "write", folder, needs="peft")
    return folder


def difference(actual, expected) -> str:
    return f"largest difference {np.abs(np.asarray(actual) - expected).max():.1e}, of numbers up to {np.abs(expected).max():.1e}"


def near(actual, expected, what: str) -> None:
    """Check that numbers are equal up to the rounding of float32, and print how near they are."""
    print(f"{what}: {difference(actual, expected)}")
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-5, err_msg=f"{what}: {difference(actual, expected)}")


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", ["gpt2", "qwen2-moe", "llama", "qwen2", "gemma4"])
def test_adapters_of_peft_compute_and_learn_the_same(name, theirs, tmp_path):
    """In GPT-2 queries, keys and values share A in PEFT's adapters but not in jpipe's, so that a step differs."""
    folder, golden = theirs / name / "adapters", load_file(theirs / name / "adapters" / "golden.safetensors")
    config = folders.config(tmp_path, "llama", f"warm_start.adapters={folder}", file=theirs / name)
    stack, arrays = begun(config)
    tokens, labels = (jnp.asarray(golden[key]) for key in ("tokens", "labels"))
    params = stack.ties.split(folders.nested(stack, arrays, tokens))
    loss_of = cross_entropy.loss

    @jax.jit
    def step(params):
        def mean(params):
            outputs = applied(stack, params, tokens)
            total, number = loss_of(outputs, labels)
            return total / number, outputs["tokens"] if isinstance(outputs, dict) else outputs

        (loss, outputs), gradients = jax.value_and_grad(mean, has_aux=True)(params)
        return loss, outputs, jax.tree.map(lambda old, gradient: old - folders.RATE * gradient, params, gradients)

    loss, logits, after = step(params)
    near(logits, golden["logits"], "logits")
    near(loss, golden["loss"], "loss")
    named = {f"{layer_id}/{path}": leaf for layer_id, tree in after.items() for path, leaf in by_path(tree).items()}
    modules = [m for row in layout(read_config.read(theirs / name)) for m in read_adapters.modules_of(row, named, config.model)]
    assert {f"after/{tensor}" for module in modules for tensor in module.tensors} == {key for key in golden if key.startswith("after/")}
    for module in modules if name != "gpt2" else ():
        for tensor, array in zip(module.tensors, module.joined(named), strict=True):
            near(array, golden[f"after/{tensor}"], f"{tensor} after a step")
    if name != "qwen2-moe":
        write_weights.write_huggingface(ExportRequest(str(folders.written(config, arrays, stack)), str(tmp_path / "merged")), print)
        save_file({key: golden[key] for key in ("tokens", "labels")}, tmp_path / "merged" / "batch.safetensors")
        torch.run("-m", test_transformers.PROGRAM, "load", tmp_path / "merged")
        near(load_file(tmp_path / "merged" / "results.safetensors")["logits"], golden["logits"], "logits of the merged folder")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "kind", "overrides"),
    [
        pytest.param("llama", "LlamaForCausalLM", ("tune.lora={rank: 2, alpha: 6}",), marks=pytest.mark.exhaustive),
        pytest.param(
            "gpt2", "GPT2LMHeadModel", ("tune.lora={rank: 2, targets: [q_proj, v_proj, down_proj]}",), marks=pytest.mark.exhaustive
        ),
        ("llama", "LlamaForSequenceClassification", ("tune={lora: {rank: 2}, train_only: [head, 'block_*/mlp_norm']}", *TO_CLASSES)),
        pytest.param(
            "bert",
            "BertForSequenceClassification",
            ("tune={lora: {rank: 2}, train_only: [head, block_1/project]}", *TO_CLASSES),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["llama", "gpt2", "llama-classes", "bert-classes"],
)
def test_peft_computes_the_same_logits(name, kind, overrides, tmp_path):
    """GPT-2 has queries, keys and values in one module, and `c_proj` twice in each block."""
    if name == "bert":
        overrides = (overrides[0].replace("rank: 2", "rank: 2, targets: [q_proj, up_proj]"), *TO_CLASSES)
    _, stack, arrays = written(tmp_path, name, *overrides)
    write_adapters.write_peft(ExportRequest(str(tmp_path / "run"), str(tmp_path / "peft")), print)
    tokens = np.arange(1, 1 + folders.ROWS * folders.LENGTH, dtype=np.int32).reshape(folders.ROWS, -1)
    save_file({"tokens": tokens}, tmp_path / "peft" / "batch.safetensors")
    torch.run("-m", PROGRAM, "load", kind, folders.GOLDEN / name, tmp_path / "peft", needs="peft")
    actual = applied(stack, stack.ties.split(folders.nested(stack, arrays, tokens)), tokens)
    near(actual, load_file(tmp_path / "peft" / "results.safetensors")["logits"], "logits")
