"""The section `model` of a config: the keys and methods that all kinds of models share."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jpipe_train.config.section import Count, TargetSection
from jpipe_train.config.tune_section import TuneSection

if TYPE_CHECKING:
    import jpipe
    import jpipe_train.config.config
    import jpipe_train.config.data_section

KIND = "decoder"
"""The kind of model that a config means if it names none."""
Limit = tuple[int, int, str]
"""The smallest and the largest legal value, and the reason for these limits."""


class ModelSection(TargetSection):
    """The model of a run. It has a `kind` that an installed package adds, or a `target`.

    A kind is a subclass with keys of its own and a method `build_layers`. A `target` is a function: `target(**arguments)` returns a model
    or a `jpipe.LayerStack`. It can also be the class of an NNX module; the constructor gets `rngs` and `arguments`. If the data are text,
    `seq_len` is the number of tokens in a row. `tune_section` is the class of the section `tune` for models of this kind.
    """

    keeps_meaning: ClassVar[frozenset[str]] = TargetSection.keeps_meaning | {"seq_len"}
    tune_section: ClassVar[type[TuneSection]] = TuneSection

    kind: str = KIND
    seq_len: Count = 128

    def build_layers(self, config: "jpipe_train.config.config.Config", inputs: Callable[[], Any] | None) -> "jpipe.LayerStack":
        """Return the layers of the model.

        Args:
            config: the config of the run.
            inputs: a function that returns the inputs of a batch, or their shapes and dtypes; None if the inputs are not known yet.

        Raises:
            InputError: the model cannot be built with the values of the keys.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method build_layers")

    @classmethod
    def with_overrides(cls, keys: dict[str, Any], overridden: frozenset[str]) -> dict[str, Any]:
        """Return `keys` of a config file without keys that lose their effect because the command line sets the `overridden` ones."""
        return keys

    def check_config(self, config: "jpipe_train.config.config.Config") -> None:
        """Check that this section is compatible with the other sections of a config.

        Raise ValueError if the sections contradict each other.
        """

    def check_plan(self, plan: "jpipe.Plan") -> None:
        """Check that the meshes of a plan can divide the model. Rules that follow from the shapes of the parameters are checked elsewhere.

        Raise InputError if a mesh cannot divide the model.
        """

    def remarks(self, config: "jpipe_train.config.config.Config") -> list[str]:
        """Return lines to print before the run."""
        return []

    def extra_metrics(self) -> Mapping[str, Any]:
        """Return additional metrics for each evaluation: functions of the outputs; lower values are better.

        With additional metrics, the outputs are a dict with the key "tokens".
        """
        return {}

    def input_limits(self) -> Mapping[str, Limit]:
        """Return the legal values of the input arrays of a batch; the keys are the names of the arrays, or "" for a single array."""
        return {}

    def knows(self, data: "jpipe_train.config.data_section.DataSection") -> bool:
        """Return whether all values of these data are known to be legal, so that batches need no check."""
        return False

    @property
    def loss_name(self) -> str:
        """The name of the loss if the config names none."""
        return "cross_entropy"

    @property
    def loss_unit(self) -> str | None:
        """The unit of the cross-entropy, or None if the data determine it."""
        return None

    @property
    def label_count(self) -> int | None:
        """The number of labels, or None if the model does not classify."""
        return None

    @property
    def computes_in(self) -> str:
        """The dtype that the model computes in if `precision` does not set one."""
        return "float32"
