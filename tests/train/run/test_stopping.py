"""Early stopping and the best checkpoints, against plain references of their rules."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jpipe
import jpipe.checkpoints
from jpipe_train import cli
from jpipe_train.assemble.metrics import results
from jpipe_train.checkpoint.best import Best, best_step, values_in
from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.checkpoint.resume import Facts, Resumed
from jpipe_train.config.config import BestConfig, CheckpointConfig, Config
from jpipe_train.config.config_file import to_yaml
from jpipe_train.console.preemption import Preemption
from jpipe_train.launch.team import Team
from jpipe_train.run import loop, training
from jpipe_train.run.settings import settings_of
from jpipe_train.run.stopping import Stopping, check, stopped_words
from tests.train.checkpoint.test_checkpoints import Pipe
from tests.train.checkpoint.test_resume import run_in_two, weights_of
from tests.train.checkpoint.written import FACTS
from tests.train.conftest import changed
from tests.train.run.test_loop import rows_of

ROOT = Path(__file__).parents[3]


def stop_of(values, patience: int, min_delta: float, sign: int) -> int | None:
    """Return the index of the value after which a run stops: the rule, said plainly."""
    improvements: list[int] = []
    for i, value in enumerate(values):
        if math.isfinite(value) and (not improvements or sign * value < sign * values[improvements[-1]] - min_delta):
            improvements.append(i)
        if i - (improvements[-1] if improvements else -1) >= patience:
            return i
    return None


def resumed_at(step: int, stop) -> Resumed:
    facts = Facts(**FACTS, stop=stop)
    return Resumed(Path("run"), step, facts, ())


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_run_stops_where_the_rule_says_also_if_it_was_resumed(mode):
    random = np.random.default_rng(0)
    stops = []
    for _ in range(300):
        patience, min_delta = int(random.integers(1, 10)), float(random.choice([0.0, 0.25]))
        values = random.choice([0.0, 0.25, 0.5, 0.75, 1.0, math.nan], 12, p=[0.18] * 5 + [0.1])
        config = Config.model_validate({"train": {"stop": {"patience": patience, "min_delta": min_delta, "mode": mode}}})
        expected = stop_of(values, patience, min_delta, 1 if mode == "min" else -1)
        stopping, cut = Stopping(settings_of(config)), int(random.integers(0, 12))
        found = None
        for i, value in enumerate(values):
            if stopping.record(10 * i, {"val_loss": float(value)}):
                found = i
                break
            if i == cut:  # a checkpoint holds the state, also if it is written after later validations
                stopping.record(10 * i + 1, {"val_loss": 0.5})
                resumed = resumed_at(10 * i, stopping.facts(10 * i))
                assert not stopped_words(config.train.stop, resumed)
                stopping = Stopping(settings_of(config), resumed)
                assert not stopping.record(10 * i, {"val_loss": 0.5}), "the validation of the checkpoint counts once"
        assert found == expected
        stops.append(expected)
        if found is not None:
            assert f"in {patience} validation" in stopped_words(config.train.stop, resumed_at(10 * found, stopping.facts(10 * found)))
            assert stopping.words(10 * found)
            assert not stopping.words(10 * found + 1)
            longer = Config.model_validate({"train": {"stop": {"patience": patience + 1, "mode": mode}}})
            assert not stopped_words(longer.train.stop, resumed_at(10 * found, stopping.facts(10 * found))), "more patience lets it go on"
    assert None in stops
    assert len(set(stops)) > 5


def test_results_have_the_direction_of_their_metric():
    of_config = Config.model_validate(
        {"eval": {"metrics": {"hits": "accuracy", "nats": "cross_entropy", "own": "a:b"}}, "optimizer": {"ema_decay": 0.9}}
    )
    one = {"val_loss": "min", "val_hits": "max", "val_nats": "min", "val_own": "max"}
    assert results(of_config) == one | {f"{name}_ema": mode for name, mode in one.items()}


@pytest.mark.parametrize("key", ["train", "checkpoint"])
def test_a_result_that_there_is_not_is_an_error(key):
    section = {"stop": {"patience": 1, "metric": "val_acuracy"}} if key == "train" else {"best": {"metric": "val_acuracy"}}
    config = Config.model_validate({key: section, "eval": {"metrics": {"accuracy": "accuracy"}}})
    with pytest.raises(jpipe.InputError, match=r"\.metric: expected a result .* found 'val_acuracy'; did you mean 'val_accuracy'\?"):
        check(settings_of(config))


@pytest.mark.parametrize(("mode", "keep"), [("min", 2), ("max", 1)])
def test_the_best_checkpoints_stay_and_others_are_not_even_written(mode, keep, tmp_path, monkeypatch):
    values = dict(zip(range(2, 22, 2), np.random.default_rng(3).permutation(10).astype(float).tolist(), strict=True))
    config = CheckpointConfig(every=5, keep=1, best=BestConfig(keep=keep))
    checkpoints = Checkpoints(config, Pipe(), tmp_path, 21, Team(None), {}, bytes, print, Best(config.best, mode, {}), 2)
    written, save = [], checkpoints._save
    monkeypatch.setattr(checkpoints, "_save", lambda snapshot, facts: (written.append(snapshot.batch), save(snapshot, facts)))
    for step in range(21):
        checkpoints.schedule_snapshot(step)
        checkpoints.flush_finished(step, lambda step: {"val_loss": values.get(step), "val_metrics": {}})
        checkpoints.finish()
    checkpoints.close()
    sign = 1 if mode == "min" else -1
    best = sorted(values, key=lambda step: sign * values[step])[:keep]
    assert jpipe.checkpoints.steps(tmp_path) == sorted({*best, 21})
    assert checkpoints._best.in_folder(tmp_path) == best
    seen: list[int] = []
    expected = []
    for step in range(1, 22):
        seen += [step] if step in values else []
        is_best = step in values and step in sorted(seen, key=lambda step: sign * values[step])[:keep]
        expected += [step] if is_best or step % 5 == 0 or step == 21 else []
    assert written == expected


VALUES = {0: 5.0, 1: 4.5, 2: 3.0, 3: 2.5, 4: 2.0, 6: 2.5, 8: 2.4, 10: 2.3, 12: 1.0}


@pytest.fixture
def scripted(tiny, monkeypatch):
    """Return a config of a run whose validation losses are `VALUES`; it stops before step 8."""
    monkeypatch.setattr(loop, "write_report", lambda *_: None)
    monkeypatch.setattr(training.Training, "_evaluate", lambda self, state: {"val_loss": VALUES.get(state.batch, 9.0)})
    train = tiny["train"] | {"steps": 12, "stop": {"patience": 2}}
    return tiny | {"train": train, "checkpoint": {"every": 5, "keep": 1, "best": {}}}


def test_a_run_ends_early_with_its_best_checkpoint(scripted, tmp_path, capsys):
    summary = loop.main(changed(scripted))
    assert (summary.steps, summary.val_loss_after) == (8, VALUES[8])
    rows = rows_of(summary.folder)
    assert [row["step"] for row in rows] == list(range(8))
    assert [row.get("val_loss") for row in rows] == [5.0, None, 3.0, None, 2.0, None, 2.5, 2.4]
    assert jpipe.checkpoints.steps(summary.folder) == [4, 8]
    assert best_step(summary.folder, "") == 4
    words = "val_loss has not improved in 2 validations; the best one, 2, was at step 4"
    out = capsys.readouterr().out
    assert f"stopped early: at step 8: {words}\nbest checkpoint: step 4, val_loss 2\n8 steps in " in out
    again = loop.main(changed(scripted))
    assert again.steps == 8
    assert (
        f"the run in '{summary.folder}' stopped early at step 8: {words}; raise train.stop.patience (or remove train.stop) to continue"
        in capsys.readouterr().out
    )
    assert cli.main(["export", str(summary.folder), str(tmp_path / "best.safetensors"), "--step", "best"]) == 0
    assert f"step 4 of {summary.folder}" in capsys.readouterr().out
    longer = loop.main(changed(scripted, train={"stop": {"patience": 9}}), from_checkpoint="best")
    assert "resumes at step 4" in capsys.readouterr().out
    assert (longer.steps, jpipe.checkpoints.steps(longer.folder)) == (12, [12])


@pytest.mark.parametrize(
    ("best", "message"),
    [(None, "expected a run with checkpoint.best, which keeps its best"), ({}, "expected a checkpoint with val_loss in")],
)
def test_without_best_checkpoints_none_can_be_named(best, message, scripted, tmp_path):
    (tmp_path / "config.yaml").write_text(to_yaml(changed(scripted, checkpoint={"best": best})))
    with pytest.raises(jpipe.InputError, match=f"export: --step best: {message}"):
        best_step(tmp_path, "export: --step best")


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "cut"), [("gpipe", 5), ("pipedream_2bw", 6), ("pipedream_2bw", 7)])
def test_a_run_that_was_interrupted_stops_at_the_same_step(schedule, cut, scripted, tmp_path, monkeypatch):
    config = scripted | {"plan": scripted["plan"] | {"schedule": schedule}, "checkpoint": {"every": 1, "keep": 3, "best": {"keep": 2}}}
    whole = loop.main(changed(config, run={"dir": str(tmp_path / "whole")}))
    parts = run_in_two(config, monkeypatch, cut)
    assert (parts.steps, parts.remarks) == (whole.steps, whole.remarks)
    assert rows_of(parts.folder) == rows_of(whole.folder)
    assert jpipe.checkpoints.steps(parts.folder) == jpipe.checkpoints.steps(whole.folder) == [4, 6, 7, 8]
    np.testing.assert_equal(weights_of(parts.folder), weights_of(whole.folder))


def signal_before(monkeypatch, step):
    """Send SIGTERM just before the run decides what to do before a step."""
    real = Preemption.decide

    def decide(self, at, is_saved):
        if at == step:
            signal.raise_signal(signal.SIGTERM)
        return real(self, at, is_saved)

    monkeypatch.setattr(Preemption, "decide", decide)


@pytest.mark.parametrize(("at", "steps", "kept"), [(6, 7, [4, 7]), (8, 8, [4, 8])])
def test_the_validation_at_which_a_signal_arrives_counts(at, steps, kept, scripted, monkeypatch):
    config = changed(scripted, train={"steps": 10**5})  # the run goes on until its checkpoint is written
    with monkeypatch.context() as patched:
        signal_before(patched, at)
        summary = loop.main(config)
    assert (summary.steps, jpipe.checkpoints.steps(summary.folder)) == (steps, kept)
    assert summary.stopped_by == (signal.SIGTERM if steps < 8 else None), "the rule ends the run at step 8 without a signal"
    if steps < 8:
        assert loop.main(config).steps == 8


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"schedule": "gpipe"}, {"schedule": "pipedream", "num_stages": 3, "microbatches": 1}])
def test_each_checkpoint_has_the_result_of_its_own_weights(plan, scripted):
    config = scripted | {"plan": scripted["plan"] | plan, "train": scripted["train"] | {"steps": 4, "eval_every": 1, "stop": None}}
    folder = loop.main(changed(config, checkpoint={"every": 1, "keep": 9})).folder
    assert values_in(folder, "val_loss") == {step: VALUES[step] for step in (1, 2, 3, 4)}


@pytest.mark.slow
def test_two_processes_stop_at_the_same_step(tiny, tmp_path):
    train = tiny["train"] | {"steps": 12, "stop": {"patience": 2, "min_delta": 100.0}}
    config = changed(tiny | {"train": train, "checkpoint": {"every": 1, "keep": 1, "best": {"metric": "val_loss", "mode": "max"}}})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-m", "jpipe_train.cli", "launch", "-n", "2", "--", "train", "config.yaml", "--wait-limit", "60"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "stopped early: at step 4: val_loss has not improved in 2 validations; the best one, " in ended.stdout
    assert len(rows_of(tmp_path / "run")) == 4
    values = values_in(tmp_path / "run", "val_loss")
    assert set(values) == {max(values, key=values.get), 4}
