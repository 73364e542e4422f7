"""A simulation of a program in compact form: the times of its computations, and the bytes of its ranks."""

from collections.abc import Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

from jpipe.programs._costs import Network, StageCost
from jpipe.programs._execution_order import ProgramError
from jpipe.programs._instructions import Program
from jpipe.programs._timeline import Span, Timeline
from jpipe.programs._traffic import Traffic
from jpipe.programs.prediction._batches import Batches
from jpipe.programs.prediction._bytes import bytes_of_ranks, size_of_message, size_of_sum
from jpipe.programs.prediction._compact import COMPUTE, MAKE, NOWHERE, PASS, SEND, SUM, Compact, CompactRank, Message, Sum
from jpipe.programs.prediction._prediction import Prediction, draw_grid
from jpipe.programs.prediction._state import NOT_YET


class _Rank:
    """The times of a rank so far.

    Attributes:
        clock: when it last ended something before a pause, or before the end.
        starts: of its computations.
        updates: by the number of the computation that an update follows, when it begins and how long it takes; the last one of several.
        updating: how long it has updated.
        times: when what it needed was there, in the current batch.
        ended: the number of computations in earlier batches.
    """

    def __init__(self, number: int, actions: CompactRank) -> None:
        self.number, self.actions, self.computations = number, actions.actions, actions.computations
        self.clock = 0.0
        self.starts: list[float] = []
        self.updates: dict[int, tuple[float, float]] = {}
        self.updating = 0.0
        self.times: list[float] = []
        self.ended = 0

    def end_batch(self) -> list[float]:
        """Return the starts of computations, and when what they needed was there, since the last call."""
        times = self.starts[self.ended :] + self.times
        self.ended = len(self.starts)
        self.times.clear()
        return times

    def last(self, chunk: int) -> int:
        """Return the number of its last computation of one of its stages."""
        place, count = len(self.starts) - 1, len(self.computations)
        while self.computations[place % count].chunk != chunk:
            place -= 1
        return place


class Clocks:
    """The times of a program in compact form, whose transfers and sums go on beside computations.

    Args:
        program: the program.
        form: the same in compact form.
        costs: one for each stage.
        network: the link between any two ranks.
    """

    def __init__(self, program: Program, form: Compact, costs: Sequence[StageCost], network: Network) -> None:
        self._plan, self._form, self._costs = program.plan, form, costs
        self._program = program
        self._traffic = Traffic(network)
        stages = self._plan.stages
        self._seconds = [
            costs[s].seconds(op) if part is None else costs[s].seconds_of_part(op, part, stages[s]) for op, s, part in form.computations
        ]
        self._links = [self._traffic.link(source, to, size_of_message(message, costs[s])) for source, to, message, s in form.links]
        self._rings = [self._ring(s, part) for s, part in form.summed]
        self._ready = [NOT_YET] * form.places
        self._begun: list[list[float]] = [[] for _ in form.sums]
        self._ranks = [_Rank(rank, actions) for rank, actions in enumerate(form.ranks)]
        self._active = [rank for rank in self._ranks if rank.actions]
        self._now, self._requests = 0.0, list[tuple[float, Message | Sum, float]]()

    def _ring(self, s: int, part: int | None) -> tuple[tuple[int, ...], float, float]:
        """Return the ports of a sum over the replicas of a stage, how long it takes, and how much later it is there."""
        ranks = [self._plan.rank_of[w] for w in self._plan.stage_workers[s]]
        return self._traffic.ring(ranks, size_of_sum(self._plan, s, part, self._costs[s]))

    def run(self) -> None:
        """Execute the program once.

        Raises:
            ProgramError: the ranks deadlock, which verified instructions do not.
        """
        running = [self._execute(rank, rank.actions) for rank in self._ranks]
        self._go_on(running, Batches(len(running), 0, False))
        stuck = [rank for rank, actions in enumerate(running) if next(actions, "done") != "done"]
        if stuck:
            raise self._deadlock(stuck)

    def run_batches(self, most: int, until_periodic: bool) -> float | None:
        """Execute a batch that is flushed several times, as `Batches`, and return their period."""
        batches = Batches(len(self._active), most, until_periodic)
        running = [self._repeat(rank, batches) if rank.actions else iter(()) for rank in self._ranks]
        self._go_on(running, batches)
        if batches.behind:
            raise self._deadlock(batches.stuck())
        return batches.period

    def _repeat(self, rank: _Rank, batches: Batches) -> Iterator[None]:
        begins = next(n for n, action in enumerate(rank.actions) if action[0] == COMPUTE)
        return batches.execute(rank.number, rank.actions, begins, partial(self._execute, rank), rank.end_batch)

    def _go_on(self, running: Sequence[Iterator[None]], batches: Batches) -> None:
        """Execute actions of all ranks until none can continue, or all have begun the batch after the last one."""
        for actions in running:
            next(actions, None)
        requests, ready, links, rings, occupy = self._requests, self._ready, self._links, self._rings, self._traffic.occupy
        while requests and batches.behind:
            self._now, event, time = heappop(requests)
            if isinstance(event, Message):
                ports, seconds, latency = links[event.link]
                ready[event.place] = occupy(ports, time, seconds) + latency
                next(running[event.to], None)
            else:
                ports, seconds, latency = rings[event.link]
                time = occupy(ports, time, seconds) + latency
                for place in event.places:
                    ready[place] = time
                for rank in event.ranks:
                    next(running[rank], None)

    def _deadlock(self, stuck: Sequence[int]) -> ProgramError:
        grid = draw_grid(self.timeline(), notes=[(rank, "waits") for rank in stuck])
        return ProgramError(f"{self._plan.schedule}: deadlock, ranks {stuck} wait for each other\n{grid}")

    def _execute(self, rank: _Rank, actions: Sequence[tuple[int, Any, Any, Any]]) -> Iterator[None]:
        """Execute actions of a rank, and pause while the time of something that one needs is not known."""
        ready, seconds, requests, starts, times = self._ready, self._seconds, self._requests, rank.starts, rank.times
        clock = rank.clock
        for kind, what, needs, made in actions:
            if kind == COMPUTE:
                if needs != NOWHERE:
                    while (time := ready[needs]) == NOT_YET:
                        rank.clock = clock
                        yield
                    ready[needs] = NOT_YET
                    times.append(time)
                    if time > clock:
                        clock = time
                starts.append(clock)
                clock += seconds[what]
                if made != NOWHERE:
                    ready[made] = clock
            elif kind == SEND:
                time = ready[what]
                heappush(requests, (max(time, self._now), needs, time))
            elif kind == PASS:
                ready[needs] = ready[what]
            elif kind == MAKE:
                ready[made] = clock
            elif kind == SUM:
                begun = self._begun[needs.number]
                begun.append(clock if what == NOWHERE else ready[what])
                if len(begun) == len(needs.places):
                    time = max(begun)
                    begun.clear()
                    heappush(requests, (max(time, self._now), needs, time))
            else:
                for place in needs:
                    while (time := ready[place]) == NOT_YET:
                        rank.clock = clock
                        yield
                    ready[place] = NOT_YET
                    times.append(time)
                    clock = max(clock, time)
                update = self._costs[what].update
                rank.updates[rank.last(made)] = clock, update
                rank.updating += update
                clock += update
        rank.clock = clock

    def timeline(self) -> Timeline:
        """Return the spans of each rank so far."""
        return tuple(tuple(self._spans(rank)) for rank in self._ranks)

    def _spans(self, rank: _Rank) -> Iterator[Span]:
        plan, seconds, updates, count = self._plan, self._seconds, rank.updates, len(rank.computations)
        for n, start in enumerate(rank.starts):
            batch, place = divmod(n, count)
            number, op, k, version, chunk, part = rank.computations[place]
            end = start + seconds[number]
            if batch:
                k += batch * plan.microbatches
                version += batch * plan.updates_per_batch(self._form.computations[number][1])
            if n in updates:
                begins, update = updates[n]
                yield Span(op, k, version, start, end, True, update, begins + update - update - end, chunk, part)
            else:
                yield Span(op, k, version, start, end, False, 0.0, 0.0, chunk, part)

    def prediction(self) -> Prediction:
        """Return the prediction from all actions so far, without memory over time and transfers; the moved bytes are those of one batch."""
        timeline, nothing = self.timeline(), (0,) * len(self._ranks)
        seconds = max(rank.clock for rank in self._ranks)
        busy = sum(span.end - span.start for spans in timeline for span in spans) + sum(rank.updating for rank in self._ranks)
        held, peak, moved = bytes_of_ranks(self._program, self._form, self._costs)
        return Prediction(
            timeline=timeline,
            transfers=(),
            memory=((),) * len(self._ranks),
            seconds=seconds,
            bubble=1 - busy / (seconds * len(self._active)) if seconds else 0.0,
            held_bytes=tuple(held),
            peak_bytes=tuple(peak),
            moved_bytes=tuple(moved),
            versions_alive=self._form.versions_alive,
            host_bytes=nothing,
            host_moved_bytes=nothing,
        )
