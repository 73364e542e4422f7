"""Compressed messages: the numbers are those of the model with the same rounding in place, whatever the schedule is."""

import re
from functools import partial

import jax
import numpy as np
import pytest

from jpipe import InputError, LayerStack, Link, Pipeline, Plan, lower, simulate
from jpipe.capabilities.compressed_messages.compress import compress, decompress
from jpipe.capabilities.compressed_messages.runtime import exchange
from jpipe.plan import Links
from jpipe.programs import LayerCost, sum_layer_costs
from tests.jpipe import models, reference, running

WIDTH = 40
STACK = LayerStack({"first": models.dense(WIDTH), "second": models.noisy(0.1, WIDTH), "mix": models.dense(WIDTH), "out": models.dense()})
LINKS = {
    "bfloat16": {"activations": "bfloat16", "gradients": "bfloat16"},
    "int8": {"activations": "int8", "gradients": "int8"},
    "fp8": {"activations": "fp8", "gradients": "fp8"},
    "mixed": {"activations": "int8", "gradients": "bfloat16"},
    "activations": {"activations": "int8"},
    "gradients": {"gradients": "fp8"},
}
CASES: dict[str, dict] = {
    "gpipe": {},
    "pipedream_flush": {"recompute": "full"},
    "pipedream": {"num_stages": 3},
    "pipedream_2bw": {"replicas": [2, 1]},
    "zb_h1": {},
    "interleaved_1f1b": {"num_stages": 4, "chunks_per_rank": 2},
    "zb_v": {"num_stages": 4},
    "replicas": {"schedule": "pipedream_flush", "replicas": 2},
    "early": {"schedule": "pipedream", "split_backward": "early"},
    "parts": {"schedule": "pipedream_flush", "replicas": 2, "sum_parts": 2},
    "one rank": {"schedule": "interleaved_1f1b", "num_stages": 4, "chunks_per_rank": 4},
}


def plan_of(name, links, **fields) -> Plan:
    fields = {"num_stages": 2, "microbatches": 4, "schedule": name, **CASES.get(name, {}), **fields}
    return Plan.even(STACK.ids, links=None if links is None else Links(**links), **fields)


def pipeline(plan, stack=STACK, **options) -> Pipeline:
    devices = None if any(stage.mesh for stage in plan.stages) else jax.devices()[:1] * len(plan.rank_workers)
    return Pipeline(stack, plan, models.masked_squares, models.momentum(), devices, **options)


def batches_of(plan, count=5):
    return models.masked_batches(count, plan.microbatches, dtype=np.float64)


def rounded(links, stage, rng, x):
    """Round what a stage sends forward, and the gradient that comes back to it."""

    def both_ways(tree, message, sender):
        messages = exchange({"links": links})
        return messages.decode(message, messages.encode(message, tree, sender, rng), tree)

    @jax.custom_vjp
    def identity(x):
        return both_ways(x, "activation", stage)

    identity.defvjp(lambda x: (identity(x), None), lambda _, g: (both_ways([g], "gradient", stage + 1)[0],))
    return identity(x)


def mean_gradient(t, parts, weight):
    """Return the mean over the microbatches of an update, from the gradient of each and its numbers."""
    return jax.tree.map(lambda *g: sum(g) / weight, *(gradient for gradient, _ in parts))


def rule(pipe, batches, params, key, mean_of=mean_gradient, optimizer=None):
    """Apply the rule, microbatch after microbatch: return the losses and the weights at the end."""
    plan, optimizer, m = pipe.plan, optimizer or pipe.optimizer, pipe.plan.microbatches
    stage_of = {layer_id: s for s, stage in enumerate(plan.stages) for layer_id in stage.layers}

    @partial(jax.grad, has_aux=True)
    def gradient_of(read, x, labels, k):
        for i in STACK.ids:
            x, _ = STACK.apply([i], {i: read[i]}, {i: {}}, x, key=key, microbatch=k, train=True)
            if (s := stage_of[i]) < plan.depth - 1 and i == plan.stages[s].layers[-1]:
                x = rounded(plan.links, s, (k, key), x)
        total, weight = pipe.loss(x, labels)
        return total, (total, weight)

    gradient_of, updated = jax.jit(gradient_of), jax.jit(lambda g, state, p: optimizer.update(g, state, p))
    versions, state, losses = [params], optimizer.init(params), []
    for t, batch in enumerate(batches):
        parts = []
        for k in range(t * m, (t + 1) * m):
            x, labels = jax.tree.map(lambda a, k=k: a.reshape(m, -1, *a.shape[1:])[k % m], batch)
            read = {i: versions[reference.version(plan, stage_of[i], k)][i] for i in STACK.ids}
            parts.append(gradient_of(read, x, labels, np.uint32(k)))
        total, weight = (sum(float(numbers[j]) for _, numbers in parts) for j in range(2))
        changes, state = updated(mean_of(t, parts, weight), state, versions[-1])
        versions.append(jax.tree.map(np.add, versions[-1], changes))
        losses.append(total / weight)
    return losses, versions[-1]


def check_rule(plan):
    pipe, batches = pipeline(plan), batches_of(plan)
    state = running.fresh(pipe, batches)
    expected = rule(pipe, batches, jax.tree.map(np.asarray, pipe.params(state)), jax.random.key(running.KEY))
    found = running.train(pipe, batches, state)
    running.check_close((found.losses, found.params), expected)
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(most=2)
def test_equals_the_rule(name, kind, rounding):
    check_rule(plan_of(name, {**LINKS[kind], "rounding": rounding}))


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", ["pipedream_2bw", "pipedream", "pipedream_flush"])
def test_a_run_from_a_snapshot_equals_the_run_that_continued(name):
    plan = plan_of(name, {**LINKS["mixed"], "rounding": "stochastic"})
    pipe, batches, cut = pipeline(plan), models.masked_batches(6, plan.microbatches), 3
    state, snapshot, losses = running.fresh(pipe, batches), pipe.snapshot(cut), {}
    for batch in batches:
        state, metrics = pipe.step(state, batch, observe=None if snapshot.complete else snapshot)
        losses |= metrics.losses
    state, metrics = pipe.drain(state, with_metrics=True)
    resumed = running.train(pipe, batches[cut:], pipe.restore(jax.random.key(running.KEY), batches[0], snapshot.layers(), cut))
    assert resumed.losses == [float(loss) for t, loss in sorted((losses | metrics.losses).items()) if t >= cut]
    running.check_equal(resumed.params, pipe.params(state))


@pytest.mark.slow
def test_where_stages_run_and_when_changes_no_number():
    """All stages on one rank, where nothing is sent, and on a rank each; forwards before backwards, and in turn."""
    links, found = {**LINKS["int8"], "rounding": "stochastic"}, []
    for name, fields in {"gpipe": {"num_stages": 4}, "one rank": {}, "pipedream_flush": {"num_stages": 4, "recompute": "none"}}.items():
        plan = plan_of(name, links, **fields)
        found.append(running.train(pipeline(plan), models.masked_batches(2, 4)))
    running.check_equal(found[1], found[0])
    running.check_equal(found[2], found[0])


def test_an_evaluation_rounds_the_same_activations_to_nearest():
    plan = plan_of("gpipe", {"activations": "int8", "rounding": "stochastic"}, num_stages=3)
    pipe, batches = pipeline(plan), models.masked_batches(1, 4)
    state = running.fresh(pipe, batches)
    params, x = jax.tree.map(np.asarray, pipe.params(state)), jax.numpy.asarray(batches[0][0])
    for stage in plan.stages:
        x, _ = STACK.apply(stage.layers, params, {layer_id: {} for layer_id in STACK.ids}, x, key=None, microbatch=0, train=False)
        x = x if stage is plan.stages[-1] else decompress(compress(x, "int8"), "int8", x)
    total, weight = pipe.loss(x, batches[0][1])
    evaluation = pipe.evaluate(state, batches[0])
    assert float(evaluation.loss) == pytest.approx(float(total / weight), rel=1e-5)
    np.testing.assert_allclose(pipe.predict(state, batches[0][0]), x, rtol=1e-5, atol=1e-5)


def test_compressed_bytes_are_counted():
    """A message of 2 rows of 40 numbers of float32, and the weight of the microbatch, with each gradient."""
    moved, costs = {}, {}
    for name, links in {"none": None, "int8": LINKS["int8"], "bfloat16": LINKS["bfloat16"], "activations": LINKS["activations"]}.items():
        plan = plan_of("pipedream_flush", links)
        costs[name] = pipeline(plan).costs(models.masked_batches(1, 4)[0])
        moved[name] = simulate(lower(plan, 1), costs[name], Link(bandwidth=100.0)).moved_bytes
        first, second = costs[name]
        assert (first.outputs, first.message) == (second.inputs, second.gradient)
    assert moved == {"none": (4 * 320, 4 * 324), "int8": (4 * 88, 4 * 92), "bfloat16": (4 * 160, 4 * 164), "activations": (4 * 88, 4 * 324)}
    layers = {layer_id: LayerCost(1.0, 2.0, outputs=2048, residuals={"none": 0}) for layer_id in STACK.ids}
    first, second = sum_layer_costs(plan_of("gpipe", LINKS["mixed"]), layers, inputs=7)
    assert (first.inputs, first.outputs, second.inputs, first.message, second.gradient) == (7, 520, 520, 1024, 1024)


@pytest.mark.slow
def test_arrays_between_stages_that_are_not_compressed_go_along():
    """Whole numbers and thin arrays beside a wide one, in a dict, in both directions."""

    def begin(x):
        return {"wide": jax.numpy.tile(x, (1, 16)), "thin": x[:, :1], "number": jax.numpy.arange(3)}

    def end(tree):
        return tree["wide"][:, :3] + tree["thin"] + tree["number"].astype(tree["thin"].dtype)[None, :]

    stack = LayerStack({"in": models.dense(), "begin": begin, "end": end, "out": models.dense()})
    for schedule in ("pipedream_flush", "zb_h1"):
        plan = Plan.even(stack.ids, 2, schedule, 2, links=Links(activations="int8", gradients="int8"))
        plain = plan.model_copy(update={"links": None})
        batches = models.masked_batches(2, 2)
        found, expected = (running.train(pipeline(one, stack), batches) for one in (plan, plain))
        running.check_close(found.losses, expected.losses, tolerance=0.05)
        assert found.losses != expected.losses


AXES = {"first/w": (None, "mlp"), "first/b": ("mlp",), "second/w": (None, "mlp"), "mix/w": ("mlp", None)}
MESHES = {
    "rows": {"mesh": {"data": 2}},
    "weights": {"mesh": {"model": 2}, "param_axes": AXES},
    "unlike": {"mesh": [{"model": 2}, {"data": 2}], "param_axes": {"first/w": (None, "mlp")}},
}


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["mixed", "fp8"])
@pytest.mark.parametrize("name", ["pipedream_2bw", "zb_h1"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.thinned(most=2)
def test_a_mesh_changes_no_number(mesh, name, kind):
    links = {**LINKS[kind], "rounding": "stochastic"}
    check_rule(plan_of(name, links, replicas=1, **MESHES[mesh]))


@pytest.mark.slow
def test_rows_on_a_mesh_are_compressed_where_they_are():
    """No program has more collectives than without compression but for the gradients of the weights."""
    collectives = {}
    for links in (None, {**LINKS["int8"], "rounding": "stochastic"}):
        pipe = pipeline(plan_of("gpipe", links, mesh={"data": 2}))
        pipe.init(jax.random.key(0), models.masked_batches(1, 4)[0])
        calls = {(w, name): call.as_text() for w, stage in pipe._executor.stages.items() for name, call in stage.calls.items()}
        collectives[links is None] = {key: re.findall(r"(all-gather|all-to-all|collective-permute)\(", text) for key, text in calls.items()}
        assert not collectives[links is None][0, "forward"]
    assert collectives[True] == collectives[False]


def test_unknown_kinds_are_refused():
    with pytest.raises(InputError, match=r"plan: links\.activations: expected 'bfloat16', 'int8' or 'fp8', found 'int4'"):
        Plan.even(STACK.ids, 2, links={"activations": "int4"})


def test_a_plan_with_links_goes_through_json():
    plan = plan_of("gpipe", LINKS["mixed"])
    assert Plan.from_json(plan.to_json()) == plan
    assert "links=Links(activations='int8'" in repr(plan)


def test_a_plan_of_version_0_4_is_read_unless_it_remembers_rows():
    text = plan_of("gpipe", LINKS["mixed"]).to_json()
    of_0_4 = text.replace('"rounding"', '"rows": null, "rounding"')
    assert of_0_4 != text
    assert Plan.from_json(of_0_4) == Plan.from_json(text)
    with pytest.raises(InputError, match=r"^plan: links: expected no key 'rows', which only version 0\.4 had, found 12; remove it$"):
        Plan.from_json(of_0_4.replace("null, ", "12, "))
