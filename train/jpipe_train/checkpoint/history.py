"""The history of a run. Each part begins when the run starts or resumes."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, NamedTuple

import pydantic

import jpipe
from jpipe_train.assemble.meshes import has_meshes, mesh_words
from jpipe_train.console.terminal import count, duration

MOST_PARTS = 1000  # a checkpoint keeps only the latest parts

_Words = Annotated[str, pydantic.Field(max_length=300)]
Count = Annotated[int, pydantic.Field(ge=0, le=2**53)]


class RunPart(pydantic.BaseModel):
    """One part of a run."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    first: Count  # the first step of the part
    end: Count  # the step after its last step
    plan: _Words  # a description of its plan
    optimizer: _Words  # a description of its optimizer
    devices: Count  # the number of devices
    began: _Words | None = None  # the time of its start, in UTC
    # its duration, including start-up. If the part was killed, neither this nor `end` counts lost steps.
    seconds: Annotated[float, pydantic.Field(ge=0, lt=1e12)] | None = None
    updates: Count | None = None  # the number of optimizer updates before `first`; None if it differs between stages
    # seconds from the last logged step of the previous part to the first new step of this part
    pause: Annotated[float, pydantic.Field(ge=0, lt=1e12)] | None = None
    # the number of steps of the previous part that were trained again, because they came after its last checkpoint
    repeated: Count | None = None
    batch_size: Count | None = None  # the number of examples in each step


class LastStep(NamedTuple):
    """The last step that a part of a run has logged, and its time in seconds since 1970."""

    step: int
    time: float


class History:
    """The parts of a run so far.

    Args:
        before: the earlier parts.
        now: the current part.
        plan: the plan of the current part.
        clock: a function that returns the seconds since the current part began.
        earlier: the last step of the previous part; None if there is no such part, or its last step is unknown.
        wall_clock: a function that returns the time in seconds since 1970.
    """

    def __init__(
        self,
        before: Sequence[RunPart],
        now: RunPart,
        plan: jpipe.Plan,
        clock: Callable[[], float],
        earlier: LastStep | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._before, self._plan, self._clock, self._wall_clock = tuple(before[-MOST_PARTS + 1 :]), plan, clock, wall_clock
        self._earlier = earlier  # None after the first new step
        began = datetime.now(UTC) - timedelta(seconds=clock())
        self._now = now.model_copy(update={"began": now.began or f"{began:%Y-%m-%d %H:%M:%S}"})

    def logged(self, step: int) -> str:
        """Record a logged step. At the first new step after an interruption, return a line about it, otherwise ""."""
        if self._earlier is None or step < max(self._earlier.step + 1, self._now.first):
            return ""
        last, self._earlier = self._earlier, None
        pause, repeated = max(self._wall_clock() - last.time, 0.0), max(last.step + 1 - self._now.first, 0)
        self._now = self._now.model_copy(update={"pause": round(pause, 3), "repeated": repeated})
        again = f", with {count(repeated, 'step')} trained again" if repeated else ""
        return (
            f"{duration(pause)} passed from step {last.step}, the last before the interruption, to step {step}, the first new step{again}"
        )

    def parts(self, end: int) -> list[RunPart]:
        """Return all parts; the current part ends at step `end`."""
        return [*self._before, self._now.model_copy(update={"end": max(end, self._now.first), "seconds": round(self._clock(), 3)})]

    def facts(self, end: int) -> list[dict[str, Any]]:
        """Return all parts as plain data, for the checkpoint at step `end`."""
        return [part.model_dump(mode="json") for part in self.parts(end)]

    @property
    def seconds(self) -> float:
        """The sum of the known durations of all parts, in seconds."""
        return sum(part.seconds or 0.0 for part in self._before) + self._clock()

    def updates(self, step: int) -> int | None:
        """Return the number of optimizer updates before batch `step`, or None if stages differ."""
        return updates_before(self._now, self._plan, step)


def updates_before(part: RunPart, plan: jpipe.Plan, step: int) -> int | None:
    """Return the number of optimizer updates before batch `step` in a part with this plan, or None if stages differ."""
    per_batch = {plan.updates_per_batch(s) for s in range(plan.depth)}
    if part.updates is None or len(per_batch) > 1:
        return None
    return part.updates + (step - part.first) * per_batch.pop()


def part(plan: jpipe.Plan, config: Mapping[str, Any], devices: int, first: int, end: int, updates: int | None) -> RunPart:
    """Return a new part for a config in plain data. Its start and duration are not known yet."""
    replicas = "" if len(plan.workers) == plan.depth else f", replicas {', '.join(str(stage.replicas) for stage in plan.stages)}"
    schedule = plan.schedule + (" with vertical sync" if plan.vertical_sync else "")
    ranks = f" on {count(len(plan.pipeline_ranks), 'rank')}" if plan.depth > len(plan.pipeline_ranks) else ""
    meshes = f" on {mesh_words(plan)}" if has_meshes(plan) else ""
    words = f"{schedule}, {count(plan.depth, 'stage')}{ranks}{meshes}{replicas}, {count(plan.microbatches, 'microbatch', 'es')}"
    words += f", {count(plan.flush_first, 'batch', 'es')} flushed first" if plan.flush_first else ""
    optimizer = optimizer_words(config.get("optimizer"))
    train = config.get("train")
    size = train.get("batch_size") if isinstance(train, Mapping) else None
    size = size if type(size) is int and size > 0 else None
    return RunPart(first=first, end=end, plan=words[:300], optimizer=optimizer[:300], devices=devices, updates=updates, batch_size=size)


def optimizer_words(config: Any) -> str:
    """Describe the optimizer section of a config, such as `adamw, learning rate 0.001, cosine, 20 warm-up steps`."""
    if not isinstance(config, Mapping):
        return "not known"
    rate, schedule, warmup = config.get("learning_rate"), config.get("lr_schedule", "constant"), config.get("warmup_steps")
    words = [str(config.get("name", "adamw"))]
    words += [f"learning rate {rate:g}"] if isinstance(rate, int | float) else []
    words += [str(schedule)] if schedule != "constant" else []
    words += [count(warmup, "warm-up step")] if isinstance(warmup, int) and warmup else []
    batches = config.get("accumulate_batches")
    words += [f"an update every {batches} batches"] if isinstance(batches, int) and batches > 1 else []
    words += (
        [f"{name} {value}" for name, value in (config.get("arguments") or {}).items()] if isinstance(config.get("arguments"), dict) else []
    )
    of_stages = config.get("per_stage")
    words += [f"{name} by stage {values}" for name, values in of_stages.items()] if isinstance(of_stages, dict) else []
    steps = config.get("lr_delay_steps")
    words += [f"the rate divided by the delay for {count(steps, 'update')}"] if isinstance(steps, int) else []
    return ", ".join(words)


def table(parts: Sequence[RunPart]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of a table of parts."""
    head = ("steps", "plan", "optimizer", "devices", "began (UTC)", "duration", "pause before", "steps repeated")
    rows: list[tuple[str, ...]] = [
        (
            f"{part.first:,} to {part.end - 1:,}" if part.end > part.first else f"none from {part.first:,}",
            part.plan,
            part.optimizer,
            str(part.devices),
            part.began or "–",
            "–" if part.seconds is None else duration(part.seconds),
            "–" if part.pause is None else duration(part.pause),
            "–" if part.repeated is None else f"{part.repeated:,}",
        )
        for part in parts
    ]
    return head, rows


def changes_of_plan(parts: Sequence[RunPart]) -> list[tuple[int, str]]:
    """Return each step at which the plan or the number of devices changed, and the change, such as `(40, "3 stages")`."""
    trained = [part for part in parts if part.end > part.first]
    changes = []
    for before, now in itertools.pairwise(trained):
        pieces = before.plan.split(", ")
        new = [piece for piece in now.plan.split(", ") if piece not in pieces]
        if len(now.plan.split(", ")) < len(pieces) and not new:  # only parts were removed, such as replicas
            new = [now.plan]
        if not new and now.devices != before.devices:
            new = [count(now.devices, "device")]
        if new:
            changes.append((now.first, ", ".join(new)))
    return changes
