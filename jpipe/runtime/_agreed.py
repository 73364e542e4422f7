"""The weights on which parallel pipelines have agreed last, also where that agreement is still to be applied."""

from typing import Any

import jax

from jpipe.runtime._transport import arrived
from jpipe.runtime.state import WorkerState, copied
from jpipe.stages._agreement import ALREADY_AGREED, ALREADY_APPLIED, Agreed
from jpipe.stages._arrays import shardings_of
from jpipe.stages._compiled_stage import CompiledStage

Tree = Any


def changes_under_way(worker: WorkerState) -> Tree:
    """Return the mean of the changes of an agreement that is still to be applied, perhaps still in transfer; None: there is none."""
    return next((pending.changes for pending in worker.updates.values() if pending.changes is not None), None)


def last_agreed(stage: CompiledStage, agreed: Agreed, changes: Tree) -> Agreed:
    """Return the result of the last agreement that has begun.

    Args:
        stage: of the worker.
        agreed: the result of the last agreement that it has applied.
        changes: from `changes_under_way`, of this worker or another replica of its stage.
    """
    mean = arrived(changes)
    if mean is None or mean in (ALREADY_AGREED, ALREADY_APPLIED):
        return agreed
    return stage.calls["agree"](copied(agreed), jax.device_put(mean, shardings_of(agreed.params)))


def agreed_params(stage: CompiledStage, worker: WorkerState) -> Tree:
    """Return the weights on which the pipelines have agreed last, with the frozen parameters."""
    assert worker.agreed is not None
    agreed = last_agreed(stage, worker.agreed, changes_under_way(worker))
    return stage.functions.trained.joined(agreed.params, worker.weights.read(worker.weights.newest))
