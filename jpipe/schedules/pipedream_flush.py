"""PipeDream-Flush: one forward, one backward in turn, with a flush after each batch. GPipe's bubble, fewer activations.

@GRID pipedream_flush 3 4 2@

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: min(n_s, m) with n_s = d - s.
Bubble with equal stages: (d - 1) / (m + d - 1). Reference: PipeDream-2BW (ICML 2021), section 3.2, figure 4.
"""

from jpipe.schedules._schedule import Schedule, no_complaint, pipeline_in_flight, synchronous_version

PIPEDREAM_FLUSH = Schedule(
    name="pipedream_flush",
    flushes=True,
    in_flight=lambda plan, s: min(pipeline_in_flight(plan, s), plan.microbatches),
    version=synchronous_version,
    versions_alive=lambda plan, s: 1,
    complaint=no_complaint,
)
