"""The sections `train` and `checkpoint` of a config: how long a run trains, when it stops early, and which checkpoints it keeps."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_serializer, model_serializer, model_validator

from jpipe.errors import short
from jpipe_train.config.section import MOST_ROWS, Count, Section

MOST_EPOCHS = 10**6
Mode = Literal["min", "max"]
"""Whether lower or higher values of a result are better."""
_RESULT = re.compile(r"val_[A-Za-z]\w{0,80}")


def _checked_result(name: str) -> str:
    """Return `name` unchanged, or raise ValueError if it cannot be the name of a result."""
    if _RESULT.fullmatch(name) is None:
        hint = f"did you mean 'val_{name}'?" if _RESULT.fullmatch(f"val_{name}") else "write val_loss or another name in metrics.jsonl"
        raise ValueError(f"expected the name of a result of the validations, val_loss or val_NAME, found {short(name)}; {hint}")
    return name


_ResultName = Annotated[str, AfterValidator(_checked_result)]


class StopConfig(Section):
    """Stop the run early if `patience` validations in a row do not improve the best value of `metric` by more than `min_delta`.

    `metric` is the name of a result in `metrics.jsonl`. `mode` says whether lower or higher values are better; null means lower for losses
    and higher for metrics.
    """

    metric: _ResultName = "val_loss"
    mode: Mode | None = None
    patience: Count
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class BestConfig(Section):
    """Keep the `keep` checkpoints with the best values of `metric`. `metric` and `mode` have the same meaning as in `StopConfig`."""

    metric: _ResultName = "val_loss"
    mode: Mode | None = None
    keep: Count = 1


class ProfileConfig(Section):
    """The steps that JAX's profiler records: `steps` steps, beginning with step `from`."""

    first: Annotated[int, Field(alias="from", ge=0, le=MOST_ROWS)]
    steps: Annotated[int, Field(ge=1, le=1000)] = 3

    @model_serializer
    def _with_the_names_of_a_config(self) -> dict[str, int]:
        return {"from": self.first, "steps": self.steps}


class TrainConfig(Section):
    """The length of the run, the size of its batches, and when it is evaluated.

    Set either `steps` or `epochs`; an epoch contains each row of the training data once. A step uses `batch_size` rows. The run is
    evaluated at step 0, every `eval_every` steps and at the end. `stop` can end the run earlier. The report shows `trace_batches` batches
    (0 for none), measured when the pipeline is full, after each evaluation, and when steps are slow. JAX's profiler records the steps in
    `profile`.
    """

    steps: Count | None = 200
    epochs: Annotated[float, Field(gt=0, le=MOST_EPOCHS)] | None = None
    batch_size: Count = 32
    log_every: Count = 1
    eval_every: Count = 50
    eval_batches: Count = 4
    trace_batches: Annotated[int, Field(ge=0, le=100)] = 3
    stop: StopConfig | None = None
    profile: ProfileConfig | None = None

    @property
    def length(self) -> int:
        """The number of steps, or the largest allowed number while the steps of the epochs are unknown."""
        return MOST_ROWS if self.steps is None else self.steps

    @model_validator(mode="before")
    @classmethod
    def _epochs_replace_default(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("epochs") is not None and "steps" not in data:
            return {**data, "steps": None}
        return data

    @model_validator(mode="after")
    def _one_length(self) -> "TrainConfig":
        if (self.steps is None) == (self.epochs is None):
            found = "neither" if self.steps is None else f"steps {self.steps} and epochs {self.epochs:g}"
            raise ValueError(f"expected either steps or epochs, found {found}; set one of them, and the other to null")
        return self

    @model_validator(mode="after")
    def _profiled_steps_exist(self) -> "TrainConfig":
        if problem := self.profile_problem():
            raise ValueError(problem)
        return self

    def profile_problem(self) -> str | None:
        """Return an error message if a step to profile comes after the last step of the run, otherwise None."""
        if self.profile is None or self.profile.first + self.profile.steps <= self.length:
            return None
        last = self.profile.first + self.profile.steps - 1
        return f"profile: expected steps up to {self.length - 1}, the last one of the run, found {self.profile.first} to {last}"

    @field_serializer("steps")
    def _epochs_stay(self, steps: int | None) -> int | None:
        """Write null if `epochs` is set, because the number of steps was computed from it."""
        return steps if self.epochs is None else None


class CheckpointConfig(Section):
    """Checkpoints are written every `every` steps and at the end; with null, none are written.

    The last `keep` checkpoints are kept. Older checkpoints are kept at multiples of `keep_every` steps, one every `keep_hours` hours, and
    the `best` ones. If the disk is full, the run stops or continues without checkpoints (`on_full_disk`).
    """

    every: Count | None = 10
    keep: Count = 3
    keep_every: Count | None = None
    keep_hours: Annotated[float, Field(gt=0)] | None = None
    best: BestConfig | None = None
    on_full_disk: Literal["stop", "train"] = "stop"

    @model_validator(mode="after")
    def _best_needs_checkpoints(self) -> "CheckpointConfig":
        if self.best is not None and self.every is None:
            raise ValueError("best has no effect with every null, which writes no checkpoints; set every, or remove best")
        return self
