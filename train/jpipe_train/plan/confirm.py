"""Compile the best plans of a search until one fits."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jpipe import InputError
from jpipe_planner.machine.compiling import Compiling
from jpipe_planner.ranking import confirm as confirmation
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.ranking.compiled import Compiled, compile_stages
from jpipe_planner.ranking.confirm import Attempt
from jpipe_train.console.terminal import count
from jpipe_train.plan.compiling import compiled_words
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import SearchResult


def nothing_fits(choice: Choice) -> InputError:
    """Return the error if no plan fits."""
    return InputError(*(f"plan: {line}" for line in table.what_would_fit(choice)))


def confirm(
    searched: SearchResult, parts: Parts, compiling: Compiling, report: Callable[[Attempt], None]
) -> tuple[SearchResult, list[Compiled]]:
    """Compile the fastest plans until one fits, and also those that may be as fast; put the best first.

    Args:
        searched: the result of the search, by estimates.
        parts: the model.
        compiling: the devices to compile for.
        report: called with each plan that does not fit.

    Returns:
        The result with compiled plans first, and the compiled stages of these, in the same order.

    Raises:
        InputError: no plan fits; the message lists what was tried.
    """
    programs = dict[Any, Any]()

    def compile(choice: Choice, ranked: Ranked) -> Compiled:
        pipe = parts.pipeline(choice.plan(ranked))
        return compile_stages(choice, ranked, pipe, parts.rows(ranked.candidate.batch), compiling.devices, programs)

    result = confirmation.confirm(searched.plans, compile, report)
    if not result.attempts and not result.fitting:
        raise nothing_fits(searched.choice)
    if not result.fitting:
        raise _nothing_fitted(result.attempts, compiled_words(parts.config, compiling))
    ranked = (*(compiled.ranked for compiled in result.fitting), *result.uncompiled)
    kinds = {plan.candidate.kind for plan in ranked}
    rejected = tuple(candidate for candidate in searched.choice.rejected if candidate.kind not in kinds)
    choice = dataclasses.replace(searched.choice, ranked=ranked, rejected=rejected)
    plans = dataclasses.replace(searched.plans, choice=choice, tried=result.tried)
    return dataclasses.replace(searched, plans=plans, compiled=len(result.fitting), attempts=tuple(result.attempts)), result.fitting


def _nothing_fitted(attempts: Sequence[Attempt], scratch: str) -> InputError:
    """Return the error if the compiled stages of no plan fit: what was tried, and what to change."""
    tried = [f"plan: {table.attempt(one)}" for one in attempts]
    change = "use more devices, a smaller batch or devices with more memory"
    return InputError(
        f"plan: no plan fits: the compiled stages of {count(len(attempts), 'plan')} need too much memory; {change}",
        *tried,
        f"plan: stages are {scratch}",
    )
