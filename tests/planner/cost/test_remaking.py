"""The scratch memory of stages whose backward makes residuals itself, by hand, alike in all places that estimate it."""

import pytest

import jpipe
from jpipe_planner.cost.memory import temporary_bytes
from jpipe_planner.profile.profile import Profile
from jpipe_planner.search.stages import Layers

RESIDUALS = {"none": 100, "dots_saveable": 50, "full": 0}
AT = {"forward": 1.0, "backward": 2.0, "outputs": 0, "residuals": RESIDUALS, "temporary": 10, "temporary_more": 2}
EXPECTED = {"none": 12, "dots_saveable": 71, "full": 130}  # 10 + 2; half of what remaking adds; 70 + 60


def profile(**remaking):
    layers = [{"id": name, "weights": 8, "at": [AT | remaking]} for name in "abcd"]
    return Profile(source="analytic", sizes=(1,), inputs=(0,), labels=(0,), layers=layers)


@pytest.mark.parametrize("policy", EXPECTED)
def test_a_stage_of_two_layers(policy):
    remaking = {"remaking": 70, "remaking_more": 60}
    stages = [{"layers": ["a", "b"], "recompute": policy}, {"layers": ["c", "d"], "recompute": policy}]
    plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=stages)
    assert profile(**remaking).stage_costs(plan, 1)[0].temporary == EXPECTED[policy]
    layers = Layers(profile(**remaking))
    assert layers.cut((0, 2), 0).temporary[layers.policies.index(policy), 0] == EXPECTED[policy]
    assert temporary_bytes(12, 130, 200, 2 * RESIDUALS[policy], 0) == EXPECTED[policy]


def test_without_compiled_layers_the_residuals_themselves_are_counted():
    plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=[{"layers": list("ab"), "recompute": "full"}, {"layers": list("cd")}])
    assert profile().stage_costs(plan, 1)[0].temporary == 12 + 200
