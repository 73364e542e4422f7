"""SOAP: Adam in the eigenbases of the gradients' covariances.

Every n-th update decomposes matrices to refresh the bases. In a pipeline all stages do this at the same updates, so its time is lost only
once; otherwise the other stages would wait each time.

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
        covariances: for each parameter a tuple with the covariance matrix of its gradients along each rotated dim, size × size.
        bases: for each parameter a tuple with the approximate eigenvectors of each covariance matrix, as columns.
    """

    count: Any
    mu: Tree
    nu: Tree
    covariances: Tree
    bases: Tree


class _Parameter(NamedTuple):
    """The part of a `SoapState` for one parameter."""

    mu: Any
    nu: Any
    covariances: tuple[Any, ...]
    bases: tuple[Any, ...]


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
    rotated into these bases; Adam computes an update there, which is rotated back. The first update is zero; it computes the first bases by
    an eigendecomposition.

    A parameter with more than two dims has a basis for each dim. Dims larger than `max_dim` are not rotated. Parameters with fewer than two
    dims are not rotated either; for them this is Adam, except that ε is added to the root of the second moment before the bias correction.
    The state is in float32 for parameters of lower precision. For a matrix m × n it has 2·(m·n + m² + n²) numbers.

    Args:
        b1: the decay of the first moment.
        b2: the decay of the second moment.
        eps: ε.
        precondition_frequency: the number of updates from one change of the bases to the next.
        max_dim: the largest size of a dim that is rotated.
        shampoo_beta: the decay of the covariances; by default `b2`.

    Returns:
        A transformation, with a `SoapState`.
    """
    rule = _Rule(b1, b2, eps, precondition_frequency, max_dim, b2 if shampoo_beta is None else shampoo_beta)
    return optax.GradientTransformation(rule.init, rule.update)


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
        b1: this and `b2`, `eps`, `precondition_frequency`, `max_dim` and `shampoo_beta` are the arguments of `scale_by_soap`.
        weight_decay: the decoupled weight decay, which is multiplied by the learning rate, as in AdamW.
        mask: the parameters that decay, as in `optax.adamw`.
    """
    return optax.chain(
        scale_by_soap(b1, b2, eps, precondition_frequency, max_dim, shampoo_beta),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


class _Rule(NamedTuple):
    """The arguments of `scale_by_soap`, with the functions of the transformation."""

    b1: ArrayLike
    b2: ArrayLike
    eps: ArrayLike
    precondition_frequency: int
    max_dim: int
    shampoo_beta: Any

    def init(self, params: Tree) -> SoapState:
        def precise(p: Any) -> Any:
            return p.dtype if jnp.finfo(p.dtype).bits >= 32 else jnp.float32

        def zeros(p: Any) -> jax.Array:
            return jnp.zeros(p.shape, precise(p))

        def square(p: Any) -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros((p.shape[dim],) * 2, precise(p)) for dim in self.rotated_dims(p.shape))

        return SoapState(jnp.zeros([], jnp.int32), *(jax.tree.map(make, params) for make in (zeros, zeros, square, square)))

    def update(self, updates: Tree, state: SoapState, params: Tree = None) -> tuple[Tree, SoapState]:
        leaves: list[Any] = jax.tree.leaves(updates)
        structure: Any = jax.tree.structure(updates)
        parameters = [_Parameter(*parts) for parts in zip(*map(structure.flatten_up_to, state[1:]), strict=True)]
        gradients = [jnp.asarray(g, p.mu.dtype) for g, p in zip(leaves, parameters, strict=True)]
        scaled, parameters = jax.lax.cond(
            state.count == 0,
            lambda: ([jnp.zeros_like(g) for g in gradients], list(map(self.begun, gradients, parameters))),
            lambda: self.later(state.count, gradients, parameters),
        )
        scaled = [u.astype(jnp.result_type(g)) for u, g in zip(scaled, leaves, strict=True)]
        parts = [structure.unflatten([p[i] for p in parameters]) for i in range(len(_Parameter._fields))]
        return structure.unflatten(scaled), SoapState(optax.safe_increment(state.count), *parts)

    def begun(self, gradient: Any, parameter: _Parameter) -> _Parameter:
        """Return the state of a parameter with the first covariances and bases."""
        covariances = self.averaged(parameter.covariances, gradient)
        bases = tuple(jnp.flip(jnp.linalg.eigh(c + 1e-30 * jnp.eye(len(c), dtype=c.dtype))[1], 1) for c in covariances)
        return parameter._replace(covariances=covariances, bases=bases)

    def later(self, count: Any, gradients: list[Any], parameters: list[_Parameter]) -> tuple[list[Any], list[_Parameter]]:
        """Return the updates of Adam in the rotated bases and the new state; the bases change every `precondition_frequency` updates."""
        correction = jnp.sqrt(1 - self.b2**count) / (1 - self.b1**count)
        moved, scaled = list(map(self.moved, gradients, parameters)), []
        for parameter in moved:
            update = parameter.mu / (jnp.sqrt(parameter.nu) + self.eps)
            scaled.append(correction.astype(update.dtype) * self.rotated(update, parameter.bases, back=True))
        is_due = count % self.precondition_frequency == 0
        return scaled, jax.lax.cond(is_due, lambda: list(map(self.with_new_bases, moved)), lambda: moved)

    def moved(self, gradient: Any, parameter: _Parameter) -> _Parameter:
        """Return the state of a parameter with one more gradient, in the same bases."""
        rotated = self.rotated(gradient, parameter.bases)
        mu, nu = self.b1 * parameter.mu + (1 - self.b1) * rotated, self.b2 * parameter.nu + (1 - self.b2) * rotated**2
        return _Parameter(mu, nu, self.averaged(parameter.covariances, gradient), parameter.bases)

    def with_new_bases(self, parameter: _Parameter) -> _Parameter:
        """Return the state after one step of power iteration of each basis, with the moments in the new bases."""
        mu, nu, bases = self.rotated(parameter.mu, parameter.bases, back=True), parameter.nu, []
        for dim, covariance, basis in zip(self.rotated_dims(mu.shape), parameter.covariances, parameter.bases, strict=True):
            product = jnp.matmul(covariance, basis, precision="highest")
            largest_first = jnp.argsort(jnp.sum(basis * product, 0), descending=True)  # by the estimated eigenvalues
            nu = jnp.take(nu, largest_first, dim)
            bases.append(jnp.linalg.qr(product[:, largest_first])[0])
        return _Parameter(self.rotated(mu, tuple(bases)), nu, parameter.covariances, tuple(bases))

    def averaged(self, covariances: tuple[Any, ...], gradient: Any) -> tuple[Any, ...]:
        """Return the covariances with one more gradient."""
        remaining = [[other for other in range(gradient.ndim) if other != dim] for dim in self.rotated_dims(gradient.shape)]
        products = [jnp.tensordot(gradient, gradient, (axes, axes), precision="highest") for axes in remaining]
        return tuple(self.shampoo_beta * c + (1 - self.shampoo_beta) * product for c, product in zip(covariances, products, strict=True))

    def rotated(self, array: Any, bases: tuple[Any, ...], back: bool = False) -> Any:
        """Return a gradient in the given bases, or back from them in the ordinary one."""
        of_dim = dict(zip(self.rotated_dims(array.shape), bases, strict=True))
        for dim in range(array.ndim):  # each turn takes the first dim and appends it, rotated
            if dim in of_dim:
                array = jnp.tensordot(array, of_dim[dim], (0, 1 if back else 0), precision="highest")
            else:
                array = jnp.moveaxis(array, 0, -1)
        return array

    def rotated_dims(self, shape: Sequence[int]) -> list[int]:
        return [dim for dim, size in enumerate(shape) if len(shape) > 1 and size <= self.max_dim]
