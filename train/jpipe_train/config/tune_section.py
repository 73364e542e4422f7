"""The section `tune` of a config: the parameters that training leaves as they are."""

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
    """Return whether one of the patterns names a parameter, or a layer or a part of one that has it."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in patterns)


class TuneSection(Section):
    """Training of some parameters only: `freeze` and `train_only` say which by patterns of names.

    A pattern such as `block_*/qkv/kernel` is a name of a parameter, of a layer (`embed`) or of a part of one, in which * matches anything,
    / too. Parameters that `freeze` names, or that `train_only` does not name, stay as they are, and cost no gradients and no optimizer
    state. A kind of models can name a subclass as its `tune_section`, with further keys.
    """

    freeze: Patterns = []
    train_only: Patterns = []

    def trained(self) -> Callable[[str], bool] | None:
        """Return a function that says of the name of a parameter whether it is trained; None if all are."""
        if self.freeze:
            return lambda name: not matches_any(name, self.freeze)
        return (lambda name: matches_any(name, self.train_only)) if self.train_only else None

    def check_names(self, names: Sequence[str]) -> None:
        """Check that further keys fit the parameters of the model.

        Raises:
            InputError: they do not.
        """

    def adds(self, name: str) -> bool:
        """Return whether this section adds a parameter to the model, which begins fresh where a warm start does not have it."""
        return False

    def whole_names(self, names: list[str]) -> list[str]:
        """Return the names of parameters, and those in other programs of the parameters that this section changes."""
        return names

    def source_for(
        self,
        source: "jpipe_train.checkpoint.sources.source.Source",
        specs: "dict[str, jpipe_train.checkpoint.sources.source.Spec]",
    ) -> "jpipe_train.checkpoint.sources.source.Source":
        """Return a source of the parameters of the model as one of the parameters that it has with this section, which have `specs`."""
        return source

    @model_validator(mode="after")
    def _one_choice(self) -> "TuneSection":
        if self.freeze and self.train_only:
            raise ValueError("freeze and train_only: expected one of them, found both; keep one of them")
        return self
