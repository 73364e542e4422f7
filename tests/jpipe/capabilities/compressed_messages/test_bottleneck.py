"""Bottlenecks: the numbers equal the model with the two matrices written out, whatever the schedule is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from jpipe import InputError, LayerStack, Link, Pipeline, Plan, Precision, lower, simulate
from jpipe_planner import measure
from tests.jpipe import models, reference, running

WIDTH, NARROW = 12, 3
STACK = LayerStack({"first": models.dense(WIDTH), "second": models.dense(WIDTH), "mix": models.dense(WIDTH), "out": models.dense()})
CASES: dict[str, dict] = {
    "gpipe": {},
    "pipedream_flush": {"num_stages": 4, "recompute": "full"},
    "pipedream": {"num_stages": 4},
    "pipedream_2bw": {"replicas": [2, 1]},
    "zb_h1": {"num_stages": 3},
    "interleaved_1f1b": {"num_stages": 4, "chunks_per_rank": 2},
    "parts": {"schedule": "pipedream_flush", "replicas": 2, "sum_parts": 2},
    "one stage": {"schedule": "gpipe", "num_stages": 1, "after": ["first", "mix"]},
    "inside": {"schedule": "pipedream", "after": ["first", "second"]},
}


def plan_of(name, *, after=None, **fields) -> Plan:
    fields = {"num_stages": 2, "microbatches": 4, "schedule": name, "after": after, **CASES.get(name, {}), **fields}
    links = {"bottleneck": {"width": NARROW, "after": fields.pop("after")}}
    return Plan.even(STACK.ids, links=links, **fields)


def pipeline(plan, stack=STACK, **options) -> Pipeline:
    return Pipeline(stack, plan, models.masked_squares, models.momentum(), jax.devices()[:1] * len(plan.rank_workers), **options)


def written_out(pipe, batches, params):
    """Apply the rule of the schedule to the model with its matrices: return the losses and the weights at the end."""
    plan, m = pipe.plan, pipe.plan.microbatches
    stage_of = {layer_id: s for s, stage in enumerate(plan.stages) for layer_id in stage.layers}

    def total(read, x, labels):
        for layer_id in STACK.ids:
            x = jnp.tanh(x @ read[layer_id]["w"] + read[layer_id]["b"][None, :])
            if layer_id in plan.links.bottleneck.after:
                x = (x @ read[f"bottleneck.{layer_id}.down"]["kernel"]) @ read[f"bottleneck.{layer_id}.up"]["kernel"]
        total, weight = pipe.loss(x, labels)
        return total, (total, weight)

    gradient_of = jax.jit(jax.grad(total, has_aux=True))
    versions, state, losses = [params], pipe.optimizer.init(params), []
    for t, batch in enumerate(batches):
        parts = []
        for k in range(t * m, (t + 1) * m):
            microbatch = jax.tree.map(lambda a, k=k: a.reshape(m, -1, *a.shape[1:])[k % m], batch)
            read = {layer_id: versions[reference.version(plan, s, k)][layer_id] for layer_id, s in stage_of.items()}
            parts.append(gradient_of(read, *microbatch))
        loss, weight = (sum(float(numbers[j]) for _, numbers in parts) for j in range(2))
        mean = jax.tree.map(lambda *g, weight=weight: sum(g) / weight, *(gradient for gradient, _ in parts))
        changes, state = pipe.optimizer.update(mean, state, versions[-1])
        versions.append(jax.tree.map(np.add, versions[-1], changes))
        losses.append(loss / weight)
    return losses, versions[-1]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(most=2)
def test_equals_the_model_with_the_matrices_written_out(name):
    pipe = pipeline(plan_of(name))
    batches = models.masked_batches(5, pipe.plan.microbatches, dtype=np.float64)
    state = running.fresh(pipe, batches)
    expected = written_out(pipe, batches, jax.tree.map(np.asarray, pipe.params(state)))
    found = running.train(pipe, batches, state)
    running.check_close((found.losses, found.params), expected)


@pytest.mark.usefixtures("float64")
def test_a_run_goes_on_under_a_plan_with_other_cuts():
    """The bottlenecks stay where they are; one is then inside a stage, and another cut has none."""
    pipe, batches, cut = pipeline(plan_of("pipedream_flush", num_stages=3)), models.masked_batches(5, 4, dtype=np.float64), 2
    assert [stage.layers[-1] for stage in pipe.plan.stages[:-1]] == ["bottleneck.second.down", "bottleneck.mix.down"]
    state, snapshot, losses = running.fresh(pipe, batches), pipe.snapshot(cut), []
    for batch in batches:
        state, metrics = pipe.step(state, batch, observe=None if snapshot.complete else snapshot)
        losses += metrics.losses.values()
    other = pipeline(models.cut(STACK.ids, (1, 3), schedule="gpipe", microbatches=4, links=pipe.plan.links))
    assert [len(stage.layers) for stage in other.plan.stages] == [1, 7]
    restored = other.restore(jax.random.key(running.KEY), batches[0], snapshot.layers(), cut)
    resumed = running.train(other, batches[cut:], restored)
    running.check_close((resumed.losses, resumed.params), ([float(loss) for loss in losses[cut:]], pipe.params(state)))


def test_all_bottlenecks_begin_with_one_projection():
    pipe = pipeline(plan_of("gpipe", num_stages=3))
    params = pipe.params(running.fresh(pipe, models.masked_batches(1, 4)))
    down, up = (np.asarray(params[f"bottleneck.second.{name}"]["kernel"]) for name in ("down", "up"))
    np.testing.assert_allclose(down.T @ down, np.eye(NARROW), atol=1e-6)
    np.testing.assert_allclose(up, down.T, atol=1e-6)
    np.testing.assert_allclose(params["bottleneck.mix.down"]["kernel"], down, atol=1e-6)


def test_narrow_messages_are_counted():
    """A message of 2 rows of 3 numbers of float32, and the weight of the microbatch with each gradient. A profile has the same bytes."""
    pipe, batch = pipeline(plan_of("pipedream_flush", num_stages=2)), models.masked_batches(1, 4)[0]
    costs = pipe.costs(batch)
    assert simulate(lower(pipe.plan, 1), costs, Link(bandwidth=100.0)).moved_bytes == (4 * 24, 4 * 28)
    sent = pipe.stack.specs(jax.ShapeDtypeStruct((2, 3), np.float32))["bottleneck.second.down"].output
    assert [leaf.shape for leaf in jax.tree.leaves(sent)] == [(2, NARROW)]
    microbatch = models.masked_batches(1, 1)[0]
    options = {"seconds": 0.01, "policies": ["none"]}
    profile = measure(pipe.stack, lambda rows: microbatch, models.masked_squares, pipe.optimizer, [2], **options)
    of_profile = profile.stage_costs(pipe.plan, 2)
    assert (of_profile[0].outputs, of_profile[1].inputs) == (costs[0].outputs, costs[1].inputs) == (24, 24)
    assert [cost.weights for cost in of_profile] == [cost.weights for cost in costs]


def in_layers(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"])
    return x


STACKS = {
    "module": lambda x: LayerStack.from_model(
        linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(8), linen.relu, linen.Dense(2)]), x
    ),
    "function": lambda x: LayerStack.from_function(in_layers, [{"w": jnp.eye(8)}, {"w": jnp.eye(8)}, {"w": jnp.ones((8, 2))}], x),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_model_that_was_cut_gets_bottlenecks(name):
    stack = STACKS[name](jnp.ones((4, 8)))
    first, plan = stack.ids[0], Plan.even(stack.ids, 3, "gpipe", 2, links={"bottleneck": {"width": 4}})
    loss, batch = lambda y, labels: (((y - labels) ** 2).sum(), jnp.float32(y.size)), (jnp.ones((4, 8)), jnp.zeros((4, 2)))
    pipe = Pipeline(stack, plan, loss, optax.sgd(0.1), jax.devices()[:1] * 3, precision=Precision(params="bfloat16"))
    state = pipe.init(jax.random.key(0), batch)
    state, metrics = pipe.step(state, batch)
    assert np.isfinite(float(metrics.losses[0]))
    assert [cost.outputs for cost in pipe.costs(batch)[:2]] == [2 * 4 * 2, 2 * 4 * 2]
    params = pipe.params(state)
    assert params.keys() == set(pipe.stack.ids)
    assert params[f"bottleneck.{first}.up"]["kernel"].shape == (4, 8)
    with pytest.raises(InputError, match=rf"^model: the model has further layers, bottleneck\.{first}\.down, .*; use params$"):
        pipe.model(state)


def test_further_arrays_pass_a_bottleneck():
    """Several wide arrays, thin ones and whole numbers, in a dict."""

    def begin(x):
        return {"one": jnp.tile(x, (1, 4)), "two": jnp.tile(x, (1, 2)), "thin": x[:, :1], "number": jnp.arange(3)}

    def end(tree):
        return tree["one"][:, :3] + tree["two"][:, 3:] + tree["thin"] + tree["number"].astype(tree["thin"].dtype)[None, :]

    stack = LayerStack({"in": models.dense(), "begin": begin, "end": end, "out": models.dense()})
    pipe = pipeline(Plan.even(stack.ids, 2, "zb_h1", 2, links={"bottleneck": {"width": NARROW}, "activations": "bfloat16"}), stack)
    found = running.train(pipe, models.masked_batches(2, 2))
    assert np.isfinite(found.losses).all()
    assert {name: p.shape for name, p in found.params["bottleneck.begin.down"].items()} == {"kernel": (12, 3), "kernel_1": (6, 3)}


def test_mistakes_are_refused():
    batch = models.masked_batches(1, 4)[0]
    with pytest.raises(InputError, match=r"^plan: links\.bottleneck\.width: expected .* 1"):
        Plan.even(STACK.ids, 2, links={"bottleneck": {"width": 0}})
    for after in ("out", "other"):
        with pytest.raises(InputError, match=rf"^links\.bottleneck\.after: no layer of the model follows '{after}'"):
            pipeline(plan_of("gpipe", after=[after]))
    with pytest.raises(InputError, match=r"^links\.bottleneck\.width: expected fewer features than the layers pass on, found 99 of "):
        pipeline(Plan.even(STACK.ids, 2, "gpipe", 4, links={"bottleneck": {"width": 99}})).check(batch)
    stack = pipeline(plan_of("gpipe")).stack
    with pytest.raises(InputError, match=r"^links\.bottleneck: the model has other bottlenecks, found width=3 after=\('mix',\); use"):
        pipeline(plan_of("gpipe", after=["mix"]), stack)
    again = pipeline(plan_of("gpipe"), stack)  # a model that has them already
    assert again.stack is stack
    assert pipeline(again.plan).plan == again.plan
    assert Plan.from_json(again.plan.to_json()) == again.plan
    taken = LayerStack({"first": models.dense(WIDTH), "bottleneck.first.up": models.dense(WIDTH), "out": models.dense()})
    with pytest.raises(InputError, match=r"LayerStack: the model has a layer 'bottleneck\.first\.up' already; rename it"):
        pipeline(Plan.even(taken.ids, 3, "gpipe", 4, links={"bottleneck": {"width": 3}}), taken)
