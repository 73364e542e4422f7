"""Runs with adapters as they begin, without training."""

from pathlib import Path

import numpy as np
from rich.console import Console

import jpipe
from jpipe_lm.config.tune_config import is_of_adapter
from jpipe_train.assemble.build import build
from jpipe_train.checkpoint import warm_start
from jpipe_train.checkpoint.weights import by_path
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from tests.lm.checkpoint import folders


def begun(config: Config) -> tuple[jpipe.LayerStack, dict[str, np.ndarray]]:
    """Return the model of a run, and the parameters that it begins with by name."""
    pipe, batches = build(config, Reporter(1, 1, "", Console(quiet=True)))
    found = warm_start.load(config, pipe, batches.train[0], Team(None), lambda _: None)
    return pipe.stack, {f"{layer_id}/{name}": array for layer_id, arrays in found.items() for name, array in arrays.items()}


def drawn(stack: jpipe.LayerStack, base: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays of a whole model: those of a base, and random ones for the others."""
    generator = np.random.default_rng(0)
    arrays = {name: np.asarray(array) for name, array in base.items()}
    for layer_id, spec in stack.specs(np.zeros((1, folders.LENGTH), np.int32)).items():
        for path, leaf in by_path(spec.params).items():
            name = f"{layer_id}/{path}"
            if name not in arrays or is_of_adapter(name):
                arrays[name] = (0.3 * generator.normal(size=leaf.shape)).astype(leaf.dtype)
    return arrays


def written(folder: Path, name: str, *overrides: str) -> tuple[Config, jpipe.LayerStack, dict[str, np.ndarray]]:
    """Write a run that begins with a golden model into `folder`/run, as if it had moved its adapters; return also its model and arrays."""
    folder.mkdir(exist_ok=True)
    config = folders.config(folder, name, *overrides)
    stack, found = begun(config)
    arrays = drawn(stack, found)
    folders.written(config, arrays, stack)
    return config, stack, arrays
