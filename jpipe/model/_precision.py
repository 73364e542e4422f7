"""The dtypes of parameters, computations and accumulated gradients, and loss scaling."""

import math
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe._numbers import is_int, is_number
from jpipe.errors import InputError, nearest
from jpipe.model._layer import Layer
from jpipe.model._stack import LayerStack

Tree = Any

DTYPES = ("float32", "bfloat16", "float16")
ACCUMULATE = ("float32", "float64")


class LossScale(NamedTuple):
    """The current value of a dynamic loss scale, as scalars."""

    value: Any  # the factor of the loss gradient, float32
    finite: Any  # the number of consecutive batches with finite gradients since the last change of the factor, int32


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that is halved after NaN or infinite gradients, and doubled after many consecutive batches with finite gradients.

    It stays between 1 and 2**100. Reference: Micikevicius et al., *Mixed Precision Training*, ICLR 2018, section 3.2.

    Attributes:
        initial: the scale of the first batch. A power of two adds no rounding.
        growth_every: the number of consecutive batches with finite gradients after which the scale is doubled.

    Raises:
        InputError: the initial scale is outside [1, 2**100], or `growth_every` is not an integer of at least 1.

    Example:
        >>> Precision(params="float16", loss_scale="dynamic").loss_scale
        DynamicLossScale(initial=32768.0, growth_every=2000)
    """

    initial: float = 2.0**15
    growth_every: int = 2000

    def __post_init__(self) -> None:
        if not is_number(self.initial) or not 1 <= self.initial <= _LARGEST_SCALE:
            raise InputError(
                where="precision",
                key="loss_scale: initial",
                expected="a number from 1 to 2**100",
                found=repr(self.initial),
                change="the default is 32768",
            )
        if not is_int(self.growth_every) or not 1 <= self.growth_every < 2**31:
            raise InputError(
                where="precision",
                key="loss_scale: growth_every",
                expected="a number of batches, at least 1",
                found=repr(self.growth_every),
                change="the default is 2000",
            )
        object.__setattr__(self, "initial", float(self.initial))
        object.__setattr__(self, "growth_every", int(self.growth_every))

    def first(self) -> LossScale:
        """Return the scale of the first batch."""
        return LossScale(jnp.asarray(self.initial, jnp.float32), jnp.zeros((), jnp.int32))

    def after(self, scale: LossScale, is_finite: Any) -> LossScale:
        """Return the next scale; `is_finite` says whether all gradients of the last batch were finite."""
        finite = jnp.where(is_finite, scale.finite + 1, 0)
        grows = finite == self.growth_every
        value = jnp.where(is_finite, jnp.where(grows, scale.value * 2, scale.value), scale.value / 2)
        return LossScale(jnp.clip(value, 1, _LARGEST_SCALE), jnp.where(grows, 0, finite))


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Losses, their weights and norms are always float32, or float64 if JAX has it enabled. Layer state keeps its own dtypes, and so do arrays
    of integers and float64.

    Attributes:
        params: the dtype of the weight versions that forwards and backwards read. With "float32" parameters keep the dtypes of the layers.
            With "bfloat16" or "float16" the optimizer state also holds each parameter in float32, its master. Updates change the masters,
            and each version is a copy of the masters in this dtype.
        compute: the dtype of everything that layers read and return (parameters, inputs and outputs), and so of messages. The loss gets the
            outputs in float32. None: as `params` if that is "bfloat16" or "float16"; otherwise the layers decide.
        accumulate: the dtype of sums of gradients over microbatches and over replicas; gradients of wider parameters keep their dtype.
            "float64" needs JAX with `jax_enable_x64`.
        loss_scale: a factor of the gradient of the loss at the last stage. Each stage divides the gradients by this factor when it
            accumulates them, so that small gradients do not vanish in float16. A power of two adds no rounding. None: 1. With a
            `DynamicLossScale`, or "dynamic" for its default, the factor adapts, and batches with infinite or NaN gradients are skipped.

    Raises:
        InputError: a dtype is unknown, or the loss scale is none of these values.

    Example:
        >>> Precision(params="bfloat16").compute
        'bfloat16'
    """

    params: str = "float32"
    compute: str | None = None
    accumulate: str = "float32"
    loss_scale: float | DynamicLossScale | str | None = None

    def __post_init__(self) -> None:
        for name, known in (("params", DTYPES), ("compute", DTYPES), ("accumulate", ACCUMULATE)):
            dtype = getattr(self, name)
            if dtype not in known and not (name == "compute" and dtype is None):
                raise InputError(f"unknown dtype {dtype!r}", where="precision", key=name, change=nearest(str(dtype), known))
        if self.compute is None and self.has_masters:
            object.__setattr__(self, "compute", self.params)
        if self.loss_scale is not None:
            object.__setattr__(self, "loss_scale", _checked_scale(self.loss_scale))
        elif self.compute == "float16":
            warnings.warn(
                'precision: compute is float16 without a loss_scale: gradients below 3e-8 become zero; set loss_scale to "dynamic", '
                "or compute in bfloat16, which needs none",
                UserWarning,
                stacklevel=3,
            )

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer state holds masters, which are the parameters in float32."""
        return self.params != "float32"

    @property
    def fixed_scale(self) -> float | None:
        """The loss scale if it is a number, else None."""
        return self.loss_scale if isinstance(self.loss_scale, float) else None

    @property
    def dynamic_scale(self) -> DynamicLossScale | None:
        """The loss scale if it is dynamic, else None."""
        return self.loss_scale if isinstance(self.loss_scale, DynamicLossScale) else None

    def version_dtype(self, dtype: Any) -> Any:
        """Return the dtype that a parameter with this dtype in its layer has in the weight versions."""
        return jnp.dtype(self.params) if self.has_masters and dtype in _NARROW else dtype

    def accumulator_dtype(self, dtype: Any) -> Any:
        """Return the dtype in which gradients of this dtype are summed."""
        return wider(dtype, self.accumulate)


_LARGEST_SCALE = 2.0**100
PLAIN = Precision()  # the layers decide all dtypes
_NARROW = tuple(jnp.dtype(name) for name in DTYPES)  # float64 is not cast, because users choose it on purpose


def _checked_scale(scale: Any) -> float | DynamicLossScale:
    if isinstance(scale, DynamicLossScale):
        return scale
    if scale == "dynamic":
        return DynamicLossScale()
    if not is_number(scale) or not 0 < scale < math.inf:
        raise InputError(
            where="precision",
            key="loss_scale",
            expected='a finite number above 0, "dynamic", a DynamicLossScale or None',
            found=repr(scale),
            change="give one such as 1024",
        )
    return float(scale)


def check_precision(precision: Any) -> None:
    """Check that a value is a `Precision`, and that JAX has enabled its dtypes."""
    if not isinstance(precision, Precision):
        raise InputError(
            where="precision", expected="a jpipe.Precision", found=type(precision).__name__, change="give Precision(params=…, compute=…)"
        )
    if precision.accumulate == "float64" and jax.dtypes.canonicalize_dtype(jnp.float64) != jnp.float64:
        raise InputError(
            "float64 needs jax.config.update('jax_enable_x64', True) or JAX_ENABLE_X64=1",
            where="precision",
            key="accumulate",
            change="enable it, or use float32",
        )


def wider(dtype: Any, least: Any) -> Any:
    """Return `dtype`, or `least` if that has more bits."""
    return max(jnp.dtype(dtype), jnp.dtype(least), key=lambda one: one.itemsize)


def master_dtype(dtype: Any) -> Any:
    """Return the dtype of a parameter's master: at least float32. A frozen parameter that is not floating point keeps its dtype."""
    return wider(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else jnp.dtype(dtype)


def rounded(x: Any, dtype: Any) -> jax.Array:
    """Cast `x` and round it on every backend: inside a program XLA may skip a cast to bfloat16."""
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        x = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return x.astype(dtype)


def widened(x: jax.Array, dtype: Any) -> jax.Array:
    """Cast `x` to a dtype with at least as many bits; a bfloat16 `x` is rounded first, as in `rounded`."""
    wide = x.astype(dtype)
    return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7) if x.dtype == jnp.bfloat16 != dtype else wide


def cast_layers(stack: LayerStack, precision: Precision) -> LayerStack:
    """Return the model with layers that compute in `precision.compute`, or `stack` itself if this is None.

    Each layer gets its parameters and inputs in this dtype, and its outputs are cast to the dtype, independently of the cut. Outputs of the
    last layer are float32 instead. Layers are initialized from float32 inputs, and new layer state is cast to the dtype of the old state.

    Args:
        stack: the model.
        precision: the precision of the run.
    """
    if precision.compute is None:
        return stack
    compute = jnp.dtype(precision.compute)
    if stack.traced is not None:  # layers cut from a model compute like the whole model with parameters and inputs of this dtype
        return stack.recut(lambda whole: _cast(whole, compute, jnp.dtype("float32")), partial(_floats_as, compute))
    outputs = dict.fromkeys(stack.ids, compute) | {stack.ids[-1]: jnp.dtype("float32")}
    return stack.with_layers({layer_id: _cast(layer, compute, outputs[layer_id]) for layer_id, layer in stack.layers.items()})


def _cast(layer: Layer, compute: Any, outputs: Any) -> Layer:
    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        return layer.init(key, _floats_as(jnp.dtype("float32"), x))  # a layer may make parameters with the dtype of its input

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        y, new_state = layer.apply(_floats_as(compute, params), state, _floats_as(compute, x), key, train)
        if jax.tree.structure(new_state) == jax.tree.structure(state):  # type: ignore[operator]  # otherwise a later check raises the error
            new_state = jax.tree.map(lambda new, old: _floats_as(old.dtype, new) if old.dtype in _NARROW else new, new_state, state)
        return _floats_as(outputs, y), new_state

    if (with_carry := layer.carried) is None:
        return replace(layer, init=init, apply=apply)

    def carried(params: Tree, state: Tree, x: Tree, carry: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree, Tree]:
        y, new_state, left = with_carry(_floats_as(compute, params), state, _floats_as(compute, x), carry, key, train)
        return _floats_as(outputs, y), new_state, left

    return replace(layer, init=init, apply=apply, carried=carried)


def _floats_as(dtype: Any, tree: Tree) -> Tree:
    """Cast the floating-point leaves of at most 32 bits."""

    def cast(leaf: Any) -> Any:
        return rounded(leaf, dtype) if getattr(leaf, "dtype", None) in _NARROW and leaf.dtype != dtype else leaf

    return jax.tree.map(cast, tree)
