"""A plan that was considered, with its price; small enough to keep thousands of them."""

from dataclasses import dataclass, replace
from typing import Literal

import jpipe


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan in numbers, what it costs, and whether it fits.

    Attributes:
        schedule: a name of `jpipe.schedules.SCHEDULES`.
        rows: of a microbatch.
        microbatches: M, between two updates, over all replicas.
        starts: the first layer of each stage.
        replicas: of each stage.
        policies: recomputation of each stage.
        extra_in_flight: as in `jpipe.Plan`.
        keep_together: as in `jpipe.Plan`.
        seconds: of a batch, in steady state.
        bubble: share of the time of its workers in which they do not compute.
        memory: bytes that a worker of each stage holds at most.
        sent: bytes that all workers together send, for each row.
        bound: what bounds the time, in words.
        over: the stage that lacks most memory and how many bytes; None: it fits.
        update_every: as in `jpipe.Plan`.
    """

    schedule: str
    rows: int
    microbatches: int
    starts: tuple[int, ...]
    replicas: tuple[int, ...]
    policies: tuple[str, ...]
    extra_in_flight: int
    keep_together: Literal["replicas", "stages"]
    seconds: float
    bubble: float
    memory: tuple[int, ...]
    sent: float
    bound: str
    over: tuple[int, int] | None = None
    update_every: Literal["batch", "replicas"] = "batch"

    @property
    def depth(self) -> int:
        """d, the number of stages."""
        return len(self.starts)

    @property
    def workers(self) -> int:
        """How many workers it uses."""
        return sum(self.replicas)

    @property
    def batch(self) -> int:
        """Rows between two updates."""
        return self.rows * self.microbatches

    @property
    def samples_per_second(self) -> float:
        """Rows per second."""
        return self.batch / self.seconds

    @property
    def kind(self) -> tuple[object, ...]:
        """What it shares with plans that differ from it in sizes only: schedule, replicas of each stage, and what is kept together."""
        return self.schedule, self.update_every, self.replicas, self.keep_together

    @property
    def rank(self) -> tuple[object, ...]:
        """What to sort by: plans that fit, fast ones first; of equal ones that with fewer stages, a flush, less memory, a smaller batch."""
        schedule = jpipe.schedules.SCHEDULES[self.schedule]
        lacks = self.over[1] if self.over else 0
        ties = (self.depth, not schedule.flushes, max(self.memory), self.batch, self.extra_in_flight, self.rows)
        # nine digits: that which sums of floats round to does not decide
        return (lacks, float(f"{-self.samples_per_second:.9g}"), *ties, self.schedule, self.keep_together, self.starts, self.replicas)

    def sharing(self, cores: float | None) -> "Candidate":
        """The same plan where its workers share cores: a batch takes at least all computations divided by these.

        Args:
            cores: how many workers compute at a time without slowing each other down; None: all.
        """
        computing = (1 - self.bubble) * self.workers * self.seconds
        if cores is None or computing / cores <= self.seconds * (1 + 1e-9):  # or it is what sums of floats round to
            return self
        return replace(self, seconds=computing / cores, bubble=1 - cores / self.workers, bound="the cores")

    def plan(self, ids: tuple[str, ...]) -> jpipe.Plan:
        """The plan itself.

        Args:
            ids: the layers of the profile, in order.
        """
        ends = (*self.starts[1:], len(ids))
        stages = [
            {"layers": ids[start:end], "replicas": count, "recompute": policy}
            for start, end, count, policy in zip(self.starts, ends, self.replicas, self.policies, strict=True)
        ]
        return jpipe.Plan(
            schedule=self.schedule,
            microbatches=self.microbatches,
            stages=stages,
            extra_in_flight=self.extra_in_flight,
            keep_together=self.keep_together,
            update_every=self.update_every,
        )
