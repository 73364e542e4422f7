"""Read the `config.json` of a folder in Hugging Face's layout and convert it to keys of the section `model`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from jpipe import InputError
from jpipe.errors import MISSING, Problem, explain, problems_of, short
from jpipe.files import read_text, shown, unusable
from jpipe_lm.config.huggingface import labels
from jpipe_lm.config.huggingface.conversion import keys_of, names_of, schema
from jpipe_lm.config.huggingface.experts_config import OF_THE_LOSS
from jpipe_lm.config.huggingface.families import ARCHITECTURES, FAMILIES, IGNORED, WITH_IMAGES
from jpipe_lm.config.huggingface.parts import HINT, in_json
from jpipe_lm.config.model.experts_section import replace_all_mlps
from jpipe_lm.config.model.rope_section import RopeScaling
from jpipe_lm.config.model_config import LOWER, ModelConfig
from jpipe_train.registry import located

CONFIG = "config.json"
MOST_BYTES = 2**20  # hundreds of times the usual size of a `config.json`
_SMALLER = "jpipe does not support models of this size; use a smaller model"
_UNKNOWN = "jpipe does not know whether this key changes the model; if it does not, remove it, otherwise use another model"
_DERIVED = ("kv_heads", "head_size", "mlp_width", "max_positions")  # if these keys of `model` are null, other keys determine them


class Description(NamedTuple):
    """The architecture in `config.json`, and the keys of `model` that the file determines."""

    architecture: str
    keys: dict[str, Any]


def is_folder(path: str) -> bool:
    """Return whether the path is a folder in Hugging Face's layout."""
    try:
        return unusable(path) is None and (located(path, "warm_start.file") / CONFIG).is_file()
    except OSError:  # reported when the folder is read
        return False


def read(folder: Path) -> Description:
    """Read the model that `config.json` of a folder describes.

    Raise InputError if it cannot be read, its architecture is not supported, or jpipe's layers cannot express the model.
    """
    path = folder / CONFIG
    return parse(load_json(path, MOST_BYTES), shown(path))


def parse(data: Any, where: str = "config.json") -> Description:
    """Return the model that the content of `config.json` describes."""
    architecture = validated(_Architectures, data, where).architectures[0]
    if architecture in WITH_IMAGES:
        of_text, where = data.get("text_config"), f"{where}: text_config"
        if not isinstance(of_text, dict):
            raise InputError(f"{where}: expected the keys of the language model of {architecture}, found {short(of_text)}; {HINT}")
        tied = {key: data[key] for key in ("tie_word_embeddings",) if key in data}
        architecture, data = WITH_IMAGES[architecture], {**of_text, **tied}
    if architecture not in ARCHITECTURES:
        known = ", ".join(family.architectures[0] for family in FAMILIES)
        raise InputError(
            f"{where}: architectures: expected one of {known}, or a model of the same family, found {short(architecture)}; {HINT}"
        )
    family = ARCHITECTURES[architecture]
    json_keys = validated(schema(family), {key: value for key, value in data.items() if key not in IGNORED | family.ignored}, where)
    about_labels = {} if architecture in family.architectures else data
    try:
        keys = keys_of(family, json_keys) | labels.keys_of(family, architecture, validated(labels.SCHEMA, about_labels, where))
    except ValueError as error:
        raise InputError(*map(_advised, problems_of(error))).at(where) from None
    validated(ModelConfig, whole_section(keys), where, names_of(family))
    return Description(architecture, keys)


def whole_section(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Add values for keys that a folder never determines: the length of a row, and the number of choices in an example."""
    return {"seq_len": 1, **({"labels": 2} if keys.get("head") == "multiple_choice" else {}), **keys}


class _Architectures(BaseModel):
    """The key that selects a family."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    architectures: Annotated[list[str], Field(min_length=1)]


def fill_section(section: Mapping[str, Any], folder: Path, where: str, partial: bool) -> dict[str, Any]:
    """Return the section `model` with the keys that a folder in Hugging Face's layout determines.

    Keys may contradict the folder only if it is `partial`; then only parameters that match are read from it later. Raise InputError if they
    do, or as in `read`.
    """
    keys, file = read(folder).keys, shown(folder / CONFIG)
    section, keys = _with_router_losses(section, keys)
    if section.get("target") is not None:
        raise InputError(f"{where}: model.target: expected the built-in model that {file} describes, found {short(section['target'])}")
    explicit = {key: _normal(key, value) for key, value in section.items() if value is not None or (key in keys and _says_none(key))}
    if partial:
        unused = {"mlp_width": None} if replace_all_mlps(explicit.get("experts")) else {}
        return {**section, **keys, **unused, **explicit}
    if "labels" in keys and explicit.get("labels") is not None:
        keys["labels"] = labels.agreed(keys["labels"], explicit["labels"])
        explicit["labels"] = labels.agreed(explicit["labels"], keys["labels"])
    lines = [
        f"{where}: model.{key}: expected {json.dumps(keys[key])} as in {file}, found {short(explicit[key])}; remove model.{key}"
        for key in keys
        if key in explicit and explicit[key] != keys[key]
    ]
    if "preset" in explicit:
        lines.append(f"{where}: model.preset has no effect, because {file} describes the model; remove model.preset")
    if lines:
        raise InputError(*lines)
    return {**section, **keys}


def _with_router_losses(section: Mapping[str, Any], keys: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return the section with all keys of `experts`, and the folder's keys with the section's loss factors."""
    ours, theirs = section.get("experts"), keys["experts"]
    if not isinstance(ours, dict) or theirs is None:
        return section, keys
    chosen = {key: value for key, value in ours.items() if key in OF_THE_LOSS}
    return {**section, "experts": {**theirs, **ours}}, {**keys, "experts": {**theirs, **chosen}}


def _says_none(key: str) -> bool:
    """Return whether null is a real value of a key of `model`. For some keys it means that other keys determine the value."""
    return key not in _DERIVED and ModelConfig.model_fields[key].get_default() is None


def _normal(key: str, value: Any) -> Any:
    """Fill in the defaults of a rope scaling, for comparison. Other values, and invalid ones, are returned unchanged."""
    if key != "rope_scaling" or not isinstance(value, dict):
        return value
    try:
        return RopeScaling.model_validate(value).model_dump()
    except pydantic.ValidationError:  # reported when the section is validated
        return value


def load_json(path: Path, most: int) -> dict[str, Any]:
    """Read the object in an untrusted JSON file.

    Raise InputError if the file cannot be read, is larger than `most` bytes, or is not a JSON object.
    """
    where, hint = shown(path), "give a folder such as transformers' save_pretrained writes"
    text = read_text(path, most, f"{where}: cannot read the file", hint, f"{where}: expected JSON in UTF-8, found other bytes; {hint}")
    try:
        content = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise InputError(f"{where}: expected JSON, found too many nested lists; {hint}") from None
    except ValueError as error:
        raise InputError(f"{where}: expected JSON, found: {error}; {hint}") from None
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected a JSON object, found {'a list' if isinstance(content, list) else short(content)}; {hint}")
    return content


def inside(folder: Path, name: str) -> Path:
    """Resolve the links of a file in a folder that may be untrusted.

    Links may lead to the blobs of a Hugging Face download, but nowhere else outside the folder. Raise InputError if they do, or if the file
    does not exist or is not a regular file.
    """
    path = folder / name
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError:
        raise InputError(f"{shown(path)}: expected a file, found none; download the whole folder again") from None
    except (OSError, RuntimeError) as error:
        raise InputError(f"{shown(path)}: cannot find the file: {getattr(error, 'strerror', None) or error}") from None
    allowed = [folder.resolve()]
    if allowed[0].parent.name == "snapshots":  # models--owner--name/snapshots/REVISION links to models--owner--name/blobs
        allowed.append(allowed[0].parent.parent / "blobs")
    if not any(target.is_relative_to(parent) for parent in allowed):
        raise InputError(f"{shown(path)}: expected a file inside the folder, found a link to {target}; replace the link by the file")
    if not target.is_file():
        raise InputError(f"{shown(path)}: expected a regular file, found none; download it again")
    return target


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


_Model = TypeVar("_Model", bound=BaseModel)


def validated(model: type[_Model], data: Any, where: str, theirs: Mapping[str, str] | None = None) -> _Model:
    """Validate untrusted JSON. Raise InputError if the content is invalid; the message uses Hugging Face's names."""
    try:
        return model.model_validate(data, context=theirs)
    except pydantic.ValidationError as error:
        names = {f"{where}.{ours}": f"{where}: {name}" for ours, name in (theirs or {}).items()}
        raise InputError(*map(_advised, explain(error, model, where, in_json).problems)).renamed(names) from None


def _advised(problem: Problem) -> Problem:
    """Return a problem in a model's file with a hint about what to do, because jpipe may not support the model."""
    if problem.change == MISSING:
        return problem
    if problem.what.startswith("unknown key"):
        return problem._replace(change=_UNKNOWN)
    is_size = problem.change == LOWER or problem.expected.startswith("less than or equal to")
    return problem._replace(change=_SMALLER if is_size else HINT)
