"""Reject arrays that a layer closes over, because they would not be trained."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import FrozenDict

from jpipe.errors import InputError
from jpipe.model._function_arguments import closed_over
from jpipe.model._layer import describe
from jpipe.model.jaxprs._dependence import bodies

_FEW = 4  # an array with at most this many numbers counts as a constant, unless it is a module's
_MOST_OBJECTS = 10_000  # the most objects that are searched for the name of an array


def reject_constants(layer_id: str, layer: Any, traced: Any, trace: Callable[[], Any]) -> None:
    """Raise `InputError` if the forward of a layer closes over floating-point arrays: parameters that would not be trained.

    Integers, arrays that the forward makes itself, arrays of a few numbers, and NumPy arrays outside of modules are constants. The names in
    the message are found in `layer`, which the user has passed; `trace` traces the forward once more.
    """
    of_jax, of_numpy = _floats(traced), _floats(traced, (np.ndarray,))
    if not of_jax and not of_numpy:
        return
    # An array that a forward makes while it is traced is a different object when it is traced again.
    again = {id(constant) for constant in _floats(trace())} if of_jax else set()
    names = _names(layer, of_jax, of_numpy)
    for constant in (*of_jax, *of_numpy):
        place = names.get(id(constant))
        is_of_module = place is not None and place[1] is not None
        if not is_of_module and (id(constant) not in again or constant.size <= _FEW):
            continue
        name, module = (None, None) if place is None else place
        is_named = module is not None and not isinstance(module, Mapping)
        shown = f"{describe(constant)}{f', {name}' if name else ''}{f' of a {type(module).__name__}' if is_named else ''}"
        raise InputError(
            f"layer '{layer_id}': its forward reads an array from outside ({shown}), which would not be trained; "
            + _remedy(layer_id, module)
        )


def _remedy(layer_id: str, module: Any) -> str:
    weights = f"to begin with these weights, pass params={{'{layer_id}': …}} to init"
    if isinstance(module, nnx.Module):
        kind = type(module).__name__
        return f"give the constructor as the layer, lambda rngs: {kind}(…, rngs=rngs); {weights}, with nnx.state(module, nnx.Param)"
    if isinstance(module, nnx.Variable):
        return f"make it in an NNX module and give the constructor as the layer, lambda rngs: …; {weights}"
    if isinstance(module, (linen.Module, Mapping)):
        return f"give the Linen module itself as the layer, not bound to variables; {weights}, with its variables['params']"
    return (
        f"if it is a parameter, give a Flax module or a jpipe.Layer with an init ({weights}); "
        "if it is a constant, make it a NumPy array (np.asarray), or compute it in the forward"
    )


def built_module(layer: Any) -> str | None:
    """Return the name under which a layer holds a built module, or None. Such a module often is why a forward cannot be traced."""
    for name, value in _reachable(layer):
        if isinstance(value, nnx.Module) or _is_bound(value):
            return f"'{name}', a {type(value).__name__}" if name else f"a {type(value).__name__}"
    return None


_OF_JAX = (jax.Array, jax.Ref) if hasattr(jax, "Ref") else (jax.Array,)


def _floats(traced: Any, kinds: Any = _OF_JAX) -> list[Any]:
    """Return the distinct floating-point arrays of these types among the constants of a closed jaxpr."""
    constants = {id(c): c for c in _constants(traced.jaxpr, traced.consts) if isinstance(c, kinds) and jnp.issubdtype(c.dtype, jnp.inexact)}
    return list(constants.values())


def _constants(jaxpr: Any, consts: Sequence[Any]) -> Iterator[Any]:
    """Yield the constants of a jaxpr and of the jaxprs nested in it."""
    yield from consts
    for equation in jaxpr.eqns:
        for body in bodies(equation):
            yield from _constants(*body)


def _names(layer: Any, arrays: list[Any], of_numpy: list[Any]) -> dict[int, tuple[str, Any]]:
    """Return (name, module or None) of each array that a layer holds, by id of the array; NumPy arrays count only in modules.

    JAX copies NumPy arrays into constants, so these are found by their values.
    """
    wanted = {id(array) for array in arrays}
    names: dict[int, tuple[str, Any]] = {}
    for name, value in _reachable(layer):
        if id(value) in wanted:
            names.setdefault(id(value), (name, None))
        elif isinstance(value, (nnx.Module, nnx.Variable)) or _is_bound(value) or _are_variables(value):
            for path, array in _arrays(value):
                if isinstance(array, np.ndarray):
                    names |= {id(one): (_joined(name, path), value) for one in of_numpy if _equal(one, array)}
                if id(array) in wanted and names.get(id(array), ("", None))[1] is None:
                    names[id(array)] = (_joined(name, path), value)
    return names


def _equal(constant: Any, array: Any) -> bool:
    return constant.shape == array.shape and np.array_equal(constant, array.astype(constant.dtype))


def _arrays(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, array) of the variables of a module, or of a dict of variables."""
    if isinstance(module, linen.Module):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(module.variables)[0]:
            yield jax.tree_util.keystr(keys, simple=True, separator="."), leaf
        return
    if isinstance(module, Mapping):
        yield from ((jax.tree_util.keystr(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(module)[0])
        return
    for keys, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            for inner, leaf in jax.tree_util.tree_flatten_with_path(variable.get_value())[0]:
                yield ".".join(map(str, keys)) + jax.tree_util.keystr(inner), leaf


def _is_bound(value: Any) -> bool:
    return isinstance(value, linen.Module) and value.scope is not None


def _are_variables(value: Any) -> bool:
    """Return whether a value looks like the variables that `apply` of a Linen module takes."""
    return isinstance(value, dict | FrozenDict) and isinstance(value.get("params"), Mapping)


def _reachable(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of everything that a layer holds, outermost first: outer variables, arguments of partials, items, attributes."""
    seen: dict[int, Any] = {}
    waiting = [("", layer)]
    for name, value in waiting:  # the list grows in the loop
        if id(value) in seen or len(seen) > _MOST_OBJECTS:
            continue
        seen[id(value)] = value  # kept alive, so that no other object gets its id
        yield name, value
        waiting += [(_joined(name, part), inner) for part, inner in _parts(value)]


def _joined(name: str, part: str) -> str:
    return f"{name}{part}" if not name or not part or part.startswith("[") else f"{name}.{part}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of a value; nothing for values that cannot hold an array of the user."""
    if isinstance(
        value, (str, bytes, int, float, complex, type(None), ModuleType, jax.Array, np.ndarray, nnx.Module, nnx.Variable)
    ) or _is_bound(value):
        return
    if isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"args[{i}]", inner) for i, inner in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in list(value.items()))
    elif isinstance(value, (tuple, list, set, frozenset)):
        yield from ((f"[{i}]", inner) for i, inner in enumerate(value))
    elif inspect.ismethod(value):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, type):
        yield "", vars(value).get("__call__")
    elif inspect.isfunction(value):
        yield from _variables(value)
    else:  # a user's object, or a wrapped function
        yield "", _attribute(value, "__wrapped__")
        yield from ((str(key), inner) for key, inner in list(getattr(value, "__dict__", {}).items()))
        slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
        yield from ((name, _attribute(value, name)) for name in slots if not name.startswith("__"))
        yield "", type(value)


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # a user's object may raise any error
        return None


def _variables(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the outer variables that a function reads, with their names."""
    yield "", getattr(function, "__wrapped__", None)
    yield from closed_over(function)
    for name in _names_in(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from (("", default) for default in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function and its nested functions read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
