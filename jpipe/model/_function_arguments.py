"""Arguments that a user's function requests through its parameter names: the mode (training or evaluation) and random numbers."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jpipe.errors import InputError

Tree = Any
Modes = Callable[[bool], dict[str, Any]]
"""A function from `train` to the keyword arguments that select training or evaluation."""

Loss = Callable[..., tuple[jax.Array, jax.Array]]
"""`(outputs, labels) -> (sum, weight)`. A function with a further parameter `rngs` or `key` gets random numbers."""

_MODES = {"train": True, "training": True, "is_training": True, "deterministic": False, "use_running_average": False}
"""The value of each mode parameter in training, by name; in evaluation the value is the opposite."""

_LIKE_MODES = ("train", "determin", "running_av", "eval", "infer", "dropout")  # parts of parameter names that may select training
_RANDOM = ("key", "rng", "dropout_rng", "rngs")  # parameters that ask for random numbers


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable by name; empty if its signature is unknown."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some callables written in C have no signature: they count as functions of the input
        return {}


def closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a function's closed-over variables, except unassigned ones; nothing for other objects."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def modes(where: str, call: Callable[..., Any], is_set: Callable[[inspect.Parameter], bool], num_inputs: int | None = None) -> Modes:
    """Return a function from `train` to the arguments of a call that select training or evaluation.

    `call` takes `num_inputs` inputs first (None: one), and `is_set` tells whether a parameter already has a value. Raise InputError if a
    parameter looks like a mode parameter but has an unknown name.
    """
    parameters = list(parameters_of(call).values())
    names = [parameter.name for parameter in parameters if parameter.name in _MODES and not is_set(parameter)]
    for parameter in parameters[num_inputs or 1 :]:
        if not names and parameter.name not in (*_MODES, *_RANDOM) and _looks_like_mode(parameter):
            raise InputError(
                where=where,
                expected=f"one of {', '.join(_MODES)} as the parameter that selects training",
                found=f"'{parameter.name}'",
                change="rename the parameter, or wrap the layer",
            )
    return lambda train: {name: _MODES[name] == train for name in names}


def is_bound(function: Callable[..., Any]) -> Callable[[inspect.Parameter], bool]:
    """Return a function that tells whether a parameter already has a value, as a keyword of a `functools.partial`."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return lambda parameter: parameter.name in bound


def _looks_like_mode(parameter: inspect.Parameter) -> bool:
    name, default = parameter.name.lower(), parameter.default
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return False
    if isinstance(default, str):  # mode="train"
        return any(word in default.lower() for word in _LIKE_MODES)
    return (default is inspect.Parameter.empty or isinstance(default, bool)) and any(word in name for word in _LIKE_MODES)


@dataclass(frozen=True)
class Randomness:
    """The parameter through which a callable asks for random numbers."""

    # the name of the parameter: `key`, `rng` or `dropout_rng` for a random key, `rngs` for a `flax.nnx.Rngs`; None if the callable has no
    # such parameter
    name: str | None = None
    is_needed: bool = False  # whether the parameter has no default. With the default None it gets random numbers only in training.

    @staticmethod
    def of(call: Callable[..., Any]) -> "Randomness":
        """Return the parameter through which `call` asks for random numbers."""
        for p in parameters_of(call).values():
            if p.name in _RANDOM and (p.default is None or p.default is p.empty) and p.kind is not p.VAR_KEYWORD:
                return Randomness(p.name, p.default is p.empty)
        return Randomness()

    def arguments(self, key: jax.Array | None, train: bool) -> dict[str, Any]:
        """Return the keyword argument with random numbers; empty if the call gets none."""
        if self.name is None or key is None or not (train or self.is_needed):
            return {}
        return {self.name: nnx.Rngs(key) if self.name == "rngs" else key}


def arguments_of(x: Tree, num_inputs: int | None) -> tuple[Any, ...]:
    """Return the arguments of a call of a model: several inputs are the items of the tuple `x`, a single input is `x` itself."""
    return (x,) if num_inputs in (None, 1) else tuple(x)


def call_by_name(function: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Call a function with named arguments that may stand between positional arguments, as in `apply(params, rng, x)`."""
    arguments, remaining, keywords = [], list(positional), dict(named)
    for parameter in parameters_of(function).values():
        if not remaining or parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            break
        arguments.append(keywords.pop(parameter.name) if parameter.name in keywords else remaining.pop(0))
    return function(*arguments, *remaining, **keywords)


# Losses and metrics ----------------------------------------------------------------------------------------------------


def random_parameter(function: Loss) -> str | None:
    """Return the name of the parameter that asks for random numbers, `rngs` or `key`, without default or with the default None."""
    parameters = list(parameters_of(function).values())[2:]  # after the outputs and labels
    names = (p.name for p in parameters if p.name in ("rngs", "key") and (p.default is None or p.default is p.empty))
    return next(names, None)


def call_with_randomness(function: Loss, outputs: Tree, labels: Tree, key: jax.Array | None) -> Any:
    """Call a loss or metric. If it asks for random numbers, `rngs` gets a `flax.nnx.Rngs`, and `key` gets the key."""
    name = random_parameter(function)
    if name is None:
        return function(outputs, labels)
    assert key is not None
    randomness: dict[str, Any] = {name: nnx.Rngs(key) if name == "rngs" else key}
    return function(outputs, labels, **randomness)
