"""The model as data: layers and their specs, the stack, adapters for Flax modules and functions, optimizers layer by layer."""

from jpipe.model._layer import LayerSpec
from jpipe.model._optimizer import LayerwiseOptimizer, find_layerwise

__all__ = ["LayerSpec", "LayerwiseOptimizer", "find_layerwise"]
