"""Programs as actions: a program is converted to actions once, for many simulations with different costs.

All times are in one list; an action waits for the time at a place of this list. If later batches repeat a part of the program, their arrays
use the same places again. Everything that depends on costs is a price (`_prices`) with its arguments. The bytes of a rank change in the
order of its instructions, independently of the times, so these changes are a separate list.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, cycle
from typing import Any

import numpy as np

from jpipe.capabilities.protocol import MessageHooks, hooks, merged
from jpipe.ops import OPS, Op
from jpipe.programs._costs import Overlap
from jpipe.programs._instructions import (
    AllReduce,
    Compute,
    Load,
    Program,
    Receive,
    Release,
    Send,
    Update,
    ends_update,
)
from jpipe.programs._route import last_microbatch
from jpipe.programs._verify import versions_before
from jpipe.programs.prediction._prices import Prices
from jpipe.schedules import SCHEDULES

WORK, BEGIN, WAIT, MAKE, MOVE = range(5)
"""The kinds of actions; see `RankActions.queue`."""

NOWHERE = -1
"""Stands for no place."""

Versions = tuple[tuple[int, tuple[tuple[int, tuple[int, ...]], ...]], ...]
"""For each worker of a rank: its stage, and its weight versions on the device, each with the replicas that have not sent their share."""


Work = tuple[int, int, int, str, int, int, int | None, int, int, Versions]
"""A computation or an update of a rank:

- the number of its price in seconds;
- its stage, and the index of that stage on its rank;
- the op, microbatch, version and part of a computation, as in a `Span`;
- for an update, the index of the last computation of its stage, counted over the rank; for a computation, NOWHERE;
- the number of changes of the rank's bytes until its end, and the versions that the rank holds then.

Works and events are plain tuples, because the garbage collector does not track these: a program has hundreds of thousands of them.
"""

Event = tuple[tuple[Any, ...], int, int, tuple[int, ...], tuple[int, ...]]
"""A message or a sum, which begins when all participants have come to it:

- its order, a unique tuple that decides between events that can begin at the same time: messages come before sums, so that all sums of
  that time are known when the first is chosen. The last entry is the number in a `Transfer`;
- the number of its participants;
- the number of its route;
- the places for the time at which it is over;
- the ranks that may wait for it.
"""


class RankActions:
    """The actions of a rank.

    Attributes:
        number: the number of the rank.
        workers: the workers of the rank that have instructions.
        queue: the actions in order. Each is one of: (WORK, number of the price, place that it waits for and clears, place of its result);
            (BEGIN, the event, place of the array to send, or NOWHERE if it is there now, 0); (WAIT, place, whether to clear it, 0); (MAKE,
            0, place of the result of another worker of the rank, or NOWHERE if it is there now, place of the copy); (MOVE, number of the
            route, number in a `Transfer`, place of the moved array).
        works: the computation or update of each WORK.
        computations: the number of computations in `works`.
        repeated: the numbers of actions, works and computations before the part of the program that later batches repeat, at its end, and
            in all.
        changes: the numbers of the changes of the rank's bytes, in order; an array when all are written.
        first: the number of changes for the bytes held at the beginning, and the versions held then.
        versions: the versions that the rank holds after the actions so far.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.workers: list[Worker] = []
        self.queue: list[tuple[int, Any, int, int]] = []
        self.works: list[Work] = []
        self.computations = 0
        self.repeated: list[tuple[int, int, int]] = []
        self.changes: Any = []
        self.first: tuple[int, Versions] = 0, ()
        self.versions: Versions = ()

    def note_place(self) -> None:
        """Note that the repeated part of the program begins or ends here."""
        self.repeated.append((len(self.queue), len(self.works), self.computations))

    def works_of_run(self) -> Iterator[Work]:
        """Return the works of a run of any length: those up to the end of the repeated part, and then this part again and again."""
        (_, begin, _), (_, end, _), _ = self.repeated
        return chain(self.works[:begin], cycle(self.works[begin:end]))

    def note_versions(self) -> None:
        """Note which versions the workers of the rank have on the device from now on."""
        self.versions = tuple(
            (worker.stage, tuple(entry for entry in worker.versions.items() if ("versions", entry[0]) not in worker.away))
            for worker in self.workers
        )


Numbers = defaultdict[Any, int]
"""Numbers for keys, in the order in which the keys first occur."""


class _Places(dict[int, int]):
    """The places of the arrays of one kind at a worker, by microbatch or batch; each place is used again after `after` of them."""

    def __init__(self, next_place: Callable[[], int], after: int) -> None:
        self._places, self._after = Numbers(next_place), after

    def __missing__(self, number: int) -> int:
        place = self[number] = self._places[number % self._after]
        return place


class _PlacesOfKinds(dict[tuple[Any, ...], dict[int, int]]):
    """The places of all kinds of arrays by worker and kind, and then by microbatch or batch."""

    def __init__(self, program: Program) -> None:
        self._program, self.next_place = program, count().__next__

    def __missing__(self, key: tuple[Any, ...]) -> dict[int, int]:
        program, (worker, what, *_) = self._program, key
        places: dict[int, int] = Numbers(self.next_place)
        if program.repeated is not None:  # the batches of sums count the updates of a stage
            stage, _ = program.plan.workers[worker]
            each = program.updates_per_batch[stage] if what in ("sum", "part") else program.plan.microbatches
            places = _Places(self.next_place, program.repeated.batches * each)
        self[key] = places
        return places


class Actions:
    """A program as actions.

    Args:
        program: the program.
        overlap: what can overlap with the computations of a rank.

    Attributes:
        ranks: the actions of each rank.
        workers: the workers that have instructions, by number.
        messages: the messages of capabilities.
        begin, before_compute, before_update: the hooks of capabilities for these moments, see `ProgramHooks`.
        places: the numbers of places, by worker and kind, then by microbatch or batch; empty when all actions are written.
        num_places: the number of places.
        there: the places of arrays that are there from the beginning.
        seconds: the numbers of prices in seconds, by the function of `Prices` that returns the price and its arguments.
        changes: the numbers of changes of bytes, by slice of the rows, name, stage and arguments.
        routes: the numbers of routes, by slice of the rows, kind of message or sum, workers, and further arguments of the price.
        events: the events by their order; empty when all actions are written.
    """

    def __init__(self, program: Program, overlap: Overlap) -> None:
        plan = program.plan
        self.program, self.plan, self.depth, self.separates_sums = program, plan, plan.depth, program.separates_sums
        self.transfers_block, self.sums_block = overlap == "none", overlap != "transfers and sums"
        self.flushes = SCHEDULES[plan.schedule].flushes
        self.averages_state = plan.sync_state and self.flushes and not plan.has_parallel_pipelines
        self.seconds, self.changes, self.routes = (Numbers(count().__next__) for _ in range(3))
        self.places = _PlacesOfKinds(program)
        used = program.hooks
        self.messages: dict[str, MessageHooks] = merged("messages", used)
        self.begin, self.before_compute, self.before_update = (hooks(name, used) for name in ("begin", "before_compute", "before_update"))
        writers = WRITERS | merged("writers", used)
        self.there: set[int] = set()
        self.events: dict[tuple[Any, ...], Event] = {}
        self.ranks = [RankActions(rank) for rank in range(len(plan.rank_workers))]
        self.workers = {w: Worker(self, w) for w in (range(len(plan.workers)) if program.workers is None else sorted(program.workers))}
        self.summing = [[w for w in workers if w in self.workers] for workers in plan.stage_workers]  # by stage
        for rank in self.ranks:
            rank.note_versions()
            rank.first = len(rank.changes), rank.versions
        begin, end, _ = program.repeated or (0, len(program.instructions), program.end)
        for part in (program.instructions[:begin], program.instructions[begin:end], program.instructions[end:]):
            for i in part:
                worker = self.workers[i.worker]
                if plan.row_slices > 1:
                    worker.slice = getattr(i, "microbatch", 0) % plan.row_slices
                writers[type(i)](worker, i)
            for rank in self.ranks:
                rank.note_place()
        for rank in self.ranks:
            rank.changes = np.array(rank.changes, int)
        self.num_places = self.places.next_place()
        for places in self.places.values():
            places.clear()  # frees thousands of keys
        self.events.clear()


class Worker:
    """A worker, which converts its instructions to actions of its rank, and keeps the state that they depend on.

    Attributes:
        all, rank: the actions of all ranks, and the actions of its rank.
        number, stage, replica: the numbers of the worker, of its stage and of its replica.
        chunk: the index of its stage among the stages of the rank.
        others: the workers of the other replicas, if each replica updates a share of the weights.
        versions: its weight versions, each with the replicas that have not sent their share of the weights yet.
        most_versions: the largest number of versions so far.
        away: the arrays that a capability keeps in host memory, each as (kind, number): optimizer state (number 0), versions, residuals and
            stashes.
        accumulates: whether the worker has memory for gradients: not between setting a batch aside and the next backward.
        computed: by microbatch, the parts of ops that it has computed, if a neighbouring stage is on the same rank.
        last: the index of its last computation, counted over the rank.
        slice: the number of the slice of the rows that the current instruction is about; 0 for whole rows.
    """

    def __init__(self, of_program: Actions, number: int) -> None:
        plan, start = of_program.plan, of_program.program.start
        self.all, self.rank, self.number = of_program, of_program.ranks[plan.rank_of[number]], number
        self.stage, self.replica = s, _ = plan.workers[number]
        self.chunk = plan.rank_workers[self.rank.number].index(number)
        self.others = tuple(w for w in plan.stage_workers[s] if w != number) if plan.divides_updates else ()
        self.versions: dict[int, tuple[int, ...]] = dict.fromkeys(sorted(versions_before(plan, number, start)), ())
        self.most_versions, self.accumulates, self.last = len(self.versions), True, NOWHERE
        self.away = set[tuple[str, int]]()
        self.separates_sums = of_program.separates_sums[s]
        self.computed: dict[int, str] = {}
        self.slice = 0
        self._effects: dict[tuple[int, str], tuple[Op, int, dict[int, int] | None, list[dict[int, int]]]] = {}
        self._changes: dict[tuple[int, str, tuple[Any, ...]], int] = {}
        self.rank.workers.append(self)
        for begin in of_program.begin:
            begin(self)
        self.change("begin", len(self.versions), bool(self.away))

    def place(self, *what: Any) -> int:
        """Return the place for the time of an array, which is given by a name and numbers."""
        return self.all.places[self.number, *what[:-1]][what[-1]]

    def effect(self, name: str) -> tuple[Op, int, dict[int, int] | None, list[dict[int, int]]]:
        """Return an op, the number of its price, the places of messages that it waits for, if any, and the places of its results."""
        key = self.slice, name
        if key not in self._effects:
            op, w, s, last, places = OPS[name], self.number, self.stage, self.all.depth - 1, self.all.places
            message, is_alone = _NEEDS[op.reads], s == (0 if op.begins else last)
            made = {"activation": "output" in op.leaves and s < last, "gradient": op.gives_gradient and s > 0}
            needs = places[w, message] if message and not is_alone else None
            left = [places[w, "made", message] for message, is_made in made.items() if is_made]
            self._effects[key] = op, self.all.seconds[Prices.seconds, s, name, self.slice], needs, left
        return self._effects[key]

    def wait(self, *what: Any, uses_up: bool = False) -> None:
        """Wait for an array, unless the worker never lacks it. An array that is used up is made anew in the next batch."""
        if (place := self.all.places[self.number, *what[:-1]].get(what[-1])) is not None:
            self.rank.queue.append((WAIT, place, uses_up, NOWHERE))

    def make(self, *what: Any) -> None:
        """Write that an array now exists."""
        self.rank.queue.append((MAKE, 0, NOWHERE, self.place(*what)))

    def change(self, name: str, *arguments: Any) -> None:
        """Change the bytes of the rank."""
        key = self.slice, name, arguments
        if (number := self._changes.get(key)) is None:
            number = self._changes[key] = self.all.changes[self.slice, name, self.stage, *arguments]
        self.rank.changes.append(number)

    def route(self, what: str, workers: tuple[int, ...], *further: Any) -> int:
        """Return the number of the route of a message or a sum between workers; `further` are further arguments of its price."""
        return self.all.routes[self.slice, what, workers, *further]

    def accumulate(self) -> None:
        """Add memory for gradients if the worker has none, because a batch that was set aside took it."""
        if not self.accumulates:
            self.accumulates = True
            self.change("accumulate")

    def begin(
        self, order: tuple[Any, ...], participants: int, route: tuple[Any, ...], waiting: Iterable[tuple[Any, ...]], sent: int
    ) -> None:
        """Take part in an event with this order and number of participants.

        `route` has the kind of message or sum, the workers, and further arguments of the price. `waiting` are the workers that wait for the
        event, each with the name and numbers of the array for which it waits. `sent` is the place of the array that this worker sends, or
        NOWHERE if it is there now.
        """
        event = self.all.events.get(order)
        if event is None:
            keys = [(self.all.workers[w], what) for w, *what in waiting]
            places, ranks = tuple(worker.place(*what) for worker, what in keys), tuple(worker.rank.number for worker, _ in keys)
            event = self.all.events[order] = order, participants, self.route(*route), places, ranks
        self.rank.queue.append((BEGIN, event, sent, NOWHERE))

    def begin_sum(self, what: str, batch: int, sent: int = NOWHERE, piece: int = 0, following: int = 0) -> None:
        """Take part in a sum over the replicas of the stage, or in a piece of it. "sum" adds gradients; capabilities add other arrays.

        Sums over the same replicas end in order. So if pieces follow, workers wait only for the last piece.
        """
        program, s = self.all, self.stage
        place = (what, piece, batch) if following else (what, batch)
        waiting = ((w, *place) for w in program.summing[s] if program.sums_block or not following)
        route = what, program.plan.stage_workers[s], s, piece
        self.begin((1, s, what, piece, batch), len(program.summing[s]), route, waiting, NOWHERE if program.sums_block else sent)
        if program.sums_block:
            self.wait(*place, uses_up=following > 0)

    def meet(self, message: str, source: int, to: int, k: int) -> None:
        """Take part in a message between two ranks that wait for it."""
        waiting = [(source, "arrival", message, to, k), (to, *self.received(message, source, k))]
        self.begin((0, source, to, message, k), 2, (message, (source, to)), waiting, NOWHERE)

    def received(self, message: str, source: int, k: int) -> tuple[Any, ...]:
        """Return the name and numbers under which the receiver of a message waits for it."""
        hooks = self.all.messages.get(message)
        return (message, k) if hooks is None or hooks.awaited is None else (message, *hooks.awaited(self, source, k))


def _load(worker: Worker, i: Load) -> None:
    worker.change(i.data)


def _compute(worker: Worker, i: Compute) -> None:
    (op, seconds, needs, made), k = worker.effect(i.op), i.microbatch
    prepare(worker, i)
    change_bytes(worker, i, op)
    work(worker, i, seconds, NOWHERE if needs is None else needs[k], [places[k] for places in made])
    finish(worker, i, op)


def prepare(worker: Worker, i: Compute) -> None:
    """Wait for the weights of a computation, and run the hooks of capabilities before it."""
    for other in worker.others:
        worker.wait("weights", other, i.version)
    for hook in worker.all.before_compute:
        hook(worker, i)


def work(worker: Worker, i: Compute, seconds: int, needs: int, made: Sequence[int], part: int | None = None) -> None:
    """Write a computation with the number of its price, the place for which it waits, and the places of its results."""
    rank = worker.rank
    rank.queue.append((WORK, seconds, needs, made[0] if made else NOWHERE))
    for place in made[1:]:
        rank.queue.append((MAKE, 0, NOWHERE, place))
    rank.works.append(
        (seconds, worker.stage, worker.chunk, i.shown, i.microbatch, i.version, part, NOWHERE, len(rank.changes), rank.versions)
    )
    worker.last, rank.computations = rank.computations, rank.computations + 1


def finish(worker: Worker, i: Compute, op: Op) -> None:
    """If a computation completes the gradients for an update, note that they are set aside."""
    if worker.separates_sums and op.finishes:
        worker.accumulate()
        worker.accumulates = not ends_update(worker.all.plan, worker.stage, i.microbatch)


def change_bytes(worker: Worker, i: Compute, op: Op) -> None:
    """Change the bytes at the end of a computation."""
    if len(worker.rank.workers) == 1:
        worker.change("compute", op.name, None, None)
        return
    of_stage = {other.stage: other.computed.get(i.microbatch, "") for other in worker.rank.workers}
    worker.change("compute", op.name, of_stage.get(worker.stage - 1), of_stage.get(worker.stage + 1))
    worker.computed[i.microbatch] = of_stage[worker.stage] + op.parts


_NEEDS = {"inputs": "activation", "residuals": "gradient", "stash": ""}
"""The message that an op waits for, by what it reads."""


def _send(worker: Worker, i: Send) -> None:
    program, w, message, to, k = worker.all, i.worker, i.message, i.to, i.microbatch
    worker.change("send", message, w, to)
    receiver = program.workers[to]
    if program.transfers_block and receiver.rank is not worker.rank:
        worker.meet(message, w, to, k)
        worker.wait("arrival", message, to, k, uses_up=True)
        return
    if (sent := program.places[w, "made", message].get(k)) is None:
        sent = worker.place(message, k)  # the worker forwards an array that it has received
    arrival = receiver.place(*worker.received(message, w, k))
    if receiver.rank is worker.rank:
        worker.rank.queue.append((MAKE, 0, sent, arrival))
    else:
        event = (0, w, to, message, k), 1, worker.route(message, (w, to)), (arrival,), (receiver.rank.number,)
        worker.rank.queue.append((BEGIN, event, sent, NOWHERE))


def _receive(worker: Worker, i: Receive) -> None:
    program, k = worker.all, i.microbatch
    worker.change("receive", i.message, i.source, i.worker)
    if i.message in _NEEDS.values() and not program.transfers_block:
        return  # the actions of computations wait for these messages
    received = worker.received(i.message, i.source, k)
    worker.place(*received)
    if i.message in program.messages and (hook := program.messages[i.message].received) is not None:
        hook(worker, i)
    if program.transfers_block and program.plan.rank_of[i.source] != worker.rank.number:
        worker.meet(i.message, i.source, i.worker, k)
        worker.wait(*received)


def all_reduce(worker: Worker, i: AllReduce) -> None:
    if worker.all.averages_state:
        worker.change("take state")  # memory for the mean, until the update replaces the worker's state
    worker.change("sum", 0)
    worker.begin_sum("sum", i.batch)


def _update(worker: Worker, i: Update) -> None:
    program, rank, s, k = worker.all, worker.rank, worker.stage, last_microbatch(worker.all.plan, i.batch)
    worker.wait("sum", i.batch, uses_up=True)
    if program.averages_state and len(program.plan.stage_workers[s]) > 1:
        worker.change("average state")
    if worker.accumulates and worker.separates_sums:
        worker.change("set aside")
    worker.accumulates = True
    for hook in program.before_update:
        hook(worker, i)
    if i.retires is None:
        worker.change("update")
    else:
        del worker.versions[i.retires]
    worker.versions[i.batch + 1] = tuple(program.plan.workers[other][1] for other in worker.others)
    worker.most_versions = max(worker.most_versions, len(worker.versions))
    rank.note_versions()
    if worker.others:
        worker.change("lack shares", worker.replica)
    seconds = program.seconds[Prices.seconds, s, ""]
    rank.queue.append((WORK, seconds, NOWHERE, worker.place("made", "weights", k) if worker.others else NOWHERE))
    rank.works.append((seconds, s, worker.chunk, "", k, i.batch, None, worker.last, len(rank.changes), rank.versions))


def _release(worker: Worker, i: Release) -> None:
    worker.change("release in host" if ("versions", i.version) in worker.away else "release")
    worker.away.discard(("versions", i.version))
    del worker.versions[i.version]
    worker.rank.note_versions()


WRITERS: dict[type, Callable[[Worker, Any], None]] = {
    Load: _load,
    Compute: _compute,
    Send: _send,
    Receive: _receive,
    AllReduce: all_reduce,
    Update: _update,
    Release: _release,
}
"""How each instruction is written as actions and changes of bytes."""
