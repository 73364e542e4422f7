"""The state of a simulation: the clocks of ranks, the bytes of workers, and what these wait for."""

import math
from typing import NamedTuple

from jpipe.ops import Op
from jpipe.plan import Kept, Plan
from jpipe.programs._costs import Passed, StageCost
from jpipe.programs._instructions import Compute, Fetch, Offload
from jpipe.programs._timeline import MemorySample, Span


class Rank:
    """The clock, the spans and the bytes of one rank."""

    def __init__(self, number: int, has_samples: bool) -> None:
        self.number, self.has_samples = number, has_samples
        self.clock, self.busy, self.moved = 0.0, 0.0, 0
        self.moved_by_batch: int | None = None  # what it moves in each batch, if these are counted
        self.times: list[float] = []  # when what it needed was there, in the current batch
        self.spans_before = 0  # the number of spans in earlier batches
        self.spans: list[Span] = []
        self.workers: list[Worker] = []
        self.live = self.most_live = self.peak = 0
        self.in_host = self.most_in_host = self.moved_to_host = 0
        self.host_free = {Offload: 0.0, Fetch: 0.0}  # when the link to the host is free, in each direction
        self.samples: list[MemorySample] = []

    def begin(self) -> None:
        """Add up the bytes of all its workers at the beginning."""
        self.live = self.most_live = sum(worker.memory.at_first for worker in self.workers)
        self.in_host = self.most_in_host = sum(worker.memory.cost.optimizer for worker in self.workers if worker.memory.away)
        self.sample()

    def wait(self, until: float) -> None:
        self.clock = max(self.clock, until)

    def end_batch(self, plan: Plan) -> list[float]:
        """Count what follows as the next batch, with the same instructions, and return when what happened in this one did.

        Returns:
            The starts of computations, and when what was needed was there.
        """
        if self.moved_by_batch is None:
            self.moved_by_batch = self.moved
        times = [span.start for span in self.spans[self.spans_before :]]
        times += [time for time in self.times if time]  # 0 stands for what did not have to come
        self.spans_before = len(self.spans)
        self.times.clear()
        for worker in self.workers:
            worker.begin_batch(plan)
        return times

    def add(self, size: int) -> None:
        self.live += size
        if self.live > self.most_live:
            self.most_live = self.live

    def add_in_host(self, size: int) -> None:
        self.in_host += size
        self.most_in_host = max(self.most_in_host, self.in_host)

    def update(self, chunk: int, seconds: float) -> None:
        """Note an update of one of its stages, on the span of the stage's last computation."""
        self.clock += seconds
        self.busy += seconds
        place = next(n for n in range(len(self.spans) - 1, -1, -1) if self.spans[n].chunk == chunk)
        last = self.spans[place]
        self.spans[place] = last._replace(updates=True, update_time=seconds, update_wait=self.clock - seconds - last.end)
        self.sample()

    def sample(self) -> None:
        if not self.has_samples:
            return
        first, *further = (worker.memory for worker in self.workers)
        weights, (optimizer, accumulators, residuals) = first.by_version(), first.parts()
        for memory in further:
            more = memory.by_version()
            weights = {version: weights.get(version, 0) + more.get(version, 0) for version in sorted({*weights, *more})}
            more_optimizer, more_accumulators, more_residuals = memory.parts()
            optimizer, accumulators, residuals = optimizer + more_optimizer, accumulators + more_accumulators, residuals + more_residuals
        other = self.live - sum(weights.values()) - optimizer - accumulators - residuals
        self.samples.append(MemorySample(self.clock, weights, optimizer, accumulators, residuals, other))


class Memory:
    """The bytes of one worker, which are added to those of its rank."""

    def __init__(self, cost: StageCost, versions: set[int], rank: Rank, optimizer_in_host: bool) -> None:
        self.cost, self.rank = cost, rank
        self.away: set[tuple[Kept, int]] = {("optimizer", 0)} if optimizer_in_host else set()  # what is in host memory
        self.weights = dict.fromkeys(sorted(versions), cost.trained)  # by version; replaced and not changed: samples share it
        self.at_first = bytes_at_first(cost, len(versions), self.optimizer)
        self.most_versions = len(versions)
        self.waiting = {"residuals": 0, "stash": 0}  # how many microbatches have left each of these for a later op
        self.accumulates = True  # whether there is memory for gradients: not between a batch set aside and the next backward

    @property
    def optimizer(self) -> int:
        """The bytes of the optimizer state on the device."""
        return 0 if ("optimizer", 0) in self.away else self.cost.optimizer

    def add(self, size: int) -> None:
        self.rank.add(size)

    def move(self, i: Offload | Fetch) -> int:
        """Count something in host memory and not on the device, or the reverse; return its bytes."""
        cost = self.cost
        size = {"optimizer": cost.optimizer, "versions": cost.trained, "residuals": cost.residuals, "stash": cost.stash}[i.what]
        to_host = isinstance(i, Offload)
        (self.away.add if to_host else self.away.remove)((i.what, i.number))
        self.add(-size if to_host else size)
        self.rank.add_in_host(size if to_host else -size)
        self.rank.moved_to_host += size
        return size

    def accumulate(self) -> None:
        if not self.accumulates:
            self.accumulates = True
            self.add(self.cost.accumulators)

    def update(self, version: int, retired: int | None) -> None:
        """Make weights `version`, in the memory of `retired` if there is one."""
        if retired is None:
            self.add(self.cost.trained)
        self.weights = {v: size for v, size in self.weights.items() if v != retired} | {version: self.cost.trained}
        self.most_versions = max(self.most_versions, len(self.weights))

    def by_version(self) -> dict[int, int]:
        """Return the bytes of each version on the device; what all of them share counts with the oldest one."""
        weights = {v: size for v, size in self.weights.items() if ("versions", v) not in self.away} if self.away else self.weights
        if not self.cost.frozen or not weights:
            return weights
        oldest = min(weights)
        return weights | {oldest: weights[oldest] + self.cost.frozen}

    def complete(self, version: int, size: int) -> None:
        """Add bytes to a version; negative ones are still to arrive."""
        self.weights = self.weights | {version: self.weights[version] + size}
        self.add(size)

    def release(self, version: int) -> None:
        self.weights = {v: size for v, size in self.weights.items() if v != version}
        if ("versions", version) in self.away:
            self.away.remove(("versions", version))
            self.rank.add_in_host(-self.cost.trained)
        else:
            self.add(-self.cost.trained)

    def compute(self, outputs: int, inputs: int) -> None:
        """Hold the bytes of outputs and inputs while a computation runs, then only the outputs."""
        self.run(outputs, inputs)
        if self.rank.has_samples:
            self.rank.sample()

    def run(self, outputs: int, inputs: int) -> None:
        """Do the same for a program that is no computation of the timeline."""
        rank = self.rank
        running = rank.live + outputs + self.cost.temporary
        if running > rank.peak:
            rank.peak = running
        rank.add(outputs - inputs)

    def parts(self) -> tuple[int, int, int]:
        """Return the bytes of optimizer state, of accumulators, and of residuals and stashes.

        What compressed sums have lost is with the optimizer state.
        """
        cost = self.cost
        waiting = dict(self.waiting)
        for what, _ in self.away:
            if what in waiting:
                waiting[what] -= 1
        return (
            self.optimizer + cost.sum_error,
            cost.accumulators,
            waiting["residuals"] * cost.residuals + waiting["stash"] * cost.stash,
        )


def bytes_at_first(cost: StageCost, versions: int, optimizer: int) -> int:
    """Return the bytes of a worker at the beginning, with that many weight versions, and bytes of optimizer state on the device."""
    constant = cost.frozen + cost.state + cost.accumulators + cost.sum_error
    return versions * cost.trained + optimizer + constant


class Effect(NamedTuple):
    """What an op does at a stage.

    Attributes:
        op: the op.
        needs: the message that it waits for; "": none.
        seconds: how long it takes.
        allocated: the bytes that it makes.
        freed: the bytes that it frees at its end.
        waiting: how many residuals and stashes more there are then.
        makes_output: whether it makes an output for the next stage.
        makes_gradient: whether it makes a gradient for the stage before.
    """

    op: Op
    needs: str
    seconds: float
    allocated: int
    freed: int
    waiting: tuple[tuple[str, int], ...]
    makes_output: bool
    makes_gradient: bool


def effect_of(op: Op, cost: StageCost, s: int, depth: int) -> Effect:
    """Return what an op does at stage s."""
    is_last, is_alone, left = s == depth - 1, s == (0 if op.begins else depth - 1), {"residuals": cost.residuals, "stash": cost.stash}
    waiting: dict[str, int] = {kind: 1 for kind in left if kind in op.leaves}
    allocated = sum(left[kind] for kind in waiting) + (cost.gradient if op.gives_gradient else 0)
    if "output" in op.leaves:
        allocated += cost.message if is_last else cost.outputs - cost.kept_outputs
    freed = cost.inputs + cost.labels
    if not op.begins:
        freed = left[op.reads] + (cost.message if op.reads == "residuals" else 0)
        waiting[op.reads] = waiting.get(op.reads, 0) - 1
    return Effect(
        op=op,
        needs="" if is_alone else _MESSAGES[op.reads],
        seconds=cost.seconds(op.name),
        allocated=allocated,
        freed=freed,
        waiting=tuple(waiting.items()),
        makes_output="output" in op.leaves and not is_last,
        makes_gradient=op.gives_gradient and s > 0,
    )


_MESSAGES = {"inputs": "activation", "residuals": "gradient", "stash": ""}
"""The message that an op waits for, by what it reads."""

Key = tuple[str, int]
"""What a worker waits for, or has made: a message and its microbatch, a sum and its batch, or a part of a version and its number."""

NOT_YET = math.inf
"""The time of what is not known to come yet."""


class Worker:
    """The messages that one worker waits for, and its memory."""

    def __init__(self, plan: Plan, number: int, cost: StageCost, effects: dict[str, Effect], rank: Rank, versions: set[int]) -> None:
        self.number, (self.stage, self.replica) = number, plan.workers[number]
        self.chunk, self.cost, self.rank = plan.rank_workers[plan.rank_of[number]].index(number), cost, rank
        self.memory = Memory(cost, versions, rank, plan.offloads("optimizer", self.stage))
        self.moved: dict[tuple[str, int], float] = {}  # when what is moved to or from host memory is there
        self.effects = effects  # by op
        self.ready: dict[Key, float] = {}  # when messages were made or arrived, and sums
        self.updated = 0.0  # when its last update was over
        self.microbatches_before = self.updates_before = 0  # in earlier executions of the same instructions
        self.passed: dict[int, list[Passed]] = {}  # by microbatch, what the stage before on the same rank keeps, too
        parts, others = plan.stages[self.stage].sum_parts, plan.stage_workers[self.stage] if plan.shard_optimizer else ()
        self.sums = [sum_name(part) for part in (range(len(parts)) if parts else (None,))]
        self.shares = [share_name(other) for other in others if other != number]  # of each version, which other replicas update
        rank.workers.append(self)

    def wait(self, until: float) -> None:
        self.rank.wait(until)

    def compute(self, i: Compute, op: Op, seconds: float) -> None:
        rank, needs = self.rank, self.effects[i.op].needs
        if needs:
            self.ready.pop((needs, i.microbatch), None)
        if self.moved:
            rank.wait(max(self.moved.get(("versions", i.version), 0.0), self.moved.pop((op.reads, i.microbatch), 0.0)))
        starts = rank.clock
        rank.clock = ends = starts + seconds
        rank.busy += seconds
        k, version = self.microbatches_before + i.microbatch, self.updates_before + i.version
        rank.spans.append(Span(op.name, k, version, starts, ends, False, 0.0, 0.0, self.chunk, i.part))

    def begin_batch(self, plan: Plan) -> None:
        """Count what follows as the batch after the one that was executed."""
        self.microbatches_before += plan.microbatches
        self.updates_before += plan.updates_per_batch(self.stage)

    def forget(self, version: int) -> None:
        """Remove the times of a version that is no longer alive."""
        self.moved.pop(("versions", version), None)
        for share in self.shares:
            self.ready.pop((share, version), None)


def sum_name(part: int | None) -> str:
    return "sum" if part is None else f"sum of part {part}"


def share_name(worker: int) -> str:
    return f"weights of {worker}"
