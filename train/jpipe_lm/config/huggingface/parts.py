"""The parts of a row of the table of families: groups of keys of `config.json` that together decide keys of `model`, and back."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from jpipe import InputError
from jpipe.errors import short

T = TypeVar("T")
Keys = Mapping[str, Any]  # of the section `model`, or of `config.json`

HINT = "jpipe's models have nothing else; take another model"
Size = Annotated[int, Field(ge=1, le=10**9)]
Depth = Annotated[int, Field(ge=1, le=1000)]  # as `model.depth`, before a pattern along it is made
Number = Annotated[float, Field(gt=0)]

# Hugging Face's names by jpipe's; the first is written. All of these approximate tanh like `gelu_new`.
ACTIVATIONS = {"gelu": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_exact": ("gelu", "gelu_python"), "silu": ("silu", "swish")}
Activation = Literal["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "gelu_python", "silu", "swish"]


@dataclass(frozen=True)
class KeyGroup:
    """JSON keys that decide keys of `model` together.

    Attributes:
        fields: type and default of each JSON key; the default ... marks a key that must be there.
        read: returns the keys of `model`, given the JSON keys and the keys of `model` that earlier parts have decided. It raises ValueError
            for what jpipe's layers cannot express.
        write: returns the JSON keys, given all keys of `model`. What they cannot express is left out.
        names: the JSON key of a key of `model`, for messages.
    """

    fields: Mapping[str, tuple[Any, Any]]
    read: Callable[[Keys, Keys], Keys]
    write: Callable[[Keys], Keys]
    names: Mapping[str, str] = field(default_factory=dict)


def one(theirs: str, ours: str, kind: Any, default: Any = ...) -> KeyGroup:
    """Return the part for a JSON key that equals a key of `model`."""
    return KeyGroup({theirs: (kind, default)}, lambda json, _: {ours: json[theirs]}, lambda keys: {theirs: keys[ours]}, {ours: theirs})


def only(theirs: str, *values: Any) -> KeyGroup:
    """Return the part for a JSON key with equivalent legal values, the default first; it is not written."""
    return KeyGroup({theirs: (_one_of(*values), values[0])}, lambda *_: {}, lambda _: {})


def in_json(value: Any) -> str:
    """Return a value as JSON has it, with short texts in single quotes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else short(value)


def _one_of(*legal: Any) -> Any:
    """Return the type of a JSON key with these legal values."""

    def check(value: Any) -> Any:
        if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in legal):
            *others, last = map(in_json, legal)
            raise InputError(expected=f"{', '.join(others)} or {last}" if others else last, found=in_json(value))
        return value

    return Annotated[Any, AfterValidator(check)]


def agreed(name: str, values: Iterable[T | None], default: T, where: str = "rope_parameters") -> T:
    """Return the value on which all known values agree, or the default without any; the message names `where` another value is."""
    known = list(dict.fromkeys(value for value in values if value is not None))
    if len(known) > 1:
        raise ValueError(f"expected one {name}, found a different one in {where}; leave one of them out")
    return known[0] if known else default


def written(theirs: str, value: Any) -> KeyGroup:
    """Return the part for a JSON key with a single legal value, which is also its default; it is written."""
    return KeyGroup({theirs: (_one_of(value), value)}, lambda *_: {}, lambda _: {theirs: value})


def activation(theirs: str, default: str) -> KeyGroup:
    """Return the part for the activation inside the MLP."""

    def read(json: Keys, _: Keys) -> Keys:
        return {"activation": next(ours for ours, names in ACTIVATIONS.items() if json[theirs] in names)}

    return KeyGroup(
        {theirs: (Activation, default)}, read, lambda keys: {theirs: ACTIVATIONS[keys["activation"]][0]}, {"activation": theirs}
    )


def biases(*theirs: str) -> KeyGroup:
    """Return the part for biases: `attention_bias` alone, or with `mlp_bias`."""

    def read(json: Keys, _: Keys) -> Keys:
        attention, mlp = json["attention_bias"], json.get("mlp_bias", False)
        if mlp and not attention:
            raise ValueError("expected attention_bias where mlp_bias is true, found false")
        return {"bias": True if mlp else "attention" if attention else False}

    def write(keys: Keys) -> Keys:
        return {"attention_bias": keys["bias"] in (True, "attention"), "mlp_bias": keys["bias"] is True}

    return KeyGroup(dict.fromkeys(theirs, (bool, False)), read, lambda keys: {key: write(keys)[key] for key in theirs})


def qkv_bias() -> KeyGroup:
    """Return the part for Qwen2-MoE's biases, which only queries, keys and values have."""
    return KeyGroup(
        {"qkv_bias": (bool, True)},
        lambda json, _: {"bias": "qkv" if json["qkv_bias"] else False},
        lambda keys: {"qkv_bias": keys["bias"] == "qkv"},
        {"bias": "qkv_bias"},
    )


def attention_scale() -> KeyGroup:
    """Return the part for Gemma's attention scale, given as its inverse square."""

    def write(keys: Keys) -> Keys:
        scale = keys["attention_scale"]
        number = keys["head_size"] if scale is None else scale**-2
        return {"query_pre_attn_scalar": round(number) if abs(number - round(number)) < 1e-6 * number else number}

    key = "query_pre_attn_scalar"
    return KeyGroup({key: (Number, 256)}, lambda json, _: {"attention_scale": json[key] ** -0.5}, write, {"attention_scale": key})


# Patterns along the depth --------------------------------------------------------------------------------------------------

FULL, WINDOW = "full_attention", "sliding_attention"
Layers = Callable[[Keys, Keys], Sequence[bool]]  # which layers have the window, given JSON keys and keys of `model`


def window(default: int | None) -> KeyGroup:
    """Return the part for a window in all layers."""
    return one("sliding_window", "window", Size | None, default)


def windows(default: int | None, layers: Layers, fields: Mapping[str, tuple[Any, Any]], write: Callable[[Keys], Keys]) -> KeyGroup:
    """Return the part for a window in some layers.

    Args:
        default: the default of `sliding_window`.
        layers: decides which layers have the window, if there are no `layer_types`.
        fields: further JSON keys that `layers` reads. If `use_sliding_window` is among them, it has to be true.
        write: returns them.
    """

    def read(json: Keys, keys: Keys) -> Keys:
        size = json["sliding_window"] if json.get("use_sliding_window", True) else None
        types = json["layer_types"]
        if types is not None and len(types) != keys["depth"]:
            raise ValueError(f"layer_types: expected one for each of the {keys['depth']} layers, found {len(types)}")
        chosen = list(layers(json, keys)) if types is None else [kind == WINDOW for kind in types]
        if size is None and types is not None and any(chosen):
            raise ValueError(f"layer_types: expected no {WINDOW} without a window (sliding_window), found some")
        return {"window": size, "window_layers": chosen}

    def to_json(keys: Keys) -> Keys:
        types = [WINDOW if chosen else FULL for chosen in in_window(keys)]
        return {"sliding_window": keys["window"], "layer_types": types, **write(keys)}

    of_windows = {
        "sliding_window": (Size | None, default),
        "layer_types": (list[Literal["full_attention", "sliding_attention"]] | None, None),
    }
    return KeyGroup({**of_windows, **fields}, read, to_json, {"window": "sliding_window"})


def without_windows() -> KeyGroup:
    """Return the part for `layer_types` without any window; it is not written."""
    return KeyGroup({"layer_types": (list[Literal["full_attention"]] | None, None)}, lambda *_: {}, lambda _: {})


def in_window(keys: Keys) -> list[bool]:
    """Return which layers of a model have a window."""
    return [False] * keys["depth"] if keys["window"] is None else expanded(keys["window_layers"], keys["depth"])


def later_windows() -> KeyGroup:
    """Return the part for Qwen's windows: if enabled, in the layers after the first `max_window_layers`."""

    def write(keys: Keys) -> Keys:
        first = next((i for i, chosen in enumerate(in_window(keys)) if chosen), keys["depth"])
        return {"use_sliding_window": keys["window"] is not None, "max_window_layers": first}

    fields = {"use_sliding_window": (bool, False), "max_window_layers": (Annotated[int, Field(ge=0)], 28)}
    return windows(4096, lambda json, keys: [i >= json["max_window_layers"] for i in range(keys["depth"])], fields, write)


def every_second_window() -> KeyGroup:
    """Return the part for Gemma 2's windows."""
    return windows(4096, lambda _, keys: [i % 2 == 0 for i in range(keys["depth"])], {}, lambda _: {})


def windows_between() -> KeyGroup:
    """Return the part for Gemma 3's windows: one layer in `sliding_window_pattern` has none."""
    fields = {"sliding_window_pattern": (Size, 6)}
    return windows(
        4096, lambda json, keys: [(i + 1) % json["sliding_window_pattern"] != 0 for i in range(keys["depth"])], fields, lambda _: {}
    )


def layers_without_rope() -> KeyGroup:
    """Return the part for SmolLM3's layers without positions; these may have a window."""

    def turns(json: Keys, keys: Keys) -> list[bool]:
        if json["no_rope_layers"] is None:
            return [(i + 1) % json["no_rope_layer_interval"] != 0 for i in range(keys["depth"])]
        if len(json["no_rope_layers"]) < keys["depth"]:
            raise ValueError(
                f"no_rope_layers: expected one number for each of the {keys['depth']} layers, found {len(json['no_rope_layers'])}"
            )
        return [number == 1 for number in json["no_rope_layers"][: keys["depth"]]]

    def write(keys: Keys) -> Keys:
        rope = [int(chosen) for chosen in expanded(keys["rope_layers"], keys["depth"])]
        return {"use_sliding_window": keys["window"] is not None, "no_rope_layers": rope}

    fields = {
        "use_sliding_window": (bool, False),
        "no_rope_layers": (list[Literal[0, 1]] | None, None),  # 1 in layers that have rope
        "no_rope_layer_interval": (Size, 4),
    }
    part = windows(None, lambda json, keys: [not rope for rope in turns(json, keys)], fields, write)
    return KeyGroup(part.fields, lambda json, keys: {**part.read(json, keys), "rope_layers": turns(json, keys)}, part.write, part.names)


def expanded(pattern: Sequence[bool] | None, depth: int) -> list[bool]:
    """Return the value of each layer from a pattern along the depth; without a pattern it is true."""
    return [True] * depth if pattern is None else [pattern[i % len(pattern)] for i in range(depth)]


def shortened(pattern: Sequence[bool] | None, depth: int) -> list[bool] | None:
    """Return the shortest pattern with the same value in each layer, or None if all are true."""
    whole = expanded(pattern, depth)
    if all(whole):
        return None
    return next(whole[:size] for size in range(1, depth + 1) if expanded(whole[:size], depth) == whole)
