"""A pipeline compiled for batches of one or more shapes, which runs the programs of its plan on the workers of this process."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from jpipe.capabilities.protocol import TransportHooks, hooks, merged
from jpipe.capabilities.registry import runtimes_for, runtimes_of
from jpipe.meshes._place import Place
from jpipe.model._function_arguments import Loss
from jpipe.plan import Plan
from jpipe.processes._membership import Processes
from jpipe.programs._instructions import Program, Receive, Send
from jpipe.programs._steps import Steps
from jpipe.programs.lowering import lower_evaluation
from jpipe.runtime._interpreter import Observer, read_data, run
from jpipe.runtime._join import BatchComparison, share_rows
from jpipe.runtime._metrics import DelayNorms, Evaluation, Metrics, MetricsExchange
from jpipe.runtime._snapshot import Snapshot
from jpipe.runtime._transport import Sent, Transport, arrived
from jpipe.runtime._worker import Added, Data, RunResults
from jpipe.runtime.state import State, WeightVersions, WorkerState, copied, fetched, fingerprint, model_of
from jpipe.schedules import SCHEDULES
from jpipe.stages._arrays import Arrays, shardings_of, shares_of
from jpipe.stages._batch import Batch, Bucket, InMicrobatches, Repeated, check_outputs, describe_shapes, joined_rows, rows_of, to_host
from jpipe.stages._compile import compile_workers, with_metrics, with_outputs
from jpipe.stages._compiled_stage import CompiledStage
from jpipe.stages.functions._evaluation import check_evaluation
from jpipe.stages.functions._update import average_params, delay_squares, newest_params

Tree = Any
Weights = Literal["newest", "ema"]
To = Literal["all", "first"]

_FILLS = 8  # how often a prediction fills the pipeline before it copies the outputs to the host


class Executor:
    """Compiles the programs of this process's workers and their transfers, and runs steps from state to state.

    `Pipeline` checks everything that a user passes, except metrics, which the executor checks.

    Args:
        plan: the plan.
        steps: the programs of the plan.
        buckets: the shapes of batches, all with the same number of rows, weights and layer state.
        places: for each worker the devices where it computes.
        processes: the processes of the run; None in a run of one process.
        facts: further values that must be the same in all processes, by name.
        depends_on: values that the compiled programs depend on in addition to the other arguments, such as settings of JAX.
        before: an earlier executor; this one reuses its compiled programs, because nothing that they depend on has changed.

    Attributes:
        specs: the specs of one microbatch of each bucket.
        functions: the functions of the first bucket.
        buckets, depends_on: the arguments.
        stages: the compiled stages of this process's workers for the first bucket, by worker.
        fingerprint: the facts that determine the content of a state; a state with another fingerprint does not fit.
        initializers: the programs that initialize layers, which `init` has compiled.
    """

    def __init__(
        self,
        plan: Plan,
        steps: Steps,
        buckets: Sequence[Bucket],
        places: Sequence[Place],
        processes: Processes | None,
        facts: Mapping[str, str],
        depends_on: Any = None,
        before: "Executor | None" = None,
    ) -> None:
        functions, self.specs = buckets[0].functions, [bucket.spec for bucket in buckets]
        if processes is not None:  # otherwise differences would be found late or never
            processes.agree(
                {"plan": plan.to_json(), "shape of a microbatch": describe_shapes(self.specs), "model": model_of(functions), **facts}
            )
        self.functions, self.buckets, self.depends_on = functions, buckets, depends_on
        process = jax.process_index()
        for check_devices in hooks("check_devices", runtimes_of(plan)):
            check_devices(plan, [device for place in places for device in place.devices if device.process_index == process])
        steps = steps.of([w for w, place in enumerate(places) if place.process_index == process])
        self._plan, self._steps, self._places, self._processes = plan, steps, places, processes
        self._added = Added.by(plan, functions[0].capabilities)
        shares = [shares_of(plan, f) for f in functions]
        arrays = [
            [Arrays(variant[s], places[w], share=shares[s][replica]) for w, (s, replica) in enumerate(plan.workers)]
            for bucket in buckets
            for variant in bucket.variants
        ]
        self._variants = len(buckets[0].variants)  # of each bucket
        self._compiled: list[dict[int, CompiledStage]] = [] if before is None else [*before._compiled]  # by bucket and variant
        for number, of_variant in enumerate(arrays[len(self._compiled) :], len(self._compiled)):
            local = {w: a for w, a in enumerate(of_variant) if places[w].process_index == process}
            like, is_trained = self._compiled[0] if self._compiled else None, self._variants == 1 or (number + 1) % self._variants
            self._compiled.append(compile_workers(local, steps.verified_runs if is_trained else (), like))
        self.stages = self._compiled[0]
        self._by_bucket = {w: [stages[w] for stages in self._compiled] for w in self.stages}
        self._transport = Transport(places, plan.stage_workers, processes)
        sends = _sends(plan, arrays, steps.verified_runs, self.stages)
        sums, gathers = _replica_sums(plan, arrays[0])
        self._transport.compile(sends, sums, _loads(self.stages, arrays[0]), gathers)
        self._exchange = MetricsExchange(
            plan,
            [place.first for place in places],
            processes,
            [partial(report, f=functions[0]) for report in hooks("report", runtimes_for(functions[0].capabilities).values())],
        )
        for program in steps.verified_runs:
            self._exchange.check(program)
        self._comparison: BatchComparison | None = None
        if processes is not None:
            self._comparison = BatchComparison(self._exchange.name, processes, rows_of(self.specs[0]), len(buckets) > 1)
        # The workers of the last stage, by bucket and by the names and ids of metrics.
        self._measuring: dict[tuple[int, tuple[tuple[str, int], ...]], dict[int, CompiledStage]] = {}
        self._predicting: dict[int, dict[int, CompiledStage]] = {}  # by bucket, compiled at the first use
        self.initializers: dict[tuple[str, Place], jax.stages.Compiled] = {}
        if before is not None:
            self._measuring, self._predicting, self.initializers = before._measuring, before._predicting, before.initializers
        self._predictions = 0
        self.fingerprint = fingerprint(plan, steps.uses, places, self.specs, functions)

    def connect(self) -> None:
        """Wait until all processes have compiled, and connect the processes that exchange arrays."""
        if self._processes is not None:
            self._processes.barrier(f"{self._exchange.name}: compiled")
            self._transport.connect(self._exchange.name)
            self._processes.barrier(f"{self._exchange.name}: connected")

    def compiled_for(self, inputs: Tree) -> Sequence[Mapping[int, CompiledStage]]:
        """Return this process's stages that train microbatches of these shapes, for each slice or for whole rows.

        If no bucket has these shapes, they are the stages of the first one.
        """
        number = next((number for number, bucket in enumerate(self.buckets) if bucket.spec[0] == inputs), 0)
        return self._compiled[number * self._variants :][: len(self.buckets[number].trained)]

    @property
    def transfers(self) -> str | None:
        """How messages go between processes, as `Transport.way`; None in a run of one process."""
        return None if self._processes is None else self._transport.way

    def at_rest(self, workers: Sequence[WorkerState]) -> list[WorkerState]:
        """Return the workers before the run begins, after capabilities have moved arrays, for example to host memory."""
        resting = list(workers)
        for at_rest in hooks("at_rest", runtimes_of(self._plan)):
            resting = [at_rest(self._plan, self._plan.workers[w][0], worker) for w, worker in zip(self.stages, resting, strict=True)]
        return resting

    def state(self, workers: Iterable[WorkerState], batch: int, start: int, buckets: tuple[int, ...] = ()) -> State:
        """Return the state before `batch` of a pipeline that was empty before batch `start`; `buckets`: of the last batches."""
        return State(tuple(workers), batch, start, self.functions[0].average_state != "read", self.fingerprint, buckets)

    def read(self, state: State, batch: Batch, bucket: int) -> tuple[Mapping[str, Tree], Data]:
        """Read the rows of a batch (inputs, labels) that the workers of this process load in the next step.

        Return the parts of the batch as host arrays, by name, and the rows. After an error of `read_data` the state is unchanged.
        """
        program, _ = self._steps.program(state.batch - state.start, state.batch, False)
        host = _on_host(batch)
        return host, read_data(program, host, rows_of(self.specs[0]), self.buckets[bucket].positions)

    def step(self, state: State, batch: tuple[Mapping[str, Tree], Data], bucket: int, observe: Observer | None) -> tuple[State, Metrics]:
        """Feed one batch of a bucket that `read` has returned; see `Pipeline.step`."""
        program, shift = self._steps.program(state.batch - state.start, state.batch, False)
        host, data = batch
        if self._comparison is not None:
            self._comparison.step(state.batch, host)
        buckets = (*state.buckets, bucket)[-self._steps.in_flight :] if len(self.specs) > 1 else ()
        workers, results = self._run(program, shift, state.workers, data, _by_batch(buckets, state.batch + 1), observe)
        is_empty = SCHEDULES[self._plan.schedule].flushes_after(self._plan, state.batch)
        start = state.batch + 1 if is_empty else state.start
        return self.state(workers, state.batch + 1, start, buckets), self._exchange.metrics(program, shift, results)

    def drain(self, state: State, observe: Observer | None = None) -> tuple[State, Metrics]:
        """Finish the work in flight, and return the state and the metrics that this completes. Each replica keeps its own layer state."""
        if state.start == state.batch:
            return state, Metrics.empty()
        program, shift = self._steps.program(state.batch - state.start, state.batch, True)
        workers, results = self._run(program, shift, state.workers, {}, _by_batch(state.buckets, state.batch), observe)
        return self.state(workers, state.batch, state.batch), self._exchange.metrics(program, shift, results)

    def drained_copy(self, state: State) -> State:
        """Return a copy of the state with nothing in flight."""
        state = copy(state)
        if state.start == state.batch:
            return state
        program, shift = self._steps.program(state.batch - state.start, state.batch, True)
        workers, _ = self._run(program, shift, state.workers, {}, _by_batch(state.buckets, state.batch), None)
        return self.state(workers, state.batch, state.batch)

    def snapshot(self, state: State) -> Snapshot:
        """Return a complete snapshot of the state, with the arrays of a copy that is drained."""
        snapshot, drained = Snapshot(self._plan, state.batch, self.stages), self.drained_copy(state)
        snapshot.take(dict(zip(self.stages, drained.workers, strict=True)))
        return snapshot

    def average(self, state: State) -> State:
        """If replicas average their layer state when it is read, return the state with the mean, which takes one sum per stage."""
        if state.averaged:
            return state
        workers = dict(zip(self.stages, state.workers, strict=True))
        means: dict[int, Tree] = {}
        for s, replicas in enumerate(self._plan.stage_workers):
            parts = {w: self.functions[s].averaged_state(workers[w].layer_state) for w in replicas if w in workers}
            if parts and self.functions[s].averages_when_read:
                calls = self.stages[next(iter(parts))].calls
                words = f"the mean of the layer state over the replicas of stage {s}"
                means |= self._transport.sum_replicas(replicas, parts, calls["add_state"], calls["mean_state"], words)
        for w, mean in means.items():
            averaged = self.stages[w].functions.with_averages(workers[w].layer_state, arrived(mean))
            workers[w] = dataclasses.replace(workers[w], layer_state=averaged)
        return dataclasses.replace(state, workers=tuple(workers.values()), averaged=True)

    def settle(self, state: State, weights: Weights) -> tuple[State, int]:
        """Return the state and the newest version, in batches, that all workers of all processes hold; drain a copy if there is none.

        A stage holds the moving average only of its newest version, so with updates in flight the stages have no common version. This also
        holds for weights without prediction, and for weights that some capabilities read.
        """
        version_read = hooks("version_read", runtimes_of(self._plan))
        if weights == "ema" or version_read or any(f.predicts for f in self.functions):
            whole = state if state.start == state.batch else self.drained_copy(state)
            return whole, min((version(self._plan, state.batch) for version in version_read), default=state.batch)
        # After a restore or a drain the workers are ahead of an uninterrupted run, and hold all its common versions.
        since = 0 if state.start == state.batch else state.batch - self._plan.flush_first
        version = self._steps.common_version(since, state.batch)
        if version is None:
            return self.drained_copy(state), state.batch
        return state, version

    def evaluate(self, state: State, batch: InMicrobatches, bucket: int, metrics: Mapping[str, Loss], weights: Weights) -> Evaluation:
        """Forward the microbatches of a bucket; see `Pipeline.evaluate`."""
        host = _on_host(batch.batch)
        if self._comparison is not None:
            self._comparison.evaluation(host, {"the names of the metrics": ", ".join(metrics) or "none", "the kind of weights": weights})
        workers, version = self._for_evaluation(state, weights)
        results = self._forward(workers, version, host, range(batch.microbatches), bucket, self._evaluating(bucket, metrics))
        for k in results.evaluations.keys() & range(batch.whole, batch.microbatches):
            results.evaluations[k] = jax.tree.map(lambda number: number / batch.copies, results.evaluations[k])
        return self._exchange.evaluation(results, version, list(metrics), batch.microbatches)

    def predict(self, state: State, inputs: Tree, bucket: int, weights: Weights, to: To) -> Tree | None:
        """Return the outputs for any number of rows of a bucket; see `Pipeline.predict`."""
        last = self.buckets[bucket].functions[-1]
        outputs = last.last_layer.evaluated
        rows_each, size = rows_of(self.specs[0]), rows_of(inputs)
        check_outputs(outputs, rows_each, last.stage.layers[-1])
        if bucket not in self._predicting:
            whole = self._compiled[self._whole(bucket)]
            last_stages = {w: stage for w, stage in whole.items() if stage.functions.last}
            self._predicting[bucket] = whole | with_outputs(last_stages)
            if self._processes is not None:
                self._processes.barrier(f"{self._exchange.name}: predictions of bucket {bucket} compiled")
        count = -(-size // rows_each)
        filled = jax.tree.map(lambda leaf: Repeated(leaf, size - size % rows_each, count * rows_each), to_host(inputs))
        workers, version = self._for_evaluation(state, weights)
        parts: dict[int, Tree] = {}
        at_once = max(self._plan.microbatches, _FILLS * self._plan.depth * max(self._plan.replicas))  # the devices hold these outputs
        for first in range(0, count, at_once):
            numbers = range(first, min(first + at_once, count))
            results = self._forward(workers, version, {"inputs": filled}, numbers, bucket, self._predicting[bucket])
            parts |= {k: jax.tree.map(np.asarray, results.evaluations.pop(k)) for k in sorted(results.evaluations)}
        if self._processes is not None:
            sources = [self._places[self._plan.worker(self._plan.depth - 1, k)].process_index for k in range(count)]
            self._predictions += 1
            name = f"{self._exchange.name}: prediction {self._predictions}"
            parts = share_rows(self._processes, name, parts, sources, outputs, keep=to == "all" or jax.process_index() == 0)
            if to == "first" and jax.process_index() != 0:
                return None
        return jax.tree.map(lambda spec, *leaves: joined_rows(spec, leaves, size), outputs, *(parts[k] for k in range(count)))

    def _forward(
        self,
        workers: Mapping[int, WorkerState],
        version: int,
        data: dict[str, Tree],
        numbers: range,
        bucket: int,
        stages: Mapping[int, CompiledStage],
    ) -> RunResults:
        """Forward these microbatches of a bucket through these stages, with the weights of one version."""
        program = lower_evaluation(self._plan, len(numbers), version, first=numbers.start, labels="labels" in data, workers=self.stages)
        loads = read_data(program, data, rows_of(self.specs[0]))
        n = self._whole(bucket)
        by_bucket = {w: [*compiled[:n], stages[w], *compiled[n + 1 :]] for w, compiled in self._by_bucket.items()}
        _, results = run(program, 0, by_bucket, lambda _: n, workers, self._transport, loads, consume=False)
        return results

    def params(self, state: State, weights: Weights) -> dict[str, Tree]:
        """Copy this process's parameters, at one version for all stages, without prediction; masters take precedence."""
        has_masters = self.functions[0].precision.has_masters
        # A stage has masters of its newest version only. All stages have the same newest version once nothing is in flight.
        state, version = (self.drained_copy(state), state.batch) if has_masters else self.settle(state, weights)
        params: dict[str, Tree] = {}
        for w, entries in self._read(state, version, weights, masters=True).items():
            f = self.stages[w].functions
            if weights == "ema":
                entries = jax.tree.map(lambda mean, spec: mean.astype(spec.dtype), entries, f.specs.fresh)
            # replicas hold the same parameters
            layers = (layer_id for layer_id in f.stage.layers if layer_id in entries and layer_id not in params)
            params |= {layer_id: f.stack.ties.whole(layer_id, entries) for layer_id in layers}
        return copy({layer_id: params[layer_id] for layer_id in self._plan.layers if layer_id in params})

    def layer_state(self, state: State) -> dict[str, Tree]:
        """Copy the layer state of this process's layers, averaged as in an evaluation."""
        state = self.average(state)
        layer_state: dict[str, Tree] = {}
        for worker in state.workers:
            layer_state = {**worker.layer_state, **layer_state}  # replicas hold the same state
        return copy(layer_state)

    def delay_norms(self, state: State) -> DelayNorms:
        """Return the norms of the prediction and of the distance between the newest versions. Replicas report what they update."""
        squared = {}
        for (w, stage), worker in zip(self.stages.items(), state.workers, strict=True):
            (_, replica), share, versions = self._plan.workers[w], stage.arrays.share, worker.weights.versions
            if replica and share is None:
                continue
            part = dict if share is None else share.outgoing if replica else share.part  # the newest version may still lack other entries
            newest = part(worker.weights.read(versions[-1]))
            before = part(worker.weights.read(versions[-2])) if len(versions) > 1 else None
            arrays = jax.tree.map(arrived, (newest, before, part(worker.optimizer)))
            squared[w] = delay_squares(stage.functions, *fetched(arrays))
        return self._exchange.delay_norms(squared)

    def _read(self, state: State, version: int, weights: Weights, *, masters: bool = False) -> dict[int, dict[str, Tree]]:
        """Return for each worker of this process the weights of one version, in batches, or their moving average ("ema").

        They are without prediction. With `masters` these are returned, if there are any; then nothing may be in flight. If replicas divide
        the optimizer state and the result needs it, only the entries that the worker updates are returned.
        """
        read = {}
        for (w, stage), worker in zip(self.stages.items(), state.workers, strict=True):
            f, (s, _), newest = stage.functions, self._plan.workers[w], worker.weights.read(worker.weights.newest)
            if of_capability := hooks("read", runtimes_of(self._plan)):
                read[w] = of_capability[0](stage, worker)
            elif weights == "ema":
                read[w] = average_params(f, fetched(worker.optimizer), fetched(newest))
            elif f.predicts or (masters and f.precision.has_masters):
                read[w] = newest_params(f, fetched(worker.optimizer), fetched(newest))
            else:
                read[w] = fetched(worker.weights.read(version * self._plan.updates_per_batch(s)))
        return read

    def _for_evaluation(self, state: State, weights: Weights) -> tuple[dict[int, WorkerState], int]:
        """Return the workers of this process in the state that an evaluation reads, and the version of the weights in batches."""
        state, version = self.settle(state, weights)
        state = self.average(state)
        workers = dict(zip(self.stages, state.workers, strict=True))
        for w, params in self._read(state, version, weights).items():
            specs, held = self.stages[w].functions.specs.params, workers[w].weights
            whole = jax.tree.map(lambda leaf, spec: leaf.astype(spec.dtype), params, {entry: specs[entry] for entry in params})
            if len(whole) < len(specs):  # the other entries come from other replicas
                whole = {**fetched(held.read(held.newest)), **whole}
            read = WeightVersions({version * self._plan.updates_per_batch(self._plan.workers[w][0]): whole})
            workers[w] = dataclasses.replace(workers[w], weights=read, microbatches={}, updates={}, loss_scales={})
        for completes in hooks("completes_read", runtimes_of(self._plan)):
            if (program := completes(self._plan, self.functions, version, self.stages)) is not None:
                workers, _ = run(program, 0, self._by_bucket, lambda _: 0, workers, self._transport, {}, consume=False)
        return workers, version

    def _run(
        self,
        program: Program,
        shift: int,
        workers: Sequence[WorkerState],
        data: Data,
        buckets: Callable[[int], int],
        observe: Observer | None,
    ) -> tuple[Iterable[WorkerState], RunResults]:
        states, each, m = dict(zip(self.stages, workers, strict=True)), self._variants, program.plan.microbatches

        def variant(k: int) -> int:
            return each * buckets(k // m) + k % program.plan.row_slices

        new_states, results = run(program, shift, self._by_bucket, variant, states, self._transport, data, observe, added=self._added)
        return new_states.values(), results

    def _whole(self, bucket: int) -> int:
        """Return the number of the compiled stages for whole rows of a bucket."""
        return self._variants * (bucket + 1) - 1

    def _evaluating(self, bucket: int, metrics: Mapping[str, Loss]) -> dict[int, CompiledStage]:
        """Return the stages of this process; the evaluation of the last stage computes these metrics, and is compiled at the first use."""
        key, stages = (bucket, tuple((name, id(metric)) for name, metric in metrics.items())), self._compiled[self._whole(bucket)]
        if key not in self._measuring:
            check_evaluation(self.buckets[bucket].functions[-1], metrics)
            last_stages = {w: stage for w, stage in stages.items() if stage.functions.last}
            self._measuring[key] = with_metrics(last_stages, metrics) if metrics else {}
        return stages | self._measuring[key]


def copy(tree: Tree) -> Tree:
    """Copy the tree, waiting for arrays that are still in transfer from another process."""
    return copied(jax.tree.map(arrived, tree))


def _on_host(batch: Batch) -> dict[str, Tree]:
    return dict(zip(("inputs", "labels"), to_host(batch), strict=True))


def _by_batch(buckets: Sequence[int], end: int) -> Callable[[int], int]:
    """Return a function from batch number to bucket for the last batches before `end`; always 0 if there is only one bucket."""
    return (lambda batch: buckets[batch - end]) if buckets else (lambda _: 0)


def _sends(plan: Plan, buckets: Sequence[Sequence[Arrays]], runs: Iterable[Program], workers: Collection[int]) -> list[Sent]:
    """Return one `Sent` for each kind of message between two workers, at least one of them in this process.

    `buckets` has for each bucket the arrays of each worker. `workers` are the workers of this process; `runs` have their instructions.
    """
    evaluation = lower_evaluation(plan, math.lcm(*plan.replicas), 0, workers=workers)
    kinds: dict[tuple[int, int, str], Send] = {}
    for i in (i for program in (*runs, evaluation) for i in program.instructions):
        if type(i) is Send:
            kinds[i.worker, i.to, i.message] = i
        elif type(i) is Receive:
            kinds[i.source, i.worker, i.message] = Send(i.source, i.microbatch, i.message, i.worker)

    of_capabilities: dict[str, TransportHooks] = merged("messages", runtimes_of(plan, buckets[0][0].functions.capabilities))

    def sent(i: Send, bucket: int) -> Sent:
        arrays = buckets[bucket]
        source, to = arrays[i.worker], arrays[i.to]
        if i.message in of_capabilities:
            leaving, arriving = of_capabilities[i.message].specs(source, to)
            return Sent(i, bucket, leaving, arriving, of_capabilities[i.message].copies)
        if i.message == "activation":
            return Sent(i, bucket, source.sent, to.received)
        return Sent(i, bucket, source.sent_gradient, to.received_gradient)

    ordered = [i for _, i in sorted(kinds.items())]
    of_shape = [i for i in ordered if i.message in ("activation", "gradient")]
    return [sent(i, 0) for i in ordered] + [sent(i, bucket) for bucket in range(1, len(buckets)) for i in of_shape]


def _replica_sums(plan: Plan, arrays: Sequence[Arrays]) -> tuple[list[tuple[int, Tree]], list[tuple[int, Tree]]]:
    """Return two lists of (first replica of a stage, specs): arrays that replicas sum, and arrays that each gathers to sum itself."""
    sums, gathers = list[tuple[int, Tree]](), list[tuple[int, Tree]]()
    for first, *others in plan.stage_workers:
        a, summing = arrays[first], arrays[first].functions.summing
        if summing is not None:
            gathers += [(first, given) for given in summing.specs(a)]
        elif others:
            parts = [part for gathered in hooks("gathered", runtimes_of(plan)) if (part := gathered(a)) is not None]
            instead = [summed(a) for summed in hooks("summed", runtimes_of(plan))]
            gathers += [(first, part) for part in parts]
            sums += [(first, spec) for spec in instead or a.sums.values() if not parts]
        if a.functions.averages_when_read:
            sums.append((first, a.averaged))
    return sums, gathers


def _loads(workers: Iterable[int], arrays: Sequence[Arrays]) -> dict[tuple[int, str], Tree]:
    """Return the shardings of the arrays that the workers of this process load."""
    specs = {(w, name): tree for w in workers for name, tree in (("inputs", arrays[w].received), ("labels", arrays[w].labels))}
    return {key: shardings_of(tree) for key, tree in specs.items()}
