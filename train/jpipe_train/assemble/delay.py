"""Describe the delay of a plan: how many updates old the weights are with which it computes gradients."""

from collections.abc import Sequence
from itertools import groupby

import jpipe
from jpipe_train.console.terminal import count

_MOST_LISTED = 6  # at most this many groups of stages with equal values are listed


def delay_words(plan: jpipe.Plan, batches_per_update: int = 1) -> str:
    """Return a sentence about the mean delay of each stage, or "" if no gradient is computed with older weights than it changes.

    `batches_per_update` is `optimizer.accumulate_batches`.
    """
    if not any(plan.delays):
        return ""
    start = f"{plan.schedule}: "
    if plan.flush_first:
        start += f"after {count(plan.flush_first, 'batch', 'es')} that flush, "
    start += f"gradients are computed with weights that are {_updates(plan.mean_delay / batches_per_update)} old"
    delays = [f"{delay / batches_per_update:.3g}" for delay in plan.delays]
    if len(set(delays)) == 1:
        return f"{start}, at every stage"
    return f"{start} on average: {words_by_stage(delays)}"


def words_by_stage(words: Sequence[str]) -> str:
    """Return a list of the values of all stages, such as `1 at stages 0 to 2, 0 at stage 3`; stages with "" are left out."""
    groups = [(list(group), word) for word, group in groupby(range(len(words)), words.__getitem__)]
    listed = [f"{word} at {_stages(stages[0], stages[-1])}" for stages, word in groups if word]
    if len(listed) > _MOST_LISTED:
        listed[_MOST_LISTED - 1 : -1] = ["…"]
    return ", ".join(listed)


def correction_words(factor: float | None) -> str:
    """Describe the delay correction with the factor `factor`; None means no correction."""
    if factor is None:
        return "none; see optimizer.delay_correction"
    return "predict" if factor == 1 else f"predict with a factor of {factor:g}"


def _updates(delay: float) -> str:
    return f"{delay:.3g} {'update' if f'{delay:.3g}' == '1' else 'updates'}"


def _stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first} to {last}"
