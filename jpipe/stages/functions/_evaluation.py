"""The forward of a stage in evaluation mode, with the loss and the metrics at the last stage."""

from collections.abc import Mapping
from typing import Any

from jpipe.model._losses import Loss
from jpipe.stages.functions._loss import call_loss, check_loss
from jpipe.stages.functions._stage import StageFunctions

Tree = Any


def evaluate(f: StageFunctions, params: Tree, state: Tree, x: Tree, labels: Tree, rng: tuple[Any, Any]) -> Tree:
    """Return the stage output in evaluation mode; at the last stage (sum, weight) of the loss and of each metric, in their order."""
    y = predict(f, params, state, x, None, rng)
    if not f.last:
        return f.sent(y, None)
    sums = [f.loss_of(y, labels, f.draw_key(f.loss, "", rng, train=False))]
    for name, metric in f.metrics.items():
        key = f.draw_key(metric, name, rng, train=False, of_metric=True)
        sums.append(call_loss(metric, f"metrics: '{name}'", y, labels, key))
    return sums


def predict(f: StageFunctions, params: Tree, state: Tree, x: Tree, labels: None, rng: tuple[Any, Any]) -> Tree:
    """Return the stage output in evaluation mode, at the last stage, too; the arguments are those of `evaluate`, without labels."""
    return f.apply(f.whole(params), state, f.received(x), rng, train=False)[0]


def check_metrics(last: StageFunctions, metrics: Mapping[str, Loss]) -> None:
    """Check that metrics take the outputs and labels of the last stage.

    Raises:
        InputError: names the metric.
    """
    if metrics:
        layer_id = last.stage.layers[-1]
        outputs = last.stack.specs(last.specs.input, last.stage.layers)[layer_id].output
        for name, metric in metrics.items():
            check_loss(metric, f"metrics: '{name}'", layer_id, outputs, last.specs.labels)
