"""A pipeline compiled for batches of one shape: runs the programs of its plan on the workers of this process."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.plan import Plan
from jpipe.processes._membership import Processes
from jpipe.programs._instructions import Program, Send
from jpipe.programs._lower import lower_evaluation
from jpipe.programs._steps import Steps
from jpipe.runtime._interpreter import Found, Observer, read_data, run
from jpipe.runtime._lanes import arrived
from jpipe.runtime._metrics import Evaluation, Metrics, MetricsExchange
from jpipe.runtime._state import State, WorkerState, fingerprint
from jpipe.runtime._transport import Transport, to_host
from jpipe.schedules import SCHEDULES
from jpipe.stages._batch import Batch, rows_of
from jpipe.stages._compile import CompiledStage, compile_workers, reduced_spec, with_metrics
from jpipe.stages._functions import Loss, StageFunctions, check_metrics, floats_of, with_floats

Tree = Any


class Executor:
    """Compiles what the workers of this process run, and their transfers to other processes; then runs steps from state to state.

    Its arguments must be valid: `Pipeline` checks everything that a user gives, except metrics, which are checked here.

    Args:
        plan: the plan.
        steps: its programs.
        functions: the functions of each stage.
        spec: shapes and dtypes of one microbatch.
        devices: the device of each worker.
        processes: the processes of the run, if there are several.

    Attributes:
        spec: as given.
        functions: as given.
        stages: the compiled stage of each worker of this process, by worker.
        fingerprint: what determines the content of a state; states with another fingerprint do not fit.
    """

    def __init__(
        self,
        plan: Plan,
        steps: Steps,
        functions: Sequence[StageFunctions],
        spec: Batch,
        devices: Sequence[jax.Device],
        processes: Processes | None,
    ) -> None:
        self.functions, self.spec = functions, spec
        self._plan, self._steps, self._processes = plan, steps, processes
        own = {w: (functions[s], devices[w]) for w, (s, _) in enumerate(plan.workers) if devices[w].process_index == jax.process_index()}
        self.stages = compile_workers(own, steps.verified_runs)
        self._transport = Transport(devices, plan.stage_workers, processes)
        self._transport.compile(_sends(plan, functions, steps.verified_runs), _replica_sums(plan, functions))
        self._exchange = MetricsExchange(plan, devices, processes, functions[0].global_norm)
        self._measuring: dict[tuple[tuple[str, int], ...], dict[int, CompiledStage]] = {}  # the last stage, by names and ids of metrics
        self.fingerprint = fingerprint(plan, devices, spec, functions)

    def connect(self) -> None:
        """Wait until all processes have compiled, and connect those that exchange arrays."""
        if self._processes is not None:
            self._processes.barrier(f"{self._exchange.name}: compiled")
            self._transport.connect()
            self._processes.barrier(f"{self._exchange.name}: connected")

    def state(self, workers: Iterable[WorkerState], batch: int, start: int) -> State:
        """The state before `batch` of a pipeline that was last empty before batch `start`."""
        return State(tuple(workers), batch, start, self.functions[0].average_state != "read", self.fingerprint)

    def step(self, state: State, batch: Batch, observe: Observer | None) -> tuple[State, Metrics]:
        """Feed one batch; see `Pipeline.step`."""
        program, shift = self._steps.program(state.batch - state.start, state.batch, False)
        workers, found = self._run(program, shift, state.workers, batch, observe)
        is_empty = SCHEDULES[self._plan.schedule].flushes_after(self._plan, state.batch)
        start = state.batch + 1 if is_empty else state.start
        return self.state(workers, state.batch + 1, start), self._exchange.metrics(program, shift, found)

    def drain(self, state: State, observe: Observer | None = None) -> tuple[State, Metrics]:
        """The state with nothing in flight, and what only now is known of batches; each replica keeps its own layer state."""
        if state.start == state.batch:
            return state, Metrics({}, {}, {}, {})
        program, shift = self._steps.program(state.batch - state.start, state.batch, True)
        workers, found = self._run(program, shift, state.workers, None, observe)
        return self.state(workers, state.batch, state.batch), self._exchange.metrics(program, shift, found)

    def drained_copy(self, state: State) -> State:
        """A copy of the state with nothing in flight."""
        state = copy(state)
        if state.start == state.batch:
            return state
        program, shift = self._steps.program(state.batch - state.start, state.batch, True)
        workers, _ = self._run(program, shift, state.workers, None, None)
        return self.state(workers, state.batch, state.batch)

    def average(self, state: State) -> State:
        """The state with the mean of the replicas' layer state, if they average it when it is read: one sum per stage."""
        if state.averaged:
            return state
        workers = dict(zip(self.stages, state.workers, strict=True))
        means: dict[int, Tree] = {}
        for s, replicas in enumerate(self._plan.stage_workers):
            parts = {w: floats_of(workers[w].layer_state) for w in replicas if w in workers}
            if parts and self.functions[s].averages_when_read:
                calls = self.stages[next(iter(parts))].calls
                words = f"the mean of the layer state over the replicas of stage {s}"
                means |= self._transport.sum_replicas(replicas, parts, calls["add_state"], calls["mean_state"], words)
        for w, mean in means.items():
            averaged = with_floats(workers[w].layer_state, arrived(mean))
            workers[w] = dataclasses.replace(workers[w], layer_state=averaged)
        return dataclasses.replace(state, workers=tuple(workers.values()), averaged=True)

    def settle(self, state: State) -> tuple[State, int]:
        """(state, the newest version, in batches, that all workers of all processes hold); if there is none, for a drained copy."""
        # After a restore or a drain the workers are ahead of a run without one, and hold all versions that its workers have in common.
        since = 0 if state.start == state.batch else state.batch - self._plan.flush_first
        version = self._steps.common_version(since, state.batch)
        if version is None:
            return self.drained_copy(state), state.batch
        return state, version

    def evaluate(self, state: State, batch: Batch, count: int, metrics: Mapping[str, Loss]) -> Evaluation:
        """Forward `count` microbatches; see `Pipeline.evaluate`."""
        state, version = self.settle(state)
        state = self.average(state)
        program = lower_evaluation(self._plan, count, version)
        workers = {
            w: dataclasses.replace(worker, versions=dict(worker.versions), layer_state=dict(worker.layer_state), buffers={})
            for w, worker in zip(self.stages, state.workers, strict=True)
        }
        data = read_data(program, workers, _on_host(batch), rows_of(self.spec))
        _, found = run(program, 0, self._evaluating(metrics), workers, self._transport, data)
        return self._exchange.evaluation(found, version, list(metrics))

    def params(self, state: State) -> dict[str, Tree]:
        """A copy of the parameters of this process's layers, at one version for all stages."""
        state, version = self.settle(state)
        found: dict[str, Tree] = {}
        for w, worker in zip(self.stages, state.workers, strict=True):
            s, _ = self._plan.workers[w]
            if self._plan.stages[s].layers[0] not in found:  # replicas hold the same
                found |= worker.versions[version * self._plan.updates_per_batch(s)]
        return copy(found)

    def _run(
        self, program: Program, shift: int, workers: Sequence[WorkerState], batch: Batch | None, observe: Observer | None
    ) -> tuple[Iterable[WorkerState], Found]:
        states = dict(zip(self.stages, workers, strict=True))
        data = read_data(program, states, {} if batch is None else _on_host(batch), rows_of(self.spec))
        left, found = run(program, shift, self.stages, states, self._transport, data, observe)
        return left.values(), found

    def _evaluating(self, metrics: Mapping[str, Loss]) -> dict[int, CompiledStage]:
        """The stages of this process, with these metrics in the last one's evaluation; compiled at the first use of the metrics."""
        asked = tuple((name, id(metric)) for name, metric in metrics.items())
        if metrics and asked not in self._measuring:
            check_metrics(self.functions[-1], metrics)
            own = {w: stage for w, stage in self.stages.items() if stage.functions.last}
            self._measuring[asked] = with_metrics(own, metrics)
        return self.stages | self._measuring.get(asked, {})


def copy(tree: Tree) -> Tree:
    """A copy of the tree; waits for arrays that are still in transfer from another process."""
    return jax.tree.map(jnp.copy, jax.tree.map(arrived, tree))


def _on_host(batch: Batch) -> dict[str, Tree]:
    return dict(zip(("inputs", "labels"), to_host(batch), strict=True))


def _sends(plan: Plan, functions: Sequence[StageFunctions], runs: Iterable[Program]) -> list[tuple[Send, Tree]]:
    """One send of each kind between each pair of workers, with the shapes of its message."""
    number = jax.ShapeDtypeStruct((), functions[0].loss_dtype)
    specs: dict[tuple[int, str], Tree] = {}
    for s, f in enumerate(functions):
        specs[s, "gradient"] = floats_of(f.specs.x), number
        specs[s, "norm"] = f.norm_spec
        specs[s, "squares"] = tuple(f.squares_spec(len(stage.layers)) for stage in plan.stages[s:])
        if not f.last:
            specs[s, "activation"] = functions[s + 1].specs.x
    evaluation = lower_evaluation(plan, math.lcm(*plan.replicas), 0)
    sends = (i for program in (*runs, evaluation) for i in program.instructions if type(i) is Send)
    kinds = {(i.worker, i.to, i.message): i for i in sends}
    return [(i, specs[plan.workers[i.worker][0], i.message]) for _, i in sorted(kinds.items())]


def _replica_sums(plan: Plan, functions: Sequence[StageFunctions]) -> list[tuple[int, Tree]]:
    """What the replicas of each stage sum, as (first replica, shapes)."""
    replicated = [(plan.stage_workers[s][0], f) for s, f in enumerate(functions) if f.stage.replicas > 1]
    sums: list[tuple[int, Tree]] = [(first, reduced_spec(f)) for first, f in replicated]
    return sums + [(first, floats_of(f.specs.state)) for first, f in replicated if f.averages_when_read]
