"""Measure lowering and verification of programs: 64 stages × 512 microbatches, and how the time grows."""

import statistics
import time
from typing import Any

from jpipe import Plan, lower, simulate

STAGES, REPEATS = 64, 5


def measure() -> list[dict[str, Any]]:
    """Measure seconds to lower and simulate, and microseconds per instruction for 128 to 1,024 microbatches."""
    rows = []
    for microbatches in (128, 256, 512, 1024):
        plan = Plan.even([str(i) for i in range(STAGES)], STAGES, "pipedream_2bw", microbatches)
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            program = lower(plan, 1)
            simulate(program)
            times.append(time.perf_counter() - start)
        seconds, count = statistics.median(times), len(program.instructions)
        label = f"lower + simulate, {STAGES} stages x {microbatches} microbatches"
        rows.append({"figure": f"{label}: s", "measured": seconds, "goal": "< 2" if microbatches == 512 else ""})
        rows.append({"figure": f"{label}: µs per instruction ({count})", "measured": seconds / count * 1e6, "goal": "constant"})
    return rows
