"""What compressed messages and sums change in the rule of the reference of pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.pairs.option import Option
from tests.pairs.reference import Array

KINDS = ("bfloat16", "int8", "fp8")


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


PAIRS = {
    "compressed messages": CompressedMessages,
    "compressed sums": CompressedSums,
}
