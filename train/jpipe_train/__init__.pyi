from .run.callbacks import CheckpointRecord, EvalRecord, StepRecord
from .run.fit import FitResult, fit

__all__ = [
    "CheckpointRecord",
    "EvalRecord",
    "FitResult",
    "StepRecord",
    "fit",
]
