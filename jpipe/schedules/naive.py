"""Naive model parallelism: one microbatch at a time walks through all stages and back; one worker computes, the others wait.

@GRID naive 3 2 2@

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: 1.
Reference: the baseline of PipeDream (SOSP 2019), section 2.2, figure 2.
"""

from jpipe.schedules._schedule import Schedule, refuse_extra_in_flight, synchronous_version

NAIVE = Schedule(
    name="naive",
    flushes=True,
    in_flight=lambda plan, s: 1,
    version=synchronous_version,
    versions_alive=lambda plan, s: 1,
    complaint=refuse_extra_in_flight,
)
