"""A whole model of any kind as one layer, and conversions back to the user's model."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import linen, nnx

from jpipe.errors import InputError, callers_code, cause
from jpipe.model._adapters import is_constructor, linen_layer, needed_parameters
from jpipe.model._function_arguments import Randomness, arguments_of, call_by_name, is_bound, modes
from jpipe.model._layer import Layer, describe, key_spec
from jpipe.model._nnx import NnxFunctions, abstract, built_functions, is_in_evaluation, nnx_functions
from jpipe.model.traced.frontends._whole import WHERE, Whole, is_array, is_spec, joined, matched, only, path_name, specs_of, whole

Tree = Any

_LOG = logging.getLogger("jpipe")


def open_model(model: Any, inputs: tuple[Any, ...], *, variables: Any = None) -> Whole:
    """Return a model of any kind as one layer. Raise InputError for another model, or if it does not take inputs of these specs.

    A model is an NNX module, or an abstract one from `nnx.eval_shape`; a constructor of an NNX module, with a parameter `rngs`; a Linen
    module, which initializes its variables unless they are passed; or any other pytree that can be called, such as an Equinox module.
    """
    if isinstance(model, linen.Module):
        if model.scope is not None:
            bound, model = model.variables, model.clone(parent=None)
            variables = bound if variables is None else variables
        return _open_linen(model, inputs, variables)
    if variables is not None:
        raise InputError(f"variables: expected None, because only a Linen module takes separate variables, found {_kind(model)}")
    if isinstance(model, nnx.Module):
        if is_in_evaluation(model):
            _LOG.warning(
                "from_model: the %s is in evaluation mode, so it will train without dropout and without updating its batch statistics; "
                "call train() on it first to train as usual",
                type(model).__name__,
            )
        return _open_nnx(built_functions(WHERE, model, len(inputs)))
    if callable(model) and not isinstance(model, type) and not jax.tree_util.all_leaves([model]):
        return _open_called(type(model).__call__, model, inputs, None)
    if is_constructor(model):
        if needed := needed_parameters(model):
            raise InputError(
                f"{WHERE} is a constructor of an NNX module, because it has a parameter 'rngs'; it also needs "
                f"{', '.join(map(repr, needed))}; give lambda rngs: … with all arguments, or for a function from_function"
            )
        return _open_nnx(nnx_functions(WHERE, model, len(inputs)))
    remedy = (
        f"give an instance of {model.__name__}" if isinstance(model, type) else "for a function of parameters and inputs use from_function"
    )
    raise InputError(
        where=WHERE,
        expected="an NNX module or its constructor (a callable with a parameter 'rngs'), a Linen module, or a pytree that can "
        "be called, such as an Equinox module",
        found=_kind(model),
        change=remedy,
    )


def open_function(fn: Any, params: Tree, inputs: tuple[Any, ...], *, state: Tree | None = None) -> Whole:
    """Return `fn(params, *inputs) -> y` or `fn(params, state, *inputs) -> (y, new state)` as one layer, or raise InputError.

    At any position, a parameter named `key`, `rng` or `dropout_rng` gets the microbatch's random key, and one named `rngs` a
    `flax.nnx.Rngs`; in evaluation only if it has no default. A parameter for the mode gets the same values as in a layer. Floating-point
    arrays of `params` are trained, other arrays stay as they are, and all other leaves are part of the function; a leaf named `inference`
    that is True or False becomes False in training and True in evaluation.
    """
    if not callable(fn):
        raise InputError(where=WHERE, expected="a function of parameters and inputs", found=_kind(fn))
    if inspect.ismethod(fn) and isinstance(fn.__self__, linen.Module):
        name = type(fn.__self__).__name__
        raise InputError(f"{WHERE} is a method of the Linen module {name}; give the module itself to from_model, with its variables")
    return _open_called(fn, params, inputs, state)


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _open_nnx(functions: NnxFunctions) -> Whole:
    specs = nnx.to_pure_dict(functions.params_specs), nnx.to_pure_dict(functions.state_specs)

    def trees(tree: Any) -> tuple[Tree, Tree]:
        """Return the parameters and the state of a module, of an `nnx.State`, or of plain dicts of parameters."""
        if isinstance(tree, nnx.Module):
            tree = nnx.state(tree)
        if not isinstance(tree, nnx.State):
            return tree, {}
        params, _, state = nnx.split_state(tree, nnx.Param, nnx.RngState, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    params, state = functions.initial or specs
    # nnx.map_state and others need an nnx.State. nnx.Optimizer passes a state with variables to init, and one without to update.
    others = [jax.tree.structure(tree) for tree in (nnx.as_pure(functions.params_specs), functions.params_specs)]
    return whole(functions.layer(), params, state, functions.module, trees, others)


def _open_linen(module: linen.Module, inputs: tuple[Any, ...], variables: Any) -> Whole:
    layer, x = linen_layer(WHERE, module, len(inputs)), inputs[0] if len(inputs) == 1 else inputs
    with callers_code(lambda error: f"{WHERE} does not take its inputs, {describe(x)}; it raises {cause(error)}; fix one of them"):
        specs = jax.eval_shape(layer.init, key_spec(), x)

    def trees(tree: Any) -> tuple[Tree, Tree]:
        """Return the collection "params" and the other collections, from all variables or from only the parameters."""
        tree = linen.meta.unbox(flax.core.unfreeze(tree))
        has_their_structure = jax.tree.structure(tree) == jax.tree.structure(specs[0])  # type: ignore[operator]
        if not isinstance(tree, dict) or has_their_structure or not {"params", *specs[1]} & tree.keys():
            return tree, {}
        return tree.get("params", {}), {name: collection for name, collection in tree.items() if name != "params"}

    params, state = specs
    if variables is not None:
        params = matched("variables: params", params, trees(variables)[0], any_float=True)
        state = matched("variables", state, trees(variables)[1], any_float=True)
        flat = jax.tree_util.tree_flatten_with_path((params, state), is_leaf=lambda leaf: leaf is None)[0]
        if missing := next((path for path, leaf in flat if leaf is None), None):
            raise InputError(f"variables: expected '{path_name(missing[1:])}', found none; give all variables that module.init returns")
    return whole(layer, params, state, lambda params, state: {"params": params, **state}, trees)


def _open_called(fn: Callable[..., Any], params: Tree, inputs: tuple[Any, ...], state: Tree | None) -> Whole:
    """Return a function of parameters as one layer. The parameters may have leaves that are not arrays."""
    state_arrays = only({} if state is None else state, is_array)
    static_state = only(state, lambda leaf: not is_array(leaf))
    num_inputs, mode, randomness = len(inputs), modes(WHERE, fn, is_bound(fn), (state is not None) + 1 + len(inputs)), Randomness.of(fn)

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        if any(map(is_spec, jax.tree.leaves((params, state)))):
            raise abstract(WHERE, "arrays in place of specs")
        return params, state_arrays

    def apply(tree: Tree, arrays: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        first = (_with_inference(tree, not train), *(() if state is None else (joined(arrays, static_state),)))
        named = {**mode(train), **randomness.arguments(key, train)}
        y = call_by_name(fn, (*first, *arguments_of(x, num_inputs)), named)
        if state is None:
            return y, arrays
        if not isinstance(y, tuple) or len(y) != 2:
            raise InputError("with a state, the function has to return a pair, (outputs, new state)", where=WHERE, found=_kind(y))
        y, changed = y
        if jax.tree.structure(changed) != jax.tree.structure(state):  # type: ignore[operator]
            raise InputError(
                where=WHERE, expected=f"a new state with the structure of the old one, {describe(specs_of(state))}", found=describe(changed)
            )
        return y, jax.tree.map(lambda old, new: new if is_array(old) else None, state, changed) if train else arrays

    def rebuild(tree: Tree, arrays: Tree) -> Any:
        return tree if state is None else (tree, joined(arrays, static_state))

    layer = Layer(init, apply, randomness.name is not None, draws_in_evaluation=randomness.is_needed)
    return whole(layer, params, state_arrays, rebuild, lambda tree: (tree, {}))


def _with_inference(tree: Tree, inference: bool) -> Tree:
    """Set the leaves named `inference` that are True or False to `inference`."""

    def changed(path: tuple[Any, ...], leaf: Any) -> Any:
        return inference if isinstance(leaf, bool) and path and path_name(path[-1:]) == "inference" else leaf

    return jax.tree_util.tree_map_with_path(changed, tree)
