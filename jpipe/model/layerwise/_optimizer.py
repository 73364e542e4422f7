"""An optax optimizer applied to each layer separately."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe.model._precision import master_dtype
from jpipe.model._subset import EVERYTHING, Subset
from jpipe.model.layerwise._of_model import ModelOptimizer
from jpipe.model.layerwise._trace import Position, optax_promotion
from jpipe.optimizers._predict import predicted, with_prediction

Tree = Any


class WithBuffers(NamedTuple):
    """The optimizer state of one layer with further arrays for each of its parameters.

    Attributes:
        optimizer: what the transformation keeps.
        weights_ema: the average of the weights, in float32 for weights of lower precision; None without `ema_decay`.
        ahead: how far the weights are ahead of those without prediction, see `predict_delay`; None without `delay_factor`.
    """

    optimizer: Tree
    weights_ema: Tree = None
    ahead: Tree = None


class WithMasters(NamedTuple):
    """The optimizer state of a layer with parameters of lower precision: its parameters in float32, and their state."""

    masters: Tree
    state: Tree


def masters_of(params: Tree) -> Tree:
    """Cast parameters to float32, or keep a wider dtype, and what is not floating point."""
    return jax.tree.map(lambda p: p.astype(master_dtype(p.dtype)), params)


@dataclass(frozen=True)
class LayerwiseOptimizer:
    """An optax transformation applied to one layer at a time, as `{layer id: params}`, without its frozen parameters.

    Attributes:
        transformation: any optax transformation; `find_layerwise` says whether it may be used like this.
        blank: empty; or all layers by layer id, with `optax.MaskedNode()` in place of every leaf, as optax does for leaves that a
            transformation must not see. Then a layer has the structure of the whole model, which masks and labels given as trees need.
        has_masters: whether the state is a `WithMasters`, whose masters are updated and then cast to the parameters' dtypes.
        ema_decay: keep an exponential moving average of the weights, or of the masters, with this decay.
        delay_factor: move the weights ahead of each update by this many updates for each update of its delay, as the last thing.
        accepted: the names of the `Position` that the transformation accepts as extra arguments, sorted.
        used: those of them on which its updates or its state depend.
        trained: the parameters that updates change, by entry (see `Ties`). Of frozen parameters there are no gradients and
            no optimizer state. A layer of which all are frozen has none of either.
        of_model: the optimizer for the tree of the model that the layers were cut from, which updates one entry at a time; None: apply
            `transformation` to layers by layer id.
        structured: for shared parameters, and for layers with shared or frozen ones, (layer id, tree of that layer) from their arrays.
    """

    transformation: optax.GradientTransformation
    blank: Mapping[str, Tree]
    has_masters: bool = False
    ema_decay: float | None = None
    trained: Subset = EVERYTHING
    of_model: ModelOptimizer | None = None
    structured: Mapping[str, Callable[[Tree], tuple[str, Tree]]] = field(default_factory=dict)
    delay_factor: float | None = None
    accepted: tuple[str, ...] = ()
    used: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the `Position` that `update` requires, sorted."""
        return tuple(sorted({*self.used, *(() if self.delay_factor is None else ("delay",))}))

    def init(self, layer_id: str, params: Tree) -> Tree:
        """Return the optimizer state of one layer, from its trained parameters."""
        if self.has_masters:
            masters = masters_of(params)
            return WithMasters(masters, self._without_masters.init(layer_id, masters))
        with optax_promotion():
            state = () if self.trained.excludes(layer_id) else self._init(layer_id, params)
            average = None if self.ema_decay is None else jax.tree.map(_precise_copy, params)
            ahead = None if self.delay_factor is None else jax.tree.map(jnp.zeros_like, params)
        return WithBuffers(state, average, ahead) if self._has_buffers else state

    def update(
        self, layer_id: str, gradient: Tree, state: Tree, params: Tree, position: Position = MappingProxyType({})
    ) -> tuple[Tree, Tree]:
        """Update the trained parameters of one layer.

        Args:
            layer_id: of the layer, or the name of a shared parameter.
            gradient: with respect to its trained parameters.
            state: its optimizer state.
            params: its trained parameters.
            position: at least the entries that are `required`.

        Returns:
            The new parameters; the new optimizer state.
        """
        if self.trained.excludes(layer_id):
            return params, state
        if self.has_masters:
            masters, inner = self._without_masters.update(layer_id, gradient, state.state, state.masters, position)
            return jax.tree.map(lambda p, master: master.astype(p.dtype), params, masters), WithMasters(masters, inner)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
        state, average, ahead = state if self._has_buffers else (state, None, None)
        extra = {name: position[name] if name in self.used else 0 for name in self.accepted}
        with optax_promotion():
            update, state = self._update(layer_id, gradient, state, params, extra)
            new = optax.apply_updates(params, update)
        if not self._has_buffers:
            return new, state
        if average is not None:
            average = self._moved(average, new if ahead is None else without_prediction(new, ahead))
        if ahead is not None:
            assert self.delay_factor is not None
            # Of the difference of the weights, not of the updates: with these XLA would round the new weights in another way.
            before, ahead = ahead, predicted(jax.tree.map(jnp.subtract, new, params), ahead, self.delay_factor, position["delay"])
            new = with_prediction(new, before, ahead)
        return new, WithBuffers(state, average, ahead)

    def average(self, state: Tree) -> Tree:
        """Return the average of the weights in the state of a layer; needs `ema_decay`."""
        return (state.state if self.has_masters else state).weights_ema

    def ahead(self, state: Tree) -> Tree:
        """Return how far the parameters of a layer, or their masters, are ahead; needs `delay_factor`."""
        return (state.state if self.has_masters else state).ahead

    def _init(self, entry: str, params: Tree) -> Tree:
        if self.of_model is not None:
            return self.of_model.init(entry, params)
        return self.transformation.init(self._placed(entry, params)[1])

    def _update(self, entry: str, gradient: Tree, state: Tree, params: Tree, extra: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """Return the updates of an entry, in the structure of its parameters, and its new state."""
        if self.of_model is not None:
            return self.of_model.update(entry, gradient, state, params, extra)
        place, placed = self._placed(entry, params)
        updates, state = self.transformation.update(self._placed(entry, gradient)[1], state, placed, **extra)
        return with_structure(params, updates[place]), state

    def _placed(self, entry: str, tree: Tree) -> tuple[str, dict[str, Tree]]:
        """Return the layer id of an entry, and its tree as the transformation sees it."""
        layer_id, tree = self.structured[entry](tree) if entry in self.structured else (entry, tree)
        return layer_id, {**self.blank, layer_id: tree}

    @property
    def _has_buffers(self) -> bool:
        return self.ema_decay is not None or self.delay_factor is not None

    @property
    def _without_masters(self) -> "LayerwiseOptimizer":
        return replace(self, has_masters=False)

    def _moved(self, average: Tree, params: Tree) -> Tree:
        """Return the average after an update to `params`."""
        decay = self.ema_decay
        assert decay is not None
        return jax.tree.map(lambda mean, leaf: decay * mean + (1 - decay) * leaf.astype(mean.dtype), average, params)


def without_prediction(params: Tree, ahead: Tree) -> Tree:
    """Return the parameters without the prediction that has moved them ahead."""
    return jax.tree.map(jnp.subtract, params, ahead)


def with_structure(like: Tree, tree: Tree) -> Tree:
    """Return the leaves of a tree in the structure of another one."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(tree))


def _precise_copy(leaf: jax.Array) -> jax.Array:
    """Copy an array, at least in float32: weights and their average are donated separately."""
    return jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32), copy=True)
