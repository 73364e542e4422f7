"""The key `model.rope_scaling`: it extends rotary positions beyond the length of the original training."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_serializer, model_validator

from jpipe import InputError
from jpipe_train.config.section import Count, Section

Factor = Annotated[float, Field(ge=1, le=10**6)]
_Positive = Annotated[float, Field(gt=0, le=10**6)]
_Factors = Annotated[list[_Positive], Field(min_length=1, max_length=10**6)]

NEEDED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "llama3": ("factor", "low_frequency_factor", "high_frequency_factor", "original_positions"),
        "linear": ("factor",),
        "yarn": ("factor", "original_positions"),
        "longrope": ("original_positions", "short_factors", "long_factors"),
        "proportional": ("share",),
    }
)
"""The keys that each kind of scaling needs."""

OPTIONAL: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama3": {},
        "linear": {},
        "yarn": {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None},
        "longrope": {"attention_factor": None},
        "proportional": {},
    }
)
"""The optional keys of each kind of scaling, with their defaults."""


class RopeScaling(Section):
    """A scaling of rotary positions.

    `llama3`: waves with fewer than `low_frequency_factor` turns within `original_positions` become `factor` times as long, waves with more
    than `high_frequency_factor` turns stay, and waves in between are interpolated. `linear`: all waves become `factor` times as long.
    `yarn`: like `llama3`, but the interpolation is along the pairs of a head, from `beta_fast` to `beta_slow` turns; `truncate` rounds the
    two limiting pairs outwards. `longrope`: the wave of each pair is stretched by a factor of its own, from `short_factors` in texts of at
    most `original_positions`, otherwise from `long_factors`. `proportional`: only this `share` of the pairs, the fastest, rotates. `yarn`
    and `longrope` multiply queries and keys by `attention_factor`.
    """

    kind: Literal["llama3", "linear", "yarn", "longrope", "proportional"] = "llama3"
    factor: Factor | None = None
    low_frequency_factor: _Positive | None = None
    high_frequency_factor: _Positive | None = None
    original_positions: Count | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    truncate: bool | None = None
    short_factors: _Factors | None = None
    long_factors: _Factors | None = None
    attention_factor: _Positive | None = None
    share: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        kind = data.get("kind", "llama3") if isinstance(data, dict) else None
        return {**OPTIONAL[kind], **data} if isinstance(kind, str) and kind in OPTIONAL else data

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> "RopeScaling":
        values = {name: value for name, value in self if value is not None and name != "kind"}
        if missing := next((name for name in NEEDED[self.kind] if name not in values), None):
            raise InputError(f"kind {self.kind} needs {missing}, found none", change=f"add {missing}")
        if unknown := next((name for name in values if name not in NEEDED[self.kind] and name not in OPTIONAL[self.kind]), None):
            raise InputError(f"{unknown} has no effect with kind {self.kind}", change=f"remove {unknown}")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        if low is not None and high is not None and low >= high:
            raise InputError(
                expected="low_frequency_factor below high_frequency_factor", found=f"{low:g} and {high:g}", change="change one of them"
            )
        slow, fast = self.beta_slow, self.beta_fast
        if slow is not None and fast is not None and slow >= fast:
            raise InputError(expected="beta_slow below beta_fast", found=f"{slow:g} and {fast:g}", change="change one of them")
        return self

    @model_serializer(mode="wrap")
    def _only_keys_of_the_kind(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in write(self).items() if key in ("kind", *NEEDED[self.kind], *OPTIONAL[self.kind])}
