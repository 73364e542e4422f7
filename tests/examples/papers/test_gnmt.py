"""GNMT: equality with NumPy, its number of parameters, and masked inputs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from examples.papers.models.gnmt import Attention, gnmt
from examples.papers.samples import make
from jpipe_train import cli
from tests.examples.papers.test_recurrent import plain_lstm
from tests.lm.models.running import params_of

SMALL = {"vocab_size": 13, "depth": 6, "width": 4, "dropout": 0.0}
FULL = {"source": (2, 9), "source_length": (2,), "target": (2, 8)}


def specs(**arguments):
    inputs = {name: jax.ShapeDtypeStruct(shape, np.int32) for name, shape in FULL.items()}
    return gnmt(**arguments).specs(inputs)


def numbers(spec):
    return sum(leaf.size for leaf in jax.tree.leaves(spec.params))


def test_its_layers_are_as_large_as_in_the_published_profile():
    # Bytes of the parameters that the original PipeDream publishes for GNMT-8. Its LSTMs have two biases for each direction, which only
    # their sum matters of, and its attention was not yet normalized: without the numbers g and b.
    published = {
        **{"embed": 132382720, "encoder_0": 67174400, "encoder_1": 50364416, "encoder_2": 33587200, "encoder_3": 33587200},
        **{"decoder_embed": 132382720, "decoder_0": 41979904, "decoder_1": 50364416, "decoder_2": 50364416, "decoder_3": 50364416},
        "head": 132512000,
    }
    biases = {name: 4 * 1024 for name in published if "coder_" in name and not name.endswith("embed")}
    biases["encoder_0"] *= 2
    counts = {name: numbers(spec) for name, spec in specs().items()}
    expected = {name: count // 4 - biases.get(name, 0) for name, count in published.items()}
    expected["decoder_0"] += 1024 + 1
    assert counts == expected


@pytest.mark.exhaustive
def test_gnmt_16_has_eight_more_lstms():
    small, large = (specs(depth=depth) for depth in (8, 16))
    more = [name for name in large if name not in small]
    assert more == [f"encoder_{i}" for i in range(4, 8)] + [f"decoder_{i}" for i in range(4, 8)]
    extra = sum(map(numbers, large.values())) - sum(map(numbers, small.values()))
    assert extra == 4 * (4 * 1024 * 2048 + 4096) + 4 * (4 * 1024 * 3072 + 4096)


def test_both_languages_can_have_the_same_vectors():
    stack = gnmt(vocab_size=13, depth=4, width=4, share_embeddings=True)
    assert stack.ties.first


def batch(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "source": rng.integers(0, 13, (3, 6)).astype(np.int32),
        "source_length": np.array([6, 3, 1], np.int32),
        "target": rng.integers(0, 13, (3, 5)).astype(np.int32),
    }


@pytest.fixture(scope="module")
def small():
    stack = gnmt(**SMALL)
    params = jax.tree.map(lambda leaf: leaf * 6, params_of(stack, batch()))  # so that all of it matters
    forward = jax.jit(lambda x: stack.apply(stack.ids, params, {i: {} for i in stack.ids}, x, key=None, microbatch=None, train=False)[0])
    return params, lambda x: np.asarray(forward(x))


def plain_attention(params, queries, keys, mask):
    v = np.asarray(params["v"], np.float64)
    outputs = np.zeros((queries.shape[0], queries.shape[1], keys.shape[2]))
    for row in range(queries.shape[0]):
        valid_keys = keys[row][mask[row]]
        for t, query in enumerate(queries[row]):
            scores = []
            for key in valid_keys:
                sums = (
                    query @ np.asarray(params["query"]["kernel"]) + key @ np.asarray(params["key"]["kernel"]) + np.asarray(params["bias"])
                )
                scores.append(float(params["g"]) * v @ np.tanh(sums) / np.sqrt((v**2).sum()))
            shares = np.exp(scores) / np.exp(scores).sum()
            outputs[row, t] = shares @ valid_keys
    return outputs


def plain_gnmt(params, inputs):
    def run(part, x, mask=None, reverse=False):
        return plain_lstm(x, part["kernel"], part["recurrent"], part["bias"], mask, reverse=reverse)[1]

    mask = np.arange(6)[None] < inputs["source_length"][:, None]
    x = np.asarray(params["embed"]["embedding"]["embedding"], np.float64)[inputs["source"]]
    first = params["encoder_0"]
    x = np.concatenate([run(first["forward"], x, mask), run(first["backward"], x, mask, reverse=True)], axis=-1)
    x = run(params["encoder_1"]["lstm"], x, mask)
    x = x + run(params["encoder_2"]["lstm"], x, mask)
    y = np.asarray(params["decoder_embed"]["embedding"]["embedding"], np.float64)[inputs["target"]]
    y = run(params["decoder_0"]["lstm"], y)
    attention = plain_attention(params["decoder_0"]["attention"], y, x, mask)
    y = run(params["decoder_1"]["lstm"], np.concatenate([y, attention], axis=-1))
    y = y + run(params["decoder_2"]["lstm"], np.concatenate([y, attention], axis=-1))
    return y @ np.asarray(params["head"]["logits"]["kernel"]) + np.asarray(params["head"]["logits"]["bias"])


@pytest.mark.slow
def test_it_computes_what_the_paper_says(small):
    params, forward = small
    np.testing.assert_allclose(forward(batch()), plain_gnmt(params, batch()), atol=2e-4)


def test_attention_reads_unmasked_positions_only():
    rng = np.random.default_rng(0)
    queries, keys = (jnp.asarray(rng.normal(size=(2, positions, 4)), jnp.float32) for positions in (3, 5))
    mask = jnp.arange(5)[None] < jnp.asarray([5, 2])[:, None]
    module = Attention(4)
    params = jax.tree.map(lambda leaf: leaf + 0.3, module.init(jax.random.key(0), queries, keys, mask)["params"])
    expected = plain_attention(params, *(np.asarray(each) for each in (queries, keys, mask)))
    np.testing.assert_allclose(module.apply({"params": params}, queries, keys, mask), expected, atol=1e-5)


@pytest.mark.slow
def test_the_decoder_reads_the_source_but_no_padding_and_no_later_word(small):
    _, forward = small
    before = forward(batch())
    source, padding, later = batch(), batch(), batch()
    source["source"][:, 0] = (source["source"][:, 0] + 1) % 13
    padding["source"][1, 3:] = (padding["source"][1, 3:] + 1) % 13
    later["target"][:, 3] = (later["target"][:, 3] + 1) % 13
    assert (forward(source) != before).any(axis=-1).all()
    np.testing.assert_array_equal(forward(padding), before)
    np.testing.assert_array_equal(forward(later)[:, :3], before[:, :3])
    assert (forward(later)[:, 3:] != before[:, 3:]).any(axis=-1).all()


@pytest.mark.exhaustive
def test_dropout_is_between_layers_in_training_only():
    stack = gnmt(**SMALL | {"dropout": 0.5})
    inputs = jax.tree.map(jnp.asarray, batch())
    params, x, drawing = params_of(stack, inputs), inputs, []
    for i, layer in stack.layers.items():
        y, other = (layer.apply(params[i], {}, x, jax.random.key(key), True)[0] for key in (0, 1))
        drawing += [i] if any((a != b).any() for a, b in zip(jax.tree.leaves(y), jax.tree.leaves(other), strict=True)) else []
        x = y
    assert drawing == ["encoder_1", "encoder_2", "decoder_1", "decoder_2"]

    def run(key, train):
        state = {i: {} for i in stack.ids}
        return np.asarray(stack.apply(stack.ids, params, state, inputs, key=jax.random.key(key), microbatch=0, train=train)[0])

    assert (run(0, True) != run(1, True)).any()
    np.testing.assert_array_equal(run(0, True), run(0, True))
    np.testing.assert_array_equal(run(0, False), run(1, False))


@pytest.mark.exhaustive
def test_a_run_with_buckets_resumes_with_equal_results(tmp_path, capsys):
    """Batches of three lengths are in flight at the same time; the evaluation includes rows that do not fill a batch."""
    make.SAMPLES["translation"](tmp_path, 0)
    for part, count in (("train", 60), ("validation", 19)):
        for name in ("source", "target"):
            lines = (tmp_path / f"{part}.{name}").read_text(encoding="utf-8").splitlines()[:count]
            cut = [" ".join(line.split()[: 2 + i % 5]) for i, line in enumerate(lines)]
            (tmp_path / f"{part}.{name}").write_text("\n".join(cut) + "\n", encoding="utf-8")
    config = {
        "data": {
            "target": "examples.papers.data.translation:load",
            "arguments": {"folder": str(tmp_path), "source_length": 10, "target_length": 10, "buckets": [4, 6]},
        },
        "model": {"target": "examples.papers.models.gnmt:gnmt", "arguments": {"vocab_size": 512, "depth": 4, "width": 8}},
        "train": {"steps": 8, "batch_size": 4, "eval_every": 4, "eval_batches": 3, "trace_batches": 0},
        "plan": {"schedule": "pipedream", "num_stages": 2, "microbatches": 1},
        "checkpoint": {"every": 4},
        "log": [],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["train", str(tmp_path / "config.yaml"), "--allow-code", "--set", f"run.dir={tmp_path / 'whole'}"]) == 0
    options = ["--set", f"run.dir={tmp_path / 'part'}"]
    assert cli.main(["train", str(tmp_path / "config.yaml"), "--allow-code", *options, "--set", "train.steps=4"]) == 0
    assert cli.main(["train", str(tmp_path / "config.yaml"), "--allow-code", *options, "--resume", "must"]) == 0
    whole, part = (losses(tmp_path / name / "metrics.jsonl") for name in ("whole", "part"))
    assert sorted(whole) == list(range(8))
    assert part == whole
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "whole"), "--allow-code"]) == 0
    assert "19 rows" in capsys.readouterr().out


def losses(file):
    """Return the losses of a metrics file by step."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
