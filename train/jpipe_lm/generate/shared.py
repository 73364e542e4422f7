"""Share arrays between the processes that generate text."""

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jpipe_lm.generate.decoder import Share
from jpipe_train.launch.team import Team


def share_of(team: Team) -> Share | None:
    """Return a function that shares arrays between processes; None for a single process."""
    processes = team.processes
    if processes is None:
        return None

    def share(array: Any, like: jax.ShapeDtypeStruct, what: str, source: int) -> np.ndarray:
        blank = np.zeros(like.shape, like.dtype)
        own = np.ascontiguousarray(array) if source == processes.index else blank
        with processes.waiting(what, source):
            # Bytes are sent, because the broadcast is a sum, which would turn -0 into 0.
            received = multihost_utils.broadcast_one_to_all(own.reshape(-1).view(np.uint8), is_source=source == processes.index)
        return np.asarray(received).view(like.dtype).reshape(like.shape)

    return share
