"""What each capability of the core changes in the rule of the reference, and values of its options drawn at random.

Each class is one capability, complete by itself: `draw` chooses its options, `plan`, `stage`, `pipeline`, `optimizer`, `model` and `data`
say where they are set, and the methods of `reference.Capability` say what they change in the numbers, which is often nothing. Those with
a folder in `jpipe/capabilities/` stand in `pair.py` of the folder of their tests, which a new one brings along.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jpipe import Precision
from tests.pairs.option import IN_A_V, IN_CHUNKS, LIMITED, Option, clipped, norm_of
from tests.pairs.reference import Array, Place

RECOMPUTE = ("none", "elementwise", "full", "everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
RATE, DECAY, B1, B2, EPS = 0.05, 0.9, 0.9, 0.999, 1e-8


# Where and when things are computed: no number changes --------------------------------------------------------------------


class Replicas(Option):
    """Copies of stages; `Run` sums over them, whether there is another capability or not."""

    replicas = 2


@dataclass(frozen=True)
class Recomputation(Option):
    policies: tuple[str, ...]

    @classmethod
    def draw(cls, random, shape):
        return cls(tuple(random.choice(RECOMPUTE) for _ in shape.stages))

    def stage(self, s):
        return {"recompute": self.policies[s]}


class DividedBackward(Option):
    schedules = LIMITED

    def plan(self):
        return {"split_backward": "early"}


@dataclass(frozen=True)
class ScaledLoss(Option):
    """A constant loss scale; a power of two adds no rounding."""

    scale: float

    @classmethod
    def draw(cls, random, shape):
        return cls(2.0 ** random.randint(-3, 6))

    def pipeline(self):
        return {"precision": Precision(loss_scale=self.scale)}


# When weights are read: `version` in tests/jpipe/reference.py has the formulas ---------------------------------------------


class Chunks(Option):
    """Several stages on each rank; `draw` makes the plan."""

    schedules = (*IN_CHUNKS, *IN_A_V)


class VerticalSync(Option):
    schedules = ("pipedream",)

    def plan(self):
        return {"vertical_sync": True}


@dataclass(frozen=True)
class FlushedFirst(Option):
    schedules = ("pipedream", "pipedream_2bw")
    batches: int

    @classmethod
    def draw(cls, random, shape):
        return cls(random.randint(1, 4))

    def plan(self):
        return {"flush_first": self.batches}


@dataclass(frozen=True)
class MoreInFlight(Option):
    schedules = LIMITED
    extra: int

    @classmethod
    def draw(cls, random, shape):
        return cls(random.randint(1, 2))

    def plan(self):
        return {"extra_in_flight": self.extra}


@dataclass(frozen=True)
class FewerInFlight(Option):
    schedules = LIMITED
    most: int

    @classmethod
    def draw(cls, random, shape):
        return cls(random.randint(1, 3))

    def plan(self):
        return {"max_in_flight": self.most}


class UpdatesOfReplicas(Option):
    schedules = ("pipedream",)
    replicas = 2

    def plan(self):
        return {"update_every": "replicas"}


# Models and data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerState(Option):
    stays = True
    tracking: frozenset[str]
    sync_state: bool

    @classmethod
    def draw(cls, random, shape):
        layers = [layer for stage in shape.stages for layer in stage]
        return cls(frozenset(random.sample(layers, random.randint(1, 2))), random.random() < 0.7)

    def plan(self):
        return {"sync_state": self.sync_state}

    def model(self):
        return {"tracking": self.tracking}


@dataclass(frozen=True)
class Dropout(Option):
    stays = True
    layer: str

    @classmethod
    def draw(cls, random, shape):
        return cls(random.choice([layer for stage in shape.stages for layer in stage]))

    def model(self):
        return {"noisy": self.layer}


@dataclass(frozen=True)
class FrozenParameters(Option):
    stays = True
    places: frozenset[Place]

    @classmethod
    def draw(cls, random, shape):
        places = [(layer, name) for stage in shape.stages for layer in stage for name in "wb"]
        return cls(frozenset(random.sample(places, random.randint(1, 5))))

    def model(self):
        return {"frozen": self.places}


@dataclass(frozen=True)
class Buckets(Option):
    """Batches of several shapes."""

    stays = True
    lengths: tuple[int, ...]

    @classmethod
    def draw(cls, random, shape):
        return cls((1, 3, *(random.choice((1, 2, 3)) for _ in range(4))))

    def data(self):
        return {"lengths": self.lengths}


# Optimizers -----------------------------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """An optimizer: SGD with momentum, or Adam with a learning rate that falls over four updates, and what is around it.

    Attributes:
        adam: whether it is Adam.
        compensated: whether late gradients count as if they had come in time (spike compensation).
        rates: the learning rate of each stage; empty: one for all.
        delay_steps: of `scale_by_delay`; 0: without.
        accumulated: the number of batches for an update.
    """

    adam: bool = False
    compensated: bool = False
    rates: tuple[float, ...] = ()
    delay_steps: int = 0
    accumulated: int = 1

    def __call__(self, state: dict[str, Any], gradient: Array, delay: float, s: int) -> tuple[Array, dict[str, Any]]:
        """Return the update of one parameter, and the next state."""
        if self.accumulated == 1:
            return self._update(state, gradient, delay, s)
        number, total = state.get("number", 0) + 1, state.get("total", 0.0) + gradient
        if number < self.accumulated:
            return np.zeros_like(gradient), state | {"number": number, "total": total}
        change, state = self._update(state, total / number, delay, s)
        return change, state | {"number": 0, "total": 0.0}

    def _update(self, state: dict[str, Any], g: Array, delay: float, s: int) -> tuple[Array, dict[str, Any]]:
        t, tau = state.get("count", 0), delay if self.compensated else 0.0
        new: dict[str, Any] = {"count": t + 1}
        if self.adam:
            new["mu"] = B1 * state.get("mu", 0.0) + (1 - B1) * g
            new["nu"] = B2 * state.get("nu", 0.0) + (1 - B2) * g**2
            mean = (B1**tau * new["mu"] + (1 - B1**tau) * g) / (1 - B1 ** (t + 1 + tau))
            direction = mean / (np.sqrt(new["nu"] / (1 - B2 ** (t + 1))) + EPS)
            rate = RATE * (1 - 0.8 * min(t / 4, 1))
        else:
            new["trace"] = g + DECAY * state.get("trace", 0.0)
            direction = DECAY**tau * new["trace"] + (1 - DECAY**tau) / (1 - DECAY) * g
            rate = RATE
        change = -(self.rates[s] if self.rates else rate) * direction
        if self.delay_steps:
            change = change / max(delay, 1.0) ** (1 - min(t / self.delay_steps, 1))
        return change, state | new


class Adam(Option):
    stays = True

    def optimizer(self):
        return {"adam": True}


class SpikeCompensation(Option):
    stays = True

    def optimizer(self):
        return {"compensated": True}


@dataclass(frozen=True)
class RatesByDelay(Option):
    stays = True
    steps: int

    @classmethod
    def draw(cls, random, shape):
        return cls(random.randint(1, 6))

    def optimizer(self):
        return {"delay_steps": self.steps}


@dataclass(frozen=True)
class RatesByStage(Option):
    """Learning rates of at most eight stages; a plan has the first ones."""

    stays = True
    rates: tuple[float, ...]

    @classmethod
    def draw(cls, random, shape):
        return cls(tuple(round(random.uniform(0.01, 0.1), 3) for _ in range(8)))

    def optimizer(self):
        return {"rates": self.rates}


@dataclass(frozen=True)
class AccumulatedBatches(Option):
    stays = True
    batches: int

    @classmethod
    def draw(cls, random, shape):
        return cls(random.randint(2, 3))

    def optimizer(self):
        return {"accumulated": self.batches}


# What an update does --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClippedStageNorm(Option):
    stays = True
    largest: float

    @classmethod
    def draw(cls, random, shape):
        return cls(random.choice((0.1, 0.3, 0.6)))

    def pipeline(self):
        return {"clip_stage_norm": self.largest}

    def gradients(self, run, p, due, gradients):
        result = {}
        for s in due:
            of_stage = {place: gradients[place] for place in run.trained(s)}
            norm = norm_of(of_stage)
            if p == 0:
                run.metrics["stage_norms"][run.batch, s] = norm
            result |= clipped(of_stage, norm, self.largest)
        return result


@dataclass(frozen=True)
class DelayCorrection(Option):
    """W = y + λ U: the weights that are read are ahead of those that the optimizer has made by the delay times the update."""

    factor: float | str

    @classmethod
    def draw(cls, random, shape):
        return cls(random.choice(("predict", 0.5, 0.75)))

    def pipeline(self):
        return {"delay_correction": self.factor}

    def ahead(self, run, s, u, change):
        return (1.0 if self.factor == "predict" else self.factor) * run.delay(s, u) * change

    def is_ahead(self, run, s):
        return run.delay(s, 100) > 0  # once the pipeline is full


@dataclass(frozen=True)
class AveragedWeights(Option):
    stays = True
    decay: float

    @classmethod
    def draw(cls, random, shape):
        return cls(random.choice((0.5, 0.75)))

    def pipeline(self):
        return {"ema_decay": self.decay}

    def begin(self, run):
        run.kept["average"] = {place: versions[0] for place, versions in run.ordinary[0].items()}

    def after(self, run, s, u):
        average = run.kept["average"]
        for place in () if run.skipped[0] else run.updated_by(s):
            average[place] = self.decay * average[place] + (1 - self.decay) * run.ordinary[0][place][-1]

    def read(self, run, v, weights, params):
        return dict(run.kept["average"]) if weights == "ema" else params

    def resume(self, old, new):
        new.kept["average"] = dict(old.kept["average"])


_ROOMS = Path(__file__).parents[1] / "jpipe" / "capabilities"
OF_ROOMS: dict[str, Mapping[str, type[Option]]] = {
    path.parent.name: import_module(f"tests.jpipe.capabilities.{path.parent.name}.pair").PAIRS for path in sorted(_ROOMS.glob("*/pair.py"))
}
"""The capabilities of each folder in `jpipe/capabilities/`, by name."""

CAPABILITIES: dict[str, type[Option]] = {
    **{name: kind for kinds in OF_ROOMS.values() for name, kind in kinds.items()},  # they report a norm before others clip by it
    "clipped stage norm": ClippedStageNorm,
    "replicas": Replicas,
    "recomputation": Recomputation,
    "divided backward": DividedBackward,
    "loss scale": ScaledLoss,
    "chunks": Chunks,
    "vertical sync": VerticalSync,
    "flushed first": FlushedFirst,
    "more in flight": MoreInFlight,
    "fewer in flight": FewerInFlight,
    "updates of replicas": UpdatesOfReplicas,
    "layer state": LayerState,
    "dropout": Dropout,
    "frozen parameters": FrozenParameters,
    "buckets": Buckets,
    "adam": Adam,
    "spike compensation": SpikeCompensation,
    "rates by delay": RatesByDelay,
    "rates by stage": RatesByStage,
    "accumulated batches": AccumulatedBatches,
    "delay correction": DelayCorrection,
    "averaged weights": AveragedWeights,
}
"""All capabilities by name; the rule applies them in this order."""
