"""The programs of a plan: instructions, their lowering, simulation and timeline. No module in this folder imports JAX."""

from jpipe.programs._costs import (
    HostLink,
    LayerCost,
    Network,
    Overlap,
    SharedCost,
    StageCost,
    mean_of_slices,
    sum_layer_costs,
    unit_costs,
    uses_by_costs,
)
from jpipe.programs._execution_order import ProgramError
from jpipe.programs._instructions import Program
from jpipe.programs._simulate import has_repeated_batches, simulate_batches
from jpipe.programs._steps import Steps
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Span, Timeline, format_grid, to_ticks, whole_spans
from jpipe.programs._transfers import Transfer
from jpipe.programs._window import Window, extract_window, predict_window
from jpipe.programs.lowering import batches_until_full, lower_repeated
from jpipe.programs.prediction import Prediction

__all__ = [
    "HostLink",
    "LayerCost",
    "MemorySample",
    "MemoryTimeline",
    "Network",
    "Overlap",
    "Prediction",
    "Program",
    "ProgramError",
    "SharedCost",
    "Span",
    "StageCost",
    "Steps",
    "Timeline",
    "Transfer",
    "Window",
    "batches_until_full",
    "extract_window",
    "format_grid",
    "has_repeated_batches",
    "lower_repeated",
    "mean_of_slices",
    "predict_window",
    "simulate_batches",
    "sum_layer_costs",
    "to_ticks",
    "unit_costs",
    "uses_by_costs",
    "whole_spans",
]
