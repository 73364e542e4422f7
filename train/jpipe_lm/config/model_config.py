"""The section `model` of a config for the built-in language models."""

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from jpipe import InputError
from jpipe.errors import nearest
from jpipe_lm.config.data_config import BYTES, DataConfig
from jpipe_lm.config.model import heads_section
from jpipe_lm.config.model.delta_section import DeltaConfig
from jpipe_lm.config.model.experts_section import ExpertsConfig, replace_all_mlps
from jpipe_lm.config.model.full_section import FullConfig
from jpipe_lm.config.model.latent_section import LatentConfig
from jpipe_lm.config.model.presets import PRESETS
from jpipe_lm.config.model.rope_section import RopeScaling
from jpipe_lm.config.model.temperature_section import TemperatureConfig
from jpipe_lm.config.tune_config import TuneConfig
from jpipe_train.config.model_section import ModelSection
from jpipe_train.config.section import Count
from jpipe_train.config.tune_section import TuneSection, matches_any

if TYPE_CHECKING:
    import jpipe_train.config.config

LOWER = "lower one"
"""The hint of an error about two sizes with a product that is too large."""
_LARGEST_TABLE = 2**28
_MOST_SYMBOLS = 10**7
_MOST_EXPERTS = 10**5
_ENCODER = {  # the values that kind bert requires
    **{"positions": "learned", "norm": "layer", "gated_mlp": False, "bias": True, "tied": True, "window": None, "qk_norm": None},
    **{"post_norms": False, "attention_soft_cap": None, "logits_soft_cap": None, "attention_scale": None, "embed_scale": False},
    **{"experts": None, "sinks": False, "latent": None, "delta": None, "attention_gate": False, "layer_scale": False},
}
_OF_WINDOWS = ("window_kind", "window_layers", "window_rope_base", "full_attention")
_OF_ROPE = ("rope_base", "rope_share", "rope_pairs", "rope_scaling", "rope_layers", "window_rope_base")

# Keys that do not depend on the preset.
OF_THE_RUN = frozenset({"target", "arguments", "head", "labels", "dropout", "compute_dtype", "attention", "products"})

Pattern = Annotated[list[bool], Field(min_length=1, max_length=1000)]
Scale = Annotated[float, Field(gt=0, le=10**6)]


class ModelConfig(ModelSection):
    """A language model with `depth` blocks of width `width` and `heads` heads, for sequences of `seq_len` tokens.

    Parameters are float32 regardless of `compute_dtype`. The default is a GPT over bytes. A `preset` sets the keys of a known model;
    explicit keys override the preset.
    """

    tune_section: ClassVar[type[TuneSection]] = TuneConfig

    preset: str | None = None
    kind: Literal["decoder", "bert"] = "decoder"
    head: heads_section.Head = "language"
    labels: heads_section.Labels = None
    vocab_size: Annotated[int, Field(ge=2, le=_MOST_SYMBOLS)] = 256
    depth: Annotated[int, Field(ge=1, le=1000)] = 4
    width: Annotated[int, Field(ge=1, le=10**6)] = 128
    heads: Count = 4
    kv_heads: Count | None = None
    head_size: Annotated[int, Field(ge=1, le=10**6)] | None = None
    mlp_width: Annotated[int, Field(ge=1, le=10**7)] | None = None
    positions: Literal["learned", "rope", "none"] = "learned"
    max_positions: Count | None = None
    rope_base: Annotated[float, Field(gt=1, le=10**12)] = 10000.0
    rope_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    rope_scaling: RopeScaling | None = None
    rope_layers: Pattern | None = None
    window: Count | None = None
    window_kind: Literal["sliding", "chunks"] = "sliding"
    window_layers: Pattern | None = None
    window_rope_base: Annotated[float, Field(gt=1, le=10**12)] | None = None
    full_attention: FullConfig | None = None
    attention_scale: Scale | None = None
    attention_soft_cap: Scale | None = None
    sinks: bool = False
    attention_gate: bool = False
    attention_temperature: TemperatureConfig | None = None
    latent: LatentConfig | None = None
    delta: DeltaConfig | None = None
    qk_norm: Literal["head", "all", "head_and_values", "after_rope"] | None = None
    norm: Literal["layer", "rms", "rms_plus_one"] = "layer"
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-6
    post_norms: bool = False
    layer_scale: bool = False
    activation: Literal["gelu", "gelu_exact", "silu", "clamped_swiglu"] = "gelu"
    gated_mlp: bool = False
    experts: ExpertsConfig | None = None
    bias: bool | Literal["qkv", "attention"] = True
    embed_scale: bool = False
    tied: bool = False
    logits_soft_cap: Scale | None = None
    init: Literal["scaled", "normal"] = "scaled"
    attention: Literal["auto", "xla", "blockwise", "cudnn", "splash"] = "auto"
    products: Literal["float8"] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def kv_heads_used(self) -> int:
        """The number of key and value heads; by default as many as query heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size_used(self) -> int:
        """The size of a head; by default the width divided by the number of heads."""
        return self.width // self.heads if self.head_size is None else self.head_size

    @property
    def mlp_width_used(self) -> int:
        """The hidden width of the MLP; by default four times the width."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def loss_name(self) -> str:
        """The name of the loss, which follows from the head."""
        return "squared_error" if self.head == "regression" else "cross_entropy"

    @property
    def loss_unit(self) -> str | None:
        """The unit of the loss: nats, if it includes a router loss; otherwise None, because the data determine it."""
        return " nats" if self.has_router_loss else None

    @property
    def computes_in(self) -> str:
        """The dtype that the model computes in if `precision` does not set one."""
        return self.compute_dtype

    @property
    def label_count(self) -> int | None:
        """The number of labels, or None if the head does not distinguish labels."""
        return len(self.labels) if isinstance(self.labels, list) else self.labels

    @property
    def max_positions_used(self) -> int:
        """The length of the longest possible sequence; by default `seq_len`."""
        return self.seq_len if self.max_positions is None else self.max_positions

    @property
    def has_router_loss(self) -> bool:
        """Whether the loss of a microbatch includes a router loss."""
        return self.experts is not None and max(self.experts.balance_loss, self.experts.z_loss) > 0

    @property
    def rotary_size(self) -> int:
        """The number of components of a head that rotate with the position."""
        return int(self.head_size_used * self.rope_share) if self.latent is None else self.latent.rotary

    @property
    def sliding_window(self) -> int | None:
        """The number of positions that a position sees, itself and those before it; None if it sees all before it in its chunk or row."""
        return self.window if self.window_kind == "sliding" else None

    @property
    def value_size(self) -> int:
        """The numbers of a value of one head."""
        return self.head_size_used if self.latent is None else self.latent.values

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """The numbers of outputs of the projection to queries, with their gates, keys and values, unless keys are also the values."""
        q, kv = self.heads * self.head_size_used * (2 if self.attention_gate else 1), self.kv_heads_used * self.head_size_used
        are_values = self.window is None and self.full_attention is not None and self.full_attention.keys_as_values
        return (q, kv) if are_values else (q, kv, kv)

    @property
    def blocks(self) -> "list[ModelConfig]":
        """The config of each block, with patterns along the depth resolved; blocks with equal configs share one object."""
        distinct: list[ModelConfig] = []
        for i in range(self.depth):
            block = self.block(i)
            distinct.append(next((other for other in distinct if other == block), block))
        return distinct

    def block(self, i: int) -> "ModelConfig":
        """Return the config of a block."""
        decided: dict[str, Any] = {"window_layers": None, "window_rope_base": None, "rope_layers": None}
        if self.window is not None and not _at(self.window_layers, i):
            full = self.full_attention
            decided |= {"window": None, **({} if full is None else {"head_size": full.head_size, "kv_heads": full.kv_heads})}
        elif self.window_rope_base is not None:
            decided |= {"rope_base": self.window_rope_base, "rope_scaling": None}
        if not _at(self.rope_layers, i):
            decided |= {"positions": "none", "rope_scaling": None} | ({"qk_norm": None} if self.qk_norm == "after_rope" else {})
        elif self.positions != "none":
            decided |= {"attention_temperature": None}
        if self.experts is not None and not _at(self.experts.layers, i):
            decided |= {"experts": None}
        if self.delta is not None and not _at(self.delta.layers, i):
            decided |= {"delta": None}
        return self.model_copy(update=decided)

    def check_config(self, config: "jpipe_train.config.config.Config") -> None:
        """Check that this section is compatible with the other sections of a config."""
        computes = config.precision.computes
        if computes is not None and self.compute_dtype not in ("float32", computes):
            raise ValueError(f"model.compute_dtype is {self.compute_dtype} and precision.compute {computes}; remove model.compute_dtype")
        if self.attention == "cudnn" and config.computes == "float32":
            raise ValueError("model.attention cudnn computes in bfloat16 or float16, found float32; set model.compute_dtype to bfloat16")
        if self.products is not None and isinstance(config.tune, TuneConfig) and config.tune.lora is not None:
            raise ValueError(f"model.products {self.products} has no effect beside tune.lora; remove one of them")
        if config.data.format == "arrays":
            raise ValueError(
                "data.format arrays needs a model of your own, found a built-in model; set model.target, or read texts with another format"
            )
        if isinstance(config.data, DataConfig) and config.data.read_as == "bytes" and self.vocab_size < BYTES:
            raise ValueError(f"model.vocab_size {self.vocab_size} is less than the {BYTES} bytes of a text; raise or remove it")
        if self.head != "language":
            self._check_head(config)
        if config.loss.name is not None and getattr(config.data, "format", None) != "preferences":
            raise ValueError(
                f"loss.name has no effect without model.target, because model.head determines the loss of a built-in model, found "
                f"{config.loss.name}; remove loss.name, or set data.format to preferences for a loss of preferences"
            )

    def _check_head(self, config: "jpipe_train.config.config.Config") -> None:
        """Check that a head other than `language` is compatible with the other sections of a config."""
        if isinstance(data := config.data, DataConfig) and data.format != "labels":
            raise ValueError(f"model.head {self.head} needs data.format labels, found {data.format}; change one of them")
        if self.head != "multiple_choice" and isinstance(data, DataConfig) and data.is_changed("choices_key"):
            raise ValueError(f"data.choices_key has no effect with model.head {self.head}; remove it, or use multiple_choice")
        if (
            isinstance(config.tune, TuneConfig)
            and config.tune.lora is not None
            and not matches_any("head/score/kernel", config.tune.train_only)
        ):
            raise ValueError(f"tune.lora alone would not train the new model.head {self.head}; add tune.train_only: [head]")
        if config.loss.chunk not in ("auto", None):
            raise ValueError(f"loss.chunk has no effect with model.head {self.head}, which has few logits; remove loss.chunk")

    @classmethod
    def with_overrides(cls, keys: dict[str, Any], overridden: frozenset[str]) -> dict[str, Any]:
        """If `preset` is overridden, drop the other keys of the file's section `model`, except the keys in `OF_THE_RUN`."""
        if "preset" not in overridden or keys["preset"] is None:
            return keys
        return {key: value for key, value in keys.items() if key in overridden | OF_THE_RUN}

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise InputError(f"unknown preset {reprlib.repr(name)}", change=nearest(name, PRESETS))
        return name

    @model_validator(mode="before")
    @classmethod
    def _merge_preset(cls, data: Any) -> Any:
        """Fill in the keys of the preset that are not set explicitly. BERT is tied by default."""
        if not isinstance(data, dict):
            return data
        name = data.get("preset")
        preset = dict(PRESETS.get(name, {})) if isinstance(name, str) else {}
        if data.get("positions") == "learned":
            preset = {key: value for key, value in preset.items() if key not in _OF_ROPE}
        if replace_all_mlps(data.get("experts")):
            preset.pop("mlp_width", None)
        merged = {**preset, **data}
        return {"tied": True, **merged} if merged.get("kind") == "bert" else merged

    @model_validator(mode="after")
    def _labels_fit_the_head(self) -> "ModelConfig":
        heads_section.check(self.head, self.labels)
        return self

    @model_validator(mode="after")
    def _heads_fit(self, info: Any) -> "ModelConfig":
        width, heads, kv_heads = (_shown(info, key) for key in ("width", "heads", "kv_heads"))
        if self.head_size is None and self.width % self.heads:
            raise InputError(f"{width} {self.width} is not divisible by {heads} {self.heads}", change="change one of them")
        if self.heads % self.kv_heads_used:
            raise InputError(f"{heads} {self.heads} is not divisible by {kv_heads} {self.kv_heads}", change="change one of them")
        if self.positions == "rope" and (self.rotary_size % 2 or not self.rotary_size):
            size = "width / heads" if self.head_size is None else "head_size"
            words = "heads of even size" if self.rope_share == 1 else f"an even number of each head (rope_share {self.rope_share:g})"
            raise InputError(
                f"positions rope rotates pairs of numbers, so it needs {words}, found {self.rotary_size} ({size})",
                change="change the size, or use learned positions",
            )
        return self

    @model_validator(mode="after")
    def _positions_fit(self, info: Any) -> "ModelConfig":
        longest, most = self.max_positions_used, _shown(info, "max_positions")
        if self.seq_len > longest:
            raise InputError(f"seq_len {self.seq_len} is more than {most} {longest}", change="change one of them")
        if self.positions == "learned" and self.width * longest > _LARGEST_TABLE:
            width, key = _shown(info, "width"), "seq_len" if self.max_positions is None else most
            raise InputError(
                f"{width} {self.width} × {key} {longest} makes a table of positions of more than {_LARGEST_TABLE:,} numbers",
                change=LOWER,
            )
        return self

    @model_validator(mode="after")
    def _experts_fit(self, info: Any) -> "ModelConfig":
        if self.experts is None:
            return self
        layers = [_at(self.experts.layers, i) for i in range(self.depth)]
        if not any(layers):
            raise InputError(
                f"experts.layers has experts in none of the {self.depth} blocks (depth)",
                change="set one of the first entries to true, or remove experts.layers",
            )
        if all(layers) and self.mlp_width not in (None, self.experts.mlp_width):
            raise InputError(
                f"{_shown(info, 'mlp_width')} {self.mlp_width} has no effect if all blocks have experts, with experts.mlp_width "
                f"{self.experts.mlp_width}",
                change="remove mlp_width",
            )
        if self.experts.count * self.depth > _MOST_EXPERTS:
            depth = f"{_shown(info, 'depth')} {self.depth}"
            raise InputError(f"experts.count {self.experts.count} × {depth} is more than {_MOST_EXPERTS:,} experts", change=LOWER)
        return self

    @model_validator(mode="after")
    def _no_key_is_without_effect(self) -> "ModelConfig":
        fields = type(self).model_fields
        given = [name for name in fields if getattr(self, name) != fields[name].default]
        unused = [name for name in given if self.positions != "rope" and name in _OF_ROPE]
        if unused:
            raise InputError(
                f"{unused[0]} has no effect with {self.positions} positions", change=f"remove {unused[0]}, or set positions to rope"
            )
        unused = [name for name in given if self.window is None and name in _OF_WINDOWS]
        if unused:
            raise InputError(f"{unused[0]} has no effect without a window", change=f"remove {unused[0]}, or set window")
        return self

    @model_validator(mode="after")
    def _attention_is_possible(self) -> "ModelConfig":
        scaling, pairs = self.rope_scaling, self.rotary_size // 2
        for key in ("short_factors", "long_factors"):
            if scaling is not None and (factors := getattr(scaling, key)) is not None and len(factors) != pairs:
                raise InputError(
                    key=f"rope_scaling.{key}",
                    expected=f"{pairs} factors, one for each pair of a head",
                    found=len(factors),
                    change="correct them",
                )
        if self.attention == "cudnn" and self.attention_soft_cap is not None:
            raise InputError("attention cudnn cannot compute attention_soft_cap", change="set attention to xla")
        if (full := self.full_attention) is not None and (self.heads % full.kv_heads or full.head_size % 2):
            raise InputError(
                f"full_attention needs a head_size that is even, and kv_heads that divide heads {self.heads}, found {full.head_size} and "
                f"{full.kv_heads}",
                change="change them",
            )
        if (latent := self.latent) is not None:
            wrong = next(
                (key for key in ("qk_norm", "sinks", "attention_gate", "full_attention") if getattr(self, key)),
                "bias" if has_bias(self.bias, "qkv") else None,
            )
            if wrong or self.positions != "rope" or self.rope_share != 1 or self.kv_heads_used != self.heads:
                found = f"{wrong} {_as_yaml(getattr(self, wrong))}" if wrong else f"{self.positions} positions and {self.kv_heads} kv_heads"
                raise InputError(
                    f"latent needs rope positions, no kv_heads, no rope_share, and no biases or norms of heads, found {found}",
                    change="change them",
                )
            if (most := max(latent.rotary, latent.values)) > self.head_size_used:
                raise InputError(
                    f"latent has {most} numbers of a head, more than head_size {self.head_size_used}", change="raise head_size"
                )
        if self.attention in ("cudnn", "splash") and self.sinks:
            raise InputError(f"attention {self.attention} cannot compute sinks", change="set attention to xla")
        if self.activation == "clamped_swiglu" and not self.gated_mlp:
            raise InputError("activation clamped_swiglu needs gated_mlp", change="set gated_mlp to true, or another activation")
        return self

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> "ModelConfig":
        if self.kind != "bert":
            return self
        for key, required in _ENCODER.items():
            if (value := getattr(self, key)) != required:
                raise InputError(
                    f"kind bert needs {key} {_as_yaml(required)}, found {_as_yaml(value)}{self._preset_of(key)}",
                    change=f"{self._advice_for(key)}, or set kind to decoder",
                )
        if self.kv_heads_used != self.heads:
            words = f"kind bert needs as many kv_heads as heads, {self.heads}, found {self.kv_heads}{self._preset_of('kv_heads')}"
            raise InputError(words, change=self._advice_for("kv_heads"))
        return self

    def _preset_of(self, key: str) -> str:
        """Return words that name the preset if the value of the key comes from the preset, otherwise ""."""
        of_preset = key in PRESETS.get(self.preset or "", {}) and PRESETS[self.preset or ""][key] == getattr(self, key)
        return f" of preset {self.preset}" if of_preset else ""

    def _advice_for(self, key: str) -> str:
        """Return the advice for a value that the model's kind does not allow."""
        return "set another preset" if self._preset_of(key) else "leave it out"


def _shown(info: Any, key: str) -> str:
    """Return the name of a key in messages: that in the context of `info`, if the keys come from a file such as `config.json`."""
    names: Mapping[str, str] = info.context or {}
    return names.get(key, key)


def _as_yaml(value: object) -> str:
    """Return a value as YAML; for a mixture of experts, return "a mixture"."""
    return "null" if value is None else str(value).lower() if isinstance(value, (str, bool, int, float)) else "a mixture"


def _at(pattern: list[bool] | None, layer: int) -> bool:
    """Return a layer's value in a pattern that repeats along the depth; without a pattern it is true."""
    return pattern is None or pattern[layer % len(pattern)]


def has_bias(bias: bool | str, part: Literal["qkv", "project", "mlp"]) -> bool:
    """Return whether a linear layer of a block has a bias, according to the key `bias`."""
    return part in {"qkv": ("qkv",), "attention": ("qkv", "project")}[bias] if isinstance(bias, str) else bias
