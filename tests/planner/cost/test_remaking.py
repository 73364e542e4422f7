"""The scratch memory of stages whose backward makes residuals itself, by hand, alike in all places that estimate it."""

import itertools

import pytest

import jpipe
from benchmarks.papers.partition import Placed, Problem, memory_of
from jpipe.schedules import PlainShape
from jpipe_planner import Topology
from jpipe_planner.cost.shape import planned_schedules, schedule_facts
from jpipe_planner.profile.profile import Profile
from jpipe_planner.search.stages import Layers

RESIDUALS = {"none": 100, "dots_saveable": 50, "full": 0}
AT = {"forward": 1.0, "backward": 2.0, "outputs": 0, "residuals": RESIDUALS, "temporary": 10, "temporary_more": 2}
REMAKING = {"remaking": 70, "remaking_next": 60, "remaking_more": 5}
SCRATCH = {1: 10, 2: 12, 3: 14}
EVERYTHING = {1: 70, 2: 70 + 60, 3: 70 + 60 + 5}
OF_ALL = {"none": 0, "dots_saveable": 0.5, "full": 1}  # the residuals that the backward makes, as a share


def profile(**remaking):
    layers = [{"id": name, "weights": 8, "at": [AT | remaking]} for name in "abcdef"]
    return Profile(source="analytic", sizes=(1,), inputs=(0,), labels=(0,), layers=layers)


def expected(count, share):
    return SCRATCH[count] + -(-(EVERYTHING[count] - SCRATCH[count]) * share // 1)


@pytest.mark.parametrize("count", SCRATCH)
@pytest.mark.parametrize("policy", OF_ALL)
def test_a_stage_of_equal_layers(policy, count):
    costs = profile(**REMAKING)
    ends = (0, count, len(costs.ids) - count, len(costs.ids))
    cut = [costs.ids[begin:end] for begin, end in itertools.pairwise(dict.fromkeys(ends))]
    plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=[{"layers": ids, "recompute": policy} for ids in cut])
    layers = Layers(costs)
    in_search = layers.cut([costs.ids.index(ids[0]) for ids in cut], 1)
    for s in (0, -1):
        assert costs.stage_costs(plan, 1)[s].temporary == expected(count, OF_ALL[policy])
        assert in_search.temporary[layers.policies.index(policy), s] == expected(count, OF_ALL[policy])
        assert in_search.fused[s] == EVERYTHING[count]


@pytest.mark.parametrize("count", SCRATCH)
@pytest.mark.parametrize("policy", OF_ALL)
def test_a_stage_of_a_partition(policy, count):
    """The bytes are those that a stage needs more than one without scratch memory; the last stage makes its residuals itself."""
    some, none = (problem(policy, count, **fields) for fields in (REMAKING, dict.fromkeys((*REMAKING, "temporary", "temporary_more"), 0)))
    cut = [Placed(0, count, 0, 1, policy), Placed(count, 2 * count, 1, 1, policy)]
    more = [size - without for size, without in zip(memory_of(some, cut), memory_of(none, cut), strict=True)]
    share = OF_ALL[policy] if OF_ALL[policy] in (0, 1) else RESIDUALS[policy] * count / (RESIDUALS["none"] * count - 1)
    assert more == [expected(count, share), EVERYTHING[count]]


def problem(policy, count, **fields):
    layers = [jpipe.programs.LayerCost(**AT | {"outputs": 1, "weights": 8} | fields) for _ in range(2 * count)]
    return Problem(layers, Topology.flat(2, bandwidth=1.0), 4, inputs=1)


def test_without_compiled_layers_the_residuals_themselves_are_counted():
    stages = [{"layers": list("abc"), "recompute": "full"}, {"layers": list("def")}]
    plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=stages)
    assert profile().stage_costs(plan, 1)[0].temporary == 14 + 300
    assert Layers(profile()).cut((0, 3), 1).fused.tolist() == [14 + 300] * 2


@pytest.mark.parametrize("schedule", planned_schedules())
def test_whether_stages_begin_fused_is_the_same_for_few_microbatches(schedule):
    """The search asks the schedule about few microbatches, because many take long to list."""
    rules = jpipe.schedules.SCHEDULES[schedule]
    for width, depth in ((1, 1), (2, 2), (1, 3), (3, 2)):
        for shape in (PlainShape(schedule, m * width, (width,) * depth) for m in range(1, 5 * depth + 2)):
            if (facts := schedule_facts(shape)) is not None:
                assert facts.fused.tolist() == [rules.begins_fused(shape, s) for s in range(depth)]
