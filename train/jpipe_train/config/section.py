"""Base classes for the sections of a config, and types of keys that several sections share."""

import importlib
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from jpipe.errors import nearest
from jpipe_train.config import entry_point

# The upper limits are far beyond what runs; they keep a typo from counting for hours or out of 32 bits.
MOST_ROWS = 10**9
Count = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Arguments = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


def _usable_path(path: str) -> str:
    """Return the path unchanged, or raise ValueError if no file can have that name."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # an escape in YAML
        raise ValueError(f"{path!a} has a character that no path can have; choose another name") from None
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{path!r} begins with an unknown user's home folder; give the full path") from None
    if "\0" in path:
        raise ValueError(f"{path!r} holds a null character, which no path can have; choose another name")
    return path


FilePath = Annotated[str, Field(min_length=1), AfterValidator(_usable_path)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
AUTO: Final = "auto"  # a plan's file, a size or a token that is chosen when the run starts


class Section(BaseModel):
    """A section with typed keys; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class BuiltIn:
    """A built-in part that a config can name as a `target`.

    Attributes:
        arguments: the schema of its arguments.
        function: the function that makes it, as `module:function`, because this package does not import models.
    """

    arguments: type[Section]
    function: str

    def load(self) -> Callable[..., Any]:
        """Import and return the function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def parse(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Validate the arguments and fill in defaults.

        Args:
            name: the name of the part, for messages.
            arguments: the arguments in the config.

        Raises:
            ValueError: an argument is unknown, missing or invalid.
        """
        try:
            return self.arguments.model_validate(dict(arguments))
        except ValidationError as error:
            first = error.errors()[0]
        key, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            raise ValueError(f"arguments: '{name}' has no '{key}'; {nearest(key, self.arguments.model_fields)}")
        if first["type"] == "missing":
            raise ValueError(f"arguments: '{name}' needs '{key}'; add it")
        raise ValueError(
            f"arguments: {key}: {message}, found {reprlib.repr(first['input'])}; change it" if key else f"arguments: {message}"
        )


class OwnCode(Section):
    """A section that a `target` with `arguments` can replace: a function of the user's, or a part of `built_in` by name."""

    target: str | None = None
    arguments: Arguments = {}

    built_in: ClassVar[Mapping[str, BuiltIn]] = {}

    keeps_meaning: ClassVar[frozenset[str]] = frozenset({"target", "arguments"})  # keys that still apply with a target

    @property
    def is_built_in(self) -> bool:
        """Whether the target is one of `built_in`."""
        return self.target in self.built_in

    @property
    def carries(self) -> bool:
        """Whether the layers carry state for each row from batch to batch, which limits each stage to one replica."""
        return self.is_built_in and getattr(self.parsed, "carries", False)

    @property
    def parsed(self) -> Any:
        """The arguments of a built-in target, with defaults filled in."""
        assert self.target is not None
        return self.built_in[self.target].parse(self.target, self.arguments)

    @field_validator("target")
    @classmethod
    def _names_something(cls, target: str | None) -> str | None:
        if target is None or target in cls.built_in:
            return target
        if ":" in target or not cls.built_in:
            return entry_point.check_form(target)
        raise ValueError(f"expected module:function or one of {', '.join(cls.built_in)}, found {reprlib.repr(target)}")

    @model_validator(mode="after")
    def _arguments_are_its_own(self) -> "OwnCode":
        if self.is_built_in:
            _ = self.parsed
        return self

    @model_validator(mode="after")
    def _no_key_is_ignored(self) -> "OwnCode":
        if self.arguments and self.target is None:
            raise ValueError("arguments are those of a target, and there is none; name one as module:function, or leave them out")
        if self.target is not None and (ignored := sorted(self.model_fields_set - self.keeps_meaning)):
            raise ValueError(f"{', '.join(ignored)} would mean nothing to '{self.target}'; leave it out, or give it in arguments")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_ignored_keys(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        written = {"target", "arguments", *self.model_fields_set} if self.target is not None else set(type(self).model_fields)
        return {key: value for key, value in write(self).items() if key in written}
