"""The lowering of a plan to the instructions of all workers, in one total order."""

from jpipe.programs.lowering._lower import batches_until_full, lower, lower_evaluation, lower_repeated
from jpipe.programs.lowering._run import Run

__all__ = ["Run", "batches_until_full", "lower", "lower_evaluation", "lower_repeated"]
