"""The costs of slices: what half rows say about them, beside the exact bytes and products of a pipeline's stages."""

import itertools

import jax
import numpy as np
import optax
import pytest

import jpipe
from jpipe import InputError
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_planner.machine.device import Device
from jpipe_planner.profile import scratch
from jpipe_planner.profile.analyze import analyze
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.slices import bounds_of, value_of
from jpipe_train.losses.cross_entropy import loss

LENGTH = 64


@pytest.mark.parametrize("lengths", [(64,), (16, 16, 16, 16), (40, 14, 10)])
def test_the_values_of_slices_follow_from_the_halves(lengths):
    """A layer computes 3 for each position and 2 for each pair of a position with itself or an earlier slice's."""

    def computed(lengths):
        ends = list(itertools.accumulate(lengths))
        return [length * (3 + 2 * end) for length, end in zip(lengths, ends, strict=True)]

    halves = tuple(computed((32, 32)))
    assert [value_of(halves, bounds) for bounds in bounds_of(lengths)] == pytest.approx(computed(lengths))


def of(rows: int):
    return jax.ShapeDtypeStruct((rows, LENGTH), np.int32), jax.ShapeDtypeStruct((rows, LENGTH), np.int32)


@pytest.fixture(scope="module")
def decoder() -> tuple[jpipe.LayerStack, Profile]:
    """Return a model and its profile, without scratch memory, which is the same with slices and takes long to compile."""
    stack = layers(ModelConfig(depth=2, width=16, heads=2, vocab_size=11, seq_len=LENGTH))
    device = Device(name="one", flops={"float32": 1e9}, memory_bandwidth=1e15)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "compile_program", lambda *_: (0, None))
        return stack, analyze(stack, of, loss, optax.adam(0.1), [2], device, policies=("none", "elementwise", "full"), in_slices=True)


@pytest.mark.thinned
@pytest.mark.parametrize("recompute", ["none", "elementwise", "full"])
@pytest.mark.parametrize("slices", [4, (24, 24, 8, 8), {"count": 3, "by": "cost"}], ids=str)
def test_stages_in_slices_have_the_bytes_of_a_pipeline(decoder, slices, recompute):
    stack, profile = decoder
    plan = jpipe.Plan.even(stack.ids, 2, "pipedream_flush", 2, slices=slices, recompute=recompute)
    exact, costs = jpipe.Pipeline(stack, plan, loss, optax.adam(0.1)).costs(of(4)), profile.stage_costs(plan, 2)
    for s, (true, cost) in enumerate(zip(exact, costs, strict=True)):
        assert len(true.by_slice) == len(cost.by_slice)
        units = sum(each.forward for each in cost.by_slice) / len(cost.by_slice)
        for one, other in zip((true, *true.by_slice), (cost, *cost.by_slice), strict=True):
            names = "inputs", "carries", "carries_used_up", "carries_freed", "carry_message", "carry_gradient", "weights", "optimizer"
            names = *names, *(("outputs",) if s == 0 else ())
            assert {name: getattr(one, name) for name in names} == {name: getattr(other, name) for name in names}
            assert other.residuals == pytest.approx(one.residuals, rel=1e-3)
            assert other.forward / units == pytest.approx(one.forward, rel=2e-3)


def test_slices_by_cost_are_as_long_as_in_a_pipeline(decoder):
    stack, profile = decoder
    plan = jpipe.Plan.even(stack.ids, 2, "pipedream_flush", 2, slices={"count": 3, "by": "cost"})
    (bucket,) = {tuple(cost.inputs // 8 for cost in jpipe.Pipeline(stack, plan, loss, optax.adam(0.1)).costs(of(4))[0].by_slice)}
    assert profile.slice_lengths(plan.slices) == bucket
    assert len(set(bucket)) > 1


def test_a_profile_keeps_them_as_json(decoder):
    _, profile = decoder
    assert Profile.from_json(profile.to_json()) == profile


def test_the_part_that_does_not_grow_with_the_rows_is_the_same_in_each_slice():
    at = [{"forward": 1.0 + 2.0 * rows, "backward": 4.0 * rows, "outputs": 100, "residuals": {"none": 10}} for rows in (1, 2)]
    halves = {"work": (0.5, 0.5), "residuals": {"none": (5, 5)}}
    layer = {"id": "one", "weights": 4, "at": at, "halves": halves}
    profile = Profile(source="analytic", sizes=[1, 2], inputs=[1, 2], labels=[1, 2], layers=[layer], positions=8)
    (cost,) = profile.stage_costs(jpipe.Plan.even(["one"], 1, "gpipe", 1, slices=4), 2)
    assert [each.forward for each in cost.by_slice] == [1.0 + 2.0 * 2 / 4] * 4
    assert cost.backward == 4.0 * 2 / 4


@pytest.mark.parametrize("is_measured", [True, False])
def test_slices_take_less_work_only_where_whole_rows_compute_all_pairs(is_measured):
    """Halves of a layer that multiplies all pairs of positions take 1/4 and 1/2 of the work."""
    layer = {"id": "one", "weights": 4, "at": [{"forward": 1.0, "backward": 2.0, "outputs": 1, "residuals": {"none": 1}}]}
    halves = {"work": (0.25, 0.5), "residuals": {"none": (1, 1)}}
    source = {"source": "measured", "compiled_for": "cpu"} if is_measured else {"source": "analytic"}
    profile = Profile(**source, sizes=[1], inputs=[1], labels=[1], layers=[layer | {"halves": halves}], positions=8)
    (cost,) = profile.stage_costs(jpipe.Plan.even(["one"], 1, "gpipe", 1, slices=2), 1)
    assert sum(each.forward for each in cost.by_slice) == pytest.approx(0.75 if is_measured else 1.0)
    assert cost.by_slice[1].forward == pytest.approx(2 * cost.by_slice[0].forward)


def test_a_profile_without_them_is_refused():
    layer = {"id": "one", "weights": 4, "at": [{"forward": 1.0, "backward": 2.0, "outputs": 1, "residuals": {"none": 1}}]}
    profile = Profile(source="measured", sizes=[1], inputs=[1], labels=[1], layers=[layer])
    with pytest.raises(InputError, match=r"slices: expected a profile with the costs of half rows, found one without"):
        profile.stage_costs(jpipe.Plan.even(["one"], 1, "gpipe", 1, slices=2), 1)
