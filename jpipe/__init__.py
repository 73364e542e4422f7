"""jpipe: pipeline-parallel training for JAX and Flax.

The names below stand in the order of the data flow: a model and a plan, the programs and their proof, then the run.
"""

from jpipe._errors import InputError, explain, nearest
from jpipe._pipeline import Pipeline, join_processes
from jpipe._plan import RECOMPUTE, Plan, Predicted, Stage, read_json
from jpipe.model._layer import Layer, LayerSpec
from jpipe.model._optimizer import LayerwiseOptimizer, find_layerwise
from jpipe.model._stack import LayerStack
from jpipe.processes._membership import PeerLost, Processes
from jpipe.programs._costs import LayerCost, Link, Network, StageCost, sum_layer_costs, unit_costs
from jpipe.programs._instructions import Program
from jpipe.programs._lower import batches_until_full, lower
from jpipe.programs._simulate import Prediction, ProgramError, simulate
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Span, Timeline, format_grid, parse_grid, to_ticks
from jpipe.programs._window import Window, cut_window, predict_window
from jpipe.runtime._host_memory import keep_freed_memory
from jpipe.runtime._interpreter import Event
from jpipe.runtime._metrics import Evaluation, Mean, Metrics, Told
from jpipe.runtime._placement import placement_grid
from jpipe.runtime._snapshot import Cut, average_replicas, layer_of
from jpipe.runtime._state import State, WorkerState
from jpipe.runtime._trace import Trace, Tracer, fit_costs
from jpipe.schedules import SCHEDULES, Schedule
from jpipe.stages._standalone import LoneStage
from jpipe.viz._draw import draw_memory, draw_timeline
from jpipe.viz._perfetto import to_perfetto

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
