"""A whole model of any kind as one layer, and the way back to the user's model."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen, nnx

from jpipe.errors import InputError, callers_code, cause
from jpipe.model._adapters import is_constructor, linen_layer, needed_parameters
from jpipe.model._calls import Randomness, arguments_of, call_by_name, is_bound, modes
from jpipe.model._layer import Layer, describe, key_spec, spec_of
from jpipe.model._nnx import NnxFunctions, abstract, built_functions, nnx_functions
from jpipe.model.traced._parts import Parts, array_spec, is_array, is_spec, is_trained, matched, path_name, specs_of

Tree = Any

_WHERE = "the model"


@dataclass(frozen=True)
class Whole:
    """A whole model as one layer, and the way back.

    With one input the layer's `x` is that input, with several it is their tuple.

    Attributes:
        layer: its `init` uses the key of the run as it is, its `apply` that of the microbatch. Its parameters are the floating-point
            arrays that are trained, in a tree in which None replaces all others; other parameters are in its state.
        params: the arrays that the user gave, in the structure of the layer's parameters; None if there are none yet.
        state: likewise.
        specs: shapes and dtypes of the layer's parameters and state.
        rebuild: `(params, state) ->` the user's model with these arrays: an NNX module, the variables of a Linen module, a callable
            pytree; for a function, its parameters, or the pair of its parameters and its state.
        to_user: parameters of the layer -> the tree that the user knows: nested dicts for NNX, the collection "params" for Linen, the
            pytree that was given for other models and functions.
        from_user: such a tree, or the user's model with its variables -> `(params, state)` in the layer's structures, in which None
            replaces what it does not have.
    """

    layer: Layer
    params: Tree | None
    state: Tree | None
    specs: tuple[Tree, Tree]
    rebuild: Callable[[Tree, Tree], Any]
    to_user: Callable[[Tree], Tree]
    from_user: Callable[[Any], tuple[Tree, Tree]]


def open_model(model: Any, inputs: tuple[Any, ...], *, variables: Any = None) -> Whole:
    """Return a model of any kind as one layer.

    Args:
        model: an NNX module that is built, or an abstract one from `nnx.eval_shape`; a constructor of one, with a parameter `rngs`; a
            Linen module; any other pytree that can be called, such as an Equinox module.
        inputs: specs of the inputs, with which the model is called.
        variables: of a Linen module; by default they are fresh.

    Raises:
        InputError: the model is none of these, or does not take the inputs.
    """
    if isinstance(model, linen.Module):
        if model.scope is not None:
            bound, model = model.variables, model.clone(parent=None)
            variables = bound if variables is None else variables
        return _open_linen(model, inputs, variables)
    if variables is not None:
        raise InputError(f"variables: expected None, because only a Linen module has variables apart from it, and found {_kind(model)}")
    if isinstance(model, nnx.Module):
        return _open_nnx(built_functions(_WHERE, model, len(inputs)))
    if callable(model) and not isinstance(model, type) and not jax.tree_util.all_leaves([model]):
        return _open_called(type(model).__call__, model, inputs, None)
    if is_constructor(model):
        if needed := needed_parameters(model):
            raise InputError(
                f"{_WHERE} is a constructor of an NNX module, because it has a parameter 'rngs'; it also needs "
                f"{', '.join(map(repr, needed))}; give lambda rngs: … with all arguments, or for a function from_function"
            )
        return _open_nnx(nnx_functions(_WHERE, model, len(inputs)))
    remedy = (
        f"give an instance of {model.__name__}" if isinstance(model, type) else "for a function of parameters and inputs use from_function"
    )
    raise InputError(
        f"{_WHERE}: expected an NNX module or its constructor (a callable with a parameter 'rngs'), a Linen module, or a pytree that can "
        f"be called, such as an Equinox module; found {_kind(model)}; {remedy}"
    )


def open_function(fn: Callable[..., Any], params: Tree, inputs: tuple[Any, ...], *, state: Tree | None = None) -> Whole:
    """Return a function of parameters as one layer.

    A parameter named `key`, `rng` or `dropout_rng` gets the random key of the microbatch, and one named `rngs` a `flax.nnx.Rngs`, wherever
    it stands; in evaluation only if it has no default. Whether it trains is passed as to layers. A leaf named `inference` of the
    parameters that is True or False becomes False in training and True in evaluation.

    Args:
        fn: `fn(params, *inputs) -> y`, or with a state `fn(params, state, *inputs) -> (y, new state)`.
        params: a pytree of arrays or specs. Floating-point arrays are trained, other arrays stay as they are, and all other leaves are part
            of the function.
        inputs: specs of the inputs.
        state: arrays or specs that each training step passes on to the next.

    Raises:
        InputError: it is no such function.
    """
    if not callable(fn):
        raise InputError(f"{_WHERE}: expected a function of parameters and inputs, found {_kind(fn)}")
    if inspect.ismethod(fn) and isinstance(fn.__self__, linen.Module):
        name = type(fn.__self__).__name__
        raise InputError(f"{_WHERE} is a method of the Linen module {name}; give the module itself to from_model, with its variables")
    return _open_called(fn, params, inputs, state)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _open_nnx(functions: NnxFunctions) -> Whole:
    specs = nnx.to_pure_dict(functions.params_specs), nnx.to_pure_dict(functions.state_specs)
    arrays = specs if functions.arrays is None else (nnx.to_pure_dict(functions.arrays[0]), nnx.to_pure_dict(functions.arrays[2]))

    def trees(tree: Any) -> tuple[Tree, Tree]:
        """Return the parameters and the state of a module, of an `nnx.State`, or of plain dicts of parameters."""
        if isinstance(tree, nnx.Module):
            tree = nnx.state(tree)
        if not isinstance(tree, nnx.State):
            return tree, {}
        params, _, state = nnx.split_state(tree, nnx.Param, nnx.RngState, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    return _whole(functions.layer(), *arrays, functions.module, trees)


def _open_linen(module: linen.Module, inputs: tuple[Any, ...], variables: Any) -> Whole:
    layer, x = linen_layer(_WHERE, module, len(inputs)), _x_of(inputs)
    with callers_code(lambda error: f"{_WHERE} does not take its inputs, {describe(x)}; it says: {cause(error)}; fix one of them"):
        specs = jax.eval_shape(layer.init, key_spec(), x)

    def trees(tree: Any) -> tuple[Tree, Tree]:
        """Return the collection "params" and the others, of all variables or of the parameters alone."""
        tree = linen.meta.unbox(flax.core.unfreeze(tree))
        is_params = not isinstance(tree, dict) or jax.tree.structure(tree) == jax.tree.structure(specs[0])
        if is_params or not {"params", *specs[1]} & tree.keys():
            return tree, {}
        return tree.get("params", {}), {name: collection for name, collection in tree.items() if name != "params"}

    arrays = specs
    if variables is not None:
        arrays = matched("variables: params", specs[0], trees(variables)[0]), matched("variables", specs[1], trees(variables)[1])
        flat = jax.tree_util.tree_flatten_with_path(arrays, is_leaf=lambda leaf: leaf is None)[0]
        if missing := next((path for path, leaf in flat if leaf is None), None):
            raise InputError(f"variables: expected '{path_name(missing[1:])}', found none; give all that module.init returns")
    return _whole(layer, *arrays, lambda params, state: {"params": params, **state}, trees)


def _open_called(fn: Callable[..., Any], params: Tree, inputs: tuple[Any, ...], state: Tree | None) -> Whole:
    """Return the whole of a function of a tree, of which only the arrays change."""
    state_parts = Parts.of({} if state is None else state, is_array)
    state_specs = state_parts.treedef.unflatten(state_parts.leaves)
    state_arrays = state_parts.chosen_of({} if state is None else state)
    num_inputs, mode, randomness = len(inputs), modes(_WHERE, fn, is_bound(fn), (state is not None) + 1 + len(inputs)), Randomness.of(fn)

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        if any(map(is_spec, jax.tree.leaves((params, state)))):
            raise abstract(_WHERE, "arrays in place of specs")
        return params, state_arrays

    def apply(tree: Tree, arrays: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        first = (_with_inference(tree, not train), *(() if state is None else (state_parts.joined(arrays),)))
        named = {**mode(train), **randomness.arguments(key, train)}
        y = call_by_name(fn, (*first, *arguments_of(x, num_inputs)), named)
        if state is None:
            return y, arrays
        if not isinstance(y, tuple) or len(y) != 2:
            raise InputError(f"{_WHERE}: with a state its function returns a pair, (outputs, new state); found {_kind(y)}")
        y, changed = y
        if jax.tree.structure(changed) != state_parts.treedef:
            raise InputError(
                f"{_WHERE}: expected a new state of the structure of the old, {describe(state_specs)}, found {describe(changed)}"
            )
        return y, state_parts.chosen_of(changed) if train else arrays

    def rebuild(tree: Tree, arrays: Tree) -> Any:
        return tree if state is None else (tree, state_parts.joined(arrays))

    layer = Layer(init, apply, randomness.name is not None, draws_in_evaluation=randomness.is_needed)
    return _whole(layer, params, state_arrays, rebuild, lambda tree: (tree, {}))


def _with_inference(tree: Tree, inference: bool) -> Tree:
    """Set the leaves named `inference` that are True or False."""

    def changed(path: tuple[Any, ...], leaf: Any) -> Any:
        return inference if isinstance(leaf, bool) and path and path_name(path[-1:]) == "inference" else leaf

    return jax.tree_util.tree_map_with_path(changed, tree)


def _whole(
    layer: Layer,
    params: Tree,
    state: Tree,
    rebuild: Callable[[Tree, Tree], Any],
    trees: Callable[[Any], tuple[Tree, Tree]],
) -> Whole:
    """Return the whole of a layer whose parameters may have constants and leaves that are no arrays: those are not trained.

    Args:
        layer: its parameters are the user's tree.
        params: this tree, with arrays or specs.
        state: likewise.
        rebuild: `(user's tree, state) -> user's model`.
        trees: what a user gives -> (tree, state).
    """
    parts = Parts.of(params, is_trained)
    _reject_complex(parts.treedef.unflatten(parts.leaves))

    def pack(state: Tree, constants: Tree) -> Tree:
        return {"state": state, "constants": constants} if parts.has_constants else state

    def unpack(params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Return the user's tree and the layer's state."""
        return (parts.joined(params, state["constants"]), state["state"]) if parts.has_constants else (parts.joined(params), state)

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        tree, state = layer.init(key, x)
        return parts.chosen_of(tree), pack(state, parts.constants_of(tree))

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        y, new_state = layer.apply(*unpack(params, state), x, key, train)
        return y, pack(new_state, state["constants"] if parts.has_constants else None)

    full_specs, state_specs = parts.treedef.unflatten(parts.leaves), specs_of(state)
    initial = parts.chosen_of(params), pack(state, parts.constants_of(params))

    def from_user(tree: Any) -> tuple[Tree, Tree]:
        params, state = trees(tree)
        full = matched("params", full_specs, params)
        return parts.chosen_of(full), pack(matched("params: state", state_specs, state), parts.constants_of(full))

    return Whole(
        layer=replace(layer, init=init, apply=apply),
        params=_arrays(initial[0]),
        state=_arrays(initial[1]),
        specs=(specs_of(initial[0]), specs_of(initial[1])),
        rebuild=lambda params, state: rebuild(*unpack(params, state)),
        to_user=lambda chosen: parts.joined(chosen, parts.constants_of(params)),
        from_user=from_user,
    )


def _arrays(tree: Tree) -> Tree | None:
    """Return a tree of arrays, of the dtypes that they have on a device; None if it is one of specs."""
    if any(map(is_spec, jax.tree.leaves(tree))):
        return None

    def canonical(leaf: Any) -> Any:
        spec = array_spec(leaf)
        return leaf if leaf.dtype == spec.dtype else leaf.astype(spec.dtype)

    return jax.tree.map(canonical, tree)


def _reject_complex(tree: Tree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            raise InputError(
                f"{_WHERE}: parameter '{path_name(path)}' is {leaf.dtype}: only real floating-point parameters can be trained; keep its "
                "real and imaginary parts as two parameters"
            )


def _x_of(inputs: tuple[Any, ...]) -> Any:
    """Return the layer's input."""
    specs = jax.tree.map(spec_of, inputs)
    return specs[0] if len(inputs) == 1 else specs
