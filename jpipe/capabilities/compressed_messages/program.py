"""The cost of compressed messages. They add no instructions; messages between stages and sums have fewer bytes."""

import math
from dataclasses import replace

from jpipe.capabilities.protocol import ProgramHooks
from jpipe.plan import Plan, Stage
from jpipe.programs._costs import StageCost, pieces_of


def sent_cost(plan: Plan, stage: Stage, cost: StageCost) -> StageCost:
    """Return the cost of a stage with compressed messages, and with the bytes that replicas send and keep for compressed sums."""
    links = plan.links
    assert links is not None
    cost = replace(
        cost,
        inputs=cost.inputs if stage is plan.stages[0] else links.compressed_bytes("activations", cost.inputs),
        outputs=links.compressed_bytes("activations", cost.outputs),
        message=links.compressed_bytes("gradients", cost.message),
        gradient=links.compressed_bytes("gradients", cost.gradient),
    )
    if links.sums is None or stage.replicas == 1:
        return cost
    gathered = tuple(links.compressed_bytes("sums", math.ceil(size)) for size in pieces_of(plan, stage, cost))
    return replace(cost, kept=cost.kept + cost.accumulators, gathered=gathered)


PROGRAM = ProgramHooks(sent_cost=sent_cost)
