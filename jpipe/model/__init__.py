"""The model as data: layers and specs, the stack of layers, adapters for Flax modules and functions, and layerwise optimizers."""

from jpipe.model._added_layers import with_added_layers
from jpipe.model._layer import LayerSpec
from jpipe.model._precision import cast_layers
from jpipe.model.jaxprs._products import count_products, find_products, product_flops, window_pairs
from jpipe.model.layerwise._optimizer import LayerwiseOptimizer
from jpipe.model.layerwise._probe import find_layerwise

__all__ = [
    "LayerSpec",
    "LayerwiseOptimizer",
    "cast_layers",
    "count_products",
    "find_layerwise",
    "find_products",
    "product_flops",
    "window_pairs",
    "with_added_layers",
]
