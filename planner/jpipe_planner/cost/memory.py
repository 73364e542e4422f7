"""The peak memory of a worker in bytes, counted as in `jpipe.simulate`: one function for all searches, for numbers and NumPy arrays."""

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

    Without a flush a replicated stage sums the gradients of one update while it computes the next one's, and so does a stage that
    shares a parameter with others. Both sets exist until the update, and the newest of `versions` only after it. So the second set adds
    to the peak only what it takes more than the weights do.

    A gradient may arrive while the stage is still computing a forward. If stages have different numbers of replicas, or updates wait for a
    norm and additional microbatches are in flight, more messages can wait than are counted, and `simulate` has up to a tenth more.

    Args:
        weights: bytes of one version, without frozen parameters.
        optimizer: optimizer state.
        state: layer state, and frozen parameters, which all versions share.
        residuals: bytes kept from a forward to its backward, with the stage's recomputation.
        inputs: the stage input; its gradient has the same size.
        outputs: the stage output, 0 at the last stage; its gradient has the same size.
        temporary: the largest scratch memory of a program, including recomputed residuals.
        labels: labels, 0 except at the last stage.
        versions: weight versions alive.
        in_flight: n_s, microbatches between forward and backward.
        waiting: stage inputs that have arrived and wait for their forward, 0 at the first stage (see `waiting_inputs`).
        accumulators: accumulated gradients.
        replicas: r_s.
        gradients: gradients of outputs that have arrived and wait for their backward, beside one (see `waiting_gradients`).
        exchanged: gradients of shared parameters that wait for the update, the stage's own and the other stages'; with a flush
            nothing is in flight then.
        ahead: the prediction of `delay_correction`, which is held if there are several versions.
    """
    asynchronous = np.asarray(versions) > 1
    sets_aside = asynchronous & ((np.asarray(replicas) > 1) | (np.asarray(exchanged) > 0))
    second = sets_aside * np.maximum(accumulators - weights, 0)
    static = versions * weights + accumulators + second + optimizer + asynchronous * np.asarray(ahead) + state
    moving = in_flight * residuals + (waiting + 1) * inputs + (gradients + 2) * outputs + labels + temporary
    return static + np.where(asynchronous, moving + exchanged, np.maximum(moving, exchanged))


def temporary_bytes(scratch: Number, everything: Number | None, unchanged: Number, residuals: Number, inputs: Number) -> Number:
    """Return the largest scratch memory of the programs of a stage, with the residuals that the program of its backward makes itself.

    Args:
        scratch: bytes without recomputation.
        everything: bytes if the backward makes all residuals itself; None: not known, the residuals themselves are counted.
        unchanged: bytes of residuals without recomputation.
        residuals: bytes of residuals with the stage's recomputation; 0 if forward and backward are one program, which makes all.
        inputs: bytes of the stage input, which no program makes.
    """
    remade = np.maximum(unchanged - residuals, 0)
    if everything is None:
        return scratch + remade
    share = np.minimum(remade / np.maximum(unchanged - inputs, 1), 1.0)
    return scratch + np.ceil((everything - scratch) * share).astype(np.int64)


def waiting_inputs(in_flight: Number, replicas: Number, sent: Number) -> Number:
    """Return the most inputs that wait at a replica of a stage: its share of those in flight at the previous stage, minus its own.

    Args:
        in_flight: n_s of the stage.
        replicas: r_s.
        sent: n r of the stage before: its microbatches in flight over all its replicas; 0 at the first stage.
    """
    return np.maximum(-(-sent // replicas) - in_flight, 0)


def waiting_gradients(replicas: Number, after: Number) -> Number:
    """Return how many gradients of outputs wait at a replica of a stage, beside the first: the replicas of the next stage send at once.

    Args:
        replicas: r_s.
        after: the replicas of the next stage; 0 at the last stage.
    """
    return np.maximum(-(-after // replicas) - 1, 0)
