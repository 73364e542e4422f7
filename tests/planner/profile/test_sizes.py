"""Numbers at all microbatch sizes: linear ones are counted at few sizes, others at all, and both are those of each size by itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe_planner.profile.model import Meter, Model, count_bytes
from jpipe_planner.profile.sizes import count_at, count_by_policy

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.parametrize(
    ("count", "counted"),
    [
        (lambda rows: {"bytes": 5 + 12 * rows, "flops": 0.1 * rows}, [1, 4, 16]),
        (lambda rows: {"bytes": -(-rows // 4), "flops": 0.1 * rows}, [1, 2, 4, 8, 16]),
        (lambda rows: {"bytes": 7, "flops": 0.1 * rows**2}, [1, 2, 4, 8, 16]),
    ],
)
def test_only_numbers_that_are_not_linear_are_counted_at_all_sizes(count, counted):
    calls = []
    at, is_linear = count_at(SIZES, lambda rows: calls.append(rows) or count(rows))
    assert sorted(calls) == counted
    assert is_linear == (len(counted) == 3)
    for rows in SIZES:
        assert at[rows]["bytes"] == count(rows)["bytes"]
        assert at[rows]["flops"] == pytest.approx(count(rows)["flops"])


@pytest.mark.parametrize("sizes", [(3,), (2, 6), (1, 3, 8)])
def test_few_sizes_are_all_counted(sizes):
    assert count_at(sizes, lambda rows: 2 * rows)[0] == {rows: 2 * rows for rows in sizes}


def test_policies_are_counted_at_two_sizes_where_no_recomputation_is_linear():
    calls = []

    def count(rows, policy):
        calls.append((policy, rows))
        return rows * len(policy)

    numbers, is_linear = count_by_policy(SIZES, ["none", "full!"], count)
    assert is_linear
    assert calls == [("none", 1), ("none", 4), ("none", 16), ("full!", 1), ("full!", 16)]
    assert numbers == {(rows, policy): rows * len(policy) for rows in SIZES for policy in ("none", "full!")}


class Padded(nnx.Module):
    """A layer that computes a multiple of four rows, as a capacity of experts is rounded up."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (6, 6)))

    def __call__(self, x):
        padded = jnp.pad(x, ((0, -len(x) % 4), (0, 0)))
        return jnp.tanh(padded @ self.kernel[...])[: len(x)]


def squares(outputs, labels):
    return ((outputs - labels) ** 2).sum(), jnp.asarray(labels.size, jnp.float32)


def floats(rows):
    return tuple(jax.ShapeDtypeStruct((rows, 6), np.float32) for _ in "xy")


def linear(rngs):
    return nnx.Linear(6, 6, rngs=rngs)


def pad(x):
    return x, jnp.pad(x, ((0, -len(x) % 4), (0, 0)))


def crop(both):
    x, padded = both
    return padded[: len(x)]


@pytest.mark.parametrize("middle", [{"mid": Padded}, {"mid": linear}, {"pad": pad, "crop": crop}])  # a linear pair of two that are not
def test_the_bytes_of_a_layer_are_those_of_each_size_alone(middle):
    stack, policies = jpipe.LayerStack({"in": linear, **middle, "out": linear}), ("none", "full")
    costs = count_bytes(Model(stack, floats, squares, optax.sgd(0.1), SIZES), policies, Meter(None, 0))
    for rows in (2, 8):
        alone = count_bytes(Model(stack, floats, squares, optax.sgd(0.1), (rows,)), policies, Meter(None, 0))
        for name, by_policy in alone.items():
            for policy in policies:
                assert dataclasses.asdict(costs[name][rows, policy]) == dataclasses.asdict(by_policy[rows, policy])
