"""jpipe: pipeline-parallel training for JAX and Flax."""

from jpipe._layers import Layer, LayerStack
from jpipe._plan import Plan, Stage
from jpipe._pipeline import Evaluation, Metrics, Pipeline
from jpipe._state import State
from jpipe.schedules import SCHEDULES
from jpipe._errors import InputError

__all__ = ["Layer", "LayerStack", "Plan", "Stage", "SCHEDULES", "Pipeline", "State", "Metrics", "Evaluation", "InputError"]
