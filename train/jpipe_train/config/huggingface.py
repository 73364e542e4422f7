"""`config.json` of a folder in Hugging Face's layout, read as keys of the section `model` and written from them: data only, no JAX."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_validator

from jpipe import InputError
from jpipe.errors import explain, short
from jpipe.files import expanded, read_text, shown
from jpipe_train.config.config import ModelConfig

CONFIG = "config.json"
MOST_BYTES = 2**20  # of `config.json`, hundreds of times what those of language models have
_HINT = "jpipe's models have nothing else; take another model"
_SMALLER = "jpipe's models are not so large; take a smaller model"

Size = Annotated[int, Field(ge=1, le=10**9)]
Number = Annotated[float, Field(gt=0)]

# Theirs by ours, the name that is written first. The tanh of all of these is that of `gelu_new`.
_ACTIVATIONS = {"gelu": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_exact": ("gelu", "gelu_python"), "silu": ("silu", "swish")}
Activation = Literal["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "gelu_python", "silu", "swish"]


# Theirs by ours of Llama 3's scaling.
_SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


class Found(NamedTuple):
    """What `config.json` says: the architecture, and the keys of `model` that it decides."""

    architecture: str
    keys: dict[str, Any]


class _Json(BaseModel):
    """What matters of `config.json`. Keys that change nothing here, dropout among them, are left aside; others have one legal value."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    vocab_size: Size
    quantization_config: None = None
    is_decoder: Literal[False] = False
    is_encoder_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False


class _Gpt2(_Json):
    n_layer: Size
    n_embd: Size
    n_head: Size
    n_positions: Size
    n_inner: Size | None = None
    activation_function: Activation = "gelu_new"
    layer_norm_epsilon: Number = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    reorder_and_upcast_attn: Literal[False] = False

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "_Gpt2":
        _check_heads("n_embd", self.n_embd, "n_head", self.n_head)
        return self

    def keys(self) -> dict[str, Any]:
        return {
            **_sizes("decoder", self.vocab_size, self.n_layer, self.n_embd, self.n_head),
            "mlp_width": self.n_inner or 4 * self.n_embd,
            "positions": "learned",
            "max_positions": self.n_positions,
            "norm": "layer",
            "norm_epsilon": self.layer_norm_epsilon,
            "activation": _ours(self.activation_function),
            "gated_mlp": False,
            "bias": True,
            "tied": self.tie_word_embeddings,
        }


class _Rope(BaseModel):
    """The rotation of positions: `rope_parameters` of newer configs, `rope_scaling` of older ones.

    Without a type transformers stops, or leaves the scaling out, depending on its version: such a rotation is refused.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] | None = None  # what `rope_type` was called first
    rope_theta: Number | None = None
    partial_rotary_factor: Literal[1] | None = None
    factor: Number | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    original_max_position_embeddings: Size | None = None

    @model_validator(mode="after")
    def _has_a_type(self) -> "_Rope":
        given = [name for name, value in (dict(self) | (self.model_extra or {})).items() if value is not None]
        unread = [name for name in given if name not in ("rope_theta", "partial_rotary_factor")]
        if unread and self.kind is None:
            raise ValueError(f"expected rope_type beside {unread[0]}, found none; add llama3, or default where nothing is scaled")
        return self

    @property
    def kind(self) -> str | None:
        return self.rope_type or self.type

    def scaling(self, positions: int) -> dict[str, float] | None:
        if self.kind != "llama3":
            return None
        values = {ours: getattr(self, theirs) for ours, theirs in _SCALING.items()}
        values["original_positions"] = self.original_max_position_embeddings or positions
        if missing := next((_SCALING[ours] for ours, value in values.items() if value is None), None):
            raise ValueError(f"expected {missing} beside rope_type llama3, found none; add it")
        return values


class _Llama(_Json):
    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    intermediate_size: Size
    max_position_embeddings: Size
    hidden_act: Activation = "silu"
    rms_norm_eps: Number = 1e-6
    rope_theta: Number | None = None
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    partial_rotary_factor: Literal[1] | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> "_Llama":
        if self.attention_bias != self.mlp_bias:
            raise ValueError(
                f"expected attention_bias and mlp_bias to be the same, found {self.attention_bias} and {self.mlp_bias}; {_HINT}"
            )
        if len({scaling and tuple(scaling.items()) for scaling in self._scalings()}) > 1:
            raise ValueError("expected rope_scaling and rope_parameters to say the same, found different ones; leave one of them out")
        if len(set(self._thetas())) > 1:
            raise ValueError("expected one rope_theta, found a different one in rope_parameters; leave one of them out")
        if self.head_dim is None:
            _check_heads("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        return self

    def _scalings(self) -> list[dict[str, float] | None]:
        return [rope.scaling(self.max_position_embeddings) for rope in (self.rope_parameters, self.rope_scaling) if rope]

    def _thetas(self) -> list[float]:
        said = (rope.rope_theta for rope in (self.rope_parameters, self.rope_scaling) if rope)
        return [theta for theta in (*said, self.rope_theta) if theta is not None]

    def keys(self) -> dict[str, Any]:
        heads, width = self.num_attention_heads, self.hidden_size
        return {
            **_sizes("decoder", self.vocab_size, self.num_hidden_layers, width, heads),
            "kv_heads": self.num_key_value_heads or heads,
            "head_size": self.head_dim or width // heads,
            "mlp_width": self.intermediate_size,
            "positions": "rope",
            "max_positions": self.max_position_embeddings,
            "rope_base": next(iter(self._thetas()), 10_000.0),
            "rope_scaling": next(iter(self._scalings()), None),
            "norm": "rms",
            "norm_epsilon": self.rms_norm_eps,
            "activation": _ours(self.hidden_act),
            "gated_mlp": True,
            "bias": self.attention_bias,
            "tied": self.tie_word_embeddings,
        }


class _Bert(_Json):
    num_hidden_layers: Size
    hidden_size: Size
    num_attention_heads: Size
    intermediate_size: Size
    max_position_embeddings: Size
    hidden_act: Activation = "gelu"
    layer_norm_eps: Number = 1e-12
    type_vocab_size: Literal[2] = 2
    position_embedding_type: Literal["absolute"] = "absolute"
    tie_word_embeddings: Literal[True] = True

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "_Bert":
        _check_heads("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        return self

    def keys(self) -> dict[str, Any]:
        return {
            **_sizes("bert", self.vocab_size, self.num_hidden_layers, self.hidden_size, self.num_attention_heads),
            "mlp_width": self.intermediate_size,
            "positions": "learned",
            "max_positions": self.max_position_embeddings,
            "norm": "layer",
            "norm_epsilon": self.layer_norm_eps,
            "activation": _ours(self.hidden_act),
            "gated_mlp": False,
            "bias": True,
            "tied": True,
        }


class _Architectures(BaseModel):
    """What says which of the classes above the rest is."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    architectures: Annotated[list[str], Field(min_length=1)]


ARCHITECTURES: dict[str, type[_Gpt2 | _Llama | _Bert]] = {
    "GPT2LMHeadModel": _Gpt2,
    "LlamaForCausalLM": _Llama,
    "BertForPreTraining": _Bert,
    "BertForMaskedLM": _Bert,  # which often has the next-sentence head all the same
}
_SIZES = {
    "depth": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_width": "intermediate_size",
    "max_positions": "max_position_embeddings",
}
_THEIRS: dict[type[_Gpt2 | _Llama | _Bert], dict[str, str]] = {  # by jpipe's key the one that decides it
    _Gpt2: {
        **{"depth": "n_layer", "width": "n_embd", "heads": "n_head", "mlp_width": "n_inner", "max_positions": "n_positions"},
        "norm_epsilon": "layer_norm_epsilon",
    },
    _Llama: {**_SIZES, "rope_base": "rope_theta", "norm_epsilon": "rms_norm_eps"},
    _Bert: {**_SIZES, "norm_epsilon": "layer_norm_eps"},
}
_MODEL_TYPES = {"GPT2LMHeadModel": "gpt2", "LlamaForCausalLM": "llama", "BertForPreTraining": "bert"}  # of those that are written


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
    architecture = _validated(_Architectures, data, where).architectures[0]
    if architecture not in ARCHITECTURES:
        raise InputError(f"{where}: architectures: expected one of {', '.join(ARCHITECTURES)}, found {short(architecture)}; {_HINT}")
    keys = _validated(ARCHITECTURES[architecture], data, where).keys()
    _validated(ModelConfig, keys | {"seq_len": 1}, where, _THEIRS[ARCHITECTURES[architecture]])
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


def written(model: ModelConfig) -> dict[str, Any]:
    """The content of `config.json` for a model of jpipe's, but for the dtype.

    Raises:
        InputError: no architecture is that model; says which keys differ.
    """
    if model.target is not None:
        raise InputError(f"--layout huggingface: expected a built-in model, found one of '{model.target}'; leave out --layout")
    keys = _keys_of(model)
    differences = {name: _differences(keys, needed(keys)) for name, needed in _NEEDED.items()}
    chosen = next((name for name, different in differences.items() if not different), None)
    if chosen is None:
        nearest = sorted(differences.items(), key=lambda found: len(found[1]))
        words = "; ".join(f"{name} has {', '.join(different)}" for name, different in nearest)
        raise InputError(f"--layout huggingface: no architecture is this model: {words}; leave out --layout")
    return {"architectures": [chosen], "model_type": _MODEL_TYPES[chosen], **_WRITERS[chosen](keys)}


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
    return f"{line}; {_SMALLER if is_size else _HINT}"


def _check_heads(width_key: str, width: int, heads_key: str, heads: int) -> None:
    if width % heads:
        raise ValueError(f"expected {heads_key} to divide {width_key} {width}, found {heads}")


def _sizes(kind: str, vocab_size: int, depth: int, width: int, heads: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "depth": depth, "width": width, "heads": heads}
    return {"kind": kind, **sizes, "kv_heads": heads, "head_size": width // heads}


def _ours(activation: str) -> str:
    return next(ours for ours, theirs in _ACTIVATIONS.items() if activation in theirs)


def _keys_of(model: ModelConfig) -> dict[str, Any]:
    """The keys of `model`, each with the value that it comes to."""
    keys = model.model_dump()
    derived = {
        "kv_heads": model.heads,
        "head_size": model.width // model.heads,
        "mlp_width": 4 * model.width,
        "max_positions": model.seq_len,
    }
    return keys | {key: value for key, value in derived.items() if keys[key] is None}


def _differences(keys: Mapping[str, Any], needed: Mapping[str, Any]) -> list[str]:
    found = [f"model.{key} {json.dumps(value)}, not {json.dumps(keys[key])}" for key, value in needed.items() if keys[key] != value]
    if keys["width"] % keys["heads"]:  # although Llama's config has the size of a head
        found.append(f"model.heads that divide model.width {keys['width']}, not {keys['heads']}")
    return found


def _needed_gpt2(keys: Mapping[str, Any]) -> dict[str, Any]:
    fixed = {"kind": "decoder", "positions": "learned", "norm": "layer", "gated_mlp": False, "bias": True}
    return fixed | {"kv_heads": keys["heads"], "head_size": keys["width"] // keys["heads"]}


def _needed_llama(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "decoder", "positions": "rope", "norm": "rms", "gated_mlp": True}


def _needed_bert(keys: Mapping[str, Any]) -> dict[str, Any]:
    return _needed_gpt2(keys) | {"kind": "bert", "tied": True}


def _gpt2_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": keys["vocab_size"],
        "n_layer": keys["depth"],
        "n_embd": keys["width"],
        "n_head": keys["heads"],
        "n_positions": keys["max_positions"],
        "n_inner": keys["mlp_width"],
        "activation_function": _ACTIVATIONS[keys["activation"]][0],
        "layer_norm_epsilon": keys["norm_epsilon"],
        "tie_word_embeddings": keys["tied"],
    }


def _llama_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    scaling = keys["rope_scaling"]
    rope = {"rope_type": "llama3", **{_SCALING[key]: value for key, value in scaling.items()}} if scaling else None
    return {
        **_transformer_json(keys),
        "num_key_value_heads": keys["kv_heads"],
        "head_dim": keys["head_size"],
        "rms_norm_eps": keys["norm_epsilon"],
        "rope_theta": keys["rope_base"],  # this and the next for transformers before 5, the third for later ones
        "rope_scaling": rope,
        "rope_parameters": {"rope_type": "default", **(rope or {}), "rope_theta": keys["rope_base"]},
        "attention_bias": keys["bias"],
        "mlp_bias": keys["bias"],
        "tie_word_embeddings": keys["tied"],
    }


def _bert_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {**_transformer_json(keys), "layer_norm_eps": keys["norm_epsilon"], "type_vocab_size": 2, "tie_word_embeddings": True}


def _transformer_json(keys: Mapping[str, Any]) -> dict[str, Any]:
    """What Llama's and BERT's have in common."""
    return {
        "vocab_size": keys["vocab_size"],
        "num_hidden_layers": keys["depth"],
        "hidden_size": keys["width"],
        "num_attention_heads": keys["heads"],
        "intermediate_size": keys["mlp_width"],
        "max_position_embeddings": keys["max_positions"],
        "hidden_act": _ACTIVATIONS[keys["activation"]][0],
    }


_NEEDED = {"GPT2LMHeadModel": _needed_gpt2, "LlamaForCausalLM": _needed_llama, "BertForPreTraining": _needed_bert}
_WRITERS = {"GPT2LMHeadModel": _gpt2_json, "LlamaForCausalLM": _llama_json, "BertForPreTraining": _bert_json}
