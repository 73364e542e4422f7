"""`python -m benchmarks.hosts.accuracy_program TASK SAMPLES PLAN HOSTS PROCESS COORDINATOR`: the training program of one host.

PLAN is a file. For each number on standard input it trains that many steps and then validates.
"""

import sys
from pathlib import Path
from typing import Any

import jax

import jpipe
from benchmarks.hosts.network import sent_bytes
from benchmarks.hosts.tasks import TASKS, load, pipeline
from benchmarks.serve import now, serve
from jpipe_train.report.metrics_log import mean_loss


class Trainer:
    """A trainer that measures time and bytes of its steps, without validation.

    Args:
        task: a name of `TASKS`.
        samples: the folder with the data sets.
        plan: how it is trained.
    """

    def __init__(self, task: str, samples: Path, plan: jpipe.Plan) -> None:
        config = load(TASKS[task], samples)
        self._pipe, data = pipeline(config, plan)
        self._batches = data.train
        self._held_out = [data.validation[i] for i in range(config.train.eval_batches)]
        self._state = self._pipe.init(jax.random.key(config.seed), self._batches[0])

    def __call__(self, steps: int) -> dict[str, Any]:
        """Train for this many more steps, possibly none.

        Returns:
            {"seconds", "sent_bytes", "loss" of the validation after them}.
        """
        begin, before = now(), sent_bytes()
        for _ in range(steps):
            self._state, _ = self._pipe.step(self._state, self._batches[self._state.batch])
        jax.block_until_ready(self._state)
        facts = {"seconds": now() - begin, "sent_bytes": sent_bytes() - before}
        return {**facts, "loss": mean_loss([(self._pipe.evaluate(self._state, batch), 1) for batch in self._held_out])}


def main() -> None:
    """Compile, then train as standard input requests."""
    task, samples, plan, hosts, process, coordinator = sys.argv[1:7]
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(hosts), int(process))
    serve(Trainer(task, Path(samples), jpipe.Plan.from_json(Path(plan).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
