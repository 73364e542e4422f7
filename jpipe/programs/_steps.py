"""The few programs that a pipeline repeats, however long it runs, and the versions that its workers hold between them."""

from functools import cached_property

from jpipe.plan import Plan
from jpipe.programs._instructions import Program
from jpipe.programs._simulate import simulate
from jpipe.programs.lowering import batches_until_full, lower
from jpipe.schedules import SCHEDULES


class Steps:
    """The programs of single steps: once the pipeline is full, all steps are one program, run some batches later than it was lowered for.

    They are several programs by turns if the order of the schedule takes several batches to repeat.

    The batches that are flushed first also share one program: that of the first batch of a plan that flushes only this one.

    Args:
        plan: what runs.
        global_norm: whether updates use the norm of the gradients of all stages.
        shared: for each group of shared parameters, the stages that hold them.
    """

    def __init__(self, plan: Plan, global_norm: bool, shared: tuple[tuple[int, ...], ...] = ()) -> None:
        self.shared = shared
        self._flushed, self._global_norm = plan.flush_first, global_norm
        self._plan = plan.model_copy(update={"flush_first": min(plan.flush_first, 1)})
        self._programs: dict[tuple[int, int, bool], Program] = {}

    @cached_property
    def verified_runs(self) -> tuple[Program, ...]:
        """Return verified runs from the first batch and from steady state, which contain every step that the pipeline repeats.

        Raises:
            ProgramError: the verification fails.
        """
        steady = self._plan.flush_first + 2 * self._full
        runs = tuple(self._lower(start + steady + self._period, start, start, True) for start in (0, steady))
        for program in runs:
            simulate(program)
        return runs

    def program(self, since: int, batch: int, drain: bool) -> tuple[Program, int]:
        """Return the program of a step or drain at `batch`, `since` batches after the pipeline was empty, and the shift to run it with."""
        since, model_batch = self._modelled(since, batch)
        name = since, model_batch, drain
        if name not in self._programs:
            stop = model_batch if drain else model_batch + 1
            self._programs[name] = self._lower(stop, model_batch, model_batch - since, drain)
        return self._programs[name], batch - model_batch

    def common_version(self, since: int, batch: int) -> int | None:
        """Return the newest weights, by their number of batches, that all workers hold before `batch`, or None."""
        if since == 0:
            return batch
        since, model_batch = self._modelled(since, batch)
        versions = self._lower(model_batch, model_batch, model_batch - since, False).versions
        rates = [self._plan.updates_per_batch(s) for s, _ in self._plan.workers]
        version = min(newest // rate for (_, newest), rate in zip(versions, rates, strict=True))
        if any(version * rate < oldest for (oldest, _), rate in zip(versions, rates, strict=True)):
            return None
        return version + batch - model_batch

    @property
    def in_flight(self) -> int:
        """The number of batches, with the newest, of which a microbatch may be computed in a step."""
        return self._full + 1

    @cached_property
    def _full(self) -> int:
        return batches_until_full(self._plan) - self._plan.flush_first

    @property
    def _period(self) -> int:
        return SCHEDULES[self._plan.schedule].period(self._plan)

    def _modelled(self, since: int, batch: int) -> tuple[int, int]:
        """Return the earliest batch of a run where the pipeline does the same."""
        if batch < self._flushed:
            return 0, 0
        batch, steady = batch - self._flushed, 2 * self._full
        return min(since, self._full), self._plan.flush_first + (batch if batch < steady else steady + (batch - steady) % self._period)

    def _lower(self, stop: int, begin: int, start: int, drain: bool) -> Program:
        return lower(self._plan, stop, begin=begin, start=start, drain=drain, global_norm=self._global_norm, shared=self.shared)
