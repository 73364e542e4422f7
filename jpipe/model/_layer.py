"""Layers as pairs of pure functions, and the shapes and dtypes of their arguments and results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import InputError, short

Tree = Any  # a pytree of arrays


@dataclass(frozen=True)
class Layer:
    """The smallest unit of a model, which is never cut: two pure functions.

    Attributes:
        init: `(key, x) -> (params, state)`, where `x` is an example of the input. `params` are trained; `state` is passed from forward to
            forward (for example batch statistics). Both may be `{}`.
        apply: `(params, state, x, key, train) -> (y, state)`. `train` is False in evaluation. `key` is a random key for this layer and
            microbatch, in training if `stochastic` and in evaluation if `draws_in_evaluation`; otherwise it is None.
        stochastic: whether `apply` draws random numbers in training (dropout).
        draws_in_evaluation: whether `apply` also draws random numbers in evaluation (sampling from a distribution).
        owner: an object that no other layer may use, because the layers would share its parameters; None without such an object.
        axes: for stages on meshes: for each parameter with logical axes, by path with keys joined by "/", the logical axis of each dim or
            None. Layers made from Flax modules fill it in while `init` is traced.
        of_model: whether the layer was cut from a whole model. Then its random numbers do not depend on its id, but only on the key of the
            run (in initialization) or of the microbatch.
        carried: for plans that cut rows into slices: `(params, state, x, carry, key, train) -> (y, state, carry)`. It applies the layer to
            a slice of the rows. `carry` is what it returned for the slice before, any pytree of arrays, and None for the first slice. A
            layer without it must compute each position separately.
    """

    init: Callable[[jax.Array, Tree], tuple[Tree, Tree]]
    apply: Callable[[Tree, Tree, Tree, jax.Array | None, bool], tuple[Tree, Tree]]
    stochastic: bool = False
    draws_in_evaluation: bool = field(default=False, kw_only=True)
    owner: Any = None
    axes: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    of_model: bool = field(default=False, kw_only=True)
    carried: Callable[[Tree, Tree, Tree, Tree, jax.Array | None, bool], tuple[Tree, Tree, Tree]] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class LayerSpec:
    """The shapes and dtypes of a layer's arguments and results, found by tracing.

    Attributes:
        x: the input.
        params: the parameters.
        state: the layer state.
        output: the output in training.
        evaluated: the output in evaluation. Only the last layer's may differ in shapes or structure from its output in training.
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
    """Return the shape and dtype that an array of NumPy or JAX has on a device."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(jnp.result_type(x)))


def untrainable(name: str, dtype: Any) -> InputError:
    """Return the error for a trained parameter that is not real floating point."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    remedy = "keep its real and imaginary parts as two parameters" if is_complex else "make it layer state, or freeze it"
    return InputError(f"parameter {name} is {dtype}: only real floating-point parameters can be trained; {remedy}")


_MOST_LEAVES = 8  # the most leaves that a message shows


def describe(tree: Tree) -> str:
    """Describe a pytree of arrays: `float32[4, 8]` for an array, otherwise the first leaves with their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    kinds = [f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__ for _, leaf in leaves[:_MOST_LEAVES]]
    words = [f"{jax.tree_util.keystr(path)} {kind}".strip() for (path, _), kind in zip(leaves, kinds, strict=False)]
    if len(leaves) > _MOST_LEAVES:
        words.append(f"and {len(leaves) - _MOST_LEAVES:,} more")
    return ", ".join(words) if words else "nothing"


def with_arrays(layer_id: str, layer: Layer) -> Layer:
    """Wrap a layer so that its parameters and state are arrays, and so that they and its output have no weak types."""

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        params, state = layer.init(key, x)
        return _as_arrays(params, f"layer '{layer_id}': its parameters"), _as_arrays(state, f"layer '{layer_id}': its state")

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        y, new_state = layer.apply(params, state, x, key, train)
        return jax.tree.map(_strong, y), _as_arrays(new_state, f"layer '{layer_id}': its state")

    if (with_carry := layer.carried) is None:
        return replace(layer, init=init, apply=apply)

    def carried(params: Tree, state: Tree, x: Tree, carry: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree, Tree]:
        y, new_state, left = with_carry(params, state, x, carry, key, train)
        parts = (_as_arrays(tree, f"layer '{layer_id}': its {what}") for what, tree in (("state", new_state), ("carry", left)))
        return jax.tree.map(_strong, y), *parts

    return replace(layer, init=init, apply=apply, carried=carried)


def reject_python_values(layer_id: str, y: Tree) -> None:
    """Check that a layer returns arrays: the cut would decide whether the next layer gets a Python number or an array."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(y)[0]:
        if not hasattr(leaf, "dtype"):
            actual = f"the Python {type(leaf).__name__} {short(leaf)} at {jax.tree_util.keystr(path) or 'its top'}"
            remedy = f"return an array, such as jnp.asarray({leaf!r})" if isinstance(leaf, _NUMBERS) else "return arrays only"
            raise InputError(f"layer '{layer_id}': expected the output to be arrays, found {actual}; {remedy}")


_NUMBERS = (bool, int, float, complex)


def _as_arrays(tree: Tree, where: str) -> Tree:
    """Convert the leaves to arrays without weak types."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, _NUMBERS):
            raise InputError(where=where, expected="arrays", found=f"{type(leaf).__name__} at {jax.tree_util.keystr(path) or 'the top'}")
    return jax.tree.map(lambda leaf: _strong(jnp.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf), tree)


def _strong(leaf: Any) -> Any:
    """Remove JAX's weak type from an array. Otherwise it would be lost at the end of a stage, so numbers would depend on the cut."""
    return jax.lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf
