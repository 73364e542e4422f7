"""NAdam with the momentum schedule of PyTorch, which `optax.nadamw` does not have."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

Tree = Any


class TorchNadamState(NamedTuple):
    """The state of `scale_by_torch_nadam`.

    Attributes:
        count: the number of updates.
        mu_product: the product of the momenta μ₁ … μ_t.
        mu: the first moment.
        nu: the second moment.
    """

    count: Any
    mu_product: Any
    mu: Tree
    nu: Tree


def scale_by_torch_nadam(
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.999, eps: ArrayLike = 1e-8, momentum_decay: ArrayLike = 4e-3, mu_dtype: DTypeLike | None = None
) -> optax.GradientTransformation:
    """Rescale updates as `torch.optim.NAdam` does.

    The momentum μ_t = β₁·(1 − ½·0.96^(t·momentum_decay)) rises with the number t of updates, from half of β₁ to β₁. With the moments m and
    v of Adam the update is

        (μ_{t+1}·m/(1 − μ₁⋯μ_{t+1}) + (1 − μ_t)·g/(1 − μ₁⋯μ_t)) / (√(v/(1 − β₂^t)) + ε).

    Args:
        b1: β₁, the decay of the first moment.
        b2: β₂, the decay of the second moment.
        eps: ε.
        momentum_decay: the rate at which the momentum rises; with 0.004 the momentum is 0.75·β₁ after 4,245 updates.
        mu_dtype: the dtype of the first moment; by default the dtype of the parameters.

    Returns:
        A transformation.

    Reference:
        https://pytorch.org/docs/stable/generated/torch.optim.NAdam.html
    """

    def init(params: Tree) -> TorchNadamState:
        mu, nu = optax.tree.zeros_like(params, dtype=mu_dtype), optax.tree.zeros_like(params)
        return TorchNadamState(jnp.zeros([], jnp.int32), jnp.ones([], float), mu, nu)

    def momentum(count: jax.Array) -> Any:
        return b1 * (1 - 0.5 * 0.96 ** (count.astype(float) * momentum_decay))

    def update(updates: Tree, state: TorchNadamState, params: Tree = None) -> tuple[Tree, TorchNadamState]:
        count = optax.safe_increment(state.count)
        current, following = momentum(count), momentum(optax.safe_increment(count))
        product = (state.mu_product * current).astype(state.mu_product.dtype)
        of_moment, of_gradient = following / (1 - product * following), (1 - current) / (1 - product)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)

        def scaled(m: Any, v: Any, g: Any) -> jax.Array:
            return (of_moment.astype(m.dtype) * m + of_gradient.astype(g.dtype) * g) / (jnp.sqrt(v) + eps)

        updates = jax.tree.map(scaled, mu, optax.tree.bias_correction(nu, b2, count), updates)
        return updates, TorchNadamState(count, product, optax.tree.cast(mu, mu_dtype), optax.tree.cast_like(nu, state.nu))

    return optax.GradientTransformation(init, update)


def torch_nadam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.0,
    momentum_decay: ArrayLike = 4e-3,
    decoupled_weight_decay: bool = False,
    mu_dtype: DTypeLike | None = None,
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """Return NAdam with the momentum schedule of `torch.optim.NAdam`.

    With b1 = 0.99 this is the optimizer of Ajanthan et al., "Nesterov Method for Asynchronous Pipeline Parallel Optimization", 2025,
    https://arxiv.org/abs/2505.01099.

    Args:
        learning_rate: a number or a schedule; PyTorch's default is 2e-3.
        b1: this and `b2`, `eps`, `momentum_decay` and `mu_dtype` are the arguments of `scale_by_torch_nadam`.
        weight_decay: the factor of the weight decay, which is added to the gradient unless it is decoupled.
        decoupled_weight_decay: whether the weight decay is decoupled, as in AdamW: multiplied only by the learning rate.
        mask: the parameters that decay, as in `optax.adamw`.
    """
    decay, scale = optax.add_decayed_weights(weight_decay, mask), scale_by_torch_nadam(b1, b2, eps, momentum_decay, mu_dtype)
    first, second = (scale, decay) if decoupled_weight_decay else (decay, scale)
    return optax.chain(first, second, optax.scale_by_learning_rate(learning_rate))
