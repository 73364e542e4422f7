"""Convert keys of `config.json` to keys of the section `model` and back. A row of the table of families describes the conversion."""

from functools import cache
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict

from jpipe_lm.config.huggingface.experts_config import canonical_experts
from jpipe_lm.config.huggingface.families import COMMON, FAMILIES, Family
from jpipe_lm.config.huggingface.parts import KeyGroup, Keys, shortened
from jpipe_lm.config.model_config import OF_THE_RUN, ModelConfig

_FREE = OF_THE_RUN | {"preset", "seq_len", "init"}  # keys of `model` that `config.json` does not decide


def schema(family: Family) -> type[BaseModel]:
    """Return the schema of the relevant keys of `config.json`; other keys are errors."""
    return _schemas()[family.model_type]


def names_of(family: Family) -> dict[str, str]:
    """Return a dict from keys of `model` to keys of `config.json`, for messages."""
    return {ours: theirs for part in _parts(family) for ours, theirs in part.names.items()}


def keys_of(family: Family, content: BaseModel) -> dict[str, Any]:
    """Return the keys of `model` that `config.json` determines. Raise ValueError if jpipe's layers cannot express the model."""
    json_keys = dict(content)
    keys = {name: field.get_default() for name, field in ModelConfig.model_fields.items() if name not in _FREE} | dict(family.fixed)
    for part in _parts(family):
        keys |= part.read(json_keys, keys)
    if keys["width"] % keys["heads"] and keys["head_size"] is None:
        names = names_of(family)
        raise ValueError(f"expected {names['heads']} to divide {names['width']} {keys['width']}, found {keys['heads']}")
    return canonical(keys)


def json_of(family: Family, keys: Keys) -> dict[str, Any]:
    """Return the keys of `config.json` for the keys of `model`. Keys that the family cannot express are left out."""
    return {key: value for part in _parts(family) for key, value in part.write(keys).items()}


def canonical(keys: Keys) -> dict[str, Any]:
    """Return keys of `model` in a normal form, with dependent defaults filled in, so that equal models have equal keys."""
    same = dict(keys)
    derived = {"kv_heads": keys["heads"], "head_size": keys["width"] // keys["heads"], "mlp_width": 4 * keys["width"]}
    same |= {key: value for key, value in derived.items() if keys[key] is None}
    for key in ("window_layers", "rope_layers"):
        same[key] = shortened(keys[key], keys["depth"])
    same |= canonical_experts(same)
    if same["window"] is None or same["window_layers"] == [False]:
        same |= {"window": None, "window_layers": None, "window_rope_base": None, "full_attention": None, "window_kind": "sliding"}
    if same["attention_scale"] == same["head_size"] ** -0.5:
        same["attention_scale"] = None
    if same["window_rope_base"] == same["rope_base"] and same["rope_scaling"] is None:
        same["window_rope_base"] = None
    return same


def _parts(family: Family) -> tuple[KeyGroup, ...]:
    return *COMMON, *family.parts


@cache
def _schemas() -> dict[str, type[BaseModel]]:
    config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    fields = {family.model_type: {key: kind for part in _parts(family) for key, kind in part.fields.items()} for family in FAMILIES}
    return {name: pydantic.create_model(name, __config__=config, **of_family) for name, of_family in fields.items()}  # type: ignore[call-overload]
