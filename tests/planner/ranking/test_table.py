"""The ranking as text, and its picture."""

import dataclasses

import pytest

import jpipe
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import Choice, choose
from jpipe_planner.ranking.draw import draw_choice, look
from jpipe_planner.search.candidates import find_candidates


def chosen(weights: int, residuals: int, memory: float) -> Choice:
    """Choose a plan of four equal layers for two devices, in microbatches of 2 or 4 rows."""
    at = [{"forward": 0.01 * n, "backward": 0.02 * n, "outputs": 100 * n, "residuals": {"none": residuals * n}} for n in (2, 4)]
    layers = [{"id": f"layer {n}", "weights": weights, "optimizer": 2 * weights, "at": at} for n in range(4)]
    profile = Profile(source="measured", sizes=(2, 4), inputs=(200, 400), labels=(8, 16), layers=layers)
    topology = Topology.flat(2, 1e9, memory=memory)
    return choose(profile, topology, find_candidates(profile, topology, 8))


@pytest.mark.parametrize(("weights", "residuals", "smaller"), [(10**5, 10**7, True), (10**7, 10**3, False)])
def test_smaller_microbatches_are_suggested_only_where_all_else_fits(weights, residuals, smaller):
    choice = chosen(weights, residuals, memory=1e7)
    assert not choice.ranked
    nearest, change = table.what_would_fit(choice)
    assert nearest.startswith("no plan fits: nearest is ")
    assert nearest.endswith(" too much")
    devices = "what would make it fit: more than 2 devices, for more stages"
    assert change == devices + (", or smaller microbatches than 2 rows" if smaller else "")


def test_a_plan_rejected_by_its_estimate_says_so():
    lines = table.why_rejected(chosen(10**5, 10**7, memory=1e7), 3)
    assert len(lines) == 3
    assert all("needs an estimated " in line and line.endswith(" too much") for line in lines)


def test_one_stage_is_named_in_the_singular():
    candidate = chosen(10**5, 10**3, memory=1e9).ranked[0].candidate
    one = dataclasses.replace(
        candidate, schedule="gpipe", starts=(0,), replicas=(1,), policies=("none",), options=jpipe.schedules.NO_OPTIONS
    )
    assert table.name(one) == "one stage on one device"
    assert table.name(dataclasses.replace(one, starts=(0, 2), replicas=(1, 1), policies=("none",) * 2)) == "gpipe with 2 stages"


def test_data_parallelism_says_how_late_its_gradients_are():
    candidate = chosen(10**5, 10**3, memory=1e9).ranked[0].candidate
    one = dataclasses.replace(candidate, starts=(0,), replicas=(2,), policies=("none",), options=jpipe.schedules.NO_OPTIONS, microbatches=8)
    names = [table.schedule(dataclasses.replace(one, schedule=name)) for name in ("pipedream_flush", "pipedream_2bw", "pipedream")]
    late = ["data parallel, one update late (pipedream_2bw)", "data parallel, 0.25 updates late (pipedream)"]
    assert names == ["data parallel", *late]


def test_links_are_printed_with_their_units():
    level = {"count": 4, "bandwidth": 2.5e9, "latency": 3e-5}
    assert table.links(Topology(levels=(level,))) == "links of 2.5 GB/s, 30 us per message; 8 GB/s to host memory"
    shared = "links of 2.5 GB/s, 30 us per message; 1.8 of 4 devices compute at full speed at a time; 8 GB/s to host memory"
    assert table.links(Topology(levels=(level,), cores=1.8)) == shared
    assert table.links(Topology(levels=(level | {"count": 1},))) == "one device, no links; 8 GB/s to host memory"


def test_the_picture_shows_plans_that_do_not_fit_pale():
    choice = chosen(10**5, 10**3, memory=1e9)
    first, second = choice.ranked[:2]
    too_large = dataclasses.replace(second, candidate=dataclasses.replace(second.candidate, over=(0, 1)))
    scatter = draw_choice(choice, [first, too_large], first).axes[0]
    *points, ring = scatter.collections
    assert ring.get_offsets().tolist() == [[max(first.memory), first.samples_per_second]]
    pale = {tuple(points_.get_offsets().tolist()[0]): points_.get_alpha() < 0.5 for points_ in points}
    assert pale == {(max(one.memory), one.samples_per_second): one is second for one in (first, second)}
    assert scatter.get_ylim()[1] > 1.1 * first.samples_per_second  # the ring is not cut


def test_each_schedule_has_a_colour_and_a_marker_of_its_own():
    looks = [look(number) for number in range(len(jpipe.schedules.SCHEDULES))]
    assert len({colour for colour, _ in looks}) == len({mark for _, mark in looks}) == len(looks)
    hundred = [look(number) for number in range(100)]  # of schedules that are added
    assert len(set(hundred)) == 100


def test_the_picture_has_each_schedule_once_in_its_legend_with_its_own_look():
    choice = chosen(10**5, 10**3, memory=1e9)
    first = choice.ranked[0]
    plans = [
        dataclasses.replace(first, candidate=dataclasses.replace(first.candidate, schedule=name)) for name in jpipe.schedules.SCHEDULES
    ]
    scatter = draw_choice(choice, plans, first).axes[0]
    legend = [text.get_text() for text in scatter.get_legend().get_texts()]
    assert legend == [*jpipe.schedules.SCHEDULES, "chosen", "memory of a device"]
    series = scatter.collections[:-1]
    assert len({tuple(points.get_facecolor()[0]) for points in series}) == len(plans)
    assert len({str(points.get_paths()[0].vertices.tolist()) for points in series}) == len(plans)


def test_the_table_has_a_row_for_one_device_that_is_far_behind():
    choice = chosen(10, 10**3, memory=1e9)
    place = next(n for n, one in enumerate(choice.ranked) if one.candidate.devices == 1)
    assert place > 0
    assert [row[:2] for row in table.rows(choice, place)[place - 1 :]][-1] == (str(place + 1), "one device")
    assert len(table.rows(choice, place)) == place + 1 == len(table.rows(choice, place + 1))


def test_it_is_said_if_no_pipeline_pays():
    choice = chosen(10, 10**3, memory=1e9)
    best = choice.ranked[0]
    alone = dataclasses.replace(best, candidate=dataclasses.replace(best.candidate, schedule="gpipe", starts=(0,), replicas=(1,)))
    pipeline = next(one for one in choice.ranked if one.candidate.depth > 1)
    slower = dataclasses.replace(pipeline.simulated, batch_seconds=1.5 * best.seconds)
    words = table.no_pipeline(dataclasses.replace(choice, ranked=(alone, dataclasses.replace(pipeline, simulated=slower))))
    assert words.startswith("no pipeline pays here: one device is as fast or faster; the best one, ")
    assert words.endswith(" is 50.0% slower")
    assert table.no_pipeline(dataclasses.replace(choice, ranked=(pipeline,))) == ""


@pytest.mark.parametrize("faster", [1.02, 1.04])
def test_several_devices_must_be_some_percent_faster_than_one(faster):
    choice = chosen(10, 10**3, memory=1e9)
    one = next(one for one in choice.ranked if one.candidate.depth > 1)
    alone = dataclasses.replace(one, candidate=dataclasses.replace(one.candidate, schedule="gpipe", starts=(0,), replicas=(1,)))
    pipeline = dataclasses.replace(one, simulated=dataclasses.replace(one.simulated, batch_seconds=one.seconds / faster))
    ranked = dataclasses.replace(choice, ranked=()).with_more([alone, pipeline])
    assert ranked.ranked[0].candidate.devices == (1 if faster < 1.03 else one.candidate.devices)
    words = table.no_pipeline(ranked)
    assert words.endswith(" is only 2.0% faster than one device") if faster < 1.03 else words == ""
