"""PipeDream-2BW: one forward, one backward in turn, never a flush; two weight versions, one update every m microbatches.

@GRID pipedream_2bw 3 4 3@

Version read at any stage: max(floor(k / m) - 1, 0): W(t + 1) = W(t) - lr * grad f(W(t - 1)), staleness 1. Versions alive: 2.
Legal for m >= max(d, n_0 - 1). Reference: PipeDream-2BW (ICML 2021), section 3.1, figure 2.
"""

from typing import TYPE_CHECKING

from jpipe.schedules._schedule import Schedule, pipeline_in_flight

if TYPE_CHECKING:
    from jpipe._plan import Plan


def _too_few_microbatches(plan: "Plan") -> str:
    least = max(plan.depth, pipeline_in_flight(plan, 0) - 1)
    if plan.microbatches < least:
        extra = f" with extra_in_flight {plan.extra_in_flight}" if plan.extra_in_flight else ""
        return (
            f"the schedule 'pipedream_2bw' needs at least {least} microbatches for {plan.depth} stages{extra}, found microbatches "
            f"{plan.microbatches}; raise microbatches or use fewer stages"
        )
    return ""


PIPEDREAM_2BW = Schedule(
    name="pipedream_2bw",
    flushes=False,
    in_flight=pipeline_in_flight,
    version=lambda plan, s, k: max(k // plan.microbatches - 1, 0),
    versions_alive=lambda plan, s: 2,
    complaint=_too_few_microbatches,
)
