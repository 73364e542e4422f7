"""`jpipe plan --measure`: run the best plans of a search for some steps on this machine, and put the fastest first."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jpipe
from jpipe_planner import Choice, Compiled, Profile, Ranked, Simulated, compile_stages, simulate_plan
from jpipe_planner.ranking import table
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, first_line
from jpipe_train.data import data
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import SearchResult

SECONDS = 2.0  # that each part of a measurement takes
PARTS = 3  # of which the median counts
TRACED = 2  # batches of which the computations are timed
NEARLY = 0.01  # relative difference up to which measured plans count as equally fast
HEAD = "measured", "off by"  # columns of the table of plans


@dataclass(frozen=True)
class Trial:
    """What a step of a plan took.

    Attributes:
        ranked: the plan, with its prediction.
        compiled: the memory of its stages.
        seconds: seconds per step.
        computing: seconds per step that all ranks together compute.
    """

    ranked: Ranked
    compiled: Compiled
    seconds: float
    computing: float

    @property
    def samples_per_second(self) -> float:
        """Rows per second."""
        return self.ranked.candidate.batch / self.seconds

    @property
    def error(self) -> float:
        """The relative error of the predicted speed; above 0 if it was too high."""
        return self.seconds / self.ranked.seconds - 1

    @property
    def slower(self) -> float:
        """How many times as long as predicted its computations took, in the mean."""
        bubble = self.ranked.candidate.bubble if self.ranked.simulated is None else self.ranked.simulated.bubble
        return self.computing / ((1 - bubble) * self.ranked.candidate.num_ranks * self.ranked.seconds)


@dataclass(frozen=True)
class Measured:
    """The plans that ran.

    Attributes:
        result: the result of the search, with these plans first.
        trials: what they took, the fastest first.
        profile: the profile, with computations as long as they were in these plans.
    """

    result: SearchResult
    trials: tuple[Trial, ...]
    profile: Profile


def measure(searched: SearchResult, compiled: Sequence[Compiled], parts: Parts, most: int, reporter: Reporter) -> Measured:
    """Run the best plan of each of the first `most` kinds, and put those that ran first, by their measured speed.

    Each plan trains random weights with the first batch of the config's data, so that the speed of reading data does not count. Plans
    whose compiled stages do not fit are left out. Plans that are within `NEARLY` of the fastest one keep the order of their predictions.

    Args:
        searched: the result of the search, confirmed.
        compiled: the memory of the stages that are compiled.
        parts: the model.
        most: the number of plans to run.
        reporter: prints what is run.

    Raises:
        InputError: no plan could run.
    """
    choice, batches = searched.choice, data.load(parts.config)
    known, programs = {one.ranked.candidate: one for one in compiled}, dict[Any, Any]()
    trials, left_out = list[Trial](), list[Ranked]()
    for ranked in choice.ranked:
        if len(trials) == most:
            break
        interrupt.check()
        candidate = ranked.candidate
        pipe = parts.pipeline(choice.plan(ranked))
        if candidate not in known:
            known[candidate] = compile_stages(choice, ranked, pipe, parts.rows(candidate.batch), jax.local_devices(), programs)
        if not known[candidate].fits:
            left_out.append(ranked)
            reporter.say(f"not measured, because its compiled stages do not fit: {table.name(candidate)}")
            continue
        with reporter.phase(f"measuring {table.name(candidate)}"):
            trials.append(_try(known[candidate], ranked, pipe, _rows(batches, candidate.batch)))
    if not trials:
        raise jpipe.InputError("--measure: the compiled stages of no plan fit; use a smaller batch, or more devices")
    ordered = in_order(trials)
    first = [trial.ranked for trial in ordered]
    plans = (*first, *(ranked for ranked in choice.ranked if ranked not in (*first, *left_out)))
    result = dataclasses.replace(searched, choice=dataclasses.replace(choice, ranked=plans), compiled=max(searched.compiled, len(ordered)))
    return Measured(result, tuple(ordered), choice.profile.scaled(_slower(choice, ordered)))


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials, the fastest first; those within `NEARLY` of the fastest one that remains keep their order."""
    remaining, ordered = list(trials), list[Trial]()
    while remaining:
        least = (1 - NEARLY) * max(trial.samples_per_second for trial in remaining)
        ordered += [trial for trial in remaining if trial.samples_per_second >= least]
        remaining = [trial for trial in remaining if trial.samples_per_second < least]
    return ordered


def cells(trials: Sequence[Trial], ranked: Ranked) -> tuple[str, str]:
    """Return the cells of a plan below `HEAD`."""
    trial = next((trial for trial in trials if trial.ranked == ranked), None)
    return ("", "") if trial is None else (table.rate(trial.samples_per_second), f"{trial.error:+.0%}")


def words(measured: Measured) -> list[str]:
    """Describe how far off the predictions were, before and after the profile was corrected."""
    trials, choice = measured.trials, measured.result.choice
    order = _correlation([trial.ranked.seconds for trial in trials], [trial.seconds for trial in trials])
    lines = [
        f"measured: samples/s of {count(len(trials), 'plan')} that ran here, each with one batch again and again; off by: the relative "
        f"error of the prediction, above 0 if it was too fast{order}"
    ]
    corrected = [simulated.batch_seconds for trial in trials if (simulated := _simulate(choice, measured.profile, trial)) is not None]
    if len(corrected) == len(trials):
        errors = [trial.seconds / seconds - 1 for trial, seconds in zip(trials, corrected, strict=True)]
        lines.append(
            f"computations took {_slower(choice, trials):.2f} times as long as in the profile; with the profile corrected by that, as "
            f"--profile-out writes it, predictions are off by {min(errors):+.0%} to {max(errors):+.0%}"
        )
    return lines


def _slower(choice: Choice, trials: Sequence[Trial]) -> float:
    """Return how many times as long as in the profile computations took; 1 where no plan says it, because ranks share cores."""
    cores = choice.topology.cores
    alone = [trial.slower for trial in trials if cores is None or trial.ranked.candidate.num_ranks <= cores]
    return statistics.median(alone) if alone else 1.0


def _simulate(choice: Choice, profile: Profile, trial: Trial) -> Simulated | None:
    """Simulate a plan with a corrected profile; None if that takes too long."""
    candidate, corrected = trial.ranked.candidate, dataclasses.replace(choice, profile=profile)
    shares, topology = corrected.meshes.of(candidate.degrees)
    plan = candidate.plan(profile.ids)
    return simulate_plan(plan, shares.stage_costs(plan, candidate.rows), topology, choice.global_norm)


def _correlation(predicted: Sequence[float], measured: Sequence[float]) -> str:
    """Describe how well the order of the predictions agrees with that of the measurements, as the end of a sentence."""
    pairs = list(itertools.combinations(zip(predicted, measured, strict=True), 2))
    if len(pairs) < 3:
        return ""
    agree = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    return f"; of {count(len(pairs), 'pair')} of plans the prediction orders {agree} as they were measured"


def _rows(batches: data.Data, rows: int) -> Any:
    """Return a batch of some rows: those of the first batch of the data, again and again."""
    return jax.tree.map(lambda array: np.resize(array[: len(array)], (rows, *array.shape[1:])), batches.train[batches.first])


def _try(compiled: Compiled, ranked: Ranked, pipe: jpipe.Pipeline, batch: Any) -> Trial:
    """Run some steps of a plan in steady state.

    Raises:
        InputError: a computation failed.
    """
    full = jpipe.programs.batches_until_full(pipe.plan)
    try:
        state, seconds = _run(pipe, pipe.init(jax.random.key(0), batch), batch, full + 1)
        times = []
        for _ in range(PARTS):
            state, seconds = _run(pipe, state, batch, max(1, round(SECONDS / seconds)))
            times.append(seconds)
        return Trial(ranked, compiled, statistics.median(times), _computing_seconds(pipe, state, batch))
    except jax.errors.JaxRuntimeError as error:
        raise jpipe.InputError(f"--measure: {table.name(ranked.candidate)} failed: {first_line(error)}; use a smaller batch") from None


def _run(pipe: jpipe.Pipeline, state: jpipe.State, batch: Any, steps: int) -> tuple[jpipe.State, float]:
    """Run steps, and return the state and the seconds of one."""
    begin = time.perf_counter()
    for _ in range(steps):
        state, _ = pipe.step(state, batch)
    jax.block_until_ready(state)
    interrupt.check()
    return state, (time.perf_counter() - begin) / steps


def _computing_seconds(pipe: jpipe.Pipeline, state: jpipe.State, batch: Any) -> float:
    """Return the seconds per batch that all ranks together compute."""
    first = state.batch + 1
    with jpipe.Tracer(pipe.plan) as tracer:
        for _ in range(TRACED + 2):
            state, _ = pipe.step(state, batch, observe=tracer)
        trace = tracer.finish()
    window = jpipe.programs.extract_window(trace.timeline, trace.memory, pipe.plan.microbatches, first, TRACED)
    return (1 - window.bubble) * len(window.timeline) * window.step_seconds
