"""`python -m benchmarks.peers.jpipe_pipeline SCHEDULE M PROCESS PROCESSES PORT`: the same model in jpipe, with one stage per process.

SCHEDULE is one of jpipe's (`+1`: one more microbatch in flight), or `dp`, data parallelism: one stage with one replica per process. With
one process the stages share its core, and the times of their computations are measured as well.
"""

import sys
from typing import Any

import jax

import jpipe
from benchmarks import gpt
from benchmarks.pipelines import Runner
from benchmarks.serve import serve
from benchmarks.sizes import PEERS, warm_up

STAGES = 2


def main() -> None:
    """Compile, warm up, then run the steps that standard input asks for."""
    (schedule, _, extra), (microbatches, process, processes, port) = sys.argv[1].partition("+"), map(int, sys.argv[2:6])
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    stack, batch = gpt.stack(PEERS), gpt.data(PEERS, microbatches)
    if schedule == "dp":
        plan = jpipe.Plan.even(stack.ids, 1, "pipedream_flush", microbatches, replicas=processes)
    else:
        plan = jpipe.Plan.even(stack.ids, STAGES, schedule, microbatches, extra_in_flight=int(extra or 0))
    pipe = jpipe.Pipeline(stack, plan, gpt.summed_loss, gpt.optimizer())
    facts: dict[str, Any] = {"parameters": gpt.count_parameters(stack, batch[0][: PEERS.rows])}
    if processes == 1:
        serve(lambda steps: {"stage_seconds": _stage_seconds(pipe, batch, steps)}, **facts)
    else:
        runner = Runner(pipe, batch)
        runner(warm_up(microbatches))
        serve(runner, **facts)


def _stage_seconds(pipe: jpipe.Pipeline, batch: Any, steps: int) -> list[float]:
    """Median time of a forward and a backward of each stage."""
    state = pipe.init(jax.random.key(0), batch)
    state, _ = pipe.step(state, batch)
    with jpipe.Tracer(pipe.plan) as tracer:
        for _ in range(steps):
            state, _ = pipe.step(state, batch, observe=tracer)
        trace = tracer.finish()
    return [cost.forward + cost.backward for cost in jpipe.runtime.fit_costs(pipe.costs(batch), trace.timeline)]


if __name__ == "__main__":
    main()
