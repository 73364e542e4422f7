"""Train through a pipeline, or as one function, and compare."""

from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import numpy as np
import optax

from jpipe import LayerStack, Pipeline, Plan, State
from jpipe.capabilities.global_norm.runtime import sum_squares, with_stage_norm
from jpipe.model.jaxprs._cpu_products import with_swapped_products
from jpipe.stages.functions._update import add, update, update_entries
from tests.jpipe import models, monolith, reference

KEY = 11
REFERENCE_BATCHES = 9  # long enough for every schedule to run in its steady state for some batches


JITTED: dict = {}  # the stage functions that the reference runs, by stack and stages


class Trained(NamedTuple):
    """The loss of every batch, and the parameters and layer state by layer id after a drain."""

    losses: list[float]
    params: dict[str, Any]
    layer_state: dict[str, Any]


def fresh(pipe: Pipeline, batches) -> State:
    """Return a new state, always of the same seed."""
    return pipe.init(jax.random.key(KEY), batches[0])


def train(pipe: Pipeline, batches, state: State | None = None) -> Trained:
    """Feed all batches, then drain."""
    state, losses = state or fresh(pipe, batches), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses += metrics.losses.values()
    state, metrics = pipe.drain(state, with_metrics=True)
    losses += metrics.losses.values()
    return Trained([float(loss) for loss in losses], pipe.params(state), layer_state(state))


def layer_state(state: State) -> dict[str, Any]:
    """Return the layer state that forwards pass on, by layer id."""
    return {layer_id: s for worker in state.workers for layer_id, s in worker.layer_state.items()}


def train_as_one_function(pipe: Pipeline, batches, state: State | None = None) -> Trained:
    """Train the same model without stages (see `monolith`), leaving the state passed in unchanged."""
    plan, state, optimizer = pipe.plan, state or fresh(pipe, batches), pipe.optimizer
    if pipe.clip_global_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(pipe.clip_global_norm), optimizer)
    if pipe.clip_stage_norm is not None:
        optimizer = optax.chain(clip_by_stage(tuple(stage.layers for stage in plan.stages), pipe.clip_stage_norm), optimizer)
    stage_of = {layer_id: s for s, stage in enumerate(plan.stages) for layer_id in stage.layers}
    start = models.on_first_device((pipe.params(state), layer_state(state)))
    return Trained(
        *monolith.train(
            pipe.stack,
            pipe.loss,
            optimizer,
            *start,
            jax.random.key(KEY),
            batches,
            plan.microbatches,
            read=lambda layer_id, k: reference.version(plan, stage_of[layer_id], k),
        )
    )


def clip_by_stage(stages: tuple[tuple[str, ...], ...], largest: float) -> optax.GradientTransformation:
    """Return `optax.clip_by_global_norm` of each stage's layers alone."""
    clip = optax.clip_by_global_norm(largest)

    def update(gradients, state, params=None):
        clipped = {}
        for layers in stages:
            clipped |= clip.update({layer_id: gradients[layer_id] for layer_id in layers}, clip.init(None))[0]
        return {layer_id: clipped[layer_id] for layer_id in gradients}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def check_against_reference(
    stack: LayerStack,
    plan: Plan,
    drain_after: set[int],
    batches=None,
    optimizer=None,
    loss=models.masked_squares,
    **options: Any,
) -> None:
    """Train through the pipeline twice, the second time with drains in the middle, and compare both with the reference.

    `batches` are `REFERENCE_BATCHES` many and fit `loss`, `options` are those of the pipeline: clipping, say.
    """
    devices = (
        None
        if len(plan.workers) == plan.depth
        else [jax.devices()[p] for p, stages in enumerate(plan.pipeline_ranks) for _ in range(plan.replicas[stages[0]])]
    )  # replicas share what is compiled
    pipe = Pipeline(stack, plan, loss, optimizer or models.momentum(), devices, **options)
    batches = batches or models.masked_batches(REFERENCE_BATCHES, plan.microbatches)
    fresh = pipe.init(jax.random.key(KEY), batches[0])
    key = stack, plan.stages, plan.sync_state, optimizer, loss, *options.items()
    if key not in JITTED:  # they depend on nothing else: the microbatches of all tests are alike
        functions, added = pipe.stage_functions(batches[0]), jax.jit(add)
        names = ("forward", "backward", "forward_backward", "forward_backward_input", "backward_weight")
        calls = [{name: jax.jit(with_swapped_products(getattr(f, name))) for name in names} for f in functions]
        of_updates = {"update": update, "update_entries": update_entries, "sum_squares": sum_squares, "stage_norm": with_stage_norm}
        update_calls = [{"add": added} | {name: jax.jit(partial(call, f)) for name, call in of_updates.items()} for f in functions]
        JITTED[key] = functions, [stage_calls | other for stage_calls, other in zip(calls, update_calls, strict=True)]
    for drains in (set(), drain_after):
        always = [*drains, REFERENCE_BATCHES - 1] if plan.schedule in reference.ASYNCHRONOUS else range(REFERENCE_BATCHES)
        expected = reference.train(*JITTED[key], plan, models.on_first_device(fresh.workers), batches, set(always))
        state, losses, weights, norms, scales, of_stages = models.copied(fresh), {}, {}, {}, {}, {}
        for t, batch in enumerate(batches):
            state, metrics = pipe.step(state, batch)
            losses, weights = losses | metrics.losses, weights | metrics.weights
            norms, scales, of_stages = norms | metrics.norms, scales | metrics.loss_scales, of_stages | metrics.stage_norms
            if t in drains:
                state, metrics = pipe.drain(state, with_metrics=True)
                norms, scales, of_stages = norms | metrics.norms, scales | metrics.loss_scales, of_stages | metrics.stage_norms
                losses, weights = losses | metrics.losses, weights | metrics.weights
        state, metrics = pipe.drain(state, with_metrics=True)
        check_equal(scales | metrics.loss_scales, expected.scales)
        check_equal(losses | metrics.losses, expected.losses)
        check_equal(weights | metrics.weights, expected.weights)
        check_equal(norms | metrics.norms, expected.norms)
        check_equal(of_stages | metrics.stage_norms, expected.stage_norms)
        for worker, (s, replica) in zip(state.workers, plan.workers, strict=True):
            updates = REFERENCE_BATCHES * plan.microbatches // reference.every(plan, s)
            oldest = reference.version(plan, s, REFERENCE_BATCHES * plan.microbatches + replica)
            assert list(worker.weights.versions) == list(range(oldest, updates + 1)), (
                f"stage {s} keeps what the next microbatches read, no more"
            )
            for version in worker.weights.versions:
                check_equal(worker.weights.read(version), expected.versions[s][version])
            check_equal(worker.optimizer, expected.optimizer[s])
            check_equal(worker.layer_state, expected.layer_state[s][replica])
            waiting = {name for update in worker.updates.values() for name, tree in update.items() if jax.tree.leaves(tree)}
            assert not worker.microbatches, f"stage {s} is empty after a drain"
            assert waiting <= {"norm"}, f"stage {s} is empty after a drain"


def check_close(actual, expected, tolerance: float = 1e-12) -> None:
    """Check that two trees have equal structure, shapes and dtypes, and values equal up to float64 rounding."""
    actual, expected = jax.tree.map(_plain, actual), jax.tree.map(_plain, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_equal(actual, expected) -> None:
    """Check that two trees have equal structure, shapes, dtypes and values."""
    actual, expected = jax.tree.map(_plain, actual), jax.tree.map(_plain, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)  # for values bfloat16 is float32 to chex, strict or not
    chex.assert_trees_all_equal(actual, expected)


def _plain(leaf):
    is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if is_key:
        return jax.random.key_data(leaf)
    return leaf if hasattr(leaf, "shape") else np.asarray(leaf)
