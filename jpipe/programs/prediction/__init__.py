"""What a verified program does, for given costs: time, memory and bytes moved."""

from jpipe.programs.prediction._clocks import Clocks
from jpipe.programs.prediction._compact import compact
from jpipe.programs.prediction._prediction import Prediction, draw_grid
from jpipe.programs.prediction._predictor import Predictor

__all__ = ["Clocks", "Prediction", "Predictor", "compact", "draw_grid"]
