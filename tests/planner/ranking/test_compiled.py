"""The memory of a plan from its compiled stages is exact and decides whether it fits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe_planner.machine.device import Device
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.analyze import analyze
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking import compiled as module
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.compiled import Repeats, compile_repeated, compile_stages, equal_stages, find_repeats
from jpipe_planner.search.candidates import find_candidates

STACK = jpipe.LayerStack({f"dense_{n}": lambda rngs: nnx.Linear(16, 16, rngs=rngs) for n in range(4)})
RULE = optax.sgd(1e-3, momentum=0.9)  # one object, so that tests share what is compiled with it
FLOPS = {"flops": {"float32": 1e9}, "memory": 1e9}


def batch(rows):
    return jax.ShapeDtypeStruct((rows, 16), np.float32), jax.ShapeDtypeStruct((rows, 16), np.float32)


def loss(y, labels):
    return jnp.sum((y - labels) ** 2), jnp.asarray(y.size, jnp.float32)


def compiled_choice(schedule, memory=1e9):
    topology = Topology(levels=({"count": 2, "bandwidth": 1e9},), device=FLOPS | {"memory": memory})
    profile = analyze(STACK, batch, loss, RULE, [2], topology.device)
    roomy = topology.model_copy(update={"device": topology.device.model_copy(update={"memory": 1e9})})
    choice = choose(profile, roomy, find_candidates(profile, roomy, 8, schedules=[schedule]))
    ranked = next(one for one in choice.ranked if one.candidate.depth == 2)
    pipe = jpipe.Pipeline(STACK, choice.plan(ranked), loss, RULE)
    return compile_stages(dataclasses.replace(choice, topology=topology), ranked, pipe, batch(8), jax.devices()[0]), pipe


@pytest.mark.exhaustive
@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream_flush", "pipedream_2bw"])
def test_where_simulating_takes_too_long_the_closed_form_has_the_exact_bytes(schedule, monkeypatch):
    monkeypatch.setattr(module, "SURE", 0.0)  # all ranks are compiled
    exact, pipe = compiled_choice(schedule)
    monkeypatch.setattr(module, "simulate_plan", lambda *_: None)
    closed, _ = compiled_choice(schedule)
    costs = pipe.costs(batch(8), compiled_for=jax.devices()[0])
    for s, (estimate, truth) in enumerate(zip(closed.ranked.memory, exact.ranked.memory, strict=True)):
        assert truth - 64 <= estimate <= 1.5 * truth  # the closed form knows no weights of microbatches, numbers that ride with messages
        assert estimate >= costs[s].temporary + costs[s].weights + costs[s].optimizer  # XLA's numbers, not the estimate's


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.25G of 15.75G hbm. Exceeded hbm capacity by 1.50G.",
        "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (17.25G) exceeds available HBM (15.75G)",
    ],
)
def test_a_plan_whose_program_exceeds_the_memory_of_the_compiler_does_not_fit(message, monkeypatch):
    costs = jpipe.Pipeline.costs

    def refuse(self, batch, *, stages, **options):
        if 1 in stages:
            raise jax.errors.JaxRuntimeError(message)
        return costs(self, batch, stages=stages, **options)

    monkeypatch.setattr(jpipe.Pipeline, "costs", refuse)
    compiled, _ = compiled_choice("gpipe")
    assert not compiled.fits
    assert compiled.lacking == 1.5 * 2**30
    assert compiled.ranked.memory[1] == 1e9 + 1.5 * 2**30
    assert compiled.ranked.memory[0] < 1e9
    assert compiled.ranks == (0, 1)


@pytest.mark.slow
def test_other_errors_of_the_compiler_are_not_caught(monkeypatch):
    def fail(*args, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: libdevice is missing")

    monkeypatch.setattr(jpipe.Pipeline, "costs", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="libdevice"):
        compiled_choice("gpipe")


@pytest.mark.slow
def test_a_plan_fits_up_to_its_last_byte():
    most = max(compiled_choice("gpipe")[0].ranked.memory)
    assert compiled_choice("gpipe", memory=most)[0].fits
    tight = compiled_choice("gpipe", memory=most - 1)[0]
    assert not tight.fits
    assert tight.lacking == 1


@pytest.mark.slow
def test_an_estimate_that_is_too_high_is_reported_as_a_lower_bound():
    exact = compiled_choice("gpipe")[0]
    doubled = dataclasses.replace(exact, estimated=tuple(2 * size for size in exact.ranked.memory))
    assert doubled.errors == (1.0, 1.0)
    assert dataclasses.replace(exact, estimated=(0, 0)).errors == (-1.0, -1.0)


IDS = tuple("abcdefgh")


@pytest.mark.parametrize(
    ("fields", "heavier", "shared", "expected"),
    [
        ({}, "", (), (0, 1, 1, 3)),
        ({}, "e", (), (0, 1, 2, 3)),
        ({}, "", ("a", "h"), (0, 1, 1, 3)),
        ({}, "", ("a", "c"), (0, 1, 2, 3)),
        ({"schedule": "gpipe", "recompute": ["none", "none", "full", "full"]}, "", (), (0, 1, 2, 3)),
        ({"schedule": "pipedream_2bw"}, "", (), (0, 1, 1, 3)),
        ({"schedule": "pipedream", "microbatches": 1}, "", (), (0, 1, 2, 3)),  # three versions, and two
    ],
)
def test_equal_stages_are_those_in_the_middle_with_equal_layers_ops_and_versions(fields, heavier, shared, expected):
    costs = {name: jpipe.programs.LayerCost(1.0, 2.0, weights=8 if name == heavier else 4, residuals={"none": 1}) for name in IDS}
    parameters = [jpipe.programs.SharedCost(layers=shared, weights=4, accumulators=4)] if shared else []
    assert equal_stages(jpipe.Plan.even(IDS, 4, **{"microbatches": 8} | fields), costs, parameters) == expected


@pytest.mark.parametrize(("share", "expected"), [(1.1, [[0], [1, 3]]), (0.9, [[0]]), (1.3, [[0]])])
def test_the_fullest_rank_is_compiled_first_and_of_equal_stages_one_unless_they_fit_for_sure(monkeypatch, share, expected):
    layers = [
        {
            "id": name,
            "weights": 1000,
            "at": [{"forward": 1.0, "backward": 2.0, "outputs": 4, "residuals": {"none": 4000, "full": 4}, "temporary": 10}],
        }
        for name in IDS
    ]
    profile = Profile(source="analytic", sizes=[1], inputs=[4], labels=[4], layers=layers)
    topology = Topology(levels=({"count": 4, "bandwidth": 1e9},), device={"memory": 1e9})
    candidates = find_candidates(profile, topology, 8, schedules=["gpipe"], replicas=False)
    choice = choose(profile, topology, candidates)
    ranked, asked = next(one for one in choice.ranked if one.candidate.depth == 4), []
    limited = topology.model_copy(update={"device": Device(memory=share * max(ranked.memory))})
    choice = dataclasses.replace(choice, topology=limited)
    plan = choice.plan(ranked)

    def costs(self, batch, *, compiled_for, stages, programs):
        asked.append(stages)
        estimates = enumerate(profile.stage_costs(plan, 1))
        return tuple(dataclasses.replace(cost, temporary=100 * s + 50 if s in stages else 0) for s, cost in estimates)

    monkeypatch.setattr(jpipe.Pipeline, "costs", costs)
    pipe = jpipe.Pipeline(jpipe.LayerStack(dict.fromkeys(IDS, jnp.tanh)), plan, loss, RULE)
    compiled = compile_stages(choice, ranked, pipe, batch(8), jax.devices()[0])
    assert asked == expected
    assert compiled.fits == (share > 1)
    assert compiled.ranks == ((0, 1, 2, 3) if share == 1.1 else (0,))
    more = [true - estimate for true, estimate in zip(compiled.ranked.memory, compiled.estimated, strict=True)]
    temporary = [cost.temporary for cost in profile.stage_costs(plan, 1)]
    found = (50, 150, 150, 350) if share == 1.1 else (50, *temporary[1:])  # that of stage 2 is stage 1's
    assert more == [new - old for new, old in zip(found, temporary, strict=True)]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("a" + 16 * "b" + "c", Repeats(1, 1, 16)),
        ("a" + 15 * "b" + "c", None),
        ("a" + 17 * "bc" + "d", Repeats(1, 2, 17)),
        ("x" + 16 * "abcd" + "abx", Repeats(1, 4, 16)),
        (17 * "a" + "b" + 20 * "c", Repeats(18, 1, 20)),
        ("a", None),
    ],
)
def test_the_longest_part_of_a_stage_that_repeats_is_found(kinds, expected):
    assert find_repeats([*map(ord, kinds)]) == expected


def test_fewer_repetitions_keep_the_first_and_the_last_one():
    layers = ("in", *(f"{kind}{n}" for n in range(9) for kind in "ab"), "out")
    assert Repeats(1, 2, 9).fewer(layers, 4) == ("in", "a0", "b0", "a1", "b1", "a7", "b7", "a8", "b8", "out")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.wide, self.narrow = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.narrow(jnp.tanh(self.wide(self.norm(x))))


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("recompute", "mesh", "schedule"),
    [
        ("none", {}, "pipedream_flush"),
        ("full", {}, "pipedream_2bw"),
        ("elementwise", {"mesh": {"data": 2}, "fsdp": True}, "pipedream_flush"),
        ("none", {}, "zb_h1"),
    ],
)
def test_what_is_extrapolated_from_few_equal_layers_is_what_all_of_them_need(recompute, mesh, schedule):
    blocks = {f"block_{n}": Block for n in range(24)}
    stack = jpipe.LayerStack({"in": lambda rngs: nnx.Linear(16, 8, rngs=rngs), **blocks, "out": lambda rngs: nnx.Linear(8, 16, rngs=rngs)})
    parts = (stack.ids[:12], stack.ids[12:])
    plan = jpipe.Plan(schedule=schedule, microbatches=4, stages=[{"layers": ids, "recompute": recompute, **mesh} for ids in parts])
    pipe, devices = jpipe.Pipeline(stack, plan, loss, RULE), jax.devices()
    repeats = {0: Repeats(1, 1, 11), 1: Repeats(0, 1, 13)}
    extrapolated = compile_repeated(pipe, repeats, batch(2048), stages=[0, 1], compiled_for=devices)
    exact = pipe.costs(batch(2048), compiled_for=devices)
    for one, other in zip(extrapolated, exact, strict=True):
        assert one.temporary == pytest.approx(other.temporary, rel=0.005)
        assert dataclasses.replace(one, temporary=0) == dataclasses.replace(other, temporary=0)
