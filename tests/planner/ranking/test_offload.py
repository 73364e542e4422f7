"""Plans that fit because parts of their state wait in host memory: exact memory, the least that suffices, and what the moves cost."""

import dataclasses

import numpy as np
import pytest

import jpipe
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.offload import find_offloads, offload_bases
from jpipe_planner.search.candidates import find_candidates

MB = 10**6
AT = {"forward": 0.01, "backward": 0.02, "outputs": 4 * MB, "residuals": {"none": 8 * MB, "full": 4 * MB}}
LAYERS = [{"id": f"layer_{n}", "weights": 10 * MB, "optimizer": 20 * MB, "at": [AT]} for n in range(4)]
PROFILE = Profile(source="analytic", sizes=(1,), inputs=(4 * MB,), labels=(8,), layers=LAYERS)
SCHEDULES = "gpipe", "pipedream_flush", "pipedream"


def candidates_and_choice(memory, schedule, host=None):
    """Search plans for two devices with so many bytes."""
    device = {"memory": memory, "host": host or {}}
    topology = Topology(levels=({"count": 2, "bandwidth": 1e12},), device=device)
    candidates = find_candidates(PROFILE, topology, 8, schedules=[schedule], replicas=False)
    return candidates, choose(PROFILE, topology, candidates)


def tight(schedule, **host):
    """Search plans for devices with a twentieth less than any plan needs: the choice, those that fit with host memory, and the bytes."""
    candidates, _ = candidates_and_choice(1.0, schedule)
    memory = 0.95 * min(max(candidate.memory) for candidate in candidates)
    candidates, choice = candidates_and_choice(memory, schedule, host)
    assert not choice.ranked
    return choice, find_offloads(choice, offload_bases(candidates)), memory


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_model_that_does_not_fit_two_devices_does_with_host_memory(schedule):
    choice, found, memory = tight(schedule, bandwidth=1e9)
    assert found
    for ranked in found:
        plan = choice.plan(ranked)
        costs = PROFILE.stage_costs(plan, 1)
        run, without = (jpipe.simulate(jpipe.lower(each, 8), costs) for each in (plan, plan.model_copy(update={"offload": None})))
        assert ranked.memory == ranked.candidate.memory == plan.predicted.peak_bytes == run.peak_bytes
        assert ranked.simulated.host_bytes == run.host_bytes
        assert max(run.peak_bytes) <= memory < max(without.peak_bytes)
        assert [bool(size) for size in run.host_bytes] == [size > memory for size in without.peak_bytes], "only where memory is lacking"
        assert ranked.seconds >= ranked.candidate.on_device > 0


def test_what_is_moved_least_often_comes_first_and_what_moves_cost_is_shown():
    choice, found, _ = tight("gpipe", bandwidth=1e8)
    assert [name for name, stages in found[0].candidate.offload if stages] == ["optimizer"]
    choice = choice.with_more(found, len(found))
    slower = choice.ranked[0].seconds / choice.ranked[0].candidate.on_device - 1
    assert slower > 0.1
    assert table.schedule(choice.ranked[0].candidate).startswith("gpipe offload optimizer")
    assert any(f"offload {slower:.1%} slower" in cell for cell in table.rows(choice, 1)[0])


def test_host_memory_is_limited_too():
    _, found, _ = tight("gpipe")
    used = max(found[0].simulated.host_bytes)
    assert all(max(one.simulated.host_bytes) <= used for one in tight("gpipe", memory=used)[1])
    assert not tight("gpipe", memory=0)[1]
    assert not tight("gpipe", memory=used / 4)[1]


def test_bases_lack_memory_or_recompute_and_are_the_leanest_and_the_fastest_of_each_kind():
    candidates, _ = candidates_and_choice(1.0, "gpipe")
    whole = dataclasses.replace(candidates[0], policies=("none",) * candidates[0].depth, over=None)
    lean, fast = (
        dataclasses.replace(whole, over=(0, lacks), seconds=seconds, microbatches=many * whole.microbatches)
        for lacks, seconds, many in ((5, 2.0, 1), (9, 1.0, 2))
    )
    other = dataclasses.replace(whole, schedule="naive", policies=("full",) * whole.depth)
    assert offload_bases([fast, other, lean, whole]) == [other, lean, fast]


def test_cuts_for_which_only_host_memory_suffices_are_found():
    """Of these layers no cut that needs least memory fits with host memory; another one does."""
    random = np.random.default_rng(1015)
    count = int(random.integers(8, 65))
    seconds, outputs, weights = random.exponential(5e-3, count), 10 ** random.uniform(5, 7.3, count), 10 ** random.uniform(5, 8, count)
    layers = []
    for n in range(count):
        residuals = {"none": int(3 * outputs[n]), "full": int(outputs[max(n - 1, 0)])}
        at = {"forward": float(seconds[n]), "backward": 2 * float(seconds[n]), "outputs": int(outputs[n]), "residuals": residuals}
        layers.append({"id": f"layer {n}", "weights": int(weights[n]), "optimizer": int(weights[n]), "update": 1e-4, "at": [at]})
    profile = Profile(source="analytic", sizes=(1,), inputs=[10**5], labels=[100], layers=layers)
    device = {"memory": 340_314_116, "reserved": 0, "overlap": "transfers and sums"}
    topology = Topology(levels=[{"count": 8, "bandwidth": 1e9, "latency": 5e-5}], device=device)
    candidates = find_candidates(profile, topology, 16, schedules=["pipedream"])
    choice = choose(profile, topology, candidates)
    assert not choice.ranked
    assert find_offloads(choice, offload_bases(candidates, choice.lacks_in_host)[:1])
    assert not find_offloads(choice, offload_bases(candidates)[:2])
