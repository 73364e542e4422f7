"""Computations of slices: their places in a program, their verification and their price."""

from dataclasses import dataclass

from jpipe.capabilities.protocol import LoweringHooks, ProgramHooks, VerifyHooks
from jpipe.ops import OPS, Op
from jpipe.programs._instructions import Compute
from jpipe.programs._verify import Verifier
from jpipe.programs.lowering import Run
from jpipe.programs.lowering._progress import Worker
from jpipe.programs.prediction import _actions as prediction


@dataclass(frozen=True, slots=True)
class ComputeSlice(Compute):
    """Run an op on a slice of the rows of a microbatch. Its `microbatch` counts slices."""

    slice: int


class _Lowering(LoweringHooks):
    """Writes the computations of slices."""

    def __init__(self, run: Run) -> None:
        self._run, self._slices = run, run.plan.row_slices

    def write(self, worker: Worker, op: Op, ticks: int, k: int, version: int) -> int:
        """Write a computation of a slice, and return the time of its end."""
        self._run.listing.compute(worker.clock, op.name, worker.number, k, version, ComputeSlice, k % self._slices)
        return worker.clock + ticks


class _Verification(VerifyHooks):
    """Tracks the carries between the slices of one worker, and the gradients of the carries."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self.checks = {ComputeSlice: self._compute}

    def _compute(self, i: ComputeSlice) -> None:
        """Check a computation. A forward reads the carry of the slice before, a backward the gradient of its forward's carry."""
        verifier, op, k, slices = self._verifier, OPS[i.op], i.microbatch, self._verifier.plan.row_slices
        is_first, is_last = k % slices == 0, (k + 1) % slices == 0
        if i.slice != k % slices:
            verifier.fail(f"{i}: expected slice {k % slices}")
        if op.begins and not is_first:
            verifier.take("carry", k)
        if op.gives_gradient and not is_last:
            verifier.take("gradient of the carry", k)
        verifier.compute(i)
        if op.begins and not is_last:
            verifier.put("carry", k + 1)
        if op.gives_gradient and not is_first:
            verifier.put("gradient of the carry", k - 1)


PROGRAM = ProgramHooks(
    instructions=(ComputeSlice,),
    lower=_Lowering,
    verify=_Verification,
    writers={ComputeSlice: prediction.WRITERS[Compute]},
)
