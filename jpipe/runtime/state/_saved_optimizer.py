"""Functions that read and change the parts of a layer's optimizer state in a snapshot: masters, averages and predictions."""

from typing import Any

import jax
import numpy as np

from jpipe.model._precision import master_dtype
from jpipe.model.layerwise._optimizer import WithBuffers
from jpipe.runtime._plain import Plain, overlaid, to_plain
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


def masters_in(plain: Plain) -> Plain | None:
    """Return a layer's newest parameters in float32 if its snapshot entry has masters, else None.

    Frozen parameters have no masters; they are converted.

    Args:
        plain: the entry, with arrays of any kind.
    """
    newest, optimizer = plain.get("params", {}).get("0", {}), plain.get("optimizer")
    masters = optimizer.get("masters") if isinstance(optimizer, dict) else None
    if masters is not None and not isinstance(masters, dict):
        masters = {"array": masters}  # here the parameters are one array
    # In the state of optax, trees of parameters are below the layer's id, so they are not mistaken for masters.
    if not masters or not _fits(masters, newest):
        return None
    return overlaid(jax.tree.map(_in_float32, newest), masters)


def without_prediction(plain: Plain) -> Plain:
    """Return a layer of a snapshot without its prediction, which is removed from the newest parameters and masters.

    A layer without a prediction is returned unchanged. Older versions are not changed.

    Args:
        plain: the entry, with arrays of any kind.
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
    """Add or remove the fields of `WithBuffers` in a layer's optimizer state from a snapshot, so that it fits the stage.

    A missing prediction begins with zeros.
    """
    spec = f.optimizer_spec[layer_id]
    if f.precision.has_masters:
        inner = plain.get("state", {}) if isinstance(plain, dict) else None
        return plain if inner is None else {**plain, "state": _filled_in(spec.state, inner)}
    return _filled_in(spec, plain)


def _filled_in(spec: Tree, plain: Any) -> Any:
    """Do the same as `with_buffers` for an optimizer state without masters."""
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
    """Return whether an optimizer state in a snapshot has the field names of `WithBuffers`."""
    return bool(plain) and plain.keys() <= set(WithBuffers._fields)


def _as_dict(tree: Any) -> Plain:
    """Return the parameters of a layer as a dict; a single array gets the key "array"."""
    return tree if isinstance(tree, dict) else {"array": tree}


def _fits_array(part: Any, whole: Any) -> bool:
    return bool(part is not None and _as_dict(part)) and _fits(_as_dict(part), whole)


def _fits(part: Any, whole: Any) -> bool:
    """Return whether another tree has each leaf of these nested dicts, with the same shape."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and _fits(inner, whole[name]) for name, inner in part.items())
    return not isinstance(whole, dict) and part.shape == whole.shape


def _less(tree: Any, ahead: Any) -> Any:
    """Subtract the leaves of `ahead` from the leaves of nested dicts with the same keys; specs are returned unchanged.

    This uses NumPy, because the arrays of a live snapshot may be on several devices and in host memory.
    """
    if isinstance(ahead, dict):
        return {name: _less(tree[name], inner) for name, inner in ahead.items()}
    return tree if isinstance(tree, jax.ShapeDtypeStruct) else np.asarray(tree) - np.asarray(ahead)


def _in_dtypes(part: Any, whole: Any) -> Any:
    """Convert the leaves of nested dicts to the dtypes of the same leaves in another tree."""
    if isinstance(part, dict):
        return {name: _in_dtypes(inner, whole[name]) for name, inner in part.items()}
    return whole if isinstance(part, jax.ShapeDtypeStruct) else part.astype(whole.dtype)


def _in_float32(leaf: Any) -> Any:
    dtype = master_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf).astype(dtype)
