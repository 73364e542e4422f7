"""The sentence about delayed weights agrees with the formula of every schedule."""

import re

import pytest

import jpipe
from jpipe_train.assemble.build import last_agreement
from jpipe_train.assemble.delay import correction_words, delay_words


def plan(schedule, stages=4, microbatches=4, **options):
    return jpipe.Plan.even("abcdefgh", stages, schedule, microbatches, **options)


@pytest.mark.parametrize("schedule", [name for name, rules in jpipe.schedules.SCHEDULES.items() if rules.flushes])
def test_schedules_that_flush_have_no_delay(schedule):
    if "order" in jpipe.schedules.SCHEDULES[schedule].options:
        order = jpipe.schedules.written_order(plan("zb_h1"))
        flushing = plan(schedule, order=order)
    else:
        flushing = plan(schedule)
    assert not delay_words(flushing)


def test_2bw_is_one_update_behind_everywhere():
    words = "gradients are computed with weights that are 1 update old, at every stage"
    assert delay_words(plan("pipedream_2bw")) == f"pipedream_2bw: {words}"
    assert delay_words(plan("pipedream_2bw", flush_first=3)) == f"pipedream_2bw: after 3 batches that flush, {words}"


def test_the_mean_delay_of_each_stage_is_printed():
    start = "pipedream: gradients are computed with weights that are"
    stages = "3 at stage 0, 2 at stage 1, 1 at stage 2, 0 at stage 3"
    assert delay_words(plan("pipedream", microbatches=1)) == f"{start} 1.5 updates old on average: {stages}"
    stages = "0.75 at stage 0, 0.5 at stage 1, 0.25 at stage 2, 0 at stage 3"
    assert delay_words(plan("pipedream", microbatches=4)) == f"{start} 0.375 updates old on average: {stages}"
    synced = delay_words(plan("pipedream", microbatches=1, vertical_sync=True))
    assert synced == f"{start} 3 updates old, at every stage"
    deep = delay_words(plan("pipedream", stages=8, microbatches=1))
    assert (
        deep == f"{start} 3.5 updates old on average: 7 at stage 0, 6 at stage 1, 5 at stage 2, 4 at stage 3, 3 at stage 4, …, 0 at stage 7"
    )


def test_batches_that_share_an_update_are_less_late():
    words = "gradients are computed with weights that are 0.25 updates old, at every stage"
    assert delay_words(plan("pipedream_2bw"), batches_per_update=4) == f"pipedream_2bw: {words}"


def test_one_stage_has_no_delay():
    assert not delay_words(plan("pipedream", stages=1))


@pytest.mark.parametrize(
    ("factor", "words"),
    [(None, "none; see optimizer.delay_correction"), (1.0, "predict"), (0.5, "predict with a factor of 0.5")],
)
def test_the_correction_is_printed(factor, words):
    assert correction_words(factor) == words


@pytest.mark.parametrize(("steps", "words"), [(8, ""), (9, r"the last 1 are not .*; use 12 steps"), (3, "use 4 steps")])
def test_steps_after_the_last_agreement_are_named(steps, words):
    agreeing = jpipe.Plan.even("ab", 2, "gpipe", 2, replicas=2, agree={"every": 4})
    assert re.search(words, last_agreement(agreeing, steps))
    assert bool(words) == bool(last_agreement(agreeing, steps))
    assert not last_agreement(plan("gpipe"), steps)


@pytest.mark.parametrize(
    ("every", "fragments", "steps", "words"),
    [
        (8, "stages", 16, "the last 6 at stage 1, 4 at stage 2, 2 at stage 3 are"),
        (8, 2, 18, "the last 2 at stages 0 to 1, 6 at stages 2 to 3 are"),
        (1, "stages", 7, ""),
        (8, 1, 18, "the last 2 are not .*; use 24 steps"),
    ],
)
def test_updates_that_fragments_have_not_agreed_on_are_named(every, fragments, steps, words):
    agreeing = jpipe.Plan.even("abcd", 4, "gpipe", 2, replicas=2, agree={"every": every, "fragments": fragments})
    found = last_agreement(agreeing, steps)
    assert re.search(words, found)
    assert bool(words) == bool(found)
