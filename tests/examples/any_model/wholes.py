"""The models of examples/any_model, and two more, called and trained as wholes: without layers, stages and microbatches in flight."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from jpipe import LayerStack

KEY = 7
MICROBATCHES, ROWS = 4, 2

DEPTH = {
    "nnx_transformer": 2,
    "linen_resnet": 1,
    "unet": 2,
    "vit": 2,
    "encoder_decoder": 1,
    "mixture_of_experts": 2,
    "scanned": 2,
    "equinox_mixer": 2,
    "pretrained": 2,
}
"""As small as four stages allow: what is compiled takes the time."""
FOR_TESTS = ("equinox_mixer", "pretrained")


class Whole(NamedTuple):
    """A model, and a pure function that calls it.

    Attributes:
        stack: the same model, cut into layers.
        params, state: its initial parameters and layer state, as trees of arrays.
        call: `(params, state, inputs, key, train) -> (outputs, new state)`.
        params_of: the parameters, as such a tree, of what `Pipeline.model` returns.
    """

    stack: LayerStack
    params: Any
    state: Any
    call: Callable[..., Any]
    params_of: Callable[[Any], Any]


def module(name: str) -> Any:
    """Return the module of a model."""
    return importlib.import_module(f"tests.examples.any_model.{name}" if name in FOR_TESTS else f"examples.any_model.{name}")


def batches(name: str, count: int, dtype: Any) -> list[Any]:
    """Return batches whose floats have this dtype."""
    return [jax.tree.map(lambda a: cast(a, dtype), module(name).batch(MICROBATCHES * ROWS, seed)) for seed in range(count)]


def whole(name: str, dtype: Any) -> Whole:
    """Return a model whose parameters have this dtype."""
    example, key = module(name), jax.random.key(KEY)
    x, _ = jax.tree.map(lambda a: a[:ROWS], batches(name, 1, dtype)[0])
    inputs = x if isinstance(x, tuple) else (x,)
    if name == "pretrained":
        return _of_function(example, cast_all(example.model(DEPTH[name]), dtype), inputs)
    if "rngs" in inspect.signature(example.model).parameters:
        return _of_nnx(lambda rngs: _cast_module(example.model(DEPTH[name], rngs=rngs), dtype), nnx.Rngs(key), inputs)
    model = example.model(DEPTH[name])
    if isinstance(model, nnx.Module):
        return _of_nnx(_cast_module(model, dtype), None, inputs)
    if isinstance(model, linen.Module):
        return _of_linen(model, key, inputs, dtype)
    return _of_pytree(cast_all(model, dtype), inputs)


def _of_nnx(model: Any, rngs: nnx.Rngs | None, inputs: Any) -> Whole:
    built = nnx.clone(model if rngs is None else nnx.jit(model)(rngs))
    is_param, is_rng = nnx.Param, nnx.RngState
    built.train()
    training, params, streams, state = nnx.split(built, is_param, is_rng, ...)
    built.eval()
    graphs = {True: training, False: nnx.split(built, is_param, is_rng, ...)[0]}
    leaves, treedefs = jax.tree.leaves(streams), [jax.tree.structure(part) for part in (params, streams, state)]

    def call(params: Any, state: Any, inputs: Any, key: jax.Array, train: bool) -> Any:
        """Call the module with each of its random streams at its start, with a key of its own."""
        drawn = [jax.random.fold_in(key, i) if _is_key(leaf) else jnp.zeros_like(leaf) for i, leaf in enumerate(leaves)]
        values = jax.tree.leaves(params), drawn, jax.tree.leaves(state)
        merged = nnx.merge(graphs[train], *map(jax.tree.unflatten, treedefs, values))
        outputs = merged(*inputs)
        return outputs, nnx.to_pure_dict(nnx.split(merged, is_param, is_rng, ...)[3])

    initial = nnx.to_pure_dict(params), nnx.to_pure_dict(state)
    return Whole(LayerStack.from_model(model, *inputs), *initial, call, lambda trained: nnx.to_pure_dict(nnx.state(trained, is_param)))


def _of_linen(model: linen.Module, key: jax.Array, inputs: Any, dtype: Any) -> Whole:
    variables = cast_all(jax.jit(model.init)(key, *inputs), dtype)
    state = {name: collection for name, collection in variables.items() if name != "params"}

    def call(params: Any, state: Any, inputs: Any, key: jax.Array, train: bool) -> Any:
        outputs, new = model.apply({"params": params, **state}, *inputs, train=train, rngs={"dropout": key}, mutable=list(state))
        return outputs, new

    options = {} if dtype == jnp.float32 else {"variables": variables}  # else they are made of the key of the run
    stack = LayerStack.from_model(model, *inputs, **options)
    return Whole(stack, variables["params"], state, call, lambda trained: trained["params"])


def _of_pytree(model: Any, inputs: Any) -> Whole:
    def params_of(model: Any) -> list[jax.Array]:
        return [leaf for leaf in jax.tree.leaves(model) if hasattr(leaf, "dtype")]

    leaves, treedef = jax.tree.flatten(model)

    def call(params: Any, state: Any, inputs: Any, key: jax.Array, train: bool) -> Any:
        arrays = iter(params)
        merged = jax.tree.unflatten(treedef, [next(arrays) if hasattr(leaf, "dtype") else leaf for leaf in leaves])
        return merged(*inputs, key=key if train else None, train=train), state

    return Whole(LayerStack.from_model(model, *inputs), params_of(model), {}, call, params_of)


def _of_function(example: Any, params: Any, inputs: Any) -> Whole:
    def function(params: Any, *inputs: Any, key: jax.Array, train: bool) -> Any:
        return example.apply(params, *inputs, dropout_rng=key, train=train)

    def call(params: Any, state: Any, inputs: Any, key: jax.Array, train: bool) -> Any:
        return function(params, *inputs, key=key, train=train), state

    return Whole(LayerStack.from_function(function, params, *inputs), params, {}, call, lambda trained: trained)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def cast(leaf: Any, dtype: Any) -> Any:
    return leaf.astype(dtype) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def cast_all(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda leaf: cast(leaf, dtype), tree)


def _cast_module(model: nnx.Module, dtype: Any) -> nnx.Module:
    nnx.update(model, cast_all(nnx.state(model, nnx.Not(nnx.RngState)), dtype))
    for _, part in nnx.iter_modules(model):
        if isinstance(part, nnx.Embed):
            part.dtype = dtype  # it keeps that of its table
    return model


class Trained(NamedTuple):
    """The loss of every batch, and the parameters and layer state after the last."""

    losses: list[float]
    params: Any
    state: Any


def train(name: str, model: Whole, optimizer: optax.GradientTransformation, delay: int, count: int) -> Trained:
    """Train with the gradient of each batch at the weights that had `delay` updates fewer: the sum over its microbatches, by its weight."""
    step = _compiled(name, optimizer, model.call)
    versions, state, losses, optimizer_state = [model.params], model.state, [], jax.jit(optimizer.init)(model.params)
    for t, batch in enumerate(batches(name, count, jax.tree.leaves(model.params)[0].dtype)):
        keys = [model.stack.microbatch_key(jax.random.key(KEY), t * MICROBATCHES + j, train=True) for j in range(MICROBATCHES)]
        loss, new, state, optimizer_state = step(versions[max(t - delay, 0)], versions[-1], state, optimizer_state, batch, jnp.stack(keys))
        versions.append(new)
        losses.append(float(loss))
    return Trained(losses, versions[-1], state)


@functools.cache
def _compiled(name: str, optimizer: optax.GradientTransformation, call: Any) -> Any:
    """Compile the update with one batch: its microbatches one after another, then their gradient at the parameters `read`."""

    def loss(params: Any, state: Any, x: Any, labels: Any, key: jax.Array) -> Any:
        outputs, state = call(params, state, x if isinstance(x, tuple) else (x,), key, True)
        total, weight = module(name).loss(outputs, labels)
        return total, (weight.astype(total.dtype), state)

    @jax.jit
    def step(read: Any, params: Any, state: Any, optimizer_state: Any, batch: Any, keys: jax.Array) -> Any:
        def microbatch(state: Any, arguments: Any) -> Any:
            (total, (weight, state)), gradients = jax.value_and_grad(loss, has_aux=True)(read, state, *arguments)
            return state, (total, weight, gradients)

        x, labels = jax.tree.map(lambda a: a.reshape(MICROBATCHES, ROWS, *a.shape[1:]), batch)
        state, parts = jax.lax.scan(microbatch, state, (x, labels, keys))
        total, weight, gradients = jax.tree.map(lambda a: a.sum(0), parts)
        updates, optimizer_state = optimizer.update(jax.tree.map(lambda g: g / weight, gradients), optimizer_state, params)
        return total / weight, optax.apply_updates(params, updates), state, optimizer_state

    return step


def evaluate(name: str, model: Whole, params: Any, state: Any, batch: Any) -> float:
    """Return the loss of a batch in evaluation mode, one microbatch after another."""
    call, total, weight = jax.jit(functools.partial(model.call, train=False)), 0.0, 0.0
    for j in range(MICROBATCHES):
        x, labels = jax.tree.map(lambda a, rows=slice(j * ROWS, (j + 1) * ROWS): a[rows], batch)
        outputs, _ = call(params, state, x if isinstance(x, tuple) else (x,), jax.random.key(0))
        added, count = module(name).loss(outputs, labels)
        total, weight = total + float(added), weight + float(count)
    return total / weight
