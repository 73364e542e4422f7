"""The orders of PyTorch's schedule classes, as JSON; for an environment with PyTorch, where jpipe may be missing.

Reads lists [class, ranks, stages per rank, microbatches] and writes for each, rank by rank, lists of (op, stage, microbatch): F, B, I or W.
"""

import json
import sys
from types import SimpleNamespace

from torch.distributed.pipelining import schedules


def order(name, ranks, chunks, microbatches):
    """Return the computations of each rank in a schedule of PyTorch, listing overlapped computations one after the other."""
    stages = [
        SimpleNamespace(
            group_size=ranks, group_rank=0, num_stages=ranks * chunks, stage_index=n, is_first=n == 0, is_last=False, submod=None
        )
        for n in range(chunks)
    ]
    single = issubclass(getattr(schedules, name), schedules.PipelineScheduleSingle)
    schedule = getattr(schedules, name)(stages[0] if single else stages, microbatches)
    orders = []
    for rank in range(ranks):
        actions = [action for action in schedule.pipeline_order[rank] if action is not None]
        flat = [part for action in actions for part in (action.sub_actions or (action,))]
        orders.append([(part.computation_type.value, part.stage_index, part.microbatch_index) for part in flat])
    return orders


if __name__ == "__main__":
    json.dump([order(*case) for case in json.load(sys.stdin)], sys.stdout)
