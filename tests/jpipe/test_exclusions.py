"""What cannot be combined: each pair of the table is refused with its reason, and each of both options alone is not."""

import itertools

import pytest

from jpipe import InputError, Plan, lower
from jpipe.plan import EXCLUSIONS, Exclusion, excluded

OF_PLANS = {
    "max_in_flight": {"max_in_flight": 2},
    "extra_in_flight": {"extra_in_flight": 1},
    "flush_first": {"flush_first": 1},
    "update_every": {"update_every": "replicas"},
    "early updates": {"vertical_sync": False},
    "shard_optimizer": {"shard_optimizer": True},
    "stages.sum_parts": {"sum_parts": 2},
    "chunks_per_rank": {"chunks_per_rank": 2},
    "links.sums": {"links": {"sums": "int8"}},
    "agree": {"agree": {"every": 2}},
    "slices": {"slices": 2},
    "stash": {"stash": False, "replicas": 1, "vertical_sync": False},
    "offload.versions": {"offload": {"versions": "all"}},
    "offload.residuals": {"offload": {"residuals": [1]}},
    "offload.stash": {"offload": {"stash": "all"}},
}
"""The options of plans in the table, and fields that set them."""
BESIDE_PLANS = {
    "clip_stage_norm": 2.0,
    "clip_global_norm": 1.0,
    "skip_nonfinite": True,
    "precision: loss_scale: dynamic": True,
    "precision: params": "bfloat16",
    "ema_decay": 0.9,
    "delay_correction": 1.0,
    "accumulate_batches": 2,
    "ties": ["w"],
}


def plan_of(**fields):
    return Plan.even("abcdefgh", 4, **{"schedule": "pipedream", "microbatches": 8, "replicas": 2, "vertical_sync": True, **fields})


@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=lambda each: f"{each.option} and {each.other}")
def test_both_are_refused_and_one_is_not(exclusion: Exclusion):
    keys = exclusion.option, exclusion.other
    fields = [OF_PLANS[key] for key in keys if key in OF_PLANS]
    arguments = [{key: BESIDE_PLANS[key]} for key in keys if key in BESIDE_PLANS]
    for one in itertools.chain([{}], fields):
        for given in [{}] if one else [{}, *arguments]:
            assert excluded(plan_of(**one), **given) is None
    both, given = ({key: value for part in parts for key, value in part.items()} for parts in (fields, arguments))
    if not given:
        with pytest.raises(InputError) as error:
            plan_of(**both)
        message = str(error.value).removeprefix("plan: ")
    else:
        problem = excluded(plan_of(**both), **given)
        message = problem.text()
    where, _, rest = message.partition(": expected ")
    assert where == exclusion.option.replace("stages.", "stages.0.")
    name = exclusion.other if exclusion.other in {*given, "early updates"} or not given else f"plan.{exclusion.other}"
    assert name.removeprefix("stages.") in rest.partition(": ")[0]
    assert rest.endswith(f": {exclusion.why}; {exclusion.change}")


def test_each_pair_is_said_once():
    pairs = [frozenset((each.option, each.other)) for each in EXCLUSIONS]
    assert len(set(pairs)) == len(pairs)
    assert set().union(*pairs) == OF_PLANS.keys() | BESIDE_PLANS.keys()


def test_where_the_pipeline_flushes_less_is_excluded():
    flushing = {"vertical_sync": False, "agree": {"every": 2}}
    assert plan_of(schedule="pipedream_flush", vertical_sync=False, shard_optimizer=True, max_in_flight=2).shard_optimizer
    assert excluded(plan_of(schedule="gpipe", **flushing), clip_global_norm=1.0) is None


def test_updates_of_as_many_microbatches_as_there_are_replicas_are_those_of_a_batch():
    """The option changes nothing there, so that it excludes nothing."""
    plan = plan_of(microbatches=2, update_every="replicas", shard_optimizer=True)
    assert excluded(plan, clip_global_norm=1.0, accumulate_batches=2) is None
    once = lower(plan.model_copy(update={"update_every": "batch"}), 3)
    assert lower(plan, 3).instructions == once.instructions


def test_arguments_are_checked_without_a_plan():
    assert excluded(None, clip_stage_norm=1.0, ema_decay=0.0, skip_nonfinite=False) is None
    assert (
        excluded(None, clip_stage_norm=1.0, clip_global_norm=2.0).text()
        == "clip_stage_norm: expected no clip_global_norm with 1.0, found 2.0: gradients are clipped by one norm; remove one of them"
    )
    assert excluded(None, [Exclusion("--here", "--there", "they differ")], **{"--here": 1, "--there": False}) is None


@pytest.mark.parametrize(
    ("option", "found"), [({"global_norm": True}, "global_norm"), ({"shared_parameters": [(0, 1)]}, "shared_parameters")]
)
def test_programs_are_not_written_for_what_is_excluded(option, found):
    with pytest.raises(InputError, match=rf"^lower: {found}: expected no early updates under the schedule 'pipedream': the last stage "):
        lower(plan_of(vertical_sync=False), 2, **option)


def test_options_of_stages_exclude_each_other_at_the_same_stage():
    stages = [{"layers": ("a", "b"), "replicas": 2}, {"layers": ("c", "d"), "replicas": 2, "sum_parts": (1, 1)}]
    plan = {"schedule": "gpipe", "microbatches": 2, "stages": stages}
    assert Plan(**plan, offload={"residuals": [0]}).offload is not None
    with pytest.raises(InputError, match=r"^plan: offload\.residuals: expected no stages\.1\.sum_parts, found \(1, 1\): "):
        Plan(**plan, offload={"residuals": "all"})
