"""Detect layers and losses that compute with several rows together; in a pipeline these are the rows of a microbatch."""

import functools
import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jpipe.errors import shortened
from jpipe.model._layer import LayerSpec, key_spec
from jpipe.model._losses import Loss, call_with_randomness
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._follow import follow
from jpipe.model.jaxprs._origins import Origin, origin_of

Tree = Any

_COUNTS = (3, 5, 7, 11, 13, 17, 19, 23)
"""Numbers of rows to trace with: one that divides no dim, so that a dim of rows is recognized after a layer that mixes them."""


def warn_of_mixed_rows(stack: LayerStack, layers: Mapping[str, LayerSpec], labels: Tree, loss: Loss, rows: int, microbatches: int) -> None:
    """Log a warning, once in a process, for layers and losses that mix the rows of a microbatch.

    Args:
        stack, layers, labels, loss: as in `rows_together`.
        rows: of a microbatch.
        microbatches: of a batch; with one there is no warning, nor for a stack that `mixes_rows`.
    """
    if microbatches == 1 or stack.mixes_rows or jax.process_index() > 0:
        return
    known = _KNOWN.setdefault(stack, {})
    leaves, treedef = jax.tree.flatten((layers[stack.ids[0]].x, labels))
    asked = loss, treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if asked not in known:
        known[asked] = rows_together(stack, layers, labels, loss)
    ids, loss_too = known[asked]
    sees = f"the {rows} rows of a microbatch, not the {rows * microbatches} of a batch"
    if ids:
        names = f"layer{'s' if len(ids) > 1 else ''} {shortened([repr(layer_id) for layer_id in ids])}"
        _warn_once(f"{names}: the rows of a microbatch are computed together, as in batch normalization: such a layer sees {sees}")
    if loss_too:
        _warn_once(f"loss: it is more than a sum over rows, as a loss over pairs of rows is: it sees {sees}")


_KNOWN: weakref.WeakKeyDictionary[LayerStack, dict[Any, tuple[list[str], bool]]] = weakref.WeakKeyDictionary()
"""By model, loss and shapes what mixes rows."""


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("jpipe").warning(message)


def rows_together(stack: LayerStack, layers: Mapping[str, LayerSpec], labels: Tree, loss: Loss) -> tuple[list[str], bool]:
    """Return the layers whose training forward mixes rows, and whether the loss is more than a sum over rows.

    A layer mixes rows if one row of its outputs, or its new state, depends on another row of its inputs. Layers and losses that fit only
    one number of rows are traced with the rows of a microbatch; what cannot be followed then, and what comes after it, is left out.

    Args:
        stack: the model.
        layers: from `LayerStack.specs`.
        labels: specs of the labels of a microbatch.
        loss: as in `Pipeline`.
    """
    x = layers[stack.ids[0]].x
    known = [x, labels, [(layer.params, layer.state, layer.output) for layer in layers.values()]]
    dims = {dim for leaf in jax.tree.leaves(known) for dim in leaf.shape if dim}
    rows = jax.tree.leaves((x, labels))[0].shape[0]
    count = next((count for count in _COUNTS if not any(dim % count == 0 for dim in dims)), _COUNTS[0])
    mixing: list[str] = []
    for number in (count, rows):
        mixing.clear()
        x, labels = (
            jax.tree.map(lambda leaf, n=number: jax.ShapeDtypeStruct((n, *leaf.shape[1:]), leaf.dtype), part) for part in (x, labels)
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # already shown when the model was first traced
                return mixing, _rows_together(stack, x, labels, loss, number, mixing)
        except Exception:  # noqa: S112 - a layer or a loss that fits one number of rows only, or of too many elements
            continue
    return mixing, False


def _rows_together(stack: LayerStack, x: Tree, labels: Tree, loss: Loss, count: int, mixing: list[str]) -> bool:
    """Add the layers that mix `count` rows to a list, and return whether the loss mixes them."""
    known: dict[Any, tuple[Tree, list[Origin], bool]] = {}
    origins = _in_rows(x, count)
    for layer_id in stack.ids:
        like = stack.like(layer_id, x), tuple((origin.rows.shape, origin.rows.tobytes()) for origin in origins)
        if like not in known:
            known[like] = _of_layer(stack, layer_id, x, origins, count)
        x, origins, mixes = known[like]
        if mixes:
            mixing.append(layer_id)
    return _of_loss(loss, (x, origins), labels, count)


def _in_rows(tree: Tree, count: int, *, of_model: bool = True) -> list[Origin]:
    """Return the origins of arrays with one dim of rows, the first of `count` elements; arrays without such a dim depend on no row."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree)]
    return [origin_of(shape, shape.index(count) if count and count in shape else None, of_model=of_model) for shape in shapes]


def _of_layer(stack: LayerStack, layer_id: str, x: Tree, inputs: Sequence[Origin], count: int) -> tuple[Tree, list[Origin], bool]:
    """Return the specs and the origins of the output, and whether outputs or new state mix rows."""
    layer = stack.layers[layer_id]
    params, state = jax.eval_shape(layer.init, key_spec(), x)
    traced, (y, _) = jax.make_jaxpr(lambda p, s, k, v: layer.apply(p, s, v, k, True), return_shape=True)(params, state, key_spec(), x)
    held = _in_rows(state, count if stack.carries_rows else 0)
    arguments = [*_in_rows(params, 0), *held, origin_of(()), *inputs]
    results = [origin._replace(numbers=None) for origin in follow(traced.jaxpr, traced.consts, arguments)]
    outputs, mixes = results[: len(jax.tree.leaves(y))], not all(origin.is_apart(count) for origin in results)
    return y, [new if new.is_apart(count) else old for new, old in zip(outputs, _in_rows(y, count), strict=True)], mixes


def _of_loss(loss: Loss, outputs: tuple[Tree, list[Origin]], labels: Tree, count: int) -> bool:
    """Return whether the loss mixes rows in another way than by adding them."""
    traced = jax.make_jaxpr(lambda key, y, labels: call_with_randomness(loss, y, labels, key)[0])(key_spec(), outputs[0], labels)
    inputs = [origin_of(()), *outputs[1], *_in_rows(labels, count, of_model=False)]
    return follow(traced.jaxpr, traced.consts, inputs)[0].is_more_than_a_sum
