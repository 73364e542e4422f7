"""The state of a run: weights by version, microbatches in flight, and pending updates."""

from jpipe.runtime.state._fingerprint import fingerprint, model_of
from jpipe.runtime.state._fresh import fresh_worker, initialized_at, is_fresh
from jpipe.runtime.state._host_memory import check_host_memory, copied, copied_to_host, from_host_memory, in_host, to_host_memory
from jpipe.runtime.state._in_flight import Fields, Microbatch, PendingUpdate
from jpipe.runtime.state._state import CONSUMED, State, WorkerState, check_state, is_consumed
from jpipe.runtime.state._weights import DoubleBuffer, Latest, Stash, Weights, weights_of

__all__ = [
    "CONSUMED",
    "DoubleBuffer",
    "Fields",
    "Latest",
    "Microbatch",
    "PendingUpdate",
    "Stash",
    "State",
    "Weights",
    "WorkerState",
    "check_host_memory",
    "check_state",
    "copied",
    "copied_to_host",
    "fingerprint",
    "fresh_worker",
    "from_host_memory",
    "in_host",
    "initialized_at",
    "is_consumed",
    "is_fresh",
    "model_of",
    "to_host_memory",
    "weights_of",
]
