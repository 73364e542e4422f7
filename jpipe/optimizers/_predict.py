"""Weight prediction: move the weights ahead along the last update, to make up for the delay of gradients."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe._numbers import is_number
from jpipe.errors import InputError

Tree = Any


class PredictDelayState(NamedTuple):
    """The state of `predict_delay`.

    Attributes:
        ahead: the current prediction, a tree like the parameters: each parameter minus its value without the prediction.
    """

    ahead: Tree


def predict_delay(factor: float = 1.0) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that moves the weights ahead along the last update, for late gradients.

    Gradients with a delay of n updates are applied to weights that n further updates have moved in the meantime. If the weights are moved
    ahead by λ = `factor` · n updates, in the direction of the last update, gradients are computed approximately where they are applied. Let
    U_t be the incoming updates and out_t the outgoing ones:

        ahead_t = λ_t U_t
        out_t   = U_t + ahead_t − ahead_{t−1}

    For a constant λ, out_t = U_t + λ (U_t − U_{t−1}), which is error feedback. Let x_t be the weights, which the out_t add up to, and y_t
    the weights without prediction, which the U_t add up to. Then y_t = x_t − ahead_t, so λ may change at any time; with λ = 0 the next
    update removes the prediction.

    Make it the last transformation of a chain, after the learning rate. It needs an optimizer with momentum; without momentum it makes
    training less stable. If the optimizer itself looks ahead, as with Nesterov's momentum, use the factor 0.5 for delays above one.

    `jpipe.Pipeline(…, delay_correction="predict")` applies the same rule, and evaluates the weights without the prediction.

    Args:
        factor: the number of updates to predict for each update of delay.

    Returns:
        A transformation. Its `update` takes the keyword `delay`, the delay of the gradients in updates, a scalar. Its state is a
        `PredictDelayState` with one array for each parameter, zeros at first.

    Raises:
        InputError: `factor` is not a number of at least 0.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = optax.chain(optax.sgd(0.1, momentum=0.9), predict_delay())
        >>> params = jnp.array([1.0])
        >>> updates, state = optimizer.update(jnp.array([1.0]), optimizer.init(params), params, delay=1.0)
        >>> float(updates[0]), float(state[-1].ahead[0])  # −0.1, and the prediction of another −0.1
        (-0.20000000298023224, -0.10000000149011612)

    Reference: Zmushko et al., One-Step Gradient Delay is Not a Barrier (2026), arXiv:2606.30634.
    """
    if not is_number(factor) or not 0 <= factor < math.inf:
        raise InputError(where="predict_delay", expected="a factor of at least 0 such as 0.5", found=repr(factor))

    def init(params: Tree) -> PredictDelayState:
        return PredictDelayState(jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: Tree, state: PredictDelayState, params: Tree = None, *, delay: Any, **extra_args: Any
    ) -> tuple[Tree, PredictDelayState]:
        del params, extra_args
        ahead = predicted(updates, state.ahead, factor, delay)
        return with_prediction(updates, state.ahead, ahead), PredictDelayState(ahead)

    return optax.GradientTransformationExtraArgs(init, update)


def predicted(updates: Tree, before: Tree, factor: float, delay: Any) -> Tree:
    """Return `factor` · `delay` · updates in the dtypes of `before`. If factor or delay is 0, the result is 0 even for infinite updates."""

    def ahead(u: jax.Array, old: jax.Array) -> jax.Array:
        rate = jnp.asarray(delay, old.dtype) * jnp.asarray(factor, old.dtype)
        return jnp.where(rate == 0, jnp.zeros_like(old), rate * u.astype(old.dtype))

    return jax.tree.map(ahead, updates, before)


def with_prediction(tree: Tree, before: Tree, after: Tree) -> Tree:
    """Replace the prediction `before` in updates or parameters by `after`. Entries where both are equal do not change, bit for bit."""
    return jax.tree.map(lambda x, old, new: jnp.where(old == new, x, x - (old - new).astype(x.dtype)), tree, before, after)
