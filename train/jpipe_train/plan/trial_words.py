"""What `jpipe plan --measure` prints: measurements beside predictions, and the errors of the predictions."""

import itertools
from collections.abc import Sequence

from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import Ranked
from jpipe_train.console.terminal import count
from jpipe_train.plan.trial import ROUNDS, Measured, Trial, corrected_seconds

HEAD = "measured", "off by"
"""Columns of the table of plans."""
ERRORS = "schedule", "stages", "predicted", "measured", "least to most", "off by", "corrected", "off by"
"""Columns of `errors`."""


def cells(measured: Measured, ranked: Ranked) -> tuple[str, str]:
    """Return the cells of a plan, in the columns of `HEAD`."""
    if any(trial.ranked == ranked for trial in measured.failed):
        return "failed", ""
    trial = next((trial for trial in measured.trials if trial.ranked == ranked), None)
    return ("", "") if trial is None else (table.rate(trial.samples_per_second), f"{trial.error:+.0%}")


def errors(measured: Measured) -> list[tuple[str, ...]]:
    """Return a row for each kind of plan that ran, in seconds per step; see `ERRORS` for the columns."""
    return [_errors(measured, trial) for trial in measured.trials]


def _errors(measured: Measured, trial: Trial) -> tuple[str, ...]:
    candidate = trial.ranked.candidate
    seconds = corrected_seconds(measured.result.choice, measured.factor, trial)
    return (
        table.schedule(candidate),
        table.shape(candidate),
        _ms(trial.ranked.seconds),
        _ms(trial.seconds),
        f"{_ms(min(trial.rounds))} to {_ms(max(trial.rounds))}",
        f"{trial.error:+.0%}",
        _ms(seconds),
        f"{trial.seconds / seconds - 1:+.0%}",
    )


def words(measured: Measured) -> list[str]:
    """Describe the measurement, and the correction of the profile."""
    trials, factor = measured.trials, measured.factor
    lines = [
        f"measured: the median of {count(ROUNDS, 'round')} of each plan with one batch again and again; off by: how much longer a step "
        f"took than predicted{_agreement(trials)}",
    ]
    if len(trials) > 1 and (faster := sum(b < a for a, b in zip(trials[0].rounds, trials[1].rounds, strict=False))):
        second = table.name(trials[1].ranked.candidate)
        lines.append(f"in {faster} of {count(len(trials[1].rounds), 'round')} {second} was faster than the first plan")
    if factor == 1:
        lines.append("corrected: nothing; other times of computations would not predict these plans better")
    else:
        lines.append(
            f"corrected: with the times of computations multiplied by {factor:.2f}, as --profile-out writes them, which makes the median "
            "prediction right"
        )
    return lines


def why(measured: Measured, ranked: Ranked) -> str | None:
    """Return why a plan that ran was not chosen; None for the chosen plan and for plans that did not run."""
    trial = next((trial for trial in measured.trials[1:] if trial.ranked == ranked), None)
    if trial is None:
        return "failed" if any(one.ranked == ranked for one in measured.failed) else None
    return f"{trial.seconds / measured.trials[0].seconds - 1:.1%} slower as measured"


def _agreement(trials: Sequence[Trial]) -> str:
    """Describe how well predictions and measurements rank the plans alike, to end a sentence."""
    pairs = list(itertools.combinations(trials, 2))
    if len(pairs) < 3:
        return ""
    agree = sum((a.ranked.seconds - b.ranked.seconds) * (a.seconds - b.seconds) > 0 for a, b in pairs)
    return f"; of {count(len(pairs), 'pair')} of plans the prediction orders {agree} as they were measured"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
