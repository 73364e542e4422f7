"""The probe that raises an error for an optimizer whose numbers change when it is applied layer by layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jpipe.errors import InputError, callers_code, cause
from jpipe.model._layer import untrainable
from jpipe.model._subset import EVERYTHING, Subset
from jpipe.model._ties import NO_TIES, Ties
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer, entries_of, masters_of, optax_promotion, with_structure
from jpipe.model.layerwise._trace import (
    TracedOptimizer,
    coupled_layers,
    frozen_leaves,
    position_spec,
    read_position,
    trace_optimizer,
    used_while_frozen,
)
from jpipe.model.layerwise._transformation import constructors_of, instead_of, unfit_mask
from jpipe.model.layerwise._trial import difference, has_momentum, sample_layers, tiny_array

Tree = Any


def find_layerwise(
    transformation: Any,
    specs: Mapping[str, Tree],
    has_masters: bool = False,
    ties: Ties | None = None,
    predicts: bool = False,
    num_stages: int | None = None,
) -> LayerwiseOptimizer:
    """Return the optimizer for use layer by layer; raise an error where that would change its numbers.

    Two tests must pass. The update of the whole model is traced: no layer's update may depend on the gradient, the
    parameters or the state of another layer, at any step. Then it runs on tiny arrays, whole and layer by layer, for a few steps with
    gradients from 1e-6 to 1e6, another size for each layer at each step, later with one layer NaN: updates and states must agree.
    An optimizer that fails on the model's structure raises it, too.

    The trace also shows the frozen parameters, whose update is always zero. The layers run without them, unless the updates of other
    parameters depend on them. A factor of zero freezes, too.

    Args:
        transformation: of the user.
        specs: shapes of all parameters by layer id.
        has_masters: whether it updates parameters in float32 whatever their dtype is.
        ties: the shared parameters, if there are any; they are updated by themselves.
        predicts: whether delays will be corrected by prediction (`delay_factor`), which needs momentum.
        num_stages: the number of stages, if it is known, for an optimizer that checks it, as `jpipe.optimizers.per_stage` does.

    Raises:
        InputError: says which layer depends on which, or differs first, and what to use instead; or the optimizer has no momentum.
    """
    ties = NO_TIES if ties is None else ties
    if not isinstance(transformation, optax.GradientTransformation):
        hint = "; call its .gradient_transformation()" if isinstance(transformation, optax.MultiSteps) else ", such as optax.adam(1e-3)"
        raise InputError(f"optimizer: expected an optax.GradientTransformation, found {type(transformation).__name__}{hint}")
    specs = ties.without_seconds(jax.eval_shape(masters_of, dict(specs)) if has_masters else specs)
    with callers_code(partial(_failure, transformation, specs)):
        traced = trace_optimizer(transformation, specs, num_stages)
    frozen = frozen_leaves(traced, specs)
    if (error := _untrainable(specs, frozen)) is not None:
        raise error
    if (coupled := coupled_layers(traced, specs)) is not None:
        raise _not_layerwise(
            "the update of layer '{}' depends on layer '{}'".format(*coupled), transformation, _counted(traced, specs, frozen)
        )
    trained = _trained(ties, specs, [leaf and not used for leaf, used in zip(frozen, used_while_frozen(traced, frozen), strict=True)])
    blank = {layer_id: jax.tree.map(lambda _: optax.MaskedNode(), tree) for layer_id, tree in specs.items()}
    first = LayerwiseOptimizer(transformation, {}, accepted=traced.position, used=read_position(traced))
    parts = (trained,) if trained.is_all else (trained, EVERYTHING)  # some mask may look at parameters that are not there
    candidates = [replace(first, blank=layers, trained=part) for part in parts for layers in ({}, blank)]
    with optax_promotion(), jax.debug_nans(False), jax.transfer_guard("allow"):
        tiny = {i: jax.tree.map(tiny_array, specs[i]) for i in sample_layers([i for i in specs if jax.tree.leaves(specs[i])])}
        for layerwise in candidates:
            if not (reason := difference(layerwise, blank, tiny, ties)):
                break
        else:
            raise _not_layerwise(reason, transformation)
    _check_without_parameters(layerwise, specs)
    if predicts and trained.has_any(specs):
        _check_correction(layerwise, blank, tiny)
    return replace(layerwise, has_masters=has_masters, structured=_placers(ties, specs, layerwise.trained))


def _untrainable(specs: Mapping[str, Tree], frozen: Sequence[bool] | None = None) -> InputError | None:
    """Return the error for the first trained parameter that is not floating point, if there is one; without `frozen` all are trained."""
    leaves = jax.tree_util.tree_flatten_with_path(dict(specs))[0]
    for (path, leaf), is_frozen in zip(leaves, frozen or [False] * len(leaves), strict=True):
        if not is_frozen and not jnp.issubdtype(leaf.dtype, jnp.floating):
            return untrainable(f"{path[0].key}{jax.tree_util.keystr(path[1:])}", leaf.dtype)
    return None


def _failure(transformation: optax.GradientTransformation, specs: Mapping[str, Tree], error: BaseException) -> str:
    """Return the message for an optimizer that fails on the model's structure."""
    if words := unfit_mask(transformation, specs):
        return f"optimizer: a mask (or labels) in the form of a tree does not fit the model: {words}"
    if (reason := _untrainable(specs)) is not None:
        return str(reason)
    instead = instead_of(transformation)
    return (
        f"optimizer: it fails on parameters in the model's structure, {{'{next(iter(specs))}': params, …}}: "
        f"{cause(error)}; masks and labels given as trees need that structure, and an optimizer whose update needs "
        f"more than gradients, state and params (a loss value, a function) cannot be used{f'; instead: {instead}' if instead else ''}"
    )


def _check_correction(layerwise: LayerwiseOptimizer, blank: Mapping[str, Tree], tiny: Mapping[str, Tree]) -> None:
    """Check that delays can be corrected: that the optimizer has momentum, and makes each update from one batch and without prediction."""
    constructors = constructors_of(layerwise.transformation)
    if "MultiSteps" in constructors:
        raise InputError(
            "optimizer: delay_correction assumes that every batch makes an update, found optax.MultiSteps; use more microbatches instead"
        )
    if "predict_delay" in constructors:
        raise InputError("optimizer: it has a predict_delay already; leave that out, or delay_correction")
    with optax_promotion(), jax.debug_nans(False), jax.transfer_guard("allow"):
        if has_momentum(layerwise, blank, tiny):
            return
    raise InputError(
        "optimizer: delay_correction needs momentum, found an optimizer whose updates depend on the newest gradient only; without momentum "
        "the prediction makes training less stable: leave it out, or use momentum, as optax.sgd(…, momentum=0.9) or optax.adamw(…) do"
    )


def _placers(ties: Ties, specs: Mapping[str, Tree], trained: Subset) -> dict[str, Callable[[Tree], tuple[str, Tree]]]:
    """Return the field `structured` of a `LayerwiseOptimizer`."""
    concerned = {layer_id: specs[layer_id] for layer_id in specs if layer_id in ties.shared or layer_id in trained.chosen}

    def placer(layer_id: str, like: Tree) -> Callable[[Tree], tuple[str, Tree]]:
        return lambda tree: (layer_id, with_structure(like, tree))

    return {entry: placer(*next(iter(part.items()))) for entry, part in entries_of(ties, concerned, trained).items()}


def _trained(ties: Ties, specs: Mapping[str, Tree], frozen: Sequence[bool]) -> Subset:
    """Return the trained parameters, by entry."""
    flags = jax.tree.unflatten(jax.tree.structure(dict(specs)), [not is_frozen for is_frozen in frozen])
    by_entry = {entry: tuple(jax.tree.leaves(part)) for entry, part in ties.parts(flags).items()}
    return Subset({entry: leaves for entry, leaves in by_entry.items() if not all(leaves)})


def _not_layerwise(why: str, transformation: optax.GradientTransformation, more: str = "") -> InputError:
    advice = instead_of(transformation) or (
        "leave out the part that looks at all layers at once (a norm over all of them, a step size from all gradients, noise from one key)"
    )
    return InputError(f"optimizer: it cannot be applied layer by layer, as stages of a pipeline have to: {why}; instead: {advice}{more}")


def _counted(traced: TracedOptimizer, specs: Mapping[str, Tree], frozen: Sequence[bool]) -> str:
    """Return a remark for the error where updates depend on the gradients of frozen parameters, or an empty string."""
    ids = [layer_id for layer_id in sorted(specs) for _ in jax.tree.leaves(specs[layer_id])]
    counted = next((layer_id for layer_id, used in zip(ids, used_while_frozen(traced, frozen), strict=True) if used), None)
    if counted is None:
        return ""
    return (
        f"; the pipeline counts the gradients of trained parameters alone, while this optimizer also counts those of frozen ones, as in "
        f"layer '{counted}', and gives other updates: to compare both, clip inside optax.partition"
    )


def _check_without_parameters(layerwise: LayerwiseOptimizer, specs: Mapping[str, Tree]) -> None:
    """Check that the optimizer accepts a layer without parameters, if the model has one."""

    def message(error: BaseException) -> str:
        return f"optimizer: it fails on layer '{bare}', which has no parameters: {cause(error)}; join that layer to one that has some"

    bare = next((layer_id for layer_id, tree in specs.items() if not jax.tree.leaves(tree)), None)
    if bare is not None:
        with callers_code(message):
            position = position_spec(layerwise.used)
            jax.eval_shape(
                lambda params, at: layerwise.update(bare, params, layerwise.init(bare, params), params, 1.0, at), specs[bare], position
            )
