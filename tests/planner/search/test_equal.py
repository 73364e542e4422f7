"""Parallel pipelines: exact cuts, all legal plans, the cheapest recomputation that fits, and prices equal to the simulation."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

import jpipe
from jpipe.schedules import PlainShape
from jpipe_planner.cost.links import find_links
from jpipe_planner.cost.memory import stage_bytes, waiting_inputs
from jpipe_planner.cost.shape import planned_schedules
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.differing import Differing
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.search.balance import balance
from jpipe_planner.search.equal import EXTRA
from jpipe_planner.search.estimate import Estimates
from jpipe_planner.search.stages import Layers
from tests.planner.invented import equal

POLICIES = ("none", "dots_saveable", "full")
ONE_STAGE = ("pipedream_flush", "pipedream", "pipedream_2bw")  # the first stands for all that flush


def gpt(blocks=4, *, head=0.5, sizes=(1, 2), weights=20_000, outputs=1_000):
    """Return the profile of an embedding, equal blocks and a head; a block's forward takes one second per row."""

    def layer(name, forward, weights):
        at = [
            {
                "forward": forward * rows,
                "backward": 2 * forward * rows,
                "outputs": outputs * rows,
                "residuals": {"none": 1_000 * rows, "dots_saveable": 400 * rows},
                "shared": {"none": 150 * rows},
                "temporary": 100 * rows,
            }
            for rows in sizes
        ]
        return {"id": name, "weights": weights, "optimizer": 2 * weights, "state": 8, "update": weights / 1e5, "at": at}

    layers = [layer("emb", 0.1, 2 * weights), *(layer(f"b{n}", 1.0, weights) for n in range(blocks)), layer("head", head, weights)]
    inputs, labels = ([factor * rows for rows in sizes] for factor in (10, 4))
    return Profile(source="analytic", sizes=sizes, inputs=inputs, labels=labels, dispatch=0.01, layers=layers)


def levels(*levels, memory=None, cores=None):
    """Return a topology with levels of (count, bandwidth, latency)."""
    parts = [{"count": count, "bandwidth": bandwidth, "latency": latency} for count, bandwidth, latency in levels]
    return Topology(levels=parts, device={"memory": memory}, cores=cores)


TWO_LEVELS = levels((2, 20_000.0, 0.02), (3, 5_000.0, 0.1))


def price(profile, topology, candidate):
    """Return the simulated seconds of a batch."""
    plan = candidate.plan(profile.ids)
    simulated = simulate_plan(plan, profile.stage_costs(plan, candidate.rows), topology)
    assert simulated is not None
    return simulated.batch_seconds


def test_no_cut_is_better_balanced():
    rng = random.Random(0)
    for _ in range(400):
        seconds = [rng.choice([0.0, 1.0, 2.0, 3.0, rng.random()]) for _ in range(rng.randint(1, 8))]
        for depth in range(1, len(seconds) + 1):
            cuts = [(0, *inner) for inner in itertools.combinations(range(1, len(seconds)), depth - 1)]
            longest = [max(sum(seconds[a:b]) for a, b in itertools.pairwise((*cut, len(seconds)))) for cut in cuts]
            assert longest[cuts.index(balance(seconds, depth))] == pytest.approx(min(longest), rel=1e-12, abs=1e-12)
            slowness = [rng.choice([0.5, 1.0, 3.0]) for _ in range(depth)]
            longest = [
                max(slow * sum(seconds[a:b]) for slow, (a, b) in zip(slowness, itertools.pairwise((*cut, len(seconds))), strict=True))
                for cut in cuts
            ]
            assert longest[cuts.index(balance(seconds, depth, slowness))] == pytest.approx(min(longest), rel=1e-12, abs=1e-12)


def test_equal_layers_make_stages_that_differ_by_one_layer_at_most():
    for count, depth in itertools.product(range(1, 30), range(1, 30)):
        if depth <= count:
            sizes = np.diff([*balance([0.125] * count, depth), count])
            assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("keep", ["replicas", "stages", "uneven"])
@pytest.mark.parametrize("differ", [False, True])
def test_links_are_those_of_the_topology(keep, differ):
    rng = random.Random(1)
    for _ in range(40):
        topology = levels(*((rng.randint(1, 4), rng.uniform(1, 9), rng.random()) for _ in range(rng.randint(1, 3))))
        if differ:
            slow = Differing(devices=tuple(range(topology.levels[0].count)), speed=0.5, bandwidth={"0": rng.uniform(1, 9)})
            topology = topology.model_copy(update={"differing": (slow,)})
        depth = rng.randint(1, topology.num_devices)
        replicas = (rng.randint(1, topology.num_devices // depth),) * depth
        if keep == "uneven":
            replicas = tuple(rng.randint(1, topology.num_devices // depth) for _ in range(depth))
        links = find_links(topology, replicas, "stages" if keep == "stages" else "replicas")
        place = {(s, r): r * depth + s if keep == "stages" else sum(replicas[:s]) + r for s in range(depth) for r in range(replicas[s])}
        assert links.slowness.tolist() == [max(topology.slowness[place[s, r]] for r in range(replicas[s])) for s in range(depth)]
        sizes, summed = (np.array([rng.randint(0, 5) for _ in range(count)]) for count in (depth - 1, depth))
        busy = dict.fromkeys(range(0), 0.0)
        for s in range(depth - 1):
            pairs = math.lcm(*replicas[s : s + 2])
            ends = [(place[s, k % replicas[s]], place[s + 1, k % replicas[s + 1]]) for k in range(pairs)]
            assert links.bandwidths[s] == min(topology.link(*pair).bandwidth for pair in ends)
            assert links.latencies[s] == max(topology.link(*pair).latency for pair in ends)
            for link in (topology.link(*pair) for one in ends for pair in (one, one[::-1])):
                for port in link.ports:
                    busy[port] = busy.get(port, 0.0) + 12 / pairs * sizes[s] / link.bandwidth
        for s in range(depth):
            if replicas[s] > 1:
                ring = [topology.link(place[s, r], place[s, (r - 1) % replicas[s]]) for r in range(replicas[s])]
                assert links.rings[s] == jpipe.Link(min(link.bandwidth for link in ring), max(link.latency for link in ring))
                share = 2 * (replicas[s] - 1) / replicas[s] / links.rings[s].bandwidth
                for port in {port for link in ring for port in link.ports}:
                    busy[port] = busy.get(port, 0.0) + share * summed[s]
        assert links.port_seconds(12, sizes, summed) == pytest.approx(max(busy.values(), default=0.0))


def test_stages_cost_what_their_layers_sum_up_to():
    profile = gpt()
    layers = Layers(profile)
    assert layers.policies == POLICIES
    for rows in profile.sizes:
        starts = (0, 1, 4)
        stages = layers.cut(starts, rows)
        for p, policy in enumerate(layers.policies):
            plan = _plan(profile, starts, policy)
            for s, cost in enumerate(profile.stage_costs(plan, rows)):
                once = profile.dispatch if s == len(starts) - 1 else 0  # in one program, the backward has the dispatch of both
                assert stages.forward[s] == pytest.approx(cost.forward + once)
                for name in ("update", "weights", "optimizer", "state", "inputs", "outputs", "labels"):
                    assert getattr(stages, name)[s] == pytest.approx(getattr(cost, name))
                for name in ("backward", "residuals"):
                    assert getattr(stages, name)[p, s] == pytest.approx(getattr(cost, name))
                one_program = stages.residuals[p, s] if s == len(starts) - 1 else 0  # of forward and backward
                assert stages.temporary[p, s] + one_program == cost.temporary


def test_a_last_stage_of_one_program_takes_its_time():
    def fused(layer, share):
        at = [one.model_copy(update={"forward_backward": share * (one.forward + one.backward)}) for one in layer.at]
        return layer.model_copy(update={"at": tuple(at)})

    plain, starts = gpt().model_copy(update={"dispatch": 0.0}), (0, 1, 5)
    profile = plain.model_copy(update={"layers": tuple(fused(layer, 0.8 if n else 0.7) for n, layer in enumerate(plain.layers))})
    assert Layers(profile).cut(starts, 2).fusing.tolist() == pytest.approx([0.7, 0.8, 0.8])
    for schedule, share in (("pipedream_flush", 0.8), ("gpipe", 1.0)):  # `gpipe` has two programs there
        before, after = (Estimates(one, TWO_LEVELS).candidate(PlainShape(schedule, 4, (2, 2, 2)), 2, starts) for one in (plain, profile))
        assert [cost.forward for cost in profile.stage_costs(after.plan(profile.ids), 2)] == pytest.approx([0.2, 8.0, share * 1.0])
        assert (after.bubble > before.bubble) == (share < 1)  # the same time passes, and less of it computes


def test_plans_also_use_the_devices_of_one_server():
    cluster = levels((4, 20_000.0, 0.02), (3, 5.0, 0.1))
    candidates = equal(gpt(), cluster, 24, exact=True)
    assert {c.devices for c in candidates} == {12, 4, 1}
    assert {c.replicas for c in candidates if c.devices == 4} == {(4,), (2, 2), (1, 1, 1, 1)}
    assert {c.keep_together for c in candidates if c.devices == 4} == {"replicas"}
    assert min(candidates, key=lambda c: c.rank).devices == 4  # the links between servers are slow


def test_every_legal_plan_is_found_and_no_other():
    profile, batch = gpt(3), 22
    candidates = [one for one in equal(profile, TWO_LEVELS, batch) if one.devices == 6]
    seen = [(c.schedule, c.replicas, c.rows, c.microbatches, c.options.extra_in_flight, c.keep_together) for c in candidates]
    assert len(set(seen)) == len(seen)
    expected = set()
    for depth, rows, schedule in itertools.product((1, 2, 3), profile.sizes, planned_schedules()):
        width = 6 // depth
        most = batch // (rows * width)
        numbers = {*(2**k for k in range(9)), *(depth * 2**k for k in range(9)), most}
        rules = jpipe.schedules.SCHEDULES[schedule]
        extras = EXTRA if depth > 1 and "extra_in_flight" in rules.options and not rules.flushes else (0,)
        for m, extra, keep in itertools.product(numbers, extras, ("replicas", "stages")[: 1 + (depth > 1)]):
            key = schedule, (width,) * depth, rows, m * width, extra, keep
            if m <= most and (depth > 1 or schedule in ONE_STAGE) and _is_legal(profile, key):
                expected.add(key)
    assert set(seen) == expected
    assert {c.schedule for c in candidates} == set(planned_schedules())


def _is_legal(profile, key):
    schedule, replicas, _, microbatches, extra, keep = key
    try:
        jpipe.Plan.even(profile.ids, len(replicas), schedule, microbatches, replicas=replicas, extra_in_flight=extra, keep_together=keep)
    except jpipe.InputError:
        return False
    return True


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("limit", [150_000, 250_000, 400_000, None])
def test_each_stage_takes_the_cheapest_recomputation_that_fits(limit):
    profile = gpt()
    topology = levels((2, 20_000.0, 0.0), (2, 20_000.0, 0.0), memory=limit)
    candidates = equal(profile, topology, 16)
    for candidate in candidates:
        sizes = [_memory(profile, candidate, policy) for policy in POLICIES]
        lacking = [candidate.memory[s] - (limit or np.inf) for s in range(candidate.depth)]
        for s, policy in enumerate(candidate.policies):
            stage_sizes = [sizes[p][s] for p in range(3)]
            fits = [p for p in range(3) if stage_sizes[p] <= (limit or np.inf)]
            assert policy == POLICIES[fits[0] if fits else stage_sizes.index(min(stage_sizes))]
            assert candidate.memory[s] == stage_sizes[POLICIES.index(policy)]
        assert candidate.over == ((lacking.index(max(lacking)), max(lacking)) if max(lacking) > 0 else None)
    chosen = {policy for candidate in candidates for policy in candidate.policies}
    assert chosen == ({"none"} if limit is None else set(POLICIES))


def _memory(profile, candidate, policy):
    """Return the memory of each stage with one policy for all."""
    plan = _plan(profile, candidate.starts, policy, candidate)
    schedule, memory = jpipe.schedules.SCHEDULES[plan.schedule], []
    for s, cost in enumerate(profile.stage_costs(plan, candidate.rows)):
        in_flight, replicas = schedule.in_flight(plan, s), plan.replicas[s]
        residuals = 0 if s == plan.depth - 1 and in_flight == 1 else cost.residuals  # in one program they are temporary
        sizes = (cost.weights, cost.optimizer, cost.state, residuals, cost.inputs, cost.outputs, cost.temporary, cost.labels)
        sent = schedule.in_flight(plan, s - 1) * replicas if s else 0
        waiting, versions = waiting_inputs(in_flight, replicas, sent), schedule.versions_alive(plan, s)
        options = {
            "versions": versions,
            "in_flight": in_flight,
            "waiting": waiting,
            "accumulators": cost.accumulators,
            "replicas": replicas,
            "gradients": candidate.options.extra_in_flight,
        }
        memory.append(int(stage_bytes(*sizes, **options)))
    return memory


def _plan(profile, starts, policy, candidate=None):
    stages = [
        {"layers": profile.ids[a:b], "recompute": policy, "replicas": candidate.replicas[0] if candidate else 1}
        for a, b in itertools.pairwise((*starts, len(profile.ids)))
    ]
    if candidate is None:
        return jpipe.Plan(schedule="gpipe", microbatches=1, stages=stages)
    return jpipe.Plan(
        schedule=candidate.schedule, microbatches=candidate.microbatches, stages=stages, extra_in_flight=candidate.options.extra_in_flight
    )


def test_links_that_pipelines_share_carry_the_bytes_of_all():
    profile = gpt(7, outputs=20_000, sizes=(1,), weights=1_000)
    topology = levels((4, 1e9, 0.0), (2, 20_000.0, 0.0))  # a message takes as long as a forward; four pipelines share a card
    wide = [c for c in equal(profile, topology, 32, exact=True) if c.replicas == (4, 4) and c.keep_together == "replicas"]
    for candidate in (c for c in wide if jpipe.schedules.SCHEDULES[c.schedule].flushes):
        assert candidate.seconds == pytest.approx(price(profile, topology, candidate), rel=0.03)
    asynchronous = [c for c in wide if not jpipe.schedules.SCHEDULES[c.schedule].flushes]
    assert {c.bound for c in asynchronous} == {"stage 0 computes"}
    for candidate in asynchronous:
        exact = 1e-9 if candidate.options.extra_in_flight else 1e-3
        assert candidate.seconds == pytest.approx(price(profile, topology, candidate), rel=exact)
    narrow = levels((4, 1e9, 0.0), (2, 4_000.0, 0.0))
    wide = [c for c in equal(profile, narrow, 32, exact=True) if c.replicas == (4, 4) and c.keep_together == "replicas"]
    asynchronous = [c for c in wide if not jpipe.schedules.SCHEDULES[c.schedule].flushes]
    assert {c.bound for c in asynchronous} == {"cut 0"}
    for candidate in asynchronous[:3]:
        assert candidate.seconds == pytest.approx(8 * 4 * 20_000 / 4_000, rel=0.2)
        assert candidate.seconds == pytest.approx(price(profile, narrow, candidate), rel=0.2)  # they collide


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "pipedream_flush"])
@pytest.mark.parametrize(("bandwidth", "bound"), [(1e30, "bubble"), (20_000.0, "bubble"), (50.0, "cut")])
def test_a_cut_is_the_bound_only_for_what_its_link_adds(schedule, bandwidth, bound):
    candidates = [c for c in equal(gpt(7, head=0.5), levels((4, bandwidth, 0.0)), 4, exact=True, schedules=[schedule]) if c.depth == 4]
    assert {candidate.bound.split()[0] for candidate in candidates} == {bound}


def test_more_in_flight_hides_a_slow_link():
    profile = gpt(2, head=0.1, sizes=(1,))
    candidates = {
        c.options.extra_in_flight: c
        for c in equal(profile, levels((2, 1e9, 1.0)), 32, exact=True, schedules=["pipedream_2bw"])
        if c.depth == 2
    }
    assert candidates[0].bound == "cut 0"
    period = (
        3 * 1.1 + 1.5 * profile.dispatch + (0.5 + profile.dispatch) / 32 + 1.0
    )  # half of what two microbatches take for one round; updates take 0.6 and 0.4
    assert price(profile, levels((2, 1e9, 1.0)), candidates[0]) == pytest.approx(32 * period, rel=1e-3)
    assert candidates[0].seconds == pytest.approx(32 * period - 0.5 - profile.dispatch, rel=1e-5)  # by estimate updates wait for nothing
    assert candidates[2].bound.endswith("computes")
    assert candidates[2].seconds < 0.9 * candidates[0].seconds
    assert candidates[2].memory[0] > candidates[0].memory[0]


def test_data_parallelism_computes_sums_and_updates():
    profile, topology = gpt(sizes=(2,)), levels((4, 10_000.0, 0.5))
    candidates = [c for c in equal(profile, topology, 24, exact=True, schedules=["pipedream_flush"]) if c.replicas == (4,)]
    weights, compute, update = 140_000, 2 * 3 * 4.6 + profile.dispatch, 1.4 + profile.dispatch
    expected = 3 * compute + 2 * 3 / 4 * weights / 10_000 + 2 * 3 * 0.5 + update
    assert [c.seconds for c in candidates] == [pytest.approx(expected)]
    assert candidates[0].bubble == pytest.approx(1 - (3 * compute + update) / expected)
    assert candidates[0].sent == pytest.approx(2 * 3 * weights / 24)


def test_a_sum_without_a_flush_costs_the_time_that_is_not_hidden():
    profile, topology = gpt(sizes=(1,)), levels((2, 800.0, 0.0), (2, 1e9, 0.0))
    seconds = {
        c.schedule: c.seconds
        for c in equal(profile, topology, 8, exact=True)
        if c.depth == 2 and c.keep_together == "replicas" and not c.options.extra_in_flight
    }
    summed, update = 80_000 / 800, 0.8 + profile.dispatch
    period = 3 * 2.5 + profile.dispatch + (0.6 + profile.dispatch) / 4
    assert seconds["pipedream_2bw"] == pytest.approx(summed + update + period, rel=1e-4)  # 3 of 4 pairs hide it, n_0 = 2
    assert seconds["pipedream"] == pytest.approx(summed + update + 3 * period, rel=1e-4)  # one does


def test_a_sum_of_a_later_stage_hides_behind_the_drain_and_the_fill():
    profile, topology = gpt(sizes=(1,)), levels((2, 800.0, 0.0), (2, 1e9, 0.0))
    back_to_front = profile.model_copy(update={"layers": profile.layers[::-1]})  # most weights in the last stage
    candidates = [
        c
        for c in equal(back_to_front, topology, 8, exact=True, schedules=["naive", "pipedream_flush"])
        if c.replicas == (2, 2) and c.keep_together == "replicas" and not c.options.extra_in_flight
    ]
    assert [c.bound for c in candidates] == ["sum of stage 1", "sum of stage 1"]
    for candidate in candidates:
        assert candidate.seconds == pytest.approx(price(back_to_front, topology, candidate))


def test_more_memory_is_never_slower():
    profile = gpt(6)
    best = [equal(profile, levels((4, 20_000.0, 0.0), memory=memory), 32)[0] for memory in (2.6e5, 3e5, 4e5, 6e5, 1e6, None)]
    speeds = [candidate.samples_per_second for candidate in best]
    assert speeds == sorted(speeds)
    assert speeds[0] < speeds[-1]
    assert all(candidate.over is None for candidate in best)


@pytest.mark.parametrize("batch", [7, 12, 30])
def test_the_batch_size_is_not_exceeded(batch):
    profile, topology = gpt(), levels((3, 20_000.0, 0.0))
    assert max(candidate.batch for candidate in equal(profile, topology, batch)) <= batch
    for candidate in equal(profile, topology, batch, exact=True):
        assert candidate.batch == candidate.plan(profile.ids).microbatches * candidate.rows == batch


def test_workers_are_unused_only_where_no_other_plan_is_possible():
    assert {c.devices for c in equal(gpt(1), levels((5, 20_000.0, 0.0)), 10, exact=True)} == {1, 5}, "and one alone, for comparison"
    candidates = equal(gpt(1), levels((5, 20_000.0, 0.0)), 4, exact=True)
    assert {(c.depth, c.replicas[0]) for c in candidates} == {(1, 1), (1, 4), (1, 2), (2, 2), (3, 1)}
    assert equal(gpt(1, sizes=(3,)), levels((5, 20_000.0, 0.0)), 4, exact=True) == []


def test_plans_that_do_not_fit_come_last_with_the_missing_bytes():
    candidates = equal(gpt(), levels((4, 20_000.0, 0.0), memory=250_000), 16)
    lacks = [candidate.over[1] if candidate.over else 0 for candidate in candidates]
    assert lacks == sorted(lacks)
    assert lacks[0] == 0 < lacks[-1]
    nowhere = equal(gpt(), levels((4, 20_000.0, 0.0), memory=1_000), 16)
    assert all(candidate.over for candidate in nowhere)


def test_equally_fast_plans_rank_by_delay_and_stages():
    base = equal(gpt(), levels((4, 20_000.0, 0.0)), 16)[0]
    fewer = dataclasses.replace(
        base, starts=(0,), replicas=(4,), schedule="pipedream_flush", memory=(9,), seconds=base.seconds * (1 + 1e-14)
    )
    later = dataclasses.replace(fewer, schedule="pipedream")
    more = dataclasses.replace(fewer, starts=(0, 1), replicas=(2, 2), policies=("none", "none"), memory=(1, 1), seconds=base.seconds)
    assert sorted([more, later, fewer], key=lambda candidate: candidate.rank) == [fewer, more, later]


def test_workers_that_share_cores_compute_no_faster_than_these():
    profile = gpt(sizes=(1,))
    topology = levels((4, 1e9, 0.0), cores=2)
    for candidate in equal(profile, topology, 16, exact=True, schedules=["pipedream_2bw", "pipedream_flush"]):
        if not candidate.options.extra_in_flight:
            assert candidate.seconds == pytest.approx(price(profile, topology, candidate), rel=0.12)
    assert equal(profile, topology, 16)[0].bound == "the cores"


@pytest.mark.parametrize("schedule", planned_schedules())
def test_memory_is_no_less_than_the_simulator_counts(schedule):
    profile, topology = gpt(6), levels((4, 50_000.0, 0.02))
    candidates = [c for c in equal(profile, topology, 8, schedules=[schedule]) if c.microbatches <= 8]
    assert {candidate.replicas[0] for candidate in candidates} >= {1, 2}
    for candidate in random.Random(3).sample(candidates, min(len(candidates), 12)):
        plan = candidate.plan(profile.ids)
        simulated = simulate_plan(plan, profile.stage_costs(plan, candidate.rows), topology)
        assert simulated is not None
        peaks = [max(simulated.peak_bytes[w] for w in devices) for devices in plan.stage_workers]
        shares = [memory / peak for memory, peak in zip(candidate.memory, peaks, strict=True)]
        assert min(shares) >= 0.985  # with one microbatch under way the simulator counts the last stage's input twice
        assert max(shares) <= 1.25


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw"])
def test_weights_versions_and_both_sets_of_gradients_are_what_the_simulator_counts(schedule):
    profile = gpt(6, sizes=(1,), weights=10**9)
    candidates = [c for c in equal(profile, levels((6, 1e9, 0.0)), 12, schedules=[schedule]) if c.replicas[0] > 1]
    assert {candidate.replicas[0] for candidate in candidates} == {2, 3, 6}
    for bandwidth in (1e30, 1e9):  # it is the order that counts, not when the sums are there
        for candidate in random.Random(4).sample(candidates, 3):
            plan = candidate.plan(profile.ids)
            simulated = simulate_plan(plan, profile.stage_costs(plan, 1), levels((6, bandwidth, 0.0)))
            assert simulated is not None
            peaks = [max(simulated.peak_bytes[w] for w in devices) for devices in plan.stage_workers]
            assert candidate.memory == pytest.approx(peaks, rel=1e-4)


@pytest.mark.parametrize(
    ("compiled_for", "target", "cheapest"), [("cpu", None, "none"), ("TPU v5 lite", None, "elementwise"), ("cpu", "l4", "elementwise")]
)
def test_elementwise_recomputation_is_tried_first_on_gpus_and_tpus(compiled_for, target, cheapest):
    """Where it does not fit, as with dropout, or its residuals are unknown, the other policies are tried."""
    residuals = {"none": 1_000, "elementwise": 2_000}

    def policies(memory, residuals):
        at = [{"forward": 1.0, "backward": 2.0, "outputs": 10, "residuals": residuals}]
        layers = [{"id": name, "weights": 100, "at": at} for name in "abcd"]
        profile = Profile(source="analytic", compiled_for=compiled_for, sizes=[1], inputs=[10], labels=[4], layers=layers)
        device = {"memory": memory, "reserved": 0} if target is None else {"memory": memory, "reserved": 0, "target": target}
        topology = Topology(levels=[{"count": 2, "bandwidth": 1e9, "latency": 0.0}], device=device)
        return {one.policies for one in equal(profile, topology, 8, schedules=("gpipe",)) if one.depth == 2 and one.microbatches == 4}

    assert policies(1e6, residuals) == {(cheapest,) * 2}
    assert policies(12_000, residuals) == {("none",) * 2}
    assert policies(1e6, {"none": 1_000}) == {("none",) * 2}
