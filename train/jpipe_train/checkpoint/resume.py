"""Resume runs: choose a checkpoint, read its facts, and read the layers that this process needs."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import pydantic

import jpipe
from jpipe import InputError
from jpipe.files import resolved, shown
from jpipe_planner.machine.plain_yaml import parse
from jpipe_train.checkpoint.best import Step, StopState, best_step
from jpipe_train.checkpoint.history import MOST_PARTS, Count, History, LastStep, RunPart, part, updates_before
from jpipe_train.checkpoint.run_folder import is_of_this_job
from jpipe_train.config import config_file
from jpipe_train.config.config import PlanConfig
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.data.position import Position
from jpipe_train.launch.numeric_settings import numeric_settings
from jpipe_train.launch.team import Team

if TYPE_CHECKING:
    import jpipe.checkpoints

Resume = Literal["auto", "must", "never"]
"""Whether to resume. `auto`: if there is a checkpoint; `must`: or raise an error; `never`: raise an error if the folder holds a run."""


ANOTHER = "restore another checkpoint"
VERSIONS = {"jpipe": jpipe.__version__, "JAX": jax.__version__}
"""The versions of libraries that a checkpoint records."""


class NotRestorable(InputError):
    """A checkpoint has the right hashes, but its contents are not as jpipe writes them."""


class _TrainedMeanwhile(InputError):
    """Another process has trained in the folder in the meantime."""

    may_pass = True  # the command may succeed when it runs again


class DataFacts(pydantic.BaseModel):
    """A checkpoint's position in the training data."""

    model_config = pydantic.ConfigDict(extra="ignore")

    batch_size: Annotated[Count, pydantic.Field(strict=True, ge=1)]  # rows of a batch
    order: Position  # the position at which the order of batches begins
    position: Position  # the position of the next batch


class Facts(pydantic.BaseModel):
    """The facts of a run in a checkpoint."""

    model_config = pydantic.ConfigDict(extra="ignore")

    config: str  # the resolved config, as YAML
    plan: str  # the plan, as JSON
    devices: Annotated[Count, pydantic.Field(strict=True)]  # the number of devices
    # the validation loss before the first step; None without validation, or if it is for other data
    val_loss_before: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None
    # the validation loss before the next step, if it is computed already; its row is not logged yet
    val_loss: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None = None
    val_metrics: dict[str, float] = {}  # the other validation metrics of that step, by their names in a row
    versions: dict[str, str] = {}  # the versions of jpipe and JAX, and the settings that can change numbers
    history: Annotated[list[RunPart], pydantic.Field(min_length=1, max_length=MOST_PARTS)]  # the parts of the run up to this checkpoint
    data: DataFacts  # the position in the training data
    stop: StopState | None = None  # the state of early stopping, including any validation before the next step; None without early stopping
    val_since: Count = 0  # the last step at which `data.sources` changed; earlier validations used other data

    @pydantic.field_validator("config")
    @classmethod
    def _plain(cls, text: str) -> str:
        _config_in(text)
        return text


@dataclass(frozen=True)
class Resumed:
    """A run that resumes from a checkpoint."""

    folder: Path  # the folder of the run
    step: int  # the next batch
    facts: Facts  # the facts of the checkpoint
    steps: tuple[int, ...]  # the steps of all complete checkpoints of the folder

    def check_unchanged(self) -> None:
        """Check that no other process has trained in the folder since the checkpoint was chosen. Lock the folder first."""
        from jpipe.checkpoints import steps

        if (now := tuple(steps(self.folder))) != self.steps:
            last = f"its last checkpoint is of step {now[-1]}" if now else "it has no checkpoint"
            raise _TrainedMeanwhile(f"run.dir: another process has trained in '{shown(self.folder)}' meanwhile; now {last}; start again")

    def check_precision(self, wanted: str) -> None:
        """Check that the run's parameters have the same dtype as the checkpoint's."""
        section = _config_in(self.facts.config).get("precision")
        saved = str(section.get("params", "float32")) if isinstance(section, dict) else "float32"
        if saved != wanted:
            raise InputError(
                f"precision.params: expected {saved[:40]} as in the checkpoint of step {self.step}, found {wanted}; set it to "
                "the dtype of the checkpoint, or begin another run with the weights of this one (warm_start.file)"
            )

    def check_bottlenecks(self, plan: jpipe.Plan) -> None:
        """Check that the model is narrow behind the same layers, and as narrow, as in the checkpoint."""
        saved, wanted = (None if each.links is None else each.links.bottleneck for each in (self.plan, plan))
        if saved != wanted:
            kept = "null" if saved is None else f"{{width: {saved.width}, after: [{', '.join(saved.after or ())}]}}"
            raise InputError(
                where="plan.links.bottleneck",
                expected=f"{kept} as in the checkpoint of step {self.step}, because the layers of bottlenecks belong to the model",
                found="null" if wanted is None else f"{{width: {wanted.width}, after: [{', '.join(wanted.after or ())}]}}",
                change="set it as in the checkpoint, or begin another run",
            )

    @property
    def plan(self) -> jpipe.Plan:
        """The run's plan at the time of the checkpoint."""
        return jpipe.Plan.from_json(self.facts.plan, where=f"the plan of the checkpoint of step {self.step}")

    def position(self, batch_size: int) -> Position:
        """Return the position in the training data at which the order of batches begins.

        With the batch size of the checkpoint, the order continues. With another one, a new order begins at the next rows.
        """
        return self.facts.data.order if self.facts.data.batch_size == batch_size else self.facts.data.position

    def changes(self, record: Mapping[str, Any]) -> list[str]:
        """Return the config keys with changed values. `plan` stands for all keys of the plan, because a plan file sets them all."""
        before, now = _config_in(self.facts.config), dict(record)
        plans = before.pop("plan", None), now.pop("plan")
        flat, earlier = config_file.flat(now), config_file.flat(before)
        changed = [key for key in flat if key in earlier and flat[key] != earlier[key] and key != "run.dir"]
        return (["plan"] if _differs(*plans) else []) + changed

    def with_data_of(self, record: Mapping[str, Any]) -> "Resumed":
        """Return the run, without the validation results if `data.sources` has changed, because they used other data."""
        if "data.sources" not in self.changes(record):
            return self
        none: dict[str, Any] = {"val_loss_before": None, "val_loss": None, "val_metrics": {}, "stop": None, "val_since": self.step}
        return replace(self, facts=self.facts.model_copy(update=none))

    def other_versions(self) -> list[str]:
        """Describe changed versions and settings that can change numbers, such as `JAX 0.10.1, now 0.10.2`."""
        then, now = self.facts.versions, VERSIONS | numeric_settings()
        return [f"{name} {then[name] or 'unset'}, now {now[name] or 'unset'}" for name in now if then.get(name, now[name]) != now[name]]

    def rows(self) -> str:
        """Return the lines of `metrics.jsonl` for the steps before the checkpoint. Raise InputError if the lines are damaged."""
        from jpipe.checkpoints import Checkpoint

        lines = Checkpoint(self.folder, self.step).rows().decode("utf-8", errors="ignore").splitlines()
        where = f"{self.folder}: the rows in the checkpoint of step {self.step}"
        return "".join(f"{line}\n" for n, line in enumerate(lines, start=1) if _step(line, f"{where}, line {n}") < self.step)


def history(
    settings: RunSettings, plan: jpipe.Plan, resumed: Resumed | None, clock: Callable[[], float], earlier: LastStep | None = None
) -> History:
    """Return the history of a run that begins, or resumes from a checkpoint after `earlier`, the last logged step, if known.

    `clock` returns the seconds since this part of the run began.
    """
    devices = jax.device_count()
    if resumed is None:
        return History((), part(plan, settings.record, devices, 0, 0, 0), plan, clock)
    before, step = resumed.facts.history, resumed.step
    updates = 0 if settings.fresh_optimizer else updates_before(before[-1], resumed.plan, step)
    return History(before, part(plan, settings.record, devices, step, step, updates), plan, clock, earlier)


def may_resume(run_dir: str | None, resume: Resume, team: Team, step: Step) -> bool:
    """Return whether `find` must look for checkpoints: the run must resume, or its folder has checkpoints. No checkpoint is read."""
    folder = None if run_dir is None else resolved(run_dir, "run.dir")

    def look() -> str:
        if resume == "must" or step is not None:
            return "yes"
        if folder is None or (resume == "never" and not is_of_this_job(folder)):
            return ""
        try:
            return "yes" if _has_checkpoints(folder) else ""
        except OSError:
            return "yes"  # `find` reports the problem

    return bool(team.from_first("whether a run may resume", look))


def _has_checkpoints(folder: Path) -> bool:
    return os.path.isdir(folder / "checkpoints") and bool(os.listdir(folder / "checkpoints"))


def find(
    run_dir: str | None, resume: Resume, team: Team, say: Callable[[str], None], *, step: Step = None, before: int | None = None
) -> Resumed | None:
    """Return the run at the newest complete checkpoint in its folder, or None if it begins at step 0. All processes call this.

    Args:
        resume: whether to resume.
        team: the processes of the run. Process 0 chooses the checkpoint for all.
        say: a function that prints a line for each newer checkpoint that cannot be used.
        step: the step of the checkpoint to resume from, or "best", instead of the newest. Later checkpoints of the same job have priority.
        before: the step of a checkpoint that could not be read; only earlier ones are considered.

    Raises:
        InputError: `resume` is "must" and there is no checkpoint; all checkpoints are incomplete or written by a newer jpipe; or none is of
            `step`.
    """

    def look() -> str:
        try:
            found = _find(run_dir, resume, say, step, before)
        except OSError as error:
            raise InputError(f"run.dir: cannot read '{error.filename}': {error.strerror}; make it readable, or choose another") from None
        return "" if found is None else json.dumps([str(found.folder), found.step, found.facts.model_dump(mode="json"), found.steps])

    what = "where the run resumes" if before is None else f"where the run resumes before step {before}"
    if not (chosen := team.from_first(what, look)):
        return None
    path, number, facts, steps = json.loads(chosen)
    return Resumed(Path(path), number, Facts(**facts), tuple(steps))


def _find(run_dir: str | None, resume: Resume, say: Callable[[str], None], wanted: Step, before: int | None) -> Resumed | None:
    if wanted is not None and resume == "never":
        raise InputError("--from-checkpoint has no effect with --resume never; leave out one of them")
    option = "--from-checkpoint" if wanted is not None else "--resume must" if resume == "must" else None  # which requires a checkpoint
    if run_dir is None:
        if option is not None:
            raise InputError(f"{option}: expected a run.dir to resume in, found none; name the run's folder with --set run.dir=FOLDER")
        return None
    folder = resolved(run_dir, "run.dir")
    ours = is_of_this_job(folder)
    if resume == "never" and not ours:  # an earlier attempt of this job has written checkpoints
        return None
    if not _has_checkpoints(folder):
        if option is not None:
            raise InputError(f"{option}: expected checkpoints in '{shown(folder / 'checkpoints')}', found none; check run.dir")
        return None
    from jpipe import checkpoints

    steps = tuple(checkpoints.steps(folder))  # listed before any is read, because others may become complete meanwhile
    if wanted is not None and not ours:
        step = wanted if isinstance(wanted, int) else best_step(folder, "--from-checkpoint best")
        checkpoint = checkpoints.at(folder, step, "--from-checkpoint")
        checkpoint.verify()
        return Resumed(folder, step, _facts_of(checkpoint), steps)
    newest = _newest(folder, steps, lambda line: say(f"checkpoint: {line}"), before)
    if newest is None and (resume == "must" or steps):
        raise InputError(
            f"run.dir: none of the checkpoints in '{shown(folder / 'checkpoints')}' is complete and undamaged; choose another run.dir"
        )
    return newest


def _newest(folder: Path, steps: tuple[int, ...], report: Callable[[str], None], before: int | None) -> Resumed | None:
    """Return the run at the newest checkpoint that can be restored.

    Raise NotRestorable if there is none, but an undamaged one with contents that jpipe does not write.
    """
    from jpipe.checkpoints import newest

    first: NotRestorable | None = None
    while (checkpoint := newest(folder, lambda damaged: report(passed_over(damaged)), before)) is not None:
        try:
            resumed = Resumed(folder, checkpoint.step, _facts_of(checkpoint), steps)
            resumed.rows()
        except NotRestorable as error:
            report(passed_over(error))
            first, before = first or error, checkpoint.step
        else:
            return resumed
    if first is not None:
        raise first
    return None


def passed_over(error: InputError) -> str:
    """Return the message about a checkpoint that cannot be restored, after which the caller tries the previous one."""
    return str(InputError(error.problems[0]).with_change("the previous checkpoint is tried"))


def at(folder: Path, step: int) -> Resumed:
    """Return the run at the checkpoint of `step`. Raise InputError if it is damaged, or its facts are not as jpipe writes them."""
    from jpipe.checkpoints import Checkpoint, steps

    return Resumed(folder, step, _facts_of(Checkpoint(folder, step)), tuple(steps(folder)))


def _facts_of(checkpoint: "jpipe.checkpoints.Checkpoint") -> Facts:
    where = f"{checkpoint.path.parent}: step {checkpoint.step}: facts"
    try:
        return Facts.model_validate(checkpoint.facts)
    except pydantic.ValidationError as error:
        raise NotRestorable(*jpipe.errors.explain(error, Facts, where).problems) from None


def _config_in(text: str) -> dict[Any, Any]:
    """Parse the config in a checkpoint, perhaps with other keys, of another version of jpipe. Raise InputError if it is no config."""
    if len(text) > config_file.MOST_BYTES:
        raise InputError(expected=f"at most {config_file.MOST_BYTES:,} characters", found=f"{len(text):,}")
    data = parse(text, "the config of the checkpoint", ANOTHER)
    if not isinstance(data, dict):
        raise InputError(expected="a mapping of keys such as 'train:'", found=type(data).__name__, change=ANOTHER)
    return data


def _step(line: str, where: str) -> float:
    """Return the step of a row, or infinity if the row is cut off because it was being written. Raise InputError for another row."""
    if len(line) > _LONGEST_ROW:
        raise NotRestorable(where=where, expected="a JSON object of numbers", found=f"{len(line):,} characters", change=ANOTHER)
    try:
        row = json.loads(line)
    except ValueError:
        return math.inf
    except RecursionError:
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not all(map(_is_number, row.values())):
        raise NotRestorable(where=where, expected="a JSON object of numbers", found=repr(line[:60]), change=ANOTHER)
    return float(row["step"])


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 2**63)


_LONGEST_ROW = 2**16  # characters: about a thousand metrics


def _differs(before: Any, now: dict[str, Any]) -> bool:
    """Return whether the value of a key has changed. A key that an older version of jpipe lacks counts as its default."""
    defaults = PlanConfig().model_dump()
    return not isinstance(before, dict) or any(
        _without_nulls(before.get(key, defaults[key])) != _without_nulls(value) for key, value in now.items()
    )


def _without_nulls(value: Any) -> Any:
    """Return a dict without null values, because an older version may lack their keys."""
    return {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value
