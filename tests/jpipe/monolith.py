"""The delayed rule without stages: `jax.grad` of the whole model for each microbatch, and one optax update of the whole tree."""

import functools

import jax
import numpy as np
import optax


def train(stack, loss, optimizer, params, state, key, batches, m, read):
    """Train and return (losses, params by layer id, layer state); microbatch k reads version `read(layer_id, k)` of a layer."""
    gradient_of, updated = compiled(stack, loss, optimizer)
    versions, losses, optimizer_state = [params], [], optimizer.init(params)
    for t, batch in enumerate(batches):
        rows = np.split(np.arange(len(jax.tree.leaves(batch)[0])), m)
        microbatches = [jax.tree.map(lambda leaf, part=part: leaf[part], batch) for part in rows]
        trees = [{i: versions[read(i, t * m + j)][i] for i in stack.ids} for j in range(m)]
        (value, state), gradient = gradient_of(trees, state, microbatches, t * m, key)
        new, optimizer_state = updated(gradient, optimizer_state, versions[-1])
        versions.append(new)
        losses.append(float(value))
    return losses, versions[-1], state


@functools.cache
def compiled(stack, loss, optimizer):
    """Return functions that compute the gradient of a batch and the update."""

    @jax.jit
    def of_microbatch(params, state, x, labels, number, key):
        def total(params):
            y, new = stack.apply(stack.ids, params, state, x, key=key, microbatch=number, train=True)
            added, weight = loss(y, labels)
            return added, (weight, new)

        return jax.value_and_grad(total, has_aux=True)(params)

    def gradient_of(trees, state, microbatches, first, key):
        """Return the mean loss of a batch, the layer state after it, and the gradient; numpy adds up, which compiles nothing."""
        parts = []
        for j, (tree, (x, labels)) in enumerate(zip(trees, microbatches, strict=True)):
            (added, (weight, state)), gradient = of_microbatch(tree, state, x, labels, first + j, key)
            parts.append(jax.tree.map(np.asarray, (added, weight, gradient)))
        total, weight, gradient = jax.tree.map(lambda *each: sum(each[1:], each[0]), *parts)
        mean, gradient = jax.tree.map(lambda leaf: leaf / leaf.dtype.type(weight or 1), (total, gradient))
        return (mean, state), gradient

    @jax.jit
    def updated(gradient, optimizer_state, params):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for optax's own code
            updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
            return optax.apply_updates(params, updates), optimizer_state

    return gradient_of, updated
