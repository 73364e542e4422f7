"""The choices of routers, and the losses that keep them balanced.

Letters in shapes: b rows, l blocks with experts, e experts.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jpipe_lm.config.model.experts_section import ExpertsConfig
from jpipe_train.losses.cross_entropy import wider


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routing:
    """The choices of the routers so far, for each row, in the order of the blocks. Padding is not counted.

    Each block's numbers are kept separately, because sums would be rounded when layers pass on bfloat16.
    """

    counts: Any  # (b, l, e), the number of tokens that chose each expert
    probabilities: Any  # (b, l, e), the mean probability of each expert
    squares: Any  # (b, l), the mean of the squared logsumexp of a router's logits
    per_token: int = field(metadata={"static": True})  # the number of experts that each token chooses
    balance_loss: float = field(metadata={"static": True})  # the factor of the load-balancing loss
    z_loss: float = field(metadata={"static": True})  # the factor of the mean of the squares

    def loss(self) -> Float[Array, ""]:
        """Return the router loss of the rows: the sum of the load-balancing loss and the mean of the squares, each times its factor.

        References: Fedus et al. 2021, "Switch Transformers", and Zoph et al. 2022, "ST-MoE". The number of experts per token enters the
        load-balancing loss as in Hugging Face's transformers.
        """
        return self.balance_loss * self.balance() + self.z_loss * self._mean(self.squares)

    def balance(self) -> Float[Array, ""]:
        """Return the load-balancing loss of all blocks together.

        It is e times the sum over the experts of (share of the tokens that chose the expert) · (mean probability of the expert). It equals
        `per_token` if all experts get the same number of tokens.
        """
        wide = wider(self.probabilities.dtype)
        shares = self.counts.sum((0, 1)).astype(wide) / self._number(wide).sum()
        return self.counts.shape[-1] * (shares * self._mean(self.probabilities)).sum()

    def busiest(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the pair (m · n, n). m is the largest load of an expert relative to the mean, averaged over blocks; n counts tokens."""
        counts = self.counts.sum(0).astype("float32")
        number = self._number(jnp.float32)[:, 0].sum()
        most = counts.max(-1) / jnp.maximum(counts.mean(-1), jnp.finfo("float32").tiny)
        return number * most.mean(), number

    def unused(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the pair (m · n, n). m is the share of the experts of all blocks that no token chose; n is the number of tokens."""
        number = self._number(jnp.float32)[:, 0].sum()
        return number * (self.counts.sum(0) == 0).mean(dtype="float32"), number

    def _mean(self, means: Float[Array, "b l *e"]) -> Float[Array, "*e"]:
        """Return the mean of a quantity over all tokens and blocks, given its means over the tokens of each row."""
        wide = wider(means.dtype)
        number = self._number(wide)
        return jnp.tensordot(number, means.astype(wide), 2) / number.sum()

    def _number(self, dtype: Any) -> Float[Array, "b l"]:
        """Return the number of tokens of each row and block, at least a tiny positive number, so that rows of padding have a loss of 0."""
        return jnp.maximum(self.counts.sum(-1).astype(dtype) / self.per_token, jnp.finfo(dtype).tiny)

    def followed_by(self, counts: Any, probabilities: Any, squares: Any) -> "Routing":
        """Return the routing after one more block: append this block's numbers, and drop the first numbers, which are zeros."""

        def shifted(all_blocks: Any, new: Any) -> Any:
            return jnp.concatenate([all_blocks[:, 1:], new[:, None].astype(all_blocks.dtype)], axis=1)

        return replace(
            self,
            counts=shifted(self.counts, counts),
            probabilities=shifted(self.probabilities, probabilities),
            squares=shifted(self.squares, squares),
        )


def no_routing(config: ExpertsConfig, rows: int, blocks: int, dtype: Any) -> Routing:
    """Return the routing before the first block: zeros for `blocks` blocks with experts."""
    return Routing(
        counts=jnp.zeros((rows, blocks, config.count), jnp.int32),
        probabilities=jnp.zeros((rows, blocks, config.count), dtype),
        squares=jnp.zeros((rows, blocks), dtype),
        per_token=config.per_token,
        balance_loss=config.balance_loss,
        z_loss=config.z_loss,
    )
