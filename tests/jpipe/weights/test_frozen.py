"""Frozen parameters: the numbers are equal, and nothing is computed, summed, sent or stored for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan, Precision, Tie, lower, simulate
from jpipe.programs import uses_by_costs
from tests.jpipe import models, monolith, reference, running

RICH, PLAIN, TIED = models.rich_stack(), models.plain_stack(), models.tied_stack()
STEPS = 5


def frozen(*words):
    """Label parameters "frozen" if their path contains one of these words, else "trained"."""

    def label(path, _):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return "frozen" if any(word in name for word in words) else "trained"

    return functools.partial(jax.tree_util.tree_map_with_path, label)


@functools.cache
def freezing(*words, inner=None, clip=None):
    """Return an optimizer that freezes the parameters that `frozen(*words)` labels and updates all others."""
    rule = inner() if inner else optax.sgd(0.1, momentum=0.9)
    rule = rule if clip is None else optax.chain(optax.clip_by_global_norm(clip), rule)
    return optax.partition({"trained": rule, "frozen": optax.set_to_zero()}, frozen(*words))


@functools.cache
def adamw():
    return optax.adamw(0.05, weight_decay=0.1)


def pipeline(words, plan, stack=RICH, inner=None, **options):
    return Pipeline(stack, plan, models.masked_squares, freezing(*words, inner=inner), **options)


def even(stack=RICH, **fields):
    return Plan.even(stack.ids, **{"num_stages": 4, "schedule": "pipedream_flush", "microbatches": 4} | fields)


def as_one_function(pipe, words, inner, batches, clip):
    """Train the model without stages, computing all gradients and applying optax to the whole tree."""
    plan, state = pipe.plan, running.fresh(pipe, batches)
    stage_of = {layer_id: s for s, stage in enumerate(plan.stages) for layer_id in stage.layers}
    start = models.on_first_device((pipe.params(state), running.layer_state(state)))
    rule = freezing(*words, inner=inner, clip=clip)
    key = jax.random.key(running.KEY)

    def read(layer_id, k):
        return reference.version(plan, stage_of[layer_id], k)

    return running.Trained(*monolith.train(pipe.stack, pipe.loss, rule, *start, key, batches, plan.microbatches, read=read))


CASES = {
    "first layers, one partly": (["track", "noise", "mix/w"], {"schedule": "pipedream_2bw", "num_stages": 2}),
    "first layer": (["track"], {}),
    "first stage of two, recomputed": (["track", "noise"], {"schedule": "gpipe", "num_stages": 2, "recompute": "full"}),
    "a layer between": (["mix"], {"schedule": "pipedream"}),
    "the last layer": (["out"], {"schedule": "pipedream_2bw", "num_stages": 2}),
    "all vectors": (["/b"], {"schedule": "pipedream", "vertical_sync": True, "microbatches": 2}),
    "early gradients": (["track", "mix"], {"schedule": "pipedream_2bw", "split_backward": "early"}),
    "halves": (["track", "noise", "out/w"], {"schedule": "zb_h1"}),
    "chunks": (["track", "noise"], {"schedule": "interleaved_1f1b", "chunks_per_rank": 2}),
    "all but one vector": (["track", "noise", "mix", "out/w"], {}),
    "everything": (["/"], {"schedule": "pipedream_2bw"}),
}


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.thinned(most=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", CASES)
def test_equals_optax_on_the_whole_tree(case):
    words, fields = CASES[case]
    plan = even(**fields)
    clip = None if fields.get("schedule") == "pipedream" or "split_backward" in fields else 0.5
    batches = models.masked_batches(STEPS, plan.microbatches, dtype=np.float64)
    pipe = pipeline(words, plan, inner=adamw, clip_global_norm=clip)
    actual = running.train(pipe, batches)
    running.check_close(actual, as_one_function(pipe, words, adamw, batches, pipe.clip_global_norm))
    start = pipe.params(running.fresh(pipe, batches))
    label = frozen(*words)(start)
    for before, after, how in zip(*map(jax.tree.leaves, (start, actual.params, label)), strict=True):
        assert np.array_equal(before, after) == (how == "frozen")


REPLICATED = {
    "replicas": {"replicas": 2, "num_stages": 2},
    "more replicas at the end": {"schedule": "pipedream_2bw", "replicas": (1, 3), "num_stages": 2, "microbatches": 6},
    "shared optimizer state": {"replicas": 2, "num_stages": 2, "shard_optimizer": True},
}


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("words", [["layer0", "layer1/w"], ["layer1", "layer2/b"]], ids=" ".join)
@pytest.mark.parametrize("case", REPLICATED)
def test_equals_optax_on_the_whole_tree_with_replicas(case, words):
    plan = even(PLAIN, **REPLICATED[case])
    batches = models.masked_batches(STEPS, plan.microbatches, dtype=np.float64)
    pipe = pipeline(words, plan, PLAIN, adamw, clip_global_norm=0.5)
    running.check_close(running.train(pipe, batches), as_one_function(pipe, words, adamw, batches, 0.5))


BIT_FOR_BIT = {
    "masters": (["track", "mix/w"], RICH, {"schedule": "pipedream_2bw"}, {"precision": Precision(params="bfloat16")}),
    "2BW": (["track", "noise/w"], RICH, {"schedule": "pipedream_2bw"}, {}),
    "stash, split": (["mix"], RICH, {"schedule": "pipedream", "split_backward": "early"}, {}),
    "dynamic scale": (["track"], RICH, {}, {"precision": Precision(params="float16", loss_scale="dynamic")}),
    "average": (["track", "mix/b"], RICH, {}, {"ema_decay": 0.9}),
    "a tied parameter": (["noise/w"], TIED, {"schedule": "pipedream_2bw"}, {"clip_global_norm": 0.5}),
    "around a tied parameter": (["track", "out", "noise/b"], TIED, {}, {"clip_global_norm": 0.5}),
}


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("case", BIT_FOR_BIT)
def test_equals_the_sequential_reference_bit_for_bit(case):
    words, stack, fields, options = BIT_FOR_BIT[case]
    running.check_against_reference(stack, even(stack, num_stages=2, **fields), {2}, optimizer=freezing(*words), **options)


INTEGERS = {
    "masters, average": ({"schedule": "pipedream"}, {"precision": Precision(params="bfloat16"), "ema_decay": 0.9}),
    "2BW": ({"schedule": "pipedream_2bw"}, {"clip_global_norm": 0.5}),
    "halves, average": ({"schedule": "zb_h1"}, {"ema_decay": 0.9}),
}


@pytest.mark.exhaustive
@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("case", INTEGERS)
def test_frozen_parameters_may_be_integers(case):
    """They give the numbers of the same parameters as floats, and stay integers in what is returned."""
    fields, options = INTEGERS[case]
    plan, batches = even(TABLES[np.int8], num_stages=2, **fields), models.masked_batches(STEPS, 4, width=4)
    pipes = {dtype: pipeline(["table"], plan, stack, adamw, **options) for dtype, stack in TABLES.items()}
    states = {dtype: pipe.init(jax.random.key(0), batches[0]) for dtype, pipe in pipes.items()}
    for dtype, pipe in pipes.items():
        for batch in batches:
            states[dtype], _ = pipe.step(states[dtype], batch)
    for weights in ("newest", "ema") if "ema_decay" in options else ("newest",):
        actual, expected = (pipe.params(states[dtype], weights=weights) for dtype, pipe in pipes.items())
        assert all(tree["table"].dtype == np.int8 for tree in actual.values())
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a, b.dtype), b), actual, expected)
    frozen = [sum(cost.frozen for cost in pipe.costs(batches[0])) for pipe in pipes.values()]
    assert frozen[0] * (2 if "precision" in options else 4) == frozen[1]


def table_layer(dtype):
    """Return a layer with a table of small integers, and a vector."""

    def init(key, x):
        return {"table": jax.random.randint(key, (4, 4), -3, 4).astype(dtype), "b": jnp.zeros(4, jnp.float32)}, {}

    def apply(params, state, x, key, train):
        return jnp.tanh(x @ params["table"].astype(x.dtype) / 4 + params["b"][None]), state

    return Layer(init, apply)


TABLES = {dtype: LayerStack({f"layer{i}": table_layer(dtype) for i in range(3)}) for dtype in (np.int8, np.float32)}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_a_mesh_changes_no_number():
    words, stack = ["track", "mix/w"], models.wide_stack()
    plain = even(stack, num_stages=1, schedule="pipedream_2bw", microbatches=2)
    batches = models.masked_batches(3, 2, rows=4, width=4, dtype=np.float64)
    sharded = even(stack, num_stages=1, schedule="pipedream_2bw", microbatches=2, mesh={"data": 2, "model": 2}, fsdp=True)
    actual, expected = (running.train(pipeline(words, plan, stack, adamw, clip_global_norm=0.5), batches) for plan in (sharded, plain))
    running.check_close(actual.params, models.on_first_device(expected.params))


def leaves_of(tree):
    return len(jax.tree.leaves(tree))


@pytest.mark.parametrize("schedule", ["pipedream_2bw", pytest.param("pipedream", marks=pytest.mark.exhaustive)])
def test_nothing_is_stored_or_sent_for_frozen_parameters(schedule):
    plan = even(schedule=schedule)
    pipe = pipeline(["track", "noise", "mix/w"], plan)
    batches = models.masked_batches(4, plan.microbatches)
    sent = {}

    def observe(event):
        for microbatch in event.state.microbatches.values():
            for field, tree in microbatch.items():
                if tree is not None:
                    sent.setdefault((event.instruction.worker, field), set()).add(leaves_of(tree))

    state = pipe.init(jax.random.key(0), batches[0])
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=observe)
    for worker, leaves in zip(state.workers, (0, 0, 1, 2), strict=True):
        assert leaves_of(worker.accumulators["gradients"] if worker.accumulators else {}) in (0, leaves)
        assert leaves_of(worker.optimizer) == leaves  # the momentum
    assert len(state.workers[0].weights.versions) >= 2
    for first in state.workers[:2]:  # one array of a parameter, however many versions there are
        assert len({id(leaf) for leaf in jax.tree.leaves(first.weights)}) == leaves_of(first.weights) / len(first.weights.versions)
    assert sent[1, "message"] == {1}  # the weight of the microbatch
    assert sent[2, "gradient"] == {1}
    assert sent[3, "gradient"] == {2}
    assert sent[0, "residuals"] == sent[1, "residuals"] == {0}
    costs = pipe.costs(batches[0])
    assert [cost.gradient for cost in costs] == [0, 4, 4, costs[3].inputs + 4]
    assert [cost.message for cost in costs[:3]] == [4, 4, costs[2].outputs + 4]
    assert [cost.frozen for cost in costs] == [costs[0].weights, costs[1].weights, 36, 0]
    assert [(cost.backward, cost.backward_weight) for cost in costs] == [(0, 0), (0, 0), (2, 1), (2, 1)]
    simulate(lower(plan, 4, **uses_by_costs(costs)), costs)


def test_a_backward_of_frozen_layers_computes_only_the_gradient_of_its_input():
    pipe = pipeline(["track", "mix"], even(num_stages=4))
    functions = pipe.stage_functions(models.masked_batches(1, 4)[0])

    def products(f):
        spec = f.specs.params, *f.between_specs, f.accumulators_spec, f.specs.rng
        return str(jax.make_jaxpr(f.backward)(*spec)).count("dot_general")

    assert products(functions[0]) == 0
    assert products(functions[1]) == 1  # of its weights: nothing before is trained
    assert products(functions[2]) == 1  # of its input: its weights are frozen


@pytest.mark.slow
def test_a_frozen_layer_may_have_no_backward():
    """No backward is computed before the first trained layer, so an operation without a derivative is allowed there."""

    def doubled(params, state, x, key, train):
        return jax.lax.while_loop(lambda y: jnp.abs(y).max() < 10, lambda y: y * 2 + params["w"], x), state

    first = Layer(lambda key, x: ({"w": jnp.ones((1, models.WIDTH), x.dtype)}, {}), doubled)
    stack = LayerStack({"first": first, "second": models.dense(), "third": models.dense()})
    batches = models.masked_batches(2, 2)
    plan = even(stack, num_stages=2, microbatches=2)
    running.train(pipeline(["first"], plan, stack), batches)
    with pytest.raises(InputError, match="layer 'first': its backward fails"):
        pipeline(["first/x"], plan, stack).check(batches[0])
    late = LayerStack({"second": models.dense(), "late": first, "third": models.dense()})
    behind = pipeline(["late"], even(late, num_stages=3, microbatches=2), late)
    with pytest.raises(InputError, match="layer 'late': its backward fails"):
        behind.check(batches[0])


@pytest.mark.exhaustive
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("precision", [Precision(params="bfloat16"), Precision()], ids=["masters", "float32"])
def test_the_average_of_a_frozen_parameter_is_the_parameter(precision):
    pipe = pipeline(["track", "mix/w"], even(num_stages=2), ema_decay=0.9, precision=precision)
    batches = models.masked_batches(3, 4)
    state = running.fresh(pipe, batches)
    start = pipe.params(state)
    for batch in batches:
        state, _ = pipe.step(state, batch)
    now, average = pipe.params(state), pipe.params(state, weights="ema")
    running.check_equal(average["track"], start["track"])
    running.check_equal(now["track"], start["track"])
    running.check_equal(average["mix"]["w"], start["mix"]["w"])
    assert not np.array_equal(average["mix"]["b"], now["mix"]["b"])
    pipe.evaluate(state, batches[0], weights="ema")


def tied_everywhere():
    return LayerStack({"a": models.dense(), "b": models.dense(), "c": models.dense()}, ties=[Tie(("a", "w"), ("c", "w"))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "groups"), [(["a/w"], 0), pytest.param(["a/b", "b", "c"], 1, marks=pytest.mark.exhaustive)], ids=["frozen", "trained"]
)
def test_stages_sum_no_gradients_of_a_frozen_tied_parameter(words, groups):
    stack, batches = tied_everywhere(), models.masked_batches(3, 4)
    pipe, alone = (pipeline(words, even(stack, num_stages=stages), stack, clip_global_norm=0.5) for stages in (3, 1))
    assert len(uses_by_costs(pipe.costs(batches[0])).get("shared_parameters", ())) == groups
    start = pipe.params(running.fresh(pipe, batches))
    actual, expected = running.train(pipe, batches), running.train(alone, batches)
    running.check_close(actual.params, models.on_first_device(expected.params), 1e-5)
    assert np.array_equal(actual.params["a"]["w"], start["a"]["w"]) == (groups == 0)
    assert np.array_equal(actual.params["c"]["w"], actual.params["a"]["w"])
    assert not np.array_equal(actual.params["c"]["b"], start["c"]["b"]) or words != ["a/w"]


# Checkpoints -----------------------------------------------------------------------------------------------------------


def cut(pipe, batches, at):
    """Return (layers of a snapshot before batch `at`, the outcome of the whole run)."""
    state, snapshot = running.fresh(pipe, batches), pipe.snapshot(at)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=snapshot)
    state = pipe.drain(state, observe=snapshot)
    return jax.tree.map(np.asarray, snapshot.layers()), pipe.params(state)


def restored(pipe, batches, layers, at, **options):
    state = pipe.restore(jax.random.key(running.KEY), batches[0], layers, at, **options)
    for batch in batches[at:]:
        state, _ = pipe.step(state, batch)
    return pipe.params(pipe.drain(state))


WORDS = ["track", "noise/w"]


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("precision", [Precision(), Precision(params="bfloat16")], ids=["float32", "masters"])
@pytest.mark.parametrize("schedule", ["pipedream_2bw", "pipedream"])
def test_a_restored_run_has_equal_results(schedule, precision):
    pipe = pipeline(WORDS, even(schedule=schedule, num_stages=2), precision=precision, inner=adamw)
    batches = models.masked_batches(STEPS, 4)
    layers, expected = cut(pipe, batches, 3)
    assert "1" in layers["noise"]["params"]
    assert "w" not in layers["noise"]["params"]["1"]  # an older version has only what changed
    assert "optimizer" not in layers["track"]
    running.check_equal(restored(pipe, batches, layers, 3), expected)
    fresh = pipe.restore(jax.random.key(running.KEY), batches[0], layers, 3)
    weights = fresh.workers[0].weights
    versions = [weights.read(version)["noise"]["w"] for version in weights.versions]
    assert len(versions) >= 2
    assert len({id(leaf) for leaf in versions}) == 1
    # Under another plan, too.
    other = pipeline(WORDS, even(schedule="gpipe", num_stages=1), precision=precision, inner=adamw)
    assert sorted(restored(other, batches, layers, 3)) == sorted(expected)


@pytest.mark.exhaustive
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("precision", [Precision(params="bfloat16"), Precision()], ids=["masters", "float32"])
def test_frozen_layers_are_trained_later_by_another_optimizer(precision):
    pipe = pipeline(WORDS, even(num_stages=2), precision=precision, inner=adamw)
    batches = models.masked_batches(STEPS, 4)
    layers, _ = cut(pipe, batches, 3)
    later = Pipeline(RICH, even(num_stages=1, schedule="gpipe"), models.masked_squares, adamw(), precision=precision)
    with pytest.raises(InputError, match=r"layer 'track', optimizer state: .* is it of another optimizer"):
        restored(later, batches, layers, 3)
    begin = later.restore(jax.random.key(running.KEY), batches[0], layers, 3, fresh_optimizer=True)
    state = pipe.restore(jax.random.key(running.KEY), batches[0], layers, 3)
    running.check_equal(later.params(begin), models.on_first_device(pipe.params(state)))
    params = restored(later, batches, layers, 3, fresh_optimizer=True)
    assert not np.array_equal(params["track"]["w"], layers["track"]["params"]["0"]["w"])
