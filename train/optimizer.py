"""The optax optimizer that a config names."""

import jax
import numpy as np
import optax

from train.config import OptimizerConfig

_LARGEST = float(np.finfo(np.float32).max)  # settings beyond it diverge all the same, and NumPy would warn of each


def optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer with its learning-rate schedule over `steps` updates."""
    rate = lr_schedule(config, steps)
    match config.name:
        case "adam":
            return optax.adam(rate)
        case "sgd":
            return optax.sgd(rate)
        case "adamw":
            return optax.adamw(rate, mask=_matrices, **_decay(config))
        case "lion":
            return optax.lion(rate, mask=_matrices, **_decay(config))


def lr_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """From near 0 up to `learning_rate` over `warmup_steps` updates, then constant or down a cosine to a tenth of it at `steps`."""
    peak, warmup = min(config.learning_rate, _LARGEST), config.warmup_steps
    if config.lr_schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=0.1)
    else:
        after = optax.constant_schedule(peak)
    # The first update uses peak / (warmup + 1), not 0: an update that changes nothing is a step wasted.
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]) if warmup else after


def _decay(config: OptimizerConfig) -> dict[str, float]:
    return {} if config.weight_decay is None else {"weight_decay": min(config.weight_decay, _LARGEST)}


def _matrices(params: optax.Params) -> optax.Params:
    """Which leaves decay: matrices; biases and norm scales do not."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
