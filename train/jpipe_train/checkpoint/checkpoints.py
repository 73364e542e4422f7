"""Checkpoints of a run, taken and written while it goes on."""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jpipe
from jpipe.files import shown
from jpipe_train.checkpoint.run_folder import FolderChanged
from jpipe_train.config.config import CheckpointConfig
from jpipe_train.console.exit_codes import reported_by_system
from jpipe_train.launch.together import Together

Observer = Callable[[jpipe.runtime.Event], None]

_PATIENCE = 600.0  # seconds that process 0 waits for the parts of the others


class _NotRemoved(OSError):
    """The new checkpoint is there, one that is no longer wanted too."""


class Checkpoints:
    """Takes a snapshot of the run at every so many batches and at its end, and has it written in the background.

    A snapshot is written once the rows of all batches before it are in `metrics.jsonl`; the next one waits for that. All processes write
    their parts, and process 0 says that it is complete.

    Args:
        config: how often, and what is kept.
        pipe: what runs.
        folder: of the run, the same for all processes.
        steps: of the run.
        together: the processes of the run.
        facts: what else a checkpoint says, whatever its batch.
        rows: gives those of the run so far; process 0 is asked.
        say: gets, in process 0, what went wrong.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        pipe: jpipe.Pipeline,
        folder: Path,
        steps: int,
        together: Together,
        facts: Mapping[str, Any],
        rows: Callable[[], bytes],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._pipe, self._folder, self._steps = config, pipe, folder, steps
        self._facts, self._rows, self._say = facts, rows, say
        self._together = together
        self._snapshots: list[jpipe.runtime.Snapshot] = []  # not handed over yet, in order
        self._writing: Future[None] | None = None
        self._is_last = False  # whether the last one was begun, but for that at the end
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        # Held open, to notice that another one is in its place. Where no checkpoints are written, only process 0 need see it.
        self._open_folder = None if config.every is None else os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.written: int | None = None  # the last complete one, as far as process 0 knows

    def arm(self, step: int) -> None:
        """Before `step` runs: begin to take the snapshot behind it, if one is due there."""
        every = self._config.every
        if every is not None and (step + 1 == self._steps or ((step + 1) % every == 0 and not self._is_last)):
            self._snapshots.append(self._pipe.snapshot(step + 1))

    def arm_last(self, step: int) -> None:
        """Before `step` runs: begin the snapshot behind it, due or not; none is due any more after it, but that at the run's end."""
        self._is_last = True
        self._snapshots.append(self._pipe.snapshot(step + 1))

    @property
    def last_is_over(self) -> bool:
        """Whether `arm_last` was called and its snapshot is written, in process 0 by all processes; or could not be."""
        return self._is_last and not self._snapshots and (self._writing is None or self._writing.done())

    def observing(self, other: Observer | None = None) -> Observer | None:
        """What `Pipeline.step` is to be observed with: the snapshots that are being taken, and `other`."""
        observers: list[Observer] = [snapshot for snapshot in self._snapshots if not snapshot.complete]
        observers += [] if other is None else [other]
        if len(observers) < 2:
            return observers[0] if observers else None

        def observe(event: jpipe.runtime.Event) -> None:
            for observer in observers:
                observer(event)

        return observe

    def proceed(self, logged: int, facts: Callable[[int], Mapping[str, Any]]) -> None:
        """Have snapshots written that are complete and whose rows are logged; say what became of the one before.

        Args:
            logged: the last step whose row is written.
            facts: what a checkpoint says of its own batch.

        Raises:
            OSError: the disk is full, and the config says to stop then.
            TimeoutError: another process did not write its part.
        """
        if self._writing is not None and self._writing.done():
            self.finish()  # so that what went wrong is reported now
        # Near the run's end one may stay incomplete: its workers do not come to the forwards that it waits for. That at the end is there.
        for snapshot in [snapshot for snapshot in self._snapshots if snapshot.complete and snapshot.batch <= logged + 1]:
            self._snapshots.remove(snapshot)
            self.finish()
            self._writing = self._thread.submit(self._write, snapshot, {**self._facts, **facts(snapshot.batch)})

    def finish(self) -> None:
        """Wait for what is being written.

        Raises:
            OSError: as `proceed`.
            FolderChanged: the run folder is not where it was, whatever the config says.
            jpipe.runtime.CopiesDiffer: copies of a shared parameter differ.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            with self._together.working("a checkpoint to be written"):
                writing.result()
        except FolderChanged:
            raise
        except (OSError, jpipe.runtime.CopiesDiffer) as error:
            kept = self._kept("there is no complete one")
            if isinstance(error, jpipe.runtime.CopiesDiffer):
                raise jpipe.runtime.CopiesDiffer(f"{error}; {kept}") from error
            what = "an old checkpoint could not be removed" if isinstance(error, _NotRemoved) else "a checkpoint could not be written"
            if self._config.on_full_disk == "stop":
                raise OSError(error.errno, f"{what}: {error.strerror or error}; {kept}") from error
            self._say(f"{what}: {error.strerror or error}; the run goes on, {kept}")

    def missing(self, step: int) -> str | None:
        """Return in process 0 what is wrong with the checkpoint of this step, with which the run ends; None: it is there, or not due."""
        if self._config.every is None or not self._together.is_first:
            return None
        from jpipe.checkpoints import files

        if self.written == step and files.is_all_there(self._folder, step):
            return None
        kept = self._kept("there is no other", step)
        what = "could not be written" if self.written != step else "is not in the run folder any more"
        return f"the checkpoint of step {step} {what}; {kept}"

    def close(self) -> None:
        """Begin nothing more; what is being written is finished, if it can be."""
        self._snapshots.clear()
        self._thread.shutdown(wait=True)
        if self._open_folder is not None:
            os.close(self._open_folder)

    def _kept(self, none: str, but: int | None = None) -> str:
        """What is left, in words: the last complete checkpoint, but for that of one step."""
        from jpipe.checkpoints import steps

        try:
            whole = [step for step in steps(self._folder) if step != but]
        except (jpipe.InputError, OSError):  # the disk is out of order
            whole = []
        return f"the last good one is of step {whole[-1]}" if whole else none

    def _write(self, snapshot: jpipe.runtime.Snapshot, facts: Mapping[str, Any]) -> None:
        self._check_folder()
        try:
            self._save(snapshot, facts)
            self._check_folder()  # whoever writes a file makes the folders above it again
        except jpipe.InputError as error:
            reported = reported_by_system(error)
            if reported is None:
                raise
            raise OSError(reported.errno, str(error)) from error  # what was right when the run began is no mistake of the user's

    def _save(self, snapshot: jpipe.runtime.Snapshot, facts: Mapping[str, Any]) -> None:
        from jpipe.checkpoints import files, save

        save(self._folder, snapshot, facts=dict(facts), rows=self._rows, limit=_PATIENCE, processes=self._together.processes)
        if not self._together.is_first:
            return
        self.written = snapshot.batch
        try:
            files.prune(self._folder, self._config.keep, self._config.keep_every, self._config.keep_hours)
        except OSError as error:
            raise _NotRemoved(error.errno, error.strerror) from error

    def _check_folder(self) -> None:
        """Check that the run folder is still where it was.

        Raises:
            FolderChanged: it is not.
        """
        assert self._open_folder is not None
        try:
            same = os.path.samestat(os.stat(self._folder), os.fstat(self._open_folder))
        except (FileNotFoundError, NotADirectoryError):
            raise FolderChanged(f"'{shown(self._folder)}' was moved or removed") from None
        if not same:
            raise FolderChanged(f"'{shown(self._folder)}' was moved or replaced by another folder")
