"""Shared parameters: one array in two layers, whether they are in one stage or in several."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jpipe import InputError, Layer, LayerStack, Link, Pipeline, Plan, Precision, Tie, lower, simulate
from jpipe.capabilities.shared_parameters.program import AddShared, TakeShared
from jpipe.model._ties import Ties
from jpipe.programs import ProgramError, StageCost, predict_window
from jpipe.schedules import SCHEDULES
from tests.jpipe import models, reference
from tests.jpipe.running import check_close, check_equal

pytestmark = pytest.mark.usefixtures("float64")
WORDS, WIDTH, M, BATCHES = 7, 3, 6, 4
TIE = Tie(("embed", "token/embedding"), ("head", "table/embedding"))


class Embed(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.token = nnx.Embed(WORDS, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.position = nnx.Param(jax.random.normal(rngs(), (2, WIDTH)))

    def __call__(self, x):
        return self.token(x) + self.position[...][None]


class Head(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.table = nnx.Embed(WORDS, WIDTH, rngs=rngs, param_dtype=jnp.float64)
        self.bias = nnx.Param(jnp.zeros(WORDS))

    def __call__(self, x):
        return self.table.attend(x) + self.bias[...][None, None]


def linear(*, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs, param_dtype=jnp.float64)


class Single(nnx.Module):
    """A linear layer in float32."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.zeros((WIDTH, WIDTH), jnp.float32))

    def __call__(self, x):
        return (x.astype(jnp.float32) @ self.kernel[...]).astype(x.dtype)


@functools.cache
def tied(ties=(TIE,)) -> LayerStack:
    return LayerStack({"embed": Embed, "a": linear, "b": linear, "head": Head}, ties=ties)


def loss(y, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(y, labels)
    return losses.sum(), losses.size


def batches() -> list[Any]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, WORDS, (2, 2 * M, 2))) for _ in range(BATCHES)]


def sequential(params, version, optimizer, data):
    """Train the model with one table plainly, each microbatch at the weights of `version(k)`."""

    def total(p, x, labels):
        h = p["embed"]["token"]["embedding"][x] + p["embed"]["position"][None]
        for layer in ("a", "b"):
            h = h @ p[layer]["kernel"] + p[layer]["bias"][None, None]
        return loss(h @ p["embed"]["token"]["embedding"].T + p["head"]["bias"][None, None], labels)[0]

    gradient, weights, state = jax.jit(jax.grad(total)), [params], optimizer.init(params)
    for t, (x, labels) in enumerate(data):
        rows = [slice(2 * j, 2 * j + 2) for j in range(M)]
        parts = [gradient(weights[version(t * M + j)], x[indices], labels[indices]) for j, indices in enumerate(rows)]
        mean = jax.tree.map(lambda *g: functools.reduce(jnp.add, g) / float(labels.size), *parts)  # noqa: B023 - called at once
        with jax.numpy_dtype_promotion("standard"):  # optax's own code mixes dtypes
            updates, state = optimizer.update(mean, state, weights[-1])
        weights.append(optax.apply_updates(weights[-1], updates))
    return weights[-1]


def plain(params) -> dict[str, Any]:
    """Return parameters as dicts, without the second place of the table."""
    trees = {layer_id: nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree for layer_id, tree in params.items()}
    return trees | {"head": {"bias": trees["head"]["bias"]}}


CASES = [
    ((1, 1, 1), {"schedule": "pipedream_2bw"}),
    ((1, 1, 1), {"schedule": "pipedream", "vertical_sync": True}),
    ((1, 1), {"schedule": "pipedream_flush"}),
    ((1,), {"schedule": "gpipe"}),
    ((1, 1), {"schedule": "naive"}),
    ((2,), {"schedule": "pipedream_flush"}),
    ((2, 1), {"schedule": "pipedream_2bw"}),
    ((1, 3), {"schedule": "pipedream_2bw"}),
    ((1, 1, 1), {"schedule": "pipedream_2bw", "flush_first": 2}),
    ((2, 2), {"schedule": "pipedream", "vertical_sync": True}),
    ((2, 2), {"schedule": "gpipe"}),
    ((1, 1, 1), {"schedule": "zb_h1"}),
    ((2, 2), {"schedule": "zb_v"}),  # one rank has both places of the table
    ((1, 1, 1, 1), {"schedule": "interleaved_1f1b", "chunks_per_rank": 2}),
    ((1, 1, 1, 1), {"schedule": "pipedream_2bw", "chunks_per_rank": 2, "split_backward": "early"}),
]


def pipeline(replicas, fields, stack=None, **options) -> Pipeline:
    stack = stack or tied()
    plan = Plan.even(stack.ids, len(replicas), microbatches=M, replicas=replicas, **fields)
    # Replicas share what is compiled.
    devices = [jax.devices()[p] for p, stages in enumerate(plan.pipeline_ranks) for _ in range(plan.replicas[stages[0]])]
    return Pipeline(stack, plan, loss, models.momentum(), devices, **options)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize(
    ("replicas", "fields"), CASES, ids=lambda value: "-".join(map(str, value.values() if isinstance(value, dict) else value))
)
def test_equals_plain_training_with_one_array(replicas, fields, clip):
    pipe, data = pipeline(replicas, fields, clip_global_norm=clip), batches()
    state = pipe.init(jax.random.key(0), data[0])
    start = plain(jax.tree.map(np.array, pipe.params(state)))
    for batch in data:
        state, _ = pipe.step(state, batch)
    state = pipe.drain(state)
    optimizer = models.momentum() if clip is None else optax.chain(optax.clip_by_global_norm(clip), models.momentum())
    expected = sequential(start, lambda k: reference.version(pipe.plan, 0, k), optimizer, data)
    check_close(plain(pipe.params(state)), expected)
    check_copies(state)


def check_copies(state, name="embed shared token/embedding") -> None:
    """Check that the newest copies of a parameter and of its optimizer state are equal bit by bit on all workers that have them."""
    copies = [
        (worker.weights.read(worker.weights.newest)[name], worker.optimizer[name]) for worker in state.workers if name in worker.optimizer
    ]
    assert copies
    for copy in copies[1:]:
        check_equal(jax.tree.map(np.asarray, copy), jax.tree.map(np.asarray, copies[0]))


@pytest.mark.exhaustive
def test_a_run_resumes_where_the_tied_layers_share_a_stage():
    """Restore in both directions; a checkpoint has the parameter once."""
    first, second, data = pipeline((1, 1, 1), {"schedule": "pipedream_2bw"}), pipeline((1,), {"schedule": "pipedream_2bw"}), batches()
    state, cut = first.init(jax.random.key(0), data[0]), first.snapshot(2)
    for batch in data:
        state, _ = first.step(state, batch, observe=cut)
    layers = cut.layers()
    assert [name for name in layers if "token" in str(layers[name].get("params"))] == []
    assert list(layers["embed shared token/embedding"]["params"]["0"]) == ["array"]
    assert "table" not in layers["head"]["params"]["0"]
    expected = first.params(first.drain(state))
    for pipe in (first, second):
        restored = pipe.restore(jax.random.key(0), data[0], layers, 2)
        for batch in data[2:]:
            restored, _ = pipe.step(restored, batch)
        check_close(pipe.params(pipe.drain(restored)), expected)


@pytest.mark.exhaustive
def test_averages_and_evaluation_are_those_of_one_stage():
    """Compare the moving average, and the loss of the newest weights and of the average."""
    data, results = batches(), []
    for replicas in ((1,), (1, 1, 2)):
        pipe = pipeline(replicas, {"schedule": "pipedream_2bw"}, ema_decay=0.5)
        state = pipe.init(jax.random.key(0), data[0])
        for batch in data:
            state, _ = pipe.step(state, batch)
        in_flight = pipe.evaluate(state, data[0])
        assert in_flight.version <= BATCHES
        state = pipe.drain(state)
        losses = [float(pipe.evaluate(state, data[0], weights=weights).loss) for weights in ("newest", "ema")]
        assert losses[0] != losses[1]
        check_copies(state)
        results.append((losses, pipe.params(state, weights="ema")))
    check_close(results[1], results[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("replicas", [(1, 1), pytest.param((2, 1), marks=pytest.mark.exhaustive)])
def test_masters_of_a_shared_parameter(replicas):
    """Each stage has one bfloat16 version and one master; a restored run is equal bit for bit."""
    stack, data, name = models.tied_stack(), models.masked_batches(3, 4), "noise shared w"
    plan = Plan.even(stack.ids, 2, "pipedream_2bw", 4, replicas=replicas)
    devices, precision = [jax.devices()[s] for s, _ in plan.workers], Precision(params="bfloat16")
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), devices, precision=precision)
    state, cut = pipe.init(jax.random.key(0), data[0]), pipe.snapshot(1)
    for batch in data:
        state, _ = pipe.step(state, batch, observe=cut)
    state = pipe.drain(state)
    check_copies(state, name)
    for worker in state.workers:
        assert worker.weights.read(worker.weights.newest)[name].dtype == jnp.bfloat16
        assert worker.optimizer[name].masters.dtype == worker.accumulators["gradients"][name].dtype == jnp.float32
    restored = pipe.restore(jax.random.key(0), data[0], cut.layers(), 1)
    for batch in data[1:]:
        restored, _ = pipe.step(restored, batch)
    check_equal(*(jax.tree.map(np.asarray, pipe.params(end)) for end in (pipe.drain(restored), state)))


@pytest.mark.exhaustive
def test_initial_parameters_of_a_tie_are_those_of_the_first_place():
    pipe, data = pipeline((1, 1), {"schedule": "gpipe"}), batches()
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5), pipe.params(pipe.init(jax.random.key(0), data[0])))
    for some in {"embed": params["embed"]}, params:
        state = pipe.init(jax.random.key(1), data[0], some)
        actual = pipe.params(state)
        np.testing.assert_array_equal(jax.tree.leaves(actual["head"])[-1], np.full((WORDS, WIDTH), 0.5))
        check_copies(state)
    with pytest.raises(
        InputError, match=r"^params: 'table/embedding' of layer 'head' is 'token/embedding' of layer 'embed' .*has no values"
    ):
        pipe.init(jax.random.key(1), data[0], {"head": params["head"]})
    other = jax.tree.map(lambda leaf: leaf + 1, params["head"])
    with pytest.raises(InputError, match=r"but has other values; give the same values, or leave out 'table/embedding' of layer 'head'$"):
        pipe.init(jax.random.key(1), data[0], params | {"head": other})


def test_bytes_count_one_array_in_a_stage_and_one_in_each_of_several():
    one, two = (pipeline((1,) * d, {"schedule": "gpipe"}).costs(batches()[0]) for d in (1, 2))
    size = WORDS * WIDTH * 8
    assert sum(cost.weights for cost in two) == one[0].weights + size
    assert sum(cost.optimizer for cost in two) == one[0].optimizer + size  # its momentum
    assert one[0].shared == ()
    assert [cost.shared for cost in two] == [(size,), (size,)]


# Programs -------------------------------------------------------------------------------------------------------------


@st.composite
def programs(draw) -> dict:
    """Draw the fields of a plan that can have ties, and the groups of stages that share parameters."""
    fields = dict(models.VARIANTS[draw(st.sampled_from(sorted(set(models.VARIANTS) - {"pipedream"})))])
    depth, r = draw(st.integers(2, 4)), draw(st.sampled_from([1, 1, 2]))
    replicas = draw(st.lists(st.sampled_from([1, r]), min_size=depth, max_size=depth))
    fields |= {"layers": "abcd", "num_stages": depth, "replicas": tuple(replicas), "microbatches": r * draw(st.integers(depth + 1, 9))}
    groups = draw(st.lists(st.sets(st.integers(0, depth - 1), min_size=2), min_size=1, max_size=2))
    return {"fields": fields, "shared": tuple(dict.fromkeys(tuple(sorted(stages)) for stages in groups))}


@settings(deadline=None, max_examples=40)
@given(chosen=programs(), batches=st.integers(1, 4), norm=st.booleans(), latency=st.sampled_from([0.0, 0.4]))
def test_programs_are_verified_and_without_a_flush_no_worker_waits(chosen, batches, norm, latency):
    plan, shared = Plan.even(**chosen["fields"]), chosen["shared"]
    costs = [StageCost(forward=1 + s / 3, shared=tuple(3 * (s in stages) for stages in shared)) for s in range(plan.depth)]
    with_ties = simulate(lower(plan, batches, global_norm=norm, shared_parameters=shared), costs, Link(latency=latency))
    without = simulate(lower(plan, batches), costs, Link(latency=latency))
    rows = [[[span[:3] for span in spans] for spans in prediction.timeline] for prediction in (with_ties, without)]
    assert rows[0] == rows[1]
    if max(plan.replicas) == 1 and not SCHEDULES[plan.schedule].flushes:
        assert [[span[:5] for span in spans] for spans in with_ties.timeline] == [
            [span[:5] for span in spans] for spans in without.timeline
        ]


def test_a_predicted_window_includes_the_exchange_of_shared_gradients():
    plan = Plan.even("abc", 3, "pipedream_2bw", 3)
    windows = [predict_window(plan, [StageCost(shared=each) for each in three], 6, 2) for three in ([()] * 3, [(100,), (0,), (100,)])]
    assert [window.held_bytes for window in windows] == [(0, 0, 0), (100, 0, 100)]  # after computations


@pytest.mark.parametrize("kind", [TakeShared, AddShared])
@pytest.mark.parametrize("worker", [0, 2])
def test_a_program_without_its_exchange_is_refused(kind, worker):
    program = lower(Plan.even("abc", 3, "pipedream_2bw", 3), 3, global_norm=True, shared_parameters=[(0, 2)])
    index = next(i for i, one in enumerate(program.instructions) if isinstance(one, kind) and one.worker == worker)
    remaining = (*program.instructions[:index], *program.instructions[index + 1 :])
    with pytest.raises(ProgramError, match=r"shared of microbatch|group 0 added of microbatch"):
        simulate(dataclasses.replace(program, instructions=remaining))


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        (
            [Tie(("embed", "token"), ("head", "table/embedding"))],
            r"layer 'embed' has no parameter 'token'; the nearest are token/embedding",
        ),
        ([Tie(("embed", "position"), ("head", "table/embedding"))], r"'table/embedding' of layer 'head' is float64\[7, 3\], 'position' of"),
        ([Tie(("a", "kernel"), ("single", "kernel"))], r"'kernel' of layer 'single' is float32\[3, 3\], 'kernel' of layer 'a' is float64"),
    ],
)
def test_ties_that_do_not_fit_the_parameters(ties, message):
    layers = {"embed": Embed, "a": linear, "single": Single, "head": Head}
    pipe = pipeline((1,), {"schedule": "gpipe"}, LayerStack(layers, ties=ties))
    with pytest.raises(InputError, match=f"ties: {message}"):
        pipe.init(jax.random.key(0), batches()[0])


A, B, C = ("embed", "token/embedding"), ("head", "table/embedding"), ("a", "kernel")


@pytest.mark.parametrize(
    ("ties", "message"),
    [
        ([Tie(("embe", "x"), B)], r"the model has no layer 'embe'; did you mean 'embed'\?"),
        ([Tie(A, B), Tie(B, C)], r"'table/embedding' of layer 'head' is the first place of one tie and the second of another; tie all"),
        ([Tie(A, B), Tie(B, A)], r"'token/embedding' of layer 'embed' is the first place of one tie and the second of another"),
        ([Tie(A, B), Tie(C, B)], r"'table/embedding' of layer 'head' is the second place of two ties"),
        (
            [Tie(("a", "b shared w"), C), Tie(("a shared b", "w"), A)],
            r"'w' of layer 'a shared b' and 'b shared w' of layer 'a' would both be named 'a shared b shared w'; rename a layer",
        ),
        ([Tie(A, A)], r"'token/embedding' of layer 'embed' is tied to itself"),
        ([(A, B)], r"expected a jpipe.Tie, found tuple; give Tie"),
        ([Tie(("embed", ""), B)], r"a place is \(layer id, path\), two non-empty strings, found"),
        ("embed", r"expected a list of jpipe.Tie, found str"),
        ({}, r"expected a list of jpipe.Tie, found dict"),
    ],
)
def test_invalid_ties(ties, message):
    with pytest.raises(InputError, match=f"ties: {message}"):  # past the types that tests check at run time
        Ties.__init__.__wrapped__(object.__new__(Ties), ties, ["embed", "a", "a shared b", "head"])


def test_parameters_that_are_one_array_have_no_path():
    bare = Layer(lambda key, x: (jnp.zeros(()), {}), lambda params, state, x, key, train: (x + params, state))
    stack = LayerStack({"one": bare, "two": bare}, ties=[Tie(("one", "array"), ("two", "array"))])
    with pytest.raises(InputError, match="ties: the parameters of layer 'one' are one array, which has no path; put it into a dict"):
        stack.specs(jax.ShapeDtypeStruct((), jnp.float64))


def test_weight_stashing_cannot_share_between_stages():
    with pytest.raises(
        InputError, match=r"ties: expected no early updates with \['embed shared token/embedding'\] under .*: the last stage"
    ):
        pipeline((1, 1), {"schedule": "pipedream"})
    pipeline((1,), {"schedule": "pipedream"})


@pytest.mark.parametrize("shared", [[(0,)], [(1, 0)], [(0, 3)], [(0, 0)]])
def test_impossible_groups_of_stages(shared):
    with pytest.raises(InputError, match="lower: shared_parameters: expected two or more stages of 3 in order, found"):
        lower(Plan.even("abc", 3, "gpipe", 2), 2, shared_parameters=shared)
