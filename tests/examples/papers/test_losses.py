"""The loss of smoothed labels equals the cross-entropy with the smoothed distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.papers.losses import smoothed_cross_entropy


def test_it_is_the_cross_entropy_of_smoothed_labels():
    logits = jax.random.normal(jax.random.key(0), (3, 4, 7))
    labels = jnp.asarray([[0, 6, -1, 2], [1, 1, 5, -1], [3, -1, -1, 4]], jnp.int32)
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, 7), 0.2)
    nats = optax.softmax_cross_entropy(logits, smooth)
    total, count = smoothed_cross_entropy(logits, labels, smoothing=0.2)
    np.testing.assert_allclose(total, nats[labels >= 0].sum(), rtol=1e-5)
    assert int(count) == 8
    assert abs(float(total) - float(smoothed_cross_entropy(logits, labels)[0])) > 1e-3
