"""Adapters and quantized kernels in checkpoints: merge them into whole weights, and make them from whole weights."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.tune_config import LoraConfig, TuneConfig, is_of_adapter
from jpipe_lm.models.lora import widths_of
from jpipe_lm.models.quantized import Kind, dequantize, quantize
from jpipe_train.checkpoint.sources.source import Names, Source, Spec

_CODES, _SCALE = "/codes", "/scale"
_KERNEL = "/kernel"


def merged(arrays: Mapping[str, Any], model: ModelConfig, tune: TuneConfig) -> dict[str, Any]:
    """Merge adapters into the weights beside them, and return the weights of the whole model in float32, by name in an export."""
    if tune.lora is None:
        return dict(arrays)
    weights: dict[str, Any] = {}
    for name, array in arrays.items():
        if name.endswith(f"{_KERNEL}{_CODES}"):
            assert tune.quantize is not None
            whole = name.removesuffix(_CODES)
            weights[whole] = np.asarray(dequantize(jnp.asarray(array), jnp.asarray(arrays[f"{whole}{_SCALE}"]), tune.quantize))
        elif not is_of_adapter(name) and not name.endswith(f"{_KERNEL}{_SCALE}"):
            weights[name] = _in_float32(array)
    for name in weights:
        if name.endswith(_KERNEL) and any(f"{name.removesuffix(_KERNEL)}/lora/" in other for other in arrays):
            weights[name] = weights[name] + _product(name.removesuffix(_KERNEL), weights[name].shape[1], arrays, model, tune.lora)
    return weights


def merged_specs(specs: Mapping[str, Spec], tune: TuneConfig) -> dict[str, Spec]:
    """Return the specs of the arrays that `merged` would make from arrays of these specs."""
    if tune.lora is None:
        return dict(specs)
    whole: dict[str, Spec] = {}
    for name, spec in specs.items():
        if name.endswith(f"{_KERNEL}{_CODES}"):
            whole[name.removesuffix(_CODES)] = Spec(_whole_shape(spec, tune.quantize), "float32")
        elif not is_of_adapter(name) and not name.endswith(f"{_KERNEL}{_SCALE}"):
            whole[name] = spec._replace(dtype="float32") if spec.dtype in ("bfloat16", "float16") else spec
    return whole


def _whole_shape(codes: Spec, kind: Kind | None) -> tuple[int, ...]:
    """Return the shape of a kernel from the shape of its codes."""
    return codes.shape[0] * (2 if kind == "nf4" else 1), *codes.shape[1:]


def _product(linear: str, outputs: int, arrays: Mapping[str, Any], model: ModelConfig, lora: LoraConfig) -> np.ndarray:
    """Return the sum that the adapters of a linear layer add to its kernel."""
    added = {}
    for part, width in widths_of(linear, outputs, model).items():
        a, b = (arrays.get(f"{linear}/lora/{part}/{matrix}") for matrix in "ab")
        added[part] = np.zeros((1, width), np.float32) if a is None or b is None else _in_float32(a) @ _in_float32(b)
    inputs = max(len(product) for product in added.values())
    return lora.scale * np.concatenate([np.broadcast_to(product, (inputs, product.shape[1])) for product in added.values()], axis=1)


def for_adapters(source: Source, model: Mapping[str, Spec], tune: TuneConfig) -> Source:
    """Adapt a source of whole weights to a model: adapters may be missing in the source, and kernels are quantized if the model's are."""
    if tune.lora is None:
        return source
    optional = source.optional | {name for name in model if is_of_adapter(name)}
    source = replace(source, optional=optional, converts=source.converts or tune.base_dtype != "float32")
    return source if tune.quantize is None else _quantized(source, model, tune.quantize)


def whole_names(names: list[str]) -> list[str]:
    """Return the names, and for each quantized kernel also the name of the whole kernel."""
    return [*names, *(name.removesuffix(_CODES) for name in names if name.endswith(f"{_KERNEL}{_CODES}"))]


def _quantized(source: Source, model: Mapping[str, Spec], kind: Kind) -> Source:
    """Return a source that quantizes whole kernels while it reads them, where the model has quantized ones."""
    whole = {
        kernel
        for name, spec in model.items()
        if name.endswith(f"{_KERNEL}{_CODES}")
        and (stored := source.specs.get(kernel := name.removesuffix(_CODES))) is not None
        and stored.shape == _whole_shape(spec, kind)
    }
    specs = {name: spec for name, spec in source.specs.items() if name not in whole}
    specs |= {f"{kernel}{end}": model[f"{kernel}{end}"] for kernel in whole for end in (_CODES, _SCALE)}

    def read(names: Names) -> Iterator[dict[str, Any]]:
        def kernel_of(name: str) -> str:
            kernel, _, _ = name.rpartition("/")
            return kernel if kernel in whole else name

        for arrays in source.read({layer_id: list(dict.fromkeys(map(kernel_of, inner))) for layer_id, inner in names.items()}):
            results = {name: array for name, array in arrays.items() if name not in whole}
            for kernel in arrays.keys() & whole:
                codes, scale = quantize(jnp.asarray(_in_float32(arrays[kernel])), kind)
                results |= {f"{kernel}{_CODES}": np.asarray(codes), f"{kernel}{_SCALE}": np.asarray(scale)}
            yield results

    return replace(source, specs=specs, read=read)


def _in_float32(array: Any) -> np.ndarray:
    """Convert an array to float32 if its numbers have fewer bits."""
    array = np.asarray(array)
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array
