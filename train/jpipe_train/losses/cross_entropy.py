"""The cross-entropy of integer labels. It can be computed without the logits of all positions in memory at once.

Letters in shapes: n positions (of all rows), w width, v symbols. Negative labels are ignored.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt8

from jpipe import InputError

Labels = Any  # integers, or {"tokens": integers, "next": integers of each row}
Outputs = Any  # logits or an `Unprojected`, or {"tokens": one of these, "next": logits of each row, "experts": a `Routing`}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unprojected:
    """Logits that are not computed yet: `hidden` times `kernel`, plus `bias`."""

    hidden: Any  # (…, w), the last activations
    kernel: Any  # (w, v), or (v, w) if `by_symbol`
    bias: Any  # (v), or None
    chunk: int = field(metadata={"static": True})  # the number of positions for which logits are computed at a time
    by_symbol: bool = field(metadata={"static": True})  # whether the kernel has a row for each symbol, like an embedding
    dtype: str = field(metadata={"static": True})  # the dtype in which the logits are computed. The arrays may have another dtype.
    # the bound of the logits, see `soft_capped`; None if they have no bound
    soft_cap: float | None = field(default=None, metadata={"static": True})

    @property
    def vocab_size(self) -> int:
        """The number of logits at each position."""
        return int(self.kernel.shape[0 if self.by_symbol else 1])

    def logits(self) -> Float[Array, "*n v"]:
        """Compute all logits."""
        hidden, kernel = self.hidden.astype(self.dtype), self.kernel.astype(self.dtype)
        logits = jax.lax.dot_general(hidden, kernel, (((hidden.ndim - 1,), (1 if self.by_symbol else 0,)), ((), ())))
        logits = logits if self.bias is None else logits + self.bias.astype(self.dtype)[(None,) * (hidden.ndim - 1)]
        return soft_capped(logits, self.soft_cap)


def loss(outputs: Outputs, labels: Labels) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum of the cross-entropy in nats, and the number of labels that count.

    If there are labels of tokens and of the next sentence (BERT), the loss is the mean over tokens plus the mean over rows for the next
    sentence. So for n counted tokens, (n / rows) times the sum for the next sentence is added to the sum. The mean over several
    microbatches is exact if each has the same n. If the outputs have a router loss, `outputs["experts"].loss()`, it is added n times.
    """
    if not isinstance(labels, dict):
        number = _number(labels)
        return with_router_loss(_nats(_tokens(outputs), labels), number, outputs), number
    number = _number(labels["tokens"])
    following = _nats(outputs["next"], labels["next"])
    share = (number / labels["next"].size).astype(following.dtype)
    return _nats(outputs["tokens"], labels["tokens"]) + share * following, number


def with_router_loss(total: Float[Array, ""], number: Float[Array, ""], outputs: Any) -> Float[Array, ""]:
    """Return `total`, the loss summed over `number` labels, plus any router loss of the outputs, once per label."""
    routing = outputs.get("experts") if isinstance(outputs, dict) else None
    return total if routing is None else total + (number * routing.loss()).astype(total.dtype)


def correct(outputs: Outputs, labels: Labels, most: int = 1) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the number of labels that have one of the `most` largest logits, and the number of valid labels.

    If there are labels of tokens and of next sentences, only the tokens are counted.
    """
    outputs, labels = _tokens(outputs), _tokens(labels)
    if isinstance(outputs, Unprojected):
        whole, parts = _in_chunks(outputs, labels)
        hits = jax.lax.map(lambda part: _hits(replace(whole, hidden=part[0]).logits(), part[1], most).sum(), (whole.hidden, parts))
    else:
        hits = _hits(outputs, labels, most)
    return hits.sum(), (labels >= 0).sum()


def all_logits(outputs: Outputs) -> Outputs:
    """Compute the logits of each `Unprojected` in the outputs."""
    return jax.tree.map(lambda leaf: leaf.logits() if isinstance(leaf, Unprojected) else leaf, outputs, is_leaf=_is_unprojected)


def vocab_size(outputs: Outputs) -> int:
    """Return the number of logits at each position."""
    outputs = _tokens(outputs)
    return outputs.vocab_size if isinstance(outputs, Unprojected) else int(outputs.shape[-1])


def soft_capped(x: Float[Array, "*n"], cap: float | None) -> Float[Array, "*n"]:
    """Return `cap` · tanh(x / `cap`): about x for small x, with an absolute value below the cap. Without a cap, return x."""
    if cap is None:
        return x
    limit = jnp.asarray(cap, wider(x.dtype))
    return (limit * jnp.tanh(x.astype(limit.dtype) / limit)).astype(x.dtype)


def wider(dtype: DTypeLike) -> Any:
    """Return the dtype, or float32 if that has more bits."""
    return jnp.dtype(dtype) if jnp.dtype(dtype).itemsize >= 4 else jnp.dtype("float32")


def _hits(logits: Float[Array, "*n v"], labels: Int[Array, "*n"] | UInt8[Array, "*n"], most: int) -> Bool[Array, "*n"]:
    """Return for each label whether its logit is among the `most` largest. Of equal logits, the first counts as larger."""
    if most == 1:
        return logits.argmax(-1) == labels
    return (jax.lax.top_k(logits, most)[1] == labels[..., None]).any(-1)


def _tokens(tree: Any) -> Any:
    """Return the outputs or labels of the tokens: the entry "tokens" of a dict, or `tree` itself."""
    return tree["tokens"] if isinstance(tree, dict) else tree


def _is_unprojected(leaf: Any) -> bool:
    return isinstance(leaf, Unprojected)


def _number(labels: Int[Array, "*n"] | UInt8[Array, "*n"]) -> Float[Array, ""]:
    return (labels >= 0).sum().astype(jnp.float32)


def _nats(outputs: Any, labels: Int[Array, "*n"] | UInt8[Array, "*n"]) -> Float[Array, ""]:
    """Sum the cross-entropy of the labels in nats, from logits or an `Unprojected`."""
    if isinstance(outputs, Unprojected):
        return _nats_in_chunks(*_in_chunks(outputs, labels)).sum()
    return nats_of_each(outputs, labels).sum()


def nats_of_each(outputs: Any, labels: Int[Array, "*n"] | UInt8[Array, "*n"]) -> Float[Array, "*n"]:
    """Return the cross-entropy of each label in nats, from logits or an `Unprojected`; 0 for labels that do not count."""
    if isinstance(outputs, Unprojected):
        return _nats_in_chunks(*_in_chunks(outputs, labels)).T.reshape(-1)[: labels.size].reshape(labels.shape)
    if outputs.shape[:-1] != labels.shape:
        raise InputError(
            f"loss: cross_entropy: expected outputs with one more dimension than the labels, {list(labels.shape)}, found "
            f"{list(outputs.shape)}; change the last layer of the model, or the labels"
        )
    wide = outputs.astype(wider(outputs.dtype))
    nats = optax.softmax_cross_entropy_with_integer_labels(wide, jnp.maximum(labels, 0))
    return jnp.where(labels >= 0, nats, jnp.zeros((), nats.dtype))


# Chunk by chunk ----------------------------------------------------------------------------------------------------------


def _in_chunks(outputs: Unprojected, labels: Int[Array, "*n"] | UInt8[Array, "*n"]) -> tuple[Unprojected, Int[Array, "chunks size"]]:
    """Reshape hidden to (chunks, size, w) and labels to (chunks, size), and cast all arrays to `dtype`.

    Labels that pad the last chunk are ignored. A chunk takes positions at equal distances, so that it has equally many positions from each
    part of the rows. If the rows are sharded, each chunk is sharded in the same way.
    """
    width, count = outputs.hidden.shape[-1], labels.size
    chunks = -(-count // outputs.chunk)
    size = -(-count // chunks)
    fill = chunks * size - count
    hidden = jnp.pad(outputs.hidden.reshape(count, width), ((0, fill), (0, 0))).reshape(size, chunks, width).swapaxes(0, 1)
    padded = jnp.pad(labels.reshape(count).astype(jnp.int32), (0, fill), constant_values=-1).reshape(size, chunks).T
    bias = None if outputs.bias is None else outputs.bias.astype(outputs.dtype)
    return replace(outputs, hidden=hidden.astype(outputs.dtype), kernel=outputs.kernel.astype(outputs.dtype), bias=bias), padded


@jax.custom_vjp
def _nats_in_chunks(whole: Unprojected, labels: Int[Array, "chunks size"]) -> Float[Array, "chunks size"]:
    """Return the nats of each label of all chunks. The chunks are computed one after the other.

    The backward pass recomputes the logits of each chunk. It is written out, without `jax.checkpoint`, for two reasons. Gradients of the
    kernel are summed in float32. And if backwards are split into parts for inputs and for weights, this one stays whole; otherwise it would
    keep the gradients of all logits.
    """
    return jax.lax.map(lambda part: nats_of_each(replace(whole, hidden=part[0]).logits(), part[1]), (whole.hidden, labels))


def _forward(whole: Unprojected, labels: Any) -> tuple[Any, Any]:
    return _nats_in_chunks(whole, labels), (whole, labels)


def _backward(saved: Any, gradient: Any) -> tuple[Unprojected, None]:
    whole, labels = saved
    wide = wider(whole.dtype)

    def add(sums: Any, part: Any) -> tuple[Any, Any]:
        hidden, numbers, of_nats = part
        _, pull = jax.vjp(lambda unprojected: nats_of_each(unprojected.logits(), numbers), replace(whole, hidden=hidden))
        gradients = pull(of_nats)[0]
        sums = jax.tree.map(lambda total, new: total + new.astype(wide), sums, (gradients.kernel, gradients.bias))
        return jax.lax.optimization_barrier((sums, gradients.hidden))  # both are computed together, see `_nats_in_chunks`

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, wide), (whole.kernel, whole.bias))
    sums, hidden = jax.lax.scan(add, zeros, (whole.hidden, labels, gradient))
    kernel, bias = jax.tree.map(lambda total: total.astype(whole.dtype), sums)
    return replace(whole, hidden=hidden, kernel=kernel, bias=bias), None


_nats_in_chunks.defvjp(_forward, _backward)
