"""Weight prediction in a pipeline: the same as a sequential reference of its rule, whatever it is combined with."""

import functools
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import jpipe
from jpipe import InputError, Pipeline, Plan, Precision
from jpipe._arguments import checked_delay_factor, log_correction
from jpipe.model.layerwise._transformation import has_nesterov
from jpipe.optimizers import compensated_adamw, soap, torch_nadam
from tests.jpipe import models, monolith, reference, running

STACK = models.rich_stack()
FACTOR = 0.75
DRAINED = {2, 4}
PLANS = {
    "2BW": {"schedule": "pipedream_2bw", "num_stages": 3, "microbatches": 3},
    "2BW, flushed first": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 2, "flush_first": 2},
    "pipedream": {"schedule": "pipedream", "num_stages": 4, "microbatches": 1},
    "pipedream, m = d": {"schedule": "pipedream", "num_stages": 3, "microbatches": 3},
    "vertical sync": {"schedule": "pipedream", "num_stages": 3, "microbatches": 1, "vertical_sync": True},
    "2-1": {"schedule": "pipedream", "num_stages": 2, "microbatches": 2, "replicas": [2, 1]},
    "2-1, paper": {"schedule": "pipedream", "num_stages": 2, "microbatches": 2, "replicas": [2, 1], "update_every": "replicas"},
    "chunks": {"schedule": "pipedream", "num_stages": 4, "microbatches": 3, "chunks_per_rank": 2},
    "flush": {"schedule": "pipedream_flush", "num_stages": 3, "microbatches": 3},
}


@functools.cache
def adam():
    """Adam with a schedule and no decay."""
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 9))


def plan_of(name, stack=STACK, **fields):
    return Plan.even(stack.ids, **PLANS[name], **fields)


def pipeline(plan, stack=STACK, optimizer=None, correction=FACTOR, **options):
    devices = [jax.devices()[p] for p, stages in enumerate(plan.pipeline_ranks) for _ in range(plan.replicas[stages[0]])]
    loss = models.masked_squares
    return Pipeline(stack, plan, loss, optimizer or adam(), devices, delay_correction=correction, **options)


def delays_of(plan, batch):
    """Return the mean age of the versions that each layer reads in a batch, as the float32 that the pipeline computes with."""
    m, delays = plan.microbatches, {}
    for s, stage in enumerate(plan.stages):
        mean = np.mean([batch - reference.version(plan, s, k) for k in range(batch * m, (batch + 1) * m)])
        delays |= dict.fromkeys(stage.layers, float(np.float32(mean)))
    return delays


def ordinary(pipe, batches, start, layer_state, later=None, since=None):
    """Return the losses, the weights x and the ordinary iterates y after each batch and before the first, from the rule itself.

    From batch `since` on, the run is that of the pipeline `later`.
    """
    m, x, y = pipe.plan.microbatches, [start], [start]
    optimizer, optimizer_state, losses = clipped(pipe), clipped(pipe).init(start), []
    gradient_of, _ = monolith.compiled(pipe.stack, pipe.loss, optimizer)
    for t, batch in enumerate(batches):
        if t == since:
            saved = by_layer(pipe, [reference.version(pipe.plan, s, t * m) for s in range(pipe.plan.depth)])
            pipe = later
            x[-1] = {i: x[-1][i] if predicts else y[-1][i] for i, predicts in by_layer(pipe, [f.predicts for f in built(pipe)]).items()}
            x[-2] = {i: x[-2 if saved[i] < t else -1][i] for i in pipe.stack.ids}  # what is not in a snapshot is replaced by the newest
        rows = np.split(np.arange(len(jax.tree.leaves(batch)[0])), m)
        microbatches = [jax.tree.map(lambda leaf, part=part: leaf[part], batch) for part in rows]
        stage_of = by_layer(pipe, range(pipe.plan.depth))
        trees = [{i: x[reference.version(pipe.plan, stage_of[i], t * m + j)][i] for i in pipe.stack.ids} for j in range(m)]
        (loss, layer_state), gradient = gradient_of(trees, layer_state, microbatches, t * m, jax.random.key(running.KEY))
        with jax.numpy_dtype_promotion("standard"):
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, x[-1])
        y.append(optax.apply_updates(y[-1], updates))
        rates = {layer_id: (pipe.delay_factor or 0.0) * delay for layer_id, delay in delays_of(pipe.plan, t).items()}
        x.append({i: jax.tree.map(lambda a, u, rate=rates[i]: a + rate * u, y[-1][i], updates[i]) for i in y[-1]})
        losses.append(float(loss))
    return losses, x, y


def clipped(pipe):
    norm = pipe.clip_global_norm
    return pipe.optimizer if norm is None else optax.chain(optax.clip_by_global_norm(norm), pipe.optimizer)


def built(pipe):
    return pipe.stage_functions(models.masked_batches(1, pipe.plan.microbatches, dtype=np.float64)[0])


def by_layer(pipe, of_stages):
    return {layer_id: value for stage, value in zip(pipe.plan.stages, of_stages, strict=True) for layer_id in stage.layers}


def check(pipe, batches, drained=()):
    """Train, and compare the losses, the weights at some batches and what an evaluation reads with the reference."""
    state = running.fresh(pipe, batches)
    start = models.on_first_device((pipe.params(state), running.layer_state(state)))
    losses, x, y = ordinary(pipe, batches, *start)
    all_losses = {}
    for t, batch in enumerate(batches):
        state, metrics = pipe.step(state, batch)
        all_losses |= metrics.losses
        if t in drained:
            state, metrics = pipe.drain(state, with_metrics=True)
            all_losses |= metrics.losses
        if t in (1, 4):  # in flight, or drained
            running.check_close(models.on_first_device(pipe.params(state)), y[t + 1])
    state, metrics = pipe.drain(state, with_metrics=True)
    all_losses |= metrics.losses
    running.check_close([float(all_losses[t]) for t in sorted(all_losses)], losses)
    for worker in state.workers:
        newest = worker.weights.read(worker.weights.newest)
        running.check_close(models.on_first_device(newest), {entry: x[-1][entry] for entry in newest})
    running.check_close(models.on_first_device(pipe.params(state)), y[-1])
    return state, y


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("2-1, paper", "2-1")])
def test_it_is_the_rule_applied_to_the_whole_model(name):
    plan = plan_of(name)
    batches = models.masked_batches(7, plan.microbatches, dtype=np.float64)
    check(pipeline(plan), batches, DRAINED)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_replicas_make_the_same_correction():
    plan = plan_of("2-1", models.plain_stack())
    batches = models.masked_batches(7, 2, dtype=np.float64)
    state, _ = check(pipeline(plan, models.plain_stack()), batches, DRAINED)
    running.check_equal(*[models.on_first_device(worker.optimizer) for worker in state.workers[:2]])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("stack", [STACK, pytest.param(models.tied_stack(), marks=pytest.mark.exhaustive)], ids=["untied", "tied"])
def test_gradients_are_clipped_before_the_correction(stack):
    plan = plan_of("2BW", stack)
    batches = models.masked_batches(6, 3, dtype=np.float64)
    pipe = pipeline(plan, stack, clip_global_norm=0.5)
    if stack is STACK:
        check(pipe, batches, DRAINED)
    else:  # with a plan of one stage the shared parameter is there once, and equals the rule without a tie between stages
        one = pipeline(Plan.even(stack.ids, 1, "pipedream_2bw", 3), stack, clip_global_norm=0.5)
        running.check_close(on_host(running.train(pipe, batches).params), on_host(running.train(one, batches).params))


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.slow
def test_copies_of_a_shared_parameter_stay_equal_bit_for_bit():
    stack = models.tied_stack()
    pipe = pipeline(plan_of("2BW", stack), stack, clip_global_norm=0.5)
    batches = models.masked_batches(5, 3)
    state, cut = running.fresh(pipe, batches), pipe.snapshot(5)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=cut)
    pipe.drain(state, observe=cut)
    copies = cut.copies()
    assert len(copies) == 2
    assert len({copy.checksum for copy in copies}) == 1


BITS = [name for name in PLANS if name not in ("flush", "chunks")]


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("optimizer", [models.momentum(), optax.adamw(0.05)], ids=["momentum", "adamw"])
def test_a_factor_of_zero_changes_no_bit(name, optimizer):
    plan = plan_of(name)
    batches = models.masked_batches(5, plan.microbatches)
    options = {} if plan.schedule == "pipedream" and not plan.vertical_sync else {"clip_global_norm": 0.5}
    none, zero = (running.train(pipeline(plan, optimizer=optimizer, correction=factor, **options), batches) for factor in (None, 0))
    for one, other in zip(jax.tree.leaves(none), jax.tree.leaves(zero), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.slow
def test_a_schedule_that_flushes_has_no_correction_and_no_buffer():
    plan = plan_of("flush")
    batches = models.masked_batches(3, plan.microbatches)
    none, corrected = (pipeline(plan, correction=correction) for correction in (None, "predict"))
    running.check_equal(running.train(none, batches), running.train(corrected, batches))
    assert none.costs(batches[0]) == corrected.costs(batches[0])


def test_a_buffer_for_each_parameter_of_each_stage_with_a_delay():
    plan = plan_of("pipedream")
    batch = models.masked_batches(1, 1)[0]
    none, corrected = (pipeline(plan, correction=correction).costs(batch) for correction in (None, "predict"))
    more = [after.optimizer - before.optimizer for before, after in zip(none, corrected, strict=True)]
    assert more == [*(cost.trained for cost in none[:3]), 0]  # the gradients of the last stage are never late


@pytest.mark.slow
def test_a_batch_that_is_skipped_changes_no_buffer():
    plan = plan_of("2BW")
    pipe = pipeline(plan, skip_nonfinite=True)
    batches = models.masked_batches(4, plan.microbatches)
    bad = (np.full_like(batches[0][0], np.nan), batches[0][1])
    state = running.fresh(pipe, batches)
    for batch in batches[:3]:
        state, _ = pipe.step(state, batch)
    state = pipe.drain(state)
    before = on_host([(worker.weights.read(3), worker.optimizer) for worker in state.workers])
    state, _ = pipe.step(state, bad)
    state = pipe.drain(state)
    running.check_equal(on_host([(worker.weights.read(4), worker.optimizer) for worker in state.workers]), before)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_the_average_of_the_weights_is_of_those_without_prediction():
    plan = plan_of("pipedream")
    batches = models.masked_batches(5, 1, dtype=np.float64)
    pipe = pipeline(plan, ema_decay=0.75)
    state, y = check(pipe, batches, DRAINED)
    expected = y[0]
    for new in y[1:]:
        expected = jax.tree.map(lambda mean, leaf: 0.75 * mean + 0.25 * leaf, expected, new)
    running.check_close(models.on_first_device(pipe.params(state, weights="ema")), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_an_evaluation_in_flight_reads_the_weights_without_prediction():
    plan = plan_of("pipedream", models.plain_stack())
    pipe = pipeline(plan, models.plain_stack(), correction="predict")
    batches = models.masked_batches(5, 1, dtype=np.float64)
    state = running.fresh(pipe, batches)
    _, _, y = ordinary(pipe, batches, models.on_first_device(pipe.params(state)), running.layer_state(state))
    for t, batch in enumerate(batches):
        state, _ = pipe.step(state, batch)
        out, _ = pipe.stack.apply(pipe.stack.ids, y[t + 1], running.layer_state(state), batch[0], key=None, microbatch=None, train=False)
        total, weight = models.masked_squares(out, batch[1])
        evaluation = pipe.evaluate(state, batch)
        assert evaluation.version == t + 1
        np.testing.assert_allclose(float(evaluation.loss), total / weight, rtol=1e-12)
        np.testing.assert_allclose(pipe.predict(state, batch), out, rtol=1e-12, atol=1e-14)


def saved_at(pipe, batches, cut):
    """Return the layers of a snapshot before batch `cut`, of a run that goes on, and that run in the end."""
    state = running.fresh(pipe, batches)
    start = models.on_first_device((pipe.params(state), running.layer_state(state)))
    snapshot = pipe.snapshot(cut)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=snapshot)
    state = pipe.drain(state, observe=snapshot)
    return on_host(snapshot.layers()), start, state


def resumed(pipe, batches, layers, cut, **options):
    """Go on from a snapshot and return the drained state."""
    state = pipe.restore(jax.random.key(running.KEY), batches[0], layers, cut, **options)
    for batch in batches[cut:]:
        state, _ = pipe.step(state, batch)
    return pipe.drain(state)


CUT = 4
SWITCHES = {
    "another cut": (("2BW", FACTOR), ("2BW", FACTOR, (1, 2, 1))),
    "pipedream": (("2BW", FACTOR), ("pipedream, m = d", FACTOR)),
    "another factor": (("2BW", FACTOR), ("2BW", 1.0)),
    "2BW": (("pipedream, m = d", FACTOR), ("2BW", FACTOR)),
    "flush": (("2BW", FACTOR), ("flush", FACTOR)),
    "from a flush": (("flush", FACTOR), ("2BW", FACTOR)),
    "on": (("2BW", None), ("2BW", FACTOR)),
    "off": (("2BW", FACTOR), ("2BW", None)),
}


def plan_cut(name, sizes=None):
    if sizes is None:
        return plan_of(name)
    return models.cut(STACK.ids, sizes, schedule=PLANS[name]["schedule"], microbatches=PLANS[name]["microbatches"])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("ema", [None, 0.75])
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_run_goes_on_under_another_plan_or_with_another_correction(switch, ema):
    (name, factor), (later_name, later_factor, *sizes) = SWITCHES[switch]
    pipe = pipeline(plan_of(name), correction=factor, ema_decay=ema)
    later = pipeline(plan_cut(later_name, *sizes), correction=later_factor, ema_decay=ema)
    batches = models.masked_batches(7, 3, dtype=np.float64)
    layers, start, _ = saved_at(pipe, batches, CUT)
    _, x, y = ordinary(pipe, batches, *start, later, CUT)
    state = later.restore(jax.random.key(running.KEY), batches[0], layers, CUT)
    running.check_close(on_host(later.params(state)), on_host(y[CUT]))
    state = resumed(later, batches, layers, CUT)
    running.check_close(on_host(later.params(state)), on_host(y[-1]))
    for worker in state.workers:
        newest = worker.weights.read(worker.weights.newest)
        running.check_close(on_host(newest), on_host({entry: x[-1][entry] for entry in newest}))
    if ema is not None:
        average = y[0]
        for new in y[1:]:
            average = jax.tree.map(lambda mean, leaf: ema * mean + (1 - ema) * leaf, average, new)
        running.check_close(on_host(later.params(state, weights="ema")), on_host(average))


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("precision", [Precision(params="bfloat16"), Precision()], ids=["masters", "float32"])
@pytest.mark.parametrize("name", ["2BW", "pipedream"])
def test_a_run_from_a_snapshot_is_the_run_that_went_on_bit_for_bit(name, precision):
    plan = plan_of(name)
    pipe, batches = pipeline(plan, precision=precision), models.masked_batches(6, plan.microbatches)
    layers, _, state = saved_at(pipe, batches, 3)
    again = resumed(pipe, batches, layers, 3)
    running.check_equal(pipe.params(again), pipe.params(state))
    running.check_equal([worker.optimizer for worker in again.workers], [worker.optimizer for worker in state.workers])


@pytest.mark.exhaustive
def test_masters_and_versions_lose_the_prediction_where_it_is_turned_off_or_begun_anew():
    plan = plan_of("2BW")
    precision = Precision(params="bfloat16")
    on, off = (pipeline(plan, correction=correction, precision=precision) for correction in (FACTOR, None))
    batches = models.masked_batches(4, plan.microbatches)
    layers, _, state = saved_at(on, batches, 4)
    expected = on_host(on.params(state))
    assert all(plain["optimizer"]["state"].keys() == {"optimizer", "ahead"} for plain in layers.values())
    for layer_id, plain in layers.items():
        ahead, masters = plain["optimizer"]["state"]["ahead"], plain["optimizer"]["masters"]
        running.check_equal(jax.tree.map(np.subtract, masters, ahead), expected[layer_id])
        assert {leaf.dtype for leaf in jax.tree.leaves(ahead)} == {np.dtype(np.float32)}
    for pipe, fresh in ((off, False), (off, True), (on, True)):
        state = pipe.restore(jax.random.key(running.KEY), batches[0], layers, 4, fresh_optimizer=fresh)
        running.check_equal(on_host(pipe.params(state)), expected)
        for worker in state.workers:
            newest = worker.weights.read(4)
            rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), {entry: expected[entry] for entry in newest})
            running.check_equal(on_host(newest), rounded)
    again = on.restore(jax.random.key(running.KEY), batches[0], layers, 4, fresh_optimizer=True)
    ahead = [state.state.ahead for worker in again.workers for state in worker.optimizer.values()]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(ahead))


@pytest.mark.thinned(most=0, most_slow=0)
@pytest.mark.parametrize("mesh", [{"mesh": {"data": 2, "model": 2}, "fsdp": True}, {"mesh": {"data": 2}}], ids=["fsdp", "rows"])
def test_a_mesh_changes_no_number(mesh):
    stack, results = models.wide_stack(), []
    with jax.enable_x64(True):
        batches = models.masked_batches(4, 3, rows=4, width=4, dtype=np.float64)
        for fields in ({}, mesh):
            plan = Plan.even(stack.ids, 2, "pipedream_2bw", 3, **fields)
            pipe = Pipeline(stack, plan, models.masked_squares, adam(), delay_correction=FACTOR)
            trained = running.train(pipe, batches)
            results.append(on_host((trained.losses, trained.params, trained.layer_state)))
        for one, other in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_frozen_layers_have_no_buffer():
    labels = {layer_id: "frozen" if layer_id == "mix" else "trained" for layer_id in STACK.ids}
    optimizer = optax.partition({"trained": models.momentum(), "frozen": optax.set_to_zero()}, labels)
    pipe = pipeline(plan_of("pipedream"), optimizer=optimizer)
    batches = models.masked_batches(4, 1)
    state = running.fresh(pipe, batches)
    before = on_host(pipe.params(state))
    for batch in batches:
        state, _ = pipe.step(state, batch)
    after = on_host(pipe.params(state))
    running.check_equal(after["mix"], before["mix"])
    assert np.any(after["noise"]["w"] != before["noise"]["w"])
    assert not jax.tree.leaves(pipe.drain(state).workers[2].optimizer)


def reading(seen):
    """Return momentum whose state also keeps the delay and the stage of each update."""
    inner = models.momentum()

    def update(updates, state, params=None, *, delay, stage, **extra):
        del extra
        seen.append((delay.dtype, stage.dtype))
        updates, new = inner.update(updates, state[0], params)
        return updates, (new, jnp.append(state[1][1:], delay), jnp.append(state[2][1:], stage))

    def init(params):
        return inner.init(params), jnp.full(6, -1.0, jnp.float32), jnp.full(6, -1, jnp.int32)

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize(("name", "tied"), [("2BW", True), ("pipedream, m = d", False), ("2-1, paper", False), ("flush", False)])
def test_an_optimizer_gets_the_delay_and_the_stage_of_each_update(name, tied):
    stack, seen = models.tied_stack() if tied else STACK, []
    plan = plan_of(name, stack)
    pipe = pipeline(plan, stack, optimizer=reading(seen), correction=None)
    batches = models.masked_batches(5, plan.microbatches)
    state = running.fresh(pipe, batches)
    for batch in batches:
        state, _ = pipe.step(state, batch)
    state = pipe.drain(state)
    assert set(seen) == {(np.dtype(np.float32), np.dtype(np.int32))}
    for worker, (s, _) in zip(state.workers, plan.workers, strict=True):
        updates = 5 * plan.updates_per_batch(s)
        for entry, kept in worker.optimizer.items():
            delays, stages = kept["1"], kept["2"]
            stage = next(i for i, stage in enumerate(plan.stages) if "noise" in stage.layers) if entry in stack.ties.first else s
            expected = [plan.delay(stage, update) for update in range(updates)][-6:]
            np.testing.assert_array_equal(delays[-len(expected) :], np.float32(expected))
            np.testing.assert_array_equal(stages[-len(expected) :], stage)


def test_an_optimizer_that_does_not_read_them_is_compiled_as_before():
    """Optax's own chains take extra arguments and pass them on."""
    pipe = pipeline(plan_of("2BW"), optimizer=optax.chain(optax.trace(0.9), optax.scale(-0.1)), correction=None)
    batch = models.masked_batches(1, 3)[0]
    assert [f.optimizer.required for f in pipe.stage_functions(batch)] == [()] * 3
    corrected = pipeline(plan_of("2BW")).stage_functions(batch)
    assert [f.optimizer.required for f in corrected] == [("delay",)] * 3


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.0),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
        optax.sign_sgd(0.1),
        optax.rmsprop(0.1),
        optax.adam(0.1, b1=0.0),
        optax.sgd(optax.linear_schedule(0.1, 0, 3)),
    ],
    ids=["sgd", "sgd, momentum 0", "decay", "sign", "rmsprop", "adam, b1 0", "sgd, three steps"],
)
def test_an_optimizer_without_momentum_is_refused(optimizer):
    batch = models.masked_batches(1, 3)[0]
    with pytest.raises(InputError, match="optimizer: delay_correction needs momentum, found an optimizer that uses only the newest"):
        pipeline(plan_of("2BW"), optimizer=optimizer).check(batch)
    pipeline(plan_of("flush"), optimizer=optimizer).check(batch)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 100, 1000)),
        optax.sgd(optax.linear_schedule(0.1, 0, 3), momentum=0.9),
        optax.sgd(optax.linear_schedule(0.1, 0, 2), momentum=0.9),
    ],
    ids=["warm-up", "three steps", "two steps"],
)
def test_an_optimizer_has_momentum_whatever_its_rate(optimizer):
    pipeline(plan_of("2BW"), optimizer=optimizer).check(models.masked_batches(1, 3)[0])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
            "assumes that every batch makes an update, found",
        ),
        (optax.chain(optax.adam(0.1), jpipe.optimizers.predict_delay()), "it already has a predict_delay"),
    ],
    ids=["MultiSteps", "predict_delay"],
)
def test_an_optimizer_whose_updates_cannot_be_corrected_is_refused(optimizer, message):
    with pytest.raises(InputError, match=message):
        pipeline(plan_of("2BW"), optimizer=optimizer).check(models.masked_batches(1, 3)[0])


@pytest.mark.parametrize("value", ["Predict", -0.5, float("nan"), float("inf"), 1e39, 10**400, True, [1]])
def test_a_correction_that_is_none_is_refused(value):
    with pytest.raises(InputError, match=r"delay_correction: expected 'predict', or a number from 0 to 100 such as 0\.5, found"):
        checked_delay_factor(value)


def logged(caplog, plan, optimizer, factor):
    """Return (level, message) of what is logged of a correction."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "jpipe"):
        log_correction(plan, optimizer, factor)
    return [(record.levelname, record.message) for record in caplog.records]


def test_a_correction_that_goes_too_far_or_does_nothing_is_logged(caplog):
    ids = [str(number) for number in range(4)]
    many, few, two_bw, flush = (
        Plan.even(ids, 4, *which) for which in (("pipedream", 4), ("pipedream", 2), ("pipedream_2bw", 4), ("gpipe", 4))
    )
    nesterov, plain = optax.nadam(0.1), optax.adam(0.1)
    for plan, optimizer, factor in ((many, nesterov, 1.0), (two_bw, nesterov, 1.0), (few, nesterov, 0.5), (few, plain, 1.0)):
        assert logged(caplog, plan, optimizer, factor) == []
    ((level, message),) = logged(caplog, few, nesterov, 1.0)
    assert level == "WARNING"
    assert "delay_correction: 1 was not measured with Nesterov's momentum" in message
    assert "delays above one update, found 1.5; use 0.5, or more microbatches" in message
    ((level, message),) = logged(caplog, flush, nesterov, 1.0)
    assert (level, "it has no effect, because no gradients are late under the schedule 'gpipe'" in message) == ("INFO", True)


def test_the_recipe_that_the_documentation_recommends_logs_nothing(caplog):
    page = Path(__file__).parents[3] / "docs" / "explanation" / "learning.md"
    recipe = yaml.safe_load(re.search("```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1])
    plan, rule = recipe["plan"], recipe["optimizer"]
    plan = Plan.even([str(number) for number in range(4)], plan["num_stages"], plan["schedule"], plan["microbatches"])
    assert rule["name"] == "contrib.muon"
    assert logged(caplog, plan, optax.contrib.muon(0.1), checked_delay_factor(rule["delay_correction"])) == []


INJECT = optax.inject_hyperparams
LOOKS_AHEAD = {
    "sgd": (optax.sgd(0.1, momentum=0.9), False),
    "nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), True),
    "adamw": (optax.adamw(0.1), False),
    "nadamw in a partition": (optax.partition({"a": optax.nadamw(0.1), "b": optax.adam(0.1)}, lambda params: params), True),
    "nadam, injected": (INJECT(optax.nadam)(learning_rate=0.1), True),
    "compensated": (compensated_adamw(0.1), True),
    "as in PyTorch": (torch_nadam(0.1), True),
    "soap": (soap(0.1), False),
    "muon": (optax.contrib.muon(0.1), True),
    "muon without": (optax.contrib.muon(0.1, nesterov=False), False),
    "muon, injected": (INJECT(optax.contrib.muon)(learning_rate=0.1), True),
    "muon without, injected": (INJECT(optax.contrib.muon)(learning_rate=0.1, nesterov=False), False),
}


@pytest.mark.parametrize("name", LOOKS_AHEAD)
def test_nesterovs_momentum_is_recognized(name):
    optimizer, expected = LOOKS_AHEAD[name]
    assert has_nesterov(optimizer) is expected


@pytest.mark.slow
@pytest.mark.parametrize("factor", [pytest.param(None, marks=pytest.mark.exhaustive), FACTOR])
def test_norms_of_the_correction_and_of_the_distance_between_versions(factor):
    pipe = pipeline(plan_of("pipedream"), correction=factor)
    batches = models.masked_batches(5, 1)
    state = running.fresh(pipe, batches)
    for batch in batches:
        state, _ = pipe.step(state, batch)
    norms = pipe.delay_norms(state)
    stages = [worker for worker in state.workers if len(worker.weights.versions) > 1]
    assert len(stages) == 3  # the last stage holds one version, and its gradients have no delay
    ahead = [entry.ahead for worker in stages for entry in worker.optimizer.values()] if factor is not None else []
    np.testing.assert_allclose(norms.correction, norm_of(ahead), rtol=1e-5)
    assert (float(norms.correction) > 0) == (factor is not None)
    versions = [[on_host(worker.weights.read(version)) for version in worker.weights.versions[-2:]] for worker in stages]
    np.testing.assert_allclose(norms.distance, norm_of([jax.tree.map(np.subtract, newest, older) for older, newest in versions]), rtol=1e-5)


def norm_of(tree):
    return np.sqrt(sum(float(np.square(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(tree)))
