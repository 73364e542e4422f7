from .config.data_section import DataSection
from .config.model_section import ModelSection
from .data.data import Examples
from .run.callbacks import CheckpointRecord, EvalRecord, StepRecord
from .run.fit import FitResult, fit

__all__ = [
    "CheckpointRecord",
    "DataSection",
    "EvalRecord",
    "Examples",
    "FitResult",
    "ModelSection",
    "StepRecord",
    "fit",
]
