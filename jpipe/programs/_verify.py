"""Verify the instructions of each worker: their order, the versions they read, buffers, and the batch of each update."""

from collections.abc import Callable
from typing import Any, NoReturn

from jpipe.plan import Plan
from jpipe.programs._global_norm import last_microbatch
from jpipe.programs._instructions import (
    AllReduce,
    Backward,
    Forward,
    ForwardBackward,
    Instruction,
    Load,
    Program,
    Receive,
    Release,
    Send,
    SumSquares,
    Update,
)
from jpipe.programs._walk import Violation
from jpipe.schedules import SCHEDULES


def versions_before(plan: Plan, worker: int, batch: int) -> set[int]:
    """The weight versions of a worker where the pipeline is empty before `batch`: from the next one that is read to the newest."""
    s, replica = plan.workers[worker]
    oldest = SCHEDULES[plan.schedule].version(plan, s, batch * plan.microbatches + replica)
    return set(range(oldest, batch * plan.updates_per_batch(s) + 1))


class Verifier:
    """Checks the instructions of one worker, independently of `lower`.

    Args:
        program: of all workers.
        number: of the worker.
    """

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._plan, self._number = program, program.plan, number
        self._schedule = SCHEDULES[self._plan.schedule]
        self._stage, replica = self._plan.workers[number]
        self._first, self._last = self._stage == 0, self._stage == self._plan.depth - 1
        self._replicas, self._every = self._plan.replicas[self._stage], self._plan.microbatches_per_update(self._stage)
        self._computations = self._schedule.computations(self._plan, self._stage, replica, program.start, program.end)
        self._most_versions = self._schedule.versions_alive(self._plan, self._stage)
        self._versions = versions_before(self._plan, number, program.start)
        self._buffers: set[tuple[str, int]] = set()  # (kind, microbatch or batch)
        self._accumulated = 0  # backwards of the batch that is being accumulated
        self._sets_aside = program.sets_aside[self._stage]
        self._norms: set[int] = set()  # that the worker has, by the last microbatch of their batch

    def check(self, i: Instruction) -> None:
        """Check the worker's next instruction.

        Raises:
            Violation: it breaks a rule.
        """
        _CHECKS[type(i)](self, i)

    def check_end(self) -> None:
        """Check what is left after the last instruction.

        Raises:
            Violation: a computation is missing, or buffers or versions are left.
        """
        for computation in self._computations:
            self._fail(f"the program ends before {computation}")
        if self._buffers:
            self._fail(f"left behind: {sorted(self._buffers)}")
        needed = versions_before(self._plan, self._number, self._program.end)
        if self._versions != needed:
            self._fail(f"versions {sorted(self._versions)} are left, expected {sorted(needed)}")

    # Instructions ------------------------------------------------------------------------------------------------------

    def _load(self, i: Load) -> None:
        self._put(i.data, i.microbatch)

    def _forward(self, i: Forward) -> None:
        self._take_inputs(i.microbatch)
        self._compute("F", i)
        self._put("residuals", i.microbatch)
        self._put("message" if self._last else "output", i.microbatch)

    def _backward(self, i: Backward) -> None:
        self._take("residuals", i.microbatch)
        self._take("message", i.microbatch)
        self._compute("B", i)
        self._accumulate(i)

    def _forward_backward(self, i: ForwardBackward) -> None:
        self._take_inputs(i.microbatch)
        self._compute("FB", i)
        self._accumulate(i)

    def _send(self, i: Send) -> None:
        if i.message == "norm":
            self._need_norm(i.microbatch)
        else:
            self._take(_SENT[i.message], i.microbatch)

    def _receive(self, i: Receive) -> None:
        if i.message == "norm":
            self._norms.add(i.microbatch)
        else:
            self._put(_RECEIVED[i.message], i.microbatch)

    def _all_reduce(self, i: AllReduce) -> None:
        self._take("sums", i.batch)
        self._put("summed", i.batch)

    def _sum_squares(self, i: SumSquares) -> None:
        if self._sets_aside:
            self._put(self._aside_as, self._take(self._aside_as, i.batch))  # for the update
        else:
            self._take_sum(i.batch)
        k = last_microbatch(self._plan, i.batch)
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
        self._take_sum(i.batch)
        if not self._sets_aside:
            self._accumulated = 0
        if self._program.global_norm:
            k = last_microbatch(self._plan, i.batch)
            self._need_norm(k)
            self._norms = {known for known in self._norms if known >= k}
        if i.retires is not None:
            self._free(i.retires, i)
        self._versions.add(i.batch + 1)
        if len(self._versions) > self._most_versions:
            self._fail(f"{i} leaves versions {sorted(self._versions)} alive, expected at most {self._most_versions}")

    def _release(self, i: Release) -> None:
        self._free(i.version, i)

    # Rules -------------------------------------------------------------------------------------------------------------

    def _compute(self, op: str, i: Forward | Backward | ForwardBackward) -> None:
        k = i.microbatch
        expected = next(self._computations, None)
        if expected != (op, self._stage, k):
            self._fail(f"{i}: the schedule's next computation is {expected}")
        version = self._schedule.version(self._plan, self._stage, k)
        if i.version != version:
            self._fail(f"{i} reads version {i.version}, the formula says {version}")
        if version not in self._versions:
            self._fail(f"{i} reads version {version}, alive are {sorted(self._versions)}")

    def _accumulate(self, i: Backward | ForwardBackward) -> None:
        """Count the gradients of a microbatch; those of a whole batch may be set aside until its update."""
        if not self._first:
            self._put("gradient", i.microbatch)
        self._accumulated += 1
        expected = self._every // self._replicas
        if self._sets_aside and (i.microbatch // self._replicas + 1) % expected == 0:
            if self._accumulated != expected:
                self._fail(f"{i} ends a batch after {self._accumulated} backwards, expected {expected}")
            self._accumulated = 0
            self._put("sums", i.microbatch // self._every)

    def _take_inputs(self, k: int) -> None:
        self._take("inputs", k)
        if self._last:
            self._take("labels", k)

    def _take_sum(self, batch: int) -> None:
        """Take the gradients of a whole batch, summed over all replicas."""
        if self._sets_aside:
            self._take(self._aside_as, batch)
        elif self._accumulated != self._every:
            self._fail(f"update {batch} after {self._accumulated} backwards, expected {self._every}")

    @property
    def _aside_as(self) -> str:
        """The kind of buffer in which the gradients of a whole batch wait for its update."""
        return "summed" if self._replicas > 1 else "sums"

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

    def _fail(self, what: str) -> NoReturn:
        raise Violation.at(self._plan, self._number, what)


_SENT = {"activation": "output", "gradient": "gradient", "squares": "squares"}
_RECEIVED = {"activation": "inputs", "gradient": "message", "squares": "later squares"}

_CHECKS: dict[type, Callable[[Verifier, Any], None]] = {
    Load: Verifier._load,
    Forward: Verifier._forward,
    Backward: Verifier._backward,
    ForwardBackward: Verifier._forward_backward,
    Send: Verifier._send,
    Receive: Verifier._receive,
    AllReduce: Verifier._all_reduce,
    SumSquares: Verifier._sum_squares,
    Update: Verifier._update,
    Release: Verifier._release,
}
