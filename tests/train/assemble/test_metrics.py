"""Metrics of several batches are those of all examples at once."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_train.assemble.metrics import combined, metrics
from jpipe_train.config.config import EvalConfig
from jpipe_train.report.metrics_log import mean_of, means_of


def over(names: dict[str, str], batches, classes: int | None = None) -> dict[str, float]:
    """Return metrics over batches of two microbatches, as an evaluation combines them."""
    model = None if classes is None else ModelConfig(head="classification", labels=classes)
    functions, evaluations = metrics(EvalConfig(metrics=names), model), []
    for outputs, labels in batches:
        halves = [tuple(map(jnp.asarray, half)) for half in zip(np.split(outputs, 2), np.split(labels, 2), strict=True)]
        pairs = {name: [metric(*half) for half in halves] for name, metric in functions.items()}
        sums = {name: (sum(total for total, _ in each), sum(weight for _, weight in each)) for name, each in pairs.items()}
        means = {name: jpipe.Mean(total / jnp.maximum(weight, 1), weight) for name, (total, weight) in sums.items()}
        evaluations.append(jpipe.Evaluation(jnp.float32(0), jnp.float32(1), 0, means, pairs))
    return {name: value for name, value in mean_of(list(map(means_of, evaluations))).items() if name != "val_loss"}


def f1(predicted: np.ndarray, labels: np.ndarray, number: int) -> float:
    hits = ((predicted == number) & (labels == number)).sum()
    precision, recall = hits / max((predicted == number).sum(), 1), hits / max((labels == number).sum(), 1)
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def test_f1_is_that_of_all_batches_together():
    rng = np.random.default_rng(0)
    outputs, labels = rng.normal(size=(3, 8, 4)).astype(np.float32), rng.integers(-1, 3, (3, 8)).astype(np.int32)
    outputs[..., 3] = -9  # a class that occurs nowhere does not count
    counted, predicted = labels.reshape(-1) >= 0, outputs.argmax(-1).reshape(-1)
    expected = np.mean([f1(predicted[counted], labels.reshape(-1)[counted], number) for number in range(3)])
    actual = over({"macro": "f1_macro", "again": "f1_macro"}, zip(outputs, labels, strict=True), 4)
    assert actual == {"val_macro": pytest.approx(expected, rel=1e-6), "val_again": pytest.approx(expected, rel=1e-6)}
    two = outputs[..., :2]
    expected = f1(two.argmax(-1).reshape(-1), labels.reshape(-1) % 2, 1)
    assert over({"f": "f1_binary"}, zip(two, labels % 2, strict=True)) == {"val_f": pytest.approx(expected, rel=1e-6)}


@pytest.mark.parametrize(("at", "outputs_at"), [(0, 0), (5000, 5000), (5000, 0), (-5000, 2500)])
def test_correlation_and_squared_errors_of_numbers(at, outputs_at):
    rng = np.random.default_rng(1)
    outputs, labels = rng.normal(size=(2, 3, 8))
    outputs, labels = (outputs + outputs_at).astype(np.float32), (labels + outputs + at).astype(np.float32)
    actual = over({"r": "pearson", "mse": "squared_error"}, zip(outputs, labels, strict=True))
    assert actual["val_r"] == pytest.approx(
        np.corrcoef(outputs.reshape(-1).astype(float), labels.reshape(-1).astype(float))[0, 1], rel=1e-4
    )
    assert actual["val_mse"] == pytest.approx(((outputs - labels) ** 2).mean(), rel=1e-5)
    assert math.isnan(over({"r": "pearson"}, [(outputs[0], np.full(8, at + 0.1, np.float32))] * 3)["val_r"])


def test_parts_of_averaged_weights_stay_apart():
    means = {"val_loss": 1.0, "val_f1_macro:0:f": 0.25, "val_f1_macro:1:f": 0.5, "val_f1_macro:0:f_ema": 0.5, "val_f1_macro:1:f_ema": 1.0}
    assert combined(means) == {"val_loss": 1.0, "val_f": 1.0, "val_f_ema": 1.0}
    assert math.isnan(combined({"f1_macro:0:f": 0.0, "f1_macro:1:f": 0.0})["f"])


@pytest.mark.parametrize(
    ("metric", "outputs", "labels", "message"),
    [
        ("f1_binary", (4, 3), np.zeros(4, np.int32), "f1_binary: expected logits of 2 classes, found 3; use f1_macro"),
        ("f1_macro", (4,), np.zeros(4, np.int32), "f1_macro: expected logits of classes and integer labels"),
        (
            "pearson",
            (4, 3),
            np.zeros(4, np.int32),
            r"pearson: expected one floating-point output for each.*found float32\[2, 3\], int32\[2\]",
        ),
        ("squared_error", (4,), np.zeros(4, np.int32), "squared_error: expected one floating-point output for each"),
    ],
)
def test_metrics_that_do_not_fit(metric, outputs, labels, message):
    with pytest.raises(jpipe.InputError, match=message):
        over({"m": metric}, [(np.zeros(outputs, np.float32), labels)], 3)
