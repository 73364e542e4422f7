"""What a schedule is: the order in which each worker computes and the weight version each computation reads, as data."""

from collections.abc import Callable, Iterator
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
    """One entry of a worker's order: the forward (F) or backward (B) of a microbatch."""

    op: Literal["F", "B"]
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule. In all functions s is a stage, r_s = `plan.replicas[s]`, k a microbatch, m = `plan.microbatches`,
    d = `plan.depth`; all count from 0. Microbatch k runs forward and backward on replica k mod r_s of each stage.

    The paper, its section and a timeline of each schedule are in the docstring of its module in `jpipe/schedules/`.

    Attributes:
        name: what plans call it.
        flushes: whether the pipeline is empty after each batch.
        in_flight: `(plan, s) -> n_s`, forwards that a replica of stage s does before its first backward.
        version: `(plan, s, k) -> v`, the weight version (updates applied) that forward and backward of k read at stage s;
            does not decrease with k.
        versions_alive: `(plan, s) -> int`, how many versions a replica of stage s holds at most.
        complaint: `(plan) -> str`, why the schedule cannot run this plan, or "".
    """

    name: str
    flushes: bool
    in_flight: Callable[[Shape, int], int]
    version: Callable[[Shape, int, int], int]
    versions_alive: Callable[[Shape, int], int]
    complaint: Callable[[Shape], str]

    def order(self, plan: Shape, s: int, replica: int, start: int, stop: int) -> Iterator[Compute]:
        """The computations of one replica of stage s for the batches start .. stop - 1, from an empty pipeline to an empty pipeline.

        Args:
            plan: what is run.
            s: the stage.
            replica: which of its replicas.
            start: the first batch.
            stop: one past the last batch.
        """
        replicas = plan.replicas[s]
        own = plan.microbatches // replicas  # microbatches of each batch
        ahead = self.in_flight(plan, s)
        spans = ((batch, batch + 1) for batch in range(start, stop)) if self.flushes else iter([(start, stop)])
        for first, end in spans:
            for op, index in one_forward_one_backward(first * own, end * own, ahead):
                yield Compute(op, index * replicas + replica)


def one_forward_one_backward(first: int, end: int, ahead: int) -> Iterator[Compute]:
    """1F1B: `ahead` forwards, then a backward and a forward in turn, then the backwards that are left."""
    for k in range(first, end):
        if k - first >= ahead:
            yield Compute("B", k - ahead)
        yield Compute("F", k)
    for k in range(max(end - ahead, first), end):
        yield Compute("B", k)


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


def sync_delay(plan: Shape, s: int) -> int:
    """How many forwards later than it could a stage reads a new version: 1 where an all-reduce is to be hidden behind one, else 0."""
    return int(plan.replicas[s] > 1 and not plan.noam)


def synchronous_version(plan: Shape, s: int, k: int) -> int:
    """All microbatches of a batch read the weights of the last update: v = floor(k / m)."""
    return k // plan.microbatches


def delayed_version(plan: Shape, s: int, k: int) -> int:
    """The newest version there is when a replica of stage s, with n_s in flight, comes to the forward of k.

    floor(max(floor(k / r_s) - (n_s - 1) - l, 0) / (M_s / r_s)), l = `sync_delay`, M_s = `plan.microbatches_per_update(s)`;
    floor(max(k - (n_s - 1), 0) / m) in a straight pipeline.
    """
    replicas = plan.replicas[s]
    done = k // replicas - (pipeline_in_flight(plan, s) - 1) - sync_delay(plan, s)
    return max(done, 0) * replicas // plan.microbatches_per_update(s)


def delayed_versions_alive(plan: Shape, s: int, leader: int) -> int:
    """The version that the next microbatch reads to the newest: ceil((n - 1 + l) / (M / r)) + 1, where n, l and r are those of `leader`.

    Stage s itself, or under vertical sync the first stage, decides which versions are read. A stage that hides a sum (l = 1) holds
    the last one of them only when it is drained.
    """
    replicas = plan.replicas[leader]
    ahead = (pipeline_in_flight(plan, leader) - 1 + sync_delay(plan, leader)) * replicas
    return -(-ahead // plan.microbatches_per_update(s)) + 1


def no_complaint(plan: Shape) -> str:
    """Every plan is legal."""
    return ""


def refuse_extra_in_flight(plan: Shape) -> str:
    """For schedules whose number in flight is fixed."""
    if plan.extra_in_flight:
        return f"the schedule '{plan.schedule}' has no in-flight limit to raise: expected extra_in_flight 0, found {plan.extra_in_flight}"
    return ""
