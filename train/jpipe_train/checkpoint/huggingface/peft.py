"""`jpipe export --layout peft`: the adapters of a run as a folder that the library PEFT loads beside the model they are for."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import save

from jpipe import InputError
from jpipe.files import new_folder, unused, write_atomically
from jpipe_train.checkpoint.export import Weights
from jpipe_train.checkpoint.huggingface.names import Row
from jpipe_train.checkpoint.huggingface.writing import Model, of_run
from jpipe_train.config.tune_config import PARTS, LoraConfig
from jpipe_train.config.model_config import ModelConfig
from jpipe_train.console.terminal import count
from jpipe_train.models.lora import widths_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE = "base_model.model."  # of the names of modules, as PEFT wraps them
_TASKS = {"decoder": "CAUSAL_LM"}  # others have none


class Module(NamedTuple):
    """A module of transformers, and the parts of jpipe's linear layer whose adapters it has.

    Attributes:
        name: of the module, such as "model.layers.0.self_attn.q_proj".
        ours: of the linear layer, such as "block_0/qkv".
        parts: such as ("q_proj",), or all three for a module that computes queries, keys and values.
        present: those of the parts that have adapters.
        transposed: as in `Row`.
    """

    name: str
    ours: str
    parts: tuple[str, ...]
    present: tuple[str, ...]
    transposed: bool


def main(run: str, out: str, step: int | None, report: Callable[[str], None], weights: Weights = "newest") -> None:
    """Write the adapters of a checkpoint as a folder for PEFT, which appears whole or not at all.

    Args:
        run: the folder of the run.
        out: the folder, a new one.
        step: of the checkpoint; None: the newest that is whole.
        report: gets a line for what was written, and one for each newer checkpoint that is damaged.
        weights: the newest parameters, or their moving average.

    Raises:
        InputError: no such run or checkpoint, one without adapters, or the folder cannot be written.
    """
    path = unused(out, "--out")
    jax.config.update("jax_platforms", "cpu")  # Orbax starts JAX's devices; a GPU may be another program's, and none is needed
    model = of_run(run, step, report, weights, merge=False)
    lora = model.config.tune.lora
    if lora is None:
        raise InputError(f"--layout: expected a run with adapters (tune.lora) for peft, found none in '{run}'; give huggingface")
    tensors: dict[str, np.ndarray] = {}
    modules: dict[str, Module] = {}
    for layer_id, rows in model.names.rows.items():
        of_layer = [module for row in rows for module in modules_of(row, model.specs)]
        arrays = model.read(layer_id) if of_layer else {}
        for module in of_layer:
            a, b = _matrices(module, arrays, model.config.model)
            tensors |= {f"{_BEFORE}{module.name}.lora_A.weight": a, f"{_BEFORE}{module.name}.lora_B.weight": b}
            modules[module.name] = module
    if not tensors:
        raise InputError(f"--layout: expected adapters in '{run}', as in its config.yaml, found none; the checkpoint is of another model")
    content = save(tensors, {"format": "pt"})
    with new_folder(path, "--out") as unfinished:
        described = json.dumps(_described(model, lora, modules), indent=2, sort_keys=True, allow_nan=False)
        write_atomically(unfinished / CONFIG, f"{described}\n")
        write_atomically(unfinished / WEIGHTS, content)
    report(f"{out}: {count(len(tensors), 'tensor')}, {len(content):,} bytes, {model.origin}")


def modules_of(row: Row, names: Collection[str]) -> list[Module]:
    """Return the modules of a row of the layout that have adapters.

    Args:
        row: the tensors of a parameter.
        names: of all parameters of the model with adapters.
    """
    linear, _, last = row.ours.rpartition("/")
    parts = PARTS.get(linear.rpartition("/")[2], ()) if last == "kernel" else ()
    if not parts:
        return []
    theirs = [name.removesuffix(".weight") for name in row.theirs]
    each = [(part,) for part in parts] if len(theirs) == len(parts) else [parts]
    present = [tuple(part for part in own if f"{linear}/lora/{part}/a" in names) for own in each]
    return [Module(name, linear, own, some, row.transposed) for name, own, some in zip(theirs, each, present, strict=True) if some]


def _matrices(module: Module, arrays: Mapping[str, Any], model: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of a module, of the shapes (rank, inputs) and (outputs, rank).

    Adapters of several parts of one module become one of as many times the rank, whose B has a block for each part.
    """
    pairs = {part: [np.asarray(arrays[f"{module.ours}/lora/{part}/{matrix}"]) for matrix in "ab"] for part in module.present}
    widths = widths_of(module.ours.rpartition("/")[2], next(iter(pairs.values()))[1].shape[1], model)
    a = np.concatenate([a for a, _ in pairs.values()], axis=1)
    b = np.zeros((a.shape[1], sum(widths[part] for part in module.parts)), a.dtype)
    row = column = 0
    for part in module.parts:
        if part in pairs:
            block = pairs[part][1]
            b[row : row + len(block), column : column + widths[part]] = block
            row += len(block)
        column += widths[part]
    return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)


def _described(model: Model, lora: LoraConfig, modules: Mapping[str, Module]) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    targets = _targets(modules, [name.removesuffix(".weight") for row in model.names for name in row.theirs])
    several = {name: len(module.present) for name, module in modules.items() if len(module.present) > 1}
    return {
        "peft_type": "LORA",
        "task_type": _TASKS.get(model.config.model.kind),
        "base_model_name_or_path": model.config.warm_start.file,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets,
        "rank_pattern": {name: lora.rank * number for name, number in several.items()},
        "alpha_pattern": {name: lora.alpha * number for name, number in several.items()},
        "fan_in_fan_out": not any(module.transposed for module in modules.values()),
        "bias": "none",
        "inference_mode": True,
    }


def _targets(chosen: Collection[str], every: Collection[str]) -> list[str]:
    """Return the shortest ends of the names of the chosen modules that are those of no other module, or their whole names."""
    for length in range(1, 4):
        ends = {".".join(name.split(".")[-length:]) for name in chosen}
        if {name for name in every if any(name.endswith(f".{end}") for end in ends)} == set(chosen):
            return sorted(ends)
    return list(chosen)
