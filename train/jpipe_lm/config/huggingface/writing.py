"""Write the section `model` as the `config.json` of a folder in Hugging Face's layout, by the table of families."""

import json
from typing import Any

import pydantic

from jpipe import InputError
from jpipe_lm.config.huggingface import labels
from jpipe_lm.config.huggingface.conversion import canonical, json_of, keys_of, schema
from jpipe_lm.config.huggingface.experts import without_losses
from jpipe_lm.config.huggingface.families import ARCHITECTURES, FAMILIES, Family
from jpipe_lm.config.huggingface.parts import Keys
from jpipe_lm.config.model_config import ModelConfig
from jpipe_train.config.model_section import ModelSection

_HEADS = {"classification": "classification", "regression": "classification", "multiple_choice": "multiple_choice"}  # in `Family.judges`
_SHOWN = 3  # families that a message compares with the model


def to_json_keys(model: ModelSection, preferred: str | None = None) -> dict[str, Any]:
    """Return the content of `config.json` for a model, without the dtype.

    A family can express a model if it reads back the same model from what it has written.

    Args:
        model: the section `model`.
        preferred: the architecture to take where several have the model; None: the first in the table.

    Raises:
        InputError: no architecture can express the model; the message names the keys that differ.
    """
    if not isinstance(model, ModelConfig):
        found = f"model.kind {model.kind}" if model.target is None else f"one of '{model.target}'"
        raise InputError(f"--layout huggingface: expected a built-in model, found {found}; leave out --layout")
    keys = model.model_dump()
    keys = canonical(keys | {"max_positions": model.max_positions_used})
    first = ARCHITECTURES.get(preferred or "")
    differences = {family.model_type: _differences(family, keys) for family in ([first] if first else []) + list(FAMILIES)}
    chosen = next((name for name, different in differences.items() if not different), None)
    if chosen is None:
        nearest = sorted(FAMILIES, key=lambda family: _distance(differences[family.model_type]))[:_SHOWN]
        words = "; ".join(f"{family.architectures[0]} has {', '.join(differences[family.model_type])}" for family in nearest)
        raise InputError(f"--layout huggingface: no architecture is this model; the nearest: {words}; leave out --layout")
    family = next(family for family in FAMILIES if family.model_type == chosen)
    architecture = family.architectures[0] if model.head == "language" else family.judges[_HEADS[model.head]]
    return {"architectures": [architecture], "model_type": chosen, **json_of(family, keys), **labels.json_of(keys)}


def _differences(family: Family, keys: Keys) -> list[str]:
    """Return the keys of `model` that change when a family writes the model and reads it back."""
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
    if keys["width"] % keys["heads"]:  # transformers refuses it, even where the config has the head size
        different.append(f"model.heads that divide model.width {keys['width']}, not {keys['heads']}")
    return different


def _distance(different: list[str]) -> tuple[bool, int]:
    """Return the distance of a family from a model: families with comparable keys are closer, then those with fewer differences."""
    return not all(line.startswith("model.") for line in different), len(different)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
