"""The probe that raises an error for an optimizer whose numbers change when it is applied layer by layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe.errors import InputError, callers_code, cause, shortened
from jpipe.model._layer import untrainable
from jpipe.model._subset import EVERYTHING, Subset
from jpipe.model._ties import NO_TIES, ModelTree, Ties
from jpipe.model.layerwise._of_model import Coupled, model_optimizer, names_of, one_slice, traced_in, whole_specs
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer, masters_of, with_structure
from jpipe.model.layerwise._trace import (
    TracedOptimizer,
    coupled_layers,
    frozen_leaves,
    optax_promotion,
    position_spec,
    read_position,
    read_state,
    trace_optimizer,
    used_while_frozen,
)
from jpipe.model.layerwise._transformation import constructors_of, instead_of, instead_of_slices, unfit_mask
from jpipe.model.layerwise._trial import difference, has_momentum, sample_layers, slice_difference, tiny_array

Tree = Any


def find_layerwise(
    transformation: Any,
    specs: Mapping[str, Tree],
    has_masters: bool = False,
    ties: Ties | None = None,
    predicts: bool = False,
    num_stages: int | None = None,
    tree: ModelTree | None = None,
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
        tree: of the model that the layers were cut from, if they were: the optimizer is traced for it, see `_find_in_tree`.

    Raises:
        InputError: says which layer depends on which, or differs first, and what to use instead; or the optimizer has no momentum.
    """
    ties = NO_TIES if ties is None else ties
    if not isinstance(transformation, optax.GradientTransformation):
        hint = "; call its .gradient_transformation()" if isinstance(transformation, optax.MultiSteps) else ", such as optax.adam(1e-3)"
        raise InputError(f"optimizer: expected an optax.GradientTransformation, found {type(transformation).__name__}{hint}")
    specs = jax.eval_shape(masters_of, dict(specs)) if has_masters else specs
    failure = partial(_failure, transformation, specs)
    if tree is not None:
        try:
            structure, traced = traced_in(transformation, tree, specs, num_stages)
        except Exception as error:  # perhaps because of masks or labels by layer id
            failure = partial(_failure_in_tree, transformation, tree, specs, error)
        else:
            layerwise = _find_in_tree(structure, traced, transformation, tree, specs, ties, num_stages)
            with optax_promotion():
                tiny = structure.unflatten(map(tiny_array, whole_specs(tree, specs, sliced=True)))
            return _finished(layerwise, specs, tiny, {}, has_masters, predicts)
    specs = ties.without_seconds(specs)
    with callers_code(failure):
        traced = trace_optimizer(transformation, specs, num_stages)
    blank = {layer_id: jax.tree.map(lambda _: optax.MaskedNode(), params) for layer_id, params in specs.items()}
    with optax_promotion(), jax.debug_nans(False), jax.transfer_guard("allow"):
        tiny = {i: jax.tree.map(tiny_array, specs[i]) for i in sample_layers([i for i in specs if jax.tree.leaves(specs[i])])}
        layerwise = _find_by_layer(traced, transformation, specs, tiny, blank, ties)
    _check_without_parameters(layerwise, specs)
    if tree is not None and tree.axes():
        _check_slices_by_layer(layerwise, traced, tree, specs, ties)
    return _finished(layerwise, specs, tiny, blank, has_masters, predicts)


def _finished(
    layerwise: LayerwiseOptimizer, specs: Mapping[str, Tree], tiny: Tree, blank: Mapping[str, Tree], has_masters: bool, predicts: bool
) -> LayerwiseOptimizer:
    """Return the optimizer with masters if it `has_masters`, after the check that delays can be corrected; see `find_layerwise`."""
    if predicts and layerwise.trained.has_any(specs):
        _check_correction(layerwise, tiny, blank)
    return replace(layerwise, has_masters=has_masters)


def _find_by_layer(
    traced: TracedOptimizer,
    transformation: optax.GradientTransformation,
    specs: Mapping[str, Tree],
    tiny: Mapping[str, Tree],
    blank: Mapping[str, Tree],
    ties: Ties,
) -> LayerwiseOptimizer:
    """Return the optimizer of layers by layer id, alone or in the structure of all layers; see `find_layerwise`.

    Args:
        traced: the optimizer, for all layers.
        transformation, ties: as in `find_layerwise`.
        specs: shapes of all parameters by layer id, with masked nodes in second places.
        tiny: arrays like the parameters of some layers.
        blank: the structure of all layers.

    Raises:
        InputError: as `find_layerwise`.
    """
    frozen = frozen_leaves(traced)
    if (untrained := _untrainable(specs, frozen)) is not None:
        raise untrained
    if (coupled := coupled_layers(traced, specs)) is not None:
        names = [f"layer '{layer_id}'" for layer_id in sorted(specs) for _ in jax.tree.leaves(specs[layer_id])]
        raise _not_layerwise(
            "the update of layer '{}' depends on layer '{}'".format(*coupled), transformation, _counted(traced, names, frozen)
        )
    used = used_while_frozen(traced, frozen)
    flags = [not is_frozen or is_used for is_frozen, is_used in zip(frozen, used, strict=True)]
    trained = _trained(ties, jax.tree.unflatten(jax.tree.structure(dict(specs)), flags))
    first = LayerwiseOptimizer(transformation, {}, accepted=traced.position, used=read_position(traced))
    parts = (trained,) if trained.is_all else (trained, EVERYTHING)  # some mask may look at parameters that are not there
    reason = ""
    for layerwise in (replace(first, blank=layers, trained=part) for part in parts for layers in ({}, blank)):
        if not (reason := difference(layerwise, blank, tiny, ties)):
            return replace(layerwise, structured=_placers(ties, specs, layerwise.trained))
    raise _not_layerwise(reason, transformation)


def _find_in_tree(
    structure: Any,
    traced: TracedOptimizer,
    transformation: optax.GradientTransformation,
    tree: ModelTree,
    specs: Mapping[str, Tree],
    ties: Ties,
    num_stages: int | None,
) -> LayerwiseOptimizer:
    """Return the optimizer of a model's own tree, of which each entry evaluates its part.

    No entry's update may depend on another entry. Where blocks are stacked in one array, updates of single slices must equal those of the
    whole array: its traced equations must not depend on the number of blocks, and a trial on tiny arrays must give equal numbers.

    Args:
        structure, traced: from `traced_in`.
        transformation, tree, specs, ties, num_stages: as in `find_layerwise`.

    Raises:
        InputError: as `find_layerwise`.
    """
    axes, sliced, names = tree.axes(), whole_specs(tree, specs, sliced=True), _names_in(tree, ties, structure)
    frozen = frozen_leaves(traced)
    used = used_while_frozen(traced, frozen)
    trained = _trained(ties, jax.tree.map(lambda place: not frozen[place.number] or used[place.number], dict(tree.layers)))
    try:
        traced = one_slice(transformation, structure, sliced, num_stages, traced) if axes else traced
        of_model = model_optimizer(traced, tree, sliced, ties, trained, names)
    except Coupled as reason:
        raise _not_layerwise(str(reason), transformation, _counted(traced, names, frozen), in_slices=reason.in_slices) from None
    used_position = read_position(traced)
    found = LayerwiseOptimizer(transformation, {}, accepted=traced.position, used=used_position, trained=trained, of_model=of_model)
    if axes:
        _check_slices(found, traced, structure, sliced, axes, tree.shapes, keeps_axes=True)
    return found


def _names_in(tree: ModelTree, ties: Ties, structure: Any) -> list[str]:
    """Return what each leaf of a model's tree is called in messages."""
    paths = jax.tree_util.tree_flatten_with_path(structure.unflatten(tree.shapes), is_leaf=lambda leaf: isinstance(leaf, tuple))[0]
    owners = {place.number: layer_id for layer_id, part in ties.without_seconds(tree.layers).items() for place in jax.tree.leaves(part)}
    stacked = {number: f"the stacked parameter '{'/'.join(names_of(paths[number][0]))}'" for number in tree.axes()}
    return [stacked.get(number, f"layer '{owners[number]}'") for number in range(len(paths))]


def _check_slices_by_layer(
    layerwise: LayerwiseOptimizer, traced: TracedOptimizer, tree: ModelTree, specs: Mapping[str, Tree], ties: Ties
) -> None:
    """Check that an optimizer with masks or labels by layer id updates slices of stacked arrays as it updates these arrays."""
    flat, structure = jax.tree.flatten(dict(specs))
    places = jax.tree.leaves(ties.without_seconds(tree.layers))
    axes = {number: place.axes for number, place in enumerate(places) if place.axes}
    sliced = (np.expand_dims(np.broadcast_to(0, spec.shape), axes.get(number, ())).shape for number, spec in enumerate(flat))
    stacked = [jax.ShapeDtypeStruct(shape, spec.dtype) for shape, spec in zip(sliced, flat, strict=True)]
    _check_slices(layerwise, traced, structure, stacked, axes, [tree.shapes[place.number] for place in places], keeps_axes=False)


def _check_slices(
    layerwise: LayerwiseOptimizer,
    traced: TracedOptimizer,
    structure: Any,
    specs: Sequence[Any],
    axes: Mapping[int, tuple[int, ...]],
    shapes: Sequence[tuple[int, ...]],
    *,
    keeps_axes: bool,
) -> None:
    """Check by a trial that slices of stacked arrays are updated one by one as in these arrays; see `slice_difference`."""
    with optax_promotion(), jax.debug_nans(False), jax.transfer_guard("allow"):
        if not slice_difference(layerwise, structure, specs, axes, shapes, read_state(traced), keeps_axes):
            return
    raise _not_layerwise(
        "it computes with all blocks together, which the model stacks in one array", layerwise.transformation, in_slices=True
    )


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


def _failure_in_tree(
    transformation: optax.GradientTransformation, tree: ModelTree, specs: Mapping[str, Tree], first: BaseException, error: BaseException
) -> str:
    """Return the message for an optimizer that fails on the model's own tree and on layers by layer id, from both exceptions."""
    own = tree.structures[0].unflatten(whole_specs(tree, specs))
    if isinstance(own, Mapping) and (words := unfit_mask(transformation, own)):
        return f"optimizer: a mask (or labels) in the form of a tree does not fit the model's own tree of parameters: {words}"
    if instead_of(transformation) or not isinstance(own, Mapping):
        return _failure(transformation, specs, first)
    return (
        f"optimizer: it fails on the model's own tree of parameters, with the keys {shortened([*map(repr, own)])}: {cause(first)}; masks "
        "and labels given as trees need that structure"
    )


def _check_correction(layerwise: LayerwiseOptimizer, tiny: Tree, blank: Mapping[str, Tree]) -> None:
    """Check that delays can be corrected: that the optimizer has momentum, and makes each update from one batch and without prediction."""
    constructors = constructors_of(layerwise.transformation)
    if "MultiSteps" in constructors:
        raise InputError(
            "optimizer: delay_correction assumes that every batch makes an update, found optax.MultiSteps; use more microbatches instead"
        )
    if "predict_delay" in constructors:
        raise InputError("optimizer: it has a predict_delay already; leave that out, or delay_correction")
    with optax_promotion(), jax.debug_nans(False), jax.transfer_guard("allow"):
        if has_momentum(layerwise, tiny, blank):
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

    return {entry: placer(*next(iter(part.items()))) for entry, part in ties.parts(concerned, trained).items()}


def _trained(ties: Ties, flags: Mapping[str, Tree]) -> Subset:
    """Return the trained parameters, by entry, from flags by layer id."""
    by_entry = {entry: tuple(jax.tree.leaves(part)) for entry, part in ties.parts(flags).items()}
    return Subset({entry: leaves for entry, leaves in by_entry.items() if not all(leaves)})


def _not_layerwise(why: str, transformation: optax.GradientTransformation, more: str = "", *, in_slices: bool = False) -> InputError:
    advice = (instead_of_slices(transformation) if in_slices else instead_of(transformation)) or (
        "leave out the part that looks at all layers at once (a norm over all of them, a step size from all gradients, noise from one key)"
    )
    return InputError(f"optimizer: it cannot be applied layer by layer, as stages of a pipeline have to: {why}; instead: {advice}{more}")


def _counted(traced: TracedOptimizer, names: Sequence[str], frozen: Sequence[bool]) -> str:
    """Return a remark for the error where updates depend on the gradients of frozen parameters, or an empty string."""
    counted = next((name for name, used in zip(names, used_while_frozen(traced, frozen), strict=True) if used), None)
    if counted is None:
        return ""
    return (
        f"; the pipeline counts the gradients of trained parameters alone, while this optimizer also counts those of frozen ones, as in "
        f"{counted}, and gives other updates: to compare both, clip inside optax.partition"
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
                lambda params, at: layerwise.update(bare, params, layerwise.init(bare, params), params, at), specs[bare], position
            )
