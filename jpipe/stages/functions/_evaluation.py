"""The forward of a stage in evaluation mode, with the loss and the metrics at the last stage."""

from collections.abc import Mapping
from typing import Any

from jpipe.errors import InputError
from jpipe.model._function_arguments import Loss
from jpipe.stages.functions._loss import call_loss, check_loss
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


def evaluate(f: StageFunctions, params: Tree, state: Tree, x: Tree, labels: Tree, rng: tuple[Any, Any]) -> Tree:
    """Return the stage output in evaluation mode; at the last stage a list of (sum, weight), for the loss and then for each metric."""
    y = predict(f, params, state, x, None, rng)
    if not f.last:
        return f.sent(y, None)
    sums = [f.loss_of(y, labels, f.draw_key(f.loss, "", rng, train=False))]
    for name, metric in f.metrics.items():
        key = f.draw_key(metric, name, rng, train=False, of_metric=True)
        sums.append(call_loss(metric, f"metrics: '{name}'", y, labels, key))
    return sums


def predict(f: StageFunctions, params: Tree, state: Tree, x: Tree, labels: None, rng: tuple[Any, Any]) -> Tree:
    """Return the stage output in evaluation mode; at the last stage the model's outputs. The arguments are as in `evaluate`."""
    return f.apply(f.whole(params), state, f.received(x), rng, train=False)[0]


def check_evaluation(last: StageFunctions, metrics: Mapping[str, Loss]) -> None:
    """Check that the loss and the metrics take the labels and the outputs of the last stage in evaluation."""
    spec, layer = last.last_layer, f"'{last.stage.layers[-1]}'"
    functions = {f"metrics: '{name}'": metric for name, metric in metrics.items()}
    if spec.evaluated != spec.output:  # otherwise the loss was checked with the stage
        functions, layer = {"loss": last.loss, **functions}, f"{layer} in evaluation"
    for where, function in functions.items():
        check_loss(function, where, layer, spec.evaluated, last.specs.labels)


def can_evaluate(f: StageFunctions) -> bool:
    """Return whether a stage can be evaluated. The last stage can if the loss takes the model's outputs in evaluation. Slices cannot."""
    if f.positions is not None:
        return False
    try:
        if f.last:
            check_evaluation(f, {})
    except InputError:  # an evaluation raises the error again; training and predictions need no evaluation
        return False
    return True
