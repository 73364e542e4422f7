"""The list of all capabilities: what they add to plans, and one line for each. To remove one, remove its lines and its folder."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import pydantic

from jpipe.capabilities.agreement.option import OPTION as AGREEMENT
from jpipe.capabilities.agreement.option import Agreement, OuterOptimizer
from jpipe.capabilities.compressed_messages.option import BLOCK, Kind, Links, Message
from jpipe.capabilities.compressed_messages.option import OPTION as COMPRESSED_MESSAGES
from jpipe.capabilities.host_memory.option import OPTION as HOST_MEMORY
from jpipe.capabilities.host_memory.option import HostMemory, Kept
from jpipe.capabilities.protocol import Encoding, Option, ProgramHooks, RuntimeHooks, SumHooks
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


def programs_of(plan: Any) -> list[ProgramHooks]:
    """Return what those capabilities add to programs that a plan uses."""
    return [programs()[option.room] for option in OPTIONS if option.is_set(plan)]


def runtimes_of(plan: Any) -> list[RuntimeHooks]:
    """Return how those capabilities run that a plan uses."""
    return [runtimes()[option.room] for option in OPTIONS if option.is_set(plan)]


def runtimes_for(fields: Collection[str]) -> dict[str, RuntimeHooks]:
    """Return how the capabilities of some fields of plans run, by their names."""
    return {option.room: runtimes()[option.room] for option in OPTIONS if option.field in fields} if fields else {}


def values_of(plan: Any) -> dict[str, Any]:
    """Return what a plan says of the capabilities that have programs of their own, by field."""
    used = (option for option in OPTIONS if option.is_set(plan))
    return {option.field: getattr(plan, option.field) for option in used if runtimes()[option.room].calls is not None}


def encoding_of(values: Mapping[str, Any]) -> Encoding:
    """Return how messages between stages are sent, from `values_of` a plan."""
    return _made("encoding", values) or Encoding()


def sums_of(values: Mapping[str, Any]) -> SumHooks | None:
    """Return how the replicas of a stage sum gradients, from `values_of` a plan; None: around a ring."""
    sums: SumHooks | None = _made("sums", values)
    return sums


def _made(name: str, values: Mapping[str, Any]) -> Any:
    """Return what the one capability that has a function of this name makes with it of its value; None: there is none."""
    used = ((getattr(runtimes()[option.room], name), values[option.field]) for option in OPTIONS if option.field in values)
    return next((made for hook, value in used if hook is not None and (made := hook(value)) is not None), None)


def has_parallel_pipelines(plan: Any) -> bool:
    """Return whether the replicas of a plan are parallel pipelines, which update by themselves."""
    return any(option.parallel_pipelines and option.is_set(plan) for option in OPTIONS)


def divides_updates(plan: Any) -> bool:
    """Return whether the replicas of a stage update different entries of its weights."""
    return any(option.divides_updates and option.is_set(plan) for option in OPTIONS)
