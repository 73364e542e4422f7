"""What a schedule is: the order in which each worker computes and the weight version each computation reads, as data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class Shape(Protocol):
    """What a schedule reads of a plan: numbers, no layers."""

    @property
    def schedule(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def replicas(self) -> tuple[int, ...]: ...
    @property
    def extra_in_flight(self) -> int: ...
    @property
    def noam(self) -> bool: ...
    @property
    def vertical_sync(self) -> bool: ...
    def microbatches_per_update(self, s: int) -> int: ...


class Compute(NamedTuple):
    """One entry of an order: a forward (F), a backward (B), or both as one program (FB), of a microbatch at a stage.

    Attributes:
        op: FB is for the last stage, where a backward needs nothing but its forward.
        stage: counts from 0.
        microbatch: counts from 0, over all batches.
    """

    op: Literal["F", "B", "FB"]
    stage: int
    microbatch: int


def synchronous_version(plan: Shape, s: int, k: int) -> int:
    """All microbatches of a batch read the weights of the last update: v = floor(k / m)."""
    return k // plan.microbatches


def one_version(plan: Shape, s: int) -> int:
    """The newest weights, and no others."""
    return 1


def no_refusal(plan: Shape) -> str:
    """Every plan is legal."""
    return ""


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule. In all functions s is a stage, r_s = `plan.replicas[s]`, k a microbatch, m = `plan.microbatches`,
    d = `plan.depth`; all count from 0. Microbatch k runs forward and backward on replica k mod r_s of each stage.

    The paper, its section and a timeline of each schedule are in the docstring of its module in `jpipe/schedules/`. The defaults suit a
    schedule that flushes. `tests/jpipe/weights/test_schedule_contract.py` checks that the functions of each schedule agree with each other.

    Attributes:
        name: what plans call it.
        flushes: whether the pipeline is empty after each batch.
        order: `(plan, s, microbatches) -> computations`, what one replica of stage s computes, from an empty to an empty pipeline, of its
            own microbatches (in order, at least one): those of one batch if it flushes, else of several. Forwards, and backwards as well,
            keep the order of the microbatches. A stage may run FB for all of its microbatches or for none.
        in_flight: `(plan, s) -> n_s`, the most microbatches that a replica of stage s has begun and not finished.
        version: `(plan, s, k) -> v`, the weight version (updates applied) that forward and backward of k read at stage s;
            does not decrease with k.
        versions_alive: `(plan, s) -> int`, how many versions a replica of stage s holds at most.
        refusal: `(plan) -> str`, why the schedule cannot run this plan, or "".
        options: the fields of `Plan` that it reads and other schedules refuse.
        closed_form: the shape of its batches, for which planners have a price in closed form: "serial", one microbatch after the other;
            "fill and drain", all forwards, then all backwards; "1F1B". None: its order is walked through, which takes longer.
        data_parallel: whether it stands for all schedules that flush where there is one stage, and so nothing to schedule.
    """

    name: str
    flushes: bool
    order: Callable[[Shape, int, Sequence[int]], Iterator[Compute]]
    in_flight: Callable[[Shape, int], int]
    version: Callable[[Shape, int, int], int] = synchronous_version
    versions_alive: Callable[[Shape, int], int] = one_version
    refusal: Callable[[Shape], str] = no_refusal
    options: tuple[str, ...] = ()
    closed_form: Literal["serial", "fill and drain", "1F1B"] | None = None
    data_parallel: bool = False

    def computations(self, plan: Shape, s: int, replica: int, start: int, stop: int) -> Iterator[Compute]:
        """The computations of one replica of stage s for the batches start .. stop - 1, from an empty pipeline to an empty pipeline.

        Args:
            plan: what is run.
            s: the stage.
            replica: which of its replicas.
            start: the first batch.
            stop: one past the last batch.
        """
        m, replicas = plan.microbatches, plan.replicas[s]
        spans = ((batch, batch + 1) for batch in range(start, stop)) if self.flushes else iter([(start, stop)])
        for first, end in spans:
            if first < end:
                yield from self.order(plan, s, range(first * m + replica, end * m, replicas))

    def fuses(self, plan: Shape, s: int) -> bool:
        """Whether stage s runs the forward and the backward of a microbatch as one program."""
        return next(self.computations(plan, s, 0, 0, 1)).op == "FB"


def one_forward_one_backward(plan: Shape, s: int, microbatches: Sequence[int], ahead: int) -> Iterator[Compute]:
    """1F1B: `ahead` forwards, then a backward and a forward in turn, then the backwards that are left.

    At the last stage with one microbatch in flight each backward follows its forward, and both are one program.

    Args:
        plan: what is run.
        s: the stage.
        microbatches: of one of its replicas, in order.
        ahead: n_s; 1 or more.
    """
    if ahead == 1 and s == plan.depth - 1:
        yield from (Compute("FB", s, k) for k in microbatches)
        return
    for n, k in enumerate(microbatches):
        if n >= ahead:
            yield Compute("B", s, microbatches[n - ahead])
        yield Compute("F", s, k)
    for k in microbatches[max(len(microbatches) - ahead, 0) :]:
        yield Compute("B", s, k)


def pipeline_order(plan: Shape, s: int, microbatches: Sequence[int]) -> Iterator[Compute]:
    """1F1B with as many in flight as keep every worker busy."""
    return one_forward_one_backward(plan, s, microbatches, pipeline_in_flight(plan, s))


def pipeline_in_flight(plan: Shape, s: int) -> int:
    """n_s that keeps every worker busy: 1 at the last stage; before it, 1 + what the next stage has in flight, shared by the replicas.

    n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s) + extra_in_flight, d - s in a straight pipeline. With `plan.noam` the number of
    PipeDream's section 3.2 (NOAM): ceil(workers of stage s and after it / r_s).
    """
    return _all_in_flight(plan.replicas, plan.extra_in_flight, plan.noam)[s]


@lru_cache(maxsize=64)
def _all_in_flight(replicas: tuple[int, ...], extra: int, noam: bool) -> tuple[int, ...]:
    if noam:
        return tuple(-(-sum(replicas[s:]) // r) for s, r in enumerate(replicas))
    ahead = [1]
    for after, own in zip(reversed(replicas[1:]), reversed(replicas[:-1]), strict=True):
        ahead.append(1 + -(-ahead[-1] * after // own) + extra)
    return tuple(reversed(ahead))
