"""The grid of the study: models, optimizers, schedules and remedies, each run once for each learning rate and seed."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.learning.emulation import Emulation, Recipe, Rule, Schedule, delays, microbatches_of, warm_up_and_cosine
from benchmarks.learning.tasks import Task, make_digits, make_gpt
from benchmarks.machine import describe
from jpipe.optimizers import compensated_adamw, compensated_muon, compensated_sgd, soap, torch_nadam

Tree = Any

ADAM_B2, WEIGHT_DECAY, MUON_FACTOR = 0.95, 0.01, 5.0


@dataclass(frozen=True)
class Variant:
    """A schedule with a remedy.

    Attributes:
        schedule: how old the weights are.
        nesterov: spike compensation at each stage by this τ; "delay" for the stage's mean delay.
        prediction: λ in delays of the stage.
        control: what is added to λ, also without delay.
        slow: PipeMare's learning rate.
        momentum: the decay of the first moment, None for the optimizer's default.
        stage_clip: the largest norm of the gradients of a stage of PipeDream, in units of the task's `clip`; 0 to clip all stages by their
            global norm, as all other schedules do.
    """

    schedule: Schedule
    nesterov: float | str = 0.0
    prediction: float = 0.0
    control: float = 0.0
    slow: bool = False
    momentum: float | None = None
    stage_clip: float = 1.0

    @property
    def remedy(self) -> str:
        """What it does about the delay, in words."""
        parts = []
        if self.nesterov:
            parts.append("spike compensation" if self.nesterov == "delay" else "Nesterov")
        if self.prediction:
            parts.append({1.0: "prediction", 0.5: "half prediction"}[self.prediction])
        if self.control:
            parts.append(f"prediction by {self.control:g}")
        if self.slow:
            parts.append("rate by delay")
        if self.momentum is not None:
            parts.append(f"momentum {self.momentum:g}")
        if self.stage_clip != 1:
            parts.append(f"stages clipped at {self.stage_clip:g}" if self.stage_clip else "global clipping")
        return ", ".join(parts) or "none"

    def recipe(self, seed: int, rate: float, momentum: float, d: int, m: int) -> Recipe:
        """Return it as arrays, for d stages and batches of m equal parts."""
        table = delays(self.schedule, d, m)
        by_delay = self.nesterov == "delay"
        return Recipe(
            np.int32(seed),
            np.float32(rate),
            table,
            np.float32(self.prediction),
            np.float32(self.control),
            np.float32(by_delay),
            np.float32(0 if by_delay else self.nesterov),
            np.float32(self.slow),
            np.float32(momentum if self.momentum is None else self.momentum),
            np.float32(self.stage_clip if self.schedule.startswith("PipeDream") else 0),
        )


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of the study.

    Attributes:
        rule: see `Rule`.
        rates: the learning rates that are tried.
        momentum: its default.
        together: whether runs are vectorized; SOAP computes its bases in some updates only, which a vectorized program cannot skip.
    """

    rule: Rule
    rates: tuple[float, ...]
    momentum: float
    together: bool = True


@dataclass(frozen=True)
class Part:
    """The runs of one program.

    Attributes:
        task: "GPT", "digits", or "clipped digits", which have clipping and a warm-up and cosine as the GPT has.
        d: stages.
        optimizer: by name.
        variants: schedules and remedies.
        rates: the learning rates; None for those of the optimizer.
    """

    task: str
    d: int
    optimizer: str
    variants: tuple[Variant, ...]
    rates: tuple[float, ...] | None = None

    @property
    def name(self) -> str:
        """A name such as "GPT, 4 stages, Adam"."""
        return f"{self.task}, {self.d} stages, {self.optimizer}"

    def count(self, seeds: int) -> int:
        """Return the number of runs."""
        return len(self.variants) * len(self.rates or OPTIMIZERS[self.optimizer].rates) * seeds


@dataclass(frozen=True)
class Row:
    """One run: held-out loss after every `every` updates."""

    task: str
    d: int
    optimizer: str
    schedule: str
    remedy: str
    rate: float
    seed: int
    every: int
    losses: list[float]


def adam() -> Rule:
    """Return Adam with decoupled weight decay."""
    make = partial(compensated_adamw, b2=ADAM_B2, weight_decay=WEIGHT_DECAY)
    return Rule(make(0.0).init, lambda g, state, p, *, rate, delay, momentum: make(rate, b1=momentum).update(g, state, p, delay=delay))


def muon() -> Rule:
    """Return Muon for the matrices of blocks and hidden layers, and Adam for all other parameters."""

    def labels(params: Tree) -> Tree:
        inner = ("block", "hidden")
        return jax.tree.map_with_path(lambda path, p: "muon" if path[0].key.startswith(inner) and p.ndim == 2 else "adam", params)

    def make(rate: Any, momentum: Any = 0.95) -> optax.GradientTransformationExtraArgs:
        matrices = compensated_muon(MUON_FACTOR * rate, beta=momentum, weight_decay=WEIGHT_DECAY)
        return optax.partition({"muon": matrices, "adam": compensated_adamw(rate, b2=ADAM_B2, weight_decay=WEIGHT_DECAY)}, labels)

    return Rule(make(0.0).init, lambda g, state, p, *, rate, delay, momentum: make(rate, momentum).update(g, state, p, delay=delay))


def sgd() -> Rule:
    """Return SGD with momentum."""
    return Rule(
        compensated_sgd(0.0).init,
        lambda g, state, p, *, rate, delay, momentum: compensated_sgd(rate, momentum).update(g, state, p, delay=delay),
    )


def nadam() -> Rule:
    """Return NAdam as PyTorch has it."""
    make = partial(torch_nadam, b2=ADAM_B2, weight_decay=WEIGHT_DECAY, decoupled_weight_decay=True)
    return Rule(make(0.0).init, lambda g, state, p, *, rate, delay, momentum: make(rate, b1=momentum).update(g, state, p))


def rotated() -> Rule:
    """Return SOAP."""
    return Rule(soap(0.0).init, lambda g, state, p, *, rate, delay, momentum: soap(rate, b1=momentum).update(g, state, p))


OPTIMIZERS: dict[str, Optimizer] = {
    "Adam": Optimizer(adam(), (5e-4, 1e-3, 2e-3, 4e-3, 6e-3), 0.9),
    "Muon": Optimizer(muon(), (1.5e-3, 3e-3, 6e-3, 1e-2), 0.95),
    "NAdam of PyTorch": Optimizer(nadam(), (5e-4, 1e-3, 2e-3), 0.99),
    "SOAP": Optimizer(rotated(), (1e-3, 3e-3), 0.95, together=False),
    "SGD": Optimizer(sgd(), (0.01, 0.02, 0.05), 0.9),
}

FLUSH = (Variant("flush"), Variant("flush", nesterov=1.0))
CONTROL = (Variant("flush", control=1.0),)
TWO_BW = (
    Variant("2BW"),
    Variant("2BW", prediction=1.0),
    Variant("2BW", nesterov=1.0),
    Variant("2BW", nesterov=1.0, prediction=0.5),
    Variant("2BW", nesterov=1.0, prediction=1.0),
)
PIPEDREAM_M_IS_D = (
    Variant("PipeDream m = d"),
    Variant("PipeDream m = d", prediction=1.0),
    Variant("PipeDream m = d", nesterov=1.0),
    Variant("PipeDream m = d", nesterov="delay"),
    Variant("PipeDream m = d", nesterov=1.0, prediction=0.5),
    Variant("PipeDream m = d", nesterov=1.0, prediction=1.0),
    Variant("PipeDream m = d", nesterov=1.0, prediction=0.5, stage_clip=0.0),
    Variant("PipeDream m = d", nesterov=1.0, prediction=1.0, stage_clip=0.5),
)
PIPEDREAM_M_IS_2D = (
    Variant("PipeDream m = 2d"),
    Variant("PipeDream m = 2d", nesterov=1.0),
    Variant("PipeDream m = 2d", nesterov=1.0, prediction=0.5),
    Variant("PipeDream m = 2d", nesterov=1.0, prediction=1.0),
    Variant("PipeDream m = 2d", nesterov=1.0, prediction=1.0, stage_clip=0.5),
)
VERTICAL_SYNC = tuple(
    Variant(schedule, nesterov=nesterov, prediction=prediction)
    for schedule in ("vertical sync m = d", "vertical sync m = 2d")
    for nesterov, prediction in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0))
)
PIPEDREAM_M_IS_1 = (
    Variant("PipeDream m = 1"),
    Variant("PipeDream m = 1", prediction=1.0),
    Variant("PipeDream m = 1", nesterov=1.0),
    Variant("PipeDream m = 1", nesterov="delay"),
    Variant("PipeDream m = 1", nesterov=1.0, prediction=0.5),
    Variant("PipeDream m = 1", slow=True),
    Variant("PipeDream m = 1", nesterov="delay", momentum=0.99),
)
PLAIN = (Variant("flush"), Variant("2BW"), Variant("PipeDream m = d"), Variant("PipeDream m = 1"))
OF_8_STAGES = (TWO_BW[0], TWO_BW[2], TWO_BW[3], PIPEDREAM_M_IS_D[0], PIPEDREAM_M_IS_D[2], PIPEDREAM_M_IS_D[4], *PIPEDREAM_M_IS_2D[1:])
OF_CLIPPED_DIGITS = (*FLUSH, *TWO_BW, *PIPEDREAM_M_IS_D[:6], *PIPEDREAM_M_IS_2D, *VERTICAL_SYNC, *PIPEDREAM_M_IS_1[:5])
OF_SOAP = (*PLAIN, Variant("2BW", prediction=1.0), Variant("PipeDream m = d", prediction=1.0), Variant("PipeDream m = 2d", prediction=1.0))
WITHOUT_MOMENTUM = tuple(Variant("2BW", prediction=prediction, momentum=0.0) for prediction in (0.0, 1.0))

FULL = (
    Part("GPT", 4, "Adam", (*FLUSH, *CONTROL, *TWO_BW, *PIPEDREAM_M_IS_D, *PIPEDREAM_M_IS_2D, *VERTICAL_SYNC, *PIPEDREAM_M_IS_1)),
    Part("GPT", 4, "Muon", (*FLUSH, *CONTROL, *TWO_BW, *PIPEDREAM_M_IS_D, *PIPEDREAM_M_IS_2D, *VERTICAL_SYNC, *PIPEDREAM_M_IS_1[:6])),
    Part("GPT", 8, "Adam", (*FLUSH, *OF_8_STAGES, *PIPEDREAM_M_IS_1), (1e-3, 2e-3)),
    Part("GPT", 8, "Muon", (*FLUSH, *OF_8_STAGES, *PIPEDREAM_M_IS_1[:6]), (3e-3, 6e-3)),
    Part("GPT", 4, "NAdam of PyTorch", PLAIN),
    Part("GPT", 8, "NAdam of PyTorch", PLAIN, (1e-3,)),
    Part("digits", 8, "SGD", (*FLUSH, *CONTROL, *TWO_BW, *PIPEDREAM_M_IS_D[:7], *PIPEDREAM_M_IS_1, *WITHOUT_MOMENTUM)),
    *(Part("clipped digits", d, optimizer, OF_CLIPPED_DIGITS) for d in (4, 8) for optimizer in ("Adam", "Muon")),
    Part("GPT", 8, "SOAP", (PLAIN[0], PLAIN[1], PLAIN[3])),
    Part("GPT", 4, "SOAP", OF_SOAP),
)

# On two cores a run of the GPT takes up to two minutes, and one of the digits some seconds.
SHORT_SEEDS, SHORT_SECONDS = 1, 1500.0
SHORT = (
    Part("digits", 8, "SGD", (*FLUSH, *TWO_BW[:2], *PIPEDREAM_M_IS_D[:2], *PIPEDREAM_M_IS_1[:2]), (0.01,)),
    Part("GPT", 4, "Adam", (FLUSH[1], TWO_BW[0], TWO_BW[4], PIPEDREAM_M_IS_D[4], PIPEDREAM_M_IS_2D[3]), (4e-3,)),
    Part("GPT", 4, "Muon", (FLUSH[1], TWO_BW[2], PIPEDREAM_M_IS_2D[3]), (6e-3,)),
)


def make_task(part: Part) -> Task:
    """Return the model and data of a part."""
    return make_gpt(part.d) if part.task == "GPT" else make_digits(1.0 if part.task == "clipped digits" else None)


def stages_of(task: Task, d: int) -> tuple[tuple[str, ...], ...]:
    """Return the layer ids of each of d stages, blocks shared out evenly; the first layer and the last belong to the end stages."""
    ids = task.stack.ids
    blocks = np.array_split(ids[1:-1] if len(ids) > d else ids, d)
    stages = [tuple(map(str, block)) for block in blocks]
    if len(ids) > d:
        stages[0], stages[-1] = (ids[0], *stages[0]), (*stages[-1], ids[-1])
    return tuple(stages)


def run(part: Part, updates: int, evaluations: int, seeds: int, at_once: int, deadline: float | None = None) -> Iterator[Row]:
    """Train all runs of a part and yield their rows.

    Args:
        part: what is run.
        updates: of each run.
        evaluations: of each run.
        seeds: how many, from 0.
        at_once: how many runs are vectorized.
        deadline: the time of `time.monotonic` after which no further runs start.
    """
    task, optimizer, d = make_task(part), OPTIMIZERS[part.optimizer], part.d
    every = updates // evaluations
    m = max(microbatches_of(variant.schedule, d) for variant in part.variants)
    cells = [(v, rate, seed) for v in part.variants for rate in part.rates or optimizer.rates for seed in range(seeds)]
    recipes = [variant.recipe(seed, rate, optimizer.momentum, d, m) for variant, rate, seed in cells]
    data = stacked([batches_of_run(task, seed, evaluations, every) for seed in range(seeds)])
    params = stacked([initial(task, seed) for seed in range(seeds)])
    largest = max(int(recipe.delays.max()) for recipe in recipes)
    schedule = warm_up_and_cosine(updates) if task.clip is not None else lambda t: 1.0
    emulation = Emulation(task.stack, stages_of(task, d), task.loss, optimizer.rule, schedule, updates // 4 or 1, largest + 1, task.clip)

    def train(recipe: Recipe) -> jax.Array:
        start, batches = jax.tree.map(lambda a: a[recipe.seed], (params, data))
        losses: jax.Array = emulation.train(recipe, start, batches, jax.tree.map(jnp.asarray, task.held_out)).losses
        return losses

    size = at_once if optimizer.together else len(recipes)
    program = jax.jit(jax.vmap(train) if optimizer.together else lambda chunk: jax.lax.map(train, chunk))
    for first in range(0, len(recipes), size):
        if deadline is not None and time.monotonic() > deadline:
            return
        chunk = recipes[first : first + size]
        padded = [*chunk, *[chunk[-1]] * (size - len(chunk))]
        losses = np.asarray(program(stacked(padded)))
        for (variant, rate, seed), values in zip(cells[first : first + size], losses, strict=False):
            yield Row(
                part.task, d, part.optimizer, variant.schedule, variant.remedy, rate, seed, every, [round(float(v), 5) for v in values]
            )


def initial(task: Task, seed: int) -> Tree:
    """Return fresh parameters by layer id."""
    x = jax.tree.map(lambda a: a[:1], task.held_out[0])
    specs, params = task.stack.specs(x), {}
    for layer_id in task.stack.ids:
        params[layer_id], _ = task.stack.init_layer(layer_id, jax.random.key(seed), x)
        x = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs[layer_id].output)
    return params


def study(parts: Sequence[Part], path: Path | None, report: Callable[[str], None], **options: Any) -> list[Row]:
    """Run parts one after the other, and write all rows after each of them.

    Args:
        parts: what is run.
        path: of the results as JSON.
        report: called with a line for each part.
        options: of `run`.
    """
    rows: list[Row] = []
    for part in parts:
        start, before = time.perf_counter(), len(rows)
        rows += run(part, **options)
        report(f"{part.name}: {len(rows) - before} of {part.count(options['seeds'])} runs in {time.perf_counter() - start:.0f} s")
        if path is not None:
            path.write_text(json.dumps({"rows": [asdict(row) for row in rows], "machine": describe()}) + "\n")
    return rows


def batches_of_run(task: Task, seed: int, groups: int, each: int) -> Tree:
    """Return (inputs, labels) of all batches of a run, each of shape (groups, each, rows, …)."""
    source = task.batches(seed)
    batches = [next(source) for _ in range(groups * each)]
    return jax.tree.map(lambda *leaves: np.stack(leaves).reshape(groups, each, *leaves[0].shape), *batches)


def stacked(trees: Sequence[Tree]) -> Tree:
    """Return one tree of arrays with a first dim more, in which trees of equal structure follow each other."""
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *trees)
