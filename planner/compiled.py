"""The memory of a plan from its own compiled stages, in place of the sum over layers."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax

import jpipe
from planner.choose import Choice, Ranked
from planner.simulated import simulated


@dataclass(frozen=True)
class Compiled:
    """What XLA says of a plan's stages.

    Attributes:
        ranked: the plan, simulated with the exact bytes of its stages and the scratch memory that XLA gives its programs.
        errors: for each stage, by what share the estimate from the profile was too high (above 0) or too low.
        lacking: bytes that the worst stage lacks, at most 0 where the plan fits; None where memory is not limited.
    """

    ranked: Ranked
    errors: tuple[float, ...]
    lacking: float | None

    @property
    def fits(self) -> bool:
        """Whether all stages fit."""
        return self.lacking is None or self.lacking <= 0


def compiled(choice: Choice, ranked: Ranked, pipe: jpipe.Pipeline, batch: Any, device: jax.Device) -> Compiled:
    """Compile the stages of a plan for a device at hand, run nothing, and simulate it again with what is known then.

    Args:
        choice: where the plan comes from.
        ranked: the plan.
        pipe: of that plan.
        batch: specs of a whole batch, (inputs, labels).
        device: to compile for; on another kind of device than that of the topology the scratch memory is that of this kind.
    """
    plan, limit = choice.plan(ranked), choice.topology.device.memory
    times = choice.profile.stage_costs(plan, ranked.candidate.rows)
    costs = [
        dataclasses.replace(size, forward=time.forward, backward=time.backward, update=time.update)
        for size, time in zip(pipe.costs(batch, compiled_for=device), times, strict=True)
    ]
    exact = dataclasses.replace(ranked, simulated=simulated(plan, costs, choice.topology))
    errors = [estimate / true - 1 for estimate, true in zip(ranked.candidate.memory, exact.memory, strict=True)]
    return Compiled(exact, tuple(errors), None if limit is None else max(exact.memory) - limit)
