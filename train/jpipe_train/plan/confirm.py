"""Compile the best plans of a search until one fits."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jpipe_planner
from jpipe_planner import Attempt, Choice, Compiled, Ranked, Topology, compile_stages
from jpipe_planner.ranking import table

from jpipe import InputError
from jpipe_train.console.terminal import count
from jpipe_train.plan.profiling import Parts
from jpipe_train.plan.search import SearchResult


def nothing_fits(choice: Choice) -> InputError:
    """What is said where no plan fits."""
    return InputError(*(f"plan: {line}" for line in table.what_would_fit(choice)))


def confirm(found: SearchResult, parts: Parts, report: Callable[[Attempt], None]) -> tuple[SearchResult, Compiled]:
    """Compile the fastest plans until one fits, and those that may be as fast; put the best first, with what XLA says of it.

    Args:
        found: what was found by estimates.
        parts: the model.
        report: gets each plan that does not fit.

    Raises:
        InputError: there is none; says what was tried.
    """
    device, programs = jax.devices()[0], dict[Any, Any]()

    def compile(choice: Choice, ranked: Ranked) -> Compiled:
        pipe = parts.pipeline(choice.plan(ranked))
        return compile_stages(choice, ranked, pipe, parts.rows(ranked.candidate.batch), device, programs)

    result = jpipe_planner.confirm(found.choice, found.candidates, found.known, compile, report)
    if not result.attempts and not result.fitting:
        raise nothing_fits(found.choice)
    if not result.fitting:
        raise _nothing_fitted(result.attempts, scratch_words(parts, found.choice.topology))
    ranked = (*(one.ranked for one in result.fitting), *result.others)
    kinds = {one.candidate.kind for one in ranked}
    rejected = tuple(candidate for candidate in found.choice.rejected if candidate.kind not in kinds)
    considered = found.choice.considered + len(result.added)
    choice = dataclasses.replace(found.choice, ranked=ranked, rejected=rejected, considered=considered)
    after = dataclasses.replace(
        found,
        choice=choice,
        candidates=(*found.candidates, *result.added),
        known=result.known,
        compiled=len(result.fitting),
        attempts=tuple(result.attempts),
    )
    return after, result.fitting[0]


def _nothing_fitted(attempts: Sequence[Attempt], scratch: str) -> InputError:
    """What is said where the compiled stages of no plan fit: what was tried, and what to change."""
    tried = [f"plan: {table.attempt(one)}" for one in attempts]
    change = "use more devices, a smaller batch or devices with more memory"
    return InputError(
        f"plan: no plan fits: the compiled stages of {count(len(attempts), 'plan')} need too much memory; {change}",
        *tried,
        *([f"plan: {scratch}"] if scratch else []),
    )


def scratch_words(parts: Parts, topology: Topology) -> str:
    """What the scratch memory of stages compiled for this machine says about other machines; "" if that is the same."""
    config = parts.config
    computes = config.precision.computes or config.model.compute_dtype
    if "16" not in computes or not topology.device.flops or jax.devices()[0].platform != "cpu":
        return ""
    return (
        f"temporaries are those of a CPU, whose compiler asks in {computes} for two to four times the scratch memory of a GPU's: "
        "on GPUs a plan that lacks less than its temporaries may fit, or need less recomputation"
    )
