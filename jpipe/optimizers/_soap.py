"""SOAP: Adam in the eigenbases of the gradients' covariances.

Every n-th update decomposes matrices to refresh the bases. In a pipeline all stages do that at the same updates, so that its time is lost
once. If the stages refreshed at different updates, all others would wait for each of them.

Reference:
    Vyas, Morwani, Zhao, Kwun, Shapira, Brandfonbrener, Janson, Kakade: SOAP: Improving and Stabilizing Shampoo using Adam, 2024,
    https://arxiv.org/abs/2409.11321, and the authors' code, https://github.com/nikhilvyas/SOAP.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

Tree = Any


class SoapState(NamedTuple):
    """The state of `scale_by_soap`.

    Attributes:
        count: the number of updates.
        mu: the first moment, in the rotated basis.
        nu: the second moment, in the rotated basis.
        covariances: for each parameter a tuple with the covariance of its gradients along each rotated dim, size × size.
        bases: for each parameter a tuple with the approximate eigenvectors of these covariances, in columns.
    """

    count: Any
    mu: Tree
    nu: Tree
    covariances: Tree
    bases: Tree


class _Parameter(NamedTuple):
    """The part of a `SoapState` that belongs to one parameter."""

    mu: Any
    nu: Any
    covariances: tuple[Any, ...]
    bases: tuple[Any, ...]


class _Options(NamedTuple):
    """The arguments of `scale_by_soap`."""

    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    precondition_frequency: int
    max_dim: int
    shampoo_beta: Any


def scale_by_soap(
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    precondition_frequency: int = 10,
    max_dim: int = 10_000,
    shampoo_beta: ArrayLike | None = None,
) -> optax.GradientTransformation:
    """Rescale updates as Adam does in a basis that rotates with the gradients.

    The covariance of the gradients along each dim of a parameter is averaged over updates. Every `precondition_frequency` updates one step
    of power iteration with a QR decomposition brings the basis of each dim closer to the eigenvectors of its covariance. The gradient is
    rotated into these bases, and the update of Adam there is rotated back. The first update is zero: it computes the first bases, by an
    eigendecomposition.

    A parameter with more than two dims has a basis for each dim. Dims larger than `max_dim` are not rotated, and neither are parameters
    with fewer than two dims, for which this is Adam; ε is added to the root of the second moment before the bias correction. The state is
    in float32 for parameters of lower precision; of a matrix m × n it has 2·(m·n + m² + n²) numbers.

    Args:
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: ε.
        precondition_frequency: the number of updates between new bases.
        max_dim: the largest size of a dim that is rotated.
        shampoo_beta: the decay of the covariances; by default `b2`.

    Returns:
        A transformation, with a `SoapState`.
    """
    options = _Options(b1, b2, eps, precondition_frequency, max_dim, b2 if shampoo_beta is None else shampoo_beta)

    def update(updates: Tree, state: SoapState, params: Tree = None) -> tuple[Tree, SoapState]:
        gradients = jax.tree.map(lambda g, m: jnp.asarray(g, m.dtype), updates, state.mu)
        parameters = jax.tree.map(lambda _, *parts: _Parameter(*parts), gradients, *state[1:])
        scaled, parameters = jax.lax.cond(
            state.count == 0,
            lambda: _first(gradients, parameters, options),
            lambda: _later(state.count, gradients, parameters, options),
        )
        parts = [jax.tree.map(lambda _, p, name=name: getattr(p, name), gradients, parameters) for name in _Parameter._fields]
        scaled = jax.tree.map(lambda u, g: u.astype(jnp.result_type(g)), scaled, updates)
        return scaled, SoapState(optax.safe_increment(state.count), *parts)

    return optax.GradientTransformation(lambda params: _initial(params, max_dim), update)


def soap(
    learning_rate: optax.ScalarOrSchedule = 3e-3,
    b1: ArrayLike = 0.95,
    b2: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.01,
    precondition_frequency: int = 10,
    max_dim: int = 10_000,
    shampoo_beta: ArrayLike | None = None,
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformation:
    """Return the optimizer SOAP: Adam in slowly changing eigenbases of Shampoo's preconditioner, with decoupled weight decay.

    Args:
        learning_rate: a number or a schedule.
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, and multiplied by the learning rate, as in AdamW.
        precondition_frequency: the number of updates between new bases.
        max_dim: the largest size of a dim that is rotated.
        shampoo_beta: the decay of the covariances; by default `b2`.
        mask: what decays, as for `optax.adamw`.

    Returns:
        A transformation; see `scale_by_soap`.
    """
    return optax.chain(
        scale_by_soap(b1, b2, eps, precondition_frequency, max_dim, shampoo_beta),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _initial(params: Tree, max_dim: int) -> SoapState:
    def zeros(p: Any) -> jax.Array:
        return jnp.zeros(p.shape, precise(p))

    def squared_sides(p: Any) -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros((p.shape[dim],) * 2, precise(p)) for dim in _rotated_dims(p.shape, max_dim))

    def precise(p: Any) -> Any:
        return p.dtype if jnp.finfo(p.dtype).bits >= 32 else jnp.float32

    return SoapState(jnp.zeros([], jnp.int32), *(jax.tree.map(make, params) for make in (zeros, zeros, squared, squared)))


def _first(gradients: Tree, parameters: Tree, options: _Options) -> tuple[Tree, Tree]:
    """Return updates of zero, and the state with the first covariances and bases."""

    def begun(gradient: Any, parameter: _Parameter) -> _Parameter:
        covariances = _averaged(parameter.covariances, gradient, options)
        bases = tuple(jnp.flip(jnp.linalg.eigh(c + 1e-30 * jnp.eye(len(c), dtype=c.dtype))[1], 1) for c in covariances)
        return parameter._replace(covariances=covariances, bases=bases)

    return jax.tree.map(jnp.zeros_like, gradients), jax.tree.map(begun, gradients, parameters)


def _later(count: Any, gradients: Tree, parameters: Tree, options: _Options) -> tuple[Tree, Tree]:
    """Return the updates of Adam in the rotated bases and the new state; the bases change every `precondition_frequency` updates."""
    b1, b2, eps, precondition_frequency, max_dim, _ = options
    correction = jnp.sqrt(1 - b2**count) / (1 - b1**count)

    def moved(gradient: Any, parameter: _Parameter) -> _Parameter:
        rotated = _rotated(gradient, parameter.bases, max_dim)
        mu, nu = b1 * parameter.mu + (1 - b1) * rotated, b2 * parameter.nu + (1 - b2) * rotated**2
        return _Parameter(mu, nu, _averaged(parameter.covariances, gradient, options), parameter.bases)

    def scaled(_: Any, parameter: _Parameter) -> jax.Array:
        update = parameter.mu / (jnp.sqrt(parameter.nu) + eps)
        return correction.astype(update.dtype) * _rotated(update, parameter.bases, max_dim, back=True)

    parameters = jax.tree.map(moved, gradients, parameters)
    return jax.tree.map(scaled, gradients, parameters), jax.lax.cond(
        count % precondition_frequency == 0,
        lambda: jax.tree.map(lambda _, parameter: _with_new_bases(parameter, max_dim), gradients, parameters),
        lambda: parameters,
    )


def _with_new_bases(parameter: _Parameter, max_dim: int) -> _Parameter:
    """Return the state after one step of power iteration of each basis, with the moments in the new bases."""
    mu, nu, bases = _rotated(parameter.mu, parameter.bases, max_dim, back=True), parameter.nu, []
    for dim, covariance, basis in zip(_rotated_dims(mu.shape, max_dim), parameter.covariances, parameter.bases, strict=True):
        product = jnp.matmul(covariance, basis, precision="highest")
        largest_first = jnp.argsort(jnp.sum(basis * product, 0), descending=True)  # by the estimated eigenvalues
        nu = jnp.take(nu, largest_first, dim)
        bases.append(jnp.linalg.qr(product[:, largest_first])[0])
    return _Parameter(_rotated(mu, tuple(bases), max_dim), nu, parameter.covariances, tuple(bases))


def _averaged(covariances: tuple[Any, ...], gradient: Any, options: _Options) -> tuple[Any, ...]:
    """Return the covariances with one more gradient."""
    decay, dims = options.shampoo_beta, _rotated_dims(gradient.shape, options.max_dim)
    remaining = [[other for other in range(gradient.ndim) if other != dim] for dim in dims]
    squared = [jnp.tensordot(gradient, gradient, (axes, axes), precision="highest") for axes in remaining]
    return tuple(decay * covariance + (1 - decay) * square for covariance, square in zip(covariances, squared, strict=True))


def _rotated(array: Any, bases: tuple[Any, ...], max_dim: int, back: bool = False) -> Any:
    """Return a gradient in the given bases, or back from these in the ordinary one."""
    of_dim = dict(zip(_rotated_dims(array.shape, max_dim), bases, strict=True))
    for dim in range(array.ndim):  # each turn takes the first dim and appends it, rotated
        if dim in of_dim:
            array = jnp.tensordot(array, of_dim[dim], (0, 1 if back else 0), precision="highest")
        else:
            array = jnp.moveaxis(array, 0, -1)
    return array


def _rotated_dims(shape: Sequence[int], max_dim: int) -> list[int]:
    return [dim for dim, size in enumerate(shape) if len(shape) > 1 and size <= max_dim]
