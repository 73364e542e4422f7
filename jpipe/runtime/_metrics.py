"""The results of steps: losses, weights and norms. All processes have the same; reading a number waits for it."""

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.errors import PeerLost
from jpipe.plan import Plan
from jpipe.processes._membership import Processes
from jpipe.programs._instructions import AllReduce, Program, Update
from jpipe.runtime._interpreter import Found
from jpipe.runtime._lanes import arrived

Tree = Any
Number = jax.Array | np.ndarray


class RemoteScalar:
    """A number that some process computes; `float(…)` waits until that process has sent it. The same bits in all processes."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def __float__(self) -> float:
        return self._read()

    def __repr__(self) -> str:
        return "RemoteScalar(…)"


class Metrics(NamedTuple):
    """Results of the batches that a step finished, the same in all processes. Numbers may still be computing: `float(…)` waits.

    Attributes:
        losses: mean loss of each finished batch, by batch index.
        weights: total weight of each of those batches.
        norms: global norm of the gradient of each of those batches, before clipping; empty without `clip_global_norm`.
    """

    losses: dict[int, jax.Array | RemoteScalar]
    weights: dict[int, jax.Array | RemoteScalar]
    norms: dict[int, jax.Array | RemoteScalar]


class Mean(NamedTuple):
    """A metric over a whole batch; `float(…)` of a number waits for it.

    Attributes:
        mean: the sum of the metric over all microbatches, divided by the total weight.
        weight: the total weight. The mean over several batches is the sum of `mean * weight` divided by the sum of the weights.
    """

    mean: jax.Array | RemoteScalar
    weight: jax.Array | RemoteScalar


class Evaluation(NamedTuple):
    """The result of `Pipeline.evaluate`, the same in all processes. Numbers may still be computing: `float(…)` waits.

    Attributes:
        loss: mean over the whole batch.
        weight: total weight of the batch.
        version: weight version that was used, the same in all stages, in batches: how many batches had updated the weights.
        metrics: the mean of each requested metric, by name.
    """

    loss: jax.Array | RemoteScalar
    weight: jax.Array | RemoteScalar
    version: int
    metrics: Mapping[str, Mean] = MappingProxyType({})


class MetricsExchange:
    """Sends the numbers that one process computes to all processes of the run. In a run of one process it returns the arrays.

    Args:
        plan: the plan of the run.
        devices: the device of each worker.
        processes: the processes of the run, if there are several.
        clips: whether there are norms.

    Attributes:
        name: name of the pipeline, the same in all processes, because they make the same pipelines in the same order.
    """

    def __init__(self, plan: Plan, devices: Sequence[jax.Device], processes: Processes | None, clips: bool) -> None:
        self.name = f"pipeline {next(_pipelines)}"
        self._plan, self._devices, self._processes, self._clips = plan, devices, processes, clips
        self._evaluations = 0
        self._batches: dict[int, tuple[Program, list[int]]] = {}  # batches that a program finishes, by its id; kept, so the id stays valid

    def metrics(self, program: Program, shift: int, found: Found) -> Metrics:
        """Metrics of the batches that the program, run `shift` batches later, finishes; `found` is from the workers of this process."""
        metrics, norms = Metrics({}, {}, {}), {t: [norm] for t, norm in found.norms.items()}
        if self._processes is None:
            for batch, updates in found.losses.items():
                for held, number in zip(metrics, _numbers(updates, norms.get(batch, [])), strict=False):
                    held[batch] = number
            return metrics
        last = self._plan.stage_workers[-1][0]
        for batch in (batch + shift for batch in self._finished(program, last)):
            name = f"{self.name}: batch {batch}"
            if batch in found.losses:
                _send(self._processes, name, functools.partial(_numbers, found.losses[batch], norms.get(batch, [])))
            words = f"the loss of batch {batch}"
            read = functools.cache(functools.partial(self._processes.receive, name, self._devices[last].process_index, words))
            for i, held in enumerate(metrics if self._clips else metrics[:2]):
                held[batch] = RemoteScalar(lambda i=i, read=read: read()[i])  # type: ignore[misc]  # mypy takes i and read for arguments
        return metrics

    def evaluation(self, found: Found, version: int, names: Sequence[str]) -> Evaluation:
        """The evaluation over all microbatches, in their order, with the weights of `version`; `names` are those of the metrics."""
        last = self._plan.stage_workers[-1]
        if self._processes is None:
            parts = [found.evaluations[k] for k in sorted(found.evaluations)]
            placed = parts if len(last) == 1 else jax.device_put(parts, self._devices[last[0]])
            (loss, weight), *metrics = (Mean(*_mean(list(pairs))) for pairs in zip(*placed, strict=True))
            return Evaluation(loss, weight, version, dict(zip(names, metrics, strict=True)))
        self._evaluations += 1
        processes, topics = self._processes, [f"{self.name}: evaluation {self._evaluations}, worker {w}" for w in last]
        for replica, topic in enumerate(topics):
            own = [found.evaluations[k] for k in sorted(found.evaluations) if k % len(last) == replica]
            if own:
                _send(processes, topic, functools.partial(jax.tree.leaves, own))

        @functools.cache
        def read() -> list[tuple[float, float]]:
            words = "the loss of an evaluation"
            received = [processes.receive(topic, self._devices[w].process_index, words) for w, topic in zip(last, topics, strict=True)]
            rows = [np.array(numbers, jax.dtypes.canonicalize_dtype(np.float64)).reshape(-1, 1 + len(names), 2) for numbers in received]
            parts = [rows[k % len(rows)][k // len(rows)] for k in range(sum(map(len, rows)))]
            means = (_mean([(part[i, 0], part[i, 1]) for part in parts]) for i in range(1 + len(names)))
            return [(float(mean), float(weight)) for mean, weight in means]

        def mean(i: int) -> Mean:
            return Mean(RemoteScalar(lambda: read()[i][0]), RemoteScalar(lambda: read()[i][1]))

        return Evaluation(*mean(0), version, {name: mean(1 + i) for i, name in enumerate(names)})

    def _finished(self, program: Program, last: int) -> list[int]:
        """The batches whose last gradients the worker `last` has in the program; searched once per program."""
        if id(program) not in self._batches:
            s, _ = program.plan.workers[last]
            ends, rate = AllReduce if program.plan.replicas[s] > 1 else Update, program.plan.updates_per_batch(s)
            updates = [i.batch for i in program.instructions if type(i) is ends and i.worker == last]
            self._batches[id(program)] = program, [update // rate for update in updates if (update + 1) % rate == 0]
        return self._batches[id(program)][1]


_pipelines = itertools.count()


def _send(processes: Processes, name: str, numbers: Callable[[], Sequence[Number]]) -> None:
    """Send the numbers to all processes from a new thread, which computes and waits for them; does not wait."""

    def work() -> None:
        try:
            processes.broadcast(name, [float(number) for number in numbers()])
        except PeerLost:  # the main thread raises it, too
            pass
        except BaseException as error:
            processes.fail(error)

    threading.Thread(target=work, daemon=True).start()


def _numbers(updates: list[Tree], norm: list[jax.Array]) -> list[jax.Array]:
    """Mean loss, weight and, with clipping, norm of a batch."""
    return [*_mean_loss(updates), *norm]


def _mean_loss(updates: list[Tree]) -> tuple[jax.Array, jax.Array]:
    """(mean loss, weight) of a batch from those of its updates."""
    parts = [arrived(part) for part in updates]
    return parts[0] if len(parts) == 1 else _mean([(loss * weight, weight) for loss, weight in parts])


@jax.jit
def _mean(parts: list[tuple[Number, Number]]) -> tuple[jax.Array, jax.Array]:
    total, weight = (jnp.stack(column).sum() for column in zip(*parts, strict=True))
    return total / jnp.where(weight == 0, 1, weight), weight
