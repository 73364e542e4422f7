"""The choices of routers, and the losses that keep them balanced.

The letters in the shapes: b rows, l blocks with experts, e experts.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jpipe_lm.config.model.experts import ExpertsConfig
from jpipe_train.losses.cross_entropy import wider


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The choices of the routers so far, for each row; the last block's come last. Padding is not counted.

    Each block keeps its own numbers, not a sum, so that nothing is rounded away if layers pass on bfloat16.

    Attributes:
        counts: (b, l, e), how many tokens have chosen each expert.
        probabilities: (b, l, e), the mean probability of each expert.
        squares: (b, l), the mean square of the log of the sum of the exponentials of a router's outputs.
        per_token: how many experts each token has chosen.
        balance_loss: the factor of the load-balancing loss.
        z_loss: the factor of the mean of the squares.
    """

    counts: Any
    probabilities: Any
    squares: Any
    per_token: int = field(metadata={"static": True})
    balance_loss: float = field(metadata={"static": True})
    z_loss: float = field(metadata={"static": True})

    def loss(self) -> Float[Array, ""]:
        """Return the mean router loss of the rows: the load-balancing loss and the mean of the squares, each times its factor.

        References: Fedus et al. 2021, "Switch Transformers", for any number of experts per token as in Hugging Face's transformers; Zoph
        et al. 2022, "ST-MoE".
        """
        return self.balance_loss * self.balance() + self.z_loss * self._mean(self.squares)

    def balance(self) -> Float[Array, ""]:
        """Return the load-balancing loss of all blocks together: `per_token` if experts get equally many tokens, at most e · `per_token`.

        It is e times the sum over the experts of (share of the tokens that chose the expert) · (its mean probability).
        """
        wide = wider(self.probabilities.dtype)
        shares = self.counts.sum((0, 1)).astype(wide) / self._number(wide).sum()
        return self.counts.shape[-1] * (shares * self._mean(self.probabilities)).sum()

    def busiest(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the load of the busiest expert relative to the mean, averaged over the blocks, as a pair: times tokens, and tokens."""
        counts = self.counts.sum(0).astype("float32")
        number = self._number(jnp.float32)[:, 0].sum()
        most = counts.max(-1) / jnp.maximum(counts.mean(-1), jnp.finfo("float32").tiny)
        return number * most.mean(), number

    def unused(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the share of the experts of all blocks that no token has chosen, as a pair: times tokens, and tokens."""
        number = self._number(jnp.float32)[:, 0].sum()
        return number * (self.counts.sum(0) == 0).mean(dtype="float32"), number

    def _mean(self, means: Float[Array, "b l *e"]) -> Float[Array, "*e"]:
        """Return the mean over all tokens and blocks of a quantity that is a mean over each row's tokens."""
        wide = wider(means.dtype)
        number = self._number(wide)
        return jnp.tensordot(number, means.astype(wide), 2) / number.sum()

    def _number(self, dtype: Any) -> Float[Array, "b l"]:
        """Return the number of tokens of each row and block, at least a small positive number: padding alone then has a loss of 0."""
        return jnp.maximum(self.counts.sum(-1).astype(dtype) / self.per_token, jnp.finfo(dtype).tiny)

    def followed_by(self, counts: Any, probabilities: Any, squares: Any) -> "Routing":
        """Return the routing after one more block: append its numbers and drop the first block's (zeros, to begin with)."""

        def shifted(all_blocks: Any, new: Any) -> Any:
            return jnp.concatenate([all_blocks[:, 1:], new[:, None].astype(all_blocks.dtype)], axis=1)

        return replace(
            self,
            counts=shifted(self.counts, counts),
            probabilities=shifted(self.probabilities, probabilities),
            squares=shifted(self.squares, squares),
        )


def no_routing(config: ExpertsConfig, rows: int, blocks: int, dtype: Any) -> Routing:
    """Return the routing before the first of some blocks with experts."""
    return Routing(
        counts=jnp.zeros((rows, blocks, config.count), jnp.int32),
        probabilities=jnp.zeros((rows, blocks, config.count), dtype),
        squares=jnp.zeros((rows, blocks), dtype),
        per_token=config.per_token,
        balance_loss=config.balance_loss,
        z_loss=config.z_loss,
    )
