"""Every schedule equals the sequential reference bit for bit, at every depth and number of microbatches."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpipe import Plan
from tests.jpipe import models
from tests.jpipe.running import REFERENCE_BATCHES, check_against_reference

STACK = models.rich_stack()

CASES = [
    (variant, d, m, 0)
    for variant, fields in models.VARIANTS.items()
    for d in range(1, len(STACK.ids) + 1)
    for m in (1, 2, 3, 4, 6)
    if models.is_legal(layers=STACK.ids, num_stages=d, microbatches=m, **fields)
] + [
    ("pipedream_flush", 3, 6, 1),
    ("pipedream_flush", 4, 3, 2),
    ("pipedream", 4, 1, 1),
    ("pipedream", 3, 3, 2),
    ("pipedream_vertical_sync", 3, 1, 1),
    ("pipedream_vertical_sync", 4, 2, 1),
    ("pipedream_2bw", 3, 4, 1),
    ("pipedream_2bw", 4, 6, 1),
]


@pytest.mark.thinned(size=1, most=6)
@pytest.mark.parametrize(("variant", "d", "m", "extra"), CASES)
def test_equals_the_sequential_reference_bit_for_bit(variant, d, m, extra):
    plan = Plan.even(STACK.ids, d, microbatches=m, extra_in_flight=extra, **models.VARIANTS[variant])
    check_against_reference(STACK, plan, drain_after={0, 3, 4})


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("recompute", ["elementwise", "full", "dots_saveable"])
@pytest.mark.parametrize("variant", models.VARIANTS)
def test_recomputing_stages_equal_the_sequential_reference_bit_for_bit(variant, recompute):
    check_against_reference(
        STACK, Plan.even(STACK.ids, 3, microbatches=4, recompute=recompute, **models.VARIANTS[variant]), drain_after={2}
    )


@pytest.mark.exhaustive
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_uneven_cuts_equal_the_sequential_reference_bit_for_bit(data):
    sizes, remaining = [], len(STACK.ids)
    while remaining:
        sizes.append(data.draw(st.integers(1, remaining), label="layers"))
        remaining -= sizes[-1]
    fields = models.VARIANTS[data.draw(st.sampled_from(sorted(models.VARIANTS)))]
    least = len(sizes) if fields["schedule"] == "pipedream_2bw" else 1
    m = data.draw(st.integers(least, 6), label="microbatches")
    drain_after = data.draw(st.sets(st.integers(0, REFERENCE_BATCHES - 1), max_size=3), label="drain after")
    check_against_reference(STACK, models.cut(STACK.ids, sizes, microbatches=m, **fields), drain_after)


@pytest.mark.thinned(most=1)
@pytest.mark.oldest
@pytest.mark.parametrize("variant", models.VARIANTS)
def test_three_stages_equal_the_sequential_reference_bit_for_bit(variant):
    check_against_reference(STACK, Plan.even(STACK.ids, 3, microbatches=4, **models.VARIANTS[variant]), drain_after={4})
