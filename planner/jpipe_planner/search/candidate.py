"""Candidates: plans with their prices, small enough to keep thousands of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jpipe
from jpipe.schedules import PlainShape, PlanOptions
from jpipe_planner.cost.shape import is_planned, mean_delay
from jpipe_planner.profile.sharded import NO_MESH, Degrees

__all__ = ["NO_EXTRAS", "Candidate", "Extras"]


class Extras(NamedTuple):
    """Options that all plans of a search have: on request, because they change the results of a run, or because rows are cut into slices.

    Attributes:
        agree: how replicas agree, if there are several. Then all stages have the same number of replicas, and no gradients are summed.
        links: how messages between stages are compressed.
        slices: the slices of the rows, as in `jpipe.Plan`.
    """

    agree: jpipe.plan.Agreement | None = None
    links: jpipe.plan.Links | None = None
    slices: jpipe.plan.Slices | None = None

    @property
    def num_slices(self) -> int:
        """The number of slices of a row; 1 for whole rows."""
        if isinstance(self.slices, jpipe.plan.ByCost):
            return self.slices.count
        return len(self.slices) if isinstance(self.slices, tuple) else self.slices or 1

    def of_pipelines(self, width: int, depth: int) -> "Extras":
        """Return the options that w pipelines of d stages can have.

        One pipeline does not agree, and one stage sends no messages but keeps the model's bottlenecks.
        """
        agree, links = self.agree if width > 1 else None, self.links
        if links is not None and depth == 1:
            links = None if links.bottleneck is None else jpipe.plan.Links(bottleneck=links.bottleneck)
        if agree is not None and isinstance(agree.fragments, int) and agree.fragments > depth:
            agree = agree.model_copy(update={"fragments": depth})
        return Extras(agree, links, self.slices)

    def message_bytes(self, sizes: Sequence[int]) -> list[float]:
        """Return the bytes of compressed messages of these sizes, the mean of activations and gradients."""
        if self.links is None:
            return [float(size) for size in sizes]
        sent = self.links.compressed_bytes
        return [(sent("activations", size) + sent("gradients", size)) / 2 for size in sizes]


NO_EXTRAS = Extras()
"""No option is requested."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan in numbers, its costs, and whether it fits. Candidates that differ only in their costs are equal.

    Attributes:
        schedule: a name of `jpipe.schedules.SCHEDULES`.
        rows: rows per microbatch.
        microbatches: M, the microbatches per update over all replicas.
        starts: the first layer of each stage.
        replicas: number of replicas of each stage.
        policies: recomputation policy of each stage.
        options: the options of the schedule.
        keep_together: as in `jpipe.Plan`, and so are `shard_optimizer`, `agree`, `links` and `offload`.
        seconds: seconds per batch, in steady state.
        bubble: share of the devices' time in which they do not compute.
        memory: peak bytes of a device of each pipeline rank.
        sent: bytes per row that all devices together send.
        bound: what limits the speed, as text.
        over: the pipeline rank that lacks most memory, and how many bytes it lacks; None: the plan fits.
        chunks: the number of stages that each rank runs.
        degrees: the mesh of each replica.
        placed_on: the devices, or meshes, of the topology in the order of the ranks that get them; None: in the order of their numbers.
        sum_parts: for each stage the number of layers in each part of the sum of its gradients, as in `jpipe.Stage`; empty: no stage
            sums in parts.
        on_device: the seconds per batch of the same plan without `offload`, if the devices had enough memory.
        slices: the slices of the rows, as in `jpipe.Plan`.
    """

    schedule: str
    rows: int
    microbatches: int
    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    policies: tuple[str, ...]
    options: PlanOptions
    keep_together: Literal["replicas", "stages"]
    seconds: float = field(default=0.0, compare=False)
    bubble: float = field(default=0.0, compare=False)
    memory: tuple[int, ...] = field(default=(0,), compare=False)
    sent: float = field(default=0.0, compare=False)
    bound: str = field(default="", compare=False)
    over: tuple[int, int] | None = field(default=None, compare=False)
    chunks: int = 1
    degrees: Degrees = NO_MESH
    shard_optimizer: bool = False
    placed_on: tuple[int, ...] | None = None
    sum_parts: tuple[tuple[int, ...], ...] = ()
    agree: jpipe.plan.Agreement | None = None
    links: jpipe.plan.Links | None = None
    offload: jpipe.plan.HostMemory | None = None
    on_device: float = field(default=0.0, compare=False)
    slices: jpipe.plan.Slices | None = None

    @property
    def depth(self) -> int:
        """d, the number of stages."""
        return len(self.starts)

    @property
    def devices(self) -> int:
        """The number of devices that it uses."""
        return self.num_ranks * self.degrees.size

    @property
    def num_ranks(self) -> int:
        """The number of ranks: devices, or meshes, that it uses."""
        return sum(self.replicas) // self.chunks

    @property
    def num_pipeline_ranks(self) -> int:
        """The number of pipeline ranks."""
        return self.depth // self.chunks

    @property
    def batch(self) -> int:
        """Rows per update."""
        return self.rows * self.microbatches

    @property
    def samples_per_second(self) -> float:
        """Rows per second."""
        return self.batch / self.seconds

    @property
    def extras(self) -> Extras:
        """The options that were requested for the plan."""
        return Extras(self.agree, self.links, self.slices)

    @property
    def delay(self) -> float:
        """The mean delay of the stages in steady state, in updates; 0 with schedules that flush. See `jpipe.Plan.mean_delay`."""
        if jpipe.schedules.SCHEDULES[self.schedule].flushes:
            return 0.0
        return mean_delay(self.shape)

    @property
    def num_slices(self) -> int:
        """The number of slices of a row; 1 for whole rows."""
        return self.extras.num_slices

    @property
    def shape(self) -> PlainShape:
        """The part of the plan that its schedule reads. Slices count as microbatches."""
        count = self.num_slices
        return PlainShape(self.schedule, count * self.microbatches, self.replicas, self.options, self._ranks, count)

    def with_options(self, **options: Any) -> "Candidate":
        """Return the candidate with other values of some options of its schedule."""
        return replace(self, options=self.options.model_copy(update=options))

    def is_within(self, max_delay: float | None) -> bool:
        """Return whether the mean delay is at most `max_delay` updates, up to rounding. With None, any delay is allowed."""
        return max_delay is None or self.delay <= max_delay + 1e-9

    @property
    def is_late_data_parallel(self) -> bool:
        """Whether the plan is data parallelism that applies the sum of the gradients one update late."""
        return self.depth == 1 and self.num_ranks > 1 and self.agree is None and not jpipe.schedules.SCHEDULES[self.schedule].flushes

    @property
    def has_one_stage_each(self) -> bool:
        """Whether the plan has one stage on each rank, and planners search all cuts for its schedule."""
        return is_planned(self.schedule) and self.chunks == 1

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that plans of one kind share. They may differ in sizes, sums in parts and options that save memory."""
        options = self.options.vertical_sync, self.options.split_backward, self.options.update_every
        return self.schedule, *options, self.replicas, self.degrees, self.keep_together, self.chunks, self.num_slices

    @property
    def has_whole_backwards(self) -> bool:
        """Whether planners search all cuts for the schedule, backwards are not split, and sums are not in parts."""
        return is_planned(self.schedule) and self.options.split_backward == "joint" and not self.sum_parts

    @property
    def rank(self) -> tuple[object, ...]:
        """The sort key. First come plans that fit, then faster plans.

        Of equally fast plans those with newer weights, fewer ranks, chunks or slices, no offload, less memory come first, in this order.
        """
        lacks = self.over[1] if self.over else 0
        ties = (
            round(self.delay, 9),
            self.degrees.size,
            self.num_pipeline_ranks,
            self.chunks,
            self.num_slices,
            self.offload is not None,
            not self.has_whole_backwards,
            max(self.memory),
            self.batch,
            self.options.extra_in_flight,
            self.rows,
        )
        # nine digits: rounding errors of sums do not decide
        return (lacks, float(f"{-self.samples_per_second:.9g}"), *ties, self.schedule, self.keep_together, self.starts, self.replicas)

    def plan(self, ids: tuple[str, ...]) -> jpipe.Plan:
        """Return the candidate as a `jpipe.Plan` of the layers `ids`."""
        ends = (*self.starts[1:], len(ids))
        mesh, parts = {"mesh": self.degrees.mesh, "fsdp": self.degrees.fsdp}, self.sum_parts or ((),) * self.depth
        stages = [
            {"layers": ids[start:end], "replicas": count, "recompute": policy, "sum_parts": sum_parts, **mesh}
            for start, end, count, policy, sum_parts in zip(self.starts, ends, self.replicas, self.policies, parts, strict=True)
        ]
        plan = jpipe.Plan(
            schedule=self.schedule,
            microbatches=self.microbatches,
            stages=stages,
            shard_optimizer=self.shard_optimizer,
            keep_together=self.keep_together,
            ranks=self._ranks,
            agree=self.agree,
            links=self.links,
            offload=self.offload,
            slices=self.slices,
            **dict(self.options),
        )
        return plan if self.placed_on is None else plan.model_copy(update={"placement": self._placement(plan, self.placed_on)})

    def most_of_replicas(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return for each pipeline rank the largest number of its replicas, from the numbers of all ranks."""
        remaining = iter(sizes)
        return tuple(max(itertools.islice(remaining, count)) for count in self.replicas[: self.num_pipeline_ranks])

    def _placement(self, plan: jpipe.Plan, devices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the first device of each replica of each pipeline rank."""
        of_ranks = {plan.rank_positions[rank]: self.degrees.size * devices[n] for n, rank in enumerate(plan.placing_order)}
        counts = [plan.replicas[stages[0]] for stages in plan.pipeline_ranks]
        return tuple(tuple(of_ranks[p, replica] for replica in range(count)) for p, count in enumerate(counts))

    @property
    def _ranks(self) -> jpipe.schedules.Ranks | None:
        """The stages of each pipeline rank in the layout of the schedule (a V for custom orders); None: one stage for each."""
        if self.chunks == 1:
            return None
        layout = jpipe.schedules.SCHEDULES[self.schedule].layout
        return jpipe.schedules.arranged("v" if layout == "any" else layout, self.depth, self.chunks)
