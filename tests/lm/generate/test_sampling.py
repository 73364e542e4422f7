"""The choice of the next token equals NumPy's, and samples have the right frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe_lm.generate.sampling import Sampling, choose, with_temperature, with_top_k, with_top_p

CHOOSE = jax.jit(choose, static_argnums=1)
LOGITS = np.random.default_rng(0).normal(size=(5, 11)).astype(np.float32)
LOGITS[1, 3] = LOGITS[1].max()  # two that are equal
LOGITS[2] = 0.5  # and only such


def drawn(sampling: Sampling, logits: np.ndarray, seed: int = 0, first: int = 0, count: int = 0) -> np.ndarray:
    rows = np.arange(first, first + len(logits), dtype=np.int32)
    return np.asarray(CHOOSE(jnp.asarray(logits), sampling, jnp.uint32(seed), jnp.asarray(rows), jnp.int32(count)))


def probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def test_greedy_takes_the_first_of_the_largest():
    np.testing.assert_array_equal(drawn(Sampling(), LOGITS), LOGITS.argmax(-1))


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_temperature_divides_the_logits(temperature):
    actual = probabilities(np.asarray(with_temperature(jnp.asarray(LOGITS), temperature)))
    np.testing.assert_allclose(actual, probabilities(LOGITS / temperature), rtol=1e-5)


@pytest.mark.parametrize("sampling", [Sampling(1e-45), Sampling(1e-320), Sampling(1.0, top_p=1e-50), Sampling(1e-45, 3, 1e-320)])
def test_the_smallest_temperature_and_top_p_leave_the_likeliest(sampling):
    np.testing.assert_array_equal(drawn(sampling, LOGITS[[0, 3, 4]]), LOGITS[[0, 3, 4]].argmax(-1))


@pytest.mark.parametrize("k", [1, 4, 11, 50])
def test_top_k_leaves_the_k_largest_the_first_of_equal_ones(k):
    expected = np.full_like(LOGITS, -np.inf)
    for row, logits in enumerate(LOGITS):
        largest = sorted(range(len(logits)), key=lambda symbol: -logits[symbol])[:k]
        expected[row, largest] = logits[largest]
    np.testing.assert_array_equal(np.asarray(with_top_k(jnp.asarray(LOGITS), k)), expected)


@pytest.mark.parametrize("p", [1e-9, 0.3, 0.5, 0.95])
def test_top_p_leaves_the_fewest_that_have_the_probability(p):
    expected = np.full_like(LOGITS, -np.inf)
    for row, logits in enumerate(LOGITS):
        likely, total = probabilities(logits), 0.0
        for symbol in sorted(range(len(logits)), key=lambda symbol: -likely[symbol]):
            expected[row, symbol] = logits[symbol]
            total += likely[symbol]
            if total >= p:
                break
    np.testing.assert_array_equal(np.asarray(with_top_p(jnp.asarray(LOGITS), p)), expected)


def test_samples_follow_the_truncated_probabilities():
    logits = np.log(np.asarray([0.4, 0.1, 0.3, 0.2], np.float32))
    samples = drawn(Sampling(1.0, top_k=3, top_p=0.7), np.tile(logits, (8000, 1)))  # of 0.4, 0.3, 0.2 the first two have 7/9
    np.testing.assert_allclose(np.bincount(samples, minlength=4) / 8000, [4 / 7, 0, 3 / 7, 0], atol=0.03)


def test_draws_depend_on_seed_row_and_count_and_not_on_other_rows():
    logits, sampling = np.zeros((6, 1000), np.float32), Sampling(1.0)
    together = drawn(sampling, logits)
    assert len(set(together)) == 6
    np.testing.assert_array_equal(np.concatenate([drawn(sampling, logits[:1], first=row) for row in range(6)]), together)
    for other in ({"seed": 1}, {"count": 1}, {"first": 6}):
        assert (drawn(sampling, logits, **other) != together).sum() >= 5


def test_nan_logits_give_no_token():
    logits = LOGITS.copy()
    logits[3, 0] = np.nan
    for sampling in (Sampling(), Sampling(1.0, 4, 0.5)):
        assert [row for row, token in enumerate(drawn(sampling, logits)) if token == -1] == [3]
