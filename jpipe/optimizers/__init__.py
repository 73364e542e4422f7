"""Optax transformations for gradients that are computed with delayed weights.

They do not depend on pipelines. A pipeline passes two additional arguments to their `update`: `delay`, the mean age in updates of the
weights that the gradients were computed with, and `stage`, the number of the stage.
"""

from jpipe.optimizers._per_stage import PerStageState, per_stage
from jpipe.optimizers._predict import PredictDelayState, predict_delay
from jpipe.optimizers._scale_by_delay import ScaleByDelayState, scale_by_delay
from jpipe.optimizers._soap import SoapState, scale_by_soap, soap
from jpipe.optimizers._spike_compensation import (
    compensated_adam,
    compensated_adamw,
    compensated_muon,
    compensated_sgd,
    scale_by_compensated_adam,
    scale_by_compensated_momentum,
    scale_by_compensated_muon,
)
from jpipe.optimizers._torch_nadam import TorchNadamState, scale_by_torch_nadam, torch_nadam

__all__ = [
    "PerStageState",
    "PredictDelayState",
    "ScaleByDelayState",
    "SoapState",
    "TorchNadamState",
    "compensated_adam",
    "compensated_adamw",
    "compensated_muon",
    "compensated_sgd",
    "per_stage",
    "predict_delay",
    "scale_by_compensated_adam",
    "scale_by_compensated_momentum",
    "scale_by_compensated_muon",
    "scale_by_delay",
    "scale_by_soap",
    "scale_by_torch_nadam",
    "soap",
    "torch_nadam",
]
