"""The section `tune` of a config for language models: adapters, and quantized frozen weights."""

from collections.abc import Callable
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from jpipe.errors import nearest
from jpipe_train.config.section import Section
from jpipe_train.config.tune_section import TuneSection, matches_any

PARTS: Final = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "project": ("o_proj",),
    "gate": ("gate_proj",),
    "expand": ("up_proj",),
    "contract": ("down_proj",),
}
"""The linear layers of a block, and the names of their parts in adapters; these are the names in transformers' Llama."""

TARGETS: Final = tuple(name for names in PARTS.values() for name in names)


class LoraConfig(Section):
    """Low-rank adapters (LoRA) of the linear layers of the blocks. All other parameters are frozen.

    A linear layer with an adapter returns x W + (`alpha` / `rank`) · dropout(x) A B. A has `rank` columns, and B has `rank` rows and is
    initially zero. `targets` lists the layers with adapters, out of `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj` and
    `down_proj`; these names are the same for all architectures. null means all of these layers that the model has.
    """

    rank: Annotated[int, Field(ge=1, le=10**5)] = 8
    alpha: Annotated[float, Field(gt=0, le=10**6)] = 8.0
    targets: Annotated[list[str], Field(min_length=1, max_length=len(TARGETS))] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def scale(self) -> float:
        """The factor `alpha` / `rank` of the product A B."""
        return self.alpha / self.rank

    @field_validator("targets")
    @classmethod
    def _known_targets(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if name not in TARGETS:
                raise ValueError(f"unknown layer {name!r}; {nearest(name, TARGETS)}")
        if names is not None and len(set(names)) < len(names):
            raise ValueError(f"expected each layer once, found {names}; keep one of each")
        return names


class TuneConfig(TuneSection):
    """Train only some parameters: adapters (`lora`), or the parameters that the patterns in `freeze` or `train_only` select.

    With `lora`, the adapters and the parameters that match `train_only` are trained. The other parameters are stored in `base_dtype`. If
    `quantize` is set, the kernels of the blocks are stored as 8-bit integers or in the 4-bit format NF4.
    """

    lora: LoraConfig | None = None
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    quantize: Literal["int8", "nf4"] | None = None

    def trained(self) -> Callable[[str], bool] | None:
        """Return a function from the name of a parameter to whether it is trained, or None if all parameters are trained."""
        if self.lora is None:
            return super().trained()
        return lambda name: matches_any(name, self.train_only) or (is_of_adapter(name) and not matches_any(name, self.freeze))

    @model_validator(mode="after")
    def _base_is_frozen(self) -> "TuneConfig":
        if self.lora is None:
            for key in ("base_dtype", "quantize"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} has no effect without lora, which freezes the base weights; remove {key}, or set lora")
        return self


def is_of_adapter(name: str) -> bool:
    """Return whether a name, such as "block_0/qkv/lora/q_proj/a", is the name of a parameter of an adapter."""
    parts = name.split("/")
    return len(parts) >= 5 and parts[-3] == "lora" and parts[-2] in TARGETS
