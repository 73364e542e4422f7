"""GPipe: all forwards of a batch, then all backwards, then a flush.

@GRID gpipe 3 4 2@

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: m.
Bubble with equal stages: (d - 1) / (m + d - 1). Reference: PipeDream (SOSP 2019), section 2.2, figure 3; Huang et al. 2019.
"""

from jpipe.schedules._schedule import Schedule, refuse_extra_in_flight, synchronous_version

GPIPE = Schedule(
    name="gpipe",
    flushes=True,
    in_flight=lambda plan, s: plan.microbatches,
    version=synchronous_version,
    versions_alive=lambda plan, s: 1,
    complaint=refuse_extra_in_flight,
)
