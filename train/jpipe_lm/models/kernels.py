"""Attention by kernels that JAX ships outside of its public API: splash attention for TPUs, and cuDNN's layout of packed documents.

Letters in shapes: b rows, s positions, h query heads, k key and value heads, d numbers per head, n documents.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpipe.context import traced_mesh
from jpipe.processes.jax_internals import cudnn_attention
from jpipe_lm.models.blockwise import Masked

Attention = Callable[..., Any]
"""Computes attention from queries, keys, values and segments."""
DOCUMENTS = 32
"""The most documents of a row in cuDNN's packed layout. Its scratch memory has a float32 number for each document, position and head."""
BLOCKS = (512, 256, 128)
"""The possible sizes of the blocks of positions in splash attention. The first that divides the length of a row is taken."""


# TPUs ----------------------------------------------------------------------------------------------------------------------


def fits_splash(positions: int) -> bool:
    """Return whether splash attention can compute rows of this length."""
    return positions % BLOCKS[-1] == 0


def splash(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    segments: Int[Array, "b s"] | None,
    masked: Masked,
    *,
    scale: float,
    soft_cap: float | None = None,
    interpret: bool = False,
) -> Float[Array, "b s h d"]:
    """Compute attention by splash attention. Blocks of positions outside the mask are not computed.

    On the mesh of a stage, each device computes its own rows and heads. Queries attend only to keys of their own segment, as `masked` says.
    With a soft cap, the scores x become cap · tanh(x / cap). For tests, `interpret` computes without a TPU, operation by operation.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as jax_splash

    length = q.shape[1]
    block, shape = next(size for size in BLOCKS if length % size == 0), (length, length)
    window = None if masked.window is None else masked.window - 1
    mask: Any = jax_splash.LocalMask(shape, (window, 0), 0) if masked.is_causal else jax_splash.FullMask(shape)
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    sizes: dict[str, Any] = dict.fromkeys(names, block)

    def on_device(q: Any, k: Any, v: Any, *segments: Any) -> Any:
        kernel = jax_splash.make_splash_mha_single_device(
            jax_splash.MultiHeadMask([mask] * q.shape[2]),
            block_sizes=jax_splash.BlockSizes(**sizes),
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )
        by_head = (x.swapaxes(1, 2) for x in (q * jnp.asarray(scale, q.dtype), k, v))
        return jax.vmap(kernel)(*by_head, *(jax_splash.SegmentIds(ids, ids) for ids in segments)).swapaxes(1, 2)

    inputs = (q, k, v) if segments is None else (q, k, v, segments)
    if (stage := traced_mesh()) is None:
        return on_device(*inputs)
    rows, heads = stage.rows or None, P(stage.rows or None, None, stage.axes.get("heads"))
    specs = (heads, heads, heads, P(rows))[: len(inputs)]
    # The kernel does not say over which axes its results vary, so JAX cannot check it.
    return jax.shard_map(on_device, mesh=stage.mesh, in_specs=specs, out_specs=heads, check_vma=False)(*inputs)


# NVIDIA GPUs ----------------------------------------------------------------------------------------------------------------


def is_gpu_with(capability: str) -> bool:
    """Return whether this machine has a GPU of at least this compute capability, such as "9.0". Of an absent GPU it is not known."""
    return cudnn_attention().check_compute_capability(capability)


def packs_documents(q: Float[Array, "b s h d"], k: Float[Array, "b s k d"]) -> bool:
    """Return whether cuDNN's packed layout is available: on a Hopper GPU or later. Before JAX 0.12, grouped keys were misplaced in it."""
    return is_gpu_with("9.0") and (q.shape[2] == k.shape[2] or jax.__version_info__ >= (0, 12))


def packed(
    otherwise: Attention,
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    segments: Int[Array, "b s"],
    masked: Masked,
    scale: float,
) -> Float[Array, "b s h d"]:
    """Compute attention by cuDNN in its packed layout, without a mask. The documents (`segments`) of a row follow each other.

    The backward computes the forward again: the arrays that it would need have room for `DOCUMENTS` documents in each row. If a row has
    more, `otherwise` computes attention. `masked` says which keys in its document a query attends to.
    """
    return _by_number(partial(_packed, masked, scale), otherwise, q, k, v, segments)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_number(few: Attention, many: Attention, q: Any, k: Any, v: Any, segments: Any) -> Any:
    """Choose by the number of documents."""
    return jax.lax.cond(_are_few(segments), few, many, q, k, v, segments)


def _forward(few: Attention, many: Attention, *inputs: Any) -> tuple[Any, Any]:
    return _by_number(few, many, *inputs), inputs


def _backward(few: Attention, many: Attention, inputs: Any, gradient: Any) -> tuple[Any, Any, Any, None]:
    q, k, v, segments = inputs

    def pull(attention: Attention) -> Callable[..., Any]:
        return lambda q, k, v, gradient: jax.vjp(lambda *qkv: attention(*qkv, segments), q, k, v)[1](gradient)

    return *jax.lax.cond(_are_few(segments), pull(few), pull(many), q, k, v, gradient), None


_by_number.defvjp(_forward, _backward)


def _packed(masked: Masked, scale: float, q: Any, k: Any, v: Any, segments: Any) -> Any:
    cudnn, (lengths, starts) = cudnn_attention(), documents_of(segments)
    kind = cudnn.MaskType.PADDING_CAUSAL if masked.is_causal else cudnn.MaskType.PADDING
    places: dict[str, Any] = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": starts, "kv_offsets": starts}
    return cudnn.dot_product_attention(q, k, v, **places, scale=scale, mask_type=kind, sliding_window_length=masked.window)


def documents_of(segments: Int[Array, "b s"]) -> tuple[Int[Array, "b n"], Int[Array, "b n+1"]]:
    """Return the lengths and the first positions of the documents of each row, as cuDNN's packed layout has them, then -1.

    Padding counts as a document, so that all positions have outputs.
    """
    length = segments.shape[1]
    firsts = jax.vmap(partial(jnp.flatnonzero, size=DOCUMENTS + 1, fill_value=length))(_begins(segments)).astype(jnp.int32)
    lengths, starts = jnp.diff(firsts), firsts.at[:, -1].set(length)
    return jnp.where(lengths > 0, lengths, -1), jnp.where(starts < length, starts, -1)


def _are_few(segments: Int[Array, "b s"]) -> Array:
    """Return whether no row has more than `DOCUMENTS` documents."""
    return _begins(segments).sum(1).max() <= DOCUMENTS


def _begins(segments: Int[Array, "b s"]) -> Array:
    """Return for each position whether it is the first of its document."""
    return jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1)
