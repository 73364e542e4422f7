"""The sections `train` and `checkpoint` of a config: how long a run trains, when it stops early, and which checkpoints it keeps."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_serializer, model_serializer, model_validator

from jpipe_train.config.section import MOST_ROWS, Count, Section

Mode = Literal["min", "max"]
"""Whether lower or higher values of a result are better."""
_ResultName = Annotated[str, Field(pattern=r"^val_[A-Za-z]\w{0,80}$")]


class StopConfig(Section):
    """Stop early: once the result `metric` of `patience` validations in a row has not improved by more than `min_delta` on the best one.

    `metric` is the name of a result in `metrics.jsonl`. `mode` says whether lower or higher values are better; null: lower ones of losses,
    higher ones of metrics.
    """

    metric: _ResultName = "val_loss"
    mode: Mode | None = None
    patience: Count
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class BestConfig(Section):
    """Keep the `keep` checkpoints with the best values of `metric`, which is named and ordered as in `StopConfig`."""

    metric: _ResultName = "val_loss"
    mode: Mode | None = None
    keep: Count = 1


class ProfileConfig(Section):
    """The steps that JAX's profiler records: `steps` of them, of which `from` is the first one."""

    first: Annotated[int, Field(alias="from", ge=0, le=MOST_ROWS)]
    steps: Annotated[int, Field(ge=1, le=1000)] = 3

    @model_serializer
    def _with_the_names_of_a_config(self) -> dict[str, int]:
        return {"from": self.first, "steps": self.steps}


class TrainConfig(Section):
    """The length of the run and its batches: `batch_size` rows per step; validation at step 0, every `eval_every` steps and at the end.

    Either `steps` or `epochs` is given: an epoch has each row of the training data once. `stop` ends the run earlier. `trace_batches`
    batches are measured for the report once the pipeline is full, after each evaluation, and when steps are slow; 0 measures none. JAX's
    profiler records the steps in `profile`.
    """

    steps: Count | None = 200
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    batch_size: Count = 32
    log_every: Count = 1
    eval_every: Count = 50
    eval_batches: Count = 4
    trace_batches: Annotated[int, Field(ge=0, le=100)] = 3
    stop: StopConfig | None = None
    profile: ProfileConfig | None = None

    @property
    def length(self) -> int:
        """The number of steps; the largest possible one as long as the epochs are not counted in steps."""
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
        if self.profile is not None and self.profile.first + self.profile.steps > self.length:
            last = self.profile.first + self.profile.steps - 1
            raise ValueError(
                f"profile: expected steps up to {self.length - 1}, the last one of the run, found {self.profile.first} to {last}"
            )
        return self

    @field_serializer("steps")
    def _epochs_stay(self, steps: int | None) -> int | None:
        """Leave out the number of steps that epochs have become."""
        return steps if self.epochs is None else None


class CheckpointConfig(Section):
    """Checkpoints every `every` steps and at the end, or none if null.

    The last `keep` are kept, and of the older ones those of steps that `keep_every` divides, one every `keep_hours` hours, and the `best`
    ones. If the disk is full, the run stops or continues without checkpoints (`on_full_disk`).
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
            raise ValueError("best: would mean nothing with every null, which writes no checkpoints; set every, or leave out best")
        return self
