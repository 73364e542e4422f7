"""`python -m benchmarks.peers.jax_spmd M PROCESS PROCESSES PORT`: run GPipe as one jitted SPMD program, written without jpipe.

Each process holds a part of the blocks; embedding and head are in all processes. A scan over m + d - 1 ticks runs the blocks in every
process and sends the result with `ppermute`; results while the pipeline fills and drains are dropped.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import gpt
from benchmarks.serve import serve, step_by_step
from benchmarks.sizes import PEERS, warm_up

WHOLE, CUT = PartitionSpec(), PartitionSpec("stage")


def main() -> None:
    """Compile, warm up, then run the steps that standard input requests."""
    microbatches, process, processes, port = map(int, sys.argv[1:5])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    params = gpt.init(PEERS, jax.random.key(0))
    params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])
    specs = {"embedding": WHOLE, "blocks": CUT, "head": WHOLE}
    params = {name: jax.tree.map(lambda leaf, name=name: _spread(leaf, mesh, specs[name]), part) for name, part in params.items()}
    batch = jax.tree.map(lambda leaf: _spread(leaf.reshape(microbatches, -1, *leaf.shape[1:]), mesh, WHOLE), gpt.data(PEERS, microbatches))
    step = _step(jax.shard_map(_loss, mesh=mesh, in_specs=(specs, WHOLE, WHOLE), out_specs=WHOLE))
    optimizer_state = jax.jit(gpt.optimizer().init)(params)

    def one() -> None:
        nonlocal params, optimizer_state
        params, optimizer_state, loss = step(params, optimizer_state, batch)
        jax.block_until_ready((params, loss))

    for _ in range(warm_up(microbatches)):
        one()
    serve(step_by_step(one), parameters=sum(leaf.size for leaf in jax.tree.leaves(params)))


def _step(loss: Any) -> Any:
    def step(params: Any, optimizer_state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, optimizer_state = gpt.optimizer().update(gradients, optimizer_state, params)
        return optax.apply_updates(params, updates), optimizer_state, value

    return jax.jit(step, donate_argnums=(0, 1))


def _loss(params: Any, tokens: jax.Array, labels: jax.Array) -> jax.Array:
    """Compute the mean loss of a batch in each process, with its own blocks and all microbatches."""
    stages, stage = jax.lax.axis_size("stage"), jax.lax.axis_index("stage")
    microbatches, rows, positions = tokens.shape
    onward = [(s, (s + 1) % stages) for s in range(stages)]

    def tick(arrived: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        entering = gpt.embed(PEERS, params["embedding"], tokens[jnp.clip(t, 0, microbatches - 1)])
        x = jnp.where(stage == 0, entering, arrived)
        for i in range(PEERS.layers // stages):
            x = gpt.block(PEERS, jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]), x)
        return jax.lax.ppermute(x, "stage", onward), x

    nothing = jax.lax.pcast(jnp.zeros((rows, positions, PEERS.width)), "stage", to="varying")
    _, outputs = jax.lax.scan(tick, nothing, jnp.arange(microbatches + stages - 1))
    loss = gpt.mean_loss(gpt.head(PEERS, params["head"], outputs[stages - 1 :]), labels)
    return jax.lax.psum(jnp.where(stage == stages - 1, loss, 0.0), "stage")


def _spread(leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Build an array over all processes from the part of each."""
    values = np.asarray(leaf)
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


if __name__ == "__main__":
    main()
