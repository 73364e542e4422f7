"""Layers as two pure functions, and the shapes and dtypes around them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import InputError, short

Tree = Any  # a pytree of arrays


@dataclass(frozen=True)
class Layer:
    """The smallest unit that is never cut: two pure functions.

    Attributes:
        init: `(key, x) -> (params, state)`; `x` is an example of the input. `params` are trained, `state` is passed from forward
            to forward (batch statistics, say); either may be `{}`.
        apply: `(params, state, x, key, train) -> (y, state)`; `key` is a random key of this layer and microbatch in training if
            `stochastic`, in evaluation if `draws_in_evaluation`, and else None; `train` is False in evaluation.
        stochastic: whether `apply` draws random numbers in training (dropout).
        draws_in_evaluation: whether it draws some in evaluation, too (sampling from a distribution).
        owner: the object that must not be used in a second layer, since both would share its parameters; if any.
        axes: the logical axis of each dim, or None, of the parameters that have some, by path, with keys joined by "/"; for stages on
            meshes. Layers made of Flax modules fill it in while `init` is traced.
        of_model: whether it was cut from a whole model. Then its random numbers depend on the key of the run, in initialization, or on the
            key of the microbatch, and not on the layer's id.
    """

    init: Callable[[jax.Array, Tree], tuple[Tree, Tree]]
    apply: Callable[[Tree, Tree, Tree, jax.Array | None, bool], tuple[Tree, Tree]]
    stochastic: bool = False
    draws_in_evaluation: bool = field(default=False, kw_only=True)
    owner: Any = None
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    of_model: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class LayerSpec:
    """Shapes and dtypes around one layer, traced without allocating anything.

    Attributes:
        x: its input.
        params: its parameters.
        state: its state.
        output: its output in training.
        evaluated: its output in evaluation; only the last layer's may have another structure or other shapes.
        axes: as in `Layer`.
    """

    x: Tree
    params: Tree
    state: Tree
    output: Tree
    evaluated: Tree
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)


def key_spec() -> jax.ShapeDtypeStruct:
    """Return the spec of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def spec_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype that a NumPy or JAX array has on a device."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(jnp.result_type(x)))


def untrainable(name: str, dtype: Any) -> InputError:
    """Return the error for a parameter that is not real floating point, and not frozen."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    remedy = "keep its real and imaginary parts as two parameters" if is_complex else "make it layer state, or freeze it"
    return InputError(f"parameter {name} is {dtype}: only real floating-point parameters can be trained; {remedy}")


_MOST_LEAVES = 8  # that a message shows


def describe(tree: Tree) -> str:
    """Describe a pytree of arrays: `float32[4,8]`, or its leaves with their paths, of many only the first."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    words = [f"{jax.tree_util.keystr(path)} {_describe_leaf(leaf)}".strip() for path, leaf in leaves[:_MOST_LEAVES]]
    if len(leaves) > _MOST_LEAVES:
        words.append(f"and {len(leaves) - _MOST_LEAVES:,} more")
    return ", ".join(words) if words else "nothing"


def _describe_leaf(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def with_arrays(layer_id: str, layer: Layer) -> Layer:
    """Wrap a layer so that its parameters, state and output are arrays without weak types or Python numbers.

    Args:
        layer_id: for messages.
        layer: any layer.
    """

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        params, state = layer.init(key, x)
        return _as_arrays(params, f"layer '{layer_id}': its parameters"), _as_arrays(state, f"layer '{layer_id}': its state")

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        y, new_state = layer.apply(params, state, x, key, train)
        return jax.tree.map(_strong, y), _as_arrays(new_state, f"layer '{layer_id}': its state")

    return replace(layer, init=init, apply=apply)


def reject_python_values(layer_id: str, y: Tree) -> None:
    """Raise `InputError` for an output that the next layer would get as a Python number or as an array, depending on the cut.

    Raises:
        InputError: a leaf is no array.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(y)[0]:
        if not hasattr(leaf, "dtype"):
            actual = f"the Python {type(leaf).__name__} {short(leaf)} at {jax.tree_util.keystr(path) or 'its top'}"
            remedy = f"return an array, such as jnp.asarray({leaf!r})" if isinstance(leaf, _NUMBERS) else "return arrays only"
            raise InputError(f"layer '{layer_id}': expected its output to be arrays, found {actual}; {remedy}")


_NUMBERS = (bool, int, float, complex)


def _as_arrays(tree: Tree, where: str) -> Tree:
    """Return the leaves as arrays without weak types."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, _NUMBERS):
            raise InputError(where=where, expected="arrays", found=f"{type(leaf).__name__} at {jax.tree_util.keystr(path) or 'the top'}")
    return jax.tree.map(lambda leaf: _strong(jnp.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf), tree)


def _strong(leaf: Any) -> Any:
    """Return the array without JAX's weak type: it would be lost at the end of a stage, so numbers would depend on the cut."""
    return jax.lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf
