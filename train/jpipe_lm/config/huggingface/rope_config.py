"""The rotary positions in `config.json`: `rope_parameters` in newer files, `rope_theta` and `rope_scaling` in older ones."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, model_validator

from jpipe_lm.config.huggingface.parts import FULL, WINDOW, KeyGroup, Keys, Number, Size, agreed
from jpipe_lm.config.model.rope_section import NEEDED, OPTIONAL

NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_positions": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
        "attention_factor": "attention_factor",
        "share": "partial_rotary_factor",
    }
)
"""From jpipe's names to Hugging Face's names of the numbers of a scaling."""

KINDS = ("llama3", "linear", "yarn", "longrope")
_FURTHER = {"yarn": ("mscale", "mscale_all_dim"), "longrope": ("factor",)}  # the attention factor is computed from these
_UNSCALED = ("default", None)
_OF_IMAGES = ("mrope_section", "mrope_interleaved")  # the positions of images; texts have the same position along each axis
_UNTYPED = ("rope_theta", "partial_rotary_factor", *_OF_IMAGES)  # keys that need no type of a scaling


def _kind(name: str | None) -> str | None:
    return "longrope" if name == "su" else name  # the first name of LongRoPE


class Rope(BaseModel):
    """One set of rotary parameters. A scaling without a type is an error, because some versions of transformers would ignore it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    rope_type: str | None = None
    type: str | None = None  # the older name of `rope_type`
    rope_theta: Number | None = None
    partial_rotary_factor: Number | None = None
    mrope_section: list[Size] | None = None
    mrope_interleaved: bool | None = None
    factor: Number | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    original_max_position_embeddings: Size | None = None
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    truncate: bool | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    short_factor: list[Number] | None = None
    long_factor: list[Number] | None = None
    attention_factor: Number | None = None

    @model_validator(mode="after")
    def _has_a_type(self) -> "Rope":
        unread = [name for name, value in self if value is not None and name not in _UNTYPED]
        if unread and self.kind is None:
            raise ValueError(
                f"expected rope_type with {unread[0]}, found none; add rope_type, such as llama3, or default if nothing is scaled"
            )
        agreed("rope_type", [_kind(self.rope_type), _kind(self.type)], None, "type")
        return self

    @property
    def kind(self) -> str | None:
        """The type of the scaling."""
        return _kind(self.rope_type or self.type)

    def scaling(self, where: str, kinds: Sequence[str], original: int) -> dict[str, Any] | None:
        """Return the key `rope_scaling` of `model`; `original` is the number of positions before it, unless the parameters have that."""
        kind = self.kind
        if kind in _UNSCALED:
            return None
        if kind == "dynamic":
            raise ValueError(
                f"{where}.rope_type: dynamic scales positions by the longest row so far, so a row's loss would depend on other rows"
            )
        if kind not in kinds:
            raise ValueError(f"{where}.rope_type: expected {', '.join(map(repr, ('default', *kinds)))}, found {kind!r}")
        values = {ours: getattr(self, NAMES[ours]) for ours in (*NEEDED[kind], *OPTIONAL[kind])}
        if "original_positions" in values:
            values["original_positions"] = values["original_positions"] or original
        if missing := next((NAMES[ours] for ours in NEEDED[kind] if values[ours] is None), None):
            raise ValueError(f"expected {missing} with rope_type {kind}, found none; add {missing}")
        known = {"rope_type", "type", *_UNTYPED, *(NAMES[ours] for ours in values), *_FURTHER.get(kind, ())}
        if unknown := next((name for name, value in self if value is not None and name not in known), None):
            raise ValueError(f"{where}.{unknown}: expected only keys of rope_type {kind}, found {unknown}")
        if "attention_factor" in values and values["attention_factor"] is None:
            values["attention_factor"] = self._attention_factor(kind, values["original_positions"])
        return {"kind": kind, **{key: OPTIONAL[kind].get(key) if value is None else value for key, value in values.items()}}

    def _attention_factor(self, kind: str, original: int) -> float | None:
        """Return the attention factor computed from other keys, or None without them, so that transformers' default is used."""
        if kind == "longrope" and self.factor is not None:
            return math.sqrt(1 + math.log(self.factor) / math.log(original)) if self.factor > 1 else 1.0
        if kind == "yarn" and self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return None

    def growth(self, strength: float) -> float:
        """Return a factor that grows with the logarithm of the scaling's factor."""
        return 0.1 * strength * math.log(self.factor) + 1 if self.factor and self.factor > 1 else 1.0


def rope(
    theta: float = 10_000.0,
    kinds: Sequence[str] = KINDS,
    share: float | None = None,
    original: int | None = None,
    is_needed: bool = False,
    scales_attention: bool = False,
    reads_images: bool = False,
) -> KeyGroup:
    """Return the key group for rotary positions with this default of `rope_theta`.

    Args:
        kinds: the scalings that the family has.
        share: the default of `partial_rotary_factor`, if only a part of each head may be rotated.
        original: the default of the top-level JSON key `original_max_position_embeddings`, if the family has it.
        is_needed: whether `rope_parameters` or `rope_scaling` has to be there, because by default the family has a scaling.
        reads_images: whether there may be keys for the positions of images, which have no effect in texts.
        scales_attention: whether `mscale_all_dim` of a scaling also multiplies the scores of attention (DeepSeek-V3).
    """
    fields: dict[str, tuple[Any, Any]] = {
        "rope_theta": (Number | None, None),
        "rope_scaling": (Rope | None, None),
        "rope_parameters": (Rope | None, None),
        "partial_rotary_factor": (Number | None, None),
        **({} if original is None else {"original_max_position_embeddings": (Size, original)}),
    }

    def read(json: Keys, keys: Keys) -> Keys:
        ropes = {key: json[key] for key in ("rope_parameters", "rope_scaling") if json[key] is not None}
        if is_needed and not ropes:
            raise ValueError("expected rope_parameters or rope_scaling, found none")
        if not reads_images and (key := next((key for rope in ropes.values() for key in _OF_IMAGES if getattr(rope, key)), None)):
            raise ValueError(f"{key}: expected null, found a value")
        first = json.get("original_max_position_embeddings")
        inside = next((rope.original_max_position_embeddings for rope in ropes.values() if rope.original_max_position_embeddings), first)
        if first is not None and inside != first:
            raise ValueError(f"original_max_position_embeddings: expected {inside} as in rope_parameters, found {first}")
        scaling = _scaling(ropes, kinds, first or keys["max_positions"])
        shares = [*(rope.partial_rotary_factor for rope in ropes.values()), json["partial_rotary_factor"]]
        chosen = agreed("partial_rotary_factor", shares, share or 1.0)
        if chosen != 1 and share is None:
            raise ValueError(f"partial_rotary_factor: expected 1, found {chosen:g}")
        base = agreed("rope_theta", [*(rope.rope_theta for rope in ropes.values()), json["rope_theta"]], theta)
        result = {"rope_base": base, "rope_share": chosen, "rope_scaling": scaling}
        growth = next((rope.growth(rope.mscale_all_dim or 0) for rope in ropes.values() if rope.kind not in _UNSCALED), 1.0)
        return result | ({"attention_scale": keys["head_size"] ** -0.5 * growth**2} if scales_attention else {})

    def write(keys: Keys) -> Keys:
        scaling = to_json(keys["rope_scaling"], kinds)
        if scales_attention and scaling and keys["attention_scale"] is not None and scaling.get("factor", 1) > 1:
            growth = math.sqrt(keys["attention_scale"] * math.sqrt(keys["head_size"]))
            scaling["mscale_all_dim"] = round((growth - 1) / (0.1 * math.log(scaling["factor"])), 9)
        parts = {} if share is None else {"partial_rotary_factor": keys["rope_share"]}
        outside = {key: scaling[key] for key in (NAMES["original_positions"],) if scaling and original is not None and key in scaling}
        # transformers before version 5 reads rope_theta and rope_scaling, later versions read rope_parameters
        new = {"rope_type": "default", **(scaling or {}), "rope_theta": keys["rope_base"], **parts}
        return {"rope_theta": keys["rope_base"], "rope_scaling": scaling, "rope_parameters": new, **parts, **outside}

    return KeyGroup(fields, read, write, {"rope_base": "rope_theta", "rope_share": "partial_rotary_factor"})


def _scaling(ropes: Mapping[str, Rope | None], kinds: Sequence[str], original: int) -> dict[str, Any] | None:
    """Return the scaling that all parameters agree on, which JSON keys name. Raise ValueError if they differ."""
    scalings = [rope.scaling(key, kinds, original) for key, rope in ropes.items() if rope is not None]
    if any(scaling != scalings[0] for scaling in scalings):
        raise ValueError("expected equal values in rope_scaling and rope_parameters, found different ones; remove one of them")
    return next(iter(scalings), None)


class _ByLayer(BaseModel):
    """The rotary parameters of layers without and with a window."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    full_attention: Rope | None = None
    sliding_attention: Rope | None = None


def rope_by_layer(theta: float, local: float, kinds: Sequence[str] = KINDS, is_needed: bool = False) -> KeyGroup:
    """Return the key group for rotary positions that differ in layers with a window (Gemma 3 and 4).

    `theta` and `local` are the default bases of layers without and with a window. `is_needed`: as in `rope`.
    """
    fields: dict[str, tuple[Any, Any]] = {
        "rope_theta": (Number | None, None),
        "rope_local_base_freq": (Number | None, None),
        "rope_scaling": (Rope | None, None),
        "rope_parameters": (_ByLayer | None, None),
    }

    def read(json: Keys, keys: Keys) -> Keys:
        if is_needed and (json["rope_parameters"] is None or json["rope_parameters"].full_attention is None):
            raise ValueError("expected rope_parameters.full_attention, found none")
        both = json["rope_parameters"] or _ByLayer()
        outer, inner = both.full_attention or Rope(), both.sliding_attention or Rope()
        if inner.kind not in _UNSCALED:
            raise ValueError(f"rope_parameters.{WINDOW}.rope_type: expected 'default', found {inner.kind!r}")
        ropes = {f"rope_parameters.{FULL}": both.full_attention, "rope_scaling": json["rope_scaling"]}
        scaling = _scaling(ropes, kinds, keys["max_positions"])
        shares = [rope.partial_rotary_factor for rope in (outer, inner) if rope.kind != "proportional"]
        if (share := agreed("partial_rotary_factor", shares, 1.0)) != 1:
            raise ValueError(f"partial_rotary_factor: expected 1, found {share:g}")
        return {
            "rope_base": agreed("rope_theta", [outer.rope_theta, json["rope_theta"]], theta),
            "window_rope_base": agreed("rope_local_base_freq", [inner.rope_theta, json["rope_local_base_freq"]], local),
            "rope_scaling": scaling,
        }

    def write(keys: Keys) -> Keys:
        scaling, base, inner = to_json(keys["rope_scaling"], kinds), keys["rope_base"], keys["window_rope_base"]
        inner = base if inner is None else inner
        full = {"rope_type": "default", **(scaling or {}), "rope_theta": base}
        new = {FULL: full, WINDOW: {"rope_type": "default", "rope_theta": inner}}
        before_5 = {} if is_needed else {"rope_theta": base, "rope_local_base_freq": inner, "rope_scaling": scaling}
        return {"rope_parameters": new, **before_5}

    return KeyGroup(fields, read, write, {"rope_base": "rope_theta", "window_rope_base": "rope_local_base_freq"})


def to_json(scaling: Keys | None, kinds: Sequence[str]) -> dict[str, Any] | None:
    """Return a scaling with the names of transformers; None if there is none, or the family does not support it."""
    if scaling is None or scaling["kind"] not in kinds:
        return None
    values = {NAMES[key]: value for key, value in scaling.items() if key != "kind" and value is not None}
    return {"rope_type": scaling["kind"], **values}
