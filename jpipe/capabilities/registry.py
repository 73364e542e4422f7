"""The list of all capabilities, and their fields of plans. To remove a capability, remove its lines here and its folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pydantic

from jpipe._frozen import NOTHING, FrozenMapping
from jpipe.capabilities.agreement.option import OPTION as AGREEMENT
from jpipe.capabilities.agreement.option import Agreement, OuterOptimizer
from jpipe.capabilities.compressed_messages.option import BLOCK, Bottleneck, Kind, Links, Message
from jpipe.capabilities.compressed_messages.option import OPTION as COMPRESSED_MESSAGES
from jpipe.capabilities.global_norm.option import OPTION as GLOBAL_NORM
from jpipe.capabilities.global_norm.option import NormCosts
from jpipe.capabilities.host_memory.option import OPTION as HOST_MEMORY
from jpipe.capabilities.host_memory.option import HostMemory, Kept
from jpipe.capabilities.protocol import Exchange, Option, ProgramHooks, RuntimeHooks, UpdateHooks
from jpipe.capabilities.shared_optimizer.option import OPTION as SHARED_OPTIMIZER
from jpipe.capabilities.shared_parameters.option import OPTION as SHARED_PARAMETERS
from jpipe.capabilities.shared_parameters.option import SharedCosts
from jpipe.capabilities.slices.option import OPTION as SLICES
from jpipe.capabilities.slices.option import ByCost, Slices, lengths_by_cost, lengths_of
from jpipe.capabilities.slices.option import Field as SlicesField
from jpipe.capabilities.sums_in_parts.option import OPTION as SUMS_IN_PARTS
from jpipe.capabilities.sums_in_parts.option import PartCosts, SumParts

OPTIONS: Sequence[Option] = [
    SHARED_PARAMETERS,
    GLOBAL_NORM,
    AGREEMENT,
    HOST_MEMORY,
    SHARED_OPTIMIZER,
    SUMS_IN_PARTS,
    COMPRESSED_MESSAGES,
    SLICES,
]

__all__ = [  # `jpipe.plan` exports these
    "Agreement",
    "HostMemory",
    "Kept",
    "OuterOptimizer",
]
__all__ += ["BLOCK", "Bottleneck", "Kind", "Links", "Message"]
__all__ += ["ByCost", "Slices", "lengths_by_cost", "lengths_of"]


class CapabilityOptions(pydantic.BaseModel):
    """The fields of a plan, and keys of a config, that belong to capabilities.

    Attributes:
        links: how messages between stages, and sums over replicas, are compressed, see `jpipe.plan.Links`. None, the default: they are sent
            unchanged.
        shard_optimizer: the replicas of a stage divide its optimizer state (ZeRO stage 1): each replica updates some of the layers, and
            sends their new weights to the others. The numbers are the same. Needs update_every "batch". False by default.
        agree: the replicas of all stages form parallel pipelines: each pipeline makes its own updates, without sums of gradients, and the
            pipelines agree on their weights rarely (DiLoCo), see `jpipe.plan.Agreement`. None, the default: replicas sum their gradients
            for each update.
        offload: the arrays that stay in host memory while no computation needs them, see `jpipe.plan.HostMemory`. None, the default: all
            arrays are on the devices.
        slices: the number of slices into which the rows of a microbatch are cut along their positions, a list of the lengths of the slices,
            or `{"count": number, "by": "cost"}` for slices that take equally long. The slices go through the stages one after the other,
            which needs less memory and makes the bubble shorter. None, the default: whole rows.
    """

    links: Links | None = None
    shard_optimizer: bool = False
    agree: Agreement | None = None
    offload: HostMemory | None = None
    slices: SlicesField = None


class StageOptions(
    SumParts,
    pydantic.BaseModel,
):
    """The fields of a stage that belong to capabilities."""


@dataclass(frozen=True, kw_only=True)
class Costs(
    SharedCosts,
    NormCosts,
    PartCosts,
):
    """The fields of a stage's cost that belong to capabilities."""


@cache
def programs() -> dict[str, ProgramHooks]:
    """Return the `ProgramHooks` of all capabilities, by name.

    This function imports their modules, to avoid an import cycle: they import the core, which calls this function. Code that lowers and
    simulates does not import JAX.
    """
    return {option.room: import_module(f"jpipe.capabilities.{option.room}.program").PROGRAM for option in OPTIONS}


@cache
def runtimes() -> dict[str, RuntimeHooks]:
    """Return the `RuntimeHooks` of all capabilities, by name."""
    return {option.room: import_module(f"jpipe.capabilities.{option.room}.runtime").RUNTIME for option in OPTIONS}


def uses_of(**values: Any) -> FrozenMapping[Any]:
    """Return the value of `Program.uses`: for each capability a value that is not in the plan; False and empty values are left out."""
    return FrozenMapping({name: _as_tuples(value) for name, value in sorted(values.items()) if value})


def _as_tuples(value: Any) -> Any:
    """Replace lists with tuples, so that the value can be compared and hashed."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def uses_by(capabilities: Mapping[str, Any]) -> FrozenMapping[Any]:
    """Return `Program.uses` for stages with these capabilities (`StageFunctions.capabilities`)."""
    used = {option.room: option.used(capabilities[option.key]) for option in OPTIONS if option.used and option.key in capabilities}
    return uses_of(**used)


def known_beside() -> dict[str, Option]:
    """Return the capabilities that have no field in the plan, by their names in `Program.uses`."""
    return {option.room: option for option in OPTIONS if option.field is None}


def programs_of(plan: Any, uses: Collection[str] = ()) -> list[ProgramHooks]:
    """Return the `ProgramHooks` of the capabilities that a plan sets or that `uses` names."""
    return [programs()[option.room] for option in OPTIONS if option.room in uses or option.is_set(plan)]


def runtimes_of(plan: Any, uses: Collection[str] = ()) -> list[RuntimeHooks]:
    """Return the `RuntimeHooks` of the capabilities that a plan sets or that `uses` names."""
    return [runtimes()[option.room] for option in OPTIONS if option.room in uses or option.is_set(plan)]


def runtimes_for(capabilities: Collection[str]) -> dict[str, RuntimeHooks]:
    """Return the `RuntimeHooks` of capabilities, by name, from their keys in `StageFunctions.capabilities`."""
    return {option.room: runtimes()[option.room] for option in OPTIONS if option.key in capabilities} if capabilities else {}


def updates_for(capabilities: Collection[str]) -> dict[str, UpdateHooks]:
    """Return the `UpdateHooks` of capabilities, by name, from their keys in `StageFunctions.capabilities`."""
    return {name: used.update for name, used in runtimes_for(capabilities).items() if used.update is not None}


def values_of(plan: Any, arguments: Mapping[str, Any] = NOTHING, entries: Any = None) -> dict[str, Any]:
    """Return the values for `StageFunctions.capabilities`, by key, of all capabilities with their own programs of stages."""
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.of_arguments is not None and (value := option.of_arguments(arguments, entries)) is not None:
            values[option.key] = value
        elif option.is_set(plan) and runtimes()[option.room].calls is not None:
            values[option.key] = option.in_plan(plan)
    return values


def with_options(stages: Sequence[dict[str, Any]], **values: Any) -> Sequence[dict[str, Any]]:
    """Apply the arguments of `Plan.even` that belong to capabilities to the fields of stages."""
    for option in OPTIONS:
        if option.even is not None and option.field in values:
            stages = option.even(values[option.field], stages)
    return stages


def exchange_of(values: Mapping[str, Any]) -> Exchange:
    """Return how workers exchange activations and gradients, from `values_of` a plan."""
    made = (hooks.exchange(values) for hooks in runtimes_for(values).values() if hooks.exchange is not None)
    return next(made, Exchange())


def row_lengths_of(plan: Any) -> tuple[int | None, ...] | None:
    """Return the length of each slice of the rows, or None in place of a length that depends on the rows; None for whole rows."""
    cut = (option.row_lengths(option.in_plan(plan)) for option in OPTIONS if option.row_lengths is not None and option.is_set(plan))
    return next(cut, None)


def variants_of(plan: Any, spec: Any, functions: Any) -> list[Any]:
    """Return for each slice of the rows of a microbatch the functions of all stages; empty for whole rows."""
    return next((cut(plan, spec, functions) for cut in (each.variants for each in runtimes_of(plan)) if cut is not None), [])


def has_parallel_pipelines(plan: Any) -> bool:
    """Return whether the replicas of a plan are parallel pipelines, each with its own updates."""
    return any(option.parallel_pipelines and option.is_set(plan) for option in OPTIONS)


def divides_updates(plan: Any) -> bool:
    """Return whether the replicas of a stage update different entries of its weights."""
    return any(option.divides_updates and option.is_set(plan) for option in OPTIONS)
