"""A schedule needs a file and a line in the registry to be planned, drawn, simulated, trained and reported."""

import random

import pytest
import yaml

import jpipe
from jpipe_planner import draw_choice
from jpipe_planner.cost.shape import planned_schedules
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import choose
from jpipe_planner.search.candidates import find_candidates
from jpipe_train import cli
from jpipe_train.run import loop
from tests.planner.invented import equal
from tests.planner.search.test_equal import gpt, levels, price
from tests.train.conftest import changed

TOPOLOGY = levels((2, 20_000.0, 0.02), (2, 5_000.0, 0.1))


@pytest.fixture(autouse=True)
def schedule(two_by_two):
    return two_by_two.name


def test_its_estimate_is_near_its_simulation(schedule):
    """Without a closed form it is estimated as 1F1B."""
    profile = gpt(6, head=0.5)
    candidates = equal(profile, TOPOLOGY, 12, schedules=[schedule])
    assert {candidate.depth for candidate in candidates} == {2, 4}  # data parallelism is another schedule's
    for candidate in random.Random(2).sample(candidates, 12):
        assert candidate.seconds == pytest.approx(price(profile, TOPOLOGY, candidate), rel=0.3)
    for ranked in choose(profile, TOPOLOGY, candidates).ranked:  # what is shown is simulated
        assert ranked.seconds == pytest.approx(price(profile, TOPOLOGY, ranked.candidate), rel=1e-9)


def test_very_many_microbatches_are_estimated_at_once(schedule):
    candidates = equal(gpt(), levels((4, 20_000.0, 0.0)), 10**6, exact=True, schedules=[schedule, "pipedream_flush"])
    seconds = {c.schedule: c.seconds for c in candidates if c.microbatches == 10**6 and c.depth == 4}
    # The slowest stage, the last one, is always busy in both. Under the added schedule it starts two programs for each microbatch, not one.
    assert seconds[schedule] == pytest.approx(seconds["pipedream_flush"] + 10**6 * gpt().dispatch, rel=1e-4)


def test_it_is_ranked_and_drawn_among_the_others(schedule):
    profile = gpt(4)
    candidates = find_candidates(profile, TOPOLOGY, 8, schedules=planned_schedules())
    assert {candidate.schedule for candidate in candidates} == set(planned_schedules())
    choice = choose(profile, TOPOLOGY, [c for c in candidates if c.schedule in (schedule, "gpipe")], most=2)
    added = next(ranked for ranked in choice.ranked if ranked.candidate.schedule == schedule)
    assert added.samples_per_second > 0
    assert any(schedule in row for row in table.rows(choice, len(choice.ranked)))
    scatter = draw_choice(choice, choice.ranked, added).axes[0]
    assert schedule in [text.get_text() for text in scatter.get_legend().get_texts()]


def test_a_config_may_name_an_added_schedule(schedule, tiny, tmp_path, capsys):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny))
    picture = tmp_path / "grid.png"
    assert cli.main(["simulate", str(path), "--set", f"plan.schedule={schedule}", "--png", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert f"{schedule}: 2 stages, 2 microbatches per batch" in printed
    assert "rank 1 |    . F0.0 F1.0 B0.0 - B1.0* -" in printed
    assert picture.stat().st_size > 0


@pytest.mark.slow
def test_a_run_of_it_is_reported(schedule, tiny):
    summary = loop.main(changed(tiny, train={"steps": 6, "eval_every": 50}, plan={"schedule": schedule}))
    assert schedule in (summary.folder / "report.html").read_text()
    assert (summary.folder / "timeline.png").stat().st_size > 0
    assert summary.predicted.timeline[0][0][:3] == summary.measured.timeline[0][0][:3]
    assert jpipe.Plan.from_json((summary.folder / "plan.json").read_text()).schedule == schedule
