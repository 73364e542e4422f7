"""`python -m benchmarks.peers.jax_plain M`: the whole model in one jitted step of M microbatches, one process, no pipeline."""

import sys

import jax

from benchmarks import gpt
from benchmarks.serve import serve, step_by_step
from benchmarks.sizes import PEERS


def main() -> None:
    """Compile, warm up, then run the steps that standard input asks for."""
    microbatches = int(sys.argv[1])
    params = gpt.init(PEERS, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    batch = jax.device_put(gpt.data(PEERS, microbatches))
    step = gpt.plain_step(PEERS, microbatches)
    held = [params, gpt.optimizer().init(params)]
    *held, loss = step(*held, batch)
    first_loss = float(loss)

    def one() -> None:
        nonlocal held
        *held, _ = step(*held, batch)
        jax.block_until_ready(held)

    one()
    serve(step_by_step(one), parameters=count, first_loss=first_loss)


if __name__ == "__main__":
    main()
