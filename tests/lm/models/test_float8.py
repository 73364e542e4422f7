"""Products in float8: they equal those of qwix for quantized training, and a block with them is near the block without."""

import builtins

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpipe import InputError
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.float8 import float8_product
from jpipe_lm.models.transformer import Block

qwix = pytest.importorskip("qwix")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flax, about qwix
def test_products_equal_those_of_qwix():
    random = np.random.default_rng(0)
    x, target = (jnp.asarray(random.normal(size=(2, 6, n)) * 10.0 ** random.integers(-3, 3, (2, 6, 1)), jnp.float32) for n in (16, 8))
    rule = qwix.QtRule(weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn, bwd_qtype=jnp.float8_e5m2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        ours = nnx.Linear(16, 8, use_bias=False, dot_general=float8_product, rngs=nnx.Rngs(0))
        theirs = qwix.quantize_model(nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0)), qwix.QtProvider([rule]), x)

        def with_gradients(layer):
            graph, params = nnx.split(layer)
            result = jax.value_and_grad(lambda params, x: (nnx.merge(graph, params)(x) * target).sum(), argnums=(0, 1))(params, x)
            return jax.tree.leaves(result)

        for found, expected in zip(with_gradients(ours), with_gradients(theirs), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
def test_a_block_is_near_the_block_without_float8(dtype):
    """All five linear layers multiply in float8. A row does not depend on the other rows."""
    sizes = {"width": 32, "heads": 2, "gated_mlp": True, "compute_dtype": dtype}
    block, plain = (Block(ModelConfig(**sizes, products=products), rngs=nnx.Rngs(0)) for products in ("float8", None))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 32)), dtype)
    with jax.numpy_dtype_promotion("standard"):
        found, expected = (jax.jit(lambda x, of=of: of(x))(x) for of in (block, plain))
        difference = np.asarray(found - expected, np.float32)
        assert 1e-4 < np.abs(difference).mean() < 0.05
        text = str(jax.make_jaxpr(block)(x))
        assert text.count("f8_e4m3fn") >= 2 * 5
        np.testing.assert_array_equal(jax.jit(lambda x: block(x))(x[:1])[0], found[0])


def test_qwix_is_named_where_it_is_missing(monkeypatch):
    known = builtins.__import__

    def without_qwix(name, *rest):
        if name == "qwix":
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_qwix)
    with pytest.raises(
        InputError, match=r"model\.products: qwix is not installed; install it with pip install qwix, or remove model\.products"
    ):
        float8_product(jnp.ones((2, 4)), jnp.ones((4, 4)))
