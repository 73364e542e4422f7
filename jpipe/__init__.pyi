from . import checkpoints, context, errors, files, meshes, model, ops, optimizers, plan, processes, programs, runtime, schedules, stages
from ._host_memory import keep_freed_memory
from .errors import InputError, PeerLost
from .model._layer import Layer
from .model._precision import DynamicLossScale, Precision
from .model._stack import LayerStack
from .model._ties import Tie
from .model.traced._chain import cut
from .pipeline import Pipeline
from .plan import Plan, Stage
from .programs._costs import Link
from .programs._simulate import simulate
from .programs.lowering import lower
from .runtime._join import join_processes
from .runtime._metrics import Evaluation, Mean, Metrics
from .runtime._trace import Tracer
from .runtime.state import State
from .viz._draw import draw_memory, draw_timeline
from .viz._perfetto import to_perfetto

__version__: str

__all__ = [
    "DynamicLossScale",
    "Evaluation",
    "InputError",
    "Layer",
    "LayerStack",
    "Link",
    "Mean",
    "Metrics",
    "PeerLost",
    "Pipeline",
    "Plan",
    "Precision",
    "Stage",
    "State",
    "Tie",
    "Tracer",
    "checkpoints",
    "context",
    "cut",
    "draw_memory",
    "draw_timeline",
    "errors",
    "files",
    "join_processes",
    "keep_freed_memory",
    "lower",
    "meshes",
    "model",
    "ops",
    "optimizers",
    "plan",
    "processes",
    "programs",
    "runtime",
    "schedules",
    "simulate",
    "stages",
    "to_perfetto",
]
