"""Plans with several stages on a rank or split backwards: legal, priced as simulated, and chosen where fastest."""

import dataclasses
import itertools

import pytest

import jpipe
from jpipe_planner import Profile, find_plans
from jpipe_planner.cost.shape import planned_schedules
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.ranking import table, variants
from jpipe_planner.ranking.choose import Ranked, choose
from jpipe_planner.ranking.variants import MOST_CHUNKS, variant_schedules
from jpipe_planner.search.candidates import find_candidates
from tests.jpipe.schedules.pricing import most_in_flight, order_of
from tests.planner.invented import varied
from tests.planner.search.test_equal import gpt, levels

FAST = levels((4, 1e9, 0.0))


@pytest.mark.exhaustive
def test_every_schedule_is_searched_in_one_way_or_the_other():
    assert {*planned_schedules(), *variant_schedules()} == set(jpipe.schedules.SCHEDULES)
    variants = varied(gpt(14), FAST, find_candidates(gpt(14), FAST, 8))
    assert {candidate.schedule for candidate in variants} >= set(variant_schedules())
    assert {candidate.chunks for candidate in variants} == set(range(1, MOST_CHUNKS + 1))
    assert {candidate.devices for candidate in variants} == {4}


@pytest.mark.slow
def test_variants_are_priced_as_simulated_with_memory_of_each_rank():
    profile, slow = gpt(6), levels((4, 20_000.0, 0.02))
    variants = varied(profile, slow, find_candidates(profile, slow, 8))
    assert {candidate.options.split_backward for candidate in variants} == {"joint", "early"}
    assert len(variants) > 20
    for candidate in itertools.islice(variants, 0, None, 7):
        plan = candidate.plan(profile.ids)
        costs = profile.stage_costs(plan, candidate.rows)
        simulated = simulate_plan(plan, costs, slow)
        assert (candidate.seconds, candidate.bubble) == (simulated.batch_seconds, simulated.bubble)
        assert len(candidate.memory) == len(plan.pipeline_ranks) == candidate.num_pipeline_ranks
        assert max(candidate.memory) == max(simulated.peak_bytes)


def ranking(profile, topology, batch, schedules=None):
    return find_plans(profile, topology, batch, schedules=schedules).choice


@pytest.mark.slow
def test_without_stale_weights_and_links_a_zero_bubble_schedule_is_the_fastest_of_those_that_flush():
    """The bubble is large, and all microbatches have one size."""
    choice = ranking(gpt(7, head=0.9, sizes=(1,), weights=10), FAST, 4)
    flushing = [one for one in choice.ranked if jpipe.schedules.SCHEDULES[one.candidate.schedule].flushes and one.candidate.depth > 1]
    assert flushing[0].candidate.schedule not in planned_schedules()
    assert any(one.candidate.schedule == "pipedream_flush" for one in flushing[1:])


@pytest.mark.slow
def test_chunks_gain_nothing_without_a_flush():
    """Transfers are more frequent and there is no bubble to fill: for equal layers the straight plan of 2BW is best."""
    profile = gpt(8, sizes=(1,))
    profile = profile.model_copy(update={"layers": profile.layers[1:-1]})
    topology, schedules = levels((4, 20_000.0, 0.02)), ["pipedream_2bw", "pipedream_flush"]
    best = ranking(profile, topology, 8, ["pipedream_2bw"]).ranked[0]
    assert best.candidate.chunks == 1
    variants = varied(profile, topology, find_candidates(profile, topology, 8, schedules=schedules), ["pipedream_2bw"])
    chunked = [one for one in variants if one.chunks > 1 and one.over is None]
    assert chunked
    assert max(one.samples_per_second for one in chunked) <= best.samples_per_second


@pytest.mark.parametrize(("rival", "chunks"), [(4.5, {2}), (3.9, set())])
def test_chunks_are_tried_if_they_balance_the_ranks_better_than_a_rival(rival, chunks):
    """Two stages compute for 6 and 2 or 3 and 5 seconds, two ranks of two chunks for 4 each; the rival's stages have different replicas."""
    at = [{"forward": seconds / 3, "backward": 2 * seconds / 3, "outputs": 4, "residuals": {"none": 4}} for seconds in (3.0, 3.0, 1.0, 1.0)]
    layers = [{"id": f"layer_{n}", "weights": 4, "at": [one]} for n, one in enumerate(at)]
    profile, topology, tried = Profile(source="analytic", sizes=[1], inputs=[4], labels=[4], layers=layers), levels((2, 1e9, 0.0)), {}
    planned = [one for one in find_candidates(profile, topology, 8, schedules=["pipedream_flush"]) if one.depth == 2]
    fastest = Ranked(dataclasses.replace(planned[0], schedule="pipedream", seconds=8 * rival))
    variants.find_variants(dataclasses.replace(choose(profile, topology, planned), ranked=(fastest,)), planned, ["pipedream"], tried)
    assert {one.candidate.chunks for one in tried.values()} == chunks


def test_with_a_global_norm_chunks_and_early_gradients_of_pipedream_have_vertical_sync():
    profile, topology = gpt(8, sizes=(1,)), levels((2, 2_000.0, 0.02))
    planned = find_candidates(profile, topology, 8, schedules=["pipedream"], global_norm=True)
    planned += find_candidates(profile, topology, 8, schedules=["pipedream_flush"], global_norm=True)
    variants = varied(profile, topology, planned, ["pipedream"], global_norm=True)
    assert {(one.chunks > 1, one.options.split_backward, one.options.vertical_sync) for one in variants} >= {
        (True, "joint", True),
        (False, "early", True),
    }
    assert all(one.options.vertical_sync for one in variants if one.depth > 1)


def test_where_memory_is_short_fewer_microbatches_in_flight_save_it():
    """Without recomputation, which the profile lacks, and with two versions of 2BW nothing else has so little memory."""
    profile, limited = gpt(6, sizes=(1,), outputs=10), levels((4, 1e9, 0.0), memory=None)
    straight = [one for one in find_candidates(profile, limited, 8, schedules=["pipedream_2bw"]) if one.depth == 4]
    whole = min(straight, key=lambda one: one.rank)
    found = {}
    for memory in (None, max(whole.memory) - 1):
        limited = levels((4, 1e9, 0.0), memory=memory)
        planned = [dataclasses.replace(one, over=(0, 1) if memory else None) for one in straight]
        found[memory] = [one for one in varied(profile, limited, planned, ["pipedream_2bw"]) if one.options.max_in_flight]
    assert not found[None]
    fitting = [one for one in found[max(whole.memory) - 1] if one.over is None]
    assert {one.options.max_in_flight for one in fitting} >= {1, 2}
    for one in fitting:
        assert one.seconds > whole.seconds
        assert one.plan(profile.ids).max_in_flight == one.options.max_in_flight
        assert f"≤{one.options.max_in_flight}" in table.schedule(one)


def test_where_memory_is_short_replicas_share_their_optimizer():
    profile, topology = gpt(6, sizes=(1,), outputs=10), levels((4, 1e9, 0.0))
    planned = [one for one in find_candidates(profile, topology, 8, schedules=["pipedream_2bw", "gpipe"]) if one.replicas == (2, 2)]
    lacking = [dataclasses.replace(one, over=(0, 1)) for one in planned]
    names = ["pipedream_2bw", "gpipe"]
    found = varied(profile, topology, lacking, names)
    assert not any(one.shard_optimizer for one in varied(profile, topology, lacking, names, share_optimizer=False))
    sharing = {one.schedule: one for one in found if one.shard_optimizer}
    assert sharing.keys() == {"pipedream_2bw", "gpipe"}
    for schedule, one in sharing.items():
        plan = one.plan(profile.ids)
        without = plan.model_copy(update={"shard_optimizer": False})
        whole = simulate_plan(without, profile.stage_costs(without, one.rows), topology)
        assert plan.shard_optimizer
        assert max(whole.peak_bytes) - max(one.memory) == 80_000, "two of five equal parts of the optimizer state"
        assert one.seconds < whole.batch_seconds, "each makes a part of the update, and links are fast"
        assert "shard_optimizer" in table.schedule(one), schedule


def test_plans_that_do_not_fit_are_rejected_by_rank():
    limited = levels((4, 1e9, 0.0), memory=100_000)
    variants = varied(gpt(6), limited, find_candidates(gpt(6), limited, 8, schedules=["pipedream_flush"]), ["zb_h2", "interleaved_1f1b"])
    assert any(candidate.over for candidate in variants)
    for candidate in variants:
        assert (candidate.over is not None) == (max(candidate.memory) > 100_000)
        if candidate.over:
            assert candidate.over == (candidate.memory.index(max(candidate.memory)), max(candidate.memory) - 100_000)


@pytest.mark.slow
def test_the_reason_for_a_plan_is_explained():
    choice = ranking(gpt(7, head=0.9, sizes=(1,)), FAST, 4)
    rows = table.why_chosen(choice, 6)
    assert rows[0][-1] == "chosen"
    for row in rows[1:]:
        assert row[-1].startswith("as fast, ") or "% slower" in row[-1]
    assert all(len(row) == len(table.WHY_HEAD) for row in rows)
    assert any(", " in row[4] for row in rows), "the memory of each rank"


def straight_pipelines(schedule, latency, **fields):
    """Rank equal layers on four ranks with these links, joint and without more microbatches in flight, and their variants."""
    profile, topology = gpt(4, sizes=(1,)), levels((4, 1e12, latency))
    layers = [layer.model_copy(update={"at": tuple(at.model_copy(update=fields) for at in layer.at)}) for layer in profile.layers[1:-1]]
    profile = profile.model_copy(update={"layers": tuple(layers)})
    candidates = find_candidates(profile, topology, 16, schedules=[schedule])
    joint = [candidate for candidate in candidates if candidate.depth == 4 and not candidate.options.extra_in_flight]
    tried = {}
    choice = choose(profile, topology, joint, tried=tried)
    variants.find_variants(choice, joint, [schedule], tried)
    return choice.with_more([one for one in tried.values() if one.candidate.options.split_backward == "early"])


@pytest.mark.parametrize("schedule", ["pipedream_flush", "pipedream", "pipedream_2bw"])
def test_early_gradients_win_where_they_hide_the_latency_of_links(schedule):
    """A backward for weights takes a second and hides messages of 0.4 seconds; whole backwards wait for them."""
    choice = straight_pipelines(schedule, 0.4)
    first, second = choice.ranked
    assert (first.candidate.options.split_backward, first.candidate.options.extra_in_flight) == ("early", 0)
    assert (second.candidate.options.split_backward, second.candidate.options.extra_in_flight) == ("joint", 0)
    if schedule != "pipedream_flush":  # nobody waits; a backward in two halves has a program, and its dispatch, more
        assert first.seconds == pytest.approx(16 * 3, rel=0.02)
    rows = table.why_chosen(choice, 2)
    assert [row[0] for row in rows] == [f"{schedule} early", schedule]
    assert rows[0][-1] == "chosen"
    assert "% slower" in rows[1][-1]
    assert choice.plan(first).split_backward == "early"


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("schedule", ["pipedream_flush", "pipedream", "pipedream_2bw"])
def test_early_gradients_do_not_win_without_latency(schedule):
    """Without latency the gradient is not needed earlier, and whole backwards need fewer programs."""
    choice = straight_pipelines(schedule, 0.4, backward_weight=0.0)
    assert [one.candidate.options.split_backward for one in choice.ranked] == ["joint", "early"]
    assert table.why_chosen(choice, 2)[1][-1] == "as fast, more programs"


def test_early_gradients_with_unequal_replicas_have_the_memory_of_each_rank():
    profile, slow = gpt(4, sizes=(1,)), levels((4, 1e12, 0.4))
    joint = next(c for c in find_candidates(profile, slow, 16, schedules=["pipedream"]) if c.depth == 3 or c.depth == 4)
    uneven = dataclasses.replace(joint, starts=(0, 3, 4), replicas=(2, 1, 1), policies=("none",) * 3, options=jpipe.schedules.NO_OPTIONS)
    (candidate,) = [one for one in varied(profile, slow, [uneven], ["pipedream"]) if one.options.split_backward == "early"]
    plan = candidate.plan(profile.ids)
    peaks = simulate_plan(plan, profile.stage_costs(plan, 1), slow).peak_bytes
    assert candidate.memory == (max(peaks[:2]), peaks[2], peaks[3])


def test_plans_that_would_take_too_long_are_left_out_and_smaller_ones_tried(monkeypatch):
    profile, two = gpt(6, sizes=(1,)), ["zb_h1", "interleaved_1f1b"]
    planned = [one for one in find_candidates(profile, FAST, 8, schedules=["pipedream_flush"]) if one.depth == 4]
    choice = choose(profile, FAST, planned)
    whole, least = {}, {}
    variants.find_variants(choice, planned, two, whole)
    most = sorted(map(choice.forwards, whole))
    monkeypatch.setattr(variants, "MOST_OF_VARIANTS", most[0])
    variants.find_variants(choice, planned, two, least)
    assert len(whole) > 1
    assert list(map(choice.forwards, least)) == [most[0]], "not the first one, but one that may be"


@pytest.mark.slow
def test_orders_that_are_made_have_the_limit_for_which_they_were_made():
    variants = varied(gpt(6), FAST, find_candidates(gpt(6), FAST, 8, schedules=["pipedream_flush"]), ["auto_zero_bubble"])
    assert {candidate.options.order_limit // candidate.depth for candidate in variants} == {1, 2}
    for candidate in variants:
        plan = candidate.plan(gpt(6).ids)
        assert plan.order_limit == candidate.options.order_limit
        peaks = [most_in_flight(order_of(plan, p), lambda entry: entry.finishes) for p in range(candidate.num_pipeline_ranks)]
        assert max(peaks) <= plan.order_limit
        assert jpipe.Plan.from_json(plan.to_json()).order_limit == plan.order_limit


@pytest.mark.parametrize("flag", ["backward_weight", "stash"])
def test_profiles_of_older_versions_are_read(flag):
    profile = gpt(2)
    text = profile.to_json()
    assert flag in text
    at = profile.layers[1].at[0]
    older = profile.from_json(profile.to_json().replace(f', "{flag}": null', "").replace(f', "{flag}": {{}}', ""))
    assert older == profile
    cost = older.costs(1)["b0"]
    assert (cost.for_weights, dict(cost.stash)) == (at.backward / 2, {})
