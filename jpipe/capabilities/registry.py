"""The list of all capabilities: what they add to plans, and one line for each. To remove one, remove its lines and its folder."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import pydantic

from jpipe._frozen import FrozenMapping
from jpipe.capabilities.agreement.option import OPTION as AGREEMENT
from jpipe.capabilities.agreement.option import Agreement, OuterOptimizer
from jpipe.capabilities.compressed_messages.option import BLOCK, Kind, Links, Message
from jpipe.capabilities.compressed_messages.option import OPTION as COMPRESSED_MESSAGES
from jpipe.capabilities.host_memory.option import OPTION as HOST_MEMORY
from jpipe.capabilities.host_memory.option import HostMemory, Kept
from jpipe.capabilities.protocol import Exchange, Option, ProgramHooks, RuntimeHooks
from jpipe.capabilities.shared_optimizer.option import OPTION as SHARED_OPTIMIZER

OPTIONS: Sequence[Option] = [
    AGREEMENT,
    HOST_MEMORY,
    SHARED_OPTIMIZER,
    COMPRESSED_MESSAGES,
]

__all__ = [  # what `jpipe.plan` exports of them
    "Agreement",
    "HostMemory",
    "Kept",
    "OuterOptimizer",
]
__all__ += ["BLOCK", "Kind", "Links", "Message"]


class Options(pydantic.BaseModel):
    """The fields of a plan that belong to capabilities."""

    links: Links | None = None
    shard_optimizer: bool = False
    agree: Agreement | None = None
    offload: HostMemory | None = None


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
    """Return what a program does beside its plan, by the names of capabilities: of these values those that are not False or empty."""
    return FrozenMapping({name: value for name, value in sorted(values.items()) if value})


def programs_of(plan: Any, uses: Collection[str] = ()) -> list[ProgramHooks]:
    """Return what those capabilities add to programs that a plan uses, or a program beside its plan."""
    return [programs()[option.room] for option in OPTIONS if option.room in uses or option.is_set(plan)]


def runtimes_of(plan: Any, uses: Collection[str] = ()) -> list[RuntimeHooks]:
    """Return how those capabilities run, as `programs_of`."""
    return [runtimes()[option.room] for option in OPTIONS if option.room in uses or option.is_set(plan)]


def runtimes_for(fields: Collection[str]) -> dict[str, RuntimeHooks]:
    """Return how the capabilities of some fields of plans run, by their names."""
    return {option.room: runtimes()[option.room] for option in OPTIONS if option.field in fields} if fields else {}


def values_of(plan: Any) -> dict[str, Any]:
    """Return what a plan says of the capabilities that have programs of their own, by field."""
    used = [(option.field, option.room) for option in OPTIONS if option.is_set(plan)]
    return {field: getattr(plan, field) for field, room in used if field is not None and runtimes()[room].calls is not None}


def exchange_of(values: Mapping[str, Any]) -> Exchange:
    """Return how workers exchange activations and gradients, from `values_of` a plan."""
    made = ((runtimes()[option.room].exchange, values.get(str(option.field))) for option in OPTIONS)
    return next((exchange(value) for exchange, value in made if exchange is not None and value is not None), Exchange())


def has_parallel_pipelines(plan: Any) -> bool:
    """Return whether the replicas of a plan are parallel pipelines, which update by themselves."""
    return any(option.parallel_pipelines and option.is_set(plan) for option in OPTIONS)


def divides_updates(plan: Any) -> bool:
    """Return whether the replicas of a stage update different entries of its weights."""
    return any(option.divides_updates and option.is_set(plan) for option in OPTIONS)
