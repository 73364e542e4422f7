"""Read a config from YAML with `--set key=value` overrides, and write it back."""

import contextlib
import functools
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from jpipe import InputError
from jpipe.errors import explain
from jpipe.files import expanded, read_text
from jpipe_planner.machine.plain_yaml import dump, parse
from jpipe_train import registry
from jpipe_train.config.config import Config, data_class, model_class
from jpipe_train.config.functions.entry_point import IN_PYTHON
from jpipe_train.config.section import AUTO

MOST_BYTES = 2**20  # hundreds of times the size of a long config


def load(
    path: str | Path, overrides: Sequence[str] = (), *, allow_code: bool = False, sections: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """Read the YAML file at `path`, apply the overrides and validate the result.

    An override of `train.epochs` removes `train.steps` of the file, and the other way round. A kind of model can define similar pairs of
    its keys. If a package can read `warm_start.file`, the keys of the config that this file determines (such as the model's sizes) are
    added.

    Args:
        path: the YAML file.
        overrides: replacements of single keys, such as `"train.steps=10"`; the value is YAML.
        allow_code: whether the config may name functions to import and call. A file from a stranger must not run code, so the user has to
            allow this.
        sections: whole sections that replace sections of the file before the overrides apply.

    Raises:
        InputError: the file cannot be read or parsed; a key is unknown, or has a wrong type or value; the config names functions without
            `allow_code`; a key contradicts `warm_start.file`; or a name of a model or of data cannot be found.
    """
    data = _read(path)
    if str(data.get("format")).startswith("jpipe-plan/"):
        raise InputError(f"{path}: expected a config, found a plan; name it as plan.file in a config, or show it with jpipe simulate")
    data |= sections or {}
    overridden: list[str] = []
    for override in overrides:
        _override(data, override, overridden)
    _let_overrides_decide_model(data, overridden)
    _let_override_decide_length(data, overridden)
    where = " ".join([str(path), *(f"--set {override}" for override in overrides)])
    _pin_names(data, where)
    for name in registry.names("sources") if _has_file(data) else ():
        registry.find("sources", name).fill_config(data, where)
    config = _validated(data, where)
    if config.plan.file is not None:
        for override, key in zip(overrides, overridden, strict=True):
            kept = _beside_plan_file(config.plan.file)
            if set(data["plan"]) - {*kept} if key == "plan" else key.startswith("plan.") and key[5:].split(".")[0] not in kept:
                raise InputError(
                    f"--set {override} has no effect with plan.file '{config.plan.file}'; remove this --set, or change the plan file"
                )
    in_python = [key for key, target in config.code.items() if target.startswith(f"{IN_PYTHON}:") and key != "optimizer.name"]
    if in_python:  # evaluating such a run needs no optimizer, so `optimizer.name` may stay
        raise InputError(
            f"{where}: this run was trained from Python (jpipe_train.fit) with objects that its config cannot name; give functions that "
            f"return them: {' '.join(f'--set {key}=module:function' for key in in_python)} --allow-code"
        )
    if config.code and not allow_code:
        named = ", ".join(f"'{target}' ({key})" for key, target in config.code.items())
        raise InputError(
            f"{where}: expected built-in parts only, found functions to import and run: {named}; read their code, and if you trust it "
            "add --allow-code"
        )
    return config


def _pin_names(data: dict[Any, Any], where: str) -> None:
    """Pin names of models and data, such as `hf:owner/name`, to the version of today, or to the version of the run that resumes."""
    found = [each for section in ("data", "warm_start") for each in _with_names(data.get(section), (section,))]
    run = data.get("run") if found else None
    folder = run.get("dir") if isinstance(run, dict) else None
    recorded = expanded(folder, "run.dir") / "config.yaml" if isinstance(folder, str) else None
    earlier = _read(recorded) if recorded is not None and recorded.is_file() else {}
    for holder, keys in found:
        try:
            before = functools.reduce(operator.getitem, keys, earlier)
        except (KeyError, IndexError, TypeError):
            before = None
        name, place = holder[keys[-1]], ".".join(map(str, keys))
        holder[keys[-1]] = registry.scheme_of(name).pin(name, f"{where}: {place}", before if isinstance(before, str) else None)


def _with_names(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the dict or list that holds each name in a section, and the keys that lead to it. Arguments of functions are left out."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(part, str) and registry.scheme_of(part) is not None:
            yield value, (*keys, key)
        elif key != "arguments":
            yield from _with_names(part, (*keys, key))


def _beside_plan_file(file: str) -> tuple[str, ...]:
    """Return the keys of `plan` that a plan file does not replace. A search for a plan (`file: auto`) also uses other keys."""
    return ("file", "max_delay", *(("agree", "links", "slices") if file == AUTO else ()))


def load_resolved(path: Path) -> Config:
    """Read the `config.yaml` of a run, as `to_yaml` wrote it, without importing the functions that it names.

    Raise InputError if the file cannot be read, or is not such a config.
    """
    return _validated(_read(path), str(path))


def _validated(data: dict[Any, Any], where: str) -> Config:
    """Return the config, or raise an InputError that compares unknown keys with the keys of the model's kind and the data's format."""
    try:
        return Config.model_validate(data)
    except pydantic.ValidationError as error:
        keys: type[Config] = Config
        with contextlib.suppress(InputError):  # an unknown kind or format is among the reported mistakes
            model = model_class(data.get("model") or {})
            fields: Any = {"data": data_class(data.get("data") or {}), "model": model, "tune": model.tune_section}
            keys = pydantic.create_model("Config", __base__=Config, **fields)
        raise explain(error, keys, where) from None


def to_yaml(config: Config) -> str:
    """Return the config as YAML with all defaults; `load` reads the same config from it."""
    return dump(record(config))


def record(config: Config) -> dict[str, Any]:
    """Return the config as plain data with all defaults, as in `config.yaml` of a run folder.

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


def _let_overrides_decide_model(data: dict[Any, Any], overridden: Sequence[str]) -> None:
    """Drop keys of the file's section `model` that have lost their effect because the command line changes other keys."""
    model = data.get("model")
    keys = frozenset(key.split(".")[1] for key in overridden if key.startswith("model."))
    if isinstance(model, dict) and keys:
        with contextlib.suppress(InputError):  # an unknown kind is reported with the other mistakes
            data["model"] = model_class(model).with_overrides(model, keys)


def _let_override_decide_length(data: dict[Any, Any], overridden: Sequence[str]) -> None:
    """Drop the file's `train.steps` if the command line sets only `train.epochs`, and the other way round."""
    train = data.get("train")
    for key, other in (("epochs", "steps"), ("steps", "epochs")):
        is_alone = f"train.{key}" in overridden and f"train.{other}" not in overridden
        if is_alone and isinstance(train, dict) and train.get(key) is not None:
            train.pop(other, None)


def _has_file(data: Mapping[Any, Any]) -> bool:
    """Return whether the run starts with parameters from a file."""
    warm_start = data.get("warm_start")
    return isinstance(warm_start, dict) and isinstance(warm_start.get("file"), str)


def _override(data: dict[Any, Any], override: str, overridden: list[str]) -> None:
    """Set `section.key=value` in `data` and append the key to `overridden`; raise InputError if that undoes an earlier override."""
    key, equals, value = override.partition("=")
    *sections, last = key.split(".")
    if not equals or not all([*sections, last]):
        mistake = "an empty name" if equals else "no '='"
        raise InputError(f"--set {override}: expected key=value, such as train.steps=100, found {mistake}")
    for earlier in overridden:
        if f"{earlier}.".startswith(f"{key}."):
            raise InputError(f"--set {override}: expected each key once, found --set {earlier}=… before, which would be lost; keep one")
    overridden.append(key)
    for depth, section in enumerate(sections):
        inner = data.setdefault(section, {})
        if inner is None:  # `run:` with nothing below it
            inner = data[section] = {}
        if not isinstance(inner, dict):
            name = ".".join(sections[: depth + 1])
            raise InputError(f"--set {override}: '{name}' is a value, not a section; set the whole value, as {name}=…")
        data = inner
    data[last] = parse(value, f"--set {override}", "put text with special characters in an extra pair of quotes")


def flat(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return a dict from the dotted keys of a config, as plain data, to their values."""
    inner = {f"{prefix}{key}": value for key, value in config.items()}
    parts = ((flat(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}) for key, value in inner.items())
    return {key: value for part in parts for key, value in part.items()}


def texts_of(config: Mapping[Any, Any]) -> dict[str, str]:
    """Return a dict from the dotted keys of a config to their values as text."""
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in flat(config).items()}
