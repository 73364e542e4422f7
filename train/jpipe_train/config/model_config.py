"""The section `model` of a config: the built-in family of language models."""

import reprlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from jpipe.errors import nearest
from jpipe_train.config.model import heads
from jpipe_train.config.presets import PRESETS
from jpipe_train.config.section import Count, Section, TargetSection

_LARGEST_TABLE = 2**28
_MOST_SYMBOLS = 10**7
_ENCODER = {"positions": "learned", "norm": "layer", "gated_mlp": False, "bias": True, "tied": True}  # what BERT requires

# Keys that a preset does not decide.
OF_THE_RUN = frozenset({"target", "arguments", "head", "labels", "dropout", "compute_dtype", "attention"})


class RopeScaling(Section):
    """Llama 3's stretching of rotary positions beyond the `original_positions` that a model was first trained with.

    Waves with fewer than `low_frequency_factor` turns within these positions become `factor` times as long, those with more than
    `high_frequency_factor` turns stay, and those between are interpolated.
    """

    factor: Annotated[float, Field(ge=1, le=10**6)]
    low_frequency_factor: Annotated[float, Field(gt=0, le=10**6)]
    high_frequency_factor: Annotated[float, Field(gt=0, le=10**6)]
    original_positions: Count

    @model_validator(mode="after")
    def _low_is_below_high(self) -> "RopeScaling":
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low >= high:
            raise ValueError(f"expected low_frequency_factor below high_frequency_factor, found {low:g} and {high:g}; change one of them")
        return self


class ModelConfig(TargetSection):
    """A language model: `depth` blocks of `width` with `heads` heads over sequences of `seq_len` tokens.

    Parameters are float32 regardless of `compute_dtype`. The default is a GPT over bytes; a `preset` gives the other keys, and explicit
    keys override it. A `target` is a function: `target(**arguments)` returns a model or a `jpipe.LayerStack`; or it is the class of an NNX
    module, whose constructor gets `rngs` and `arguments`. `seq_len` then only applies to the text.
    """

    keeps_meaning: ClassVar[frozenset[str]] = TargetSection.keeps_meaning | {"seq_len"}

    preset: str | None = None
    kind: Literal["decoder", "bert"] = "decoder"
    head: heads.Head = "language"
    labels: heads.Labels = None
    vocab_size: Annotated[int, Field(ge=2, le=_MOST_SYMBOLS)] = 256
    depth: Annotated[int, Field(ge=1, le=1000)] = 4
    width: Annotated[int, Field(ge=1, le=10**6)] = 128
    heads: Count = 4
    kv_heads: Count | None = None
    head_size: Annotated[int, Field(ge=1, le=10**6)] | None = None
    mlp_width: Annotated[int, Field(ge=1, le=10**7)] | None = None
    seq_len: Count = 128
    positions: Literal["learned", "rope"] = "learned"
    max_positions: Count | None = None
    rope_base: Annotated[float, Field(gt=1, le=10**12)] = 10000.0
    rope_scaling: RopeScaling | None = None
    norm: Literal["layer", "rms"] = "layer"
    norm_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-6
    activation: Literal["gelu", "gelu_exact", "silu"] = "gelu"
    gated_mlp: bool = False
    bias: bool = True
    tied: bool = False
    init: Literal["scaled", "normal"] = "scaled"
    attention: Literal["xla", "cudnn"] = "xla"
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def kv_heads_used(self) -> int:
        """The number of key and value heads; by default that of the query heads."""
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
    def label_count(self) -> int | None:
        """The number of labels, if the head tells some apart."""
        return len(self.labels) if isinstance(self.labels, list) else self.labels

    @property
    def max_positions_used(self) -> int:
        """The longest sequence; by default that of the batches."""
        return self.seq_len if self.max_positions is None else self.max_positions

    @field_validator("preset")
    @classmethod
    def _known_preset(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"unknown preset {reprlib.repr(name)}; {nearest(name, PRESETS)}")
        return name

    @model_validator(mode="before")
    @classmethod
    def _merge_preset(cls, data: Any) -> Any:
        """Merge the explicit keys over those of the preset; BERT is tied by default."""
        if not isinstance(data, dict) or data.get("target") is not None:
            return data
        name = data.get("preset")
        preset = dict(PRESETS.get(name, {})) if isinstance(name, str) else {}
        if data.get("positions") == "learned":
            preset = {key: value for key, value in preset.items() if not key.startswith("rope_")}
        merged = {**preset, **data}
        return {"tied": True, **merged} if merged.get("kind") == "bert" else merged

    @model_validator(mode="after")
    def _labels_fit_the_head(self) -> "ModelConfig":
        if self.target is None:
            heads.check(self.head, self.labels)
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelConfig":
        if self.target is not None:
            return self
        if self.head_size is None and self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        if self.heads % self.kv_heads_used:
            raise ValueError(f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}; change one of them")
        if self.positions == "rope" and self.head_size_used % 2:
            raise ValueError(
                f"positions rope turns pairs of numbers, so that it needs heads of even size, found {self.head_size_used} "
                f"({'width / heads' if self.head_size is None else 'head_size'}); change it, or use learned positions"
            )
        return self

    @model_validator(mode="after")
    def _positions_fit(self) -> "ModelConfig":
        if self.target is not None:
            return self
        longest = self.max_positions_used
        if self.seq_len > longest:
            raise ValueError(f"seq_len {self.seq_len} is more than max_positions {longest}; change one of them")
        if self.positions == "learned" and self.width * longest > _LARGEST_TABLE:
            key = "seq_len" if self.max_positions is None else "max_positions"
            raise ValueError(
                f"width {self.width} × {key} {longest} makes a table of positions of more than {_LARGEST_TABLE:,} numbers; lower one"
            )
        if self.positions == "learned":
            usual = type(self).model_fields["rope_base"].default
            for key, value, default in (("rope_base", self.rope_base, usual), ("rope_scaling", self.rope_scaling, None)):
                if value != default:
                    raise ValueError(f"{key} would mean nothing to learned positions; leave it out, or set positions to rope")
        return self

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> "ModelConfig":
        if self.target is not None or self.kind != "bert":
            return self
        for key, required in _ENCODER.items():
            if (value := getattr(self, key)) != required:
                raise ValueError(
                    f"kind bert needs {key} {_as_yaml(required)}, found {_as_yaml(value)}{self._advice_for(key)}, or set kind to decoder"
                )
        if self.kv_heads_used != self.heads:
            raise ValueError(f"kind bert has as many kv_heads as heads, {self.heads}, found {self.kv_heads}{self._advice_for('kv_heads')}")
        return self

    def _advice_for(self, key: str) -> str:
        """Return the advice for a value that does not fit the model's kind."""
        of_preset = key in PRESETS.get(self.preset or "", {}) and PRESETS[self.preset or ""][key] == getattr(self, key)
        return f" of preset {self.preset}; set another preset" if of_preset else "; leave it out"


def _as_yaml(value: object) -> str:
    """Return a value as YAML writes it."""
    return str(value).lower()
