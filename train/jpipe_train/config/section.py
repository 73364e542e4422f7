"""Base classes for the sections of a config, and types of keys that several sections share."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_serializer,
    model_validator,
)

from jpipe.files import unusable
from jpipe_train.config.functions import entry_point

# The upper limits are far larger than any real run needs. They catch typos that would run for hours or overflow 32 bits.
MOST_ROWS = 10**9
Count = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Arguments = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


def as_python(value: Any) -> Any:
    """Convert a NumPy scalar to a Python scalar; return any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _usable_path(path: str) -> str:
    """Return the path unchanged, or raise ValueError if it cannot be the name of a file."""
    if problem := unusable(path):
        raise ValueError(problem)
    return path


FilePath = Annotated[str, Field(min_length=1), AfterValidator(_usable_path)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
AUTO: Final = "auto"  # for a key with a value that is chosen when the run starts


class Section(BaseModel):
    """A section with typed keys; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _with_numbers_of_python(cls, keys: Any) -> Any:
        """Accept NumPy scalars, which a program may pass to `jpipe_train.fit`."""
        if not isinstance(keys, dict):
            return keys
        return {key: as_python(value) for key, value in keys.items()}


class TargetSection(Section):
    """A section that has either its own keys, or a `target` (a user's function) and its `arguments`."""

    target: str | None = None
    arguments: Arguments = {}

    keeps_meaning: ClassVar[frozenset[str]] = frozenset({"target", "arguments"})  # keys that still apply with a target

    @field_validator("target")
    @classmethod
    def _names_something(cls, target: str | None) -> str | None:
        return None if target is None else entry_point.check_form(target)

    @model_validator(mode="before")
    @classmethod
    def _no_key_is_ignored(cls, keys: Any) -> Any:
        if not isinstance(keys, dict) or (target := keys.get("target")) is None:
            return keys
        if ignored := sorted(str(key) for key in keys.keys() - cls.keeps_meaning):
            verb, them = ("has", "it") if len(ignored) == 1 else ("have", "them")
            raise ValueError(f"{', '.join(ignored)} {verb} no effect with '{target}'; remove {them}, or move {them} below arguments")
        return keys

    @model_validator(mode="after")
    def _arguments_have_a_target(self) -> "TargetSection":
        if self.arguments and self.target is None and getattr(self, "name", None) is None:  # a loss has a name in place of a target
            raise ValueError("arguments has no effect without target; set target to module:function, or remove arguments")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_ignored_keys(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        written = {"target", "arguments", *self.model_fields_set} if self.target is not None else set(type(self).model_fields)
        return {key: value for key, value in write(self).items() if key in written}


def without_others(keys: Mapping[str, Any], own: type[Section], others: Iterable[type[Section]]) -> dict[str, Any]:
    """Return the keys of a section, except those that only classes in `others` have and that are set to their defaults.

    Earlier versions wrote the keys of all kinds and formats into `config.yaml`.
    """
    unknown = keys.keys() - own.model_fields.keys()
    if not unknown:
        return dict(keys)
    defaults = {key: other.model_fields[key].get_default() for other in others for key in unknown & other.model_fields.keys()}
    return {key: value for key, value in keys.items() if key not in defaults or value != defaults[key]}
