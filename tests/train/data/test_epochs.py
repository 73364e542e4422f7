"""Runs whose length is given in epochs: the number of steps, the rows of each batch, and the last one, which may be partial."""

import math
import sys
from collections import Counter
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jpipe
from jpipe_train.config import config_file
from jpipe_train.config.config import TrainConfig
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.data.position import Position
from jpipe_train.launch.team import Team
from jpipe_train.losses import cross_entropy
from jpipe_train.run import loop
from jpipe_train.run.settings import settings_of
from tests.train.conftest import changed
from tests.train.run.test_loop import rows_of

ROWS = 449  # windows of 8 bytes in the training part of the text


def with_epochs(tiny, epochs, **train):
    return changed({**tiny, "train": {key: value for key, value in tiny["train"].items() if key != "steps"} | {"epochs": epochs} | train})


def rows_that_count(batches, first: int, end: int) -> list[bytes]:
    """Return the windows in these batches, in order, without padding."""
    rows = []
    for t in range(first, end):
        tokens, labels = (part[: len(part)] for part in batches[t])
        rows += [tokens[i].astype(np.uint8).tobytes() for i in range(len(labels)) if (labels[i] >= 0).any()]
        assert all((row >= 0).all() or (row == -1).all() for row in labels)
    return rows


@pytest.mark.thinned
@pytest.mark.parametrize("epochs", [1, 0.1, 2.5, 1 / 3])
@pytest.mark.parametrize("batch_size", [4, 512])
def test_a_run_of_epochs_has_each_row_as_often_and_then_padding(epochs, batch_size, tiny):
    read = data.load(with_epochs(tiny, epochs, batch_size=batch_size))
    assert (read.rows, read.steps) == (ROWS, math.ceil(Fraction(repr(float(epochs))) * ROWS / batch_size))
    rows = rows_that_count(read.train, 0, read.steps)
    assert len(rows) == math.ceil(Fraction(repr(float(epochs))) * ROWS)
    endless = data.load(changed(tiny, train={"batch_size": batch_size, "steps": 10**6}))
    assert rows == rows_that_count(endless.train, 0, read.steps)[: len(rows)], "the order is that of a run of steps"
    whole = Counter(rows_that_count(endless.train, 0, math.ceil(ROWS / batch_size))[:ROWS])
    assert all(math.floor(epochs) * n <= Counter(rows)[row] <= math.ceil(epochs) * n for row, n in whole.items())


def test_with_another_batch_size_the_run_has_the_same_rows(tiny):
    first = data.load(with_epochs(tiny, 0.1))
    position = first.train.position(5)
    then = data.load(with_epochs(tiny, 0.1, batch_size=6), position)
    assert then.steps == 5 + math.ceil((45 - 20) / 6)
    assert rows_that_count(first.train, 0, 5) + rows_that_count(then.train, 5, then.steps) == rows_that_count(first.train, 0, 12)
    beyond = data.load(with_epochs(tiny, 0.01), Position(batch=5, rows=(20,), pieces=4))
    assert beyond.steps == 5, "nothing is left"


def test_the_loss_of_the_last_batch_is_the_mean_over_its_rows(tiny):
    read = data.load(with_epochs(tiny, 0.02))
    labels = jnp.asarray(read.train[read.steps - 1][1][:4])
    assert (read.steps, [int((row >= 0).sum()) for row in labels]) == (3, [8, 0, 0, 0])
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 256)), jnp.float32)
    total, weight = cross_entropy.loss(logits, labels)
    alone, of_row = cross_entropy.loss(logits[:1], labels[:1])
    assert (float(weight), float(of_row)) == (8, 8)
    assert float(total) == pytest.approx(float(alone), rel=1e-6)


class Numbered:
    """Batches without end, each with its number."""

    def __getitem__(self, t):
        return np.full((4, 1), t, np.float32), np.full((4, 1), t, np.float32)


class Huge(Numbered):
    """The same with a length, as endless data often have one."""

    def __len__(self):
        return sys.maxsize


def own_data(seed, batch_size, kind):
    batches = Numbered()
    listed = [batches[t] for t in range(3)]
    return {"list": listed, "endless": batches, "huge": Huge()}[kind], listed


def own(tiny, kind, **train):
    target = {"target": f"{__name__}:own_data", "arguments": {"kind": kind}}
    return with_epochs({**tiny, "data": target, "model": {"target": "a:b"}, "plan": {}}, 2.4, **train)


def test_a_list_of_batches_starts_over(tiny):
    read = data.load(own(tiny, "list"))
    assert (read.rows, read.steps) == (12, math.ceil(2.4 * 3))
    assert [int(read.train[t][0][:1][0, 0]) for t in range(read.steps)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert (read.train[7][1][:4] == 1).all(), "a function of the user's may not know padding"


def test_data_without_a_length_have_no_epochs(tiny):
    with pytest.raises(
        jpipe.InputError, match=r"train\.epochs: expected training data with a known length, found .*own_data with .* len\(\)"
    ):
        data.load(own(tiny, "endless"))
    with pytest.raises(jpipe.InputError, match=r"train\.epochs: expected at most 1,000,000,000 steps, found"):
        data.load(own(tiny, "huge"))


def test_a_profile_after_the_last_step_of_the_epochs_is_an_error(tiny):
    config = with_epochs(tiny, 0.1, profile={"from": 10, "steps": 3})
    read, reporter = data.load(config), Reporter(1, 1, "tokens", Console(quiet=True))
    assert read.steps == 12
    with pytest.raises(jpipe.InputError, match=r"train\.profile: expected steps up to 11, the last one of the run, found 10 to 12"):
        loop.with_steps(settings_of(config), read, reporter, Team(None))
    fits = with_epochs(tiny, 0.1, profile={"from": 9, "steps": 3})
    assert loop.with_steps(settings_of(fits), read, reporter, Team(None)).train.length == 12


def test_a_run_has_either_steps_or_epochs(tmp_path):
    assert (TrainConfig().steps, TrainConfig(epochs=2.0).steps, TrainConfig(epochs=2.0).length) == (200, None, 10**9)
    for section in ({"steps": 3, "epochs": 1.0}, {"steps": None}):
        with pytest.raises(ValueError, match=r"expected either steps or epochs, found (steps 3 and epochs 1|neither); set one of them"):
            TrainConfig.model_validate(section)
    (tmp_path / "steps.yaml").write_text("train: {steps: 7}")
    (tmp_path / "epochs.yaml").write_text("train: {epochs: 3}")
    overrides = ("steps", "epochs=2", (None, 2.0)), ("epochs", "steps=5", (5, None)), ("epochs", "log_every=2", (None, 3.0))
    for file, override, expected in overrides:
        config = config_file.load(tmp_path / f"{file}.yaml", [f"train.{override}"])
        assert (config.train.steps, config.train.epochs) == expected
    with pytest.raises(jpipe.InputError, match="expected either steps or epochs, found steps 4 and epochs 2"):
        config_file.load(tmp_path / "steps.yaml", ["train.steps=4", "train.epochs=2"])


@pytest.mark.usefixtures("no_report")
def test_a_run_of_epochs_counts_its_steps(tiny, capsys):
    config = with_epochs(tiny | {"checkpoint": {"every": 2}}, 0.02)
    summary = loop.main(config)
    assert summary.steps == len(rows_of(summary.folder)) == 3
    assert "3 steps (0.02 epochs)" in capsys.readouterr().out
    written = config_file.load_resolved(summary.folder / "config.yaml")
    assert (written.train.steps, written.train.epochs) == (None, 0.02)
    assert loop.main(config).steps == 3
    assert "has done 3 steps of 3; raise train.epochs to continue" in capsys.readouterr().out
