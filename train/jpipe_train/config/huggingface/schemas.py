"""Pydantic schemas of the `config.json` of GPT-2, Llama and BERT, with the keys of the section `model` that each decides."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

HINT = "jpipe's models have nothing else; take another model"

Size = Annotated[int, Field(ge=1, le=10**9)]
Number = Annotated[float, Field(gt=0)]

# Hugging Face's names by jpipe's; the first is written. The tanh of all of these is that of `gelu_new`.
ACTIVATIONS = {"gelu": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_exact": ("gelu", "gelu_python"), "silu": ("silu", "swish")}
Activation = Literal["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "gelu_python", "silu", "swish"]


# Hugging Face's names by jpipe's for Llama 3's scaling.
SCALING = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


class _Json(BaseModel):
    """The keys of `config.json` that matter. Keys without effect here, such as dropout, are ignored; others have one legal value."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    vocab_size: Size
    quantization_config: None = None
    is_decoder: Literal[False] = False
    is_encoder_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False


class Gpt2(_Json):
    """The `config.json` of GPT-2."""

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
    def _heads_divide_width(self) -> "Gpt2":
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
    """The rotary positions: `rope_parameters` of newer configs, `rope_scaling` of older ones.

    A rotation without a type is an error: depending on its version, transformers stops or ignores the scaling.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] | None = None  # the older name of `rope_type`
    rope_theta: Number | None = None
    partial_rotary_factor: Literal[1] | None = None
    factor: Number | None = None
    low_freq_factor: Number | None = None
    high_freq_factor: Number | None = None
    original_max_position_embeddings: Size | None = None

    @model_validator(mode="after")
    def _has_a_type(self) -> "_Rope":
        present = [name for name, value in (dict(self) | (self.model_extra or {})).items() if value is not None]
        unread = [name for name in present if name not in ("rope_theta", "partial_rotary_factor")]
        if unread and self.kind is None:
            raise ValueError(f"expected rope_type beside {unread[0]}, found none; add llama3, or default where nothing is scaled")
        return self

    @property
    def kind(self) -> str | None:
        return self.rope_type or self.type

    def scaling(self, positions: int) -> dict[str, float] | None:
        if self.kind != "llama3":
            return None
        values = {ours: getattr(self, theirs) for ours, theirs in SCALING.items()}
        values["original_positions"] = self.original_max_position_embeddings or positions
        if missing := next((SCALING[ours] for ours, value in values.items() if value is None), None):
            raise ValueError(f"expected {missing} beside rope_type llama3, found none; add it")
        return values


class Llama(_Json):
    """The `config.json` of Llama."""

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
    def _check_consistency(self) -> "Llama":
        if self.attention_bias != self.mlp_bias:
            raise ValueError(
                f"expected attention_bias and mlp_bias to be the same, found {self.attention_bias} and {self.mlp_bias}; {HINT}"
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
        thetas = (rope.rope_theta for rope in (self.rope_parameters, self.rope_scaling) if rope)
        return [theta for theta in (*thetas, self.rope_theta) if theta is not None]

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


class Bert(_Json):
    """The `config.json` of BERT."""

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
    def _heads_divide_width(self) -> "Bert":
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


class Architectures(BaseModel):
    """The key that selects one of the schemas above."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    architectures: Annotated[list[str], Field(min_length=1)]


ARCHITECTURES: dict[str, type[Gpt2 | Llama | Bert]] = {
    "GPT2LMHeadModel": Gpt2,
    "LlamaForCausalLM": Llama,
    "BertForPreTraining": Bert,
    "BertForMaskedLM": Bert,  # often has the next-sentence head, too
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
THEIRS: dict[type[Gpt2 | Llama | Bert], dict[str, str]] = {  # Hugging Face's key by jpipe's
    Gpt2: {
        **{"depth": "n_layer", "width": "n_embd", "heads": "n_head", "mlp_width": "n_inner", "max_positions": "n_positions"},
        "norm_epsilon": "layer_norm_epsilon",
    },
    Llama: {**_SIZES, "rope_base": "rope_theta", "norm_epsilon": "rms_norm_eps"},
    Bert: {**_SIZES, "norm_epsilon": "layer_norm_eps"},
}


def _check_heads(width_key: str, width: int, heads_key: str, heads: int) -> None:
    if width % heads:
        raise ValueError(f"expected {heads_key} to divide {width_key} {width}, found {heads}")


def _sizes(kind: str, vocab_size: int, depth: int, width: int, heads: int) -> dict[str, Any]:
    sizes = {"vocab_size": vocab_size, "depth": depth, "width": width, "heads": heads}
    return {"kind": kind, **sizes, "kv_heads": heads, "head_size": width // heads}


def _ours(activation: str) -> str:
    return next(ours for ours, theirs in ACTIVATIONS.items() if activation in theirs)
