"""The user's object: a pipeline over a model, a plan, a loss and an optimizer; functional, state in and state out."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe._compile import CompiledStage, compile_initializers, compile_workers, reduced_spec
from jpipe._costs import StageCost, measure_bytes
from jpipe._errors import InputError, cause
from jpipe._layers import LayerStack, describe, key_spec, spec_of
from jpipe._lower import batches_until_full, lower, lower_evaluation
from jpipe._optimizer import LayerwiseOptimizer, find_layerwise
from jpipe._placement import place
from jpipe._plan import Plan
from jpipe._processes import Processes
from jpipe._program import AllReduce, Program, Send, Update
from jpipe._runtime import Found, Observer, run
from jpipe._simulate import simulate
from jpipe._stage import Loss, Specs, StageFunctions, floats_of
from jpipe._state import State, WorkerState
from jpipe._told import Told, tell, told, told_mean
from jpipe._transport import Transport, arrived, to_host
from jpipe.schedules import SCHEDULES

Tree = Any
Batch = tuple[Tree, Tree]


class Metrics(NamedTuple):
    """What a step finished, the same in all processes, as numbers that are not waited for: `float(…)` of one waits.

    Attributes:
        losses: mean loss of each batch that was finished, by batch index.
        weights: total weight of each of those batches.
        norms: global norm of the gradient of each of those batches, before clipping; empty without `clip_global_norm`.
    """

    losses: dict[int, jax.Array | Told]
    weights: dict[int, jax.Array | Told]
    norms: dict[int, jax.Array | Told]


class Evaluation(NamedTuple):
    """What `Pipeline.evaluate` found, the same in all processes, as numbers that are not waited for.

    Attributes:
        loss: mean over the whole batch.
        weight: total weight of the batch.
        version: of the weights, the same in all stages: how many batches they have learnt from.
    """

    loss: jax.Array | Told
    weight: jax.Array | Told
    version: int


@functools.cache
def join_processes() -> Processes | None:
    """The processes of this run, joined by the first call, which all make; None where there is only this one.

    Raises:
        InputError: process 0 cannot be reached.
        PeerLost: not all have joined in time.
    """
    return Processes.join() if jax.process_count() > 1 else None


_numbers_of_pipelines = itertools.count()


class Pipeline:
    """Trains `stack` as `plan` says. Holds compiled programs, and nothing that changes from step to step.

    `init` proves the programs (see `simulate`) before it compiles what they use. In a run of several processes (after
    `jax.distributed.initialize`) every process makes the same pipeline and calls the same methods in the same order; each runs the
    workers on its own devices.

    Args:
        stack: the model.
        plan: stages, schedule, microbatches, recomputation.
        loss: `(outputs, labels) -> (sum of the losses, weight)` of one microbatch, two scalars; a batch's gradient is divided by
            its total weight, so microbatches with padding or masks count for what they hold.
        optimizer: any optax transformation that treats every layer by itself, masks and labels by layer id included; one that
            does not is found out and refused by `init`.
        devices: where the workers run, one for each, stage by stage; by default the plan's placement among the devices of all
            processes, several neighbouring workers to a device where there are too few.
        clip_global_norm: clip the mean gradient of each batch to this norm over all stages, as `optax.clip_by_global_norm` does;
            the same whatever the cut. For the schedules that flush.

    Raises:
        InputError: the plan does not fit the model or the devices, or its schedule cannot clip.

    Example:
        >>> stack = LayerStack({"double": lambda x: 2 * x, "add": lambda x: x + 1})
        >>> plan = Plan.even(stack.ids, num_stages=2, schedule="gpipe", microbatches=2)
        >>> pipe = Pipeline(stack, plan, lambda y, labels: (((y - labels) ** 2).sum(), y.size), optax.sgd(0.1))
        >>> batch = np.ones((4, 1), np.float32), np.zeros((4, 1), np.float32)
        >>> state = pipe.init(jax.random.key(0), batch)
        >>> state, metrics = pipe.step(state, batch)
        >>> {t: float(loss) for t, loss in metrics.losses.items()}
        {0: 9.0}
    """

    def __init__(
        self,
        stack: LayerStack,
        plan: Plan,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        devices: Sequence[jax.Device] | None = None,
        *,
        clip_global_norm: float | None = None,
    ) -> None:
        plan.check_layers(stack.ids)
        if clip_global_norm is not None:
            _check_clipping(clip_global_norm, plan)
        self.stack, self.plan, self.loss, self.optimizer = stack, plan, loss, optimizer
        self.clip_global_norm = clip_global_norm
        self._given_devices = None if devices is None else tuple(devices)
        self._spec: Batch | None = None
        self._probed: tuple[Tree, LayerwiseOptimizer] | None = None  # for which parameters, and the answer
        self._stages: dict[int, CompiledStage] = {}  # by worker of this process
        self._compiled: list[StageFunctions] = []
        self._evaluations = 0
        self._name = ""  # under which the processes of the run tell each other its numbers
        self._programs: dict[tuple[int, int, bool], Program] = {}

    # What a user calls -------------------------------------------------------------------------------------------------

    def check(self, batch: Batch) -> None:
        """Refuse what would not run with batches like this one; the optimizer is tried on tiny arrays, nothing else is computed.

        Raises:
            InputError: a batch that is no (inputs, labels), rows not divisible by the microbatches, layers that do not fit, an
                optimizer that cannot be applied layer by layer.
        """
        self._functions(batch)

    def init(self, key: jax.Array, batch: Batch) -> State:
        """Fresh weights on their devices, and everything compiled for batches like this one.

        Args:
            key: seed of initialization and dropout.
            batch: (inputs, labels) as in `step`; only shapes and dtypes are used.

        Returns:
            The state before batch 0.

        Raises:
            InputError: as `check`; a key of another kind; devices that are not there.
        """
        key, functions = _as_key(key), self._functions(batch)
        runs = self._proved_runs()
        own = {w: (functions[s], self.devices[w]) for w, (s, _) in enumerate(self.plan.workers) if self._is_here(w)}
        self._stages = compile_workers(own, runs)
        self._transport = Transport(self.devices, self.plan.stage_workers, self._processes)
        self._connect(functions, runs)
        self._spec, self._compiled = _microbatch_spec(batch, self.plan.microbatches), functions
        places = [(layer_id, stage.device) for stage in self._stages.values() for layer_id in stage.functions.stage.layers]
        initializers = compile_initializers(self.stack, self.stack.specs(self._spec[0]), places)
        workers = tuple(self._init_worker(stage, initializers, key) for stage in self._stages.values())
        if self._processes is not None:
            self._name = f"pipeline {next(_numbers_of_pipelines)}"
            self._processes.barrier(f"{self._name}: compiled")
            self._transport.connect()
            self._processes.barrier(f"{self._name}: connected")
        return State(workers, batch=0, start=0)

    def step(self, state: State, batch: Batch, *, observe: Observer | None = None) -> tuple[State, Metrics]:
        """Feed one batch: m microbatches enter the pipeline, and whatever can be computed then is dispatched.

        Asynchronous schedules do not finish all of it: the rest stays in flight in the state.

        Args:
            state: used up; use the returned one from here on.
            batch: (inputs, labels), pytrees of arrays whose first dim is the batch, divisible by the plan's microbatches. Anything with
                a shape, a dtype and slices of rows will do: only the rows that this process's workers need are read.
            observe: called with an `Event` after each instruction is dispatched; see `Tracer`.

        Returns:
            The next state, and the losses of the batches that this step finished.

        Raises:
            InputError: a state that was used already, or a batch unlike the one given to `init`.
        """
        self._check_state(state)
        spec = _microbatch_spec(batch, self.plan.microbatches)
        if spec != self._spec:
            raise InputError(f"batch: expected microbatches like the one of init, {describe(self._spec)}; found {describe(spec)}")
        since = state.batch - state.start
        program, shift = self._program(since, state.batch, False)
        workers, found = self._run(program, shift, state.workers, batch, observe)
        start = state.batch + 1 if SCHEDULES[self.plan.schedule].flushes else state.start
        return State(workers, state.batch + 1, start), self._metrics(program, shift, found)

    def drain(self, state: State, *, observe: Observer | None = None) -> State:
        """Finish all work in flight, the pending updates included. Training may go on afterwards, with the same numbers.

        Args:
            state: used up, if anything is in flight; use the returned one from here on.
            observe: as in `step`.

        Returns:
            The state with nothing in flight.

        Raises:
            InputError: a state that was used already.
        """
        self._check_state(state)
        if state.start == state.batch:
            return state
        program, shift = self._program(state.batch - state.start, state.batch, True)
        workers, _ = self._run(program, shift, state.workers, None, observe)
        return State(workers, state.batch, state.batch)

    def evaluate(self, state: State, batch: Batch) -> Evaluation:
        """Forward only, at one version for all stages, in evaluation mode; leaves the state as it is, work in flight included.

        The version is the newest that all stages hold. Weight stashing holds none while microbatches are in flight: then a copy
        of the state is drained, which costs that memory for the time of the call. Layer state (batch statistics) is what each
        stage holds, ahead of that version by the microbatches in flight.

        Args:
            state: any state that is not used up.
            batch: as in `step`, of any number of microbatches of the size that `init` saw.

        Raises:
            InputError: a state that was used already, or a batch unlike the one given to `init`.
        """
        self._check_state(state)
        rows_each = _rows(self._spec)
        count = _count_microbatches(batch, rows_each)
        if _microbatch_spec(batch, count) != self._spec:
            raise InputError(f"batch: expected microbatches like the one of init, {describe(self._spec)}; found {describe(batch)}")
        state = self._settled(state)
        version = self._common_version(state)
        assert version is not None, "after a drain all stages hold the newest version"
        program = lower_evaluation(self.plan, count, version)
        host = dict(zip(("inputs", "labels"), to_host(batch), strict=True))
        workers = {
            w: dataclasses.replace(worker, versions=dict(worker.versions), layer_state=dict(worker.layer_state), buffers={})
            for w, worker in zip(self._stages, state.workers, strict=True)
        }
        _, found = run(program, 0, self._stages, workers, self._transport, host, rows_each)
        loss, weight = self._evaluated(found)
        return Evaluation(loss, weight, version)

    def params(self, state: State) -> dict[str, Tree]:
        """The parameters of all layers at one version (as in `evaluate`), by layer id; arrays stay on their devices.

        They are copies: the next step may write into the memory of the originals. In a run of several processes each gets the layers of
        its own workers.

        Raises:
            InputError: a state that was used already.
        """
        self._check_state(state)
        state = self._settled(state)
        version = self._common_version(state)
        assert version is not None, "after a drain all stages hold the newest version"
        found: dict[str, Tree] = {}
        for w, worker in zip(self._stages, state.workers, strict=True):
            if self.plan.stages[self.plan.workers[w][0]].layers[0] not in found:  # replicas hold the same
                found |= worker.versions[version * self._updates_a_batch(w)]
        return _copy(found)

    def costs(self, batch: Batch) -> tuple[StageCost, ...]:
        """What the stages hold and move for batches like this one, in exact bytes, for `jpipe.simulate`; from shapes alone.

        Times are units: a forward takes 1, a backward 2, one that recomputes 3. Temporaries are known once `init` has compiled.

        Args:
            batch: as in `init`.

        Raises:
            InputError: a batch or layers that do not fit; see `check`.
        """
        compiled = self._spec is not None and self._spec == _microbatch_spec(batch, self.plan.microbatches)
        functions = self._compiled if compiled else self._functions(batch)
        costs = [measure_bytes(f, f.stage.recompute != "none") for f in functions]
        for w, stage in self._stages.items():
            s = self.plan.workers[w][0]
            costs[s] = dataclasses.replace(costs[s], temporary=stage.temporary_bytes)
        return tuple(costs)

    @cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each worker."""
        return place(self.plan, self._given_devices)

    # Inside ------------------------------------------------------------------------------------------------------------

    @cached_property
    def _processes(self) -> Processes | None:
        """Those of the run, where there are several."""
        return join_processes()

    def _is_here(self, w: int) -> bool:
        return self.devices[w].process_index == jax.process_index()

    def _connect(self, functions: list[StageFunctions], runs: list[Program]) -> None:
        """Compile the transfers between processes."""
        number = jax.ShapeDtypeStruct((), functions[0].loss_dtype)
        specs: dict[tuple[int, str], Tree] = {}
        for s, f in enumerate(functions):
            specs[s, "gradient"] = floats_of(f.specs.x), number
            specs[s, "norm"] = number
            specs[s, "squares"] = tuple(jax.ShapeDtypeStruct((len(stage.layers),), number.dtype) for stage in self.plan.stages[s:])
            if not f.last:
                specs[s, "activation"] = functions[s + 1].specs.x
        evaluation = lower_evaluation(self.plan, math.lcm(*self.plan.replicas), 0)
        sends = (i for program in (*runs, evaluation) for i in program.instructions if type(i) is Send)
        kinds = {(i.worker, i.to, i.message): i for i in sends}
        sums = {self.plan.stage_workers[s][0]: reduced_spec(f) for s, f in enumerate(functions) if f.stage.replicas > 1}
        stage_of = [s for s, _ in self.plan.workers]
        self._transport.compile([(i, specs[stage_of[i.worker], i.message]) for _, i in sorted(kinds.items())], sums)

    def _functions(self, batch: Batch) -> list[StageFunctions]:
        inputs, labels = _microbatch_spec(batch, self.plan.microbatches)
        layers = self.stack.specs(inputs)
        unprobed = LayerwiseOptimizer(self.optimizer, {})
        functions = []
        x = inputs
        for s, stage in enumerate(self.plan.stages):
            first, last = s == 0, s == self.plan.depth - 1
            draw = (jax.ShapeDtypeStruct((), np.uint32), key_spec()) if self.stack.is_stochastic(stage.layers) else (None, None)
            params = {layer_id: layers[layer_id].params for layer_id in stage.layers}
            state = {layer_id: layers[layer_id].state for layer_id in stage.layers}
            specs = Specs(params, state, x, labels if last else None, draw)
            scale = stage.replicas / self.plan.replicas[0] if self.plan.scale_learning_rate else 1.0
            options = self.clip_global_norm, scale, self.plan.sync_state
            functions.append(StageFunctions(self.stack, stage, first, last, self.loss, unprobed, specs, *options))
            x = layers[stage.layers[-1]].output
        _check_loss(functions[-1], x, labels)
        layerwise = self._layerwise({layer_id: spec.params for layer_id, spec in layers.items()})
        return [dataclasses.replace(f, optimizer=layerwise) for f in functions]

    def _layerwise(self, params: Tree) -> LayerwiseOptimizer:
        """Probed once for each model that this pipeline meets: batches of other shapes may make other parameters."""
        if self._probed is None or self._probed[0] != params:
            self._probed = params, find_layerwise(self.optimizer, params)
        return self._probed[1]

    def _init_worker(
        self, stage: CompiledStage, initializers: dict[tuple[str, jax.Device], jax.stages.Compiled], key: jax.Array
    ) -> WorkerState:
        f, params, state = stage.functions, {}, {}
        for layer_id in f.stage.layers:
            layer_key = jax.device_put(self.stack.init_key(layer_id, key), stage.device)
            params[layer_id], state[layer_id] = initializers[layer_id, stage.device](layer_key)
        optimizer, sums = jax.device_put((jax.jit(f.init_optimizer)(params), jax.jit(f.zero_sums)(params)), stage.device)
        return WorkerState({0: params}, optimizer, state, sums, {}, jax.device_put(key, stage.device))

    def _proved_runs(self) -> list[Program]:
        """A run from the first batch and one from later on, long enough to hold whatever the pipeline will do; both proved."""
        runs = [self._lower(first + 2 * self._horizon + 1, first, first, True) for first in (0, 2 * self._horizon)]
        for program in runs:
            simulate(program)
        return runs

    @cached_property
    def _horizon(self) -> int:
        return batches_until_full(self.plan)

    def _program(self, since: int, batch: int, drain: bool) -> tuple[Program, int]:
        """The program of a step (or drain) at `batch`, `since` batches after the pipeline was empty, and the shift to run it with."""
        since, model_batch = min(since, self._horizon), min(batch, 2 * self._horizon)
        name = since, model_batch, drain
        if name not in self._programs:
            stop = model_batch if drain else model_batch + 1
            self._programs[name] = self._lower(stop, model_batch, model_batch - since, drain)
        return self._programs[name], batch - model_batch

    def _lower(self, stop: int, begin: int, start: int, drain: bool) -> Program:
        return lower(self.plan, stop, begin=begin, start=start, drain=drain, clips=self.clip_global_norm is not None)

    def _run(
        self, program: Program, shift: int, workers: Sequence[WorkerState], batch: Batch | None, observe: Observer | None
    ) -> tuple[tuple[WorkerState, ...], Found]:
        host = {} if batch is None else dict(zip(("inputs", "labels"), to_host(batch), strict=True))
        states = dict(zip(self._stages, workers, strict=True))
        left, found = run(program, shift, self._stages, states, self._transport, host, _rows(self._spec), observe)
        return tuple(left.values()), found

    def _metrics(self, program: Program, shift: int, found: Found) -> Metrics:
        """Of the batches that the program finishes; what other processes compute is told by them."""
        if self._processes is None:
            means = {batch: _mean_loss(parts) for batch, parts in found.losses.items()}
            return Metrics({t: mean[0] for t, mean in means.items()}, {t: mean[1] for t, mean in means.items()}, dict(found.norms))
        last = self.plan.stage_workers[-1][0]
        on, updates = self.devices[last].process_index, self._updates_a_batch(last)
        ends = AllReduce if self.plan.replicas[-1] > 1 else Update
        metrics = Metrics({}, {}, {})
        for update in (i.batch for i in program.instructions if type(i) is ends and i.worker == last and (i.batch + 1) % updates == 0):
            batch = update // updates + shift
            if batch in found.losses:
                norm = [found.norms[batch]] if batch in found.norms else []
                tell(self._processes, f"{self._name}: batch {batch}", partial(_numbers, found.losses[batch], norm))
            numbers = told(self._processes, f"{self._name}: batch {batch}", on, 2 if self.clip_global_norm is None else 3)
            for held, number in zip(metrics, numbers, strict=False):
                held[batch] = number
        return metrics

    def _evaluated(self, found: Found) -> tuple[Any, Any]:
        """(mean loss, weight) over all microbatches, in their order; what other processes compute is told by them."""
        last = self.plan.stage_workers[-1]
        if self._processes is None:
            parts = [found.evaluations[k] for k in sorted(found.evaluations)]
            return _mean(parts if len(last) == 1 else jax.device_put(parts, self.devices[last[0]]))
        self._evaluations += 1
        names = [(f"{self._name}: evaluation {self._evaluations}, worker {w}", self.devices[w].process_index) for w in last]
        for replica, (w, (name, _)) in enumerate(zip(last, names, strict=True)):
            if self._is_here(w):
                own = [found.evaluations[k] for k in sorted(found.evaluations) if k % len(last) == replica]
                tell(self._processes, name, partial(_flat, own))
        return told_mean(self._processes, names, _mean)

    def _check_state(self, state: State) -> None:
        if not isinstance(state, State):
            raise InputError(f"state: expected a jpipe.State, found {type(state).__name__}")
        if self._spec is None or len(state.workers) != len(self._stages):
            raise InputError("state: this pipeline did not make it; call init first")
        if any(_is_used_up(worker) for worker in state.workers):
            raise InputError("state: it was used up by step or drain already; go on with the state that call returned")

    def _settled(self, state: State) -> State:
        """The state itself if all stages hold a common version, else a drained copy of it."""
        return state if self._common_version(state) is not None else self.drain(_copy(state))

    def _common_version(self, state: State) -> int | None:
        """The newest version, in batches, that all workers of all processes hold, if there is one; told from the program alone."""
        if state.batch == state.start:
            return state.batch
        # Where the step before this state ended, the next one begins.
        since, model_batch = min(state.batch - state.start, self._horizon), min(state.batch, 2 * self._horizon)
        program = self._lower(model_batch, model_batch, model_batch - since, False)
        held = [(oldest, newest, self._updates_a_batch(w)) for w, (oldest, newest) in enumerate(program.versions)]
        version = min(newest // updates for _, newest, updates in held)
        if any(version * updates < oldest for oldest, _, updates in held):
            return None
        return version + state.batch - model_batch

    def _updates_a_batch(self, w: int) -> int:
        return self.plan.microbatches // self.plan.microbatches_an_update(self.plan.workers[w][0])


def _as_key(key: Any) -> jax.Array:
    """A typed key of JAX's default kind; an old-style `jax.random.PRNGKey` is wrapped."""
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == jax.random.key_data(jax.random.key(0)).shape:
        return jax.random.wrap_key_data(key)
    if not isinstance(key, jax.Array) or key.dtype != key_spec().dtype or key.shape != ():
        found = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else type(key).__name__
        raise InputError(f"init: expected a random key like jax.random.key(0), of JAX's default kind {key_spec().dtype}, found {found}")
    return key


def _is_used_up(worker: WorkerState) -> bool:
    """Whether a run took what it held, or donated the arrays that a copy of it shares."""
    return not worker.versions or any(leaf.is_deleted() for leaf in jax.tree.leaves(worker.sums)[:1])


def _microbatch_spec(batch: Any, count: int) -> Batch:
    """Shapes and dtypes of one of `count` microbatches."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        found = f"{len(batch)} of them" if isinstance(batch, tuple) else type(batch).__name__
        raise InputError(f"batch: expected a tuple (inputs, labels), found {found}")
    leaves = jax.tree.leaves(batch)
    sizes = {leaf.shape[0] if getattr(leaf, "ndim", 0) else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        raise InputError(f"batch: expected arrays that agree in their first dim, the batch, found {describe(batch)}")
    size = sizes.pop()
    if size == 0 or size % count:
        raise InputError(
            f"batch: expected a number of rows divisible by {count} microbatches, found {size}; change the batch size or microbatches"
        )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size // count, *leaf.shape[1:]), spec_of(leaf).dtype), batch)


def _count_microbatches(batch: Batch, rows_each: int) -> int:
    size = _rows(_microbatch_spec(batch, 1))
    if size % rows_each:
        raise InputError(f"batch: expected a number of rows divisible by the microbatch size {rows_each}, found {size}")
    return size // rows_each


def _rows(spec: Tree) -> int:
    return jax.tree.leaves(spec)[0].shape[0]


def _check_loss(last: StageFunctions, outputs: Tree, labels: Tree) -> None:
    try:
        jax.eval_shape(last._loss_of, outputs, labels)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"loss: it does not take outputs {describe(outputs)} of layer '{last.stage.layers[-1]}' and labels {describe(labels)}; "
            f"it says: {cause(error)}; mend the loss"
        ) from error


def _check_clipping(clip_global_norm: Any, plan: Plan) -> None:
    if not isinstance(clip_global_norm, (int, float)) or not 0 < clip_global_norm < math.inf:
        raise InputError(f"clip_global_norm: expected a finite number above 0, found {clip_global_norm!r}")
    if SCHEDULES[plan.schedule].flushes:
        return
    flushing = ", ".join(f"'{name}'" for name, schedule in SCHEDULES.items() if schedule.flushes)
    if plan.schedule == "pipedream" and not plan.vertical_sync:
        why = "weight stashing cannot clip: its first stages know the norm only after its last ones had to update"
    else:
        why = f"clipping with the asynchronous schedule '{plan.schedule}' is not there yet"
    raise InputError(f"clip_global_norm: {why}; use a schedule that flushes ({flushing}), or leave it out")


def _numbers(updates: list[Tree], norm: list[jax.Array]) -> list[jax.Array]:
    return [*_mean_loss(updates), *norm]


def _flat(parts: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    return [number for part in parts for number in part]


def _mean_loss(updates: list[Tree]) -> tuple[jax.Array, jax.Array]:
    """(mean loss, weight) of a batch from those of its updates."""
    parts = [arrived(part) for part in updates]
    return parts[0] if len(parts) == 1 else _mean([(loss * weight, weight) for loss, weight in parts])


@jax.jit
def _mean(parts: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    total, weight = (jnp.stack(column).sum() for column in zip(*parts, strict=True))
    return total / jnp.where(weight == 0, 1, weight), weight


def _copy(tree: Tree) -> Tree:
    return jax.tree.map(jnp.copy, jax.tree.map(arrived, tree))
