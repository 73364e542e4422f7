"""Host memory: what a plan lets wait there changes no bit, is moved as the plan says, and leaves the device."""

import jax
import numpy as np
import pytest

from jpipe import LayerStack, Pipeline, Plan, lower
from jpipe.capabilities.host_memory.option import offloads
from jpipe.capabilities.host_memory.program import Fetch, Offload
from tests.jpipe import models, running

STACK = LayerStack({"first": models.dense(), "second": models.noisy(0.1), "mix": models.tracking(), "out": models.dense()})
WHOLE = {"optimizer": "all", "versions": "all", "residuals": "all", "stash": "all"}
CASES: dict[str, dict] = {
    "gpipe": {"num_stages": 2, "offload": {"optimizer": "all", "residuals": "all"}},
    "pipedream_flush": {"num_stages": 3, "offload": {"optimizer": [0, 2]}},
    "pipedream": {"num_stages": 4, "microbatches": 1, "offload": WHOLE},
    "pipedream_2bw": {"num_stages": 3, "offload": {"optimizer": "all", "versions": [0, 2]}},
    "zb_h1": {"num_stages": 4, "offload": WHOLE},
    "interleaved_1f1b": {"num_stages": 4, "chunks_per_rank": 2, "offload": {"optimizer": "all"}},
    "replicas": {"schedule": "pipedream", "num_stages": 2, "replicas": [2, 1], "offload": WHOLE},
    "shared": {"schedule": "pipedream_flush", "num_stages": 2, "replicas": 2, "shard_optimizer": True, "offload": {"optimizer": "all"}},
    "vertical": {"schedule": "pipedream", "num_stages": 3, "microbatches": 1, "vertical_sync": True, "offload": {"versions": "all"}},
    "agree": {"schedule": "pipedream", "num_stages": 3, "replicas": 2, "agree": {"every": 2}, "offload": WHOLE},
    "agree late": {
        "schedule": "pipedream_2bw",
        "num_stages": 2,
        "microbatches": 8,
        "replicas": 2,
        "agree": {"every": 3, "delay": 2, "fragments": "stages"},
        "offload": {"optimizer": "all", "versions": "all"},
    },
    "flush first": {"schedule": "pipedream_2bw", "num_stages": 3, "flush_first": 2, "offload": {"optimizer": [1], "versions": "all"}},
}


def plan_of(name, **fields) -> Plan:
    return Plan.even(STACK.ids, **{"schedule": name, "microbatches": 4, **CASES[name], **fields})


def pipeline(plan) -> Pipeline:
    average = 0.9 if plan.schedule == "gpipe" else None
    return Pipeline(STACK, plan, models.masked_squares, models.momentum(), jax.devices()[:1] * len(plan.rank_workers), ema_decay=average)


def check_memory_of_copies(plan, layers):
    """Check that a snapshot holds in host memory what the plan lets wait there, and everything else on the devices."""
    device_kind = jax.devices()[0].default_memory().kind
    for s, stage in enumerate(plan.stages):
        of_stage = [layers[name] for name in layers if name.partition(" replica ")[0] in stage.layers]
        versions = "params" if plan.agree is None else "own"  # the agreed weights are on the device
        for what, part in (("optimizer", "optimizer"), ("versions", versions)):
            kinds = {leaf.sharding.memory_kind for layer in of_stage for leaf in jax.tree.leaves(layer.get(part))}
            assert kinds == {"pinned_host" if offloads(plan, what, s) else device_kind}, (what, s)


@pytest.mark.thinned(most=3)
@pytest.mark.parametrize("name", CASES)
def test_host_memory_changes_no_bit(name):
    plan, moves = plan_of(name), set()
    batches = models.masked_batches(6, plan.microbatches)
    expected = running.train(pipeline(plan_of(name, offload=None)), batches)
    pipe = pipeline(plan)
    state, losses = running.fresh(pipe, batches), []
    snapshot = pipe.snapshot(4)

    def observe(event):
        snapshot(event)
        i = event.instruction
        if isinstance(i, Offload | Fetch):
            stage, weights = plan.workers[i.worker][0], event.state.weights
            match i.what:
                case "optimizer":
                    moved = event.state.optimizer
                case "versions":
                    moved = weights.read(i.number)
                case _:
                    moved = event.state.microbatches[i.number][i.what]
            kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(moved)}
            assert kinds == {"pinned_host" if isinstance(i, Offload) else jax.devices()[0].default_memory().kind}
            moves.add((i.what, stage))

    for batch in batches:
        state, metrics = pipe.step(state, batch, observe=observe)
        losses += metrics.losses.values()
        pipe.evaluate(state, batch, weights="newest" if pipe.ema_decay is None else "ema")
    state, metrics = pipe.drain(state, with_metrics=True, observe=observe)
    losses += metrics.losses.values()
    assert [float(loss) for loss in losses] == expected.losses
    jax.tree.map(np.testing.assert_array_equal, pipe.params(state), expected.params)
    if pipe.ema_decay is not None:
        assert jax.tree.leaves(pipe.params(state, weights="ema"))
    assert moves == {(i.what, plan.workers[i.worker][0]) for i in lower(plan, 6).instructions if isinstance(i, Offload)}
    layers = snapshot.layers()
    check_memory_of_copies(plan, layers)
    again = pipeline(plan)
    restored = running.train(again, batches[4:], again.restore(jax.random.key(running.KEY), batches[0], layers, 4))
    jax.tree.map(np.testing.assert_array_equal, restored.params, expected.params)
