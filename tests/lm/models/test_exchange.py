"""Tokens that are sent to the devices of their experts, with XLA's exchange, which CPUs do not have, replaced by gathers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jpipe.context import StageMesh, tracing_for, tracing_on
from jpipe_lm.config.model.experts_section import ExpertsConfig
from jpipe_lm.models.experts import on_stage
from jpipe_lm.models.experts.exchange import sent

RNG = np.random.default_rng(0)
CONFIG = ExpertsConfig(count=8, per_token=2, mlp_width=12, balance_loss=0.5, z_loss=0.25)
SIZES = {"expert 2": {"expert": 2}, "expert 4": {"expert": 4}, "all axes": {"data": 2, "expert": 2, "model": 2}}
ROUTED = {"evenly": range(8), "to one device": (0, 1), "to two of four": (3, 4, 5), "to the last": (6, 7)}


def all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Return what `jax.lax.ragged_all_to_all` does; NaN if the sizes do not agree."""
    here, rows = jax.lax.axis_index(axis_name), jnp.arange(len(output), dtype=jnp.int32)
    everything = [jax.lax.all_gather(array, axis_name) for array in (operand, input_offsets, send_sizes, output_offsets)]
    for source in range(len(recv_sizes)):
        data, start, size, at = (array[source] if n == 0 else array[source, here] for n, array in enumerate(everything))
        values = data.at[start + rows - at].get(mode="clip")
        output = jnp.where(((rows >= at) & (rows < at + size))[:, None], values, output)
        output = jnp.where((size == recv_sizes[source]) & (at + size <= len(output)) & (start + size <= len(data)), output, jnp.nan)
    return output


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch):
    """Trace for GPUs, with an exchange that CPUs have."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", all_to_all)
    with tracing_for("gpu"):
        yield


def mesh_of(sizes):
    """Return a mesh of some devices."""
    devices = jax.devices()[: math.prod(sizes.values())]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("routed", ROUTED)
@pytest.mark.parametrize("name", SIZES)
def test_experts_compute_what_is_sent_as_on_one_device(name, routed):
    """Outputs, router numbers and all gradients; some devices get no token, others all."""
    sizes, shapes = SIZES[name], {"expand": (8, 16, 12), "gate": (8, 16, 12), "contract": (8, 12, 16)}
    mesh, axes = mesh_of(sizes), {"expert": "expert", **({"mlp": "model"} if "model" in sizes else {})}
    rows = tuple(axis for axis in sizes if axis != "model")
    with jax.enable_x64(True):
        kernels = {name: jnp.asarray(RNG.normal(size=shape)) for name, shape in shapes.items()}
        x, router, is_counted = RNG.normal(size=(4, 6, 16)), RNG.normal(size=(16, 8)), jnp.ones((4, 6), bool)
        x[..., 0], router[0] = 1, [0 if e in ROUTED[routed] else -30 for e in range(8)]

        def total(x, router, kernels):
            y, _, probabilities, squares = on_stage(CONFIG, "silu")(x, is_counted, {"kernel": router}, kernels)
            return jnp.sin(y).sum() + (probabilities**2).sum() + squares.sum(), y

        def on_mesh(*arguments):
            with tracing_on(StageMesh(mesh.abstract_mesh, axes, rows)):
                return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*arguments)

        arguments = jnp.asarray(x), jnp.asarray(router), kernels
        expected = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arguments)
        actual = jax.jit(on_mesh, in_shardings=NamedSharding(mesh, P()))(*arguments)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10), actual, expected)


def test_a_token_is_sent_once_to_each_device_of_its_experts():
    """With devices that send back what they get, a token comes back once from each of them."""
    mesh, x = mesh_of({"expert": 4}), RNG.normal(size=(24, 3)).astype(np.float32)
    chosen = np.stack([RNG.permutation(8)[:3] for _ in x]).astype(np.int32)
    weights = np.ones((24, 3), np.float32)

    def local(x, weights, chosen):
        return sent(lambda x, weights, chosen: x, x, weights, chosen, over="expert", rows=("expert",), count=2)

    y = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))(x, weights, chosen)
    np.testing.assert_allclose(y, x * [[len({*numbers // 2})] for numbers in chosen], rtol=1e-6)
