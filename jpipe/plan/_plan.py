"""The plan of a run: its fields, the numbers that follow from the fields, and reading and writing a plan as JSON."""

import itertools
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, SupportsIndex

import pydantic
from pydantic import Field

from jpipe._frozen import NOTHING
from jpipe._numbers import Int
from jpipe.capabilities.registry import CapabilityOptions, divides_updates, has_parallel_pipelines, row_lengths_of, with_options
from jpipe.errors import InputError, explain
from jpipe.plan._axes import ParamAxes, Rules
from jpipe.plan._checks import check, check_layers_of_model
from jpipe.plan._even import even_ranks, even_stages
from jpipe.plan._stage import Predicted, Stage
from jpipe.plan._text import FORMAT, read_json, text_of_plan
from jpipe.schedules import SCHEDULES, PlanOptions, Ranks, arranged, name_of

Numbers = Annotated[tuple[Annotated[tuple[Annotated[Int, Field(ge=0)], ...], Field(strict=False)], ...], Field(strict=False)]
"""Lists of numbers: for each pipeline rank the stages, or the devices of the replicas."""


class _Pipeline(pydantic.BaseModel):
    """The fields of a plan that stand before its options in JSON."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["jpipe-plan/1"] = "jpipe-plan/1"
    schedule: Annotated[str, pydantic.AfterValidator(name_of)]
    microbatches: Annotated[Int, Field(ge=1, le=10**9)]
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, strict=False)]


class _Layout(pydantic.BaseModel):
    """The fields of a plan that stand between its options and the fields of capabilities in JSON."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True)

    sync_state: bool = True
    keep_together: Literal["replicas", "stages"] = "replicas"
    ranks: Numbers | None = None
    rules: Rules = NOTHING
    param_axes: ParamAxes = NOTHING


class Plan(CapabilityOptions, _Layout, PlanOptions, _Pipeline):
    """The stages, schedule, microbatches and recomputation of a run.

    When a plan is built or read, jpipe checks that it can run with its schedule. Pass fields by keyword; they cannot be changed afterwards.
    Further fields are the options of the schedule (`jpipe.schedules.PlanOptions`) and the options of capabilities
    (`jpipe.plan.CapabilityOptions`): `Plan(…, extra_in_flight=1, shard_optimizer=True)`.

    Attributes:
        format: "jpipe-plan/1", which marks JSON as a plan.
        schedule: a name of `jpipe.schedules.SCHEDULES`; other usual names, such as "1F1B", become the name there (`OTHER_NAMES`).
        microbatches: m, the number of microbatches between two updates over all replicas, 1 to 10^9; a multiple of each stage's number of
            replicas. Microbatch k runs on replica k mod r of a stage with r replicas.
        stages: for each stage a `Stage`, or a dict of the fields of a `Stage`. Together the stages have every layer exactly once, in order.
        sync_state: whether replicas average the state that forwards update (batch statistics). Under schedules that flush they average at
            each update, otherwise only when the state is read from the run. If False, each replica keeps its own state: use this for state
            that belongs to rows, such as a carried recurrent state.
        keep_together: what to place on neighbouring devices, inside a host. "replicas", the default: the replicas of a stage, which sum
            gradients (2BW section 3.3). "stages": the stages of a pipeline, which exchange activations.
        ranks: for each pipeline rank the stages that it runs in turn, in order. None: one stage per rank, or the layout that the schedule
            needs. Each replica of a rank's stages is on its own device. `even` sets this field from `chunks_per_rank`.
        rules: for each logical axis that differs from `RULES`, the mesh axis over which it is sharded, or None.
        param_axes: the logical axes of parameters, for models that name none: a pattern (`fnmatch`) for "layer id/path" of parameters, with
            a logical axis or None for each dim. The first matching pattern counts.
        placement: for each pipeline rank the device numbers of its replicas, counted from 0 over the devices of all processes, process by
            process. For a mesh it is the number of the first device; the other devices follow. None: `keep_together` determines the order.
        predicted: the prediction of a planner, or None.

    Raises:
        InputError: a field is wrong; the message says what was expected.
    """

    placement: Numbers | None = None
    predicted: Predicted | None = None
    _row_slices: int = 1

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except pydantic.ValidationError as error:
            raise explain(error, Plan, "plan") from None

    @pydantic.model_validator(mode="after")
    def _legal(self) -> "Plan":
        check(self)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> "Plan":
        """Return a copy in which some fields have other values, without checks; cached properties are computed again."""
        copied = super().model_copy(update=update, deep=deep)
        for name in vars(copied).keys() - Plan.model_fields.keys():
            del vars(copied)[name]
        return copied

    @property
    def counted(self) -> "Plan":
        """The plan as its programs count: if rows are cut into S slices, each slice is a microbatch, m S in a batch; see `row_slices`."""
        return self if self.row_slices > 1 else self._in_slices or self

    @cached_property
    def _in_slices(self) -> "Plan | None":
        """The plan `counted` of a plan that cuts rows into slices; None for any other plan."""
        if (lengths := row_lengths_of(self)) is None:
            return None
        counted = self.model_copy(update={"microbatches": self.microbatches * len(lengths)})
        counted._row_slices = len(lengths)
        return counted

    @cached_property
    def row_slices(self) -> int:
        """The number of consecutive microbatches that are slices of the same rows: 1, except in `counted`."""
        return self._row_slices

    def resolved(self, platform: str) -> "Plan":
        """Return the plan with the recomputation policies that "auto" is on a platform, "cpu", "gpu" or "tpu"."""
        stages = tuple(stage.resolved(platform) for stage in self.stages)
        return self if stages == self.stages else self.model_copy(update={"stages": stages})

    @property
    def depth(self) -> int:
        """The number of stages, d."""
        return len(self.stages)

    @property
    def layers(self) -> tuple[str, ...]:
        """All layer ids, in order."""
        return tuple(layer_id for stage in self.stages for layer_id in stage.layers)

    @cached_property
    def options(self) -> PlanOptions:
        """The options of the schedule as one value."""
        return PlanOptions.model_construct(**{name: getattr(self, name) for name in PlanOptions.model_fields})

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The number of replicas of each stage, r_s."""
        return tuple(stage.replicas for stage in self.stages)

    @cached_property
    def workers(self) -> tuple[tuple[int, int], ...]:
        """The (stage, replica) of each worker. Workers are numbered stage by stage, and within a stage replica by replica."""
        return tuple((s, replica) for s, count in enumerate(self.replicas) for replica in range(count))

    @cached_property
    def stage_workers(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each stage, replica by replica. Microbatch k runs on number k mod r of a stage's r workers."""
        numbers = iter(range(sum(self.replicas)))
        return tuple(tuple(itertools.islice(numbers, count)) for count in self.replicas)

    @cached_property
    def pipeline_ranks(self) -> Ranks:
        """The stages of each pipeline rank, in order. The replicas of a pipeline rank are ranks that run the same stages."""
        if self.ranks is not None:
            return self.ranks
        layout = SCHEDULES[self.schedule].layout
        return arranged("v", self.depth, 2) if layout == "v" and self.depth % 2 == 0 else arranged("straight", self.depth, 1)

    @cached_property
    def rank_positions(self) -> tuple[tuple[int, int], ...]:
        """The (pipeline rank, replica) of each rank. Ranks are numbered by pipeline rank, and within one by replica."""
        return tuple((p, replica) for p, stages in enumerate(self.pipeline_ranks) for replica in range(self.replicas[stages[0]]))

    @cached_property
    def rank_workers(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each rank, which take turns on the rank's device."""
        return tuple(tuple(self.stage_workers[s][replica] for s in self.pipeline_ranks[p]) for p, replica in self.rank_positions)

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each worker."""
        ranks = {w: rank for rank, workers in enumerate(self.rank_workers) for w in workers}
        return tuple(ranks[w] for w in range(len(ranks)))

    @property
    def placing_order(self) -> tuple[int, ...]:
        """The ranks in the order in which devices are assigned to them without a `placement`; `keep_together` determines it."""
        key = (lambda rank: rank) if self.keep_together == "replicas" else (lambda rank: self.rank_positions[rank][::-1])
        return tuple(sorted(range(len(self.rank_positions)), key=key))

    def worker(self, s: int, k: int) -> int:
        """Return the worker of stage s that runs microbatch k."""
        return self.stage_workers[s][k // self.row_slices % self.replicas[s]]

    def microbatches_per_update(self, s: int) -> int:
        """Return M_s, the number of microbatches over all replicas in an update of stage s: m, or r_s with update_every "replicas"."""
        return self.microbatches if self.update_every == "batch" else self.replicas[s] * self.row_slices

    def updates_per_batch(self, s: int) -> int:
        """Return m / M_s, the number of updates of stage s in a batch: 1, or more with update_every "replicas"."""
        return self.microbatches // self.microbatches_per_update(s)

    @cached_property
    def has_parallel_pipelines(self) -> bool:
        """Whether the replicas of all stages are parallel pipelines, each with its own weights and updates, as with `agree`."""
        return has_parallel_pipelines(self)

    @cached_property
    def divides_updates(self) -> bool:
        """Whether the replicas of a stage update different entries of its weights, as with `shard_optimizer`."""
        return divides_updates(self)

    def sums_gradients(self, s: int) -> bool:
        """Return whether the replicas of stage s sum their gradients for each update. They do not if they are parallel pipelines."""
        return self.replicas[s] > 1 and not self.has_parallel_pipelines

    def delay(self, s: int, update: int) -> float:
        """Return the mean age, in updates, of the weights that an update's gradients were computed with.

        The delay depends only on the plan and the number of the update. It is 0 with schedules that flush, and smaller for the first
        updates of a run, while the pipeline fills.

        Args:
            s: the stage.
            update: the number of the stage's update, counted from 0.
        """
        return SCHEDULES[self.schedule].delay(self.counted, s, update)

    @cached_property
    def delays(self) -> tuple[float, ...]:
        """The mean `delay` of each stage's updates once the pipeline is full, in updates; 0 with schedules that flush."""
        return SCHEDULES[self.schedule].delays(self.counted)

    @property
    def mean_delay(self) -> float:
        """The mean of `delays` over the stages, in updates: 0 with schedules that flush, 1 with `pipedream_2bw`."""
        return sum(self.delays) / self.depth

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
        recompute: str | Sequence[str] = "auto",
        mesh: Mapping[str, SupportsIndex] | Sequence[Mapping[str, SupportsIndex]] | None = None,
        fsdp: bool = False,
        sum_parts: SupportsIndex = 1,
        **fields: Any,
    ) -> "Plan":
        """Return a plan with the same number of layers in each stage; the first stages take the remainder.

        Args:
            layers: all layer ids in order.
            num_stages: number of stages, at most the number of layers.
            schedule: as the field of `Plan`; the default flushes, so that training equals training without a pipeline.
            microbatches: the number of microbatches per update, over all replicas; by default 4.
            replicas: the number of replicas of every stage, or one number for each stage.
            chunks_per_rank: how many stages each rank runs, in the layout of the schedule; by default 1, or 2 if the schedule needs a V. It
                divides the number of stages.
            recompute: a policy for all stages, or one policy for each stage.
            mesh: axes and sizes of the mesh of every stage, or one mesh for each stage; None: one device.
            fsdp: the field `fsdp` of every `Stage`.
            sum_parts: the number of even parts into which the layers of each stage with replicas are divided (see `Stage`); a stage has at
                most one part per layer.
            fields: the other fields of `Plan`.

        Raises:
            InputError: there are more stages than layers; policies, replicas or meshes are for another number of stages; or the plan is
                illegal.

        Example:
            >>> Plan.even(["a", "b", "c"], num_stages=2, schedule="gpipe", microbatches=4).stages[0].layers
            ('a', 'b')
        """
        schedule = name_of(schedule)
        stages = with_options(even_stages(layers, num_stages, recompute, replicas, mesh, fsdp), sum_parts=sum_parts)
        if chunks_per_rank is not None and "ranks" not in fields:
            fields["ranks"] = even_ranks(schedule, len(stages), len(layers), chunks_per_rank)
        return cls(schedule=schedule, microbatches=microbatches, stages=stages, **fields)

    def __repr__(self) -> str:
        return text_of_plan(self)

    __str__ = __repr__

    def check_layers(self, ids: Sequence[str]) -> None:
        """Check that the stages of the plan have exactly the layers of a model.

        Args:
            ids: the layer ids of the model, in order.

        Raises:
            InputError: the plan does not have exactly these layers in this order.
        """
        check_layers_of_model(self.layers, ids)

    def to_json(self) -> str:
        """Return the plan as JSON text, which `from_json` reads."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "plan") -> "Plan":
        """Read a plan from JSON text.

        Args:
            text: the text that `to_json` has returned, or that a person has written.
            where: the name of the source, such as a file, for error messages.

        Raises:
            InputError: the text is not JSON (the message has line and column), it is not a plan of this format, or the plan cannot run.
        """
        data = read_json(text, FORMAT, where)
        try:
            return cls(**data)
        except InputError as error:
            raise error.at(where) from None
