"""`python -m benchmarks.peers.jax_plain M`: run the model as one jitted step of M microbatches in one process, without a pipeline."""

import sys

import jax

from benchmarks import gpt
from benchmarks.serve import serve, step_by_step
from benchmarks.sizes import PEERS, warm_up


def main() -> None:
    """Compile, warm up, then run the steps that standard input requests."""
    microbatches = int(sys.argv[1])
    batch = jax.device_put(gpt.data(PEERS, microbatches))
    step = gpt.PlainStep(PEERS, microbatches, batch)
    for _ in range(warm_up(microbatches)):
        step()
    serve(step_by_step(step), parameters=sum(leaf.size for leaf in jax.tree.leaves(step.params)))


if __name__ == "__main__":
    main()
