"""The shares of the replicas of a stage in its updates, which a capability may divide among them."""

from jpipe.capabilities.protocol import hooks
from jpipe.capabilities.registry import runtimes_of
from jpipe.plan import Plan
from jpipe.stages._arrays import Share
from jpipe.stages.functions._stage import StageFunctions


def shares_of(plan: Plan, f: StageFunctions) -> tuple[Share | None, ...]:
    """Return the share of each replica of a stage, or Nones where each updates everything."""
    for shares in hooks("shares", runtimes_of(plan)):
        divided: tuple[Share | None, ...] = shares(plan, f)
        return divided
    return (None,) * f.stage.replicas
