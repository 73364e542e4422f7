"""The messages by which replicas send each other the weights that they have updated: their lowering, verification and price."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, permutations

from jpipe.capabilities.protocol import LoweringHooks, MessageHooks, ProgramHooks, VerifyHooks
from jpipe.plan import Plan, Stage
from jpipe.programs._costs import LayerCost, StageCost
from jpipe.programs._instructions import Program, Receive, Send, Update
from jpipe.programs._route import last_microbatch, transfer
from jpipe.programs._verify import Verifier
from jpipe.programs.lowering import Run
from jpipe.programs.lowering._lower import without_training
from jpipe.programs.lowering._progress import Worker
from jpipe.programs.prediction import _actions as prediction
from jpipe.programs.prediction._prices import Prices

# Lowering ------------------------------------------------------------------------------------------------------------------


class _Lowering(LoweringHooks):
    """Writes the messages of a run: once all replicas have made an update, they send each other the weights that they have updated."""

    def __init__(self, run: Run) -> None:
        self._run, self._plan = run, run.plan

    def settle(self, worker: Worker) -> bool:
        """Make a pending update half a batch after its gradients, so that the other half is left for messages with the weights.

        Return False if the worker must wait for the sum of that update.
        """
        if len(worker.pending) != 1:
            return True
        run, s = self._run, worker.stage
        each, batch = run.each[s], worker.pending[0].batch
        if run.routed[s] or each == 1 or worker.backwards < (batch + 1) * each + each // 2:
            return True
        summed = run.available.time("sum", s, batch, worker)
        if summed is None:
            return False
        worker.clock = max(worker.clock, summed)
        run.updates.make(worker, worker.clock)
        return True

    def after_update(self, time: int, worker: int, batch: int, retires: int | None) -> None:
        """Once all replicas have made the update, write the messages by which they send each other the updated weights."""
        run, (s, _) = self._run, self._plan.workers[worker]
        if run.replicas[s] == 1 or (last := run.updates.come(s, time, "update", batch)) is None:
            return
        k = last_microbatch(self._plan, batch)
        for w, other in permutations(self._plan.stage_workers[s], 2):
            run.listing.once(last, transfer(w, other, k, "weights"))
        run.available.announce("weights", s, batch, last)

    def version_ready(self, worker: Worker, version: int) -> int | None:
        """Return the time from which a version has the weights of the other replicas, or None if this is not known yet."""
        s = worker.stage
        if self._run.replicas[s] == 1 or version <= self._run.start:
            return 0
        return self._run.available.time("weights", s, version - 1, worker)


def lower_weights(plan: Plan, stages: Collection[int], batch: int, *, workers: Collection[int]) -> Program:
    """Return a program by which the replicas of stages send each other their shares of the weights after `batch` batches."""
    pairs = chain.from_iterable(permutations(plan.stage_workers[s], 2) for s in stages)
    moves = chain.from_iterable(transfer(w, other, last_microbatch(plan, batch - 1), "weights") for w, other in pairs)
    return without_training(plan, [i for i in moves if i.worker in workers], workers)


# Verification --------------------------------------------------------------------------------------------------------------


class _Verification(VerifyHooks):
    """Tracks which versions of one worker lack weights that other replicas have updated."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self._plan = verifier, verifier.plan
        self._others = set(verifier.plan.stage_workers[verifier.stage]) - {verifier.number}  # the replicas that update the other weights
        self._missing: dict[int, set[int]] = {}  # by version, the replicas that have not sent their weights yet
        self.sends, self.receives = {"weights": self._updated_with}, {"weights": self._receive}

    def _receive(self, i: Receive) -> None:
        missing = self._missing.get(version := self._updated_with(i), set())
        if i.source not in missing:
            self._verifier.fail(f"{i}: version {version} already has the weights of that worker")
        missing.remove(i.source)

    def _updated_with(self, i: Send | Receive) -> int:
        """Return the version of the weights in a message, and check that the worker has this version: it has updated its own part."""
        version = i.microbatch // self._plan.microbatches_per_update(self._verifier.stage) + 1
        if version not in self._verifier.versions:
            self._verifier.fail(f"{i} before version {version} exists; the versions are {sorted(self._verifier.versions)}")
        return version

    def updated(self, i: Update) -> None:
        self._missing[i.batch + 1] = set(self._others)

    def whole(self, version: int, where: object) -> None:
        """Check that all other replicas have sent the weights of a version that they update."""
        if missing := self._missing.get(version):
            self._verifier.fail(f"{where}: version {version} lacks the weights that workers {sorted(missing)} have updated")

    def freed(self, version: int) -> None:
        self._missing.pop(version, None)


# Price ---------------------------------------------------------------------------------------------------------------------


def stage_cost(plan: Plan, stage: Stage, cost: StageCost, layers: Mapping[str, LayerCost]) -> StageCost:
    """Return the cost of a stage that divides its optimizer state among its replicas. Shared parameters count with each of their layers."""
    if stage.replicas == 1:
        return cost
    layers_of_stage = [layers[layer_id] for layer_id in stage.layers]
    owners = deal([(layer.optimizer, layer.trained) for layer in layers_of_stage], stage.replicas)
    shares = [
        [layer for layer, owner in zip(layers_of_stage, owners, strict=True) if owner == replica] for replica in range(stage.replicas)
    ]
    return replace(
        cost,
        optimizer=max(sum(layer.optimizer for layer in share) for share in shares),
        updated=tuple(sum(layer.trained for layer in share) for share in shares),
        update=max(sum(layer.update for layer in share) for share in shares),
    )


def deal(sizes: Sequence[tuple[int, int]], replicas: int) -> list[int]:
    """Return the replica of each part of a stage's optimizer state: the largest parts first, each to the least loaded replica.

    `sizes` are the bytes of optimizer state and of weights; the weights decide if parts have equal optimizer state.
    """
    loads, owners = [(0, 0)] * replicas, [0] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda part: sizes[part], reverse=True):
        owner = owners[part] = min(range(replicas), key=loads.__getitem__)
        loads[owner] = (loads[owner][0] + sizes[part][0], loads[owner][1] + sizes[part][1])
    return owners


def _price(prices: Prices, source: int, to: int) -> tuple[int, int, int]:
    """Return the bytes that a message with updated weights frees at the sender (none), carries, and adds at the receiver."""
    s, replica = prices.plan.workers[source]
    size = prices.share(s, [replica])
    return 0, size, size


def _version(worker: prediction.Worker, k: int) -> int:
    """Return the version that the update after microbatch k makes."""
    return k // worker.all.plan.microbatches_per_update(worker.stage) + 1


def _received(worker: prediction.Worker, i: Receive) -> None:
    """Note that a version has received the weights from another replica."""
    version, (_, sender) = _version(worker, i.microbatch), worker.all.plan.workers[i.source]
    worker.versions[version] = tuple(replica for replica in worker.versions[version] if replica != sender)
    worker.rank.note_versions()


WEIGHTS = MessageHooks("w", price=_price, awaited=lambda worker, source, k: (source, _version(worker, k)), received=_received)

PROGRAM = ProgramHooks(messages={"weights": WEIGHTS}, carries_over=True, stage_cost=stage_cost, lower=_Lowering, verify=_Verification)
