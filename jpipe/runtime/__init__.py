"""The runtime, which runs programs on devices: interpreter, state, transport, metrics, traces and snapshots."""

from jpipe.runtime._interpreter import Event
from jpipe.runtime._metrics import DelayNorms, RemoteScalar
from jpipe.runtime._placement import placement_grid
from jpipe.runtime._snapshot import CopiesDiffer, Snapshot, average_replicas, layer_of, shared_place
from jpipe.runtime._trace import Trace, fit_costs
from jpipe.runtime.state import WeightVersions, WorkerState
from jpipe.runtime.state._saved_optimizer import masters_in, without_prediction
from jpipe.runtime.timing._overlap import Moved, OverlapTimes, time_overlap
from jpipe.runtime.timing._transfer_times import join_transfers

__all__ = [  # noqa: RUF022 - in the order of the data flow
    "WorkerState",
    "WeightVersions",
    "RemoteScalar",
    "DelayNorms",
    "Snapshot",
    "CopiesDiffer",
    "layer_of",
    "shared_place",
    "average_replicas",
    "masters_in",
    "without_prediction",
    "Event",
    "Trace",
    "fit_costs",
    "join_transfers",
    "placement_grid",
    "Moved",
    "OverlapTimes",
    "time_overlap",
]
