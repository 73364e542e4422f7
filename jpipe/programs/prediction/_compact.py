"""Programs in a compact form, of which many simulations with different costs take little time.

Instructions are numbers in tables: what a rank waits for is a place in one list of times, and its bytes are those of a few kinds of steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jpipe.ops import OPS
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
    op_of,
)
from jpipe.programs._verify import versions_before
from jpipe.programs.prediction._state import sum_name
from jpipe.schedules import SCHEDULES

COMPUTE, SEND, PASS, MAKE, SUM, UPDATE = range(6)
"""The kinds of actions; see `CompactRank.actions`."""

NOWHERE = -1
"""The place of what does not exist."""


class Kind(NamedTuple):
    """A kind of steps with the same bytes: what happens at a stage, and of which part of it, if that matters."""

    name: str
    stage: int
    part: int | None = None
    op: str = ""


class Computation(NamedTuple):
    """A computation: its number among those of equal length, and what a span says about it."""

    number: int
    op: str
    microbatch: int
    version: int
    chunk: int
    part: int | None


class CompactRank(NamedTuple):
    """The instructions of a rank.

    Attributes:
        actions: what takes time, in order. (COMPUTE, number of the computation, place that it waits for, place of what it makes); (SEND,
            place of what is sent, the message, 0); (PASS, place of a message, place for another worker of the rank, 0); (MAKE, 0, 0, place
            of what is made); (SUM, place of what is summed, number of the sum, 0); (UPDATE, stage, places of its sums, chunk).
        computations: what each COMPUTE is.
        kinds: the numbers of the kinds of steps that change the bytes, in order.
    """

    actions: list[tuple[int, Any, Any, Any]]
    computations: list[Computation]
    kinds: Any


class Message(NamedTuple):
    """A message; `order` decides between those that can begin at the same time."""

    order: tuple[object, ...]
    link: int
    place: int
    to: int


class Sum(NamedTuple):
    """A sum over the replicas of a stage; `order` decides between those that can begin at the same time."""

    order: tuple[object, ...]
    number: int
    link: int
    places: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Compact:
    """A program in compact form.

    Attributes:
        ranks: the instructions of each rank.
        places: the number of places for the times of messages, results and sums.
        computations: by number, the op, the stage and the part of computations.
        links: by number, the ranks, the message and the stage of its sender.
        sums: all sums.
        summed: by number, the stage and the part of what sums sum.
        kinds: by number.
        versions_alive: the most weight versions of each worker.
    """

    ranks: list[CompactRank]
    places: int
    computations: list[tuple[str, int, int | None]]
    links: list[tuple[int, int, str, int]]
    sums: list[Sum]
    summed: list[tuple[int, int | None]]
    kinds: list[Kind]
    versions_alive: tuple[int, ...]


def compact(program: Program) -> Compact | None:
    """Return a program in compact form; None if it has other instructions than those of `_WRITERS`."""
    if "compact" not in program.prepared:
        kinds = {type(i) for i in program.instructions}
        is_simple = not (program.global_norm or program.shared or program.plan.shard_optimizer or program.plan.offload)
        program.prepared["compact"] = _Writer(program).write() if is_simple and kinds <= _WRITERS.keys() else None
    return program.prepared["compact"]


def _array(numbers: Sequence[int]) -> Any:
    return np.array(numbers, int)


class _Numbers(dict[Any, int]):
    """Numbers for keys, in the order in which they first come."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class _Worker:
    """What matters of the past of a worker for its bytes, and where the steps of its rank are written."""

    def __init__(self, program: Program, number: int, steps: Sequence[list[int]]) -> None:
        plan = program.plan
        self.number, (self.stage, _), self.rank = number, plan.workers[number], plan.rank_of[number]
        self.chunk = plan.rank_workers[self.rank].index(number)
        self.steps = steps[self.rank]
        self.accumulates = True
        self.versions = self.most_versions = len(versions_before(plan, number, program.start))


class _Writer:
    def __init__(self, program: Program) -> None:
        self._program, self._plan = program, program.plan
        self._places, self._kinds, self._computations, self._links, self._summed = (_Numbers() for _ in range(5))
        self._sums: dict[tuple[int, int, int | None], Sum] = {}
        self._actions: list[list[tuple[int, Any, Any, Any]]] = [[] for _ in self._plan.rank_workers]
        self._computed: list[list[Computation]] = [[] for _ in self._plan.rank_workers]
        self._steps: list[list[int]] = [[] for _ in self._plan.rank_workers]
        numbers = range(len(self._plan.workers)) if program.workers is None else program.workers
        self._workers = {w: _Worker(program, w, self._steps) for w in numbers}
        self._averages_state = self._plan.sync_state and SCHEDULES[self._plan.schedule].flushes and self._plan.agree is None

    def write(self) -> Compact:
        workers, writers = self._workers, _WRITERS
        for i in self._program.instructions:
            writers[type(i)](self, workers[i.worker], i)
        return Compact(
            ranks=[CompactRank(*of) for of in zip(self._actions, self._computed, map(_array, self._steps), strict=True)],
            places=len(self._places),
            computations=list(self._computations),
            links=list(self._links),
            sums=list(self._sums.values()),
            summed=list(self._summed),
            kinds=[Kind(*kind) for kind in self._kinds],
            versions_alive=tuple(workers[w].most_versions if w in workers else 0 for w in range(len(self._plan.workers))),
        )

    def _step(self, worker: _Worker, name: str, part: int | None = None, op: str = "") -> None:
        """Write a step that changes the bytes of a rank."""
        worker.steps.append(self._kinds[name, worker.stage, part, op])

    def _load(self, worker: _Worker, i: Load) -> None:
        self._step(worker, i.data)

    def _compute(self, worker: _Worker, i: Compute) -> None:
        op, s, k, places, made = OPS[i.op], worker.stage, i.microbatch, self._places, NOWHERE
        message = "activation" if op.begins else "gradient" if op.reads == "residuals" else ""
        needs = places[worker.number, message, k] if message and s != (0 if op.begins else self._plan.depth - 1) and not i.part else NOWHERE
        if "output" in op.leaves and s < self._plan.depth - 1:
            made = places[worker.number, "made activation", k]
        if op.gives_gradient and s > 0:
            made = places[worker.number, "made gradient", k]
        actions = self._actions[worker.rank]
        number, is_last = self._computations[i.op, s, i.part], i.part is None or i.part == len(self._plan.stages[s].sum_parts) - 1
        self._computed[worker.rank].append(Computation(number, op_of(i, self._plan).name, k, i.version, worker.chunk, i.part))
        actions.append((COMPUTE, number, needs, made if is_last else NOWHERE))
        if i.part is not None:
            self._compute_part(worker, i, is_last)
        if is_last:
            self._step(worker, "compute", None, i.op)
            if op.finishes:
                self._accumulate(worker)
                if self._program.sets_aside[s] and ends_update(self._plan, s, k):
                    worker.accumulates = False

    def _compute_part(self, worker: _Worker, i: Compute, is_last: bool) -> None:
        """Write that the sum of a part can begin, and the bytes of parts: the first one leaves all residuals that are not used at once."""
        batch = i.microbatch // self._plan.microbatches_per_update(worker.stage)
        self._actions[worker.rank].append((MAKE, 0, 0, self._places[worker.number, f"part {i.part}", batch]))
        is_kept = OPS[i.op].begins and len(self._plan.stages[worker.stage].sum_parts) > 1
        if not is_last:
            self._accumulate(worker)
            self._step(worker, "first part" if is_kept and not i.part else "part")
        elif is_kept:
            self._step(worker, "last part")

    def _accumulate(self, worker: _Worker) -> None:
        if not worker.accumulates:
            worker.accumulates = True
            self._step(worker, "accumulate")

    def _send(self, worker: _Worker, i: Send) -> None:
        made, place = self._places[worker.number, _MADE[i.message], i.microbatch], self._places[i.to, i.message, i.microbatch]
        to = self._plan.rank_of[i.to]
        if to == worker.rank:
            self._actions[worker.rank].append((PASS, made, place, 0))
            self._step(worker, _PASSED[i.message])
            return
        link = self._links[worker.rank, to, i.message, worker.stage]
        message = Message((0, i.worker, i.to, i.message, i.microbatch), link, place, to)
        self._actions[worker.rank].append((SEND, made, message, 0))
        self._step(worker, _SENT[i.message])

    def _receive(self, worker: _Worker, i: Receive) -> None:
        self._step(worker, _RECEIVED[i.message])

    def _all_reduce(self, worker: _Worker, i: AllReduce) -> None:
        s, key, plan = worker.stage, (worker.stage, i.batch, i.part), self._plan
        if key not in self._sums:
            summing, name = [w for w in plan.stage_workers[s] if w in self._workers], sum_name(i.part)
            places, ranks = tuple(self._places[w, name, i.batch] for w in summing), tuple(plan.rank_of[w] for w in summing)
            self._sums[key] = Sum((1, s, name, i.batch), len(self._sums), self._summed[s, i.part], places, ranks)
        if self._averages_state and not i.part:
            self._step(worker, "take state")
        made = NOWHERE if i.part is None else self._places[worker.number, f"part {i.part}", i.batch]
        self._actions[worker.rank].append((SUM, made, self._sums[key], 0))
        self._step(worker, "sum", i.part)

    def _update(self, worker: _Worker, i: Update) -> None:
        s, places = worker.stage, tuple[int, ...]()
        if self._plan.sums_gradients(s):
            parts = [*range(len(self._plan.stages[s].sum_parts))] or [None]
            places = tuple(self._places[worker.number, sum_name(part), i.batch] for part in parts)
        self._actions[worker.rank].append((UPDATE, s, places, worker.chunk))
        if self._averages_state and self._plan.replicas[s] > 1:
            self._step(worker, "average state")
        if worker.accumulates and self._program.sets_aside[s]:
            self._step(worker, "set aside")
        worker.accumulates = True
        worker.versions += i.retires is None
        worker.most_versions = max(worker.most_versions, worker.versions)
        if i.retires is None:
            self._step(worker, "update")

    def _release(self, worker: _Worker, i: Release) -> None:
        worker.versions -= 1
        self._step(worker, "release")


_MADE, _SENT, _PASSED, _RECEIVED = (
    {message: f"{done} {message}" for message in ("activation", "gradient")} for done in ("made", "send", "pass", "receive")
)
"""Names of what is done to messages; programs in compact form have activations and gradients only."""

_WRITERS: dict[type[Instruction], Callable[[_Writer, _Worker, Any], None]] = {
    Load: _Writer._load,
    Compute: _Writer._compute,
    Send: _Writer._send,
    Receive: _Writer._receive,
    AllReduce: _Writer._all_reduce,
    Update: _Writer._update,
    Release: _Writer._release,
}
"""How instructions are written that depend on nothing but messages and sums of gradients."""
