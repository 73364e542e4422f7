"""Parameters that stages share because layers of a model are tied, and checks that a plan can sum their gradients in time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError, short

if TYPE_CHECKING:
    import jpipe

ROOM = "shared_parameters"
Groups = tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
"""For each set of stages that share parameters: (stages, names of the parameters)."""


@dataclass(frozen=True, kw_only=True)
class SharedCosts:
    """The field of the cost of a stage that shares parameters.

    Attributes:
        shared: for each group of shared parameters, as in `lower`, the bytes of its gradients; 0 if the stage does not hold the group.
    """

    shared: tuple[int, ...] = ()


def check_model(plan: "jpipe.Plan", entries: Any) -> None:
    """Raise InputError if stages on different meshes share a parameter, which they would round differently."""
    for stages, names in entries.groups:
        meshes = [(plan.stages[s].shape, plan.stages[s].fsdp) for s in stages]
        if len(set(meshes)) > 1:
            actual = ", ".join(
                f"stage {s} on {dict(mesh)}{' with fsdp' if fsdp else ''}" for s, (mesh, fsdp) in zip(stages, meshes, strict=True)
            )
            raise InputError(f"ties: expected the same mesh for all stages that share '{names[0]}', found {actual}; give them one mesh")


def refusal(plan: "jpipe.Plan", groups: Any) -> str:
    """Return why the stages of a plan cannot share parameters, or ""; `groups` has for each group of parameters its stages."""
    for stages in groups:
        if len(stages) < 2 or list(stages) != sorted(set(stages)) or not set(stages) <= set(range(plan.depth)):
            return f"expected two or more stages of {plan.depth} in order, found {short(stages)}"
    return ""


OPTION = Option(
    room=ROOM,
    field=None,
    check_model=check_model,
    of_arguments=lambda arguments, entries: entries.groups or None if entries else None,
    used=lambda groups: tuple(stages for stages, _ in groups),
    stands_for="ties",
    refusal=refusal,
    exclusions=(
        Exclusion(
            "ties",
            "early updates",
            "the last stage updates before the first stage has computed its gradients",
            "use vertical_sync, 'pipedream_2bw' or a schedule that flushes, or put the layers that share a parameter into one stage",
        ),
        Exclusion(
            "ties",
            "update_every",
            "a stage would update before all gradients of the batch are computed",
            "use 'batch' with as many microbatches as the stages have replicas",
        ),
    ),
)
