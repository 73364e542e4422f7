"""Read the `config.json` of a folder in Hugging Face's layout as keys of the section `model`."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import pydantic
from pydantic import BaseModel

from jpipe import InputError
from jpipe.errors import explain, short
from jpipe.files import expanded, read_text, shown
from jpipe_train.config.config import ModelConfig
from jpipe_train.config.huggingface.schemas import ARCHITECTURES, HINT, THEIRS, Architectures

CONFIG = "config.json"
MOST_BYTES = 2**20  # of `config.json`, hundreds of times what those of language models have
_SMALLER = "jpipe's models are not so large; take a smaller model"


class Found(NamedTuple):
    """What `config.json` says: the architecture, and the keys of `model` that it decides."""

    architecture: str
    keys: dict[str, Any]


def is_folder(path: str) -> bool:
    """Whether the path is a folder in Hugging Face's layout."""
    try:
        return (expanded(path, "folder") / CONFIG).is_file()
    except (InputError, OSError):  # whoever needs the folder reports it
        return False


def read(folder: Path) -> Found:
    """What `config.json` of a folder says of the model.

    Raises:
        InputError: it cannot be read, its architecture is not there, or it describes a model that jpipe's layers cannot be.
    """
    path = folder / CONFIG
    return described(load_json(path, MOST_BYTES), shown(path))


def described(data: Any, where: str = "config.json") -> Found:
    """The same for the content of the file."""
    architecture = _validated(Architectures, data, where).architectures[0]
    if architecture not in ARCHITECTURES:
        raise InputError(f"{where}: architectures: expected one of {', '.join(ARCHITECTURES)}, found {short(architecture)}; {HINT}")
    keys = _validated(ARCHITECTURES[architecture], data, where).keys()
    _validated(ModelConfig, keys | {"seq_len": 1}, where, THEIRS[ARCHITECTURES[architecture]])
    return Found(architecture, keys)


def filled(section: Mapping[str, Any], folder: Path, where: str, partial: bool) -> dict[str, Any]:
    """The section `model` as the user gave it, with the keys that the folder decides.

    Args:
        section: as it was given.
        folder: in Hugging Face's layout.
        where: the source of the section, for messages.
        partial: keys may say something else than the folder; what then fits is taken.

    Raises:
        InputError: as `read`; keys that say something else than the folder.
    """
    keys, file = read(folder).keys, shown(folder / CONFIG)
    if section.get("target") is not None:
        raise InputError(f"{where}: model.target: expected the built-in model, as {file} describes one, found {short(section['target'])}")
    given = {key: value for key, value in section.items() if value is not None or key == "rope_scaling"}
    if partial:
        return {**section, **keys, **given}
    lines = [
        f"{where}: model.{key}: expected {json.dumps(keys[key])} as in {file}, found {short(given[key])}; leave it out"
        for key in keys
        if key in given and given[key] != keys[key]
    ]
    if "preset" in given:
        lines.append(f"{where}: model.preset would say what {file} says; leave it out")
    if lines:
        raise InputError(*lines)
    return {**section, **keys}


def load_json(path: Path, most: int) -> dict[str, Any]:
    """The object in a JSON file that may be a stranger's.

    Raises:
        InputError: it cannot be read, is larger than `most` bytes, or is no object of JSON.
    """
    where, hint = shown(path), "give a folder such as transformers' save_pretrained writes"
    text = read_text(path, most, f"{where}: cannot read it", hint, f"{where}: expected JSON in UTF-8, found other bytes; {hint}")
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InputError(f"{where}: expected JSON, found lists in lists too deep to read; {hint}") from None
    except ValueError as error:
        raise InputError(f"{where}: expected JSON, found: {error}; {hint}") from None
    if not isinstance(found, dict):
        raise InputError(f"{where}: expected an object of JSON, found {'a list' if isinstance(found, list) else short(found)}; {hint}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


_Model = TypeVar("_Model", bound=BaseModel)


def _validated(model: type[_Model], data: Any, where: str, theirs: Mapping[str, str] | None = None) -> _Model:
    """An instance of `model`; messages have the names of `theirs`, by jpipe's."""
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        lines = (line.removeprefix(f"{where}: ") for line in explain(error, model, where).args)
        raise InputError(*(f"{where}: {_told(line, theirs or {})}" for line in lines)) from None


def _told(line: str, theirs: Mapping[str, str]) -> str:
    """What is wrong, in the words of `config.json`, and what to do about it."""
    if line.endswith("is missing; add it"):
        return line
    if theirs:  # and so the line may end with what to change in a config of jpipe's
        line = re.sub(rf"\b({'|'.join(theirs)})(?=: | \d)", lambda part: theirs[part[0]], line.partition("; ")[0])
    is_size = re.search("expected less than or equal to|of more than", line) is not None
    return f"{line}; {_SMALLER if is_size else HINT}"
