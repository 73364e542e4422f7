"""What a schedule is: the order in which each worker computes and the weight version each computation reads, as data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, runtime_checkable


@runtime_checkable
class Shape(Protocol):
    """The part of a plan that a schedule reads: numbers, no layers."""

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
    @property
    def flush_first(self) -> int: ...
    def microbatches_per_update(self, s: int) -> int: ...


class Compute(NamedTuple):
    """One entry of an order: a forward (F), a backward (B), or both as one program (FB), of a microbatch at a stage.

    Attributes:
        op: F, B, or FB, which only the last stage can run: there a backward needs only its forward.
        stage: counted from 0.
        microbatch: counted from 0, over all batches.
    """

    op: Literal["F", "B", "FB"]
    stage: int
    microbatch: int


def synchronous_version(plan: Shape, s: int, k: int) -> int:
    """All microbatches of a batch read the weights of the last update: v = floor(k / m)."""
    return k // plan.microbatches


def one_version(plan: Shape, s: int) -> int:
    """Only the newest weights."""
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
        name: its name in plans.
        flushes: whether the pipeline is empty after each batch.
        order: `(plan, s, microbatches) -> computations`, what one replica of stage s computes, from an empty pipeline to an empty one, for
            the given microbatches (in order, at least one): those of one batch if the schedule flushes, of several otherwise. Forwards are
            in the order of the microbatches, and so are backwards. A stage runs FB for all of its microbatches or for none.
        in_flight: `(plan, s) -> n_s`, the largest number of microbatches that a replica of stage s has begun but not finished.
        formula: `(plan, s, k) -> v`, the weight version (number of updates applied) that forward and backward of k read at stage s,
            both counted from the first batch that is not flushed; does not decrease with k. See `version`.
        versions_alive: `(plan, s) -> int`, the largest number of versions that a replica of stage s holds.
        refusal: `(plan) -> str`, why the schedule cannot run this plan, or "".
        norm_refusal: `(plan) -> str`, why updates cannot use the global norm of the gradients of all stages, or "". They can if each
            stage knows the norm of a batch before it reads the weights that the batch has updated.
        options: the fields of `Plan` that it reads and other schedules refuse.
        closed_form: the form of its batches, if planners have a closed-form price for it: "serial", one microbatch after the other;
            "fill and drain", all forwards, then all backwards; "1F1B". None: planners walk through its order, which takes longer.
        data_parallel: whether planners use it for all schedules that flush if there is one stage, for which these are equal.
    """

    name: str
    flushes: bool
    order: Callable[[Shape, int, Sequence[int]], Iterator[Compute]]
    in_flight: Callable[[Shape, int], int]
    formula: Callable[[Shape, int, int], int] = synchronous_version
    versions_alive: Callable[[Shape, int], int] = one_version
    refusal: Callable[[Shape], str] = no_refusal
    norm_refusal: Callable[[Shape], str] = no_refusal
    options: tuple[str, ...] = ()
    closed_form: Literal["serial", "fill and drain", "1F1B"] | None = None
    data_parallel: bool = False

    def version(self, plan: Shape, s: int, k: int) -> int:
        """The weight version that forward and backward of microbatch k read at stage s; does not decrease with k.

        In the first `plan.flush_first` batches that is the newest. After them the schedule runs as if these weights were fresh.
        """
        first = plan.flush_first
        if not first:
            return self.formula(plan, s, k)
        batch = k // plan.microbatches
        return batch if batch < first else first + self.formula(plan, s, k - first * plan.microbatches)

    def flushes_after(self, plan: Shape, batch: int) -> bool:
        """Whether the pipeline is empty after a batch."""
        return self.flushes or batch < plan.flush_first

    def computations(self, plan: Shape, s: int, replica: int, start: int, stop: int) -> Iterator[Compute]:
        """The computations of one replica of stage s for the batches start .. stop - 1, from an empty pipeline to an empty pipeline.

        Args:
            plan: the plan.
            s: the stage.
            replica: number of the replica.
            start: the first batch.
            stop: one past the last batch.
        """
        m, replicas = plan.microbatches, plan.replicas[s]
        while start < stop:
            end = start + 1 if self.flushes_after(plan, start) else stop
            yield from self.order(plan, s, range(start * m + replica, end * m, replicas))
            start = end

    def fuses(self, plan: Shape, s: int) -> bool:
        """Whether stage s runs the forward and the backward of a microbatch as one program."""
        return next(self.computations(plan, s, 0, 0, 1)).op == "FB"


def one_forward_one_backward(plan: Shape, s: int, microbatches: Sequence[int], ahead: int) -> Iterator[Compute]:
    """1F1B: `ahead` forwards, then a backward and a forward in turn, then the remaining backwards.

    At the last stage, with one microbatch in flight, each backward follows its forward, and both are one program.

    Args:
        plan: the plan.
        s: the stage.
        microbatches: those of one of its replicas, in order.
        ahead: n_s, at least 1.
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
    """1F1B with as many microbatches in flight as keep every worker busy."""
    return one_forward_one_backward(plan, s, microbatches, pipeline_in_flight(plan, s))


def pipeline_in_flight(plan: Shape, s: int) -> int:
    """The n_s that keeps every worker busy: 1 at the last stage, n_s = 1 + ceil(n_{s+1} r_{s+1} / r_s) + extra_in_flight before it.

    Without replicas and `extra_in_flight` that is d - s. With `plan.noam` it is the NOAM of PipeDream, section 3.2: the workers of
    stage s and of all later stages, divided by r_s and rounded up.
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
