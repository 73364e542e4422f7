"""An optax optimizer that is applied to each layer separately."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe.model._precision import master_dtype
from jpipe.model._subset import EVERYTHING, Subset
from jpipe.model.layerwise._of_model import ModelOptimizer
from jpipe.model.layerwise._trace_optimizer import Position, optax_promotion
from jpipe.optimizers._predict import predicted, with_prediction

Tree = Any


class WithBuffers(NamedTuple):
    """The optimizer state of one layer, with further arrays for each of its parameters."""

    optimizer: Tree  # the state of the optax transformation
    weights_ema: Tree = None  # the moving average of the weights, in float32 for weights of lower precision; None without `ema_decay`
    ahead: Tree = None  # by how much prediction has moved the weights, see `predict_delay`; None without `delay_factor`


class WithMasters(NamedTuple):
    """The optimizer state of a layer with low-precision parameters: the float32 masters and the state of their optimizer."""

    masters: Tree
    state: Tree


def masters_of(params: Tree) -> Tree:
    """Cast parameters to float32. Wider dtypes, and dtypes that are not floating point, stay."""
    return jax.tree.map(lambda p: p.astype(master_dtype(p.dtype)), params)


@dataclass(frozen=True)
class LayerwiseOptimizer:
    """An optax transformation that is applied to one layer at a time, as `{layer id: params}`, without its frozen parameters.

    Attributes:
        transformation: an optax transformation; `find_layerwise` checks whether it can be used like this.
        of_model: the transformation, traced for the parameters of the whole model; each entry evaluates its part. None: apply the
            transformation to each layer alone.
        has_masters: whether the state is a `WithMasters`: updates change the masters, which are then cast to the parameters' dtypes.
        ema_decay: keep an exponential moving average of the weights, or of the masters, with this decay; None: keep none.
        delay_factor: how many updates to move the weights ahead, after each update, per update of delay; None: do not.
        used: the names of the `Position` entries on which updates or state depend, sorted.
        trained: the parameters that updates change, by entry (see `Ties`). Frozen parameters have no gradients and no optimizer state.
    """

    transformation: optax.GradientTransformation
    of_model: ModelOptimizer | None = None
    has_masters: bool = False
    ema_decay: float | None = None
    delay_factor: float | None = None
    used: tuple[str, ...] = ()
    trained: Subset = EVERYTHING

    @property
    def required(self) -> tuple[str, ...]:
        """The names of the `Position` entries that `update` requires, sorted."""
        return tuple(sorted({*self.used, *(() if self.delay_factor is None else ("delay",))}))

    def init(self, layer_id: str, params: Tree) -> Tree:
        """Return the optimizer state of one layer, from its trained parameters."""
        if self.has_masters:
            masters = masters_of(params)
            return WithMasters(masters, self._without_masters.init(layer_id, masters))
        with optax_promotion():
            state = () if self.trained.excludes(layer_id) else self._init(layer_id, params)
            average = None
            if self.ema_decay is not None:  # a copy, at least in float32, because weights and their average are donated separately
                average = jax.tree.map(lambda p: jnp.array(p, jnp.promote_types(p.dtype, "float32"), copy=True), params)
            ahead = None if self.delay_factor is None else jax.tree.map(jnp.zeros_like, params)
        return WithBuffers(state, average, ahead) if self._has_buffers else state

    def update(
        self, layer_id: str, gradient: Tree, state: Tree, params: Tree, position: Position = MappingProxyType({})
    ) -> tuple[Tree, Tree]:
        """Update the trained parameters of one layer.

        Args:
            layer_id: the id of the layer, or the name of a shared parameter.
            gradient: the gradient with respect to the layer's trained parameters.
            state: the optimizer state of the layer.
            params: the trained parameters of the layer.
            position: the `required` entries of the `Position`, or more.

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
        with optax_promotion():
            if self.of_model is not None:
                update, state = self.of_model.update(layer_id, gradient, state, params, position)
            else:
                updates, state = self.transformation.update({layer_id: gradient}, state, {layer_id: params})
                update = updates[layer_id]
            new = optax.apply_updates(params, update)
        if not self._has_buffers:
            return new, state
        if (decay := self.ema_decay) is not None:
            exact = new if ahead is None else without_prediction(new, ahead)
            average = jax.tree.map(lambda mean, leaf: decay * mean + (1 - decay) * leaf.astype(mean.dtype), average, exact)
        if ahead is not None:
            assert self.delay_factor is not None
            # The prediction uses the difference of the weights: if it used the updates, XLA would round the new weights differently.
            before, ahead = ahead, predicted(jax.tree.map(jnp.subtract, new, params), ahead, self.delay_factor, position["delay"])
            new = with_prediction(new, before, ahead)
        return new, WithBuffers(state, average, ahead)

    def average(self, state: Tree) -> Tree:
        """Return the moving average of the weights in the state of a layer. Needs `ema_decay`."""
        return (state.state if self.has_masters else state).weights_ema

    def ahead(self, state: Tree) -> Tree:
        """Return by how much prediction has moved a layer's parameters, or masters. Needs `delay_factor`."""
        return (state.state if self.has_masters else state).ahead

    def _init(self, entry: str, params: Tree) -> Tree:
        return self.transformation.init({entry: params}) if self.of_model is None else self.of_model.init(entry, params)

    @property
    def _has_buffers(self) -> bool:
        return self.ema_decay is not None or self.delay_factor is not None

    @property
    def _without_masters(self) -> "LayerwiseOptimizer":
        return replace(self, has_masters=False)


def without_prediction(params: Tree, ahead: Tree) -> Tree:
    """Return the parameters without the prediction that has moved them ahead."""
    return jax.tree.map(jnp.subtract, params, ahead)
