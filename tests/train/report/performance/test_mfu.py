"""MFU: FLOPs equal to the formula, peaks of common devices, and where it is shown."""

import json

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jpipe.model import count_products
from jpipe_lm.models import kernels
from jpipe_lm.models.blockwise import Masked
from jpipe_train.assemble.build import build
from jpipe_train.console.progress import Reporter
from jpipe_train.report.metrics_log import repeatable
from jpipe_train.report.performance import mfu
from jpipe_train.run import loop
from tests.train.conftest import changed
from tests.train.report.loggers.test_tensorboard import read


def flops_of(config) -> dict[str, float]:
    pipe, batches = build(config, Reporter(1, 1, "", Console(quiet=True)))
    return mfu.forward_flops(pipe, batches.train[0])


def test_the_flops_of_a_gpt_are_those_of_the_formula(tiny):
    depth, width, positions, rows = 2, 16, 8, 4
    of_a_token = depth * (24 * width**2 + 4 * positions * width) + 2 * width * 256
    sizes = {"model": {"depth": depth, "width": width}, "train": {"batch_size": rows}}
    for plan in ({}, {"microbatches": 4}, {"recompute": "full", "replicas": 2, "num_stages": 1, "schedule": "gpipe"}):
        assert flops_of(changed(tiny, **sizes, plan=plan)) == {"float32": rows * positions * of_a_token}, plan
    assert flops_of(changed(tiny, **sizes, loss={"chunk": 8})) == {"float32": rows * positions * of_a_token}, "logits in chunks"


def test_the_flops_of_a_llama_are_those_of_its_products(tiny):
    """Two heads share keys and values, and the MLP has a gate."""
    depth, width, positions, rows = 2, 16, 8, 4
    of_a_layer = 2 * width * (2 * width + 2 * width // 2) + 3 * 2 * width * 24 + 4 * positions * width
    keys = {
        "depth": depth,
        "width": width,
        "mlp_width": 24,
        "kv_heads": 1,
        "positions": "rope",
        "norm": "rms",
        "gated_mlp": True,
        "tied": True,
    }
    expected = rows * positions * (depth * of_a_layer + 2 * width * 256)
    assert flops_of(changed(tiny, model=keys, train={"batch_size": rows})) == {"float32": expected}


def test_flops_are_of_the_dtype_that_is_multiplied(tiny):
    plain = flops_of(changed(tiny))
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes bfloat16 to float32 inside
        assert flops_of(changed(tiny, precision={"compute": "bfloat16"})) == {"bfloat16": plain["float32"]}


def test_products_in_loops_and_fused_attention_count(monkeypatch):
    x, matrix = jnp.ones((4, 8)), jnp.ones((8, 8))
    looped = jax.make_jaxpr(lambda x: jax.lax.scan(jax.checkpoint(lambda x, _: (jax.nn.relu(x @ matrix), None)), x, length=5)[0])(x)
    assert count_products(looped.jaxpr) == {"float32": 5 * 2 * 4 * 8 * 8}
    for needs in ("check_cudnn_version", "check_compute_capability"):
        monkeypatch.setattr(f"jax._src.cudnn.fused_attention_stablehlo.{needs}", lambda *_: 91000)
    query, key = (jax.ShapeDtypeStruct((2, *shape, 64), jnp.bfloat16) for shape in ((128, 4), (256, 2)))
    for implementation in ("cudnn", "xla"):
        with jax.numpy_dtype_promotion("standard"):
            attention = jax.make_jaxpr(lambda q, k, i=implementation: jax.nn.dot_product_attention(q, k, k, implementation=i))(query, key)
        assert count_products(attention.jaxpr) == {"bfloat16": 4 * 2 * 4 * 128 * 256 * 64}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        splash = jax.make_jaxpr(lambda q, k: kernels.splash(q, k, k, None, Masked(True), scale=1.0))(query, query)
    assert count_products(splash.jaxpr) == {"bfloat16": 4 * 2 * 4 * 128 * 128 * 64}


@pytest.mark.parametrize(
    ("kind", "dtype", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "float32", 156),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "float16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA L40", "bfloat16", 181.05),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA A10", "bfloat16", 125),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA A40", "bfloat16", 149.7),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-PCIE-32GB", "float32", 14),
        ("Tesla V100-SXM2-32GB", "bfloat16", None),
        ("Tesla T4", "float16", 65),
        ("TPU v3", "bfloat16", 61.5),
        ("TPU v4", "float32", 275),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5e", "bfloat16", 197),
        ("TPU v5", "bfloat16", 459),
        ("TPU v5p", "bfloat16", 459),
        ("TPU v6 lite", "bfloat16", 918),
        ("TPU v6e", "float32", 918),
        ("TPU v4 lite", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float64", None),
        ("cpu", "float32", None),
    ],
)
def test_the_peak_of_a_device(kind, dtype, expected):
    assert mfu.peak_of(kind, dtype) == (None if expected is None else pytest.approx(expected * 1e12))


def test_the_peak_of_float32_depends_on_how_it_is_multiplied(monkeypatch):
    for precision, gpu, tpu in (("float32", 66.9, None), ("highest", 66.9, None), ("tensorfloat32", 494.7, 275), ("high", None, None)):
        with jax.default_matmul_precision(precision):
            peaks = [mfu.peak_of(kind, "float32") for kind in ("NVIDIA H100 80GB HBM3", "TPU v4")]
        assert peaks == [None if expected is None else pytest.approx(expected * 1e12) for expected in (gpu, tpu)], precision
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert mfu.peak_of("NVIDIA H100 80GB HBM3", "float32") == pytest.approx(66.9e12)
    assert mfu.peak_of("TPU v4", "float32") == pytest.approx(275e12)


def test_a_run_prints_its_mfu_where_the_peak_is_known(tiny, monkeypatch, capsys):
    config = changed(tiny)
    monkeypatch.setattr(mfu, "PEAKS", (("^cpu$", {"float32": 1e-4}),))
    folder = loop.main(config).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert "mfu" not in rows[0]  # nor is the speed known
    per_token = 3 * flops_of(config)["float32"] / (4 * 8)
    for row in rows[1:]:
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * per_token / (2 * 1e8), rel=2e-3)  # two devices
        assert "mfu" not in repeatable(row)
    assert [(step, pytest.approx(value)) for step, value in read(folder / "tensorboard")["mfu"]] == [
        (r["step"], r["mfu"]) for r in rows[1:]
    ]
    assert f"  MFU {rows[-1]['mfu']:.1%}  " in capsys.readouterr().out
    assert "<dt>MFU</dt>" in (folder / "report.html").read_text()


def test_a_run_on_devices_with_an_unknown_peak_prints_no_mfu(tiny, monkeypatch, capsys):
    monkeypatch.setattr(mfu, "forward_flops", lambda *_: pytest.fail("counted in vain"))
    folder = loop.main(changed(tiny)).folder
    assert "mfu" not in (folder / "metrics.jsonl").read_text()
    assert "MFU" not in capsys.readouterr().out + (folder / "report.html").read_text()
