"""Flax NNX modules as layers: split into parameters and state, merged again for each call."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jpipe._errors import InputError, callers_code, cause, short
from jpipe._layer import Layer, key_spec

Tree = Any
Modes = Callable[[Callable[..., Any], Callable[[inspect.Parameter], bool]], Callable[[bool], dict[str, Any]]]

_FROZEN = ("deterministic", "use_running_average")  # the attributes that nnx.Module.train() and eval() set


def nnx_layer(layer_id: str, constructor: Callable[..., nnx.Module], modes: Modes) -> Layer:
    """The layer of a module: its `nnx.Param`s are trained, all other variables and arrays are layer state.

    Args:
        layer_id: for messages.
        constructor: takes `rngs`.
        modes: finds the arguments of a call that say whether it trains.

    Raises:
        InputError: the constructor fails or returns something else; when it is traced, a forward that changes what is no array.
    """

    def build(key: jax.Array) -> Any:  # checked below: the constructor is the caller's
        module = constructor(rngs=nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise InputError(f"layer '{layer_id}': its constructor returned {type(module).__name__}, expected a flax.nnx.Module")
        _set_to_train(module)
        return module

    def split(module: nnx.Module) -> Any:
        return nnx.split(module, nnx.Param, nnx.RngState, ...)

    graphs: dict[bool, Any] = {}
    classes: list[Any] = []

    def trace(key: jax.Array) -> Any:  # not nnx.eval_shape, which loses arrays that are in no nnx.Variable
        module = build(key)
        classes.append(type(module))
        graphs[True], *parts = split(module)
        module.eval()
        graphs[False] = split(module)[0]
        return parts

    with callers_code(lambda error: f"layer '{layer_id}': its constructor fails: {cause(error)}; mend it there"):
        abstract = jax.eval_shape(trace, key_spec())
    # A parameter whose default is None leaves the choice to the attribute of the same name, which train() and eval() set.
    mode = modes(functools.partial(classes[0].__call__, None), lambda parameter: parameter.default is None)
    params_form, rng_form, state_form = (jax.tree.structure(part) for part in abstract)
    rng_specs = jax.tree.leaves(abstract[1])

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        _, params, _, state = split(build(key))
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    def rng_state(key: jax.Array | None) -> list[jax.Array]:
        """Every random stream of the module restarted from this microbatch's key, all counters at 0."""
        base = jax.random.key(0) if key is None else key  # in evaluation nothing is drawn
        return [
            _keys_like(spec, jax.random.fold_in(base, i))
            if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)
            else jnp.zeros(spec.shape, spec.dtype)
            for i, spec in enumerate(rng_specs)
        ]

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        parts = (
            jax.tree.unflatten(params_form, jax.tree.leaves(params)),
            jax.tree.unflatten(rng_form, rng_state(key)),
            jax.tree.unflatten(state_form, jax.tree.leaves(state)),
        )
        module = nnx.merge(graphs[train], *parts)
        before = _static_attributes(module)
        y = module(x, **mode(train))
        _refuse_changed(layer_id, before, _static_attributes(module))
        return y, nnx.to_pure_dict(split(module)[3]) if train else state

    return Layer(init, apply, stochastic=bool(rng_specs))


def _set_to_train(module: nnx.Module) -> None:
    """As `module.train()`, but what its author has frozen stays frozen: a constructor is the only place to say so."""
    frozen = [(part, name) for _, part in nnx.iter_modules(module) for name in _FROZEN if getattr(part, name, None) is True]
    module.train()
    for part, name in frozen:
        setattr(part, name, True)
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.MultiHeadAttention) and part.decode is None:  # nothing is decoded here
            part.decode = False


def _keys_like(spec: Any, key: jax.Array) -> jax.Array:
    """As many keys as `spec` has (modules that are vmapped or scanned hold a stack of them), from one."""
    return jax.random.split(key, spec.shape) if spec.shape else key


def _static_attributes(module: nnx.Module) -> dict[str, Any]:
    """By path the attributes that are no arrays: numbers, text, functions, None. Containers are copied."""
    found = {}
    for path, part in nnx.iter_modules(module):
        for name, value in vars(part).items():
            is_cache = isinstance(getattr(type(part), name, None), functools.cached_property)
            if not name.startswith(("_pytree__", "_object__")) and not nnx.is_data(value) and not is_cache:  # the former are Flax's own
                copied = value.copy() if isinstance(value, (list, dict, set)) else value
                found[".".join(map(str, (*path, name)))] = copied
    return found


def _refuse_changed(layer_id: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in {**before, **after}:
        if name not in before or name not in after or not _same(before[name], after[name]):
            was, now = (short(found[name]) if name in found else "nothing" for found in (before, after))
            raise InputError(
                f"layer '{layer_id}': its forward changes the attribute '{name}' from {was} to {now}, which would be lost, because a "
                "forward is compiled; keep what changes as an array in an nnx.Variable, such as nnx.BatchStat"
            )


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # an object of the user's that cannot be compared
        return False
