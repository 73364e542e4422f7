"""Optimizers with arguments that differ between stages."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jpipe.errors import InputError, short

Tree = Any


class PerStageState(NamedTuple):
    """The state of `per_stage`.

    Attributes:
        count: the number of updates, for schedules.
        inner_state: the state of the inner optimizer.
    """

    count: Any
    inner_state: Tree


def per_stage(make: Callable[..., optax.GradientTransformation], **arguments: Any) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer with numeric arguments that may differ between stages.

    The state holds none of the values, so a run can be resumed with other values, or with another number of stages.

    Args:
        make: a function that returns an optimizer, such as `optax.adamw`. The optimizer must not keep the arguments in its state, as
            optimizers of `optax.inject_hyperparams` do.
        arguments: the arguments of `make`. A list has one number or schedule for each stage; other values are passed on unchanged.

    Returns:
        A transformation. Its `update` takes `stage`, the number of the stage, and `num_stages`, the length that the lists must have.

    Raises:
        InputError: a list is empty, or has a value that is neither a finite number nor a schedule; values for the stages are not in a list;
            or `make` lacks an argument, or needs another one. From `update`: the length of a list is not `num_stages`.

    Example:
        >>> optimizer = per_stage(optax.adamw, learning_rate=[1e-4, 2e-4, optax.cosine_decay_schedule(3e-4, 1000)], b1=0.95)
    """
    staged = {name: values for name, values in arguments.items() if isinstance(values, list)}
    constant = {name: value for name, value in arguments.items() if name not in staged}
    _check(make, staged, constant)

    def inner(count: jax.Array, stage: ArrayLike) -> optax.GradientTransformationExtraArgs:
        values = {name: _of_stage(values, count, stage) for name, values in staged.items()}
        return optax.with_extra_args_support(make(**constant, **values))

    def init(params: Tree) -> PerStageState:
        count = jnp.zeros([], jnp.int32)
        state = inner(count, 0).init(params)
        for _, hyperparams in optax.tree.get_all_with_path(state, "hyperparams"):
            if names := sorted(staged.keys() & hyperparams.keys()):
                raise InputError(
                    f"per_stage: the optimizer keeps {names[0]} in its state, as optax.inject_hyperparams does, and would use the value of "
                    "stage 0 at all stages; make the optimizer without inject_hyperparams"
                )
        return PerStageState(count, state)

    def update(
        updates: Tree,
        state: PerStageState,
        params: Tree = None,
        *,
        stage: ArrayLike = 0,
        num_stages: int | None = None,
        **extra_args: Any,
    ) -> tuple[Tree, PerStageState]:
        for name, values in staged.items():
            if num_stages is not None and len(values) != num_stages:
                raise InputError(where="per_stage", key=name, expected=f"one value for each of the {num_stages} stages", found=len(values))
        if num_stages is not None:
            extra_args["num_stages"] = num_stages
        updates, after = inner(state.count, stage).update(updates, state.inner_state, params, stage=stage, **extra_args)
        # The values of schedules are arrays, which may promote the dtypes of the state.
        after = jax.tree.map(lambda old, new: new if new.dtype == old.dtype else new.astype(old.dtype), state.inner_state, after)
        return updates, PerStageState(optax.safe_increment(state.count), after)

    return optax.GradientTransformationExtraArgs(init, update)


def _check(make: Callable[..., Any], staged: Mapping[str, list[Any]], constant: Mapping[str, Any]) -> None:
    """Check the lists, and that `make` accepts the arguments."""
    for name, values in staged.items():
        if not values or not all(map(_is_value, values)):
            raise InputError(
                f"per_stage: {name}: expected a list of finite numbers or schedules, one for each stage; found {short(values)}"
            )
    signature = inspect.signature(make)
    try:
        signature.bind(**staged, **constant)
    except TypeError as error:
        raise InputError(f"per_stage: {getattr(make, '__name__', make)}: {error}; see its signature") from None
    for name, value in constant.items():
        parameter = signature.parameters.get(name)
        is_number = name == "learning_rate" or (parameter is not None and isinstance(parameter.default, int | float))
        if is_number and (isinstance(value, tuple) or getattr(value, "ndim", 0) > 0):
            actual = f"{type(value).__name__} {short(value)}"
            raise InputError(f"per_stage: {name}: expected a list, or one value for all stages; found {actual}; write list(...)")


def _is_value(value: Any) -> bool:
    """Return whether a value of a list is a schedule or a finite number."""
    if isinstance(value, bool | np.bool_):
        return False
    return callable(value) or (isinstance(value, Real) and math.isfinite(value))


def _of_stage(values: Sequence[Any], count: jax.Array, stage: ArrayLike) -> Any:
    """Return the value of one stage from a list of numbers and schedules."""
    numbers = [jnp.asarray(value(count), float) if callable(value) else value for value in values]
    selected = numbers[-1]
    for number, value in enumerate(numbers[:-1]):
        selected = jnp.where(stage == number, value, selected)
    return selected
