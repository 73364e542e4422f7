"""The arguments that a config gives to a function: names held against its signature, values against its annotations."""

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
LARGEST = float(np.finfo(np.float32).max)  # settings beyond it diverge all the same, and NumPy would warn of each


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function by name; none where it has no signature."""
    try:
        return dict(inspect.signature(function, eval_str=True).parameters)
    except (TypeError, ValueError, NameError):
        return {}


def check_names(function: Callable[..., Any], name: str, given: Iterable[str], filled: Mapping[str, str]) -> None:
    """Refuse arguments that `function` does not have, and a call that lacks one.

    Args:
        function: what will be called; messages call it `name`.
        given: the names in the config.
        filled: arguments that do not come from there, each with what to say to somebody who gives it all the same.

    Raises:
        ValueError: the message, without the place in the config.
    """
    parameters = parameters_of(function)
    if not parameters and not inspect.isfunction(function):
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    own = [key for key, p in parameters.items() if key not in filled and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in given:
        if key in filled:
            raise ValueError(f"'{key}' of '{name}' {filled[key]}; leave it out here")
        if key not in own and inspect.Parameter.VAR_KEYWORD not in kinds:
            near = sorted(own, key=lambda other: -difflib.SequenceMatcher(None, key, other).ratio())
            listed = f"its arguments, the nearest first: {', '.join(near)}" if near else "it takes none"
            raise ValueError(f"'{name}' has no argument '{key}'; {listed}")
    for key in own:
        if parameters[key].default is inspect.Parameter.empty and key not in given:
            raise ValueError(f"'{name}' needs the argument '{key}'; add it")


def converted(function: Callable[..., Any], name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values from YAML as `function`, which has annotations, wants them: a list as a tuple, `bfloat16` as a dtype, 1 as 1.0.

    Raises:
        ValueError: a value of the wrong type, or an argument that only Python can express.
    """
    parameters = parameters_of(function)
    values: dict[str, Any] = {}
    for key, value in given.items():
        kind = kind_of(parameters[key])
        if kind is None:
            raise ValueError(
                f"'{key}' of '{name}' takes a Python object, which a config cannot express; "
                f"write a function that calls {name} with it and name that one, as module:function"
            )
        if value is None and _may_be_none(parameters[key]):
            values[key] = None
            continue
        words, convert = kind
        try:
            values[key] = convert(value)
        except (TypeError, ValueError, KeyError, OverflowError):
            raise ValueError(f"'{key}' of '{name}': expected {words}, found {reprlib.repr(value)}") from None
        if isinstance(parameters[key].default, float) and isinstance(values[key], int):
            values[key] = float(values[key])
    return values


def kind_of(parameter: inspect.Parameter) -> tuple[str, Callable[[Any], Any]] | None:
    """What YAML can give for a parameter: the words for it and the conversion; None where only Python has the like."""
    choices = alternatives(parameter.annotation)
    origins = {get_origin(choice) or choice for choice in choices}
    if "dtype" in parameter.name:
        return f"a dtype ({', '.join(DTYPES)})", DTYPES.__getitem__
    if origins & {Iterable, Mapping}:  # a tree like that of the parameters
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
    """The members of a union, unions inside it too; of anything else itself."""
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
    """Of these very values: 1 is not true here."""
    known = {(type(name), name): name for name in names}
    return lambda value: known[type(value), value]
