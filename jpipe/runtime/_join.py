"""Join the processes of a run, compare their batches, and share the rows of predictions."""

import atexit
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jpipe.errors import InputError
from jpipe.model._layer import describe
from jpipe.processes._channel import Limits
from jpipe.processes._membership import Processes
from jpipe.processes._rendezvous import Rendezvous
from jpipe.processes.handshake import find_secret
from jpipe.runtime._transport import progress

_joined: list[Processes] = []  # the processes of this run, once they have joined


def join_processes(
    limit: float = 300.0, wait: float = Limits.wait, secret: bytes | None = None, rendezvous: Rendezvous | None = None
) -> Processes | None:
    """Join the processes of this run, or return None if there is only one. All processes call this; later calls return the first result.

    It does not start JAX devices. When Python ends, the process leaves the run (`Processes.end`).

    Args:
        limit: the time in seconds that the first call waits for the other processes.
        wait: the time in seconds without progress in any process after which the run counts as hanging. Only the first call sets it. It
            must be equal in all processes, and longer than a microbatch's computation and anything that one process does alone.
        secret: a secret that all processes share, and by which they authenticate each other (`jpipe.processes.handshake`). The default is
            the value of the environment variable `JPIPE_SECRET`. Without a secret, anyone who reaches JAX's coordinator can join.
        rendezvous: the place where the processes find each other; by default the store of `jax.distributed`. With a rendezvous the
            processes can join before JAX connects them, and so notice if one is missing or ends in the meantime.

    Raises:
        InputError: process 0 cannot be reached or has another secret, the secret is too short, or `wait` is not above 0; or processes did
            not join in time, which the message names.
    """
    if not wait > 0:
        raise InputError(where="wait limit", expected="more than 0 seconds", found=f"{wait:g}")
    if not _joined and (rendezvous is not None or jax.distributed.is_initialized()):
        secret = find_secret() if secret is None else secret
        _joined.append(Processes.join(limit=limit, limits=Limits(wait=wait), rendezvous=rendezvous, progress=progress, secret=secret))
        atexit.register(_joined[0].end)  # registered after JAX's own exit handler, so Python calls it first
    return _joined[0] if _joined and _joined[0].count > 1 else None


Tree = Any

_EVERY = 8  # the number of batches that one message covers
_MOST_BYTES = 1 << 16  # the most bytes of an array of a batch that a checksum reads, in some microseconds


class BatchComparison:
    """Compares the batches of this process with the batches of other processes, to find a mistake in reading or shuffling them.

    Each process uses only the parts of a batch that its own stages need. Without the comparison a run could use the inputs of one batch
    with the labels of another. A comparison is a message for which no process waits. It is sent after the first batch and after every
    eighth batch, and covers all batches since the last one; if shapes may differ, it is sent for each batch. For a NumPy or JAX array it
    has a checksum of the first row of each microbatch. Other arrays are not read, because a process may lack rows that its workers do not
    need.

    Args:
        name: the name of the pipeline, the same in all processes.
        processes: the processes of the run.
        rows_each: the number of rows of a microbatch.
        several_shapes: whether batches may differ in their shapes.
    """

    def __init__(self, name: str, processes: Processes, rows_each: int, several_shapes: bool) -> None:
        self._name, self._processes, self._rows, self._several_shapes = name, processes, rows_each, several_shapes
        self._first: int | None = None  # the first batch that has not been compared
        self._checksums: dict[str, int] = {}  # checksums of the batches that have not been compared, by array
        self._evaluations = 0

    def step(self, number: int, batch: Tree) -> None:
        """Record the inputs and labels of batch `number`, as host arrays, before training on the batch."""
        first = self._first = number if self._first is None else self._first
        self._checksums = _checksums(batch, self._rows, self._checksums)
        if number % _EVERY == 0 or self._several_shapes:
            batches = f"batch {number}" if first == number else f"batches {first} to {number}"
            self._compare(batches, _facts(batches, batch if self._several_shapes else {}, self._checksums))
            self._first, self._checksums = None, {}

    def evaluation(self, batch: Tree, options: Mapping[str, str]) -> None:
        """Compare the inputs and labels of a batch, as host arrays, and the other arguments of an evaluation before it runs."""
        self._evaluations += 1
        of = f"evaluation {self._evaluations}"
        facts = {f"{name} of {of}": value for name, value in options.items()}
        self._compare(of, facts | _facts(f"the batch of {of}", batch, _checksums(batch, self._rows, {})))

    def _compare(self, what: str, facts: dict[str, str]) -> None:
        self._processes.compare(f"{what} of {self._name}", facts, "pass the same arguments in all processes")


def _facts(batches: str, batch: Tree, checksums: Mapping[str, int]) -> dict[str, str]:
    shapes = {f"the shape of {name} of {batches}": describe(leaf) for name, leaf in _by_name(batch).items()}
    return shapes | {f"the checksum of {name} of {batches}": f"{checksum:08x}" for name, checksum in checksums.items()}


def _checksums(batch: Tree, rows_each: int, before: Mapping[str, int]) -> dict[str, int]:
    """Return checksums by array name, which continue the checksums `before` with the rows of this batch."""
    checksums = dict(before)
    for name, array in _by_name(batch).items():
        if isinstance(array, np.ndarray) and array.size:
            rows = array[::rows_each][: max(_MOST_BYTES // array[0].nbytes, 1)]
            checksums[name] = zlib.crc32(rows.ravel().view(np.uint8)[:_MOST_BYTES].tobytes(), checksums.get(name, 0))
    return checksums


def _by_name(batch: Tree) -> dict[str, Any]:
    """Return the arrays by name: `inputs`, or `inputs['tokens']` if the inputs are a dict."""
    return {"".join((path[0].key, jax.tree_util.keystr(path[1:]))): leaf for path, leaf in jax.tree.leaves_with_path(batch)}


def share_rows(
    processes: Processes, name: str, parts: Mapping[int, Tree], sources: Sequence[int], outputs: Tree, *, keep: bool
) -> dict[int, Tree]:
    """Send the outputs of each microbatch to all processes, bit for bit. All processes call this function.

    Return the outputs by microbatch, or nothing without `keep`. `name` is the same in all processes. `parts` has the outputs of this
    process, and `sources` the process that has them, by microbatch. `outputs` are the specs for one microbatch.
    """
    processes.barrier(name)  # then all have computed, and no process waits in a collective for another's computation
    blank = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), outputs)
    results = {}
    for k, source in enumerate(sources):
        part = parts.get(k, blank)
        with processes.waiting("the outputs of a prediction", source):
            # The outputs are sent as bytes, because a sum of numbers would turn -0 into 0.
            sent = jax.tree.map(lambda leaf: np.ascontiguousarray(leaf).reshape(-1).view(np.uint8), part)
            received = multihost_utils.broadcast_one_to_all(sent, is_source=source == processes.index)
        if keep:
            results[k] = jax.tree.map(lambda leaf, like: np.asarray(leaf).view(like.dtype).reshape(like.shape), received, blank)
    return results
