"""A recipe, compiled for its card, has the memory and the throughput of the page."""

import jax
import pytest

from benchmarks.planner import recipes
from tests.lm.run.test_recipes import HELD
from tests.targets.conftest import devices_of

pytestmark = pytest.mark.targets


def test_a_recipe_has_its_figures_when_it_is_compiled_for_its_card():
    name = "gemma-3-1b-full-2x24gb"
    (machine,) = recipes.RECIPES[name].values()
    devices_of(machine.device.compiles_for)  # skips the test without the compiler
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as in a run
        (row,) = recipes.predicted(name, whole=False)
    assert row["memory"] == pytest.approx(int(HELD[name]["peak"]), rel=0.05)
    assert row["tokens_per_second"] == pytest.approx(float(HELD[name]["tokens per second"].replace(",", "")), rel=0.05)
