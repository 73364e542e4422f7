"""PipeDream: one forward, one backward in turn, never a flush; each stage stashes the versions its microbatches in flight have read.

@GRID pipedream 3 1 6@

Version read at stage s: floor(max(k - (n_s - 1), 0) / m) with n_s = d - s: W_s(t - d + s + 1), staleness d - 1 - s updates for m = 1.
Versions alive: ceil((n_s - 1) / m) + 1.

With `vertical_sync` every stage reads the version that the first stage reads, floor(max(k - (n_0 - 1), 0) / m): W(t - d + 1), staleness
d - 1 everywhere for m = 1, and every stage holds ceil((n_0 - 1) / m) + 1 versions. Reference: PipeDream (SOSP 2019), section 3.3, figure 9.
"""

from typing import TYPE_CHECKING

from jpipe.schedules._schedule import Schedule, delayed_version, delayed_versions_alive, no_complaint, pipeline_in_flight

if TYPE_CHECKING:
    from jpipe._plan import Plan


def _leader(plan: "Plan", s: int) -> int:
    """The stage whose number in flight decides the version: the first one under vertical sync, else the stage itself."""
    return 0 if plan.vertical_sync else s


PIPEDREAM = Schedule(
    name="pipedream",
    flushes=False,
    in_flight=pipeline_in_flight,
    version=lambda plan, s, k: delayed_version(plan, k, pipeline_in_flight(plan, _leader(plan, s))),
    versions_alive=lambda plan, s: delayed_versions_alive(plan, pipeline_in_flight(plan, _leader(plan, s))),
    complaint=no_complaint,
)
