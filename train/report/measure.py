"""A few steps of a run measured now and then, and the same steps as the simulator predicts them."""

from collections.abc import Sequence
from functools import cached_property

import jpipe
from train.launch.gather import gather

MOST_FORWARDS = 100_000  # that a prediction may simulate: some seconds


class Measure:
    """Decides which steps are traced, and compares the last traced window with its prediction.

    A window is up to `batches` batches once the pipeline is full, and again after each evaluation, never with an evaluation inside;
    one batch before and one after are traced as well. The prediction is the schedule simulated with the median times of the window's
    own computations: it shows what the order of the computations costs, not how fast the devices are.

    Args:
        pipe: what runs; compiled.
        costs: of its stages in bytes, from `pipe.costs`.
        steps: of the run.
        every: steps between two evaluations.
        batches: of a window at most; 0: nothing is measured.
        processes: of the run, if there are several: all measure the same steps, each its own workers, and process 0 has the windows.
        first: the step that the run begins with.

    Attributes:
        measured: the last window; None before the first one.
    """

    def __init__(
        self,
        pipe: jpipe.Pipeline,
        costs: Sequence[jpipe.programs.StageCost],
        steps: int,
        every: int,
        batches: int,
        processes: jpipe.processes.Processes | None = None,
        first: int = 0,
    ) -> None:
        self._processes, self._start = processes, first
        self._pipe, self._costs, self._steps, self._every, self._most = pipe, costs, steps, every, batches
        self._full = jpipe.programs.batches_until_full(pipe.plan)
        self._tracer: jpipe.Tracer | None = None
        self._first = self._batches = 0  # of the window that is traced
        self._window = 0, 0  # the same of the last one that was measured
        self.measured: jpipe.programs.Window | None = None

    def observer(self, step: int) -> jpipe.Tracer | None:
        """What `Pipeline.step` is to be observed with at `step`, if anything; finishes the window that the step before ended."""
        if self._tracer is not None and step > self._first + self._batches:
            self.finish()
        if self._tracer is None and (batches := self._fitting(step)):
            self._first, self._batches = step + 1, batches
            if self._processes is not None:  # all clocks begin now, as precisely as a message over the network can say
                self._processes.barrier(f"the trace from step {step}")
            self._tracer = jpipe.Tracer(self._pipe.plan)
        return self._tracer

    def finish(self) -> None:
        """Wait for what is traced, if anything is."""
        if self._tracer is None:
            return
        trace, self._tracer = self._tracer.finish(), None
        self._window = self._first, self._batches
        if self._processes is not None:
            everyones = gather(self._processes, self._pipe, f"trace of batch {self._first}", trace)
            if everyones is None:
                return
            trace = everyones
        self._costs = jpipe.runtime.fit_costs(self._costs, trace.timeline, self._pipe.plan.replicas)
        self.measured = jpipe.programs.extract_window(trace.timeline, trace.memory, self._pipe.plan.microbatches, *self._window)

    def close(self) -> None:
        """Give up what is traced, if anything is: the run stops."""
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None

    @cached_property
    def predicted(self) -> jpipe.programs.Window | None:
        """The measured window as simulated; only asked for at the end, for it takes a while. None where it would take minutes."""
        plan = self._pipe.plan
        forwards = plan.depth * plan.microbatches * (2 * self._full + self._window[1] + 1)
        if self.measured is None or forwards > MOST_FORWARDS:
            return None
        return jpipe.programs.predict_window(plan, self._costs, *self._window, clips=self._pipe.clip_global_norm is not None)

    def _fitting(self, step: int) -> int:
        """How many batches a window that begins to be traced at `step` can have; 0: none is to begin."""
        due = step % self._every == 0 if self._window[1] else step >= self._start + self._full
        room = min(self._steps - step, self._every - step % self._every)  # steps until the end, or until the next evaluation
        return min(self._most, max(room - 2, 0)) if due else 0
