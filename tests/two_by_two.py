"""A schedule outside the registry, written like a file in `jpipe/schedules/`."""

from jpipe.schedules import Action, Schedule, one_forward_one_backward, pipeline_in_flight


def _order(plan, s, microbatches):
    """Yield 1F1B of pairs: two forwards, then two backwards."""
    pairs = [microbatches[n : n + 2] for n in range(0, len(microbatches), 2)]
    for entry in one_forward_one_backward(plan, s, range(len(pairs)), pipeline_in_flight(plan, s)):
        for op in entry.op:
            yield from (Action(op, s, k) for k in pairs[entry.microbatch])


TWO_BY_TWO = Schedule(
    name="two_by_two",
    flushes=True,
    order=_order,
    in_flight=lambda plan, s: min(2 * pipeline_in_flight(plan, s), plan.microbatches // plan.replicas[s]),
)
