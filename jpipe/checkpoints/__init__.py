"""Checkpoints of a run: written while it goes on, and read under any plan. `jpipe train` uses these functions.

A public module of its own, `jpipe.checkpoints`: importing `jpipe` does not import Orbax. Layout and hashes: `jpipe.checkpoints.files`.
"""

import errno
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpipe.checkpoints import files
from jpipe.checkpoints.files import prune, steps
from jpipe.errors import InputError
from jpipe.pipeline import Pipeline
from jpipe.processes._membership import Processes
from jpipe.runtime._join import join_processes
from jpipe.runtime._plain import Plain
from jpipe.runtime._snapshot import CopiesDiffer, SharedCopy, Snapshot, layer_of
from jpipe.runtime.state import State
from jpipe.stages._batch import Batch

__all__ = ["load", "own_layers", "prune", "read", "save", "stand_ins", "steps"]

_PATIENCE = 5.0  # seconds without any progress until the processes are named that have not called `save`


def save(
    folder: str | Path,
    snapshot: Snapshot,
    *,
    facts: Any = None,
    rows: Callable[[], bytes] = lambda: b"",
    keep: int | None = None,
    limit: float = 600.0,
    processes: Processes | None = None,
) -> None:
    """Write a checkpoint, the folder `checkpoints/00000040` for a snapshot at batch 40; returns when it is whole and on the disk.

    In a run of several processes all call this, each writes the layers it has, and process 0 says that it is complete. Before that the
    copies of parameters that stages share are compared, bit for bit, those of the replicas of a stage included.

    Args:
        folder: of the run; the same for all processes, which share its file system.
        snapshot: from `Pipeline.snapshot`, complete.
        facts: anything that JSON can say, for `files.read_facts`.
        rows: gives the metrics so far, for `files.read_metrics`; process 0 asks once the parts are written.
        keep: so many of the newest checkpoints stay, older ones are removed; None: all stay. With other rules, see `prune`.
        limit: seconds that process 0 waits for the others.
        processes: of the run; by default those of `jpipe.join_processes`.

    Raises:
        OSError: the disk is full, say; nothing is left of this checkpoint.
        TimeoutError: another process did not write its part.
        PeerLost: another process did not call this. Process 0 names it on standard error after five seconds in which nothing moves in any
            process, and gives up when the run counts as hanging (`wait` of `join_processes`), or with `InputError` if that process has
            finished.
        jpipe.runtime.CopiesDiffer: in process 0, the copies of a shared parameter are not the same; nothing is left of this checkpoint.
        InputError: `folder` cannot be used, `snapshot` is not complete, or `keep` is below 1.
    """
    _check(snapshot, keep)
    place, processes = files.run_folder(folder), processes or join_processes()
    index = 0 if processes is None else processes.index
    if processes is not None and index > 0:
        processes.broadcast(_begun(snapshot.batch, index), [])
    problem: OSError | None = None
    try:
        files.write_layers(place, snapshot.batch, snapshot.layers(), index)
    except OSError as error:
        problem = error
    copies = snapshot.shared_copies()
    if index == 0:
        if processes is not None:
            _await_calls(processes, snapshot.batch)
        _complete(place, snapshot, copies, processes, problem, facts, rows, limit)
        if keep is not None:
            prune(place, keep)
        return
    assert processes is not None
    numbers = [float(number) for copy in copies for number in copy]
    processes.broadcast(_ended(snapshot.batch, index, well=problem is None), numbers)  # process 0 waits for it
    if problem is not None:
        raise problem


def load(
    pipe: Pipeline, folder: str | Path, key: jax.Array, batch: Batch, step: int | None = None, *, buckets: Sequence[Batch] = ()
) -> State | None:
    """The state of a run before a batch, everything compiled; the run goes on as if it had not ended. See `Pipeline.restore`.

    Args:
        pipe: what is to go on, perhaps under another plan than the run had.
        folder: of the run, one of `jpipe train` too.
        key: of the run, as it was given to `Pipeline.init`.
        batch: as in `Pipeline.init`; only shapes and dtypes are used.
        step: of the checkpoint, the batches that its weights have seen; None: the newest that is whole.
        buckets: as in `Pipeline.init`.

    Returns:
        The state; its `batch` is the step. None where `step` is None and the folder has no whole checkpoint.

    Raises:
        InputError: a checkpoint of another model or optimizer, a damaged one, no such step, or no whole one where there are some.

    Example:
        >>> state = load(pipe, "runs/mine", key, batches[0]) or pipe.init(key, batches[0])  # doctest: +SKIP
    """
    if not isinstance(pipe, Pipeline):
        raise InputError(f"pipe: expected a jpipe.Pipeline, found {type(pipe).__name__}")
    place = files.run_folder(folder)
    found = files.newest_good(place, lambda line: None) if step is None else step
    if found is None:
        if steps(place):
            raise InputError(f"{place}: none of its checkpoints is whole; choose another folder, or remove them to begin anew")
        return None
    if found not in steps(place):
        raise InputError(f"step: expected one of {', '.join(map(str, steps(place))) or 'none at all'}, those in '{place}', found {found}")
    pipe.check_layers(batch, stand_ins(pipe, place, found), found)
    return pipe.restore(key, batch, read(pipe, place, found), found, buckets=buckets)


def read(pipe: Pipeline, folder: Path, step: int) -> dict[str, Plain]:
    """The layers of this process's workers, read and held against their hashes; what `Pipeline.restore` takes.

    Args:
        pipe: what is to go on.
        folder: of the run.
        step: of the checkpoint.

    Raises:
        InputError: one of them is not in the checkpoint; a file is damaged.
    """
    return files.read_layers(folder, step, _own_names(pipe, folder, step))


def stand_ins(pipe: Pipeline, folder: Path, step: int) -> dict[str, Plain]:
    """What has the shapes and types of `read` and needs no memory, for `Pipeline.check_layers` before anything is read.

    Args:
        pipe: what is to go on.
        folder: of the run.
        step: of the checkpoint.

    Raises:
        InputError: as `read`, but for the contents of files.
    """
    specs = files.layer_specs(folder, step)
    own = {name: specs[name] for name in _own_names(pipe, folder, step)}
    return jax.tree.map(lambda spec: np.broadcast_to(np.zeros((), spec.dtype), spec.shape), own)


def own_layers(pipe: Pipeline) -> list[str]:
    """The layers of this process's workers, and those that hold the first places of shared parameters that these use."""
    ids, ties = _layers_here(pipe), pipe.stack.ties
    return list(dict.fromkeys((*ids, *(ties.first[name][0] for name in ties.names(ids)))))


def _layers_here(pipe: Pipeline) -> list[str]:
    own = {s for (s, _), device in zip(pipe.plan.workers, pipe.devices, strict=True) if device.process_index == jax.process_index()}
    return [layer_id for s in sorted(own) for layer_id in pipe.plan.stages[s].layers]


def _own_names(pipe: Pipeline, folder: Path, step: int) -> list[str]:
    """The names in the checkpoint of the layers of this process's workers."""
    ids, there = pipe.stack.ties.entries(_layers_here(pipe)), files.layers_in(folder, step)
    everything = pipe.stack.ties.entries(pipe.stack.ids)
    if missing := [layer_id for layer_id in everything if layer_id not in there]:
        raise InputError(f"{folder}: the checkpoint of step {step} lacks layer '{missing[0]}'; is it of another model?")
    if unknown := [name for name in there if layer_of(name, everything) is None]:
        raise InputError(f"{folder}: the model lacks layer '{unknown[0]}' of the checkpoint of step {step}; is it another model?")
    return [name for name in there if layer_of(name, everything) in ids]


def _check(snapshot: Any, keep: int | None) -> None:
    if not isinstance(snapshot, Snapshot):
        raise InputError(
            f"checkpoint: expected a jpipe.runtime.Snapshot, found {type(snapshot).__name__}; make one with pipe.snapshot(batch)"
        )
    if keep is not None:
        files.check_keep(keep)
    if not snapshot.complete:
        raise InputError(
            f"checkpoint: expected a complete snapshot, found one at batch {snapshot.batch} whose run has not come to it yet; step on"
        )


def _await_calls(processes: Processes, step: int) -> None:
    """Wait until all other processes have called `save`; name those that have not, since mostly they never will."""
    absent, patience = list(range(1, processes.count)), time.monotonic() + _PATIENCE
    while absent:
        with processes.waiting(f"the call of checkpoints.save for step {step}", absent):
            while not any(processes.has_message(_begun(step, k)) for k in absent):
                processes.check()
                if gone := processes.finished().intersection(absent):
                    raise InputError(
                        f"checkpoint of step {step}: expected all processes to call checkpoints.save, {_named(gone)} finished without; "
                        "call it in all processes"
                    )
                if time.monotonic() > patience and processes.still() > _PATIENCE:
                    text = f"the checkpoint of step {step} waits for {_named(absent)} to call checkpoints.save; call it in all processes"
                    os.write(2, f"jpipe: {text}\n".encode())
                    patience = math.inf  # once is enough
                time.sleep(0.02)
        for k in [k for k in absent if processes.has_message(_begun(step, k))]:
            processes.receive(_begun(step, k), k)
            absent.remove(k)


def _named(processes: Collection[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, sorted(processes)))}"


def _complete(
    place: Path,
    snapshot: Snapshot,
    copies: list[SharedCopy],
    processes: Processes | None,
    problem: OSError | None,
    facts: Any,
    rows: Callable[[], bytes],
    limit: float,
) -> None:
    """Say that it is complete, or clear it away: the disk may be full, or copies of shared parameters may differ."""
    step, count, end = snapshot.batch, 1 if processes is None else processes.count, time.monotonic() + limit

    def has_reported(k: int, well: bool) -> bool:
        return processes is not None and processes.has_message(_ended(step, k, well=well))

    # A part of an earlier attempt may be there: only the process itself knows when that of this one is.
    while time.monotonic() < end and not all(has_reported(k, True) or has_reported(k, False) for k in range(1, count)):
        time.sleep(0.02)
    failed = {k for k in range(1, count) if has_reported(k, False)} | ({0} if problem is not None else set())
    without = files.gather(place, step, count, max(end - time.monotonic(), 0.0), lambda: failed)
    try:
        if problem is not None:
            raise problem
        if without:
            raise OSError(errno.EIO, f"process {without[0]} could not write its part")
        for k in range(1, count) if snapshot.shared else ():
            assert processes is not None
            numbers = map(int, processes.receive(_ended(step, k, well=True), k))
            copies = copies + [SharedCopy(*copy) for copy in zip(numbers, numbers, numbers, strict=True)]
        _check_copies(snapshot, copies)
        files.complete(place, step, count, facts, rows())
    except (OSError, CopiesDiffer):
        files.discard(place, step)
        raise


def _check_copies(snapshot: Snapshot, copies: Iterable[SharedCopy]) -> None:
    """Refuse copies of a shared parameter that differ from that of its first stage."""
    first: dict[int, SharedCopy] = {}
    for copy in sorted(copies):
        other = first.setdefault(copy.parameter, copy)
        if copy.checksum != other.checksum:
            at = [
                "stage {}{}".format(s, f", replica {r}" if r else "") for s, r in (snapshot.plan.workers[c.worker] for c in (other, copy))
            ]
            raise CopiesDiffer(
                f"checkpoint of step {snapshot.batch}: the copies of '{snapshot.shared[copy.parameter]}' at {at[0]} and at {at[1]} are not "
                f"the same bits after batch {snapshot.batch - 1}; a device or a link may be faulty, so go on from the checkpoint before"
            )


def _begun(step: int, process: int) -> str:
    return f"process {process} begins its part of the checkpoint of step {step}"


def _ended(step: int, process: int, *, well: bool) -> str:
    return f"process {process} {'has written' if well else 'could not write'} its part of the checkpoint of step {step}"
