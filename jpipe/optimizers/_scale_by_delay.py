"""The learning rate of PipeMare, which is smaller for older gradients at the beginning of a run."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from jpipe._numbers import is_int
from jpipe.errors import InputError

Tree = Any


class ScaleByDelayState(NamedTuple):
    """The state of `scale_by_delay`.

    Attributes:
        count: the number of updates.
    """

    count: Any


def scale_by_delay(steps: int) -> optax.GradientTransformationExtraArgs:
    """Divide updates by τ^(1 − min(t/steps, 1)), where τ is the delay, at least 1, and t the number of the update, counted from 0.

    As the last part of a chain this divides the learning rate: by the whole delay at first, and by 1 from update `steps` on.

    Args:
        steps: the number of updates after which the transformation changes nothing.

    Returns:
        A transformation. Its `update` takes the argument `delay`, τ.

    Raises:
        InputError: `steps` is not a whole number of at least 1.

    Reference:
        Yang, Zhang, Li, Ré, Aberger, De Sa: PipeMare: Asynchronous Pipeline Parallel DNN Training, 2019, https://arxiv.org/abs/1910.05124.
    """
    if not is_int(steps) or steps < 1:
        raise InputError(where="scale_by_delay", expected="steps of at least 1", found=repr(steps))

    def init(params: Tree) -> ScaleByDelayState:
        return ScaleByDelayState(jnp.zeros([], jnp.int32))

    def update(
        updates: Tree, state: ScaleByDelayState, params: Tree = None, *, delay: ArrayLike = 0.0, **extra_args: Any
    ) -> tuple[Tree, ScaleByDelayState]:
        exponent = jnp.minimum(state.count.astype(float) / int(steps), 1) - 1
        factor = jnp.maximum(jnp.asarray(delay, float), 1) ** exponent
        return jax.tree.map(lambda u: factor.astype(u.dtype) * u, updates), ScaleByDelayState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)
