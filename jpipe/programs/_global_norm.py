"""How all workers get the global norm of a batch's gradients: at a flush in messages of its own, otherwise along with other messages.

Without a flush, the sums of squares travel from the last stage to the first along with the input gradients of one microbatch, the j-th
after the batch. Stage 0 computes the norm, which travels on along with activations. Each worker makes the
update of the batch just before the first forward whose activation brings the norm. No worker waits for these messages: each of them
arrives together with one that the worker needs anyway.

    q = (t + 1) m - 1 + j       the sums of squares of batch t travel with the input gradients of microbatch q
    K = min(q + n_0 r_0, V)     the norm of batch t arrives with the activations of the microbatches K .. K + r_s - 1 at stage s

n_0 is the number in flight at stage 0, r_s the replicas of stage s, and V the first microbatch that reads the updated weights. If a
stage has replicas, j is as large as K <= V allows, so that the sum over the replicas overlaps with computations; otherwise j = 0.
"""

from dataclasses import dataclass

from jpipe.plan import Plan
from jpipe.programs._instructions import Instruction, Message, Receive, Send, SumSquares
from jpipe.schedules import SCHEDULES


@dataclass(frozen=True)
class Route:
    """Which microbatches carry the sums of squares and the norm of each batch, under a schedule that does not flush.

    Attributes:
        plan: what runs.
        delay: j, by how many microbatches the sums of squares follow the last microbatch of their batch.
        first: K of the first batch that is not flushed; that of the t-th after it is t m later.
    """

    plan: Plan
    delay: int
    first: int

    def squares_with(self, k: int) -> int | None:
        """The batch whose sums of squares travel with the input gradient of microbatch k, if any."""
        batch, rest = divmod(k + 1 - self.delay, self.plan.microbatches)
        return batch - 1 if rest == 0 and batch > 0 else None

    def norm_with(self, s: int, k: int) -> int | None:
        """The batch whose norm arrives at stage s with the activation of microbatch k, if any."""
        batch, rest = divmod(k - self.first, self.plan.microbatches)
        return batch + self.plan.flush_first if batch >= 0 and rest < self.plan.replicas[s] else None

    def root(self, batch: int) -> int:
        """The worker of stage 0 that computes the norm of a batch."""
        return self.plan.worker(0, last_microbatch(self.plan, batch) + self.delay)


def route_of(plan: Plan) -> Route:
    """The route of a plan whose schedule does not flush and can use the norm."""
    schedule, last, replicas = SCHEDULES[plan.schedule], last_microbatch(plan, plan.flush_first), plan.replicas[0]
    needed = last + 1
    while schedule.version(plan, 0, needed) == plan.flush_first:
        needed += 1
    arrives = last + schedule.in_flight(plan, 0) * replicas
    delay = max(needed - arrives, 0) if max(plan.replicas) > 1 else 0
    return Route(plan, delay, min(arrives + delay, needed))


def last_microbatch(plan: Plan, batch: int) -> int:
    """The last microbatch of a batch, which names the messages about its norm."""
    return (batch + 1) * plan.microbatches - 1


def norm_alone(plan: Plan, batch: int) -> list[Instruction]:
    """The sums of squares from the last stage to stage 0, and the norm to all workers, in messages of their own."""
    k, first, written = last_microbatch(plan, batch), [workers[0] for workers in plan.stage_workers], list[Instruction]()
    for s in reversed(range(plan.depth)):
        written.append(SumSquares(first[s], batch))
        if s > 0:
            written += transfer(first[s], first[s - 1], k, "squares")
    return written + distribute(plan, batch, {first[0]})


def distribute(plan: Plan, batch: int, holders: set[int]) -> list[Instruction]:
    """The norm from the workers that have it, at least one of stage 0, to all others."""
    k, written, source = last_microbatch(plan, batch), list[Instruction](), -1
    for workers in plan.stage_workers:
        for worker in sorted(workers, key=lambda w: w not in holders):
            if worker not in holders:
                written += transfer(source, worker, k, "norm")
            if worker in holders or worker == workers[0]:
                source = worker
    return written


def transfer(source: int, to: int, k: int, message: Message) -> list[Instruction]:
    """A send and its receive."""
    return [Send(source, k, message, to), Receive(to, k, message, source)]
