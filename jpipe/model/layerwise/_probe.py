"""The probe that raises an error if an optimizer would give other numbers when it is applied layer by layer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe.errors import InputError, callers_code, cause, shortened
from jpipe.model._layer import untrainable
from jpipe.model._subset import Subset
from jpipe.model._ties import NO_TIES, ModelTree, Ties
from jpipe.model.layerwise._of_model import Coupled, model_optimizer, names_of, one_slice, traced_in, tree_by_id, whole_specs
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer, masters_of
from jpipe.model.layerwise._trace_optimizer import (
    TracedOptimizer,
    frozen_leaves,
    has_momentum,
    read_position,
    used_while_frozen,
)
from jpipe.model.layerwise._transformation import constructors_of, instead_of, instead_of_slices, unfit_mask
from jpipe.model.layerwise._trial import slice_difference

Tree = Any

_BLOCKS_TOGETHER = "it computes with all blocks together, which the model stacks in one array"


def find_layerwise(
    transformation: Any,
    specs: Mapping[str, Tree],
    has_masters: bool = False,
    ties: Ties | None = None,
    predicts: bool = False,
    num_stages: int | None = None,
    tree: ModelTree | None = None,
) -> LayerwiseOptimizer:
    """Return the optimizer for use layer by layer; raise an error if this would change its numbers.

    The optimizer is traced for the whole model. No layer's update or state may depend on the gradient, the parameters or the state of
    another layer, at any step. Each layer then evaluates its part of the trace. If the optimizer fails on the model's structure, this is an
    error, too.

    The trace also shows which parameters are frozen: their update is always zero. They get no gradients and no optimizer state, unless the
    updates of other parameters depend on them. Parameters also count as frozen if their updates are multiplied by a constant zero.

    Args:
        transformation: the user's optimizer.
        specs: the shapes of all parameters by layer id.
        has_masters: whether the optimizer updates masters in float32 for parameters of any dtype.
        ties: the shared parameters, or None; each is updated as a separate entry.
        predicts: whether delays will be corrected by prediction (`delay_factor`), which needs momentum.
        num_stages: the number of stages, or None; an optimizer such as `jpipe.optimizers.per_stage` checks it.
        tree: the parameter tree of the model, if the layers were cut from a whole model. The optimizer is traced on this tree. If it fails
            there, for example because its masks go by layer id, it is traced on a dict by layer id.

    Raises:
        InputError: a layer depends on another one (the message names both and what to use instead); or the optimizer has no momentum, but
            `predicts` is set.
    """
    ties = NO_TIES if ties is None else ties
    if not isinstance(transformation, optax.GradientTransformation):
        change = "call its .gradient_transformation()" if isinstance(transformation, optax.MultiSteps) else ""
        expected = "an optax.GradientTransformation, such as optax.adam(1e-3)"
        raise InputError(where="optimizer", expected=expected, found=type(transformation).__name__, change=change)
    specs = jax.eval_shape(masters_of, dict(specs)) if has_masters else specs
    failure, own = partial(_failure, transformation, specs), tree
    if tree is not None:
        try:
            structure, traced = traced_in(transformation, tree, specs, num_stages)
        except Exception as error:  # the reason may be masks or labels by layer id
            failure, tree = partial(_failure_in_tree, transformation, tree, specs, error), None
    if tree is None:
        specs = ties.without_seconds(specs)
        tree = tree_by_id(specs)
        with callers_code(failure):
            structure, traced = traced_in(transformation, tree, specs, num_stages)
    layerwise = _find(structure, traced, transformation, tree, specs, ties, num_stages)
    if own is not None and own is not tree and own.axes() and _differs_by_layer(transformation, traced, own, specs, ties):
        raise _not_layerwise(_BLOCKS_TOGETHER, transformation, in_slices=True)
    if predicts and layerwise.trained.has_any(specs):
        _check_correction(transformation, traced)
    return replace(layerwise, has_masters=has_masters)


def _find(
    structure: Any,
    traced: TracedOptimizer,
    transformation: optax.GradientTransformation,
    tree: ModelTree,
    specs: Mapping[str, Tree],
    ties: Ties,
    num_stages: int | None,
) -> LayerwiseOptimizer:
    """Return the optimizer of a tree of parameters; each entry evaluates its part. See `find_layerwise`, also for errors.

    If blocks are stacked in one array, updates of single slices must equal the update of the whole array. So the traced equations must not
    depend on the number of blocks, and a trial on tiny arrays must give equal numbers.
    """
    axes, sliced, names = tree.axes(), whole_specs(tree, specs, sliced=True), _names_in(tree, ties, structure)
    frozen = frozen_leaves(traced)
    if (untrained := _untrainable(structure.unflatten(sliced), frozen)) is not None:
        raise untrained
    used = used_while_frozen(traced, frozen)
    flags = ties.parts(jax.tree.map(lambda place: not frozen[place.number] or used[place.number], dict(tree.layers)))
    by_entry = {entry: tuple(jax.tree.leaves(part)) for entry, part in flags.items()}
    trained = Subset({entry: leaves for entry, leaves in by_entry.items() if not all(leaves)})
    try:
        traced = one_slice(transformation, structure, sliced, num_stages, traced) if axes else traced
        of_model = model_optimizer(traced, tree, sliced, ties, trained, names)
    except Coupled as reason:
        raise _not_layerwise(str(reason), transformation, _counted(traced, names, frozen), in_slices=reason.in_slices) from None
    if axes and slice_difference(transformation, traced, structure, sliced, axes, tree.shapes, keeps_axes=True):
        raise _not_layerwise(_BLOCKS_TOGETHER, transformation, in_slices=True)
    return LayerwiseOptimizer(transformation, of_model, used=read_position(traced), trained=trained)


def _names_in(tree: ModelTree, ties: Ties, structure: Any) -> list[str]:
    """Return for each leaf of a model's tree its name in messages."""
    paths = jax.tree_util.tree_flatten_with_path(structure.unflatten(range(len(tree.shapes))))[0]
    owners = {place.number: layer_id for layer_id, part in ties.without_seconds(tree.layers).items() for place in jax.tree.leaves(part)}
    stacked = {number: f"the stacked parameter '{'/'.join(names_of(paths[number][0]))}'" for number in tree.axes()}
    return [stacked.get(number, f"layer '{owners[number]}'") for number in range(len(paths))]


def _differs_by_layer(
    transformation: optax.GradientTransformation, traced: TracedOptimizer, tree: ModelTree, specs: Mapping[str, Tree], ties: Ties
) -> bool:
    """Return whether masks or labels by layer id make an optimizer update slices of stacked arrays differently from whole arrays."""
    flat, structure = jax.tree.flatten(dict(specs))
    places = jax.tree.leaves(ties.without_seconds(tree.layers))
    axes = {number: place.axes for number, place in enumerate(places) if place.axes}
    sliced = (np.expand_dims(np.broadcast_to(0, spec.shape), axes.get(number, ())).shape for number, spec in enumerate(flat))
    stacked = [jax.ShapeDtypeStruct(shape, spec.dtype) for shape, spec in zip(sliced, flat, strict=True)]
    shapes = [tree.shapes[place.number] for place in places]
    return slice_difference(transformation, traced, structure, stacked, axes, shapes, keeps_axes=False)


def _untrainable(specs: Tree, frozen: Sequence[bool] | None = None) -> InputError | None:
    """Return the error for the first trained parameter that is not floating point, or None. Without `frozen`, all are trained."""
    leaves = jax.tree_util.tree_flatten_with_path(specs)[0]
    for (path, leaf), is_frozen in zip(leaves, frozen or [False] * len(leaves), strict=True):
        if not is_frozen and not jnp.issubdtype(leaf.dtype, jnp.floating):
            return untrainable(f"{path[0].key}{jax.tree_util.keystr(path[1:])}", leaf.dtype)
    return None


def _failure(transformation: optax.GradientTransformation, specs: Mapping[str, Tree], error: BaseException) -> str:
    """Return the message for an optimizer that fails on the model's structure."""
    if words := unfit_mask(transformation, specs):
        return f"optimizer: a mask (or labels) in the form of a tree does not fit the model: {words}"
    if (reason := _untrainable(dict(specs))) is not None:
        return str(reason)
    instead = instead_of(transformation)
    return (
        f"optimizer: it fails on parameters in the model's structure, {{'{next(iter(specs))}': params, …}}: "
        f"{cause(error)}; masks and labels given as trees need this structure, and an optimizer that needs "
        f"more than gradients, state and params (a loss value, a function) cannot be used{f'; instead: {instead}' if instead else ''}"
    )


def _failure_in_tree(
    transformation: optax.GradientTransformation, tree: ModelTree, specs: Mapping[str, Tree], first: BaseException, error: BaseException
) -> str:
    """Return the message for an optimizer that fails on the model's own tree (`first`) and on a dict by layer id (`error`)."""
    own = tree.structures[0].unflatten(whole_specs(tree, specs))
    if isinstance(own, Mapping) and (words := unfit_mask(transformation, own)):
        return f"optimizer: a mask (or labels) in the form of a tree does not fit the model's own tree of parameters: {words}"
    if instead_of(transformation) or not isinstance(own, Mapping):
        return _failure(transformation, specs, first)
    return (
        f"optimizer: it fails on the model's own tree of parameters, with the keys {shortened([*map(repr, own)])}: {cause(first)}; masks "
        "and labels given as trees need this structure"
    )


def _check_correction(transformation: optax.GradientTransformation, traced: TracedOptimizer) -> None:
    """Check that delays can be corrected: the optimizer must have momentum, update after each batch, and not predict itself."""
    constructors = constructors_of(transformation)
    if "MultiSteps" in constructors:
        raise InputError(
            "optimizer: delay_correction assumes that every batch makes an update, found optax.MultiSteps; use more microbatches instead"
        )
    if "predict_delay" in constructors:
        raise InputError("optimizer: it already has a predict_delay; remove this, or delay_correction")
    if not has_momentum(traced):
        raise InputError(
            "optimizer: delay_correction needs momentum, found an optimizer that uses only the newest gradient; without "
            "momentum the prediction makes training less stable: remove delay_correction, or use momentum, as in "
            "optax.sgd(…, momentum=0.9) or optax.adamw(…)"
        )


def _not_layerwise(why: str, transformation: optax.GradientTransformation, more: str = "", *, in_slices: bool = False) -> InputError:
    advice = (instead_of_slices(transformation) if in_slices else instead_of(transformation)) or (
        "leave out the part that uses all layers at once (a norm over all layers, a step size from all gradients, noise from one key)"
    )
    return InputError(f"optimizer: it cannot be applied layer by layer, as stages of a pipeline require: {why}; instead: {advice}{more}")


def _counted(traced: TracedOptimizer, names: Sequence[str], frozen: Sequence[bool]) -> str:
    """Return a remark for the error if updates depend on the gradients of frozen parameters, or an empty string."""
    counted = next((name for name, used in zip(names, used_while_frozen(traced, frozen), strict=True) if used), None)
    if counted is None:
        return ""
    return (
        f"; the pipeline counts only the gradients of trained parameters, but this optimizer also counts frozen ones, as in {counted}, so "
        "the updates differ; to get equal updates, clip inside optax.partition"
    )
