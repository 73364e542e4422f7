"""`jpipe plan --measure`: run the best plans of a search for some steps on the devices of this run, and put the fastest first.

Several processes run each plan together. Process 0 knows the search; the other processes get the plans from it, as text.
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
from typing import Any, NamedTuple

import jax
import numpy as np

import jpipe
from jpipe_planner import Profile
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.ranking.compiled import Compiled, compile_stages
from jpipe_planner.ranking.confirm import Attempt
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, first_line
from jpipe_train.data import data
from jpipe_train.launch.together import Together
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import SearchResult

ROUNDS = 5  # their median counts; each plan runs once in each, so that a change of the machine's speed concerns all
SECONDS = 1.0  # that the measured steps of a round take
LEAST = 2  # of these steps
NEARLY = 0.01  # relative difference up to which measured plans count as equally fast
LONGEST = 6 * 3600.0  # seconds that process 0 may search and compile while the other processes wait
_READ = 16  # batches; the largest is used, where they have several shapes


@dataclass
class Outcome:
    """The outcome of running a plan.

    Attributes:
        name: of the plan, for messages.
        rounds: seconds per step in each round, in the slowest process.
        failure: why it could not run; "": it could.
    """

    name: str
    rounds: list[float] = field(default_factory=list)
    failure: str = ""


class Run(NamedTuple):
    """A plan to run.

    Attributes:
        outcome: where its rounds are recorded.
        pipe: its pipeline.
        rows: of a batch.
    """

    outcome: Outcome
    pipe: jpipe.Pipeline
    rows: int


@dataclass
class Trial:
    """A plan that ran here, or could not.

    Attributes:
        ranked: the plan with its prediction.
        compiled: the memory of its stages; None if they are not compiled.
        outcome: what running it gave.
    """

    ranked: Ranked
    compiled: Compiled | None = None
    outcome: Outcome = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = Outcome(table.name(self.ranked.candidate))

    @property
    def rounds(self) -> list[float]:
        """Seconds per step in each round."""
        return self.outcome.rounds

    @property
    def failure(self) -> str:
        """Why it could not run; "" if it could."""
        return self.outcome.failure

    @property
    def is_measured(self) -> bool:
        """Whether it has a measurement."""
        return bool(self.rounds) and not self.failure

    @property
    def seconds(self) -> float:
        """Seconds per step: the median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def samples_per_second(self) -> float:
        """Rows per second."""
        return self.ranked.candidate.batch / self.seconds

    @property
    def error(self) -> float:
        """The excess of the measured step time over the predicted one, relative to the prediction."""
        return self.seconds / self.ranked.seconds - 1


@dataclass(frozen=True)
class Measured:
    """The plans that ran.

    Attributes:
        result: the result of the search, with the fastest of these plans first.
        searched: the result before, in the order of predictions.
        trials: the plans that ran, the fastest first.
        failed: the plans that could not run.
        factor: by what the times of computations are multiplied in the corrected profile.
        chosen: the memory of the first plan of the result; None if its stages are not compiled.
    """

    result: SearchResult
    searched: SearchResult
    trials: tuple[Trial, ...]
    failed: tuple[Trial, ...]
    factor: float
    chosen: Compiled | None

    @property
    def profile(self) -> Profile:
        """The corrected profile."""
        return self.result.choice.profile.scaled(self.factor)


class _Search(NamedTuple):
    """What only process 0 knows about the plans to run.

    Attributes:
        result: the result of the search.
        known: the memory of the stages that are compiled, by candidate.
        trials: the plans to run, and those that cannot.
    """

    result: SearchResult
    known: dict[Any, Compiled]
    trials: list[Trial]


def measure(
    find: Callable[[], tuple[SearchResult, Sequence[Compiled]]], parts: Parts, most: int, reporter: Reporter, together: Together
) -> Measured | None:
    """Run the best plan of each kind until `most` have run, and rank these first, by measured speed; all processes call it.

    Each plan trains fresh weights with one batch of the config's data, so that the speed of reading data does not count. After Ctrl-C a
    single process stops measuring: the measurements so far decide, or else the predictions. Several processes end.

    Args:
        find: searches for the plans and confirms them, in process 0 alone: the result, and the memory of the stages that are compiled.
        parts: the model.
        most: the number of plans to run.
        reporter: prints what is run.
        together: the processes of the run.

    Returns:
        What was measured; None in other processes than process 0.

    Raises:
        InputError: no plan could run; or in one of several processes a plan could not.
        jpipe.PeerLost: another process died, hung or stopped.
    """
    searches, groups = list[_Search](), list[list[Run]]()

    def prepare() -> str:
        result, compiled = find()
        searches.append(search := _Search(result, {one.ranked.candidate: one for one in compiled}, []))
        pipes = _compile(search, parts, most, reporter)
        _check_some(search.trials)
        for group in _groups(pipes, result.choice.topology.device.limit):
            groups.append([Run(trial.outcome, pipe, trial.ranked.candidate.batch) for trial, pipe in group])
        return _to_text(groups)

    try:
        text = together.from_first("the plans to measure", prepare, LONGEST)
        for group in groups if together.is_first else _from_text(text, parts):
            _run(group, parts, reporter, together)
    except BaseException as error:
        if interrupt.words(error) is None or not searches or together.processes is not None:
            raise
        interrupt.forget()
        some = any(one.rounds for one in searches[0].trials)
        decide = "the plans that were measured until now are compared" if some else "predictions decide"
        reporter.say(f"interrupted: {decide}")
    else:
        _check_some(searches[0].trials if searches else ())
    return _compared(searches[0]) if searches else None


def _check_some(trials: Sequence[Trial]) -> None:
    """Raise InputError if there are trials, and all have failed."""
    if trials and all(one.failure for one in trials):
        raise jpipe.InputError(*(f"--measure: {one.outcome.name}: {one.failure}" for one in trials))


def _to_text(groups: Sequence[Sequence[Run]]) -> str:
    """Return the plans to run as text, for `_from_text` in the other processes."""
    return json.dumps([[(run.outcome.name, run.rows, run.pipe.plan.to_json()) for run in group] for group in groups])


def _from_text(text: str, parts: Parts) -> list[list[Run]]:
    return [
        [Run(Outcome(name), parts.pipeline(jpipe.Plan.from_json(plan)), rows) for name, rows, plan in group] for group in json.loads(text)
    ]


def _compile(search: _Search, parts: Parts, most: int, reporter: Reporter) -> list[tuple[Trial, jpipe.Pipeline]]:
    """Return the pipelines of `most` plans that fit; record each in the trials, with the memory of its stages."""
    pipes, programs = list[tuple[Trial, jpipe.Pipeline]](), dict[Any, Any]()
    choice, known = search.result.choice, search.known
    for ranked in choice.ranked:
        if len(pipes) == most:
            break
        interrupt.check()
        candidate = ranked.candidate
        search.trials.append(trial := Trial(ranked, known.get(candidate)))
        with _failing(trial.outcome, reporter):
            pipe = parts.pipeline(choice.plan(ranked))
            if trial.compiled is None:
                with reporter.phase(f"compiling the stages of {trial.outcome.name}"):
                    trial.compiled = compile_stages(choice, ranked, pipe, parts.rows(candidate.batch), jax.local_devices(), programs)
            trial.ranked = trial.compiled.ranked
            known[candidate] = trial.compiled
            if not trial.compiled.fits:
                raise jpipe.InputError(table.attempt(Attempt(trial.ranked, trial.compiled, None)))
            pipes.append((trial, pipe))
    return pipes


def _groups(pipes: Sequence[tuple[Trial, jpipe.Pipeline]], limit: float | None) -> list[list[tuple[Trial, jpipe.Pipeline]]]:
    """Group the plans that run in turn: all together, or each alone if their states do not fit into memory together."""
    together = limit is None or sum(max(trial.ranked.memory) for trial, _ in pipes) <= limit
    return [list(pipes)] if together else [[one] for one in pipes]


def _run(group: Sequence[Run], parts: Parts, reporter: Reporter, together: Together) -> None:
    """Run the plans of a group in turn, `ROUNDS` times."""
    batches = together.run_on_all(lambda: data.load(parts.config))
    together.agree(lambda: {"data": batches.digest()})
    batch, ready = together.run_on_all(lambda: _first_batch(batches)), list[tuple[Outcome, Running]]()
    processes = together.processes
    for outcome, pipe, rows in group:
        with _failing(outcome, reporter, processes=processes), reporter.phase(f"starting {outcome.name}"):
            ready.append((outcome, Running(pipe, _resized(batch, rows), together)))
    if not ready:
        return
    with reporter.counting(f"measuring {count(len(ready), 'plan')}, {ROUNDS} rounds") as progress:
        for n, (outcome, running) in enumerate(itertools.chain.from_iterable(itertools.repeat(ready, ROUNDS)), start=1):
            interrupt.check()
            if not outcome.failure:
                with _failing(outcome, reporter, processes=processes):
                    outcome.rounds.append(running.round())
            progress(n, len(ready) * ROUNDS)
    if processes is not None:
        for _, running in ready:
            running.drain()


@contextmanager
def _failing(outcome: Outcome, reporter: Reporter, *, processes: jpipe.processes.Processes | None = None) -> Iterator[None]:
    """Record why a plan cannot run, and continue. Several processes end instead, because the other ones wait for this plan."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, jpipe.InputError, MemoryError) as error:
        interrupt.check()  # a Ctrl-C can surface as any error
        failure = first_line(error)
        if processes is not None:
            processes.check()  # whether another process was lost, which surfaces as any error, too
            raise jpipe.InputError(f"--measure: {outcome.name} cannot run here: {failure}; leave --measure out, or measure fewer") from None
        outcome.failure = failure
        reporter.say(f"left out: {outcome.name} cannot run here: {failure}")


class Running:
    """A compiled plan that trains fresh weights, with a full pipeline.

    Args:
        pipe: the pipeline of the plan.
        batch: (inputs, labels), the same for each step.
        together: the processes of the run, which all do the same.
    """

    def __init__(self, pipe: jpipe.Pipeline, batch: Any, together: Together) -> None:
        self._pipe, self._batch, self._together = pipe, batch, together
        self._state = pipe.init(jax.random.key(0), batch)
        self._seconds(jpipe.programs.batches_until_full(pipe.plan))
        self._steps = max(LEAST, math.ceil(SECONDS / self._seconds(1)))

    def round(self) -> float:
        """Run some steps and return the seconds per step in the slowest process."""
        self._seconds(1)  # caches have what another plan needs
        return self._seconds(self._steps)

    def drain(self) -> None:
        """Wait until no message is in flight between processes."""
        jax.block_until_ready(self._pipe.drain(self._state))

    def _seconds(self, steps: int) -> float:
        """Run steps and return the seconds per step. All processes begin together; garbage is not collected."""
        gc.collect()
        self._together.meet("the next steps to measure")
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
        return self._together.largest("the seconds of a step", seconds)


def _first_batch(batches: data.Data) -> Any:
    """Return the first batch; if batches have several shapes, the largest of the first ones."""
    first = (batches.train[batches.first + n] for n in range(_READ if batches.shapes else 1))
    return max(first, key=lambda batch: sum(array.size for array in jax.tree.leaves(jax.tree.map(_rows, batch))))


def _rows(array: Any) -> Any:
    """Read all rows of an array that reads only sliced rows."""
    return np.asarray(array[: array.shape[0]])


def _resized(batch: Any, rows: int) -> Any:
    """Return a batch of some rows, by repeating the rows of `batch`."""
    return jax.tree.map(lambda array: np.resize(_rows(array), (rows, *array.shape[1:])), batch)


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials by speed. At each place, the trials within `NEARLY` of the fastest remaining one keep their order."""
    remaining, ordered = list(trials), list[Trial]()
    while remaining:
        least = (1 - NEARLY) * max(trial.samples_per_second for trial in remaining)
        ordered += [trial for trial in remaining if trial.samples_per_second >= least]
        remaining = [trial for trial in remaining if trial.samples_per_second < least]
    return ordered


def _compared(search: _Search) -> Measured:
    """Rank the plans that ran first, then those that failed; if none ran, the failed ones come last of all."""
    searched, known = search.result, search.known
    trials, failed = in_order([one for one in search.trials if one.is_measured]), [one for one in search.trials if one.failure]
    first, last = [one.ranked for one in trials], [one.ranked for one in failed]
    tried = {ranked.candidate for ranked in (*first, *last)}
    rest = [ranked for ranked in searched.choice.ranked if ranked.candidate not in tried]
    choice = dataclasses.replace(searched.choice, ranked=(*first, *last, *rest) if first else (*rest, *last))
    compiled = sum(1 for _ in itertools.takewhile(lambda ranked: ranked.candidate in known, choice.ranked))
    result = dataclasses.replace(searched, plans=dataclasses.replace(searched.plans, choice=choice), compiled=compiled)
    return Measured(result, searched, tuple(trials), tuple(failed), correction(choice, trials), known.get(choice.ranked[0].candidate))


def correction(choice: Choice, trials: Sequence[Trial]) -> float:
    """Return the factor for the times of a profile's computations with which the median step takes as long as measured.

    It is 1 if a factor does not improve the predictions, for example because transfers, not computations, took longer.
    """
    if not trials:
        return 1.0
    factor = statistics.median(trial.seconds / trial.ranked.seconds for trial in trials)
    before, after = (
        statistics.median(abs(math.log(trial.seconds / seconds)) for trial, seconds in zip(trials, times, strict=True))
        for times in ([trial.ranked.seconds for trial in trials], [corrected_seconds(choice, factor, trial) for trial in trials])
    )
    return factor if after < before else 1.0


def corrected_seconds(choice: Choice, factor: float, trial: Trial) -> float:
    """Return the predicted seconds of a step if computations take `factor` times as long as in the profile."""
    simulated = dataclasses.replace(choice, profile=choice.profile.scaled(factor)).simulate(trial.ranked.candidate)
    return factor * trial.ranked.seconds if simulated.simulated is None else simulated.seconds
