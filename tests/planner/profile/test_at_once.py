"""How devices slow each other down: which layers are run, what runs at once, and what follows for the price of a plan."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe_planner import Topology
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.profile import bench
from jpipe_planner.profile.bench import Together, cores, neighbours
from jpipe_planner.profile.model import Model
from jpipe_planner.profile.profile import Profile


def profile_of(sizes=(2, 4, 8), **seconds):
    layers = [
        {
            "id": name,
            "weights": 4,
            "at": [{"forward": rows * forward, "backward": 2 * rows * forward, "outputs": 4, "residuals": {"none": 4}} for rows in sizes],
        }
        for name, forward in seconds.items()
    ]
    return Profile(source="measured", sizes=sizes, inputs=[4] * len(sizes), labels=[4] * len(sizes), layers=layers)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"embed": 1.0, "a": 2.0, "b": 2.0, "c": 2.0, "head": 3.0}, "a b c"),
        ({"embed": 1.0, "a": 2.0, "b": 2.0, "head": 3.0}, "embed a b"),
        ({"embed": 1.0, "a": 2.0, "b": 2.0, "head": 5.0}, "a b head"),
        ({"embed": 1.0, "head": 2.0}, "embed head"),
        ({"embed": 0.0, "a": 0.0, "b": 0.0, "head": 0.1}, "a b head"),
    ],
)
def test_the_neighbours_are_of_the_kind_that_takes_most_of_the_time(seconds, expected):
    kinds = {name: "block" if name in "abc" else name for name in seconds}
    assert neighbours(tuple(seconds), kinds, seconds) == tuple(expected.split())


def loss(outputs, labels):
    return ((outputs - labels) ** 2).sum(), np.float32(labels.size)


def test_all_devices_run_the_same_work_at_once(monkeypatch):
    stack = jpipe.LayerStack({name: lambda rngs: nnx.Linear(4, 4, rngs=rngs) for name in ("in", "a", "b", "out")})
    spec = {rows: jax.ShapeDtypeStruct((rows, 4), np.float32) for rows in (4,)}
    devices = jax.devices()[:2]
    model = Model(stack, lambda rows: (spec[rows], spec[rows]), loss, optax.adam(1e-3), (4,))
    work = Together(model, ("a", "b"), 4, bench.SECONDS / 2, devices)
    assert work.seconds() > 0
    begun, finished = [], []
    clock = iter(range(100))
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(bench.jax, "block_until_ready", finished.append)
    monkeypatch.setattr(work, "_runs", [SimpleNamespace(begin=lambda name, n=n: begun.append((n, name)) or n) for n in range(2)])
    assert work.seconds(count=2) == 0.5
    assert begun == [(n, name) for name in ("forward", "backward") * 2 for n in (0, 1)]
    assert finished == [[0, 1]]


@pytest.mark.parametrize(
    ("rounds", "devices", "expected"),
    [
        ([(1.0, 1.6)], 2, 1.25),
        ([(1.0, 1.0)], 8, 8),
        ([(1.0, 0.5)], 8, 8),
        ([(1.0, 9.0)], 4, 1),
        ([(0.0, 0.0)], 2, 2),
        ([(1.0, 1.6), (9.0, 1.6), (2.0, 3.2)], 2, 1.25),  # something else ran in the second round
        ([(1.0, 1.6), (3.0, 4.8), (2.0, 9.0)], 2, 1.25),
    ],
)
def test_cores_are_between_one_and_the_number_of_devices(rounds, devices, expected):
    assert cores(rounds, devices) == pytest.approx(expected)


@pytest.mark.parametrize("factor", [1.0, 1.25, 1.6, 2.0])
def test_what_computes_at_once_takes_as_much_longer_as_it_did_when_measured(factor):
    profile = profile_of(sizes=(1,), **dict.fromkeys("abcd", 0.01))
    topology = Topology.flat(2, 1e12).model_copy(update={"cores": cores([(1.0, factor)], 2)})
    plans = {name: jpipe.Plan.even("abcd", 2, name, 4) for name in ("naive", "pipedream_2bw")}
    plans["data parallel"] = jpipe.Plan.even("abcd", 1, "pipedream_flush", 4, replicas=2)
    seconds = {name: simulate_plan(plan, profile.stage_costs(plan, 1), topology).batch_seconds for name, plan in plans.items()}
    serial = 4 * 4 * 0.03
    assert seconds["naive"] == pytest.approx(serial, rel=1e-3)  # one device computes at a time
    for name in ("pipedream_2bw", "data parallel"):
        assert seconds[name] == pytest.approx(factor * serial / 2, rel=1e-3)
