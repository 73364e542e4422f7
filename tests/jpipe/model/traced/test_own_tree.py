"""Optimizers of a model that was cut into layers see its own tree of parameters, and give the updates of optax on that tree."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, traverse_util

from docs import optimizers
from jpipe import InputError, LayerStack, Pipeline, Plan
from jpipe.model import find_layerwise
from jpipe.runtime._plain import to_plain
from tests.jpipe import reference

RATE, ROWS, STEPS = 0.05, 4, 3
X = jax.ShapeDtypeStruct((ROWS // 2, 3), np.float64)
pytestmark = pytest.mark.usefixtures("float64")


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return x + linen.tanh(linen.Dense(4, param_dtype=np.float64)(x)), None


class Backbone(linen.Module):
    """Four blocks that `linen.scan` stacks, after a layer of its own."""

    @linen.compact
    def __call__(self, x):
        scan = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return scan(name="blocks")(linen.Dense(4, name="first", param_dtype=np.float64)(x), None)[0]


class Scanned(linen.Module):
    def setup(self):
        self.backbone, self.head = Backbone(), linen.Dense(3, param_dtype=np.float64)

    def __call__(self, x):
        return self.head(self.backbone(x))


class Tied(nnx.Module):
    """A list of blocks between two uses of one array."""

    def __init__(self, rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (3, 4), np.float64))
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs, param_dtype=np.float64) for _ in range(3)])

    def __call__(self, x):
        x = x @ self.embed[...]
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return x @ self.embed[...].T


def scanned(cuts=()):
    """Return a model as layers, its own tree, and its forward as a function of that tree."""
    net = Scanned()
    variables = net.init(jax.random.key(0), jnp.zeros(X.shape))
    stack = LayerStack.from_model(net, X, variables=variables, cuts=cuts)
    return stack, variables["params"], lambda params, x: net.apply({"params": params}, x)


def tied():
    net = Tied(nnx.Rngs(0))
    graph, arrays = nnx.split(net)

    def forward(params, x):
        state = jax.tree.unflatten(jax.tree.structure(arrays), jax.tree.leaves(params))
        return nnx.merge(graph, state)(x)

    return LayerStack.from_model(net, X), nnx.to_pure_dict(arrays), forward


MODELS = {"scanned": functools.cache(scanned), "tied": functools.cache(tied)}


def labels(*words):
    return functools.partial(
        jax.tree_util.tree_map_with_path,
        lambda path, _: "frozen" if any(word in jax.tree_util.keystr(path) for word in words) else "trained",
    )


def freezing(*words, rule=None):
    rule = rule or optax.adamw(RATE, weight_decay=0.5, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
    return optax.multi_transform({"trained": rule, "frozen": optax.set_to_zero()}, labels(*words))


def loss(outputs, targets):
    return ((outputs - targets) ** 2).sum(), jnp.asarray(targets.size, np.float64)


def batches():
    generator = np.random.default_rng(0)
    return [tuple(generator.normal(size=(ROWS, 3)) for _ in range(2)) for _ in range(STEPS)]


def as_one(forward, params, rule, plan):
    """Train a whole model with optax; each batch reads the version that the schedule says."""
    versions, state = [params], rule.init(params)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for step, (x, y) in enumerate(batches()):
            read = versions[reference.version(plan, 0, step * plan.microbatches)]
            gradient = jax.grad(lambda p, x=x, y=y: jnp.divide(*loss(forward(p, x), y)))(read)
            updates, state = rule.update(gradient, state, versions[-1])
            versions.append(optax.apply_updates(versions[-1], updates))
    return versions[-1]


PIPELINES = {
    "a backbone under 2BW": ("scanned", "backbone", {"schedule": "pipedream_2bw"}),
    "a tied parameter, optimizer state in parts": ("tied", "embed", {"replicas": 2, "shard_optimizer": True}),
    "stacked biases": ("scanned", "bias", {"schedule": "zb_h1"}),
    "a head with replicas": ("scanned", "head", {"replicas": 2}),
    "some blocks": ("tied", "[1]", {"schedule": "pipedream_2bw"}),
    "nothing": ("scanned", "nothing", {"schedule": "gpipe"}),
    "nothing, tied": ("tied", "nothing", {"schedule": "interleaved_1f1b", "num_stages": 4, "chunks_per_rank": 2}),
}


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("case", PIPELINES)
def test_freezing_by_path_in_a_pipeline_equals_optax_on_the_models_tree(case):
    name, word, fields = PIPELINES[case]
    stack, params, forward = MODELS[name]()
    plan, rule = Plan.even(stack.ids, **{"num_stages": 2, "schedule": "gpipe", "microbatches": 2} | fields), freezing(word)
    pipe = Pipeline(stack, plan, loss, rule)
    state = pipe.init(jax.random.key(0), batches()[0])
    for batch in batches():
        state, _ = pipe.step(state, batch)
    actual, expected = pipe.params(pipe.drain(state)), as_one(forward, params, rule, plan)
    for (path, after), before, leaf in zip(
        jax.tree_util.tree_leaves_with_path(actual), *map(jax.tree.leaves, (params, expected)), strict=True
    ):
        np.testing.assert_allclose(after, leaf, rtol=1e-12, atol=1e-13)
        assert np.array_equal(before, after) == (word in jax.tree_util.keystr(path))


def found(stack, rule):
    specs = {layer_id: spec.params for layer_id, spec in stack.specs(X).items()}
    return find_layerwise(rule, specs, False, stack.ties, tree=stack.tree)


def difference(stack, params, rule):
    """Return how far layers of untied parameters get from the whole tree, in the nested dicts of `params`."""
    specs = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    split = lambda tree: {layer_id: part for layer_id, (part, _) in stack.by_layer(tree).items()}  # noqa: E731
    return optimizers._difference(rule, found(stack, rule), specs, split, stack.whole_params)


def decay(mask):
    return optax.adamw(RATE, weight_decay=0.5, mask=mask)


def by_dims(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


OPTIMIZERS = {
    "dims": lambda params: decay(by_dims),
    "a tree of dims": lambda params: decay(by_dims(params)),
    "every path and leaf": lambda params: decay(
        lambda tree: traverse_util.path_aware_map(lambda path, p: p.ndim > 1 and "head" not in path, tree)
    ),
    "one key of the whole tree": lambda params: optax.masked(optax.scale(3.0), lambda tree: {key: key == "head" for key in sorted(tree)}),
    "nested": lambda params: optax.chain(optax.masked(freezing("bias"), labels_of_head), optax.add_decayed_weights(0.1, by_dims)),
    "branches": lambda params: optax.chain(
        optax.transforms.conditionally_transform(optax.scale_by_adam(), lambda step: step > 1), freezing("first", rule=optax.sgd(RATE))
    ),
    "a prefix of labels": lambda params: optax.partition({"a": optax.sgd(RATE), "b": optax.adam(RATE)}, {"backbone": "a", "head": "b"}),
}


def labels_of_head(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "head", params)


@pytest.mark.thinned(most=4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cuts", [(), ("backbone.blocks.2", "head")], ids=["blocks", "two blocks in a layer"])
def test_what_sees_trees_and_paths_sees_those_of_the_model(name, cuts):
    stack, params, _ = scanned(cuts)
    assert difference(stack, params, OPTIMIZERS[name](params)) < 1e-12


def test_functions_of_flax_get_a_state_of_nnx():
    stack, _, _ = MODELS["tied"]()
    by_state = lambda state: nnx.map_state(lambda path, _: "frozen" if "blocks" in path else "trained", state)  # noqa: E731
    variables = nnx.state(Tied(nnx.Rngs(0)), nnx.Param)
    for given in (by_state, by_state(nnx.as_pure(variables)), labels("blocks")(variables)):
        rule = optax.partition({"trained": optax.sgd(RATE), "frozen": optax.set_to_zero()}, given)
        assert sorted(found(stack, rule).trained.chosen) == ["blocks.0", "blocks.1", "blocks.2"]


def test_the_state_of_a_layer_has_the_names_that_it_has_alone():
    """So runs that earlier versions saved go on."""
    stack, _, _ = MODELS["scanned"]()
    rule = optax.chain(optax.adamw(optax.linear_schedule(RATE, 0.0, 9), mask=by_dims), optax.ema(0.9))
    layerwise = found(stack, rule)
    for layer_id, spec in stack.specs(X).items():
        alone = jax.eval_shape(lambda i=layer_id, p=spec.params: rule.init({i: zeros(p)}))
        state = jax.eval_shape(lambda i=layer_id, p=spec.params: layerwise.init(i, zeros(p)))
        assert to_plain(state) == to_plain(alone)


def zeros(specs):
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)


@pytest.mark.slow
def test_trees_by_layer_id_are_for_single_numbers_only():
    stack, _, _ = MODELS["scanned"]()
    blocks = {layer_id: "blocks" in layer_id for layer_id in stack.ids}
    assert found(stack, optax.masked(optax.set_to_zero(), blocks)).trained.excludes("backbone.blocks.0")
    for rule in (optax.lamb(RATE), optax.contrib.muon(RATE), decay(by_dims)):  # of slices: other norms, other dims
        with pytest.raises(InputError, match="it computes with all blocks together, which the model stacks in one array"):
            found(stack, optax.masked(rule, blocks))


BLOCKS_TOGETHER = "it computes with all blocks together, which the model stacks in one array"
NUMBER_OF_BLOCKS = "its computation depends on the number of blocks that the model stacks in one array"
REFUSED = {
    "lamb": (optax.lamb(RATE), f"{BLOCKS_TOGETHER}; instead: keep the blocks in a list"),
    "muon": (optax.contrib.muon(RATE), f"{NUMBER_OF_BLOCKS}; instead: give muon_weight_dimension_numbers for the matrices of the blocks"),
    "noise": (
        optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(RATE)),
        f"{BLOCKS_TOGETHER}; instead: optax.partition with",
    ),
    "the first two blocks": (
        optax.chain(
            optax.sgd(RATE),
            optax.stateless(
                lambda updates, _: jax.tree.map(lambda u: u * (np.arange(len(u)) < 2).reshape(-1, *[1] * (u.ndim - 1)), updates)
            ),
        ),
        BLOCKS_TOGETHER,
    ),
    "size": (decay(lambda tree: jax.tree.map(lambda p: p.size > 20, tree)), NUMBER_OF_BLOCKS),
    "norm of all": (
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(RATE)),
        "the update of .* depends on .*; instead: clip_global_norm of",
    ),
    "a mask of another model": (
        decay({"backbone": True, "heads": True}),
        "own tree of parameters: the model has no 'heads'; the nearest is 'head'",
    ),
    "a mask of all variables": (decay({"params": {"backbone": True, "head": True}}), "own tree of parameters: the model has no 'params'"),
    "a function that fails": (decay(lambda tree: tree["layers"]), "with the keys 'backbone', 'head': KeyError: 'layers'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_numbers_than_those_of_optax_are_refused(name):
    rule, message = REFUSED[name]
    with pytest.raises(InputError, match=rf"^optimizer: .*{message}"):
        found(MODELS["scanned"]()[0], rule)


def test_the_refusal_names_parameters_that_are_stacked():
    stack, _, _ = MODELS["scanned"]()

    def shared(updates, state, params=None):
        bias = updates["backbone"]["blocks"]["Dense_0"]["bias"].sum()
        return {**updates, "head": jax.tree.map(lambda u: u * bias, updates["head"])}, state

    with pytest.raises(
        InputError, match=re.escape("the update of layer 'head' depends on the stacked parameter 'backbone/blocks/Dense_0/bias'")
    ):
        found(stack, optax.GradientTransformation(lambda params: (), shared))
