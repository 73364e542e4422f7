"""Low-rank adapters for frozen linear layers (Hu et al., *LoRA*, ICLR 2022), and quantized kernels of these layers.

Letters in shapes: i inputs, o outputs, r rank.
"""

import itertools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.tune_config import PARTS, LoraConfig, TuneConfig
from jpipe_lm.models.metadata import named
from jpipe_lm.models.quantized import Kind, multiply, quantize
from jpipe_train.config.tune_section import matches_any

_EMBEDDING, _TIED = "embed/token/embedding", "head/token/embedding"  # the places of a tied embedding; the first is its name
_UNIFORM = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")  # as in PEFT: from -1 / sqrt(inputs) to 1 / sqrt(inputs)


class Adapter(nnx.Module):
    """Multiplies by the matrices A and B of an adapter, for one part of a linear layer."""

    def __init__(self, inputs: int, outputs: int, lora: LoraConfig, axes: tuple[Any, Any], *, rngs: nnx.Rngs):
        self.a = _param(_UNIFORM(rngs.params(), (inputs, lora.rank), jnp.float32), axes[0], None)
        self.b = _param(jnp.zeros((lora.rank, outputs), jnp.float32), None, axes[1])
        self.dropout = nnx.Dropout(lora.dropout, rngs=rngs if lora.dropout else None)
        self.scale = lora.scale

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        return self.scale * (self.dropout(x) @ self.a[...].astype(x.dtype) @ self.b[...].astype(x.dtype))


class Quantized(nnx.Module):
    """A quantized kernel."""

    def __init__(self, kernel: nnx.Param[Any], kind: Kind):
        codes, scale = quantize(kernel[...], kind)
        inputs, outputs = axes_of(kernel)
        self.codes, self.scale, self.kind = _param(codes, inputs, outputs), _param(scale, None, outputs), kind

    def __rmatmul__(self, x: Float[Array, "*n i"]) -> Float[Array, "*n o"]:
        return multiply(x, self.codes[...], self.scale[...], self.kind)


class Adapted(nnx.Module):
    """A linear layer with adapters for its parts. The outputs of the parts are concatenated."""

    def __init__(self, base: nnx.Linear, widths: Mapping[str, int], tune: TuneConfig, *, rngs: nnx.Rngs):
        lora = tune.lora
        assert lora is not None
        self.kernel = Quantized(base.kernel, tune.quantize) if tune.quantize else base.kernel
        self.bias = nnx.data(base.bias)
        self.dtype, self.widths = base.dtype, tuple(widths.items())
        chosen = {name: width for name, width in widths.items() if lora.targets is None or name in lora.targets}
        axes = axes_of(base.kernel)
        self.lora = nnx.Dict({name: Adapter(base.in_features, width, lora, axes, rngs=rngs) for name, width in chosen.items()})

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        x = x.astype(self.dtype)
        y = x @ (self.kernel if isinstance(self.kernel, Quantized) else self.kernel[...].astype(x.dtype))
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype)[(None,) * (y.ndim - 1)]
        if not self.lora:
            return y
        changes = [self.lora[name](x) if name in self.lora else jnp.zeros((*y.shape[:-1], width), y.dtype) for name, width in self.widths]
        return y + jnp.concatenate(changes, axis=-1)


def tuned(layers: Mapping[str, Callable[..., nnx.Module]], config: ModelConfig, tune: TuneConfig) -> dict[str, Callable[..., nnx.Module]]:
    """Return constructors of the layers with adapters. Layers that shared a constructor share the new one."""
    if tune.lora is None:
        return dict(layers)
    same: dict[Any, Callable[..., nnx.Module]] = {}
    changed = {}
    for layer_id, make in layers.items():
        is_like_others = not any(fnmatchcase(layer_id, pattern.partition("/")[0]) for pattern in tune.train_only)
        key = id(make) if is_like_others else layer_id  # patterns in train_only may change the dtypes of this layer's parameters
        changed[layer_id] = same.setdefault(key, _tuned(layer_id, make, config, tune))
    return changed


def widths_of(linear: str, outputs: int, config: ModelConfig) -> dict[str, int]:
    """Return the number of outputs of each part of a linear layer, such as "block_0/qkv", which has `outputs` outputs in all."""
    name = linear.rpartition("/")[2]
    block = int(linear.partition("/")[0].removeprefix("block_"))
    return dict(zip(PARTS[name], config.block(block).qkv_sizes if name == "qkv" else (outputs,), strict=False))


def _tuned(layer_id: str, make: Callable[..., nnx.Module], config: ModelConfig, tune: TuneConfig) -> Callable[..., nnx.Module]:
    def tuned(rngs: nnx.Rngs) -> nnx.Module:
        module = make(rngs=rngs)
        base = {"/".join(map(str, (layer_id, *path))): node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Param)}
        shared = getattr(getattr(module, "experts", None), "shared", None)
        for owner, name in itertools.product((module, shared), PARTS):
            linear = getattr(owner, name, None)
            if isinstance(linear, nnx.Linear):
                setattr(owner, name, Adapted(linear, widths_of(f"{layer_id}/{name}", linear.out_features, config), tune, rngs=rngs))
        for name, param in base.items():
            first_place = _EMBEDDING if config.tied and name == _TIED else name
            if not matches_any(first_place, tune.train_only):
                param.set_value(param[...].astype(tune.base_dtype))
        return module

    return tuned


def is_quantized(name: str) -> bool:
    """Return whether this is the name of an array of a quantized kernel, such as "block_0/qkv/kernel/codes"."""
    return name.endswith(("/kernel/codes", "/kernel/scale"))


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names of the parts of a linear layer, given the name of its kernel, such as "block_0/qkv/kernel"; () for other names."""
    _, _, inner = name.replace("/experts/shared/", "/").partition("/")
    linear, _, kernel = inner.partition("/")
    return PARTS.get(linear, ()) if kernel.partition("/")[0] == "kernel" else ()


def axes_of(kernel: nnx.Param[Any]) -> tuple[Any, Any]:
    """Return the logical axes of a kernel: the axis of its inputs and the axis of its outputs."""
    inputs, outputs = kernel.get_metadata().get("out_sharding") or (None, None)
    return inputs, outputs


def _param(value: Array, *names: str | None) -> nnx.Param[Any]:
    return nnx.Param(value, **named(*names))
