"""The shares of the replicas in the optimizer state and the update of their stage (ZeRO stage 1)."""

from jpipe.plan import Plan
from jpipe.programs._costs import deal
from jpipe.stages._arrays import Share
from jpipe.stages._bytes import arrays_of, nbytes
from jpipe.stages.functions._stage import StageFunctions


def shares_of(plan: Plan, f: StageFunctions) -> tuple[Share | None, ...]:
    """Return the share of each replica of a stage, or Nones where each updates everything.

    The bytes of optimizer state on each device are as even as whole entries let them be. Layers that share parameters with each other
    stay together, with these, so that one replica has all of their masters.
    """
    if not plan.shard_optimizer or f.stage.replicas == 1:
        return (None,) * f.stage.replicas
    arrays, common = arrays_of(f), [name for names in f.sharing.groups_of(f.number).values() for name in names]
    ties = f.stack.ties
    parts: dict[str, list[str]] = {}
    for entry in f.specs.params:
        if entry not in common:
            tied = entry in ties.first or any(name not in common for name in ties.shared.get(entry, {}).values())
            parts.setdefault("" if tied else entry, []).append(entry)
    sizes = [tuple(sum(nbytes(tree[entry]) for entry in part) for tree in (arrays.optimizer, arrays.trained)) for part in parts.values()]
    owners = deal([(size[0], size[1]) for size in sizes], f.stage.replicas)
    entries: list[list[str]] = [[] for _ in range(f.stage.replicas)]
    for owner, part in zip(owners, parts.values(), strict=True):
        entries[owner] += part
    return tuple(Share(tuple(exclusive), tuple(common)) for exclusive in entries)
