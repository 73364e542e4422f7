"""The search with Optuna on the page "Compare runs", with a stand-in of Optuna that draws at random."""

import os
import random
import runpy
import sys
import types
from pathlib import Path

import pytest

from jpipe_train.config import config_file

ROOT = Path(__file__).parents[3]
TINY = ("model.depth=4", "model.width=16", "model.seq_len=16", "train.steps=2", "train.trace_batches=0", "train.eval_every=2")


class Trial:
    """The trial with a number, which draws values by it."""

    def __init__(self, number):
        self.number, self._source = number, random.Random(number)

    def suggest_float(self, name, low, high, *, log):
        assert log
        return low * (high / low) ** self._source.random()

    def suggest_categorical(self, name, options):
        return self._source.choice(options)


class Study:
    """A study that records the values of its trials."""

    def __init__(self):
        self.values = []

    def optimize(self, objective, n_trials):
        self.values = [objective(Trial(number)) for number in range(n_trials)]

    @property
    def best_params(self):
        return {"trial": self.values.index(min(self.values))}


@pytest.mark.slow
def test_the_search_of_the_page_trains_a_run_for_each_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    study = Study()
    monkeypatch.setitem(sys.modules, "optuna", types.SimpleNamespace(create_study=lambda: study))
    (tmp_path / "configs").mkdir()
    config = config_file.load(str(ROOT / "configs" / "gpt-bytes.yaml"), TINY)
    (tmp_path / "configs" / "gpt-bytes.yaml").write_text(config_file.to_yaml(config))
    _, _, snippet = (ROOT / "docs" / "how-to" / "compare-runs.md").read_text().partition("```python\n")
    code, found, _ = snippet.partition("\n```")
    assert found
    (tmp_path / "search.py").write_text(code.replace("n_trials=20", "n_trials=2"))
    runpy.run_path(str(tmp_path / "search.py"))
    assert len(study.values) == 2
    assert study.values[0] != study.values[1]
    assert all(0 < value < 10 for value in study.values)
    assert capsys.readouterr().out.strip().endswith(str(study.best_params))
