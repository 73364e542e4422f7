"""Read a config from YAML with `--set key=value` overrides, and write it back."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from jpipe import InputError
from jpipe.errors import explain
from jpipe.files import expanded, read_text, resolved
from jpipe_lm.config import huggingface
from jpipe_lm.config.model_config import OF_THE_RUN
from jpipe_planner.machine.plain_yaml import dump, parse
from jpipe_train.config.config import Config
from jpipe_train.config.functions.entry_point import IN_PYTHON
from jpipe_train.config.section import AUTO

MOST_BYTES = 2**20  # hundreds of times the size of a long config


def load(
    path: str | Path, overrides: Sequence[str] = (), *, allow_code: bool = False, sections: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """Read the YAML file at `path`, apply the overrides and validate the result.

    An override of `model.preset` replaces the shape of the model that the file gives, one of `train.epochs` its `train.steps`, and one of
    `train.steps` its `train.epochs`. If `warm_start.file` is a folder in Hugging Face's
    layout, the keys of `model` that its `config.json` decides are added, and the keys of `tune.lora` that `warm_start.adapters` decides.

    Args:
        path: the YAML file.
        overrides: replacements of single keys, such as `"train.steps=10"`; the value is YAML.
        allow_code: whether the config may name functions to import and call. A stranger's file must not, so a person has to allow it.
        sections: whole sections that replace the file's before the overrides apply.

    Raises:
        InputError: the file cannot be read or parsed; a key is unknown, has a wrong type or value; code is not allowed; `config.json`
            describes no model of jpipe's, or a key contradicts it.
    """
    data = _read(path)
    if str(data.get("format")).startswith("jpipe-plan/"):
        raise InputError(f"{path}: expected a config, found a plan; name it in a config, as plan.file, or look at it with jpipe simulate")
    data |= sections or {}
    overridden: list[str] = []
    for override in overrides:
        _override(data, override, overridden)
    _let_preset_decide(data, overridden)
    _let_override_decide_length(data, overridden)
    where = " ".join([str(path), *(f"--set {override}" for override in overrides)])
    _fill_model(data, where)
    _fill_lora(data, where)
    try:
        config = Config.model_validate(data)
    except pydantic.ValidationError as error:
        raise explain(error, Config, where) from None
    if config.plan.file is not None:
        for override, key in zip(overrides, overridden, strict=True):
            kept = _beside_plan_file(config.plan.file)
            if set(data["plan"]) - {*kept} if key == "plan" else key.startswith("plan.") and key[5:].split(".")[0] not in kept:
                raise InputError(
                    f"--set {override} has no effect with plan.file '{config.plan.file}'; leave it out, or change the plan file"
                )
    in_python = [key for key, target in config.code.items() if target.startswith(f"{IN_PYTHON}:") and key != "optimizer.name"]
    if in_python:  # an evaluation needs no optimizer
        raise InputError(
            f"{where}: this run was trained by a Python program (jpipe_train.fit), and no file names its parts; name functions for them: "
            f"{' '.join(f'--set {key}=module:function' for key in in_python)} --allow-code"
        )
    if config.code and not allow_code:
        named = ", ".join(f"'{target}' ({key})" for key, target in config.code.items())
        raise InputError(
            f"{where}: expected built-in parts only, found code of its own to import and run: {named}; read that code, and if you trust it "
            "add --allow-code"
        )
    return config


def _beside_plan_file(file: str) -> tuple[str, ...]:
    """Return the keys of `plan` that a plan file does not replace; a plan that is searched does what `agree` and `links` ask for."""
    return ("file", "max_delay", *(("agree", "links") if file == AUTO else ()))


def load_resolved(path: Path) -> Config:
    """Read the `config.yaml` of a run, as `to_yaml` wrote it, without importing the functions that it names.

    Raises:
        InputError: the file cannot be read, or is no such config.
    """
    try:
        return Config.model_validate(_read(path))
    except pydantic.ValidationError as error:
        raise explain(error, Config, str(path)) from None


def to_yaml(config: Config) -> str:
    """Return the config as YAML with all defaults; `load` of this text describes the same run."""
    return dump(record(config))


def record(config: Config) -> dict[str, Any]:
    """Return the config as plain data with all defaults, as `config.yaml` in a run folder has it.

    If `plan.file` is set, the keys of `plan` that the file replaces are left out.
    """
    data = config.model_dump()
    if config.plan.file is not None:
        kept = _beside_plan_file(config.plan.file)
        data["plan"] = {key: value for key, value in data["plan"].items() if key in kept and value is not None}
    return data


def _read(path: str | Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file."""
    text = read_text(
        expanded(str(path), "config"),
        MOST_BYTES,
        f"{path}: cannot read the config",
        "give a YAML file such as configs/gpt-bytes.yaml",
        f"{path}: expected YAML text in UTF-8, found other bytes; is this a config?",
    )
    data = parse(text, str(path))
    if data is None:  # an empty file: all defaults
        return {}
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of keys such as 'train:', found {type(data).__name__}")
    return data


def _let_preset_decide(data: dict[Any, Any], overridden: Sequence[str]) -> None:
    """Drop the file's own keys of the model, except those in `OF_THE_RUN`, if `model.preset` is overridden."""
    model = data.get("model")
    if "model.preset" in overridden and isinstance(model, dict) and model["preset"] is not None:
        keys = {key.split(".")[1] for key in overridden if key.startswith("model.")}
        data["model"] = {key: value for key, value in model.items() if key in keys | OF_THE_RUN}


def _let_override_decide_length(data: dict[Any, Any], overridden: Sequence[str]) -> None:
    """Drop the file's own `train.steps` if `train.epochs` is overridden alone, and the other way round."""
    train = data.get("train")
    for key, other in (("epochs", "steps"), ("steps", "epochs")):
        is_alone = f"train.{key}" in overridden and f"train.{other}" not in overridden
        if is_alone and isinstance(train, dict) and train.get(key) is not None:
            train.pop(other, None)


def _fill_model(data: dict[Any, Any], where: str) -> None:
    """Add the keys of `model` that `config.json` decides to `data`, if the run starts from a folder in Hugging Face's layout."""
    warm_start, model = data.get("warm_start"), data.get("model")
    warm_start = warm_start if isinstance(warm_start, dict) else {}
    file = warm_start.get("file")
    if isinstance(file, str) and huggingface.is_folder(file) and isinstance(model, dict | None):
        data["model"] = huggingface.fill_section(model or {}, resolved(file, "warm_start.file"), where, warm_start.get("mode") == "partial")


def _fill_lora(data: dict[Any, Any], where: str) -> None:
    """Add the keys of `tune.lora` that the folder of adapters decides to `data`, if the run starts from one."""
    warm_start, tune = data.get("warm_start"), data.get("tune")
    file, adapters = (warm_start.get(key) for key in ("file", "adapters")) if isinstance(warm_start, dict) else (None, None)
    if not isinstance(file, str) or not isinstance(adapters, str) or not huggingface.has_adapters(adapters):
        return  # reported when a run begins with them
    if not huggingface.is_folder(file):
        raise InputError(
            f"{where}: warm_start.adapters: expected warm_start.file to be a folder in Hugging Face's layout, found '{file}'; give the "
            "folder of the model that the adapters are for"
        )
    lora = tune.get("lora") if isinstance(tune, dict) else None
    if isinstance(tune, dict | None) and isinstance(lora, dict | None):
        base, folder = huggingface.read(resolved(file, "warm_start.file")), resolved(adapters, "warm_start.adapters")
        data["tune"] = {**(tune or {}), "lora": huggingface.fill_lora(lora or {}, folder, base, where)}


def _override(data: dict[Any, Any], override: str, overridden: list[str]) -> None:
    """Set `section.key=value` in `data` and append the key to `overridden`; raise InputError if that would undo an earlier override."""
    key, equals, value = override.partition("=")
    *sections, last = key.split(".")
    if not equals or not all([*sections, last]):
        mistake = "an empty name" if equals else "no '='"
        raise InputError(f"--set {override}: expected key=value, such as train.steps=100, found {mistake}")
    for earlier in overridden:
        if f"{earlier}.".startswith(f"{key}."):
            raise InputError(f"--set {override}: expected each key once, found --set {earlier}=… before it, which would be lost; keep one")
    overridden.append(key)
    for depth, section in enumerate(sections):
        inner = data.setdefault(section, {})
        if inner is None:  # `run:` with nothing below it
            inner = data[section] = {}
        if not isinstance(inner, dict):
            name = ".".join(sections[: depth + 1])
            raise InputError(f"--set {override}: '{name}' is a value, not a section; give the whole of it, as {name}=…")
        data = inner
    data[last] = parse(value, f"--set {override}", "put text with special characters in quotes of its own")
