"""How messages about a batch travel through all stages without a flush: together with the messages of certain microbatches.

A message about a batch travels from the last stage to the first with the input gradients of one microbatch, the j-th after the batch. From
stage 0 another message travels back with activations. Each worker updates by the batch just before the first forward that reads an
activation with this message. No worker waits for these messages, because each arrives with a message that the worker needs anyway.

    q = (t + 1) m - 1 + j       the message about batch t travels to stage 0 with the input gradients of microbatch q
    K = min(A(q), V)            at stage s the message back arrives with the activations of the microbatches K .. K + r_s - 1

A(q) is the first microbatch that stage 0 begins after the backward of q on the same replica. If each rank has one stage, A(q) is q + n_0
r_0, with n_0 microbatches in flight at stage 0. Stage s has r_s replicas. V is the first microbatch that reads the updated weights. If a
stage has replicas, j is the largest value with K <= V, so that the sum over the replicas overlaps with computations; otherwise j = 0.

If rows are cut into S slices, all of this holds for the rows, in place of microbatches: messages to stage 0 travel with the gradient of a
row's first slice, as its backward is the last one, and messages back with the activation of a row's first slice.
"""

from dataclasses import dataclass

from jpipe.plan import Plan
from jpipe.programs._instructions import Instruction, Receive, Send
from jpipe.schedules import SCHEDULES


@dataclass(frozen=True)
class Route:
    """The microbatches that carry the messages about each batch, under a schedule that does not flush."""

    plan: Plan  # the plan that runs
    delay: int  # j, the number of microbatches by which the message to stage 0 follows the last microbatch of its batch; whole rows
    arrivals: tuple[int, ...]  # K for the first batches that are not flushed; as many as the order of the schedule takes to repeat

    def to_first_with(self, k: int) -> int | None:
        """Return the batch, if any, that sends a message to stage 0 with the input gradient of microbatch k."""
        batch, offset = divmod(k + self.plan.row_slices - self.delay, self.plan.microbatches)
        return batch - 1 if offset == 0 and batch > 0 else None

    def complete_after(self, s: int, k: int) -> int | None:
        """Return the batch, if any, with gradients that stage s has summed after the backward of microbatch k; a replica gets it once."""
        replicas, each = self.plan.replicas[s], self.plan.row_slices
        batch, offset = divmod(k - (self.delay if replicas > 1 else 0), self.plan.microbatches)
        return batch if batch >= 0 and k % each == 0 and offset >= self.plan.microbatches - replicas * each else None

    def from_first_with(self, s: int, k: int) -> int | None:
        """Return the batch, if any, that gets a message from stage 0 at stage s with the activation of microbatch k."""
        period, m, each = len(self.arrivals), self.plan.microbatches, self.plan.row_slices
        for n, arrival in enumerate(self.arrivals if k % each == 0 else ()):
            periods, offset = divmod(k - arrival, period * m)
            if periods >= 0 and offset < self.plan.replicas[s] * each:
                return periods * period + n + self.plan.flush_first
        return None

    def root(self, batch: int) -> int:
        """Return the worker of stage 0 at which the message about a batch arrives."""
        return self.plan.worker(0, last_microbatch(self.plan, batch) + self.delay)


def route_of(plan: Plan) -> Route:
    """Return the route for a plan that does not flush, with updates that can wait for other stages."""
    period = SCHEDULES[plan.schedule].period(plan)
    batches = range(plan.flush_first, plan.flush_first + period)
    needed = [_first_reader(plan, batch) for batch in batches]

    def arrivals(delay: int) -> list[int]:
        return [_first_after(plan, last_microbatch(plan, batch) + delay) for batch in batches]

    def in_time(delay: int) -> bool:
        return all(arrival <= reader for arrival, reader in zip(arrivals(delay), needed, strict=True))

    delay = 0
    while max(plan.replicas) > 1 and in_time(delay + plan.row_slices):
        delay += plan.row_slices
    return Route(plan, delay, tuple(map(min, arrivals(delay), needed)))


def _first_reader(plan: Plan, batch: int) -> int:
    """Return V, the first microbatch that reads the weights that a batch has updated."""
    k = last_microbatch(plan, batch) + 1
    while SCHEDULES[plan.schedule].version(plan, 0, k) <= batch:
        k += 1
    return k


def _first_after(plan: Plan, q: int) -> int:
    """Return A(q), the first microbatch that the replica of stage 0 begins after the backward of q, the last slice of a row."""
    begun, step, each = plan.flush_first * plan.microbatches, plan.replicas[0] * plan.row_slices, plan.row_slices
    k = q + 1 - each + step
    while SCHEDULES[plan.schedule].done(plan, 0, k - begun) < ((q - begun) // step + 1) * each:
        k += step
    return k


def last_microbatch(plan: Plan, batch: int) -> int:
    """Return the last microbatch of a batch, which names the messages about it."""
    return (batch + 1) * plan.microbatches - 1


def transfer(source: int, to: int, k: int, message: str) -> list[Instruction]:
    """Return the send and the receive of a message."""
    return [Send(source, k, message, to), Receive(to, k, message, source)]
