"""The program that the tests of several processes run in each of them, and how they start it.

`python -m tests.jpipe.several ADDRESS COUNT INDEX FILE` trains every case in turn and writes what it found to FILE; with COUNT 1 all
workers are in one process.
"""

import sys

import numpy as np

CASES: dict[str, dict] = {
    "naive": {"num_stages": 2, "schedule": "naive", "microbatches": 2},
    "gpipe": {"num_stages": 2, "schedule": "gpipe", "microbatches": 3, "clip": 3.0},
    "flush": {"num_stages": 2, "schedule": "pipedream_flush", "microbatches": 3},
    "pipedream": {"num_stages": 2, "schedule": "pipedream", "microbatches": 1},
    "vertical_sync": {"num_stages": 2, "schedule": "pipedream", "microbatches": 2, "vertical_sync": True},
    "2bw": {"num_stages": 2, "schedule": "pipedream_2bw", "microbatches": 3},
    "data_parallel": {"num_stages": 1, "schedule": "pipedream_flush", "microbatches": 4, "replicas": 2, "clip": 3.0},
    "four_workers": {"num_stages": 2, "schedule": "pipedream_2bw", "microbatches": 6, "replicas": 2, "placement": [[0, 1], [0, 1]]},
    "round_robin": {"num_stages": 2, "schedule": "pipedream", "microbatches": 6, "replicas": (3, 2), "placement": [[0, 0, 1], [1, 0]]},
}
BATCHES = 5


def train(case: str, fields: dict) -> dict[str, np.ndarray]:
    """Every number that a run makes known, by name: losses, weights, norms, evaluations; parameters of the layers that are here."""
    import jax

    from jpipe import Pipeline, Plan
    from tests.jpipe import models

    stack = models.rich_stack()
    clip = fields.pop("clip", None)
    plan = Plan.even(stack.ids, **fields)
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), clip_global_norm=clip)
    batches = models.masked_batches(BATCHES, plan.microbatches)
    state, found = pipe.init(jax.random.key(7), batches[0]), {}
    for t, batch in enumerate(batches):
        state, metrics = pipe.step(state, batch)
        for name, numbers in metrics._asdict().items():
            found |= {f"{name} {batch}": float(number) for batch, number in numbers.items()}
        if t == 2:
            loss, weight, version = pipe.evaluate(state, batches[0])
            found |= {"evaluation": float(loss), "weight": float(weight), "version": version}
    state = pipe.drain(state)
    for layer_id, params in pipe.params(state).items():
        found |= {f"{layer_id} {jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree.leaves_with_path(params)}
    return {f"{case}: {name}": np.asarray(value) for name, value in found.items()}


def main(address: str, count: int, index: int, file: str) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if count > 1:
        jax.distributed.initialize(address, count, index)
    found = {}
    for case, fields in CASES.items():
        found |= train(case, dict(fields))
    np.savez(file, **found)
    if count > 1:
        from jpipe import _pipeline

        _pipeline.join_processes().close()
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
