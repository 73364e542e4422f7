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
from jpipe_train.checkpoint.huggingface.folder import ADAPTERS
from jpipe_train.checkpoint.huggingface.names import Row
from jpipe_train.checkpoint.huggingface.writing import Model, of_run
from jpipe_train.config.model_config import ModelConfig
from jpipe_train.config.tune_config import PARTS, LoraConfig
from jpipe_train.console.terminal import count
from jpipe_train.models.lora import widths_of

WEIGHTS = "adapter_model.safetensors"
_BEFORE = "base_model.model."  # of the names of modules, as PEFT wraps them


class Part(NamedTuple):
    """A part of a linear layer, which may have an adapter.

    Attributes:
        adapter: the start of the names of its parameters, such as "block_0/qkv/lora/q_proj".
        outputs: the number of outputs of the part.
        exists: whether the part has an adapter.
    """

    adapter: str
    outputs: int
    exists: bool


class Module(NamedTuple):
    """A module of transformers that has adapters.

    Attributes:
        name: of the module, such as "model.layers.0.self_attn.q_proj".
        parts: what it computes, side by side: one part, or several, such as queries, keys and values.
        transposed: as in `Row`.
    """

    name: str
    parts: tuple[Part, ...]
    transposed: bool

    @property
    def number(self) -> int:
        """The number of parts that have an adapter."""
        return sum(part.exists for part in self.parts)

    def matrices(self, arrays: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return A and B, of the shapes (rank, inputs) and (outputs, rank).

        Adapters of several parts become one of as many times the rank, whose B has a block for each part.

        Args:
            arrays: the parameters of the layer, by name in an export.
        """
        columns = [np.asarray(arrays[f"{part.adapter}/a"]) for part in self.parts if part.exists]
        a = np.concatenate(columns, axis=1)
        b = np.zeros((a.shape[1], sum(part.outputs for part in self.parts)), a.dtype)
        row = column = 0
        for part in self.parts:
            if part.exists:
                block = np.asarray(arrays[f"{part.adapter}/b"])
                b[row : row + len(block), column : column + part.outputs] = block
                row += len(block)
            column += part.outputs
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)


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
    if model.config.tune.train_only:
        raise InputError("--layout: peft has adapters alone, and tune.train_only trained other parameters as well; give huggingface")
    tensors: dict[str, np.ndarray] = {}
    modules: dict[str, Module] = {}
    for layer_id, rows in model.names.rows.items():
        of_layer = [module for row in rows for module in modules_of(row, model.specs, model.config.model)]
        arrays = model.read(layer_id) if of_layer else {}
        for module in of_layer:
            a, b = module.matrices(arrays)
            tensors |= {f"{_BEFORE}{module.name}.lora_A.weight": a, f"{_BEFORE}{module.name}.lora_B.weight": b}
            modules[module.name] = module
    if not tensors:
        raise InputError(f"--layout: expected adapters in '{run}', as in its config.yaml, found none; the checkpoint is of another model")
    content = save(tensors, {"format": "pt"})
    with new_folder(path, "--out") as unfinished:
        described = json.dumps(_described(model, lora, modules), indent=2, sort_keys=True, allow_nan=False)
        write_atomically(unfinished / ADAPTERS, f"{described}\n")
        write_atomically(unfinished / WEIGHTS, content)
    report(f"{out}: {count(len(tensors), 'tensor')}, {len(content):,} bytes, {model.origin}")


def modules_of(row: Row, names: Collection[str], model: ModelConfig) -> list[Module]:
    """Return the modules of a row of the layout that have adapters.

    Args:
        row: the tensors of parameters that are stored together.
        names: of all parameters of the model with adapters.
        model: the section `model`.
    """
    parts = []
    for ours, shape in row.shapes.items():
        linear, _, last = ours.rpartition("/")
        kind = linear.rpartition("/")[2]
        if last != "kernel" or kind not in PARTS:
            return []
        for part, outputs in widths_of(kind, shape[1], model).items():
            adapter = f"{linear}/lora/{part}"
            parts.append(Part(adapter, outputs, f"{adapter}/a" in names))
    if not any(part.exists for part in parts):
        return []
    each = [(part,) for part in parts] if len(row.theirs) == len(parts) else [tuple(parts)]
    modules = [Module(name.removesuffix(".weight"), own, row.transposed) for name, own in zip(row.theirs, each, strict=True)]
    return [module for module in modules if module.number]


def _described(model: Model, lora: LoraConfig, modules: Mapping[str, Module]) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    targets = _targets(modules, [name.removesuffix(".weight") for row in model.names for name in row.theirs])
    several = {name: module.number for name, module in modules.items() if module.number > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if (model.config.model.kind, model.config.model.head) == ("decoder", "language") else None,
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
