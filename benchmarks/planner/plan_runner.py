"""`python -m benchmarks.planner.plan_runner INDEX COUNT PORT`: one of several processes that run the plans they receive.

It prints what the planner needs (the profile of process 0, and the links measured by all). Then, for each line of JSON with a plan and a
number of steps, it prints the time of the steps and the memory of its workers. Before and after each plan it times a step of the whole
model alone, because the speed of a core on a shared machine varies by a fifth within a minute.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from benchmarks.pipelines import Runner
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import layers
from jpipe_planner import Profile, local_topology, measure
from jpipe_train.losses import cross_entropy
from jpipe_train.report.performance.comparison import temporary_of_ranks

MODEL = ModelConfig(depth=3, width=128, heads=4, seq_len=128)  # configs/gpt-bytes.yaml with one block less
BATCH, SIZES = 32, (4, 8, 16)
_LONG = 600.0  # seconds without progress that the profile may take


def main(index: int, count: int, port: int) -> None:
    """Join the other processes, profile, then run the plans that arrive."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    processes = jpipe.join_processes(limit=120.0, wait=_LONG)
    assert processes is not None
    jax.devices()  # they start together
    pace = _pace()
    paces = [pace()]
    if index < (os.cpu_count() or 1):  # as many as there are cores: busy cores slow each other down, as they will when plans run
        text = profile().to_json()
    paces.append(pace())
    if index == 0:
        processes.broadcast("profile", text.encode())
    received = Profile.from_json(processes.receive("profile", 0).decode())
    topology = local_topology()
    facts = {"profile": json.loads(received.to_json()), "topology": topology.model_dump(mode="json")}
    print(json.dumps({**facts, "pace": statistics.fmean(paces)}), flush=True)
    paces = [pace()]
    for line in sys.stdin:
        request = json.loads(line)
        answer = run(jpipe.Plan(**request["plan"]), request["steps"])
        paces.append(pace())
        print(json.dumps({**answer, "pace": statistics.fmean(paces[-2:])}), flush=True)


def profile() -> Profile:
    """Profile the default GPT on the core of this process."""
    stack = layers.layers(MODEL)

    def batch(rows: int) -> Any:
        spec = jax.ShapeDtypeStruct((rows, MODEL.seq_len), np.int32)
        return spec, spec

    return measure(stack, batch, cross_entropy.loss, optimizer(), SIZES, seconds=20.0)


def _pace() -> Callable[[], float]:
    """Return a function that runs forward and backward of the whole model for a third of a second and returns the time of one."""
    stack, (inputs, labels) = layers.layers(MODEL), _batch(SIZES[0])
    specs = {layer_id: (spec.params, spec.state) for layer_id, spec in stack.specs(inputs).items()}
    params, state = (jax.tree.map(_filled, {layer_id: spec[n] for layer_id, spec in specs.items()}) for n in (0, 1))

    def summed(params: Any) -> Any:
        outputs, _ = stack.apply(stack.ids, params, state, inputs, key=None, microbatch=0, train=False)
        return cross_entropy.loss(outputs, labels)[0]

    pass_ = jax.jit(jax.grad(summed))
    jax.block_until_ready(pass_(params))

    def measured() -> float:
        seconds = []
        while sum(seconds) < 1 / 3:
            begin = time.perf_counter()
            jax.block_until_ready(pass_(params))
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)

    return measured


def _filled(spec: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.full(spec.shape, 0.01, spec.dtype)


def _batch(rows: int) -> Any:
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (rows, MODEL.seq_len + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def optimizer() -> optax.GradientTransformation:
    """Return the optimizer of the default config."""
    return optax.adamw(1e-3)


def run(plan: jpipe.Plan, steps: int) -> dict[str, Any]:
    """Run steps of a plan.

    Returns:
        When the steps ended, the sizes of the stages, and the peak bytes of each rank of this process: of its arrays, and of temporaries.
    """
    batch = _batch(BATCH)
    pipe = jpipe.Pipeline(layers.layers(MODEL), plan, cross_entropy.loss, optimizer())
    runner = Runner(pipe, batch)
    runner(2 * jpipe.programs.batches_until_full(plan) + 2)
    ends = runner(steps)["ends"]
    tracer = jpipe.Tracer(plan)
    runner(3, tracer)
    memory = tracer.finish().memory
    costs = pipe.costs(batch)  # those of other processes' stages without temporaries
    local = [rank for rank, workers in enumerate(plan.rank_workers) if pipe.devices[workers[0]].process_index == jax.process_index()]
    unseen = [
        size
        for stages, size in zip(plan.pipeline_ranks, temporary_of_ranks(plan, costs), strict=True)
        for _ in range(plan.replicas[stages[0]])
    ]
    peaks = {rank: max(sample.total for sample in memory[rank]) + unseen[rank] for rank in local}
    return {"ends": ends, "peaks": peaks, "costs": [vars(cost) for cost in costs]}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
