"""The prediction of a verified program from given costs: time, memory and bytes moved."""

from jpipe.programs.prediction._prediction import Prediction, draw_grid
from jpipe.programs.prediction._simulator import Simulator

__all__ = ["Prediction", "Simulator", "draw_grid"]
