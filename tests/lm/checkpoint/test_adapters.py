"""Runs with adapters: warm starts, what training leaves as it is, resumes under other plans, exports and generation."""

import json
import shutil
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jpipe.checkpoints
from jpipe import InputError
from jpipe_lm.checkpoint.adapters import merged
from jpipe_lm.checkpoint.huggingface import read_adapters as of_modules
from jpipe_lm.checkpoint.huggingface import write_adapters, write_weights
from jpipe_lm.checkpoint.huggingface.names import layout
from jpipe_lm.config.huggingface import read_config
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.tune_config import LoraConfig, TuneConfig, is_of_adapter
from jpipe_lm.generate import model_source
from jpipe_lm.generate.request import Request
from jpipe_lm.models.layers import layers
from jpipe_lm.models.quantized import quantize
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.checkpoint.weights import by_name, by_path
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.run import loop
from tests.lm.checkpoint import beginnings, families, folders
from tests.lm.models.running import applied

TUNE = "tune={lora: {rank: 2, alpha: 8, targets: [q_proj, v_proj, up_proj, down_proj]}}"
SOME = ["q_proj", "v_proj", "gate_proj", "down_proj"]
RATE = ("optimizer.name=sgd", "optimizer.learning_rate=0.05")
QUANTIZED = ("tune.base_dtype=bfloat16", "tune.quantize=nf4")


def run(folder: Path, name: str, *overrides: str, tune: str = TUNE) -> types.SimpleNamespace:
    """Train from a golden folder of transformers; return the config, the folder of the run and its arrays by name."""
    folder.mkdir(exist_ok=True)
    config = folders.config(folder, name, tune, *RATE, *overrides)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "write_report", lambda *_: None)
        summary = loop.main(config)
    arrays = by_name(jpipe.checkpoints.Checkpoint(summary.folder, config.train.steps).read())
    return types.SimpleNamespace(config=config, folder=summary.folder, arrays={name: np.asarray(array) for name, array in arrays.items()})


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> types.SimpleNamespace:
    """Return a run of two steps with adapters and a base in float32."""
    return run(tmp_path_factory.mktemp("trained"), "llama", "checkpoint.every=1", "plan.num_stages=1")


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> dict[str, types.SimpleNamespace]:
    """Return runs as they begin, with adapters of random numbers and a base in float32 or a quantized one."""
    runs = {}
    for kind, overrides in {"float32": (), "nf4": QUANTIZED}.items():
        config, _, arrays = beginnings.written(tmp_path_factory.mktemp(kind), "llama", TUNE, *overrides)
        runs[kind] = types.SimpleNamespace(config=config, folder=Path(config.run.dir), arrays=arrays)
    return runs


def logits(config: Config, arrays: dict[str, np.ndarray], tokens: np.ndarray, tune: object = None) -> np.ndarray:
    """Return the outputs of a model with these arrays by name."""
    stack = layers(config.model, None, tune)
    params = folders.nested(stack, arrays, tokens)
    return np.asarray(applied(stack, stack.ties.split(params), tokens))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "nf4"])
def test_the_base_is_as_it_was_in_the_folder(kind, trained, begun):
    run = trained if kind == "float32" else begun[kind]
    actual, (_, original) = run.arrays, folders.read(folders.GOLDEN / "llama")
    kernels = {name for name in original if name.startswith("block") and name.endswith("kernel")}
    for name, array in original.items():
        if kind == "nf4" and name in kernels:
            for part, expected in zip(("codes", "scale"), quantize(jax.numpy.asarray(array, "float32"), "nf4"), strict=True):
                np.testing.assert_array_equal(actual[f"{name}/{part}"], expected)
        else:
            np.testing.assert_array_equal(actual[name], array.astype(actual[name].dtype))
    adapters = {name: array for name, array in actual.items() if is_of_adapter(name)}
    assert len(adapters) == 2 * 4 * 2
    assert all(array.any() for array in adapters.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("float32", marks=pytest.mark.exhaustive), "nf4"])
def test_merged_weights_compute_what_adapters_compute(kind, begun, tmp_path):
    result, tokens = begun[kind], folders.computed("llama")["tokens"]
    expected = logits(result.config, result.arrays, tokens, result.config.tune)
    write_weights.write_huggingface(ExportRequest(str(result.folder), str(tmp_path / "merged")), print)
    _, arrays = folders.read(tmp_path / "merged")
    folders.close(logits(result.config, arrays, tokens), expected)
    for name, array in merged(result.arrays, result.config.model, result.config.tune).items():
        np.testing.assert_array_equal(arrays[name], array)
    origin = model_source.find(Request(str(result.folder), tokenizer="bytes"), print)
    for layer_id, specs in {"block_1": layers(result.config.model).specs(tokens)["block_1"].params}.items():
        np.testing.assert_allclose(origin.layer(layer_id, specs)["qkv"]["kernel"], arrays[f"{layer_id}/qkv/kernel"], rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("plan.num_stages=2", "plan.schedule=naive"), marks=pytest.mark.exhaustive),
        ("plan.num_stages=3", "plan.schedule=gpipe"),
    ],
)
def test_a_run_that_is_resumed_under_another_plan_gives_the_same_weights(overrides, trained, tmp_path):
    stopped = shutil.copytree(trained.folder, tmp_path / "run")
    shutil.rmtree(stopped / "checkpoints" / "2")
    earlier = by_name(jpipe.checkpoints.Checkpoint(stopped, 1).read())
    assert not np.array_equal(earlier["block_0/qkv/lora/q_proj/b"], trained.arrays["block_0/qkv/lora/q_proj/b"])
    resumed = run(tmp_path, "llama", *overrides)
    assert resumed.arrays.keys() == trained.arrays.keys()
    for name, array in trained.arrays.items():
        np.testing.assert_allclose(resumed.arrays[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_folder_for_peft_has_its_names_and_shapes(begun, tmp_path):
    write_adapters.write_peft(ExportRequest(str(begun["float32"].folder), str(tmp_path / "peft")), print)
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert described["target_modules"] == ["down_proj", "q_proj", "up_proj", "v_proj"]
    assert (described["r"], described["lora_alpha"], described["peft_type"], described["task_type"]) == (2, 8.0, "LORA", "CAUSAL_LM")
    tensors, arrays = load_file(tmp_path / "peft" / "adapter_model.safetensors"), begun["float32"].arrays
    assert len(tensors) == 2 * 4 * 2
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_{}.weight"
    np.testing.assert_array_equal(tensors[name.format("A")], arrays["block_1/qkv/lora/v_proj/a"].T)
    np.testing.assert_array_equal(tensors[name.format("B")], arrays["block_1/qkv/lora/v_proj/b"].T)


def test_a_run_without_adapters_has_no_folder_for_peft(begun, tmp_path):
    plain = shutil.copytree(begun["float32"].folder, tmp_path / "plain")
    config = config_file.load_resolved(plain / "config.yaml")
    (plain / "config.yaml").write_text(config_file.to_yaml(config.model_copy(update={"tune": TuneConfig()})))
    with pytest.raises(
        InputError, match=r"--layout: expected a run with adapters \(tune.lora\) for peft, found none in .*; give huggingface"
    ):
        write_adapters.write_peft(ExportRequest(str(plain), str(tmp_path / "peft")), print)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("phi3", None),
        ("gpt2", SOME),
        pytest.param("phi3", SOME, marks=pytest.mark.exhaustive),
        pytest.param("llama3", SOME, marks=pytest.mark.exhaustive),
    ],
)
def test_modules_for_peft_add_what_merged_weights_have_more(name, targets):
    """Phi-3 has queries, keys and values in one module, and both projections into the MLP in another one."""
    content = json.loads((folders.GOLDEN / "gpt2" / "config.json").read_text())
    if name != "gpt2":
        architecture, content = families.MODELS[name]
        content = {**content, "architectures": [architecture]}
    described = read_config.parse(content)
    model, names = ModelConfig(**described.keys, seq_len=1), layout(described)
    lora = LoraConfig(rank=2, alpha=6, targets=targets)
    stack, generator = (
        layers(model, None, TuneConfig(lora=lora.model_copy(update={"targets": None}))),
        np.random.default_rng(0),
    )
    arrays: dict[str, np.ndarray] = {}
    for layer_id, spec in stack.specs(np.zeros((1, 1), np.int32)).items():
        for path, leaf in by_path(spec.params).items():
            part = path.split("/")[-2]
            if not is_of_adapter(f"{layer_id}/{path}"):
                arrays[f"{layer_id}/{path}"] = np.zeros(leaf.shape, np.float32)
            elif targets is None or part in targets:
                arrays[f"{layer_id}/{path}"] = generator.normal(size=leaf.shape).astype(np.float32)
    weights, found = merged(arrays, model, TuneConfig(lora=lora)), 0
    for row in names:
        tensors = row.split(weights) if all(ours in weights for ours in row.shapes) else {}
        for module in of_modules.modules_of(row, arrays, model):
            a, b = module.joined(arrays)
            assert len(a) == 2 * module.number
            added = 3 * b @ a
            np.testing.assert_allclose(tensors.pop(f"{module.name}.weight"), added if module.transposed else added.T, rtol=1e-5, atol=1e-5)
            found += module.number
        assert not any(tensor.any() for tensor in tensors.values())
    assert found == sum(is_of_adapter(name) for name in arrays) / 2 > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["pipedream_flush", "pipedream_2bw"])
def test_fifty_steps_lower_the_loss(schedule, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    config = folders.config(folder, "llama", TUNE, "train.steps=50", f"plan.schedule={schedule}", *RATE, "train.eval_every=50")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "write_report", lambda *_: None)
        patched.setattr(folders, "data", repeated)
        summary = loop.main(config)
    assert summary.val_loss_after < summary.val_loss_before - 0.5


def repeated(seed: int, batch_size: int, name: str) -> object:
    """Return more of the batches of `folders.data`."""
    batch = folders.batch(folders.computed(name))
    return [batch] * 50, [batch]
