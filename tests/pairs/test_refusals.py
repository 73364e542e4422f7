"""Which pairs the library refuses: those that the documentation excludes, each with a message, and few others that are drawn."""

import itertools
from random import Random

import jax
import pytest

from jpipe import InputError
from jpipe.capabilities.registry import OPTIONS
from tests.pairs.capabilities import CAPABILITIES, OF_ROOMS
from tests.pairs.draw import ROWS, SameOption, Setting, schedules_of, setting_of

EXCLUDED = {
    "rare agreement": {  # docs/how-to/agree-rarely.md
        *("shared optimizer", "sums in parts", "updates of replicas", "compressed sums"),
        *("averaged weights", "delay correction", "dynamic loss scale"),
    },
    "shared optimizer": {"averaged weights", "updates of replicas"},  # docs/how-to/meshes.md
    "clipped global norm": {"clipped stage norm"},  # docs/how-to/clipping.md
    "more in flight": {"fewer in flight", "chunks"},  # docs/reference/schedules.md
    "fewer in flight": {"chunks"},
    "updates of replicas": {
        *("flushed first", "chunks"),  # docs/reference/schedules.md, docs/explanation/chunks.md
        *("clipped global norm", "skipped batches", "dynamic loss scale"),  # docs/how-to/clipping.md
    },
}
"""The pairs that the documentation excludes whatever the plan is, if it has two stages or more."""

WITHOUT_PAIRS = {"slices"}
"""The rooms that the reference cannot have, because its rows have no positions; tests/jpipe/capabilities/slices compares their numbers."""


def refusal(pair, seed, schedule=None) -> tuple[Setting, str]:
    """Return a drawn setting of a pair, and why it is refused, or an empty text."""
    setting = setting_of(Random(f"{pair} {seed}"), pair, schedule)
    try:
        with jax.enable_x64(True):
            pipe = setting.pipeline()
            if schedule is not None:  # the optimizer is traced, too
                pipe.check(setting.data.batches(0, ROWS * setting.microbatches)[0])
    except InputError as error:
        return setting, str(error)
    return setting, ""


def test_every_room_brings_its_part_of_the_reference():
    assert {option.room for option in OPTIONS} - WITHOUT_PAIRS <= OF_ROOMS.keys()
    assert all(OF_ROOMS.values())


@pytest.mark.parametrize("name", EXCLUDED)
def test_excluded_pairs_are_refused(name):
    for other, seed in itertools.product(sorted(EXCLUDED[name]), range(3)):
        setting, why = refusal((name, other), seed)
        is_once = "updates of replicas" in (name, other) and {*setting.shape.replicas} == {setting.microbatches}  # as every: batch
        assert why or len(setting.shape.stages) == 1 or is_once, f"{name} and {other}: {setting.describe()}"


def test_delay_correction_with_accumulated_batches_is_refused_where_there_is_a_delay():
    """docs/explanation/update-rule.md."""
    pair = ("accumulated batches", "delay correction")
    assert "every batch makes an update" in refusal(pair, 0, "pipedream_2bw")[1]


@pytest.mark.slow
def test_all_other_pairs_are_allowed_and_few_settings_of_them_are_refused():
    refused = total = 0
    for pair in itertools.combinations(CAPABILITIES, 2):
        if pair[1] in EXCLUDED.get(pair[0], ()) or pair[0] in EXCLUDED.get(pair[1], ()):
            continue
        assert schedules_of([CAPABILITIES[name] for name in pair], late=False), pair
        try:
            found = [refusal(pair, seed)[1] for seed in range(6)]
        except SameOption:
            continue
        refused, total = refused + sum(map(bool, found)), total + len(found)
        more = (refusal(pair, seed)[1] for seed in range(6, 24))  # where parts of a capability are refused, six may all have them
        assert not all(found) or not all(more), f"{pair} is always refused: {found[0]}"
    assert refused / total < 0.15
