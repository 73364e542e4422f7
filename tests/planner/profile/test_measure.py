"""Measured profiles: layers timed together, the split of a group's time, and bytes equal to the analytic profile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jpipe
from jpipe_planner.cost.memory import stage_bytes
from jpipe_planner.machine.device import Device
from jpipe_planner.profile.analyze import analyze
from jpipe_planner.profile.measure import Ratios, _as_together, _Neighbours, measure, short_groups, split
from jpipe_planner.profile.model import Costs, Model

LIKE = {"a": "a", "b": "b", "c": "b", "d": "d", "e": "b", "f": "f"}


def roughly(**forward):
    return {(layer_id,): {"forward": seconds, "backward": 2 * seconds, "update": 9.0} for layer_id, seconds in forward.items()}


@pytest.mark.parametrize(
    ("times", "groups"),
    [
        # All long: each distinct layer alone.
        ({"a": 1e-3, "b": 1e-3, "d": 1e-3, "f": 1e-3}, [("a",), ("b",), ("d",), ("f",)]),
        # b and its equals are short, and c stands beside b: e, alone between long ones, has its time from there.
        ({"a": 1e-3, "b": 1e-5, "d": 1e-3, "f": 1e-3}, [("a",), ("b", "c"), ("d",), ("f",)]),
        # All short: one group, if it is not long before it ends.
        ({"a": 1e-5, "b": 1e-5, "d": 1e-5, "f": 1e-5}, [("a", "b", "c", "d", "e", "f")]),
        ({"a": 1e-4, "b": 1e-4, "d": 1e-4, "f": 1e-4}, [("a", "b", "c"), ("d", "e", "f")]),
        # Short ones of which none has a short neighbour are timed alone.
        ({"a": 1e-5, "b": 1e-3, "d": 1e-5, "f": 1e-5}, [("a",), ("b",), ("d",), ("f",)]),
    ],
)
def test_short_neighbours_are_timed_together(times, groups):
    assert short_groups(tuple(LIKE), LIKE, roughly(**times)) == groups


def test_the_time_of_a_group_is_split_by_flops():
    flops = {"a": {"forward": 30.0, "update": 0.0}, "b": {"forward": 10.0, "update": 0.0}}
    assert split({"forward": 4.0, "update": 1.0}, flops) == {"a": {"forward": 3.0, "update": 0.5}, "b": {"forward": 1.0, "update": 0.5}}


def linear(n, m):
    return lambda rngs: nnx.Linear(n, m, rngs=rngs)


class Lookup(nnx.Module):
    """A table of three rows: a number that is none of theirs would give NaN."""

    def __init__(self, rngs):
        self.table = nnx.Embed(3, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.table(x))


def loss(outputs, labels):
    return jnp.square(outputs - labels).sum(), jnp.asarray(labels.size, jnp.float32)


def batch(rows):
    return np.arange(rows) % 3, np.ones((rows, 4), np.float32)


def ones(rows):
    return np.ones((rows, 4), np.float32), np.ones((rows, 4), np.float32)


def test_layers_take_the_time_that_neighbours_take_together():
    alone = {("a", rows): Costs(rows * 1.0, rows * 2.0, 4.0, 7.0) for rows in (1, 2, 4)} | {("b", 2): Costs(20.0, 40.0, 4.0, 7.0)}
    costs = _as_together(alone, {1: Ratios(0.7, 0.9, 0.2, 0.5), 4: Ratios(1.0, 0.8, 0.3, 0.7)})
    assert [costs["a", rows].forward / rows for rows in (1, 2, 4)] == pytest.approx([0.7, 0.9, 1.0])
    assert costs["b", 2] == pytest.approx(Costs(18.0, 36.0, 2.4, 7.0, 0.85 * 54, 0.25 * 54))


def test_ratios_are_those_of_medians_without_dispatch():
    run = object.__new__(_Neighbours)
    run._keys, run._rounds = [("a", 1), ("a", 1)], [(4.2, 3.7, 5.2, 1.1), (9.0, 9.0, 9.0, 9.0), (1.0, 1.0, 1.0, 1.0)]
    ratios = run.ratios({("a", 1): Costs(1.0, 1.5, 0.25, 0.0)}, 0.1)
    assert ratios == pytest.approx((4.0 / 5, 3.6 / 4, 1.0 / 4, 1.0 / 0.5))


@pytest.mark.parametrize("seconds", [(0.1, 0.1, 0.1, 0.1), (0.29, 0.19, 0.39, 9.0), (0.2, 0.1, 9.0, 9.0)])
def test_times_as_short_as_a_start_give_no_ratio(seconds):
    run = object.__new__(_Neighbours)
    run._keys, run._rounds = [("a", 1), ("a", 1)], [seconds]
    assert run.ratios({("a", 1): Costs(0.4, 0.6, 1e-6, 0.0)}, 0.1) == (1.0, 1.0, 0.4, 1.0)


@pytest.mark.slow
def test_a_model_is_measured():
    layers = {"in": Lookup, "tanh": jnp.tanh, "h0": linear(8, 8), "h1": linear(8, 8), "norm": lambda rngs: nnx.BatchNorm(8, rngs=rngs)}
    stack = jpipe.LayerStack({**layers, "out": linear(8, 4)})
    reports, rule = [], optax.sgd(1e-3, momentum=0.9)
    profile = measure(
        stack, batch, loss, rule, [8, 2], seconds=0.01, repetitions=3, progress=lambda done, total: reports.append((done, total))
    )
    assert (profile.source, profile.device, profile.sizes) == ("measured", "cpu", (2, 8))
    assert profile.dispatch > 0
    assert [done for done, _ in reports] == list(range(1, reports[-1][1] + 1))
    by_what_follows = {"temporary_more": 0, "remaking_next": 0, "remaking_more": 0}
    first, second = ([at.model_copy(update=by_what_follows) for at in profile.layers[n].at] for n in (2, 3))
    assert first == second
    assert profile.layers[2].model_copy(update={"id": "h1", "at": ()}) == profile.layers[3].model_copy(update={"at": ()})
    assert all(None not in (at.forward_backward, at.again) for layer in profile.layers for at in layer.at)
    # What shapes tell is the same as without a device.
    analytic = analyze(stack, batch, loss, rule, [2, 8], Device(flops={"float32": 1e9}))
    for layer, expected in zip(profile.layers, analytic.layers, strict=True):
        assert (layer.weights, layer.optimizer, layer.state) == (expected.weights, expected.optimizer, expected.state)
        for at, other in zip(layer.at, expected.at, strict=True):
            assert (at.outputs, at.residuals, at.shared) == (other.outputs, other.residuals, other.shared)
            assert at.flops >= other.flops  # products alone, without what XLA may fuse into them
    # A plan of any cut can be simulated with it.
    plan = jpipe.Plan.even(stack.ids, 3, "pipedream_2bw", 4)
    assert jpipe.simulate(jpipe.lower(plan, 4), profile.stage_costs(plan, 8)).timeline


def test_equal_layers_are_recognized_under_any_optimizer():
    stack = jpipe.LayerStack({name: linear(4, 4) for name in ("in", "a", "b", "c", "out")})
    frozen = {"in": "adam", "a": "adam", "b": "none", "c": "adam", "out": "adam"}
    masked = optax.multi_transform({"adam": optax.adam(1e-3), "none": optax.set_to_zero()}, frozen)
    assert Model(stack, ones, loss, optax.adam(1e-3), (2,)).first_equal == {"in": "in", "a": "a", "b": "a", "c": "a", "out": "out"}
    model = Model(stack, ones, loss, masked, (2,))
    assert model.first_equal == {"in": "in", "a": "a", "b": "b", "c": "a", "out": "out"}
    assert model.stage(["b"], 2).cost.optimizer < model.stage(["a"], 2).cost.optimizer


class Block(linen.Module):
    """A residual block with dropout, whose random numbers differ from those of other blocks."""

    rate: float = 0.1

    @linen.compact
    def __call__(self, x, train):
        return x + linen.Dense(4)(linen.Dropout(self.rate, deterministic=not train)(jnp.tanh(linen.Dense(8)(x))))


class Residual(linen.Module):
    """Blocks, and layers without a block, whose parameters have other names in each."""

    @linen.compact
    def __call__(self, x, train=True):
        for _ in range(2):
            x = jnp.tanh(linen.Dense(4)(x))
        for rate in (0.1, 0.1, 0.5, 0.1):
            x = Block(rate)(x, train)
        for _ in range(3):
            x = jnp.tanh(linen.Dense(4)(x))
        return x


@pytest.mark.exhaustive
def test_layers_cut_from_a_model_are_equal_whatever_their_names_and_random_keys():
    stack = jpipe.LayerStack.from_model(Residual(), jnp.ones((2, 4)))
    assert stack.ids == ("Dense_0", "Dense_1", "Block_0", "Block_1", "Block_2", "Block_3", "Dense_2", "Dense_3", "Dense_4")
    model = Model(stack, ones, loss, optax.adam(1e-3), (2, 4))
    blocks = {"Block_0": "Block_0", "Block_1": "Block_0", "Block_2": "Block_2", "Block_3": "Block_0"}  # one drops more
    dense = {"Dense_0": "Dense_0", "Dense_1": "Dense_1", "Dense_2": "Dense_1", "Dense_3": "Dense_1", "Dense_4": "Dense_4"}
    assert model.first_equal == blocks | dense
    decayed = optax.masked(
        optax.trace(0.9), lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "Dense_3" in str(path), params)
    )
    assert Model(stack, ones, loss, decayed, (2,)).first_equal["Dense_3"] == "Dense_3", "its optimizer differs"
    profile = analyze(stack, ones, loss, optax.adam(1e-3), [2], Device(flops={"float32": 1e9}), policies=("none",))
    assert profile.layers[3].model_copy(update={"id": "Block_0", "at": ()}) == profile.layers[2].model_copy(update={"at": ()})


class Numbered(linen.Module):
    """Residual blocks that are no modules: the names of their parameters sort as Dense_10, Dense_9."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        for _ in range(6):
            x = x + linen.Dense(4)(jnp.tanh(linen.Dense(8)(x)))
        return linen.Dense(4)(x)


@pytest.mark.slow
def test_layers_are_equal_however_their_names_are_sorted():
    stack = jpipe.LayerStack.from_model(Numbered(), jnp.ones((2, 4)))
    assert stack.ids == ("Dense_0", "Dense_1", "Dense_3", "Dense_5", "Dense_7", "Dense_9", "Dense_11", "Dense_13")
    equal = Model(stack, ones, loss, optax.adam(1e-3), (2,)).first_equal
    assert {equal[layer_id] for layer_id in stack.ids[1:-1]} == {"Dense_1"}


def test_the_average_of_the_weights_counts_as_optimizer_state():
    stack = jpipe.LayerStack({name: linear(4, 4) for name in ("in", "out")})
    plain, averaged = (Model(stack, ones, loss, optax.adam(1e-3), (2,), ema_decay=decay).stage(["in"], 2).cost for decay in (None, 0.9))
    assert averaged.optimizer == plain.optimizer + plain.weights


@pytest.mark.exhaustive
def test_the_prediction_of_late_gradients_counts_where_they_are_late():
    ids = ("in", "a", "b", "out")
    stack = jpipe.LayerStack({name: linear(4, 4) for name in ids})
    model = Model(stack, ones, loss, optax.adam(1e-3), (2,), jpipe.Precision(params="bfloat16"), delay_correction=0.5)
    weights = model.stage(["a"], 2).cost.weights
    assert [model.ahead_bytes(name) for name in ids] == [2 * weights] * 4  # in the dtype of the masters
    assert Model(stack, ones, loss, optax.adam(1e-3), (2,)).ahead_bytes("a") == 0
    layers = {name: jpipe.programs.LayerCost(1.0, 2.0, optimizer=3, ahead=model.ahead_bytes(name)) for name in ids}
    layers = {name: dataclasses.replace(layer, residuals={"none": 1}) for name, layer in layers.items()}
    for schedule, m in (("pipedream", 1), ("pipedream_2bw", 4), ("pipedream_flush", 4)):
        plan = jpipe.Plan.even(ids, 4, schedule, m)
        pipe = jpipe.Pipeline(stack, plan, loss, optax.adam(1e-3), delay_correction=0.5, precision=model.precision)
        plain = jpipe.Pipeline(stack, plan, loss, optax.adam(1e-3), precision=model.precision)
        batch = ones(2 * m)
        exact = [more.optimizer - less.optimizer for more, less in zip(pipe.costs(batch), plain.costs(batch), strict=True)]
        assert exact == [cost.optimizer - 3 for cost in jpipe.programs.sum_layer_costs(plan, layers)]
        in_memory = [
            stage_bytes(*[0] * 8, versions=versions, in_flight=1, waiting=0, accumulators=0, replicas=1, ahead=2 * weights)
            for versions in jpipe.simulate(jpipe.lower(plan, 4)).versions_alive
        ]
        assert in_memory == exact
