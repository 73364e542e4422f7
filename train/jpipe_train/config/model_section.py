"""The section `model` of a config: the keys and the functions that every kind of models has."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from jpipe_train.config.section import Count, TargetSection
from jpipe_train.config.tune_section import TuneSection

if TYPE_CHECKING:
    import jpipe
    import jpipe_train.config.config
    import jpipe_train.config.data_section

KIND = "decoder"
"""The kind of models where a config names none."""
Limit = tuple[int, int, str]
"""The smallest and the largest legal value, and the reason."""


class ModelSection(TargetSection):
    """The model of a run: of a `kind` that an installed package adds, or a `target`.

    A kind is a subclass, which has keys of its own and a method `build_layers`. A `target` is a function: `target(**arguments)` returns a
    model or a `jpipe.LayerStack`; or it is the class of an NNX module; its constructor gets `rngs` and `arguments`. `seq_len` is the number
    of tokens in a row, where the data are text. `tune_section` is the class of the section `tune` for such models.
    """

    keeps_meaning: ClassVar[frozenset[str]] = TargetSection.keeps_meaning | {"seq_len"}
    tune_section: ClassVar[type[TuneSection]] = TuneSection

    kind: str = KIND
    seq_len: Count = 128

    def build_layers(self, config: "jpipe_train.config.config.Config", inputs: Callable[[], Any] | None) -> "jpipe.LayerStack":
        """Return the layers of the model.

        Args:
            config: of the run.
            inputs: returns the inputs of a batch, or their shapes and dtypes; None: they are not known yet.

        Raises:
            InputError: a key does not fit.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method build_layers")

    @classmethod
    def with_overrides(cls, keys: dict[str, Any], overridden: frozenset[str]) -> dict[str, Any]:
        """Return the keys of a file that still count where the command line has changed the values of the `overridden` ones."""
        return keys

    def check_config(self, config: "jpipe_train.config.config.Config") -> None:
        """Check that the section fits the other ones of a config.

        Raises:
            ValueError: it does not.
        """

    def check_plan(self, plan: "jpipe.Plan") -> None:
        """Check that a plan's meshes divide the model, as far as the shapes of its parameters do not say it.

        Raises:
            InputError: they do not.
        """

    def remarks(self, config: "jpipe_train.config.config.Config") -> list[str]:
        """Return lines to print before the run."""
        return []

    def extra_metrics(self) -> Mapping[str, Any]:
        """Return metrics of each evaluation, where lower values are better: functions of the outputs, which also have "tokens" then."""
        return {}

    def input_limits(self) -> Mapping[str, Limit]:
        """Return the legal values of the arrays in the inputs of a batch, by their keys; "" for a single array."""
        return {}

    def knows(self, data: "jpipe_train.config.data_section.DataSection") -> bool:
        """Return whether the values of these data are legal without a check of each batch."""
        return False

    @property
    def loss_name(self) -> str:
        """The name of the loss where the config names none."""
        return "cross_entropy"

    @property
    def loss_unit(self) -> str | None:
        """The unit of the cross-entropy; None: the one of the data."""
        return None

    @property
    def label_count(self) -> int | None:
        """The number of labels, if the model tells some apart."""
        return None

    @property
    def computes_in(self) -> str:
        """The dtype that it computes in, where `precision` says nothing of it."""
        return "float32"
