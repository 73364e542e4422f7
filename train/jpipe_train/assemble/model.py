"""Build the model and the loss that a config names: built-in ones, or the user's functions."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

import jpipe
from jpipe import InputError
from jpipe_train import registry
from jpipe_train.config.config import Config
from jpipe_train.config.functions import entry_point
from jpipe_train.config.functions.arguments import check_names, convert, parameters_of
from jpipe_train.config.model_section import ModelSection


def layers(config: Config, inputs: Callable[[], Any] | None = None) -> jpipe.LayerStack:
    """Return the layers of the model. Either its kind builds them, or `model.target` returns a LayerStack or a whole model.

    A whole model is traced with the inputs of a batch, or their specs, that `inputs` returns, and cut into layers, which do not depend on
    the plan; without `inputs` it is rejected. Raise InputError if the target does not exist, fails, or does not return a model; or its
    model cannot be cut.
    """
    if (target := config.model.target) is None:
        return config.model.build_layers(config, inputs)
    model = _of_target(target, config.model.arguments, config.train.batch_size)
    if isinstance(model, jpipe.LayerStack):
        return model
    if inputs is None or not callable(model) or inspect.isclass(model):  # a whole model is a module or another callable
        raise InputError(f"model.target: expected '{target}' to return a model or a jpipe.LayerStack, found {_describe(model)}")
    batch = jax.tree.map(lambda rows: jax.ShapeDtypeStruct(tuple(rows.shape), jax.dtypes.canonicalize_dtype(rows.dtype)), inputs())
    arguments = batch if isinstance(batch, tuple) else (batch,)
    return jpipe.LayerStack.from_model(model, *arguments)


def check_target(config: ModelSection) -> None:
    """Check that `model.target` exists and accepts `model.arguments`, without calling it."""
    target, function = str(config.target), entry_point.load(str(config.target), "model.target")
    signed = getattr(function, "__init__") if inspect.isclass(function) else function  # noqa: B009 - read, never called
    supplied = [name for name in ("self", "rngs", "batch_size") if name in parameters_of(signed) and name not in config.arguments]
    with entry_point.errors_about("model.arguments"):
        check_names(signed, target, config.arguments, dict.fromkeys(supplied, "is given by jpipe"))


def _of_target(target: str, arguments: Mapping[str, Any], batch_size: int) -> Any:
    """Call a target with its arguments. If it has a parameter `rngs`, return a function of `rngs` instead."""
    function = entry_point.load(target, "model.target")
    signed = getattr(function, "__init__") if inspect.isclass(function) else function  # noqa: B009 - read, never called
    parameters, optional = parameters_of(signed), {"batch_size": batch_size}
    if "rngs" not in parameters:
        return entry_point.call(target, "model.target", arguments, optional=optional)
    wanted = {key: value for key, value in optional.items() if key in parameters and key not in arguments}
    with entry_point.errors_about("model.arguments"):
        check_names(signed, target, arguments, dict.fromkeys(("self", "rngs", *wanted), "is given by jpipe"))
    return lambda rngs: function(**wanted, **arguments, rngs=rngs)


def loss(config: Config) -> Any:
    """Return the loss function `(outputs, labels) -> (sum, weight)`: the loss of this name or `loss.target`, with its arguments.

    Raise InputError if the target does not exist, or has other arguments; or the package that adds the loss cannot be imported.
    """
    if (name := config.loss_name) is not None:
        found, arguments = registry.find("losses", name), config.loss.arguments
        with entry_point.errors_about("loss.arguments"):
            if inspect.isclass(found):
                check_names(found, name, arguments, {})
                return found(**convert(found, name, arguments))
            if arguments:
                raise ValueError(f"'{name}' takes no arguments; remove them")
        return found
    target = str(config.loss.target)
    function = entry_point.load(target, "loss.target")
    first_two, remaining = list(parameters_of(function).values())[:2], list(parameters_of(function).values())[2:]
    random = [p for p in remaining if p.name in ("rngs", "key") and p.default in (None, p.empty)]
    filled = dict.fromkeys([p.name for p in (*first_two, *random)], "is given by jpipe")
    with entry_point.errors_about("loss.arguments"):
        check_names(function, target, config.loss.arguments, filled)
    return partial(function, **config.loss.arguments)


def _describe(value: Any) -> str:
    """Describe a value that the target returned in place of a model, and say what to return instead."""
    if value is None:
        return "None; end the function with return"
    if isinstance(value, dict):
        return f"a dict with keys {', '.join(map(str, value))}; wrap it in jpipe.LayerStack(…)"
    if inspect.isclass(value):
        return f"the class {value.__name__}; return an instance of it, or name the class itself as model.target"
    return f"{type(value).__name__}; return jpipe.LayerStack({{'layer id': layer, …}})"
