"""Verify the instructions of each worker: their order, the weight versions that they read, their buffers, and the batch of each update."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from jpipe.capabilities.protocol import hooks, made, merged
from jpipe.ops import OPS, Op
from jpipe.plan import Plan
from jpipe.programs._execution_order import Violation
from jpipe.programs._instructions import (
    AllReduce,
    Compute,
    Instruction,
    Load,
    Program,
    Receive,
    Release,
    Send,
    Update,
    ends_update,
)
from jpipe.schedules import SCHEDULES, Action


def rank_computations(program: Program) -> list[Iterator[Action]]:
    """Return for each rank the computations that its schedule has in the batches of the program."""
    plan = program.plan
    schedule = SCHEDULES[plan.schedule]
    return [schedule.computations(plan, p, replica, program.start, program.end) for p, replica in plan.rank_positions]


def versions_before(plan: Plan, worker: int, batch: int) -> set[int]:
    """Return the weight versions of a worker if the pipeline is empty before `batch`: from the next version to be read to the newest."""
    s, replica = plan.workers[worker]
    oldest = SCHEDULES[plan.schedule].version(plan, s, batch * plan.microbatches + replica * plan.row_slices)
    return set(range(oldest, batch * plan.updates_per_batch(s) + 1))


class Verifier:
    """A check of the instructions of one worker, independent of `lower`.

    Args:
        program: the program of all workers.
        number: the number of the worker.
        computations: the computations of its rank, in order; the workers of a rank share this iterator.

    Attributes:
        number: as given.
        plan, uses: the plan and the uses of the program.
        stage: the stage of the worker.
        versions: the weight versions that are alive.
        buffers: the other buffers that the worker holds, each as (kind, microbatch or batch).
    """

    def __init__(self, program: Program, number: int, computations: Iterator[Action]) -> None:
        self._program, self.plan, self.number = program, program.plan, number
        schedule, self.uses = SCHEDULES[self.plan.schedule], program.uses
        self._schedule = schedule
        self._version = schedule.version if self.plan.flush_first else schedule.formula
        self.stage, _ = self.plan.workers[number]
        first, last, workers = self.stage == 0, self.stage == self.plan.depth - 1, self.plan.stage_workers
        self._before, self._after = () if first else workers[self.stage - 1], () if last else workers[self.stage + 1]
        self._kinds_read = _KINDS_READ | ({"inputs": ("inputs", "labels")} if last else {})
        self._kinds_left = {"output": "message" if last else "output", "residuals": "residuals", "stash": "stash"}
        self._kinds_left |= {} if first else {"gradient": "gradient"}
        self._replicas, self._every = self.plan.replicas[self.stage], self.plan.microbatches_per_update(self.stage)
        self._computations = computations
        self._most_versions = schedule.versions_alive(self.plan, self.stage)
        self.versions = versions_before(self.plan, number, program.start)
        self.buffers = set[tuple[str, int]]()
        self._accumulated = 0  # the number of backwards in the accumulated gradients
        self._separates_sums = program.separates_sums[self.stage]
        verifications = made("verify", program.hooks, self)
        self._added, self._sends, self._receives = (merged(name, verifications) for name in ("checks", "sends", "receives"))
        self._needs, self._updated, self._complete = (hooks(name, verifications) for name in ("needs", "updated", "complete"))
        self._whole, self._held, self._freed, self._end = (hooks(name, verifications) for name in ("whole", "held", "freed", "end"))
        self.buffers |= self._held_before(program.start)

    def check(self, i: Instruction) -> None:
        """Check the worker's next instruction."""
        if (added := self._added.get(type(i))) is not None:
            added(i)
        else:
            _CHECKS.get(type(i), Verifier._fail_unused)(self, i)

    def check_end(self) -> None:
        """Check what the worker holds after the last instruction."""
        for computation in self._computations:
            self.fail(f"the program ends before {computation}")
        if self.buffers != (held := self._held_before(self._program.end)):
            expected = f", expected {sorted(held)}" if held else ""
            self.fail(f"left behind: {sorted(self.buffers) or 'no buffers'}{expected}")
        needed = versions_before(self.plan, self.number, self._program.end)
        if self.versions != needed:
            self.fail(f"versions {sorted(self.versions)} are left, expected {sorted(needed)}")
        for version in sorted(self.versions):
            self.check_whole(version, "the end")
        for hook in self._end:
            hook()

    # Instructions ------------------------------------------------------------------------------------------------------

    def _load(self, i: Load) -> None:
        self.put(i.data, i.microbatch)

    def compute(self, i: Compute) -> None:
        """Check a computation, which must be the next computation of its rank."""
        op = OPS[i.op]
        self.read(i, op)
        self.check_next(i)
        self.check_version(i)
        self.leave(i, op)

    def read(self, i: Compute, op: Op) -> None:
        """Remove the buffers that an op reads; they must be there."""
        if op.reads != "inputs":
            self.need(op.reads, i.microbatch, i)
        for kind in self._kinds_read[op.reads]:
            self.take(kind, i.microbatch)

    def leave(self, i: Compute, op: Op) -> None:
        """Add the buffers that an op leaves."""
        for kind in op.leaves:
            if kind == "accumulators":
                self._accumulate(i)
            elif (left := self._kinds_left.get(kind)) is not None:
                self.put(left, i.microbatch)

    def _send(self, i: Send) -> None:
        if i.message == "activation":
            self._check_other(i, i.to, self._after, 1)
            self.take("output", i.microbatch)
        elif i.message == "gradient":
            self._check_other(i, i.to, self._before, -1)
            self.take("gradient", i.microbatch)
        else:
            self._sends.get(i.message, self._fail_unused)(i)

    def _receive(self, i: Receive) -> None:
        if i.message == "activation":
            self._check_other(i, i.source, self._before, -1)
            self.put("inputs", i.microbatch)
        elif i.message == "gradient":
            self._check_other(i, i.source, self._after, 1)
            self.put("message", i.microbatch)
        else:
            self._receives.get(i.message, self._fail_unused)(i)

    def all_reduce(self, i: AllReduce) -> None:
        """Check the beginning of a sum of gradients."""
        if not self.plan.sums_gradients(self.stage):
            self.fail(f"{i}: its replicas do not sum gradients")
        self.take("sums", i.batch)
        self.put("summed", i.batch)

    def _update(self, i: Update) -> None:
        latest = max(self.versions, default=None)
        if i.batch != latest:
            self.fail(f"{i} at version {latest}, expected version {i.batch}")
        self.check_whole(i.batch, i)
        self._take_sum(i.batch)
        if not self._separates_sums:
            self._accumulated = 0
        self.need("optimizer", 0, i)
        self.need("versions", i.batch, i)
        if i.retires is not None:
            self.need("versions", i.retires, i)
            self._free(i.retires, i)
        self.versions.add(i.batch + 1)
        for hook in self._updated:
            hook(i)
        if len(self.versions) > self._most_versions:
            self.fail(f"{i} leaves versions {sorted(self.versions)} alive, expected at most {self._most_versions}")

    def _release(self, i: Release) -> None:
        self._free(i.version, i)

    # Rules -------------------------------------------------------------------------------------------------------------

    def check_next(self, i: Compute) -> None:
        """Check that a computation is the next one in the schedule."""
        expected = next(self._computations, None)
        if expected != (i.op, self.stage, i.microbatch):
            self.fail(f"{i}: the schedule's next computation is {expected}")

    def check_version(self, i: Compute) -> None:
        """Check that a computation reads the version given by the schedule's formula, and that this version is alive."""
        of_op = self._version if OPS[i.op].begins or self.plan.stash else self._schedule.backward_version
        version = of_op(self.plan, self.stage, i.microbatch)
        if i.version != version:
            self.fail(f"{i} reads version {i.version}, the formula says {version}")
        if version not in self.versions:
            self.fail(f"{i} reads version {version}, but the stage has {sorted(self.versions)}")
        self.check_whole(version, i)
        self.need("versions", version, i)

    def _held_before(self, batch: int) -> set[tuple[str, int]]:
        """Return the buffers that capabilities hold if the pipeline is empty before a batch."""
        return {buffer for hook in self._held for buffer in hook(batch)}

    def need(self, what: str, number: int, i: Instruction) -> None:
        """Check that an instruction can read these arrays where they are, for example on the device and not in host memory."""
        for hook in self._needs:
            hook(what, number, i)

    def _check_other(self, i: Send | Receive, other: int, workers: Sequence[int], step: int) -> None:
        """Check that the worker `other`, one of `workers` and `step` stages on, is the replica that runs the message's microbatch."""
        if not workers or other != workers[i.microbatch // self.plan.row_slices % len(workers)]:
            self.fail(f"{i}: worker {other} does not run microbatch {i.microbatch} at stage {self.stage + step}")

    def check_whole(self, version: int, where: object) -> None:
        """Check that a version of the weights is complete, for example has the shares of all replicas."""
        for hook in self._whole:
            hook(version, where)

    def _accumulate(self, i: Compute) -> None:
        """Count the gradients of a microbatch. Once they are complete, the gradients of a batch may be set aside until its update."""
        self._accumulated += 1
        if not self._separates_sums or not ends_update(self.plan, self.stage, i.microbatch):
            return
        expected = self._every // self._replicas
        if self._accumulated != expected:
            self.fail(f"{i} ends a batch after {self._accumulated} backwards, expected {expected}")
        self._accumulated = 0
        self.put("sums", i.microbatch // self._every)

    def _take_sum(self, batch: int) -> None:
        """Remove the gradients of a whole batch, which must be summed over all replicas."""
        if self._separates_sums:
            self.take(self._aside_as, batch)
        elif self._accumulated != (expected := self._every // self._replicas):
            self.fail(f"update {batch} after {self._accumulated} backwards, expected {expected}")

    def look_at_complete_sum(self, batch: int) -> None:
        """Check that the gradients of a whole batch exist, and are complete for all parameters that begin at this stage."""
        self.look_at_sum(batch)
        for hook in self._complete:
            hook(batch)

    def look_at_sum(self, batch: int) -> None:
        """Check that the gradients of a whole batch exist, and keep them for the update."""
        if self._separates_sums:
            self.look_at(self._aside_as, batch)
        else:
            self._take_sum(batch)

    @property
    def _aside_as(self) -> str:
        """The kind of buffer in which the gradients of a whole batch wait for its update."""
        return "summed" if self.plan.sums_gradients(self.stage) else "sums"

    def take(self, kind: str, k: int) -> int:
        """Remove a buffer, which must exist."""
        try:
            self.buffers.remove((kind, k))
        except KeyError:
            self.fail(f"{kind} of microbatch {k} used before it was made, or twice")
        return k

    def look_at(self, kind: str, k: int) -> None:
        """Check that a buffer exists, and keep it."""
        self.put(kind, self.take(kind, k))

    def put(self, kind: str, k: int) -> None:
        """Add a buffer, which must not exist yet."""
        buffer = kind, k
        if buffer in self.buffers:
            self.fail(f"{kind} of microbatch {k} made twice")
        self.buffers.add(buffer)

    def _free(self, version: int, i: Instruction) -> None:
        if version not in self.versions:
            self.fail(f"{i} frees version {version}, but the stage has {sorted(self.versions)}")
        self.versions.remove(version)
        for hook in self._freed:
            hook(version)

    def _fail_unused(self, i: Instruction) -> NoReturn:
        self.fail(f"{i}: the plan does not use the capability of this instruction")

    def fail(self, what: str) -> NoReturn:
        raise Violation.at(self.plan, self.number, what)


_KINDS_READ: dict[str, tuple[str, ...]] = {"inputs": ("inputs",), "residuals": ("residuals", "message"), "stash": ("stash",)}
"""The kinds of buffers that an op reads and frees, by `Op.reads`. At the last stage, an op that reads inputs also reads labels."""

_CHECKS: dict[type, Callable[[Verifier, Any], None]] = {
    Load: Verifier._load,
    Compute: Verifier.compute,
    Send: Verifier._send,
    Receive: Verifier._receive,
    AllReduce: Verifier.all_reduce,
    Update: Verifier._update,
    Release: Verifier._release,
}
