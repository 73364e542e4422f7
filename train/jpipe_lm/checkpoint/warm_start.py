"""Warm starts from folders of Hugging Face and adapters of PEFT: a `jpipe_train.checkpoint.sources.source.Format`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe.files import resolved
from jpipe_lm.checkpoint import huggingface
from jpipe_lm.config.huggingface import adapter_config, read_config
from jpipe_lm.config.model_config import ModelConfig
from jpipe_train.checkpoint.sources.source import Source, Spec
from jpipe_train.config.config import WarmStartConfig
from jpipe_train.config.model_section import ModelSection
from jpipe_train.registry import located

_FILE, _ADAPTERS = "warm_start.file", "warm_start.adapters"


def opens(path: Path) -> bool:
    """Return whether a folder is in Hugging Face's layout.

    Raise InputError if it holds only adapters, or if the path is a pickle, or a file inside such a folder.
    """
    if not os.path.isdir(path):
        huggingface.reject_file(path)
        return False
    huggingface.reject_adapters(path, _FILE, _ADAPTERS)
    return huggingface.is_meant(path)


def open_source(path: Path, config: WarmStartConfig, model: ModelSection, specs: Mapping[str, Spec] | None) -> Source:
    """Return the parameters of a folder, as `jpipe_train.checkpoint.sources.source.Format` says. A head of another kind is left out."""
    head = model.head if isinstance(model, ModelConfig) else "language"
    source = huggingface.source(path, head=head, strict=config.mode == "strict")
    if config.names:
        raise InputError("warm_start.names has no effect for a folder of Hugging Face's layout, because its names are known; leave it out")
    if config.adapters is None:
        return source
    base, adapters = read_config.read(path), _located(config.adapters, _ADAPTERS)
    if specs is None:
        adapter_config.read_adapters(adapters, base)
        return source
    return huggingface.with_adapters(source, adapters, base, head, specs)


def fill_config(data: dict[Any, Any], where: str) -> None:
    """Add the keys of `model` that `config.json` decides, and the keys of `tune.lora` that a folder of adapters decides.

    Raise InputError if a key contradicts a folder, or there are adapters without a model in Hugging Face's layout.
    """
    warm_start, model = data["warm_start"], data.get("model")
    file, adapters = warm_start["file"], warm_start.get("adapters")
    if (is_folder := read_config.is_folder(file)) and isinstance(model, dict | None):
        data["model"] = read_config.fill_section(model or {}, _located(file, _FILE), where, warm_start.get("mode") == "partial")
    if not isinstance(adapters, str) or not adapter_config.has_adapters(adapters):
        return  # this error is reported when the run begins
    if not is_folder:
        raise InputError(
            f"{where}: warm_start.adapters: expected warm_start.file to be a folder in Hugging Face's layout, found '{file}'; give the "
            "folder of the model that the adapters are for"
        )
    tune = data.get("tune")
    lora = tune.get("lora") if isinstance(tune, dict) else None
    if isinstance(tune, dict | None) and isinstance(lora, dict | None):
        base, folder = read_config.read(_located(file, _FILE)), _located(adapters, _ADAPTERS)
        data["tune"] = {**(tune or {}), "lora": adapter_config.fill_lora(lora or {}, folder, base, where)}


def _located(path: str, where: str) -> Path:
    return resolved(str(located(path, where)), where)
