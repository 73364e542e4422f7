"""What sections of a config are made of: their base classes, and the types of keys that several of them have."""

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
    """The path as it is, or an error where no file can have that name."""
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
AUTO: Final = "auto"  # in place of a plan's file, a size or a token: found when the run starts


class Section(BaseModel):
    """Keys with fixed types; others are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class BuiltIn:
    """A built-in part that a config can name as a `target`.

    Attributes:
        arguments: which it has, and what they may be.
        function: that makes it, as `module:function`: text, because this room knows no models.
    """

    arguments: type[Section]
    function: str

    def load(self) -> Callable[..., Any]:
        """The function, imported."""
        module, _, name = self.function.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return found

    def parsed(self, name: str, given: Mapping[str, Any]) -> Any:
        """The arguments, defaults filled in.

        Args:
            name: of the part, for messages.
            given: in the config.

        Raises:
            ValueError: it has no such arguments.
        """
        try:
            return self.arguments.model_validate(dict(given))
        except ValidationError as error:
            wrong = error.errors()[0]
        key, said = ".".join(map(str, wrong["loc"])), wrong["msg"].removeprefix("Value error, ")
        if wrong["type"] == "extra_forbidden":
            raise ValueError(f"arguments: '{name}' has no '{key}'; {nearest(key, self.arguments.model_fields)}")
        if wrong["type"] == "missing":
            raise ValueError(f"arguments: '{name}' needs '{key}'; add it")
        raise ValueError(f"arguments: {key}: {said}, found {reprlib.repr(wrong['input'])}; change it" if key else f"arguments: {said}")


class OwnCode(Section):
    """A section in which a `target` with its `arguments` can replace what the other keys describe: a function of the user's own, or a part
    of `built_in` by name.
    """

    target: str | None = None
    arguments: Arguments = {}

    built_in: ClassVar[Mapping[str, BuiltIn]] = {}

    keeps_meaning: ClassVar[frozenset[str]] = frozenset({"target", "arguments"})  # beside a target

    @property
    def is_built_in(self) -> bool:
        """Whether the target is one of `built_in`."""
        return self.target in self.built_in

    @property
    def carries(self) -> bool:
        """Whether layers carry a state of each row from batch to batch, so that a stage has one replica only: a built-in model may."""
        return self.is_built_in and getattr(self.parsed, "carries", False)

    @property
    def parsed(self) -> Any:
        """The arguments of a built-in target, defaults filled in."""
        assert self.target is not None
        return self.built_in[self.target].parsed(self.target, self.arguments)

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
    def _nothing_is_said_in_vain(self) -> "OwnCode":
        if self.arguments and self.target is None:
            raise ValueError("arguments are those of a target, and there is none; name one as module:function, or leave them out")
        if self.target is not None and (idle := sorted(self.model_fields_set - self.keeps_meaning)):
            raise ValueError(f"{', '.join(idle)} would mean nothing to '{self.target}'; leave it out, or give it in arguments")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_means_nothing(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        said = {"target", "arguments", *self.model_fields_set} if self.target is not None else set(type(self).model_fields)
        return {key: value for key, value in write(self).items() if key in said}
