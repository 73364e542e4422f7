"""What a plan costs in closed form, in seconds: small functions that the searches share, so that all of them count alike.

All of them take NumPy arrays as well as numbers.
"""

from typing import Any

import numpy as np

import jpipe

Number = Any  # float or array


def all_reduce_seconds(size: Number, replicas: Number, link: jpipe.Link) -> Number:
    """A ring over `replicas` workers that sums `size` bytes: 2 (r - 1) / r of them leave and reach each worker, in 2 (r - 1) steps."""
    steps = 2 * (replicas - 1)
    return steps / replicas * size / link.bandwidth + steps * link.latency


def cut_seconds(size: Number, link: jpipe.Link) -> Number:
    """The outputs of a microbatch cross a cut, or their gradients come back: each direction has its own half of the link.

    The latency is left out: it delays the pipeline and does not slow it down, as long as enough microbatches are in flight.
    """
    return size / link.bandwidth


def stage_seconds(compute: Number, update: Number, all_reduce: Number, replicas: Number, microbatches: Number) -> Number:
    """Seconds a microbatch that a stage of a pipeline in its stride needs, shared by its replicas.

    Between two updates each replica computes M_s / r_s microbatches and updates once; the sum of the gradients is hidden behind the
    forward and backward that follow it, and waited for as far as it takes longer than they do. With M_s = r_s that is the larger of
    compute and all-reduce, as in PipeDream (SOSP 2019), section 3.1.

    Args:
        compute: seconds of the forward and backward of one microbatch.
        update: seconds of an update.
        all_reduce: seconds to sum the gradients over the replicas.
        replicas: r_s.
        microbatches: M_s, microbatches between two updates over all replicas.
    """
    own = microbatches / replicas
    return (own * compute + update + np.maximum(all_reduce - compute, 0.0)) / microbatches
