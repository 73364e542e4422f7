"""Plans for fewer processes than a config is made for: stages times replicas, in the same schedule and for the same batch."""

import pytest

import jpipe
from jpipe_train.assemble import smaller_plan
from jpipe_train.config.config import AUTO, Config, PlanConfig

ONE_BY_FOUR = {"num_stages": 4, "microbatches": 4}
TWO_BY_FOUR = {"num_stages": 4, "replicas": 2, "microbatches": 4}
PARALLEL = {"num_stages": 1, "replicas": 4, "microbatches": 4}


@pytest.mark.parametrize(
    ("plan", "ranks", "batch", "expected"),  # stages, replicas, microbatches
    [
        (ONE_BY_FOUR, 3, 8, (3, 1, 4)),
        (ONE_BY_FOUR, 1, 8, (1, 1, 4)),
        (TWO_BY_FOUR, 4, 8, (4, 1, 4)),  # rather than two by two, whose stages need more memory
        (TWO_BY_FOUR, 6, 8, (3, 2, 4)),
        (TWO_BY_FOUR, 7, 8, None),
        (TWO_BY_FOUR, 5, 8, None),
        (PARALLEL, 2, 8, (1, 2, 4)),
        (PARALLEL, 3, 8, None),  # three replicas cannot share eight rows
        (PARALLEL, 3, 24, (1, 3, 6)),
        (ONE_BY_FOUR | {"schedule": "interleaved_1f1b", "chunks_per_rank": 2, "num_stages": 8}, 2, 8, (4, 1, 4)),
        (ONE_BY_FOUR | {"schedule": "dualpipe_v", "microbatches": 8, "num_stages": 8}, 3, 8, (6, 1, 8)),
        (ONE_BY_FOUR | {"replicas": [2, 1, 1, 1]}, 3, 8, None),
        (ONE_BY_FOUR | {"recompute": ["full", "none", "none", "none"]}, 3, 8, None),
        (ONE_BY_FOUR | {"mesh": [{}, {}, {"data": 2}, {}]}, 3, 8, None),
        ({"file": "plan.json"}, 3, 8, None),
    ],
)
def test_a_smaller_plan_has_the_most_stages_that_occupy_all_ranks(plan, ranks, batch, expected):
    full = PlanConfig(**plan)
    found = smaller_plan.smaller(full, ranks, batch)
    assert (found and (found.num_stages, found.replicas, found.microbatches)) == expected
    if found is not None:
        assert found.ranks == ranks
        sizes = {"num_stages", "replicas", "microbatches"}
        assert found.model_dump(exclude=sizes) == full.model_dump(exclude=sizes)
        layers = list("abcdefgh")
        assert jpipe.Plan.even(layers, **found.of_even_stages).schedule == full.schedule


def config(plan: dict, **sections) -> Config:
    return Config.model_validate({"plan": plan, "train": {"batch_size": 8}} | sections)


def test_the_config_is_changed_for_fewer_processes_only():
    full = config(TWO_BY_FOUR)
    assert smaller_plan.for_processes(full, 3, None) == (full, "")
    assert smaller_plan.for_processes(full, 8, 8) == (full, "")
    assert smaller_plan.for_processes(full, 4, 4) == (full, "")  # two ranks in each
    fewer, line = smaller_plan.for_processes(full, 3, 4)
    assert (fewer.plan.num_stages, fewer.plan.replicas) == (3, 2)
    assert line == "plan for 3 of 4 processes: num_stages 3 instead of 4"
    fewer, line = smaller_plan.for_processes(config(PARALLEL | {"microbatches": 2, "replicas": 2}), 1, 2)
    assert line == "plan for 1 of 2 processes: replicas 1 instead of 2"
    assert fewer == config(PARALLEL | {"microbatches": 2, "replicas": 1})


def test_other_plans_are_searched_for():
    fewer, line = smaller_plan.for_processes(config(PARALLEL), 3, 4)
    assert fewer.plan.file == AUTO
    words = "no smaller pipedream_flush plan with even stages and replicas"
    assert line == f"plan for 3 of 4 processes: the plan is searched for, because the config has {words} for them"
    fewer, line = smaller_plan.for_processes(config({"file": "plan.json"}), 3, 4)
    assert (fewer.plan.file, "because the config has a plan file for them" in line) == (AUTO, True)
    searched = config({"file": AUTO})
    assert smaller_plan.for_processes(searched, 3, 4) == (searched, "")


@pytest.mark.parametrize(
    ("sections", "processes", "message"),
    [
        ({}, 5, "^--elastic: expected at least as many as there are processes, 5, found 4$"),
        ({"checkpoint": {"every": None}}, 4, r"^checkpoint\.every: expected a number of steps with --elastic, found null"),
        (
            {"optimizer": {"per_stage": {"learning_rate": [0.1] * 4}}},
            4,
            r"^optimizer\.per_stage: cannot be used with --elastic, because its values are for a fixed number of stages",
        ),
        (
            {"plan": PARALLEL | {"links": {"sums": "int8"}}},
            4,
            r"^plan\.links\.sums: with --elastic, expected a plan that becomes smaller with .* for 3 of 4",
        ),
        (
            {"plan": PARALLEL | {"links": {"bottleneck": {"width": 2}}}},
            4,
            r"^plan\.links\.bottleneck\.after: expected with --elastic, the layers before the bottlenecks, .*, found null; name them",
        ),
    ],
)
def test_what_cannot_go_on_with_fewer_processes_is_an_error(sections, processes, message):
    with pytest.raises(jpipe.InputError, match=message):
        smaller_plan.for_processes(config(**{"plan": ONE_BY_FOUR, **sections}), processes, 4)


def test_compressed_sums_go_on_where_each_smaller_plan_is_known():
    sums = TWO_BY_FOUR | {"links": {"sums": "int8"}}
    assert smaller_plan.for_processes(config(sums), 4, 4) == (config(sums), "")
    assert smaller_plan.for_processes(config(sums), 3, 4)[0].plan.links == config(sums).plan.links
