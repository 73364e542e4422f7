"""Bottlenecks: layers that make a model narrow where a plan cuts it, so that messages with F features have only W.

Behind a layer stand two layers. Their matrices D (F × W) and U (W × F) are parameters of the model:

    down    z = x D, which is sent
    up      y = z U

All bottlenecks of a run begin with the same D, of orthonormal columns, and with U = Dᵀ. This is a projection, so the features that pass the
first cut pass all others. Training changes each matrix by itself: the pair contains the low-rank identity path of ResBM (arXiv 2604.11947),
without the nonlinear encoder beside it, and D need not stay orthogonal as in MAPL (arXiv 2606.05484).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import InputError, nearest
from jpipe.model._layer import Layer, describe
from jpipe.model._precision import rounded, wider
from jpipe.model._stack import LayerStack
from jpipe.plan import Plan

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Narrow:
    """An array between `down` and `up`."""

    values: Any  # (…, W)
    features: int = field(metadata={"static": True})  # F


def add_bottlenecks(stack: LayerStack, plan: Plan) -> tuple[LayerStack, Plan]:
    """Return a model and a plan with the layers of the plan's bottlenecks, and with their places in the plan.

    Raise InputError if no layer follows such a place, or the model has other bottlenecks.
    """
    links, key = plan.links, "links.bottleneck"
    assert links is not None
    if links.bottleneck is None:
        return stack, plan
    places = links.bottleneck.after
    if places is None:
        places = tuple(stack.added) or tuple(stage.layers[-1] for stage in plan.stages[:-1])
    known = [layer_id for layer_id in stack.ids if layer_id not in stack.ids_of_added][:-1]
    if unknown := [layer_id for layer_id in places if layer_id not in known]:
        raise InputError(f"no layer of the model follows '{unknown[0]}'", key=f"{key}.after", change=nearest(unknown[0], known))
    layers = pair(links.bottleneck.width)
    added = {place: {f"bottleneck.{place}.{name}": layer for name, layer in layers.items()} for place in known if place in places}
    if not stack.added:
        stack = stack.with_added(added)
    if stack.added != added:
        raise InputError("the model has other bottlenecks", key=key, found=f"{links.bottleneck}", change="use the model without them")
    bottleneck = links.bottleneck.model_copy(update={"after": tuple(added)})
    plan = plan.model_copy(update={"links": links.model_copy(update={"bottleneck": bottleneck})})
    return stack, plan if set(stack.ids_of_added).intersection(plan.layers) else _with_layers(plan, added)


def _with_layers(plan: Plan, added: Mapping[str, Mapping[str, Layer]]) -> Plan:
    """Return a plan with the layers of bottlenecks. Behind the last layer of a stage `up` belongs to the next stage."""
    stages, first = [], list[str]()
    for stage in plan.stages:
        ids = [*first, *(i for layer_id in stage.layers for i in (layer_id, *added.get(layer_id, ())))]
        first = [ids.pop()] if stage.layers[-1] in added else []
        stages.append(stage.with_layers(ids))
    return plan.model_copy(update={"stages": tuple(stages)})


@cache
def pair(width: int) -> Mapping[str, Layer]:
    """Return the layers `down` and `up` of bottlenecks of this width. Further arrays of an output, such as masks, pass them unchanged."""

    def is_wide(leaf: Any) -> bool:
        return getattr(leaf, "ndim", 0) > 1 and leaf.shape[-1] > width and jnp.issubdtype(leaf.dtype, jnp.floating)

    def is_narrow(leaf: Any) -> bool:
        return isinstance(leaf, Narrow)

    def orthonormal(key: jax.Array, features: int, dtype: Any) -> jax.Array:
        return jnp.linalg.qr(jax.random.normal(key, (features, width), wider(dtype, jnp.float32)))[0]

    def initial_down(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        params = {name: orthonormal(key, leaf.shape[-1], leaf.dtype) for name, leaf in _named(x, is_wide).items()}
        if not params:
            raise InputError(
                key="links.bottleneck.width", expected="fewer features than the layers pass on", found=f"{width} of {describe(x)}"
            )
        return params, {}

    def initial_up(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        return {name: orthonormal(key, leaf.features, leaf.values.dtype).T for name, leaf in _named(x, is_narrow).items()}, {}

    def down(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        return _changed(x, is_wide, params, lambda leaf, matrix: Narrow(_product(leaf, matrix), leaf.shape[-1])), state

    def up(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        return _changed(x, is_narrow, params, lambda leaf, matrix: _product(leaf.values, matrix)), state

    # with `of_model` both get the key of the run, and draw the same matrix
    return {"down": Layer(initial_down, down, of_model=True), "up": Layer(initial_up, up, of_model=True)}


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    return x @ rounded(matrix, x.dtype)


def _named(x: Tree, chosen: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the chosen leaves of a tree, named `kernel` and, if there are several, `kernel_1` and so on."""
    leaves = filter(chosen, jax.tree.leaves(x, is_leaf=chosen))
    return {f"kernel_{n}" if n else "kernel": leaf for n, leaf in enumerate(leaves)}


def _changed(x: Tree, chosen: Callable[[Any], bool], params: Tree, change: Callable[[Any, jax.Array], Any]) -> Tree:
    """Return a tree with the chosen leaves changed by their matrices."""
    matrices = iter(params[name] for name in _named(x, chosen))
    return jax.tree.map(lambda leaf: change(leaf, next(matrices)) if chosen(leaf) else leaf, x, is_leaf=chosen)
