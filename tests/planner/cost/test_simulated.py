"""Plans priced by simulation: links and their shared ports, placement, shared cores."""

import dataclasses

import pytest

import jpipe
from jpipe_planner.cost.devices import device_numbers, network
from jpipe_planner.cost.simulated import lowered, simulate_plan
from jpipe_planner.machine.topology import Topology
from tests.planner.invented import invented_profile


def _plan(replicas=1, schedule="pipedream", microbatches=4, stages=2, **fields):
    return jpipe.Plan.even([f"l{n}" for n in range(4)], stages, schedule, microbatches, replicas=replicas, **fields)


def _costs(plan, **fields):
    return [jpipe.programs.StageCost(1.0, 2.0, **fields) for _ in plan.stages]


def _servers(count, size, inner, outer, **fields):
    return Topology(levels=({"count": size, "bandwidth": inner}, {"count": count, "bandwidth": outer}), **fields)


def test_a_link_slower_than_the_computation_is_the_bound():
    plan = _plan()
    costs = _costs(plan, outputs=60, inputs=60, message=60, gradient=60)
    fast = simulate_plan(plan, costs, Topology.flat(2, bandwidth=1e9))
    slow = simulate_plan(plan, costs, Topology.flat(2, bandwidth=10.0))
    assert fast.batch_seconds == pytest.approx(4 * 3.0)
    assert slow.batch_seconds == pytest.approx(4 * (3.0 + 6.0))  # a period of F + B + l
    assert fast.bubble == pytest.approx(0.0, abs=1e-6)
    assert slow.bubble == pytest.approx(1 - 3 / 9)


def test_pipelines_that_leave_a_server_by_one_port_share_it():
    plan = _plan(replicas=2, extra_in_flight=8, microbatches=8)
    costs = _costs(plan, outputs=60, inputs=60, message=60, gradient=60)
    across = simulate_plan(plan, costs, _servers(2, 2, inner=1e9, outer=20.0))  # the replicas of a stage in one server
    assert across.batch_seconds == pytest.approx(8 * 3.0, rel=0.15)  # 3 s each, one after the other, where computing takes 1.5
    inside = simulate_plan(plan.model_copy(update={"keep_together": "stages"}), costs, _servers(2, 2, inner=1e9, outer=20.0))
    assert inside.batch_seconds == pytest.approx(4 * 3.0, rel=0.05)


def test_no_plan_is_faster_than_its_busiest_rank(monkeypatch):
    """The first stage runs ahead of the second one, as long as there may be more microbatches in flight."""
    monkeypatch.setattr("jpipe_planner.cost.simulated.window", lambda plan: (0, 1))
    plan = _plan(replicas=2, extra_in_flight=8, microbatches=8)
    costs = [jpipe.programs.StageCost(0.1, 0.2), jpipe.programs.StageCost(1.0, 2.0)]
    assert simulate_plan(plan, costs, _servers(2, 2, inner=1e9, outer=1e9)).batch_seconds == 4 * 3.0


def test_a_sum_over_servers_takes_the_slow_link():
    plan = _plan(replicas=2, schedule="pipedream_flush", stages=1)
    costs = _costs(plan, accumulators=100)
    one = simulate_plan(plan, costs, _servers(1, 2, inner=10.0, outer=1.0))
    two = simulate_plan(plan, costs, _servers(2, 1, inner=10.0, outer=1.0))
    assert one.batch_seconds == pytest.approx(2 * 3.0 + 10.0)
    assert two.batch_seconds == pytest.approx(2 * 3.0 + 100.0)


def test_workers_that_share_cores_take_turns():
    plan = _plan(stages=4)
    costs = [dataclasses.replace(cost, update=0.5) for cost in _costs(plan)]
    alone = simulate_plan(plan, costs, Topology.flat(4, 1e9))
    shared = simulate_plan(plan, costs, Topology(levels=({"count": 4, "bandwidth": 1e9},), cores=2))
    assert alone.batch_seconds == pytest.approx(4 * 3.0 + 0.5)
    assert shared.batch_seconds == pytest.approx(2 * alone.batch_seconds)
    naive = _plan(stages=4, schedule="naive")
    one_at_a_time = simulate_plan(naive, _costs(naive), Topology(levels=({"count": 4, "bandwidth": 1e9},), cores=2))
    assert one_at_a_time.batch_seconds == pytest.approx(simulate_plan(naive, _costs(naive), Topology.flat(4, 1e9)).batch_seconds)


def test_workers_are_where_the_plan_places_them():
    assert device_numbers(_plan(replicas=[3, 1], microbatches=3)) == (0, 1, 2, 3)
    assert device_numbers(_plan(replicas=2, keep_together="stages")) == (0, 2, 1, 3)  # stage 0 on 0 and 2, stage 1 on 1 and 3
    assert device_numbers(_plan(placement=((5,), (2,)))) == (5, 2)


def test_simulations_that_would_take_minutes_are_skipped():
    assert simulate_plan(_plan(microbatches=10**6), _costs(_plan()), Topology.flat(2, 1e9)) is None


def test_sums_that_leave_a_server_by_one_port_go_one_after_the_other():
    plan = _plan(replicas=2, schedule="gpipe", stages=2)
    costs = _costs(plan, accumulators=100)
    apart = simulate_plan(plan, costs, _servers(2, 2, inner=1e9, outer=10.0))  # the replicas of a stage in one server
    together = simulate_plan(plan.model_copy(update={"keep_together": "stages"}), costs, _servers(2, 2, inner=1e9, outer=10.0))
    free = simulate_plan(plan, costs, Topology.flat(4, 1e9))
    assert apart.batch_seconds == pytest.approx(free.batch_seconds, rel=1e-3)
    assert together.batch_seconds > free.batch_seconds + 17  # two sums of 10 s, the first of them begun while stage 0 still computes


@pytest.mark.parametrize("overlap", ["none", "transfers", "transfers and sums"])
def test_the_window_ends_before_the_pipeline_drains(overlap):
    """Without overlap ranks wait for each other's transfers, and near the end earlier ranks have nothing to send any more."""
    plan, outputs = jpipe.Plan.even("abcdef", 6, "pipedream", 4, extra_in_flight=2), (10, 1, 1, 1, 0, 0)
    costs = [jpipe.programs.StageCost(outputs=outputs[s], gradient=outputs[s - 1] if s else 0) for s in range(6)]
    topology = Topology(levels=({"count": 6, "bandwidth": 1.0, "latency": 0.5},), device={"overlap": overlap})
    ends = [jpipe.simulate(jpipe.lower(plan, batches), costs, network(plan, topology), overlap).seconds for batches in (20, 40)]
    assert simulate_plan(plan, costs, topology).batch_seconds == pytest.approx((ends[1] - ends[0]) / 20, rel=5e-3)


def check_long_run(plan, topology, rel):
    """Compare the price of a plan whose pipelines agree with whole rounds in the middle of a long run; `rel` is that of the seconds."""
    every = plan.agree.every
    costs, batches = invented_profile(3).stage_costs(plan, 1), 12 // every * every + every
    short, long = (jpipe.simulate(jpipe.lower(plan, n), costs, network(plan, topology), brief=True) for n in (batches, 2 * batches))
    known = simulate_plan(plan, costs, topology)
    assert known.batch_seconds == pytest.approx((long.seconds - short.seconds) / batches, rel=rel)
    assert (known.peak_bytes, known.held_bytes) == (long.peak_bytes, long.held_bytes)
    sent = [(more - less) / batches for more, less in zip(long.moved_bytes, short.moved_bytes, strict=True)]
    assert known.sent_bytes == pytest.approx(sent, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "every", "fragments"),
    [
        ("pipedream_flush", 8, "stages"),
        ("gpipe", 6, "stages"),  # not a multiple of the fragments
        ("gpipe", 2, "stages"),  # two fragments agree in each batch
        ("pipedream_flush", 5, 2),
        ("pipedream_2bw", 12, None),
        ("pipedream_2bw", 12, 2),
        ("pipedream_2bw", 3, "stages"),
        ("pipedream", 12, "stages"),
    ],
)
def test_each_fragment_that_agrees_delays_a_batch_of_its_own(schedule, every, fragments):
    layers, agree = [f"layer_{n}" for n in range(8)], {"every": every, "fragments": fragments}
    plan, topology = jpipe.Plan.even(layers, 4, schedule, 8, replicas=2, agree=agree), Topology.flat(8, 4e6)
    check_long_run(plan, topology, rel=1e-6)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("schedule", "every", "fragments", "delay", "bandwidth"),
    [
        ("pipedream_flush", 12, None, 1, 4e7),
        ("pipedream_flush", 12, "stages", 1, 3e5),
        ("pipedream_flush", 5, 2, 3, 4e7),  # agreements of both fragments are under way at the same time
        ("gpipe", 5, 2, 3, 4e6),
        ("gpipe", 12, "stages", 3, 4e7),
        ("pipedream_2bw", 12, None, 3, 4e7),
        ("pipedream_2bw", 12, 2, 1, 4e6),
        ("pipedream_2bw", 5, "stages", 3, 4e6),
        ("pipedream", 12, "stages", 3, 4e7),
    ],
)
@pytest.mark.parametrize("are_apart", [True, False])
def test_late_agreements_take_as_long_as_in_a_long_run(schedule, every, fragments, delay, bandwidth, are_apart):
    """With pipelines in servers of their own only sums take the slow link; otherwise messages between stages take it, too."""
    layers, agree = [f"layer_{n}" for n in range(8)], {"every": every, "fragments": fragments, "delay": delay}
    plan = jpipe.Plan.even(layers, 4, schedule, 8, replicas=2, agree=agree, keep_together="stages")
    topology = _servers(2, 4, inner=1e9, outer=bandwidth) if are_apart else Topology.flat(8, bandwidth)
    check_long_run(plan, topology, rel=1e-3)


@pytest.mark.parametrize(("overlap", "hidden"), [("transfers and sums", 6.0), ("transfers", 0.0), ("none", 0.0)])
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("seconds", [4, 11, 40])
def test_ranks_wait_for_what_a_sum_takes_longer_than_the_delay(seconds, delay, overlap, hidden):
    """A sum goes on beside the computations of the `delay` batches, 6 s each, if the device allows that."""
    topology = Topology(levels=({"count": 2, "bandwidth": 1.0},), device={"overlap": overlap})
    plan = _plan(replicas=2, schedule="gpipe", stages=1, agree={"every": 10, "delay": delay})
    known = simulate_plan(plan, _costs(plan, weights=seconds), topology)
    assert known.batch_seconds == pytest.approx(6 + max(seconds - hidden * delay, 0) / 10, rel=1e-9)


def test_plans_that_differ_in_their_cuts_have_the_same_program():
    cuts = [
        jpipe.Plan(schedule="pipedream", microbatches=4, stages=[{"layers": [*"abcd"[:n]]}, {"layers": [*"abcd"[n:]]}]) for n in (1, 3, 1)
    ]
    costs = [[jpipe.programs.StageCost(of, 2 * of, residuals=of) for of in (n, 4 - n)] for n in (1, 3, 1)]
    lowered.cache_clear()
    topology = Topology.flat(2, 1e9)
    first, second, third = (simulate_plan(*each, topology) for each in zip(cuts, costs, strict=True))
    assert lowered.cache_info().misses == 1
    assert first == third != second
    lowered.cache_clear()
    assert simulate_plan(cuts[1], costs[1], topology) == second
