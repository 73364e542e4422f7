"""Plans whose compiled stages need more memory than estimated recompute more, then use smaller microbatches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe_planner import Plans
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.analyze import analyze
from jpipe_planner.profile.profile import Profile, TensorProfile
from jpipe_planner.profile.sharded import NO_MESH, Degrees
from jpipe_planner.ranking import confirm as module
from jpipe_planner.ranking import table
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.compiled import compile_stages
from jpipe_planner.ranking.confirm import confirm
from jpipe_planner.ranking.find import Compiled
from jpipe_planner.search.candidates import find_candidates

MB = 10**6


def profile(temporary: int = 0, fixed: int = 0, dispatch: float = 0.0) -> Profile:
    """Return eight equal layers with `temporary` bytes of scratch memory per row and `fixed` bytes in addition."""
    at = [
        {
            "forward": 0.01 * n,
            "backward": 0.02 * n,
            "outputs": 1_000 * n,
            "residuals": {"none": MB * n, "dots_saveable": MB // 2 * n, "full": 1_000 * n},
            "temporary": temporary * n + fixed,
        }
        for n in (1, 2)
    ]
    layers = [{"id": f"layer_{n}", "weights": MB, "optimizer": 2 * MB, "at": at} for n in range(8)]
    return Profile(source="analytic", sizes=(1, 2), inputs=(8, 16), labels=(8, 16), dispatch=dispatch, layers=layers)


def confirmed(memory: float, actual: Profile, schedules=("pipedream_flush",), estimated: Profile | None = None, count: int = 4):
    """Confirm plans estimated by a profile, where compiling finds the memory of another one: the result, and the plans compiled."""
    topology, estimated = Topology.flat(count, 1e12, memory=memory), profile() if estimated is None else estimated
    compiled, reported = [], []

    def compile_stages(choice, ranked):
        compiled.append(ranked.candidate)
        plan = choice.plan(ranked)
        simulated = simulate_plan(plan, actual.stage_costs(plan, ranked.candidate.rows), topology)
        exact = dataclasses.replace(ranked, simulated=simulated)
        return Compiled(exact, ranked.candidate.memory, max(exact.memory) - memory, tuple(range(len(exact.memory))))

    # Stages without replicas: each width would be a kind of its own.
    candidates = find_candidates(estimated, topology, 8, schedules=schedules, replicas=False)
    candidates = [candidate for candidate in candidates if candidate.depth == count]
    tried = {}
    choice = choose(estimated, topology, candidates, tried=tried)
    return confirm(Plans(choice, tuple(candidates), tried), compile_stages, reported.append), compiled, reported


def test_only_stages_that_lack_memory_recompute_more():
    # Four stages of two layers hold 8 MB and, from the first on, the residuals of 4, 3, 2 and 1 microbatches.
    result, compiled, reported = confirmed(18e6, profile(fixed=4 * MB))
    first = result.compiled[0].ranked.candidate
    assert (
        [attempt.ranked.candidate for attempt in reported] == compiled[: len(reported)] == [one.ranked.candidate for one in result.attempts]
    )
    assert reported
    assert set(compiled[0].policies) == {"none"}
    assert first.policies[0] != "none"
    assert first.policies[-1] == "none"
    assert max(result.compiled[0].ranked.memory) <= 18e6
    assert first.rows == compiled[0].rows
    assert result.tried[first].memory == result.compiled[0].ranked.memory


def test_policies_that_save_too_little_are_skipped():
    result, compiled, _ = confirmed(18e6, profile(fixed=7 * MB))
    assert compiled[1].policies[0] == "full"
    assert result.compiled[0].ranked.candidate == compiled[-1]


def test_where_recomputing_everything_is_not_enough_microbatches_become_smaller():
    result, compiled, reported = confirmed(30e6, profile(9 * MB + MB // 2, dispatch=0.5), estimated=profile(dispatch=0.5))
    assert {candidate.rows for candidate in compiled[:-1]} == {2}
    assert result.compiled[0].ranked.candidate.rows == 1
    assert set(result.compiled[0].ranked.candidate.policies) == {"none"}  # no more recomputation than it needs
    assert any(attempt.ranked.candidate.policies[0] == "full" for attempt in reported)


def test_where_nothing_fits_all_attempts_are_reported():
    result, compiled, reported = confirmed(18e6, profile(fixed=30 * MB))
    assert not result.compiled
    assert len(compiled) == len(set(compiled)) == len(reported)
    assert {candidate.policies[0] for candidate in compiled} >= {"none", "full"}
    text = table.attempt(reported[0])
    assert text.startswith("pipedream_flush with 4 stages, 1 row, recompute none: stage 0 lacks ")
    assert text.endswith(" when compiled; next with recompute full at stages 0, 1, 2, 3")


def test_plans_that_may_be_as_fast_are_compiled_too_and_the_best_of_them_is_first():
    result, compiled, _ = confirmed(1e9, profile(), schedules=("pipedream_2bw", "pipedream", "pipedream_flush"))
    kinds = [one.ranked.candidate.schedule for one in result.compiled]
    assert len(compiled) == len(kinds) == 2  # a flush is slower than the error of the prediction
    assert set(kinds) == {"pipedream", "pipedream_2bw"}
    assert max(result.compiled[0].ranked.memory) <= max(result.compiled[1].ranked.memory)
    assert [ranked.candidate.schedule for ranked in result.choice.ranked[2:]] == ["pipedream_flush"]


@pytest.mark.parametrize(("cores", "devices"), [(1.01, 1), (1.5, 2)])
def test_after_compilation_too_one_device_is_chosen_unless_several_pay(cores, devices):
    topology = Topology(levels=[{"count": 2, "bandwidth": 1e12}], device={"memory": 1e9}, cores=cores)
    candidates, tried = find_candidates(profile(), topology, 8, schedules=("pipedream_flush",)), {}
    choice = choose(profile(), topology, candidates, tried=tried)
    assert choice.ranked[0].candidate.devices == devices

    def compile_stages(choice, ranked):
        memory = choice.simulate(ranked.candidate).memory
        return Compiled(ranked, memory, max(memory) - 1e9, tuple(range(len(memory))))

    result = confirm(Plans(choice, tuple(candidates), tried), compile_stages, print)
    assert {one.ranked.candidate.devices for one in result.compiled} >= {devices}
    assert result.choice.ranked[0].candidate.devices == devices
    assert result.compiled[0].ranked is result.choice.ranked[0]


def test_no_more_plans_are_compiled_than_the_limits_say(monkeypatch):
    monkeypatch.setattr(module, "MOST_COMPILED", 1)
    monkeypatch.setattr(module, "MOST_LEAN", 1)
    result, compiled, _ = confirmed(18e6, profile(fixed=30 * MB))
    assert not result.compiled
    assert [set(candidate.policies) for candidate in compiled] == [{"none"}, {"full"}]  # the smallest of all comes last


def test_estimates_that_are_too_high_do_not_rule_out_everything():
    result, compiled, _ = confirmed(20e6, profile(), estimated=profile(fixed=30 * MB))
    assert result.compiled
    assert compiled
    hopeless, compiled, _ = confirmed(5e6, profile())  # weights, gradients and optimizer state alone are more
    assert not hopeless.compiled
    assert not compiled


STACK = jpipe.LayerStack({f"dense_{n}": lambda rngs: nnx.Linear(16, 16, rngs=rngs) for n in range(4)})


def batch(rows):
    return jax.ShapeDtypeStruct((rows, 16), np.float32), jax.ShapeDtypeStruct((rows, 16), np.float32)


def loss(y, labels):
    return jnp.sum((y - labels) ** 2), jnp.asarray(y.size, jnp.float32)


@pytest.mark.slow
def test_programs_that_were_compiled_for_another_plan_are_not_compiled_again(monkeypatch):
    compiled_ones, compiled = [], jpipe.stages._compile.compile_for_analysis

    def counted(program, device):
        compiled_ones.append(program)
        return compiled(program, device)

    monkeypatch.setattr(jpipe.stages._compile, "compile_for_analysis", counted)
    monkeypatch.setattr("jpipe_planner.ranking.compiled.SURE", 0.0)  # all ranks are compiled
    topology = Topology(levels=({"count": 2, "bandwidth": 1e9},), device={"flops": {"float32": 1e9}, "memory": 1e9})
    costs = analyze(STACK, batch, loss, optax.adam(1e-3), [2], topology.device)
    choice = choose(costs, topology, find_candidates(costs, topology, 8, schedules=["pipedream_flush", "pipedream_2bw"]))
    programs, counts = {}, {}
    for ranked in [one for one in choice.ranked if one.candidate.depth == 2]:
        pipe = jpipe.Pipeline(STACK, choice.plan(ranked), loss, optax.adam(1e-3))
        memories = []
        for known in (programs, None):
            compiled_ones.clear()
            memories.append(compile_stages(choice, ranked, pipe, batch(8), jax.devices()[0], known).ranked.memory)
            counts[ranked.candidate.schedule, known is None] = len(compiled_ones)
        assert memories[0] == memories[1]
    (first, _), *_ = counts
    other = ({"pipedream_flush", "pipedream_2bw"} - {first}).pop()
    assert counts[first, False] == counts[first, True]
    assert counts[other, False] <= counts[other, True] - 3  # forward, backward, and both in one


def test_what_the_compiler_finds_too_large_even_with_recomputation_waits_in_host_memory():
    estimated = profile()
    layers = [
        layer.model_copy(update={"at": tuple(at.model_copy(update={"residuals": dict.fromkeys(at.residuals, MB)}) for at in layer.at)})
        for layer in estimated.layers
    ]
    result, _, reported = confirmed(20e6, estimated.model_copy(update={"layers": tuple(layers)}), schedules=("gpipe",))
    assert reported
    assert all(attempt.compiled.ranked.memory[0] > 20e6 for attempt in reported)
    found = result.compiled[0].ranked
    assert found.candidate.offload is not None
    assert found.candidate in result.tried
    assert max(found.memory) <= 20e6


@pytest.mark.parametrize("degrees", [NO_MESH, Degrees(model=2)], ids=str)
def test_on_meshes_only_plans_that_fit_by_their_estimates_are_compiled(degrees):
    estimated, compiled = profile(dispatch=0.5), []
    layers = tuple(layer.model_copy(update={"tensor": TensorProfile(divides=2)}) for layer in estimated.layers)
    estimated = estimated.model_copy(update={"layers": layers})

    def find(memory=None):
        """Return the plans of one stage, where recomputation saves no memory."""
        topology = Topology.flat(4, 1e12, memory=memory)
        found = find_candidates(estimated, topology, 8, schedules=("pipedream_flush",), meshes=[degrees], replicas=False)
        return topology, tuple(one for one in found if one.depth == 1)

    memory = 0.95 * max(next(one for one in find()[1] if one.rows == 2).memory)
    (topology, candidates), tried = find(memory), {}
    choice = choose(estimated, topology, candidates, tried=tried)

    def compile_stages(choice, ranked):
        compiled.append(ranked)
        return Compiled(ranked, ranked.memory, -1.0, tuple(range(len(ranked.memory))))

    assert confirm(Plans(choice, candidates, tried), compile_stages, lambda attempt: None).compiled
    assert all(max(one.memory) <= memory for one in compiled) == (degrees.size > 1)
