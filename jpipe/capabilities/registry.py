"""The list of all capabilities, and what they add to plans. To remove one, remove its lines here and its folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pydantic

from jpipe._frozen import NOTHING, FrozenMapping
from jpipe.capabilities.agreement.option import OPTION as AGREEMENT
from jpipe.capabilities.agreement.option import Agreement, OuterOptimizer
from jpipe.capabilities.compressed_messages.option import BLOCK, Kind, Links, Message
from jpipe.capabilities.compressed_messages.option import OPTION as COMPRESSED_MESSAGES
from jpipe.capabilities.global_norm.option import OPTION as GLOBAL_NORM
from jpipe.capabilities.global_norm.option import NormCosts
from jpipe.capabilities.host_memory.option import OPTION as HOST_MEMORY
from jpipe.capabilities.host_memory.option import HostMemory, Kept
from jpipe.capabilities.protocol import Exchange, Option, ProgramHooks, RuntimeHooks, UpdateHooks
from jpipe.capabilities.shared_optimizer.option import OPTION as SHARED_OPTIMIZER
from jpipe.capabilities.shared_parameters.option import OPTION as SHARED_PARAMETERS
from jpipe.capabilities.shared_parameters.option import SharedCosts
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
]

__all__ = [  # what `jpipe.plan` exports of them
    "Agreement",
    "HostMemory",
    "Kept",
    "OuterOptimizer",
]
__all__ += ["BLOCK", "Kind", "Links", "Message"]


class CapabilityOptions(pydantic.BaseModel):
    """The fields of a plan, and keys of a config, that belong to capabilities.

    Attributes:
        links: messages between stages, and what replicas sum, are compressed, see `jpipe.plan.Links`. None, the default: they are sent
            as they are.
        shard_optimizer: replicas of a stage share its optimizer state (ZeRO stage 1): each updates some of the layers, and they send each
            other what they have updated. The numbers are the same. With update_every "batch". False by default.
        agree: the replicas of all stages, equally many, are parallel pipelines: each makes its own updates, without sums of gradients, and
            they agree on their weights rarely (DiLoCo), see `jpipe.plan.Agreement`. None, the default: replicas sum their
            gradients for each update.
        offload: what waits in the memory of the host while no computation needs it, see `jpipe.plan.HostMemory`. None, the default:
            everything is on the devices.
    """

    links: Links | None = None
    shard_optimizer: bool = False
    agree: Agreement | None = None
    offload: HostMemory | None = None


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
    """The fields of the cost of a stage that belong to capabilities."""


@cache
def programs() -> dict[str, ProgramHooks]:
    """Return what capabilities add to programs, by their names.

    Modules are imported here, by name, because they import the core, which calls this. So there is no circle of imports, and nothing that
    lowers and simulates imports JAX.
    """
    return {option.room: import_module(f"jpipe.capabilities.{option.room}.program").PROGRAM for option in OPTIONS}


@cache
def runtimes() -> dict[str, RuntimeHooks]:
    """Return how capabilities run, by their names."""
    return {option.room: import_module(f"jpipe.capabilities.{option.room}.runtime").RUNTIME for option in OPTIONS}


def uses_of(**values: Any) -> FrozenMapping[Any]:
    """Return what a program does beside its plan, by capability: the values that are not False or empty."""
    return FrozenMapping({name: _as_tuples(value) for name, value in sorted(values.items()) if value})


def _as_tuples(value: Any) -> Any:
    """Return a value with tuples in place of lists, so that it can be compared and hashed."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def uses_by(capabilities: Mapping[str, Any]) -> FrozenMapping[Any]:
    """Return what programs do beside their plan, for stages with these capabilities (`StageFunctions.capabilities`)."""
    used = {option.room: option.used(capabilities[option.key]) for option in OPTIONS if option.used and option.key in capabilities}
    return uses_of(**used)


def known_beside() -> dict[str, Option]:
    """Return the capabilities that are in no plan, by their names in what a program `uses`."""
    return {option.room: option for option in OPTIONS if option.field is None}


def programs_of(plan: Any, uses: Collection[str] = ()) -> list[ProgramHooks]:
    """Return what those capabilities add to programs that a plan uses, or a program beside its plan."""
    return [programs()[option.room] for option in OPTIONS if option.room in uses or option.is_set(plan)]


def runtimes_of(plan: Any, uses: Collection[str] = ()) -> list[RuntimeHooks]:
    """Return how the capabilities of `programs_of` run."""
    return [runtimes()[option.room] for option in OPTIONS if option.room in uses or option.is_set(plan)]


def runtimes_for(capabilities: Collection[str]) -> dict[str, RuntimeHooks]:
    """Return how capabilities run, by their names, from their keys in `StageFunctions.capabilities`."""
    return {option.room: runtimes()[option.room] for option in OPTIONS if option.key in capabilities} if capabilities else {}


def updates_for(capabilities: Collection[str]) -> dict[str, UpdateHooks]:
    """Return what capabilities change in updates, as `runtimes_for`."""
    return {name: used.update for name, used in runtimes_for(capabilities).items() if used.update is not None}


def values_of(plan: Any, arguments: Mapping[str, Any] = NOTHING, entries: Any = None) -> dict[str, Any]:
    """Return the values that stages have of capabilities, by key: of all those that have programs of their own.

    Args:
        plan: the plan of the pipeline.
        arguments: the arguments of the pipeline, as in `excluded`.
        entries: the `StageEntries` of the model.
    """
    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.of_arguments is not None and (value := option.of_arguments(arguments, entries)) is not None:
            values[option.key] = value
        elif option.is_set(plan) and runtimes()[option.room].calls is not None:
            values[option.key] = option.in_plan(plan)
    return values


def with_options(stages: Sequence[dict[str, Any]], **values: Any) -> Sequence[dict[str, Any]]:
    """Return the fields of even stages with what capabilities make of arguments of `Plan.even`."""
    for option in OPTIONS:
        if option.even is not None and option.field in values:
            stages = option.even(values[option.field], stages)
    return stages


def exchange_of(values: Mapping[str, Any]) -> Exchange:
    """Return how workers exchange activations and gradients, from `values_of` a plan."""
    made = (hooks.exchange(values) for hooks in runtimes_for(values).values() if hooks.exchange is not None)
    return next(made, Exchange())


def has_parallel_pipelines(plan: Any) -> bool:
    """Return whether the replicas of a plan are parallel pipelines, which update by themselves."""
    return any(option.parallel_pipelines and option.is_set(plan) for option in OPTIONS)


def divides_updates(plan: Any) -> bool:
    """Return whether the replicas of a stage update different entries of its weights."""
    return any(option.divides_updates and option.is_set(plan) for option in OPTIONS)
