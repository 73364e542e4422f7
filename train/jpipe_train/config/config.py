"""The sections of a config with their defaults and checks. Wrong values are rejected before anything runs on a device."""

import math
import re
import reprlib
import warnings
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, field_validator, model_validator

import jpipe
from jpipe.errors import nearest
from jpipe.plan import excluded
from jpipe_train import registry
from jpipe_train.config.data_section import DataSection
from jpipe_train.config.functions import entry_point, optax_names
from jpipe_train.config.model_section import KIND, ModelSection
from jpipe_train.config.plan_config import MOST_MICROBATCHES as MOST_MICROBATCHES
from jpipe_train.config.plan_config import PlanConfig as PlanConfig
from jpipe_train.config.section import AUTO as AUTO
from jpipe_train.config.section import Arguments, Count, FilePath, Section, TargetSection, without_others
from jpipe_train.config.train_config import BestConfig as BestConfig
from jpipe_train.config.train_config import CheckpointConfig as CheckpointConfig
from jpipe_train.config.train_config import Mode as Mode
from jpipe_train.config.train_config import ProfileConfig as ProfileConfig
from jpipe_train.config.train_config import StopConfig as StopConfig
from jpipe_train.config.train_config import TrainConfig as TrainConfig
from jpipe_train.config.tune_section import TuneSection

MOST_PLAN_BYTES = 2**22  # a plan of ten thousand stages needs a third of this
FEW_SYMBOLS, CHUNK = 8192, 1024  # all logits at once for at most FEW_SYMBOLS symbols; for more, CHUNK positions at a time
LOGS = ("tensorboard", "wandb", "trackio", "mlflow")
METRICS = ("accuracy", "top5", "cross_entropy", "f1_binary", "f1_macro", "squared_error", "pearson")  # built in
MOST_F1_CLASSES = 256  # an evaluation sends two numbers per class


class RunConfig(Section):
    """The folder of the run: `dir`, or the next free `runs/0001`, `runs/0002`, … if null."""

    dir: FilePath | None = None


def _metric_names(metrics: dict[str, str]) -> dict[str, str]:
    for name, metric in metrics.items():
        if not re.fullmatch(r"[A-Za-z]\w{0,63}", name, re.ASCII) or name == "loss":
            raise ValueError(f"expected a name of letters, digits and _, other than 'loss', found {reprlib.repr(name)}")
        if ":" in metric:
            entry_point.check_form(metric)
        elif metric not in METRICS:
            raise ValueError(f"'{name}': expected module:function or one of {', '.join(METRICS)}, found {reprlib.repr(metric)}")
    return metrics


class EvalConfig(Section):
    """The `metrics` of an evaluation. Each has a name of your choice; its value is one of `METRICS` or `module:function`.

    The function is called with (outputs, labels) of a microbatch and returns (sum, weight), like the loss.
    """

    metrics: Annotated[dict[str, str], Field(max_length=100), AfterValidator(_metric_names)] = {}

    def check_classes(self, classes: int | None) -> None:
        """Raise ValueError if a metric is `f1_macro` and the built-in model does not have 2 to `MOST_F1_CLASSES` classes."""
        for name, metric in self.metrics.items():
            if metric == "f1_macro" and not 2 <= (classes or 0) <= MOST_F1_CLASSES:
                raise ValueError(
                    f"eval.metrics.{name}: f1_macro needs a built-in model with 2 to {MOST_F1_CLASSES} labels (model.labels), found "
                    f"{classes or 'none'}; remove this metric"
                )


class ResumeConfig(Section):
    """What a resumed run reads from its checkpoint. With `optimizer: reset` it begins with new optimizer state, as for a new optimizer."""

    optimizer: Literal["keep", "reset"] = "keep"


class WarmStartConfig(Section):
    """The initial parameters. `file` is a safetensors file, an export, a run folder or an Orbax checkpoint; null means random parameters.

    With `mode: strict` the file must have exactly the parameters of the model; with `partial` the parameters that match in name and shape
    are used. `names` maps prefixes of parameter names in the model to prefixes in the file; `{n}` stands for any number. `adapters` is a
    folder of LoRA adapters in PEFT's layout; it needs a `file` in Hugging Face's layout.
    """

    file: FilePath | None = None
    adapters: FilePath | None = None
    mode: Literal["strict", "partial"] = "strict"
    names: dict[str, str] = {}

    @model_validator(mode="after")
    def _adapters_have_a_model(self) -> "WarmStartConfig":
        if self.adapters is not None and self.file is None:
            raise ValueError("adapters has no effect without file; set file to the folder of the model that the adapters are for")
        return self

    @model_validator(mode="after")
    def _numbers_are_known(self) -> "WarmStartConfig":
        for start, instead in self.names.items():
            numbers, replacements = (re.findall(r"\{(.*?)\}", text) for text in (start, instead))
            if len(set(numbers)) < len(numbers) or not all(number.isidentifier() for number in numbers) or set(replacements) - set(numbers):
                raise ValueError(f"names: expected placeholders such as {{n}}, each once on the left, found '{start}: {instead}'")
        return self


class PrecisionConfig(Section):
    """The dtypes of the weights, of the computation and of the accumulated gradients, and the loss scale, as in `jpipe.Precision`.

    The loss scale is a number or `dynamic`. With `compute: null` the layers choose the dtype; a GPT uses `model.compute_dtype`.
    """

    params: str = "float32"
    compute: str | None = None
    accumulate: str = "float32"
    loss_scale: float | str | None = None

    @model_validator(mode="after")
    def _check_precision(self) -> "PrecisionConfig":
        if self.model_fields_set:  # imported here because it imports JAX
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)  # reported when the pipeline is built
                    jpipe.Precision(**self.model_dump())
            except jpipe.InputError as error:
                raise error.at("") from None
        return self

    @property
    def computes(self) -> str | None:
        """The dtype that layers compute in, or None if the layers choose it."""
        return self.params if self.compute is None and self.params != "float32" else self.compute


class LossConfig(TargetSection):
    """The loss: the mean cross-entropy of integer labels, the mean squared error, or a function of your own.

    `name` is `cross_entropy`, `squared_error` or a loss that an installed package adds, perhaps with `arguments`, such as `dpo`; null
    means the loss of the model, usually the cross-entropy. `target(outputs, labels, **arguments)` returns (sum of the losses, weight). The
    logits of built-in models are computed for `chunk` positions at a time, and again in the backward pass, so that they are never all in
    memory. null: all logits at once. "auto": all at once for small vocabularies, otherwise in chunks.
    """

    keeps_meaning: ClassVar[frozenset[str]] = TargetSection.keeps_meaning | {
        "chunk",
        "name",
    }  # so that --set loss.target=… can override a config that has all keys

    name: str | None = None
    chunk: Count | Literal["auto"] | None = "auto"

    @field_validator("name")
    @classmethod
    def _known_loss(cls, name: str | None) -> str | None:
        if name is not None and name not in (known := registry.names("losses")):
            raise ValueError(f"unknown loss {name!r}; {nearest(name, known)}")
        return name

    @model_validator(mode="after")
    def _named_or_of_the_user(self) -> "LossConfig":
        if self.name is not None and self.target is not None:
            raise ValueError(f"name has no effect with '{self.target}', found {self.name}; remove one of them")
        return self

    def chunk_for(self, symbols: int) -> int | None:
        """Return the number of positions for which logits (`symbols` per position) are computed at a time, or None for all at once."""
        if self.target is not None:
            return None
        if self.chunk == "auto":
            return None if symbols <= FEW_SYMBOLS else CHUNK
        return self.chunk


def _checked_correction(value: Any) -> Any:
    is_factor = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    if value is not None and value != "predict" and not is_factor:
        raise ValueError(f"expected predict, or a number of at least 0 such as 0.5, found {value!r}")
    return value


class OptimizerConfig(Section):
    """The optimizer: the name of an optimizer in optax and its `arguments`, or a `module:function` that returns an optimizer.

    See `jpipe_train.assemble.optimizer`. The learning rate (null: the optimizer's default, or 1e-3) rises over `warmup_steps`, then follows
    `lr_schedule`: constant, cosine (down to a tenth at the last step), or a schedule of optax with its `lr_arguments`. `decay` lists
    patterns; parameters with a matching path get weight decay (null: matrices, not biases and norms). With `accumulate_batches` above 1,
    each update uses the mean gradient of that many batches, and schedules count updates. Gradients are clipped by the norm of the whole
    model or of each stage, not by both. `ema_decay` is the decay of a moving average of the weights. `delay_correction` corrects the delay
    of gradients under schedules that do not flush: `predict` moves the weights ahead by their delay, and a number f moves them by f
    times the delay. `per_stage` has, for each argument that differs between stages, a list with one number for each stage. For the first
    `lr_delay_steps` updates the learning rate of a stage is divided by the delay of its gradients. This effect decreases with each update.
    """

    name: str = "adamw"
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    lr_schedule: str = "constant"
    lr_arguments: Arguments = {}
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    arguments: Arguments = {}
    per_stage: dict[str, Annotated[list[float], Field(min_length=1, max_length=4096)]] = {}
    lr_delay_steps: Count | None = None
    decay: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=256)] | None = None
    clip_global_norm: Annotated[float, Field(gt=0)] | None = None
    clip_stage_norm: Annotated[float, Field(gt=0)] | None = None
    skip_nonfinite: bool = False
    inject_hyperparams: bool = False
    accumulate_batches: Count = 1
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    delay_correction: Annotated[Literal["predict"] | float | None, BeforeValidator(_checked_correction)] = None

    @property
    def of_pipeline(self) -> dict[str, Any]:
        """The keys that are arguments of `jpipe.Pipeline`."""
        names = ("clip_global_norm", "clip_stage_norm", "skip_nonfinite", "ema_decay", "delay_correction")
        return {name: getattr(self, name) for name in names}

    @property
    def of_plans(self) -> dict[str, Any]:
        """The keys that some plans or other keys exclude; see `jpipe.plan.excluded`."""
        return self.of_pipeline | {"accumulate_batches": self.accumulate_batches if self.accumulate_batches > 1 else None}

    @model_validator(mode="after")
    def _can_be_combined(self) -> "OptimizerConfig":
        if problem := excluded(None, **self.of_plans):
            raise jpipe.InputError(problem)
        return self

    @field_validator("name")
    @classmethod
    def _known_optimizer(cls, name: str) -> str:
        if ":" in name:
            return entry_point.check_form(name)
        known, contributed = optax_names.optimizers(), f"contrib.{name}"
        if name not in known:
            hint = f"did you mean '{contributed}'?" if contributed in known else nearest(name, known)
            raise ValueError(f"unknown optimizer {name!r}; {hint}")
        return name

    @field_validator("lr_schedule")
    @classmethod
    def _known_lr_schedule(cls, name: str) -> str:
        known = ("constant", "cosine", *optax_names.schedules())
        if name not in known:
            raise ValueError(f"unknown learning-rate schedule {name!r}; {nearest(name, known)}")
        return name


Seed = Annotated[int, Field(ge=0, lt=2**32)]


def _known_logs(names: list[str]) -> list[str]:
    for name in names:
        if name not in LOGS:
            raise ValueError(f"unknown log {name!r}; {nearest(name, LOGS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"expected each log once, found {names}; keep one of each")
    return names


LogNames = Annotated[list[str], AfterValidator(_known_logs)]


def model_class(keys: Any) -> type[ModelSection]:
    """Return the class of a section `model` with these keys; `model.kind` decides it. Raise InputError if no package adds the kind."""
    kind = keys.get("kind", KIND) if isinstance(keys, dict) and keys.get("target") is None else None
    found: type[ModelSection] = registry.find("models", kind) if isinstance(kind, str) else ModelSection
    return found


def data_class(keys: Any) -> type[DataSection]:
    """Return the class of a section `data` with these keys; `data.format` decides it. Raise InputError if no package adds the format."""
    form = keys.get("format", AUTO) if isinstance(keys, dict) and keys.get("target") is None else None
    found: type[DataSection] = registry.find("formats", form) if isinstance(form, str) else DataSection
    return found


def _with_known_keys(keys: dict[str, Any], own: type[DataSection]) -> dict[str, Any]:
    """Return the keys of a section `data` without keys of other formats with default values. Raise ValueError for other values."""
    if keys.get("target") is not None or keys.keys() <= own.model_fields.keys():
        return keys
    classes = {name: registry.find("formats", name) for name in registry.names("formats")}
    keys = without_others(keys, own, classes.values())
    for key in keys.keys() - own.model_fields.keys():
        formats = {
            name: None for name, other in classes.items() for name in other.formats_of.get(key, (name,)) if key in other.model_fields
        }
        if formats:
            form = keys.get("format", AUTO)
            raise ValueError(f"{key} has no effect with format {form}: {key} is for {' and '.join(formats)}; remove {key}")
    return keys


class Config(Section):
    """The whole config of a run. `jpipe_train.config.config_file` reads it from YAML and writes it back.

    The kind of `model` and the format of `data` decide the classes of these two sections.
    """

    seed: Seed = 0
    compile_cache: FilePath | None = AUTO
    log: LogNames = ["tensorboard"]
    run: RunConfig = RunConfig()
    data: SerializeAsAny[DataSection] = Field(default={}, validate_default=True)
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    model: SerializeAsAny[ModelSection] = Field(default={}, validate_default=True)
    tune: SerializeAsAny[TuneSection] = Field(default={}, validate_default=True)
    precision: PrecisionConfig = PrecisionConfig()
    loss: LossConfig = LossConfig()
    plan: PlanConfig = PlanConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    warm_start: WarmStartConfig = WarmStartConfig()

    @model_validator(mode="before")
    @classmethod
    def _empty_sections_are_defaults(cls, data: object) -> object:
        """Read a section without content, such as `train:`, as an empty section."""
        if not isinstance(data, dict):
            return data
        return {key: {} if value is None and key not in ("seed", "compile_cache", "log") else value for key, value in data.items()}

    @field_validator("model", mode="before")
    @classmethod
    def _of_its_kind(cls, keys: Any) -> ModelSection:
        return keys if isinstance(keys, ModelSection) else model_class(keys).model_validate(keys)

    @field_validator("data", mode="before")
    @classmethod
    def _of_its_format(cls, keys: Any) -> DataSection:
        own = data_class(keys)
        return (
            keys if isinstance(keys, DataSection) else own.model_validate(_with_known_keys(keys, own) if isinstance(keys, dict) else keys)
        )

    @field_validator("tune", mode="before")
    @classmethod
    def _of_the_models_kind(cls, keys: Any, info: Any) -> TuneSection:
        model = info.data.get("model")
        if model is None or isinstance(keys, TuneSection):
            return keys if isinstance(keys, TuneSection) else TuneSection()  # the error in the model is reported
        own: type[TuneSection] = model.tune_section
        if not isinstance(keys, dict) or keys.keys() <= own.model_fields.keys():
            return own.model_validate(keys)
        of_kinds: type[TuneSection] = registry.find("models", KIND).tune_section
        keys = without_others(keys, own, [of_kinds])
        if model.target is not None and (foreign := sorted(keys.keys() & of_kinds.model_fields.keys() - own.model_fields.keys())):
            raise ValueError(
                f"{foreign[0]} is for built-in models, found model.target; remove {foreign[0]}, or list the trained parameters in "
                "tune.train_only"
            )
        return own.model_validate(keys)

    @model_validator(mode="after")
    def _sections_fit_the_others(self) -> "Config":
        self.model.check_config(self)
        self.data.check_config(self)
        return self

    @model_validator(mode="after")
    def _microbatches_divide_batch(self) -> "Config":
        batch_size, microbatches = self.train.batch_size, self.plan.microbatches
        if self.plan.file is None and batch_size % microbatches:
            raise ValueError(f"train.batch_size {batch_size} is not divisible by plan.microbatches {microbatches}; change one of them")
        return self

    @model_validator(mode="after")
    def _at_least_one_update(self) -> "Config":
        if self.optimizer.accumulate_batches > self.train.length:
            raise ValueError(
                f"optimizer.accumulate_batches {self.optimizer.accumulate_batches} is more than train.steps {self.train.steps}, so "
                "there would be no update; change one of them"
            )
        return self

    @model_validator(mode="after")
    def _sources_fit_the_run(self) -> "Config":
        sources = self.data.sources or []
        if sources and self.train.epochs is not None:
            raise ValueError(
                "train.epochs needs data.path, because data.sources have epochs of different lengths; set train.steps and train.epochs=null"
            )
        for source in sources:
            result = f"loss_{source.name}"
            if result in self.eval.metrics or result.removesuffix("_ema") in self.eval.metrics:
                raise ValueError(f"eval.metrics has '{result}', the name of the loss of a source in data.sources; rename one of them")
        return self

    @model_validator(mode="after")
    def _f1_has_classes(self) -> "Config":
        self.eval.check_classes(self.model.label_count)
        return self

    @model_validator(mode="after")
    def _chunks_are_of_logits(self) -> "Config":
        target_key = next((f"{name}.target" for name in ("model", "loss") if getattr(self, name).target is not None), None)
        if target_key is not None and self.loss.chunk not in ("auto", None):
            raise ValueError(f"loss.chunk has no effect with {target_key}: it is for built-in models and losses; remove loss.chunk")
        return self

    @model_validator(mode="after")
    def _seq_len_is_for_something(self) -> "Config":
        if self.model.target and not self.data.has_tokens and "seq_len" in self.model.model_fields_set:
            beside = "data.target" if self.data.target is not None else f"data.format {self.data.format}"
            raise ValueError(f"model.seq_len has no effect with model.target and {beside}; remove model.seq_len")
        return self

    @property
    def loss_name(self) -> str | None:
        """The name of the loss, or None if it is the user's function."""
        return None if self.loss.target is not None else self.loss.name or self.model.loss_name

    @property
    def computes(self) -> str:
        """The dtype that the model computes in."""
        return self.precision.computes or self.model.computes_in

    @property
    def skips_nonfinite(self) -> bool:
        """Whether batches with gradients that are not finite are skipped."""
        return self.optimizer.skip_nonfinite or self.precision.loss_scale == "dynamic"

    @property
    def uses_global_norm(self) -> bool:
        """Whether updates use the norm of the gradients of all stages."""
        return self.optimizer.clip_global_norm is not None or self.skips_nonfinite

    @property
    def code(self) -> dict[str, str]:
        """The user's functions that this run calls, by config key."""
        named = {f"{name}.target": getattr(self, name).target for name in ("model", "data", "loss")}
        optimizer = {"optimizer.name": self.optimizer.name} if ":" in self.optimizer.name else {}
        metrics = {f"eval.metrics.{name}": metric for name, metric in self.eval.metrics.items() if ":" in metric}
        return {key: target for key, target in named.items() if target} | optimizer | metrics
