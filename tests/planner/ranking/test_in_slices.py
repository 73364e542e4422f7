"""Plans in slices: proposed for few microbatches and for little memory, and only where they gain enough."""

import pytest

import jpipe
from jpipe_planner import Profile, Topology, find_plans
from jpipe_planner.profile.profile import TensorProfile
from jpipe_planner.profile.sharded import Degrees, Meshes
from jpipe_planner.ranking import table
from jpipe_planner.search.candidate import Extras


def profile(positions=4096, work=(0.5, 0.5), residuals=10**6) -> Profile:
    """Return eight layers that compute for 1 and 2 seconds."""
    at = [{"forward": 1.0, "backward": 2.0, "outputs": 1000, "residuals": {"none": residuals, "full": 1000}}]
    halves = {"work": work, "residuals": {"none": (residuals / 2, residuals / 2), "full": (500, 500)}, "carry": 200}
    layers = [{"id": f"layer {n}", "weights": 10**8, "at": at, "halves": halves} for n in range(8)]
    return Profile(source="analytic", sizes=[1], inputs=[8], labels=[8], layers=layers, positions=positions)


def topology(memory=0.5e9):
    """Return four devices. Each has memory for two layers with their gradients, not for eight."""
    return Topology.flat(4, 1e9, memory=memory)


def test_few_microbatches_go_through_a_pipeline_in_slices():
    """The bubble of two microbatches in four stages is 60%, in eight slices 3/19."""
    plans = find_plans(profile(), topology(), 2, schedules=["pipedream_flush"])
    bubbles = {table.schedule(one.candidate): one.bubble for one in plans.choice.ranked}
    assert bubbles["pipedream_flush 8 slices"] == pytest.approx(3 / 19, abs=1e-3)
    assert bubbles["pipedream_flush"] == pytest.approx(0.6, abs=1e-3)
    assert next(iter(bubbles)) == "pipedream_flush early 8 slices"
    plan = jpipe.Plan.from_json(plans.choice.plan(plans.choice.ranked[0]).to_json())
    assert (plan.slices, plan.microbatches, plan.depth) == (8, 2, 4)


def test_later_slices_that_attend_to_more_are_shorter():
    plans = find_plans(profile(work=(0.25, 0.5)), topology(), 2, schedules=["pipedream_flush"])
    candidate = plans.choice.ranked[0].candidate
    assert candidate.slices == jpipe.plan.ByCost(count=8, by="cost")
    lengths = plans.choice.profile.slice_lengths(candidate.slices)
    assert list(lengths) == sorted(lengths, reverse=True)
    assert lengths[0] > 2 * lengths[-1]


@pytest.mark.parametrize(
    ("batch", "changes"),
    [(128, {}), (60, {}), (2, {"positions": 0}), (2, {"positions": 500})],
    ids=["the bubble is small", "they gain less than 3%", "rows cannot be cut", "slices would be short"],
)
def test_whole_rows_are_chosen_where_slices_gain_little(batch, changes):
    plans = find_plans(profile(**changes), topology(), batch, schedules=["pipedream_flush"])
    without = find_plans(profile(positions=0), topology(), batch, schedules=["pipedream_flush"])
    assert plans.choice.ranked == without.choice.ranked
    assert plans.choice.ranked[0].candidate.slices is None


def test_slices_save_memory():
    """Whole rows fit only if a stage recomputes. A slice is an eighth of a microbatch, so the first stage holds 11/8 microbatches."""
    plans = find_plans(profile(residuals=10**9), topology(5e9), 32, schedules=["pipedream_flush"])
    best, whole = plans.choice.ranked[0], next(one for one in plans.choice.ranked if one.candidate.slices is None)
    assert (best.candidate.num_slices, set(best.candidate.policies)) == (8, {"none"})
    assert "full" in whole.candidate.policies
    assert best.memory[0] == pytest.approx(4e8 + 11 / 8 * 2e9, rel=1e-3)


def test_all_plans_have_the_slices_that_are_asked_for():
    plans = find_plans(profile(), topology(1e9), 16, extras=Extras(slices=(2048, 1024, 1024)))
    assert {one.slices for one in plans.candidates} == {(2048, 1024, 1024)}
    schedules = {one.candidate.schedule for one in plans.choice.ranked}
    assert {"pipedream_flush", "interleaved_1f1b", "zb_h1"} <= schedules
    assert all(jpipe.schedules.SCHEDULES[name].takes_slices for name in schedules)


def test_without_a_flush_updates_of_slices_may_wait_for_other_stages():
    plans = find_plans(profile(), topology(1e9), 16, extras=Extras(slices=2), global_norm=True)
    assert any(one.candidate.options.vertical_sync for one in plans.choice.ranked)


def test_slices_are_tried_with_compressed_messages_and_in_host_memory():
    links = jpipe.plan.Links(activations="int8", gradients="bfloat16")
    plans = find_plans(profile(), topology(), 2, schedules=["pipedream_flush"], extras=Extras(links=links))
    assert (plans.choice.ranked[0].candidate.slices, plans.choice.ranked[0].candidate.links) == (8, links)
    machine = Topology(levels=({"count": 4, "bandwidth": 1e9},), device={"memory": 4e9, "host": {"bandwidth": 1e12}})
    plans = find_plans(profile(residuals=10**9), machine, 8, schedules=["gpipe"], offload=True, extras=Extras(slices=4, links=links))
    moved = next(one for one in plans.choice.ranked if one.candidate.offload)
    plan, costs = plans.choice.plan(moved), plans.choice.profile.stage_costs(plans.choice.plan(moved), moved.candidate.rows)
    run, without = (jpipe.simulate(jpipe.lower(each, 4), costs) for each in (plan, plan.model_copy(update={"offload": None})))
    assert moved.memory == moved.candidate.most_of_replicas(run.peak_bytes)
    assert max(run.peak_bytes) <= 4e9 < max(without.peak_bytes)


def test_slices_are_tried_with_agreements_and_on_meshes():
    agree = jpipe.plan.Agreement(every=4)
    plans = find_plans(profile(), Topology.flat(8, 1e9, memory=2e9), 4, schedules=["pipedream_flush"], extras=Extras(agree=agree))
    assert (8, agree, (2,) * 4) in {(one.candidate.num_slices, one.candidate.agree, one.candidate.replicas) for one in plans.choice.ranked}
    alone = find_plans(profile(), topology(), 2, schedules=["pipedream_flush"])
    plans = find_plans(on_meshes(), Topology.flat(8, 1e15, memory=0.5e9), 2, schedules=["pipedream_flush"], meshes=[Degrees(model=2)])
    plan = plans.choice.plan(plans.choice.ranked[0])
    assert (plan.slices, plan.stages[0].shape) == (8, {"model": 2})
    seconds, on_one = ({table.schedule(one.candidate): one.seconds for one in each.choice.ranked} for each in (plans, alone))
    assert seconds["pipedream_flush 8 slices"] == pytest.approx(on_one["pipedream_flush 8 slices"] / 2)


def on_meshes(**fields) -> Profile:
    """Return the layers of `profile` with shares that tensor parallelism shards."""
    plain = profile()
    shares = TensorProfile(weights=1.0, compute=1.0, outputs=0.0, residuals={"none": 1.0}, divides=8, **fields)
    return plain.model_copy(update={"layers": tuple(layer.model_copy(update={"tensor": shares}) for layer in plain.layers)})


def test_each_slice_sums_its_share_and_waits_as_often_as_whole_rows():
    """A ring of two devices sends the bytes of a sum once; a sum in each slice has a latency of its own."""
    link = Topology.flat(8, bandwidth=1e3, latency=0.25)
    (cost,) = (
        Meshes(on_meshes(reduced=4000.0, reductions=2), link).of(Degrees(model=2))[0].stage_costs(plan, 1)
        for plan in [jpipe.Plan.even([f"layer {n}" for n in range(8)], 1, "gpipe", 1, slices=(1024, 3072), mesh={"model": 2})]
    )
    assert [each.forward for each in cost[0].by_slice] == pytest.approx(
        [8 * (share * (1 / 2 + 4) + 2 * 2 * 0.25) for share in (1 / 4, 3 / 4)]
    )
