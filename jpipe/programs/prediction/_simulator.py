"""A simulation of a program, which computes the times of actions, and from them the prediction."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import add
from typing import Any

import numpy as np

from jpipe.programs._costs import HostLink, Network, Overlap, StageCost
from jpipe.programs._execution_order import ProgramError
from jpipe.programs._instructions import Program
from jpipe.programs._timeline import MemorySample, Span, Timeline
from jpipe.programs._traffic import Traffic
from jpipe.programs._transfers import HOST, Transfer
from jpipe.programs.prediction._actions import MAKE, MOVE, NOWHERE, WAIT, WORK, Actions, Event, RankActions, Versions
from jpipe.programs.prediction._prediction import Prediction, draw_grid
from jpipe.programs.prediction._prices import Change, Prices

_NOT_YET = float("inf")
"""Stands for a time that is not known yet."""

_SAME = 1e-9
"""The largest relative difference of two times that count as equal."""

_Route = tuple[str, tuple[int, ...], tuple[int, ...], float, float, float]
"""The kind of message or sum, its ranks, the ports that it occupies, for how many seconds, its latency, and its bytes."""


class _Rank:
    """The times of a rank so far.

    Attributes:
        actions: the actions of the rank.
        clock: the end of the last action before the rank began to wait, or of its last action.
        starts: the times at which its computations and updates began.
        arrivals: the arrival times of arrays that actions of the current repetition wait for.
        begins: the index in `starts` at which each repetition of the repeated part of the program begins.
        repetitions: for each finished repetition, its `starts` and `arrivals`.
    """

    def __init__(self, actions: RankActions) -> None:
        self.actions, self.clock = actions, 0.0
        self.starts: list[float] = []
        self.arrivals: list[float] = []
        self.begins: list[int] = []
        self.repetitions: list[list[float]] = []

    def begin(self) -> None:
        """Begin the next repetition."""
        self.begins.append(len(self.starts))
        self.arrivals.clear()

    def end(self) -> None:
        """Finish a repetition."""
        self.repetitions.append(self.starts[self.begins[-1] :] + self.arrivals)


class Simulator:
    """A simulation of a program.

    Each rank executes its actions in order, up to one that waits for an unknown time. Messages and sums occupy their ports in the order in
    which they become ready, so the result does not depend on how the instructions of ranks are interleaved.

    Args:
        program: the program that runs.
        costs: the cost of each stage.
        network: returns the link between any two ranks.
        host: returns the link of a rank to its host.
        overlap: what can overlap with the computations of a rank.
        brief: whether to leave out memory over time and transfers.
    """

    def __init__(
        self,
        program: Program,
        costs: Sequence[StageCost],
        network: Network,
        host: HostLink,
        overlap: Overlap = "transfers and sums",
        brief: bool = False,
    ) -> None:
        if overlap not in program.prepared:
            program.prepared[overlap] = Actions(program, overlap)
        self._actions: Actions = program.prepared[overlap]
        self._plan, self._prices, self._is_brief = program.plan, Prices(program, costs), brief
        self._traffic, self._host = Traffic(network), host
        self._seconds = [seconds(self._prices, *of) for seconds, *of in self._actions.seconds]
        self._routes = [self._route(*route) for route in self._actions.routes]
        self._times = [_NOT_YET] * self._actions.num_places
        for place in self._actions.there:
            self._times[place] = 0.0
        self._host_free: dict[tuple[int, ...], float] = {}  # by rank and direction, the time when the link to the host is free
        self._begun: dict[tuple[Any, ...], dict[int, list[float]]] = {}  # by order of an event and rank, when the rank has reached it
        self._ranks = [_Rank(rank) for rank in self._actions.ranks]
        self._now, self._requests = 0.0, list[tuple[float, Event, float]]()
        self._transfers: list[Transfer] = []
        self._behind = len(self._ranks)  # the number of ranks that have not begun the repetition after the last one; at 0 it ends
        self._period: float | None = None

    def _route(self, number: int, what: Any, workers: tuple[int, ...], *summed: Any) -> _Route:
        ranks = tuple(w if w == HOST else self._plan.rank_of[w] for w in workers)
        if summed:
            summed_bytes, rounds = self._prices.sum(what, *summed)
            return what, ranks, *self._traffic.ring(ranks, summed_bytes, rounds), summed_bytes
        (source, to), (_, size, _) = ranks, self._prices.of(number).message(what, *workers)
        if HOST in workers:
            link = self._host(max(ranks))
            return what, ranks, (), size / link.bandwidth, link.latency, size
        return what, ranks, *self._traffic.link(source, to, size), size

    def run(self) -> None:
        """Execute the program once. Raise ProgramError if the ranks deadlock; verified instructions never do."""
        running = [self._execute(rank, rank.actions.queue) for rank in self._ranks]
        self._go_on(running)
        self._check_done([rank for rank, actions in enumerate(running) if next(actions, "done") != "done"])

    def run_repeated(self, first: int, most: int, until_periodic: bool) -> float:
        """Execute the repeated part of the program several times, until all ranks have begun the repetition after the last one.

        A repetition depends only on the previous one. So if it repeats that one with all times shifted, all later ones do so as well, and
        with `until_periodic` the run stops there. At most `most` are executed; those from `first` on count. Return the seconds by which a
        repetition is shifted, or otherwise their mean over the ranks and the repetitions that count. Raise ProgramError if the ranks
        deadlock.
        """
        active = [rank for rank in self._ranks if rank.actions.queue]
        self._behind, unfinished = len(active), [len(active)] * most

        def repeat(rank: _Rank) -> Iterator[None]:
            (begin, *_), (end, *_), _ = rank.actions.repeated
            repeated = rank.actions.queue[begin:end]
            yield from self._execute(rank, rank.actions.queue[:begin])
            for n in range(most):
                rank.begin()
                yield from self._execute(rank, repeated)
                rank.end()
                unfinished[n] -= 1
                if until_periodic and n and not unfinished[n] and (period := _shift(active, n)) is not None:
                    self._period, self._behind = period, 0
                    return
            rank.begin()
            begun = next(n for n, action in enumerate(repeated) if action[0] == WORK) + 1
            yield from self._execute(rank, repeated[:begun])
            self._behind -= 1
            yield from self._execute(rank, repeated[begun:])

        self._go_on([repeat(rank) if rank.actions.queue else iter(()) for rank in self._ranks])
        self._check_done([rank.actions.number for rank in active if self._behind and len(rank.repetitions) < most])
        if self._period is not None:
            return self._period
        seconds = [rank.starts[rank.begins[most]] - rank.starts[rank.begins[first]] for rank in active]
        return sum(seconds) / len(active) / (most - first)

    def _check_done(self, stuck: Sequence[int]) -> None:
        """Raise an error if ranks still wait although nothing more can happen."""
        if stuck:
            grid = draw_grid(self.timeline(), notes=[(rank, "waits") for rank in stuck])
            raise ProgramError(f"{self._plan.schedule}: deadlock, ranks {[*stuck]} wait for each other\n{grid}")

    def _go_on(self, running: Sequence[Iterator[None]]) -> None:
        """Execute actions of all ranks until no rank can continue, or all ranks have begun the last repetition."""
        for actions in running:
            next(actions, None)
        requests, times, routes, occupy = self._requests, self._times, self._routes, self._traffic.occupy
        while requests and self._behind:
            self._now, (order, _, route, places, waiting), ready = heappop(requests)
            what, ranks, ports, seconds, latency, size = routes[route]
            end = occupy(ports, ready, seconds)
            for place in places:
                times[place] = end + latency
            if not self._is_brief:
                self._transfers.append(Transfer(what, ranks, order[-1], end - seconds, end, end + latency, size))
            for rank in waiting:
                next(running[rank], None)

    def _execute(self, rank: _Rank, queue: Sequence[tuple[int, Any, int, int]]) -> Iterator[None]:
        """Execute actions of a rank; pause at each action that waits for an unknown time."""
        times, seconds, starts, arrivals = self._times, self._seconds, rank.starts, rank.arrivals
        requests, clock = self._requests, rank.clock
        for kind, what, needs, made in queue:
            if kind == WORK:
                if needs != NOWHERE:
                    while (time := times[needs]) == _NOT_YET:
                        rank.clock = clock
                        yield
                    times[needs] = _NOT_YET
                    arrivals.append(time)
                    if time > clock:
                        clock = time
                starts.append(clock)
                clock += seconds[what]
                if made != NOWHERE:
                    times[made] = clock
            elif kind == WAIT:
                while (time := times[what]) == _NOT_YET:
                    rank.clock = clock
                    yield
                times[what] = _NOT_YET if needs else time
                arrivals.append(time)
                clock = max(clock, time)
            elif kind == MOVE:
                self._move(what, needs, made, clock)
            else:
                time = clock
                while needs != NOWHERE and (time := times[needs]) == _NOT_YET:
                    rank.clock = clock
                    yield
                if kind == MAKE:
                    times[made] = time
                elif what[1] == 1:  # one participant
                    heappush(requests, (max(time, self._now), what, time))
                else:
                    self._meet(rank, what, time)
        rank.clock = clock

    def _meet(self, rank: _Rank, event: Event, ready: float) -> None:
        """Record that a rank has reached an event. When all participants have, the event is queued by the time at which it can begin.

        A rank may reach the event of a later repetition before another rank has reached this one.
        """
        order, participants, *_ = event
        begun = self._begun.setdefault(order, {})
        begun.setdefault(rank.actions.number, []).append(ready)
        if len(begun) == participants:
            ready = max(times.pop(0) for times in begun.values())
            self._begun[order] = {number: times for number, times in begun.items() if times}
            heappush(self._requests, (max(ready, self._now), event, ready))

    def _move(self, route: int, number: int, place: int, clock: float) -> None:
        """Move an array over the link to the host, after earlier moves in this direction, and once the array exists."""
        what, ranks, _, seconds, latency, size = self._routes[route]
        begins = max(clock, self._host_free.get(ranks, 0.0), self._times[place])
        self._host_free[ranks] = end = begins + seconds
        self._times[place] = end + latency
        if not self._is_brief:
            self._transfers.append(Transfer(what, ranks, number, begins, end, end + latency, size))

    def timeline(self) -> Timeline:
        """Return the spans of each rank so far."""
        return tuple(tuple(self._spans(rank)) for rank in self._ranks)

    def _spans(self, rank: _Rank) -> list[Span]:
        spans, program = list[Span](), self._actions.program
        (_, begin, computed), (_, end, computed_then), _ = rank.actions.repeated
        for n, (work, start) in enumerate(zip(rank.actions.works_of_run(), rank.starts, strict=False)):
            number, s, chunk, op, k, version, part, follows, _, _ = work
            seconds, repetition = self._seconds[number], (n - begin) // (end - begin)
            if repetition > 0 and program.repeated is not None:
                batches = repetition * program.repeated.batches
                k, version = k + batches * self._plan.microbatches, version + batches * program.updates_per_batch[s]
                follows += 0 if follows == NOWHERE else repetition * (computed_then - computed)
            if follows == NOWHERE:
                spans.append(Span._make((op, k, version, start, start + seconds, False, 0.0, 0.0, chunk, part)))
            else:
                op, k, version, began, ended, _, _, _, chunk, part = spans[follows]
                spans[follows] = Span(op, k, version, began, ended, True, seconds, start + seconds - seconds - ended, chunk, part)
        return spans

    def prediction(self, with_times: bool = True) -> Prediction:
        """Return the prediction from all actions so far. Its bytes are for one execution of the program.

        Without times, the timeline is empty and the bubble is 0.
        """
        ranks, workers, memory = self._actions.ranks, self._actions.workers, Memory(self._actions, self._prices)
        seconds = max(rank.clock for rank in self._ranks)
        busy, samples = list[float](), list[tuple[MemorySample, ...]]()
        for rank in self._ranks if with_times else ():
            each = [self._seconds[seconds] for (seconds, *_), _ in zip(rank.actions.works_of_run(), rank.starts, strict=False)]
            busy.append([0.0, *accumulate(each)][-1])
            ends = map(add, rank.starts, each)
            samples.append(() if self._is_brief else memory.samples(rank.actions, ends))
        held, peak, sent, in_host, moved = zip(*map(memory.most, ranks), strict=True)
        return Prediction(
            timeline=self.timeline() if with_times else (),
            transfers=tuple(self._transfers),
            memory=tuple(samples),
            seconds=seconds,
            bubble=1 - sum(busy) / (seconds * sum(bool(rank.workers) for rank in ranks)) if seconds and busy else 0.0,
            held_bytes=held,
            peak_bytes=peak,
            moved_bytes=sent,
            versions_alive=tuple(workers[w].most_versions if w in workers else 0 for w in range(len(self._plan.workers))),
            host_bytes=in_host,
            host_moved_bytes=moved,
        )


def _shift(ranks: Sequence[_Rank], n: int) -> float | None:
    """Return by how many seconds repetition n is later than the previous one; None if that is not the same for all its actions."""
    pairs = [rank.repetitions[n - 1 : n + 1] for rank in ranks]
    if any(len(before) != len(after) for before, after in pairs):
        return None
    later = [[b - a for a, b in zip(before, after, strict=True)] for before, after in pairs]
    least, most = min(map(min, later)), max(map(max, later))
    return sum(shifts[0] for shifts in later) / len(later) if most - least <= _SAME * most else None


class Memory:
    """The bytes of the ranks of a program: the maxima, the bytes over time, and the bytes sent and moved. They do not depend on times.

    Args:
        actions: the program.
        prices: the prices of its actions.
    """

    def __init__(self, actions: Actions, prices: Prices) -> None:
        self._prices = prices
        self._changes: Any = Change._make(map(np.array, zip(*(prices.change(*change) for change in actions.changes), strict=True)))

    def most(self, rank: RankActions) -> tuple[int, int, int, int, int]:
        """Return the fields of a `Prediction` for one rank: held_bytes, peak_bytes, moved_bytes, host_bytes and host_moved_bytes."""
        if not rank.workers:
            return 0, 0, 0, 0, 0
        live, running, sent, _, _, in_host, moved = self._changes
        added, running, sent, in_host, moved = (changes[rank.changes] for changes in (live, running, sent, in_host, moved))
        live = np.cumsum(added)
        peak = max(live.max(), (live - added + running).max())
        held, peak, sent, in_host, moved = (x.item() for x in (live.max(), peak, sent.sum(), np.cumsum(in_host).max(), moved.sum()))
        return held, peak, sent, in_host, moved

    def samples(self, rank: RankActions, ends: Iterable[float]) -> tuple[MemorySample, ...]:
        """Return memory samples of a rank: at the beginning, and at the ends of its computations and updates."""
        if not rank.workers:
            return ()
        kinds = self._changes.live, self._changes.residuals, self._changes.optimizer
        live, residuals, optimizer = (np.cumsum(changes[rank.changes]).tolist() for changes in kinds)
        accumulators, samples = sum(self._prices.costs[worker.stage].accumulators for worker in rank.workers), list[MemorySample]()
        last, weights, kept = None, dict[int, int](), 0
        held = [rank.first, *((changes, versions) for *_, changes, versions in rank.works)]
        for time, (count, versions) in zip((0.0, *ends), held, strict=True):
            if versions is not last:
                last, weights = versions, self._weights(versions)
                kept = accumulators + sum(weights.values())
            n = count - 1
            other = live[n] - kept - optimizer[n] - residuals[n]
            samples.append(MemorySample._make((time, weights, optimizer[n], accumulators, residuals[n], other)))
        return tuple(samples)

    def _weights(self, versions: Versions) -> dict[int, int]:
        """Return the bytes of each version on the device. Weights that all versions share count with the oldest version."""
        weights: dict[int, int] = {}
        for s, of_worker in versions:
            cost = self._prices.costs[s]
            for version, missing in of_worker:
                frozen = cost.frozen if version == of_worker[0][0] else 0
                weights[version] = weights.get(version, 0) + cost.trained + frozen - self._prices.share(s, missing)
        return dict(sorted(weights.items()))
