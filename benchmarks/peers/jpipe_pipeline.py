"""`python -m benchmarks.peers.jpipe_pipeline SCHEDULE M PROCESS PROCESSES PORT`: run the same model in jpipe, one rank per process.

SCHEDULE is one of jpipe's (`+1`: one more microbatch in flight, `/2`: two stages on each rank), or `dp`, data parallelism: one stage with
one replica per process (`/4`: which sum their gradients in four parts; `+shared`: which share the optimizer state). With one process the
stages share its core, and the times of their computations are measured as well.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax

import jpipe
from benchmarks import gpt
from benchmarks.pipelines import Runner, fitted_costs
from benchmarks.serve import serve
from benchmarks.sizes import PEERS, warm_up

RANKS = 2


def main() -> None:
    """Compile, warm up, then run the steps that standard input requests."""
    (kind, _, extra), (microbatches, process, processes, port) = sys.argv[1].partition("+"), map(int, sys.argv[2:6])
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    stack, batch = gpt.stack(PEERS), gpt.data(PEERS, microbatches)
    schedule, _, chunks = kind.partition("/")
    if schedule == "dp":
        options = {"sum_parts": int(chunks or 1), "shard_optimizer": extra == "shared"}
        plan = jpipe.Plan.even(stack.ids, 1, "pipedream_flush", microbatches, replicas=processes, **options)
    else:
        stages, ranks = _cut(stack.ids, schedule, int(chunks or 1))
        plan = jpipe.Plan(schedule=schedule, microbatches=microbatches, stages=stages, ranks=ranks, extra_in_flight=int(extra or 0))
    pipe = jpipe.Pipeline(stack, plan, gpt.summed_loss, gpt.optimizer())
    facts: dict[str, Any] = {"parameters": gpt.count_parameters(stack, batch[0][: PEERS.rows])}
    if processes == 1:
        serve(lambda steps: {"stage_seconds": [cost.forward + cost.backward for cost in fitted_costs(pipe, batch, steps)]}, **facts)
    else:
        runner = Runner(pipe, batch)
        runner(warm_up(microbatches))
        serve(runner, **facts)


def _cut(ids: Sequence[str], schedule: str, chunks: int) -> tuple[list[jpipe.Stage], jpipe.schedules.Ranks]:
    """Return stages of equally many blocks, with the embedding in the first and the head in the last one, and their ranks."""
    count = RANKS * chunks
    blocks = ids[1:-1]
    size = len(blocks) // count
    cuts = [0, *(1 + s * size for s in range(1, count)), len(ids)]
    stages = [jpipe.Stage(layers=tuple(ids[a:b])) for a, b in itertools.pairwise(cuts)]
    return stages, jpipe.schedules.arranged(jpipe.schedules.SCHEDULES[schedule].layout, count, chunks)


if __name__ == "__main__":
    main()
