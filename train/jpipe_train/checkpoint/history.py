"""The history of a run in parts, each from a start or resume to the next resume or the end."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pydantic

import jpipe
from jpipe_train.assemble.meshes import has_meshes, mesh_words
from jpipe_train.console.terminal import count, duration

MOST_PARTS = 1000  # the latest, which a checkpoint keeps

_Words = Annotated[str, pydantic.Field(max_length=300)]
Count = Annotated[int, pydantic.Field(ge=0, le=2**53)]


class Part(pydantic.BaseModel):
    """One part of a run; the optional fields are unknown in checkpoints of versions of jpipe that kept no history.

    Attributes:
        first: its first step.
        end: the step after its last.
        plan: its description.
        optimizer: its description.
        devices: their number.
        began: its start, in UTC.
        seconds: its duration, start-up included; steps that were lost when it was killed are in neither this nor `end`.
        updates: the number of optimizer updates before `first`; None if it differs between stages.
    """

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    first: Count
    end: Count
    plan: _Words
    optimizer: _Words
    devices: Count
    began: _Words | None = None
    seconds: Annotated[float, pydantic.Field(ge=0, lt=1e12)] | None = None
    updates: Count | None = None


class History:
    """The parts of a run so far.

    Args:
        before: the parts that ended.
        now: the current part.
        plan: of the current part.
        clock: returns the seconds since the current part began.
    """

    def __init__(self, before: Sequence[Part], now: Part, plan: jpipe.Plan, clock: Callable[[], float]) -> None:
        self._before, self._plan, self._clock = tuple(before[-MOST_PARTS + 1 :]), plan, clock
        began = datetime.now(UTC) - timedelta(seconds=clock())
        self._now = now.model_copy(update={"began": now.began or f"{began:%Y-%m-%d %H:%M:%S}"})

    def parts(self, end: int) -> list[Part]:
        """Return all parts, the last up to step `end`."""
        return [*self._before, self._now.model_copy(update={"end": max(end, self._now.first), "seconds": round(self._clock(), 3)})]

    def facts(self, end: int) -> list[dict[str, Any]]:
        """Return all parts as plain data, for a checkpoint of step `end`."""
        return [part.model_dump(mode="json") for part in self.parts(end)]

    @property
    def seconds(self) -> float:
        """The known seconds of all parts together."""
        return sum(part.seconds or 0.0 for part in self._before) + self._clock()

    def updates(self, step: int) -> int | None:
        """Return the number of optimizer updates before batch `step`, or None if it differs between stages."""
        return updates_before(self._now, self._plan, step)


def updates_before(part: Part, plan: jpipe.Plan, step: int) -> int | None:
    """Return the number of optimizer updates before batch `step` of a part with this plan, or None if it differs between stages."""
    per_batch = {plan.updates_per_batch(s) for s in range(plan.depth)}
    if part.updates is None or len(per_batch) > 1:
        return None
    return part.updates + (step - part.first) * per_batch.pop()


def part(plan: jpipe.Plan, config: Mapping[str, Any], devices: int, first: int, end: int, updates: int | None) -> Part:
    """Return a part whose start and duration are not known yet, for a config as plain data."""
    replicas = "" if len(plan.workers) == plan.depth else f", replicas {', '.join(str(stage.replicas) for stage in plan.stages)}"
    schedule = plan.schedule + (" with vertical sync" if plan.vertical_sync else "")
    ranks = f" on {count(len(plan.pipeline_ranks), 'rank')}" if plan.depth > len(plan.pipeline_ranks) else ""
    meshes = f" on {mesh_words(plan)}" if has_meshes(plan) else ""
    words = f"{schedule}, {count(plan.depth, 'stage')}{ranks}{meshes}{replicas}, {count(plan.microbatches, 'microbatch', 'es')}"
    words += f", {count(plan.flush_first, 'batch', 'es')} flushed first" if plan.flush_first else ""
    optimizer = optimizer_words(config.get("optimizer"))
    return Part(first=first, end=end, plan=words[:300], optimizer=optimizer[:300], devices=devices, updates=updates)


def optimizer_words(config: Any) -> str:
    """Describe the optimizer section of a config: `adamw, learning rate 0.001, cosine, 20 warm-up steps`."""
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
    words += [f"a rate divided by the delay for {count(steps, 'update')}"] if isinstance(steps, int) else []
    return ", ".join(words)


def table(parts: Sequence[Part]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of a table of parts."""
    head = ("steps", "plan", "optimizer", "devices", "began (UTC)", "duration")
    rows: list[tuple[str, ...]] = [
        (
            f"{part.first:,} to {part.end - 1:,}" if part.end > part.first else f"none from {part.first:,}",
            part.plan,
            part.optimizer,
            str(part.devices),
            part.began or "–",
            "–" if part.seconds is None else duration(part.seconds),
        )
        for part in parts
    ]
    return head, rows
