"""The peak memory of a worker in bytes, counted as in `jpipe.simulate`. All searches use this function, with numbers or NumPy arrays."""

from typing import Any

import numpy as np

__all__ = ["stage_bytes", "temporary_bytes", "waiting_gradients", "waiting_inputs"]

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
    accumulators: Number,
    replicas: Number,
    gradients: Number = 0,
    exchanged: Number = 0,
    ahead: Number = 0,
) -> Number:
    """Return the peak bytes of a worker while it computes, in a pipeline with stages that are about equally fast.

    Without a flush, a stage with replicas or with a shared parameter sums the gradients of one update while it computes the gradients of
    the next update. Both sets of gradients exist until the update, but the newest of `versions` exists only after it. So only the bytes by
    which the second set exceeds the weights add to the peak.

    A gradient may arrive while the stage is still computing a forward. With different numbers of replicas, or with additional microbatches
    in flight while updates wait for a norm, more messages can wait than are counted here: `simulate` then counts up to a tenth more.

    Args:
        weights: bytes of one version, without frozen parameters.
        state: bytes of the layer state and of frozen parameters, which all versions share.
        residuals: bytes that the stage keeps from a forward to its backward, with its recomputation.
        inputs, outputs: bytes of the stage input and output (0 at the last stage); their gradients have the same sizes.
        temporary: the largest scratch memory of a program in bytes, including recomputed residuals.
        labels: bytes of the labels, 0 except at the last stage.
        in_flight: n_s, the number of microbatches between forward and backward.
        waiting, gradients: the numbers of stage inputs and of gradients that wait, see `waiting_inputs` and `waiting_gradients`.
        exchanged: bytes of this and other stages' gradients of shared parameters that wait for the update. With a flush, no microbatch is
            in flight then.
        ahead: bytes of the weights that `delay_correction` predicts; a stage with several versions holds them.
    """
    asynchronous = np.asarray(versions) > 1
    sets_aside = asynchronous & ((np.asarray(replicas) > 1) | (np.asarray(exchanged) > 0))
    second = sets_aside * np.maximum(accumulators - weights, 0)
    static = versions * weights + accumulators + second + optimizer + asynchronous * np.asarray(ahead) + state
    moving = in_flight * residuals + (waiting + 1) * inputs + (gradients + 2) * outputs + labels + temporary
    return static + np.where(asynchronous, moving + exchanged, np.maximum(moving, exchanged))


def temporary_bytes(scratch: Number, everything: Number | None, unchanged: Number, residuals: Number, inputs: Number) -> Number:
    """Return the largest scratch memory of the programs of a stage, including the residuals that its backward recomputes.

    `scratch` is without recomputation, `everything` with recomputation of all residuals; None if unknown: the recomputed residuals are
    added. `unchanged` are the residuals without recomputation, and `residuals` with the stage's, 0 if forward and backward are one program.
    No program recomputes `inputs`.
    """
    remade = np.maximum(unchanged - residuals, 0)
    if everything is None:
        return scratch + remade
    share = np.minimum(remade / np.maximum(unchanged - inputs, 1), 1.0)
    return scratch + np.ceil((everything - scratch) * share).astype(np.int64)


def waiting_inputs(in_flight: Number, replicas: Number, sent: Number) -> Number:
    """Return the largest number of inputs that wait at a replica of a stage.

    This is its share of the microbatches in flight at the previous stage (`sent`, over all its replicas; 0 at the first stage), minus its
    own microbatches in flight.
    """
    return np.maximum(-(-sent // replicas) - in_flight, 0)


def waiting_gradients(replicas: Number, after: Number) -> Number:
    """Return how many gradients wait at a replica, not counting the first: the next stage's replicas (`after`) send simultaneously."""
    return np.maximum(-(-after // replicas) - 1, 0)
