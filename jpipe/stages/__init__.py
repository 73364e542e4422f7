"""The pure functions of a stage (forward, backward, update), and their compilation ahead of time."""

from jpipe.stages._compile import compile_for_analysis, program_key
from jpipe.stages._standalone import StandaloneStage, costs_in_slices, in_slices
from jpipe.stages.functions._residuals import find_residuals
from jpipe.stages.functions._stage_functions import StageFunctions
from jpipe.stages.functions._update import update

__all__ = [
    "StageFunctions",
    "StandaloneStage",
    "compile_for_analysis",
    "costs_in_slices",
    "find_residuals",
    "in_slices",
    "program_key",
    "update",
]
