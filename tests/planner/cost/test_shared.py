"""Shared parameters in profiles and plans: stored once in a stage, exchanged between stages, and exact."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe import InputError
from jpipe_planner.cost.shape import needs_vertical_sync, planned_schedules, updates_early
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.analyze import analyze
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking.choose import choose
from jpipe_planner.search.candidates import find_candidates
from tests.planner.invented import equal, invented_profile

WORDS, WIDTH = 12, 4
LAYERS = {
    "embed": lambda rngs: nnx.Embed(WORDS, WIDTH, rngs=rngs),
    "a": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    "b": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    "again": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs),
    "head": lambda rngs: nnx.Linear(WIDTH, WORDS, rngs=rngs),
}
TIES = [jpipe.Tie(("a", "kernel"), ("again", "kernel")), jpipe.Tie(("b", "bias"), ("again", "bias"))]
MACHINE = {"flops": {"float32": 1e9, "bfloat16": 1e9}, "memory": 1e9}


def loss(y, labels):
    return optax.softmax_cross_entropy_with_integer_labels(y, labels).sum(), labels.size


def batch(rows):
    return jax.ShapeDtypeStruct((rows, 3), np.int32), jax.ShapeDtypeStruct((rows, 3), np.int32)


def shared_profile(seed=0, *layers: str) -> Profile:
    """Return an invented profile in which some layers share most of the smallest one's weights, with gradients larger than weights."""
    profile = invented_profile(seed)
    changed = tuple(layer.model_copy(update={"accumulators": 2 * layer.weights}) for layer in profile.layers)
    size = min(layer.weights for layer in changed if layer.id in layers) * 3 // 4
    shared = [{"layers": layers, "weights": size, "accumulators": 2 * size, "optimizer": size}]
    return Profile(**dict(profile.model_copy(update={"layers": changed})) | {"shared": shared})


@pytest.mark.parametrize("precision", [jpipe.Precision(), pytest.param(jpipe.Precision(params="bfloat16"), marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive
def test_the_bytes_of_a_profile_are_those_of_the_pipeline(precision):
    stack = jpipe.LayerStack(LAYERS, ties=TIES)
    topology = Topology(levels=({"count": 2, "bandwidth": 1e9},), device=MACHINE)
    profile = analyze(stack, batch, loss, optax.adam(1e-3), [2], topology.device, policies=("none",), precision=precision)
    assert [parameter.layers for parameter in profile.shared] == [("a", "again"), ("b", "again")]
    assert Profile.from_json(profile.to_json()) == profile
    for stages in (
        (["embed", "a", "b", "again", "head"],),
        (["embed", "a"], ["b", "again", "head"]),
        (["embed"], ["a"], ["b", "again"], ["head"]),
    ):
        plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=[{"layers": tuple(layers)} for layers in stages])
        expected = jpipe.Pipeline(stack, plan, loss, optax.adam(1e-3), precision=precision).costs(batch(4))
        for actual, true in zip(profile.stage_costs(plan, 2), expected, strict=True):
            assert (actual.weights, actual.optimizer, actual.shared) == (true.weights, true.optimizer, true.shared)
            assert true.accumulators - 8 <= actual.accumulators <= true.accumulators  # the weight and the loss of a batch


def test_held_and_sent_bytes_of_plans_equal_the_simulators():
    topology = Topology.flat(4, bandwidth=1e9)
    for profile in shared_profile(1, "layer_0", "layer_7"), shared_profile(2, "layer_1", "layer_2", "layer_6"):
        candidates = equal(profile, topology, 8, exact=True, schedules=("gpipe", "pipedream_flush", "pipedream_2bw"))
        assert {candidate.depth for candidate in candidates} == {1, 2, 4}
        for candidate in candidates:
            plan = candidate.plan(profile.ids)
            simulated = simulate_plan(plan, profile.stage_costs(plan, 1), topology)
            assert candidate.sent * candidate.batch == pytest.approx(sum(simulated.sent_bytes), rel=1e-3)
            peaks = [max(simulated.peak_bytes[w] for w in workers) for workers in plan.stage_workers]
            # Gradients of the next update may come before those of the last one are used.
            assert all(0.9 <= memory / peak <= 1.3 for memory, peak in zip(candidate.memory, peaks, strict=True))


def test_both_layers_in_a_stage_take_less_than_apart():
    apart = shared_profile(3, "layer_0", "layer_1")
    without = apart.model_copy(update={"shared": ()})
    plan = jpipe.Plan.even(apart.ids, 2, "gpipe", 2)
    (together, *_), (twice, *_) = (profile.stage_costs(plan, 1) for profile in (apart, without))
    parameter = apart.shared[0]
    assert (
        dataclasses.replace(
            together,
            weights=together.weights + parameter.weights,
            accumulators=together.accumulators + parameter.accumulators,
            optimizer=together.optimizer + parameter.optimizer,
        )
        == twice
    )


def test_weight_stashing_is_planned_with_vertical_sync():
    profile, topology = shared_profile(1, "layer_0", "layer_7"), Topology.flat(2, bandwidth=1e9)
    assert needs_vertical_sync("pipedream")
    assert not any(needs_vertical_sync(name) for name in planned_schedules() if name != "pipedream")
    assert not any(map(updates_early, planned_schedules()))
    candidates = find_candidates(profile, topology, 4, schedules=("pipedream", "pipedream_flush"))
    assert all(one.options.vertical_sync == (one.schedule == "pipedream" and one.depth > 1) for one in candidates)
    assert any(one.options.vertical_sync for one in candidates)
    assert choose(profile, topology, candidates).ranked[0].simulated is not None


def test_a_schedule_that_cannot_share_parameters_is_excluded(monkeypatch):
    without_option = dataclasses.replace(jpipe.schedules.SCHEDULES["pipedream"], options=("extra_in_flight",))
    monkeypatch.setitem(jpipe.schedules._BY_NAME, "pipedream", without_option)
    assert updates_early("pipedream")
    profile, topology = shared_profile(1, "layer_0", "layer_7"), Topology.flat(2, bandwidth=1e9)
    assert find_candidates(profile, topology, 4, schedules=("pipedream",)) == []


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ({"layers": ("layer_0", "layer_9")}, "profile: shared: layer 'layer_9' is not among the layers; did you mean"),
        ({"layers": ("layer_0", "layer_0")}, "profile: shared: expected different layers, found layer_0, layer_0"),
        (
            {"layers": ("layer_0", "layer_1"), "weights": 10**12},
            "profile: shared: layer 'layer_0' has fewer bytes of weights than it shares",
        ),
    ],
)
def test_shared_parameters_that_do_not_fit_the_layers(shared, message):
    fields = dict(invented_profile(0))
    with pytest.raises(InputError, match=message):
        Profile(**fields | {"shared": [{"weights": 1, "accumulators": 1} | shared]})


def test_a_profile_of_other_ties_is_refused():
    profile = shared_profile(0, "layer_0", "layer_7")
    profile.check_layers(profile.ids, [("layer_0", "layer_7")])
    with pytest.raises(
        InputError, match="profile: expected layers that share a parameter: none; found layer_0, layer_7; profile this model"
    ):
        profile.check_layers(profile.ids)
