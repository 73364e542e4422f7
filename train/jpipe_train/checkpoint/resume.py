"""Where a run takes up again: the checkpoint, what it says, and the layers that this process needs of it."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import pydantic
from jpipe_planner.machine.plain_yaml import parse

import jpipe
from jpipe import InputError
from jpipe.files import shown
from jpipe_train.checkpoint.history import MOST_PARTS, Count, History, Part, part, updates_before
from jpipe_train.checkpoint.run_folder import folder_of, is_of_this_job
from jpipe_train.config import config_file
from jpipe_train.config.config import Config, PlanConfig
from jpipe_train.config.section import MOST_ROWS
from jpipe_train.data.position import Position
from jpipe_train.launch.numeric_settings import numeric_settings
from jpipe_train.launch.together import Together

Resume = Literal["auto", "must", "never"]
"""Whether to resume: where the run's folder holds a checkpoint; or refuse to begin anew; or refuse a folder that holds a run."""


VERSIONS = {"jpipe": jpipe.__version__, "JAX": jax.__version__}
"""The libraries whose versions a checkpoint says."""


class NotRestorable(InputError):
    """A checkpoint whose hashes fit and whose contents are not what jpipe writes."""


class _TrainedMeanwhile(InputError):
    """Another process has trained in the folder."""

    may_pass = True  # when the command runs again


class DataFacts(pydantic.BaseModel):
    """Where in the training data a checkpoint is.

    Attributes:
        batch_size: rows of a batch.
        order: where the order of the batches begins.
        position: of the batch that comes next.
    """

    model_config = pydantic.ConfigDict(extra="ignore")

    batch_size: Annotated[Count, pydantic.Field(strict=True, ge=1)]
    order: Position
    position: Position


class Facts(pydantic.BaseModel):
    """What a checkpoint says of its run.

    Attributes:
        config: as resolved, in YAML.
        plan: as JSON.
        devices: how many there were.
        val_loss_before: before the first step.
        val_loss: of the step that comes next, where it was evaluated before that step; its row is not logged yet.
        val_metrics: likewise, by their names in a row.
        versions: of jpipe and JAX, and the settings that can change numbers.
        history: the parts of the run up to this checkpoint; none where the jpipe that wrote it kept none.
        data: the place in the training data; None where the jpipe that wrote it counted batches only.
    """

    model_config = pydantic.ConfigDict(extra="ignore")

    config: str
    plan: str
    devices: Annotated[Count, pydantic.Field(strict=True)]
    val_loss_before: Annotated[float, pydantic.Field(allow_inf_nan=False)]
    val_loss: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None = None
    val_metrics: dict[str, float] = {}
    versions: dict[str, str] = {}
    history: Annotated[list[Part], pydantic.Field(max_length=MOST_PARTS)] = []
    data: DataFacts | None = None

    @pydantic.field_validator("config")
    @classmethod
    def _plain(cls, text: str) -> str:
        _config_in(text)
        return text


@dataclass(frozen=True)
class Resumed:
    """A run that goes on.

    Attributes:
        folder: of the run.
        step: the batch that comes next.
        facts: of the checkpoint.
        there: the steps of all complete checkpoints of the folder.
    """

    folder: Path
    step: int
    facts: Facts
    there: tuple[int, ...]

    def check_unchanged(self) -> None:
        """Refuse a folder in which another process has trained since this run was looked for; for the one that holds its lock.

        Raises:
            InputError: it has other checkpoints now.
        """
        from jpipe.checkpoints import files as checkpoint_files

        if (now := tuple(checkpoint_files.steps(self.folder))) != self.there:
            last = f"its last checkpoint is of step {now[-1]}" if now else "it has no checkpoint"
            raise _TrainedMeanwhile(f"run.dir: another process has trained in '{shown(self.folder)}' meanwhile, {last} now; start again")

    def check_precision(self, config: Config) -> None:
        """Refuse a run whose parameters are of another dtype than those of the checkpoint.

        Raises:
            InputError: they are.
        """
        section, wanted = _config_in(self.facts.config).get("precision"), config.precision.params
        kept = str(section.get("params", "float32")) if isinstance(section, dict) else "float32"
        if kept != wanted:
            raise InputError(
                f"precision.params: expected {kept[:40]} as in the checkpoint of step {self.step}, found {wanted}; set it to that, or "
                "begin another run with the weights of this one (warm_start.file)"
            )

    @property
    def plan(self) -> jpipe.Plan:
        """The plan that it ran by."""
        return jpipe.Plan.from_json(self.facts.plan, where=f"the plan of the checkpoint of step {self.step}")

    def position(self, batch_size: int) -> Position | None:
        """Return where in the training data the order of the batches begins; None: at the first row.

        With the batch size of the checkpoint the order goes on; with another one a new order begins at the rows that come next.

        Args:
            batch_size: rows of a batch now.
        """
        data = self.facts.data
        if data is not None:
            return data.order if data.batch_size == batch_size else data.position
        section = _config_in(self.facts.config).get("train")
        before = section.get("batch_size") if isinstance(section, dict) else None
        if type(before) is not int or not 1 <= before <= MOST_ROWS or before == batch_size:
            return None
        return Position(batch=self.step, rows=(self.step * before,), pieces=before)

    def parts(self) -> list[Part]:
        """Those of the run up to here; one in place of all of those that a jpipe without a history has made."""
        if self.facts.history:
            return self.facts.history
        settings = _config_in(self.facts.config)
        may_be_reset = settings.get("resume", {"optimizer": "keep"}) != {"optimizer": "keep"}
        return [part(self.plan, settings, self.facts.devices, 0, self.step, None if may_be_reset else 0)]

    def changes(self, config: Config) -> list[str]:
        """The keys whose values are other ones now; the plan as a whole, for a file of it says all its keys."""
        before, now = (_config_in(text) for text in (self.facts.config, config_file.to_yaml(config)))
        plans = before.pop("plan", None), now.pop("plan")
        flat, there = _flat(now), _flat(before)
        changed = [key for key in flat if key in there and flat[key] != there[key] and key != "run.dir"]
        return (["plan"] if _differs(*plans) else []) + changed

    def other_versions(self) -> list[str]:
        """`JAX 0.10.1, now 0.10.2`: of each library, and each setting that can change numbers, that was another one when it was written."""
        then, now = self.facts.versions, VERSIONS | numeric_settings()
        return [f"{name} {then[name] or 'unset'}, now {now[name] or 'unset'}" for name in now if then.get(name, now[name]) != now[name]]

    def rows(self) -> str:
        """The lines of `metrics.jsonl` of the steps before.

        Raises:
            InputError: they are damaged.
        """
        from jpipe.checkpoints import files as checkpoint_files

        lines = checkpoint_files.read_metrics(self.folder, self.step).decode("utf-8", errors="ignore").splitlines()
        where = f"{self.folder}: the rows of the checkpoint of step {self.step}"
        return "".join(f"{line}\n" for n, line in enumerate(lines, start=1) if _step(line, f"{where}, line {n}") < self.step)

    def layers(self, pipe: jpipe.Pipeline) -> dict[str, Any]:
        """The layers of this process's workers, read and held against their hashes.

        Raises:
            InputError: one of them is not in the checkpoint; a file is damaged.
        """
        from jpipe.checkpoints import read

        return read(pipe, self.folder, self.step)

    def stand_ins(self, pipe: jpipe.Pipeline) -> dict[str, Any]:
        """What has the shapes and types of `layers` and needs no memory, to be checked before they are read.

        Raises:
            InputError: as `layers`, but for the contents of files.
        """
        from jpipe.checkpoints import stand_ins

        return stand_ins(pipe, self.folder, self.step)


def history(config: Config, plan: jpipe.Plan, resumed: Resumed | None, clock: Callable[[], float]) -> History:
    """The parts of the run that begins now, or goes on.

    Args:
        config: of the run.
        plan: by which it goes on.
        resumed: where it goes on.
        clock: seconds since this part of it began.
    """
    settings, devices = config.model_dump(), jax.device_count()
    if resumed is None:
        return History((), part(plan, settings, devices, 0, 0, 0), plan, clock)
    before, step = resumed.parts(), resumed.step
    updates = 0 if config.resume.optimizer == "reset" else updates_before(before[-1], resumed.plan, step)
    return History(before, part(plan, settings, devices, step, step, updates), plan, clock)


def find(
    config: Config, resume: Resume, together: Together, say: Callable[[str], None], *, step: int | None = None, before: int | None = None
) -> Resumed | None:
    """The newest whole checkpoint of the run's folder; None: the run begins at step 0. All processes call this.

    Args:
        config: of the run.
        resume: whether to look for one.
        together: the processes of the run; process 0 looks, so that all resume from the same one.
        say: gets a line for each newer checkpoint that cannot be used.
        step: of the checkpoint to resume from in place of the newest; what this very job has written later comes first.
        before: only checkpoints of earlier steps than this; the one of this step could not be read.

    Raises:
        InputError: `resume` is "must" and there is none; there are checkpoints, but none is complete; a newer jpipe wrote them; there is
            none of `step`.
    """

    def look() -> str:
        try:
            return json.dumps(_find(config, resume, say, step, before))
        except OSError as error:
            raise InputError(f"run.dir: cannot read '{error.filename}': {error.strerror}; make it readable, or choose another") from None

    what = "where the run resumes" if before is None else f"where the run resumes before step {before}"
    found = json.loads(together.from_first(what, look))
    if found is None:
        return None
    return Resumed(Path(found["folder"]), found["step"], Facts(**found["facts"]), tuple(found["there"]))


def _find(config: Config, resume: Resume, say: Callable[[str], None], wanted: int | None, before: int | None) -> Mapping[str, Any] | None:
    if wanted is not None and resume == "never":
        raise InputError("--from-checkpoint: would mean nothing with --resume never; leave out one of them")
    if config.run.dir is None:
        if resume == "must" or wanted is not None:
            option = "--resume must" if wanted is None else "--from-checkpoint"
            raise InputError(f"{option}: expected a run.dir to resume in, found none; name the run's folder with --set run.dir=FOLDER")
        return None
    folder = folder_of(config)
    assert folder is not None
    ours = is_of_this_job(folder)
    if resume == "never" and not ours:  # what this job has written before a process of it failed is not refused
        return None
    if not os.path.isdir(folder / "checkpoints") or not os.listdir(folder / "checkpoints"):
        if resume == "must" or wanted is not None:
            option = "--resume must" if wanted is None else "--from-checkpoint"
            raise InputError(f"{option}: expected checkpoints in '{shown(folder / 'checkpoints')}', found none; check run.dir")
        return None
    from jpipe.checkpoints import files as checkpoint_files

    there = checkpoint_files.steps(folder)  # before any is read: what is complete by then may not be so now
    if wanted is not None and not ours:
        if wanted not in there:
            known = ", ".join(map(str, there)) or "none at all"
            raise InputError(f"--from-checkpoint: expected one of {known}, those in '{shown(folder)}', found {wanted}")
        checkpoint_files.verify(folder, wanted)
        facts: Facts | None = _facts_of(folder, wanted)
        step: int | None = wanted
    else:
        step, facts = _newest(folder, lambda line: say(f"checkpoint: {line}"), before)
    if step is None or facts is None:
        if resume == "must" or there:
            raise InputError(f"run.dir: none of the checkpoints in '{shown(folder / 'checkpoints')}' is whole; choose another run.dir")
        return None
    return {"folder": str(folder), "step": step, "facts": facts.model_dump(mode="json"), "there": there}


def _newest(folder: Path, report: Callable[[str], None], before: int | None) -> tuple[int | None, Facts | None]:
    """The newest checkpoint that can be restored, as far as its files tell, and what it says.

    Raises:
        NotRestorable: there is none, but there is one whose files are whole and whose contents are not as jpipe writes them.
    """
    from jpipe.checkpoints import files as checkpoint_files

    first: NotRestorable | None = None
    while (step := checkpoint_files.newest_good(folder, lambda line: report(passed_over(line)), before)) is not None:
        try:
            facts = _facts_of(folder, step)
            Resumed(folder, step, facts, ()).rows()
        except NotRestorable as error:
            report(passed_over(str(error).splitlines()[0]))
            first, before = first or error, step
        else:
            return step, facts
    if first is not None:
        raise first
    return None, None


def passed_over(line: str) -> str:
    """What is said of a checkpoint that cannot be restored where the one before is tried next."""
    return f"{line.removesuffix('; take another checkpoint')}; the one before is tried"


def at(folder: Path, step: int) -> Resumed:
    """The checkpoint of one step, to be read.

    Raises:
        InputError: it is damaged, or says something else than jpipe writes.
    """
    from jpipe.checkpoints import files as checkpoint_files

    return Resumed(folder, step, _facts_of(folder, step), tuple(checkpoint_files.steps(folder)))


def _facts_of(folder: Path, step: int) -> Facts:
    from jpipe.checkpoints import files as checkpoint_files

    try:
        return Facts.model_validate(checkpoint_files.read_facts(folder, step))
    except pydantic.ValidationError as error:
        raise NotRestorable(*jpipe.errors.explain(error, Facts, f"{folder / 'checkpoints'}: step {step}: facts").args) from None


def _config_in(text: str) -> dict[Any, Any]:
    """The config that a checkpoint says, which may be of another version of jpipe, with other keys.

    Raises:
        ValueError: it is none.
    """
    try:
        if len(text) > config_file.MOST_BYTES:
            raise ValueError(f"expected at most {config_file.MOST_BYTES:,} characters, found {len(text):,}")
        data = parse(text, "the config of the checkpoint", "take another checkpoint")
    except jpipe.InputError as error:
        raise ValueError(str(error)) from None
    if not isinstance(data, dict):
        raise ValueError(f"expected a mapping of keys such as 'train:', found {type(data).__name__}; take another checkpoint")
    return data


def _step(line: str, where: str) -> float:
    """Of which step a row is; infinite if it is none: it was being written.

    Raises:
        InputError: jpipe does not write such rows.
    """
    if len(line) > _LONGEST_ROW:
        raise NotRestorable(f"{where}: expected numbers by their names, found {len(line):,} characters; take another checkpoint")
    try:
        row = json.loads(line)
    except ValueError:
        return math.inf
    except RecursionError:
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not all(map(_is_number, row.values())):
        raise NotRestorable(f"{where}: expected numbers by their names, found {line[:60]!r}; take another checkpoint")
    return float(row["step"])


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 2**63)


_LONGEST_ROW = 2**16  # characters; a thousand metrics


def _differs(before: Any, now: dict[str, Any]) -> bool:
    """Whether a section has another value for one of its keys; a jpipe that had fewer keys did as their defaults say."""
    usual = PlanConfig().model_dump()
    return not isinstance(before, dict) or any(before.get(key, usual[key]) != value for key, value in now.items())


def _flat(tree: Any, before: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {before.removesuffix("."): tree}
    return {key: value for name, inner in tree.items() for key, value in _flat(inner, f"{before}{name}.").items()}
