"""Joining the processes of a run, comparing their batches, and sharing the rows of predictions."""

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
    """Join the processes of this run; returns None if there is only one. All processes call it; only the first call of each joins.

    It does not start JAX devices. When Python ends, a process leaves by itself (`Processes.end`).

    Args:
        limit: seconds that the first call waits for the other processes.
        wait: seconds without progress in any process after which the run counts as hanging. The first call sets it; it must be the same
            in all processes, and longer than a computation of a microbatch and anything that one process does alone.
        secret: shared by all processes, which authenticate each other by it (`jpipe.processes.handshake`); by default the value of the
            variable `JPIPE_SECRET`. Without a secret, whoever reaches JAX's coordinator can join.
        rendezvous: where the processes find each other, if that is not the store of `jax.distributed`: then they can join before JAX
            connects them, and so notice if one is missing or ends meanwhile.

    Raises:
        InputError: process 0 cannot be reached or has another secret, the secret is too short, or `wait` is not above 0; or processes did
            not join in time, and are named.
    """
    if not wait > 0:
        raise InputError(where="wait limit", expected="more than 0 seconds", found=f"{wait:g}")
    if not _joined and (rendezvous is not None or jax.distributed.is_initialized()):
        secret = find_secret() if secret is None else secret
        _joined.append(Processes.join(limit=limit, limits=Limits(wait=wait), rendezvous=rendezvous, progress=progress, secret=secret))
        atexit.register(_joined[0].end)  # registered after JAX's own exit, and so called before it
    return _joined[0] if _joined and _joined[0].count > 1 else None


Tree = Any

_EVERY = 8  # batches that one message is for
_MOST_BYTES = 1 << 16  # of one array of one batch that are read for its checksum: some microseconds


class BatchComparison:
    """Compares the batches of this process with the other processes', to find a mistake in reading or shuffling them.

    Without it a run would continue with the inputs of one batch and the labels of another, since each process uses what its own stages
    need. The comparison takes a message for which nobody waits: for the first batch, for all batches since then after every eighth, and for
    each batch with shapes that may differ. Of a NumPy or JAX array it takes a checksum of the first row of each microbatch. Nothing of any
    other array is read, since a process may not have the rows that its workers do not need.

    Args:
        name: the name of the pipeline, the same in all processes.
        processes: the processes of the run.
        rows_each: rows of a microbatch.
        several_shapes: whether batches may differ in their shapes.
    """

    def __init__(self, name: str, processes: Processes, rows_each: int, several_shapes: bool) -> None:
        self._name, self._processes, self._rows, self._several_shapes = name, processes, rows_each, several_shapes
        self._first: int | None = None  # the first batch that has not been compared
        self._checksums: dict[str, int] = {}  # of the batches since then, by array
        self._evaluations = 0

    def step(self, number: int, batch: Tree) -> None:
        """Take the inputs and labels of batch `number`, as host arrays, before it is trained on."""
        first = self._first = number if self._first is None else self._first
        self._checksums = _checksums(batch, self._rows, self._checksums)
        if number % _EVERY == 0 or self._several_shapes:
            batches = f"batch {number}" if first == number else f"batches {first} to {number}"
            self._compare(batches, _facts(batches, batch if self._several_shapes else {}, self._checksums))
            self._first, self._checksums = None, {}

    def evaluation(self, batch: Tree, options: Mapping[str, str]) -> None:
        """Take the inputs and labels of a batch, as host arrays, before it is evaluated, and the other arguments of the evaluation."""
        self._evaluations += 1
        of = f"evaluation {self._evaluations}"
        facts = {f"{name} of {of}": value for name, value in options.items()}
        self._compare(of, facts | _facts(f"the batch of {of}", batch, _checksums(batch, self._rows, {})))

    def _compare(self, what: str, facts: dict[str, str]) -> None:
        self._processes.compare(f"{what} of {self._name}", facts, "pass the same in all processes")


def _facts(batches: str, batch: Tree, checksums: Mapping[str, int]) -> dict[str, str]:
    shapes = {f"the shape of {name} of {batches}": describe(leaf) for name, leaf in _by_name(batch).items()}
    return shapes | {f"the checksum of {name} of {batches}": f"{checksum:08x}" for name, checksum in checksums.items()}


def _checksums(batch: Tree, rows_each: int, before: Mapping[str, int]) -> dict[str, int]:
    """Return the checksums `before`, by array, with this batch's added."""
    checksums = dict(before)
    for name, array in _by_name(batch).items():
        if isinstance(array, np.ndarray) and array.size:
            rows = array[::rows_each][: max(_MOST_BYTES // array[0].nbytes, 1)]
            checksums[name] = zlib.crc32(rows.ravel().view(np.uint8)[:_MOST_BYTES].tobytes(), checksums.get(name, 0))
    return checksums


def _by_name(batch: Tree) -> dict[str, Any]:
    """Yield the arrays by their names: `inputs`, or `inputs['tokens']` where the inputs are a dict."""
    return {"".join((path[0].key, jax.tree_util.keystr(path[1:]))): leaf for path, leaf in jax.tree.leaves_with_path(batch)}


def share_rows(
    processes: Processes, name: str, parts: Mapping[int, Tree], sources: Sequence[int], outputs: Tree, *, keep: bool
) -> dict[int, Tree]:
    """Send the outputs of each microbatch to all processes, bit for bit; all of them call it.

    Args:
        processes: the processes of the run.
        name: the name of the call, the same in all processes.
        parts: the parts of this process, by microbatch.
        sources: for each microbatch the process that has it.
        outputs: the specs of each part.
        keep: whether this process wants them.

    Returns:
        All parts, or nothing.
    """
    processes.barrier(name)  # all have computed: no process waits in a collective for another's computation
    blank = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), outputs)
    results = {}
    for k, source in enumerate(sources):
        part = parts.get(k, blank)
        with processes.waiting("the outputs of a prediction", source):
            # As bytes: a sum of numbers would make 0 of -0.
            sent = jax.tree.map(lambda leaf: np.ascontiguousarray(leaf).reshape(-1).view(np.uint8), part)
            received = multihost_utils.broadcast_one_to_all(sent, is_source=source == processes.index)
        if keep:
            results[k] = jax.tree.map(lambda leaf, like: np.asarray(leaf).view(like.dtype).reshape(like.shape), received, blank)
    return results
