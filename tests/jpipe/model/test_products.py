"""The FLOPs of convolutions are what XLA counts for them and their gradients: neither padding nor spread inputs count."""

import jax
import jax.numpy as jnp
import pytest

from jpipe.model import count_products

SAME, UNEVEN = "SAME", ((2, 1), (1, 2))


@pytest.mark.parametrize(
    ("stride", "padding", "spread", "window_spread", "groups"),
    [(1, SAME, 1, 1, 1), (2, SAME, 1, 1, 1), (1, "VALID", 1, 2, 1), (1, UNEVEN, 2, 1, 1), (2, SAME, 1, 1, 2)],
)
def test_a_convolution_and_its_gradients(stride, padding, spread, window_spread, groups):
    image, kernel = jnp.ones((3, 15, 14, 8)), jnp.ones((3, 3, 8 // groups, 6))

    def convolve(image, kernel):
        dilations = {"lhs_dilation": (spread, spread), "rhs_dilation": (window_spread, window_spread)}
        names = ("NHWC", "HWIO", "NHWC")
        strides = (stride, stride)
        return jax.lax.conv_general_dilated(
            image, kernel, strides, padding, **dilations, dimension_numbers=names, feature_group_count=groups
        )

    def gradient(argument):
        return jax.grad(lambda image, kernel: convolve(image, kernel).sum(), argument)

    for program in (convolve, gradient(0), gradient(1)):
        counted = sum(count_products(jax.make_jaxpr(program)(image, kernel).jaxpr).values())
        assert counted == jax.jit(program).lower(image, kernel).cost_analysis()["flops"] > 0
