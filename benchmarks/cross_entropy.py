"""Compare logits of a large vocabulary computed in chunks and all at once: temporary memory, and time of loss and gradients."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe import keep_freed_memory
from jpipe_train.config.config import CHUNK
from jpipe_train.losses.cross_entropy import Unprojected, loss

VOCABULARIES = {"GPT-2": 50_257, "Llama 3": 128_256}
SIZES = {"GPT-2": 768, "Llama 3": 2048}  # widths of GPT-2 small and of Llama 3.2 1B, whose programs are compiled
MICROBATCH = 8, 1024  # rows and positions of these
RUN_POSITIONS, RUN_WIDTH, REPEATS = 2048, 256, 5  # of what is run


def measure() -> list[dict[str, Any]]:
    """Measure both vocabularies: XLA's memory for a large microbatch, and the time of a small one."""
    keep_freed_memory()
    rows: list[dict[str, Any]] = []
    for name, symbols in VOCABULARIES.items():
        what, width = f"{name}, {symbols:,} symbols", SIZES[name]
        for dtype in ("float32", "bfloat16"):
            plain, chunked = (temporary(MICROBATCH, width, symbols, dtype, chunk) for chunk in (None, CHUNK))
            of = f"{what}, width {width}, 8 × 1,024 positions, {dtype}: temporaries"
            rows += [
                {"figure": f"{of}, all at once, MB", "measured": plain / 1e6},
                {"figure": f"{of}, chunks, MB", "measured": chunked / 1e6},
                {"figure": f"{of}, all at once / chunks", "measured": plain / chunked},
            ]
        both = [timed(symbols, chunk) for chunk in (None, CHUNK)]
        times = [tuple(run() for run in both) for _ in range(REPEATS + 1)][1:]
        ratio = statistics.median(plain / chunked for plain, chunked in times)
        rows.append({"figure": f"{what}, width {RUN_WIDTH}, {RUN_POSITIONS:,} positions: time, all at once / chunks", "measured": ratio})
        for which, mine in zip(("all at once", "chunks"), zip(*times, strict=True), strict=True):
            rows.append({"figure": f"{what}: s, {which}", "measured": statistics.median(mine)})
    return rows


def gradients(chunk: int | None, dtype: str) -> Callable[[Any, Any, Any], Any]:
    """Return a function of hidden, kernel (symbols, width) and labels that computes loss and gradients."""

    def total(hidden: Any, kernel: Any, labels: Any) -> Any:
        outputs = Unprojected(hidden, kernel, None, chunk or 1, True, dtype)
        nats, weight = loss(outputs if chunk else outputs.logits(), labels)
        return nats / weight

    return jax.value_and_grad(total, (0, 1))


def temporary(positions: tuple[int, int], width: int, symbols: int, dtype: str, chunk: int | None) -> int:
    """Return the bytes of temporaries of the compiled program, in addition to its arguments and results."""
    hidden = jax.ShapeDtypeStruct((*positions, width), dtype)
    kernel, labels = jax.ShapeDtypeStruct((symbols, width), "float32"), jax.ShapeDtypeStruct(positions, "int32")
    compiled = jax.jit(gradients(chunk, dtype)).lower(hidden, kernel, labels).compile()
    analysis: Any = compiled.memory_analysis()
    return int(analysis.temp_size_in_bytes)


def timed(symbols: int, chunk: int | None) -> Callable[[], float]:
    """Return a function that computes loss and gradients once in float32 and returns its seconds."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, RUN_POSITIONS, RUN_WIDTH)), "float32")
    kernel = jnp.asarray(0.02 * rng.normal(size=(symbols, RUN_WIDTH)), "float32")
    labels = jnp.asarray(rng.integers(0, symbols, (1, RUN_POSITIONS)), "int32")
    program = jax.jit(gradients(chunk, "float32"))

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(hidden, kernel, labels))
        return time.perf_counter() - begin

    return run
