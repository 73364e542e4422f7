"""Optax transformations for gradients that are computed with delayed weights. They know no pipeline: a delay is an argument."""

from jpipe.optimizers._predict import PredictDelayState, predict_delay

__all__ = ["PredictDelayState", "predict_delay"]
