"""Translation: greedy decoding equals a plain loop, and a run translates."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from examples.papers import translate
from examples.papers.models.gnmt import gnmt
from examples.papers.samples import make
from jpipe_train import cli
from jpipe_train.console.terminal import printable
from tests.lm.models.running import params_of


@pytest.mark.slow
def test_greedy_is_the_likeliest_token_after_token():
    rng = np.random.default_rng(0)
    inputs = {"source": rng.integers(0, 9, (3, 5)).astype(np.int32), "source_length": np.array([5, 2, 3], np.int32)}
    stack = gnmt(vocab_size=9, depth=4, width=6, dropout=0.0)
    params = params_of(stack, inputs | {"target": np.zeros((3, 4), np.int32)}, seed=3)
    params = jax.tree.map(lambda leaf: leaf * 3, params)
    forward = jax.jit(lambda x: stack.apply(stack.ids, params, {i: {} for i in stack.ids}, x, key=None, microbatch=None, train=False)[0])
    target = np.full((3, 5), 7, np.int32)
    for t in range(4):
        logits = forward(inputs | {"target": jnp.asarray(target[:, :-1])})
        target[:, t + 1] = np.asarray(logits)[:, t].argmax(-1)
    result = np.asarray(
        jax.jit(lambda params, inputs: translate.greedy(stack, params, inputs, 4, 7))(params, jax.tree.map(jnp.asarray, inputs))
    )
    np.testing.assert_array_equal(result, target[:, 1:])
    assert len({tuple(row) for row in result.tolist()}) > 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train one step on a few sentences with shared embeddings and return the folder of the text, the config and the run."""
    folder = tmp_path_factory.mktemp("translate")
    (folder / "text").mkdir()
    make.SAMPLES["translation"](folder / "text", 0)
    for name in ("validation.source", "validation.target"):
        lines = (folder / "text" / name).read_text(encoding="utf-8").splitlines(True)
        (folder / "text" / name).write_text("".join(lines[:5]), encoding="utf-8")
    arguments = {"folder": str(folder / "text"), "source_length": 10, "target_length": 10}
    config = {
        "data": {"target": translate.DATA, "arguments": arguments},
        "model": {"target": translate.MODEL, "arguments": {"vocab_size": 512, "depth": 4, "width": 8, "share_embeddings": True}},
        "train": {"steps": 1, "batch_size": 4, "eval_every": 1, "eval_batches": 1, "trace_batches": 0},
        "plan": {"schedule": "gpipe", "num_stages": 2, "microbatches": 2},
        "log": [],
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert cli.main(["train", str(folder / "config.yaml"), "--allow-code", "--set", f"run.dir={folder / 'run'}"]) == 0
    return folder


@pytest.mark.exhaustive
def test_a_run_translates_what_it_is_validated_on(run, tmp_path, capsys, monkeypatch):
    capsys.readouterr()
    scored = []

    class Sacrebleu:
        """In place of the library."""

        @staticmethod
        def corpus_bleu(hypotheses, references):
            scored.append((hypotheses, references))
            return type("Score", (), {"score": 12.5})

    monkeypatch.setitem(sys.modules, "sacrebleu", Sacrebleu)
    assert translate.main([str(run / "run")]) == 0
    printed = capsys.readouterr()
    lines = (run / "text" / "validation.target").read_text(encoding="utf-8").splitlines()
    assert printed.out.splitlines() == [printable(line) for line in scored[0][0]]  # so that each is one line
    assert len(printed.out.splitlines()) == 5
    assert scored[0][1] == [lines]
    assert "step 1: 5 sentences of validation.source" in printed.err
    assert "BLEU 12.50" in printed.err
    (tmp_path / "some.txt").write_text("the old dog sees one house\n")
    assert translate.main([str(run / "run"), "--source", str(tmp_path / "some.txt")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    for options, message in (
        ([], "BLEU is found by sacrebleu, which is not installed; pip install sacrebleu, or give"),
        (["--source", "missing.txt"], "--source: cannot read 'missing.txt': No such file or directory"),
        (["--source", str(tmp_path / "some.txt"), "--reference", str(run / "text" / "train.target")], "--reference: expected 1 lines"),
        (["--step", "7"], "--step: expected one of 1, the checkpoints in"),
    ):
        assert translate.main([str(run / "run"), *options]) == 2
        assert message in capsys.readouterr().err


def test_other_folders_are_refused(tmp_path, capsys):
    assert translate.main([str(tmp_path / "none")]) == 2
    assert "translate: expected checkpoints in" in capsys.readouterr().err
