"""The parts of a row of the table of families: groups of keys of `config.json`, and their conversion to keys of `model` and back."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from jpipe import InputError
from jpipe.errors import short

T = TypeVar("T")
Keys = Mapping[str, Any]  # keys and values of the section `model`, or of `config.json`
HINT = "jpipe's models do not support other values; use another model"
Size = Annotated[int, Field(ge=1, le=10**9)]
Depth = Annotated[int, Field(ge=1, le=1000)]  # the same limit as `model.depth`, because patterns along the depth are created
Number = Annotated[float, Field(gt=0)]

# Hugging Face's names for each of jpipe's; the first is written. The names for gelu all mean the tanh approximation of `gelu_new`.
ACTIVATIONS = {"gelu": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_exact": ("gelu", "gelu_python"), "silu": ("silu", "swish")}
Activation = Literal["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "gelu_python", "silu", "swish"]


@dataclass(frozen=True)
class KeyGroup:
    """A group of JSON keys that together determine keys of `model`."""

    fields: Mapping[str, tuple[Any, Any]]  # the type and the default of each JSON key; the default ... marks a required key.
    # a function of the JSON keys, and of the keys of `model` from earlier groups, that returns keys of `model`. It raises ValueError if
    # jpipe's layers cannot express the values.
    read: Callable[[Keys, Keys], Keys]
    # a function of all keys of `model` that returns the JSON keys. Values that the JSON keys cannot express are left out.
    write: Callable[[Keys], Keys]
    names: Mapping[str, str] = field(default_factory=dict)  # a mapping from keys of `model` to JSON keys, for messages


def one(theirs: str, ours: str, kind: Any, default: Any = ...) -> KeyGroup:
    """Return the group of one JSON key that has the same value as a key of `model`."""
    return KeyGroup({theirs: (kind, default)}, lambda json, _: {ours: json[theirs]}, lambda keys: {theirs: keys[ours]}, {ours: theirs})


def only(theirs: str, *values: Any) -> KeyGroup:
    """Return the group of one JSON key that must have one of the equivalent `values`. The first is the default, which is not written."""
    return KeyGroup({theirs: (_one_of(*values), values[0])}, lambda *_: {}, lambda _: {})


def in_json(value: Any) -> str:
    """Return a value as text like in JSON, but with strings in single quotes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else short(value)


def _one_of(*legal: Any) -> Any:
    """Return a type for a JSON key that accepts only the values in `legal`."""

    def check(value: Any) -> Any:
        if not any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in legal):
            *others, last = map(in_json, legal)
            raise InputError(expected=f"{', '.join(others)} or {last}" if others else last, found=in_json(value))
        return value

    return Annotated[Any, AfterValidator(check)]


def agreed(name: str, values: Iterable[T | None], default: T, where: str = "rope_parameters") -> T:
    """Return the common value of all values that are not None, or the default; raise ValueError if they differ from the one at `where`."""
    known = list(dict.fromkeys(value for value in values if value is not None))
    if len(known) > 1:
        raise ValueError(f"expected one {name}, found a different one in {where}; remove one of them")
    return known[0] if known else default


def written(theirs: str, value: Any, is_needed: bool = False) -> KeyGroup:
    """Return the group of one JSON key with a single legal value, which is written, and is the default unless the key `is_needed`."""
    return KeyGroup({theirs: (_one_of(value), ... if is_needed else value)}, lambda *_: {}, lambda _: {theirs: value})


def activation(theirs: str, default: str) -> KeyGroup:
    """Return the group of the JSON key for the activation in the MLP."""

    def read(json: Keys, _: Keys) -> Keys:
        return {"activation": next(ours for ours, names in ACTIVATIONS.items() if json[theirs] in names)}

    return KeyGroup(
        {theirs: (Activation, default)}, read, lambda keys: {theirs: ACTIVATIONS.get(keys["activation"], "?")[0]}, {"activation": theirs}
    )


def biases(*theirs: str, default: bool = False) -> KeyGroup:
    """Return the group for biases with this default: the JSON key `attention_bias`, alone or with `mlp_bias`."""

    def read(json: Keys, _: Keys) -> Keys:
        attention, mlp = json["attention_bias"], json.get("mlp_bias", False)
        if mlp and not attention:
            raise ValueError("expected attention_bias where mlp_bias is true, found false")
        return {"bias": True if mlp else "attention" if attention else False}

    def write(keys: Keys) -> Keys:
        return {"attention_bias": keys["bias"] in (True, "attention"), "mlp_bias": keys["bias"] is True}

    return KeyGroup(dict.fromkeys(theirs, (bool, default)), read, lambda keys: {key: write(keys)[key] for key in theirs})


def flag(theirs: str, default: bool, ours: str, on: Any, off: Any) -> KeyGroup:
    """Return the group of one JSON key that chooses between two values of a key of `model`."""
    return KeyGroup(
        {theirs: (bool, default)},
        lambda json, _: {ours: on if json[theirs] else off},
        lambda keys: {theirs: keys[ours] == on},
        {ours: theirs},
    )


def attention_scale() -> KeyGroup:
    """Return the group for Gemma's attention scale s; the JSON key has 1 / s²."""

    def write(keys: Keys) -> Keys:
        scale = keys["attention_scale"]
        number = keys["head_size"] if scale is None else scale**-2
        return {"query_pre_attn_scalar": round(number) if abs(number - round(number)) < 1e-6 * number else number}

    key = "query_pre_attn_scalar"
    return KeyGroup({key: (Number, 256)}, lambda json, _: {"attention_scale": json[key] ** -0.5}, write, {"attention_scale": key})


def latents() -> KeyGroup:
    """Return the group for latent attention (DeepSeek-V3)."""
    ours = {"queries": "q_lora_rank", "keys": "kv_lora_rank", "rotary": "qk_rope_head_dim", "values": "v_head_dim"}
    fields: dict[str, tuple[Any, Any]] = {
        "q_lora_rank": (Size | None, 1536),
        "kv_lora_rank": (Size, 512),
        "qk_rope_head_dim": (Size, 64),
        "v_head_dim": (Size, 128),
    }

    def read(json: Keys, _: Keys) -> Keys:
        size, pairs = json["qk_nope_head_dim"] + json["qk_rope_head_dim"], "neighbours" if json["rope_interleave"] else "halves"
        return {"head_size": size, "rope_pairs": pairs, "latent": {key: json[theirs] for key, theirs in ours.items()}}

    def write(keys: Keys) -> Keys:
        if (latent := keys["latent"]) is None:
            return {}
        of_heads = {"qk_nope_head_dim": keys["head_size"] - latent["rotary"], "rope_interleave": keys["rope_pairs"] == "neighbours"}
        return of_heads | {theirs: latent[key] for key, theirs in ours.items()}

    more = {"qk_nope_head_dim": (Size, 128), "rope_interleave": (bool, True)}
    return KeyGroup(fields | more, read, write, {"head_size": "qk_nope_head_dim", "latent": "kv_lora_rank"})


# Patterns along the depth --------------------------------------------------------------------------------------------------

FULL, WINDOW, LINEAR, CHUNKS = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
Layers = Callable[[Keys, Keys], Sequence[bool]]  # a function of JSON keys and keys of `model`: for each layer, whether it has the window


def _chosen(json: Keys, keys: Keys, kind: str, layers: Layers) -> list[bool]:
    """Return for each layer whether it is of this kind: by the JSON key `layer_types` or, without it, by the function `layers`."""
    if (types := json["layer_types"]) is None:
        return list(layers(json, keys))
    if len(types) != keys["depth"]:
        raise ValueError(f"layer_types: expected one type for each of the {keys['depth']} layers, found {len(types)}")
    return [found == kind for found in types]


def window(default: int | None) -> KeyGroup:
    """Return the group for a window in all layers."""
    return one("sliding_window", "window", Size | None, default)


def windows(default: int | None, layers: Layers, fields: Mapping[str, tuple[Any, Any]], write: Callable[[Keys], Keys]) -> KeyGroup:
    """Return the group for a window in some layers; `default` is for `sliding_window`.

    Without `layer_types`, `layers` decides which layers have it, from further JSON keys, its `fields`; `write` returns these from all keys
    of `model`. If `use_sliding_window` is among them, there is a window only if it is true.
    """

    def read(json: Keys, keys: Keys) -> Keys:
        size = json["sliding_window"] if json.get("use_sliding_window", True) else None
        chosen = _chosen(json, keys, WINDOW, layers)
        if size is None and json["layer_types"] is not None and any(chosen):
            raise ValueError(f"layer_types: {WINDOW} needs a window (sliding_window), found none")
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
    """Return the group for `layer_types` in models without windows. The key is not written."""
    return KeyGroup({"layer_types": (list[Literal["full_attention"]] | None, None)}, lambda *_: {}, lambda _: {})


def in_window(keys: Keys) -> list[bool]:
    """Return for each layer of a model whether it has a window."""
    return [False] * keys["depth"] if keys["window"] is None else expanded(keys["window_layers"], keys["depth"])


def later_windows() -> KeyGroup:
    """Return the group for Qwen's windows. If they are enabled, the layers after the first `max_window_layers` have one."""

    def write(keys: Keys) -> Keys:
        first = next((i for i, chosen in enumerate(in_window(keys)) if chosen), keys["depth"])
        return {"use_sliding_window": keys["window"] is not None, "max_window_layers": first}

    fields = {"use_sliding_window": (bool, False), "max_window_layers": (Annotated[int, Field(ge=0)], 28)}
    return windows(4096, lambda json, keys: [i >= json["max_window_layers"] for i in range(keys["depth"])], fields, write)


def every_second_window(default: int = 4096) -> KeyGroup:
    """Return the group for the windows of Gemma 2 and gpt-oss. Every second layer has one, beginning with the first."""
    return windows(default, lambda _, keys: [i % 2 == 0 for i in range(keys["depth"])], {}, lambda _: {})


def windows_between(default: int = 4096) -> KeyGroup:
    """Return the group for the windows of Gemma 3 and 4. All layers have one, except every `sliding_window_pattern`-th layer."""
    fields = {"sliding_window_pattern": (Size, 6)}
    return windows(
        default, lambda json, keys: [(i + 1) % json["sliding_window_pattern"] != 0 for i in range(keys["depth"])], fields, lambda _: {}
    )


class _OfLayer(BaseModel):
    """The keys of a layer without a window in `per_layer_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    head_dim: Size
    num_key_value_heads: Size | None = None


def full_attention() -> KeyGroup:
    """Return the group for the layers without a window of Gemma 4, among them the last one."""
    fields: dict[str, tuple[Any, Any]] = {
        **{"global_head_dim": (Size, 512), "num_global_key_value_heads": (Size | None, None), "attention_k_eq_v": (bool, False)},
        "per_layer_config": (dict[str, _OfLayer] | None, None),
    }

    def read(json: Keys, keys: Keys) -> Keys:
        full = [str(i) for i, has_window in enumerate(in_window(keys)) if not has_window]
        if not full or len(full) == keys["depth"] or full[-1] != str(keys["depth"] - 1):
            raise ValueError(f"layer_types: expected {WINDOW} and {FULL}, the latter in the last layer, found others")
        size, kv_heads = json["global_head_dim"], json["num_global_key_value_heads"] if json["attention_k_eq_v"] else None
        if (layers := json["per_layer_config"]) is not None:
            if set(layers) != set(full) or any(layer != layers[full[0]] for layer in layers.values()):
                raise ValueError("per_layer_config: expected the same keys for each layer without a window, and no others")
            size, kv_heads = layers[full[0]].head_dim, layers[full[0]].num_key_value_heads
        return {
            "full_attention": {
                **{"head_size": size, "kv_heads": kv_heads or keys["kv_heads"], "keys_as_values": json["attention_k_eq_v"]},
            }
        }

    def write(keys: Keys) -> Keys:
        if (full := keys["full_attention"]) is None:
            return {}
        of_layer = {"head_dim": full["head_size"], "num_key_value_heads": full["kv_heads"]}
        return {
            **{"global_head_dim": full["head_size"], "num_global_key_value_heads": full["kv_heads"]},
            "attention_k_eq_v": full["keys_as_values"],
            "per_layer_config": {str(i): of_layer for i, has_window in enumerate(in_window(keys)) if not has_window},
        }

    return KeyGroup(fields, read, write, {"full_attention": "global_head_dim"})


def gated_delta() -> KeyGroup:
    """Return the group for layers with a gated delta rule in place of attention (Qwen3.5)."""
    ours = {"key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_size": "linear_key_head_dim"}
    ours |= {"value_size": "linear_value_head_dim", "convolution": "linear_conv_kernel_dim"}
    defaults = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    fields: dict[str, tuple[Any, Any]] = {
        **{key: (Size, value) for key, value in (defaults | {"linear_conv_kernel_dim": 4}).items()},
        "layer_types": (list[Literal["linear_attention", "full_attention"]] | None, None),
        "full_attention_interval": (Size, 4),
    }

    def read(json: Keys, keys: Keys) -> Keys:
        chosen = _chosen(json, keys, LINEAR, lambda *_: [(i + 1) % json["full_attention_interval"] != 0 for i in range(keys["depth"])])
        layers = shortened(chosen, keys["depth"])
        return {"delta": None if layers == [False] else {**{key: json[theirs] for key, theirs in ours.items()}, "layers": layers}}

    def write(keys: Keys) -> Keys:
        if (delta := keys["delta"]) is None:
            return {"layer_types": [FULL] * keys["depth"]}
        types = [LINEAR if chosen else FULL for chosen in expanded(delta["layers"], keys["depth"])]
        return {"layer_types": types, **{theirs: delta[key] for key, theirs in ours.items()}}

    return KeyGroup(fields, read, write, {"delta": "linear_num_value_heads"})


_OF_ROPE: Mapping[str, tuple[Any, Any]] = {  # 1 in layers that have rope
    "no_rope_layers": (list[Literal[0, 1]] | None, None),
    "no_rope_layer_interval": (Size, 4),
}


def _turns(json: Keys, keys: Keys) -> list[bool]:
    """Return for each layer whether it has rotary positions."""
    if json["no_rope_layers"] is None:
        return [(i + 1) % json["no_rope_layer_interval"] != 0 for i in range(keys["depth"])]
    if len(json["no_rope_layers"]) < keys["depth"]:
        raise ValueError(f"no_rope_layers: expected one number for each of the {keys['depth']} layers, found {len(json['no_rope_layers'])}")
    return [number == 1 for number in json["no_rope_layers"][: keys["depth"]]]


def _no_rope_layers(keys: Keys) -> list[int]:
    return [int(chosen) for chosen in expanded(keys["rope_layers"], keys["depth"])]


def chunks() -> KeyGroup:
    """Return the group for Llama 4's layers: with rotary positions in chunks, or without them and with queries that grow."""
    fields: dict[str, tuple[Any, Any]] = {
        **_OF_ROPE,
        "layer_types": (list[Literal["chunked_attention", "full_attention"]] | None, None),
        **{"attention_chunk_size": (Size | None, 8192), "use_qk_norm": (bool, True)},
        **{"attn_temperature_tuning": (bool, True), "floor_scale": (Size, 8192), "attn_scale": (Number, 0.1)},
    }

    def read(json: Keys, keys: Keys) -> Keys:
        turns = _turns(json, keys)
        chosen = _chosen(json, keys, CHUNKS, lambda *_: turns)
        if json["attention_chunk_size"] is None and any(chosen):
            raise ValueError(f"layer_types: {CHUNKS} needs attention_chunk_size, found none")
        tuned = json["attn_temperature_tuning"] and not all(turns)
        return {
            **{"rope_layers": turns, "window": json["attention_chunk_size"], "window_kind": "chunks"},
            **{"window_layers": chosen, "qk_norm": "after_rope" if json["use_qk_norm"] else None},
            "attention_temperature": {"positions": json["floor_scale"], "scale": json["attn_scale"]} if tuned else None,
        }

    def write(keys: Keys) -> Keys:
        temperature = keys["attention_temperature"]
        scales = {"floor_scale": temperature["positions"], "attn_scale": temperature["scale"]} if temperature else {}
        return {
            **{
                "no_rope_layers": _no_rope_layers(keys),
                "attention_chunk_size": keys["window"],
                "attn_temperature_tuning": bool(temperature),
            },
            **{"layer_types": [CHUNKS if chosen else FULL for chosen in in_window(keys)], "use_qk_norm": keys["qk_norm"] == "after_rope"},
            **scales,
        }

    return KeyGroup(fields, read, write, {"window": "attention_chunk_size"})


def layers_without_rope() -> KeyGroup:
    """Return the group for SmolLM3's layers without rotary positions. These layers may have a window."""

    def write(keys: Keys) -> Keys:
        return {"use_sliding_window": keys["window"] is not None, "no_rope_layers": _no_rope_layers(keys)}

    fields = {"use_sliding_window": (bool, False), **_OF_ROPE}
    part = windows(None, lambda json, keys: [not rope for rope in _turns(json, keys)], fields, write)
    return KeyGroup(part.fields, lambda json, keys: {**part.read(json, keys), "rope_layers": _turns(json, keys)}, part.write, part.names)


def expanded(pattern: Sequence[bool] | None, depth: int) -> list[bool]:
    """Return the value of each layer from a pattern that repeats along the depth. Without a pattern all values are true."""
    return [True] * depth if pattern is None else [pattern[i % len(pattern)] for i in range(depth)]


def shortened(pattern: Sequence[bool] | None, depth: int) -> list[bool] | None:
    """Return the shortest pattern that gives the same value to each layer, or None if all values are true."""
    whole = expanded(pattern, depth)
    if all(whole):
        return None
    return next(whole[:size] for size in range(1, depth + 1) if expanded(whole[:size], depth) == whole)
