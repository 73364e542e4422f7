"""The section `tune` of a config: which parameters are frozen."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from jpipe_train.config.section import Section

if TYPE_CHECKING:
    import jpipe_train.checkpoint.sources.source

Pattern = Annotated[str, Field(min_length=1, max_length=256)]
Patterns = Annotated[list[Pattern], Field(max_length=256)]


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the name of a parameter, or the name of a layer or module that contains the parameter."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in patterns)


class TuneSection(Section):
    """Train only some parameters. `freeze` or `train_only` selects them with patterns of names.

    A pattern such as `block_*/qkv/kernel` matches the name of a parameter, of a layer (`embed`) or of a module in a layer; `*` matches any
    text, even with a `/`. Parameters that match `freeze`, or that do not match `train_only`, are frozen: they have no gradients and no
    optimizer state. A kind of model can set `tune_section` to a subclass with further keys.
    """

    freeze: Patterns = []
    train_only: Patterns = []

    def trained(self) -> Callable[[str], bool] | None:
        """Return a function from the name of a parameter to whether it is trained, or None if all parameters are trained."""
        if self.freeze:
            return lambda name: not matches_any(name, self.freeze)
        return (lambda name: matches_any(name, self.train_only)) if self.train_only else None

    def check_names(self, names: Sequence[str]) -> None:
        """Check the further keys of a subclass against the names of the model's parameters."""

    def adds(self, name: str) -> bool:
        """Return whether this section adds the parameter `name` to the model. If a warm start lacks it, it is initialized anew."""
        return False

    def whole_names(self, names: list[str]) -> list[str]:
        """Return `names` and, for parameters that this section renames, also their plain names."""
        return names

    def source_for(
        self,
        source: "jpipe_train.checkpoint.sources.source.Source",
        specs: "dict[str, jpipe_train.checkpoint.sources.source.Spec]",
    ) -> "jpipe_train.checkpoint.sources.source.Source":
        """Convert a source of the plain model's parameters to one of the parameters (`specs`) that the model has with this section."""
        return source

    @model_validator(mode="after")
    def _one_choice(self) -> "TuneSection":
        if self.freeze and self.train_only:
            raise ValueError("freeze and train_only: expected one of them, found both; keep one of them")
        return self
