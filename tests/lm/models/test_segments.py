"""Documents packed into one row are separate: in a pipeline they give the loss and gradients of separate rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from tests.lm.models.running import LLAMA, SMALL, applied, params_of, trained

LENGTHS = (3, 4)  # and one position of padding
LONG = {  # one of the documents is longer than the original positions, and the window shorter than both
    "window": 3,
    "rope_scaling": {
        "kind": "longrope",
        "original_positions": 3,
        "short_factors": [1.0, 2.0, 1.0, 3.0],
        "long_factors": [4.0, 1.0, 5.0, 2.0],
    },
}
CHUNKS = {**LLAMA, "window": 3, "window_kind": "chunks", "rope_pairs": "neighbours"}
DELTA = {**LLAMA, "delta": {"key_heads": 2, "value_heads": 4, "key_size": 4, "value_size": 3}}
MORE = ({}, "pipedream_flush"), ({**LLAMA, **LONG}, "gpipe"), (CHUNKS, "gpipe"), (DELTA, "gpipe")


def rows():
    """Return inputs and labels with two documents in each row, and the same with one document in each row."""
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 256, (2, 2, 8)).astype(np.int32)
    segments = np.repeat(np.asarray([[1, 2, 0]], np.int32), (*LENGTHS, 1), axis=1).repeat(2, axis=0)
    labels[segments == 0] = -1
    alone = np.zeros((4, 8), np.int32), np.full((4, 8), -1, np.int32)
    for row in range(2):
        for number, (begin, length) in enumerate(((0, 3), (3, 4))):
            for whole, one in zip((tokens, labels), alone, strict=True):
                one[2 * row + number, :length] = whole[row, begin : begin + length]
    return ({"tokens": tokens, "segments": segments}, labels), alone


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("keys", "schedule"),
    [
        (LLAMA, "zb_h1"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE),
    ],
    ids=["llama", "gpt", "longrope", "chunks", "delta"],
)
def test_packed_documents_teach_what_they_teach_alone(keys, schedule):
    packed, (tokens, labels) = rows()
    # LongRoPE needs to know which positions are padding, for it chooses by the length of a document.
    alone = ({"tokens": tokens, "segments": (labels >= 0).astype(np.int32)} if "rope_scaling" in keys else tokens), labels
    results = []
    for batch in (packed, alone):
        stack = layers(ModelConfig(**SMALL | {"depth": 1}, **keys))
        results.append(trained(stack, jpipe.Plan.even(stack.ids, 2, schedule, 2), [batch, batch]))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    assert results[0][0][1] < results[0][0][0]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6), results[0][1], results[1][1])


@pytest.mark.parametrize("keys", [{}, pytest.param({"kind": "bert"}, marks=pytest.mark.exhaustive), CHUNKS, DELTA])
def test_nothing_of_one_document_is_in_the_logits_of_another(keys):
    kind, stack = keys.get("kind"), layers(ModelConfig(**SMALL, **keys))
    ((inputs, _), _) = rows()
    params = params_of(stack, inputs)

    def logits(inputs):
        outputs = applied(stack, params, jax.tree.map(jnp.asarray, inputs))
        return np.asarray(outputs["tokens"] if kind == "bert" else outputs)

    changed = {**inputs, "tokens": inputs["tokens"].copy()}
    changed["tokens"][:, 1] += 1 - 2 * (changed["tokens"][:, 1] == 255)
    before, after = logits(inputs), logits(changed)
    np.testing.assert_array_equal(before[:, 3:], after[:, 3:])
    assert (before[:, 2] != after[:, 2]).any()
    assert (before[:, 0] != after[:, 0]).any() == (kind == "bert")  # a decoder does not look ahead
