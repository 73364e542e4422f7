"""What sections of a config are made of: their base classes, and the types of keys that several of them have."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from train.config import entry_point

# The upper limits are far beyond what runs; they keep a typo from counting for hours or out of 32 bits.
MOST_ROWS = 10**9
Count = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Target = Annotated[str, AfterValidator(entry_point.check_form)]
Arguments = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


def _usable_path(path: str) -> str:
    """The path as it is, or an error where no file can have that name."""
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{path!r} begins with an unknown user's home folder; give the full path") from None
    if "\0" in path:
        raise ValueError(f"{path!r} holds a null character, which no path can have; choose another name")
    return path


FilePath = Annotated[str, Field(min_length=1), AfterValidator(_usable_path)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
AUTO = "auto"  # in place of a plan's file, a size or a token: found when the run starts


class Section(BaseModel):
    """Keys with fixed types; others are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OwnCode(Section):
    """A section in which a function of the user's own, `target` called with `arguments`, can replace what the other keys describe."""

    target: Target | None = None
    arguments: Arguments = {}

    keeps_meaning: ClassVar[frozenset[str]] = frozenset({"target", "arguments"})  # beside a target
    families: ClassVar[frozenset[str]] = frozenset()  # each describes by itself what otherwise the other keys do

    @property
    def family(self) -> str | None:
        """The one of `families` that is given."""
        return next((key for key in sorted(self.families) if getattr(self, key) is not None), None)

    @model_validator(mode="after")
    def _nothing_is_said_in_vain(self) -> "OwnCode":
        if self.arguments and self.target is None:
            raise ValueError("arguments are those of a target, and there is none; name one as module:function, or leave them out")
        if self.target is not None and (idle := sorted(self.model_fields_set - self.keeps_meaning)):
            raise ValueError(f"{', '.join(idle)} would mean nothing to '{self.target}'; leave it out, or give it in arguments")
        family = self.family
        others = {key for key in self.model_fields_set if not (key in self.families and getattr(self, key) is None)}
        if self.target is None and family is not None and (idle := sorted(others - {"target", "arguments", family})):
            raise ValueError(f"{', '.join(idle)} would mean nothing beside {family}; leave it out")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_means_nothing(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        said = set(type(self).model_fields)
        if self.target is not None:
            said = {"target", "arguments", *self.model_fields_set}
        elif self.family is not None:
            said = {"target", "arguments", self.family}
        return {key: value for key, value in write(self).items() if key in said}
