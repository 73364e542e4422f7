"""The gated delta rule in chunks equals its recurrence, position by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe_lm.models.mixers import delta_rule


@pytest.mark.parametrize("size", [3, 64])
def test_chunks_equal_the_recurrence(size, monkeypatch):
    monkeypatch.setattr(delta_rule, "_CHUNK", size)
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(2, 8, 3, numbers)).astype(np.float32) for numbers in (4, 4, 5))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay, rate = -random.random((2, 8, 3), np.float32), random.random((2, 8, 3), np.float32)
    state = random.normal(size=(2, 3, 4, 5)).astype(np.float32)
    segments = np.asarray([[1, 1, 2, 2, 2, 2, 2, 0], [3] * 8], np.int32)  # the first row continues segment 1, the second begins anew
    y, last = jax.jit(delta_rule.delta_rule)(*map(jnp.asarray, (q, k, v, decay, rate, segments, state, np.asarray([1, 2], np.int32))))
    expected = np.zeros_like(v)
    for row, before in enumerate((1, 2)):
        for t in range(8):
            for head in range(3):
                kept = state[row, head] * (np.exp(decay[row, t, head]) if segments[row, t] == before else 0)
                key = k[row, t, head]
                state[row, head] = kept + rate[row, t, head] * np.outer(key, v[row, t, head] - kept.T @ key)
                expected[row, t, head] = q[row, t, head] @ state[row, head]
            before = segments[row, t]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(last, state, rtol=1e-4, atol=1e-4)
