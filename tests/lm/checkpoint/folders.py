"""Folders in Hugging Face's layout with what transformers computes from them, and runs that begin with one.

The folders are in `golden/`, written by `golden/write_golden.py`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

import jpipe
import jpipe.checkpoints.writing
from jpipe.runtime._plain import to_plain
from jpipe_lm.checkpoint import huggingface as folder_of
from jpipe_lm.checkpoint.huggingface.names import layout
from jpipe_lm.config.huggingface import read_config
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train import registry
from jpipe_train.checkpoint.weights import by_path
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from tests.lm.models.running import applied

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("gpt2", "llama", "bert")
ROWS, LENGTH, RATE = 4, 12, 0.1


def computed(name: str) -> dict[str, np.ndarray]:
    """Load what transformers computed: the logits, the loss and, as after/NAME, the weights after a step of SGD with `RATE`."""
    return load_file(GOLDEN / name / "golden.safetensors")


def batch(arrays: dict[str, np.ndarray]) -> Any:
    """Return the inputs and labels in these arrays."""
    if "mask" not in arrays:
        return arrays["tokens"], arrays["labels"]
    inputs = {"tokens": arrays["tokens"], "segments": arrays["mask"]} | ({"types": arrays["types"]} if "types" in arrays else {})
    return inputs, {"tokens": arrays["labels"], "next": arrays["next"]} if "next" in arrays else arrays["labels"]


def data(seed: int, batch_size: int, name: str) -> tuple[Any, Any]:
    """Return training and validation data for `data.target`, in which every batch is the golden one."""
    assert batch_size == ROWS
    return [batch(computed(name))] * 2, [batch(computed(name))]


def config(folder: Path, name: str, *overrides: str, file: Path | None = None) -> Config:
    """Return the config of a run in `folder` that starts from a golden folder, or `file`, with steps too small to change anything."""
    path = folder / "config.yaml"
    sections = {
        "run": {"dir": str(folder / "run")},
        "data": {"target": f"{__name__}:data", "arguments": {"name": name}},
        "train": {"steps": 2, "batch_size": ROWS, "eval_every": 2, "eval_batches": 1, "trace_batches": 0},
        "model": {"seq_len": LENGTH},
        "optimizer": {"name": "sgd", "learning_rate": 1e-35},
        "plan": {"schedule": "gpipe", "num_stages": 2, "microbatches": 2},
        "checkpoint": {"every": 2},
        "warm_start": {"file": str(file or GOLDEN / name)},
        "log": [],
    }
    path.write_text(json.dumps(sections))
    return config_file.load(path, overrides, allow_code=True)


def copied(name: str, to: Path, change: Any = None, changes: dict[str, Any] | None = None) -> Path:
    """Copy a golden folder, passing its tensors to `change` and updating `config.json` with `said`, where `...` removes a key."""
    to.mkdir()
    tensors = load_file(GOLDEN / name / "model.safetensors")
    if change is not None:
        tensors = change(tensors) or tensors
    save_file({key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, to / "model.safetensors")
    described = json.loads((GOLDEN / name / "config.json").read_text()) | (changes or {})
    (to / "config.json").write_text(json.dumps({key: value for key, value in described.items() if value is not ...}))
    return to


def in_shards(name: str, to: Path) -> Path:
    """Copy a golden folder, splitting its tensors into two files with an index."""
    to.mkdir()
    shutil.copy(GOLDEN / name / "config.json", to)
    tensors = load_file(GOLDEN / name / "model.safetensors")
    files = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({key: tensors[key] for key in files if files[key] == file}, to / file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return to


def section_of(folder: Path) -> ModelConfig:
    """Return the section `model` that a folder describes."""
    return ModelConfig(**read_config.whole_section(read_config.read(folder).keys) | {"seq_len": LENGTH})


def read(folder: Path, **options: Any) -> tuple[jpipe.LayerStack, dict[str, Any]]:
    """Return the model that a folder describes, and its parameters by name."""
    stack = layers(section_of(folder))
    source = folder_of.source(folder, **options)
    names = {layer_id: [name for name in source.specs if name.startswith(f"{layer_id}/")] for layer_id in stack.ids}
    return stack, {name: array for part in source.read(names) for name, array in part.items()}


def nested(stack: jpipe.LayerStack, arrays: dict[str, Any], inputs: Any) -> Any:
    """Return arrays by name as the parameters of the model."""
    specs = {layer_id: layer.params for layer_id, layer in stack.specs(inputs).items()}
    (first, second) = (("embed", "token", "embedding"), ("head", "token", "embedding"))

    def array(layer_id: str, path: Any) -> Any:
        name = f"{layer_id}/{jax.tree_util.keystr(path, simple=True, separator='/')}"
        return jnp.asarray(arrays["/".join(first) if name == "/".join(second) else name])

    return {i: jax.tree_util.tree_map_with_path(lambda path, _, i=i: array(i, path), tree) for i, tree in specs.items()}


def written(config: Config, arrays: dict[str, Any], stack: jpipe.LayerStack, above: float | None = None, rows: int = 1) -> Path:
    """Write a run with these parameters in its only checkpoint and, if `above` is set, averages that exceed them by it."""
    folder = Path(config.run.dir)
    params = stack.ties.split(nested(stack, arrays, jnp.zeros((rows, config.model.seq_len), jnp.int32)))
    trees = {name: jax.tree.map(np.asarray, tree) for name, tree in params.items()}
    averages = {name: {} if above is None else {"weights_ema": jax.tree.map(lambda w: w + above, tree)} for name, tree in trees.items()}
    entries = {name: to_plain({"params": {"0": tree}, "optimizer": averages[name]}) for name, tree in trees.items()}
    jpipe.checkpoints.writing.write_layers(folder, 7, entries, 0)
    jpipe.checkpoints.writing.complete(folder, 7, 1, {})
    (folder / "config.yaml").write_text(config_file.to_yaml(config))
    return folder


def learned(folder: Path, arrays: dict[str, np.ndarray]) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """Return the loss and outputs of that batch, and the tensors of a folder after a step of SGD with `RATE`, by name."""
    stack, loaded = read(folder)
    loss_of = registry.find("losses", section_of(folder).loss_name)
    inputs, labels = jax.tree.map(jnp.asarray, batch(arrays))
    params = stack.ties.split(nested(stack, loaded, inputs))

    @jax.jit
    def step(params: Any) -> Any:
        def mean(params: Any) -> Any:
            outputs = applied(stack, params, inputs)
            total, number = loss_of(outputs, labels)
            return total / number, outputs

        (loss, outputs), gradients = jax.value_and_grad(mean, has_aux=True)(params)
        return loss, outputs, jax.tree.map(lambda old, gradient: old - RATE * gradient, params, gradients)

    loss, outputs, after = step(params)
    whole = {layer_id: stack.ties.whole(layer_id, after) for layer_id in stack.ids}
    updated = {f"{layer_id}/{path}": np.asarray(leaf) for layer_id, tree in whole.items() for path, leaf in by_path(tree).items()}
    rows = layout(read_config.read(folder))
    return loss, outputs, {name: tensor for row in rows for name, tensor in row.split(updated).items()}


def check_learned(folder: Path, expected: dict[str, np.ndarray], atol: float = 8e-6) -> None:
    """Check that the model of a folder computes the loss, outputs and updated weights that transformers computed."""
    loss, outputs, after = learned(folder, expected)
    close(loss, expected["loss"])
    is_language = section_of(folder).head == "language"
    valid = expected["mask"] > 0 if is_language and "mask" in expected else ...
    close(np.asarray(outputs["tokens"] if isinstance(outputs, dict) else outputs)[valid], expected["logits"][valid])
    if "next_logits" in expected:
        close(outputs["next"], expected["next_logits"])
    assert {f"after/{name}" for name in after} == {name for name in expected if name.startswith("after/")}
    for name, tensor in after.items():
        close(tensor, expected[f"after/{name}"], atol)


def close(actual: Any, expected: Any, atol: float = 8e-6) -> None:
    """Check that arrays are equal up to the rounding of float32."""
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=atol)
