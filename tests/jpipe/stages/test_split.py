"""The two halves of a backward equal the whole, compute nothing twice, and store little in between."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import Layer, LayerStack, Pipeline, Precision, Tie
from jpipe.model.jaxprs._dependence import is_literal
from jpipe.model.jaxprs._wanted import evaluate_wanted
from jpipe.stages._bytes import nbytes
from jpipe.stages.functions._stage_functions import StageFunctions
from tests.jpipe import models, running

pytestmark = pytest.mark.usefixtures("lenient")

ROWS, STEPS, WIDTH = 4, 8, 16
HEADS = 2
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


def weights(key, **shapes) -> dict:
    keys = jax.random.split(key, len(shapes))
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def layer(apply, state=None, *, stochastic=False, **shapes) -> Layer:
    """Return a layer with weights of these shapes that computes `apply(params, state, x, key) -> (y, state)`."""
    return Layer(
        lambda key, x: (weights(key, **shapes), state or {}),
        lambda params, state, x, key, train: apply(params, state, x, key),
        stochastic=stochastic,
    )


def stateless(apply, **shapes) -> Layer:
    """Return a layer with weights of these shapes that computes `apply(params, x) -> y`."""
    return layer(lambda params, state, x, key: (apply(params, x), state), **shapes)


def _normed(scale, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale


def _attended(p, x):
    queries, keys, values = (part.reshape(*x.shape[:-1], HEADS, -1) for part in jnp.split(_normed(p["first"], x) @ p["qkv"], 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys)
    shares = jax.nn.softmax(jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, values).reshape(x.shape) @ p["out"]


def _gpt_block(p, x):
    x = x + _attended(p, x)
    return x + jax.nn.gelu(_normed(p["second"], x) @ p["up"] + p["bias"]) @ p["down"]


BLOCK = {
    "first": (WIDTH,),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "second": (WIDTH,),
    "up": (WIDTH, 4 * WIDTH),
    "bias": (4 * WIDTH,),
    "down": (4 * WIDTH, WIDTH),
}


def _dropped_block(p, state, x, key):
    y = _gpt_block(p, x)
    if key is None:
        return x + y, state
    return x + jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0), state


def _in_bfloat16(p, x):
    return _gpt_block(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16)).astype(x.dtype)


def _convolved(p, state, x, key):
    """Apply a residual convolution with batch normalization; its running mean is layer state."""
    y = jax.lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))
    mean = y.mean((0, 1))
    y = (y - mean) * jax.lax.rsqrt(jnp.square(y - mean).mean((0, 1)) + 1e-5) * p["scale"]
    return x + jax.nn.relu(y), {"mean": 0.9 * state["mean"] + 0.1 * mean}


def _lstm(p, x):
    def step(carry, inputs):
        h, c = carry
        i, f, g, o = jnp.split(inputs @ p["input"] + h @ p["hidden"] + p["bias"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[0], WIDTH), x.dtype)
    return jax.lax.scan(step, (start, start), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def _scanned_blocks(p, x):
    return jax.lax.scan(lambda h, block: (_gpt_block(block, h), None), x, p)[0]


def _nested_scans(p, x):
    def outer(h, w):
        return jax.lax.scan(lambda g, _: (jnp.tanh(g @ w), None), h, length=2)[0], None

    return jax.lax.scan(outer, x, p["w"])[0]


def _branched(p, x):
    """Compute one of two products, chosen by the data; the body of a `cond` is not split."""
    return jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ p["a"]), lambda x: jnp.sin(x @ p["b"]), x)


def _routed(p, x):
    """Send each row to one of the experts, gathering the expert's weights."""
    expert = jnp.argmax(x.mean(1) @ p["router"], axis=-1)
    share = jax.nn.softmax(x.mean(1) @ p["router"]).max(-1)
    return x + share[:, None, None] * jnp.einsum("bsw,bwv->bsv", x, p["experts"][expert])


@jax.custom_vjp
def _clipped(x):
    return jnp.tanh(x)


_clipped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * (1 - jnp.square(jnp.tanh(x))),))


def _custom(p, x):
    return _clipped(_clipped(x @ p["w"]) @ p["w"])  # the weights twice


SQUARE = (WIDTH, WIDTH)
LAYERS = {
    "dense": lambda: stateless(lambda p, x: jnp.tanh(x @ p["w"] + p["b"]), w=SQUARE, b=(WIDTH,)),
    "gpt": lambda: stateless(_gpt_block, **BLOCK),
    "dropout": lambda: layer(_dropped_block, stochastic=True, **BLOCK),
    "bfloat16": lambda: stateless(_in_bfloat16, **BLOCK),
    "convolution": lambda: layer(_convolved, {"mean": jnp.zeros(WIDTH)}, kernel=(3, WIDTH, WIDTH), scale=(WIDTH,)),
    "lstm": lambda: stateless(_lstm, input=(WIDTH, 4 * WIDTH), hidden=(WIDTH, 4 * WIDTH), bias=(4 * WIDTH,)),
    "scanned": lambda: stateless(_scanned_blocks, **{name: (3, *shape) for name, shape in BLOCK.items()}),
    "nested": lambda: stateless(_nested_scans, w=(3, *SQUARE)),
    "cond": lambda: stateless(_branched, a=SQUARE, b=SQUARE),
    "experts": lambda: stateless(_routed, router=(WIDTH, 3), experts=(3, *SQUARE)),
    "custom_vjp": lambda: stateless(_custom, w=SQUARE),
}
EMBEDDING = stateless(lambda p, x: p["table"][x], table=(11, WIDTH))
PAIRED = stateless(lambda p, x: {"a": (x @ p["w"], jnp.arange(3)), "b": x}, w=SQUARE)
UNPAIRED = stateless(lambda p, x: jnp.tanh(x["a"][0] @ p["w"]) + x["b"] * x["a"][1].sum(), w=SQUARE)


def loss(y, labels):
    return jnp.square(y - labels).sum(), 1.0 * labels.size


def functions_of(layers: dict, sizes=None, *, inputs=None, recompute="none", **options) -> list[StageFunctions]:
    """Return the stage functions of these layers, by default with one layer per stage."""
    stack = LayerStack(layers, ties=options.pop("ties", ()))
    plan = models.cut(stack.ids, sizes or [1] * len(stack.ids), microbatches=2, recompute=recompute, schedule="zb_h1")
    x = np.zeros((2 * ROWS, STEPS, WIDTH), np.float32) if inputs is None else inputs
    pipe = Pipeline(stack, plan, loss, optax.sgd(0.1), **options)
    return pipe.stage_functions((x, np.zeros((2 * ROWS, STEPS, WIDTH), np.float32)))


def middle(kind: str, recompute: str = "none", **options) -> StageFunctions:
    """Return the functions of a middle stage with two layers of this kind."""
    layers = {"in": LAYERS["dense"](), "one": LAYERS[kind](), "two": LAYERS[kind](), "out": LAYERS["dense"]()}
    return functions_of(layers, (1, 2, 1), recompute=recompute, **options)[1]


def filled(specs, seed: int = 0):
    """Return random arrays of these shapes and dtypes."""
    draw = np.random.default_rng(seed)

    def fill(spec):
        if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if jnp.issubdtype(spec.dtype, jnp.inexact):
            return jnp.asarray(draw.normal(0.0, 0.5, spec.shape), spec.dtype)
        return jnp.asarray(draw.integers(0, 3, spec.shape), spec.dtype)

    return jax.tree.map(fill, specs)


class Run:
    """A forward of a stage and the inputs of its backward, on random arrays."""

    def __init__(self, f: StageFunctions) -> None:
        self.f = f
        self.params, self.rng, self.sums = filled(f.specs.params, 1), filled(f.specs.rng), filled(f.accumulators_spec, 2)
        self.arguments = filled(f.specs.arguments, 3)
        self.scale = None if f.scale_spec is None else jnp.float32(64.0)
        self.y, self.new_state, self.saved = jax.jit(f.forward)(self.params, *self.arguments, self.rng)
        self.kept = f.residuals.keep(self.arguments, (self.y, self.new_state))
        self.message = self.y if f.last else filled(f.between_specs[2], 4)

    def whole(self):
        return self.params, self.kept, self.saved, self.message, self.sums, self.rng, self.scale

    def first(self):
        return self.params, self.kept, self.saved, self.message, self.rng, self.scale

    def second(self, stash):
        return self.params, self.f.halves.late_inputs(self.kept, self.saved, self.message), stash, self.sums, self.rng, self.scale

    def in_halves(self):
        message, stash = jax.jit(self.f.backward_input)(*self.first())
        return message, jax.jit(self.f.backward_weight)(*self.second(stash))


def check_close(actual, expected, tolerance: float = 1e-3) -> None:
    """Check that two trees are equal up to rounding: XLA may fuse the same operations differently."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=tolerance, atol=tolerance / 10)


def one_by_one(function, arguments):
    """Evaluate a function, compiling each operation alone, so that equal ones give equal bits; a loop is one operation."""
    traced, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves, treedef = jax.tree.flatten(results)
    return treedef.unflatten(evaluate_wanted(traced.jaxpr, traced.consts, jax.tree.leaves(arguments), [True] * len(leaves)))


def check_halves(f: StageFunctions, tolerance: float = 1e-3) -> Run:
    """Check that both halves equal the whole backward: up to rounding if compiled, and bit for bit operation by operation."""
    run = Run(f)
    check_close(run.in_halves(), jax.jit(f.backward)(*run.whole()), tolerance)
    message, stash = one_by_one(f.backward_input, run.first())
    actual, expected = (message, one_by_one(f.backward_weight, run.second(stash))), one_by_one(f.backward, run.whole())
    if has_scan(f.backward, run.whole()):  # each half has a loop of its own, which is compiled as a whole
        check_close(actual, expected, tolerance)
    else:
        running.check_equal(actual, expected)
    return run


def has_scan(function, arguments) -> bool:
    """Return whether a function contains a loop."""
    return "scan[" in str(jax.make_jaxpr(function)(*arguments))


def products(function, arguments) -> int:
    """Count the products and convolutions that the results of a function depend on, for each step of a loop."""
    return _products(jax.make_jaxpr(function)(*arguments).jaxpr)


def _products(jaxpr) -> int:
    live, count = {var for var in jaxpr.outvars if not is_literal(var)}, 0
    for equation in reversed(jaxpr.eqns):
        if any(var in live for var in equation.outvars):
            live.update(var for var in equation.invars if not is_literal(var))
            bodies = [getattr(value, "jaxpr", value) for value in equation.params.values()]
            inner = sum(_products(body) for body in bodies if hasattr(body, "eqns"))
            count += (equation.primitive.name in PRODUCTS) + equation.params.get("length", 1) * inner
    return count


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        ("gpt", "none"),
        *((kind, "none") for kind in LAYERS if kind != "gpt"),
        *((kind, "full") for kind in ("gpt", "convolution", "lstm")),
        ("convolution", "dots_saveable"),
    ],
)
def test_halves_equal_the_whole_backward(kind, recompute):
    check_halves(middle(kind, recompute))


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("kind", ["lstm", "scanned", "nested"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.usefixtures("float64")
def test_halves_of_loops_equal_the_whole_backward(kind, recompute):
    """The comparison is in float64 because a compiled loop rounds differently from its two halves."""
    run = Run(middle(kind, recompute, inputs=np.zeros((2 * ROWS, STEPS, WIDTH))))
    assert {leaf.dtype for leaf in jax.tree.leaves(run.params)} == {np.dtype(np.float64)}
    check_close(run.in_halves(), jax.jit(run.f.backward)(*run.whole()), tolerance=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [
        Precision(params="bfloat16"),
        pytest.param(Precision(loss_scale=8.0), marks=pytest.mark.exhaustive),
        pytest.param(Precision(params="float16", loss_scale="dynamic"), marks=pytest.mark.exhaustive),
    ],
    ids=["masters", "fixed scale", "dynamic scale"],
)
def test_halves_in_another_precision_equal_the_whole_backward(precision):
    for f in functions_of({f"layer{n}": LAYERS["dense"]() for n in range(3)}, precision=precision):
        check_halves(f, tolerance=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), pytest.param((1, 1, 2), marks=pytest.mark.exhaustive)])
def test_halves_with_a_shared_weight_equal_the_whole_backward(sizes):
    """Both uses of the weight are in one stage, or in two."""
    layers = {name: LAYERS["dense"]() for name in ("in", "one", "two", "out")}
    for f in functions_of(layers, sizes, ties=[Tie(("one", "w"), ("two", "w"))]):
        check_halves(f)


def _merged(p, x):
    """Apply a weight that is the product of two others, as with LoRA."""
    return jnp.tanh(x @ (p["a"] @ p["b"]))


def test_a_product_of_weights_is_not_computed_twice():
    """The first half passes its result to the second, though the second half has the weights."""
    layers = {"in": LAYERS["dense"](), "merged": stateless(_merged, a=(WIDTH, 2), b=(2, WIDTH)), "out": LAYERS["dense"]()}
    run = check_halves(functions_of(layers, recompute="full")[1])
    _, stash = jax.eval_shape(run.f.backward_input, *run.first())
    parts = products(run.f.backward_input, run.first()), products(run.f.backward_weight, run.second(stash))
    assert sum(parts) == products(run.f.backward, run.whole())


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("kind", "of_inputs", "of_weights"), [("gpt", 16, 8), ("convolution", 2, 2)])
def test_no_product_is_computed_twice(kind, of_inputs, of_weights, recompute):
    """The second half computes the products of weight gradients, the first half all other products."""
    run = Run(middle(kind, recompute))
    _, stash = jax.eval_shape(run.f.backward_input, *run.first())
    whole = products(run.f.backward, run.whole())
    first, second = products(run.f.backward_input, run.first()), products(run.f.backward_weight, run.second(stash))
    assert second == of_weights
    assert first == of_inputs if recompute == "none" else first + second == whole


@pytest.mark.parametrize(("kind", "most"), [("gpt", 66_308), ("lstm", 24_580)])
def test_less_is_stored_between_the_halves_than_before_the_first(kind, most):
    """The LSTM would store more if every array that the second half reads were stored in place of the cheapest cut."""
    f = middle(kind)
    assert nbytes(f.halves.stash_spec) <= most < nbytes(f.between_specs[:2]) / 2


def test_the_first_stage_has_nothing_in_its_first_half():
    f = functions_of({"in": EMBEDDING, "out": LAYERS["dense"]()}, inputs=np.zeros((2 * ROWS, STEPS), np.int32))[0]
    run = check_halves(f)
    (gradient, _), stash = f.backward_input(*run.first())
    assert (gradient, list(stash)) == ([], [])


def test_the_last_stage_runs_its_forward_with_the_first_half():
    f = functions_of({"in": LAYERS["dense"](), "out": LAYERS["dense"]()})[-1]
    run = Run(f)
    message, state, extra = jax.jit(f.forward_backward_input)(run.params, *run.arguments, run.rng, run.scale)
    sums = jax.jit(f.backward_weight)(run.params, *f.halves.stash_of(run.arguments, state, extra), run.sums, run.rng, run.scale)
    whole = jax.jit(f.forward_backward)(run.params, *run.arguments, run.sums, run.rng, run.scale)
    check_close((message, sums, state), whole)


@jax.custom_vjp
def _reporting(x):
    return x


def _report(_, gradient):
    jax.debug.callback(lambda _: None, gradient.sum())
    return (gradient,)


_reporting.defvjp(lambda x: (x, None), _report)


def _reported(p, x):
    return jnp.tanh(_reporting(x) @ p["w"] + p["b"])


@pytest.mark.slow
def test_a_layer_whose_backward_cannot_be_split():
    """A warning names the layer, its stage runs the whole backward early, and the numbers are equal."""
    layers = {
        "in": LAYERS["dense"](),
        "reported": stateless(_reported, w=SQUARE, b=(WIDTH,)),
        "out": LAYERS["dense"](),
    }
    stack, params = LayerStack(layers), {}
    batch = tuple(np.random.default_rng(0).normal(size=(2, 2 * ROWS, STEPS, WIDTH)).astype(np.float32))
    for schedule in ("zb_h1", "pipedream_flush"):
        pipe = Pipeline(stack, models.cut(stack.ids, (1, 1, 1), microbatches=2, schedule=schedule), loss, optax.sgd(0.1))
        warning = "^layer 'reported': its backward cannot be split: it has side effects: .*; the whole backward runs instead of"
        with pytest.warns(UserWarning, match=warning) if schedule == "zb_h1" else contextlib.nullcontext():
            state = pipe.init(jax.random.key(0), batch)
        state, _ = pipe.step(state, batch)
        params[schedule] = pipe.params(state)
    check_close(params["zb_h1"], params["pipedream_flush"])


def test_messages_of_several_arrays():
    f = functions_of({"in": LAYERS["dense"](), "pair": PAIRED, "unpair": UNPAIRED, "out": LAYERS["dense"]()})
    check_halves(f[1])
    check_halves(f[2])
