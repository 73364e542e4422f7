"""Whole models as one layer."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Whole:
    layer: Any
    params: Any = None
    state: Any = None


def open_model(model, inputs, variables=None):
    from jpipe.model._adapters import adapt

    return Whole(adapt("model", model))


def open_function(f, params, inputs, state=None):
    from jpipe.model._layer import Layer

    return Whole(Layer(lambda k, x: (params, {}), lambda p, s, x, k, t: (f(p, x), s)))
