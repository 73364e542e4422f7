"""The bytes of a program in compact form, which do not depend on times."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._costs import StageCost
from jpipe.programs._instructions import Program
from jpipe.programs._verify import versions_before
from jpipe.programs.prediction._compact import Compact, Kind
from jpipe.programs.prediction._state import bytes_at_first, effect_of


def size_of_message(message: str, cost: StageCost) -> int:
    """Return the size of a message of a stage."""
    return cost.outputs if message == "activation" else cost.gradient


def size_of_sum(plan: Plan, s: int, part: int | None, cost: StageCost) -> float:
    """Return the bytes that each replica of a stage sends for a sum of gradients."""
    replicas, summed = plan.replicas[s], cost.accumulators if part is None else cost.accumulators_of_part(part, plan.stages[s])
    return 2 * (replicas - 1) / replicas * summed


def bytes_of_ranks(program: Program, form: Compact, costs: Sequence[StageCost]) -> tuple[list[int], list[int], list[int]]:
    """Return for each rank the most bytes that it holds after any instruction, its peak memory, and the bytes that it sends."""
    plan = program.plan
    changes, running, moved = np.array([_bytes_of(kind, plan, costs[kind.stage]) for kind in form.kinds] or [(0, 0, 0)]).T
    first = [0] * len(plan.rank_workers)
    for w in range(len(plan.workers)) if program.workers is None else program.workers:
        s, _ = plan.workers[w]
        cost = costs[s]
        first[plan.rank_of[w]] += bytes_at_first(cost, len(versions_before(plan, w, program.start)), cost.optimizer)
        if plan.agreement_under_way(s, program.start * plan.updates_per_batch(s)) is not None:
            first[plan.rank_of[w]] += cost.trained  # the changes
    held, peak = [], []
    for at_first, rank in zip(first, form.ranks, strict=True):
        change: Any = changes[rank.kinds]
        live = at_first + np.cumsum(change)
        held.append(max(at_first, int(live.max(initial=0))))
        peak.append(max(held[-1], int((live - change + running[rank.kinds]).max(initial=0))))
    return held, peak, [int(moved[rank.kinds].sum()) for rank in form.ranks]


def _bytes_of(kind: Kind, plan: Plan, cost: StageCost) -> tuple[int, int, int]:
    """Return by how many bytes a step changes those of its rank, how many more there are while it runs, and how many it sends."""
    name, s, part, op = kind
    match name:
        case "compute":
            effect = effect_of(OPS[op], cost, s, plan.depth)
            return effect.allocated - effect.freed, effect.allocated + cost.temporary, 0
        case "first part":
            return cost.residuals, cost.residuals + cost.temporary, 0
        case "part":
            return 0, cost.temporary, 0
        case "sum":
            return 0, 0, round(size_of_sum(plan, s, part, cost))
        case "send activation" | "pass activation":
            return cost.kept_outputs - cost.outputs, 0, cost.outputs if name == "send activation" else 0
        case "send gradient" | "pass gradient":
            return -cost.gradient, 0, cost.gradient if name == "send gradient" else 0
    changes = {
        "inputs": cost.inputs,
        "labels": cost.labels,
        "receive activation": cost.inputs,
        "receive gradient": cost.message,
        "last part": -cost.residuals,
        "accumulate": cost.accumulators,
        "set aside": -cost.accumulators,
        "take state": cost.state,
        "average state": -cost.state,
        "update": cost.trained,
        "release": -cost.trained,
    }
    return changes[name], 0, 0
