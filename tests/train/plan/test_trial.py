"""`jpipe plan --measure`: the choice by measurement, and the table beside the predictions."""

import io
import itertools
import re
import types
from pathlib import Path

import jax
import pytest
import yaml
from rich.console import Console

import jpipe
from jpipe_planner import Plans
from jpipe_planner.ranking.find import Compiled
from jpipe_train import cli
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from jpipe_train.plan import trial
from tests.train.plan import test_plan as planned
from tests.train.plan import test_planning as planning


def measured_as(monkeypatch, seconds, most: int = 3, fits=lambda candidate: True) -> tuple[Plans, trial.Measured, str]:
    """Measure plans of a profile, where the plan n that starts takes `seconds(n, ranked)` each step; return what is printed, too."""
    searched, numbers, output = planning.searched(planning.TWO), itertools.count(), io.StringIO()
    by_plan = {searched.choice.plan(ranked): ranked for ranked in searched.choice.ranked}

    def running(pipe, batch, team):
        n, ranked = next(numbers), by_plan[pipe.plan]
        assert {len(array) for array in jax.tree.leaves(batch)} == {ranked.candidate.batch}
        return types.SimpleNamespace(round=lambda: seconds(n, ranked))

    def compiled(choice, ranked, *_):
        return Compiled(ranked, ranked.candidate.memory, 0.0 if fits(ranked.candidate) else 2000.0, ())

    monkeypatch.setattr(trial, "Running", running)
    monkeypatch.setattr(trial, "compile_stages", compiled)
    monkeypatch.setattr(trial.data, "load", lambda _: trial.data.Data([(jax.numpy.zeros((1, 2)),) * 2], [], "", "", str))
    reporter = Reporter(1, 1, "samples", Console(file=output, width=200))
    return searched, trial.measure(lambda: searched, planning.parts(), most, reporter, Team(None)), output.getvalue()


def test_the_fastest_measured_plan_is_chosen(monkeypatch):
    searched, measured, _ = measured_as(monkeypatch, lambda n, ranked: (4.0, 3.0, 2.0)[n])
    before, after = searched.choice.ranked, measured.result.choice.ranked
    assert [one.candidate for one in after[:3]] == [before[n].candidate for n in (2, 1, 0)]
    assert after[3:] == before[3:]
    assert [one.ranked for one in measured.result.compiled] == list(after[:3])
    assert [one.error for one in measured.trials] == pytest.approx([(2.0, 3.0, 4.0)[n] / before[2 - n].seconds - 1 for n in range(3)])


def test_equal_measurements_keep_the_order_of_predictions_and_rounds_their_median(monkeypatch):
    rounds = itertools.cycle((1.0, 1.0, 9.0, 1.0, 1.005))
    searched, measured, _ = measured_as(monkeypatch, lambda n, ranked: next(rounds), most=2)
    assert [one.ranked.candidate for one in measured.trials] == [one.candidate for one in searched.choice.ranked[:2]]
    assert all(len(one.rounds) == trial.ROUNDS and one.seconds == 1.0 for one in measured.trials)


def fails_second(n, ranked):
    if n == 1:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nwith details")
    return 2 * ranked.seconds


def test_a_plan_that_fails_or_does_not_fit_has_its_reason_in_a_line_and_a_row(monkeypatch):
    searched, measured, printed = measured_as(monkeypatch, fails_second)
    failed = searched.choice.ranked[1]
    assert "cannot run here: RESOURCE_EXHAUSTED: out of memory\n" in printed
    assert [one.ranked.candidate for one in measured.failed] == [failed.candidate]
    assert trial.why(measured, measured.failed[0].ranked) == "failed"
    best = searched.choice.ranked[0].candidate
    _, measured, printed = measured_as(monkeypatch, lambda n, ranked: ranked.seconds, fits=lambda candidate: candidate != best)
    assert re.search(r"cannot run here: .*lacks 2 kB when compiled", printed)
    assert len(measured.trials) == 3
    assert best not in {one.ranked.candidate for one in measured.trials}


def test_where_every_plan_fails_the_reasons_are_the_error(monkeypatch):
    def fails(n, ranked):
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    with pytest.raises(jpipe.InputError, match=r"--measure: .*: INTERNAL: broken\n--measure: "):
        measured_as(monkeypatch, fails, most=2)


@pytest.mark.parametrize("after", [0, 5])
def test_ctrl_c_keeps_what_was_measured(monkeypatch, after):
    runs = itertools.count()

    def pressed(n, ranked):
        if next(runs) == after:
            raise KeyboardInterrupt
        return (4.0, 3.0, 2.0)[n]

    with interrupt.watched():
        searched, measured, printed = measured_as(monkeypatch, pressed)
    if after:
        assert "interrupted: only the plans that are measured already are compared" in printed
        assert measured.result.choice.ranked[0].candidate == searched.choice.ranked[2].candidate
    else:
        assert "interrupted: predictions decide" in printed
        assert measured.result.choice.ranked[0].candidate == searched.choice.ranked[0].candidate


def test_plans_run_one_by_one_where_memory_is_short():
    choice = planning.searched(planning.TWO).choice
    trials = [trial.Trial("", ranked.candidate.batch, ranked=ranked) for ranked in choice.ranked[:2]]
    needed = sum(max(one.ranked.memory) for one in trials)
    assert [len(group) for group in trial._groups(trials, needed)] == [2]
    assert [len(group) for group in trial._groups(trials, None)] == [2]
    assert [len(group) for group in trial._groups(trials, needed - 1)] == [1, 1]


def test_the_table_has_the_times_of_a_step_and_how_much_longer_they_are_than_predicted(monkeypatch):
    _, measured, _ = measured_as(monkeypatch, lambda n, ranked: ranked.seconds * (1.9, 2.0, 2.6)[n])
    for row, one in zip(trial.rows(measured), measured.trials, strict=True):
        assert len(row) == len(trial.HEAD)
        assert row[3] == row[4].split(" to ")[0] == row[4].split(" to ")[1]
        assert float(row[5].rstrip("%")) == pytest.approx(100 * one.error, abs=1)


@pytest.mark.slow
def test_plans_run_and_the_written_profile_plans_again(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "SECONDS", 0.0)
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny | {"optimizer": {"name": "sgd"}}))
    Path("invented.json").write_text(planned.profile().to_json())
    written = "--profile=invented.json", "--out=plan.json", "--profile-out=profile.json"
    assert cli.main(["plan", "tiny.yaml", "--measure=2", "--schedules=gpipe,pipedream_flush", *written, "--explain"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(r"^schedule +stages +predicted +measured +least to most +off by$", printed.out, re.MULTILINE)
    assert len(re.findall(r" ms to .* ms +[+-]\d+%$", printed.out, re.MULTILINE)) == 2
    assert "slower as measured" in printed.out
    assert jpipe.Plan.from_json(Path("plan.json").read_text()).predicted is not None
    assert cli.main(["plan", "tiny.yaml", "--profile=profile.json", "--schedules=gpipe"]) == 0
