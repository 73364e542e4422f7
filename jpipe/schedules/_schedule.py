"""What a schedule is: the order in which each worker computes and the weight version each computation reads, as data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    def extra_in_flight(self) -> int: ...
    @property
    def vertical_sync(self) -> bool: ...


class Compute(NamedTuple):
    """One entry of a worker's order: the forward (F) or backward (B) of a microbatch."""

    op: Literal["F", "B"]
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule. In all functions s is a stage, k a microbatch, m = `plan.microbatches`, d = `plan.depth`; all count from 0.

    The paper, its section and a timeline of each schedule are in the docstring of its module in `jpipe/schedules/`.

    Attributes:
        name: what plans call it.
        flushes: whether the pipeline is empty after each batch.
        in_flight: `(plan, s) -> n_s`, forwards that stage s does before its first backward.
        version: `(plan, s, k) -> v`, the weight version (updates applied) that forward and backward of k read at stage s;
            does not decrease with k.
        versions_alive: `(plan, s) -> int`, how many versions stage s holds at most.
        complaint: `(plan) -> str`, why the schedule cannot run this plan, or "".
    """

    name: str
    flushes: bool
    in_flight: Callable[[Shape, int], int]
    version: Callable[[Shape, int, int], int]
    versions_alive: Callable[[Shape, int], int]
    complaint: Callable[[Shape], str]

    def order(self, plan: Shape, s: int, start: int, stop: int) -> Iterator[Compute]:
        """The computations of stage s for the batches start .. stop - 1, from an empty pipeline to an empty pipeline.

        Args:
            plan: what is run.
            s: the stage.
            start: the first batch.
            stop: one past the last batch.
        """
        m = plan.microbatches
        ahead = self.in_flight(plan, s)
        if self.flushes:
            for batch in range(start, stop):
                yield from one_forward_one_backward(batch * m, (batch + 1) * m, ahead)
        else:
            yield from one_forward_one_backward(start * m, stop * m, ahead)


def one_forward_one_backward(first: int, end: int, ahead: int) -> Iterator[Compute]:
    """1F1B: `ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    for k in range(first, end):
        if k - first >= ahead:
            yield Compute("B", k - ahead)
        yield Compute("F", k)
    for k in range(max(end - ahead, first), end):
        yield Compute("B", k)


def pipeline_in_flight(plan: Shape, s: int) -> int:
    """n_s that keeps every stage of a straight pipeline busy: 1 at the last stage, and 1 + extra_in_flight more for each link."""
    return 1 + (1 + plan.extra_in_flight) * (plan.depth - 1 - s)


def synchronous_version(plan: Shape, s: int, k: int) -> int:
    """All microbatches of a batch read the weights of the last update: v = floor(k / m)."""
    return k // plan.microbatches


def delayed_version(plan: Shape, k: int, ahead: int) -> int:
    """The newest version there is when a stage with `ahead` in flight does forward k: floor(max(k - (ahead - 1), 0) / m)."""
    return max(k - (ahead - 1), 0) // plan.microbatches


def delayed_versions_alive(plan: Shape, ahead: int) -> int:
    """Versions between the one of the oldest microbatch in flight and the newest: ceil((ahead - 1) / m) + 1."""
    return -(-(ahead - 1) // plan.microbatches) + 1


def no_complaint(plan: Shape) -> str:
    """Every plan is legal."""
    return ""


def refuse_extra_in_flight(plan: Shape) -> str:
    """For schedules whose number in flight is fixed."""
    if plan.extra_in_flight:
        return f"the schedule '{plan.schedule}' has no in-flight limit to raise: expected extra_in_flight 0, found {plan.extra_in_flight}"
    return ""
