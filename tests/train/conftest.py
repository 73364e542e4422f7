"""Fixtures of training tests: a training text, and a config whose run takes a second or two."""

import signal
from pathlib import Path

import pytest

from jpipe_train.config.config import Config

SENTENCE = b"the quick brown fox jumps over the lazy dog; "


@pytest.fixture
def text(tmp_path):
    """Write a text file of a few thousand bytes."""
    path = tmp_path / "text.txt"
    path.write_bytes(SENTENCE * 100)
    return path


@pytest.fixture
def tiny(text, tmp_path) -> dict:
    """Return a valid config as plain data: three layers, two stages."""
    return tiny_of(text, tmp_path / "run")


def tiny_of(text: Path, run: Path) -> dict:
    """Return that config for a text and the folder of a run."""
    return {
        "run": {"dir": str(run)},
        "data": {"path": str(text), "validation_fraction": 0.2},
        "train": {"steps": 5, "batch_size": 4, "eval_every": 2, "eval_batches": 2},
        "model": {"depth": 1, "width": 8, "heads": 2, "seq_len": 8},
        "plan": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 2},
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"every": None},
    }


@pytest.fixture
def no_report(monkeypatch):
    """Skip the report at the end of a run, which takes longer than the run."""
    monkeypatch.setattr("jpipe_train.run.loop.write_report", lambda *_: None)


@pytest.fixture
def interruptible():
    """Install Python's own handler of Ctrl-C, which tests started in the background lack."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # put back
    signal.signal(signal.SIGINT, before)


def changed(data: dict, **sections) -> Config:
    """Return the config `data` with some keys of some sections replaced: `changed(tiny, train={"steps": 1})`."""
    return Config.model_validate(data | {name: data.get(name, {}) | keys for name, keys in sections.items()})
