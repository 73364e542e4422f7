"""The papers' image models have the published numbers of parameters, accept small images, and compute what the papers describe."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples.papers.models import inception, resnet, vgg
from examples.papers.models.convolutions import Conv, average_pool
from jpipe import InputError
from tests.lm.models.running import applied, params_of

LATE = pytest.mark.slow  # tracing so many layers takes seconds
PUBLISHED = [("alexnet", 61_100_840), ("vgg16", 138_357_544), pytest.param("resnet50", 25_557_032, marks=LATE),
             pytest.param("inception_v3", 23_834_568, marks=pytest.mark.exhaustive)]  # fmt: skip
SMALLEST = [
    ("alexnet", 63),
    ("vgg16", 32),
    pytest.param("resnet50", 32, marks=pytest.mark.exhaustive),
    pytest.param("inception_v3", 75, marks=pytest.mark.exhaustive),
]


MODELS = {"alexnet": vgg.alexnet, "vgg16": vgg.vgg16, "resnet50": resnet.resnet50, "inception_v3": inception.inception_v3}


def stack_of(target: str, **arguments: Any) -> Any:
    return MODELS[target](**arguments)


def specs_of(target: str, size: int, **arguments: Any) -> Any:
    return stack_of(target, image_size=size, **arguments).specs(jax.ShapeDtypeStruct((1, size, size, 3), np.float32))


@pytest.mark.parametrize(("target", "count"), PUBLISHED)
def test_models_have_as_many_parameters_as_published(target, count):
    """The counts are those of torchvision; for Inception-v3 without its auxiliary head, which has 3,326,696."""
    specs = specs_of(target, 299 if target == "inception_v3" else 224)
    assert sum(leaf.size for spec in specs.values() for leaf in jax.tree.leaves(spec.params)) == count
    assert specs[next(reversed(specs))].output.shape == (1, 1000)


@pytest.mark.exhaustive
def test_layers_have_the_names_of_the_papers():
    assert stack_of("alexnet").ids == ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8")
    assert stack_of("vgg16").ids[2:8] == ("conv2_1", "conv2_2", "conv3_1", "conv3_2", "conv3_3", "conv4_1")
    blocks = [f"block{group}_{i}" for group, count in enumerate((3, 4, 6, 3), 1) for i in range(1, count + 1)]
    assert stack_of("resnet50").ids == ("conv1", *blocks, "fc")
    mixed = [f"mixed_{name}" for name in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e", "7a", "7b", "7c")]
    assert stack_of("inception_v3").ids == ("conv_1a", "conv_2a", "conv_2b", "conv_3b", "conv_4a", *mixed, "fc")


@pytest.mark.exhaustive
def test_batch_norm_follows_each_convolution_of_vgg16():
    plain, normed = (specs_of("vgg16", 32, width=0.03, classes=7, batch_norm=choice) for choice in (False, True))
    assert {layer_id: spec.output for layer_id, spec in plain.items()} == {layer_id: spec.output for layer_id, spec in normed.items()}
    assert {layer_id for layer_id, spec in normed.items() if "norm" in spec.params} == {name for name in normed if name.startswith("conv")}
    assert not any("norm" in spec.params for spec in plain.values())


@pytest.mark.exhaustive
def test_fewer_blocks_are_the_first_of_each_group():
    assert stack_of("resnet50", blocks=[1, 2, 1, 1]).ids == ("conv1", "block1_1", "block2_1", "block2_2", "block3_1", "block4_1", "fc")
    mixed = [f"mixed_{name}" for name in ("5b", "6a", "6b", "6c", "7a", "7b")]
    assert stack_of("inception_v3", blocks=[1, 2, 1]).ids[5:] == (*mixed, "fc")
    assert stack_of("inception_v3", blocks=[3, 4, 2]).ids == stack_of("inception_v3").ids


@pytest.mark.parametrize("target", ["resnet50", pytest.param("inception_v3", marks=pytest.mark.exhaustive)])
def test_fewer_blocks_fit_each_other(target):
    specs = specs_of(target, 75, width=0.03, classes=7, blocks=[1, 1, 1, 1] if target == "resnet50" else [1, 1, 1])
    assert specs["fc"].output.shape == (1, 7)


@pytest.mark.parametrize(("target", "size"), SMALLEST)
def test_the_smallest_image_leaves_one_pixel_and_a_smaller_one_is_refused(target, size):
    specs = specs_of(target, size, width=0.03, classes=7)
    last = [spec.output.shape for spec in specs.values() if len(spec.output.shape) == 4][-1]
    assert last[:3] == (1, 1, 1)
    assert specs[next(reversed(specs))].output.shape == (1, 7)
    message = f"model.arguments.image_size: expected at least {size} pixels per side, found {size - 1}; change it"
    with pytest.raises(InputError, match=re.escape(message)):
        stack_of(target, image_size=size - 1)


def test_widths_scale_channels():
    specs = specs_of("vgg16", 32, width=0.25, classes=3)
    assert specs["conv1_1"].output.shape == (1, 32, 32, 16)
    assert specs["conv5_3"].output.shape == (1, 1, 1, 128)
    assert specs["fc7"].output.shape == (1, 1024)


@pytest.mark.slow
def test_a_residual_block_adds_its_input():
    block = resnet.Block(8, 2, 8, 1, rngs=nnx.Rngs(0))
    block.eval()
    x = jax.random.normal(jax.random.key(1), (2, 5, 5, 8))
    np.testing.assert_allclose(block(x), nnx.relu(x))
    block.expand.norm.scale[...] = jnp.ones(8)
    inner = block.conv(block.reduce(x)) @ block.expand.conv.kernel[...][0, 0] / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(block(x), nnx.relu(x + inner), rtol=1e-5, atol=1e-5)
    halving = resnet.Block(8, 2, 16, 2, rngs=nnx.Rngs(0))
    halving.eval()
    kernel = halving.project.conv.kernel[...][0, 0]
    np.testing.assert_allclose(halving(x), nnx.relu(x[:, ::2, ::2] @ kernel / np.sqrt(1 + 1e-5)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_branches_are_put_beside_each_other():
    pair = Conv(3, (1, 3)), Conv(2, (3, 1))
    mixed = inception.Mixed(4, ((Conv(5, (1, 1)),), (average_pool, pair)), rngs=nnx.Rngs(0))
    mixed.eval()
    x = jax.random.normal(jax.random.key(1), (2, 6, 6, 4))
    whole = mixed(x)
    first = jax.nn.relu(x @ mixed.branches[0].layers[0].conv.kernel[...][0, 0] / np.sqrt(1 + 1e-3))
    np.testing.assert_allclose(whole[..., :5], first, rtol=1e-5, atol=1e-6)
    around = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    averages = sum(around[:, i : i + 6, j : j + 6] for i in range(3) for j in range(3)) / 9
    wide = jnp.pad(averages, ((0, 0), (0, 0), (1, 1), (0, 0)))
    kernel = mixed.branches[1].layers[1].parts[0].conv.kernel[...]
    second = sum(wide[:, :, j : j + 6] @ kernel[0, j] for j in range(3)) / np.sqrt(1 + 1e-3)
    np.testing.assert_allclose(whole[..., 5:8], jax.nn.relu(second), rtol=1e-4, atol=1e-5)
    assert whole.shape == (2, 6, 6, 10)


@pytest.mark.slow
def test_alexnet_is_convolutions_and_dense_layers():
    """The reference is the same model written with JAX's own convolution."""
    stack = stack_of("alexnet", image_size=63, width=0.05, classes=3)
    x = jax.random.normal(jax.random.key(1), (2, 63, 63, 3))
    params = params_of(stack, x)
    activations = x
    for layer_id, stride, padding, pooled in (
        ("conv1", 4, 2, 1),
        ("conv2", 1, 2, 1),
        ("conv3", 1, 1, 0),
        ("conv4", 1, 1, 0),
        ("conv5", 1, 1, 1),
    ):
        conv = params[layer_id]["conv"]
        dims = ("NHWC", "HWIO", "NHWC")
        activations = jax.lax.conv_general_dilated(activations, conv["kernel"], (stride,) * 2, [(padding,) * 2] * 2, dimension_numbers=dims)
        activations = jnp.maximum(activations + conv["bias"][None, None, None], 0)
        if pooled:
            activations = jax.lax.reduce_window(activations, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")
    activations = activations.reshape(2, -1)
    for layer_id in ("fc6", "fc7", "fc8"):
        activations = activations @ params[layer_id]["linear"]["kernel"] + params[layer_id]["linear"]["bias"][None]
        activations = activations if layer_id == "fc8" else jnp.maximum(activations, 0)
    np.testing.assert_allclose(applied(stack, params, x), activations, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("target", "blocks", "message"),
    [
        ("resnet50", [1, 0, 1, 1], "expected 4 numbers of blocks: 1 to 64"),
        ("resnet50", [1, 1], "expected 4 numbers of blocks: 1 to 64"),
        ("inception_v3", [1, 5, 1], "expected 3 numbers of blocks: 1 to 3, 1 to 4, 1 to 2"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(target, blocks, message):
    with pytest.raises(InputError, match=message):
        stack_of(target, blocks=blocks)


def test_top5_needs_five_classes(tmp_path):
    from jpipe_train.assemble.metrics import metrics
    from jpipe_train.config.config import EvalConfig

    metric = metrics(EvalConfig(metrics={"top5": "top5"}))["top5"]
    with pytest.raises(InputError, match=r"eval.metrics: top5: expected logits of at least 5 classes, found 4; remove top5"):
        metric(jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32))
    logits = jax.random.normal(jax.random.key(0), (64, 9))
    labels = jax.random.randint(jax.random.key(1), (64,), -1, 9, jnp.int32)
    hits, counted = metric(logits, labels)
    expected = sum(label >= 0 and label in np.argsort(-row)[:5] for row, label in zip(np.asarray(logits), np.asarray(labels), strict=True))
    assert (int(hits), int(counted)) == (expected, int((labels >= 0).sum()))
    assert 0 < expected < int(counted)
