"""Check and convert the arguments that a config gives to a function, according to the function's signature and annotations."""

import difflib
import inspect
import math
import reprlib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import jax.numpy as jnp
import numpy as np

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
LARGEST = float(np.finfo(np.float32).max)  # larger settings would diverge, and NumPy would warn


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return a dict from the names of a function's parameters to the parameters; it is empty if the function has no signature."""
    try:
        return dict(inspect.signature(function, eval_str=True).parameters)
    except (TypeError, ValueError, NameError):
        return {}


def check_names(function: Callable[..., Any], name: str, names: Iterable[str], reserved: Mapping[str, str]) -> None:
    """Check that `function` accepts the named arguments and that no required argument is missing.

    `reserved` has the arguments that jpipe sets itself, each with the message for a config that sets it too. Raise ValueError for an
    unknown, reserved or missing argument; the message does not say where in the config.
    """
    parameters = parameters_of(function)
    if not parameters and not inspect.isfunction(function):
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    accepted = [key for key, p in parameters.items() if key not in reserved and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in names:
        if key in reserved:
            raise ValueError(f"'{key}' of '{name}' {reserved[key]}; remove it here")
        if key not in accepted and inspect.Parameter.VAR_KEYWORD not in kinds:
            near = sorted(accepted, key=lambda other: -difflib.SequenceMatcher(None, key, other).ratio())
            listed = f"its arguments, the most similar first: {', '.join(near)}" if near else "it takes none"
            raise ValueError(f"'{name}' has no argument '{key}'; {listed}")
    for key in accepted:
        if parameters[key].default is inspect.Parameter.empty and key not in names:
            raise ValueError(f"'{name}' needs the argument '{key}'; add it")


def convert(function: Callable[..., Any], name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from YAML, by argument, to the types in the annotations of `function`.

    A list becomes a tuple, `bfloat16` a dtype, and 1 becomes 1.0. Raise ValueError if a value has the wrong type, or YAML cannot express
    the argument.
    """
    parameters = parameters_of(function)
    converted: dict[str, Any] = {}
    for key, value in values.items():
        kind = kind_of(parameters[key])
        if kind is None:
            raise ValueError(
                f"'{key}' of '{name}' takes a Python object, which a config cannot express; "
                f"write a function that calls {name} with this object, and name your function as module:function"
            )
        if value is None and _may_be_none(parameters[key]):
            converted[key] = None
            continue
        expected, convert_value = kind
        try:
            converted[key] = convert_value(value)
        except (TypeError, ValueError, KeyError, OverflowError):
            raise ValueError(f"'{key}' of '{name}': expected {expected}, found {reprlib.repr(value)}") from None
        if isinstance(parameters[key].default, float) and isinstance(converted[key], int):
            converted[key] = float(converted[key])
    return converted


def kind_of(parameter: inspect.Parameter) -> tuple[str, Callable[[Any], Any]] | None:
    """Return a description of the YAML values that a parameter accepts, and a function that converts them; None if there are none."""
    choices = alternatives(parameter.annotation)
    origins = {get_origin(choice) or choice for choice in choices}
    if "dtype" in parameter.name:
        return f"a dtype ({', '.join(DTYPES)})", DTYPES.__getitem__
    if origins & {Iterable, Mapping}:  # a pytree with the structure of the model's parameters
        return None
    if float in origins:
        return "a number", _number
    if int in origins:
        return "a whole number", _whole
    if bool in origins:
        return "true or false", _one_of((True, False))
    if tuple in origins:
        return "a list of numbers", _numbers
    if dict in origins:
        return "a mapping of steps to numbers", _steps
    if Literal in origins or str in origins:
        names = [name for choice in choices if get_origin(choice) is Literal for name in get_args(choice)]
        return (f"one of {', '.join(names)}", _one_of(names)) if names else ("text", _text)
    return None


def alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union, flattened; for any other annotation, a list with just that annotation."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for member in get_args(annotation) for choice in alternatives(member)]
    return [annotation]


def _may_be_none(parameter: inspect.Parameter) -> bool:
    return parameter.default is None or types.NoneType in alternatives(parameter.annotation)


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError
    return max(-LARGEST, min(value, LARGEST))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    return value


def _numbers(value: Any) -> Any:
    return tuple(_numbers(item) for item in value) if isinstance(value, list) else _number(value)


def _steps(value: Any) -> dict[int, int | float]:
    if not isinstance(value, dict):
        raise ValueError
    return {_whole(step): _number(number) for step, number in value.items()}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _one_of(names: Iterable[Any]) -> Callable[[Any], Any]:
    """Return a conversion that accepts only these values, with the same type: 1 does not stand for true."""
    known = {(type(name), name): name for name in names}
    return lambda value: known[type(value), value]
