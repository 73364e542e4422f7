"""`jpipe plan --measure`: run the best plans of a search for some steps on this machine, and put the fastest first."""

import dataclasses
import gc
import itertools
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
from jpipe_planner import Attempt, Choice, Compiled, Profile, Ranked, compile_stages, simulate_plan
from jpipe_planner.ranking import table
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, first_line
from jpipe_train.data import data
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import SearchResult

ROUNDS = 5  # of which the median counts; each plan runs once in each, so that a change of the machine's speed concerns all
SECONDS = 1.0  # that the measured steps of a round take
LEAST = 2  # of these steps
NEARLY = 0.01  # relative difference up to which measured plans count as equally fast
_READ = 16  # batches of which the largest is used, where they have several shapes

Round = Callable[[], float]
"""Runs some steps of a plan whose pipeline is full, and returns the seconds of one."""


@dataclass
class Trial:
    """A plan that ran here, or could not.

    Attributes:
        ranked: the plan with its prediction.
        compiled: the memory of its stages; None if they are not compiled.
        rounds: seconds per step in each round.
        failure: why it could not run; "": it could.
    """

    ranked: Ranked
    compiled: Compiled | None = None
    rounds: list[float] = field(default_factory=list)
    failure: str = ""

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
        """How much longer a step took than predicted, relative to the prediction."""
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


def measure(searched: SearchResult, compiled: Sequence[Compiled], parts: Parts, most: int, reporter: Reporter) -> Measured:
    """Run the best plan of each kind until `most` have run, and put these first, by their measured speed.

    Each plan trains fresh weights with one batch of the config's data, so that the speed of reading data does not count. Ctrl-C ends the
    measuring: what was measured until then decides, or else the predictions.

    Args:
        searched: the result of the search, confirmed.
        compiled: the memory of the stages that are compiled.
        parts: the model.
        most: the number of plans to run.
        reporter: prints what is run.

    Raises:
        InputError: no plan could run.
    """
    known, trials = {one.ranked.candidate: one for one in compiled}, list[Trial]()
    try:
        pipes = _compile(searched.choice, known, parts, most, reporter, trials)
        for group in _groups(pipes, searched.choice.topology.device.limit):
            _run(group, parts, reporter)
    except BaseException as error:
        if interrupt.words(error) is None:
            raise
        interrupt.forget()
        decide = "the plans that were measured until now are compared" if any(one.rounds for one in trials) else "predictions decide"
        reporter.say(f"interrupted: {decide}")
    else:
        if all(one.failure for one in trials):
            raise jpipe.InputError(*(f"--measure: {table.name(one.ranked.candidate)}: {one.failure}" for one in trials))
    failed = [one for one in trials if one.failure]
    return _compared(searched, in_order([one for one in trials if one.is_measured]), failed, known)


def _compile(
    choice: Choice, known: dict[Any, Compiled], parts: Parts, most: int, reporter: Reporter, trials: list[Trial]
) -> list[tuple[Trial, jpipe.Pipeline]]:
    """Return the pipelines of `most` plans that fit; add each to `trials`, and the memory of its stages to `known`."""
    pipes, programs = list[tuple[Trial, jpipe.Pipeline]](), dict[Any, Any]()
    for ranked in choice.ranked:
        if len(pipes) == most:
            break
        interrupt.check()
        candidate = ranked.candidate
        trials.append(trial := Trial(ranked, known.get(candidate)))
        with _failing(trial, reporter):
            pipe = parts.pipeline(choice.plan(ranked))
            if trial.compiled is None:
                with reporter.phase(f"compiling the stages of {table.name(candidate)}"):
                    trial.compiled = compile_stages(choice, ranked, pipe, parts.rows(candidate.batch), jax.local_devices(), programs)
            trial.ranked = trial.compiled.ranked
            known[candidate] = trial.compiled
            if not trial.compiled.fits:
                raise jpipe.InputError(table.attempt(Attempt(trial.ranked, trial.compiled, None)))
            pipes.append((trial, pipe))
    return pipes


def _groups(pipes: Sequence[tuple[Trial, jpipe.Pipeline]], limit: float | None) -> list[list[tuple[Trial, jpipe.Pipeline]]]:
    """Return all plans as one group, which runs in turn, or each alone where their states do not fit into memory together."""
    together = limit is None or sum(max(trial.ranked.memory) for trial, _ in pipes) <= limit
    return [list(pipes)] if together else [[one] for one in pipes]


def _run(group: Sequence[tuple[Trial, jpipe.Pipeline]], parts: Parts, reporter: Reporter) -> None:
    """Run the plans of a group in turn, `ROUNDS` times."""
    batch, ready = _first_batch(data.load(parts.config)), list[tuple[Trial, Round]]()
    for trial, pipe in group:
        candidate = trial.ranked.candidate
        with _failing(trial, reporter), reporter.phase(f"starting {table.name(candidate)}"):
            ready.append((trial, start(pipe, _resized(batch, candidate.batch))))
    if not ready:
        return
    with reporter.counting(f"measuring {count(len(ready), 'plan')}, {ROUNDS} rounds") as progress:
        for n, (trial, run) in enumerate(itertools.chain.from_iterable(itertools.repeat(ready, ROUNDS)), start=1):
            interrupt.check()
            if not trial.failure:
                with _failing(trial, reporter):
                    trial.rounds.append(run())
            progress(n, len(ready) * ROUNDS)


@contextmanager
def _failing(trial: Trial, reporter: Reporter) -> Iterator[None]:
    """Record why a plan cannot run, and go on."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, jpipe.InputError, MemoryError) as error:
        interrupt.check()  # a Ctrl-C can surface as any error
        trial.failure = first_line(error)
        reporter.say(f"left out: {table.name(trial.ranked.candidate)} cannot run here: {trial.failure}")


def start(pipe: jpipe.Pipeline, batch: Any) -> Round:
    """Compile a plan, and train fresh weights until its pipeline is full.

    Args:
        pipe: the pipeline of the plan.
        batch: (inputs, labels), the same for each step.
    """
    state, _ = _steps(pipe, pipe.init(jax.random.key(0), batch), batch, jpipe.programs.batches_until_full(pipe.plan))
    state, seconds = _steps(pipe, state, batch, 1)
    steps = max(LEAST, math.ceil(SECONDS / seconds))

    def run() -> float:
        nonlocal state
        state, _ = _steps(pipe, state, batch, 1)  # caches have what another plan needs
        state, seconds = _steps(pipe, state, batch, steps)
        return seconds

    return run


def _steps(pipe: jpipe.Pipeline, state: jpipe.State, batch: Any, steps: int) -> tuple[jpipe.State, float]:
    """Run steps without collecting garbage, and return the state and the seconds of one."""
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        for _ in range(steps):
            interrupt.check()
            state, _ = pipe.step(state, batch)
        jax.block_until_ready(state)
        return state, (time.perf_counter() - begin) / steps
    finally:
        gc.enable()


def _first_batch(batches: data.Data) -> Any:
    """Return the first batch, or the largest of the first ones where they have several shapes."""
    first = (batches.train[batches.first + n] for n in range(_READ if batches.shapes else 1))
    return max(first, key=lambda batch: sum(array.size for array in jax.tree.leaves(jax.tree.map(_rows, batch))))


def _rows(array: Any) -> Any:
    """Return all rows of an array of which only the rows that are sliced are read."""
    return np.asarray(array[: array.shape[0]])


def _resized(batch: Any, rows: int) -> Any:
    """Return a batch of some rows: those of `batch`, again and again."""
    return jax.tree.map(lambda array: np.resize(_rows(array), (rows, *array.shape[1:])), batch)


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials, the fastest first; those within `NEARLY` of the fastest one that remains keep their order."""
    remaining, ordered = list(trials), list[Trial]()
    while remaining:
        least = (1 - NEARLY) * max(trial.samples_per_second for trial in remaining)
        ordered += [trial for trial in remaining if trial.samples_per_second >= least]
        remaining = [trial for trial in remaining if trial.samples_per_second < least]
    return ordered


def _compared(searched: SearchResult, trials: Sequence[Trial], failed: Sequence[Trial], known: dict[Any, Compiled]) -> Measured:
    """Put the plans that ran first, and those that failed after them; after all, if none ran."""
    first, last = [one.ranked for one in trials], [one.ranked for one in failed]
    tried = {ranked.candidate for ranked in (*first, *last)}
    rest = [ranked for ranked in searched.choice.ranked if ranked.candidate not in tried]
    choice = dataclasses.replace(searched.choice, ranked=(*first, *last, *rest) if first else (*rest, *last))
    compiled = sum(1 for _ in itertools.takewhile(lambda ranked: ranked.candidate in known, choice.ranked))
    result = dataclasses.replace(searched, choice=choice, compiled=compiled)
    return Measured(result, searched, tuple(trials), tuple(failed), correction(choice, trials), known.get(choice.ranked[0].candidate))


def correction(choice: Choice, trials: Sequence[Trial]) -> float:
    """Return by what to multiply the times of a profile's computations so that the median step takes as long as measured.

    It is 1 where that makes the predictions no better, for example because transfers and not computations took longer.
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
    candidate, corrected = trial.ranked.candidate, dataclasses.replace(choice, profile=choice.profile.scaled(factor))
    shares, topology = corrected.meshes.of(candidate.degrees)
    plan = candidate.plan(choice.profile.ids)
    simulated = simulate_plan(plan, shares.stage_costs(plan, candidate.rows), topology, choice.global_norm)
    return factor * trial.ranked.seconds if simulated is None else simulated.batch_seconds
