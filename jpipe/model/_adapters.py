"""Adapters that make layers of functions, Flax Linen modules and constructors of Flax NNX modules."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax
import jax
from flax import linen, nnx

from jpipe.errors import InputError, cause
from jpipe.model._layer import Layer
from jpipe.model._nnx import nnx_layer

Tree = Any

_MODES = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}
"""The value of each mode parameter in training, by name; in evaluation it is the opposite."""

_LIKE_MODES = ("train", "determin", "running_av", "eval", "infer", "dropout")  # in the name of a flag that may say whether to train


def adapt(layer_id: str, layer: Any) -> Layer:
    """Return the layer for a function, a Linen module or an NNX constructor; a `Layer` as it is.

    Raises:
        InputError: it cannot be a layer.
    """
    if isinstance(layer, Layer):
        return layer
    if isinstance(layer, linen.Module):
        if layer.scope is not None:
            raise InputError(
                f"layer '{layer_id}' is a Linen {type(layer).__name__} that is bound to variables, which would be dropped; give the module "
                f"itself, and to begin with its weights init(…, params={{'{layer_id}': variables['params']}})"
            )
        return _linen(layer_id, layer)
    if isinstance(layer, type) and issubclass(layer, linen.Module):
        name = layer.__name__
        raise InputError(f"layer '{layer_id}' is the Linen class {name}; give an instance of it, such as {name}(…)")
    if isinstance(layer, nnx.Module):
        raise InputError(
            f"layer '{layer_id}' is an NNX module that is built already; give its constructor instead, "
            f"lambda rngs: {type(layer).__name__}(..., rngs=rngs), so that planning allocates nothing; to begin with its weights give "
            f"init(…, params={{'{layer_id}': module}})"
        )
    if is_constructor(layer):
        if needed := _needed(layer):
            raise InputError(
                f"layer '{layer_id}' has a parameter 'rngs', so it is taken for a constructor of an NNX module, which gets nothing else; "
                f"it also needs {', '.join(map(repr, needed))}; give lambda rngs: … with all arguments of the constructor; if it is a "
                "function of the input, draw random numbers in an NNX module, such as nnx.Dropout(0.1, rngs=rngs), or in a jpipe.Layer "
                "with stochastic=True, whose apply gets a key"
            )
        return nnx_layer(layer_id, layer, functools.partial(_modes, layer_id))
    if isinstance(layer, type) and issubclass(layer, nnx.Module):
        name = layer.__name__
        raise InputError(f"layer '{layer_id}' is the NNX class {name}, which takes no rngs; give lambda rngs: {name}(…)")
    if callable(layer):
        return _function(layer_id, layer)
    raise InputError(
        f"layer '{layer_id}' is {type(layer).__name__}; expected an NNX constructor (a callable with a parameter 'rngs'), "
        "a Linen module, a function of the input, or a jpipe.Layer"
    )


def is_constructor(layer: Any) -> bool:
    """Return whether a layer is an NNX constructor, a callable with a parameter `rngs`; False where its signature is unknown."""
    if isinstance(layer, (Layer, nnx.Module, linen.Module)) or not callable(layer):
        return False
    while isinstance(layer, functools.partial):
        layer = layer.func
    if inspect.ismethod(layer) and isinstance(layer.__self__, (nnx.Module, linen.Module)):
        return False  # the forward of a module that is built already may take rngs, too
    if isinstance(layer, type):  # flax's metaclass hides the signature of its constructor
        layer = getattr(layer, "__init__")  # noqa: B009 - read, never called
    return "rngs" in parameters_of(layer)


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the parameters without defaults other than `rngs`."""
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = parameters_of(function).values()
    return [p.name for p in parameters if p.name != "rngs" and p.default is inspect.Parameter.empty and p.kind not in optional]


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable by name; none where its signature is unknown."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some callables of C have no signature: they are functions of the input
        return {}


def _modes(layer_id: str, call: Callable[..., Any], is_set: Callable[[inspect.Parameter], bool]) -> Callable[[bool], dict[str, Any]]:
    """Return a function from `train` to the arguments of a call that select training or evaluation.

    Args:
        layer_id: of the layer, for messages.
        call: takes the layer's input.
        is_set: whether a parameter already has a value.

    Raises:
        InputError: a parameter looks like one of these but has an unknown name.
    """
    parameters = list(parameters_of(call).values())
    names = [parameter.name for parameter in parameters if parameter.name in _MODES and not is_set(parameter)]
    for parameter in parameters[1:]:
        if not names and parameter.name not in _MODES and _looks_like_mode(parameter):
            raise InputError(
                f"layer '{layer_id}': expected one of {', '.join(_MODES)} as the parameter that says whether it trains, "
                f"found '{parameter.name}'; rename it, or wrap the layer"
            )
    return lambda train: {name: _MODES[name] == train for name in names}


def _looks_like_mode(parameter: inspect.Parameter) -> bool:
    name, default = parameter.name.lower(), parameter.default
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return False
    if isinstance(default, str):  # mode="train"
        return any(word in default.lower() for word in _LIKE_MODES)
    return (default is inspect.Parameter.empty or isinstance(default, bool)) and any(word in name for word in _LIKE_MODES)


def _function(layer_id: str, function: Callable[..., Tree]) -> Layer:
    bound = function.keywords if isinstance(function, functools.partial) else {}
    mode = _modes(layer_id, function, lambda parameter: parameter.name in bound)
    return Layer(init=lambda key, x: ({}, {}), apply=lambda params, state, x, key, train: (function(x, **mode(train)), state))


def _linen(layer_id: str, module: linen.Module) -> Layer:
    # Linen rejects an argument where the attribute of the same name is set: that one decides.
    call = functools.partial(type(module).__call__, module)
    mode = _modes(layer_id, call, lambda parameter: getattr(module, parameter.name, None) is not None)
    axes: dict[str, tuple[str | None, ...]] = {}

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        boxed = dict(module.init(keys, x, **mode(True)))
        axes.update(_axes(boxed.get("params", {})))
        state = linen.meta.unbox(boxed)
        params = state.pop("params", {})
        if not state:
            return params, state
        # Statistics of float64 inputs begin as float32 and become float64 in the first forward: they begin so.
        after = jax.eval_shape(lambda: apply(params, state, x, keys["dropout"], True)[1])
        for collection in after:
            if jax.tree.structure(after[collection]) != jax.tree.structure(state.get(collection)):  # type: ignore[operator]
                raise InputError(
                    f"layer '{layer_id}': its forward stores something new in the collection '{collection}', as sow does, and a pipeline "
                    "has no place to collect it; return it as a part of the output, or leave out the sow"
                )
        return params, jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), state, after)

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        rngs = {"dropout": key} if key is not None else {}
        variables = {"params": params, **state}
        try:
            if not train or not state:
                return module.apply(variables, x, rngs=rngs, **mode(train)), state
            y, new_state = module.apply(variables, x, rngs=rngs, mutable=list(state), **mode(train))
            return y, {**state, **new_state}
        except flax.errors.InvalidRngError as error:
            when = "in training" if train else "in evaluation"
            raise InputError(
                f"layer '{layer_id}' draws random numbers {when}, and jpipe has none for it there: {cause(error)}; give its __call__ a "
                "parameter train, pass deterministic=not train to its dropout, and draw from the stream 'dropout' only"
            ) from error

    # Linen asks for a "dropout" key only when it needs one: whether it does shows when it is traced, so it always gets one.
    draws = bool(mode(True))
    return Layer(init, apply, draws, owner=module, axes=axes, draws_in_evaluation=draws)


def _axes(params: Tree) -> dict[str, tuple[str | None, ...]]:
    """Return the logical axes that a Linen module names (`linen.with_partitioning`), by path."""
    boxes = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, linen.Partitioned))[0]
    return {"/".join(str(key.key) for key in path): tuple(box.names) for path, box in boxes if isinstance(box, linen.Partitioned)}
