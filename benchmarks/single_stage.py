"""Compare one stage on one device with one plain jitted train step of the same GPT with gradient accumulation."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe import LayerStack, Pipeline, Plan, keep_freed_memory
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train.losses.cross_entropy import loss

MODEL = ModelConfig(depth=4, width=256, heads=8, seq_len=128, dropout=0.0, compute_dtype="float32")
MICROBATCHES, ROWS, REPEATS = 8, 4, 15


def measure() -> list[dict[str, Any]]:
    """Divide throughput and peak memory of the one-stage pipeline by those of the plain step, measured in turn."""
    keep_freed_memory()  # as in `jpipe train`; it affects both sides
    stack = layers(MODEL)
    optimizer = optax.adamw(1e-3)
    tokens = np.random.default_rng(0).integers(0, 256, (MICROBATCHES * ROWS, MODEL.seq_len)).astype(np.int32)
    batch = tokens, np.roll(tokens, -1, axis=1)
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "pipedream_flush", MICROBATCHES), loss, optimizer)
    before = _alive_bytes()
    state = pipe.init(jax.random.key(0), batch)
    peaks: list[int] = []
    state, _ = pipe.step(state, batch, observe=lambda event: peaks.append(_alive_bytes() - before))
    peak_bytes = max(peaks) + pipe.costs(batch)[0].temporary
    plain = _PlainStep(stack, optimizer, batch, _copy(pipe.params(state)))
    ratios, pipe_times, plain_times = [], [], []
    for repeat in range(REPEATS + 1):
        start = time.perf_counter()
        state, metrics = pipe.step(state, batch)
        jax.block_until_ready((state, metrics))
        middle = time.perf_counter()
        plain.step()
        end = time.perf_counter()
        if repeat:
            pipe_times.append(middle - start)
            plain_times.append(end - middle)
            ratios.append(plain_times[-1] / pipe_times[-1])
    return [
        {"figure": "one stage / plain jitted step: throughput", "measured": statistics.median(ratios), "goal": ">= 0.98"},
        {"figure": "one stage / plain jitted step: peak memory", "measured": peak_bytes / plain.peak_bytes, "goal": "<= 1.05"},
        {"figure": "one stage: s per step", "measured": statistics.median(pipe_times)},
        {"figure": "plain jitted step: s per step", "measured": statistics.median(plain_times)},
        {"figure": "one stage: peak memory, MB (arrays and temporaries)", "measured": peak_bytes / 1e6},
        {"figure": "plain jitted step: peak memory, MB (arrays and temporaries)", "measured": plain.peak_bytes / 1e6},
    ]


class _PlainStep:
    """A train step without jpipe: a scan over the microbatches that sums gradients, then the optimizer."""

    def __init__(self, stack: LayerStack, optimizer: optax.GradientTransformation, batch: Any, params: Any) -> None:
        def loss_of(params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
            empty: dict[str, Any] = {layer_id: {} for layer_id in stack.ids}
            outputs, _ = stack.apply(stack.ids, params, empty, inputs, key=None, microbatch=None, train=True)
            return loss(outputs, labels)[0]

        def step(params: Any, optimizer_state: Any, batch: Any) -> Any:
            def accumulate(total: Any, microbatch: Any) -> tuple[Any, jax.Array]:
                value, gradients = jax.value_and_grad(loss_of)(params, *microbatch)
                return jax.tree.map(jnp.add, total, gradients), value

            microbatches = jax.tree.map(lambda leaf: leaf.reshape(MICROBATCHES, ROWS, *leaf.shape[1:]), batch)
            total, losses = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), microbatches)
            gradients = jax.tree.map(lambda leaf: leaf / batch[1].size, total)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
            return optax.apply_updates(params, updates), optimizer_state, losses.sum() / batch[1].size

        self.batch = batch
        self.params, self.optimizer_state = params, optimizer.init(params)
        device_batch = jax.device_put(batch)
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, self.optimizer_state, device_batch).compile()

    def step(self) -> None:
        """Run one step and wait for it."""
        self.params, self.optimizer_state, value = self.compiled(self.params, self.optimizer_state, jax.device_put(self.batch))
        jax.block_until_ready((self.params, value))

    @property
    def peak_bytes(self) -> int:
        """The bytes of arguments, temporaries, and outputs that are not written in place."""
        memory = self.compiled.memory_analysis()
        return memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def _alive_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays() if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
