"""Folders in Hugging Face's layout with what transformers computes from them, and runs that begin with one.

The folders are in `golden/`, written by `golden/write_golden.py`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from train.config import config_file
from train.config.config import Config

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("gpt2", "llama", "bert")
ROWS, LENGTH, RATE = 4, 12, 0.1


def computed(name: str) -> dict[str, np.ndarray]:
    """What transformers computed: logits, the loss, and after/NAME the weights after a step of SGD with `RATE`."""
    return load_file(GOLDEN / name / "golden.safetensors")


def batch(arrays: dict[str, np.ndarray]) -> Any:
    """(inputs, labels) of them."""
    if "mask" not in arrays:
        return arrays["tokens"], arrays["labels"]
    inputs = {"tokens": arrays["tokens"], "types": arrays["types"], "segments": arrays["mask"]}
    return inputs, {"tokens": arrays["labels"], "next": arrays["next"]}


def data(seed: int, batch_size: int, name: str) -> tuple[Any, Any]:
    """What `data.target` names: that batch again and again."""
    assert batch_size == ROWS
    return [batch(computed(name))] * 2, [batch(computed(name))]


def config(folder: Path, name: str, *overrides: str, file: Path | None = None) -> Config:
    """Of a run in `folder` that begins with a golden folder, or `file`, and whose steps change nothing, for they are too small."""
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


def copied(name: str, to: Path, change: Any = None, said: dict[str, Any] | None = None) -> Path:
    """A copy of a golden folder, its tensors as `change` leaves them, and `said` changed in `config.json` (null: removed)."""
    to.mkdir()
    tensors = load_file(GOLDEN / name / "model.safetensors")
    if change is not None:
        tensors = change(tensors) or tensors
    save_file({key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, to / "model.safetensors")
    described = json.loads((GOLDEN / name / "config.json").read_text()) | (said or {})
    (to / "config.json").write_text(json.dumps({key: value for key, value in described.items() if value is not ...}))
    return to


def in_shards(name: str, to: Path) -> Path:
    """A copy of a golden folder in two files with an index."""
    to.mkdir()
    shutil.copy(GOLDEN / name / "config.json", to)
    tensors = load_file(GOLDEN / name / "model.safetensors")
    files = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({key: tensors[key] for key in files if files[key] == file}, to / file)
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return to
