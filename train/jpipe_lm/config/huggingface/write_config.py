"""Convert the section `model` to the `config.json` of a folder in Hugging Face's layout."""

import json
from typing import Any

import pydantic

from jpipe import InputError
from jpipe_lm.config.huggingface import labels
from jpipe_lm.config.huggingface.conversion import canonical, json_of, keys_of, schema
from jpipe_lm.config.huggingface.experts_config import without_losses
from jpipe_lm.config.huggingface.families import ARCHITECTURES, FAMILIES, Family
from jpipe_lm.config.huggingface.parts import Keys
from jpipe_lm.config.model_config import ModelConfig
from jpipe_train.config.model_section import ModelSection

_HEADS = {"classification": "classification", "regression": "classification", "multiple_choice": "multiple_choice"}  # in `Family.judges`
_SHOWN = 3  # the number of families that a message compares with the model


def to_json_keys(model: ModelSection, preferred: str | None = None) -> dict[str, Any]:
    """Return the content of `config.json` for a model, without the dtype, in the `preferred` architecture or the first that fits.

    A family can express a model if reading the written content gives the same model. Raise InputError if none can; the message names the
    keys that differ.
    """
    if not isinstance(model, ModelConfig):
        found = f"model.kind {model.kind}" if model.target is None else f"one of '{model.target}'"
        raise InputError(f"--layout huggingface: expected a built-in model, found {found}; remove --layout")
    keys = model.model_dump()
    keys = canonical(keys | {"max_positions": model.max_positions_used})
    first = ARCHITECTURES.get(preferred or "")
    differences = {family.model_type: _differences(family, keys) for family in ([first] if first else []) + list(FAMILIES)}
    chosen = next((name for name, different in differences.items() if not different), None)
    if chosen is None:
        nearest = sorted(FAMILIES, key=lambda family: _distance(differences[family.model_type]))[:_SHOWN]
        words = "; ".join(f"{family.architectures[0]} has {', '.join(differences[family.model_type])}" for family in nearest)
        raise InputError(f"--layout huggingface: no architecture can express this model; the most similar: {words}; remove --layout")
    family = next(family for family in FAMILIES if family.model_type == chosen)
    architecture = family.architectures[0] if model.head == "language" else family.judges[_HEADS[model.head]]
    return {"architectures": [architecture], "model_type": chosen, **json_of(family, keys), **labels.json_of(keys)}


def _differences(family: Family, keys: Keys) -> list[str]:
    """Describe the keys of `model` that would change if a model were written in the form of a family and read again."""
    if keys["head"] != "language" and _HEADS[keys["head"]] not in family.judges:
        return [f"no model.head {keys['head']}"]
    try:
        read = keys_of(family, schema(family).model_validate(json_of(family, keys)))
    except pydantic.ValidationError as error:
        return [f"other values of {', '.join(str(problem['loc'][0]) for problem in error.errors())}"]
    except ValueError as error:
        return [str(error)]
    pairs = {key: [without_losses(side[key]) if key == "experts" else side[key] for side in (read, keys)] for key in read}
    different = [f"model.{key} {_shown(theirs)}, not {_shown(ours)}" for key, (theirs, ours) in pairs.items() if ours != theirs]
    if keys["width"] % keys["heads"]:  # transformers rejects this, even if the file has the head size
        different.append(f"model.heads that divide model.width {keys['width']}, not {keys['heads']}")
    return different


def _distance(different: list[str]) -> tuple[bool, int]:
    """Return a key to sort families by: those with comparable keys come first, then those with fewer differences."""
    return not all(line.startswith("model.") for line in different), len(different)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
