"""What to run, as plain JSON data: stages, schedule, microbatches, recomputation. It has no algorithm; it only refuses what cannot run."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, SupportsIndex

import numpy as np
import pydantic
from pydantic import Field

from jpipe._frozen import NOTHING, FrozenMapping
from jpipe._html import html_table
from jpipe.errors import InputError, explain, nearest, short, shortened
from jpipe.schedules import SCHEDULES, Ranks, arranged

__all__ = ["RECOMPUTE", "RULES", "Predicted", "mesh_rules", "read_json"]  # the others are in jpipe itself

FORMAT = "jpipe-plan/1"
RECOMPUTE = (
    "none",
    "full",
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)
"""Recomputation of a stage: `none`, `full` (only the stage input is kept), or a policy of `jax.checkpoint_policies` by name."""

RULES: Mapping[str, str | None] = {
    "batch": "data",
    "embed": None,
    "mlp": "model",
    "heads": "model",
    "kv_heads": "model",
    "vocab": "model",
}
"""By logical axis the axis of a stage's mesh over which it is sharded, None: over none. `Plan.rules` adds to these and replaces them."""


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, np.integer) else value


def _mesh(value: Any) -> FrozenMapping[int]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected axes and sizes such as {{'data': 2, 'model': 4}}, found {short(value)}")
    for axis, size in value.items():
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ValueError(f"expected the name of an axis, such as 'model', found {short(axis)}")
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or not 1 <= size <= 65536:
            raise ValueError(f"expected a size of 1 to 65536 for the axis '{axis}', found {short(size)}")
    return FrozenMapping({axis: int(size) for axis, size in value.items()})


def _rules(value: Any) -> FrozenMapping[str | None]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected axes of meshes by logical axis, such as {{'mlp': 'model'}}, found {short(value)}")
    for name, axis in value.items():
        if not isinstance(name, str) or not (axis is None or isinstance(axis, str)):
            raise ValueError(f"expected the axis of a mesh or None for {short(name)}, found {short(axis)}")
    return FrozenMapping(value)


def _param_axes(value: Any) -> FrozenMapping[tuple[str | None, ...]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected logical axes by pattern, such as {{'*/kernel': ['embed', 'mlp']}}, found {short(value)}")
    for pattern, axes in value.items():
        fits = isinstance(axes, (list, tuple)) and all(axis is None or isinstance(axis, str) for axis in axes)
        if not isinstance(pattern, str) or not fits:
            raise ValueError(f"expected a list of a logical axis or None for each dim of {short(pattern)}, found {short(axes)}")
    return FrozenMapping({pattern: tuple(axes) for pattern, axes in value.items()})


def _lists(axes: Mapping[str, tuple[str | None, ...]]) -> dict[str, list[str | None]]:
    return {pattern: list(names) for pattern, names in axes.items()}


Mesh = Annotated[FrozenMapping[int], pydantic.PlainValidator(_mesh), pydantic.PlainSerializer(dict)]
"""Sizes by axis."""


Int = Annotated[int, pydantic.BeforeValidator(_as_int)]
"""An integer, Python's or NumPy's; in a JSON file Python's."""


class Stage(pydantic.BaseModel):
    """Consecutive layers, by id, that one worker (or several replicas of it) runs.

    Attributes:
        layers: ids of the layers, in order, of printable characters; at least one.
        replicas: number of workers that share the stage, 1 by default, at most 65536.
        recompute: one of `RECOMPUTE`, "none" by default.
        mesh: axes and sizes of the devices of each replica, such as `{"data": 2, "model": 4}`; empty, the default: one device. The axes
            that the rules of the plan name shard the rows of a microbatch and the weights.
        fsdp: shard the weights over the axis of the rows, too; they are gathered where they are used. False by default.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    layers: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    replicas: Annotated[Int, Field(ge=1, le=65536)] = 1
    recompute: str = "none"
    mesh: Mesh = NOTHING
    fsdp: bool = False

    @property
    def shape(self) -> FrozenMapping[int]:
        """The mesh without axes of size 1, which shard nothing."""
        return FrozenMapping({axis: size for axis, size in self.mesh.items() if size > 1})

    @property
    def devices_each(self) -> int:
        """How many devices each replica has: the size of its mesh."""
        return math.prod(self.mesh.values())

    @pydantic.field_validator("recompute")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        if name not in RECOMPUTE:
            raise ValueError(f"unknown recomputation policy {name!r}; {nearest(name, RECOMPUTE)}")
        return name


class Predicted(pydantic.BaseModel):
    """What a planner expects of a plan, to be held against the run; nothing runs differently for it.

    Attributes:
        batch_seconds: of one batch.
        bubble: share of the workers' time in which they do not compute.
        peak_bytes: for each rank, without replicas, the most bytes that a device holds, scratch memory of its programs included.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    batch_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    bubble: Annotated[float, Field(ge=0, le=1)]
    peak_bytes: Annotated[tuple[Annotated[Int, Field(ge=0)], ...], Field(strict=False)]


Numbers = Annotated[tuple[Annotated[tuple[Annotated[Int, Field(ge=0)], ...], Field(strict=False)], ...], Field(strict=False)]
"""Lists of numbers: for each rank its stages, or for each rank the devices of its replicas."""


class Plan(pydantic.BaseModel):
    """Stages, schedule, microbatches and recomputation of one run. A plan that was built or read is legal for its schedule.

    Fields are given by keyword and cannot be changed afterwards.

    Attributes:
        format: "jpipe-plan/1", which marks the JSON as a plan.
        schedule: a name of `jpipe.schedules.SCHEDULES`.
        microbatches: m, the number of microbatches between two updates over all replicas, 1 to 10^9; a multiple of each stage's
            replicas. Microbatch k runs on replica k mod r of a stage with r replicas.
        stages: a `Stage` for each, or a dict of its fields; every layer exactly once, in order, cut anywhere.
        extra_in_flight: additional microbatches in flight a link, 0 (n_s = d - s) to 64, to hide the latency of slow links.
        vertical_sync: for `pipedream`: every stage reads the version that the first stage read. False by default.
        noam: for `pipedream` with replicas: the paper's number in flight (NOAM, section 3.2), sums over replicas waited for at
            once. False, the default: as many as keep every worker busy, sums hidden behind one more microbatch.
        update_every: "batch", the default: all stages update after each batch. "replicas": stage s updates after r_s microbatches,
            as in the original PipeDream; stages with different replicas update at different rates. For `pipedream`.
        flush_first: for schedules that do not flush: flush after each of the first so many batches, so that these read the newest
            weights; then run freely. A warm-up without staleness. 0 by default; needs update_every "batch".
        split_backward: "joint", the default, or "early": compute each backward in two halves, and send the input gradient after the first.
            For `pipedream_flush`, `pipedream` and `pipedream_2bw`; the zero-bubble schedules always split.
        scale_learning_rate: with update_every "replicas", multiply the updates of stage s by r_s / r_0, as the original does.
        sync_state: whether replicas average the state that forwards update (batch statistics): with each update under schedules
            that flush, else when it is read out of the run; without, each replica keeps its own. True by default; False for state
            that belongs to rows, such as a carried recurrent state.
        keep_together: what gets neighbouring devices, so that it stays inside a host: "replicas", the default, those of a stage (the
            sums of gradients, 2BW section 3.3); "stages", those of a pipeline (the activations).
        ranks: for each rank the stages that it runs by turns on its device, in order; None: one stage for each rank, or what the schedule
            needs. With replicas, each replica of these stages is on a device of its own. `even` fills it from `chunks_per_rank`.
        order: for `auto_zero_bubble`: what each rank computes in a batch, such as "F0.0 F0.1 I0.0 W0.0": a forward of stage 0,
            microbatch 0, and so on; microbatches of one replica, counted from 0 in each batch. See `jpipe.schedules.greedy_order`.
        order_limit: for `auto_zero_bubble`: the most microbatches that a rank may hold between forward and the end of the backward, those
            of all its stages added up; an order that holds more is refused. None: no limit.
        rules: by logical axis the axis of the meshes over which it is sharded, None for none: what differs from `RULES`.
        param_axes: for models that name no logical axes: for parameters whose "layer id/path" matches a pattern (`fnmatch`), a logical
            axis or None for each dim. A parameter that matches several has the first.
        shard_optimizer: replicas of a stage share its optimizer state (ZeRO stage 1): each updates some of the layers, and they send each
            other what they have updated. The numbers are the same. For schedules that flush. False by default.
        placement: for each rank the numbers of its replicas' devices, counted from 0 over the devices of all processes, process by
            process; with a mesh the first device of each, the others follow it. None: in order, as `keep_together` says.
        predicted: what a planner expects of the plan; None: it was not asked.

    Raises:
        InputError: any part that is wrong, with what was expected.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    format: Literal["jpipe-plan/1"] = "jpipe-plan/1"
    schedule: str
    microbatches: Annotated[Int, Field(ge=1, le=10**9)]
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, strict=False)]
    extra_in_flight: Annotated[Int, Field(ge=0, le=64)] = 0
    vertical_sync: bool = False
    noam: bool = False
    update_every: Literal["batch", "replicas"] = "batch"
    flush_first: Annotated[Int, Field(ge=0, le=10**9)] = 0
    split_backward: Literal["joint", "early"] = "joint"
    scale_learning_rate: bool = False
    sync_state: bool = True
    keep_together: Literal["replicas", "stages"] = "replicas"
    ranks: Numbers | None = None
    order: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    order_limit: Annotated[Int, Field(ge=1)] | None = None
    rules: Annotated[FrozenMapping[str | None], pydantic.PlainValidator(_rules), pydantic.PlainSerializer(dict)] = NOTHING
    param_axes: Annotated[FrozenMapping[tuple[str | None, ...]], pydantic.PlainValidator(_param_axes), pydantic.PlainSerializer(_lists)] = (
        FrozenMapping({})
    )
    shard_optimizer: bool = False
    placement: Numbers | None = None
    predicted: Predicted | None = None

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            raise explain(error, Plan, "plan") from None

    @pydantic.field_validator("order", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if isinstance(value, (str, bytes)):
            raise ValueError(f"expected a list of texts, one for each rank, found {short(value)}; put it into a list")
        return value

    @pydantic.model_validator(mode="after")
    def _legal(self) -> "Plan":
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; {nearest(self.schedule, SCHEDULES)}")
        _check_layers(self.stages)
        _check_ranks(self)
        _check_per_rank(self)
        _check_meshes(self)
        _check_options(self)
        _check_microbatches(self)
        if reason := SCHEDULES[self.schedule].refuses(self):
            raise ValueError(reason)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Plan":
        """A copy with other values of some fields, which are not checked. What was computed from the old ones is computed again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - Plan.model_fields.keys():
            del vars(copied)[name]
        return copied

    @property
    def depth(self) -> int:
        """d, the number of stages."""
        return len(self.stages)

    @property
    def layers(self) -> tuple[str, ...]:
        """All layer ids, in order."""
        return tuple(layer_id for stage in self.stages for layer_id in stage.layers)

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """r_s, the number of replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @cached_property
    def workers(self) -> tuple[tuple[int, int], ...]:
        """(stage, replica) of each worker. Workers are numbered stage by stage, the replicas of a stage one after the other."""
        return tuple((s, replica) for s, count in enumerate(self.replicas) for replica in range(count))

    @cached_property
    def stage_workers(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each stage, replica by replica; microbatch k is with number k mod r of them."""
        numbers = iter(range(sum(self.replicas)))
        return tuple(tuple(itertools.islice(numbers, count)) for count in self.replicas)

    @cached_property
    def rank_stages(self) -> Ranks:
        """For each rank, counted without replicas, the stages that it runs, in order."""
        if self.ranks is not None:
            return self.ranks
        layout = SCHEDULES[self.schedule].layout
        return arranged("v", self.depth, 2) if layout == "v" and self.depth % 2 == 0 else arranged("straight", self.depth, 1)

    @cached_property
    def rank_places(self) -> tuple[tuple[int, int], ...]:
        """(number in `rank_stages`, replica) of each rank: with replicas each replica is a rank, those of the first stages first."""
        return tuple((p, replica) for p, stages in enumerate(self.rank_stages) for replica in range(self.replicas[stages[0]]))

    @cached_property
    def rank_workers(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each rank, as `rank_places` counts them, which take turns on its device."""
        return tuple(tuple(self.stage_workers[s][replica] for s in self.rank_stages[p]) for p, replica in self.rank_places)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each worker, as `rank_places` counts them."""
        found = {w: rank for rank, workers in enumerate(self.rank_workers) for w in workers}
        return tuple(found[w] for w in range(len(found)))

    @property
    def placing_order(self) -> tuple[int, ...]:
        """The ranks in the order in which they take devices where `placement` names none, as `keep_together` says."""
        key = (lambda rank: rank) if self.keep_together == "replicas" else (lambda rank: self.rank_places[rank][::-1])
        return tuple(sorted(range(len(self.rank_places)), key=key))

    def worker(self, s: int, k: int) -> int:
        """The worker of stage s that runs microbatch k."""
        return self.stage_workers[s][k % self.replicas[s]]

    def microbatches_per_update(self, s: int) -> int:
        """M_s, how many microbatches, over all its replicas, an update of stage s sees: m, or r_s with update_every "replicas"."""
        return self.microbatches if self.update_every == "batch" else self.replicas[s]

    def updates_per_batch(self, s: int) -> int:
        """m / M_s, how many updates stage s makes a batch: 1, or more with update_every "replicas"."""
        return self.microbatches // self.microbatches_per_update(s)

    @classmethod
    def even(
        cls,
        layers: Sequence[str],
        num_stages: SupportsIndex,
        schedule: str = "pipedream_flush",
        microbatches: SupportsIndex = 4,
        *,
        replicas: SupportsIndex | Sequence[SupportsIndex] = 1,
        chunks_per_rank: SupportsIndex | None = None,
        recompute: str | Sequence[str] = "none",
        mesh: Mapping[str, SupportsIndex] | Sequence[Mapping[str, SupportsIndex]] | None = None,
        fsdp: bool = False,
        **fields: Any,
    ) -> "Plan":
        """A plan whose stages hold equally many layers (the first ones take the remainder).

        Args:
            layers: all layer ids in order.
            num_stages: number of stages, at most the number of layers.
            schedule: a name of `jpipe.schedules.SCHEDULES`; by default one that flushes, so that training is as without a pipeline.
            microbatches: microbatches per update, over all replicas; by default 4.
            replicas: of every stage, or one number for each.
            chunks_per_rank: how many stages each rank runs, in the layout of the schedule; by default 1, or 2 where it needs a V. The
                stages are a multiple of it.
            recompute: a policy for all stages, or one for each.
            mesh: axes and sizes of the devices of every stage, or of each; None: one device.
            fsdp: for all stages, as in `Stage`.
            fields: the other fields of `Plan`.

        Raises:
            InputError: more stages than layers, a number of policies or replicas that is not that of the stages, or an illegal plan.

        Example:
            >>> Plan.even(["a", "b", "c"], num_stages=2, schedule="gpipe", microbatches=4).stages[0].layers
            ('a', 'b')
        """
        layers = _layer_ids(layers)
        if not isinstance(num_stages, (int, np.integer)) or isinstance(num_stages, bool):
            raise InputError(f"plan: num_stages: expected an integer, found {short(num_stages)}")
        num_stages = int(num_stages)
        if not 1 <= num_stages <= len(layers):
            raise InputError(f"plan: expected between 1 and {len(layers)} stages (the number of layers), found {num_stages}")
        policies = _for_each(recompute, str, num_stages, "recompute")
        counts = _for_each(replicas, (int, np.integer), num_stages, "replicas")
        meshes = _for_each({} if mesh is None else mesh, Mapping, num_stages, "mesh")
        for what, found in (("recomputation policy", policies), ("number of replicas", counts), ("mesh", meshes)):
            if len(found) != num_stages:
                raise InputError(f"plan: expected one {what} for all or one for each of {num_stages} stages, found a list of {len(found)}")
        size, rest = divmod(len(layers), num_stages)
        starts = [s * size + min(s, rest) for s in range(num_stages + 1)]
        stages = [
            {"layers": tuple(layers[a:b]), "replicas": count, "recompute": policy, "mesh": sizes, "fsdp": fsdp}
            # The last start is an end only.
            for a, b, count, policy, sizes in zip(starts, starts[1:], counts, policies, meshes, strict=False)
        ]
        if chunks_per_rank is not None and "ranks" not in fields:
            fields["ranks"] = _even_ranks(schedule, num_stages, len(layers), chunks_per_rank)
        return cls(schedule=schedule, microbatches=microbatches, stages=stages, **fields)

    def __repr__(self) -> str:
        stages = shortened(
            [f"[{shortened(s.layers)}]{_mesh_text(s)}" + (f" × {s.replicas}" if s.replicas > 1 else "") for s in self.stages]
        )
        return f"Plan({self.schedule}, {self.microbatches} microbatches, {self.depth} stages: {stages}{self._options()})"

    __str__ = __repr__

    def _options(self) -> str:
        special = (name for name, field in Plan.model_fields.items() if not field.is_required() and getattr(self, name) != field.default)
        return "".join(
            f", {name}={getattr(self, name)!r}"
            for name in special
            if name not in ("placement", "predicted", "order", "rules", "param_axes")
        )

    def _repr_html_(self) -> str:
        if self.placement is None:
            return html_of_plan(self, "Plan")
        of_ranks = [str(number) for numbers in self.placement for number in numbers]
        return html_of_plan(self, "Plan", devices=[of_ranks[rank] for rank in self.rank_of])

    def check_layers(self, ids: Sequence[str]) -> None:
        """Refuse a plan for another model.

        Args:
            ids: the layer ids of the model, in order.

        Raises:
            InputError: the plan does not hold exactly these layers in this order.
        """
        missing = [layer_id for layer_id in ids if layer_id not in self.layers]
        unknown = [layer_id for layer_id in self.layers if layer_id not in ids]
        if missing:
            raise InputError(f"plan: layer '{missing[0]}' of the model is in no stage; add it to one")
        if unknown:
            raise InputError(f"plan: layer '{unknown[0]}' is not in the model; {nearest(unknown[0], ids)}")
        for found, expected in zip(self.layers, ids, strict=True):
            if found != expected:
                raise InputError(f"plan: the stages hold layer '{found}' where the model has '{expected}'; keep the model's order")

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` reads it back."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "plan") -> "Plan":
        """Read a plan from JSON text.

        Args:
            text: what `to_json` wrote, or a person.
            where: names the source (a file, say) in error messages.

        Raises:
            InputError: no JSON (with line and column), not a plan of this format, or an illegal plan.
        """
        data = read_json(text, FORMAT, where)
        try:
            return cls(**data)
        except InputError as error:
            raise InputError(*(where + line.removeprefix("plan") for line in error.args)) from None


def _check_layers(stages: Sequence[Stage]) -> None:
    """Refuse names that cannot be shown, and layers that are in two stages."""
    owner: dict[str, int] = {}
    for s, stage in enumerate(stages):
        for layer_id in stage.layers:
            if not layer_id or not layer_id.isprintable():  # a plan may be a stranger's, and ids are shown on a terminal
                raise ValueError(f"stages.{s}.layers: expected names of printable characters, found {short(layer_id)}")
            if layer_id in owner:
                raise ValueError(
                    f"layer '{layer_id}' is in stage {owner[layer_id]} and again in stage {s}; every layer is in one stage, once"
                )
            owner[layer_id] = s


def _check_ranks(plan: Plan) -> None:
    """Refuse ranks that do not run each stage once, or whose stages have different replicas."""
    if plan.ranks is None:
        return
    found, shown = sorted(s for stages in plan.ranks for s in stages), [list(stages) for stages in plan.ranks]
    if found != list(range(plan.depth)) or not all(plan.ranks):
        expected = f"each of the stages 0 to {plan.depth - 1} once, on ranks of one stage or more"
        raise ValueError(f"ranks: expected {expected}, found {shown}; put each of them on one rank, or leave out ranks")
    for p, stages in enumerate(plan.ranks):
        if list(stages) != sorted(stages):
            raise ValueError(f"ranks.{p}: expected the stages of a rank in order, found {list(stages)}; use {sorted(stages)}")
        if len({plan.stages[s].replicas for s in stages}) > 1:
            counts = [plan.stages[s].replicas for s in stages]
            expected = f"expected as many replicas of each of its stages {list(stages)}, found {counts}"
            raise ValueError(f"ranks.{p}: {expected}; give these stages the same replicas, or put them on different ranks")


def _check_meshes(plan: Plan) -> None:
    """Refuse meshes that nothing is sharded over, different ones on a rank, and rules for meshes that there are not."""
    axes = {axis for stage in plan.stages for axis in stage.mesh}
    rules = mesh_rules(plan)
    for s, stage in enumerate(plan.stages):
        for axis in stage.mesh:
            if axis not in rules.values():
                named = ", ".join(sorted({f"'{name}'" for name in rules.values() if name is not None}))
                raise ValueError(
                    f"stages.{s}.mesh: expected axes that the rules name, {named}, found '{axis}', over which nothing would be sharded; "
                    f"rename it, or add a rule such as {{'mlp': '{axis}'}}"
                )
        if stage.fsdp and rules["batch"] not in stage.mesh:
            expected = f"a mesh with the axis '{rules['batch']}', over which the rows are sharded"
            raise ValueError(f"stages.{s}.fsdp: expected {expected}, found {dict(stage.mesh)}; add it, or remove fsdp")
    for name, found in plan.rules.items():
        if found is not None and found not in axes:
            meshes = ", ".join(f"'{axis}'" for axis in sorted(axes)) or "no mesh"
            raise ValueError(
                f"rules.{name}: expected an axis of the stages' meshes, {meshes}, found '{found}'; remove the rule or add the axis"
            )
    for p, stages in enumerate(plan.rank_stages):
        if len({(plan.stages[s].shape, plan.stages[s].fsdp) for s in stages}) > 1:
            found_meshes = [dict(plan.stages[s].mesh) for s in stages]
            expected = f"the same mesh and fsdp for all stages of a rank, {list(stages)}"
            raise ValueError(f"ranks.{p}: expected {expected}, found {found_meshes}; they take turns on its devices")
    if plan.shard_optimizer and max(plan.replicas) == 1:
        raise ValueError("shard_optimizer: expected a stage with replicas, found none; remove it, or give a stage replicas")
    if plan.shard_optimizer and not SCHEDULES[plan.schedule].flushes:
        names = ", ".join(f"'{name}'" for name, schedule in SCHEDULES.items() if schedule.flushes)
        raise ValueError(
            f"shard_optimizer: expected a schedule that flushes, {names}, found '{plan.schedule}', whose replicas update at different "
            "times, while forwards go on; remove it, or use one of these"
        )


def mesh_rules(plan: Plan) -> dict[str, str | None]:
    """By logical axis the axis of a mesh over which it is sharded, None for none: `RULES`, and the plan's own."""
    return {**RULES, **plan.rules}


def _check_per_rank(plan: Plan) -> None:
    """Refuse a placement or a prediction of other ranks."""
    of = "stages" if plan.depth == len(plan.rank_stages) else "ranks"
    if plan.placement is not None:
        found, expected = [len(devices) for devices in plan.placement], [plan.replicas[stages[0]] for stages in plan.rank_stages]
        if found != expected:
            raise ValueError(f"placement names {found} devices for the {of}, expected {expected} (one for each replica)")
    if plan.predicted is not None and len(plan.predicted.peak_bytes) != len(plan.rank_stages):
        peaks, ranks = len(plan.predicted.peak_bytes), len(plan.rank_stages)
        raise ValueError(f"predicted.peak_bytes: expected one number for each of {ranks} {of}, found {peaks}; plan again")


def _check_options(plan: Plan) -> None:
    """Refuse options that other schedules read and this one does not, and options that exclude each other."""
    own = SCHEDULES[plan.schedule].options
    for option in dict.fromkeys(option for schedule in SCHEDULES.values() for option in schedule.options):
        if option in own or getattr(plan, option) == Plan.model_fields[option].default:
            continue
        if option == "extra_in_flight":
            limit = f"expected extra_in_flight 0, found {plan.extra_in_flight}"
            raise ValueError(f"the schedule '{plan.schedule}' has no in-flight limit to raise: {limit}")
        others = [f"'{name}'" for name, schedule in SCHEDULES.items() if option in schedule.options]
        of = f"schedule{'s' if len(others) > 1 else ''} {', '.join(others)}"
        raise ValueError(f"{option} is an option of the {of}, found schedule '{plan.schedule}'; remove it")
    if plan.noam and plan.extra_in_flight:
        raise ValueError(f"noam fixes the number in flight: expected extra_in_flight 0, found {plan.extra_in_flight}")
    if plan.flush_first and plan.update_every != "batch":
        raise ValueError(f"flush_first needs update_every 'batch', found {plan.update_every!r}; change one of them")
    if plan.scale_learning_rate and plan.update_every != "replicas":
        raise ValueError("scale_learning_rate is for update_every 'replicas', found 'batch'; remove it")


def _check_microbatches(plan: Plan) -> None:
    """Refuse a number of microbatches that the replicas of a stage cannot share evenly."""
    common = math.lcm(*plan.replicas)
    if plan.microbatches % common:
        raise ValueError(
            f"microbatches: expected a multiple of the replicas of each stage, {list(plan.replicas)}, so of {common}, "
            f"found {plan.microbatches}; use {-(-plan.microbatches // common) * common}, or other replicas"
        )


def _mesh_text(stage: Stage) -> str:
    """The mesh of a stage in a few words, after a space; nothing where it has none."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in stage.mesh.items())
    return f" on ({sizes}{', fsdp' if stage.fsdp else ''})" if stage.mesh else ""


def html_of_plan(plan: Plan, name: str, facts: str = "", devices: Sequence[str] | None = None) -> str:
    """The stages of a plan as a table for a notebook, the rest in its caption.

    Args:
        plan: what to show.
        name: of what has the plan.
        facts: what else to say of it, from a comma on.
        devices: the device of each worker; None: no such column.
    """
    caption = f"{name}: {plan.schedule}, {plan.microbatches} microbatches, {plan.depth} stages{plan._options()}{facts}"
    shares = plan.depth > len(plan.rank_stages)
    meshes = any(stage.mesh for stage in plan.stages)
    head = [
        "stage",
        "layers",
        "replicas",
        "recompute",
        *(("mesh",) if meshes else ()),
        *(("rank",) if shares else ()),
        *(() if devices is None else ("devices",)),
    ]
    rows = [[str(s), shortened(stage.layers), str(stage.replicas), stage.recompute] for s, stage in enumerate(plan.stages)]
    if meshes:
        for row, stage in zip(rows, plan.stages, strict=True):
            row.append(_mesh_text(stage).strip() or "–")
    if shares:
        for row, workers in zip(rows, plan.stage_workers, strict=True):
            row.append(shortened([str(plan.rank_of[w]) for w in workers]))
    if devices is not None:
        for row, workers in zip(rows, plan.stage_workers, strict=True):
            row.append(shortened([devices[w] for w in workers]))
    return html_table(caption, head, rows)


def _layer_ids(layers: Any) -> Sequence[str]:
    """What was given as all layer ids, in order."""
    if not isinstance(layers, (Sequence, Mapping)):
        hint = "its ids, as stack.ids" if hasattr(layers, "ids") else "a list of them"
        raise InputError(f"plan: expected the layer ids in order, found {type(layers).__name__}; give {hint}")
    return list(layers)


def _even_ranks(schedule: str, num_stages: int, num_layers: int, chunks: Any) -> Ranks | None:
    """The ranks of `chunks` stages each, as the schedule lays them out."""
    if not isinstance(chunks, (int, np.integer)) or isinstance(chunks, bool) or chunks < 1:
        raise InputError(f"plan: chunks_per_rank: expected an integer of 1 or more, found {short(chunks)}")
    if schedule not in SCHEDULES:
        return None  # which the plan refuses
    rules = SCHEDULES[schedule]
    if reason := rules.refuses_chunks(int(chunks)):
        raise InputError(f"plan: chunks_per_rank: {reason}")
    if num_stages % chunks:
        whole = [count for count in (-(-num_stages // chunks) * chunks, num_stages // chunks * chunks) if 1 <= count <= num_layers]
        fewer = next(count for count in range(int(min(chunks, num_stages)), 0, -1) if num_stages % count == 0)
        # a V has no other number of chunks
        change = [*(f"{count} stages" for count in whole[:1]), *([] if rules.layout == "v" else [f"chunks_per_rank {fewer}"])]
        raise InputError(
            f"plan: expected stages that are a multiple of chunks_per_rank {chunks}, found {num_stages}; "
            f"use {' or '.join(change) or 'more layers'}"
        )
    return None if chunks == 1 else arranged(rules.layout, num_stages, int(chunks))


def _for_each(value: Any, kind: Any, num_stages: int, what: str) -> list[Any]:
    """One value for all stages, or what was given for each of them."""
    if isinstance(value, kind):
        return [value] * num_stages
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InputError(f"plan: {what}: expected one for all stages or a list of one for each, found {short(value)}")
    return list(value)


def read_json(text: str | bytes, expected: str, where: str) -> dict[str, Any]:
    """The JSON object in a text, if its key `format` says that it is what is expected.

    Args:
        text: somebody's; a key that occurs twice gets a value that no field takes.
        expected: the format, such as "jpipe-plan/1".
        where: names the source (a file, say) in error messages.

    Raises:
        InputError: no JSON (with line and column), no object, or of another format.
    """
    kind = expected.removeprefix("jpipe-").partition("/")[0]
    if not isinstance(text, (str, bytes, bytearray)):
        raise InputError(f"{where}: expected a {kind} as JSON text, found {type(text).__name__}")
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}: expected a {kind} as JSON, found text that is none or is cut off "
            f"at line {error.lineno}, column {error.colno} ({error.msg})"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"{where}: expected a {kind} as JSON, found bytes that are no text in UTF-8; give what to_json wrote") from None
    except (RecursionError, ValueError):
        raise InputError(f"{where}: expected a {kind} as JSON, found text nested too deeply, or a number of thousands of digits") from None
    if not isinstance(data, dict) or data.get("format") != expected:
        found = short(data.get("format") if isinstance(data, dict) else type(data).__name__)
        raise InputError(f'{where}: expected a JSON object with "format": "{expected}", found {found}; is this a {kind} of jpipe?')
    return data


class _Twice:
    """What JSON says of a key that occurs twice. No field takes it, so that it is refused in its place."""

    def __repr__(self) -> str:
        return "the key twice"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict; of a key that occurs twice, `json` by itself silently takes the last."""
    times = Counter(key for key, _ in pairs)
    return {key: value if times[key] == 1 else _Twice() for key, value in pairs}
