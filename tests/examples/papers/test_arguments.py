"""Invalid arguments of the papers' models, data and losses, and data of another model, give a one-line error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.papers.data import captions, images, translation, words
from examples.papers.losses import smoothed_cross_entropy
from examples.papers.models.awd_lm import awd_lm
from examples.papers.models.gnmt import gnmt
from examples.papers.models.inception import inception_v3
from examples.papers.models.resnet import resnet50
from examples.papers.models.s2vt import s2vt
from examples.papers.models.vgg import alexnet, vgg16
from jpipe import InputError


def awd(**arguments):
    return awd_lm(4, **arguments)


def loss(**arguments):
    return smoothed_cross_entropy(jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), **arguments)


@pytest.mark.parametrize(
    ("function", "name", "value", "expected"),
    [
        (gnmt, "dropout", 1, "a number from 0 to less than 1"),
        (gnmt, "vocab_size", 1, "an integer from 2 to 10000000"),
        (gnmt, "width", 0, "an integer from 1 to 1000000"),
        (gnmt, "depth", 4.0, "an integer from 1 to 1000"),
        (gnmt, "share_embeddings", 1, "True or False"),
        (awd, "dropout_words", -0.1, "a number from 0 to less than 1"),
        (awd, "dropout_weights", 1.5, "a number from 0 to less than 1"),
        (awd, "hidden", 0, "an integer from 1 to 1000000"),
        (awd, "depth", 0, "an integer from 1 to 1000"),
        (s2vt, "dropout", float("nan"), "a number from 0 to less than 1"),
        (s2vt, "hidden", -5, "an integer from 1 to 1000000"),
        (alexnet, "classes", 0, "an integer from 2 to 10000000"),
        (alexnet, "dropout", 1.0, "a number from 0 to less than 1"),
        (vgg16, "width", 0, "a number above 0 and at most 16"),
        (vgg16, "batch_norm", "no", "True or False"),
        (resnet50, "width", float("inf"), "a number above 0 and at most 16"),
        (resnet50, "image_size", 10**6, "an integer from 1 to 4096"),
        (resnet50, "blocks", 3, "4 numbers of blocks"),
        (resnet50, "blocks", ["a"] * 4, "4 numbers of blocks"),
        (inception_v3, "dropout", "half", "a number from 0 to less than 1"),
        (inception_v3, "classes", True, "an integer from 2 to 10000000"),
        (images.load, "image_size", 0, "an integer from 1 to 4096"),
        (images.load, "smallest_crop", 0, "a number above 0 and at most 1"),
        (images.load, "validation_fraction", 1, "a number from 0 to less than 1"),
        (translation.load, "source_length", 0, "an integer from 1 to 100000"),
        (translation.load, "buckets", ["a"], "lengths that grow"),
        (translation.load, "unusable", "keep", "'refuse' or 'drop'"),
        (captions.load, "frames", 0, "an integer from 1 to 100000"),
        (captions.load, "vocab_size", 1, "an integer from 2 to 10000000"),
        (words.load, "length", -1, "an integer from 1 to 100000"),
        (words.load, "vocab_size", 0, "an integer from 2 to 10000000"),
        (loss, "smoothing", 1, "a number from 0 to less than 1"),
    ],
)
def test_an_argument_out_of_range_is_named(function, name, value, expected):
    section, batches = "loss" if function is loss else "model", {}
    if function.__name__ == "load":
        section, batches = "data", {"seed": 0, "batch_size": 2, "folder": "nowhere"}
    with pytest.raises(InputError) as caught:
        function(**batches, **{name: value})
    message = str(caught.value)
    assert message.startswith(f"{section}.arguments.{name}: expected {expected}")
    assert "\n" not in message
    assert f"found {value!r}" in message


IMAGES = jax.ShapeDtypeStruct((2, 96, 96, 3), np.float32)
TOKENS = {"tokens": jax.ShapeDtypeStruct((2, 5), np.int32)}
SIZE = r"data\.arguments\.image_size: expected images of 80 × 80 pixels, model\.arguments\.image_size, found 96 × 96; change one of them"
NO_IMAGES = r"data\.target: expected images, an array \(rows, 80, 80, 3\), which the model reads, found the fields 'tokens'"


@pytest.mark.parametrize(
    "model", [alexnet, vgg16, *(pytest.param(model, marks=pytest.mark.exhaustive) for model in (resnet50, inception_v3))]
)
@pytest.mark.parametrize(("inputs", "message"), [(IMAGES, SIZE), (TOKENS, NO_IMAGES)])
def test_a_model_of_images_checks_the_images_of_a_batch(model, inputs, message):
    with pytest.raises(InputError, match=message):
        model(image_size=80, width=0.03, classes=3).specs(inputs)


@pytest.mark.parametrize(
    ("model", "data", "fields"),
    [
        (gnmt, "translation", "'source' and 'source_length' and 'target'"),
        (awd, "words", "'tokens' and 'continues'"),
        (s2vt, "captions", "'features' and 'tokens'"),
    ],
)
def test_a_model_of_sequences_checks_the_fields_of_a_batch(model, data, fields):
    with pytest.raises(InputError, match=rf"data\.target: expected inputs with {fields}, .*data\.{data}:load, found float32\[2, 96"):
        model(width=8).specs(IMAGES)
