"""The delayed rule without stages: one `jax.grad` of the whole model and one optax update of the whole tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax


def train(stack, loss, optimizer, params, state, key, batches, m, read):
    """Train and return (losses, params by layer id, layer state); microbatch k reads version `read(layer_id, k)` of a layer."""
    gradient_of, updated = compiled(stack, loss, optimizer)
    versions, losses, optimizer_state = [params], [], optimizer.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    for t, batch in enumerate(batches):
        rows = np.split(np.arange(len(jax.tree.leaves(batch)[0])), m)
        microbatches = [jax.tree.map(lambda leaf, part=part: leaf[part], batch) for part in rows]
        trees = [{i: versions[read(i, t * m + j)][i] for i in stack.ids} for j in range(m)]
        (value, state), gradient = gradient_of(zero, trees, state, microbatches, t * m, key)
        new, optimizer_state = updated(gradient, optimizer_state, versions[-1])
        versions.append(new)
        losses.append(float(value))
    return losses, versions[-1], state


@functools.cache
def compiled(stack, loss, optimizer):
    """Compute the gradient of a batch and the update."""

    def mean_loss(shift, trees, state, microbatches, first, key):
        """Return the loss of a batch. `shift` is zero and added to all weights, so that its gradient is the sum over microbatches."""
        total = weight = 0.0
        for j, (tree, (x, labels)) in enumerate(zip(trees, microbatches, strict=True)):
            weights = jax.tree.map(jnp.add, tree, shift)
            y, state = stack.apply(stack.ids, weights, state, x, key=key, microbatch=first + j, train=True)
            state = jax.lax.stop_gradient(state)
            added, count = loss(y, labels)
            total, weight = total + added, weight + count
        return total / jnp.where(weight == 0, 1, weight), state

    @jax.jit
    def updated(gradient, optimizer_state, params):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for optax's own code
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
            return optax.apply_updates(params, updates), optimizer_state

    return jax.jit(jax.value_and_grad(mean_loss, has_aux=True)), updated
