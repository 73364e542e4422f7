"""Measure the cost of checkpoints with the default config: the delay of training, bytes, and the time of a restore."""

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import jpipe
import jpipe.checkpoints
from benchmarks.faults.runs import ROOT
from benchmarks.planner.markdown import print_table
from jpipe_train.assemble.build import prepare_devices
from jpipe_train.checkpoint import history
from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.checkpoint.resume import find
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.config.config_file import to_yaml
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data, position
from jpipe_train.launch.team import Team
from jpipe_train.run import loop, starting

SCHEDULES = "pipedream_2bw", "pipedream", "gpipe"  # whose bytes are counted; the first is the default
ALONE = Team(None)


def main(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure, print and return the figures.

    Args:
        folder: where the checkpoints are written.
        rounds: how often steps with and without checkpoints take turns.
    """
    figures: dict[str, Any] = {"bytes": {}}
    for schedule in SCHEDULES:
        training = _Training(_config(folder / schedule, schedule))
        if schedule == SCHEDULES[0]:
            figures |= training.turns(rounds)
        else:
            training.block(saves=True)
        figures["bytes"][schedule] = training.bytes_written()
        if schedule == SCHEDULES[0]:
            figures |= _restores(training.config)
    print_table(("figure", "found"), list(_rows(figures)))
    return figures


class _Training:
    """The training loop without evaluations and rows, in blocks of as many steps as lie between two checkpoints.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.every = config, config.checkpoint.every or 1
        prepare_devices(config.plan)
        self._pipe, self._batches, reporter = _ready(config)
        self._state = starting.begin(config.seed, self._pipe, self._batches, None)
        self._folder = Path(config.run.dir or "")
        jpipe.checkpoints.folders.begin(self._folder, None)
        devices = jax.device_count()
        facts = {"config": to_yaml(config), "plan": self._pipe.plan.to_json(), "devices": devices, "val_loss_before": 0.0}
        place = position.start(config.train.batch_size).model_dump()
        facts |= {
            "history": [history.part(self._pipe.plan, {}, devices, 0, 1, 0).model_dump()],
            "data": {"batch_size": config.train.batch_size, "order": place, "position": place},
        }
        self._checkpoints = Checkpoints(config.checkpoint, self._pipe, self._folder, config.train.length, ALONE, facts, bytes, reporter.say)
        self._last: jpipe.Metrics | None = None
        self._last_logged_step, self._stalled = -1, 0.0
        for _ in range(self.every - 1):  # the first step of each block then begins a snapshot
            self._step(saves=False)

    def block(self, saves: bool) -> tuple[float, float]:
        """Run some steps, with a snapshot if `saves`.

        Returns:
            Their seconds, and the seconds that this thread spent on checkpoints.
        """
        began, self._stalled = time.perf_counter(), 0.0
        for _ in range(self.every):
            self._step(saves)
        with self._counted():
            self._checkpoints.finish()
        return time.perf_counter() - began, self._stalled

    def turns(self, rounds: int) -> dict[str, float]:
        """Run blocks with and without a checkpoint in turn.

        Returns:
            Medians of the seconds per step and of their ratios, without the first two blocks.
        """
        blocks = [(self.block(saves=True), self.block(saves=False)) for _ in range(rounds + 1)][1:]
        return {
            "step with": statistics.median(saving[0] for saving, _ in blocks) / self.every,
            "step without": statistics.median(alone[0] for _, alone in blocks) / self.every,
            "ratio": statistics.median(saving[0] / alone[0] for saving, alone in blocks),
            "stall": statistics.median(saving[1] / alone[0] for saving, alone in blocks),
        }

    def bytes_written(self) -> dict[str, int]:
        """Return the bytes of the newest checkpoint, and those that the workers hold: versions, optimizer state and layer state."""
        place = self._folder / "checkpoints" / str(jpipe.checkpoints.steps(self._folder)[-1])
        state = [(worker.weights, worker.optimizer, worker.layer_state) for worker in self._state.workers]
        return {
            "files": sum(path.stat().st_size for path in place.rglob("*") if path.is_file()),
            "state": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        }

    def _step(self, saves: bool) -> None:
        step = self._state.batch
        with self._counted():
            if saves:
                self._checkpoints.schedule_snapshot(step)
            observer = self._checkpoints.observing()
        self._state, metrics = self._pipe.step(self._state, self._batches.train[step], observe=observer and self._timed(observer))
        for t, loss in ({} if self._last is None else self._last.losses).items():
            float(loss)  # waits for it, as a row does
            self._last_logged_step = t
        self._last = metrics
        with self._counted():
            self._checkpoints.flush_finished(self._last_logged_step, lambda _: {})

    def _timed(self, observer: Callable[[jpipe.runtime.Event], None]) -> Callable[[jpipe.runtime.Event], None]:
        def observe(event: jpipe.runtime.Event) -> None:
            with self._counted():
                observer(event)

        return observe

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._stalled += time.perf_counter() - began


def _config(folder: Path, schedule: str) -> Config:
    shutil.rmtree(folder, ignore_errors=True)
    return config_file.load(ROOT / "configs" / "gpt-bytes.yaml", [f"run.dir={folder}", f"plan.schedule={schedule}", "train.steps=1000000"])


def _ready(config: Config) -> tuple[jpipe.Pipeline, data.Data, Reporter]:
    reporter = Reporter(config.train.length, *data.portion(config), Console(quiet=True))
    return *loop.build_and_check(config, reporter), reporter


def _restores(config: Config, times: int = 3) -> dict[str, float]:
    """Return median seconds until a run has its first state, fresh and from its newest checkpoint; both compile."""
    fresh, restored = [], []
    for _ in range(times):
        for durations, resumes in ((fresh, False), (restored, True)):
            pipe, batches, reporter = _ready(config)
            began = time.perf_counter()
            resumed = find(config.run.dir, "must", ALONE, reporter.say) if resumes else None
            layers = None if resumed is None else starting.read_checkpoint(pipe, batches, ALONE, resumed, fresh_optimizer=False)[0]
            jax.block_until_ready(starting.begin(config.seed, pipe, batches, resumed, layers))
            durations.append(time.perf_counter() - began)
    return {"fresh": statistics.median(fresh), "restored": statistics.median(restored)}


def _rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "a step without checkpoints", f"{figures['step without'] * 1e3:.0f} ms"
    yield "a step with a checkpoint every 10", f"{figures['step with'] * 1e3:.0f} ms, {figures['ratio']:.3f} times as long"
    yield "time of the training thread for it", f"{figures['stall']:.2%} of the time of 10 steps"
    for schedule, of in figures["bytes"].items():
        yield f"bytes written ÷ bytes of state, `{schedule}`", f"{of['files'] / of['state']:.3f} ({of['files'] / 1e6:.1f} MB)"
    yield (
        "restore ÷ start without a checkpoint, both with compilation",
        f"{figures['restored'] / figures['fresh']:.2f} ({figures['restored']:.1f} s)",
    )
