"""`python -m benchmarks.hosts.accuracy_program TASK SAMPLES PLAN HOSTS PROCESS COORDINATOR`: the training program of one host.

PLAN is a file. For each number on standard input it trains that many steps and then validates.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jpipe
from benchmarks.hosts.network import sent_bytes
from benchmarks.hosts.tasks import TASKS, load, pipeline
from benchmarks.serve import now, serve
from jpipe_train.report.metrics_log import mean_of, means_of


class Trainer:
    """A trainer that measures time and bytes of its steps, without validation.

    Args:
        pipe: the pipeline.
        batches: to train on, in this order.
        held_out: the batches to validate on.
        seed: of the weights.
    """

    def __init__(self, pipe: jpipe.Pipeline, batches: Sequence[Any], held_out: Sequence[Any], seed: int) -> None:
        self._pipe, self._batches, self._held_out, self._seed = pipe, batches, held_out, seed
        self.restart()

    def restart(self) -> dict[str, Any]:
        """Begin with fresh weights."""
        self._state = self._pipe.init(jax.random.key(self._seed), self._batches[0])
        return {}

    def __call__(self, steps: int) -> dict[str, Any]:
        """Train for this many more steps, possibly none.

        Returns:
            {"seconds", "sent_bytes", "val_loss" of the validation after them}.
        """
        begin, before = now(), sent_bytes()
        for _ in range(steps):
            self._state, _ = self._pipe.step(self._state, self._batches[self._state.batch])
        jax.block_until_ready(self._state)
        facts = {"seconds": now() - begin, "sent_bytes": sent_bytes() - before}
        return {**facts, **mean_of([means_of(self._pipe.evaluate(self._state, batch)) for batch in self._held_out])}


def make_trainer(task: str, samples: Path, plan: jpipe.Plan) -> Trainer:
    """Return the trainer of a task.

    Args:
        task: a name of `TASKS`.
        samples: the folder with the data sets.
        plan: how it is trained.
    """
    config = load(TASKS[task], samples)
    pipe, data = pipeline(config, plan)
    return Trainer(pipe, data.train, [data.validation[i] for i in range(config.train.eval_batches)], config.seed)


def main() -> None:
    """Compile, then train as standard input requests."""
    task, samples, plan, hosts, process, coordinator = sys.argv[1:7]
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(hosts), int(process))
    serve(make_trainer(task, Path(samples), jpipe.Plan.from_json(Path(plan).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
