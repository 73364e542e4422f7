"""The ranking: plans that fit, their simulation, and explanations of the simulation."""

import dataclasses

import pytest

import jpipe
from jpipe.schedules import PlanOptions
from jpipe_planner.cost.devices import limits_of
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.differing import Differing
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import NO_MESH, Degrees, possible_degrees
from jpipe_planner.ranking import choose as choosing
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import ALIKE, DOUBT, Choice, Ranked, choose
from jpipe_planner.ranking.draw import draw_choice
from jpipe_planner.search.candidates import find_candidates
from tests.planner.invented import invented_profile, invented_topology, simulate_all


def gpt(blocks: int = 6, outputs: int = 1_000, weights: int = 100_000) -> Profile:
    """Return a profile of equal blocks between a light first and a heavy last layer."""

    def layer(name, factor):
        at = [
            {
                "forward": 0.1 * n * factor,
                "backward": 0.2 * n * factor,
                "outputs": outputs * n,
                "residuals": {"none": 50_000 * n, "full": outputs * n},
            }
            for n in (1, 2)
        ]
        return {"id": name, "weights": weights, "optimizer": 2 * weights, "at": at}

    layers = [layer("embed", 0.2), *(layer(f"block_{n}", 1) for n in range(blocks)), layer("head", 1.5)]
    return Profile(source="analytic", sizes=(1, 2), inputs=(8, 16), labels=(8, 16), layers=layers)


def machines(bandwidth: float, memory: float | None = None) -> Topology:
    return Topology(levels=({"count": 4, "bandwidth": bandwidth},), device={"memory": memory})


@pytest.mark.slow
def test_the_chosen_plan_is_the_fastest_in_the_simulator():
    profile, topology = gpt(4), machines(50_000.0)
    candidates = find_candidates(profile, topology, 8)
    choice = choose(profile, topology, candidates)
    everything = [
        candidate.batch / simulated.batch_seconds
        for candidate in candidates
        if (
            simulated := simulate_plan(
                candidate.plan(profile.ids), profile.stage_costs(candidate.plan(profile.ids), candidate.rows), topology
            )
        )
    ]
    assert choice.ranked[0].samples_per_second == pytest.approx(max(everything), rel=0.02)
    speeds = [ranked.samples_per_second for ranked in choice.ranked if ranked.simulated]
    assert speeds == pytest.approx(sorted(speeds, reverse=True), rel=0.01)


@pytest.mark.slow
def test_one_plan_of_each_kind_is_ranked():
    profile, topology = gpt(), machines(50_000.0)
    choice = choose(profile, topology, find_candidates(profile, topology, 8))
    kinds = [(r.candidate.schedule, r.candidate.replicas, r.candidate.keep_together) for r in choice.ranked]
    assert len(kinds) == len(set(kinds))
    assert {"gpipe", "naive", "pipedream", "pipedream_2bw", "pipedream_flush"} == {kind[0] for kind in kinds}
    assert any(replicas == (4,) for _, replicas, _ in kinds)  # data parallelism, a plan like any other
    assert {schedule for schedule, replicas, _ in kinds if replicas == (4,)} == {"pipedream_flush", "pipedream", "pipedream_2bw"}


def candidate_of_pipedream():
    profile, topology = gpt(4), machines(50_000.0)
    candidate = next(one for one in find_candidates(profile, topology, 8) if one.schedule == "pipedream" and one.depth > 1)
    return Choice(profile, topology, (), (), 0), candidate


def test_estimates_are_corrected_by_what_simulations_of_their_family_have_taken():
    _, candidate = candidate_of_pipedream()
    slower = dataclasses.replace(candidate, seconds=1.2 * candidate.seconds)
    more = candidate.with_options(extra_in_flight=2)
    assert choosing._turn(candidate, []) < choosing._turn(slower, [])
    assert choosing._turn(candidate, [1.4, 1.6]) > choosing._turn(slower, [1.0])
    assert choosing._turn(dataclasses.replace(more, seconds=(1 + ALIKE / 4) * candidate.seconds), []) < choosing._turn(candidate, [])


@pytest.mark.parametrize("times_as_fast", [0.99 * DOUBT, 1.01 * DOUBT])
def test_a_plan_that_cannot_be_simulated_has_to_be_much_faster(monkeypatch, times_as_fast):
    choice, candidate = candidate_of_pipedream()
    monkeypatch.setattr(Choice, "forwards", lambda self, candidate: 10**9)
    estimated = dataclasses.replace(candidate, seconds=candidate.seconds / times_as_fast)
    simulations = choosing._Simulations(choice, [estimated], {}, 20)
    simulations.found.append(Ranked(candidate))
    assert (simulations._simulated(estimated, 1000) is not None) == (times_as_fast > DOUBT)


@pytest.mark.slow
def test_memory_that_the_simulation_counts_decides():
    profile = gpt()
    free = choose(profile, machines(50_000.0), find_candidates(profile, machines(50_000.0), 8))
    most = max(free.ranked[0].memory)
    tight = machines(50_000.0, memory=0.9 * most)
    choice = choose(profile, tight, find_candidates(profile, tight, 8))
    assert all(max(ranked.memory) <= 0.9 * most for ranked in choice.ranked)
    assert choice.ranked[0].samples_per_second <= free.ranked[0].samples_per_second
    assert choice.rejected
    assert all(candidate.over is not None and candidate.over[1] > 0 for candidate in choice.rejected)


@pytest.mark.slow
def test_candidates_that_only_the_simulation_finds_too_large_are_rejected():
    profile, topology = gpt(), machines(50_000.0, memory=1e9)
    candidates = find_candidates(profile, topology, 8)
    least = min(max(one.simulated.peak_bytes) for one in simulate_all(profile, topology, candidates))
    small = machines(50_000.0, memory=least - 1)  # the candidates still say that they fit
    choice = choose(profile, small, candidates, most=1000)
    assert choice.ranked == ()
    assert all(candidate.over[1] > 0 for candidate in choice.rejected)


def test_the_plan_knows_what_is_predicted_and_the_picture_can_be_drawn(tmp_path):
    profile, topology = gpt(), machines(50_000.0, memory=1e7)
    candidates = find_candidates(profile, topology, 8)
    choice = choose(profile, topology, candidates)
    plan = choice.plan(choice.ranked[0])
    assert plan.predicted == jpipe.plan.Predicted(
        batch_seconds=choice.ranked[0].seconds,
        bubble=choice.ranked[0].simulated.bubble,
        peak_bytes=choice.ranked[0].memory,
        delay=plan.mean_delay,
        stage_seconds=plan.predicted.stage_seconds,
    )
    costs = profile.stage_costs(plan, choice.ranked[0].candidate.rows)
    assert plan.predicted.stage_seconds == tuple(cost.forward + cost.backward for cost in costs)
    assert plan.mean_delay
    assert jpipe.Plan.from_json(plan.to_json()) == plan
    assert [row[0] for row in table.rows(choice, 3)] == ["1", "2", "3", "10"], "the last one is for one device"
    assert all(len(row) == len(table.HEAD) for row in table.rows(choice, 3))
    figure = draw_choice(choice, choice.ranked, choice.ranked[0])
    figure.savefig(tmp_path / "p.png")
    scatter, bars = figure.axes
    assert sum(len(points.get_offsets()) for points in scatter.collections) == len(choice.ranked) + 1  # and the ring
    assert [label.get_text()[0] for label in bars.get_yticklabels()] == [str(s) for s in range(plan.depth)]


SLOW = {"devices": [0, 1], "name": "V100", "speed": 0.4, "memory": 1.5e9, "bandwidth": {"1": 1e9}}


@pytest.mark.parametrize(
    ("differing", "schedules"),
    [
        ([SLOW], ["pipedream_flush", "pipedream"]),
        ([{"devices": 3, "speed": 0.1}], ["gpipe"]),
        pytest.param([{"devices": 1, "speed": 3}], ["pipedream_2bw"], marks=pytest.mark.exhaustive),
    ],
)
def test_where_devices_differ_the_choice_is_the_fastest_of_all_candidates(differing, schedules):
    levels = [{"count": 2, "bandwidth": 1e10, "latency": 5e-6}, {"count": 2, "bandwidth": 2e9, "latency": 5e-5}]
    profile = invented_profile(3, 6)
    topology = Topology(levels=levels, device={"name": "A100", "memory": 2e9}, differing=differing)
    candidates = find_candidates(profile, topology, 4, schedules=schedules)
    choice = choose(profile, topology, candidates)
    best = choice.ranked[0]
    everything = simulate_all(profile, topology, candidates)
    fitting = [one for one in everything if one.candidate.over is None]
    assert best.seconds / best.candidate.batch <= 1.006 * min(one.seconds / one.candidate.batch for one in fitting)
    plan, kinds = choice.plan(best), choice.plan(best).predicted.devices
    assert len(kinds) == len(plan.pipeline_ranks)
    assert jpipe.Plan.from_json(plan.to_json()) == plan
    if differing == [SLOW]:  # both stand for what they say
        assert (
            any("V100" in one for ranked in choice.ranked for one in choice.plan(ranked).predicted.devices) or best.candidate.devices == 2
        )
        assert table.devices(topology) == "2 × V100 with 1.5 GB, 2 × A100 with 2 GB"
        assert "of" in table.why_chosen(choice, 1)[0][4]
    assert all(len(row) == len(table.head(choice)) for row in table.rows(choice, 3))
    assert table.head(choice)[3] == "devices"
    assert (
        sum(int(part.split(" × ")[0]) if " × " in part else 1 for part in table.rows(choice, 1)[0][3].split(", ")) == best.candidate.devices
    )


@pytest.mark.parametrize("keep", ["replicas", "stages"])
def test_a_plan_in_another_order_is_the_plan_on_machines_counted_in_that_order(keep):
    levels = [{"count": 2, "bandwidth": 1e10, "latency": 5e-6}, {"count": 2, "bandwidth": 2e9, "latency": 5e-5}]
    topology = Topology(levels=levels, device={"memory": 2e9}, differing=[SLOW, {"devices": 3, "speed": 0.7}])
    order = topology.orders()[2]
    assert order == (1, 0, 3, 2) or order == (0, 1, 3, 2)
    profile = invented_profile(3, 6)
    found = find_candidates(profile, topology.ordered(order), 4, schedules=["pipedream_flush"])
    candidate = next(c for c in found if c.replicas == (2, 2) and c.keep_together == keep and c.placed_on is None)
    moved = dataclasses.replace(candidate, placed_on=order)
    there, here = (
        (one.plan(profile.ids), machine, limits_of(one.plan(profile.ids), machine))
        for one, machine in ((candidate, topology.ordered(order)), (moved, topology))
    )
    assert there[2] == here[2]
    times = [simulate_plan(plan, profile.stage_costs(plan, 1), machine).batch_seconds for plan, machine, _ in (there, here)]
    assert times[0] == times[1]
    assert sorted(number for numbers in here[0].placement for number in numbers) == [0, 1, 2, 3]
    on_meshes = dataclasses.replace(moved, degrees=Degrees(model=2)).plan(profile.ids)
    assert on_meshes.placement == tuple(tuple(2 * number for number in numbers) for numbers in here[0].placement)


OPTIONS = {
    "sum_parts": ((1, 1), (1, 2, 1)),
    "policies": ("full", "none"),
    "shard_optimizer": True,
    "placed_on": (3, 2, 1, 0),
    "links": jpipe.plan.Links(activations="int8"),
    "offload": jpipe.plan.HostMemory(optimizer="all"),
}


def test_where_devices_differ_each_option_has_the_memory_of_the_devices_of_its_stages():
    """The last stage has several layers, whose sums may have parts."""
    profile, levels = invented_profile(3, 6), [{"count": 4, "bandwidth": 1e9}]
    topology = Topology(levels=levels, device={"memory": 2e9}, differing=[{"devices": 1, "memory": 1e9}, {"devices": 2, "speed": 0.5}])
    found = find_candidates(profile, topology, 4, schedules=["pipedream"])
    base = next(one for one in found if one.replicas == (2, 2) and one.keep_together == "replicas")
    base = dataclasses.replace(base, starts=(0, 2), placed_on=None, options=jpipe.schedules.NO_OPTIONS)
    of_schedule = ({"extra_in_flight": 1}, {"max_in_flight": 1}, {"split_backward": "early"}, {"vertical_sync": True})
    options = [{name: value} for name, value in OPTIONS.items()] + [{"options": PlanOptions(**one)} for one in of_schedule]
    for option in ({}, *options, {"agree": jpipe.plan.Agreement(every=2), "schedule": "gpipe"}):
        candidate = dataclasses.replace(base, **option)
        assert candidate.plan(profile.ids).depth == 2
        assert Choice(profile, topology, (), (), 0).limits(candidate) == ((2e9, 1e9) if "placed_on" in option else (1e9, 2e9))
    on_meshes = dataclasses.replace(base, replicas=(1, 1), degrees=Degrees(data=2), sum_parts=())
    with_equal = Topology(levels=levels, device={"memory": 2e9}, differing=[{"devices": "0-1", "memory": 1e9}])
    assert limits_of(on_meshes.plan(profile.ids), with_equal.groups(2)) == (1e9, 2e9)


def test_an_entry_that_changes_nothing_changes_no_plan():
    profile, equal = invented_profile(5, 6), invented_topology(1)
    same = equal.model_copy(update={"differing": (Differing(devices=(1,)),)})
    plans = [find_candidates(profile, topology, 4, schedules=["pipedream_flush", "pipedream"]) for topology in (equal, same)]
    priced = [[(one, one.rank) for one in found if one.devices == 6] for found in plans]
    assert priced[0] == priced[1] != []


def test_meshes_leave_room_for_pipelines_among_the_simulated_plans():
    """A topology file brings meshes in, and each mesh its own plans of one stage."""
    tensor = {"weights": 1, "compute": 1, "outputs": 0, "residuals": {"none": 0.7}, "reduced": 4e6, "reductions": 2, "divides": 64}

    def at(rows):
        return {"forward": 2e-3 * rows, "backward": 4e-3 * rows, "outputs": 4_000_000 * rows, "residuals": {"none": 60_000_000 * rows}}

    layers = [
        {"id": f"block_{n}", "weights": 200_000_000, "optimizer": 800_000_000, "tensor": tensor, "at": [at(1), at(2), at(4)]}
        for n in range(8)
    ]
    profile = Profile(source="analytic", sizes=(1, 2, 4), inputs=(8, 16, 32), labels=(8, 16, 32), layers=layers)
    links = ({"count": 8, "bandwidth": 3e11, "latency": 3e-6}, {"count": 2, "bandwidth": 3e9, "latency": 3e-5})
    topology = Topology(levels=links, device={"memory": 80e9})
    names = "pipedream_flush", "gpipe", "naive", "pipedream_2bw"
    rates = [
        choose(profile, topology, find_candidates(profile, topology, 64, schedules=names, meshes=meshes)).ranked[0].samples_per_second
        for meshes in ((NO_MESH,), possible_degrees(profile, topology))
    ]
    assert rates[1] >= 0.99 * rates[0]


def test_one_stage_on_a_mesh_is_not_called_one_device():
    profile, topology = gpt(), Topology.flat(2, 1e9)
    alone = next(one for one in find_candidates(profile, topology, 4, schedules=("pipedream_flush",)) if one.devices == 1)
    assert table.name(alone) == "one stage on one device"
    assert table.name(dataclasses.replace(alone, degrees=Degrees(model=2))) == "one stage on one mesh (model 2)"
