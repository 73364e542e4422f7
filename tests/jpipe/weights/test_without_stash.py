"""PipeDream without a stash: forwards and backwards read the newest weights of their time."""

import jax
import numpy as np
import optax
import pytest

from jpipe import InputError, Pipeline, Plan, lower, simulate
from jpipe.ops import OPS
from jpipe.programs._instructions import Compute, Update
from tests.jpipe import models, running

RATE, LAYERS = 0.3, 6
DEPTH = 3


def plan_of(microbatches, **fields):
    return Plan.even(models.plain_stack(LAYERS).ids, DEPTH, "pipedream", microbatches, stash=False, **fields)


def versions(m, s, k):
    """Return the versions that the forward and the backward of microbatch k read at stage s."""
    return max(k - (DEPTH - 1 - s), 0) // m, k // m


def trained_by_hand(params, batches, m, recompute):
    """Train by the rule: linear maps and tanh, each backward with the activations of the forward and the weights of its own time."""
    by_version = [[params] for _ in range(DEPTH)]  # by stage
    losses, rows = [], models.ROWS
    for t, (inputs, labels) in enumerate(batches):
        sums = jax.tree.map(np.zeros_like, params)
        loss = 0.0
        for j in range(m):
            k, x, kept = t * m + j, inputs[j * rows : (j + 1) * rows], []
            target = labels[j * rows : (j + 1) * rows]
            for n, name in enumerate(params):
                s = n // (LAYERS // DEPTH)
                layer = by_version[s][versions(m, s, k)[0]][name]
                kept.append((x, np.tanh(x @ layer["w"] + layer["b"])))
                x = kept[-1][1]
            loss += ((x - target) ** 2).sum()
            gradient = 2 * (x - target)
            for n, name in reversed([*enumerate(params)]):
                s = n // (LAYERS // DEPTH)
                newest = by_version[s][versions(m, s, k)[1]]
                if recompute == "full" and n == (s + 1) * LAYERS // DEPTH - 1:  # the stage's forward again, from its input
                    again = kept[s * LAYERS // DEPTH][0]
                    for i in range(s * LAYERS // DEPTH, n + 1):
                        layer = newest[f"layer{i}"]
                        kept[i] = again, np.tanh(again @ layer["w"] + layer["b"])
                        again = kept[i][1]
                x, y = kept[n]
                before = gradient * (1 - y**2)
                sums[name]["w"] += x.T @ before
                sums[name]["b"] += before.sum(0)
                gradient = before @ newest[name]["w"].T
        losses.append(loss / labels.size)
        step = jax.tree.map(lambda total, size=labels.size: RATE * total / size, sums)
        for each in by_version:
            each.append(jax.tree.map(np.subtract, each[-1], step))
    return losses, {name: by_version[n // (LAYERS // DEPTH)][-1][name] for n, name in enumerate(params)}


@pytest.mark.parametrize(("m", "recompute"), [(1, "none"), (3, "none"), (4, "full")])
def test_it_trains_by_its_rule_and_resumes_bit_for_bit(m, recompute):
    with jax.enable_x64(True):
        batches = models.batches_of(6, m * models.ROWS, dtype=np.float64)
        pipe = Pipeline(models.plain_stack(LAYERS), plan_of(m, recompute=recompute), models.squares, optax.sgd(RATE))
        state = running.fresh(pipe, batches)
        start = jax.tree.map(np.asarray, pipe.params(state))
        losses, snapshot = {}, pipe.snapshot(3)
        for batch in batches:
            state, metrics = pipe.step(state, batch, observe=snapshot)
            losses |= {n: float(loss) for n, loss in metrics.losses.items()}
        params = pipe.params(pipe.drain(state))
        expected, final = trained_by_hand(start, batches, m, recompute)
        np.testing.assert_allclose([losses[t] for t in range(6)], expected, rtol=1e-10)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12), params, final)
        state = pipe.restore(jax.random.key(running.KEY), batches[0], snapshot.layers(), 3)
        for t, batch in enumerate(batches[3:], start=3):
            state, metrics = pipe.step(state, batch)
            assert float(metrics.losses[t]) == losses[t]
        running.check_equal(pipe.params(pipe.drain(state)), params)


@pytest.mark.parametrize("m", [1, 2, 3, 6])
def test_backwards_read_the_newest_weights_and_one_version_is_held(m):
    plan = plan_of(m)
    program = lower(plan, 8)
    simulate(program)  # verifies it
    last = 8 * m - DEPTH  # from here on the pipeline drains
    for w, (s, _) in enumerate(plan.workers):
        held, made = {0}, 0
        for i in program.instructions:
            if i.worker != w:
                continue
            if isinstance(i, Compute):
                assert i.version == versions(m, s, i.microbatch)[0 if OPS[i.op].begins else 1]
                assert i.version in held
                if i.microbatch >= last:
                    break
            if isinstance(i, Update):
                held, made = held - {i.retires} | {i.batch + 1}, made + 1
                assert held == {made}


@pytest.mark.parametrize("slices", [1, 3])
def test_stages_may_update_after_each_microbatch(slices):
    program = lower(plan_of(2, update_every="replicas", slices=slices), 6)
    simulate(program)  # verifies it
    backwards = [i for i in program.instructions if isinstance(i, Compute) and OPS[i.op].finishes]
    assert all(i.version == i.microbatch // slices for i in backwards)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 2, "microbatches": 4}, "stash: false needs one replica of each stage, found replicas"),
        ({"vertical_sync": True}, "stash: false needs stages that read their newest weights; leave out vertical_sync"),
        ({"split_backward": "early"}, "stash: false needs backwards that are one computation; leave out split_backward"),
        ({"offload": {"versions": "all"}}, "host memory keeps the versions that backwards read"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        plan_of(**({"microbatches": 3} | fields))


def test_other_schedules_have_no_stash():
    with pytest.raises(InputError, match="stash"):
        Plan.even("abcd", 4, "pipedream_2bw", 4, stash=False)


@pytest.mark.parametrize(("depth", "m", "fields"), [(2, 1, {}), (3, 1, {}), (3, 3, {"extra_in_flight": 2})])
def test_a_drain_shortly_after_another_one_needs_no_further_programs(depth, m, fields):
    """After a drain several versions are held; the next drain may come before they are released."""
    plan = Plan.even(models.plain_stack(LAYERS).ids, depth, "pipedream", m, stash=False, **fields)
    pipe = Pipeline(models.plain_stack(LAYERS), plan, models.squares, optax.sgd(RATE))
    batches = models.batches_of(8, m * models.ROWS)
    state = running.fresh(pipe, batches)
    whole = running.fresh(pipe, batches)
    for t, batch in enumerate(batches):
        state, _ = pipe.step(state, batch)
        if t in (3, 4, 6):
            state = pipe.drain(state)
    for batch in batches:
        whole, _ = pipe.step(whole, batch)
    running.check_equal(pipe.params(pipe.drain(state)), pipe.params(pipe.drain(whole)))
