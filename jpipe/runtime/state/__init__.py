"""The state of a run: weights by version, microbatches in flight, and pending updates."""

from jpipe.runtime.state._away import AWAY, copied, fetched, is_away, sent_away
from jpipe.runtime.state._fresh import fresh_worker, initialized_at, is_fresh
from jpipe.runtime.state._state import CONSUMED, Fields, State, WorkerState, check_state, fingerprint, is_consumed, model_of
from jpipe.runtime.state._weights import WeightVersions

__all__ = [
    "AWAY",
    "CONSUMED",
    "Fields",
    "State",
    "WeightVersions",
    "WorkerState",
    "check_state",
    "copied",
    "fetched",
    "fingerprint",
    "fresh_worker",
    "initialized_at",
    "is_away",
    "is_consumed",
    "is_fresh",
    "model_of",
    "sent_away",
]
