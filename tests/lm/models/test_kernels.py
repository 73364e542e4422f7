"""Attention by the kernels of TPUs and of cuDNN equals JAX's own, and `auto` takes them where they are."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jpipe import InputError
from jpipe.context import StageMesh, tracing_for, tracing_on
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import attention, kernels
from jpipe_lm.models.blockwise import Masked

SCALE = 0.3


@pytest.fixture(autouse=True)
def promotion():
    """Let JAX's own attention promote dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def inputs_of(length, heads=4, kv_heads=2, size=16):
    random = np.random.default_rng(0)
    return [jnp.asarray(random.normal(size=(2, length, n, size)), jnp.float32) for n in (heads, kv_heads, kv_heads)]


def plain(q, k, v, segments, masked, soft_cap=None):
    config = ModelConfig(attention="xla", attention_scale=SCALE, attention_soft_cap=soft_cap, window=masked.window)
    config = config if masked.is_causal else config.model_copy(update={"kind": "bert"})
    return attention.attend(q, k, v, segments, config)


def with_gradients(function, inputs):
    """Return the outputs, and the gradients of a weighted sum of them."""
    weights = jnp.asarray(np.random.default_rng(1).normal(size=inputs[0].shape), jnp.float32)

    @jax.jit
    def both(*x):
        outputs, pull = jax.vjp(function, *x)
        return outputs, pull(weights)

    return both(*inputs)


def check_equal(found, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, expected)


@pytest.mark.parametrize(("masked", "has_segments", "soft_cap"), [
    (Masked(True), True, None),
    (Masked(True, 100), False, None),
    pytest.param(Masked(True, 100), True, 2.0, marks=pytest.mark.exhaustive),
    pytest.param(Masked(False), True, None, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_splash_attention_equals_attention_of_xla(monkeypatch, masked, has_segments, soft_cap):
    monkeypatch.setattr(kernels, "BLOCKS", (128,))
    inputs = inputs_of(256)
    segments = jnp.asarray([[1] * 90 + [2] * 100 + [0] * 66, [1] * 256], jnp.int32) if has_segments else None
    splash = partial(kernels.splash, segments=segments, masked=masked, scale=SCALE, soft_cap=soft_cap, interpret=True)
    check_equal(with_gradients(splash, inputs), with_gradients(lambda *x: plain(*x, segments, masked, soft_cap), inputs))


def test_splash_attention_on_a_mesh():
    """Each device has a row, and one of the two heads of keys."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    inputs, segments = inputs_of(128), jnp.asarray([[1] * 128, [1] * 60 + [2] * 68], jnp.int32)

    def on_mesh(*x):
        with tracing_on(StageMesh(mesh.abstract_mesh, {"heads": "model"}, ("data",))):
            return kernels.splash(*x, segments, Masked(True), scale=SCALE, interpret=True)

    with jax.set_mesh(mesh):
        found = with_gradients(on_mesh, inputs)
    check_equal(found, with_gradients(lambda *x: plain(*x, segments, Masked(True)), inputs))


def test_documents_have_lengths_and_starts(monkeypatch):
    monkeypatch.setattr(kernels, "DOCUMENTS", 3)
    lengths, starts = kernels.documents_of(jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1]], jnp.int32))
    assert lengths.tolist() == [[2, 3, 1], [6, -1, -1]]
    assert starts.tolist() == [[0, 2, 5, -1], [0, -1, -1, -1]]


@pytest.mark.parametrize("masked", [Masked(True, 3), pytest.param(Masked(False), marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("most", [4, 3])
def test_packed_documents_equal_documents_behind_a_mask(monkeypatch, masked, most):
    """In place of cuDNN, which needs a GPU, a function with its interface. With one document more than that, blocks are computed."""
    monkeypatch.setattr(kernels, "DOCUMENTS", most)
    segments, inputs, calls = jnp.asarray([[1, 1, 2, 2, 2, 3, 3, 0], [1] * 8], jnp.int32), inputs_of(8), []

    def of_cudnn(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, sliding_window_length):
        assert (q_seqlen is kv_seqlen, q_offsets is kv_offsets, scale) == (True, True, SCALE)
        assert mask_type.name == ("PADDING_CAUSAL" if masked.is_causal else "PADDING")
        at = jnp.arange(q.shape[1])[None, :, None]
        inside = (at >= q_offsets[:, None, :-1]) & (at < q_offsets[:, None, :-1] + q_seqlen[:, None]) & (q_seqlen[:, None] > 0)
        return plain(q, k, v, jnp.where(inside.any(-1), inside.argmax(-1), -1), Masked(masked.is_causal, sliding_window_length))

    def otherwise(*arguments):
        calls.append("blocks")
        return plain(*arguments, masked) + (most == 4) * 1000.0

    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.dot_product_attention", of_cudnn)
    found = with_gradients(lambda *x: kernels.packed(otherwise, *x, segments, masked, SCALE), inputs)
    check_equal(found, with_gradients(lambda *x: plain(*x, segments, masked), inputs))
    assert calls


@pytest.mark.parametrize(("platform", "length", "dtype", "capability", "expected"), [
    ("absent tpu", 128, "bfloat16", "", "xla"),
    ("cpu", 128, "bfloat16", "9.0", "xla"),
    ("tpu", 256, "float32", "", "splash"),
    ("tpu", 100, "float32", "", "xla"),
    ("gpu", 128, "bfloat16", "8.0", "cudnn"),
    ("gpu", 128, "float32", "8.0", "xla"),
    ("gpu", 128, "bfloat16", "7.5", "xla"),
])  # fmt: skip
def test_auto_takes_the_kernel_of_the_platform(monkeypatch, platform, length, dtype, capability, expected):
    calls, backend, platform = [], "cpu" if platform.startswith("absent") else platform, platform.split()[-1]

    def record(name):
        return lambda q, *_, **__: calls.append(name) or q

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(kernels, "splash", record("splash"))
    monkeypatch.setattr(kernels, "is_gpu_with", lambda least: capability >= least)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, implementation, **__: calls.append(implementation) or q)
    q, k, v = (x.astype(dtype) for x in inputs_of(length))
    with tracing_for(platform):
        attention.attend(q, k, v, None, ModelConfig(compute_dtype=dtype))
    assert calls == [expected]


@pytest.mark.parametrize("length", [8, 1])
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_repeated_keys_and_values_change_no_number(monkeypatch, platform, length):
    heads, of_jax = [], jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **options: heads.append(k.shape[2]) or of_jax(q, k, v, **options))

    def gradients(platform):
        with tracing_for(platform):
            return jax.grad(lambda *arrays: jnp.sum(attention.attend(*arrays, None, ModelConfig(attention="xla")) ** 2), (0, 1, 2))(
                *inputs_of(length)
            )

    for found, expected in zip(gradients(platform), gradients("cpu"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    q, k, _ = inputs_of(length)
    assert heads == [k.shape[2] if length == 1 else q.shape[2], k.shape[2]]


def test_auto_falls_back_where_cudnn_is_not_installed(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "is_gpu_with", lambda _: True)
    q, k, v = (x.astype(jnp.bfloat16) for x in inputs_of(8))
    config = ModelConfig(compute_dtype="bfloat16")
    with tracing_for("gpu"):
        found = attention.attend(q, k, v, None, config)
    np.testing.assert_array_equal(found, attention.attend(q, k, v, None, config.model_copy(update={"attention": "xla"})))


@pytest.mark.parametrize(("platform", "length", "words"), [
    ("cpu", 128, "splash needs TPUs, found CPUs; set model.attention to auto"),
    ("tpu", 100, "splash needs rows of a multiple of 128 positions, found 100; change them, or set model.attention to auto"),
])  # fmt: skip
def test_splash_attention_is_refused_where_it_cannot_run(platform, length, words):
    with tracing_for(platform), pytest.raises(InputError, match=words):
        attention.attend(*inputs_of(length), None, ModelConfig(attention="splash"))
