"""What each capability changes in the rule of the reference, and values of its options drawn at random.

Each class is one capability, complete by itself: `draw` chooses its options, `plan`, `stage`, `pipeline`, `optimizer`, `model` and `data`
say where they are set, and the methods of `reference.Capability` say what they change in the numbers, which is often nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe import DynamicLossScale, Plan, Precision
from jpipe.schedules import SCHEDULES
from tests.pairs import reference
from tests.pairs.reference import Array, Place, Run

LIMITED = ("pipedream_flush", "pipedream", "pipedream_2bw")  # in flight, docs/reference/schedules.md has the options of each schedule
IN_CHUNKS = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "pipedream", "pipedream_2bw")
IN_A_V = ("zb_v", "dualpipe_v")
EQUAL_REPLICAS = ("interleaved_1f1b", "interleaved_zero_bubble", *IN_A_V, "auto_zero_bubble")
RECOMPUTE = ("none", "elementwise", "full", "everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
KINDS = ("bfloat16", "int8", "fp8")
RATE, DECAY, B1, B2, EPS = 0.05, 0.9, 0.9, 0.999, 1e-8


class Shape(NamedTuple):
    """What a capability sees of a plan when its options are drawn.

    Attributes:
        schedule: by name.
        stages: the layers of each stage.
        replicas: of each stage.
    """

    schedule: str
    stages: tuple[tuple[str, ...], ...]
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Option(reference.Capability):
    """A capability with the values of its options.

    Attributes:
        schedules: that have it; all by default.
        replicas: the least number of them that a stage needs, and whether all stages need as many.
        stays: whether a run that is resumed under another plan keeps the options, because the numbers depend on them.
    """

    schedules: ClassVar[Sequence[str]] = tuple(SCHEDULES)
    replicas: ClassVar[int] = 1
    needs_equal_replicas: ClassVar[bool] = False
    stays: ClassVar[bool] = False

    @classmethod
    def draw(cls, random: Random, shape: Shape) -> "Option":
        """Draw the values of the options."""
        return cls()

    def plan(self) -> dict[str, Any]:
        """Return fields of the plan."""
        return {}

    def stage(self, s: int) -> dict[str, Any]:
        """Return fields of a stage."""
        return {}

    def pipeline(self) -> dict[str, Any]:
        """Return arguments of the pipeline."""
        return {}

    def optimizer(self) -> dict[str, Any]:
        """Return fields of `Rule`."""
        return {}

    def model(self) -> dict[str, Any]:
        """Return fields of `draw.Layers`."""
        return {}

    def data(self) -> dict[str, Any]:
        """Return fields of `draw.Data`."""
        return {}


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


class SharedOptimizer(Option):
    replicas = 2

    def plan(self):
        return {"shard_optimizer": True}


@dataclass(frozen=True)
class HostMemory(Option):
    parts: Mapping[str, Any]

    @classmethod
    def draw(cls, random, shape):
        names = random.sample(("optimizer", "versions", "residuals", "stash"), random.randint(1, 3))
        some = [s for s in range(len(shape.stages)) if random.random() < 0.6]
        return cls({name: random.choice(["all", some or [0]]) for name in sorted(names)})

    def plan(self):
        return {"offload": dict(self.parts)}


@dataclass(frozen=True)
class SumsInParts(Option):
    replicas = 2
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def draw(cls, random, shape):
        return cls(tuple(composition(random, len(layers)) if r > 1 else () for layers, r in zip(shape.stages, shape.replicas, strict=True)))

    def stage(self, s):
        return {"sum_parts": self.parts[s]}


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
class SharedParameters(Option):
    stays = True
    layers: tuple[str, str]

    @classmethod
    def draw(cls, random, shape):
        first, second = sorted(random.sample([layer for stage in shape.stages for layer in stage], 2))
        return cls((first, second))

    def model(self):
        return {"tie": self.layers}


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


def norm_of(gradients: Mapping[Place, Array]) -> float:
    """Return the global norm; a parameter that stages share counts once."""
    return math.sqrt(sum(np.square(gradient).sum() for gradient in gradients.values()))


def clipped(gradients: dict[Place, Array], norm: float, largest: float) -> dict[Place, Array]:
    """Scale gradients down to a norm, as `optax.clip_by_global_norm` does."""
    return gradients if norm < largest else {place: gradient / norm * largest for place, gradient in gradients.items()}


def report_norm(run: Run, p: int, gradients: Mapping[Place, Array]) -> float:
    """Return the global norm, and report that of the first pipeline, as it is before anything is clipped."""
    norm = norm_of(gradients)
    if p == 0:
        run.metrics["norms"].setdefault(run.batch, norm)
    return norm


@dataclass(frozen=True)
class SkippedBatches(Option):
    """A batch with a gradient that is not finite changes nothing."""

    stays = True
    bad: int

    @classmethod
    def draw(cls, random, shape):
        return cls(random.randint(0, 4))

    def pipeline(self):
        return {"skip_nonfinite": True}

    def data(self):
        return {"bad": (self.bad,)}

    def gradients(self, run, p, due, gradients):
        run.skipped[p] = not math.isfinite(report_norm(run, p, gradients))
        return gradients


@dataclass(frozen=True)
class DynamicScale(Option):
    """A dynamic loss scale: it changes no finite gradient, skips batches, and follows from the batches that were skipped."""

    stays = True
    initial: float
    growth_every: int
    bad: tuple[int, ...]

    @classmethod
    def draw(cls, random, shape):
        return cls(2.0 ** random.randint(0, 5), random.randint(1, 3), tuple(sorted(random.sample(range(5), 2))))

    def pipeline(self):
        return {"precision": Precision(loss_scale=DynamicLossScale(self.initial, self.growth_every))}

    def data(self):
        return {"bad": self.bad}

    def begin(self, run):
        run.kept["loss scale"] = self.initial, 0

    def gradients(self, run, p, due, gradients):
        run.skipped[p] = not math.isfinite(report_norm(run, p, gradients))
        scale, finite = run.kept["loss scale"]
        finite = 0 if run.skipped[p] else finite + 1
        if run.skipped[p]:
            scale = max(scale / 2, 1.0)
        elif finite == self.growth_every:
            scale, finite = 2 * scale, 0
        run.kept["loss scale"] = scale, finite
        run.metrics["loss_scales"][run.batch] = scale
        return gradients

    def resume(self, old, new):
        new.kept["loss scale"] = old.kept["loss scale"]


@dataclass(frozen=True)
class ClippedGlobalNorm(Option):
    stays = True
    largest: float

    @classmethod
    def draw(cls, random, shape):
        return cls(random.choice((0.2, 0.5, 1.0)))

    def pipeline(self):
        return {"clip_global_norm": self.largest}

    def gradients(self, run, p, due, gradients):
        return clipped(gradients, report_norm(run, p, gradients), self.largest)


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


@dataclass(frozen=True)
class RareAgreement(Option):
    """Pipelines with weights of their own; docs/how-to/agree-rarely.md has the rule, with the same letters."""

    stays = True
    replicas = 2
    needs_equal_replicas = True
    every: int
    delay: int
    mixing: float
    eta: float
    mu: float
    fragments: Any

    @classmethod
    def draw(cls, random, shape):
        every = random.randint(1, 4)
        delay = random.randint(0, every - 1)
        outer = random.choice(((0.7, 0.9), (1.0, 0.0), (0.5, 0.3)))
        return cls(every, delay, random.choice((0.0, 0.3)) if delay else 0.5, *outer, random.choice((None, None, "stages", 2)))

    def plan(self):
        outer = {"learning_rate": self.eta, "momentum": self.mu}
        agree = {"every": self.every, "delay": self.delay, "mixing": self.mixing, "outer": outer, "fragments": self.fragments}
        return {"agree": agree}

    def pipelines(self, plan):
        return plan.replicas[0]

    def agrees(self, plan: Plan, s: int, u: int) -> bool:
        """Return whether an agreement on the weights of a stage begins after update u."""
        count = plan.depth if self.fragments == "stages" else self.fragments or 1
        return u >= 0 and (u + 1) % self.every == (s * count // plan.depth) * self.every // count

    def begin(self, run):
        agreed = {place: [versions[0]] for place, versions in run.weights[0].items()}
        run.kept["agreed"], run.kept["V"], run.kept["under way"] = agreed, dict.fromkeys(run.places, 0.0), {}

    def after(self, run, s, u):
        agreed, momentum, under_way = run.kept["agreed"], run.kept["V"], run.kept["under way"]
        for place in run.updated_by(s):
            a = agreed[place][-1]
            if self.agrees(run.plan, s, u):
                d = np.mean([a - weights[place][-1] for weights in run.weights], axis=0)
                v = momentum[place] = d + self.mu * momentum[place]
                a, under_way[place] = a - self.eta * (d + self.mu * v), u
            agreed[place].append(a)
            if under_way.get(place) == u - self.delay and self.agrees(run.plan, s, u - self.delay):
                own = self.mixing if self.delay else 0.0
                for weights, ordinary in zip(run.weights, run.ordinary, strict=True):
                    weights[place][-1] = ordinary[place][-1] = own * weights[place][-1] + (1 - own) * a
                del under_way[place]

    def read(self, run, v, weights, params):
        return {place: versions[v] for place, versions in run.kept["agreed"].items()}

    def saved(self, old, new, place):
        return None if new.pipelines == old.pipelines else [old.kept["agreed"][place][-1]]

    def resume(self, old, new):
        new.kept["agreed"] = {place: [versions[-1]] * (new.batch + 1) for place, versions in old.kept["agreed"].items()}
        new.kept["V"] = dict(old.kept["V"])
        if new.pipelines == old.pipelines:
            new.kept["under way"] = dict(old.kept["under way"])


# Messages -------------------------------------------------------------------------------------------------------------------


def rounded(x: Array, kind: str | None) -> Array:
    """Round each row of x as it is sent; docs/how-to/compressed-messages.md has the rule."""
    if kind is None:
        return x
    if kind == "bfloat16":
        return cast(x, jnp.bfloat16)
    largest = 127 if kind == "int8" else 448
    rows, result = x.reshape(len(x), -1), np.empty((len(x), x.size // len(x)))
    for start in range(0, rows.shape[1], 256):
        block = rows[:, start : start + 256]
        scale = np.float64(np.float32(np.abs(block).max(1, keepdims=True) * (1 / largest)))
        divided = block / np.where(scale == 0, 1, scale)
        values = np.round(divided) if kind == "int8" else cast(np.clip(divided, -largest, largest), jnp.float8_e4m3fn)
        result[:, start : start + 256] = values * scale
    return result.reshape(x.shape)


def cast(x: Array, dtype: Any) -> Array:
    """Round to the nearest value of a dtype, as JAX does."""
    return np.asarray(jax.lax.convert_element_type(x, dtype)).astype(np.float64)


@dataclass(frozen=True)
class CompressedMessages(Option):
    stays = True
    kinds: Mapping[str, str | None]

    @classmethod
    def draw(cls, random, shape):
        kinds = {"activations": random.choice((None, *KINDS)), "gradients": random.choice((None, *KINDS))}
        return cls(kinds if any(kinds.values()) else {"activations": "int8", "gradients": None})

    def plan(self):
        return {"links": dict(self.kinds)}

    def message(self, kind, x):
        return rounded(x, self.kinds[kind])


@dataclass(frozen=True)
class CompressedSums(Option):
    """Replicas send rounded sums C of their gradients G, and add the error E to the next ones (error feedback)."""

    stays = True
    replicas = 2
    kind: str

    @classmethod
    def draw(cls, random, shape):
        return cls(random.choice(KINDS))

    def plan(self):
        return {"links": {"sums": self.kind}}

    def begin(self, run):
        run.kept["errors"] = {}

    def sent(self, run, s, r, place, total, weight):
        if run.plan.replicas[s] == 1:
            return total
        error = run.kept["errors"].get((r, place), np.zeros_like(total))
        wanted = total + weight * error
        arrives = rounded(wanted.reshape(1, -1), self.kind).reshape(total.shape)
        if weight:
            lost = (wanted - arrives) / weight
            run.kept["errors"][r, place] = np.where(np.isfinite(lost), lost, 0.0)
        return arrives

    def resume(self, old, new):
        new.kept["errors"] = {
            (r, place): error for (r, place), error in old.kept["errors"].items() if new.replicas_of(place[0]) == old.replicas_of(place[0])
        }


CAPABILITIES: dict[str, type[Option]] = {
    "skipped batches": SkippedBatches,  # those that report the global norm come before those that clip
    "dynamic loss scale": DynamicScale,
    "clipped global norm": ClippedGlobalNorm,
    "clipped stage norm": ClippedStageNorm,
    "replicas": Replicas,
    "recomputation": Recomputation,
    "shared optimizer": SharedOptimizer,
    "host memory": HostMemory,
    "sums in parts": SumsInParts,
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
    "shared parameters": SharedParameters,
    "frozen parameters": FrozenParameters,
    "buckets": Buckets,
    "adam": Adam,
    "spike compensation": SpikeCompensation,
    "rates by delay": RatesByDelay,
    "rates by stage": RatesByStage,
    "accumulated batches": AccumulatedBatches,
    "delay correction": DelayCorrection,
    "averaged weights": AveragedWeights,
    "rare agreement": RareAgreement,
    "compressed messages": CompressedMessages,
    "compressed sums": CompressedSums,
}
"""All capabilities by name; the rule applies them in this order."""


def composition(random: Random, total: int, parts: int | None = None) -> tuple[int, ...]:
    """Return positive numbers with this sum, as many as `parts` or at random."""
    cuts = sorted(random.sample(range(1, total), (random.randint(1, total) if parts is None else parts) - 1))
    return tuple(end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True))
