"""Parallel pipelines that agree rarely: their numbers are those of the rule, written down here, in float64 and whatever the schedule is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, LayerStack, Link, Pipeline, Plan, Precision, lower, simulate
from jpipe.capabilities.agreement import option
from jpipe.capabilities.agreement.few_bits import mean_of_sent, pack, sent_changes, unpack
from jpipe.capabilities.agreement.program import Agree, SumChanges
from jpipe.capabilities.agreement.rule import mix
from jpipe.plan import Agreement
from jpipe.programs import ProgramError, StageCost
from jpipe.schedules import SCHEDULES
from tests.jpipe import models, monolith, reference, running

STACK = LayerStack({"first": models.dense(), "second": models.dense(4), "mix": models.dense(), "out": models.dense()})
OUTER = {"learning_rate": 0.7, "momentum": 0.9}
MEAN = {"learning_rate": 1.0, "momentum": 0.0}
BATCHES = 8
CHUNKS = {"num_stages": 4, "microbatches": 8}
CASES: dict[str, dict] = {
    "naive": {},
    "gpipe": {"num_stages": 3, "replicas": 3, "microbatches": 6},
    "pipedream_flush": {"recompute": "full"},
    "pipedream": {"num_stages": 3},
    "pipedream_2bw": {"num_stages": 3, "microbatches": 6},
    "interleaved_1f1b": {**CHUNKS, "chunks_per_rank": 2},
    "looped_bfs": {**CHUNKS, "chunks_per_rank": 2},
    "dualpipe_v": CHUNKS,
    "zb_h1": {},
    "zb_h2": {"num_stages": 3, "microbatches": 12},
    "zb_v": CHUNKS,
    "interleaved_zero_bubble": {**CHUNKS, "chunks_per_rank": 2},
    "auto_zero_bubble": {"order": ["F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 F1.1 B1.0 I1.1 W1.1"]},
    "one stage": {"schedule": "gpipe", "num_stages": 1, "replicas": 4},
    "one microbatch": {"schedule": "pipedream", "num_stages": 3, "microbatches": 2},
    "vertical sync": {"schedule": "pipedream", "num_stages": 3, "vertical_sync": True, "microbatches": 2},
    "2BW, flushed first": {"schedule": "pipedream_2bw", "flush_first": 2},
    "PipeDream in chunks": {"schedule": "pipedream", **CHUNKS, "chunks_per_rank": 2},
}
FRAGMENTS = {"pipedream_flush": "stages", "pipedream": "stages", "pipedream_2bw": 2}


def plan_of(name, agree=None, **fields) -> Plan:
    fields = {"num_stages": 2, "microbatches": 4, "replicas": 2, "schedule": name, **CASES.get(name, {}), **fields}
    return Plan.even(STACK.ids, agree=agree, **fields)


def pipeline(plan, optimizer=None, loss=models.masked_squares, **options) -> Pipeline:
    """Build a pipeline with all workers on one device, so that common programs of replicas compile once."""
    return Pipeline(STACK, plan, loss, optimizer or models.momentum(), jax.devices()[:1] * len(plan.rank_workers), **options)


def rule(pipe, optimizer, batches, params):
    """Apply the rule: return the losses, and after each batch the agreed weights, and those of each pipeline."""
    plan, count = pipe.plan, pipe.plan.replicas[0]
    gradient_of, updated = monolith.compiled(STACK, pipe.loss, optimizer)
    stage_of = {layer_id: s for s, stage in enumerate(plan.stages) for layer_id in stage.layers}
    agreed, momentum = params, jax.tree.map(np.zeros_like, params)  # after the last agreement that has begun
    delay, own_share = plan.agree.delay, plan.agree.mixing if plan.agree.delay else 0.0
    versions, states = [[params] for _ in range(count)], [optimizer.init(params)] * count
    errors = [jax.tree.map(np.zeros_like, params)] * count
    losses, history = [], []
    for t, batch in enumerate(batches):
        total = weight = 0.0
        for k in range(count):
            numbers = range(t * plan.microbatches + k, (t + 1) * plan.microbatches, count)
            trees = [{i: versions[k][reference.version(plan, stage_of[i], n)][i] for i in STACK.ids} for n in numbers]
            parts = [
                jax.tree.map(lambda leaf, n=n: leaf.reshape(plan.microbatches, -1, *leaf.shape[1:])[n], batch)
                for n in range(k, plan.microbatches, count)
            ]
            of_batch = sum(float(pipe.loss(part[0], part[1])[1]) for part in parts)
            (value, _), gradient = gradient_of(trees, {i: {} for i in STACK.ids}, parts, 0, jax.random.key(0))
            new, states[k] = updated(gradient, states[k], versions[k][-1])
            versions[k].append(jax.tree.map(np.asarray, new))  # what follows is computed by numpy, which compiles nothing
            total, weight = total + float(value) * of_batch, weight + of_batch
        losses.append(total / weight)
        for i, stage in stage_of.items():
            if agrees(plan, stage, t + 1):
                wanted = [
                    jax.tree.map(lambda a, w, e: a - w + e, agreed[i], of[-1][i], e[i]) for of, e in zip(versions, errors, strict=True)
                ]
                sent = [jax.tree.map(lambda leaf: rounded(plan.agree.bits, leaf), each) for each in wanted]
                errors = [e | {i: jax.tree.map(np.subtract, *pair)} for e, *pair in zip(errors, wanted, sent, strict=True)]
                mean = jax.tree.map(lambda *each: sum(each) / count, *sent)
                momentum[i] = jax.tree.map(lambda v, d: d + plan.agree.outer.momentum * v, momentum[i], mean)
                step = jax.tree.map(lambda v, d: plan.agree.outer.learning_rate * (d + plan.agree.outer.momentum * v), momentum[i], mean)
                agreed = agreed | {i: jax.tree.map(np.subtract, agreed[i], step)}
            for of in versions if t + 1 > delay and agrees(plan, stage, t + 1 - delay) else ():
                of[-1] = of[-1] | {i: jax.tree.map(lambda w, a: own_share * w + (1 - own_share) * a, of[-1][i], agreed[i])}
        history.append((agreed, [of[-1] for of in versions]))
    return losses, history


def rounded(bits, x):
    """Return an array as it arrives: integers up to a largest one, times a scale for each block of 256, which is float32."""
    if bits is None:
        return x
    largest, share, arrived = {4: (7, 1 / 7), 2: (1, 0.44)}[bits] + ([],)
    for block in np.split(x.reshape(-1), range(256, x.size, 256)):
        step = abs(block).max() * share
        q = np.clip(np.round(block / step), -largest, largest) if step else 0 * block
        arrived.append(q * float(np.float32(block @ q / max(q @ q, 1))))
    return np.concatenate(arrived).reshape(x.shape)


def agrees(plan, stage, updates) -> bool:
    """Return whether a stage agrees after so many updates: fragments of a plan begin evenly spread over the first round."""
    every, fragments = plan.agree.every, plan.agree.fragments
    count = plan.depth if fragments == "stages" else fragments or 1
    return updates % every == (stage * count // plan.depth) * every // count


def check_rule(plan, batches, whole=None, **options):
    """Compare a run with the rule; `whole` is the optimizer of the whole tree, if it is another than that of the layers."""
    pipe = pipeline(plan, **options)
    state, found = running.fresh(pipe, batches), {}
    losses, history = rule(pipe, whole or pipe.optimizer, batches, jax.tree.map(np.asarray, pipe.params(state)))
    for t, batch in enumerate(batches):
        state, metrics = pipe.step(state, batch)
        found |= metrics.losses
        if t in (2, 4):
            running.check_close(pipe.params(state), history[t][0])
    state, metrics = pipe.drain(state, with_metrics=True)
    found |= metrics.losses
    running.check_close([float(found[t]) for t in range(len(batches))], losses)
    running.check_close(pipe.params(state), history[-1][0])
    for worker, (_, k) in zip(state.workers, plan.workers, strict=True):
        newest = worker.weights.read(worker.weights.newest)
        running.check_close(newest, {i: history[-1][1][k][i] for i in newest})


@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_rule(name):
    plan = plan_of(name, {"every": 3, "outer": OUTER})
    check_rule(plan, models.masked_batches(BATCHES, plan.microbatches, dtype=np.float64))


@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragment_by_fragment_equals_the_rule(name):
    plan = plan_of(name, {"every": 4, "outer": OUTER, "fragments": FRAGMENTS[name]})
    check_rule(plan, models.masked_batches(BATCHES, plan.microbatches, dtype=np.float64))


@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=1, most_slow=2)
@pytest.mark.parametrize("name", dict.fromkeys(("pipedream_2bw", "gpipe", "pipedream", "zb_v", *CASES)))
def test_applied_late_it_equals_the_rule(name):
    plan = plan_of(name, {"every": 3, "outer": OUTER, "delay": 2, "mixing": 0.3})
    check_rule(plan, models.masked_batches(BATCHES, plan.microbatches, dtype=np.float64))


@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=2, most_slow=2)
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("name", ["pipedream_2bw", "gpipe", "pipedream", "zb_v"])
def test_in_few_bits_it_equals_the_rule(name, bits, delay):
    plan = plan_of(name, {"every": 3, "outer": OUTER, "delay": delay, "bits": bits, "fragments": FRAGMENTS.get(name)})
    check_rule(plan, models.masked_batches(BATCHES, plan.microbatches, dtype=np.float64))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bits", [4, 2])
def test_what_few_bits_lose_comes_with_the_next_agreements(bits):
    """Nothing that arrives is further off than zeros, an outlier arrives as it is, and errors do not add up."""
    random, errors, total = np.random.default_rng(0), {"w": np.zeros((3, 200))}, 0.0
    changes = {"w": random.standard_t(3, (3, 200))}
    zeros = jax.tree.map(np.zeros_like, changes)
    for n in range(1, 21):
        sent, errors = sent_changes(bits, changes, zeros, errors)
        total = total + np.asarray(mean_of_sent(bits, changes, [sent])["w"])
        assert np.linalg.norm(n * changes["w"] - total) < 2 * np.linalg.norm(changes["w"])
    outlier = jnp.zeros(300).at[jnp.array([7, 270])].set(jnp.array([3.0, -5.0]))
    running.check_close(unpack(bits, pack(bits, outlier), outlier), outlier, 1e-6)
    assert pack(bits, outlier)["values"].nbytes == -(-300 * bits // 8)


@pytest.mark.parametrize("bits", [4, 2])
def test_a_change_that_is_not_finite_arrives_as_nan_and_leaves_no_error(bits):
    agreed, own = {"w": np.zeros(300, np.float32)}, {"w": np.arange(300, dtype=np.float32)}
    own["w"][5] = np.inf
    sent, errors = sent_changes(bits, agreed, own, agreed)
    arrived = np.asarray(mean_of_sent(bits, agreed, [sent, sent])["w"])
    assert np.isnan(arrived[:256]).all()
    assert np.isfinite(arrived[256:]).all()
    assert np.isfinite(np.asarray(errors["w"])).all()


def test_without_mixing_what_a_pipeline_has_learned_meanwhile_is_dropped_whatever_it_is():
    agreed = {"w": np.float32([1.0, 2.0])}
    running.check_equal(mix(0.0, {"w": np.float32([np.nan, np.inf])}, agreed), agreed)


@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragments_that_are_applied_late_equal_the_rule(name, delay):
    """Agreements of several fragments are under way at the same time; without mixing the weights become the agreed ones."""
    plan = plan_of(name, {"every": 4, "outer": OUTER, "fragments": FRAGMENTS[name], "delay": delay, "mixing": 0.0})
    check_rule(plan, models.masked_batches(BATCHES, plan.microbatches, dtype=np.float64))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "norm"), [("gpipe", "clip_global_norm"), ("pipedream_2bw", "clip_stage_norm")])
def test_a_pipeline_clips_by_its_own_norm(name, norm):
    plan = plan_of(name, {"every": 3, "outer": OUTER})
    batches = models.masked_batches(BATCHES, plan.microbatches, dtype=np.float64)
    clipped = (
        optax.clip_by_global_norm(0.3)
        if norm == "clip_global_norm"
        else running.clip_by_stage(tuple(stage.layers for stage in plan.stages), 0.3)
    )
    check_rule(plan, batches, optax.chain(clipped, models.momentum()), **{norm: 0.3})


@pytest.mark.parametrize("broken", [0, 1])
def test_a_pipeline_skips_its_update_alone(broken):
    """The loss is the mean over the others, or over all if all skip; the entries of all are counted."""
    plan = plan_of("naive", {"every": 1, "outer": MEAN}, num_stages=1, microbatches=2)
    pipe = pipeline(plan, optax.sgd(0.1), models.squares, skip_nonfinite=True)
    batches, rows = models.batches_of(3, 2 * models.ROWS), models.ROWS
    batches[1] = (np.array(batches[1][0]), batches[1][1])
    batches[1][0][broken * rows : (broken + 1) * rows] = np.nan
    batches[2] = (np.full_like(batches[2][0], np.nan), batches[2][1])
    state = running.fresh(pipe, batches)
    alone = pipeline(plan_of("naive", num_stages=1, microbatches=1, replicas=1), optax.sgd(0.1), models.squares)
    state, first = pipe.step(state, batches[0])
    params = jax.tree.map(np.asarray, pipe.params(state))
    state, second = pipe.step(state, batches[1])
    after = jax.tree.map(np.asarray, pipe.params(state))
    state, third = pipe.step(state, batches[2])
    other = jax.tree.map(lambda leaf: leaf[(1 - broken) * rows : (2 - broken) * rows], batches[1])
    of_other, expected = alone.step(alone.init(jax.random.key(running.KEY), other, params), other)
    assert [bool(float(metrics.nonfinite[t])) for t, metrics in enumerate((first, second, third))] == [False, True, True]
    assert float(second.losses[1]) == pytest.approx(float(expected.losses[0]), rel=1e-6)
    assert float(second.weights[1]) == float(expected.weights[0])
    assert float(third.nonfinite[2]) == 2 * sum(leaf.size for leaf in jax.tree.leaves(params))
    assert np.isnan(float(third.losses[2]))
    running.check_close(after, jax.tree.map(lambda old, new: (old + new) / 2, params, alone.params(of_other)), 1e-6)
    running.check_equal(pipe.params(state), after)


@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", CASES)
def test_the_mean_after_each_update_equals_data_parallelism(name):
    """With SGD, and microbatches that weigh the same."""
    plan = plan_of(name, {"every": 1, "outer": MEAN})
    batches = models.batches_of(5, plan.microbatches * models.ROWS, dtype=np.float64)
    found, expected = (
        running.train(pipeline(one, optax.sgd(0.1), models.squares), batches) for one in (plan, plan.model_copy(update={"agree": None}))
    )
    running.check_close(found, expected)


def trained(pipe, state, batches, cut=None):
    """Return the losses, all weights and states at the end, and the layers of a snapshot."""
    losses, snapshot, layers = {}, None if cut is None else pipe.snapshot(cut), None
    for batch in batches:
        state, metrics = pipe.step(state, batch, observe=snapshot if layers is None else None)
        losses |= metrics.losses
        if snapshot is not None and layers is None and snapshot.complete:
            layers = jax.tree.map(np.asarray, snapshot.layers())
    state, metrics = pipe.drain(state, with_metrics=True)
    losses |= metrics.losses
    held = [
        (worker.weights.read(worker.weights.newest), worker.optimizer, worker.capabilities.get("agreement"), worker.layer_state)
        for worker in state.workers
    ]
    return losses, jax.tree.map(np.asarray, held), layers


@pytest.mark.thinned(most=2, most_slow=1)
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("cut", [3, 4])
@pytest.mark.parametrize(("name", "bits"), [("pipedream_flush", None), ("pipedream", None), ("pipedream_2bw", None), ("pipedream_2bw", 2)])
def test_a_run_from_a_snapshot_equals_the_run_that_continued(name, bits, cut, delay):
    """Right after an agreement, between two, and while agreements are under way; with layer state and dropout."""
    agree = {"every": 3, "outer": OUTER, "fragments": FRAGMENTS[name], "delay": delay, "bits": bits}
    fields = {"schedule": name, "microbatches": 6, "replicas": 2, "agree": agree}
    plan = Plan.even(models.rich_stack().ids, 3, **fields)
    pipe = Pipeline(models.rich_stack(), plan, models.masked_squares, models.momentum(), jax.devices()[:1] * 6)
    batches = models.masked_batches(BATCHES, plan.microbatches)
    losses, held, layers = trained(pipe, running.fresh(pipe, batches), batches, cut)
    assert layers is not None
    resumed, again, _ = trained(pipe, pipe.restore(jax.random.key(running.KEY), batches[0], layers, cut), batches[cut:])
    running.check_equal(resumed, {t: loss for t, loss in losses.items() if t >= cut})
    running.check_equal(again, held)


@pytest.mark.parametrize("mesh", [{}, pytest.param({"data": 2}, marks=pytest.mark.slow)])
def test_an_agreement_under_way_is_saved_and_evaluated_on_devices_of_their_own(mesh):
    plan = plan_of("pipedream_flush", {"every": 3, "outer": OUTER, "delay": 2}, num_stages=1, mesh=mesh)
    pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum(), jax.devices()[: 4 if mesh else 2])
    batches = models.masked_batches(6, plan.microbatches)
    losses, held, layers = trained(pipe, running.fresh(pipe, batches), batches, 4)
    restored = pipe.restore(jax.random.key(running.KEY), batches[0], layers, 4)
    evaluated = float(pipe.evaluate(restored, batches[0]).loss)
    resumed, again, _ = trained(pipe, restored, batches[4:])
    running.check_equal((resumed, again), ({t: losses[t] for t in (4, 5)}, held))
    state = running.fresh(pipe, batches)
    for batch in batches[:4]:
        state, _ = pipe.step(state, batch)
    assert float(pipe.evaluate(state, batches[0]).loss) == evaluated


def resumed(agree, layers, cut, batches, **fields):
    """Return the weights of each pipeline after each of some batches from a snapshot, what they have agreed on at last, and a snapshot."""
    pipe = pipeline(plan_of("pipedream_flush", agree, num_stages=1, microbatches=6, **fields))
    state, snapshot, weights = pipe.restore(jax.random.key(running.KEY), batches[0], layers, cut), pipe.snapshot(cut + 1), []
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=None if snapshot.complete else snapshot)
        weights.append(jax.tree.map(np.asarray, [worker.weights.read(worker.weights.newest) for worker in state.workers]))
    return weights, jax.tree.map(np.asarray, pipe.params(state)), jax.tree.map(np.asarray, snapshot.layers())


@pytest.mark.parametrize("before", [{"replicas": 2}, {"replicas": 3, "agree": {"every": 4, "delay": 3}}, {"agree": {"every": 4}}])
def test_weights_that_are_agreed_when_a_run_is_restored_are_not_mixed_in_later(before):
    """Without agreements, with another number of pipelines, and where the agreement has been applied; also in the run after the next."""
    batches, late = models.masked_batches(8, 6), {"every": 4, "delay": 3, "mixing": 0.0}
    pipe = pipeline(plan_of("pipedream_flush", num_stages=1, microbatches=6, **before))
    *_, layers = trained(pipe, running.fresh(pipe, batches), batches[:4], 4)
    (weights, _, again), (expected, *_) = (resumed(agree, layers, 4, batches[4:7]) for agree in (late, {"every": 4}))
    running.check_equal(weights, expected)
    running.check_equal(resumed(late, again, 5, batches[5:7])[0], expected[1:])


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_an_agreement_under_way_is_applied_under_another_delay_if_it_is_not_too_late(delay):
    batches = models.masked_batches(8, 6)
    pipe = pipeline(plan_of("pipedream_flush", {"every": 4, "delay": 2, "mixing": 0.0}, num_stages=1, microbatches=6))
    *_, layers = trained(pipe, running.fresh(pipe, batches), batches[:5], 5)
    weights, agreed, _ = resumed({"every": 4, "delay": delay, **({"mixing": 0.0} if delay else {})}, layers, 5, batches[5:7])
    for n, own in enumerate(weights):
        are_agreed = {bool(np.array_equal(jax.tree.leaves(each)[-1], jax.tree.leaves(agreed)[-1])) for each in own}
        assert are_agreed == {delay == 3 and n == 1}, "the agreement of update 3 is applied after update 6"


@pytest.mark.slow
def test_what_pipelines_have_agreed_on_is_evaluated_and_restored_under_another_plan():
    plan = plan_of("pipedream_2bw", {"every": 3, "outer": OUTER})
    pipe, batches = pipeline(plan), models.masked_batches(BATCHES, plan.microbatches)
    state, snapshot = running.fresh(pipe, batches), pipe.snapshot(5)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=snapshot)
        if state.batch == 5:
            agreed, evaluation = pipe.params(state), pipe.evaluate(state, batches[0])
    other = pipeline(plan_of("gpipe", num_stages=2, replicas=1, microbatches=6))
    with_params = other.init(jax.random.key(0), batches[0], agreed)
    assert evaluation.version == 3
    assert float(other.evaluate(with_params, batches[0]).loss) == pytest.approx(float(evaluation.loss), rel=1e-6)
    restored = other.restore(jax.random.key(running.KEY), batches[0], snapshot.layers(), 5)
    running.check_equal(other.params(restored), agreed)


def test_bytes_between_pipelines_fall_with_the_updates_between_agreements():
    """A ring sums 2 (w - 1) / w of the weights in place of the gradients."""
    costs, link = [StageCost(weights=400, accumulators=400)] * 2, Link(bandwidth=100.0)
    moved = {}
    for every in (None, 1, 4):
        plan = plan_of("pipedream_flush", every and {"every": every})
        moved[every] = sum(simulate(lower(plan, 8), costs, link).moved_bytes)
    assert moved == {None: 8 * 4 * 400, 1: 8 * 4 * 400, 4: 2 * 4 * 400}
    few = plan_of("pipedream_flush", {"every": 4, "bits": 4})
    assert sum(simulate(lower(few, 8), costs, link).moved_bytes) == 2 * 4 * 52, (
        "half a byte for each of 100 weights, and a share of a scale"
    )
    prediction = simulate(lower(plan, 4), costs, link)
    assert [(transfer.what, transfer.number) for transfer in prediction.transfers if transfer.what == "changes"] == [("changes", 3)] * 2
    assert "c3" in prediction.grid(transfers=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_program_without_one_of_its_agreements_is_refused(name):
    if name == "auto_zero_bubble":
        return  # its order is given
    stages = {"num_stages": 4, "microbatches": 16}
    plan = Plan.even("abcd", **{"schedule": name, "replicas": 2, "agree": {"every": 2, "fragments": "stages"}, **stages})
    program = lower(plan, 3)
    simulate(program)
    found = [n for n, i in enumerate(program.instructions) if isinstance(i, (SumChanges, Agree))]
    assert found
    for n in (found[0], found[-1]):
        items = [*program.instructions[:n], *program.instructions[n + 1 :]]
        with pytest.raises(ProgramError, match=r"agreed on version|changes of microbatch|deadlock|left behind: \[\('changes'"):
            simulate(replaced(program, items))
    first = found[0]
    with pytest.raises(ProgramError):
        simulate(replaced(program, [*program.instructions[:first], program.instructions[first], *program.instructions[first:]]))


@pytest.mark.parametrize("name", ["pipedream_flush", "pipedream", "zb_v"])
def test_a_program_with_another_late_agreement_is_refused(name):
    """Also those of a part of a run, with agreements under way at its beginning and its end."""
    plan = Plan.even("abcd", 4, name, 16, replicas=2, agree={"every": 3, "fragments": "stages", "delay": 2})
    program = lower(plan, 7, begin=3, start=3)
    simulate(program)
    items = list(program.instructions)
    begun, applied = ([n for n, i in enumerate(items) if isinstance(i, kind)] for kind in (SumChanges, Agree))
    for n in (begun[0], begun[-1], applied[0], applied[-1]):
        with pytest.raises(ProgramError, match=r"agreed on version|left behind: (no buffers, expected )?\[\('changes'"):
            simulate(replaced(program, [*items[:n], *items[n + 1 :]]))
        with pytest.raises(ProgramError, match=r"expected none here|expected one of update"):
            simulate(replaced(program, [*items[: n + 1], *items[n:]]))
    n = applied[-1]
    with pytest.raises(ProgramError, match=rf"expected the agreement that has begun with update {items[n].begun}\n"):
        simulate(replaced(program, [*items[:n], dataclasses.replace(items[n], begun=items[n].begun - 3), *items[n + 1 :]]))
    n = applied[0]
    with pytest.raises(ProgramError, match="the pipelines have not agreed on version"):
        simulate(replaced(program, [*items[:n], *items[n + 1 :], items[n]]))


def replaced(program, items):
    return dataclasses.replace(program, instructions=tuple(items))


AGREE = {"every": 2}
REFUSED = [
    ({"replicas": 1}, {}, r"plan: agree: expected the same number of replicas for each stage, 2 or more, .* found \[1, 1\]; give"),
    ({"replicas": [2, 1]}, {}, r"plan: agree: expected the same number of replicas for each stage"),
    ({"shard_optimizer": True}, {}, r"plan: agree: expected no shard_optimizer"),
    ({"schedule": "pipedream", "update_every": "replicas"}, {}, r"plan: agree: expected update_every 'batch', found 'replicas'"),
    ({"sum_parts": 2}, {}, r"plan: stages\.0\.sum_parts: expected no agree: pipelines that agree sum no gradients; remove one of them"),
    ({"agree": {"every": 2, "fragments": 3}}, {}, r"plan: agree\.fragments: expected 'stages', or .* up to the number of .*, 2, found 3"),
    *(
        (
            {"agree": {"every": 2, "fragments": found}},
            {},
            rf"plan: agree\.fragments: expected 'stages', a number .*, or null, found {found!r}$",
        )
        for found in ("x", 0, True, 2.0)
    ),
    ({"agree": {"every": 0}}, {}, r"plan: agree\.every: "),
    ({"agree": {"every": 2, "delay": 2}}, {}, r"plan: agree: delay: expected less than every, 2, .*, found 2"),
    *(({"agree": {"every": 3, "delay": found}}, {}, rf"plan: agree\.delay: .*, found {found!r}$") for found in (-1, True, 1.0, "1")),
    ({"agree": {"every": 2, "delay": 1, "mixing": 1.0}}, {}, r"plan: agree\.mixing: expected less than 1, found 1\.0"),
    (
        {"agree": {"every": 2, "mixing": 0.3}},
        {},
        r"plan: agree: mixing: expected no value if delay is not set, found 0\.3; remove mixing, or set",
    ),
    ({"agree": {"every": 2, "outer": {"momentum": 1.0}}}, {}, r"plan: agree\.outer\.momentum: "),
    (
        {"schedule": "pipedream_2bw"},
        {"clip_global_norm": 1.0},
        r"clip_global_norm: expected no plan\.agree with 1\.0 under the schedule 'pipedream_2bw': .*; use .* clip_stage_norm, which",
    ),
    (
        {"schedule": "pipedream_2bw"},
        {"skip_nonfinite": True},
        r"skip_nonfinite: expected no plan\.agree under the schedule 'pipedream_2bw': ",
    ),
    ({"agree": {**AGREE, "bits": 2}, "mesh": {"data": 2}}, {}, r"agree\.bits: expected stages on one device each, found 2 and a mesh"),
    ({}, {"ema_decay": 0.9}, r"ema_decay: expected no plan\.agree with 0\.9: each pipeline would average"),
    ({}, {"delay_correction": "predict"}, r"delay_correction: expected no plan\.agree with 1\.0: "),
    (
        {},
        {"precision": Precision(params="bfloat16")},
        r"precision: params: expected no plan\.agree with 'bfloat16': .* float32 copies that the optimizer updates; use compute",
    ),
]


@pytest.mark.parametrize(("fields", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_supported_is_refused(fields, options, message):
    with pytest.raises(InputError, match=message):
        pipeline(plan_of(**{"name": "pipedream_flush", "agree": AGREE, **fields}), **options)


def test_shared_parameters_of_several_stages_are_refused():
    stack = models.tied_stack()
    plan = Plan.even(stack.ids, 2, "gpipe", 4, replicas=2, agree=AGREE)
    with pytest.raises(InputError, match=r"ties: expected no plan\.agree with \['noise shared w'\]: .*; put the layers"):
        Pipeline(stack, plan, models.masked_squares, models.momentum())


def test_a_plan_with_an_agreement_goes_through_json():
    plan = Plan.even("ab", 2, "gpipe", 2, replicas=2, agree=Agreement(every=5, fragments="stages"))
    assert Plan.from_json(plan.to_json()) == plan
    assert "agree=Agreement(every=5" in repr(plan)
    assert [[u for u in range(12) if option.agrees(plan, s, u)] for s in range(2)] == [[4, 9], [1, 6, 11]]
