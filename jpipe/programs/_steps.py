"""The few programs that a pipeline repeats in a run of any length, and the weight versions that all workers hold between steps."""

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import Any

from jpipe._frozen import NOTHING, FrozenMapping
from jpipe.capabilities.protocol import hooks
from jpipe.capabilities.registry import programs_of
from jpipe.plan import Plan
from jpipe.programs._instructions import Instruction, Program, joined
from jpipe.programs._simulate import verify
from jpipe.programs.lowering import Run, batches_until_full
from jpipe.schedules import SCHEDULES

MOST_VERIFIED = 200_000
"""The most instructions that a process lowers and verifies for all workers, in about 2 seconds; of more, only its own workers'."""


class Steps:
    """The programs of single steps. Once the pipeline is full, all steps run the same program, with batches that are shifted.

    If the order of the schedule repeats only after several batches, several programs are run in turn. Under a schedule that flushes, all
    steps run one program.

    The batches that are flushed first also share one program: the program of the first batch of a plan that flushes only this batch.

    If a capability acts only in some steps, the verified programs have its instructions in all steps, and a step leaves out those that are
    not due, which only removes waits. So there are fewer programs than different steps.

    Args:
        plan: the plan that runs.
        uses: as in `Program`.
        workers: the workers with instructions in the programs; None: all.
    """

    def __init__(self, plan: Plan, uses: FrozenMapping[Any] = NOTHING, workers: Collection[int] | None = None) -> None:
        self.uses, self._given, self._flushed = uses, plan, plan.flush_first
        plan, used = plan.counted, programs_of(plan, uses)
        for modelled in hooks("modelled", used):
            plan = modelled(plan)
        self._plan = plan.model_copy(update={"flush_first": min(plan.flush_first, 1)})
        self._due = {kind: each.due for each in used if each.due is not None for kind in each.instructions}
        everyone = frozenset(range(len(plan.workers)))
        self._workers = None if workers is None or everyone <= set(workers) else frozenset(workers)
        self._chosen = {everyone: self} if self._workers is None else {}
        self._flushes = SCHEDULES[plan.schedule].flushes
        self._runs: dict[int, Run] = {}  # by the batch before which the pipeline is empty
        self._parts: dict[tuple[int, int, bool], Program] = {}  # by this batch, the batches since, and whether it is a drain
        self._programs: dict[tuple[int, int, bool], Program] = {}  # the same with only these workers
        # The same with only the due instructions of capabilities, by these instructions.
        self._programs_due: dict[tuple[tuple[int, int, bool], tuple[Instruction | None, ...]], Program] = {}

    def of(self, workers: Collection[int]) -> "Steps":
        """Return the programs of some workers, for example the workers of a process."""
        chosen = frozenset(workers)
        if chosen not in self._chosen:
            self._chosen[chosen] = Steps(self._given, self.uses, chosen)
        return self._chosen[chosen]

    @cached_property
    def verified_runs(self) -> tuple[Program, ...]:
        """Return verified runs, from the first batch and from a batch in steady state. They contain all steps that the pipeline repeats.

        A process verifies the instructions of all workers or, if there are more than `MOST_VERIFIED`, only of its own workers; `verify`
        says what that leaves out.

        Raises:
            ProgramError: the verification fails.
        """
        first = self._plan.flush_first
        runs = []
        for start in (0,) if self._flushes else (first, first + self._steady):
            parts = [self._part(start, since, False) for since in range(self._distinct(start))]
            if not self._flushes:
                parts.append(self._part(start, self._distinct(start), True))
            if start == first == 1:
                parts = [self._part(0, 0, False), *parts]
            verify(run := joined(parts))
            runs.append(self._of_workers(run))
        return tuple(runs)

    def program(self, since: int, batch: int, drain: bool) -> tuple[Program, int]:
        """Return the program of a step or drain at `batch`, `since` batches after an empty pipeline, and its shift in batches."""
        start, model_since = self._modelled(since, batch, drain)
        name = start, model_since, drain
        if name not in self._programs:
            self._programs[name] = self._of_workers(self._part(*name))
        shift = batch - start - model_since
        return self._with_due(name, shift) if self._due else self._programs[name], shift

    @property
    def steady(self) -> Program:
        """The program of a step in steady state."""
        since = self._distinct(self._plan.flush_first)
        return self.program(since, since + self._flushed, False)[0]

    def _with_due(self, name: tuple[int, int, bool], shift: int) -> Program:
        """Return a program with only those instructions of capabilities that are due when it is shifted by `shift` batches."""
        program = self._programs[name]
        chosen: dict[Instruction, Instruction | None] = {
            i: self._due[type(i)](self._given, i, shift) for i in program.instructions if type(i) in self._due
        }
        key = name, tuple(chosen.values())
        if key not in self._programs_due:
            kept = tuple(new for i in program.instructions if (new := chosen.get(i, i)) is not None)
            self._programs_due[key] = replace(program, instructions=kept)
        return self._programs_due[key]

    def common_version(self, since: int, batch: int) -> int | None:
        """Return the newest version of the weights that all workers hold before `batch`, as a number of batches; None if there is none."""
        if since == 0:
            return batch
        start, model_since = self._modelled(since, batch, True)
        versions = self._part(start, model_since - 1, False).versions
        rates = [self._plan.updates_per_batch(s) for s, _ in self._plan.workers]
        version = min(newest // rate for (_, newest), rate in zip(versions, rates, strict=True))
        if any(version * rate < oldest for (oldest, _), rate in zip(versions, rates, strict=True)):
            return None
        return version + batch - start - model_since

    @property
    def in_flight(self) -> int:
        """The largest number of batches in flight during a step, including the new batch."""
        return self._full + 1

    @cached_property
    def _full(self) -> int:
        return batches_until_full(self._plan) - self._plan.flush_first

    @property
    def _steady(self) -> int:
        """The batch, not counting batches that are flushed first, from which on all runs from an empty pipeline are the same."""
        return 2 * self._full

    @cached_property
    def _period(self) -> int:
        return SCHEDULES[self._plan.schedule].period(self._plan)

    def _distinct(self, start: int) -> int:
        """Return how many steps of a run from batch `start` are different; the last `_period` of them repeat."""
        if self._flushes or start < self._plan.flush_first:
            return 1
        return max(self._full, self._steady - (start - self._plan.flush_first)) + self._period

    def _modelled(self, since: int, batch: int, drain: bool) -> tuple[int, int]:
        """Return a run to take the program from: an early batch with an empty pipeline, and the number of batches since then."""
        if self._flushes or batch < self._flushed:
            return 0, 0
        period, start = self._period, batch - since - self._flushed
        start = self._plan.flush_first + (start if start < self._steady else self._steady + (start - self._steady) % period)
        repeated = self._distinct(start) - period + drain
        return start, since if since < repeated else repeated + (since - repeated) % period

    def _part(self, start: int, since: int, drain: bool) -> Program:
        """Return the program of a step or a drain; it has all workers if there are few instructions."""
        name = start, since, drain
        if name not in self._parts:
            if not drain:
                if start not in self._runs:
                    self._runs[start] = self._run(start)
                run = self._runs[start]
                for step in range(run.end - start, since + 1):
                    self._parts[start, step, False] = run.program(start + step + 1, False)
            elif since == self._distinct(start) and (start, since - 1, False) in self._parts and start in self._runs:
                self._parts[name] = self._runs.pop(start).program(start + since, True)  # no other step follows
            else:
                run = self._run(start)
                run.go_on(start + since, False)
                self._parts[name] = run.program(start + since, True)
        return self._parts[name]

    def _run(self, start: int) -> Run:
        plan, batches = self._plan, 1 if self._flushes else self._plan.flush_first + self._steady + self._full + 2 * self._period
        # 6 instructions per microbatch and stage: loads, computations and transfers
        few = 6 * batches * plan.microbatches * plan.depth <= MOST_VERIFIED
        return Run(plan, start, start + self._distinct(start), self.uses, None if few else self._workers)

    def _of_workers(self, program: Program) -> Program:
        return program if self._workers == program.workers else program.of(self._workers or ())
