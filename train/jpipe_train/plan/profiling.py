"""The parts of the model for which a plan is searched, and the profile of its layers."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import jpipe
from jpipe_planner import Profile, Topology, analyze, measure
from jpipe_planner.profile.bench import Together, cores, neighbours
from jpipe_planner.profile.model import Batch, Model
from jpipe_train.assemble import model
from jpipe_train.assemble.build import precision
from jpipe_train.assemble.frozen import trains_part
from jpipe_train.assemble.optimizer import optimizer, same_at_all_stages
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.launch.team import Team
from jpipe_train.plan.inputs import Request

# the number of microbatch sizes in measured and analytic profiles; each size is compiled, and also run if measured
MEASURED_SIZES, PAPER_SIZES = 4, 6
SECONDS = 8.0  # for measurements, without compilation
ROUNDS = 9  # measurements of devices that compute at the same time; the median counts


@dataclass(frozen=True)
class Parts:
    """The parts of a pipeline that a config describes, without the plan."""

    stack: jpipe.LayerStack
    loss: Any
    rule: optax.GradientTransformation
    batch: Any
    config: Config
    precision: jpipe.Precision = dataclasses.field(default_factory=jpipe.Precision)

    @classmethod
    def of(cls, config: Config, reporter: Reporter) -> "Parts":
        """Build the parts that a config describes; only the shapes of the data are read."""

        @functools.cache
        def read() -> Any:
            with reporter.phase("reading the data"):
                return jax.tree.map(_spec, data.unread(config).like)

        stack, links = model.layers(config, lambda: read()[0]), config.plan.links
        if links is not None and links.bottleneck is not None:
            stack, _ = jpipe.model.with_added_layers(stack, jpipe.Plan.even(stack.ids, 1, links=links))
        loss, batch = model.loss(config), read()
        params = stack.ties.without_seconds({layer_id: spec.params for layer_id, spec in stack.specs(batch[0]).items()})
        rule = trains_part(optimizer(same_at_all_stages(config.optimizer), config.train.length, params), config.tune, params)
        return cls(stack, loss, rule, batch, config, precision(config.precision, reporter))

    def rows(self, count: int) -> Any:
        """Return the shapes and dtypes of a batch of `count` rows."""
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct((count, *spec.shape[1:]), spec.dtype), self.batch)

    @property
    def for_profile(self) -> tuple[jpipe.LayerStack, Batch, Any, optax.GradientTransformation]:
        """The arguments of a profile: stack, batch, loss and optimizer."""
        return self.stack, self.rows, self.loss, self.rule

    @property
    def profile_options(self) -> dict[str, Any]:
        """The options of a profile that describe how the model is trained."""
        of_optimizer = {name: getattr(self.config.optimizer, name) for name in ("ema_decay", "delay_correction")}
        return {"precision": self.precision, "in_slices": self.config.plan.slices is not None, **of_optimizer}

    def complete(self, request: Request, team: Team) -> Request:
        """Return the request with the options that follow from the config and the number of processes."""
        return dataclasses.replace(
            request.with_extras(self.config.plan),
            batch=request.batch or self.config.train.batch_size,
            replicas=not self.stack.carries_rows,
            max_delay=self.config.plan.max_delay if request.max_delay is None else request.max_delay,
            share_optimizer=self.config.optimizer.ema_decay is None,
            all_devices=team.processes is not None,
        )

    def pipeline(self, plan: jpipe.Plan) -> jpipe.Pipeline:
        """Return the pipeline of the model with a plan."""
        return jpipe.Pipeline(self.stack, plan, self.loss, self.rule, precision=self.precision, **self.config.optimizer.of_pipeline)


def sizes_for(batch: int, devices: int, most: int) -> tuple[int, ...]:
    """Return divisors of the batch, each about twice the previous one, up to twice a device's share: larger ones leave pipelines empty."""
    small = [rows for rows in range(1, math.isqrt(batch) + 1) if batch % rows == 0]
    divisors = sorted({*small, *(batch // rows for rows in small)})
    sizes = [max(rows for rows in divisors if rows == 1 or rows * devices <= 2 * batch)]
    for rows in reversed(divisors):
        if rows <= sizes[-1] / 1.5:
            sizes.append(rows)
    return tuple(sorted(sizes[:most]))


def profile_of(parts: Parts, topology: Topology | None, batch: int, devices: int, reporter: Reporter, largest_mesh: int = 1) -> Profile:
    """Profile the layers on this device, or analytically if the topology gives the FLOP/s of its device.

    Without a topology it is for this run's devices; `batch` counts the rows between two updates. The largest microbatches of an analytic
    profile grow with the number of devices of the largest mesh to try.
    """
    if topology is None or not topology.device.flops:
        sizes = sizes_for(batch, devices, MEASURED_SIZES)
        with reporter.counting("profiling the layers on this device") as progress:
            return measure(*parts.for_profile, sizes, seconds=SECONDS, progress=progress, **parts.profile_options)
    sizes = sizes_for(batch, max(devices // largest_mesh, 1), PAPER_SIZES)
    with reporter.counting(f"profiling the layers for {topology.device.name} analytically") as progress:
        return analyze(*parts.for_profile, sizes, topology.device, progress=progress, **parts.profile_options)


def profile_together(parts: Parts, batch: int, devices: int, reporter: Reporter, team: Team) -> Profile:
    """Profile the layers in process 0 while the others wait. All processes call this and get the same profile, of a device alone."""
    text = team.from_first("the profile of process 0", lambda: profile_of(parts, None, batch, devices, reporter).to_json())
    return Profile.from_json(text)


def cores_of(parts: Parts, profile: Profile, devices: int, team: Team) -> float | None:
    """Return how many devices, of all processes, compute at once as fast as one; None for one or for accelerators."""
    local = jax.local_devices()[:devices]
    if devices == 1 or local[0].platform != "cpu":
        return None
    rows = profile.sizes[len(profile.sizes) // 2]
    costs = profile.costs(rows)
    seconds = {layer_id: cost.forward + cost.backward for layer_id, cost in costs.items()}
    ids = neighbours(profile.ids, {layer_id: (seconds[layer_id], cost.weights) for layer_id, cost in costs.items()}, seconds)
    model = Model(*parts.for_profile, (rows,), **parts.profile_options)
    work = Together(model, ids, rows, sum(seconds[layer_id] for layer_id in ids), local)
    rounds = list[tuple[float, float]]()
    for _ in range(ROUNDS):
        team.meet("one device to compute alone")
        alone = work.seconds() if team.is_first else 0.0
        team.meet("all devices to compute at once")
        rounds.append((team.largest("the time alone", alone), team.largest("the time at once", work.seconds(count=len(local)))))
    return cores(rounds, devices)


def _spec(rows: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(rows.shape), jax.dtypes.canonicalize_dtype(np.dtype(rows.dtype)))
