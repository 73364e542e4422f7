"""Measure a few steps of a run from time to time, and predict the same steps by simulation."""

import statistics
from collections.abc import Sequence
from functools import cached_property

import jpipe
from jpipe_train.launch.gather import gather

MOST_FORWARDS = 100_000  # a prediction with this many forwards takes some seconds; larger ones are not computed


class Measure:
    """Traces windows of steps, and compares the last window with its prediction.

    A window of at most `batches` batches is traced when the pipeline is full, after each evaluation, and when a window is requested. It
    contains no evaluation. The batches directly before and after it are traced as well. The prediction simulates the schedule with the
    median times of the window's computations, so it shows the effect of their order, not the speed of the devices.

    Args:
        pipe: the compiled pipeline.
        costs: the costs of the stages in bytes, from `pipe.costs`.
        steps: the number of steps of the run.
        every: the number of steps between two evaluations.
        batches: the largest number of batches in a window; 0 measures nothing.
        processes: the processes of the run, if there are several. All processes measure the same steps, each for its own workers, and
            process 0 gets the windows.
        first: the first step of the run.

    Attributes:
        measured: the last window; None before the first window.
        data_waits: for each process, the mean seconds per step of waiting for data during the last trace. Empty before the first trace,
            and in a run of one process.
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
        self._first = self._batches = 0  # first batch and number of batches of the window that is traced
        self._window = 0, 0  # first batch and number of batches of the last measured window
        self._waits: list[float] = []  # seconds that this process waited for the data of each step of the current trace
        self._requested: int | None = None  # the step at which an additional window begins
        self.measured: jpipe.programs.Window | None = None
        self.data_waits: Sequence[float] = ()

    def observer(self, step: int) -> jpipe.Tracer | None:
        """Return the observer for `Pipeline.step` at `step`, or None; finish a window that ended with the previous step."""
        if self._tracer is not None and step > self._first + self._batches:
            self.finish()
        if self._tracer is None and (batches := self._window_size(step)):
            self._first, self._batches = step + 1, batches
            if self._processes is not None:  # the clocks of all processes start now, except for the latency of a message
                self._processes.barrier(f"the trace from step {step}")
            self._tracer, self._waits = jpipe.Tracer(self._pipe.plan), []
        return self._tracer

    def request(self, step: int) -> None:
        """Trace a window from `step` on, if none is being traced and enough steps are left. All processes must request it."""
        self._requested = step

    def waited(self, seconds: float) -> None:
        """Record how long this process waited for the data of a step."""
        if self._tracer is not None:
            self._waits.append(seconds)

    @property
    def is_tracing(self) -> bool:
        """Whether a window is being traced."""
        return self._tracer is not None

    def finish(self) -> None:
        """Finish the current trace, if there is one."""
        if self._tracer is None:
            return
        trace, self._tracer = self._tracer.finish(), None
        self._window = self._first, self._batches
        if self._processes is not None:
            wait = statistics.fmean(self._waits) if self._waits else 0.0
            waits = self._processes.gather(f"wait for the data from batch {self._first}", str(wait).encode())
            self.data_waits = [*map(float, waits)]
            gathered = gather(self._processes, self._pipe, f"trace of batch {self._first}", trace)
            if gathered is None:
                return
            trace = gathered
        self._costs = jpipe.runtime.fit_costs(self._costs, trace.timeline, self._pipe.plan)
        self.measured = jpipe.programs.extract_window(
            trace.timeline, trace.memory, self._pipe.plan.counted.microbatches, *self._window, trace.transfers
        )

    def ends_at(self, steps: int) -> None:
        """Drop the current trace if the run ends, after `steps` batches, before the trace is complete."""
        if self._tracer is not None and self._first + self._batches >= steps:
            self.close()

    def close(self) -> None:
        """Drop the current trace, if there is one, because the run stops."""
        if self._tracer is not None:
            self._tracer.close()
            self._tracer = None

    @cached_property
    def predicted(self) -> jpipe.programs.Window | None:
        """The prediction of the measured window, or None if it would take minutes. The first access computes it, which takes some time."""
        plan = self._pipe.plan
        forwards = plan.depth * plan.counted.microbatches * (2 * self._full + self._window[1] + 1)
        if self.measured is None or forwards > MOST_FORWARDS:
            return None
        return jpipe.programs.predict_window(plan, self._costs, *self._window, global_norm=self._pipe.uses_global_norm)

    def _window_size(self, step: int) -> int:
        """Return the number of batches in the window of a trace that begins at `step`, or 0 if no trace begins."""
        due = step % self._every == 0 if self._window[1] else step >= self._start + self._full
        room = min(self._steps - step, self._every - step % self._every)  # steps until the end, or until the next evaluation
        return min(self._most, max(room - 2, 0)) if due or step == self._requested else 0
