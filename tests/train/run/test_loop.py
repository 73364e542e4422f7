"""A whole tiny run: its files, that it learns, and how it stops."""

import contextlib
import errno
import io
import json
import math
import os
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import yaml
from rich.console import Console

import jpipe
from jpipe_lm.models import layers as built_in
from jpipe_train.assemble import build
from jpipe_train.assemble.optimizer import optimizer
from jpipe_train.checkpoint.run_folder import RunFolder
from jpipe_train.config import config_file
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data
from jpipe_train.losses import cross_entropy
from jpipe_train.report import metrics_log, report
from jpipe_train.report.metrics_log import Evaluated, mean_loss, repeatable
from jpipe_train.run import loop, training
from jpipe_train.run.settings import settings_of
from tests.train.conftest import SENTENCE, changed

FILES = {".lock", "config.yaml", "plan.json", "metrics.jsonl", "end.json", "tensorboard", "trace.json", "report.html"}
FILES |= {f"{name}.png" for name in ("loss", "timeline", "memory")}


def rows_of(folder) -> list[dict]:
    """Return the rows that a run logged, without their times."""
    return [repeatable(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
@pytest.mark.oldest
def test_a_run_learns_and_writes_its_metrics_and_checkpoints(tiny):
    config = changed(tiny, train={"steps": 60, "eval_every": 20}, model={"width": 16}, optimizer={"learning_rate": 0.02})
    summary = loop.main(config)
    rows = rows_of(summary.folder)
    assert [row["step"] for row in rows] == list(range(60))
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 20, 40, 59]
    assert set(rows[0]) == {"step", "loss", "val_loss", "learning_rate", "version_distance"}
    assert set(rows[1]) == {"step", "loss", "learning_rate", "version_distance"}
    letters = np.unique(np.frombuffer(SENTENCE, np.uint8), return_counts=True)[1] / len(SENTENCE)
    assert abs(rows[0]["val_loss"] - np.log(256)) < 0.5
    assert rows[-1]["val_loss"] < -(letters * np.log(letters)).sum()  # knows more than how often each letter comes
    assert (summary.steps, summary.val_loss_before, summary.val_loss_after) == (60, rows[0]["val_loss"], rows[-1]["val_loss"])


@pytest.mark.slow
def test_a_run_repeats_from_its_folder(tiny, tmp_path):
    config = changed(tiny, train={"eval_every": 50})  # room for a window that is measured
    folder = loop.main(config).folder
    assert {entry.name for entry in folder.iterdir()} == FILES
    resolved = config_file.load(folder / "config.yaml")
    assert resolved == config
    plan = jpipe.Plan.from_json((folder / "plan.json").read_text())
    assert (plan.schedule, plan.depth, plan.microbatches) == ("pipedream_2bw", 2, 2)
    repeated = loop.main(changed(resolved.model_dump(), run={"dir": str(tmp_path / "again")}, plan={"file": str(folder / "plan.json")}))
    assert rows_of(repeated.folder) == rows_of(folder)
    assert yaml.safe_load((repeated.folder / "config.yaml").read_text())["plan"] == {"file": str(folder / "plan.json")}


@pytest.mark.usefixtures("no_report")
@pytest.mark.slow
def test_metrics_of_a_validation_are_logged_and_shown(tiny, capsys):
    metrics = {"accuracy": "accuracy", "lost": "tests.train.metrics:lost"}
    rows = rows_of(loop.main(changed(tiny | {"eval": {"metrics": metrics}, "optimizer": {"learning_rate": 0.1}})).folder)
    assert [list(row) for row in rows] == [
        ["step", "loss", *(["val_loss", "val_accuracy"] if step % 2 == 0 else []), "version_distance", "learning_rate"] for step in range(5)
    ]
    assert rows[0]["val_accuracy"] < rows[-1]["val_accuracy"] < 1
    output = capsys.readouterr().out
    assert f"validation loss {rows[-1]['val_loss']:.3f}  validation accuracy {rows[-1]['val_accuracy']:.3f}" in output
    assert "step 4: val_lost is nan; it is left out of metrics.jsonl" in output


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"top5": "tests.train.metrics:nothing"}, "eval.metrics.top5: the module 'tests.train.metrics' has no function 'nothing'"),
        (
            {"top5": "tests.train.metrics:of_outputs"},
            r"metrics: 'top5': the function does not take outputs float32\[2, 8, 256\] of layer 'head'",
        ),
    ],
)
def test_metrics_that_do_not_fit_are_refused_before_a_folder_is_made(tiny, metrics, message):
    with pytest.raises(jpipe.InputError, match=message):
        loop.main(changed(tiny | {"eval": {"metrics": metrics}}))
    assert not Path(tiny["run"]["dir"]).exists()


@pytest.mark.usefixtures("no_report")
@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("schedule", sorted({*jpipe.schedules.SCHEDULES} - {"auto_zero_bubble"}))
def test_every_schedule_logs_every_step(tiny, schedule):
    rows = rows_of(loop.main(changed(tiny, plan={"schedule": schedule})).folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 2, 4]
    assert all(0 < row["loss"] < 7 for row in rows)


@pytest.mark.usefixtures("no_report")
@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(("schedule", "behind"), [("pipedream_2bw", 1), ("gpipe", 0), ("pipedream", 0)])
def test_a_validation_loss_is_of_the_newest_weights_that_all_stages_hold(tiny, schedule, behind):
    rows = rows_of(loop.main(changed(tiny, train={"steps": 4, "eval_every": 1}, plan={"schedule": schedule})).folder)
    versions = validation_losses_after_each_update(changed(tiny, plan={"schedule": schedule}), 4)
    expected = [versions[max(step - behind, 0)] for step in range(3)] + [versions[4]]
    np.testing.assert_allclose([row["val_loss"] for row in rows], expected, rtol=1e-6)


def validation_losses_after_each_update(config, steps) -> list[float]:
    """Return the validation losses of a drained copy after 0, 1, … `steps` updates."""
    plan = build.make_plan(config.plan, ("embed", "block_0", "head"))
    stack, batches = built_in.layers(config.model), data.load(config)
    params = {layer_id: layer.params for layer_id, layer in stack.specs(batches.train[0][0]).items()}
    pipe = jpipe.Pipeline(stack, plan, cross_entropy.loss, optimizer(config.optimizer, steps, params))
    state = pipe.init(jax.random.key(config.seed), batches.train[0])
    losses = []
    for step in range(steps + 1):
        drained = pipe.drain(jax.tree.map(jax.numpy.copy, state))
        losses.append(mean_loss([Evaluated(pipe.evaluate(drained, each.batch)) for each in batches.held_out(2)]))
        state, _ = pipe.step(state, batches.train[step])
    return losses


@pytest.mark.usefixtures("no_report")
def test_a_run_of_one_step_prints_both_validation_losses(tiny):
    summary = loop.main(changed(tiny, train={"steps": 1}))
    (row,) = rows_of(summary.folder)
    assert row["val_loss"] == summary.val_loss_after < summary.val_loss_before


@pytest.mark.exhaustive
def test_the_norms_of_the_delay_are_in_some_rows_and_the_delay_is_in_the_report(tiny, monkeypatch):
    monkeypatch.setattr(training, "_MOST_NORMS", 3)
    with_correction = changed(tiny, train={"steps": 8}, optimizer={"delay_correction": "predict"})
    folder = loop.main(with_correction).folder
    rows = rows_of(folder)
    assert [row["step"] for row in rows if "version_distance" in row] == [0, 3, 6]
    assert [row["step"] for row in rows if "correction_norm" in row] == [0, 3, 6]
    assert all(row[name] > 0 for row in rows[1:] for name in ("version_distance", "correction_norm") if name in row)
    page = (folder / "report.html").read_text()
    assert "weights that are 1 update old, at every stage; correction: predict" in page


@pytest.mark.slow
@pytest.mark.usefixtures("no_report")
def test_log_every_leaves_out_what_was_not_evaluated(tiny):
    rows = rows_of(loop.main(changed(tiny, train={"steps": 8, "log_every": 3, "eval_every": 5})).folder)
    assert [row["step"] for row in rows] == [0, 3, 5, 6, 7]


def test_a_row_can_be_read_while_the_run_continues(tiny):
    plan = build.make_plan(changed(tiny).plan, ("embed", "block_0", "head"))
    with RunFolder(settings_of(changed(tiny)), plan) as folder:
        folder.log({"step": 0, "loss": 5.5})
        assert rows_of(folder.path) == [{"step": 0, "loss": 5.5}]


@pytest.mark.usefixtures("no_report")
def test_without_a_folder_runs_are_numbered(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "0007").mkdir(parents=True)
    folders = [loop.main(changed(tiny, run={"dir": None}, train={"steps": 1})).folder for _ in range(2)]
    assert folders == [tmp_path / "runs" / "0008", tmp_path / "runs" / "0009"]
    assert yaml.safe_load((folders[0] / "config.yaml").read_text())["run"]["dir"] == "runs/0008"


def test_plain_lines_show_start_progress_and_end(tiny, capsys):
    folder = loop.main(changed(tiny, train={"eval_every": 50})).folder  # room for a window that is measured
    lines = capsys.readouterr().out.splitlines()
    phases, steps, end = lines[:6], lines[6:11], lines[11:]
    assert [line.split(":")[0] for line in phases] == [
        "reading the data …",
        "reading the data",
        "data",
        "pipedream_2bw",
        "compiling 2 stages …",
        "compiling 2 stages",
    ]
    assert phases[3] == (
        "pipedream_2bw: gradients are computed with weights that are 1 update old, at every stage; "
        "delay correction: none; see optimizer.delay_correction"
    )
    assert [line.split()[1] for line in steps] == ["0", "1", "2", "3", "4"]
    assert all(re.search(r"loss \d\.\d+  [\d,]+ tokens/s  (bubble -?\d+%  )?\d+:\d\d left", line) for line in steps[1:])
    assert re.fullmatch(r"step 0  loss \d\.\d+  validation loss \d\.\d+", steps[0])  # how fast it goes is not known yet
    assert "bubble" in steps[-1]
    assert "validation loss" in steps[0]
    assert [line.split(":")[0] for line in end[:2]] == ["drawing the report …", "drawing the report"]
    assert end[2].split() == ["predicted", "measured", "ratio"]
    assert [line.rpartition("  ")[0].split("  ")[0] for line in end[3:-1] if "  " in line] == [  # but for a sentence
        "time of a step",
        "bubble (idle share)",
        "held memory, rank 0",
        "peak memory, rank 0",
        "held memory, rank 1",
        "peak memory, rank 1",
    ]
    assert any(line.startswith("peak memory is the held memory plus the temporaries of the largest compiled program: ") for line in end)
    assert end[-1].endswith(f"the run is in {folder}; open its report.html")


@pytest.mark.usefixtures("no_report")
def test_a_run_that_flushes_prints_nothing_about_delays(tiny, capsys):
    loop.main(changed(tiny, plan={"schedule": "gpipe"}, train={"steps": 1}))
    assert "update old" not in capsys.readouterr().out


def test_a_nan_loss_stops_the_run_and_keeps_the_other_rows(tiny, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "write_report", lambda *inputs: drawn.append(inputs))
    monkeypatch.setattr(loop.MetricsLog, "finished", _poisoned(loop.MetricsLog.finished, 3))
    with pytest.raises(loop.NonFiniteLoss, match=r"step 3: the loss is nan; lower optimizer\.learning_rate"):
        loop.main(changed(tiny))
    assert [row["step"] for row in rows_of(tiny_folder(tiny))] == [0, 1, 2]
    assert len(drawn) == 1


@pytest.mark.usefixtures("no_report")
def test_a_nan_loss_before_any_update_is_no_fault_of_the_learning_rate(tiny, monkeypatch):
    monkeypatch.setattr(loop.MetricsLog, "finished", _poisoned(loop.MetricsLog.finished, 0))
    with pytest.raises(loop.NonFiniteLoss, match="step 0: the loss is nan before any update; look for NaN or infinite values in the data"):
        loop.main(changed(tiny))


@pytest.mark.usefixtures("no_report")
def test_a_full_disk_stops_the_run_with_a_message(tiny, monkeypatch):
    def full(self, row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "log", full)
    with pytest.raises(loop.RunStopped, match=r"the run folder cannot be written: No space left on device; the steps logged so far are in"):
        loop.main(changed(tiny))


def test_a_report_that_cannot_be_written_does_not_end_the_run(tiny, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_report", full)
    assert loop.main(changed(tiny)).steps == 5
    out = capsys.readouterr().out
    assert "report: cannot write in" in out
    assert out.endswith(f"the run is in {tiny_folder(tiny)}\n")  # and no report is promised


def test_a_report_that_cannot_be_drawn_does_not_end_the_run(tiny, monkeypatch, capsys):
    def fails(*_):
        raise ValueError("no such colour\nand more")

    monkeypatch.setattr(report, "write_report", fails)
    assert loop.main(changed(tiny)).steps == 5
    assert "\nreport: could not be drawn: ValueError: no such colour\n" in capsys.readouterr().out


@pytest.mark.parametrize("fails_at", ["metrics.jsonl", "config.yaml", "plan.json"])
@pytest.mark.parametrize("run_dir", [None, "new/deep", "empty"])
def test_a_disk_that_is_full_from_the_start_leaves_nothing_behind(tiny, tmp_path, monkeypatch, run_dir, fails_at):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    replace = os.replace

    def full(unfinished, path):
        if path.name == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(unfinished, path)

    monkeypatch.setattr(os, "replace", full)
    where = "runs/0001" if run_dir is None else run_dir
    with pytest.raises(jpipe.InputError, match=rf"^run.dir: cannot write '{where}': No space left on device; choose another folder$"):
        RunFolder(settings_of(changed(tiny, run={"dir": run_dir})), build.make_plan(changed(tiny).plan, ("embed", "block_0", "head")))
    assert sorted(tmp_path.rglob("*")) == before


def reported(durations: list[float], steps: int, **console) -> tuple[Reporter, list[str]]:
    """Return a reporter and the lines that it prints for steps of these durations, measured by a simulated clock."""
    now, screen = [0.0], io.StringIO()
    reporter = Reporter(steps, 100, "tokens", Console(file=screen, highlight=False, width=200, **console), clock=lambda: now[0])
    with reporter.training():
        for step, seconds in enumerate(durations):
            now[0] += seconds
            reporter.step(step, 1.0, {})
    return reporter, screen.getvalue().splitlines()


def test_speed_and_time_left_are_of_the_recent_steps():
    lines = reported([1000.0, 2.0, 2.0, 90.0, 2.0], 20)[1]  # compilation first, then an evaluation
    assert lines[0] == "step 0  loss 1.000"
    assert lines[1:] == [
        f"step {step}  loss 1.000  50 tokens/s  {left} left" for step, left in ((1, "0:36"), (2, "0:34"), (3, "0:32"), (4, "0:30"))
    ]
    reporter, lines = reported([1.0] * 30 + [4.0] * 12, 60)
    assert lines[-1].endswith("25 tokens/s  1:12 left")  # 18 × 4 s, when most of the last twenty took 4 s
    assert reporter.speed == 25
    assert reported([1.0], 2)[0].speed is None


def test_the_progress_bar_shows_the_same():
    assert "25 tokens/s  1:16 left" in reported([1.0] + [4.0] * 10, 30, force_terminal=True)[1][-2]


def counted(**console) -> str:
    """Return what a reporter prints of four parts of work that take 6 s each, and of as many pieces of a file."""
    now, screen = [0.0], io.StringIO()
    reporter = Reporter(1, 1, "tokens", Console(file=screen, highlight=False, width=200, **console), clock=lambda: now[0])
    with reporter.counting("profiling") as progress:
        for part in range(4):
            now[0] += 6
            progress(part + 1, 4)
    with reporter.reading("reading", 8_000_000) as advance:
        for _ in range(4):
            now[0] += 6
            advance(2_000_000)
    return screen.getvalue()


def test_long_work_says_how_far_it_is():
    """A line after every ten seconds, and on a terminal a bar that is gone afterwards."""
    counting = ["profiling …", "profiling: 2 of 4 after 12 s", "profiling: 4 of 4 after 24 s", "profiling: 24.0 s"]
    reading = ["reading …", "reading: 4 of 8 MB after 12 s", "reading: 8 of 8 MB after 24 s", "reading: 24.0 s, 0.3 MB/s"]
    assert counted().splitlines() == counting + reading
    screen = counted(force_terminal=True)
    assert "4/4" in screen
    assert "after 12 s" not in screen


@pytest.mark.usefixtures("no_report")
def test_a_device_that_fails_is_reported(tiny, monkeypatch):
    def fails(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nmore")

    monkeypatch.setattr(jpipe.Pipeline, "step", fails)
    with pytest.raises(
        loop.RunStopped, match=r"a device failed: RESOURCE_EXHAUSTED: .* 99 bytes\.; use more stages, recomputation or smaller"
    ):
        loop.main(changed(tiny))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_report")
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("schedule", ["pipedream_2bw", "gpipe"])
def test_clipping_logs_the_norms(tiny, schedule):
    config = changed(tiny, plan={"schedule": schedule}, optimizer={"clip_global_norm": 0.1})
    rows = rows_of(loop.main(config).folder)
    assert [row["step"] for row in rows] == list(range(5))
    assert all(row["gradient_norm"] > 0.1 for row in rows)


@pytest.mark.usefixtures("no_report")
@pytest.mark.exhaustive
def test_clipping_of_each_stage_logs_its_norms(tiny):
    config = changed(tiny, plan={"schedule": "pipedream", "microbatches": 1}, optimizer={"clip_stage_norm": 0.1})
    rows = rows_of(loop.main(config).folder)
    assert [row["step"] for row in rows] == list(range(5))
    norms = [{name: norm for name, norm in row.items() if name.startswith("gradient_norm")} for row in rows]
    assert all(row.keys() == {"gradient_norm_stage_0", "gradient_norm_stage_1"} and min(row.values()) > 0 for row in norms)


@pytest.mark.usefixtures("no_report")
@pytest.mark.exhaustive
def test_a_skipped_batch_is_logged(tiny, monkeypatch, capsys):
    step = jpipe.Pipeline.step

    def spoiled(self, state, batch, **options):
        state, metrics = step(self, state, batch, **options)
        if 2 in metrics.losses:
            metrics.losses[2] = np.nan
        if 2 in metrics.nonfinite:
            metrics.nonfinite[2], metrics.norms[2] = 34.0, np.nan
        return state, metrics

    monkeypatch.setattr(jpipe.Pipeline, "step", spoiled)
    rows = rows_of(loop.main(changed(tiny, optimizer={"skip_nonfinite": True})).folder)
    assert [row.get("skipped") for row in rows] == [None, None, 1, None, None]
    assert "loss" not in rows[2]
    assert "gradient_norm" not in rows[2]
    assert "step 2: skipped, because 34 entries of its gradient are NaN or infinite" in capsys.readouterr().out


@pytest.mark.usefixtures("no_report")
@pytest.mark.slow
def test_a_run_that_skips_every_batch_ends(tiny, monkeypatch, capsys):
    step, bad = jpipe.Pipeline.step, {0, 1, 2}

    def spoiled(self, state, batch, **options):
        state, metrics = step(self, state, batch, **options)
        metrics.nonfinite.update({t: 1.0 for t in metrics.nonfinite if t in bad})
        return state, metrics

    monkeypatch.setattr(jpipe.Pipeline, "step", spoiled)
    monkeypatch.setattr(metrics_log, "MOST_SKIPPED", 3)
    with pytest.raises(loop.NonFiniteLoss, match="step 2: 3 steps in a row were skipped; lower"):
        loop.main(changed(tiny, optimizer={"skip_nonfinite": True}))
    bad.remove(1)
    bad.add(3)  # never three in a row; the rows of skipped steps are always logged
    config = changed(tiny, precision={"loss_scale": "dynamic"}, train={"log_every": 1000}, run={"dir": str(tiny_folder(tiny)) + "-again"})
    skipped = [row for row in rows_of(loop.main(config).folder) if "skipped" in row]
    assert [(row["step"], row["loss_scale"]) for row in skipped] == [(0, 2**15), (2, 2**15), (3, 2**15)]
    assert (
        "step 2: skipped, because 1 entries of its gradient are NaN or infinite; the loss scale is now 32,768\n" in capsys.readouterr().out
    )


@pytest.mark.usefixtures("no_report")
@pytest.mark.slow
def test_a_learning_rate_far_too_high_is_noticed(tiny):
    with pytest.raises(loop.NonFiniteLoss, match=r"step \d+: the (validation )?loss is (nan|inf)"):
        loop.main(changed(tiny, train={"steps": 50}, optimizer={"name": "sgd", "learning_rate": 1e30}))
    assert all(np.isfinite(row["loss"]) for row in rows_of(tiny_folder(tiny)))


@pytest.mark.usefixtures("no_report")
def test_a_bar_is_shown_on_a_terminal(tiny, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    loop.main(changed(tiny))
    output = capsys.readouterr().out
    assert "training" in output
    assert "5/5" in output
    assert "tokens/s" in output


@pytest.mark.usefixtures("no_report")
@pytest.mark.exhaustive
def test_dropout_and_bfloat16_run(tiny):
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes bfloat16 to float32 inside
        rows = rows_of(loop.main(changed(tiny, model={"dropout": 0.5, "compute_dtype": "bfloat16"})).folder)
    assert len(rows) == 5


def test_a_simulation_needs_no_devices():
    build.force_cpu_devices(1000)  # JAX runs already, with eight: stages would share them
    stack = built_in.layers(config_file.Config().model)
    assert build.devices_of(jpipe.Plan.even(stack.ids, 2, "gpipe", 2)) == 2
    assert build.devices_of(jpipe.Plan.even(stack.ids, 2, "gpipe", 2, placement=((3,), (5,)))) == 6
    assert build.devices_of(jpipe.Plan.even(stack.ids, 2, "gpipe", 2, placement=((0,), (100_000,)))) == 100_001


def test_a_device_is_for_a_rank_and_all_its_stages(tiny):
    layers = [f"layer_{number}" for number in range(6)]
    for keys, ranks in (
        ({"schedule": "interleaved_1f1b", "num_stages": 6, "chunks_per_rank": 3, "replicas": 2}, 4),
        ({"schedule": "looped_bfs", "num_stages": 4, "chunks_per_rank": 2, "replicas": [1, 2, 1, 2]}, 3),
        ({"schedule": "zb_v", "num_stages": 6}, 3),
        ({"schedule": "zb_h1", "num_stages": 3, "replicas": [2, 1, 1]}, 4),
    ):
        config = changed(tiny, plan=keys | {"microbatches": 12}, train={"batch_size": 12}).plan
        assert config.ranks == ranks == build.devices_of(build.make_plan(config, layers)), keys


def test_each_rank_has_the_devices_of_its_mesh(tiny):
    layers = [f"layer_{number}" for number in range(6)]
    for keys, devices in (
        ({"num_stages": 2, "mesh": {"data": 2, "model": 2}}, 8),
        ({"num_stages": 3, "mesh": [{"data": 4}, {}, {"model": 2}], "replicas": [1, 3, 2]}, 11),
        ({"schedule": "interleaved_1f1b", "num_stages": 4, "chunks_per_rank": 2, "mesh": {"model": 3}}, 6),
    ):
        config = changed(tiny, plan=keys | {"microbatches": 12}, train={"batch_size": 12}).plan
        assert config.devices == devices == build.devices_of(build.make_plan(config, layers)), keys
    placed = jpipe.Plan.even(layers, 2, "gpipe", 2, mesh={"model": 4}, placement=((4,), (0,)))
    assert build.devices_of(placed) == 8


class Gpu:
    platform = "gpu"

    def __init__(self, stats):
        self.memory_stats = lambda: stats


def test_the_memory_of_devices_is_that_of_all_of_them():
    assert 1e8 < build.memory_of(jax.devices()) < 1e15
    gpus = [Gpu({"bytes_limit": n}) for n in (2, 5)]
    assert build.memory_of([gpus[0], gpus[1], gpus[1]]) == 7
    assert build.memory_of([Gpu(None)]) == math.inf


def test_every_replica_needs_memory(monkeypatch):
    specs = {"a": {"w": jax.ShapeDtypeStruct((10,), "float32")}, "b": {"w": jax.ShapeDtypeStruct((5,), "float32")}}
    plan = jpipe.Plan.even("ab", 2, "gpipe", 6, replicas=(3, 2))
    need = (3 * 40 + 2 * 20) * 3  # weights, gradients and momentum of each replica
    for have, refused in ((need, False), (need - 1, True)):
        monkeypatch.setattr(build, "memory_of", lambda devices, have=have: have)
        with pytest.raises(jpipe.InputError, match="fits into 0 GB") if refused else contextlib.nullcontext():
            build.check_memory(specs, optax.trace(0.9), plan, [(device,) for device in jax.devices()[:5]])


def tiny_folder(tiny):
    return config_file.Path(tiny["run"]["dir"])


def _poisoned(finished, at):
    """Wrap `MetricsLog.finished` so that the loss of step `at` is NaN."""

    def poisoned(self, metrics):
        if metrics is not None:
            losses = {step: loss * np.float32("nan" if step == at else 1) for step, loss in metrics.losses.items()}
            metrics = metrics._replace(losses=losses)
        return finished(self, metrics)

    return poisoned
