"""In which dtypes a model keeps its parameters, computes, and accumulates gradients; and the layers that compute so."""

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import InputError, nearest
from jpipe.model._layer import Layer
from jpipe.model._stack import LayerStack

Tree = Any

DTYPES = ("float32", "bfloat16", "float16")
ACCUMULATE = ("float32", "float64")


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Losses, their weights and norms are always float32 (float64 where JAX has it enabled). Layer state keeps its own dtypes, and so do
    arrays of integers and of float64.

    Attributes:
        params: of the weight versions that forwards and backwards read. "float32": as the layers make them. "bfloat16" and "float16": the
            optimizer state also holds each parameter in float32, its master. Updates change the masters, and each version is a copy of
            them in this dtype.
        compute: of what the layers read and return: their parameters, inputs and outputs, and so of all that crosses a link. The loss gets
            the outputs in float32. None: that of `params` if it is "bfloat16" or "float16", else as the layers do it themselves.
        accumulate: in which the gradients of the microbatches are summed, and replicas sum theirs; wider parameters keep their dtype.
            "float64" needs JAX with `jax_enable_x64`.
        loss_scale: the gradient of the loss is multiplied by it at the last stage, and each stage divides by it what it accumulates, so
            that small gradients do not vanish in float16. A power of two changes no bits else. None: 1.

    Raises:
        InputError: an unknown dtype, or a loss scale that is no finite number above 0.

    Example:
        >>> Precision(params="bfloat16").compute
        'bfloat16'
    """

    params: str = "float32"
    compute: str | None = None
    accumulate: str = "float32"
    loss_scale: float | str | None = None

    def __post_init__(self) -> None:
        for name, known in (("params", DTYPES), ("compute", DTYPES), ("accumulate", ACCUMULATE)):
            dtype = getattr(self, name)
            if dtype not in known and not (name == "compute" and dtype is None):
                raise InputError(f"precision: {name}: unknown dtype {dtype!r}; {nearest(str(dtype), known)}")
        if self.compute is None and self.has_masters:
            object.__setattr__(self, "compute", self.params)
        if self.loss_scale is not None:
            object.__setattr__(self, "loss_scale", _checked_scale(self.loss_scale))
        elif self.compute == "float16":
            warnings.warn(
                "precision: compute is float16 without a loss_scale: gradients below 3e-8 become zero; set loss_scale, such as 1024, "
                "or compute in bfloat16, which needs none",
                UserWarning,
                stacklevel=3,
            )

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer state holds the parameters in float32."""
        return self.params != "float32"

    @property
    def fixed_scale(self) -> float | None:
        """The loss scale, if it is a number."""
        return self.loss_scale if isinstance(self.loss_scale, float) else None

    def version_dtype(self, dtype: Any) -> Any:
        """The dtype of a parameter in the weight versions, from that which its layer gives it."""
        return jnp.dtype(self.params) if self.has_masters and dtype in _NARROW else dtype

    def accumulator_dtype(self, dtype: Any) -> Any:
        """The dtype in which gradients of this dtype are summed."""
        return wider(dtype, self.accumulate)


PLAIN = Precision()  # all dtypes as the layers make them
_NARROW = tuple(jnp.dtype(name) for name in DTYPES)  # what is cast; float64 is left alone: who has it wants it


def _checked_scale(scale: Any) -> float:
    if scale == "dynamic":
        raise InputError("precision: loss_scale: dynamic loss scaling is not supported yet; give a number, such as 1024")
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise InputError(f"precision: loss_scale: expected a finite number above 0 or None, found {scale!r}; give one such as 1024")
    return float(scale)


def check_precision(precision: Any) -> None:
    """Refuse what is no `Precision`, or accumulates in a dtype that JAX does not have.

    Raises:
        InputError: says what to change.
    """
    if not isinstance(precision, Precision):
        raise InputError(f"precision: expected a jpipe.Precision, found {type(precision).__name__}; give Precision(params=…, compute=…)")
    if precision.accumulate == "float64" and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise InputError("precision: accumulate: float64 needs jax.config.update('jax_enable_x64', True); enable it, or use float32")


def wider(dtype: Any, least: Any) -> Any:
    """The dtype, or `least` if that has more bits."""
    return max(jnp.dtype(dtype), jnp.dtype(least), key=lambda one: one.itemsize)


def rounded(x: Any, dtype: Any) -> jax.Array:
    """`x` in another dtype, rounded on every backend: inside of a program XLA may go on with the number before its cast to bfloat16."""
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def widened(x: jax.Array, dtype: Any) -> jax.Array:
    """`x` in a dtype of no fewer bits, rounded before that, as `rounded` does."""
    wide = x.astype(dtype)
    return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7) if x.dtype == jnp.bfloat16 != dtype else wide


def cast_layers(stack: LayerStack, precision: Precision) -> LayerStack:
    """The model whose layers compute in `precision.compute`; `stack` itself if that is None.

    Each layer gets its parameters and inputs in that dtype, and its outputs are cast to it, wherever the model is cut. Outputs of the last
    layer are float32 instead. Layers are initialized from float32 inputs, and new layer state is cast back to the dtype of the old.

    Args:
        stack: the model.
        precision: of the run.
    """
    if precision.compute is None:
        return stack
    compute = jnp.dtype(precision.compute)
    outputs = dict.fromkeys(stack.ids, compute) | {stack.ids[-1]: jnp.dtype("float32")}
    return stack.with_layers({layer_id: _cast(layer, compute, outputs[layer_id]) for layer_id, layer in stack.layers.items()})


def _cast(layer: Layer, compute: Any, outputs: Any) -> Layer:
    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        return layer.init(key, _floats_as(jnp.dtype("float32"), x))  # a layer may make parameters of its input's dtype

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        y, new_state = layer.apply(_floats_as(compute, params), state, _floats_as(compute, x), key, train)
        if jax.tree.structure(new_state) == jax.tree.structure(state):  # type: ignore[operator]  # else it is refused later
            new_state = jax.tree.map(lambda new, old: _floats_as(old.dtype, new) if old.dtype in _NARROW else new, new_state, state)
        return _floats_as(outputs, y), new_state

    return replace(layer, init=init, apply=apply)


def _floats_as(dtype: Any, tree: Tree) -> Tree:
    """The tree with its floating-point leaves of at most 32 bits in another dtype."""

    def cast(leaf: Any) -> Any:
        return rounded(leaf, dtype) if getattr(leaf, "dtype", None) in _NARROW and leaf.dtype != dtype else leaf

    return jax.tree.map(cast, tree)
