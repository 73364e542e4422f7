"""The check that no two layers share a module or a parameter that the stack cannot see."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jpipe.errors import InputError
from jpipe.model._adapters import is_constructor
from jpipe.model._layer import Layer, key_spec


def reject_shared_modules(layers: Mapping[str, Any]) -> None:
    """Raise `InputError` for two NNX modules with the same variable, built or returned by constructors, from a closure."""
    constructors = {layer_id: layer for layer_id, layer in layers.items() if is_constructor(layer)}
    seen: dict[int, str] = {}

    def see(layer_id: str, module: nnx.Module) -> None:
        params = {id(node): ".".join(map(str, path)) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)}
        for identity, name in params.items():
            if identity in seen:
                raise _shared(seen[identity], layer_id, name)
        seen.update(dict.fromkeys(params, layer_id))

    for layer_id, layer in layers.items():
        if isinstance(layer, nnx.Module):
            see(layer_id, layer)

    def record(key: jax.Array) -> None:
        alive = []  # keeps the built modules alive, so that an id() is not used twice
        calls = Counter[int]()
        for layer_id, layer in constructors.items():
            calls[id(layer)] += 1
            if calls[id(layer)] > 2:
                continue  # one constructor that returns a module twice is detected by two calls
            try:
                with nnx.use_eager_sharding(False):
                    module = layer(rngs=nnx.Rngs(key))
                alive.append(module)
                see(layer_id, module)
            except (InputError, KeyboardInterrupt):
                raise
            except BaseException:  # noqa: S112 - a constructor that fails is reported by the adapter, with its layer id
                continue

    jax.eval_shape(record, key_spec())


def reject_shared_owners(layers: Mapping[str, Layer]) -> None:
    """Raise `InputError` for two layers of which one object holds the parameters."""
    seen: dict[int, str] = {}
    for layer_id, layer in layers.items():
        if layer.owner is not None and seen.setdefault(id(layer.owner), layer_id) != layer_id:
            raise _shared(seen[id(layer.owner)], layer_id, type(layer.owner).__name__)


def _shared(first: str, second: str, name: str) -> InputError:
    return InputError(
        f"layers '{first}' and '{second}' share the parameter or module '{name}', which a pipeline cannot see: two stages would train two "
        f"copies of it; give '{second}' its own (for a Linen module: module.clone()), and to share a parameter a jpipe.Tie"
    )
