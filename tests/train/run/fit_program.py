"""The program of the two processes in test_fit.py: `python -m tests.train.run.fit_program ADDRESS INDEX FOLDER`."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
import jpipe_train

X = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
ARRAYS = X, X[:, :1] * X[:, 1:2]


def squares(outputs, labels):
    """Return the sum of the squared errors, and their number."""
    return ((outputs - labels) ** 2).sum(), jnp.asarray(labels.size)


def pipeline(schedule="pipedream_2bw") -> jpipe.Pipeline:
    """Return a pipeline of two stages."""
    stack = jpipe.LayerStack(
        {"in": lambda rngs: nnx.Linear(4, 8, rngs=rngs), "act": jnp.tanh, "out": lambda rngs: nnx.Linear(8, 1, rngs=rngs)}
    )
    return jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, schedule, 2), squares, optax.sgd(0.1))


def main(address: str, index: int, folder: Path) -> None:
    """Train until the callback of process 0 stops the run; that of process 1 would stop it earlier."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=index, coordinator_bind_address=address if index == 0 else None)
    stops = SimpleNamespace(on_step=lambda record: "stop" if record.step == (2, 0)[index] else None)
    arguments = {"steps": 50, "batch_size": 8, "eval_data": ARRAYS, "eval_every": 4, "log": ()}
    result = jpipe_train.fit(pipeline(), ARRAYS, **arguments, run_dir=folder, callbacks=[stops])
    print(f"process {index}: {result.summary.steps} steps, loss {result.summary.val_loss_after!r}, {result.folder}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
