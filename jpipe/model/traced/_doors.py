"""Whole models as one layer."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Whole:
    layer: Any
    specs: Any
    params: Any = None
    state: Any = None


def open_model(model, inputs, variables=None):
    from jpipe.model._adapters import adapt

    import jax
    from jpipe.model._layer import key_spec

    layer = adapt("model", model)
    return Whole(layer, jax.eval_shape(layer.init, key_spec(), inputs[0]))


def open_function(f, params, inputs, state=None):
    from jpipe.model._layer import Layer

    import jax

    return Whole(specs=jax.eval_shape(lambda: (params, {})), layer=Layer(lambda k, x: (params, {}), lambda p, s, x, k, t: (f(p, x), s)))
