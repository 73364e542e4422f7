"""The parts of the model that a plan is searched for, and the profile of its layers."""

import dataclasses
import functools
import math
import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

import jpipe
from jpipe_planner import Profile, Topology, analyze, measure
from jpipe_train.assemble import model
from jpipe_train.assemble.build import precision
from jpipe_train.assemble.frozen import trains_part
from jpipe_train.assemble.optimizer import optimizer, same_at_all_stages
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.launch.together import Together

MEASURED_SIZES, PAPER_SIZES = 4, 6  # numbers of microbatch sizes to profile; each takes a compilation, and a run if it is measured
SECONDS = 8.0  # of measuring, without compilation


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
        """Build the parts that a config describes; of the data only shapes are read."""

        @functools.cache
        def read() -> Any:
            with reporter.phase("reading the data"):
                return jax.tree.map(_spec, data.unread(config).like)

        computes, chunk = config.precision.computes, config.logits_chunk
        stack = model.layers(config.model, config.train.batch_size, computes, chunk, lambda: read()[0], config.tune)
        loss, batch = model.loss(config.loss, config.model.head), read()
        params = stack.ties.without_seconds({layer_id: spec.params for layer_id, spec in stack.specs(batch[0]).items()})
        rule = trains_part(optimizer(same_at_all_stages(config.optimizer), config.train.length, params), config.tune, params)
        return cls(stack, loss, rule, batch, config, precision(config.precision, reporter))

    def rows(self, count: int) -> Any:
        """Return the shapes and dtypes of a batch of `count` rows."""
        return jax.tree.map(lambda spec: jax.ShapeDtypeStruct((count, *spec.shape[1:]), spec.dtype), self.batch)

    def pipeline(self, plan: jpipe.Plan) -> jpipe.Pipeline:
        """Return the pipeline with a plan."""
        return jpipe.Pipeline(self.stack, plan, self.loss, self.rule, precision=self.precision, **self.config.optimizer.of_pipeline)


def sizes_for(batch: int, devices: int, most: int) -> tuple[int, ...]:
    """Return the microbatch sizes to profile: divisors of the batch, each about twice the previous one.

    The largest is about twice the share that each device has of the batch: with larger ones pipelines are mostly empty.
    """
    small = [rows for rows in range(1, math.isqrt(batch) + 1) if batch % rows == 0]
    divisors = sorted({*small, *(batch // rows for rows in small)})
    sizes = [max(rows for rows in divisors if rows == 1 or rows * devices <= 2 * batch)]
    for rows in reversed(divisors):
        if rows <= sizes[-1] / 1.5:
            sizes.append(rows)
    return tuple(sorted(sizes[:most]))


def profile_of(parts: Parts, topology: Topology | None, batch: int, devices: int, reporter: Reporter, largest_mesh: int = 1) -> Profile:
    """Profile the layers on the present device, or analytically if the topology's device has FLOP/s to compute with.

    Args:
        parts: the model.
        topology: the machines; None for the devices of this run.
        batch: rows between two updates.
        devices: the number of devices.
        reporter: shows progress.
        largest_mesh: the number of devices of the largest mesh to try; microbatches of an analytic profile are that much larger.
    """
    of_optimizer = {name: getattr(parts.config.optimizer, name) for name in ("ema_decay", "delay_correction")}
    model_parts = parts.stack, parts.rows, parts.loss, parts.rule
    if topology is None or not topology.device.flops:
        sizes = sizes_for(batch, devices, MEASURED_SIZES)
        with reporter.counting("profiling the layers on this device") as progress:
            return measure(
                *model_parts,
                sizes,
                seconds=SECONDS,
                progress=progress,
                precision=parts.precision,
                **of_optimizer,
            )
    sizes = sizes_for(batch, max(devices // largest_mesh, 1), PAPER_SIZES)
    with reporter.counting(f"profiling the layers for {topology.device.name} analytically") as progress:
        return analyze(*model_parts, sizes, topology.device, progress=progress, precision=parts.precision, **of_optimizer)


def profile_together(parts: Parts, batch: int, devices: int, reporter: Reporter, together: Together) -> Profile:
    """Profile the layers in all processes, which call this, and return the profile of process 0.

    All cores measure at the same time, because busy cores slow each other down, as they will in training, but only once per core.

    Args:
        parts: the model.
        batch: rows between two updates.
        devices: the number of devices.
        reporter: shows progress.
        together: the processes of the run.
    """

    def measured() -> Profile | None:
        if together.index >= (os.cpu_count() or 1):
            return None
        with together.working("the profile of the layers"):
            return profile_of(parts, None, batch, devices, reporter)

    local = together.run_on_all(measured)
    return Profile.from_json(together.from_first("the profile of process 0", lambda: "" if local is None else local.to_json()))


def _spec(rows: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(rows.shape), jax.dtypes.canonicalize_dtype(np.dtype(rows.dtype)))
