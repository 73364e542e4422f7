"""Traces of a pipeline, measured during training: the times of computations, and the bytes on each rank."""

import itertools
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jpipe.capabilities.protocol import hooks
from jpipe.capabilities.registry import programs, runtimes_of
from jpipe.errors import InputError
from jpipe.meshes._partition import shard_bytes
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._costs import TIMES, StageCost
from jpipe.programs._instructions import Compute, Update
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Span, Timeline, whole_spans
from jpipe.programs._transfers import Transfer
from jpipe.programs.prediction import draw_grid
from jpipe.runtime._interpreter import Event
from jpipe.runtime.state import WeightVersions, WorkerState, is_away
from jpipe.runtime.timing._transfer_times import Arrivals, Computation, TransferWatcher, join_transfers, that_leave


@dataclass(frozen=True)
class Trace:
    """The measured timeline and memory of some steps.

    Attributes:
        timeline: the spans of each rank, in seconds from the start of the trace.
        memory: the bytes that each rank holds after each of its computations.
        transfers: the messages between ranks, the sums over replicas and the moves to host memory and back, each from post to arrival. In a
            run of several processes each process has its own workers' transfers, and unknown times are NaN; `join_transfers` joins them.
    """

    timeline: Timeline
    memory: MemoryTimeline
    transfers: tuple[Transfer, ...] = ()

    def __repr__(self) -> str:
        return f"Trace({sum(map(len, self.timeline))} computations of {len(self.timeline)} ranks, {len(self.transfers)} transfers)"

    def grid(self, tick: float | None = None, transfers: bool = False) -> str:
        """Return the timeline as text, in the form of `Prediction.grid`.

        Args:
            tick: the length of a tick in seconds; by default the shortest computation.
            transfers: whether rows for transfers and sums follow the rows of the ranks.
        """
        return draw_grid(self.timeline, tick, transfers=self.transfers if transfers else ())


class Tracer:
    """Measures some steps: pass it to `Pipeline.step` (and `drain`) as `observe`, then call `finish`.

    For each rank a thread waits for the rank's computations, one after the other, and records when each ends. A computation counts as begun
    when it has been dispatched, its input has arrived, and the previous computation on its device has ended. The run does not wait for the
    measurement, but the measurement costs tens to hundreds of microseconds per computation: measure a few steps, not the whole run. A
    `with` statement closes an unfinished tracer.

    Args:
        plan: the plan of the run.

    Example:
        >>> tracer = Tracer(Plan.even("ab", 2, "gpipe", 1))  # then: state, metrics = pipe.step(state, batch, observe=tracer)
        >>> tracer.finish().timeline
        ((), ())
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan = plan.counted
        self._seen: set[type] = set()  # the types of the observed instructions
        self._began = time.perf_counter()
        self._open = True
        _switch_often(True)
        self._watchers = [_Watcher(self._began, len(workers)) for workers in plan.rank_workers]
        self._transfers = TransferWatcher(plan, self._began)

    def __call__(self, event: Event) -> None:
        """Observe one instruction."""
        self._seen.add(type(event.instruction))
        w = event.instruction.worker
        watcher = self._watchers[self._plan.rank_of[w]]
        if event.done is not None:
            assert isinstance(event.instruction, _Instruction)
            watcher.watch(event.instruction, event.done, w, event.state)
        elif watcher.is_shared:
            watcher.look(w, event.state)
        self._transfers.note(event)

    def finish(self) -> Trace:
        """Wait until all dispatched computations have ended, and return the measurement.

        Raises:
            RuntimeError: a computation failed, for example out of memory. This is the error of the device.
        """
        self.close()
        for watcher in self._watchers:
            if watcher.ends.error is not None:
                raise watcher.ends.error
        ranks = [watcher.computations for watcher in self._watchers]
        waits_for = _waits_for(ranks, self._plan, {room for room, hooks in programs().items() if self._seen & {*hooks.instructions}})
        ends = _consistent({key_of(c.instruction): c.end for row in ranks for c in row}, waits_for)
        starts = _starts(ranks, waits_for, ends)
        transfers = self._transfers.transfers(starts, ends)
        return Trace(
            _timeline(ranks, self._plan, starts, ends),
            tuple(watcher.memory(ends) for watcher in self._watchers),
            join_transfers(transfers) if jax.process_count() == 1 else transfers,
        )

    def close(self) -> None:
        """Wait until all dispatched computations have ended, and stop measuring."""
        if self._open:
            self._open = False
            for watcher in self._watchers:
                watcher.ends.stop()
            self._transfers.close()
            _switch_often(False)

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_tracers = 0
_usual_interval = sys.getswitchinterval()


def _switch_often(begin: bool) -> None:
    """Make Python's threads switch more often while a tracer is open, so that they record the end of a computation promptly."""
    global _tracers, _usual_interval
    if begin and _tracers == 0:
        _usual_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(_usual_interval, 5e-4))  # seconds
    _tracers += 1 if begin else -1
    if _tracers == 0:
        sys.setswitchinterval(_usual_interval)


_Instruction = Compute | Update
_Key = Computation


@dataclass(frozen=True)
class _Computation:
    instruction: _Instruction
    device: jax.Device
    dispatched: float
    end: float


class _Watcher:
    """Records the computations of one rank, and the bytes that the rank holds.

    Attributes:
        ends: the thread that waits for the computations.
        is_shared: whether several workers take turns on the rank.
    """

    def __init__(self, began: float, workers: int) -> None:
        self.computations: list[_Computation] = []
        self.is_shared = workers > 1
        self._began = began
        self._sizes: dict[int, dict[str, int]] = {}  # by worker, the sizes of parts of constant size: optimizer, accumulators, layer state
        # by worker: the last versions and their bytes
        self._weights: dict[int, tuple[tuple[tuple[int, int, bool], ...], dict[int, int]]] = {}
        self._parts: dict[int, _Parts] = {}
        self._first_parts: dict[int, _Parts] = {}
        self._buffers: dict[int, _Buffers] = {}  # by worker
        self._samples: list[_Sample] = []
        self.ends = Arrivals(self._note_end)

    def watch(self, instruction: _Instruction, done: jax.Array, worker: int, state: WorkerState) -> None:
        """Record a computation of a worker, and the bytes that the rank holds when it has ended."""
        self.look(worker, state)
        sample = _Sample(dict(self._parts), *_sum_buffers(self._buffers.values()))
        self.ends.put((instruction, done, time.perf_counter() - self._began, sample), done)

    def _note_end(self, computation: "tuple[_Instruction, jax.Array, float, _Sample]") -> None:
        instruction, done, dispatched, sample = computation
        end = time.perf_counter() - self._began
        device = min(done.devices(), key=lambda device: device.id)  # the first device of a mesh
        self.computations.append(_Computation(instruction, device, dispatched, end))
        self._samples.append(sample)

    def look(self, worker: int, state: WorkerState) -> None:
        """Record the bytes that a worker holds."""
        sizes = self._sizes.setdefault(worker, {})
        # there are fewer entries while parts are set aside
        count = 0 if state.accumulators is None else len(state.accumulators.get("gradients", ()))
        summed = f"accumulators of {count} entries"
        optimizer = "optimizer elsewhere" if any(map(is_away, jax.tree.leaves(state.optimizer))) else "optimizer"
        like_optimizer = state.optimizer, state.capabilities
        named = (optimizer, like_optimizer), (summed, state.accumulators), ("state", state.layer_state)
        for name, tree in named:
            if sizes.get(name, 0) == 0:  # accumulators may be missing at first
                sizes[name] = sum(map(_on_each_device, jax.tree.leaves(tree)))
        # Parts of a new version may still be missing.
        params = {version: state.weights.read(version) for version in state.weights.versions}
        versions = tuple((version, len(tree), any(map(is_away, jax.tree.leaves(tree)))) for version, tree in params.items())
        known, weights = self._weights.get(worker, ((), {}))
        if versions != known:
            weights = _bytes_by_version(state.weights)
            self._weights[worker] = versions, weights
        self._parts[worker] = _Parts(weights, sizes[optimizer], sizes[summed], sizes["state"])
        self._first_parts.setdefault(worker, self._parts[worker])
        self._buffers[worker] = _Buffers.of(state)

    def memory(self, ends: Mapping[_Key, float]) -> tuple[MemorySample, ...]:
        """Return the memory of the rank after each computation.

        A worker that has not begun counts with the memory that it has at its first instruction.
        """
        samples = []
        for computation, (parts, residuals, buffers) in zip(self.computations, self._samples, strict=True):
            workers = [parts.get(w, first) for w, first in self._first_parts.items()]
            numbers = sorted({version for part in workers for version in part.weights})
            weights = {version: sum(part.weights.get(version, 0) for part in workers) for version in numbers}
            optimizer, accumulators, state = (sum(sizes) for sizes in zip(*(part[1:] for part in workers), strict=True))
            samples.append(
                MemorySample(ends[key_of(computation.instruction)], weights, optimizer, accumulators, residuals, buffers + state)
            )
        return tuple(samples)


def _bytes_by_version(weights: WeightVersions) -> dict[int, int]:
    """Return the bytes of each version. Frozen parameters, which all versions share, count with the oldest version."""
    counted, sizes = set[int](), dict[int, int]()
    for version in weights.versions:
        leaves = {id(leaf): leaf for leaf in jax.tree.leaves(weights.read(version))}
        sizes[version] = sum(_on_each_device(leaf) for key, leaf in leaves.items() if key not in counted)
        counted |= leaves.keys()
    return sizes


class _Parts(NamedTuple):
    """The bytes of a worker's parts: weights by version, optimizer state, accumulators, layer state."""

    weights: dict[int, int]
    optimizer: int
    accumulators: int
    state: int


class _Sample(NamedTuple):
    """The bytes that a rank holds: the known parts of its workers, residuals and other buffers."""

    parts: dict[int, _Parts]
    residuals: int
    buffers: int


class _Buffers(NamedTuple):
    """The bytes of the arrays of microbatches in flight and pending updates, by array id: arrays kept for backwards, and others."""

    residuals: dict[int, int]
    other: dict[int, int]

    @classmethod
    def of(cls, state: WorkerState) -> "_Buffers":
        """Return the buffers of a worker."""
        fields = [item for entries in (state.microbatches, state.updates) for entry in entries.values() for item in entry.items()]
        kept = [tree for name, tree in fields if name in ("residuals", "stash")]
        others = [tree for name, tree in fields if name not in ("residuals", "stash")]
        return cls(*({id(leaf): _on_each_device(leaf) for leaf in jax.tree.leaves(trees)} for trees in (kept, others)))


def _sum_buffers(of_workers: Collection[_Buffers]) -> tuple[int, int]:
    """Return the bytes of residuals and of other buffers. An array in several buffers counts once, as a residual if it is one anywhere."""
    residuals = {key: size for each in of_workers for key, size in each.residuals.items()}
    other = {key: size for each in of_workers for key, size in each.other.items() if key not in residuals}
    return sum(residuals.values()), sum(other.values())


def _on_each_device(leaf: Any) -> int:
    """Return the bytes of an array on each of its devices; an array in transfer from another process counts with its future bytes."""
    if is_away(leaf):
        return 0
    return shard_bytes(leaf) if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 else leaf.nbytes


def _waits_for(ranks: Sequence[Sequence[_Computation]], plan: Plan, uses: Collection[str]) -> dict[_Key, list[_Key]]:
    """Return for each computation those that it waits for: the ones that make its inputs, and the previous one on its rank."""
    keys = [[key_of(c.instruction) for c in row] for row in ranks]
    computations = dict.fromkeys(itertools.chain(*keys))
    instructions = [c.instruction for row in ranks for c in row]
    more = [waits_for(plan, instructions) for waits_for in hooks("waits_for", runtimes_of(plan, uses))]
    needed = {key: [*_inputs(key, plan), *(other for each in more for other in each.get(key, ()))] for key in computations}
    waits_for = {key: [k for k in keys_before if k in computations] for key, keys_before in needed.items()}
    for row in keys:
        for before, after in itertools.pairwise(row):
            waits_for[after].append(before)
    return waits_for


def _starts(
    ranks: Sequence[Sequence[_Computation]], waits_for: Mapping[_Key, Sequence[_Key]], ends: Mapping[_Key, float]
) -> dict[_Key, float]:
    """Return the start of each computation, in the order of their ends: the time when all computations that it waits for have ended."""
    computations = {key_of(c.instruction): c for row in ranks for c in row}
    starts: dict[_Key, float] = {}
    free: dict[jax.Device, float] = {}  # when the previous computation on the device ended
    for key in sorted(computations, key=ends.__getitem__):  # stable: equal times stay in a rank's order
        c = computations[key]
        starts[key] = min(max([c.dispatched, free.get(c.device, 0.0), *(ends[k] for k in waits_for[key])]), ends[key])
        free[c.device] = ends[key]
    return starts


def _timeline(ranks: Sequence[Sequence[_Computation]], plan: Plan, starts: Mapping[_Key, float], ends: Mapping[_Key, float]) -> Timeline:
    """Return the spans of each rank."""
    computations = {key_of(c.instruction): c for row in ranks for c in row}
    rows: list[list[Span]] = [[] for _ in ranks]
    for key, start in starts.items():
        i, end, rank = computations[key].instruction, ends[key], plan.rank_of[key[0]]
        row, chunk = rows[rank], plan.rank_workers[rank].index(key[0])
        if not isinstance(i, Update):
            row.append(Span(i.shown, i.microbatch, i.version, start, end, chunk=chunk, part=int(i.piece) if i.piece else None))
        elif (place := max((n for n, span in enumerate(row) if span.chunk == chunk), default=None)) is not None:
            row[place] = row[place]._replace(updates=True, update_time=end - start, update_wait=start - row[place].end)
    return tuple(tuple(row) for row in rows)


def key_of(instruction: _Instruction) -> _Key:
    """Return the key of a computation or an update in a trace."""
    if isinstance(instruction, Update):
        return instruction.worker, "U", instruction.batch, 0
    return instruction.worker, instruction.op, instruction.microbatch, instruction.following


def _inputs(key: _Key, plan: Plan) -> list[_Key]:
    """Return the computations that may make a computation's input: ops of a neighbouring stage; for an update, backwards."""
    worker, op, k, _ = key
    s = plan.workers[worker][0]
    match OPS[op].reads if op in OPS else "":  # an update is not an op
        case "inputs":
            return that_leave("output", plan, s - 1, k) if s > 0 else []
        case "residuals":
            return that_leave("gradient", plan, s + 1, k) if s + 1 < plan.depth else []
        case "stash":
            return []
        case _:
            each = plan.row_slices  # the backward of the first slice of a row is the last one
            first = (k + 1) * plan.microbatches_per_update(s) - plan.replicas[s] * each
            replicas = [plan.workers[worker][1]] if plan.has_parallel_pipelines else range(plan.replicas[s])  # only these update
            return [key for j in replicas for key in that_leave("accumulators", plan, s, first + j * each)]


def _consistent(ends: dict[_Key, float], waits_for: dict[_Key, list[_Key]]) -> dict[_Key, float]:
    """Correct ends that a thread recorded late: a computation ends no later than the computations that wait for it."""
    changed = True
    while changed:
        changed = False
        for key in sorted(ends, key=ends.__getitem__, reverse=True):
            for before in waits_for[key]:
                if ends[before] > ends[key]:
                    ends[before] = ends[key]
                    changed = True
    return ends


def fit_costs(costs: Sequence[StageCost], timeline: Timeline, plan: Plan | None = None) -> tuple[StageCost, ...]:
    """Replace the times in `costs` with each stage's median forward, backward and update times in a measured timeline.

    If forward and backward are one computation, its time is divided in their ratio in `costs`, or in `Pipeline.costs` if both are
    0. If only the halves of backwards were measured, a whole backward takes their sum; if only whole backwards were measured, the halves
    keep their ratio. Times without a measurement become 0. If the costs have the costs of slices of the rows, these are fitted, too.

    Args:
        costs: one cost for each stage; their bytes are kept.
        timeline: the timeline in seconds, with a row for each rank.
        plan: the plan that ran; None: one rank for each stage.

    Raises:
        InputError: the number of costs does not fit the plan, or the number of ranks does not fit the timeline.
    """
    ranks = [(s,) for s in range(len(costs))] if plan is None else [tuple(plan.workers[w][0] for w in row) for row in plan.rank_workers]
    stages = len(costs) if plan is None else plan.depth
    if len(costs) != stages or len(ranks) != len(timeline):
        raise InputError(
            f"fit_costs: expected one cost for each of {stages} stages and a timeline of {len(ranks)} ranks, "
            f"found {len(costs)} costs and {len(timeline)} rows"
        )
    spans: list[list[Span]] = [[] for _ in costs]
    for stages_of_rank, row in zip(ranks, timeline, strict=True):
        for span in row:
            spans[stages_of_rank[span.chunk]].append(span)
    return tuple(map(_fit, costs, spans))


def _fit(cost: StageCost, spans: Sequence[Span]) -> StageCost:
    if count := len(cost.by_slice):
        update = _median([span.update_time for span in spans if span.updates])
        slices = [_fit(each, [span for span in spans if span.microbatch % count == n]) for n, each in enumerate(cost.by_slice)]
        slices = [replace(each, update=update) for each in slices]
        means: dict[str, Any] = {name: statistics.fmean(getattr(each, name) for each in slices) for name in TIMES}
        return replace(cost, by_slice=tuple(slices), update=update, **means)
    fitted = _fit_whole(cost, whole_spans(spans))
    for fit_cost in hooks("fit_cost", programs().values()):
        fitted = fit_cost(fitted, spans)
    return fitted


def _fit_whole(cost: StageCost, spans: Sequence[Span]) -> StageCost:
    pieces = {op.pieces for op in OPS.values()}
    times = {"".join(parts): _median([span.end - span.start for span in spans if OPS[span.op].pieces == parts]) for parts in pieces}
    update = _median([span.update_time for span in spans if span.updates])
    if times["W"]:
        forward, first = times["F"], times["I"]
        if times["FI"] and not forward:
            share = _share(cost.forward, cost.backward_input, 1 / 2)
            forward, first = times["FI"] * share, times["FI"] * (1 - share)
        return replace(cost, forward=forward, backward=first + times["W"], backward_input=first, backward_weight=times["W"], update=update)
    forward, whole = times["F"], times["B"]
    if times["FB"]:
        share = _share(cost.forward, cost.backward, 1 / 3)
        forward, whole = times["FB"] * share, times["FB"] * (1 - share)
    first = cost.backward_input / ((cost.backward_input + cost.backward_weight) or 1.0)
    return replace(cost, forward=forward, backward=whole, backward_input=whole * first, backward_weight=whole * (1 - first), update=update)


def _share(part: float, other: float, usual: float) -> float:
    """Return the share of `part` in the sum of both times, or `usual` if both are 0 because an earlier fit has measured neither."""
    return part / (part + other) if part + other else usual


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
