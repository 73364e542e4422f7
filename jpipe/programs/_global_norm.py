"""Messages that bring the global norm of a batch's gradients to all workers: separate at a flush, otherwise as parts of other messages.

Without a flush, the sums of squares travel from the last stage to the first along with the input gradients of one microbatch, the j-th
after the batch. Stage 0 computes the norm, which travels on along with activations. Each worker makes the
update of the batch just before the first forward whose activation brings the norm. No worker waits for these messages: each of them
arrives together with one that the worker needs anyway.

    q = (t + 1) m - 1 + j       the sums of squares of batch t travel with the input gradients of microbatch q
    K = min(A(q), V)            the norm of batch t arrives with the activations of the microbatches K .. K + r_s - 1 at stage s

A(q) is the first microbatch whose forward stage 0 begins after the backward of q, on the same replica: q + n_0 r_0 where each rank has one
stage, n_0 microbatches in flight at stage 0. r_s are the replicas of stage s, and V is the first microbatch that reads the updated weights.
If a stage has replicas, j is as large as K <= V allows, so that the sum over the replicas overlaps with computations; otherwise j = 0.
"""

from dataclasses import dataclass
from itertools import pairwise

from jpipe.plan import Plan
from jpipe.programs._instructions import Instruction, Receive, Send, SumSquares
from jpipe.schedules import SCHEDULES


@dataclass(frozen=True)
class Route:
    """The microbatches that carry the sums of squares and the norm of each batch, under a schedule that does not flush.

    Attributes:
        plan: what runs.
        delay: j, by how many microbatches the sums of squares follow the last microbatch of their batch.
        arrivals: K of the first batches that are not flushed, as many as the order of the schedule takes to repeat.
    """

    plan: Plan
    delay: int
    arrivals: tuple[int, ...]

    def squares_with(self, k: int) -> int | None:
        """Return the batch whose sums of squares travel with the input gradient of microbatch k, if any."""
        batch, offset = divmod(k + 1 - self.delay, self.plan.microbatches)
        return batch - 1 if offset == 0 and batch > 0 else None

    def shared_after(self, s: int, k: int) -> int | None:
        """Return the batch whose shared gradients stage s sends after the backward of microbatch k, if any; each replica once per batch."""
        replicas = self.plan.replicas[s]
        batch, offset = divmod(k - (self.delay if replicas > 1 else 0), self.plan.microbatches)
        return batch if batch >= 0 and offset >= self.plan.microbatches - replicas else None

    def norm_with(self, s: int, k: int) -> int | None:
        """Return the batch whose norm arrives at stage s with the activation of microbatch k, if any."""
        period, m = len(self.arrivals), self.plan.microbatches
        for n, arrival in enumerate(self.arrivals):
            periods, offset = divmod(k - arrival, period * m)
            if periods >= 0 and offset < self.plan.replicas[s]:
                return periods * period + n + self.plan.flush_first
        return None

    def root(self, batch: int) -> int:
        """Return the worker of stage 0 that computes the norm of a batch."""
        return self.plan.worker(0, last_microbatch(self.plan, batch) + self.delay)


def route_of(plan: Plan) -> Route:
    """Return the route of a plan whose schedule does not flush and can use the norm."""
    period = SCHEDULES[plan.schedule].period(plan)
    batches = range(plan.flush_first, plan.flush_first + period)
    needed = [_first_reader(plan, batch) for batch in batches]

    def arrivals(delay: int) -> list[int]:
        return [_first_after(plan, last_microbatch(plan, batch) + delay) for batch in batches]

    def in_time(delay: int) -> bool:
        return all(arrival <= reader for arrival, reader in zip(arrivals(delay), needed, strict=True))

    delay = 0
    while max(plan.replicas) > 1 and in_time(delay + 1):
        delay += 1
    return Route(plan, delay, tuple(map(min, arrivals(delay), needed)))


def _first_reader(plan: Plan, batch: int) -> int:
    """Return V, the first microbatch that reads the weights that a batch has updated."""
    k = last_microbatch(plan, batch) + 1
    while SCHEDULES[plan.schedule].version(plan, 0, k) <= batch:
        k += 1
    return k


def _first_after(plan: Plan, q: int) -> int:
    """Return A(q), the first microbatch whose forward the replica of stage 0 begins after the backward of q."""
    begun, replicas = plan.flush_first * plan.microbatches, plan.replicas[0]
    k = q + replicas
    while SCHEDULES[plan.schedule].done(plan, 0, k - begun) <= (q - begun) // replicas:
        k += replicas
    return k


def last_microbatch(plan: Plan, batch: int) -> int:
    """Return the last microbatch of a batch, which names the messages about its norm."""
    return (batch + 1) * plan.microbatches - 1


def norm_alone(plan: Plan, batch: int) -> list[Instruction]:
    """Return separate messages: the sums of squares from the last stage to stage 0, and the norm to all workers."""
    k, first, written = last_microbatch(plan, batch), [workers[0] for workers in plan.stage_workers], list[Instruction]()
    for s in reversed(range(plan.depth)):
        written.append(SumSquares(first[s], batch))
        if s > 0:
            written += transfer(first[s], first[s - 1], k, "squares")
    return written + distribute(plan, batch, {first[0]})


def norm_of_pipeline(plan: Plan, batch: int, pipeline: int) -> list[Instruction]:
    """Return separate messages that bring the norm of one of several pipelines that agree rarely to its workers, as `norm_alone`."""
    k, workers, written = last_microbatch(plan, batch), [replicas[pipeline] for replicas in plan.stage_workers], list[Instruction]()
    for s in reversed(range(plan.depth)):
        written += [SumSquares(workers[s], batch), *(transfer(workers[s], workers[s - 1], k, "squares") if s > 0 else ())]
    for source, to in pairwise(workers):
        written += transfer(source, to, k, "norm")
    return written


def distribute(plan: Plan, batch: int, holders: set[int]) -> list[Instruction]:
    """Return the messages that bring the norm from workers that have it, at least one of stage 0, to all others."""
    k, written, source = last_microbatch(plan, batch), list[Instruction](), -1
    for workers in plan.stage_workers:
        for worker in sorted(workers, key=lambda w: w not in holders):
            if worker not in holders:
                written += transfer(source, worker, k, "norm")
            if worker in holders or worker == workers[0]:
                source = worker
    return written


def transfer(source: int, to: int, k: int, message: str) -> list[Instruction]:
    """Return a send and its receive."""
    return [Send(source, k, message, to), Receive(to, k, message, source)]
