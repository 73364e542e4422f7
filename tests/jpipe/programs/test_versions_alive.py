"""Weight versions in memory, counted after every instruction, never exceed the documented number and exist once."""

import jax
import numpy as np
import optax
import pytest

from jpipe import LayerStack, Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import fresh

WIDTHS = (13, 17, 19, 23)  # of the stages: every stage's matrix has a shape that nothing else has
STACK = LayerStack({f"layer{w}": models.dense(w) for w in WIDTHS})


def versions_allowed(variant: str, s: int, d: int, m: int, extra: int = 0) -> int:
    """Return the number of weight versions allowed at stage `s`, in closed form."""
    ahead = [1 + (1 + extra) * (d - 1 - stage) for stage in range(d)]
    if variant == "pipedream":
        return -(-(ahead[s] - 1) // m) + 1
    if variant == "pipedream_vertical_sync":
        return -(-(ahead[0] - 1) // m) + 1
    return 2 if variant == "pipedream_2bw" else 1


CASES = [(variant, 4, 4, 0) for variant in models.VARIANTS] + [
    ("pipedream", 4, 1, 0),
    pytest.param("pipedream", 4, 2, 0, marks=pytest.mark.oldest),
    ("pipedream", 3, 2, 2),
    ("pipedream_vertical_sync", 4, 1, 0),
    ("pipedream_vertical_sync", 4, 2, 0),
    pytest.param("pipedream_2bw", 3, 7, 1, marks=pytest.mark.oldest),
]


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(("variant", "d", "m", "extra"), CASES[::-1])
def test_no_more_versions_are_alive_than_the_table_says(variant, d, m, extra):
    plan = Plan.even(STACK.ids, d, microbatches=m, extra_in_flight=extra, **models.VARIANTS[variant])
    pipe = Pipeline(STACK, plan, models.squares, optax.sgd(0.01))
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(2 * m, 3)).astype(np.float32), rng.normal(size=(2 * m, WIDTHS[-1])).astype(np.float32)) for _ in range(8)]
    state = fresh(pipe, batches)
    matrix = [jax.tree.leaves(worker.weights.read(0))[-1].shape for worker in state.workers]  # of the last layer of each stage
    most = [0] * d

    def count(event):
        alive = [array.shape for array in jax.live_arrays()]
        for s in range(d):
            most[s] = max(most[s], alive.count(matrix[s]) - 1)  # one is the sum of gradients

    for batch in batches:
        state, _ = pipe.step(state, batch, observe=count)
    state = pipe.drain(state, observe=count)
    assert most == [versions_allowed(variant, s, d, m, extra) for s in range(d)]


@pytest.mark.slow
def test_a_version_exists_once_however_many_microbatches_read_it():
    plan = Plan.even(STACK.ids, 4, "pipedream_2bw", 6)
    pipe = Pipeline(STACK, plan, models.squares, optax.sgd(0.01))
    batch = (np.ones((6, 3), np.float32), np.ones((6, WIDTHS[-1]), np.float32))
    state = pipe.init(jax.random.key(0), batch)
    for _ in range(3):
        state, _ = pipe.step(state, batch)
    for worker in state.workers:
        assert len(worker.weights.versions) == 2
        assert sum("residuals" in microbatch for microbatch in worker.microbatches.values()) == 3 - state.workers.index(worker)
        weights = {leaf.shape for leaf in jax.tree.leaves(worker.weights)}
        assert not weights & {leaf.shape for leaf in jax.tree.leaves((worker.microbatches, worker.updates)) if leaf.ndim == 2}
