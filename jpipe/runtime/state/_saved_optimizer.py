"""Reads and changes the parts of a layer's optimizer state in a snapshot: masters, averages and predictions."""

from typing import Any

import jax
import numpy as np

from jpipe.model._precision import master_dtype
from jpipe.model.layerwise._optimizer import WithBuffers
from jpipe.runtime._plain import Plain, overlaid, to_plain
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


def masters_in(plain: Plain) -> Plain | None:
    """Return a layer's newest parameters in float32, if its snapshot entry has masters; frozen ones, which have none, are converted.

    Args:
        plain: the entry, with any arrays.
    """
    newest, optimizer = plain.get("params", {}).get("0", {}), plain.get("optimizer")
    masters = optimizer.get("masters") if isinstance(optimizer, dict) else None
    if masters is not None and not isinstance(masters, dict):
        masters = {"array": masters}  # the parameters are one array
    # In the state of optax, trees of parameters have the layer's id above them: they are not mistaken for these.
    if not masters or not _fits(masters, newest):
        return None
    return overlaid(jax.tree.map(_in_float32, newest), masters)


def without_prediction(plain: Plain) -> Plain:
    """Return a layer of a snapshot with its newest parameters, and masters, without the prediction that has moved them ahead.

    The prediction is then not in it any more. A layer without one is returned as it is. Older versions are left as they are.

    Args:
        plain: the entry, with any arrays.
    """
    optimizer, versions = plain.get("optimizer"), plain.get("params")
    if not isinstance(optimizer, dict) or not isinstance(versions, dict):
        return plain
    newest = versions.get("0", {})
    masters = optimizer.get("masters") if _fits_array(optimizer.get("masters"), newest) else None
    state = optimizer.get("state", {}) if masters is not None else optimizer
    if not isinstance(state, dict) or not _has_buffers(state) or not _fits_array(state.get("ahead"), newest):
        return plain
    ahead, state = _as_dict(state["ahead"]), {name: inner for name, inner in state.items() if name != "ahead"}
    precise = overlaid(newest, {} if masters is None else _as_dict(masters))
    moved = _less(precise, ahead)
    params = {**versions, "0": overlaid(newest, _in_dtypes(moved, newest))}
    if masters is None:
        return {**plain, "params": params, "optimizer": state}
    exact = moved.get("array") if not isinstance(masters, dict) else {**masters, **moved}
    return {**plain, "params": params, "optimizer": {**optimizer, "masters": exact, "state": state}}


def with_buffers(f: StageFunctions, layer_id: str, plain: Any) -> Any:
    """Return the optimizer state of a layer in a snapshot with or without the names of `WithBuffers`, as the stage has it.

    A prediction that is missing begins with zeros.
    """
    spec = f.optimizer_spec[layer_id]
    if f.precision.has_masters:
        inner = plain.get("state", {}) if isinstance(plain, dict) else None
        return plain if inner is None else {**plain, "state": _filled_in(spec.state, inner)}
    return _filled_in(spec, plain)


def _filled_in(spec: Tree, plain: Any) -> Any:
    """Return `with_buffers` for the state without its masters."""
    if not isinstance(plain, dict):
        return plain
    if not isinstance(spec, WithBuffers):
        return plain["optimizer"] if plain.keys() == {"optimizer"} else plain
    named = plain if _has_buffers(plain) else {"optimizer": plain}
    if spec.ahead is None or "ahead" in named:
        return named
    zeros = to_plain(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), spec.ahead))
    return {**named, "ahead": zeros.get("array", zeros) if isinstance(spec.ahead, jax.ShapeDtypeStruct) else zeros}


def _has_buffers(plain: Plain) -> bool:
    """Return whether an optimizer state in a snapshot is a `WithBuffers`."""
    return bool(plain) and plain.keys() <= set(WithBuffers._fields)


def _as_dict(tree: Any) -> Plain:
    """Return a tree like the parameters of a layer as a dict, also if they are one array."""
    return tree if isinstance(tree, dict) else {"array": tree}


def _fits_array(part: Any, whole: Any) -> bool:
    return bool(part is not None and _as_dict(part)) and _fits(_as_dict(part), whole)


def _fits(part: Any, whole: Any) -> bool:
    """Return whether each leaf of nested dicts is in another tree, with the same shape."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and _fits(inner, whole[name]) for name, inner in part.items())
    return not isinstance(whole, dict) and part.shape == whole.shape


def _less(tree: Any, ahead: Any) -> Any:
    """Subtract `ahead` from the leaves of nested dicts that it has; specs are returned as they are.

    With NumPy, because the arrays of a live snapshot may be on several devices, and in host memory.
    """
    if isinstance(ahead, dict):
        return {name: _less(tree[name], inner) for name, inner in ahead.items()}
    return tree if isinstance(tree, jax.ShapeDtypeStruct) else np.asarray(tree) - np.asarray(ahead)


def _in_dtypes(part: Any, whole: Any) -> Any:
    """Return the leaves of nested dicts in the dtypes of those in another tree."""
    if isinstance(part, dict):
        return {name: _in_dtypes(inner, whole[name]) for name, inner in part.items()}
    return whole if isinstance(part, jax.ShapeDtypeStruct) else part.astype(whole.dtype)


def _in_float32(leaf: Any) -> Any:
    dtype = master_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf).astype(dtype)
