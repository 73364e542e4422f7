"""Print what `LayerStack.from_model` makes of each model of this folder: `python -m examples.any_model.table`."""

import importlib
import inspect
import math
import time
from typing import Any

import jax

import jpipe

MODELS = ("nnx_transformer", "linen_resnet", "unet", "vit", "encoder_decoder", "mixture_of_experts", "scanned")
ROWS = 8
"""Of the microbatch with which each model is traced."""


def row_of(name: str) -> dict[str, Any]:
    """Return the row of one model.

    The time is that of the processor, for both of its traces and the search for cuts.
    """
    module = importlib.import_module(f"examples.any_model.{name}")
    x, _ = module.batch(ROWS, seed=0)
    inputs = x if isinstance(x, tuple) else (x,)
    model = module.model if "rngs" in inspect.signature(module.model).parameters else module.model()
    start = time.process_time()
    stack = jpipe.LayerStack.from_model(model, *inputs)
    seconds = time.process_time() - start
    specs = stack.specs(x)
    between = [specs[layer_id].output for layer_id in stack.ids[:-1]]
    return {
        "model": name,
        "lines changed": 0,
        "equations": count_equations(stack, specs),
        "layers": len(stack.ids),
        "seconds to trace": f"{seconds:.1f}",
        "widest cut, bytes": f"{max(map(bytes_of, between)):,}",
    }


def count_equations(stack: jpipe.LayerStack, specs: Any) -> int:
    """Count the operations of all layers in training."""
    key, count = jax.eval_shape(lambda: jax.random.key(0)), 0
    for layer_id, layer in stack.layers.items():
        spec = specs[layer_id]
        jaxpr = jax.make_jaxpr(lambda params, state, x, key, layer=layer: layer.apply(params, state, x, key, True))
        count += len(jaxpr(spec.params, spec.state, spec.x, key).jaxpr.eqns)
    return count


def bytes_of(tree: Any) -> int:
    """Return the bytes of all arrays of a tree."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def main() -> None:
    """Print the table."""
    rows = [row_of(name) for name in MODELS]
    print("|", " | ".join(rows[0]), "|")
    print("|", " | ".join("---" for _ in rows[0]), "|")
    for row in rows:
        print("|", " | ".join(map(str, row.values())), "|")


if __name__ == "__main__":
    main()
