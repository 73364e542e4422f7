"""Model FLOPs utilization (MFU): the share of the devices' peak FLOP/s that a run uses for the model itself.

The convention is PaLM's (Chowdhery et al. 2022, appendix B). The FLOPs of a step are three times the FLOPs of a forward's matrix products:
once for the forward and twice for the backward. Recomputation does not count. MFU is the FLOPs of a step, divided by the seconds of a step
and by the sum of the peak FLOP/s of all devices. Attention counts in full, even if it is causal.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jpipe
from jpipe.model import count_products
from jpipe_train.assemble.build import layer_specs
from jpipe_train.assemble.meshes import device_kinds

_FAST = "float32, fast"  # JAX's default for float32: TensorFloat32 on GPUs that support it, bfloat16 on TPUs
_BY_DEFAULT = (None, "default", "bfloat16", "tensorfloat32", "BF16_BF16_F32", "TF32_TF32_F32")  # values of jax_default_matmul_precision
_IN_FULL = ("highest", "float32", "F32_F32_F32")


def _gpu(half: float, fast: float | None, full: float, bfloat16: bool = True) -> dict[str, float]:
    return {"float16": half, "float32": full} | ({"bfloat16": half} if bfloat16 else {}) | ({_FAST: fast} if fast is not None else {})


def _tpu(peak: float) -> dict[str, float]:
    return {"bfloat16": peak, _FAST: peak}


PEAKS: Sequence[tuple[str, Mapping[str, float]]] = (
    # TFLOP/s per JAX device, without sparsity. The first pattern that matches the `device_kind` counts.
    # The numbers are from NVIDIA's data sheets. For Hopper and Ada the sheets give twice these numbers, "with sparsity".
    (r"GB200", _gpu(2500, 1250, 80)),  # GB200 NVL72: 360, 180 and 5.76 PFLOP/s of 72, the first two with sparsity
    (r"B200", _gpu(2250, 1125, 75)),  # HGX B200: 36, 18 and 0.6 PFLOP/s of eight, the first two with sparsity
    (r"GH200|H200(?! NVL)", _gpu(989.4, 494.7, 66.9)),  # as H100 SXM
    (r"H200 NVL|H100 NVL", _gpu(835.5, 417.5, 60)),
    (r"H100 PCIe", _gpu(756, 378, 51.2)),
    (r"H100", _gpu(989.4, 494.7, 66.9)),  # SXM: "NVIDIA H100 80GB HBM3"
    (r"A100", _gpu(312, 156, 19.5)),  # SXM and PCIe
    (r"L40S", _gpu(362.05, 183, 91.6)),
    (r"L40", _gpu(181.05, 90.5, 90.5)),
    (r"L4\b", _gpu(121, 60, 30.3)),
    (r"A40\b", _gpu(149.7, 74.8, 37.4)),
    (r"A10\b", _gpu(125, 62.5, 31.2)),
    (r"V100-SXM", _gpu(125, None, 15.7, bfloat16=False)),
    (r"V100-PCIE", _gpu(112, None, 14, bfloat16=False)),
    (r"\bT4\b", _gpu(65, None, 8.1, bfloat16=False)),
    # docs.cloud.google.com/tpu/docs has the peak of a chip for each version. A device of v2, v3 or v7 is one of the two cores of a chip.
    (r"^TPU v2$", _tpu(45 / 2)),
    (r"^TPU v3$", _tpu(123 / 2)),
    (r"^TPU v4$", _tpu(275)),
    (r"^TPU v5 ?(lite|e)$", _tpu(197)),
    (r"^TPU v5p?$", _tpu(459)),
    (r"^TPU v6 ?(lite|e)$", _tpu(918)),
    (r"^TPU7x$", _tpu(2307 / 2)),
)


def peak_of(kind: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of the `device_kind` `kind` for matrix products of this dtype, or None if it is unknown."""
    precision = jax.config.values["jax_default_matmul_precision"]
    names = [dtype]
    if dtype == "float32" and (precision in _IN_FULL or (os.environ.get("NVIDIA_TF32_OVERRIDE") == "0" and "TPU" not in kind)):
        names = ["float32"]
    elif dtype == "float32":
        names = [_FAST, "float32"] if precision in _BY_DEFAULT else []
    peaks = next((peaks for pattern, peaks in PEAKS if re.search(pattern, kind)), {})
    return next((1e12 * peaks[name] for name in names if name in peaks), None)


@dataclass(frozen=True)
class Utilization:
    """The quantities from which the MFU of a run is computed."""

    flops: float  # the model FLOPs of a step
    peak: float  # the sum of the peak FLOP/s of all devices

    def at(self, seconds: float) -> float:
        """Return the MFU if a step takes `seconds`."""
        return self.flops / (seconds * self.peak)


def find(pipe: jpipe.Pipeline, batch: Any) -> Utilization | None:
    """Return the FLOPs of a step and the peak FLOP/s of the devices, or None if a peak is unknown, for example on CPUs.

    The peak belongs to the dtype with the most FLOPs. Of the batch only the shapes and dtypes are used.
    """
    kinds = device_kinds(pipe)
    if any(not any(re.search(pattern, kind) for pattern, _ in PEAKS) for kind in kinds):
        return None  # the model need not be traced
    flops = forward_flops(pipe, batch)
    dtype = max(flops, key=lambda name: flops[name], default="")
    peaks = [peak_of(kind, dtype) for kind in kinds]
    known = [peak for peak in peaks if peak is not None]
    return Utilization(3 * sum(flops.values()), sum(known)) if flops and len(known) == len(peaks) else None


def forward_flops(pipe: jpipe.Pipeline, batch: Any) -> dict[str, float]:
    """Return the FLOPs of the matrix products and convolutions in the forward and the loss of a batch, by dtype of the factors."""
    microbatches = pipe.plan.microbatches
    specs = layer_specs(pipe.stack, pipe.plan, batch)
    flops_by_spec: dict[int, dict[str, float]] = {}  # the keys are ids of specs; equal layers share a spec
    total: dict[str, float] = {}

    def add(flops: Mapping[str, float]) -> None:
        for dtype, number in flops.items():
            total[dtype] = total.get(dtype, 0.0) + number * microbatches

    key = jax.eval_shape(lambda: jax.random.key(0))
    for layer_id, spec in specs.items():
        if id(spec) not in flops_by_spec:
            apply = pipe.stack.layers[layer_id].apply
            traced = jax.make_jaxpr(lambda p, s, x, k, apply=apply: apply(p, s, x, k, True))(spec.params, spec.state, spec.x, key)
            flops_by_spec[id(spec)] = count_products(traced.jaxpr)
        add(flops_by_spec[id(spec)])
    labels = jax.tree.map(
        lambda rows: jax.ShapeDtypeStruct((len(rows) // microbatches, *rows.shape[1:]), jax.dtypes.canonicalize_dtype(rows.dtype)), batch[1]
    )
    outputs = specs[pipe.stack.ids[-1]].output
    add(count_products(jax.make_jaxpr(pipe.loss)(outputs, labels).jaxpr))
    return total
