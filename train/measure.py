"""A few steps of a run measured now and then, and the same steps as the simulator predicts them."""

from collections.abc import Sequence

import jpipe


class Measure:
    """Decides which steps are traced, and compares each traced window with its prediction.

    A window is `batches` batches once the pipeline is full, and again after each evaluation; one batch before and one after are traced
    as well. The prediction is the schedule simulated with the median times of the window's own computations: it tells what the order
    of the computations costs, not how fast the devices are.

    Args:
        pipe: what runs; compiled.
        costs: of its stages in bytes, from `pipe.costs`.
        steps: of the run.
        every: steps between two evaluations.
        batches: of a window; 0: nothing is measured.

    Attributes:
        predicted, measured: the last window, both ways; None before the first one.
    """

    def __init__(self, pipe: jpipe.Pipeline, costs: Sequence[jpipe.StageCost], steps: int, every: int, batches: int) -> None:
        self._pipe, self._costs, self._steps, self._every, self._most = pipe, costs, steps, every, batches
        self._full = jpipe.batches_until_full(pipe.plan)
        self._tracer: jpipe.Tracer | None = None
        self._first = self._batches = 0
        self.predicted: jpipe.Window | None = None
        self.measured: jpipe.Window | None = None

    def observer(self, step: int) -> jpipe.Tracer | None:
        """What `Pipeline.step` is to be observed with at `step`, if anything; finishes the window that the step before ended."""
        if self._tracer is not None and step > self._first + self._batches:
            self.finish()
        if self._tracer is None and self._begins(step):
            self._first, self._batches = step + 1, min(self._most, self._steps - step - 2)
            self._tracer = jpipe.Tracer(self._pipe.plan)
        return self._tracer

    def finish(self) -> None:
        """Wait for what is traced, if anything is, and compare."""
        if self._tracer is None:
            return
        trace, self._tracer = self._tracer.finish(), None
        plan, window = self._pipe.plan, (self._first, self._batches)
        costs = jpipe.fit_costs(self._costs, trace.timeline)
        self.measured = jpipe.cut_window(trace.timeline, trace.memory, plan.microbatches, *window)
        self.predicted = jpipe.predict_window(plan, costs, *window, clips=self._pipe.clip_global_norm is not None)

    def _begins(self, step: int) -> bool:
        """Whether a window of at least one batch fits from here to the end, and to the next evaluation where that is possible at all."""
        if self._most == 0 or self._steps - step < 3:
            return False
        due = self.measured is None and step >= self._full
        if self._every <= self._most + 2:  # no window fits between two evaluations
            return due
        after_evaluation = step > 0 and step % self._every == 0
        fits = self._every - step % self._every >= self._most + 2
        return (due and fits) or after_evaluation
