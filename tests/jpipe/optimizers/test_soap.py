"""SOAP against a transcription of the authors' code in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe.model import find_layerwise
from jpipe.optimizers import scale_by_soap, soap

SHAPES = {"square": (4, 4), "tall": (5, 2), "cube": (3, 2, 3), "bias": (3,), "scale": ()}
STEPS = 25


def gradients(step):
    random = np.random.default_rng(step)
    return {name: random.normal(size=shape) * (1 + step % 3) for name, shape in SHAPES.items()}


def run(optimizer, steps=STEPS, dtype=np.float64):
    params = {name: jnp.zeros(shape, dtype) for name, shape in SHAPES.items()}
    update = jax.jit(optimizer.update)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = optimizer.init(params)
        for step in range(steps):
            updates, state = update(jax.tree.map(lambda g: jnp.asarray(g, dtype), gradients(step)), state, params)
            yield updates, state


class Reference:
    """One parameter, as in the authors' code: rate 1, no weight decay. It starts with the eigenvectors that `bases` returns."""

    def __init__(self, shape, b1, b2, eps, frequency, max_dim, shampoo_beta, bases):
        self.dims = [dim for dim, size in enumerate(shape) if len(shape) > 1 and size <= max_dim]
        self.b1, self.b2, self.eps, self.frequency, self.shampoo_beta, self.bases = b1, b2, eps, frequency, shampoo_beta, bases
        self.GG = {dim: np.zeros((shape[dim], shape[dim])) for dim in self.dims}
        self.Q, self.exp_avg, self.exp_avg_sq, self.steps = None, np.zeros(shape), np.zeros(shape), 0

    def project(self, x, back=False):
        for dim in self.dims:
            matrix = self.Q[dim] if back else self.Q[dim].T
            x = np.moveaxis(np.tensordot(matrix, x, (1, dim)), 0, dim)
        return x

    def step(self, grad):
        if self.Q is None:
            self.accumulate(grad)
            self.Q = dict(zip(self.dims, self.bases(), strict=True))
            for dim in self.dims:  # eigenvectors, by falling eigenvalue
                diagonal = self.Q[dim].T @ self.GG[dim] @ self.Q[dim]
                np.testing.assert_allclose(diagonal, np.diag(np.linalg.eigvalsh(self.GG[dim])[::-1]), atol=1e-12)
            return np.zeros_like(grad)
        projected = self.project(grad)
        self.steps += 1
        self.exp_avg = self.b1 * self.exp_avg + (1 - self.b1) * projected
        self.exp_avg_sq = self.b2 * self.exp_avg_sq + (1 - self.b2) * projected**2
        size = (1 - self.b2**self.steps) ** 0.5 / (1 - self.b1**self.steps)
        update = size * self.project(self.exp_avg / (np.sqrt(self.exp_avg_sq) + self.eps), back=True)
        self.exp_avg = self.project(self.exp_avg, back=True)
        self.accumulate(grad)
        if self.steps % self.frequency == 0:
            for dim in self.dims:
                estimated = np.diag(self.Q[dim].T @ self.GG[dim] @ self.Q[dim])
                order = np.argsort(-estimated)
                self.exp_avg_sq = np.take(self.exp_avg_sq, order, dim)
                self.Q[dim] = np.linalg.qr(self.GG[dim] @ self.Q[dim][:, order])[0]
        self.exp_avg = self.project(self.exp_avg)
        return update

    def accumulate(self, grad):
        for dim in self.dims:
            flat = np.moveaxis(grad, dim, 0).reshape(grad.shape[dim], -1)
            self.GG[dim] = self.shampoo_beta * self.GG[dim] + (1 - self.shampoo_beta) * flat @ flat.T


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        {"precondition_frequency": 4, "b1": 0.9, "b2": 0.99, "eps": 1e-3},
        {"precondition_frequency": 3, "max_dim": 3, "shampoo_beta": 0.8},
    ],
)
def test_equals_the_authors_code(options, float64):
    b1, b2, eps = options.get("b1", 0.95), options.get("b2", 0.95), options.get("eps", 1e-8)
    frequency, max_dim = options.get("precondition_frequency", 10), options.get("max_dim", 10_000)
    bases = {}
    references = {
        name: Reference(shape, b1, b2, eps, frequency, max_dim, options.get("shampoo_beta", b2), lambda name=name: bases[name])
        for name, shape in SHAPES.items()
    }
    for step, (updates, state) in enumerate(run(scale_by_soap(**options))):
        if step == 0:  # where eigenvalues are equal, as zeros are, any basis will do
            bases = {name: [np.asarray(basis) for basis in state.bases[name]] for name in SHAPES}
        for name, gradient in gradients(step).items():
            expected = references[name].step(gradient)
            np.testing.assert_allclose(updates[name], expected, rtol=1e-10, atol=1e-10, err_msg=f"{name}, step {step}")


@pytest.mark.slow
def test_bases_follow_the_covariances(float64):
    *_, (_, state) = run(scale_by_soap(precondition_frequency=1, b2=0.999), 400)
    for name in ("square", "tall", "cube"):
        for covariance, basis in zip(state.covariances[name], state.bases[name], strict=True):
            rotated = basis.T @ covariance @ basis
            np.testing.assert_allclose(basis.T @ basis, np.eye(len(basis)), atol=1e-12)
            assert jnp.abs(rotated - jnp.diag(jnp.diag(rotated))).max() < 0.02 * jnp.abs(rotated).max()


def test_without_rotation_is_adam_one_update_later(float64):
    """And with a smaller ε than that of optax, which corrects the second moment before it adds ε."""
    adam = optax.scale_by_adam(0.95, 0.95, 0.0)
    with jax.numpy_dtype_promotion("standard"):
        state = adam.init({name: jnp.zeros(shape) for name, shape in SHAPES.items()})
    for step, (updates, _) in enumerate(run(scale_by_soap(eps=0.0, max_dim=1))):
        if step:
            with jax.numpy_dtype_promotion("standard"):
                expected, state = adam.update(gradients(step), state)
        for name in SHAPES:
            np.testing.assert_allclose(updates[name], expected[name] if step else 0, rtol=1e-12)


@pytest.mark.exhaustive
def test_weights_decay_and_the_rate_is_a_schedule(float64):
    params, rate = {"w": jnp.ones((3, 3))}, optax.linear_schedule(0.1, 0.2, 1)
    plain, whole = scale_by_soap(), soap(rate, weight_decay=0.5)
    states = plain.init(params), whole.init(params)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for step in range(3):
            gradient = {"w": jax.random.normal(jax.random.key(step), (3, 3), np.float64)}
            (direction, first), (updates, second) = plain.update(gradient, states[0], params), whole.update(gradient, states[1], params)
            states = first, second
            np.testing.assert_allclose(updates["w"], -(0.1 if step == 0 else 0.2) * (direction["w"] + 0.5), rtol=1e-6)


@pytest.mark.exhaustive
def test_state_is_precise_for_parameters_of_lower_precision():
    for updates, state in run(soap(precondition_frequency=2), 4, jnp.bfloat16):
        assert {leaf.dtype for leaf in jax.tree.leaves(state[0])} == {np.dtype(np.int32), np.dtype(np.float32)}
        assert (
            optax.apply_updates({"w": jnp.zeros(3, jnp.bfloat16)}, {"w": updates["bias"].astype(jnp.bfloat16)})["w"].dtype == jnp.bfloat16
        )


@pytest.mark.slow
def test_works_layer_by_layer():
    specs = {layer: {"kernel": jax.ShapeDtypeStruct((4, 3), np.float32), "bias": jax.ShapeDtypeStruct((3,), np.float32)} for layer in "abc"}
    find_layerwise(soap(precondition_frequency=2), {**specs, "act": {}})
