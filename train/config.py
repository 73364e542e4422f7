"""What a run can be told: the keys of the YAML file, their defaults and their checks. Each value says no before any device work."""

import reprlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from jpipe import RECOMPUTE, SCHEDULES, nearest


def _usable_path(path: str) -> str:
    """The path as it is, or an error where no file can have that name."""
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"'{path}' begins with a user's home folder that is not known; write the folder out") from None
    if "\0" in path:
        raise ValueError(f"{path!r} holds a null character, which no path can have; choose another name")
    return path


# The upper limits are far beyond what runs; they keep a slip of the keyboard from counting for hours or out of 32 bits.
Count = Annotated[int, Field(ge=1, le=10**9)]
MOST_MICROBATCHES = 1024
FilePath = Annotated[str, Field(min_length=1), AfterValidator(_usable_path)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunConfig(_Section):
    """Where the run is written: `dir`, or the next free `runs/0001`, `runs/0002`, … when null."""

    dir: FilePath | None = None


class DataConfig(_Section):
    """What is read: `path` is a file, a folder or a glob; null means the source text of the running Python's standard library."""

    path: FilePath | None = None
    validation_fraction: Fraction = 0.05


class TrainConfig(_Section):
    """How long and in what portions: `batch_size` sequences a step; validation at step 0, every `eval_every` steps and at the end."""

    steps: Count = 200
    batch_size: Count = 32
    log_every: Count = 1
    eval_every: Count = 50
    eval_batches: Count = 4


class ModelConfig(_Section):
    """The GPT: `depth` blocks of `width` with `heads` heads over `seq_len` bytes; parameters are float32 whatever `compute_dtype` is."""

    depth: Annotated[int, Field(ge=1, le=1000)] = 4
    width: Annotated[int, Field(ge=1, le=10**6)] = 128
    heads: Count = 4
    seq_len: Count = 128
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelConfig":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}; change one of them")
        return self


class PlanConfig(_Section):
    """How the model is cut and scheduled: even stages from these keys, or a plan's JSON from `file`, which then says it all."""

    schedule: str = "pipedream_2bw"
    num_stages: Count = 4
    microbatches: Annotated[int, Field(ge=1, le=MOST_MICROBATCHES)] = 4
    recompute: str | list[str] = "none"
    extra_in_flight: Annotated[int, Field(ge=0, le=64)] = 0
    vertical_sync: bool = False
    file: FilePath | None = None

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, name: str) -> str:
        if name not in SCHEDULES:
            raise ValueError(f"unknown schedule '{name}'; {nearest(name, SCHEDULES)}")
        return name

    @field_validator("recompute", mode="before")
    @classmethod
    def _known_policies(cls, value: object) -> object:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"expected a policy's name or a list of names, one for each stage, found {reprlib.repr(value)}")
            if name not in RECOMPUTE:
                raise ValueError(f"unknown recomputation policy '{name}'; {nearest(name, RECOMPUTE)}")
        return value


class OptimizerConfig(_Section):
    """The optax optimizer by name; the learning rate rises over `warmup_steps`, then stays or falls to a tenth as a cosine.

    `weight_decay` (matrices only, not biases and norms) is optax's own default when null.
    """

    name: Literal["adam", "adamw", "lion", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    lr_schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class Config(_Section):
    """A whole run. `train.config_file` reads it from YAML and writes it back."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    model: ModelConfig = ModelConfig()
    plan: PlanConfig = PlanConfig()
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_defaults(cls, data: object) -> object:
        """`train:` with nothing below it is read as null."""
        return {key: {} if value is None and key != "seed" else value for key, value in data.items()} if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _microbatches_divide_batch(self) -> "Config":
        batch_size, microbatches = self.train.batch_size, self.plan.microbatches
        if self.plan.file is None and batch_size % microbatches:
            raise ValueError(f"train.batch_size {batch_size} is not divisible by plan.microbatches {microbatches}; change one of them")
        return self

    @model_validator(mode="after")
    def _decay_has_an_optimizer(self) -> "Config":
        if self.optimizer.weight_decay is not None and self.optimizer.name in ("adam", "sgd"):
            raise ValueError(f"optimizer.weight_decay means nothing to '{self.optimizer.name}'; leave it out or choose adamw or lion")
        return self
