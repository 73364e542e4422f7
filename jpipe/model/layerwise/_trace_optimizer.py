"""Traces of optimizers for whole models, which show on which layers and parameters an update depends."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jpipe.model.jaxprs._dependence import always_zero, passed_on, reached, union

Tree = Any


@contextmanager
def optax_promotion() -> Iterator[None]:
    """Relax JAX's promotion for optax, where even adam mixes dtypes. Strict promotion is for the user's code."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class OfParameter(NamedTuple):
    """The part of a path in an optimizer's state that is a parameter's path.

    Attributes:
        number: the number of the parameter.
        begin, end: the positions between which the parameter's path is.
    """

    number: int
    begin: int
    end: int


Position = Mapping[str, Any]
"""The position of an update in a pipeline, by name: its `delay` (see `Plan.delay`), a float32 scalar, and its `stage`, an int32 scalar."""
_POSITION = {"delay": np.float32, "stage": np.int32}


class TracedOptimizer(NamedTuple):
    """The functions of an optimizer as jaxprs, for the whole model."""

    init: Any  # `(parameters) -> state`
    update: Any  # `(gradients, state, parameters, position) -> (updates, state)`
    paths: list[tuple[Any, ...]]  # the paths of the leaves of the state
    # for each leaf of the state the parameter that its path names; None: it belongs to all parameters
    of_parameter: list[OfParameter | None]
    position: tuple[str, ...]  # the names of the position's entries, sorted


def trace_optimizer(transformation: optax.GradientTransformation, specs: Tree, num_stages: int | None = None) -> TracedOptimizer:
    """Trace the functions of an optimizer for parameters of these shapes; errors of the optimizer pass unchanged."""
    position = _accepted(transformation, _POSITION)
    constants = {} if num_stages is None else dict.fromkeys(_accepted(transformation, ["num_stages"]), num_stages)

    def update_at(gradients: Tree, state: Tree, params: Tree, position: Position) -> tuple[Tree, Tree]:
        return transformation.update(gradients, state, params, **position, **constants)

    with optax_promotion():
        init, state = jax.make_jaxpr(transformation.init, return_shape=True)(specs)
        update, (_, after) = jax.make_jaxpr(update_at, return_shape=True)(specs, state, specs, position_spec(position))
    _check_constant(state, after)
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    numbers = {_keys(path): number for number, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(specs)[0])}
    return TracedOptimizer(init, update, paths, [_of_parameter(_keys(path), numbers) for path in paths], position)


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,)) for key in path)


def _of_parameter(path: tuple[str, ...], numbers: Mapping[tuple[str, ...], int]) -> OfParameter | None:
    """Return the parameter with a path inside this path; of several, the one with the longest path, or the last if these are equal."""
    spans = ((begin, end) for begin in range(len(path) + 1) for end in range(begin, len(path) + 1) if path[begin:end] in numbers)
    begin, end = max(spans, key=lambda span: (span[1] - span[0], span[0]), default=(0, -1))
    return None if end < 0 else OfParameter(numbers[path[begin:end]], begin, end)


def _accepted(transformation: optax.GradientTransformation, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that an optimizer's update accepts as keyword arguments."""
    if not isinstance(transformation, optax.GradientTransformationExtraArgs):
        return ()
    parameters = inspect.signature(transformation.update).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return tuple(name for name in names if takes_all or name in parameters)


def position_spec(names: Sequence[str]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the specs of the entries of a `Position` with these names."""
    return {name: jax.ShapeDtypeStruct((), _POSITION[name]) for name in names}


def read_position(traced: TracedOptimizer) -> tuple[str, ...]:
    """Return the names of the position's entries on which the updates or the new state depend."""
    marks = [1 << bit for bit in range(len(traced.position))]
    remaining = len(traced.update.jaxpr.invars) - len(marks)
    used = union(reached(traced.update.jaxpr, [0] * remaining + marks))
    return tuple(name for name, mark in zip(traced.position, marks, strict=True) if mark & used)


def dependence(traced: TracedOptimizer, marks: list[int]) -> tuple[list[int], list[int]]:
    """Return, for each leaf of the updates and of the state, the marks of all gradients and parameters on which it depends at any step."""
    of_state = reached(traced.init.jaxpr, marks)
    while True:
        results = reached(traced.update.jaxpr, [*marks, *of_state, *marks, *(0 for _ in traced.position)])
        of_updates, of_next = results[: len(marks)], results[len(marks) :]
        grown = [old | new for old, new in zip(of_state, of_next, strict=True)]
        if grown == of_state:
            return of_updates, of_state
        of_state = grown


def read_state(traced: TracedOptimizer) -> list[bool]:
    """Return for each leaf of the state whether updates depend on it at any later step."""
    count, states = len(traced.init.jaxpr.invars), len(traced.paths)
    bits = [1 << number for number in range(states)]
    before = [0] * count
    results = reached(traced.update.jaxpr, [*before, *bits, *before, *(0 for _ in traced.position)])
    read, grown = 0, union(results[:count])
    while grown != read:
        read, grown = grown, grown | union(mark for bit, mark in zip(bits, results[count:], strict=True) if bit & grown)
    return [bool(bit & read) for bit in bits]


def has_momentum(traced: TracedOptimizer) -> bool:
    """Return whether an optimizer has momentum: whether zero gradients can move zero parameters, which weight decay cannot move."""
    count, update = len(traced.init.jaxpr.invars), traced.update
    zeros = [True] * count + [False] * len(traced.paths) + [True] * count + [False] * len(traced.position)
    return not all(always_zero(update.jaxpr, update.consts, zeros)[:count])


def frozen_leaves(traced: TracedOptimizer) -> list[bool]:
    """Return for each parameter whether the jaxpr shows that its update is zero at every step, for any learning-rate schedule.

    Its state can also be zero at every step, for example the momentum of gradients that are set to zero. A number in the state that updates
    do not change, such as a learning rate, counts as unknown, because users may set it.
    """
    count, update = len(traced.init.jaxpr.invars), traced.update
    zeros = always_zero(traced.init.jaxpr, traced.init.consts, [False] * count)
    is_unchanged = [source == count + i for i, source in enumerate(passed_on(update.jaxpr)[count:])]
    state = [
        zero and owner is not None and not unchanged
        for zero, owner, unchanged in zip(zeros, traced.of_parameter, is_unchanged, strict=True)
    ]
    while True:
        results = always_zero(update.jaxpr, update.consts, [False] * count + state + [False] * (count + len(traced.position)))
        still = [before and after for before, after in zip(state, results[count:], strict=True)]
        if still == state:
            return results[:count]
        state = still


def used_while_frozen(traced: TracedOptimizer, frozen: Sequence[bool]) -> list[bool]:
    """Return for each parameter whether it is frozen although the update of a trained parameter depends on it."""
    if not any(frozen):
        return list(frozen)
    marks = [1 << bit if is_frozen else 0 for bit, is_frozen in enumerate(frozen)]
    used = union(mark for is_frozen, mark in zip(frozen, dependence(traced, marks)[0], strict=True) if not is_frozen)
    return [bool(mark & used) for mark in marks]


def _check_constant(before: Tree, after: Tree) -> None:
    """Check that the state keeps its structure, shapes and dtypes, because an update is compiled only once."""
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in (before, after)]
    structures: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        raise TypeError("its update returns a state of another structure than its init, or of other shapes or dtypes")
