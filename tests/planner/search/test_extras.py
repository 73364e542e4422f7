"""Plans that agree rarely or compress messages, if they are asked to: priced as simulated, and the fastest is found."""

import pytest

import jpipe
from jpipe.plan import Agreement, Links
from jpipe_planner.cost.devices import network
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.improve import improve
from jpipe_planner.search.candidate import NO_EXTRAS, Extras
from jpipe_planner.search.candidates import find_candidates
from tests.planner.invented import simulate_all, varied
from tests.planner.search.test_equal import gpt, levels

PROFILE, SLOW = gpt(6), levels((4, 20_000.0, 0.02))
SCHEDULES = "pipedream_flush", "gpipe", "pipedream_2bw", "pipedream"
EVERY_FOUR, BYTES = Extras(agree=Agreement(every=4)), Extras(links=Links(activations="int8", gradients="fp8"))


def found(extras, schedules=SCHEDULES):
    return find_candidates(PROFILE, SLOW, 8, schedules=schedules, extras=extras)


def simulated(candidate):
    plan = candidate.plan(PROFILE.ids)
    return simulate_plan(plan, PROFILE.stage_costs(plan, candidate.rows), SLOW)


def test_pipelines_agree_where_there_are_several_and_send_less():
    usual = {(one.rows, one.replicas): one for one in found(NO_EXTRAS) if one.depth == 1}
    candidates = found(EVERY_FOUR)
    assert {(one.agree is not None) == (max(one.replicas) > 1) for one in candidates} == {True}
    assert all(len(set(one.replicas)) == 1 for one in candidates)
    alone = [one for one in candidates if one.depth == 1 and one.agree]
    assert alone
    for one in alone:
        assert one.sent == pytest.approx(usual[one.rows, one.replicas].sent / 4)
        assert one.seconds < usual[one.rows, one.replicas].seconds
    assert all(one.agree is None and one.links is None for one in found(NO_EXTRAS))


@pytest.mark.thinned(size=2)
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("schedule", "fragments"), [("pipedream_flush", None), ("gpipe", None), ("pipedream_2bw", "stages")])
def test_the_time_is_the_mean_over_batches_with_and_without_an_agreement(schedule, fragments, delay, bits):
    extras = Extras(agree=Agreement(every=4, fragments=fragments, delay=delay, bits=bits))
    candidates = [one for one in found(extras, [schedule]) if one.replicas[0] == 2 and one.depth == 2][:3]
    assert candidates
    for candidate in candidates:
        plan = candidate.plan(PROFILE.ids)
        assert table.schedule(candidate).endswith("in 4 bits") == bool(bits)
        costs, link = PROFILE.stage_costs(plan, candidate.rows), network(plan, SLOW)
        long, short = (jpipe.simulate(jpipe.lower(plan, batches), costs, link) for batches in (12, 4))
        known = simulated(candidate)
        assert known.batch_seconds == pytest.approx((long.seconds - short.seconds) / 8, rel=1e-6)
        assert known.peak_bytes == long.peak_bytes
        assert known.sent_bytes == pytest.approx(
            [(more - less) / 8 for more, less in zip(long.moved_bytes, short.moved_bytes, strict=True)]
        )
        assert candidate.seconds == pytest.approx(known.batch_seconds, rel=0.1)
        assert max(candidate.memory) == pytest.approx(max(known.peak_bytes), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("extras", [EVERY_FOUR, BYTES], ids=["agree", "links"])
def test_the_fastest_of_all_is_found_and_its_neighbours_do_the_same(extras):
    candidates, known = found(extras), {}
    choice = choose(PROFILE, SLOW, candidates, tried=known)
    fastest = min(one.seconds / one.candidate.batch for one in simulate_all(PROFILE, SLOW, candidates))
    assert choice.ranked[0].seconds / choice.ranked[0].candidate.batch <= fastest * 1.005
    variants = varied(PROFILE, SLOW, candidates, share_optimizer=False)
    assert {one.chunks for one in variants} > {1}
    improved = [one.candidate for one in improve(choice, known).ranked]
    for one in (*variants, *improved):
        assert one.extras in (extras, NO_EXTRAS)
        assert (one.extras == NO_EXTRAS) == (one.depth == 1 if extras is BYTES else max(one.replicas) == 1)


def test_messages_take_the_bytes_that_are_sent():
    usual = {one: one for one in found(NO_EXTRAS)}
    for one in found(BYTES):
        if one.depth > 1 and one.schedule == "gpipe" and max(one.replicas) == 1:
            plain = next(other for other in usual.values() if (other.starts, other.rows, other.kind) == (one.starts, one.rows, one.kind))
            assert one.sent == pytest.approx(plain.sent * 8.125 / 32, rel=0.01)
            assert one.sent * one.batch == pytest.approx(sum(simulated(one).sent_bytes), rel=0.01)
            assert one.seconds < plain.seconds
