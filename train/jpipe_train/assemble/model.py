"""The model, the loss and the metrics that a config names: built-in ones, or functions of the user's."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jpipe
from jpipe import InputError
from jpipe_train.config import entry_point
from jpipe_train.config.arguments import check_names, parameters_of
from jpipe_train.config.config import EvalConfig, LossConfig
from jpipe_train.config.model_config import ModelConfig
from jpipe_train.config.tune_config import TuneConfig
from jpipe_train.models import cross_entropy
from jpipe_train.models import layers as built_in


def layers(
    config: ModelConfig,
    batch_size: int,
    computes: str | None = None,
    chunk: int | None = None,
    inputs: Callable[[], Any] | None = None,
    tune: TuneConfig | None = None,
) -> jpipe.LayerStack:
    """Return the layers of the built-in model or of `model.target`, which returns a LayerStack or a whole model.

    Args:
        config: the section `model`.
        batch_size: rows of a batch.
        computes: the dtype in which the built-in model computes, if other than `compute_dtype`.
        chunk: the number of positions whose logits the built-in loss computes at a time; None if the model computes all of them.
        inputs: returns the inputs of a batch, or their shapes and dtypes. A whole model is cut for these, so that the same layers result
            whatever the plan is. None: whole models are rejected.
        tune: the section `tune`, for adapters in the built-in model; None: without.

    Raises:
        InputError: the target does not exist, fails, or returns no model; its model cannot be cut.
    """
    if config.target is None:
        return built_in.layers(config if computes is None else config.model_copy(update={"compute_dtype": computes}), chunk, tune)
    model = _of_target(config.target, config.arguments, batch_size)
    if isinstance(model, jpipe.LayerStack):
        return model
    if inputs is None or not _is_whole(model):
        raise InputError(f"model.target: expected '{config.target}' to return a model or a jpipe.LayerStack, found {_describe(model)}")
    batch = jax.tree.map(_spec, inputs())
    arguments = batch if isinstance(batch, tuple) else (batch,)
    return jpipe.LayerStack.from_model(model, *arguments)


def _of_target(target: str, arguments: Mapping[str, Any], batch_size: int) -> Any:
    """Call a target with these arguments; bind them instead if it has a parameter `rngs`, and so is a constructor."""
    function = entry_point.load(target, "model.target")
    signed = getattr(function, "__init__") if inspect.isclass(function) else function  # noqa: B009 - read, never called
    parameters, optional = parameters_of(signed), {"batch_size": batch_size}
    if "rngs" not in parameters:
        return entry_point.call(target, "model.target", arguments, optional=optional)
    wanted = {key: value for key, value in optional.items() if key in parameters and key not in arguments}
    with entry_point.errors_about("model.arguments"):
        check_names(signed, target, arguments, dict.fromkeys(("self", "rngs", *wanted), "is given by jpipe"))
    return lambda rngs: function(**wanted, **arguments, rngs=rngs)


def _is_whole(model: Any) -> bool:
    """Return whether a value may be a whole model: a module, or any other callable but a class."""
    return callable(model) and not inspect.isclass(model)


def _spec(rows: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(rows.shape), jax.dtypes.canonicalize_dtype(rows.dtype))


def loss(config: LossConfig) -> Any:
    """Return the loss, `(outputs, labels) -> (sum, weight)`: the cross-entropy, or `loss.target` with its arguments.

    Raises:
        InputError: the target does not exist, or has other arguments.
    """
    if config.target is None:
        return cross_entropy.loss
    function = entry_point.load(config.target, "loss.target")
    first_two, remaining = list(parameters_of(function).values())[:2], list(parameters_of(function).values())[2:]
    random = [p for p in remaining if p.name in ("rngs", "key") and p.default in (None, p.empty)]
    filled = dict.fromkeys([p.name for p in (*first_two, *random)], "is given by jpipe")
    with entry_point.errors_about("loss.arguments"):
        check_names(function, config.target, config.arguments, filled)
    return partial(function, **config.arguments)


def metrics(config: EvalConfig) -> dict[str, Any]:
    """Return the metrics of an evaluation by name, each `(outputs, labels) -> (sum, weight)`.

    Raises:
        InputError: a target does not exist.
    """
    named = config.metrics.items()
    known = {"accuracy": _accuracy, "top5": _top5, "cross_entropy": _cross_entropy}
    return {name: known.get(metric) or _LogitsMetric(entry_point.load(metric, f"eval.metrics.{name}")) for name, metric in named}


@dataclass(frozen=True)
class _LogitsMetric:
    """A metric of the user's, called with logits even if the built-in loss computes them itself."""

    metric: Any

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.metric)  # it may ask for random numbers

    def __call__(self, outputs: Any, labels: Any, **random: Any) -> Any:
        return self.metric(cross_entropy.all_logits(outputs), labels, **random)


def _accuracy(outputs: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    """Return how many labels have the largest logit, and the number of labels."""
    _check_classes("accuracy", outputs, labels)
    return cross_entropy.correct(outputs, labels)


def _top5(outputs: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    """Return how many labels have one of the five largest logits, and the number of labels."""
    _check_classes("top5", outputs, labels)
    if (classes := cross_entropy.vocab_size(outputs)) < 5:
        raise InputError(f"eval.metrics: top5: expected logits of at least 5 classes, found {classes}; leave it out")
    return cross_entropy.correct(outputs, labels, 5)


def _cross_entropy(outputs: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy of the labels in nats, whatever the loss is, and the number of labels."""
    _check_classes("cross_entropy", outputs, labels)
    return cross_entropy.loss(outputs, labels)


def _check_classes(metric: str, outputs: Any, labels: Any) -> None:
    """Check that the outputs are logits and the labels are classes."""
    logits, tokens = (outputs["tokens"], labels["tokens"]) if isinstance(labels, dict) else (outputs, labels)
    shape = (logits.hidden if isinstance(logits, cross_entropy.Unprojected) else logits).shape
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or shape[:-1] != tokens.shape:
        raise InputError(
            f"eval.metrics: {metric}: expected logits of classes and integer labels, found outputs {list(shape)} and "
            f"{tokens.dtype}{list(tokens.shape)}; name a module:function of your own"
        )


def _describe(value: Any) -> str:
    """Describe the value that was returned instead of a model, with advice."""
    if value is None:
        return "None; does the function end with return?"
    if isinstance(value, dict):
        return f"a dict with keys {', '.join(map(str, value))}; wrap it in jpipe.LayerStack(…)"
    if inspect.isclass(value):
        return f"the class {value.__name__}; return an instance of it, or name the class itself as model.target"
    return f"{type(value).__name__}; return jpipe.LayerStack({{'layer id': layer, …}})"
