"""Facts of a run besides its losses: time, speed, learning rate, and the parts of a resumed run."""

import json
import os
from pathlib import Path

import pytest

import jpipe
import jpipe.checkpoints
from jpipe_train.assemble import optimizer
from jpipe_train.checkpoint import history, resume
from jpipe_train.checkpoint.run_folder import RunFolder
from jpipe_train.config.config import OptimizerConfig
from jpipe_train.run import loop
from jpipe_train.run.settings import settings_of
from tests.train.checkpoint.written import FACTS
from tests.train.conftest import changed
from tests.train.report.loggers.test_tensorboard import read
from tests.train.report.test_report import Page

WARM = {"learning_rate": 0.01, "lr_schedule": "cosine", "warmup_steps": 2}
OTHER = {"name": "sgd", "learning_rate": 0.5, "lr_schedule": "linear_schedule", "lr_arguments": {"end_value": 0.1, "transition_steps": 3}}


@pytest.mark.exhaustive
def test_a_resumed_run_shows_its_whole_history(tiny, monkeypatch):
    saved = tiny | {"checkpoint": {"every": 2}, "optimizer": WARM}
    with monkeypatch.context() as patched:
        patched.setattr(loop, "write_report", lambda *_: None)  # the second has it all
        loop.main(changed(saved, train={"steps": 4}))
    other = saved | {"optimizer": OTHER, "resume": {"optimizer": "reset"}}
    folder = loop.main(changed(other, train={"steps": 8, "eval_every": 50}, plan={"schedule": "gpipe", "num_stages": 3})).folder

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = optimizer.lr_schedule(OptimizerConfig(**WARM), 4, 0.01)
    second = optimizer.lr_schedule(OptimizerConfig(**OTHER), 8, 0.5)
    rates = [float(first(step)) for step in range(4)] + [float(second(step)) for step in range(4)]  # new state counts from 0
    assert [row["learning_rate"] for row in rows] == pytest.approx(rates, rel=1e-5)
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)  # time goes on where the first part left off
    assert seconds[0] > 0
    assert {row["step"] for row in rows if "tokens_per_second" in row} >= {1, 2, 3, 5, 6}
    assert {row["step"] for row in rows if row.get("tokens_per_second") == 0} == set()

    scalars = read(folder / "tensorboard")
    assert {"loss", "val_loss", "learning_rate", "seconds", "tokens_per_second"} <= set(scalars)
    assert scalars["learning_rate"] == [(row["step"], pytest.approx(row["learning_rate"])) for row in rows]

    facts = resume.Facts.model_validate(jpipe.checkpoints.Checkpoint(folder, 8).facts)
    before, now = facts.history
    assert (before.first, before.end, now.first, now.end) == (0, 4, 4, 8)
    assert before.plan == "pipedream_2bw, 2 stages, 2 microbatches"
    assert now.plan == "gpipe, 3 stages, 2 microbatches"
    assert before.optimizer == "adamw, learning rate 0.01, cosine, 2 warm-up steps"
    assert 0 < before.seconds <= seconds[4] < before.seconds + now.seconds + 1e-3

    text = Page(folder / "report.html").text
    for part in (before, now):
        assert part.plan + part.optimizer in text
    for words in (
        "History",
        "0 to 3",
        "4 to 7",
        "in 2 parts",
        "tokens per second",
        "0.00333 → 0.5 → 0.1",
        "parameters",
        "tokens for training",
    ):
        assert words in text, words
    assert "command" in text


def test_a_part_is_described_with_its_plan_and_its_optimizer():
    plan = jpipe.Plan.even("ab", 2, "pipedream_2bw", 2)
    part = history.part(plan, {"optimizer": {"name": "lion"}}, 2, 0, 6, 0)
    assert history.table([part])[1] == [("0 to 5", "pipedream_2bw, 2 stages, 2 microbatches", "lion", "2", "–", "–", "–", "–")]
    warm = plan.model_copy(update={"flush_first": 3})
    assert history.part(warm, {}, 2, 0, 6, 0).plan == "pipedream_2bw, 2 stages, 2 microbatches, 3 batches flushed first"


def test_a_checkpoint_of_another_precision_is_refused():
    plan = jpipe.Plan.even("ab", 2, "pipedream_2bw", 2)
    for text, dtype in (("seed: 0\n", "float32"), ("precision: {params: bfloat16}\n", "bfloat16"), ("precision: [3]\n", "float32")):
        old = resume.Resumed(Path("run"), 6, resume.Facts(**FACTS | {"config": text, "plan": plan.to_json()}), (6,))
        old.check_precision(dtype)
        with pytest.raises(jpipe.InputError, match=f"^precision.params: expected {dtype} as in the checkpoint of step 6, found float16; "):
            old.check_precision("float16")


@pytest.mark.parametrize(
    ("replicas", "every", "updates"), [((1, 1), "batch", 13), ((2, 2), "replicas", 16), ((4, 2), "replicas", None), ((4, 2), "batch", 13)]
)
def test_updates_are_counted_as_the_optimizer_counts_them(replicas, every, updates):
    plan = jpipe.Plan.even("ab", 2, "pipedream", 4, replicas=replicas, update_every=every)
    part = history.part(plan, {}, 2, 7, 7, 10)
    assert history.History((), part, plan, lambda: 0.0).updates(10) == updates


def test_a_history_of_thousands_of_parts_stays_small():
    plan = jpipe.Plan.even("a", 1, "gpipe", 1)
    parts = [history.part(plan, {}, 1, step, step + 1, step) for step in range(3000)]
    run_history = history.History(parts, history.part(plan, {}, 1, 3000, 3000, 3000), plan, lambda: 2.5)
    facts = run_history.facts(3005)
    assert (len(facts), facts[0]["first"], facts[-1]["end"], facts[-1]["seconds"]) == (history.MOST_PARTS, 2001, 3005, 2.5)
    assert len(resume.Facts(**FACTS | {"history": facts}).history) == history.MOST_PARTS


@pytest.mark.parametrize("name", ["tests.train.own:rule", "noisy_sgd"])
def test_an_unknown_learning_rate_is_left_out(name):
    known = optimizer.learning_rate(OptimizerConfig(name=name), 10)
    assert (known is None) == (":" in name)


@pytest.mark.parametrize("steps", [5, 3000])
def test_learning_rates_are_those_of_the_schedule(steps):
    config = OptimizerConfig(learning_rate=3e-4, lr_schedule="cosine", warmup_steps=3)
    schedule, rate = optimizer.lr_schedule(config, steps, 3e-4), optimizer.learning_rate(config, steps)
    for update in {0, 1, 2, 3, 4, steps // 2, steps - 1, steps + 10}:
        assert rate(update) == pytest.approx(float(schedule(update)), rel=1e-5)
    assert optimizer.learning_rate(OptimizerConfig(), 10)(7) == 1e-3


def test_a_part_of_a_run_names_its_meshes():
    plan = jpipe.Plan.even("abcd", 2, "gpipe", 2, mesh=[{"data": 2, "model": 2}, {"data": 4}], replicas=[1, 2])
    words = history.part(plan, {}, 12, 0, 0, 0).plan
    assert words == "gpipe, 2 stages on (data 2, model 2), (data 4), replicas 1, 2, 2 microbatches"


def test_an_interruption_is_reported_at_the_first_new_step():
    plan = jpipe.Plan.even("ab", 2, "gpipe", 2)
    earlier = history.LastStep(7, 100.0)
    run_history = history.History((), history.part(plan, {}, 2, 6, 6, 6), plan, lambda: 2.5, earlier, lambda: 112.25)
    assert [run_history.logged(step) for step in (6, 7)] == ["", ""]
    assert (run_history.parts(8)[-1].pause, run_history.parts(8)[-1].repeated) == (None, None)
    assert run_history.logged(8) == (
        "0:12 passed from step 7, the last before the interruption, to step 8, the first new step, with 2 steps trained again"
    )
    assert run_history.logged(9) == ""
    (part,) = run_history.parts(10)
    assert (part.pause, part.repeated) == (12.25, 2)
    assert history.table([part])[1][0][-2:] == ("0:12", "2")
    rarely = history.History(
        (), history.part(plan, {}, 2, 9, 9, 9), plan, lambda: 2.5, earlier, lambda: 101.0
    )  # every tenth step is logged
    assert rarely.logged(8) == ""
    assert rarely.logged(9) == "0:01 passed from step 7, the last before the interruption, to step 9, the first new step"


def test_the_last_row_says_when_a_run_was_interrupted(tiny):
    plan = jpipe.Plan.even("ab", 2, "gpipe", 2)
    with RunFolder(settings_of(changed(tiny)), plan) as folder:
        file = folder.path / "metrics.jsonl"
        for text, step in (
            ("", None),
            ('{"step": 3, "loss": 1.0}\n{"step": 4, "lo', 3),
            ('{"step": 4}\n[5]\n{"step": -1}\n', 4),
            ("x\n", None),
        ):
            file.write_text(text)
            os.utime(file, (0, 1000.5))
            assert folder.last_logged() == (None if step is None else (step, 1000.5))
        file.unlink()
        assert folder.last_logged() is None


def test_the_steps_at_which_the_plan_changed_are_found():
    def part(first: int, end: int, devices: int = 4, replicas: int = 1, **keys) -> history.RunPart:
        plan = jpipe.Plan.even("abcd", **{"num_stages": 4, "schedule": "gpipe", "microbatches": 4, "replicas": replicas} | keys)
        return history.part(plan, {}, devices, first, end, 0)

    parts = [
        part(0, 4, 8, 2),
        part(4, 6),  # no replicas any more
        part(6, 6, num_stages=2),  # without a step
        part(6, 9, num_stages=3),
        part(9, 12, num_stages=3),
        part(12, 15, 1, num_stages=3),
        part(15, 20, num_stages=2, schedule="pipedream_flush"),
    ]
    assert history.changes_of_plan(parts) == [
        (4, "gpipe, 4 stages, 4 microbatches"),
        (6, "3 stages"),
        (12, "1 device"),
        (15, "pipedream_flush, 2 stages"),
    ]
    assert history.changes_of_plan(parts[:1]) == []
