"""The cut into stages does not change the numbers of a schedule that flushes."""

import jax
import numpy as np
import pytest

from jpipe import Pipeline
from tests.jpipe import models
from tests.jpipe.running import check_close, train

pytestmark = pytest.mark.usefixtures("float64")

STACK = models.rich_stack()
M = 3
BATCHES = models.masked_batches(4, M, dtype=np.float64)


@pytest.fixture(scope="module")
def uncut():
    with jax.enable_x64(True):
        return trained((4,), "naive")


def trained(sizes, variant):
    plan = models.cut(STACK.ids, sizes, microbatches=M, **models.VARIANTS[variant])
    return train(Pipeline(STACK, plan, models.masked_squares, models.momentum()), BATCHES)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("sizes", [(1, 3), (3, 1), (2, 2), (1, 2, 1), (2, 1, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("variant", ["naive", "gpipe", "pipedream_flush"])
def test_flushing_schedules_do_not_depend_on_the_cut(sizes, variant, uncut):
    check_close(trained(sizes, variant), uncut)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("sizes", [(1, 3), (1, 2, 1)])
def test_2bw_does_not_depend_on_the_cut(sizes):
    """All stages read one version at any depth."""
    check_close(trained(sizes, "pipedream_2bw"), trained((4,), "pipedream_2bw"))
