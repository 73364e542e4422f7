"""Checkpoints of a run, written in the background while it trains."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jpipe
from jpipe.files import shown
from jpipe_train.checkpoint.best import Best
from jpipe_train.checkpoint.run_folder import FolderChanged
from jpipe_train.config.config import CheckpointConfig
from jpipe_train.console.exit_codes import reported_by_system
from jpipe_train.launch.local import reported_progress
from jpipe_train.launch.team import Team

Observer = Callable[[jpipe.runtime.Event], None]

_PATIENCE = 600.0  # seconds that process 0 waits for the parts of the other processes


class _NotRemoved(OSError):
    """A new checkpoint is complete, but removing an old one has failed."""


class Checkpoints:
    """Takes snapshots of a run at regular steps and at its end, and writes them in the background.

    A snapshot is written once `metrics.jsonl` has the rows of all earlier batches; the next snapshot waits for it. Each process writes its
    part, and process 0 completes the checkpoint.

    Args:
        config: the section `checkpoint`: when to write checkpoints, and which to keep.
        pipe: the pipeline of the run.
        folder: the folder of the run, the same for all processes.
        steps: the number of steps of the run.
        team: the processes of the run.
        facts: the facts that all checkpoints of the run have in common.
        rows: a function that returns the rows of the run so far; only process 0 calls it.
        say: in process 0, a function that prints a line for each failure.
        best: selects the best checkpoints; None if the run does not keep the best.
        validated_every: the number of steps between validations; None if neither the best checkpoints nor the end of the run depend on
            them.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        pipe: jpipe.Pipeline,
        folder: Path,
        steps: int,
        team: Team,
        facts: Mapping[str, Any],
        rows: Callable[[], bytes],
        say: Callable[[str], None],
        best: Best | None = None,
        validated_every: int | None = None,
    ) -> None:
        self._config, self._pipe, self._folder, self._steps = config, pipe, folder, steps
        self._facts, self._rows, self._say = facts, rows, say
        self._team = team
        self._snapshots: list[jpipe.runtime.Snapshot] = []  # snapshots that are not written yet, in order
        self._writing: Future[None] | None = None
        self._best, self._validated_every = best, validated_every
        self._optional: set[int] = set()  # the steps of snapshots that are written only if they become one of the best
        self._is_last = False  # whether `schedule_last` was called
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        # Kept open to notice when another folder takes its place. Without checkpoints only process 0 needs the folder.
        self._open_folder = None if config.every is None else os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.written: list[int] = []  # the steps of the checkpoints that are complete, in order, in process 0

    def schedule_snapshot(self, step: int) -> None:
        """Begin the snapshot after `step` if one is due. Call this just before the step."""
        every, after = self._config.every, step + 1
        if every is None or (self._is_last and after != self._steps):
            return
        is_due = after == self._steps or after % every == 0
        if is_due or (self._validated_every is not None and after % self._validated_every == 0):
            self._snapshots.append(self._pipe.snapshot(after))
            if not is_due:
                self._optional.add(after)

    def end_at(self, step: int) -> None:
        """End the run before `step`, after the validation there."""
        self._steps = step

    def schedule_last(self, step: int) -> None:
        """If the run writes checkpoints, begin the snapshot after `step`. Later only the snapshot at the end of the run is due."""
        self._is_last = True
        if self._config.every is not None:
            self._snapshots.append(self._pipe.snapshot(step + 1))

    @property
    def last_is_done(self) -> bool:
        """Whether the snapshot of `schedule_last` is written or has failed; in process 0, whether this is so in all processes."""
        return self._is_last and not self._snapshots and (self._writing is None or self._writing.done())

    @property
    def has_snapshots(self) -> bool:
        """Whether snapshots are being taken or wait to be written."""
        return bool(self._snapshots)

    def observing(self, other: Observer | None = None) -> Observer | None:
        """Return the observer for `Pipeline.step`. It passes events to unfinished snapshots and to `other`."""
        observers: list[Observer] = [snapshot for snapshot in self._snapshots if not snapshot.complete]
        observers += [] if other is None else [other]
        if len(observers) < 2:
            return observers[0] if observers else None

        def observe(event: jpipe.runtime.Event) -> None:
            for observer in observers:
                observer(event)

        return observe

    def flush_finished(self, logged: int, facts: Callable[[int], Mapping[str, Any]]) -> None:
        """Start to write the complete snapshots if all their rows, up to step `logged`, are written, and report earlier failures.

        `facts` returns the facts for the checkpoint of a step. Raise OSError if the disk is full, and `checkpoint.on_full_disk` is "stop",
        and TimeoutError if another process did not write its part.
        """
        if self._writing is not None and self._writing.done():
            self.finish()  # to report failures now
        # Near the end of a run, a snapshot may wait for forwards that never come; only the run's last snapshot completes.
        for snapshot in [snapshot for snapshot in self._snapshots if snapshot.complete and snapshot.batch <= logged + 1]:
            self._snapshots.remove(snapshot)
            of_step = facts(snapshot.batch)
            is_best = self._best is not None and self._best.record(snapshot.batch, of_step)
            if snapshot.batch in self._optional and snapshot.batch != self._steps and not is_best:
                continue
            self.finish()
            self._writing = self._thread.submit(self._write, snapshot, {**self._facts, **of_step})

    def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            OSError: as in `flush_finished`.
            FolderChanged: the run folder was moved or replaced.
            jpipe.runtime.CopiesDiffer: copies of a shared parameter differ.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            with self._team.working("a checkpoint to be written"):
                writing.result()
        except FolderChanged:
            raise
        except (OSError, jpipe.runtime.CopiesDiffer) as error:
            last_complete = self._last_complete("there is no complete one")
            if isinstance(error, jpipe.runtime.CopiesDiffer):
                raise jpipe.runtime.CopiesDiffer(f"{error}; {last_complete}") from error
            what = "an old checkpoint could not be removed" if isinstance(error, _NotRemoved) else "a checkpoint could not be written"
            if self._config.on_full_disk == "stop":
                raise OSError(error.errno, f"{what}: {error.strerror or error}; {last_complete}") from error
            self._say(f"{what}: {error.strerror or error}; the run continues, {last_complete}")

    def missing(self, step: int) -> str | None:
        """In process 0, return why the last checkpoint, at `step`, is missing, or None if it is complete or not due."""
        if self._config.every is None or not self._team.is_first:
            return None
        from jpipe.checkpoints import Checkpoint

        is_written = self.written[-1:] == [step]
        if is_written and Checkpoint(self._folder, step).has_all_files():
            return None
        last_complete = self._last_complete("there is no other", step)
        what = "is not in the run folder any more" if is_written else "could not be written"
        return f"the checkpoint of step {step} {what}; {last_complete}"

    def close(self) -> None:
        """Finish the checkpoint that is being written and drop the other snapshots."""
        self._snapshots.clear()
        self._thread.shutdown(wait=True)
        if self._open_folder is not None:
            os.close(self._open_folder)

    def _last_complete(self, none: str, but: int | None = None) -> str:
        """Describe the last complete checkpoint, leaving out the one at step `but`."""
        from jpipe.checkpoints import steps

        try:
            whole = [step for step in steps(self._folder) if step != but]
        except (jpipe.InputError, OSError):  # the disk has failed
            whole = []
        return f"the last complete checkpoint is of step {whole[-1]}" if whole else none

    def _write(self, snapshot: jpipe.runtime.Snapshot, facts: Mapping[str, Any]) -> None:
        self._check_folder()
        try:
            self._save(snapshot, facts)
            self._check_folder()  # writing a file would create its folders again
        except jpipe.InputError as error:
            reported = reported_by_system(error)
            if reported is None:
                raise
            raise OSError(reported.errno, str(error)) from error  # not the user's mistake: writing was possible when the run began

    def _save(self, snapshot: jpipe.runtime.Snapshot, facts: Mapping[str, Any]) -> None:
        from jpipe import checkpoints

        checkpoints.save(self._folder, snapshot, facts=dict(facts), rows=self._rows, limit=_PATIENCE, processes=self._team.processes)
        if not self._team.is_first:
            return
        self.written.append(snapshot.batch)
        reported_progress.report(snapshot.batch, self._steps)
        try:
            best = () if self._best is None else self._best.in_folder(self._folder)
            checkpoints.prune(self._folder, self._config.keep, self._config.keep_every, self._config.keep_hours, best)
        except OSError as error:
            raise _NotRemoved(error.errno, error.strerror) from error

    def _check_folder(self) -> None:
        """Check that the run folder is still where it was."""
        assert self._open_folder is not None
        try:
            same = os.path.samestat(os.stat(self._folder), os.fstat(self._open_folder))
        except (FileNotFoundError, NotADirectoryError):
            raise FolderChanged(f"'{shown(self._folder)}' was moved or removed") from None
        if not same:
            raise FolderChanged(f"'{shown(self._folder)}' was moved or replaced by another folder")
