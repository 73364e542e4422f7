"""A plain float64 reference of what a run computes: one microbatch after the other in NumPy, every version kept, nothing overlapped.

It is written from the pages in docs/explanation/ and docs/how-to/ and shares no code with the packages: of a plan it reads the fields, of a
schedule the formula of the versions in `tests/jpipe/reference.py`. `Run` is what every run does. `Capability` names the places at which one
capability changes that; `tests/pairs/capabilities.py` finds them all.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jpipe import Plan
from tests.jpipe.reference import ASYNCHRONOUS, every, version

Array = np.ndarray
Place = tuple[str, str]
"""A parameter: the id of its layer and its name."""


class Model(NamedTuple):
    """Layers that compute tanh((x - mean) w + b) for inputs of the shape (rows, positions, width).

    Attributes:
        layers: their ids, in order.
        tracking: layers whose `mean` is a running mean of their inputs, which is their layer state; that of the others is 0.
        ties: by the second place of a shared parameter the first one, where it is kept.
        frozen: places that are never changed.
        mask: `(layer, k, shape) -> mask` that multiplies the output of a layer for microbatch k of the run in training.
    """

    layers: tuple[str, ...]
    tracking: frozenset[str] = frozenset()
    ties: Mapping[Place, Place] = {}
    frozen: frozenset[Place] = frozenset()
    mask: Callable[[str, int, Sequence[int]], Any] = lambda layer, k, shape: 1.0

    def owner(self, layer: str, name: str) -> Place:
        """Return the place where a parameter is kept."""
        return self.ties.get((layer, name), (layer, name))


def forward(params: Mapping[str, Array], x: Array, mean: Any, mask: Any) -> tuple[Array, tuple[Any, ...]]:
    """Return the output of a layer and what its backward needs."""
    centred = x - mean
    y = np.tanh(centred @ params["w"] + params["b"])
    return y * mask, (centred, y, mask, params["w"])


def backward(kept: tuple[Any, ...], gradient: Array) -> tuple[Array, dict[str, Array]]:
    """Return the gradients of the input and of the parameters of a layer."""
    centred, y, mask, w = kept
    inner = gradient * mask * (1 - y**2)
    return inner @ w.T, {"w": np.einsum("rpi,rpj->ij", centred, inner), "b": inner.sum((0, 1))}


def loss(y: Array, labels: Mapping[str, Array]) -> tuple[float, float, Array]:
    """Return the sum of the masked squared errors, the sum of the mask, and the gradient of the first."""
    difference, mask = y - labels["target"], labels["mask"]
    return (np.square(difference).sum(-1) * mask).sum(), mask.sum(), 2 * difference * mask[..., None]


class Capability:
    """What one capability changes in the rule. `Run` calls each of these at one place; here they change nothing.

    p is a parallel pipeline, s a stage, r a replica of it, u an update of a stage, counted from 0.
    """

    def pipelines(self, plan: Plan) -> int:
        """Return the number of pipelines with weights of their own."""
        return 1

    def begin(self, run: "Run") -> None:
        """Put what is kept from update to update into `run.kept`."""

    def message(self, kind: str, x: Array) -> Array:
        """Return what arrives of the "activations" or "gradients" that a stage sends for a microbatch."""
        return x

    def sent(self, run: "Run", s: int, r: int, place: Place, total: Array, weight: float) -> Array:
        """Return what a replica adds to the sum over the replicas: `total` is its sum over the microbatches of an update."""
        return total

    def gradients(self, run: "Run", p: int, due: Sequence[int], gradients: dict[Place, Array]) -> dict[Place, Array]:
        """Return other gradients for an update of the stages `due`, or note in `run.skipped[p]` that there is no update."""
        return gradients

    def ahead(self, run: "Run", s: int, u: int, change: Array) -> Any:
        """Return how far the weights that are read are ahead of those that the optimizer has made with `change`."""
        return 0.0

    def is_ahead(self, run: "Run", s: int) -> bool:
        """Return whether a stage of this plan ever reads weights that are ahead."""
        return False

    def after(self, run: "Run", s: int, u: int) -> None:
        """Do what follows an update of a stage, once all pipelines have made it."""

    def read(self, run: "Run", v: int, weights: str, params: dict[Place, Array]) -> dict[Place, Array]:
        """Return the parameters that `evaluate`, `predict` and `params` have after v batches."""
        return params

    def saved(self, old: "Run", new: "Run", place: Place) -> list[Array] | None:
        """Return the versions that a run under another plan goes on from, the newest first; None: those of the same pipeline."""
        return None

    def resume(self, old: "Run", new: "Run") -> None:
        """Put what a snapshot has of `old.kept` into `new.kept`, after `begin`."""


class Run:
    """A run: `step` and `drain` as a pipeline has them, `read`, `evaluate` and `predict` after them.

    Attributes:
        version: `(s, k) -> v`, the version that microbatch k reads at stage s.
        batch: the number of batches that it has been given.
        weights: of each pipeline, by place: the versions that forwards and backwards read.
        ordinary: the same as the optimizer has made them, before a capability moves them ahead.
        states: of each pipeline, by place: the state of the optimizer.
        layer_state: by layer: of each replica of its stage.
        kept: what capabilities keep.
        metrics: by name of a field of `jpipe.Metrics`, by batch.
    """

    def __init__(
        self,
        plan: Plan,
        model: Model,
        capabilities: Iterable[Capability],
        optimizer: Callable[..., tuple[Array, dict[str, Any]]],
        start: Mapping[Place, Array],
    ) -> None:
        self.plan, self.model, self.capabilities, self.optimizer = plan, model, tuple(capabilities), optimizer
        self.version = functools.cache(functools.partial(version, plan))
        self.batch, self.places = 0, tuple(place for place in start if place not in model.ties)
        self.stage_of = {layer: s for s, stage in enumerate(plan.stages) for layer in stage.layers}
        self.pipelines = max([1, *(each.pipelines(plan) for each in self.capabilities)])
        self.weights = [{place: [start[place]] for place in self.places} for _ in range(self.pipelines)]
        self.ordinary = copy.deepcopy(self.weights)
        self.states: list[dict[Place, dict[str, Any]]] = [{place: {} for place in self.places} for _ in range(self.pipelines)]
        width = len(start[model.layers[0], "b"])
        self.layer_state = {layer: [np.zeros(width)] * self.replicas_of(layer) for layer in model.tracking}
        self.kept: dict[str, Any] = {}
        self.metrics: dict[str, dict[Any, float]] = {name: {} for name in ("losses", "weights", "norms", "loss_scales", "stage_norms")}
        for each in self.capabilities:
            each.begin(self)
        self._sums: list[list[dict[Place, Array]]] = [[] for _ in plan.stages]
        self._weights: list[list[float]] = [[] for _ in plan.stages]
        self._begin_sums(range(plan.depth))
        self._begin_batch()

    def replicas_of(self, layer: str) -> int:
        """Return the number of replicas of a layer's stage."""
        return self.plan.replicas[self.stage_of[layer]]

    def trained(self, s: int) -> list[Place]:
        """Return the places of a stage that are trained; a parameter that stages share is one of each of them."""
        owners = dict.fromkeys(self.model.owner(layer, name) for layer in self.plan.stages[s].layers for name in "wb")
        return [place for place in owners if place not in self.model.frozen]

    def updated_by(self, s: int) -> list[Place]:
        """Return the places that a stage counts as its own: a shared parameter is that of the first stage that holds it."""
        return [place for place in self.places if self.stage_of[place[0]] == s]

    def delay(self, s: int, u: int) -> float:
        """Return the mean age of the weights of an update's gradients, in updates, as the 32 bits that an optimizer gets."""
        count = every(self.plan, s)
        return float(np.float32(u - np.mean([self.version(s, k) for k in range(u * count, (u + 1) * count)])))

    # Training ----------------------------------------------------------------------------------------------------------

    def step(self, x: Array, labels: Mapping[str, Array]) -> None:
        """Train with one batch."""
        m = self.plan.microbatches
        rows = len(x) // m
        for j in range(m):
            k, part = self.batch * m + j, slice(j * rows, (j + 1) * rows)
            self._microbatch(k, x[part], {name: leaf[part] for name, leaf in labels.items()})
            due = [s for s in range(self.plan.depth) if (k + 1) % every(self.plan, s) == 0]
            if due:
                self._update(due)
        self._end_batch()

    def drain(self) -> None:
        """Give all replicas the mean of their layer state if they have kept their own: no work is in flight here."""
        if self.plan.sync_state and self._keeps_own:
            self._average()

    def _microbatch(self, k: int, x: Array, labels: Mapping[str, Array]) -> None:
        """Add the gradients of one microbatch to the sums of the replicas that compute it."""
        p, kept = k % self.pipelines, []
        for layer in self.model.layers:
            s, r = self.stage_of[layer], k % self.replicas_of(layer)
            params = {name: self.weights[p][self.model.owner(layer, name)][self.version(s, k)] for name in "wb"}
            mean = self.layer_state[layer][r] if layer in self.model.tracking else 0.0
            if layer in self.model.tracking:
                states = list(self.layer_state[layer])
                states[r] = 0.9 * mean + 0.1 * x.mean((0, 1))
                self.layer_state[layer] = states
            x, saved = forward(params, x, mean, self.model.mask(layer, k, x.shape))
            x = self._message("activations", layer, x)
            kept.append(saved)
        total, weight, gradient = loss(x, labels)
        for layer, saved in zip(reversed(self.model.layers), reversed(kept), strict=True):
            s, r = self.stage_of[layer], k % self.replicas_of(layer)
            gradient, of_params = backward(saved, self._message("gradients", layer, gradient))
            for name, of_param in of_params.items():
                place = self.model.owner(layer, name)
                self._sums[s][r][place] = self._sums[s][r].get(place, 0.0) + of_param
        for s, replicas in enumerate(self.plan.replicas):
            self._weights[s][k % replicas] += weight
        self._losses[p] += total
        self._counts[p] += weight

    def _message(self, kind: str, layer: str, x: Array) -> Array:
        """Return what comes out of a layer, or back to it, after a link if a stage ends there."""
        s = self.stage_of[layer]
        if s < self.plan.depth - 1 and layer == self.plan.stages[s].layers[-1]:
            for each in self.capabilities:
                x = each.message(kind, x)
        return x

    def _update(self, due: Sequence[int]) -> None:
        """Update the stages `due`: their microbatches are complete."""
        for p in range(self.pipelines):
            gradients = self._mean(p, due)
            for each in self.capabilities:
                gradients = each.gradients(self, p, due, gradients)
            for s in due:
                for place in self.updated_by(s):
                    self._update_one(p, s, place, gradients.get(place))
        for s in due:
            for each in self.capabilities:
                each.after(self, s, len(self.weights[0][self.updated_by(s)[0]]) - 2)
        self._begin_sums(due)

    def _mean(self, p: int, due: Sequence[int]) -> dict[Place, Array]:
        """Return the sums over the replicas of each stage, divided by the weight of their microbatches."""
        means: dict[Place, Array] = {}
        for s in due:
            replicas = range(self.plan.replicas[s]) if self.pipelines == 1 else [p]
            weight = sum(self._weights[s][r] for r in replicas) or 1.0
            for place in self.trained(s):
                total = sum(self._sent(s, r, place) for r in replicas)
                means[place] = means.get(place, 0.0) + total / weight
        return means

    def _sent(self, s: int, r: int, place: Place) -> Array:
        total = self._sums[s][r][place]
        for each in self.capabilities:
            total = each.sent(self, s, r, place, total, self._weights[s][r])
        return total

    def _update_one(self, p: int, s: int, place: Place, gradient: Array | None) -> None:
        """Make the next version of a parameter: from its gradient, or the same again if it is frozen or the update is skipped."""
        read, ordinary = self.weights[p][place], self.ordinary[p][place]
        if gradient is None or self.skipped[p]:
            read.append(read[-1])
            ordinary.append(ordinary[-1])
            return
        u = len(read) - 1
        change, self.states[p][place] = self.optimizer(self.states[p][place], gradient, self.delay(s, u), s)
        ordinary.append(ordinary[-1] + change)
        read.append(ordinary[-1] + sum(each.ahead(self, s, u, change) for each in self.capabilities))

    def _begin_sums(self, due: Iterable[int]) -> None:
        for s in due:
            self._sums[s] = [{} for _ in range(self.plan.replicas[s])]
            self._weights[s] = [0.0] * self.plan.replicas[s]

    def _begin_batch(self) -> None:
        self._losses, self._counts, self.skipped = ([value] * self.pipelines for value in (0.0, 0.0, False))

    def _end_batch(self) -> None:
        """Report the loss of the pipelines that have not skipped the batch, of all if all have."""
        counted = [p for p in range(self.pipelines) if not self.skipped[p]] or range(self.pipelines)
        weight = sum(self._counts[p] for p in counted)
        self.metrics["losses"][self.batch] = sum(self._losses[p] for p in counted) / (weight or 1.0)
        self.metrics["weights"][self.batch] = weight
        if self.plan.sync_state and not self._keeps_own:
            self._average()
        self.batch += 1
        self._begin_batch()

    @property
    def _keeps_own(self) -> bool:
        """Whether each replica keeps its own layer state from batch to batch: without a flush, and in pipelines of their own."""
        return self.plan.schedule in ASYNCHRONOUS or self.pipelines > 1

    def _average(self) -> None:
        self.layer_state = {layer: [np.mean(states, axis=0)] * len(states) for layer, states in self.layer_state.items()}

    # Reading -----------------------------------------------------------------------------------------------------------

    def read(self, v: int, weights: str = "newest") -> dict[Place, Array]:
        """Return the parameters after v batches, those of shared places twice."""
        plan = self.plan
        params = {place: self.ordinary[0][place][v * plan.microbatches // every(plan, self.stage_of[place[0]])] for place in self.places}
        for each in self.capabilities:
            params = each.read(self, v, weights, params)
        return params | {second: params[first] for second, first in self.model.ties.items()}

    def predict(self, params: Mapping[Place, Array], x: Array, rows: int) -> Array:
        """Return the outputs in evaluation mode, computed in microbatches of this many rows."""
        outputs = []
        for j, start in enumerate(range(0, len(x), rows)):
            part = x[start : start + rows]
            for layer in self.model.layers:
                mean: Any = 0.0
                if layer in self.model.tracking:
                    states = self.layer_state[layer]
                    mean = np.mean(states, axis=0) if self.plan.sync_state else states[j % len(states)]
                part, _ = forward({name: params[layer, name] for name in "wb"}, part, mean, 1.0)
                part = self._message("activations", layer, part)
            outputs.append(part)
        return np.concatenate(outputs)

    def evaluate(self, params: Mapping[Place, Array], x: Array, labels: Mapping[str, Array], rows: int) -> float:
        """Return the mean loss in evaluation mode."""
        total, weight, _ = loss(self.predict(params, x, rows), labels)
        return total / (weight or 1.0)

    # Resuming ----------------------------------------------------------------------------------------------------------

    def snapshot(self) -> "Run":
        """Return a copy that is not changed by further steps."""
        copied = copy.copy(self)
        for name in ("weights", "ordinary", "states", "layer_state", "kept"):
            setattr(copied, name, copy.deepcopy(getattr(self, name)))
        return copied

    def resumed(self, plan: Plan, capabilities: Iterable[Capability], optimizer: Callable[..., Any]) -> "Run":
        """Return the run that goes on from a snapshot before this batch, under this or another plan.

        A snapshot has the versions that microbatches in flight will read, by age. Others are replaced by the newest.
        """
        new = Run(plan, self.model, capabilities, optimizer, self.read(self.batch))
        new.batch = self.batch
        for p in range(new.pipelines):
            source = p if new.pipelines == self.pipelines else 0
            for place in self.places:
                newest, (read, ordinary) = new.updates(place), self._saved(new, source, place)
                new.weights[p][place] = [read[newest - v] if newest - v < len(read) else read[0] for v in range(newest + 1)]
                new.ordinary[p][place] = [*new.weights[p][place][:-1], ordinary]
                new.states[p][place] = copy.deepcopy(self.states[source][place])
        for layer, states in self.layer_state.items():
            new.layer_state[layer] = _states_for(new.replicas_of(layer), states, plan.sync_state, new._keeps_own)
        for each in new.capabilities:
            each.resume(self, new)
        return new

    def updates(self, place: Place) -> int:
        """Return the number of updates of a parameter before this batch."""
        return self.batch * self.plan.microbatches // every(self.plan, self.stage_of[place[0]])

    def _saved(self, new: "Run", p: int, place: Place) -> tuple[list[Array], Array]:
        """Return the versions that are read by age, the newest first, and the newest as the optimizer has made it."""
        for each in self.capabilities:
            if (versions := each.saved(self, new, place)) is not None:
                return versions, versions[0]
        s = self.stage_of[place[0]]
        oldest = self.version(s, self.batch * self.plan.microbatches + p)
        read, ordinary = self.weights[p][place][oldest:][::-1], self.ordinary[p][place][-1]
        keeps = any(each.is_ahead(new, new.stage_of[place[0]]) for each in new.capabilities)
        return [read[0] if keeps else ordinary, *read[1:]], ordinary


def _states_for(count: int, states: list[Array], is_mean: bool, keeps_own: bool) -> list[Array]:
    """Return the layer state of as many replicas: their own, or else the mean of all, or those that there were again and again."""
    if is_mean and not (keeps_own and count == len(states)):
        return [np.mean(states, axis=0)] * count
    return [states[r % len(states)] for r in range(count)]
