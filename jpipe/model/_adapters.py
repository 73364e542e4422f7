"""Adapters that make layers from functions, Flax Linen modules, Flax NNX modules and constructors of NNX modules."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import flax
import jax
from flax import linen, nnx

from jpipe.errors import InputError, cause
from jpipe.model._function_arguments import arguments_of, is_bound, modes, parameters_of
from jpipe.model._layer import Layer, key_spec
from jpipe.model._nnx import NnxFunctions, built_functions, nnx_functions

Tree = Any


def adapt(layer_id: str, layer: Any) -> Layer:
    """Make a layer from a function, or a Linen or NNX module or constructor, or raise InputError; a `Layer` is returned unchanged."""
    if isinstance(layer, Layer):
        return layer
    if isinstance(layer, linen.Module):
        if layer.scope is not None:
            raise InputError(
                f"layer '{layer_id}' is a Linen {type(layer).__name__} that is bound to variables, which would be dropped; give the module "
                f"itself; to begin with its weights, pass params={{'{layer_id}': variables['params']}} to init"
            )
        return linen_layer(f"layer '{layer_id}'", layer)
    if isinstance(layer, type) and issubclass(layer, linen.Module):
        name = layer.__name__
        raise InputError(f"layer '{layer_id}' is the Linen class {name}; give an instance of it, such as {name}(…)")
    if isinstance(layer, nnx.Module):
        return _built(layer_id, layer).layer()
    if is_constructor(layer):
        if needed := needed_parameters(layer):
            raise InputError(
                f"layer '{layer_id}' has a parameter 'rngs', so it is called with rngs alone, as a constructor of an NNX module, but "
                f"it also needs {', '.join(map(repr, needed))}; give lambda rngs: … with all arguments of the constructor; if it is a "
                "function of the input, draw random numbers in an NNX module, such as nnx.Dropout(0.1, rngs=rngs), or in a jpipe.Layer "
                "with stochastic=True, which gets a key in apply"
            )
        return nnx_functions(f"layer '{layer_id}'", layer).layer()
    if isinstance(layer, type) and issubclass(layer, nnx.Module):
        name = layer.__name__
        raise InputError(f"layer '{layer_id}' is the NNX class {name}, which takes no rngs; give lambda rngs: {name}(…)")
    if callable(layer):
        return _function(layer_id, layer)
    raise InputError(
        f"layer '{layer_id}' is {type(layer).__name__}; expected an NNX module or its constructor (a callable with a parameter 'rngs'), "
        "a Linen module, a function of the input, or a jpipe.Layer"
    )


def initial_arrays(layer_id: str, layer: Any) -> tuple[Tree, Tree] | None:
    """Return the initial parameters and state of a built NNX module; None for any other layer."""
    return _built(layer_id, layer).initial if isinstance(layer, nnx.Module) else None


def _built(layer_id: str, module: nnx.Module) -> NnxFunctions:
    functions = built_functions(f"layer '{layer_id}'", module)
    if functions.arrays is None:
        raise InputError(
            f"layer '{layer_id}' is an abstract NNX module, which has no arrays; give its constructor, "
            f"lambda rngs: {type(module).__name__}(…, rngs=rngs)"
        )
    return functions


def layers_by_id(layers: Any) -> Mapping[Any, Any]:
    """Return the layers by id. The ids of a list, a tuple, an `nnx.List` or a `Sequential` of NNX or Linen are numbers, as text."""
    if isinstance(layers, Mapping):
        return layers
    if type(layers) is linen.Sequential and layers.scope is not None:
        raise InputError("LayerStack: the nn.Sequential is bound to variables, which would be dropped; give the module itself")
    items = layers.layers if type(layers) in (nnx.Sequential, linen.Sequential) else layers
    if not isinstance(items, (list, tuple, nnx.List)):
        raise InputError(
            f"LayerStack: expected a dict of layers by id, a list of layers or a Sequential, found {type(layers).__name__}; give "
            "{'layer id': layer, …}"
        )
    return {str(number): layer for number, layer in enumerate(items)}


def is_constructor(layer: Any) -> bool:
    """Return whether a layer is an NNX constructor, a callable with a parameter `rngs`; False if its signature is unknown."""
    if isinstance(layer, (Layer, nnx.Module, linen.Module)) or not callable(layer):
        return False
    while isinstance(layer, functools.partial):
        layer = layer.func
    if inspect.ismethod(layer) and isinstance(layer.__self__, (nnx.Module, linen.Module)):
        return False  # the forward of a built module may also take rngs
    if isinstance(layer, type):  # flax's metaclass hides the signature of its constructor
        layer = getattr(layer, "__init__")  # noqa: B009 - read, never called
    return "rngs" in parameters_of(layer)


def needed_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters without default, except `rngs`."""
    optional = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = parameters_of(function).values()
    return [p.name for p in parameters if p.name != "rngs" and p.default is inspect.Parameter.empty and p.kind not in optional]


def _function(layer_id: str, function: Callable[..., Tree]) -> Layer:
    mode = modes(f"layer '{layer_id}'", function, is_bound(function))
    return Layer(init=lambda key, x: ({}, {}), apply=lambda params, state, x, key, train: (function(x, **mode(train)), state))


def linen_layer(where: str, module: linen.Module, num_inputs: int | None = None) -> Layer:
    """Make a layer from an unbound Linen module. Its collection "params" is trained; all other collections are layer state.

    For a whole model `num_inputs` is the number of its inputs; it is initialized with the unchanged key, and may draw from any random
    streams. While a layer is traced, InputError is raised if a forward makes variables, or draws random numbers that jpipe does not
    provide.
    """
    # If an attribute is set, Linen rejects the argument of the same name, and the attribute decides.
    call = functools.partial(type(module).__call__, module)
    mode = modes(where, call, lambda parameter: getattr(module, parameter.name, None) is not None, num_inputs)
    axes: dict[str, tuple[str | None, ...]] = {}
    is_whole = num_inputs is not None

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        keys = key if is_whole else dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        boxed = dict(module.init(keys, *arguments_of(x, num_inputs), **mode(True)))
        axes.update(linen_axes(boxed.get("params", {})))
        state = linen.meta.unbox(boxed)
        params = state.pop("params", {})
        if not state:
            return params, state
        # Statistics of float64 inputs begin as float32 and become float64 in the first forward, so they must begin as float64.
        after = jax.eval_shape(lambda: apply(params, state, x, key, True)[1])
        for collection in after:
            if jax.tree.structure(after[collection]) != jax.tree.structure(state.get(collection)):  # type: ignore[operator]
                raise InputError(
                    f"its forward stores something new in the collection '{collection}', as sow does, but a pipeline cannot collect it",
                    where=where,
                    change="return the value as a part of the output, or remove the sow",
                )
        return params, jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), state, after)

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        return applied(params, state, arguments_of(x, num_inputs), key, train)

    def carried(params: Tree, state: Tree, x: Tree, carry: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree, Tree]:
        (y, left), new_state = applied(params, state, (x, carry), key, train, method="carried")
        return y, new_state, left

    def applied(params: Tree, state: Tree, inputs: tuple[Any, ...], key: jax.Array | None, train: bool, **method: str) -> tuple[Tree, Tree]:
        rngs = {} if key is None else {"dropout": key}
        if key is not None and is_whole:  # Linen draws from "params" if a stream is missing
            rngs["params"] = jax.random.fold_in(key, 1)
        variables, options = {"params": params, **state}, {**mode(train), **method}
        try:
            if not train or not state:
                return module.apply(variables, *inputs, rngs=rngs, **options), state
            y, new_state = module.apply(variables, *inputs, rngs=rngs, mutable=list(state), **options)
            return y, {**state, **new_state}
        except flax.errors.InvalidRngError as error:
            when = "in training" if train else "in evaluation"
            raise InputError(
                f"{where} draws random numbers {when}, but jpipe passes none there: {cause(error)}; give its __call__ a "
                "parameter train, pass deterministic=not train to its dropout, and draw only from the stream 'dropout'"
            ) from error

    # Whether Linen needs a "dropout" key is known only after tracing, so the module always gets one.
    draws = is_whole or bool(mode(True))
    takes_carry = not is_whole and callable(getattr(type(module), "carried", None))
    return Layer(init, apply, draws, owner=module, axes=axes, draws_in_evaluation=draws, carried=carried if takes_carry else None)


def linen_axes(params: Tree) -> dict[str, tuple[str | None, ...]]:
    """Return the logical axes that a Linen module names (`linen.with_partitioning`), by path."""
    boxes = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, linen.Partitioned))[0]
    return {"/".join(str(key.key) for key in path): tuple(box.names) for path, box in boxes if isinstance(box, linen.Partitioned)}


# Modules in two layers ------------------------------------------------------------------------------------------------


def reject_shared_modules(layers: Mapping[str, Any]) -> None:
    """Raise `InputError` if two NNX modules, built or returned by constructors, have the same variable."""
    constructors = {layer_id: layer for layer_id, layer in layers.items() if is_constructor(layer)}
    seen: dict[int, str] = {}

    def see(layer_id: str, module: nnx.Module) -> None:
        params = {id(node): ".".join(map(str, path)) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)}
        for identity, name in params.items():
            if identity in seen:
                raise _shared(seen[identity], layer_id, name)
        seen.update(dict.fromkeys(params, layer_id))

    for layer_id, layer in layers.items():
        if isinstance(layer, nnx.Module):
            see(layer_id, layer)

    def record(key: jax.Array) -> None:
        alive = []  # keeps the built modules alive, so that an id() is not used twice
        calls = Counter[int]()
        for layer_id, layer in constructors.items():
            calls[id(layer)] += 1
            if calls[id(layer)] > 2:
                continue  # two calls show whether one constructor returns the same module twice
            try:
                with nnx.use_eager_sharding(False):
                    module = layer(rngs=nnx.Rngs(key))
                alive.append(module)
                see(layer_id, module)
            except (InputError, KeyboardInterrupt):
                raise
            except BaseException:  # noqa: S112 - a constructor that fails is reported by the adapter, with its layer id
                continue

    jax.eval_shape(record, key_spec())


def reject_shared_owners(layers: Mapping[str, Layer]) -> None:
    """Reject two layers that share one module object."""
    seen: dict[int, str] = {}
    for layer_id, layer in layers.items():
        if layer.owner is not None and seen.setdefault(id(layer.owner), layer_id) != layer_id:
            raise _shared(seen[id(layer.owner)], layer_id, type(layer.owner).__name__)


def _shared(first: str, second: str, name: str) -> InputError:
    return InputError(
        f"layers '{first}' and '{second}' share the parameter or module '{name}', so two stages would train two copies of it; give "
        f"'{second}' its own (for a Linen module: module.clone()); to share a parameter, use a jpipe.Tie"
    )
