"""Cases drawn at random: two capabilities on one plan, what is read of the run and when, and the plan under which it is resumed.

`python -m tests.pairs.draw SEED` shows what is drawn for a seed.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan, Tie
from jpipe.optimizers import compensated_adam, compensated_sgd, per_stage, scale_by_delay
from jpipe.schedules import SCHEDULES
from tests.pairs.capabilities import B1, B2, CAPABILITIES, DECAY, EPS, RATE, Rule
from tests.pairs.option import EQUAL_REPLICAS, IN_A_V, IN_CHUNKS, Option, Shape, composition
from tests.pairs.reference import Model, Place, Run

KEY = 7
STEPS, WIDTH, ROWS, LENGTH = 6, 3, 2, 2
LAYERS = ("a", "b", "c", "d", "e")
LATE = ("pipedream", "pipedream_2bw")  # drawn as often as all other schedules: most rules meet there
KEEP = 0.75  # the share that dropout keeps
READINGS = ("evaluate", "params", "predict")


class Layers(NamedTuple):
    """What differs from five dense layers.

    Attributes:
        tracking: layers with a running mean.
        noisy: a layer with dropout.
        tie: two layers that share their matrix.
        frozen: parameters that are not trained.
    """

    tracking: frozenset[str] = frozenset()
    noisy: str = ""
    tie: tuple[str, ...] = ()
    frozen: frozenset[Place] = frozenset()

    def reference(self) -> Model:
        """Return the model of the reference."""
        stack, key = self.stack(), jax.random.key(KEY)

        def mask(layer: str, k: int, shape: Sequence[int]) -> Any:
            if layer != self.noisy:
                return 1.0
            return np.asarray(jax.random.bernoulli(stack.draw_key(key, layer, k, True), KEEP, tuple(shape))) / KEEP

        return Model(LAYERS, self.tracking, {(self.tie[1], "w"): (self.tie[0], "w")} if self.tie else {}, self.frozen, mask)

    def stack(self) -> LayerStack:
        """Return the model for a pipeline."""
        return _stack(self.tracking, self.noisy, self.tie)


class Data(NamedTuple):
    """What differs from batches of one shape with finite labels.

    Attributes:
        lengths: the positions of each batch; empty: `LENGTH`.
        bad: batches in which one label is NaN.
    """

    lengths: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()

    def batches(self, seed: int, rows: int) -> list[Any]:
        """Return a batch for each step, and one more to evaluate. The weights of the labels differ, and some are zero."""
        random, batches = np.random.default_rng(seed), []
        for t in range(STEPS + 1):
            shape = rows, self.lengths[t % len(self.lengths)] if self.lengths else LENGTH, WIDTH
            x, target = random.normal(size=shape), random.normal(size=shape)
            mask = random.choice([0.0, 0.5, 1.0, 3.0], shape[:2])
            if t in self.bad:
                target[random.integers(rows), 0, 0] = np.nan
            batches.append((x, {"target": target, "mask": mask}))
        return batches


def _layer(is_tracking: bool, is_noisy: bool) -> Layer:
    def init(key: Any, x: Any) -> Any:
        return {"w": jax.random.normal(key, (WIDTH, WIDTH), x.dtype), "b": jnp.zeros(WIDTH, x.dtype)}, (
            {"mean": jnp.zeros(WIDTH, x.dtype)} if is_tracking else {}
        )

    def apply(params: Any, state: Any, x: Any, key: Any, train: bool) -> Any:
        centred = x - state["mean"][None, None, :] if is_tracking else x
        if is_tracking and train:
            state = {"mean": 0.9 * state["mean"] + 0.1 * x.mean((0, 1))}
        y = jnp.tanh(centred @ params["w"] + params["b"][None, None, :])
        if key is not None:
            y = jnp.where(jax.random.bernoulli(key, KEEP, y.shape), y / KEEP, 0)
        return y, state

    return Layer(init, apply, stochastic=is_noisy)


_layer_of = functools.cache(_layer)


@functools.cache
def _stack(tracking: frozenset[str], noisy: str, tie: tuple[str, ...]) -> LayerStack:
    layers = {layer: _layer_of(layer in tracking, layer == noisy) for layer in LAYERS}
    return LayerStack(layers, ties=[Tie((tie[0], "w"), (tie[1], "w"))] if tie else ())


def loss(y: Any, labels: Any) -> Any:
    """Return the sum of the masked squared errors, and the sum of the mask."""
    return (((y - labels["target"]) ** 2).sum(-1) * labels["mask"]).sum(), labels["mask"].sum()


def falling_rate(count: Any) -> Any:
    """Return the learning rate of Adam after some updates; `optax.linear_schedule` computes it in 32 bits."""
    return RATE * (1 - 0.8 * jnp.minimum(count.astype(float) / 4, 1))


@functools.cache
def optimizer_of(rule: Rule, depth: int, frozen: frozenset[Place]) -> optax.GradientTransformation:
    """Return the optimizer of a rule, as a user makes it."""
    if rule.adam:
        rate: Any = RATE if rule.rates else falling_rate
        make, arguments = (compensated_adam if rule.compensated else optax.adam), {"b1": B1, "b2": B2, "eps": EPS}
    else:
        rate, make, arguments = RATE, (compensated_sgd if rule.compensated else optax.sgd), {"momentum": DECAY}
    if rule.rates:
        optimizer = per_stage(make, learning_rate=list(rule.rates[:depth]), **arguments)
    else:
        optimizer = make(rate, **arguments)
    if rule.delay_steps:
        optimizer = optax.chain(optimizer, scale_by_delay(rule.delay_steps))
    if rule.accumulated > 1:
        multi = optax.MultiSteps(optimizer, rule.accumulated)
        optimizer = optax.GradientTransformationExtraArgs(multi.init, multi.update)
    if not frozen:
        return optimizer

    def labels(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "frozen" if (path[0].key, path[-1].key) in frozen else "trained", params)

    return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)


@dataclass(frozen=True)
class Setting:
    """A plan and what runs on it: what a user writes, and the same for the reference."""

    shape: Shape
    chunks: int
    microbatches: int
    options: tuple[Option, ...]
    spread: bool

    def merged(self, part: Callable[[Option], Mapping[str, Any]]) -> dict[str, Any]:
        """Return a part of what all capabilities set; two that set the same are joined if that is a mapping or a tuple."""
        result: dict[str, Any] = {}
        for option in self.options:
            for name, value in part(option).items():
                if name not in result:
                    result[name] = value
                elif isinstance(value, Mapping):
                    result[name] = result[name] | value
                elif isinstance(value, tuple):
                    result[name] = (*result[name], *value)
                else:
                    raise SameOption(name)
        return result

    @property
    def layers(self) -> Layers:
        """What differs in the model."""
        return Layers(**self.merged(lambda option: option.model()))

    @property
    def data(self) -> Data:
        """What differs in the batches."""
        return Data(**self.merged(lambda option: option.data()))

    @property
    def rule(self) -> Rule:
        """The optimizer of the reference."""
        return Rule(**self.merged(lambda option: option.optimizer()))

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            InputError: it is not allowed.
        """
        stages = [
            {"layers": layers, "replicas": replicas, **self.merged(lambda option: option.stage(s))}  # noqa: B023 - called at once
            for s, (layers, replicas) in enumerate(zip(self.shape.stages, self.shape.replicas, strict=True))
        ]
        fields = self.merged(lambda option: option.plan())
        ranks = len(stages) // self.chunks
        if self.chunks > 1 and self.shape.schedule in IN_CHUNKS:
            fields["ranks"] = [list(range(rank, len(stages), ranks)) for rank in range(ranks)]
        if self.shape.schedule == "auto_zero_bubble":
            fields["order"] = ["F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 F1.1 B1.0 I1.1 W1.1"]
        return Plan(schedule=self.shape.schedule, microbatches=self.microbatches, stages=stages, **fields)

    def pipeline(self) -> Pipeline:
        """Return the pipeline.

        Raises:
            InputError: it is not allowed.
        """
        plan = self.plan()
        devices = None  # one for each rank; or one for each pipeline rank, whose replicas then share what is compiled
        if not self.spread:
            devices = [jax.devices()[p] for p, stages in enumerate(plan.pipeline_ranks) for _ in range(plan.replicas[stages[0]])]
        layers = self.layers
        optimizer = optimizer_of(self.rule, plan.depth, layers.frozen)
        return Pipeline(layers.stack(), plan, loss, optimizer, devices, **self.merged(lambda option: option.pipeline()))

    def reference(self, plan: Plan, start: Mapping[Place, Any]) -> Run:
        """Return the run of the reference."""
        return Run(plan, self.layers.reference(), self.options, self.rule, start)

    def describe(self) -> str:
        """Return the plan and the options in a few words."""
        shape = self.shape
        sizes = "-".join("".join(layers) for layers in shape.stages)
        options = ", ".join(map(str, self.options))
        chunks = f", {self.chunks} chunks" if self.chunks > 1 else ""
        return f"{shape.schedule}{chunks}, {sizes}, replicas {shape.replicas}, {self.microbatches} microbatches: {options}"


class SameOption(ValueError):
    """Two capabilities set one option, so that they are no pair."""


class Case(NamedTuple):
    """What is drawn.

    Attributes:
        seed: that it is drawn from.
        pair: the names of both capabilities.
        setting: how it is run.
        later: how it is resumed, beside resuming it as it was; None: only as it was.
        cut: the batch before which it is resumed.
        drained: after these batches it is drained.
        readings: by the number of batches what is read then.
    """

    seed: str
    pair: tuple[str, str]
    setting: Setting
    later: Setting | None
    cut: int
    drained: frozenset[int]
    readings: Mapping[int, tuple[str, ...]]

    def describe(self) -> str:
        """Return the case in a few lines."""
        later = f"\n    resumed under {self.later.describe()}" if self.later else ""
        return (
            f"seed {self.seed}: {self.pair[0]} and {self.pair[1]}\n    {self.setting.describe()}{later}\n"
            f"    resumed before batch {self.cut}, drained after {sorted(self.drained)}, readings {dict(self.readings)}"
        )


class Refused(NamedTuple):
    """A drawn pair that the library does not allow."""

    seed: str
    pair: tuple[str, str]
    setting: Setting
    error: InputError

    def describe(self) -> str:
        """Return the pair and the message in a few lines."""
        return f"seed {self.seed}: {self.pair[0]} and {self.pair[1]} are refused\n    {self.setting.describe()}\n    {self.error}"


def pair_of(random: Random) -> tuple[str, str]:
    """Return two capabilities that have a schedule in common and do not set the same option."""
    while True:
        first, second = sorted(random.sample(list(CAPABILITIES), 2))
        if (first, second) != ("dynamic loss scale", "loss scale"):
            return first, second


def setting_of(random: Random, names: Sequence[str], schedule: str | None = None) -> Setting:
    """Draw a plan for capabilities, and their options.

    Args:
        random: where it is drawn from.
        names: of the capabilities.
        schedule: None: one that all of them have.
    """
    kinds = [CAPABILITIES[name] for name in CAPABILITIES if name in names]
    schedule = schedule or random.choice(schedules_of(kinds, random.random() < 0.5))
    chunks = 2 if schedule in IN_A_V or "chunks" in names or (schedule in IN_CHUNKS and schedule not in LATE) else 1
    depth = 4 if chunks == 2 else 2 if schedule == "auto_zero_bubble" else random.choice((1, 2, 2, 3, 3, 4))
    stages, start = [], 0
    for size in composition(random, len(LAYERS), depth):
        stages.append(LAYERS[start : start + size])
        start += size
    least = max((kind.replicas for kind in kinds), default=1)
    is_equal = chunks > 1 or schedule in EQUAL_REPLICAS or any(kind.needs_equal_replicas for kind in kinds)
    shape = Shape(schedule, tuple(stages), replicas_of(random, depth, least, is_equal))
    options = tuple(kind.draw(random, shape) for kind in kinds)
    extra = next((option.plan().get("extra_in_flight", 0) for option in options if "extra_in_flight" in option.plan()), 0)
    return Setting(shape, chunks, microbatches_of(random, shape, chunks, extra), options, random.random() < 0.2)


def schedules_of(kinds: Sequence[type[Option]], late: bool) -> list[str]:
    """Return the schedules that all capabilities have: those without a flush if there are any and `late` is true."""
    common = [name for name in SCHEDULES if all(name in kind.schedules for kind in kinds)]
    return [name for name in common if name in LATE] or common if late else common


def replicas_of(random: Random, depth: int, least: int, is_equal: bool) -> tuple[int, ...]:
    """Draw the replicas of each stage: none in half of the plans that do not need them."""
    if least == 1 and random.random() < 0.5:
        return (1,) * depth
    count = random.choice((2, 2, 3))
    if is_equal or random.random() < 0.5:
        return (count,) * depth
    replicas = [random.choice((1, count)) for _ in range(depth)]
    replicas[random.randrange(depth)] = count
    return tuple(replicas)


def microbatches_of(random: Random, shape: Shape, chunks: int, extra: int) -> int:
    """Draw a number of microbatches that the schedule can run, by docs/explanation/."""
    replicas, depth, common = shape.replicas, len(shape.stages), math.lcm(*shape.replicas)
    least, ranks, r = 1, depth // chunks, replicas[0]
    if shape.schedule == "auto_zero_bubble":
        return 2 * r
    if shape.schedule == "dualpipe_v":
        least = 2 * ranks * r
    elif chunks > 1 and shape.schedule == "pipedream":
        least = ranks * r
    elif chunks > 1 and shape.schedule == "pipedream_2bw":
        least = 2 * (ranks - 1) + ranks % 2 if r == 1 else 2 * ranks * r
    elif shape.schedule == "pipedream_2bw":
        in_flight = [1]
        for after, own in zip(replicas[:0:-1], replicas[-2::-1], strict=True):
            in_flight.insert(0, 1 + math.ceil(in_flight[0] * after / own) + extra)
        least = max(depth, *(own * (n - 1 + (own > 1)) for own, n in zip(replicas, in_flight, strict=True)))
    least = math.ceil(least / common) * common
    return least + common * random.choice((0, 0, 1, 2)) if least < 8 else least


def later_of(random: Random, setting: Setting, names: Sequence[str]) -> Setting | None:
    """Draw another plan for a run, with the same numerical options, or None where the library does not allow what is drawn."""
    keep = {name for name in names if CAPABILITIES[name].stays}
    schedule = random.choice(list(SCHEDULES if random.random() < 0.5 else LATE))
    here = [name for name in names if name in keep or (schedule in CAPABILITIES[name].schedules and random.random() < 0.5)]
    if any(schedule not in CAPABILITIES[name].schedules for name in here):
        return None
    drawn = setting_of(random, here, schedule)
    options = tuple(next((own for own in setting.options if own.stays and type(own) is type(new)), new) for new in drawn.options)
    common = math.lcm(*drawn.shape.replicas)
    if setting.microbatches % common:
        return None
    later = Setting(drawn.shape, drawn.chunks, setting.microbatches, options, False)
    try:
        with jax.enable_x64(True):  # some options are compared with the stages of the model only when a batch is checked
            later.pipeline().check(setting.data.batches(0, ROWS * setting.microbatches)[0])
    except InputError:
        return None
    return later


def draw(seed: str) -> Case | Refused:
    """Draw a case, or a pair that the library refuses."""
    random = Random(seed)
    pair = pair_of(random)
    setting = setting_of(random, pair)
    try:
        with jax.enable_x64(True):
            pipe = setting.pipeline()
            pipe.check(setting.data.batches(0, ROWS * setting.microbatches)[0])
    except InputError as error:
        return Refused(seed, pair, setting, error)
    later = next(filter(None, (later_of(random, setting, pair) for _ in range(5))), None) if random.random() < 0.6 else None
    drained = frozenset(random.sample(range(1, STEPS), random.choice((0, 0, 1))))
    readings = {t: tuple(sorted(random.sample(READINGS, random.choice((0, 1, 2))))) for t in range(STEPS)}
    return Case(seed, pair, setting, later, random.randint(1, STEPS - 1), drained, readings)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    for seed in sys.argv[1:]:
        print(draw(seed).describe())
