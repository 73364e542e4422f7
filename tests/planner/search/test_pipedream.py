"""The PipeDream search equals an exhaustive search on small instances."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jpipe
from jpipe_planner.machine.topology import Topology
from jpipe_planner.search.pipedream.partition import Placed, Problem, evaluate_partition
from jpipe_planner.search.pipedream.ranges import Ranges
from jpipe_planner.search.pipedream.search import TIE, search_pipedream

SHAPES = [(2,), (5,), (6,), (2, 2), (3, 2), (2, 3), (1, 4), (2, 1, 2), (2, 2, 2)]
POLICIES = [("none",), ("full",), ("none", "full"), ("none", "dots_saveable", "full"), ("full", "none")]


@st.composite
def differing(draw, counts):
    """Devices of another speed, other memory, or slower ports."""
    entries, sizes = [], (1, *np.cumprod(counts).tolist())
    for _ in range(draw(st.integers(1, 2))):
        k = draw(st.integers(0, len(counts) - 1))
        first = draw(st.integers(0, sizes[-1] // sizes[k] - 1)) * sizes[k]
        entries.append(
            {
                "devices": list(range(first, first + sizes[k])),
                "speed": draw(st.sampled_from([0.5, 1.0, 3.0])),
                "memory": draw(st.sampled_from([50, 100, 200])),
                "bandwidth": {str(k): draw(st.sampled_from([0.5, 2.0, 20.0]))},
            }
        )
    return entries


@st.composite
def problems(draw, differ=False):
    """Few layers on few devices, with prices that often are equal; outer levels may be faster than inner ones.

    Numbers only, for `build`: what checks our types draws at random, which Hypothesis wants to do alone.
    """
    shape = draw(st.sampled_from(SHAPES))
    levels = [
        {"count": count, "bandwidth": draw(st.sampled_from([0.5, 1.0, 4.0, 20.0])), "latency": draw(st.sampled_from([0.0, 0.5]))}
        for count in shape
    ]
    most = draw(st.sampled_from([0, 1, 6]))  # all times alike, few, many
    sizes = st.sampled_from([0, 1, 3, 10, 40])
    layers = []
    for _ in range(draw(st.integers(1, 4 if np.prod(shape) > 6 else 5))):
        residuals = draw(st.integers(0, 20))
        layers.append(
            {
                "forward": float(draw(st.integers(1 if most == 0 else 0, max(most, 1)))),
                "backward": float(draw(st.integers(0, most))),
                "outputs": draw(sizes),
                "weights": draw(sizes),
                "optimizer": draw(sizes),
                "state": draw(st.integers(0, 2)),
                "residuals": {"none": residuals, "dots_saveable": draw(st.integers(0, residuals))},
                "shared": {"none": draw(st.integers(0, residuals))},
                "update": draw(st.sampled_from([0.0, 1.0])),
                "temporary": draw(st.integers(0, 9)),
            }
        )
    return {
        "layers": layers,
        "machine": {"levels": levels, "device": {"memory": 100}, "differing": draw(differing(shape)) if differ else ()},
        "microbatches": draw(st.sampled_from(["replicas", 1, 4, 6, 12])),
        "inputs": draw(sizes),
        "labels": draw(st.integers(0, 5)),
        "dispatch": draw(st.sampled_from([0.0, 0.5])),
        "policies": draw(st.sampled_from(POLICIES)),
    }


def build(layers, machine, **fields):
    return Problem([jpipe.programs.LayerCost(**layer) for layer in layers], Topology(**machine), **fields)


def everything(problem, i=0, a=0):
    """Yield all ways to cut the layers from i on and to place them from device a on."""
    if i == len(problem.layers):
        yield ()
    for j in range(i + 1, len(problem.layers) + 1):
        for r in range(1, problem.topology.num_devices - a + 1):
            if problem.microbatches == "replicas" or problem.microbatches % r == 0:
                for remaining in everything(problem, j, a + r):
                    yield (Placed(i, j, a, r), *remaining)


def exhaustive(problem):
    """Search `everything` for the best time and stages (None if nothing fits); also return the least memory in which one fits."""
    fitting, least = [], np.inf
    for stages in everything(problem):
        options = [evaluate_partition(problem, [stage._replace(recompute=policy) for stage in stages]) for policy in problem.policies]
        options.sort(key=lambda option: option.stages[0].recompute != "none")
        shares = [problem.kind(stage).share for stage in stages]
        least = min(least, max(min(option.memory[s] for option in options) / share for s, share in enumerate(shares)))
        limits = [problem.limit(stage) for stage in stages]
        chosen = [next((o.stages[s] for o in options if o.memory[s] <= limits[s]), None) for s in range(len(stages))]
        if None not in chosen:
            fitting.append((evaluate_partition(problem, chosen).seconds, stages))
    best = min((seconds for seconds, _ in fitting), default=None)
    ties = [stages for seconds, stages in fitting if seconds <= best * (1 + TIE)]

    def rank(stages):
        return (len(stages), sum(s.replicas for s in stages), [(s.stop, s.replicas) for s in stages])

    return best, min(ties, key=rank, default=None), least


def relative_memory(problem, partition):
    """Return the memory of the fullest device, relative to the usual one."""
    return max(size / problem.kind(stage).share for size, stage in zip(partition.memory, partition.stages, strict=True))


def without_policies(partition):
    return tuple(stage._replace(recompute="none") for stage in partition.stages)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(numbers=problems() | problems(differ=True))
@pytest.mark.slow
def test_search_without_a_limit_equals_exhaustive_search(numbers):
    problem = build(**numbers)
    seconds, stages, _ = exhaustive(problem)
    result = search_pipedream(problem)
    assert result.seconds == pytest.approx(seconds, rel=1e-12)
    assert without_policies(result) == stages
    assert result == evaluate_partition(problem, result.stages)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(numbers=problems() | problems(differ=True), share=st.sampled_from([0.95, 0.85, 0.7, 0.5, 0.3]))
@pytest.mark.slow
def test_search_with_a_limit_equals_exhaustive_search(numbers, share):
    problem = build(**numbers)
    problem = replace(problem, memory=max(relative_memory(problem, search_pipedream(problem)) * share, 1.0))
    seconds, stages, least = exhaustive(problem)
    result = search_pipedream(problem)
    if seconds is None:
        stage, lacking = result.over
        lacks = [size - problem.limit(one) for size, one in zip(result.memory, result.stages, strict=True)]
        assert max(lacks) == lacks[stage]
        assert lacking == np.ceil(lacks[stage])
        assert least <= relative_memory(problem, result) <= least * 1.0102 + 1
    else:
        assert result.over is None
        assert relative_memory(problem, result) <= problem.memory
        assert result.seconds == pytest.approx(seconds, rel=1e-12)
        assert without_policies(result) == stages
        assert result == evaluate_partition(problem, result.stages)


@pytest.mark.parametrize(
    ("devices", "layers", "memory"),
    [  # forward, outputs, weights, residuals
        (7, [(2.0, 0, 0, 0), (4.0, 10, 10, 0), (1.0, 3, 0, 2)], 93),
        (5, [(2.0, 1, 0, 2), (3.0, 1, 10, 0), (2.0, 1, 10, 2), (3.0, 40, 10, 1)], 84),
    ],
)
def test_stages_that_keep_less_than_their_input_equal_exhaustive_search(devices, layers, memory):
    costs = [
        jpipe.programs.LayerCost(f, f, outputs=out, weights=weights, residuals={"none": residuals}) for f, out, weights, residuals in layers
    ]
    problem = Problem(costs, Topology.flat(devices, bandwidth=20.0), 12, memory=float(memory))
    seconds, stages, _ = exhaustive(problem)
    result = search_pipedream(problem)
    assert (result.seconds, result.stages, result.over) == (pytest.approx(seconds, rel=1e-12), stages, None)


def test_under_the_relaxed_rules_more_in_flight_never_allows_more_in_the_stage_before():
    layers = [jpipe.programs.LayerCost(1.0, 1.0, outputs=out, weights=8, residuals={"none": 3}) for out in (10, 40, 5)]
    runs = Ranges(Problem(layers, Topology.flat(4, bandwidth=1.0), 4, inputs=20, memory=200.0))
    ahead = np.arange(1, 40)
    for relaxed in (True, False):
        room = runs.room(2, 3, 1, ahead, "none", 200.0, relaxed=relaxed)
        assert (room[:5] > 0).all()
        assert (room == -1).any()
        assert (np.diff(np.where(room < 0, -1, room + ahead)) <= 0).all() == relaxed  # here an input counts 40, what is kept of it 3


def test_the_price_by_hand():
    layers = [
        jpipe.programs.LayerCost(4.0, 8.0, outputs=30, weights=10, update=1.0),
        jpipe.programs.LayerCost(1.0, 2.0, outputs=7, weights=90),
    ]
    levels = [{"count": 2, "bandwidth": 20.0}, {"count": 2, "bandwidth": 5.0, "latency": 1.0}]
    problem = Problem(layers, Topology(levels=levels), microbatches=6, dispatch=0.5)
    stages = [Placed(0, 1, 0, 3), Placed(1, 2, 3, 1, "full")]
    # first: 2 microbatches of 13 s each and an update; its sum takes 2 · 2/3 · 10 / 5 + 4 · 1 < 13; second: 4 + 1 again, and 0.5 an update;
    # cut: 30 / 5
    assert evaluate_partition(problem, stages).seconds == pytest.approx(6.0)
    assert evaluate_partition(problem, stages).bound == ("cut", 0)
    cheap = replace(problem, layers=[replace(layers[0], outputs=3), layers[1]])
    assert evaluate_partition(cheap, stages).bound == ("stage", 1)
    assert evaluate_partition(cheap, stages).seconds == pytest.approx(5.0 + 0.5 / 6)
    assert evaluate_partition(cheap, [stages[0], Placed(1, 2, 3, 1)]).seconds == pytest.approx((2 * 13 + 1.5) / 6)
    assert evaluate_partition(replace(cheap, microbatches="replicas"), [Placed(0, 2, 0, 2)]).seconds == pytest.approx((16 + 1.5) / 2)
    # four replicas: 2 · 3/4 · 100 / 5 + 6 · 1 s to sum, 20 more than to compute
    assert evaluate_partition(replace(cheap, microbatches="replicas"), [Placed(0, 2, 0, 4)]).seconds == pytest.approx((36 + 1.5) / 4)


# VGG-16: GFLOP an image forward, million parameters, million output numbers an image
VGG = [(0.17, 0.002, 3.2), (3.7, 0.037, 0.8), (1.85, 0.074, 1.6), (3.7, 0.147, 0.4), (1.85, 0.295, 0.8), (3.7, 0.59, 0.8), (3.7, 0.59, 0.2)]
VGG += [(1.85, 1.18, 0.4), (3.7, 2.36, 0.4), (3.7, 2.36, 0.1), (0.92, 2.36, 0.1), (0.92, 2.36, 0.1), (0.92, 2.36, 0.025)]
VGG += [(0.2, 102.8, 0.004), (0.03, 16.8, 0.004), (0.008, 4.1, 0.001)]


@pytest.mark.parametrize("levels", [[16], [4, 4]])
def test_vgg_has_its_convolutions_on_fifteen_workers_and_its_dense_layers_on_one(levels):
    seconds = 32 / 12e3  # for a GFLOP an image, 32 images, 12 TFLOP/s
    layers = [
        jpipe.programs.LayerCost(flops * seconds, 2 * flops * seconds, outputs=int(32 * 4e6 * out), weights=int(4e6 * weights))
        for flops, weights, out in VGG
    ]
    topology = Topology(levels=[{"count": count, "bandwidth": "25 Gbit/s"} for count in levels])
    result = search_pipedream(Problem(layers, topology))
    assert [stage.replicas for stage in result.stages] == [15, 1]
    assert result.stages[0].stop in (12, 13)  # whether the last convolution is with the dense layers


def test_devices_beyond_the_usable_number_stay_idle():
    layers = [jpipe.programs.LayerCost(1.0, 2.0, weights=1000), jpipe.programs.LayerCost(2.0, 4.0, weights=1000)]
    result = search_pipedream(Problem(layers, Topology.flat(64, bandwidth=1e-3), microbatches=1))
    assert result.devices == 2
    assert result.bound == ("stage", 1)


def test_of_equally_fast_and_deep_partitions_the_one_with_fewer_workers_wins():
    layers = [
        jpipe.programs.LayerCost(1.0, 2.0, outputs=9, weights=100),
        jpipe.programs.LayerCost(1.0, 2.0, outputs=9),
        jpipe.programs.LayerCost(3.0, 6.0),
    ]
    result = search_pipedream(
        Problem(layers, Topology.flat(3, bandwidth=1.0))
    )  # any cut takes 9 s, so does 1, 2 of 2 replicas, on one more device
    assert [(stage.stop, stage.replicas) for stage in result.stages] == [(2, 1), (3, 1)]
    assert (result.seconds, result.bound) == (9.0, ("stage", 1))


def test_the_plan_of_a_partition():
    layers = [jpipe.programs.LayerCost(1.0, 1.0, residuals={"none": 5}, weights=8)] * 3
    stages = [Placed(0, 1, 0, 3), Placed(1, 3, 3, 2, "full")]
    problem = Problem(layers, Topology.flat(6, bandwidth=1.0), policies=("none", "full"), sync_state=False)
    plan = evaluate_partition(problem, stages).plan("abc", problem)
    assert (plan.microbatches, plan.update_every, plan.sync_state) == (6, "replicas", False)
    assert [(s.layers, s.replicas, s.recompute) for s in plan.stages] == [(("a",), 3, "none"), (("b", "c"), 2, "full")]
    assert evaluate_partition(replace(problem, microbatches=12), stages).plan("abc", problem) == plan
    plan = evaluate_partition(problem, stages).plan("abc", replace(problem, microbatches=12))
    assert (plan.microbatches, plan.update_every) == (12, "batch")


def test_policies_that_cannot_be_counted_are_refused():
    layers = [jpipe.programs.LayerCost(1.0, 1.0, residuals={"none": 5}), jpipe.programs.LayerCost(1.0, 1.0)]
    with pytest.raises(jpipe.InputError, match=r"layer 1 has no residual bytes for 'none', found \[\]; leave out this policy"):
        Problem(layers, Topology.flat(2, bandwidth=1.0), memory=100.0)
    with pytest.raises(jpipe.InputError, match="at least one recomputation policy"):
        Problem(layers, Topology.flat(2, bandwidth=1.0), policies=())
    Problem(layers, Topology.flat(2, bandwidth=1.0), memory=100.0, policies=("full",))
