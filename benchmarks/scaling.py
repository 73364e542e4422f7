"""Measure lowering and verification for 8 to 4,096 workers with measured costs: a deep pipeline, and replicas of a short one.

Further what one process of a run with 1,024 workers spends on its programs: at its start, and for each batch.
"""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import gpt
from benchmarks.sizes import Sizes
from jpipe import Pipeline, Plan, Tracer, lower, simulate
from jpipe.programs import StageCost, Steps
from jpipe.runtime import fit_costs
from jpipe.schedules import SCHEDULES

WORKERS, MICROBATCHES, STAGES, REPEATS = (8, 64, 512, 4096), 16, 8, 3
SIZES = Sizes(layers=1, width=256, heads=8, sequence=128, rows=4)


def measure() -> list[dict[str, Any]]:
    """Measure seconds to lower and simulate one batch, and microseconds per instruction, which should be constant."""
    first, middle, last = _stage_costs()
    rows = []
    for workers in WORKERS:
        plan = Plan.even([str(i) for i in range(workers)], workers, "pipedream_flush", MICROBATCHES)
        rows += _rows(f"{workers} workers in a row", plan, [first, *[middle] * (workers - 2), last])
    for workers in WORKERS:
        replicas = workers // STAGES
        plan = Plan.even([str(i) for i in range(STAGES)], STAGES, "pipedream_2bw", MICROBATCHES * replicas, replicas=replicas)
        rows += _rows(f"{STAGES} stages of {replicas} replicas", plan, [first, *[middle] * (STAGES - 2), last])
    for schedule in ("pipedream_flush", "pipedream_2bw"):
        rows += _process_rows(schedule)
    return rows


def _process_rows(schedule: str, stages: int = 128, replicas: int = 8, microbatches: int = 1024) -> list[dict[str, Any]]:
    """Measure the processor time of a process with one worker in the middle of a plan: for its programs, and a pass over one a batch."""
    plan = Plan.even([str(i) for i in range(stages)], stages, schedule, microbatches, replicas=replicas)
    flushes, batches = SCHEDULES[schedule].flushes, 20
    start = time.process_time()
    steps = Steps(plan, workers=[plan.stage_workers[stages // 2][0]])
    instructions = sum(len(run.instructions) for run in steps.verified_runs)
    seconds = time.process_time() - start
    start = time.process_time()
    for batch in range(batches):
        program, _ = steps.program(0 if flushes else batch, batch, False)
        kinds = Counter(map(type, program.instructions))
    each = (time.process_time() - start) / batches
    label = f"{schedule}, {stages} stages of {replicas} replicas x {microbatches} microbatches"
    return [
        {"figure": f"start of a process, {label}: s ({instructions} instructions verified)", "measured": seconds, "goal": "< 2"},
        {"figure": f"pass over a batch of a process, {label}: ms ({kinds.total()} instructions)", "measured": each * 1e3, "goal": "< 1"},
    ]


def _rows(label: str, plan: Plan, costs: Sequence[StageCost]) -> list[dict[str, Any]]:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        program = lower(plan, 1)
        simulate(program, costs)
        times.append(time.perf_counter() - start)
    seconds, count = statistics.median(times), len(program.instructions)
    return [
        {"figure": f"lower + simulate, {label}: s", "measured": seconds},
        {"figure": f"lower + simulate, {label}: µs per instruction ({count})", "measured": seconds / count * 1e6, "goal": "constant"},
    ]


def _stage_costs() -> tuple[StageCost, ...]:
    """Measure embedding, one block and head of the GPT on this machine."""
    stack, batch = gpt.stack(SIZES), gpt.data(SIZES, MICROBATCHES)
    plan = Plan.even(stack.ids, 3, "pipedream_flush", MICROBATCHES)
    pipe = Pipeline(stack, plan, gpt.summed_loss, gpt.optimizer())
    state = pipe.init(jax.random.key(0), batch)
    with Tracer(plan) as tracer:
        for _ in range(3):
            state, _ = pipe.step(state, batch, observe=tracer)
        trace = tracer.finish()
    return fit_costs(pipe.costs(batch), trace.timeline)
