"""Which layers and parameters the updates of an optimizer depend on, traced for a whole model."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jpipe.model.jaxprs._dependence import always_zero, passed_on, reached
from jpipe.model.layerwise._optimizer import Position, optax_promotion

Tree = Any

_POSITION = {"delay": np.float32, "stage": np.int32}


class TracedOptimizer(NamedTuple):
    """The functions of an optimizer as jaxprs, for the whole model.

    Attributes:
        init: parameters -> state.
        update: gradients, state, parameters, position -> updates, state.
        of_parameter: for each leaf of the state whether it belongs to a parameter, as its path says.
        position: the names in the position, sorted.
    """

    init: Any
    update: Any
    of_parameter: list[bool]
    position: tuple[str, ...]


def trace_optimizer(
    transformation: optax.GradientTransformation, specs: Mapping[str, Tree], num_stages: int | None = None
) -> TracedOptimizer:
    position = _accepted(transformation, _POSITION)
    constants = {} if num_stages is None else dict.fromkeys(_accepted(transformation, ["num_stages"]), num_stages)

    def update_at(gradients: Tree, state: Tree, params: Tree, position: Position) -> tuple[Tree, Tree]:
        return transformation.update(gradients, state, params, **position, **constants)

    with optax_promotion():
        init, state = jax.make_jaxpr(transformation.init, return_shape=True)(dict(specs))
        update, (_, after) = jax.make_jaxpr(update_at, return_shape=True)(dict(specs), state, dict(specs), position_spec(position))
    _check_constant(state, after)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(dict(specs))[0]}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    of_parameter = [any(jax.tree_util.keystr(path[i:]) in names for i in range(len(path))) for path in paths]
    return TracedOptimizer(init, update, of_parameter, position)


def _accepted(transformation: optax.GradientTransformation, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names that an optimizer's update accepts as keywords."""
    if not isinstance(transformation, optax.GradientTransformationExtraArgs):
        return ()
    parameters = inspect.signature(transformation.update).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return tuple(name for name in names if takes_all or name in parameters)


def position_spec(names: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the named entries of a `Position`."""
    return {name: jax.ShapeDtypeStruct((), _POSITION[name]) for name in names}


def read_position(traced: TracedOptimizer) -> tuple[str, ...]:
    """Return the names in the position that the updates or the new state depend on."""
    marks = [1 << bit for bit in range(len(traced.position))]
    remaining = len(traced.update.jaxpr.invars) - len(marks)
    used = 0
    for mark in reached(traced.update.jaxpr, [0] * remaining + marks):
        used |= mark
    return tuple(name for name, mark in zip(traced.position, marks, strict=True) if mark & used)


def _reached(traced: TracedOptimizer, marks: list[int]) -> list[int]:
    """Return for each leaf of the updates the marks of all gradients and parameters that it depends on, at any step."""
    of_state = reached(traced.init.jaxpr, marks)
    while True:
        results = reached(traced.update.jaxpr, [*marks, *of_state, *marks, *(0 for _ in traced.position)])
        of_updates, of_next = results[: len(marks)], results[len(marks) :]
        grown = [old | new for old, new in zip(of_state, of_next, strict=True)]
        if grown == of_state:
            return of_updates
        of_state = grown


def coupled_layers(traced: TracedOptimizer, specs: Mapping[str, Tree]) -> tuple[str, str] | None:
    """Return a layer whose update depends on another layer, at any step, and that other layer; or None."""
    ids = sorted(specs)  # as the leaves of a dict come
    marks = [1 << bit for bit, layer_id in enumerate(ids) for _ in jax.tree.leaves(specs[layer_id])]
    for layer, mark in zip(marks, _reached(traced, marks), strict=True):
        if other_layers := mark & ~layer:
            return ids[layer.bit_length() - 1], ids[other_layers.bit_length() - 1]
    return None


def frozen_leaves(traced: TracedOptimizer, specs: Mapping[str, Tree]) -> list[bool]:
    """Return for each parameter whether its update is zero at every step, by the jaxpr alone, whatever a learning-rate schedule says.

    The state of a parameter may be zero at every step, too, as the momentum of gradients that are set to zero. A number that an update
    passes on unchanged in the state, such as a learning rate, may be set to another one.
    """
    count, update = len(jax.tree.leaves(dict(specs))), traced.update
    zeros = always_zero(traced.init.jaxpr, traced.init.consts, [False] * count)
    is_unchanged = [source == count + i for i, source in enumerate(passed_on(update.jaxpr)[count:])]
    state = [
        zero and is_of_parameter and not unchanged
        for zero, is_of_parameter, unchanged in zip(zeros, traced.of_parameter, is_unchanged, strict=True)
    ]
    while True:
        results = always_zero(update.jaxpr, update.consts, [False] * count + state + [False] * (count + len(traced.position)))
        still = [before and after for before, after in zip(state, results[count:], strict=True)]
        if still == state:
            return results[:count]
        state = still


def used_while_frozen(traced: TracedOptimizer, frozen: Sequence[bool]) -> list[bool]:
    """Return for each parameter whether it is frozen and the update of a trained one depends on it."""
    if not any(frozen):
        return list(frozen)
    marks = [1 << bit if is_frozen else 0 for bit, is_frozen in enumerate(frozen)]
    used = 0
    for is_frozen, mark in zip(frozen, _reached(traced, marks), strict=True):
        used |= 0 if is_frozen else mark
    return [bool(mark & used) for mark in marks]


def _check_constant(before: Tree, after: Tree) -> None:
    """Check that the state keeps its structure, shapes and dtypes: an update is compiled once."""
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in (before, after)]
    structures: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        raise TypeError("its update returns a state of another structure than its init, or of other shapes or dtypes")
