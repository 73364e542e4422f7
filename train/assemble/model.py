"""The model and the loss that a config names: the built-in GPT and its cross-entropy, or functions of the user's own."""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

import jpipe
from jpipe import InputError
from train.assemble import gpt
from train.config import entry_point
from train.config.arguments import check_names, parameters_of
from train.config.config import EvalConfig, LossConfig, ModelConfig


def layers(config: ModelConfig, computes: str | None = None) -> jpipe.LayerStack:
    """The GPT, or what `model.target` returns.

    Args:
        config: which model.
        computes: the dtype in which the GPT's layers compute, if it is another than `compute_dtype`.

    Raises:
        InputError: the target does not exist, fails, or returns something else than a LayerStack.
    """
    if config.target is None:
        return gpt.gpt(config if computes is None else config.model_copy(update={"compute_dtype": computes}))
    stack = entry_point.call(config.target, "model.target", config.arguments)
    if not isinstance(stack, jpipe.LayerStack):
        raise InputError(f"model.target: expected '{config.target}' to return a jpipe.LayerStack, found {_instead(stack)}")
    return stack


def loss(config: LossConfig) -> Any:
    """`(outputs, labels) -> (sum, weight)`: the cross-entropy, or `loss.target` with its arguments.

    Raises:
        InputError: the target does not exist, or has other arguments.
    """
    if config.target is None:
        return gpt.loss
    function = entry_point.load(config.target, "loss.target")
    filled = dict.fromkeys(list(parameters_of(function))[:2], "is given by jpipe")
    with entry_point.placed("loss.arguments"):
        check_names(function, config.target, config.arguments, filled)
    return partial(function, **config.arguments)


def metrics(config: EvalConfig) -> dict[str, Any]:
    """By name `(outputs, labels) -> (sum, weight)` of each metric of an evaluation.

    Raises:
        InputError: a target does not exist.
    """
    named = config.metrics.items()
    return {name: entry_point.load(metric, f"eval.metrics.{name}") if ":" in metric else _accuracy for name, metric in named}


def _accuracy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, int]:
    """How many of the labels have the largest logit, and how many there are."""
    if not jnp.issubdtype(labels.dtype, jnp.integer) or logits.shape[:-1] != labels.shape:
        raise InputError(
            f"eval.metrics: accuracy: expected logits of classes and integer labels, found {logits.dtype}{list(logits.shape)} and "
            f"{labels.dtype}{list(labels.shape)}; name a module:function of your own"
        )
    return (logits.argmax(-1) == labels).sum(), labels.size


def _instead(found: Any) -> str:
    """What was returned instead of a LayerStack, and what to do."""
    if found is None:
        return "None; does the function end with return?"
    if isinstance(found, dict):
        return f"a dict with keys {', '.join(map(str, found))}; wrap it in jpipe.LayerStack(…)"
    if inspect.isclass(found):
        return (
            f"the class {found.__name__}; return a LayerStack of layers, such as {{'first': lambda rngs: {found.__name__}(…, rngs=rngs)}}"
        )
    if isinstance(found, nnx.Module):
        name = type(found).__name__
        return (
            f"the NNX module {name}, built already; return a LayerStack of its parts, "
            f"each a constructor such as lambda rngs: {name}(…, rngs=rngs)"
        )
    if isinstance(found, linen.Module):
        return f"the Linen module {type(found).__name__}; return a LayerStack of its parts, {{'first': nn.Dense(8), …}}"
    return f"{type(found).__name__}; return jpipe.LayerStack({{'layer id': layer, …}})"
