"""Find the optimizers and schedules that a config can name, in the installed optax and in `jpipe.optimizers`."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_origin

import optax
import optax.contrib

import jpipe
from jpipe_train.config.functions.arguments import alternatives, kind_of, parameters_of

# The config's learning rate is passed as the first of these arguments that a schedule has.
RATES = ("peak_value", "init_value", "value")


@cache
def optimizers() -> dict[str, Callable[..., Any]]:
    """Return a dict from names to optimizers: `adamw`, `lamb`, `contrib.muon`, `compensated_adamw` and so on.

    A function of optax, optax.contrib or jpipe.optimizers is included if it returns a GradientTransformation, has an argument for the
    learning rate, can be called with values that a config can express, and is not a building block (`scale_by_…`).
    """
    functions = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib), ("", jpipe.optimizers)):
        for name, function, returns in _functions(module):
            has_rate = any(key.endswith("learning_rate") for key in parameters_of(function))
            if has_rate and _is_transformation(returns) and not name.startswith("scale_by_") and _needs_no_object(function):
                functions[prefix + name] = function
    return functions


@cache
def schedules() -> dict[str, Callable[..., Any]]:
    """Return a dict from names to schedules: the functions of optax that return a Schedule and start or peak at a given learning rate."""
    return {
        name: function
        for name, function, returns in _functions(optax)
        if returns == optax.Schedule and rate_of(function) and _needs_no_object(function)
    }


def rate_of(schedule: Callable[..., Any]) -> str | None:
    """Return the name of the schedule's argument for the learning rate, or None if it has none."""
    return next((name for name in RATES if name in parameters_of(schedule)), None)


def takes_schedule(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter accepts a schedule: its annotation allows a callable, or it has no annotation."""
    choices = alternatives(parameter.annotation)
    return any(choice in (Any, parameter.empty) or get_origin(choice) is Callable or choice is Callable for choice in choices)


def _functions(module: Any) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    for name, value in sorted(vars(module).items()):
        if not name.startswith("_") and callable(value) and not inspect.isclass(value) and parameters_of(value):
            yield name, value, inspect.signature(value, eval_str=True).return_annotation


def _is_transformation(returns: Any) -> bool:
    return inspect.isclass(returns) and issubclass(returns, optax.GradientTransformation)


def _needs_no_object(function: Callable[..., Any]) -> bool:
    return all(p.default is not p.empty or kind_of(p) for p in parameters_of(function).values())
