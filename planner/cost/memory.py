"""What a worker holds at most, in bytes, counted as `jpipe.simulate` counts; one function for all searches. It takes NumPy arrays too."""

from typing import Any

import numpy as np

Number = Any  # int or array


def stage_bytes(
    weights: Number,
    optimizer: Number,
    state: Number,
    residuals: Number,
    inputs: Number,
    outputs: Number,
    temporary: Number,
    labels: Number,
    *,
    versions: Number,
    in_flight: Number,
    waiting: Number,
) -> Number:
    """The most bytes that a worker of a stage holds while it computes, in a pipeline whose stages are about equally fast.

    Without a flush a replicated stage sums the gradients of one update while it makes those of the next. Both sets are there until the
    update, the newest of `versions` is only from then on: at no time do they all take more than versions + 1 times the weights.

    A gradient may arrive while the stage still does the forward before. Where stages differ in their replicas more of them can wait, and
    `simulate` count up to a quarter more.

    Args:
        weights: of one version; as many bytes of gradients are summed.
        optimizer: optimizer state.
        state: layer state.
        residuals: what stays from a forward to its backward, with the stage's recomputation.
        inputs: the stage input; as many bytes of gradient leave.
        outputs: the stage output, 0 at the last stage; as many bytes of gradient arrive.
        temporary: the largest scratch memory of a program; where it recomputes, what it makes again included.
        labels: 0 but for the last stage.
        versions: weight versions alive.
        in_flight: n_s, microbatches between their forward and their backward.
        waiting: stage inputs that have arrived and wait for their forward while it is busy, 0 at the first stage (see `waiting_inputs`).
    """
    kept = (versions + 1) * weights + optimizer + state
    return kept + in_flight * residuals + (waiting + 1) * inputs + 2 * outputs + labels + temporary


def waiting_inputs(in_flight: Number, replicas: Number, sent: Number) -> Number:
    """How many inputs wait at most at a replica of a stage: what all replicas of the stage before have in flight, less what it has.

    Args:
        in_flight: n_s of the stage.
        replicas: r_s.
        sent: n r of the stage before: its microbatches in flight over all its replicas; 0: there is none.
    """
    return np.maximum(-(-sent // replicas) - in_flight, 0)
