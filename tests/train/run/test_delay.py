"""The sentence about delayed weights agrees with the formula of every schedule."""

import pytest

import jpipe
from jpipe_train.run.delay import delay_words, delays


def plan(schedule, stages=4, microbatches=4, **options):
    return jpipe.Plan.even("abcdefgh", stages, schedule, microbatches, **options)


@pytest.mark.parametrize("schedule", [name for name, rules in jpipe.schedules.SCHEDULES.items() if rules.flushes])
def test_schedules_that_flush_have_no_delay(schedule):
    if "order" in jpipe.schedules.SCHEDULES[schedule].options:
        order = jpipe.schedules.written_order(plan("zb_h1"))
        flushing = plan(schedule, order=order)
    else:
        flushing = plan(schedule)
    assert delays(flushing) == ((0, 0),) * flushing.depth
    assert not delay_words(flushing)


def test_2bw_is_one_update_behind_everywhere():
    assert delay_words(plan("pipedream_2bw")) == "Each gradient is computed with weights 1 update old (pipedream_2bw)."
    assert delay_words(plan("pipedream_2bw", flush_first=3)).startswith("After 3 batches that flush, each gradient is computed with")
    assert delays(plan("pipedream_2bw", replicas=2, microbatches=8)) == ((1, 1),) * 4


def test_the_delay_of_weight_stashing_is_printed_by_stage():
    words = (
        "Each gradient is computed with weights up to 3 updates old (pipedream): 3 at stage 0, 2 at stage 1, 1 at stage 2, 0 at stage 3."
    )
    assert delay_words(plan("pipedream", microbatches=1)) == words
    assert delays(plan("pipedream", microbatches=2)) == ((1, 2), (1, 1), (0, 1), (0, 0))
    synced = delay_words(plan("pipedream", microbatches=1, vertical_sync=True))
    assert synced == "Each gradient is computed with weights 3 updates old (pipedream)."
    deep = delay_words(plan("pipedream", stages=8, microbatches=1))
    assert deep.endswith("up to 7 updates old (pipedream): 7 at stage 0, …, 0 at stage 7.")


def test_one_stage_has_no_delay():
    assert not delay_words(plan("pipedream", stages=1))
