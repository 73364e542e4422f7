"""The delay of plans: the same as that of `jpipe.Plan`, bounded, shown, and what decides among plans that are equally fast."""

import dataclasses
import re

import pytest

import jpipe
from jpipe_planner import Profile, Topology
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import choose, in_order
from jpipe_planner.ranking.table import price_of_flush
from jpipe_planner.search.candidates import find_candidates
from tests.planner.invented import varied

DEVICES = 4
MACHINES = Topology.flat(DEVICES, 1e12)


def equal_layers(weights: int = 10**12, update: float = 0.0) -> Profile:
    """Layers of equal work, too heavy to replicate: a forward of a row takes a second, a backward two."""
    at = [{"forward": 1.0, "backward": 2.0, "outputs": 8, "residuals": {"none": 100}}]
    layers = [{"id": f"layer {n}", "weights": weights, "optimizer": weights, "update": update, "at": at} for n in range(2 * DEVICES)]
    return Profile(source="analytic", sizes=(1,), inputs=(8,), labels=(8,), layers=layers)


def pipelines(batch: int, **options):
    """Return the plans of four stages without replicas and without more microbatches in flight."""
    candidates = find_candidates(equal_layers(), MACHINES, batch, **options)
    return [one for one in candidates if one.depth == DEVICES and not one.options.extra_in_flight]


@pytest.mark.exhaustive
def test_a_candidate_has_the_delay_of_its_plan():
    profile, topology = equal_layers(10**6), Topology.flat(DEVICES, 1e2)
    candidates = find_candidates(profile, topology, 8)
    candidates += find_candidates(profile, topology, 8, schedules=["pipedream"], pipedream="replicas")
    shallow = [one for one in candidates if one.depth == 2]  # three chunks of deeper ones would be more stages than layers
    candidates += varied(profile, topology, candidates) + varied(profile, topology, shallow)
    assert {one.chunks for one in candidates if one.delay} == {1, 2, 3}
    assert {"early", "joint"} == {one.options.split_backward for one in candidates if one.delay}
    for one in candidates:
        assert one.delay == pytest.approx(one.plan(profile.ids).mean_delay, abs=1e-12)
        assert (one.delay == 0) >= jpipe.schedules.SCHEDULES[one.schedule].flushes


@pytest.mark.parametrize("microbatches", [4, 8])
def test_pipedream_with_as_many_microbatches_as_stages_is_offered_with_two_versions_and_the_bubble_of_2bw(microbatches):
    (stashing,) = pipelines(microbatches, schedules=["pipedream"])[:1]
    (buffered,) = pipelines(microbatches, schedules=["pipedream_2bw"])
    assert buffered.seconds == stashing.seconds == pytest.approx(2 * 3.0 * microbatches)  # two layers in a stage
    assert buffered.bubble == stashing.bubble == pytest.approx(0, abs=1e-9)
    plan = stashing.plan(equal_layers().ids)
    rules = jpipe.schedules.SCHEDULES["pipedream"]
    assert max(rules.versions_alive(plan, s) for s in range(DEVICES)) == 2
    assert stashing.delay == pytest.approx(sum(DEVICES - 1 - s for s in range(DEVICES)) / DEVICES / microbatches)
    assert buffered.delay == 1


def test_of_equally_fast_plans_the_one_with_newer_weights_comes_first():
    choice = choose(equal_layers(), MACHINES, pipelines(8, schedules=["pipedream_2bw", "pipedream", "pipedream_flush"]))
    names = [one.candidate.schedule for one in choice.ranked]
    assert names == ["pipedream", "pipedream_2bw", "pipedream_flush"]
    assert [row[table.HEAD.index("delay")] for row in table.rows(choice, 3)] == ["0.188", "1", "0"]
    assert [row[-1] for row in table.why_chosen(choice, 3)][:2] == ["chosen", "as fast, older weights"]
    # Up to half a percent, even if it has more memory and more ranks; beyond that, speed decides.
    first, second, _ = choice.ranked
    for factor, expected in ((1.004, first), (1.006, second)):
        slower = dataclasses.replace(first.simulated, batch_seconds=factor * second.seconds, peak_bytes=(10**15,) * DEVICES)
        ranked = in_order([second, dataclasses.replace(first, simulated=slower)])
        assert ranked[0].candidate == expected.candidate


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("max_delay", "expected"),
    [
        (0.5, {"pipedream"}),
        (None, {"pipedream", "pipedream_2bw"}),
        (1, {"pipedream", "pipedream_2bw"}),
        (3 / 16, {"pipedream"}),  # exactly that of four stages with 8 microbatches
        pytest.param(0.18, set(), marks=pytest.mark.slow),
        (0, set()),
    ],
)
def test_the_delay_of_plans_is_bounded(max_delay, expected):
    profile = equal_layers()
    flushing = {name for name, rules in jpipe.schedules.SCHEDULES.items() if rules.flushes}
    candidates = pipelines(8, max_delay=max_delay)
    assert {one.schedule for one in candidates} - flushing == expected
    assert all(max_delay is None or one.delay <= max_delay for one in candidates)
    variants = varied(profile, MACHINES, candidates, max_delay=max_delay)
    assert {one.schedule for one in variants} & flushing
    assert all(max_delay is None or one.delay <= max_delay for one in variants)
    assert any(one.delay for one in variants) == (max_delay is None or max_delay >= 0.5)


def ratio_in(line):
    return float(re.search(r"[0-9]\.[0-9]{2}(?= times)", line)[0])


@pytest.mark.parametrize(("microbatches", "delay"), [(8, "0.188"), (4, "0.375")])
def test_the_price_of_the_flush_is_that_of_the_simulator(microbatches, delay):
    schedules = ["pipedream_2bw", "pipedream", "pipedream_flush"]
    flush, pays = price_of_flush(choose(equal_layers(), MACHINES, pipelines(microbatches, schedules=schedules)))
    assert ratio_in(flush) == ratio_in(pays) == pytest.approx((microbatches + DEVICES - 1) / microbatches, abs=0.006)
    assert flush.startswith("price of the flush: per sample, pipedream_flush with 4 stages takes ")
    assert flush.endswith(f" times as long as pipedream with 4 stages (mean delay {delay})")
    assert pays.startswith("the asynchronous plan pays if it reaches the same loss with fewer than ")


def test_the_price_of_the_flush_with_a_plan_from_outside_the_ranking():
    choice = choose(equal_layers(), MACHINES, pipelines(8, schedules=["pipedream_flush"]))
    assert price_of_flush(choice) == []
    hint, flush, _ = price_of_flush(choice, choice.simulate(pipelines(8, schedules=["pipedream_2bw"])[0]))
    assert hint.startswith("only schedules that flush were considered; pipedream_2bw with 4 stages, with delayed weights, would be about 3")
    assert ratio_in(flush) == pytest.approx(11 / 8, abs=0.006)
    assert flush.endswith(" times as long as pipedream_2bw with 4 stages (mean delay 1)")


@pytest.mark.parametrize(("factor", "speed"), [(1.0, "as fast as"), (0.5, "faster than")])
def test_a_flush_that_costs_nothing_is_preferred(factor, speed):
    choice = choose(equal_layers(), MACHINES, pipelines(8, schedules=["pipedream", "pipedream_flush"]))
    late, flushing = (next(one for one in choice.ranked if one.candidate.schedule == name) for name in ("pipedream", "pipedream_flush"))
    fast = dataclasses.replace(flushing.simulated, batch_seconds=factor * late.seconds)
    free = dataclasses.replace(choice, ranked=(late, dataclasses.replace(flushing, simulated=fast)))
    (words,) = price_of_flush(free)
    names = "pipedream_flush with 4 stages", "pipedream with 4 stages (mean delay 0.188)"
    assert words == f"price of the flush: none; {names[0]} is {speed} {names[1]}, and its weights are newer"
