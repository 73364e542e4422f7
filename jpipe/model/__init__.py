"""The model as data: layers and their specs, the stack, adapters for Flax modules and functions, layerwise optimizers."""

from jpipe.model._layer import LayerSpec
from jpipe.model._precision import cast_layers
from jpipe.model.layerwise._find import find_layerwise
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer

__all__ = ["LayerSpec", "LayerwiseOptimizer", "cast_layers", "find_layerwise"]
