"""jpipe: pipeline-parallel training for JAX and Flax.

The names below stand in the order of the data flow: a model and a plan, the programs and their proof, then the run.
"""

from jpipe._costs import LayerCost, Link, Network, StageCost, sum_layer_costs, unit_costs
from jpipe._cut import Cut, average_replicas, layer_of
from jpipe._draw import draw_memory, draw_timeline
from jpipe._errors import InputError, explain, nearest
from jpipe._grid import MemorySample, MemoryTimeline, Span, Timeline, format_grid, parse_grid, to_ticks
from jpipe._host_memory import keep_freed_memory
from jpipe._layer import Layer, LayerSpec
from jpipe._layers import LayerStack
from jpipe._lone import LoneStage
from jpipe._lower import batches_until_full, lower
from jpipe._metrics import Evaluation, Mean, Metrics, Told
from jpipe._optimizer import LayerwiseOptimizer, find_layerwise
from jpipe._perfetto import to_perfetto
from jpipe._pipeline import Pipeline, join_processes
from jpipe._placement import placement_grid
from jpipe._plan import RECOMPUTE, Plan, Predicted, Stage, read_json
from jpipe._processes import PeerLost, Processes
from jpipe._program import Program
from jpipe._runtime import Event
from jpipe._simulate import Prediction, ProgramError, simulate
from jpipe._state import State, WorkerState
from jpipe._trace import Trace, Tracer, fit_costs
from jpipe._window import Window, cut_window, predict_window
from jpipe.schedules import SCHEDULES, Schedule

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - in the order of the data flow
    "Layer",
    "LayerStack",
    "LayerSpec",
    "Plan",
    "Stage",
    "Predicted",
    "RECOMPUTE",
    "SCHEDULES",
    "Schedule",
    "Program",
    "lower",
    "batches_until_full",
    "LayerCost",
    "StageCost",
    "Link",
    "Network",
    "sum_layer_costs",
    "unit_costs",
    "find_layerwise",
    "LayerwiseOptimizer",
    "LoneStage",
    "Prediction",
    "ProgramError",
    "simulate",
    "Span",
    "Timeline",
    "MemorySample",
    "MemoryTimeline",
    "Window",
    "cut_window",
    "predict_window",
    "to_perfetto",
    "draw_timeline",
    "draw_memory",
    "to_ticks",
    "format_grid",
    "parse_grid",
    "join_processes",
    "Processes",
    "PeerLost",
    "placement_grid",
    "Pipeline",
    "State",
    "WorkerState",
    "Metrics",
    "Evaluation",
    "Mean",
    "Told",
    "Cut",
    "layer_of",
    "average_replicas",
    "Event",
    "Tracer",
    "Trace",
    "fit_costs",
    "keep_freed_memory",
    "InputError",
    "read_json",
    "explain",
    "nearest",
]
