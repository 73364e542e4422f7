"""Verify the instructions of each worker: their order, the versions they read, buffers, and the batch of each update."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from jpipe.ops import Reads
from jpipe.plan import Kept, Plan
from jpipe.programs._execution_order import Violation
from jpipe.programs._global_norm import last_microbatch
from jpipe.programs._instructions import (
    AddShared,
    Agree,
    AllReduce,
    Compute,
    Fetch,
    Instruction,
    Load,
    Offload,
    Program,
    Receive,
    Release,
    Send,
    SumChanges,
    SumSquares,
    TakeShared,
    Update,
    ends_update,
    op_of,
    parts_of,
)
from jpipe.schedules import SCHEDULES, Action


def rank_computations(program: Program) -> list[Iterator[Action]]:
    """Return for each rank the computations of its schedule in the batches of the program."""
    plan = program.plan
    schedule = SCHEDULES[plan.schedule]
    return [schedule.computations(plan, p, replica, program.start, program.end) for p, replica in plan.rank_positions]


def versions_before(plan: Plan, worker: int, batch: int) -> set[int]:
    """Return the weight versions of a worker where the pipeline is empty before `batch`: from the next to be read to the newest."""
    s, replica = plan.workers[worker]
    oldest = SCHEDULES[plan.schedule].version(plan, s, batch * plan.microbatches + replica)
    return set(range(oldest, batch * plan.updates_per_batch(s) + 1))


class Verifier:
    """A check of the instructions of one worker, independent of `lower`.

    Args:
        program: the program of all workers.
        number: the number of the worker.
        computations: the computations of its rank, in order; the workers of a rank share this iterator.
    """

    def __init__(self, program: Program, number: int, computations: Iterator[Action]) -> None:
        self._program, self._plan, self._number = program, program.plan, number
        self._schedule = SCHEDULES[self._plan.schedule]
        self._stage, _ = self._plan.workers[number]
        self._first, self._last = self._stage == 0, self._stage == self._plan.depth - 1
        self._replicas, self._every = self._plan.replicas[self._stage], self._plan.microbatches_per_update(self._stage)
        self._computations = computations
        self._most_versions = self._schedule.versions_alive(self._plan, self._stage)
        self._versions = versions_before(self._plan, number, program.start)
        self._buffers: set[tuple[str, int]] = self._changes_under_way(program.start)  # (kind, microbatch or batch)
        self._accumulated = 0  # backwards of the batch that is being accumulated
        self._unfinished: list[Compute] = []  # the remaining parts of the last computation, in order
        self._sets_aside = program.sets_aside[self._stage]
        shares = self._plan.shard_optimizer and self._replicas > 1
        self._other_replicas = (
            set(self._plan.stage_workers[self._stage]) - {number} if shares else set[int]()
        )  # that update the other weights
        self._missing: dict[int, set[int]] = {}  # by version the replicas whose weights it lacks
        self._norms: set[int] = set()  # that the worker has, by the last microbatch of their batch
        # What waits in host memory, and its number.
        self._away: set[tuple[Kept, int]] = {_OPTIMIZER} if self._plan.offloads("optimizer", self._stage) else set()
        # Updates whose versions nothing may read yet: an agreement has to begin after them, or to be applied.
        self._to_begin, self._to_apply = set[int](), set[int]()

    def check(self, i: Instruction) -> None:
        """Check the worker's next instruction.

        Raises:
            Violation: it breaks a rule.
        """
        _CHECKS[type(i)](self, i)

    def check_end(self) -> None:
        """Check the state after the last instruction.

        Raises:
            Violation: a computation is missing, or buffers or versions are left.
        """
        for computation in self._computations:
            self._fail(f"the program ends before {computation}")
        if self._unfinished:
            self._fail(f"the program ends before {self._unfinished[0]}")
        if self._buffers != (under_way := self._changes_under_way(self._program.end)):
            expected = f", expected {sorted(under_way)}" if under_way else ""
            self._fail(f"left behind: {sorted(self._buffers) or 'no buffers'}{expected}")
        needed = versions_before(self._plan, self._number, self._program.end)
        if self._versions != needed:
            self._fail(f"versions {sorted(self._versions)} are left, expected {sorted(needed)}")
        for version in sorted(self._versions):
            self._check_whole(version, "the end")
        away = {_OPTIMIZER} if self._plan.offloads("optimizer", self._stage) else set[tuple[Kept, int]]()
        if self._away != away:
            self._fail(f"{sorted(self._away)} are left in host memory, expected {sorted(away)}")

    # Instructions ------------------------------------------------------------------------------------------------------

    def _load(self, i: Load) -> None:
        self._put(i.data, i.microbatch)

    def _compute(self, i: Compute) -> None:
        op, k = op_of(i, self._plan), i.microbatch
        if op.reads != "inputs":
            self._need((op.reads, k), i)
        for kind in self._kinds_read(op.reads):
            self._take(kind, k)
        self._check_order_and_version(i)
        for kind in op.leaves:
            if kind == "accumulators":
                self._accumulate(i)
            elif kind == "output":
                self._put("message" if self._last else "output", k)
            elif kind in ("residuals", "stash") or (kind == "gradient" and not self._first):
                self._put(kind, k)

    def _send(self, i: Send) -> None:
        if i.message == "norm":
            self._need_norm(i.microbatch)
        elif i.message == "shared":
            self._put("shared", self._take("shared", i.microbatch))  # for other sends, until the update
        elif i.message == "weights":
            self._updated_with(i)
        else:
            self._check_other(i, i.to, -1 if i.message == "gradient" else 1)
            self._take(_SENT[i.message], i.microbatch)

    def _receive(self, i: Receive) -> None:
        if i.message == "norm":
            self._norms.add(i.microbatch)
        elif i.message == "shared":
            self._put(f"shared of stage {self._plan.workers[i.source][0]}", i.microbatch)
        elif i.message == "weights":
            missing = self._missing.get(version := self._updated_with(i), set())
            if i.source not in missing:
                self._fail(f"{i}: version {version} does not lack what that worker updates")
            missing.remove(i.source)
        else:
            self._check_other(i, i.source, 1 if i.message == "gradient" else -1)
            self._put(_RECEIVED[i.message], i.microbatch)

    def _all_reduce(self, i: AllReduce) -> None:
        if not self._plan.sums_gradients(self._stage):
            self._fail(f"{i}: its replicas do not sum gradients")
        if i.part and (_of_part("summed", i.part - 1), i.batch) not in self._buffers:
            self._fail(f"{i} before the sum of part {i.part - 1}: all replicas sum the parts in order")
        self._take(_of_part("sums", i.part), i.batch)
        self._put(_of_part("summed", i.part), i.batch)

    def _take_shared(self, i: TakeShared) -> None:
        self._look_at_sum(i.batch)
        self._put("shared", last_microbatch(self._plan, i.batch))

    def _add_shared(self, i: AddShared) -> None:
        self._look_at_sum(i.batch)
        k, stages = last_microbatch(self._plan, i.batch), self._program.shared[i.group]
        if self._stage not in stages:
            self._fail(f"{i}: stage {self._stage} does not hold it, stages {list(stages)} do")
        for kind in ("shared", *(f"shared of stage {s}" for s in stages if s != self._stage)):
            self._put(kind, self._take(kind, k))  # for other groups, until the update
        self._put(f"group {i.group} added", k)

    def _sum_squares(self, i: SumSquares) -> None:
        self._look_at_sum(i.batch)
        k = last_microbatch(self._plan, i.batch)
        for group, stages in enumerate(self._program.shared):
            if stages[0] == self._stage:  # the only one whose norm has them
                self._put(f"group {group} added", self._take(f"group {group} added", k))
        if not self._last:
            self._take("later squares", k)
        if self._first:
            self._norms.add(k)
        else:
            self._put("squares", k)

    def _update(self, i: Update) -> None:
        latest = max(self._versions, default=None)
        if i.batch != latest:
            self._fail(f"{i} at version {latest}, expected version {i.batch}")
        self._check_whole(i.batch, i)
        self._take_sum(i.batch)
        if not self._sets_aside:
            self._accumulated = 0
        self._take_all_shared(last_microbatch(self._plan, i.batch))
        if self._program.global_norm:
            k = last_microbatch(self._plan, i.batch)
            self._need_norm(k)
            self._norms = {known for known in self._norms if known >= k}
        self._need(_OPTIMIZER, i)
        self._need(("versions", i.batch), i)
        if i.retires is not None:
            self._need(("versions", i.retires), i)
            self._free(i.retires, i)
        self._versions.add(i.batch + 1)
        self._missing[i.batch + 1] = set(self._other_replicas)
        if self._plan.agrees(self._stage, i.batch):
            self._to_begin.add(i.batch)
        if self._plan.agreement_applied(self._stage, i.batch) is not None:
            self._to_apply.add(i.batch)
        if len(self._versions) > self._most_versions:
            self._fail(f"{i} leaves versions {sorted(self._versions)} alive, expected at most {self._most_versions}")

    def _sum_changes(self, i: SumChanges) -> None:
        if i.batch not in self._to_begin:
            self._fail(f"{i}: no agreement begins after update {i.batch}: expected {_one_of(self._to_begin)}")
        self._put("changes", i.batch)
        self._to_begin.remove(i.batch)

    def _agree(self, i: Agree) -> None:
        if i.batch not in self._to_apply:
            self._fail(f"{i}: no agreement is to be applied after update {i.batch}: expected {_one_of(self._to_apply)}")
        if i.begun != (begun := self._plan.agreement_applied(self._stage, i.batch)):
            self._fail(f"{i}: expected the agreement that has begun with update {begun}")
        self._take("changes", i.begun)
        self._to_apply.remove(i.batch)

    def _release(self, i: Release) -> None:
        self._free(i.version, i)

    def _offload(self, i: Offload) -> None:
        self._check_kept(i)
        if (i.what, i.number) in self._away:
            self._fail(f"{i}: it is in host memory already")
        self._away.add((i.what, i.number))

    def _fetch(self, i: Fetch) -> None:
        self._check_kept(i)
        if (i.what, i.number) not in self._away:
            self._fail(f"{i}: it is not in host memory")
        self._away.remove((i.what, i.number))

    # Rules -------------------------------------------------------------------------------------------------------------

    def _kinds_read(self, reads: Reads) -> tuple[str, ...]:
        """Return the kinds of buffers that an op reads and frees."""
        if reads == "inputs":
            return ("inputs", "labels") if self._last else ("inputs",)
        return ("residuals", "message") if reads == "residuals" else ("stash",)

    def _check_order_and_version(self, i: Compute) -> None:
        k = i.microbatch
        if not self._unfinished:
            expected = next(self._computations, None)
            if expected != (i.op, self._stage, k):
                self._fail(f"{i}: the schedule's next computation is {expected}")
            self._unfinished = [i if part == i.part else replace(i, part=part) for part in parts_of(i.op, self._plan, self._stage, k)]
        if i != (following := self._unfinished.pop(0)):
            self._fail(f"{i}: the next part is {following}")
        version = self._schedule.version(self._plan, self._stage, k)
        if i.version != version:
            self._fail(f"{i} reads version {i.version}, the formula says {version}")
        if version not in self._versions:
            self._fail(f"{i} reads version {version}, alive are {sorted(self._versions)}")
        self._check_whole(version, i)
        self._need(("versions", version), i)

    def _changes_under_way(self, batch: int) -> set[tuple[str, int]]:
        """Return the buffer with the changes of an agreement that has begun before a batch and is applied later, if there is one."""
        begun = self._plan.agreement_under_way(self._stage, batch * self._plan.updates_per_batch(self._stage))
        return set() if begun is None else {("changes", begun)}

    def _check_kept(self, i: Offload | Fetch) -> None:
        """Check that something is what the plan moves, and that it exists."""
        if not self._plan.offloads(i.what, self._stage):
            self._fail(f"{i}: the plan keeps the {i.what} of stage {self._stage} on the device")
        if i.what == "versions" and i.number not in self._versions:
            self._fail(f"{i}: alive are versions {sorted(self._versions)}")
        if i.what in ("residuals", "stash") and (i.what, i.number) not in self._buffers:
            self._fail(f"{i}: it is not there")

    def _need(self, kept: tuple[Kept, int], i: Instruction) -> None:
        """Check that something that an instruction reads is on the device."""
        if kept in self._away:
            what, number = kept
            self._fail(f"{i}: it needs {what} {number}, in host memory: fetch it before")

    def _check_other(self, i: Send | Receive, other: int, step: int) -> None:
        """Check that an output or a gradient goes from or to the worker that runs its microbatch `step` stages on."""
        s = self._stage + step
        if i.message != "squares" and (not 0 <= s < self._plan.depth or other != self._plan.worker(s, i.microbatch)):
            self._fail(f"{i}: worker {other} does not run microbatch {i.microbatch} at stage {s}")

    def _check_whole(self, version: int, where: object) -> None:
        """Check that a version has the weights of all replicas that update some of them, and that the pipelines have agreed on it."""
        if version - 1 in self._to_begin | self._to_apply:
            self._fail(f"{where}: the pipelines have not agreed on version {version}")
        if missing := self._missing.get(version):
            self._fail(f"{where}: version {version} lacks the weights that workers {sorted(missing)} have updated")

    def _updated_with(self, i: Send | Receive) -> int:
        """Return the version whose weights a message has; the worker itself has updated its part."""
        version = i.microbatch // self._every + 1
        if version not in self._versions:
            self._fail(f"{i} before version {version} is there, alive are {sorted(self._versions)}")
        return version

    def _accumulate(self, i: Compute) -> None:
        """Count the gradients of a microbatch; those of a whole batch may be set aside until its update."""
        if not self._unfinished:
            self._accumulated += 1
        if not self._sets_aside or not ends_update(self._plan, self._stage, i.microbatch):
            return
        expected = self._every // self._replicas
        if not self._unfinished:
            if self._accumulated != expected:
                self._fail(f"{i} ends a batch after {self._accumulated} backwards, expected {expected}")
            self._accumulated = 0
        self._put(_of_part("sums", i.part), i.microbatch // self._every)

    def _take_sum(self, batch: int) -> None:
        """Take the gradients of a whole batch, summed over all replicas."""
        if self._sets_aside:
            for kind in self._aside_as:
                self._take(kind, batch)
        elif self._accumulated != (expected := self._every // self._replicas):
            self._fail(f"update {batch} after {self._accumulated} backwards, expected {expected}")

    def _look_at_sum(self, batch: int) -> None:
        """Check that the gradients of a whole batch are there, and leave them to the update."""
        if self._sets_aside:
            for kind in self._aside_as:
                self._put(kind, self._take(kind, batch))
        else:
            self._take_sum(batch)

    def _take_all_shared(self, k: int) -> None:
        """Take the shared gradients of an update: of its stage, of all other stages, and their sums."""
        groups = {group: stages for group, stages in enumerate(self._program.shared) if self._stage in stages}
        if groups:
            self._take("shared", k)
        for s in sorted({s for stages in groups.values() for s in stages} - {self._stage}):
            self._take(f"shared of stage {s}", k)
        for group in groups:
            self._take(f"group {group} added", k)

    @property
    def _aside_as(self) -> list[str]:
        """The kinds of buffers in which the gradients of a whole batch wait for its update."""
        parts = [*range(len(self._plan.stages[self._stage].sum_parts))] or [None]
        return [_of_part("summed" if self._plan.sums_gradients(self._stage) else "sums", part) for part in parts]

    def _need_norm(self, k: int) -> None:
        if k not in self._norms:
            self._fail(f"norm of microbatch {k} used before it was there")

    def _take(self, kind: str, k: int) -> int:
        if (kind, k) not in self._buffers:
            self._fail(f"{kind} of microbatch {k} used before it was there, or twice")
        self._buffers.remove((kind, k))
        return k

    def _put(self, kind: str, k: int) -> None:
        if (kind, k) in self._buffers:
            self._fail(f"{kind} of microbatch {k} made twice")
        self._buffers.add((kind, k))

    def _free(self, version: int, i: Instruction) -> None:
        if version not in self._versions:
            self._fail(f"{i} frees version {version}, alive are {sorted(self._versions)}")
        self._versions.remove(version)
        self._away.discard(("versions", version))
        self._missing.pop(version, None)

    def _fail(self, what: str) -> NoReturn:
        raise Violation.at(self._plan, self._number, what)


def _one_of(updates: set[int]) -> str:
    """Return what is expected in place of an instruction for a wrong update."""
    return f"one of update {', '.join(map(str, sorted(updates)))}" if updates else "none here"


def _of_part(kind: str, part: int | None) -> str:
    """Return the kind of buffer that holds one part of sums, or all of them."""
    return kind if part is None else f"{kind} of part {part}"


_OPTIMIZER: tuple[Kept, int] = "optimizer", 0

_SENT = {"activation": "output", "gradient": "gradient", "squares": "squares"}
_RECEIVED = {"activation": "inputs", "gradient": "message", "squares": "later squares"}

_CHECKS: dict[type, Callable[[Verifier, Any], None]] = {
    Load: Verifier._load,
    Compute: Verifier._compute,
    Send: Verifier._send,
    Receive: Verifier._receive,
    AllReduce: Verifier._all_reduce,
    TakeShared: Verifier._take_shared,
    AddShared: Verifier._add_shared,
    SumSquares: Verifier._sum_squares,
    Update: Verifier._update,
    SumChanges: Verifier._sum_changes,
    Agree: Verifier._agree,
    Release: Verifier._release,
    Offload: Verifier._offload,
    Fetch: Verifier._fetch,
}
