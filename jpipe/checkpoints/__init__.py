"""Write checkpoints of a run while it continues, and restore them under any plan; `jpipe train` uses these functions.

It is a separate public module, because it imports Orbax, which `import jpipe` does not. `jpipe.checkpoints.writing` describes the files of
a checkpoint, `Checkpoint` reads them.
"""

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jpipe.checkpoints import folders, writing
from jpipe.checkpoints.checkpoint import Checkpoint, run_folder
from jpipe.checkpoints.folders import at, newest, prune, steps
from jpipe.errors import InputError
from jpipe.pipeline import Pipeline
from jpipe.processes._coordinator import named
from jpipe.processes._membership import Processes
from jpipe.runtime._join import join_processes
from jpipe.runtime._plain import Plain
from jpipe.runtime._snapshot import CopiesDiffer, Copy, Snapshot, layer_of
from jpipe.runtime.state import State
from jpipe.stages._batch import Batch

__all__ = ["Checkpoint", "at", "layers_to_read", "load", "newest", "prune", "read", "save", "stand_ins", "steps"]

_PATIENCE = 5.0  # seconds without any progress after which the processes that have not called `save` are named


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
    """Write a checkpoint, such as the folder `checkpoints/40` for a snapshot at batch 40. On return it is on disk.

    In a run of several processes, all must call this. Each process writes its layers. Then process 0 checks that all copies of shared
    parameters are equal bit for bit, and completes the checkpoint. The other processes do not wait for process 0.

    Args:
        folder: the folder of the run, which all processes share.
        snapshot: a complete snapshot from `Pipeline.snapshot`.
        facts: anything of JSON types; `Checkpoint.facts` returns it.
        rows: a function that returns the metrics so far; `Checkpoint.rows` returns them. Process 0 calls it when the parts are written.
        keep: the number of newest checkpoints to keep; older ones are removed. None keeps all. `prune` has further options.
        limit: seconds that process 0 waits for the other processes.
        processes: the processes of the run; by default from `jpipe.join_processes`.

    Raises:
        OSError: writing failed, for example on a full disk; this checkpoint is removed.
        TimeoutError: another process did not write its part.
        PeerLost: another process had not called this when the run counted as hanging (`wait` of `join_processes`). After five seconds
            without progress in any process, process 0 prints the number of that process on standard error.
        jpipe.runtime.CopiesDiffer: in process 0, the copies of a shared parameter differ; this checkpoint is removed.
        InputError: `folder` cannot be used, `snapshot` is not complete, `keep` is below 1, or another process has finished.
    """
    _check(snapshot, keep)
    try:
        json.dumps(facts)
    except (TypeError, ValueError) as error:
        raise InputError(f"{error}; give numbers, texts, lists and dicts of Python", where="facts") from None
    processes = processes or join_processes()
    run, step, index = run_folder(folder), snapshot.batch, 0 if processes is None else processes.index
    if processes is not None and index > 0:
        processes.broadcast(_begun(step, index), b"")
    problem: OSError | None = None
    try:
        writing.write_layers(run, step, snapshot.layers(), index)
    except OSError as error:
        problem = error
    copies = snapshot.copies()
    if processes is not None and index > 0:
        processes.broadcast(_ended(step, index), json.dumps([problem is None, copies]).encode())
        if problem is not None:
            raise problem
        return
    if processes is not None:
        _await_calls(processes, step)
    _complete(run, snapshot, copies, processes, problem, facts, rows, limit)
    if keep is not None:
        prune(run, keep)


def load(
    pipe: Pipeline,
    folder: str | Path,
    key: jax.Array,
    batch: Batch,
    step: int | None = None,
    *,
    fresh_optimizer: bool = False,
    buckets: Sequence[Batch] = (),
) -> State | None:
    """Restore the state of a run from a checkpoint, and compile all programs. The run then continues as if it had not ended.

    `Pipeline.restore` describes what is restored under another plan.

    Args:
        pipe: the pipeline that continues the run; its plan may differ from the plan of the run.
        folder: the folder of the run; this can be a run of `jpipe train`.
        key: the random key of the run, as passed to `Pipeline.init`.
        batch: as in `Pipeline.init`; only shapes and dtypes are used.
        step: the step of the checkpoint (the number of batches that its weights have seen); None: the newest complete checkpoint.
        fresh_optimizer, buckets: as in `Pipeline.load`.

    Returns:
        The state; its `batch` is the step. None if `step` is None and there is no complete checkpoint.

    Raises:
        InputError: the checkpoint is damaged or belongs to another model or optimizer; there is no checkpoint of `step`; or all the run's
            checkpoints are damaged.

    Example:
        >>> state = load(pipe, "runs/mine", key, batches[0]) or pipe.init(key, batches[0])  # doctest: +SKIP
    """
    if not isinstance(pipe, Pipeline):
        raise InputError(where="pipe", expected="a jpipe.Pipeline", found=type(pipe).__name__)
    run = run_folder(folder)
    chosen = newest(run, lambda damaged: None) if step is None else at(run, step)
    if chosen is None:
        if steps(run):
            raise InputError(
                f"{run}: none of its checkpoints is complete and undamaged; choose another folder, or remove them to begin anew"
            )
        return None
    pipe.check_layers(batch, _stand_ins(pipe, chosen), chosen.step, fresh_optimizer=fresh_optimizer)
    layers = chosen.read(_local_names(pipe, chosen))
    return pipe.restore(key, batch, layers, chosen.step, fresh_optimizer=fresh_optimizer, buckets=buckets)


def read(pipe: Pipeline, folder: Path, step: int) -> dict[str, Plain]:
    """Read the layers of this process's workers and verify their hashes, for `Pipeline.restore`.

    Args:
        pipe: the pipeline that continues the run.
        folder: the folder of the run.
        step: the step of the checkpoint.

    Raises:
        InputError: a layer is missing from the checkpoint, or a file is damaged.
    """
    checkpoint = Checkpoint(folder, step)
    return checkpoint.read(_local_names(pipe, checkpoint))


def stand_ins(pipe: Pipeline, folder: Path, step: int) -> dict[str, Plain]:
    """Return arrays as `read` does, but without memory, for `Pipeline.check_layers`.

    Arguments and errors are as for `read`; the contents of files are not compared.
    """
    return _stand_ins(pipe, Checkpoint(folder, step))


def _stand_ins(pipe: Pipeline, checkpoint: Checkpoint) -> dict[str, Plain]:
    specs = checkpoint.specs()
    local = {name: specs[name] for name in _local_names(pipe, checkpoint)}
    return jax.tree.map(lambda spec: np.broadcast_to(np.zeros((), spec.dtype), spec.shape), local)


def layers_to_read(pipe: Pipeline) -> list[str]:
    """Return the layers of this process's workers, and the first layer of each shared parameter that they use."""
    ids, ties = _local_layers(pipe), pipe.stack.ties
    return list(dict.fromkeys((*ids, *(ties.first[name][0] for name in ties.names(ids)))))


def _local_layers(pipe: Pipeline) -> list[str]:
    devices = zip(pipe.plan.workers, pipe.devices, strict=True)
    stages = {s for (s, _), device in devices if device.process_index == jax.process_index()}
    return [layer_id for s in sorted(stages) for layer_id in pipe.plan.stages[s].layers]


def _local_names(pipe: Pipeline, checkpoint: Checkpoint) -> list[str]:
    """Return the names that the layers of this process's workers have in a checkpoint."""
    local, everything = pipe.stack.ties.entries(_local_layers(pipe)), pipe.stack.ties.entries(pipe.stack.ids)
    names, where, step = checkpoint.layers, checkpoint.folder, checkpoint.step
    if missing := [layer_id for layer_id in everything if layer_id not in names]:
        raise InputError(f"{where}: the checkpoint of step {step} lacks layer '{missing[0]}'; is it of another model?")
    if unknown := [name for name in names if layer_of(name, everything) is None]:
        raise InputError(f"{where}: the model lacks layer '{unknown[0]}' of the checkpoint of step {step}; is it another model?")
    return [name for name in names if layer_of(name, everything) in local]


def _check(snapshot: Any, keep: int | None) -> None:
    if not isinstance(snapshot, Snapshot):
        raise InputError(
            f"checkpoint: expected a jpipe.runtime.Snapshot, found {type(snapshot).__name__}; make one with pipe.snapshot(batch)"
        )
    if keep is not None:
        folders.check_keep(keep)
    if not snapshot.complete:
        raise InputError(
            f"checkpoint: expected a complete snapshot, found one at batch {snapshot.batch}, which its run has not reached yet; run more "
            "steps"
        )


def _await_calls(processes: Processes, step: int) -> None:
    """Wait until all other processes have called `save`. After a while, name the processes that have not: they probably never will."""
    absent, patience = list(range(1, processes.count)), time.monotonic() + _PATIENCE
    while absent:
        with processes.waiting(f"the call of checkpoints.save for step {step}", absent):
            while not any(processes.has_message(_begun(step, k)) for k in absent):
                processes.check()
                if finished := processes.finished().intersection(absent):
                    raise InputError(
                        f"checkpoint of step {step}: expected all processes to call checkpoints.save, {named(sorted(finished))} finished "
                        "without calling it; call it in all processes"
                    )
                if time.monotonic() > patience and processes.still() > _PATIENCE:
                    text = f"the checkpoint of step {step} waits for {named(absent)} to call checkpoints.save; call it in all processes"
                    os.write(2, f"jpipe: {text}\n".encode())
                    patience = math.inf  # name them once
                time.sleep(0.02)
        for k in [k for k in absent if processes.has_message(_begun(step, k))]:
            processes.receive(_begun(step, k), k)
            absent.remove(k)


def _complete(
    place: Path,
    snapshot: Snapshot,
    copies: list[Copy],
    processes: Processes | None,
    problem: OSError | None,
    facts: Any,
    rows: Callable[[], bytes],
    limit: float,
) -> None:
    """Complete a checkpoint, or remove it if the disk is full or copies of shared parameters differ."""
    step, count, end = snapshot.batch, 1 if processes is None else processes.count, time.monotonic() + limit
    reports: dict[int, list[Any]] = {}
    if processes is not None:  # a part of an earlier attempt may exist, so each process reports when it has written its new part
        names = {k: _ended(step, k) for k in range(1, count)}
        while time.monotonic() < end and not all(map(processes.has_message, names.values())):
            time.sleep(0.02)
        reports = {k: json.loads(processes.receive(name, k)) for k, name in names.items() if processes.has_message(name)}
    failed = {k for k, (well, _) in reports.items() if not well} | ({0} if problem is not None else set())
    writing.await_parts(place, step, sorted({*range(count)} - failed), max(end - time.monotonic(), 0.0))
    if silent := sorted({*range(1, count)} - reports.keys()):
        raise TimeoutError(f"{place}: waited {limit:g} s for {named(silent)} to report that the part of step {step} is written")
    try:
        if problem is not None:
            raise problem
        if failed:
            raise OSError(errno.EIO, f"process {min(failed)} could not write its part")
        for _, of_process in reports.values():
            copies = copies + [Copy(*copy) for copy in of_process]
        _check_copies(snapshot, copies)
        writing.complete(place, step, count, facts, rows())
    except (OSError, CopiesDiffer):
        folders.discard(place, step)
        raise


def _check_copies(snapshot: Snapshot, copies: Iterable[Copy]) -> None:
    """Check that all copies of each shared parameter equal the copy at the first stage that has it."""
    first: dict[int, Copy] = {}
    for copy in sorted(copies):
        other = first.setdefault(copy.parameter, copy)
        if copy.checksum != other.checksum:
            at = [
                "stage {}{}".format(s, f", replica {r}" if r else "") for s, r in (snapshot.plan.workers[c.worker] for c in (other, copy))
            ]
            raise CopiesDiffer(
                f"checkpoint of step {snapshot.batch}: the copies of '{snapshot.copied[copy.parameter]}' at {at[0]} and at {at[1]} are not "
                f"the same bits after batch {snapshot.batch - 1}; a device or a link may be faulty, so use the previous checkpoint"
            )


def _begun(step: int, process: int) -> str:
    return f"process {process} begins its part of the checkpoint of step {step}"


def _ended(step: int, process: int) -> str:
    return f"process {process} ends its part of the checkpoint of step {step}"
