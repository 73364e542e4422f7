"""`jpipe plan --measure`: run the best plans of a search for some steps on the devices of this run, and rank them by measured speed.

If there are several processes, they run each plan together. Process 0 has the result of the search, and sends the plans to the other
processes as text.
"""

import dataclasses
import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import jpipe
from jpipe_planner import Plans
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import Ranked
from jpipe_planner.ranking.compiled import compile_stages
from jpipe_planner.ranking.find import Attempt, Compiled
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, first_line
from jpipe_train.data import data
from jpipe_train.launch.team import Team
from jpipe_train.plan.profiling import Parts

ROUNDS = 5  # each plan runs once in each round, so that changes of the machine's speed affect all plans; the median round counts
SECONDS = 1.0  # the time of the measured steps of a round
LEAST = 2  # the fewest measured steps of a round
NEARLY = 0.01  # relative difference up to which measured plans count as equally fast
LONGEST = 6 * 3600.0  # seconds that process 0 may search and compile while the other processes wait
_READ = 16  # the number of first batches that are read; if their shapes differ, the largest batch is used
HEAD = "schedule", "stages", "predicted", "measured", "least to most", "off by"
"""The columns of `rows`."""


@dataclass
class Run:
    """A plan to run, and the results of running it."""

    name: str  # the name of the plan, for messages
    rows: int  # the number of rows in a batch
    pipe: jpipe.Pipeline | None = None  # the pipeline of the plan; None if it is not made yet, or cannot be made
    rounds: list[float] = field(default_factory=list)  # for each round the seconds per step in the slowest process
    failure: str = ""  # why the plan could not run, or ""


@dataclass(kw_only=True)
class Trial(Run):
    """A plan to run with the facts that only process 0 has."""

    ranked: Ranked  # the plan with its prediction
    compiled: Compiled | None = None  # the memory of the compiled stages; None if the stages are not compiled

    @property
    def seconds(self) -> float:
        """Seconds per step: the median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def samples_per_second(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds

    @property
    def error(self) -> float:
        """The difference between the measured and the predicted time of a step, relative to the prediction."""
        return self.seconds / self.ranked.seconds - 1


@dataclass(frozen=True)
class Measured:
    """The results of all runs."""

    result: Plans  # the plans of the search in a new order: the plans that ran come first, the fastest of them at the top
    searched: Plans  # the plans of the search in the order of predictions
    trials: tuple[Trial, ...]  # the plans that ran, the fastest first
    failed: tuple[Trial, ...]  # the plans that could not run


def measure(find: Callable[[], Plans], parts: Parts, most: int, reporter: Reporter, team: Team) -> Measured | None:
    """Run the best plan of each kind until `most` plans have run. Rank these first, by their measured speed.

    All processes must call this function. Each plan trains fresh weights with one batch of the config's data, so that the speed of reading
    data does not count. After Ctrl-C a single process stops measuring: the measurements so far decide, or the predictions if there are
    none. If there are several processes, Ctrl-C ends them.

    `find` searches for the plans and compiles them, in process 0 alone, which also returns the measurements; the others return None.

    Raises:
        InputError: no plan could run; or there are several processes, and a plan could not run in one of them.
        jpipe.PeerLost: another process died, hung or stopped.
    """
    searched, trials, groups = list[Plans](), list[Trial](), list[list[Run]]()

    def prepare() -> str:
        searched.append(find())
        _compile(searched[0], trials, parts, most, reporter)
        _check_some(trials)
        groups.extend(_groups([one for one in trials if not one.failure], searched[0].choice.topology.device.limit))
        plans = [[(run.name, run.rows, run.pipe.plan.to_json()) for run in group if run.pipe is not None] for group in groups]
        return json.dumps(plans)

    def read(name: str, rows: int, plan: str) -> Run:
        return Run(name, rows, parts.pipeline(jpipe.Plan.from_json(plan)))

    try:
        text = team.from_first("the plans to measure", prepare, LONGEST)
        for group in groups if team.is_first else ([read(*plan) for plan in group] for group in json.loads(text)):
            _run(group, parts, reporter, team)
    except BaseException as error:
        if interrupt.words(error) is None or not searched or team.processes is not None:
            raise
        interrupt.forget()
        decide = "only the plans that are measured already are compared" if any(one.rounds for one in trials) else "predictions decide"
        reporter.say(f"interrupted: {decide}")
    else:
        _check_some(trials)
    return _compared(searched[0], trials) if searched else None


def _check_some(trials: Sequence[Trial]) -> None:
    """Raise InputError if there are trials, and all trials have failed."""
    if trials and all(one.failure for one in trials):
        raise jpipe.InputError(*(f"--measure: {one.name}: {one.failure}" for one in trials))


def _compile(plans: Plans, trials: list[Trial], parts: Parts, most: int, reporter: Reporter) -> None:
    """Add plans to the trials, each with its pipeline and the memory of its stages, until `most` of them have not failed."""
    programs, known = dict[Any, Any](), {one.ranked.candidate: one for one in plans.compiled}
    for ranked in plans.choice.ranked:
        if sum(not one.failure for one in trials) == most:
            break
        interrupt.check()
        candidate = ranked.candidate
        trials.append(trial := Trial(table.name(candidate), candidate.batch, ranked=ranked, compiled=known.get(candidate)))
        with _failing(trial, reporter):
            trial.pipe = parts.pipeline(plans.choice.plan(ranked))
            if trial.compiled is None:
                with reporter.phase(f"compiling the stages of {trial.name}"):
                    batch, devices = parts.rows(trial.rows), jax.local_devices()
                    trial.compiled = compile_stages(plans.choice, ranked, trial.pipe, batch, devices, programs)
            trial.ranked = trial.compiled.ranked
            if not trial.compiled.fits:
                raise jpipe.InputError(table.attempt(Attempt(trial.ranked, trial.compiled, None)))


def _groups(trials: Sequence[Trial], limit: float | None) -> list[list[Run]]:
    """Return all plans as one group, which run in turn. If their states do not fit into memory together, each plan is a group."""
    team = limit is None or sum(max(trial.ranked.memory) for trial in trials) <= limit
    return [[*trials]] if team else [[one] for one in trials]


def _run(group: Sequence[Run], parts: Parts, reporter: Reporter, team: Team) -> None:
    """Run the plans of a group in turn, `ROUNDS` times."""
    batches = team.run_on_all(lambda: data.load(parts.config))
    team.agree(lambda: {"data": batches.digest()})
    batch, ready = team.run_on_all(lambda: _first_batch(batches)), list[tuple[Run, Running]]()
    processes = team.processes
    for run in group:
        with _failing(run, reporter, processes=processes), reporter.phase(f"starting {run.name}"):
            assert run.pipe is not None
            ready.append((run, Running(run.pipe, _resized(batch, run.rows), team)))
    if not ready:
        return
    with reporter.counting(f"measuring {count(len(ready), 'plan')}, {ROUNDS} rounds") as progress:
        for n, (run, running) in enumerate(itertools.chain.from_iterable(itertools.repeat(ready, ROUNDS)), start=1):
            interrupt.check()
            if not run.failure:
                with _failing(run, reporter, processes=processes):
                    run.rounds.append(running.round())
            progress(n, len(ready) * ROUNDS)
    if processes is not None:
        for _, running in ready:
            running.drain()


@contextmanager
def _failing(run: Run, reporter: Reporter, *, processes: jpipe.processes.Processes | None = None) -> Iterator[None]:
    """Record why a plan cannot run, and go on. With several processes raise the error, because the other processes wait for this plan."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, jpipe.InputError, MemoryError) as error:
        interrupt.check()  # a Ctrl-C can surface as any error
        failure = first_line(error)
        if processes is not None:
            processes.check()  # the loss of another process can surface as any error, too
            raise jpipe.InputError(f"--measure: {run.name} cannot run here: {failure}; leave --measure out, or measure fewer") from None
        run.failure = failure
        reporter.say(f"left out: {run.name} cannot run here: {failure}")


class Running:
    """A compiled plan that trains fresh weights, with a full pipeline, always on the same batch, (inputs, labels).

    All processes of the `team` make the same calls.
    """

    def __init__(self, pipe: jpipe.Pipeline, batch: Any, team: Team) -> None:
        self._pipe, self._batch, self._team = pipe, batch, team
        self._state = pipe.init(jax.random.key(0), batch)
        self._seconds(jpipe.programs.batches_until_full(pipe.plan))
        self._steps = max(LEAST, math.ceil(SECONDS / self._seconds(1)))

    def round(self) -> float:
        """Run some steps and return the seconds per step in the slowest process."""
        self._seconds(1)  # caches still have the data of another plan
        return self._seconds(self._steps)

    def drain(self) -> None:
        """Wait until no message is in flight between processes."""
        jax.block_until_ready(self._pipe.drain(self._state))

    def _seconds(self, steps: int) -> float:
        """Run steps and return the seconds per step. All processes begin together, and Python does not collect garbage meanwhile."""
        gc.collect()
        self._team.meet("the next steps to measure")
        gc.disable()
        try:
            begin = time.perf_counter()
            for _ in range(steps):
                interrupt.check()
                self._state, _ = self._pipe.step(self._state, self._batch)
            jax.block_until_ready(self._state)
            seconds = (time.perf_counter() - begin) / steps
        finally:
            gc.enable()
        return self._team.largest("the seconds of a step", seconds)


def _first_batch(batches: data.Data) -> Any:
    """Return the first batch. If batches have several shapes, return the largest of the first `_READ` batches."""
    first = (batches.train[batches.first + n] for n in range(_READ if batches.shapes else 1))
    return max(first, key=lambda batch: sum(array.size for array in jax.tree.leaves(jax.tree.map(_rows, batch))))


def _rows(array: Any) -> Any:
    """Read all rows of an array that reads rows only when they are sliced."""
    return np.asarray(array[: array.shape[0]])


def _resized(batch: Any, rows: int) -> Any:
    """Return a batch of `rows` rows, in which the rows of `batch` are repeated."""
    return jax.tree.map(lambda array: np.resize(_rows(array), (rows, *array.shape[1:])), batch)


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials by speed. Trials within `NEARLY` of the fastest remaining trial keep their order."""
    remaining, ordered = list(trials), list[Trial]()
    while remaining:
        least = (1 - NEARLY) * max(trial.samples_per_second for trial in remaining)
        ordered += [trial for trial in remaining if trial.samples_per_second >= least]
        remaining = [trial for trial in remaining if trial.samples_per_second < least]
    return ordered


def _compared(searched: Plans, trials: Sequence[Trial]) -> Measured:
    """Return the results: plans that ran come first, then plans that failed, then the others; if none ran, failed ones come last."""
    measured, failed = in_order([one for one in trials if one.rounds and not one.failure]), [one for one in trials if one.failure]
    first, last = [one.ranked for one in measured], [one.ranked for one in failed]
    tried = {ranked.candidate for ranked in (*first, *last)}
    rest = [ranked for ranked in searched.choice.ranked if ranked.candidate not in tried]
    choice = dataclasses.replace(searched.choice, ranked=(*first, *last, *rest) if first else (*rest, *last))
    known = {one.ranked.candidate: one for one in (*searched.compiled, *(one.compiled for one in trials if one.compiled is not None))}
    compiled = tuple(known[one.candidate] for one in itertools.takewhile(lambda one: one.candidate in known, choice.ranked))
    result = dataclasses.replace(searched, choice=choice, compiled=compiled)
    return Measured(result, searched, tuple(measured), tuple(failed))


def rows(measured: Measured) -> list[tuple[str, ...]]:
    """Return a row for each kind of plan that ran, with seconds per step. `HEAD` has the columns."""
    found = list[tuple[str, ...]]()
    for trial in measured.trials:
        plan = table.schedule(trial.ranked.candidate), table.shape(trial.ranked.candidate)
        times = _ms(trial.ranked.seconds), _ms(trial.seconds), f"{_ms(min(trial.rounds))} to {_ms(max(trial.rounds))}"
        found.append((*plan, *times, f"{trial.error:+.0%}"))
    return found


def why(measured: Measured, ranked: Ranked) -> str | None:
    """Return why a plan that ran was not chosen; None for the chosen plan and for plans that did not run."""
    trial = next((trial for trial in measured.trials[1:] if trial.ranked == ranked), None)
    if trial is None:
        return "failed" if any(one.ranked == ranked for one in measured.failed) else None
    return f"{trial.seconds / measured.trials[0].seconds - 1:.1%} slower as measured"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
