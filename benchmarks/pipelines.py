"""Record when the steps of a `jpipe.Pipeline` end in this process, without waiting between them, and measure its stages."""

import queue
import threading
from typing import Any

import jax

import jpipe
from benchmarks.serve import now


class Runner:
    """A pipeline that `serve` can run: it fills once and then never empties.

    Args:
        pipe: the pipeline.
        batch: (inputs, labels), the same for each step.
    """

    def __init__(self, pipe: jpipe.Pipeline, batch: Any) -> None:
        self._pipe, self._batch = pipe, batch
        self._state = pipe.init(jax.random.key(0), batch)

    def __call__(self, steps: int, tracer: jpipe.Tracer | None = None) -> dict[str, Any]:
        """Run steps as fast as the devices take them, and wait for their computations.

        Args:
            steps: number of steps.
            tracer: observes the steps instead of the clock; then no ends are recorded.
        """
        clock = _UpdateClock()
        for _ in range(steps):
            self._state, _ = self._pipe.step(self._state, self._batch, observe=tracer or clock)
        jax.block_until_ready(self._state)
        return {"ends": clock.finish()}


def fitted_costs(pipe: jpipe.Pipeline, batch: Any, steps: int) -> tuple[jpipe.programs.StageCost, ...]:
    """Return the costs of the stages with measured times, the medians of some steps."""
    state = pipe.init(jax.random.key(0), batch)
    state, _ = pipe.step(state, batch)
    with jpipe.Tracer(pipe.plan) as tracer:
        for _ in range(steps):
            state, _ = pipe.step(state, batch, observe=tracer)
        trace = tracer.finish()
    return jpipe.runtime.fit_costs(pipe.costs(batch), trace.timeline)


class _UpdateClock:
    """A recorder of the time of each update of one worker of this process, the first one that makes one.

    A thread waits for it, so that the thread that dispatches does not; a few waits per batch have no measurable cost.
    """

    def __init__(self) -> None:
        self._worker: int | None = None
        self._updates: queue.SimpleQueue[jax.Array | None] = queue.SimpleQueue()
        self._ends: list[float] = []
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def __call__(self, event: jpipe.runtime.Event) -> None:
        if type(event.instruction).__name__ != "Update" or event.done is None:
            return
        if self._worker is None:
            self._worker = event.instruction.worker
        if event.instruction.worker == self._worker:
            self._updates.put(event.done)

    def finish(self) -> list[float]:
        self._updates.put(None)
        self._thread.join()
        return self._ends

    def _wait(self) -> None:
        while (done := self._updates.get()) is not None:
            done.block_until_ready()
            self._ends.append(now())
