"""`jpipe export --layout peft`: write the adapters of a run as a folder that PEFT loads on top of their base model."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import save

from jpipe import InputError
from jpipe.files import new_folder, unused, write_atomically
from jpipe_lm.checkpoint.huggingface.folder import ADAPTER_WEIGHTS
from jpipe_lm.checkpoint.huggingface.names import Row
from jpipe_lm.checkpoint.huggingface.read_adapters import BEFORE, Module, modules_of
from jpipe_lm.checkpoint.huggingface.write_weights import Model, of_run
from jpipe_lm.config.huggingface.adapter_config import ADAPTER_CONFIG
from jpipe_lm.config.sections import model_of, tune_of
from jpipe_lm.config.tune_config import LoraConfig
from jpipe_train.checkpoint.export_request import ExportRequest
from jpipe_train.config.tune_section import matches_any
from jpipe_train.console.terminal import count

_JUDGED = ("classification", "regression")  # heads that PEFT calls SEQ_CLS


def write_peft(request: ExportRequest, report: Callable[[str], None]) -> None:
    """Write the adapters of a checkpoint as a folder for PEFT.

    Raise InputError as in `open_run`, or if the checkpoint has no moving average, the run has no adapters, or the folder cannot be written.
    """
    path, model = unused(request.path, "--out"), of_run(request, report, merge=False)
    lora = tune_of(model.config).lora
    if lora is None:
        raise InputError(f"--layout: expected a run with adapters (tune.lora) for peft, found none in '{request.source}'; give huggingface")
    tensors: dict[str, np.ndarray] = {}
    modules: dict[str, Module] = {}
    saved: list[str] = []
    for layer_id, rows in model.names.rows.items():
        of_layer = [module for row in rows for module in modules_of(row, model.specs, model_of(model.config))]
        modules |= {module.name: module for module in of_layer}
        whole = _saved(rows, model, modules)
        saved += whole
        arrays = model.read(layer_id) if of_layer or whole else {}
        for module in of_layer:
            tensors |= zip(module.tensors, module.joined(arrays), strict=True)
        for row in rows:
            if any(_module(name) in whole for name in row.theirs):
                tensors |= {f"{BEFORE}{name}": tensor for name, tensor in row.split(arrays).items()}
    if not modules:
        raise InputError(
            f"--layout: expected adapters in '{request.source}', as in its config.yaml, found none; the checkpoint is of another model"
        )
    content = save(tensors, {"format": "pt"})
    with new_folder(path, "--out") as unfinished:
        described = json.dumps(_described(model, lora, modules, saved), indent=2, sort_keys=True, allow_nan=False)
        write_atomically(unfinished / ADAPTER_CONFIG, f"{described}\n")
        write_atomically(unfinished / ADAPTER_WEIGHTS, content)
    report(f"{request.path}: {count(len(tensors), 'tensor')}, {len(content):,} bytes, {model.origin}")


def _saved(rows: Sequence[Row], model: Model, adapted: Collection[str]) -> list[str]:
    """Return the names of a layer's modules that are trained without adapters; PEFT stores these modules whole.

    Raise InputError if a module has an adapter as well, or transformers has no separate module for it.
    """
    patterns, saved = model.config.tune.train_only, dict[str, None]()
    for row in rows:
        trained = [name for name in row.shapes if matches_any(name, patterns)]
        saved |= dict.fromkeys(map(_module, row.theirs)) if trained else {}
        problems = {
            "has an adapter as well": any(_module(name) in adapted for name in row.theirs),
            "is shared by embeddings and logits": any(name in model.names.copies.values() for name in row.theirs),
            "belongs to experts": row.is_of_experts,
        }
        if trained and (problem := next((words for words, applies in problems.items() if applies), None)):
            raise InputError(
                f"--layout: expected tune.train_only to name modules that peft can store whole, found '{trained[0]}', which {problem}; "
                "give huggingface"
            )
    return list(saved)


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _described(model: Model, lora: LoraConfig, modules: Mapping[str, Module], saved: Collection[str]) -> dict[str, Any]:
    """Return the content of `adapter_config.json`."""
    every = list(dict.fromkeys(_module(name) for row in model.names for name in row.theirs))
    several = {name: module.number for name, module in modules.items() if module.number > 1}
    kind, head = model_of(model.config).kind, model_of(model.config).head
    task = "SEQ_CLS" if head in _JUDGED else "CAUSAL_LM" if kind == "decoder" and head == "language" else None
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": model.config.warm_start.file,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _ends(modules, every, "."),
        "modules_to_save": _ends(saved, every, "") or None,
        "rank_pattern": {name: lora.rank * number for name, number in several.items()},
        "alpha_pattern": {name: lora.alpha * number for name, number in several.items()},
        "fan_in_fan_out": not any(module.transposed for module in modules.values()),
        "bias": "none",
        "inference_mode": True,
    }


def _ends(chosen: Collection[str], every: Collection[str], before: str) -> list[str]:
    """Return for each chosen module the shortest ending after `before` that identifies its name among all, or the whole name."""
    for length in range(1, 4):
        ends = {".".join(name.split(".")[-length:]) for name in chosen}
        if {name for name in every if any(name == end or name.endswith(f"{before}{end}") for end in ends)} == set(chosen):
            return sorted(ends)
    return list(chosen)
