"""Schedules as data: the order in which each rank computes, and the weight version that each computation reads."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from jpipe.ops import OPS
from jpipe.schedules._options import NO_OPTIONS, PlanOptions

Ranks = tuple[tuple[int, ...], ...]
"""For each pipeline rank the stages that it runs, in order. All replicas of a stage belong to the same pipeline rank."""


@runtime_checkable
class Shape(Protocol):
    """The part of a plan that a schedule reads. It has no layers."""

    @property
    def schedule(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def replicas(self) -> tuple[int, ...]: ...
    @property
    def options(self) -> PlanOptions: ...
    @property
    def pipeline_ranks(self) -> Ranks: ...
    @property
    def row_slices(self) -> int: ...
    def microbatches_per_update(self, s: int) -> int: ...
    def __hash__(self) -> int: ...


class Action(NamedTuple):
    """One entry of an order: a computation of a microbatch at a stage.

    Attributes:
        op: the name of an op in `jpipe.ops.OPS`. Only the last stage can run FB and FI, because there a backward needs nothing but its
            forward. A stage runs them for all microbatches or for none.
        stage: the stage, counted from 0.
        microbatch: the microbatch, counted from 0 over all batches.
    """

    op: str
    stage: int
    microbatch: int

    @property
    def is_forward(self) -> bool:
        """Whether the microbatch enters the stage with this computation."""
        return OPS[self.op].begins

    @property
    def gives_gradient(self) -> bool:
        """Whether this computes the gradient of the stage input."""
        return OPS[self.op].gives_gradient

    @property
    def finishes(self) -> bool:
        """Whether this computes the gradients of the weights, which completes the stage's work on the microbatch."""
        return OPS[self.op].finishes


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule.

    In all functions s is a stage and k a microbatch, both counted from 0; r_s = `plan.replicas[s]`, m = `plan.microbatches`, d =
    `plan.depth`. Microbatch k runs forward and backward on replica k mod r_s of each stage.

    If rows are cut into S = `plan.row_slices` slices, each slice counts as a microbatch: number k S + j is slice j of the rows k, which are
    on replica k mod r_s. The backwards of the slices of the same rows are in reverse order (`backward_order`), and all of them read the
    same version.

    The paper, its section and a timeline of each schedule are in the docstring of its module in `jpipe/schedules/`. The defaults suit a
    schedule that flushes: each batch reads the weights of the last update, no other version is alive, and every plan is legal.
    `tests/jpipe/weights/test_schedule_contract.py` checks that the functions of each schedule agree with each other.

    Attributes:
        name: the schedule's name in plans.
        flushes: whether the pipeline is empty after each batch.
        order: `(plan, p, microbatches) -> computations` of one replica of pipeline rank p, from an empty to an empty pipeline.
            `microbatches` has at least one microbatch, in order: the microbatches of one batch if the schedule flushes, of several batches
            otherwise. At each stage the forwards are in the order of the microbatches, and the backwards, and each half of them, in
            `backward_order`.
        in_flight: `(plan, s) -> n_s`, the largest number of microbatches that a replica of stage s has begun but not finished.
        done: `(plan, s, k) -> int`, without a flush: the number of microbatches for which a replica of stage s has finished the backward
            when it begins the forward of k, counted from the first batch that is not flushed.
        period: `(plan) -> int`, without a flush: the number of batches after which the order repeats.
        layout: the ranks that the schedule can use. "straight": each stage is a rank. "looped": stage s runs on rank s mod p, where p is
            the number of ranks. "v": stage s runs on rank s if s < p, and on rank 2p - 1 - s otherwise. "any": any ranks.
        formula: `(plan, s, k) -> v`, the weight version (the number of updates applied) that forward and backward of k read at stage s;
            with the option `stash` false only the forward. Both k and v are counted from the first batch that is not flushed; v does not
            decrease with k. See `version`.
        versions_alive: `(plan, s) -> int`, the largest number of versions that a replica of stage s holds.
        refusal: `(plan) -> str`, why the schedule cannot run this plan, or "".
        updates_early: `(plan) -> bool`, whether a stage updates with a batch, and reads these weights, before all stages have computed the
            batch's gradients. Then no update can depend on the gradients of all stages, as under `pipedream`.
        options: the names of the `PlanOptions` that the schedule reads; a plan that sets any other option is illegal.
        closed_form: the form of the batches if planners have a closed-form price for it: "serial": one microbatch after the other; "fill
            and drain": all forwards, then all backwards; or "1F1B". None: planners walk through the order, which takes longer.
        data_parallel: whether planners use this schedule for plans with one stage, for which all schedules that flush are equal.
        takes_slices: whether its functions are right for rows that are cut into slices.
    """

    name: str
    flushes: bool
    order: Callable[[Shape, int, Sequence[int]], Iterable[Action]]
    in_flight: Callable[[Shape, int], int]
    done: Callable[[Shape, int, int], int] = lambda plan, s, k: 0
    period: Callable[[Shape], int] = lambda plan: 1
    layout: Literal["straight", "looped", "v", "any"] = "straight"
    formula: Callable[[Shape, int, int], int] = lambda plan, s, k: k // plan.microbatches
    versions_alive: Callable[[Shape, int], int] = lambda plan, s: 1
    refusal: Callable[[Shape], str] = lambda plan: ""
    updates_early: Callable[[Shape], bool] = lambda plan: False
    options: tuple[str, ...] = ()
    closed_form: Literal["serial", "fill and drain", "1F1B"] | None = None
    data_parallel: bool = False
    takes_slices: bool = False

    def version(self, plan: Shape, s: int, k: int) -> int:
        """Return the weight version that the forward of microbatch k reads at stage s; it does not decrease with k.

        In the first `plan.options.flush_first` batches this is the newest version. After these batches the schedule runs as if the weights
        were fresh.
        """
        first = plan.options.flush_first
        if not first:
            return self.formula(plan, s, k)
        batch = k // plan.microbatches
        return batch if batch < first else first + self.formula(plan, s, k - first * plan.microbatches)

    def backward_version(self, plan: Shape, s: int, k: int) -> int:
        """Return the weight version that the backward of microbatch k reads at stage s: without a stash, the newest one."""
        return self.version(plan, s, k) if plan.options.stash else k // plan.microbatches_per_update(s)

    def delay(self, plan: Shape, s: int, update: int) -> float:
        """Return the mean age, in updates, of the weights that an update's gradients were computed with.

        This is the mean of `update - version(plan, s, k)` over the microbatches k of the update.

        Args:
            plan: the plan.
            s: the stage.
            update: the number of the stage's update, counted from 0.
        """
        every = plan.microbatches_per_update(s)
        k, end, total = update * every, (update + 1) * every, 0
        while k < end:  # handles one run of equal versions after the other, because versions do not decrease
            version = self.version(plan, s, k)
            after = k + bisect_right(range(k, end), version, key=lambda number: self.version(plan, s, number))
            total += (after - k) * (update - version)
            k = after
        return total / every

    def delays(self, plan: Shape) -> tuple[float, ...]:
        """Return for each stage the mean `delay` of its updates once the pipeline is full."""
        if self.flushes:
            return (0.0,) * plan.depth
        in_flight = max(self.in_flight(plan, s) * replicas for s, replicas in enumerate(plan.replicas))
        full, period = plan.options.flush_first + 2 * (in_flight // plan.microbatches + 1), self.period(plan)
        means = []
        for s in range(plan.depth):
            rate = plan.microbatches // plan.microbatches_per_update(s)
            updates = range(full * rate, full * rate + (period if rate == 1 else 1))  # several updates in a batch have the same delay
            means.append(sum(self.delay(plan, s, update) for update in updates) / len(updates))
        return tuple(means)

    def flushes_after(self, plan: Shape, batch: int) -> bool:
        """Return whether the pipeline is empty after a batch."""
        return self.flushes or batch < plan.options.flush_first

    def computations(self, plan: Shape, p: int, replica: int, start: int, stop: int) -> Iterator[Action]:
        """Yield the computations of one replica of pipeline rank p for batches start .. stop - 1; the pipeline begins and ends empty.

        Args:
            plan: the plan.
            p: the pipeline rank.
            replica: the number of the replica.
            start: the first batch.
            stop: one past the last batch.
        """
        m, replicas = plan.microbatches, plan.replicas[plan.pipeline_ranks[p][0]]
        while start < stop:
            end = start + 1 if self.flushes_after(plan, start) else stop
            yield from self.order(plan, p, _of_replica(plan, start * m, end * m, replica, replicas))
            start = end

    def first_op(self, plan: Shape, s: int) -> str:
        """Return the first op of stage s, which shows whether the stage runs forward and backward as one program."""
        return _ops(self, plan)[s][0]

    def begins_fused(self, plan: Shape, s: int) -> bool:
        """Return whether stage s runs the forward of a microbatch and all or the first half of its backward as one program."""
        op = OPS[self.first_op(plan, s)]
        return op.begins and op.gives_gradient

    def fuses(self, plan: Shape, s: int) -> bool:
        """Return whether stage s runs the forward and the whole backward of a microbatch as one program."""
        op = OPS[self.first_op(plan, s)]
        return op.begins and op.finishes

    def splits(self, plan: Shape, s: int) -> bool:
        """Return whether stage s runs its backwards in two halves."""
        return any(OPS[op].reads == "stash" for op in _ops(self, plan)[s])

    def refuses(self, plan: Shape) -> str:
        """Return why this schedule cannot run this plan, or ""."""
        return _rank_refusal(self, plan) or self.refusal(plan)

    def refuses_chunks(self, chunks: int) -> str:
        """Return why this schedule cannot run `chunks` stages on each rank and what to use instead, or ""."""
        if self.layout == "straight" and chunks != 1:
            problem = f"the schedule '{self.name}' runs one stage on each rank, found {chunks}"
            return f"{problem}; leave out chunks_per_rank, or use {_SEVERAL}"
        if self.layout == "v" and chunks != 2:
            problem = f"the schedule '{self.name}' runs two stages on each rank, in a V, found {chunks}"
            return f"{problem}; use chunks_per_rank 2, or leave out chunks_per_rank"
        return ""


_SEVERAL = "an interleaved schedule such as 'interleaved_1f1b'"


@dataclass(frozen=True)
class PlainShape:
    """A `Shape` without a plan: cheap to make, and equal for plans that differ only in their layers.

    Attributes:
        schedule: a name of `jpipe.schedules.SCHEDULES`.
        microbatches: the number of microbatches of a batch, over all replicas.
        replicas: the number of replicas of each stage.
        options: the options of the schedule.
        ranks: the stages of each pipeline rank; None: one stage for each rank.
        row_slices: the number of consecutive microbatches that are slices of the same rows, see `Schedule`.
    """

    schedule: str
    microbatches: int
    replicas: tuple[int, ...]
    options: PlanOptions = NO_OPTIONS
    ranks: Ranks | None = None
    row_slices: int = 1

    @property
    def depth(self) -> int:
        """The number of stages."""
        return len(self.replicas)

    @cached_property
    def pipeline_ranks(self) -> Ranks:
        """The stages of each pipeline rank."""
        return tuple((s,) for s in range(self.depth)) if self.ranks is None else self.ranks

    def microbatches_per_update(self, s: int) -> int:
        """Return the number of microbatches per update of stage s, over all replicas."""
        return self.microbatches if self.options.update_every == "batch" else self.replicas[s] * self.row_slices


def _ops(schedule: Schedule, plan: Shape) -> tuple[tuple[str, ...], ...]:
    """Return for each stage the ops of a batch, in the order of their first use."""
    shape = PlainShape(plan.schedule, plan.microbatches, plan.replicas, plan.options, plan.pipeline_ranks, plan.row_slices)
    return _ops_of_shape(schedule, shape)


@lru_cache(maxsize=256)
def _ops_of_shape(schedule: Schedule, plan: PlainShape) -> tuple[tuple[str, ...], ...]:
    ops: list[dict[str, None]] = [{} for _ in range(plan.depth)]
    for p in range(len(plan.pipeline_ranks)):
        for entry in schedule.computations(plan, p, 0, 0, 1):
            ops[entry.stage].setdefault(entry.op)
    return tuple(map(tuple, ops))


def _of_replica(plan: Shape, start: int, stop: int, replica: int, replicas: int) -> Sequence[int]:
    """Return the microbatches of one of `replicas` replicas among the microbatches start .. stop - 1."""
    n = plan.row_slices
    if n == 1:
        return range(start + replica, stop, replicas)
    return [k for first in range(start + replica * n, stop, replicas * n) for k in range(first, first + n)]


def backward_order(plan: Shape, microbatches: Sequence[int]) -> Sequence[int]:
    """Return microbatches, whole rows only, in the order of their backwards: the slices of the same rows in reverse."""
    n = plan.row_slices
    if n == 1:
        return microbatches
    return [k for first in range(0, len(microbatches), n) for k in reversed(microbatches[first : first + n])]


def arranged(layout: str, stages: int, chunks: int) -> Ranks:
    """Return the stages of each rank in a layout.

    Args:
        layout: as in `Schedule`; "any" gives the same ranks as "looped".
        stages: the number of stages, a multiple of `chunks`.
        chunks: the number of stages of each rank.
    """
    ranks = stages // chunks
    if layout == "v":
        return tuple((p, stages - 1 - p) for p in range(ranks))
    return tuple(tuple(range(p, stages, ranks)) for p in range(ranks))


def _rank_refusal(schedule: Schedule, plan: Shape) -> str:
    """Return why the schedule cannot use the ranks of a plan, or ""."""
    ranks, depth = plan.pipeline_ranks, plan.depth
    chunks = {"straight": 1, "v": 2}.get(schedule.layout, len(ranks[0]))
    if schedule.layout == "any" or (depth % chunks == 0 and ranks == arranged(schedule.layout, depth, chunks)):
        return ""
    name, shown = f"the schedule '{schedule.name}'", f"found ranks {[list(stages) for stages in ranks]}"
    if schedule.layout == "v" and depth % 2:
        even = f"{depth - 1} or {depth + 1}" if depth > 1 else "2"
        return f"{name} needs two stages on each rank, so an even number of stages, found {depth}; use {even} stages"
    several = "the same number of stages on each rank, and stage s on rank s mod the number of ranks"
    needs, instead = {
        "v": ("ranks in a V: rank p of P runs the stages p and 2P - 1 - p", ""),
        "looped": (several, ", or give chunks_per_rank instead"),
        "straight": ("one stage on each rank, in order", f", or use {_SEVERAL}" if len(ranks) < depth else ""),
    }[schedule.layout]
    return f"{name} needs {needs}; {shown}; leave out ranks{instead}"


def counted(order: Callable[[Shape, int, Sequence[int]], Iterable[Action]], **fields: Any) -> Schedule:
    """Return a schedule that flushes; its `in_flight` counts the microbatches in the order. `fields` are further fields of `Schedule`."""

    def in_flight(plan: Shape, s: int) -> int:
        p = next(p for p, stages in enumerate(plan.pipeline_ranks) if s in stages)
        microbatches = _of_replica(plan, 0, plan.microbatches, 0, plan.replicas[s])
        return most_in_flight(e for e in order(plan, p, microbatches) if e.stage == s)

    return Schedule(flushes=True, order=order, in_flight=in_flight, **fields)


def most_in_flight(order: Iterable[Action]) -> int:
    """Return the largest number of microbatches that an order has begun but not finished."""
    begun = most = 0
    for entry in order:
        begun += entry.is_forward
        most = max(most, begun)
        begun -= entry.finishes
    return most


def split_early(order: Iterable[Action]) -> Iterator[Action]:
    """Yield the order with each backward split into two halves, so that the input gradient can be sent after the first half.

    Stage 0 sends no input gradient, so its backwards stay whole.
    """
    for entry in order:
        if entry.stage > 0 and entry.op in ("B", "FB"):
            yield entry._replace(op="I" if entry.op == "B" else "FI")
            yield entry._replace(op="W")
        else:
            yield entry


def fused(plan: Shape, order: Iterable[Action]) -> list[Action]:
    """Fuse computations that always follow each other into one program.

    At stage 0, which sends no input gradient, these are the two halves of a backward. At the last stage they are a forward and the first op
    of its backward.
    """
    result, last = list(order), plan.depth - 1
    for s, first, second, both in ((0, "I", "W", "B"), (last, "F", "B", "FB"), (last, "F", "I", "FI")):
        pairs = {n for n, (a, b) in enumerate(pairwise(result)) if a == (first, s, b.microbatch) and b == (second, s, a.microbatch)}
        if pairs and len(pairs) == sum(entry[:2] == (first, s) for entry in result):
            merged = (entry._replace(op=both) if n in pairs else entry for n, entry in enumerate(result))
            result = [entry for n, entry in enumerate(merged) if n - 1 not in pairs]
    return result


def one_forward_one_backward(plan: Shape, s: int, microbatches: Sequence[int], ahead: int) -> Iterator[Action]:
    """Yield the 1F1B order: `ahead` forwards, then a backward and a forward in turn, then the remaining backwards.

    At the last stage, with one microbatch in flight, each backward directly follows its forward, and both are one program.

    Args:
        plan: the plan.
        s: the stage.
        microbatches: the microbatches of one replica of the stage, in order.
        ahead: n_s, at least 1.
    """
    if ahead == 1 and s == plan.depth - 1:
        yield from (Action("FB", s, k) for k in microbatches)
        return
    backwards = backward_order(plan, microbatches)
    for k in microbatches[:ahead]:
        yield Action("F", s, k)
    for finished, k in zip(backwards, microbatches[ahead:], strict=False):
        yield Action("B", s, finished)
        yield Action("F", s, k)
    for k in backwards[max(len(microbatches) - ahead, 0) :]:
        yield Action("B", s, k)


def pipeline_order(plan: Shape, p: int, microbatches: Sequence[int]) -> Iterator[Action]:
    """Return the 1F1B order with as many microbatches in flight as `pipeline_in_flight` says."""
    order = one_forward_one_backward(plan, p, microbatches, pipeline_in_flight(plan, p))
    return split_early(order) if plan.options.split_backward == "early" else order


def pipeline_in_flight(plan: Shape, s: int) -> int:
    """Return the n_s that keeps every worker busy: 1 at the last stage, else 1 + ceil(n_{s+1} r_{s+1} / r_s) + extra_in_flight.

    Without replicas and `extra_in_flight` n_s is d - s. `max_in_flight` lowers all n_s in proportion, so that no n_s is larger than this
    option. It also keeps (n_s - 1) r_s from growing along the stages: otherwise a stage would wait for microbatches that the previous stage
    must not begin. The first backward of rows in S slices follows the forwards of all slices, so n_s is larger by S - 1, and where the next
    stage has more replicas, all of them need a whole row.
    """
    return _all_in_flight(plan.replicas, plan.options.extra_in_flight, plan.options.max_in_flight, plan.row_slices)[s]


@lru_cache(maxsize=64)
def _all_in_flight(replicas: tuple[int, ...], extra: int, most: int | None, slices: int) -> tuple[int, ...]:
    ahead, sliced = [1], [slices]
    for after, count in zip(reversed(replicas[1:]), reversed(replicas[:-1]), strict=True):
        ahead.append(1 + -(-ahead[-1] * after // count) + extra)
        sliced.append(max(ahead[-1] + slices - 1, 1 + -(-sliced[-1] * after // count) + extra))
    if most is not None:
        return tuple(n + slices - 1 for n in _limited(replicas, ahead[::-1], most))
    return tuple(reversed(sliced))


def _limited(replicas: tuple[int, ...], ahead: Sequence[int], most: int) -> tuple[int, ...]:
    """Return n_s for each stage: `ahead` lowered in proportion to at most `most`, and limited by the previous stage's n_s."""
    limited: list[int] = []
    for s, n in enumerate(ahead):
        n = min(n, -(-n * most // max(ahead)))
        limited.append(n if s == 0 else min(n, (limited[-1] - 1) * replicas[s - 1] // replicas[s] + 1))
    return tuple(limited)
