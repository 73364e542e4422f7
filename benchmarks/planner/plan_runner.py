"""`python -m benchmarks.planner.plan_runner INDEX COUNT PORT`: one of several processes that run any plan they are told.

It says what the planner needs to know (the profile of process 0, and the links measured by all of them), then, for each line of JSON with a
plan and a number of steps, how long these took and what its workers held.
"""

import json
import sys
from typing import Any

import jax
import numpy as np
import optax

import jpipe
from benchmarks.pipelines import Runner
from planner.local import local_topology
from planner.measure import measure
from planner.profile import Profile
from train import gpt
from train.config import ModelConfig

MODEL = ModelConfig(depth=3, width=128, heads=4, seq_len=128)  # of configs/gpt-bytes.yaml
BATCH, SIZES = 32, (4, 8, 16)
_LONG = 600.0  # seconds without progress that the profile may take


def main(index: int, count: int, port: int) -> None:
    """Join the others, profile, then run what comes."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    processes = jpipe.join_processes(limit=120.0, wait=_LONG)
    assert processes is not None
    jax.devices()  # they start together
    text = profile().to_json()  # all at the same time: cores that are busy slow each other down, as they will when plans run
    if index == 0:
        processes.tell("profile", list(map(float, text.encode())))
    found = Profile.from_json(bytes(map(int, processes.told("profile", 0))).decode())
    topology = local_topology(dispatch=found.dispatch)
    print(json.dumps({"profile": json.loads(found.to_json()), "topology": topology.model_dump(mode="json")}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps(run(jpipe.Plan(**told["plan"]), told["steps"])), flush=True)


def profile() -> Profile:
    """Of the default GPT, on the core of this process."""
    stack = gpt.gpt(MODEL)

    def batch(rows: int) -> Any:
        spec = jax.ShapeDtypeStruct((rows, MODEL.seq_len), np.int32)
        return spec, spec

    return measure(stack, batch, gpt.loss, optimizer(), SIZES, seconds=20.0)


def optimizer() -> optax.GradientTransformation:
    """As in the default config."""
    return optax.adamw(1e-3)


def run(plan: jpipe.Plan, steps: int) -> dict[str, Any]:
    """When the steps ended, the sizes of the stages, and the most bytes of each worker here: its arrays as they were seen, and the
    scratch memory of its programs."""
    tokens = np.random.default_rng(0).integers(0, gpt.SYMBOLS, (BATCH, MODEL.seq_len + 1)).astype(np.int32)
    batch = tokens[:, :-1], tokens[:, 1:]
    pipe = jpipe.Pipeline(gpt.gpt(MODEL), plan, gpt.loss, optimizer())
    runner = Runner(pipe, batch)
    runner(2 * jpipe.batches_until_full(plan) + 2)
    ends = runner(steps)["ends"]
    tracer = jpipe.Tracer(plan)
    runner(3, tracer)
    memory = tracer.finish().memory
    costs = pipe.costs(batch)  # those of other processes' stages without temporaries
    here = [w for w, device in enumerate(pipe.devices) if device.process_index == jax.process_index()]
    peaks = {w: max(sample.total for sample in memory[w]) + costs[plan.workers[w][0]].temporary for w in here}
    return {"ends": ends, "peaks": peaks, "costs": [vars(cost) for cost in costs]}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
