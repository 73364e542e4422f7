"""The results of steps: losses, weights and norms. All processes get the same results. Reading a number waits until it is computed."""

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.context import without_mesh
from jpipe.errors import InputError, PeerLost
from jpipe.plan import Plan
from jpipe.processes._membership import Processes
from jpipe.programs._instructions import Program
from jpipe.runtime._transport import arrived
from jpipe.runtime._worker import RunResults

Tree = Any
Number = jax.Array | np.ndarray


class RemoteScalar:
    """A number that one process computes; all processes get the same bits. `float(…)` waits until the number has arrived."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def __float__(self) -> float:
        return self._read()

    def __repr__(self) -> str:
        return "RemoteScalar(…)"


class OfBatches(dict[int, Any]):
    """Numbers by batch; reading one that the step did not finish raises an error that says when it comes."""

    def __missing__(self, batch: object) -> Any:
        found = f"batch {', '.join(map(str, self))}" if self else "none"
        raise InputError(
            f"metrics: expected a batch that this call finished ({found}), found {batch}; other batches are in the metrics of other calls "
            "of step, the last ones come from drain(state, with_metrics=True)"
        )


jax.tree_util.register_pytree_node(
    OfBatches, lambda numbers: ([*numbers.values()], (*numbers,)), lambda keys, values: OfBatches(zip(keys, values, strict=True))
)


class Metrics(NamedTuple):
    """Results of the batches that a step finished, the same in all processes. Numbers may still be computing: `float(…)` waits.

    Attributes:
        losses: the mean loss of each finished batch over its labels, by batch index. With `Plan.agree` each pipeline computes its
            microbatches with its own weights. Microbatches of a pipeline that skipped its update (`skip_nonfinite`) do not count, unless
            all pipelines skipped it.
        weights: the total weight of each of these batches, over the microbatches that count.
        norms: the global norm of the gradient of each of these batches before clipping; empty without `clip_global_norm` and
            `skip_nonfinite`. Under a schedule that does not flush, the norm comes one step later than the loss, or in the metrics of
            `drain`. With `Plan.agree` it is the norm of the first pipeline.
        nonfinite: the number of entries of this gradient that are NaN or infinite; empty or late like `norms`. With `skip_nonfinite`, a
            batch with such an entry changed no weights. With `Plan.agree` it is the sum over all pipelines, and a pipeline with such an
            entry changed no weights.
        loss_scales: the loss scale after each of these batches, if it is dynamic; empty or late like `norms`.
        stage_norms: the norm of the gradient of one stage before clipping, by (batch, stage); empty without `clip_stage_norm`. A norm is
            known after its stage's update, so under a schedule that does not flush the norms of early stages may come some steps later. If
            a batch updates a stage several times, it is the norm of the last update.
    """

    losses: OfBatches
    weights: OfBatches
    norms: dict[int, jax.Array | RemoteScalar]
    nonfinite: dict[int, jax.Array | RemoteScalar]
    loss_scales: dict[int, jax.Array | RemoteScalar]
    stage_norms: dict[tuple[int, int], jax.Array | RemoteScalar]

    @classmethod
    def empty(cls) -> "Metrics":
        """Return the metrics of a step that finished no batch."""
        return cls(OfBatches(), OfBatches(), {}, {}, {}, {})


class Mean(NamedTuple):
    """A metric over a whole batch. `float(…)` of a number waits until it is computed.

    Attributes:
        mean: the sum of the metric over all microbatches, divided by the total weight.
        weight: the total weight. To get the mean over several batches, divide the sum of `mean * weight` by the sum of the weights.
    """

    mean: jax.Array | RemoteScalar
    weight: jax.Array | RemoteScalar


class Evaluation(NamedTuple):
    """The result of `Pipeline.evaluate`, the same in all processes. Numbers may still be computing: `float(…)` waits.

    Attributes:
        loss: the mean loss over the whole batch.
        weight: the total weight of the batch.
        version: the weight version of all stages: the number of batches that had updated the weights. With `Plan.agree` it is the version
            of the last agreement. With fragments it is the earliest version among the last agreements of the fragments.
        metrics: the mean of each requested metric, by name.
        microbatches: for each of these metrics, by name, the (sum, weight) of each microbatch, for metrics that are not means.
    """

    loss: jax.Array | RemoteScalar
    weight: jax.Array | RemoteScalar
    version: int
    metrics: Mapping[str, Mean] = MappingProxyType({})
    microbatches: Mapping[str, Sequence[tuple[jax.Array | RemoteScalar, jax.Array | RemoteScalar]]] = MappingProxyType({})


class DelayNorms(NamedTuple):
    """The effect of a delay on the weights: norms over the parameters of all stages. `float(…)` of a norm waits until it is computed.

    Attributes:
        correction: the norm of the change by which the delay correction has moved the newest weights ahead; 0 without a correction.
        distance: the norm of the difference between the two newest weight versions, over the stages that hold two; NaN if no stage does.
    """

    correction: jax.Array | RemoteScalar
    distance: jax.Array | RemoteScalar


class MetricsExchange:
    """Sends the numbers that one process computes to all processes of the run. In a run of one process it returns the arrays.

    Args:
        plan: the plan of the run.
        devices: the device of each worker.
        processes: the processes of the run; None in a run of one process.
        reports: the reports of capabilities, see `RuntimeHooks.report`.

    Attributes:
        name: the name of the pipeline. It is the same in all processes, because they make the same pipelines in the same order.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[jax.Device],
        processes: Processes | None,
        reports: Sequence[Callable[..., Sequence[Mapping[int, Any]] | None]] = (),
    ) -> None:
        self.name = f"pipeline {next(_pipelines)}"
        self.plan, self._devices, self._processes = plan, devices, processes
        self._reports = reports
        self._evaluations = self._delay_norms = 0

    def check(self, run: Program) -> None:
        """Check that a run from an empty pipeline to an empty pipeline reports every batch once."""
        for what, batches in (("loss", run.ended), *(("gradient norm", of_stage) for of_stage in run.updated)):
            _check_complete(what, range(run.start, run.end), batches)

    @property
    def reporting(self) -> tuple[int, ...]:
        """The workers that report the numbers of batches: the first replica of the last stage, or all its replicas with `Plan.agree`."""
        last = self.plan.stage_workers[-1]
        return last if self.plan.has_parallel_pipelines else last[:1]

    def metrics(self, program: Program, shift: int, results: RunResults) -> Metrics:
        """Return the metrics of the batches that the program, run `shift` batches later, finishes; `results` are this process's results."""
        metrics = Metrics.empty()
        ended, *updated = ([batch + shift for batch in batches] for batches in (program.ended, *program.updated))
        found = [report(self, updated=updated, results=results, metrics=metrics) for report in self._reports]
        self._share_losses(ended, results, metrics, next((unchanged for unchanged in found if unchanged is not None), None))
        return metrics

    def check_complete(self, what: str, worker: int, batches: Sequence[int], local: Collection[int]) -> None:
        """If a worker is in this process, check that it has these batches' numbers. Missing numbers are an error in jpipe."""
        if self._devices[worker].process_index == jax.process_index():
            _check_complete(what, batches, local)

    def sum_of(self, numbers: Sequence[Any]) -> jax.Array | RemoteScalar:
        """Return the sum of these numbers, one from each pipeline."""
        if len(numbers) == 1:
            return numbers[0]
        if self._processes is None:
            return _sum(jax.device_put(numbers, self._devices[self.reporting[0]]))
        return RemoteScalar(lambda: sum(map(float, numbers)))

    def _share_losses(
        self, batches: Sequence[int], results: RunResults, metrics: Metrics, unchanged: Sequence[Mapping[int, Any]] | None
    ) -> None:
        """Put the losses and weights of these batches into the metrics. With pipelines that agree, they are over all pipelines.

        `unchanged` has for each pipeline, by batch, a number other than 0 if its update changed nothing, if a capability reports this.
        """
        of_pipelines: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for pipeline, worker in enumerate(self.reporting):
            local = {t: functools.partial(_mean_loss, updates) for (t, number), updates in results.losses.items() if number == pipeline}
            self.check_complete("loss", worker, batches, local)
            are_several = self.plan.has_parallel_pipelines
            into: tuple[dict[int, Any], dict[int, Any]] = ({}, {}) if are_several else (metrics.losses, metrics.weights)
            self.share(f"loss of pipeline {pipeline}" if pipeline else "loss", worker, batches, local, into)
            of_pipelines.append(into)
        for batch in batches if len(of_pipelines) > 1 else ():
            skipped = [0] * len(of_pipelines) if unchanged is None else [counts[batch] for counts in unchanged]
            triples = [(loss[batch], weight[batch], count) for (loss, weight), count in zip(of_pipelines, skipped, strict=True)]
            metrics.losses[batch], metrics.weights[batch] = self._mean_of(triples)

    def _mean_of(self, triples: Sequence[tuple[Any, Any, Any]]) -> tuple[jax.Array | RemoteScalar, jax.Array | RemoteScalar]:
        """Return (mean, weight) over all pipelines from (mean, weight, whether the update was skipped) of each."""
        if self._processes is None:
            return _mean(_as_sums(_without_skipped(jax.device_put(triples, self._devices[self.reporting[0]]))))
        dtype = jax.dtypes.canonicalize_dtype(np.float64)

        @functools.cache
        def read() -> tuple[float, float]:
            numbers = [tuple(np.array(float(number), dtype) for number in triple) for triple in triples]
            mean, weight = _mean(_as_sums(_without_skipped(numbers)))
            return float(mean), float(weight)

        return RemoteScalar(lambda: read()[0]), RemoteScalar(lambda: read()[1])

    def share(
        self,
        what: str,
        worker: int,
        batches: Sequence[int],
        local: Mapping[int, Callable[[], Sequence[Number]]],
        into: Sequence[dict[int, Any]],
    ) -> None:
        """Put a worker's numbers of these batches into the dicts `into`, in all processes. `local` has this process's numbers."""
        source = self._devices[worker].process_index
        for batch in batches:
            if self._processes is None:
                numbers = local[batch]()
            else:
                name, words = f"{self.name}: {what} of batch {batch}", f"the {what} of batch {batch}"
                if batch in local:
                    _send(self._processes, name, local[batch])
                read = functools.cache(functools.partial(_receive, self._processes, name, source, words))
                numbers = [RemoteScalar(lambda i=i, read=read: read()[i]) for i in range(len(into))]  # type: ignore[misc]  # mypy takes i and read for arguments
            for values, number in zip(into, numbers, strict=True):
                values[batch] = number

    def evaluation(self, results: RunResults, version: int, names: Sequence[str], count: int) -> Evaluation:
        """Return the evaluation over all `count` microbatches with the weights of `version`; `names` are the names of the metrics."""
        last = self.plan.stage_workers[-1]
        if self._processes is None:
            parts = [results.evaluations[k] for k in sorted(results.evaluations)]
            placed = parts if len(last) == 1 else jax.device_put(parts, self._devices[last[0]])
            _, *columns = each = [list(pairs) for pairs in zip(*placed, strict=True)]
            (loss, weight), *metrics = (Mean(*_mean(pairs)) for pairs in each)
            return Evaluation(loss, weight, version, dict(zip(names, metrics, strict=True)), dict(zip(names, columns, strict=True)))
        self._evaluations += 1
        processes, topics = self._processes, [f"{self.name}: evaluation {self._evaluations}, worker {w}" for w in last]
        for replica, topic in enumerate(topics):
            local = [results.evaluations[k] for k in sorted(results.evaluations) if k % len(last) == replica]
            if local:
                _send(processes, topic, functools.partial(jax.tree.leaves, local))

        @functools.cache
        def read() -> list[Any]:
            words = "the loss of an evaluation"
            sources = zip(last[:count], topics[:count], strict=True)  # replicas without a microbatch send nothing
            received = [_receive(processes, topic, self._devices[w].process_index, words) for w, topic in sources]
            rows = [np.array(numbers, jax.dtypes.canonicalize_dtype(np.float64)).reshape(-1, 1 + len(names), 2) for numbers in received]
            return [rows[k % len(last)][k // len(last)] for k in range(count)]

        @functools.cache
        def means() -> list[tuple[float, float]]:
            pairs = (_mean([(part[i, 0], part[i, 1]) for part in read()]) for i in range(1 + len(names)))
            return [(float(mean), float(weight)) for mean, weight in pairs]

        def mean(i: int) -> Mean:
            return Mean(RemoteScalar(lambda: means()[i][0]), RemoteScalar(lambda: means()[i][1]))

        def pair(k: int, i: int) -> tuple[RemoteScalar, RemoteScalar]:
            return RemoteScalar(lambda: float(read()[k][i, 0])), RemoteScalar(lambda: float(read()[k][i, 1]))

        pairs = {name: [pair(k, 1 + i) for k in range(count)] for i, name in enumerate(names)}
        return Evaluation(*mean(0), version, {name: mean(1 + i) for i, name in enumerate(names)}, pairs)

    def delay_norms(self, local: Mapping[int, jax.Array]) -> DelayNorms:
        """Return the norms over all stages from the squares of the norms (correction, distance) of this process's workers that report.

        These are the first replica of each stage, or all replicas with `Plan.shard_optimizer`.
        """
        plan = self.plan
        reporting = [w for w, (_, replica) in enumerate(plan.workers) if not replica or plan.divides_updates]
        if self._processes is None:
            return DelayNorms(*_norms(jax.device_put([local[w] for w in reporting], self._devices[reporting[-1]])))
        self._delay_norms += 1
        processes, topic = self._processes, f"{self.name}: norms {self._delay_norms} of the delay"
        for w, squared in local.items():
            _send(processes, f"{topic}, worker {w}", functools.partial(list, squared))

        @functools.cache
        def read() -> list[float]:
            words = "the norms of the delay"
            received = [_receive(processes, f"{topic}, worker {w}", self._devices[w].process_index, words) for w in reporting]
            return [float(norm) for norm in _norms([np.array(squared, jax.dtypes.canonicalize_dtype(np.float64)) for squared in received])]

        return DelayNorms(RemoteScalar(lambda: read()[0]), RemoteScalar(lambda: read()[1]))


_pipelines = itertools.count()


def _check_complete(what: str, expected: Sequence[int], reported: Collection[int]) -> None:
    """Check that exactly the batches that a program finishes have results."""
    if sorted(reported) != sorted(expected):
        raise RuntimeError(
            f"internal error: expected the {what} of the batches {list(expected)} from this program, found {sorted(reported)}; "
            "please report it with the plan"
        )


def _send(processes: Processes, name: str, numbers: Callable[[], Sequence[Number]]) -> None:
    """Start a thread that computes the numbers and sends them to all processes."""

    def work() -> None:
        try:
            processes.broadcast(name, np.array([float(number) for number in numbers()], np.float64).tobytes())
        except PeerLost:  # the main thread raises this error, too
            pass
        except BaseException as error:
            processes.fail(error)

    threading.Thread(target=work, daemon=True).start()


def _receive(processes: Processes, name: str, source: int, words: str) -> list[float]:
    """Wait for the numbers that another process sends with `_send`, and return them."""
    return np.frombuffer(processes.receive(name, source, words)).tolist()


def _mean_loss(updates: Sequence[Tree]) -> tuple[jax.Array, jax.Array]:
    """Return (mean loss, weight) of a batch from the (mean loss, weight) of each of its updates."""
    parts = [arrived(part) for part in updates]
    return parts[0] if len(parts) == 1 else _mean(_as_sums(parts))


def _as_sums(means: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return (sum, weight) from each (mean, weight)."""
    return [(mean * jnp.where(weight == 0, 1, weight), weight) for mean, weight in means]


@without_mesh()  # it may run only when a number is read
@jax.jit
def _norms(squared: list[Number]) -> tuple[jax.Array, jax.Array]:
    corrections, distances = jnp.stack(squared).T
    none_holds_two = jnp.isnan(distances).all()
    return jnp.sqrt(corrections.sum()), jnp.where(none_holds_two, jnp.nan, jnp.sqrt(jnp.nansum(distances)))


@without_mesh()  # it may run only when a number is read
@jax.jit
def _without_skipped(triples: Sequence[tuple[Any, Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the (mean, weight) of each pipeline, with (0, 0) for pipelines that skipped their update, unless all skipped it."""
    skipped = [count > 0 for _, _, count in triples]
    some = ~jnp.stack(skipped).all()
    return [
        (jnp.where(some & out, 0, mean), jnp.where(some & out, 0, weight)) for (mean, weight, _), out in zip(triples, skipped, strict=True)
    ]


@without_mesh()  # it may run only when a number is read
@jax.jit
def _sum(numbers: Sequence[Number]) -> jax.Array:
    return jnp.stack(numbers).sum()


@without_mesh()  # it may run only when a number is read
@jax.jit
def _mean(parts: list[tuple[Number, Number]]) -> tuple[jax.Array, jax.Array]:
    total, weight = (jnp.stack(column).sum() for column in zip(*parts, strict=True))
    return total / jnp.where(weight == 0, 1, weight), weight
