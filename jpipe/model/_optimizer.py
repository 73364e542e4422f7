"""An optax optimizer applied to each layer by itself, and the probe that refuses one that would give other numbers that way."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import jaxpr_as_fun

from jpipe.errors import InputError, callers_code, cause
from jpipe.model._precision import wider
from jpipe.model._subset import EVERYTHING, Subset
from jpipe.model._ties import NO_TIES, Ties
from jpipe.model._transformation import instead_of, unfit_mask
from jpipe.model.jaxprs._dependence import always_zero, passed_on, reached
from jpipe.model.jaxprs._wanted import without_effects

Tree = Any


class Averaged(NamedTuple):
    """The state of one layer where its weights are averaged.

    Attributes:
        optimizer: what the transformation keeps.
        weights_ema: the average of the weights, in float32 for weights of lower precision.
    """

    optimizer: Tree
    weights_ema: Tree


class WithMasters(NamedTuple):
    """The optimizer state of a layer whose parameters are kept in fewer bits: the parameters in float32, and the state that is theirs."""

    masters: Tree
    state: Tree


def masters_of(params: Tree) -> Tree:
    """Parameters in float32, or wider where they are."""
    return jax.tree.map(lambda p: p.astype(wider(p.dtype, jnp.float32)), params)


@dataclass(frozen=True)
class LayerwiseOptimizer:
    """An optax transformation that is given one layer at a time, as `{layer id: params}`, without the parameters that it never changes.

    Attributes:
        transformation: any optax transformation; `find_layerwise` says whether it may be used like this.
        blank: empty; or all layers by layer id, with `optax.MaskedNode()` in place of every leaf, which holds no arrays and which optax
            itself uses for what a transformation is not to see. Then the layer stands in the structure of the whole model, which
            masks and labels that were given as trees need.
        has_masters: whether the state is a `WithMasters`, whose masters are updated and then cast to the parameters' dtypes.
        ema_decay: keep an exponential moving average of the weights, or of the masters, with this decay.
        trained: the parameters that updates change, by entry (see `Ties`). Of the others, which are frozen, there are no gradients and
            no optimizer state. A layer of which all are frozen has none of either.
        structured: for shared parameters, and for layers with shared or frozen ones, (layer id, tree of that layer) from their arrays.
    """

    transformation: optax.GradientTransformation
    blank: Mapping[str, Tree]
    has_masters: bool = False
    ema_decay: float | None = None
    trained: Subset = EVERYTHING
    structured: Mapping[str, Callable[[Tree], tuple[str, Tree]]] = field(default_factory=dict)

    def init(self, layer_id: str, params: Tree) -> Tree:
        """The optimizer state of one layer, from its trained parameters."""
        if self.has_masters:
            masters = masters_of(params)
            return WithMasters(masters, self._without_masters.init(layer_id, masters))
        with _optax_promotion():
            state = () if self.trained.excludes(layer_id) else self.transformation.init(self._placed(layer_id, params)[1])
            return state if self.ema_decay is None else Averaged(state, jax.tree.map(_precise_copy, params))

    def update(self, layer_id: str, gradient: Tree, state: Tree, params: Tree, scale: float = 1.0) -> tuple[Tree, Tree]:
        """(new parameters, new optimizer state) of the trained parameters of one layer; the updates are multiplied by `scale`."""
        if self.trained.excludes(layer_id):
            return params, state
        if self.has_masters:
            masters, inner = self._without_masters.update(layer_id, gradient, state.state, state.masters, scale)
            return jax.tree.map(lambda p, master: master.astype(p.dtype), params, masters), WithMasters(masters, inner)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
        state, average = (state, None) if self.ema_decay is None else state
        with _optax_promotion():
            place, placed = self._placed(layer_id, params)
            updates, state = self.transformation.update(self._placed(layer_id, gradient)[1], state, placed)
            own = updates[place] if scale == 1.0 else jax.tree.map(lambda u: u * scale, updates[place])
            params = _as(params, optax.apply_updates(placed[place], own))
        return params, state if average is None else Averaged(state, self._moved(average, params))

    def average(self, state: Tree) -> Tree:
        """The average of the weights that the state of a layer holds; needs `ema_decay`."""
        return (state.state if self.has_masters else state).weights_ema

    def _placed(self, entry: str, tree: Tree) -> tuple[str, dict[str, Tree]]:
        """(layer id, what the transformation sees) of the arrays of a layer or a shared parameter."""
        layer_id, own = self.structured[entry](tree) if entry in self.structured else (entry, tree)
        return layer_id, {**self.blank, layer_id: own}

    @property
    def _without_masters(self) -> "LayerwiseOptimizer":
        return replace(self, has_masters=False)

    def _moved(self, average: Tree, params: Tree) -> Tree:
        """The average after an update to `params`."""
        decay = self.ema_decay
        assert decay is not None
        return jax.tree.map(lambda mean, leaf: decay * mean + (1 - decay) * leaf.astype(mean.dtype), average, params)


def _as(like: Tree, tree: Tree) -> Tree:
    """The arrays of a tree in the structure of another one."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def _precise_copy(leaf: jax.Array) -> jax.Array:
    """In memory of its own, for the weights and their average are donated separately; at least in float32."""
    return jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32), copy=True)


@contextmanager
def _optax_promotion() -> Iterator[None]:
    """Optax's own adam mixes dtypes: strict promotion set by the user is for the user's code, not for optax's."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# The probe ------------------------------------------------------------------------------------------------------------

_UPDATES = 8  # that change something; an optimizer that accumulates over several steps makes few
_STEPS = 100  # at most
_NAN_STEP = 6
_LAYERS = 12  # that are tried, at most
_EXPONENTS = (-6, 6, 0, -3, 3)  # of the gradients' sizes; the layers take turns


def find_layerwise(
    transformation: Any, specs: Mapping[str, Tree], has_masters: bool = False, ties: Ties | None = None
) -> LayerwiseOptimizer:
    """The optimizer layer by layer, or a refusal where that would give other numbers.

    Two tests, and doubt refuses. The update of the whole model is traced: no layer's update may depend on the gradient, the
    parameters or the state of another layer, at any step. Then it runs on tiny arrays, whole and layer by layer, for a few steps with
    gradients from 1e-6 to 1e6, another size for each layer at each step, later with one layer NaN: updates and states must agree.
    An optimizer that fails on the model's structure is refused too.

    The trace also shows the frozen parameters: those whose update is zero whatever the gradients, the parameters, the state and the
    step are. The layers run without them, unless the updates of other parameters depend on them. A factor of zero freezes, too.

    Args:
        transformation: what the user gave.
        specs: shapes of all parameters by layer id.
        has_masters: whether it is to update parameters in float32 whatever their dtype is.
        ties: the shared parameters, if there are any; they are updated by themselves.

    Raises:
        InputError: says which layer depends on which, or differs first, and what to use instead.
    """
    ties = NO_TIES if ties is None else ties
    if not isinstance(transformation, optax.GradientTransformation):
        hint = "; call its .gradient_transformation()" if isinstance(transformation, optax.MultiSteps) else ", such as optax.adam(1e-3)"
        raise InputError(f"optimizer: expected an optax.GradientTransformation, found {type(transformation).__name__}{hint}")

    def message(error: BaseException) -> str:
        if words := unfit_mask(transformation, specs):
            return f"optimizer: a mask (or labels) in the form of a tree does not fit the model: {words}"
        instead = instead_of(transformation)
        return (
            f"optimizer: it fails on parameters in the model's structure, {{'{next(iter(specs))}': params, …}}: "
            f"{cause(error)}; masks and labels given as trees need that structure, and an optimizer whose update needs "
            f"more than gradients, state and params (a loss value, a function) cannot be used{f'; instead: {instead}' if instead else ''}"
        )

    specs = ties.without_seconds(jax.eval_shape(masters_of, dict(specs)) if has_masters else specs)
    with callers_code(message):
        traced = _traced(transformation, specs)
    frozen = _frozen_leaves(traced, specs)
    if (coupled := _coupled_layers(traced, specs)) is not None:
        raise _refusal("the update of layer '{}' depends on layer '{}'".format(*coupled), transformation, _counted(traced, specs, frozen))
    trained = _trained(ties, specs, [leaf and not used for leaf, used in zip(frozen, _used(traced, frozen), strict=True)])
    blank = {layer_id: jax.tree.map(lambda _: optax.MaskedNode(), tree) for layer_id, tree in specs.items()}
    candidates = [LayerwiseOptimizer(transformation, {}, trained=trained), LayerwiseOptimizer(transformation, blank, trained=trained)]
    if not trained.is_all:  # some mask may look at parameters that are not there
        candidates += [LayerwiseOptimizer(transformation, {}), LayerwiseOptimizer(transformation, blank)]
    with _optax_promotion(), jax.debug_nans(False), jax.transfer_guard("allow"):
        tiny = {layer_id: jax.tree.map(_tiny, specs[layer_id]) for layer_id in _some([i for i in specs if jax.tree.leaves(specs[i])])}
        for found in candidates:
            if not (difference := _difference(found, blank, tiny, ties)):
                break
        else:
            raise _refusal(difference, transformation)
    _check_without_parameters(found, specs)
    return replace(found, has_masters=has_masters, structured=_placers(ties, specs, found.trained))


def _placers(ties: Ties, specs: Mapping[str, Tree], trained: Subset) -> dict[str, Callable[[Tree], tuple[str, Tree]]]:
    """`LayerwiseOptimizer.structured` of a model."""
    concerned = {layer_id: specs[layer_id] for layer_id in specs if layer_id in ties.places or layer_id in trained.chosen}

    def placer(layer_id: str, like: Tree) -> Callable[[Tree], tuple[str, Tree]]:
        return lambda tree: (layer_id, _as(like, tree))

    return {entry: placer(*next(iter(part.items()))) for entry, part in _entries(ties, concerned, trained).items()}


def _entries(ties: Ties, params: Mapping[str, Tree], trained: Subset) -> dict[str, dict[str, Tree]]:
    """As `Ties.parts`, with masked nodes in the places of frozen parameters, too."""
    parts = ties.parts(params)
    if trained.is_all:
        return parts
    of_entry = {entry: jax.tree.leaves(part) for entry, part in parts.items()}
    return {entry: _without(part, trained.chosen.get(entry, (True,) * len(of_entry[entry]))) for entry, part in parts.items()}


def _without(tree: Tree, trained: tuple[bool, ...]) -> Tree:
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [leaf if own else optax.MaskedNode() for leaf, own in zip(leaves, trained, strict=True)])


def _refusal(why: str, transformation: optax.GradientTransformation, more: str = "") -> InputError:
    advice = instead_of(transformation) or (
        "leave out the part that looks at all layers at once (a norm over all of them, a step size from all gradients, noise from one key)"
    )
    return InputError(f"optimizer: it cannot be applied layer by layer, as stages of a pipeline have to: {why}; instead: {advice}{more}")


class _Traced(NamedTuple):
    """The functions of an optimizer as jaxprs, for the whole model.

    Attributes:
        init: parameters -> state.
        update: gradients, state, parameters -> updates, state.
        of_parameter: for each leaf of the state whether it belongs to a parameter, as its path says.
    """

    init: Any
    update: Any
    of_parameter: list[bool]


def _traced(transformation: optax.GradientTransformation, specs: Mapping[str, Tree]) -> _Traced:
    with _optax_promotion():
        init, state = jax.make_jaxpr(transformation.init, return_shape=True)(dict(specs))
        update, (_, after) = jax.make_jaxpr(transformation.update, return_shape=True)(dict(specs), state, dict(specs))
    _check_constant(state, after)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(dict(specs))[0]}
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    return _Traced(init, update, [any(jax.tree_util.keystr(path[i:]) in names for i in range(len(path))) for path in paths])


def _reached(traced: _Traced, marks: list[int]) -> list[int]:
    """For each leaf of the updates the marks of all leaves of gradients and parameters that it depends on, at any step."""
    of_state = reached(traced.init.jaxpr, marks)
    while True:
        results = reached(traced.update.jaxpr, [*marks, *of_state, *marks])
        of_updates, of_next = results[: len(marks)], results[len(marks) :]
        grown = [old | new for old, new in zip(of_state, of_next, strict=True)]
        if grown == of_state:
            return of_updates
        of_state = grown


def _coupled_layers(traced: _Traced, specs: Mapping[str, Tree]) -> tuple[str, str] | None:
    """A layer whose update depends on another layer, at the first step or later through the state, and that other layer."""
    ids = sorted(specs)  # as the leaves of a dict come
    marks = [1 << bit for bit, layer_id in enumerate(ids) for _ in jax.tree.leaves(specs[layer_id])]
    for own, mark in zip(marks, _reached(traced, marks), strict=True):
        if others := mark & ~own:
            return ids[own.bit_length() - 1], ids[others.bit_length() - 1]
    return None


def _frozen_leaves(traced: _Traced, specs: Mapping[str, Tree]) -> list[bool]:
    """For each parameter whether its update is zero at every step, as the jaxpr of the update says: no schedule is taken for that.

    What the state holds for a parameter may be zero at every step, too, as the momentum of gradients that are set to zero. A number
    that an update takes over from the state before, such as a learning rate there, may be set to another one.
    """
    count, update = len(jax.tree.leaves(dict(specs))), traced.update
    zeros = always_zero(traced.init.jaxpr, traced.init.consts, [False] * count)
    is_kept = [source == count + i for i, source in enumerate(passed_on(update.jaxpr)[count:])]
    state = [zero and own and not kept for zero, own, kept in zip(zeros, traced.of_parameter, is_kept, strict=True)]
    while True:
        results = always_zero(update.jaxpr, update.consts, [False] * count + state + [False] * count)
        still = [before and after for before, after in zip(state, results[count:], strict=True)]
        if still == state:
            return results[:count]
        state = still


def _used(traced: _Traced, frozen: Sequence[bool]) -> list[bool]:
    """For each parameter whether it is frozen and the update of one that is not depends on it."""
    if not any(frozen):
        return list(frozen)
    marks = [1 << bit if own else 0 for bit, own in enumerate(frozen)]
    used = 0
    for own, mark in zip(frozen, _reached(traced, marks), strict=True):
        used |= 0 if own else mark
    return [bool(mark & used) for mark in marks]


def _counted(traced: _Traced, specs: Mapping[str, Tree], frozen: Sequence[bool]) -> str:
    """What to add to a refusal where the updates depend on the gradients of frozen parameters."""
    ids = [layer_id for layer_id in sorted(specs) for _ in jax.tree.leaves(specs[layer_id])]
    counted = next((layer_id for layer_id, used in zip(ids, _used(traced, frozen), strict=True) if used), None)
    if counted is None:
        return ""
    return (
        f"; the pipeline counts the gradients of trained parameters alone, while this optimizer also counts those of frozen ones, as in "
        f"layer '{counted}', and gives other updates: to compare both, clip inside optax.partition"
    )


def _trained(ties: Ties, specs: Mapping[str, Tree], frozen: Sequence[bool]) -> Subset:
    """The parameters that are trained, by entry."""
    flags = jax.tree.unflatten(jax.tree.structure(dict(specs)), [not own for own in frozen])
    by_entry = {entry: tuple(jax.tree.leaves(part)) for entry, part in ties.parts(flags).items()}
    return Subset({entry: leaves for entry, leaves in by_entry.items() if not all(leaves)})


def _check_constant(before: Tree, after: Tree) -> None:
    """Refuse an optimizer whose state changes its structure, shapes or dtypes: an update is compiled once."""
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in (before, after)]
    structures: list[Any] = [jax.tree.structure(state) for state in (before, after)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        raise TypeError("its update returns a state of another structure than its init, or of other shapes or dtypes")


def _check_without_parameters(layerwise: LayerwiseOptimizer, specs: Mapping[str, Tree]) -> None:
    """Refuse an optimizer that fails on a layer without parameters, if the model has one."""

    def message(error: BaseException) -> str:
        return f"optimizer: it fails on layer '{bare}', which has no parameters: {cause(error)}; join that layer to one that has some"

    bare = next((layer_id for layer_id, tree in specs.items() if not jax.tree.leaves(tree)), None)
    if bare is not None:
        with callers_code(message):
            jax.eval_shape(lambda params: layerwise.update(bare, params, layerwise.init(bare, params), params), specs[bare])


def _some(ids: list[str]) -> list[str]:
    """All of a few layers; of many the first, the last, and some between them."""
    if len(ids) <= _LAYERS:
        return ids
    return [ids[i * (len(ids) - 1) // (_LAYERS - 1)] for i in range(_LAYERS)]


def _difference(layerwise: LayerwiseOptimizer, blank: Mapping[str, Tree], params: Mapping[str, Tree], ties: Ties) -> str:
    """How these layers one by one differ from these layers together, in words; nothing where they do not.

    Args:
        layerwise: one by one.
        blank: the structure of the whole model, in which they are together.
        params: the layers.
        ties: shared parameters, which are apart when layers are one by one.
    """
    whole, trained = _Run(layerwise.transformation, {**blank, **params}), layerwise.trained
    try:
        parts = {i: part for i, part in _entries(ties, params, trained).items() if not trained.excludes(i)}
        split = {i: _Run(layerwise.transformation, {**layerwise.blank, **part}) for i, part in parts.items()}
    except Exception as error:
        return f"on one layer alone it fails: {cause(error)}"
    updates = step = 0
    while updates < _UPDATES and step < _STEPS:
        gradients = _gradients(params, step)
        expected = whole.step({**blank, **gradients})
        parts, others = _entries(ties, gradients, trained), {path for path in expected if path[0].idx == 0}
        for layer_id, run in split.items():
            found = run.step({**layerwise.blank, **parts[layer_id]})
            if not all(path in expected and _close(expected[path], leaf) for path, leaf in found.items()):
                return f"after step {step + 1} layer '{layer_id}' is not what it is without the others"
            others -= found.keys()
        if step < _NAN_STEP and any(np.any(expected[path]) for path in others):
            return f"after step {step + 1} a parameter is changed whose update is always zero"
        updates += any(np.any(leaf) for (part, *_), leaf in expected.items() if part.idx == 0)
        step += 1
    return ""


class _Run:
    """One optimizer at work on some tree."""

    def __init__(self, transformation: optax.GradientTransformation, params: Tree) -> None:
        def update(gradients: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree, Tree]:
            updates, state = transformation.update(gradients, state, params)
            return updates, state, optax.apply_updates(params, updates)

        self._params, self._state = params, _prepared(transformation.init, params)(params)
        self._update = _prepared(update, params, self._state, params)

    def step(self, gradients: Tree) -> dict[Any, np.ndarray]:
        """The arrays of the updates and of the new state, by their paths."""
        updates, self._state, self._params = self._update(gradients, self._state, self._params)
        return {path: _to_numpy(leaf) for path, leaf in jax.tree_util.tree_flatten_with_path((updates, self._state))[0]}


def _prepared(function: Callable[..., Tree], *arguments: Tree) -> Callable[..., Tree]:
    """The function traced once, then run operation by operation: for a few tiny steps far quicker than compiling, unless it loops.

    Host callbacks are left out: the steps' values are made up.
    """
    closed, output = jax.make_jaxpr(function, return_shape=True)(*arguments)
    if closed.effects:
        closed = jax.make_jaxpr(without_effects(function))(*arguments)
    run = jaxpr_as_fun(closed)
    if re.search(r"\b(while|scan|cond)\[", str(closed)):
        run = jax.jit(run)
    treedef = jax.tree.structure(output)
    return lambda *arguments: jax.tree.unflatten(treedef, run(*jax.tree.leaves(arguments)))


def _tiny(spec: Any) -> jax.Array:
    """An array with the dtype and the number of dims of `spec` and at most two entries in each dim, so small that tiny updates show."""
    shape = tuple(min(size, 2) for size in spec.shape)
    return jnp.asarray(np.linspace(1e-3, 2e-3, int(np.prod(shape))).reshape(shape), spec.dtype)


def _gradients(params: Mapping[str, Tree], step: int) -> dict[str, Tree]:
    generator = np.random.default_rng(step)
    gradients = {}
    for number, (layer_id, tree) in enumerate(params.items()):
        size = 10.0 ** _EXPONENTS[(number + step) % len(_EXPONENTS)]
        if step == _NAN_STEP and number == step % len(params):
            size = np.nan
        gradients[layer_id] = jax.tree.map(lambda leaf, size=size: _noise(generator, leaf, size), tree)
    return gradients


def _noise(generator: np.random.Generator, leaf: jax.Array, size: float) -> jax.Array:
    largest = float(jnp.finfo(leaf.dtype).max) / 8
    return jnp.asarray(np.clip(size * generator.normal(size=leaf.shape), -largest, largest), leaf.dtype)


def _to_numpy(leaf: Any) -> np.ndarray:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape:
        return False
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return bool(np.all(a == b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.abs(a[np.isfinite(a)])
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-3 * finite.max(initial=0.0), equal_nan=True))
