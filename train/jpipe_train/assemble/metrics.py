"""The evaluation metrics that a config names: built-in metrics, or the user's functions.

The pipeline adds up pairs (sum, weight) over microbatches, replicas and batches. A metric that is not a mean, such as F1, consists of
several parts; each part is a mean, and `combined` computes the metric from these means at the end.
"""

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jpipe import InputError
from jpipe_train.assemble import model as models
from jpipe_train.config.config import BestConfig, Config, EvalConfig, Mode, StopConfig
from jpipe_train.config.functions import entry_point
from jpipe_train.config.model_section import ModelSection
from jpipe_train.losses import cross_entropy, squared_error

Pair = tuple[jax.Array, jax.Array]


def metrics(config: EvalConfig, model: ModelSection | None = None, loss: Any = None) -> dict[str, Any]:
    """Return functions `(outputs, labels) -> (sum, weight)` by name; `combined` computes the metrics from their means.

    The model determines the number of classes, and may add metrics, as the property `metrics` of a loss may, a mapping from names to
    (function, "min" or "max"). Raise InputError if a target does not exist.
    """
    functions: dict[str, Any] = {} if model is None else dict(model.extra_metrics())
    has_more = bool(functions)
    functions |= {name: function for name, (function, _) in getattr(loss, "metrics", {}).items()}
    classes = None if model is None else model.label_count
    for name, metric in config.metrics.items():
        if metric in _IN_PARTS:
            count = _IN_PARTS[metric].count(classes or 0)
            functions |= {f"{metric}:{i}:{name}": _part(_IN_PARTS[metric].sums, count, i) for i in range(count)}
        elif metric in _MEANS:
            functions[name] = _MEANS[metric]
        else:
            functions[name] = _LogitsMetric(entry_point.load(metric, f"eval.metrics.{name}"), has_more)
    return functions


def results(config: Config) -> dict[str, Mode]:
    """Return each result of a validation, named as in `metrics.jsonl`, with "min" if lower values are better, else "max"."""
    named = dict.fromkeys(config.model.extra_metrics(), "loss") | config.eval.metrics
    sources: dict[str, Mode] = {f"val_loss_{source.name}": "min" for source in config.data.sources or ()}
    has_average = config.optimizer.ema_decay is not None
    of_loss = {} if config.loss_name is None else getattr(models.loss(config), "metrics", {})
    modes: dict[str, Mode] = {f"val_{name}": mode for name, (_, mode) in of_loss.items()}
    modes |= {f"{name}_ema": mode for name, mode in modes.items() if has_average}
    return modes | results_of(named, has_average=has_average) | sources


def results_of(named: Mapping[str, str], *, has_average: bool) -> dict[str, Mode]:
    """Return the same as `results`, without the losses of sources; `named` maps names to built-in metrics or `module:function`."""
    kinds = {"loss": "loss", **named}
    modes: dict[str, Mode] = {f"val_{name}": "min" if kind in _LOWER_IS_BETTER else "max" for name, kind in kinds.items()}
    return modes | {f"{name}_ema": mode for name, mode in modes.items() if has_average}


def mode_of(chosen: StopConfig | BestConfig, results: Mapping[str, Mode]) -> Mode:
    """Return whether lower or higher values of the chosen result are better. For the user's functions, higher values are."""
    return chosen.mode or results.get(chosen.metric, "max")


def combined(means: Mapping[str, float]) -> dict[str, float]:
    """Return `means` with each metric in place of its parts. The means are over a whole data set."""
    values: dict[str, float] = {}
    parts: dict[str, tuple[str, list[float]]] = {}
    for key, mean in means.items():
        if (part := _PART.fullmatch(key)) is None:
            values[key] = mean
            continue
        name = part["before"] + part["name"]
        values.setdefault(name, math.nan)  # the metric takes the place of its first part
        parts.setdefault(name, (part["metric"], []))[1].append(mean)
    return values | {name: _IN_PARTS[metric].value(numbers) for name, (metric, numbers) in parts.items()}


def centred(
    means: Mapping[str, tuple[float, float]], microbatches: Mapping[str, Sequence[tuple[Any, Any]]]
) -> dict[str, tuple[float, float]]:
    """Return `means` with the parts of `pearson` in float64, computed from the sums of each microbatch about its centre.

    Sums of squares in float32 would lose all digits if the numbers vary little compared with their size. `means` has (mean, weight) of a
    batch by name, and is waited for; `microbatches` are as in `jpipe.Evaluation`.
    """
    groups: dict[str, list[str]] = {}
    for key in means:
        if (part := _PART.fullmatch(key)) is not None and part["metric"] == "pearson":
            groups.setdefault(part["before"] + part["name"], []).append(key)
    exact = {key: pair for key, pair in means.items() if not any(key in keys for keys in groups.values())}
    for keys in groups.values():
        each = zip(*(microbatches[key] for key in keys), strict=True)
        sums = [_raw_moments(float(pairs[0][1]), *(float(total) for total, _ in pairs)) for pairs in each]
        count = means[keys[0]][1]
        exact |= {key: (sum(column) / count, count) for key, column in zip(keys, zip(*sums, strict=True), strict=False)}
    return exact


_ROUNDING = 1e-14  # relative rounding error of the difference of two means of squares in float64
_PART = re.compile(r"(?P<before>(val_)?)(?P<metric>\w+):\d+:(?P<name>\w+)")


@dataclass(frozen=True)
class _InParts:
    """A metric that is computed from several means."""

    count: Callable[[int], int]  # a function from the number of classes to the number of parts
    # a function (outputs, labels, count) -> (the sum of each part, the weight of all parts)
    sums: Callable[[Any, Any, int], tuple[list[jax.Array], jax.Array]]
    value: Callable[[Sequence[float]], float]  # a function from the means of the parts, in order, to the metric


@dataclass(frozen=True)
class _Part:
    """One part of a metric."""

    sums: Any
    count: int
    index: int

    def __call__(self, outputs: Any, labels: Any) -> Pair:
        sums, weight = self.sums(_without_experts(outputs), labels, self.count)
        return sums[self.index], weight


_part = functools.cache(_Part)
"""Return the same object for the same part, because an evaluation is compiled once for each object."""


@dataclass(frozen=True)
class _LogitsMetric:
    """A user's metric that receives logits, even if the built-in loss computes them itself."""

    metric: Any  # the user's function
    has_more: bool  # whether the outputs are a dict with more than the logits. The logits then have the key "tokens".

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.metric)  # it may have an argument for random numbers

    def __call__(self, outputs: Any, labels: Any, **random: Any) -> Any:
        return self.metric(cross_entropy.all_logits(outputs["tokens"] if self.has_more else outputs), labels, **random)


# Means -------------------------------------------------------------------------------------------------------------------


def _accuracy(outputs: Any, labels: Any) -> Pair:
    """Return the number of labels that have the largest logit, and the number of labels."""
    _check_classes("accuracy", outputs, labels)
    return cross_entropy.correct(outputs, labels)


def _top5(outputs: Any, labels: Any) -> Pair:
    """Return the number of labels that have one of the five largest logits, and the number of labels."""
    _check_classes("top5", outputs, labels)
    if (classes := cross_entropy.vocab_size(outputs)) < 5:
        raise InputError(f"eval.metrics: top5: expected logits of at least 5 classes, found {classes}; remove top5")
    return cross_entropy.correct(outputs, labels, 5)


def _cross_entropy(outputs: Any, labels: Any) -> Pair:
    """Return the sum of the cross-entropy of the labels in nats, and the number of labels. The loss of the run may be another one."""
    _check_classes("cross_entropy", outputs, labels)
    return cross_entropy.loss(_without_experts(outputs), labels)


def _squared_error(outputs: Any, labels: Any) -> Pair:
    """Return the sum of the squared errors, and the number of labels. The loss of the run may be another one."""
    outputs = _without_experts(outputs)
    _check_numbers("squared_error", outputs, labels)
    return squared_error.loss(outputs, labels)


# Metrics in parts --------------------------------------------------------------------------------------------------------


def _class_counts(outputs: Any, labels: Any, first: int, stop: int) -> tuple[list[jax.Array], jax.Array]:
    """For the classes from `first` to `stop` - 1, count the correct predictions, and count the labels plus the predictions.

    The weight is the number of all valid labels.
    """
    predicted, counts = cross_entropy.all_logits(outputs).argmax(-1), labels >= 0
    sums = []
    for number in range(first, stop):
        is_label, is_predicted = labels == number, (predicted == number) & counts
        sums += [(is_label & is_predicted).sum(), is_label.sum() + is_predicted.sum()]
    return sums, counts.sum()


def _binary_counts(outputs: Any, labels: Any, _: int) -> tuple[list[jax.Array], jax.Array]:
    _check_classes("f1_binary", outputs, labels)
    if (classes := cross_entropy.vocab_size(outputs)) != 2:
        raise InputError(f"eval.metrics: f1_binary: expected logits of 2 classes, found {classes}; use f1_macro")
    return _class_counts(outputs, labels, 1, 2)


def _all_counts(outputs: Any, labels: Any, count: int) -> tuple[list[jax.Array], jax.Array]:
    _check_classes("f1_macro", outputs, labels)
    return _class_counts(outputs, labels, 0, count // 2)


def _f1(means: Sequence[float]) -> float:
    """Return the mean F1 of the classes that occur in the labels or the predictions; NaN if there are none."""
    pairs = zip(means[::2], means[1::2], strict=True)
    values = [2 * hits / either for hits, either in pairs if either != 0]
    return sum(values) / len(values) if values else math.nan


def _moments(outputs: Any, labels: Any, _: int) -> tuple[list[jax.Array], jax.Array]:
    """Return the centres a of the outputs x and b of the labels y, and the sums of x - a, y - b, their squares and their product."""
    _check_numbers("pearson", outputs, labels)
    wide = cross_entropy.wider(outputs.dtype)
    x, y = outputs.astype(wide), labels.astype(wide)
    centres = x.mean(), y.mean()
    x, y = x - centres[0], y - centres[1]
    return [*centres, *(each.sum() for each in (x, y, x * x, y * y, x * y))], jnp.asarray(labels.size, jnp.float32)


def _raw_moments(n: float, a: float, b: float, x: float, y: float, xx: float, yy: float, xy: float) -> tuple[float, ...]:
    """Convert sums about the centres a and b to sums of n outputs and n labels, of their squares and of their products."""
    return n * a + x, n * b + y, n * a * a + 2 * a * x + xx, n * b * b + 2 * b * y + yy, n * a * b + a * y + b * x + xy


def _pearson(means: Sequence[float]) -> float:
    """Return the correlation; NaN if the outputs or the labels are equal up to rounding in float64."""
    x, y, xx, yy, xy = means
    of_x, of_y = xx - x * x, yy - y * y
    return (xy - x * y) / math.sqrt(of_x * of_y) if of_x > _ROUNDING * xx and of_y > _ROUNDING * yy else math.nan


_LOWER_IS_BETTER = frozenset({"loss", "cross_entropy", "squared_error"})
_MEANS: dict[str, Any] = {"accuracy": _accuracy, "top5": _top5, "cross_entropy": _cross_entropy, "squared_error": _squared_error}
_IN_PARTS = {
    "f1_binary": _InParts(lambda _: 2, _binary_counts, _f1),
    "f1_macro": _InParts(lambda classes: 2 * classes, _all_counts, _f1),
    "pearson": _InParts(lambda _: 7, _moments, _pearson),
}


def _without_experts(outputs: Any) -> Any:
    """Return the logits or numbers of the outputs, without the routers' choices of experts."""
    return outputs["tokens"] if isinstance(outputs, dict) and "experts" in outputs else outputs


def _check_classes(metric: str, outputs: Any, labels: Any) -> None:
    """Check that the outputs are logits and the labels are classes."""
    logits, tokens = (part["tokens"] if isinstance(part, dict) and "tokens" in part else part for part in (outputs, labels))
    shape = (logits.hidden if isinstance(logits, cross_entropy.Unprojected) else logits).shape
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or shape[:-1] != tokens.shape:
        raise InputError(
            f"eval.metrics: {metric}: expected logits of classes and integer labels, found outputs {list(shape)} and "
            f"{tokens.dtype}{list(tokens.shape)}; name a module:function of your own"
        )


def _check_numbers(metric: str, outputs: Any, labels: Any) -> None:
    """Check that outputs and labels are numbers, one output for each label."""
    leaves = jax.tree.leaves((outputs, labels))
    is_number = all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)
    if len(leaves) != 2 or not is_number or leaves[0].shape != leaves[1].shape:
        described = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
        raise InputError(
            f"eval.metrics: {metric}: expected one floating-point output for each floating-point label, found {described}; name a "
            "module:function of your own"
        )
