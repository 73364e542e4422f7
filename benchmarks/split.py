"""Compare the two halves of a backward with the whole one: floating-point operations, time, and the bytes kept in between."""

import statistics
import time
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from benchmarks.single_stage import MODEL, ROWS
from jpipe.stages import StandaloneStage
from jpipe_lm.models.layers import layers
from jpipe_train.losses.cross_entropy import loss

REPEATS = 25
BLOCKS = ("block_1", "block_2")
Half = Literal["backward", "backward_input", "backward_weight"]


def measure() -> list[dict[str, Any]]:
    """Measure two blocks of the GPT, without recomputation and with it."""
    rows: list[dict[str, Any]] = []
    for recompute, most in (("none", "<= 1.01"), ("full", "<= 1.0105")):
        programs = {name: _Program(_stage(recompute), name) for name in ("backward", "backward_input", "backward_weight")}
        whole, halves = programs["backward"], (programs["backward_input"], programs["backward_weight"])
        times = [(whole.seconds(), sum(half.seconds() for half in halves)) for _ in range(REPEATS + 1)][1:]
        stage, what = _stage(recompute), f"two GPT blocks, recompute {recompute}: both halves / whole backward"
        rows += [
            {"figure": f"{what}: FLOPs", "measured": sum(half.flops for half in halves) / whole.flops, "goal": most},
            {"figure": f"{what}: time", "measured": statistics.median(both / one for one, both in times), "goal": "<= 1.03"},
            {"figure": f"two GPT blocks, recompute {recompute}: stash / residuals", "measured": stage.stash_bytes / stage.cost.residuals},
        ]
    return rows


def _stage(recompute: str) -> StandaloneStage:
    """Return two blocks in the middle of the model."""
    stack = layers(MODEL)
    tokens = jax.ShapeDtypeStruct((ROWS, MODEL.seq_len), np.int32)
    optimizer = jpipe.model.LayerwiseOptimizer(optax.adamw(1e-3))
    return StandaloneStage(stack, jpipe.Stage(layers=BLOCKS, recompute=recompute), stack.specs(tokens), tokens, loss, optimizer)


class _Program:
    """A compiled half, or the whole backward, with arrays to run it on."""

    def __init__(self, stage: StandaloneStage, name: Half) -> None:
        self.compiled = stage.trace(name, jax.local_devices()[0]).lower().compile()
        self.arguments = list(jax.tree.map(_noise, self.compiled.args_info[0]))
        self.accumulators = {"backward": 4, "backward_weight": 3}.get(name)  # the argument that is donated

    @property
    def flops(self) -> float:
        """The floating-point operations as XLA counts them."""
        analysis: Any = self.compiled.cost_analysis()
        return float(analysis["flops"])

    def seconds(self) -> float:
        """Measure the time of one call."""
        begin = time.perf_counter()
        result, _ = jax.block_until_ready(self.compiled(*self.arguments))
        end = time.perf_counter()
        if self.accumulators is not None:
            self.arguments[self.accumulators] = result[1] if isinstance(result, tuple) else result
        return end - begin


def _noise(spec: Any) -> jax.Array:
    values = np.random.default_rng(0).normal(size=spec.shape) * 1e-2
    return jnp.asarray(values, spec.dtype)
