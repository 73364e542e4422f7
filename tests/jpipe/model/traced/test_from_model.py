"""Whole models cut into layers: where, under which names, and that the layers compute what the model computes."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jpipe
from jpipe import InputError, LayerStack


@pytest.fixture(autouse=True)
def promotion():
    """Models of users promote dtypes and ranks as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


X = jnp.linspace(-1, 1, 4 * 8).reshape(4, 8)


class Norm(nnx.Module):
    """Normalization that computes in the dtype of its input."""

    def __init__(self):
        self.scale = nnx.Param(jnp.linspace(0.5, 1.5, 8))

    def __call__(self, x):
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * self.scale[...]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = Norm()
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, mask):
        return x + self.drop(self.down(jnp.tanh(self.up(self.norm(x))))) * mask


class Tied(nnx.Module):
    """A tied embedding, a mask from the tokens that is larger than they are, dropout, blocks."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.pos = nnx.Param(jnp.ones((6, 8)) / 8)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.norm = Norm()

    def __call__(self, tokens):
        mask = jnp.broadcast_to((tokens > 0)[..., None], (*tokens.shape, 8)).astype(jnp.float32)
        x = self.embed(tokens) + self.pos[...][: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


class UNet(nnx.Module):
    """Skips across layers, and batch statistics."""

    def __init__(self, rngs):
        self.a, self.b, self.c = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs), nnx.Linear(4, 8, rngs=rngs)
        self.norm, self.end = nnx.BatchNorm(8, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        a = jnp.tanh(self.norm(self.a(x)))
        return self.end(jnp.concatenate([self.c(jnp.tanh(self.b(a))), a], -1))


class Residual(linen.Module):
    """A Linen module with compact calls, batch statistics and dropout."""

    @linen.compact
    def __call__(self, x, train: bool):
        for _ in range(3):
            x = x + linen.Dense(8)(jnp.tanh(linen.BatchNorm(use_running_average=not train)(x)))
            x = linen.Dropout(0.25, deterministic=not train)(x)
        return linen.Dense(4)(x)


TOKENS = jnp.arange(24).reshape(4, 6) % 11
MODELS = {
    "tied": (lambda rngs: Tied(rngs), TOKENS),
    "unet": (lambda rngs: UNet(rngs), X),
    "residual": (Residual(), X),
}


def initialized(stack, x, key):
    specs = stack.specs(x)
    layers = {layer_id: stack.init_layer(layer_id, key, specs[layer_id].x) for layer_id in stack.ids}
    return {layer_id: params for layer_id, (params, _) in layers.items()}, {layer_id: state for layer_id, (_, state) in layers.items()}


def in_all_places(stack, entries):
    return {layer_id: stack.ties.whole(layer_id, entries) for layer_id in stack.ids}


def by_path(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("granularity", ["block", "finest"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_what_the_model_computes(name, train, granularity):
    """Outputs, gradients and new layer state, with the random numbers of the whole model."""
    model, x = MODELS[name]
    stack, key = LayerStack.from_model(model, x, granularity=granularity), jax.random.key(7)
    params, state = initialized(stack, x, key)
    whole, (whole_params, whole_state) = stack.traced.whole.layer, stack.traced.join(params, state)

    def in_layers(entries):
        y, new_state = stack.apply(stack.ids, in_all_places(stack, entries), state, x, key=key, microbatch=3, train=train)
        return jnp.sin(y).sum(), new_state

    def at_once(params):
        y, new_state = whole.apply(params, whole_state, x, stack.microbatch_key(key, 3, train), train)
        return jnp.sin(y).sum(), new_state

    (value, new_state), gradients = jax.jit(jax.value_and_grad(in_layers, has_aux=True))(stack.ties.split(params))
    (expected, expected_state), expected_gradients = jax.jit(jax.value_and_grad(at_once, has_aux=True))(whole_params)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    joined = stack.traced.join(in_all_places(stack, gradients), new_state)
    for (path, actual), wanted in zip(by_path(joined).items(), jax.tree.leaves((expected_gradients, expected_state)), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_are_those_of_the_model_with_the_same_key(name):
    model, x = MODELS[name]
    stack, key = LayerStack.from_model(model, x), jax.random.key(7)
    params, state = stack.traced.join(*initialized(stack, x, key))
    expected_params, expected_state = stack.traced.whole.layer.init(key, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), (params, state), (expected_params, expected_state))
    if name == "residual":
        variables = model.init(key, x, train=True)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), params, variables["params"])
    else:
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            params,
            nnx.to_pure_dict(nnx.state(model(nnx.Rngs(key)), nnx.Param)),
        )


def test_one_layer_for_each_block_named_by_its_parameters():
    stack = LayerStack.from_model(MODELS["tied"][0], TOKENS)
    assert stack.ids == ("embed", "blocks.0", "blocks.1", "blocks.2", "norm")
    specs = stack.specs(TOKENS)
    assert specs["blocks.1"].params.keys() == {"norm", "up", "down"}
    assert specs["norm"].params.keys() == {"norm", "embed"}
    (name,) = stack.ties.first
    assert stack.ties.first[name] == ("embed", "embed/embedding")
    assert stack.ties.shared["norm"] == {"embed/embedding": name}


def test_a_mask_is_made_again_from_what_has_the_fewest_bytes():
    specs = LayerStack.from_model(MODELS["tied"][0], TOKENS).specs(TOKENS)
    for layer_id in ("blocks.0", "blocks.1", "blocks.2"):
        assert sorted(str(leaf.dtype) for leaf in jax.tree.leaves(specs[layer_id].x)) == ["bool", "float32"]
        assert sorted(leaf.shape for leaf in jax.tree.leaves(specs[layer_id].x)) == [(4, 6), (4, 6, 8)]
    assert specs["norm"].x.shape == (4, 6, 8)  # no later layer reads the mask


def test_a_skip_connection_is_carried_across_the_layers_between():
    stack = LayerStack.from_model(MODELS["unet"][0], X)
    specs = stack.specs(X)
    assert stack.ids == ("a", "b", "c", "end")
    assert [leaf.shape for leaf in jax.tree.leaves(specs["c"].x)] == [(4, 8), (4, 4)]
    assert specs["a"].params.keys() == {"a", "norm"}
    assert specs["a"].state.keys() == {"mean", "var"}


class ConvNet(linen.Module):
    """Convolutions and norms without blocks, as in a tutorial."""

    norm_first: bool = False

    @linen.compact
    def __call__(self, x):
        for width in (8, 8, 16):
            x = linen.GroupNorm(2)(x) if self.norm_first else x
            x = linen.Conv(width, (3, 3))(x)
            x = x if self.norm_first else linen.relu(linen.GroupNorm(2)(x))
        return linen.Dense(4)(linen.LayerNorm()(x.mean((1, 2))))


class Normalized(linen.Module):
    """Kernels that are normalized, each with a scale of its own."""

    @linen.compact
    def __call__(self, x):
        for _ in range(3):
            x = linen.tanh(linen.WeightNorm(linen.Dense(8))(x))
        return linen.Dense(2)(x)


class Stages(nnx.Module):
    """Modules with names in place of numbers, and a small head of several."""

    def __init__(self, rngs):
        def stage(*widths):
            norm = nnx.LayerNorm(widths[-1], rngs=rngs)
            return nnx.Dict(first=nnx.Linear(*widths, rngs=rngs), norm=norm, second=nnx.Linear(widths[-1], widths[-1], rngs=rngs))

        self.low, self.middle, self.high, self.top = stage(8, 8), stage(8, 8), stage(8, 8), stage(8, 2)

    def __call__(self, x):
        for stage in (self.low, self.middle, self.high, self.top):
            x = stage["second"](jnp.tanh(stage["norm"](stage["first"](x))))
        return x


IMAGES = jnp.ones((2, 4, 4, 2))


@pytest.mark.parametrize(
    ("model", "x", "ids"),
    [
        (ConvNet(), IMAGES, "Conv_0 Conv_1 Conv_2 Dense_0"),
        (ConvNet(norm_first=True), IMAGES, "Conv_0 Conv_1 Conv_2 Dense_0"),
        (Normalized(), X, "Dense_0 Dense_1 Dense_2 Dense_3"),
        (lambda rngs: Stages(rngs), X, "low.first low.second middle.first middle.second high.first high.second top"),
    ],
)
def test_norms_and_scales_are_no_layers_of_their_own(model, x, ids):
    stack = LayerStack.from_model(model, x)
    assert " ".join(stack.ids) == ids
    assert len(LayerStack.from_model(model, x, granularity="finest").ids) > len(stack.ids)


def test_the_finest_layers_are_smaller():
    ids = LayerStack.from_model(MODELS["tied"][0], TOKENS, granularity="finest").ids
    assert len(ids) > 5
    assert {name.split(".")[0] for name in ids} == {"embed", "pos", "blocks", "norm", "embed_2"}


def test_cuts_by_paths_and_by_marks_decide_alone():
    stack = LayerStack.from_model(MODELS["tied"][0], TOKENS, cuts=["blocks.1", "norm"])
    assert stack.ids == ("blocks.0", "blocks.1", "norm")

    def model(params, x):
        for number, layer in enumerate(params):
            x = jnp.tanh(x @ layer["w"])
            x = jpipe.cut(x, f"part {number}") if number in (1, 3) else x
        return x

    params = [{"w": jnp.eye(8) * number} for number in range(1, 7)]
    stack = LayerStack.from_function(model, params, X)
    assert stack.ids == ("part 1", "part 3", "4")
    np.testing.assert_array_equal(stack.traced.whole.layer.apply(params, {}, X, None, True)[0], jax.jit(model)(params, X))


def test_equal_layers_are_traced_once():
    params = [{"w": jnp.eye(8)} for _ in range(6)]
    stack = LayerStack.from_function(lambda params, x: functools.reduce(lambda x, layer: jnp.tanh(x @ layer["w"]), params, x), params, X)
    assert stack.ids == ("0", "1", "2", "3", "4", "5")
    specs = stack.specs(X)
    assert {stack.traced.first_equal(layer_id, spec.x) for layer_id, spec in specs.items()} == {"0"}


def test_inputs_of_other_shapes_are_cut_at_the_same_places():
    stack = LayerStack.from_model(MODELS["tied"][0], TOKENS)
    longer = jnp.zeros((2, 5), jnp.int32)
    with pytest.raises(InputError, match="does not come from any inputs of the model"):
        stack.specs(jnp.zeros((2, 5, 8)), ["blocks.0"])
    specs = stack.specs(longer[:, :6])
    assert specs["norm"].output.shape == (2, 5, 11)
    assert specs["blocks.1"].params == stack.specs(TOKENS)["blocks.1"].params


@pytest.mark.slow
def test_weights_of_a_built_model_are_the_initial_ones_and_come_back():
    model = UNet(nnx.Rngs(3))
    model.norm.mean.set_value(jnp.arange(8.0))
    stack = LayerStack.from_model(model, X)
    plan = jpipe.Plan.even(stack.ids, num_stages=2, schedule="pipedream_flush", microbatches=2)
    pipe = jpipe.Pipeline(stack, plan, lambda y, labels: (((y - labels) ** 2).sum(), y.size), optax.sgd(0.1))
    batch = jnp.concatenate([X, X]), jnp.zeros((8, 8))
    state = pipe.init(jax.random.key(0), batch)
    again = pipe.model(state)
    assert isinstance(again, UNet)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(again)), nnx.to_pure_dict(nnx.state(model)))
    state, _ = pipe.step(state, batch)
    trained = pipe.model(state)
    assert float(abs(trained.norm.mean.get_value() - jnp.arange(8.0)).max()) > 0.01  # the model's own statistics went on
    assert float(abs(model.norm.mean.get_value() - jnp.arange(8.0)).max()) == 0
    trained.eval()
    assert {leaf.device for leaf in jax.tree.leaves(nnx.state(trained))} == {jax.devices()[0]}
    np.testing.assert_allclose(trained(batch[0]), pipe.predict(state, batch[0]), rtol=1e-6, atol=1e-6)
    params = pipe.params(state)
    jax.tree.map(np.testing.assert_array_equal, params, nnx.to_pure_dict(nnx.state(trained, nnx.Param)))
    resumed = pipe.init(jax.random.key(0), batch, params=params)
    jax.tree.map(np.testing.assert_array_equal, pipe.params(resumed), params)
    jax.tree.map(np.testing.assert_array_equal, pipe.params(pipe.init(jax.random.key(0), batch, params=trained)), params)


def test_an_abstract_model_needs_parameters():
    abstract = nnx.eval_shape(lambda: UNet(nnx.Rngs(0)))
    stack = LayerStack.from_model(abstract, X)
    plan = jpipe.Plan.even(stack.ids, num_stages=2, schedule="gpipe", microbatches=2)
    pipe = jpipe.Pipeline(stack, plan, lambda y, labels: (((y - labels) ** 2).sum(), y.size), optax.sgd(0.1))
    batch = jnp.concatenate([X, X]), jnp.zeros((8, 8))
    with pytest.raises(InputError, match="no arrays to begin with"):
        pipe.init(jax.random.key(0), batch)
    model = UNet(nnx.Rngs(3))
    state = pipe.init(jax.random.key(0), batch, params=model)
    jax.tree.map(np.testing.assert_array_equal, pipe.params(state), nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda p, x: jax.nn.relu(x @ p[0] @ p[1]) @ p[1], None),
        (lambda p, x: jnp.tanh(x @ p[0]), "expected a model of several modules with parameters"),
        (lambda p, x: noisy(x @ p[0], ordered=True) @ p[1], "ordered side effects"),
        (lambda p, x: (x @ p[0])[x[:, 0] > 0] @ p[1], "cannot be traced"),
    ],
)
def test_models_that_cannot_be_cut_are_rejected_by_name(model, message):
    params = [jnp.eye(8), jnp.eye(8)]
    if message is None:
        assert LayerStack.from_function(model, params, X).ids == ("0", "1", "1_2")
        return
    with pytest.raises(InputError, match=message):
        LayerStack.from_function(model, params, X)


class Small(nnx.Module):
    """Two layers with something between them."""

    def __init__(self, sizes, between, rngs):
        self.first, self.last = nnx.Linear(*sizes[:2], rngs=rngs), nnx.Linear(*sizes[1:], rngs=rngs)
        self.between = between

    def __call__(self, x):
        return self.last(self.between(self.first(x)))


class SmallLinen(linen.Module):
    between: object

    @linen.compact
    def __call__(self, x):
        return linen.Dense(1, name="last")(self.between(linen.Dense(32, name="first")(x)))


class SmallEquinox(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear
    between: object = eqx.field(static=True)

    def __call__(self, x):
        return jax.vmap(self.last)(self.between(jax.vmap(self.first)(x)))


def small_function(between):
    return lambda p, x: between(x @ p["first"]["w"] + p["first"]["b"]) @ p["last"]["w"]


BETWEEN = {
    "gelu": nnx.gelu,
    "exact gelu": functools.partial(nnx.gelu, approximate=False),
    "swish": nnx.swish,
    "softplus": nnx.softplus,
    "mish": jax.nn.mish,
    "norm": lambda x: nnx.LayerNorm(x.shape[-1], rngs=nnx.Rngs(0))(x),
    "two halves": lambda x: nnx.glu(jnp.concatenate([x, x], -1)),
    "nested": jax.jit(lambda x: jax.jit(nnx.gelu)(x) + sum(jnp.sin(k * x) for k in range(9))),
    "recomputed": jax.checkpoint(nnx.gelu),
}


@pytest.mark.thinned(most=4)
@pytest.mark.parametrize("name", BETWEEN)
def test_the_smallest_models_have_a_layer_for_each_module(name):
    between, x = BETWEEN[name], X[:, :4]
    models = [Small(sizes, between, nnx.Rngs(0)) for sizes in ((4, 32, 1), (4, 2, 64), (4, 1, 1))]
    models.append(Small((4, 32, 1), nnx.Sequential(nnx.LayerNorm(32, rngs=nnx.Rngs(0)), between), nnx.Rngs(0)))
    keys = jax.random.split(jax.random.key(0))
    models += [SmallLinen(between), SmallEquinox(eqx.nn.Linear(4, 32, key=keys[0]), eqx.nn.Linear(32, 1, key=keys[1]), between)]
    ids = [LayerStack.from_model(model, x).ids for model in models]
    params = {"first": {"w": jnp.ones((4, 32)), "b": jnp.ones(32)}, "last": {"w": jnp.ones((32, 1))}}
    assert [*ids, LayerStack.from_function(small_function(between), params, x).ids] == [("first", "last")] * (len(models) + 1)


class Nested(nnx.Module):
    """All modules in one block."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Small((8, 32, 8), nnx.gelu, rngs)])

    def __call__(self, x):
        return self.blocks[0](x)


def test_one_block_a_norm_and_small_neighbours_have_two_layers_at_least():
    rngs = nnx.Rngs(0)
    assert LayerStack.from_model(Nested(rngs), X).ids == ("blocks.0.first", "blocks.0.last")
    assert LayerStack.from_model(nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)), X).ids == (
        "layers.0",
        "layers.1",
    )
    sizes = (8, 1, 300, 1, 1)
    narrow = [part for pair in itertools.pairwise(sizes) for part in (nnx.Linear(*pair, rngs=rngs), nnx.gelu)]
    assert len(LayerStack.from_model(nnx.Sequential(*narrow), X).ids) > 1


def test_a_small_model_trains_in_two_stages_as_in_one():
    model = Small((8, 32, 1), nnx.gelu, nnx.Rngs(0))
    stack = LayerStack.from_model(model, X[:2])
    pipe = jpipe.Pipeline(
        stack,
        jpipe.Plan.even(stack.ids, 2, "pipedream_flush", 2),
        lambda y, labels: (((y - labels) ** 2).sum(), labels.size),
        optax.sgd(0.1),
    )
    state, metrics = pipe.step(pipe.init(jax.random.key(0), (X, X[:, :1])), (X, X[:, :1]))
    graph, params = nnx.split(model)
    expected, gradients = jax.value_and_grad(lambda p: ((nnx.merge(graph, p)(X) - X[:, :1]) ** 2).mean())(params)
    np.testing.assert_allclose(float(metrics.losses[0]), expected, rtol=1e-5)
    trained = jax.tree.leaves(nnx.state(pipe.model(state)))
    for new, old, g in zip(trained, jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(new, old - 0.1 * g, rtol=1e-5, atol=1e-6)


def noisy(x, ordered):
    jax.debug.print("{}", x.sum(), ordered=ordered)
    return x


def counting(params, state, x):
    """Scale by a counter in each layer; return a constant and a trained NumPy scalar, too."""
    for w in params["layers"]:
        x = jnp.tanh(x @ w) * (1 + state["count"])
    return {"y": x * params["scale"], "constant": jnp.float32(3.0)}, {"count": state["count"] + 1}


@pytest.mark.exhaustive
def test_a_counter_that_several_layers_read_counts_in_each():
    params = {"layers": [jnp.eye(8) * k for k in (0.5, 1.0, 1.5)], "scale": np.float32(1.5)}
    stack = LayerStack.from_function(counting, params, X[:2], state={"count": np.zeros((), np.float32)})
    assert stack.ids[:2] == ("layers.0", "layers.1")
    plan = jpipe.Plan.even(stack.ids, num_stages=len(stack.ids), schedule="pipedream_flush", microbatches=2)
    pipe = jpipe.Pipeline(stack, plan, lambda outputs, labels: ((outputs["y"] - labels).sum(), labels.size), optax.sgd(0.1))
    state, metrics = pipe.step(pipe.init(jax.random.key(0), (X, 0 * X)), (X, 0 * X))

    def whole(params):
        count, total = {"count": jnp.float32(0)}, 0.0
        for rows in (X[:2], X[2:]):
            outputs, count = counting(params, count, rows)
            total += outputs["y"].sum()
        return total / X.size

    expected, gradients = jax.value_and_grad(whole)(params)
    np.testing.assert_allclose(float(metrics.losses[0]), expected, rtol=1e-5)
    trained, counted = pipe.model(state)
    jax.tree.map(lambda new, old, g: np.testing.assert_allclose(new, old - 0.1 * g, rtol=1e-5, atol=1e-6), trained, params, gradients)
    assert float(counted["count"]) == 2


def centered(params, state, x, train):
    """Count forwards in each layer; only evaluation reads the counts, as in Equinox's batch normalization."""
    counts = []
    for w, count in zip(params, state, strict=True):
        x = jnp.tanh(x @ w) if train else jnp.tanh(x @ w) / count
        counts.append(count + 1)
    return x, counts


def test_state_that_only_evaluation_reads_is_in_the_layer_that_reads_it():
    params, state = [jnp.eye(8) * k for k in (0.5, 1.0, 1.5)], [jnp.float32(k) for k in (1, 2, 3)]
    stack = LayerStack.from_function(centered, params, X[:2], state=state)
    plan = jpipe.Plan.even(stack.ids, num_stages=3, schedule="pipedream_flush", microbatches=2)
    pipe = jpipe.Pipeline(stack, plan, lambda outputs, labels: ((outputs - labels).sum(), labels.size), optax.sgd(0.1))
    trained, _ = pipe.step(pipe.init(jax.random.key(0), (X, 0 * X)), (X, 0 * X))
    weights, counts = pipe.model(trained)
    assert [float(count) for count in counts] == [3, 4, 5]
    expected = centered(weights, counts, X, False)[0].mean()
    np.testing.assert_allclose(float(pipe.evaluate(trained, (X, 0 * X)).loss), expected, rtol=1e-5)


def averaged(params, x):
    """Divide by the length of the input after a sum that removes it."""
    return jnp.tanh(jnp.tanh(x @ params[0]).sum(1) @ params[1]) / x.shape[1] @ params[2]


def test_a_layer_that_depends_on_a_length_that_it_does_not_see_is_rejected():
    stack = LayerStack.from_function(averaged, [jnp.eye(8)] * 3, jnp.ones((2, 5, 8)), cuts=["1", "2"])
    assert stack.specs(jnp.ones((2, 5, 8)))["2"].output.shape == (2, 8)
    with pytest.raises(InputError, match="of the same shapes for model inputs of two shapes"):
        stack.specs(jnp.ones((2, 7, 8)))


def test_a_built_model_in_evaluation_mode_is_warned_of(caplog):
    model = MODELS["unet"][0](nnx.Rngs(0))
    LayerStack.from_model(model, X)
    assert not caplog.messages
    model.eval()
    LayerStack.from_model(model, X)
    assert [message for message in caplog.messages if "the UNet is in evaluation mode" in message]


class Reversed(nnx.Module):
    """Reads its layers in another order in evaluation."""

    def __init__(self, rngs):
        self.parts = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(3)])

    def __call__(self, x, train):
        for part in self.parts if train else reversed(list(self.parts)):
            x = jnp.tanh(part(x))
        return x


def test_another_order_in_evaluation_is_rejected():
    with pytest.raises(InputError, match=r"between the layers 'parts\.0' and 'parts\.1' the model reads 'parts\..* in another order"):
        LayerStack.from_model(lambda rngs: Reversed(rngs), X)


def test_bad_arguments():
    model = MODELS["tied"][0]
    with pytest.raises(InputError, match="expected example inputs after the model"):
        LayerStack.from_model(model)
    with pytest.raises(InputError, match="cuts: no parameter that the model reads begins with 'block'"):
        LayerStack.from_model(model, TOKENS, cuts=["block"])
    with pytest.raises(InputError, match="cuts: expected a list"):
        LayerStack.from_model(model, TOKENS, cuts="blocks.1")
    with pytest.raises(InputError, match="batch statistics"):
        LayerStack.from_function(in_the_middle, [jnp.eye(8)] * 2, X, state={"mean": jnp.zeros(8)})


def in_the_middle(params, state, x):
    """Read and write layer state on the two sides of a cut."""
    x = jpipe.cut(x @ params[0] + state["mean"], "first")
    return x @ params[1], {"mean": x.mean(0)}
