"""Optimizers for delayed gradients in pipelines: each equals a sequential run of its stages, one by one, with their delays."""

import functools

import jax
import numpy as np
import optax
import pytest

import jpipe
from jpipe import InputError, Pipeline, Plan
from jpipe.optimizers import (
    compensated_adamw,
    compensated_muon,
    compensated_sgd,
    per_stage,
    scale_by_delay,
    soap,
    torch_nadam,
)
from jpipe.schedules import SCHEDULES
from tests.jpipe import models, monolith, reference, running
from tests.jpipe.weights.test_schedule_contract import legal

STACK = models.plain_stack(3)
PLANS = {
    "2BW": {"schedule": "pipedream_2bw", "num_stages": 3, "microbatches": 3},
    "2BW, flushed first": {"schedule": "pipedream_2bw", "num_stages": 3, "microbatches": 3, "flush_first": 2},
    "PipeDream, m = 1": {"schedule": "pipedream", "num_stages": 3, "microbatches": 1},
    "PipeDream, m = d": {"schedule": "pipedream", "num_stages": 3, "microbatches": 3},
    "flush": {"schedule": "pipedream_flush", "num_stages": 3, "microbatches": 3},
}
RATE = optax.linear_schedule(0.1, 0.01, 8)
OPTIMIZERS = {
    "compensated_sgd": lambda: compensated_sgd(0.05),
    "compensated_adamw": lambda: compensated_adamw(optax.cosine_decay_schedule(0.05, 20)),
    "compensated_muon": lambda: compensated_muon(0.02),
    "torch_nadam": lambda: torch_nadam(0.05, 0.99),
    "soap": lambda: soap(0.05, precondition_frequency=3),
    "scale_by_delay": lambda: optax.chain(optax.adam(0.05), scale_by_delay(6)),
    "per_stage": lambda: per_stage(
        compensated_sgd, learning_rate=[0.05, optax.linear_schedule(0.1, 0.01, 8), 0.02], momentum=[0.9, 0.8, 0.5]
    ),
    "muon": lambda: optax.contrib.muon(0.02),
    "adan": lambda: optax.adan(0.02),
}


@functools.cache
def optimizer_of(name):
    return OPTIMIZERS[name]()


def pipeline(plan, optimizer, stack=STACK, **options):
    devices = [jax.devices()[p] for p, _ in enumerate(plan.pipeline_ranks)]
    return Pipeline(stack, plan, models.masked_squares, optimizer, devices, **options)


DELAYED = {"gpipe", *(name for name, schedule in SCHEDULES.items() if not schedule.flushes)}
"""Schedules whose gradients are late, and one of the many that flush: with them no optimizer sees a delay."""


def sequential(pipe, batches, start, layer_state):
    """Return the losses and the last weights: every version is kept, and each stage is updated by itself.

    There the layers of a stage go by their positions, so that equal stages have one program.
    """
    plan, versions, losses = pipe.plan, [start], []
    m, stage_of = plan.microbatches, {layer_id: s for s, stage in enumerate(plan.stages) for layer_id in stage.layers}
    gradient_of, _ = monolith.compiled(pipe.stack, pipe.loss, pipe.optimizer)
    optimizer = optax.with_extra_args_support(pipe.optimizer)
    update = jax.jit(optimizer.update)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        states = [optimizer.init(by_position(start, stage.layers)) for stage in plan.stages]
    for t, batch in enumerate(batches):
        microbatches = [jax.tree.map(lambda leaf, j=j: np.split(leaf, m)[j], batch) for j in range(m)]
        read = [[reference.version(plan, s, t * m + j) for j in range(m)] for s in range(plan.depth)]
        trees = [{i: versions[read[stage_of[i]][j]][i] for i in start} for j in range(m)]
        (loss, layer_state), gradient = gradient_of(trees, layer_state, microbatches, t * m, jax.random.key(running.KEY))
        new = {}
        for s, stage in enumerate(plan.stages):
            params = by_position(versions[-1], stage.layers)
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                delay, part = np.float32(t - np.mean(read[s])), by_position(gradient, stage.layers)
                updates, states[s] = update(part, states[s], params, delay=delay, stage=np.int32(s))
                new |= zip(stage.layers, optax.apply_updates(params, updates).values(), strict=True)
        versions.append(new)
        losses.append(float(loss))
    return losses, versions[-1]


def by_position(tree, layers):
    return dict(enumerate(tree[layer_id] for layer_id in layers))


def check(pipe, batches):
    start = running.fresh(pipe, batches)
    expected = sequential(pipe, batches, *models.on_first_device((pipe.params(start), running.layer_state(start))))
    trained = running.train(pipe, batches)
    running.check_close(trained.losses, expected[0], 1e-11)
    running.check_close(models.on_first_device(trained.params), expected[1], 1e-11)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_it_is_the_rule_with_the_delay_of_each_stage(plan, optimizer):
    plan = Plan.even(STACK.ids, **PLANS[plan])
    check(pipeline(plan, optimizer_of(optimizer)), models.masked_batches(8, plan.microbatches, dtype=np.float64))


@pytest.mark.thinned(most=0, most_slow=0)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer", ["muon", "adan", "soap"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES, key=lambda name: name not in DELAYED))
def test_optimizers_that_bear_delay_in_every_schedule(schedule, optimizer):
    stack = models.plain_stack()
    fields = {"layers": stack.ids, "num_stages": 4, "microbatches": 4}
    plan = next(plan for chunks in (1, 2) for plan in legal(SCHEDULES[schedule], fields, chunks))
    check(pipeline(plan, optimizer_of(optimizer), stack), models.masked_batches(6, 4, dtype=np.float64))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_a_mesh_changes_no_number_of_soap():
    stack, batches, results = models.wide_stack(), models.masked_batches(5, 3, rows=4, width=4, dtype=np.float64), []
    for mesh in (None, [{"data": 2, "model": 2}] * 2):
        plan = Plan.even(stack.ids, 2, "pipedream_2bw", 3, **({} if mesh is None else {"mesh": mesh}))
        results.append(running.train(Pipeline(stack, plan, models.masked_squares, soap(0.05, precondition_frequency=2)), batches))
    running.check_close(models.on_first_device(results[1].params), models.on_first_device(results[0].params), 1e-10)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_replicas_share_the_state_of_soap():
    batches, results = models.masked_batches(4, 2, dtype=np.float64), []
    for shards in (False, True):
        plan = Plan.even(STACK.ids, 2, "pipedream_flush", 2, replicas=[2, 1], shard_optimizer=shards)
        results.append(running.train(Pipeline(STACK, plan, models.masked_squares, soap(0.05, precondition_frequency=2)), batches))
    running.check_close(models.on_first_device(results[1].params), models.on_first_device(results[0].params))


@pytest.mark.exhaustive
def test_where_a_schedule_flushes_compensation_changes_no_bit():
    plan, batches = Plan.even(STACK.ids, **PLANS["flush"]), models.masked_batches(4, 3)
    plain, compensated = (running.train(pipeline(plan, rule), batches) for rule in (optax.adamw(0.05), compensated_adamw(0.05)))
    running.check_equal(compensated.params, plain.params)


@pytest.mark.exhaustive
def test_a_shared_parameter_has_the_arguments_of_its_first_stage():
    stack = models.tied_stack()
    plan = Plan.even(stack.ids, **PLANS["2BW"])
    pipe, batches = pipeline(plan, per_stage(optax.adam, learning_rate=[0.01, 0.02, 0.03]), stack), models.masked_batches(5, 3)
    state, cut = running.fresh(pipe, batches), pipe.snapshot(5)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=cut)
    pipe.drain(state, observe=cut)
    assert len({copy.checksum for copy in cut.copies()}) == 1


def test_a_list_of_another_length_than_the_stages_is_refused():
    plan, rule = Plan.even(STACK.ids, **PLANS["2BW"]), optax.chain(optax.clip(1.0), per_stage(optax.adam, learning_rate=[0.01, 0.02]))
    with pytest.raises(InputError, match="per_stage: learning_rate: expected one value for each of the 3 stages, found 2"):
        pipeline(plan, rule).check(models.masked_batches(1, 3)[0])


@pytest.mark.exhaustive
def test_a_run_with_soap_goes_on_from_a_checkpoint(tmp_path):
    plan, batches = Plan.even(STACK.ids, **PLANS["2BW"]), models.masked_batches(8, 3)
    pipe = pipeline(plan, optimizer_of("soap"))
    state, cut = running.fresh(pipe, batches), pipe.snapshot(5)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=cut)
    state = pipe.drain(state, observe=cut)
    jpipe.checkpoints.save(tmp_path, cut)
    again = jpipe.checkpoints.load(pipe, tmp_path, jax.random.key(running.KEY), batches[0])
    for batch in batches[5:]:
        again, _ = pipe.step(again, batch)
    running.check_equal(pipe.params(pipe.drain(again)), pipe.params(state))


@pytest.mark.exhaustive
def test_covariances_and_bases_are_counted_as_optimizer_state():
    """Of a matrix n × n these are two of each, as large as the matrix."""
    plan, batch = Plan.even(STACK.ids, **PLANS["2BW"]), models.masked_batches(1, 3)[0]
    adam, rotated = (pipeline(plan, rule) for rule in (optax.adamw(0.05), soap(0.05)))
    for before, after, functions in zip(adam.costs(batch), rotated.costs(batch), adam.stage_functions(batch), strict=True):
        matrices = sum(leaf.size for leaf in jax.tree.leaves(functions.specs.params) if leaf.ndim == 2)
        assert after.optimizer - before.optimizer == 4 * 4 * matrices
