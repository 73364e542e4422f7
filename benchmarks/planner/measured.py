"""Run plans of different kinds of a small GPT on the devices of this process, as `jpipe plan --measure` does: predicted, measured, off by.

The plans are spread over the predicted speeds of all candidates, because those of the best ones hardly differ where devices share cores.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.planner.markdown import print_table
from jpipe_planner import Choice, Ranked, local_topology
from jpipe_planner.ranking import table
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.together import Together
from jpipe_train.plan import trial, trial_words
from jpipe_train.plan.inputs import Request, prepare_devices
from jpipe_train.plan.profiling import Parts, profile_of
from jpipe_train.plan.search import search

CONFIG, SMALLER = "configs/gpt-bytes.yaml", ("model.depth=2", "plan.file=auto")
PLANS = 10


def main() -> dict[str, Any]:
    """Measure, print and return the figures."""
    request = Request(schedules=("all",))
    devices = prepare_devices(request) or 1
    config = config_file.load(CONFIG, SMALLER)
    batch, reporter = config.train.batch_size, Reporter(1, 1, "samples")
    parts = Parts.of(config, reporter)
    profile = profile_of(parts, None, batch, devices, reporter)
    topology = local_topology(devices, dispatch=profile.dispatch)
    reporter.say(table.links(topology))
    result = search(profile, topology, batch, request, parts.config.uses_global_norm, reporter)
    plans = spread([Ranked(one) if one not in result.known else result.known[one] for one in result.candidates], PLANS)
    result = dataclasses.replace(result, choice=dataclasses.replace(result.choice, ranked=tuple(plans)))
    load = os.getloadavg()[0]
    measured = trial.measure(lambda: (result, []), parts, PLANS, reporter, Together(None))
    assert measured is not None
    rows = [(*row, one.ranked.candidate.rows) for row, one in zip(trial_words.errors(measured), measured.trials, strict=True)]
    print_table((*trial_words.ERRORS, "rows"), rows)
    figures = summary(measured.result.choice, measured) | {"candidates": len(result.candidates), "load before": load}
    figures["load after"] = os.getloadavg()[0]
    for name, figure in figures.items():
        print(f"  {name}: {figure}")
    return figures | {"plans": [_figures(one) for one in measured.trials]}


def spread(plans: Sequence[Ranked], most: int) -> list[Ranked]:
    """Return plans of different kinds that fit, at about equal distances in the order of their predicted speeds, fastest first."""
    fitting = sorted((one for one in plans if one.candidate.over is None), key=lambda one: one.seconds)
    kinds, chosen = set[Any](), list[Ranked]()
    for place in np.linspace(0, len(fitting) - 1, most).round().astype(int).tolist():
        near = sorted(range(len(fitting)), key=lambda n: abs(n - place))
        if (one := next((fitting[n] for n in near if fitting[n].candidate.kind not in kinds), None)) is not None:
            kinds.add(one.candidate.kind)
            chosen.append(one)
    return sorted(chosen, key=lambda one: one.seconds)


def summary(choice: Choice, measured: trial.Measured) -> dict[str, Any]:
    """Return the rank correlation, and the median and worst ratio of measured to predicted time, before and after the correction."""
    predicted = [one.ranked.seconds for one in measured.trials]
    corrected = [trial.corrected_seconds(choice, measured.factor, one) for one in measured.trials]
    seconds = [one.seconds for one in measured.trials]
    return {
        "plans that ran": len(seconds),
        "rank correlation": rank_correlation(predicted, seconds),
        "factor": measured.factor,
        **{f"{which} ratio": figure(seconds, predicted) for which, figure in _RATIOS.items()},
        **{f"{which} ratio, corrected": figure(seconds, corrected) for which, figure in _RATIOS.items()},
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share the mean of their ranks."""
    ranks = [[np.mean(np.flatnonzero(np.sort(values) == value)) for value in values] for values in (np.array(first), np.array(second))]
    return float(np.corrcoef(*ranks)[0, 1])


def _worst(seconds: Sequence[float], predicted: Sequence[float]) -> float:
    return max((a / b for a, b in zip(seconds, predicted, strict=True)), key=lambda ratio: abs(np.log(ratio)))


_RATIOS = {
    "median": lambda seconds, predicted: float(np.median(np.array(seconds) / np.array(predicted))),
    "worst": _worst,
}


def _figures(one: trial.Trial) -> dict[str, Any]:
    candidate = one.ranked.candidate
    name = f"{table.name(candidate)}, {candidate.microbatches} × {table.rows_of(candidate.rows)}"
    return {"plan": name, "predicted": one.ranked.seconds, "rounds": one.rounds}
