"""Which functions of optax a config can name, found by a rule in the optax that is installed."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, get_origin

import optax
import optax.contrib

from jpipe_train.config.arguments import alternatives, kind_of, parameters_of

# A schedule gets the config's learning rate as the first of these that it has.
RATES = ("peak_value", "init_value", "value")


@cache
def optimizers() -> dict[str, Callable[..., Any]]:
    """Every optimizer by its name: `adamw`, `lamb`, …, `contrib.muon`, ….

    A function of optax or optax.contrib is one if it returns a GradientTransformation, has a learning rate among its arguments, can
    be called with nothing but what a config can express, and is no building block (`scale_by_…`).
    """
    found = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, function, returns in _functions(module):
            rated = any(key.endswith("learning_rate") for key in parameters_of(function))
            if rated and _is_transformation(returns) and not name.startswith("scale_by_") and _needs_no_object(function):
                found[prefix + name] = function
    return found


@cache
def schedules() -> dict[str, Callable[..., Any]]:
    """Every schedule by its name: a function of optax that returns a Schedule and starts or peaks at a number of the config's."""
    return {
        name: function
        for name, function, returns in _functions(optax)
        if returns == optax.Schedule and rate_of(function) and _needs_no_object(function)
    }


def rate_of(schedule: Callable[..., Any]) -> str | None:
    """The argument of a schedule that is the config's learning rate."""
    return next((name for name in RATES if name in parameters_of(schedule)), None)


def takes_schedule(parameter: inspect.Parameter) -> bool:
    """Whether an argument may be a schedule, as its annotation says; without one it may."""
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
