"""The user's object: a pipeline over a model, a plan, a loss and an optimizer; functional, state in and state out."""

import atexit
import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe.errors import InputError, nearest
from jpipe.model._layer import LayerSpec, describe, key_spec
from jpipe.model._optimizer import LayerwiseOptimizer, find_layerwise
from jpipe.model._stack import LayerStack
from jpipe.plan import Plan, html_of_plan
from jpipe.processes._channel import Limits
from jpipe.processes._membership import Processes
from jpipe.processes.handshake import find_secret
from jpipe.programs._costs import StageCost
from jpipe.programs._instructions import Program, Send
from jpipe.programs._lower import lower_evaluation
from jpipe.programs._steps import Steps
from jpipe.runtime._batch import Batch, count_microbatches, microbatch_spec, rows_of
from jpipe.runtime._interpreter import Found, Observer, read_data, run
from jpipe.runtime._lanes import arrived
from jpipe.runtime._metrics import Evaluation, Metrics, MetricsExchange
from jpipe.runtime._placement import checked_devices, device_names, place
from jpipe.runtime._plain import Plain, filled
from jpipe.runtime._snapshot import Snapshot, fitting, restored_worker
from jpipe.runtime._state import State, WorkerState
from jpipe.runtime._transport import Transport, progress, to_host
from jpipe.schedules import SCHEDULES
from jpipe.stages._bytes import measure_bytes
from jpipe.stages._compile import (
    CompiledStage,
    compile_initializers,
    compile_start,
    compile_workers,
    reduced_spec,
    temporary_bytes,
    with_metrics,
)
from jpipe.stages._functions import Loss, StageFunctions, check_summed, floats_of, stage_functions, with_floats
from jpipe.stages._gradients import check_gradients

Tree = Any


_joined: list[Processes] = []  # the processes of this run, once they have joined


def join_processes(limit: float = 300.0, wait: float = Limits.wait, secret: bytes | None = None) -> Processes | None:
    """The processes of this run, joined by the first call, which all make; None where there is only this one. JAX starts no device for it.

    When Python ends they part by themselves (`Processes.end`).

    Args:
        limit: seconds that the first call waits for the others.
        wait: seconds without progress in any process after which the run is given up; by the first call, the same in all processes.
            More than the longest computation of a microbatch takes, and whatever is done in one process alone.
        secret: that all processes share, to recognize each other by (`jpipe.processes.handshake`); that of the variable `JPIPE_SECRET`
            where not given. Without one whoever reaches JAX's coordinator can join.

    Raises:
        InputError: process 0 cannot be reached or has another secret, the secret is too short, or the wait is no time.
        PeerLost: not all have joined in time.
    """
    if not wait > 0:
        raise InputError(f"wait limit: expected more than 0 seconds, found {wait:g}")
    if not _joined and jax.distributed.is_initialized():
        secret = find_secret() if secret is None else secret
        _joined.append(Processes.join(limit=limit, limits=Limits(wait=wait), progress=progress, secret=secret))
        atexit.register(_joined[0].end)  # after JAX's own exit, and so called before it
    return _joined[0] if _joined and _joined[0].count > 1 else None


class Pipeline:
    """Trains `stack` as `plan` says. Holds compiled programs, and nothing that changes from step to step.

    `init` verifies the programs (see `simulate`) before it compiles what they use. In a run of several processes (after
    `jax.distributed.initialize`) every process makes the same pipeline and calls the same methods in the same order; each runs the
    workers on its own devices.

    Args:
        stack: the model.
        plan: stages, schedule, microbatches, recomputation.
        loss: `(outputs, labels) -> (sum of the losses, weight)` of one microbatch, two scalars; a batch's gradient is divided by
            its total weight, so microbatches with padding or masks count for what they hold.
        optimizer: any optax transformation that treats every layer by itself, masks and labels by layer id included; one that
            does not is detected and rejected by `init`.
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
        >>> batch = jnp.ones((4, 1)), jnp.zeros((4, 1))
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
        if not isinstance(stack, LayerStack):
            raise InputError(f"stack: expected a jpipe.LayerStack, found {type(stack).__name__}; wrap the layers in LayerStack(…)")
        if not isinstance(plan, Plan):
            raise InputError(f"plan: expected a jpipe.Plan, found {type(plan).__name__}; make one with Plan.even(stack.ids, …)")
        if not callable(loss):
            raise InputError(f"loss: expected a function (outputs, labels) -> (sum, weight), found {type(loss).__name__}")
        plan.check_layers(stack.ids)
        if clip_global_norm is not None:
            _check_clipping(clip_global_norm, plan)
        self.stack, self.plan, self.loss, self.optimizer = stack, plan, loss, optimizer
        self.clip_global_norm = clip_global_norm
        self._given_devices = None if devices is None else checked_devices(devices)
        self._spec: Batch | None = None
        self._known: tuple[Any, list[StageFunctions]] | None = None  # the last batch that was checked, and its functions
        self._probed: tuple[Tree, LayerwiseOptimizer] | None = None  # for which parameters, and the answer
        self._stages: dict[int, CompiledStage] = {}  # by worker of this process
        self._compiled: list[StageFunctions] = []
        self._measuring: dict[tuple[tuple[str, int], ...], dict[int, CompiledStage]] = {}  # the last stage, by names and ids of its metrics
        self._steps = Steps(plan, clip_global_norm is not None)

    def __repr__(self) -> str:
        return f"Pipeline({self.plan!r}{self._facts()})"

    def _repr_html_(self) -> str:
        devices = None  # before it is compiled, they may not be there
        if self._spec is not None:
            names = device_names(self.devices)
            devices = [names[device] for device in self.devices]
        return html_of_plan(self.plan, "Pipeline", self._facts(), devices)

    def _facts(self) -> str:
        where = "not compiled yet" if self._spec is None else f"compiled for microbatches of {describe(self._spec)}"
        clips = "" if self.clip_global_norm is None else f", clip_global_norm={self.clip_global_norm:g}"
        return f"{clips}, {where}"

    # What a user calls -------------------------------------------------------------------------------------------------

    def check(self, batch: Batch, metrics: Mapping[str, Loss] | None = None) -> None:
        """Refuse what would not run with batches like this one; the optimizer is tried on tiny arrays, nothing else is computed.

        Args:
            batch: as in `init`.
            metrics: as in `evaluate`.

        Raises:
            InputError: a batch that is no (inputs, labels), rows not divisible by the microbatches, layers that do not fit, an
                optimizer that cannot be applied layer by layer, a metric that does not fit.
        """
        self._check_metrics(self._functions(batch)[-1], _checked_metrics(metrics))

    def init(self, key: jax.Array, batch: Batch, params: Mapping[str, Tree] | None = None) -> State:
        """Fresh weights on their devices, or those that are given, and everything compiled for batches like this one.

        Args:
            key: seed of initialization and dropout.
            batch: (inputs, labels) as in `step`; only shapes and dtypes are used.
            params: parameters to begin with, by layer id, as `params` gives them or as dicts in dicts, with any arrays; they are copied.
                What is left out, whole layers or some of the parameters of one, is fresh, as all layer state and optimizer state is.

        Returns:
            The state before batch 0.

        Raises:
            InputError: as `check`; a key of another kind; devices that are not there; parameters that the model does not have, or of
                another shape or dtype.
        """
        key = _as_key(key)
        specs = self.stack.specs(microbatch_spec(batch, self.plan.microbatches)[0])
        given = _given({} if params is None else params, specs)
        self._prepare(batch)
        places = [(layer_id, stage.device) for stage in self._stages.values() for layer_id in stage.functions.stage.layers]
        initializers = compile_initializers(self.stack, specs, places)
        workers = tuple(self._init_worker(stage, initializers, key, given) for stage in self._stages.values())
        self._meet()
        return State(workers, batch=0, start=0, made_by=self._fingerprint)

    def restore(self, key: jax.Array, batch: Batch, layers: Mapping[str, Plain], at: int, *, fresh_optimizer: bool = False) -> State:
        """The state before batch `at` of the run that a `Snapshot` was made of, and everything compiled, as `init` does.

        Under the same plan the run goes on as if it had not ended, bit for bit. The plan may be another one: other cuts, replicas,
        schedule, recomputation, processes. Weight versions that the snapshot has not, which another schedule or depth may read, are
        replaced by the newest. Where a stage has another number of replicas than there was, each begins with the mean of their layer
        state; without `sync_state` they take those that were there again and again, in order.

        Args:
            key: of the run, as it was given to `init`.
            batch: as in `init`.
            layers: from `Snapshot.layers`, with any arrays; those of the layers of this process's workers at least.
            at: the batch of the snapshot.
            fresh_optimizer: begin with new optimizer state, as another optimizer has to.

        Raises:
            InputError: as `init`; a layer that is missing, or of another shape, or optimizer state of another optimizer.
        """
        key = _as_key(key)
        self._prepare(batch)
        workers = tuple(
            restored_worker(self.plan, w, stage.functions, layers, at, key, stage.device, fresh_optimizer)
            for w, stage in self._stages.items()
        )
        self._meet()
        return State(workers, at, at, self._average_state != "read", self._fingerprint)

    def check_layers(self, batch: Batch, layers: Mapping[str, Plain], at: int, *, fresh_optimizer: bool = False) -> None:
        """Refuse the layers that `restore` would refuse; nothing is compiled, and no other process is waited for.

        Args:
            batch: (inputs, labels); only shapes and dtypes are used.
            layers: from `Snapshot.layers`, those of the layers of this process's workers at least.
            at: the batch of the snapshot.
            fresh_optimizer: whatever the optimizer state is, it will not be used.

        Raises:
            InputError: a layer that is missing, or of another shape, or optimizer state of another optimizer.
        """
        functions = self._functions(batch)
        for w, (s, _) in enumerate(self.plan.workers):
            if self._is_here(w):
                fitting(self.plan, w, functions[s], layers, at, fresh_optimizer)

    def snapshot(self, batch: int) -> Snapshot:
        """What a checkpoint of this run before `batch` is taken with; see `Snapshot`. `init` or `restore` comes first.

        Raises:
            InputError: neither has been called, or `batch` is no integer of 0 or more.
        """
        if not isinstance(batch, int | np.integer) or isinstance(batch, bool) or batch < 0:
            raise InputError(f"snapshot: expected the number of a batch, 0 or more, found {batch!r}")
        if self._spec is None:
            raise InputError("snapshot: this pipeline has no run yet; call init or restore first")
        return Snapshot(self.plan, batch, self._stages)

    def step(self, state: State, batch: Batch, *, observe: Observer | None = None) -> tuple[State, Metrics]:
        """Feed one batch: m microbatches enter the pipeline, and whatever can be computed then is dispatched.

        Asynchronous schedules do not finish all of it: the rest stays in flight in the state.

        Args:
            state: consumed; use the returned one from here on.
            batch: (inputs, labels), pytrees of arrays whose first dim is the batch, divisible by the plan's microbatches. Anything with
                a shape, a dtype and slices of rows will do: only the rows that this process's workers need are read.
            observe: called with an `Event` after each instruction is dispatched; see `Tracer`.

        Returns:
            The next state, and the losses of the batches that this step finished.

        Raises:
            InputError: a state that was used already, or a batch unlike the one given to `init`.
        """
        _check_observer(observe)
        self._check_state(state)
        spec = microbatch_spec(batch, self.plan.microbatches)
        if spec != self._spec:
            raise InputError(f"batch: expected microbatches like the one of init, {describe(self._spec)}; found {describe(spec)}")
        since = state.batch - state.start
        program, shift = self._steps.program(since, state.batch, False)
        workers, found = self._run(program, shift, state.workers, batch, observe)
        start = state.batch + 1 if SCHEDULES[self.plan.schedule].flushes else state.start
        return State(workers, state.batch + 1, start, self._average_state != "read", self._fingerprint), self._exchange.metrics(
            program, shift, found
        )

    def drain(self, state: State, *, observe: Observer | None = None) -> State:
        """Finish all work in flight, the pending updates included. Training may go on afterwards, with the same numbers.

        Replicas under a schedule that does not flush have kept layer state of their own: now each gets the mean, unless the plan has
        `sync_state` false. A layer that reads its state while it trains goes on from there.

        Args:
            state: consumed if anything is in flight; use the returned one from here on.
            observe: as in `step`.

        Returns:
            The state with nothing in flight.

        Raises:
            InputError: a state that was used already.
        """
        _check_observer(observe)
        self._check_state(state)
        return self._averaged(self._drained(state, observe))

    def evaluate(self, state: State, batch: Batch, metrics: Mapping[str, Loss] | None = None) -> Evaluation:
        """Forward only, at one version for all stages, in evaluation mode; leaves the state as it is, work in flight included.

        The version is the newest that all stages hold. Weight stashing holds none while microbatches are in flight: then a copy
        of the state is drained, which costs that memory for the time of the call. Layer state (batch statistics) is what each
        stage holds, ahead of that version by the microbatches in flight; over replicas it is the mean, unless the plan has
        `sync_state` false.

        Args:
            state: any state that is not consumed.
            batch: as in `step`, of any number of microbatches of the size that `init` saw.
            metrics: by name `(outputs, labels) -> (sum, weight)` of one microbatch, two scalars like the loss; they run at the last
                stage. They are compiled when they are first seen, so give the same function objects each time. The same in all
                processes.

        Returns:
            The mean of the loss and of each metric.

        Raises:
            InputError: a state that was used already, a batch unlike the one given to `init`, or a metric that does not fit.

        Example:
            >>> def accuracy(logits, labels):
            ...     return (logits.argmax(-1) == labels).sum(), labels.size
            >>> evaluation = pipe.evaluate(state, batch, metrics={"accuracy": accuracy})  # doctest: +SKIP
            >>> float(evaluation.metrics["accuracy"].mean)  # doctest: +SKIP
            0.75
        """
        self._check_state(state)
        metrics = _checked_metrics(metrics)
        rows_each = rows_of(self._spec)
        count = count_microbatches(batch, rows_each)
        if microbatch_spec(batch, count) != self._spec:
            raise InputError(f"batch: expected microbatches like the one of init, {describe(self._spec)}; found {describe(batch)}")
        state, version = self._settled(state)
        state = self._averaged(state)
        program = lower_evaluation(self.plan, count, version)
        host = dict(zip(("inputs", "labels"), to_host(batch), strict=True))
        workers = {
            w: dataclasses.replace(worker, versions=dict(worker.versions), layer_state=dict(worker.layer_state), buffers={})
            for w, worker in zip(self._stages, state.workers, strict=True)
        }
        data = read_data(program, workers, host, rows_each)
        _, found = run(program, 0, self._evaluating(metrics), workers, self._transport, data)
        return self._exchange.evaluation(found, version, list(metrics))

    def params(self, state: State) -> dict[str, Tree]:
        """The parameters of all layers at one version (as in `evaluate`), by layer id; arrays stay on their devices.

        They are copies: the next step may write into the memory of the originals. In a run of several processes each gets the layers of
        its own workers.

        Raises:
            InputError: a state that was used already.
        """
        self._check_state(state)
        state, version = self._settled(state)
        found: dict[str, Tree] = {}
        for w, worker in zip(self._stages, state.workers, strict=True):
            if self.plan.stages[self.plan.workers[w][0]].layers[0] not in found:  # replicas hold the same
                found |= worker.versions[version * self.plan.updates_per_batch(self.plan.workers[w][0])]
        return _copy(found)

    def costs(self, batch: Batch, *, compiled_for: jax.Device | None = None) -> tuple[StageCost, ...]:
        """What the stages hold and move for batches like this one, in exact bytes, for `jpipe.simulate`; from shapes alone.

        Times are units: a forward takes 1, a backward 2, one that recomputes 3. Temporaries are known once `init` has compiled, or
        with `compiled_for`.

        Args:
            batch: as in `init`; `jax.ShapeDtypeStruct`s will do.
            compiled_for: compile the stages for this device, whatever the plan's own are, only to know their temporaries.

        Raises:
            InputError: a batch or layers that do not fit; see `check`.
        """
        compiled = self._spec is not None and self._spec == microbatch_spec(batch, self.plan.microbatches)
        functions = self._compiled if compiled else self._functions(batch)
        costs = [measure_bytes(f, f.stage.recompute != "none") for f in functions]
        for w, stage in self._stages.items():
            s = self.plan.workers[w][0]
            costs[s] = dataclasses.replace(costs[s], temporary=stage.temporary_bytes)
        if compiled_for is not None:
            sizes = temporary_bytes(self.plan, functions, self._steps.proved_runs, compiled_for)
            costs = [dataclasses.replace(cost, temporary=size) for cost, size in zip(costs, sizes, strict=True)]
        return tuple(costs)

    @cached_property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each worker."""
        return place(self.plan, self._given_devices)

    # Inside ------------------------------------------------------------------------------------------------------------

    @property
    def _average_state(self) -> Literal["update", "read"] | None:
        """When replicas average their layer state: with each update where it changes no order, which is where the pipeline flushes."""
        if not self.plan.sync_state:
            return None
        return "update" if SCHEDULES[self.plan.schedule].flushes else "read"

    @cached_property
    def _processes(self) -> Processes | None:
        """Those of the run, where there are several."""
        return join_processes()

    def _is_here(self, w: int) -> bool:
        return self.devices[w].process_index == jax.process_index()

    def _prepare(self, batch: Batch) -> None:
        """Compile for batches like this one."""
        functions, runs = self._functions(batch), self._steps.proved_runs
        own = {w: (functions[s], self.devices[w]) for w, (s, _) in enumerate(self.plan.workers) if self._is_here(w)}
        self._stages, self._measuring = compile_workers(own, runs), {}
        self._transport = Transport(self.devices, self.plan.stage_workers, self._processes)
        self._connect(functions, runs)
        self._spec, self._compiled = microbatch_spec(batch, self.plan.microbatches), functions
        self._fingerprint = _fingerprint(self.plan, self.devices, self._spec, functions)

    def _meet(self) -> None:
        """All processes are ready from here on."""
        self._exchange = MetricsExchange(self.plan, self.devices, self._processes, self.clip_global_norm is not None)
        if self._processes is not None:
            self._processes.barrier(f"{self._exchange.name}: compiled")
            self._transport.connect()
            self._processes.barrier(f"{self._exchange.name}: connected")

    def _connect(self, functions: list[StageFunctions], runs: Sequence[Program]) -> None:
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
        replicated = [(self.plan.stage_workers[s][0], f) for s, f in enumerate(functions) if f.stage.replicas > 1]
        sums: list[tuple[int, Tree]] = [(first, reduced_spec(f)) for first, f in replicated]
        sums += [(first, floats_of(f.specs.state)) for first, f in replicated if f.averages_when_read]
        stage_of = [s for s, _ in self.plan.workers]
        self._transport.compile([(i, specs[stage_of[i.worker], i.message]) for _, i in sorted(kinds.items())], sums)

    def _functions(self, batch: Batch) -> list[StageFunctions]:
        inputs, labels = spec = microbatch_spec(batch, self.plan.microbatches)
        known = spec, jax.dtypes.canonicalize_dtype(np.float64)  # losses are summed in it
        if self._known is not None and self._known[0] == known:
            return self._known[1]
        layers = self.stack.specs(inputs)
        unprobed = LayerwiseOptimizer(self.optimizer, {})  # mistakes in the loss are told first
        functions = []
        for stage in self.plan.stages:
            scale = stage.replicas / self.plan.replicas[0] if self.plan.scale_learning_rate else 1.0
            options = {"clip_global_norm": self.clip_global_norm, "update_scale": scale, "average_state": self._average_state}
            functions.append(stage_functions(self.stack, stage, layers, labels, self.loss, unprobed, **options))
        check_gradients(self.stack, layers, len(self.plan.stages[0].layers), self.loss, labels)
        layerwise = self._layerwise({layer_id: spec.params for layer_id, spec in layers.items()})
        self._known = known, [dataclasses.replace(f, optimizer=layerwise) for f in functions]
        return self._known[1]

    def _layerwise(self, params: Tree) -> LayerwiseOptimizer:
        """Probed once for each model that this pipeline meets: batches of other shapes may make other parameters."""
        if self._probed is None or self._probed[0] != params:
            self._probed = params, find_layerwise(self.optimizer, params)
        return self._probed[1]

    def _init_worker(
        self, stage: CompiledStage, initializers: dict[tuple[str, jax.Device], jax.stages.Compiled], key: jax.Array, given: Tree
    ) -> WorkerState:
        f, params, state = stage.functions, {}, {}
        for layer_id in f.stage.layers:
            layer_key = jax.device_put(self.stack.init_key(layer_id, key), stage.device)
            fresh, state[layer_id] = initializers[layer_id, stage.device](layer_key)
            params[layer_id] = jax.tree.map(partial(_given_or_fresh, stage.device), given[layer_id], fresh)
        optimizer, sums = jax.device_put([start(params) for start in compile_start(f, stage.device)], stage.device)
        return WorkerState({0: params}, optimizer, state, sums, {}, jax.device_put(key, stage.device))

    def _evaluating(self, metrics: Mapping[str, Loss]) -> dict[int, CompiledStage]:
        """The stages of this process, the last one with these metrics in its evaluation; compiled when they are first asked for."""
        asked = tuple((name, id(metric)) for name, metric in metrics.items())
        if metrics and asked not in self._measuring:
            self._check_metrics(self._compiled[-1], metrics)
            own = {w: stage for w, stage in self._stages.items() if stage.functions.last}
            self._measuring[asked] = with_metrics(own, metrics)
        return self._stages | self._measuring.get(asked, {})

    def _check_metrics(self, last: StageFunctions, metrics: Mapping[str, Loss]) -> None:
        if metrics:
            outputs = self.stack.specs(last.specs.x, last.stage.layers)[last.stage.layers[-1]].output
            for name, metric in metrics.items():
                check_summed(metric, f"metrics: '{name}'", last, outputs)

    def _run(
        self, program: Program, shift: int, workers: Sequence[WorkerState], batch: Batch | None, observe: Observer | None
    ) -> tuple[tuple[WorkerState, ...], Found]:
        host = {} if batch is None else dict(zip(("inputs", "labels"), to_host(batch), strict=True))
        states = dict(zip(self._stages, workers, strict=True))
        data = read_data(program, states, host, rows_of(self._spec))
        left, found = run(program, shift, self._stages, states, self._transport, data, observe)
        return tuple(left.values()), found

    def _check_state(self, state: State) -> None:
        if not isinstance(state, State):
            raise InputError(f"state: expected a jpipe.State, found {type(state).__name__}")
        if self._spec is None:
            raise InputError("state: this pipeline did not make it; call init first")
        if state.made_by != self._fingerprint:
            raise InputError(
                f"state: another pipeline made it: {_difference(state.made_by, self._fingerprint)}; "
                "make one with init, or take a snapshot of the other run and restore it here"
            )
        if any(_is_used_up(worker) for worker in state.workers):
            raise InputError("state: step or drain has already consumed it; go on with the state that call returned")

    def _drained(self, state: State, observe: Observer | None = None) -> State:
        """The state with nothing in flight; layer state is what each replica has made of it."""
        if state.start == state.batch:
            return state
        program, shift = self._steps.program(state.batch - state.start, state.batch, True)
        workers, _ = self._run(program, shift, state.workers, None, observe)
        return State(workers, state.batch, state.batch, self._average_state != "read", self._fingerprint)

    def _averaged(self, state: State) -> State:
        """The state with the mean over the replicas as layer state, where they average it when it is read: one sum for each stage."""
        if state.averaged:
            return state
        workers = dict(zip(self._stages, state.workers, strict=True))
        means: dict[int, Tree] = {}
        for s, replicas in enumerate(self.plan.stage_workers):
            parts = {w: floats_of(workers[w].layer_state) for w in replicas if w in workers}
            if parts and self._compiled[s].averages_when_read:
                calls = self._stages[next(iter(parts))].calls
                words = f"the mean of the layer state over the replicas of stage {s}"
                means |= self._transport.sum_replicas(replicas, parts, calls["add_state"], calls["mean_state"], words)
        for w, mean in means.items():
            averaged = with_floats(workers[w].layer_state, arrived(mean))
            workers[w] = dataclasses.replace(workers[w], layer_state=averaged)
        return dataclasses.replace(state, workers=tuple(workers.values()), averaged=True)

    def _settled(self, state: State) -> tuple[State, int]:
        """The newest version, in batches, that all workers of all processes hold; where there is none, of a drained copy of the state."""
        # After a restore or a drain the workers are ahead of a run that had none; they hold what that one would have in common as well.
        since = 0 if state.start == state.batch else state.batch
        version = self._steps.common_version(since, state.batch)
        if version is None:
            state = self._drained(_copy(state))
            version = state.batch
        return state, version


def _as_key(key: Any) -> jax.Array:
    """A typed key of JAX's default kind; an old-style `jax.random.PRNGKey` is wrapped."""
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == jax.random.key_data(jax.random.key(0)).shape:
        return jax.random.wrap_key_data(key)
    if not isinstance(key, jax.Array) or key.dtype != key_spec().dtype or key.shape != ():
        found = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else type(key).__name__
        raise InputError(f"init: expected a random key like jax.random.key(0), of JAX's default kind {key_spec().dtype}, found {found}")
    return key


def _given(params: Mapping[str, Tree], specs: Mapping[str, LayerSpec]) -> dict[str, Tree]:
    """The parameters of all layers: arrays where they are given, else shapes."""
    if not isinstance(params, Mapping):
        raise InputError(f"params: expected a dict of parameters by layer id, found {type(params).__name__}")
    for layer_id in params:
        if layer_id not in specs:
            raise InputError(f"params: the model has no layer {layer_id!r}; {nearest(str(layer_id), specs)}")
    return {layer_id: filled(spec.params, params.get(layer_id, {}), f"params: layer '{layer_id}'") for layer_id, spec in specs.items()}


def _given_or_fresh(device: jax.Device, given: Any, fresh: jax.Array) -> jax.Array:
    """A copy of the array that is given: an update writes into the memory of the old weights, which is not to be the caller's."""
    return fresh if isinstance(given, jax.ShapeDtypeStruct) else jnp.copy(jax.device_put(given, device))


def _fingerprint(
    plan: Plan, devices: Sequence[jax.Device], spec: Batch, functions: Sequence[StageFunctions]
) -> tuple[tuple[str, str], ...]:
    """All that decides what a state holds, by name."""
    fields = plan.model_dump(exclude={"format", "stages", "predicted"}).items()
    stages = ((f"stage {s}", f"{stage.replicas} × {', '.join(stage.layers)}") for s, stage in enumerate(plan.stages))
    recompute = ("recompute", ", ".join(stage.recompute for stage in plan.stages))
    weights = [(f.specs.params, f.specs.state) for f in functions]
    optimizer = [f.optimizer_spec for f in functions]
    return (
        *((name, str(value)) for name, value in fields),
        *stages,
        recompute,
        ("devices", ", ".join(map(str, devices))),
        ("microbatch", describe(spec)),
        ("microbatch in full", _shapes(spec)),
        ("weights and layer state", _shapes(weights)),
        ("optimizer state", _shapes(optimizer)),
    )


def _shapes(tree: Tree) -> str:
    """A hash of a tree's structure, shapes and dtypes."""
    leaves = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in jax.tree.leaves_with_path(tree)]
    return f"of shapes with the hash {hashlib.sha256(repr(leaves).encode()).hexdigest()[:8]}"


def _difference(made_by: Sequence[tuple[str, str]], fingerprint: Sequence[tuple[str, str]]) -> str:
    """The first thing in which two pipelines differ."""
    there, here = dict(made_by), dict(fingerprint)
    name = next(name for name in (*here, *there) if here.get(name) != there.get(name))
    return f"{name} is {_short(there.get(name))} there and {_short(here.get(name))} here"


def _short(text: str | None) -> str:
    return "absent" if text is None else text if len(text) <= 80 else f"{text[:79]}…"


def _is_used_up(worker: WorkerState) -> bool:
    """Whether a run took what it held, or donated the arrays that a copy of it shares."""
    donated = jax.tree.leaves(worker.sums)[:1] + jax.tree.leaves(worker.optimizer)[:1]
    return not worker.versions or any(leaf.is_deleted() for leaf in donated)


def _check_observer(observe: Any) -> None:
    if observe is not None and not callable(observe):
        raise InputError(f"observe: expected a function of an Event, such as a Tracer or a Snapshot, found {type(observe).__name__}")


def _check_clipping(clip_global_norm: Any, plan: Plan) -> None:
    if not isinstance(clip_global_norm, (int, float, np.integer, np.floating)) or not 0 < clip_global_norm < math.inf:
        raise InputError(f"clip_global_norm: expected a finite number above 0, found {clip_global_norm!r}")
    if SCHEDULES[plan.schedule].flushes:
        return
    flushing = ", ".join(f"'{name}'" for name, schedule in SCHEDULES.items() if schedule.flushes)
    if "vertical_sync" in SCHEDULES[plan.schedule].options and not plan.vertical_sync:
        why = "weight stashing cannot clip: its first stages know the norm only after its last ones had to update"
    else:
        why = f"clipping with the asynchronous schedule '{plan.schedule}' is not supported"
    raise InputError(f"clip_global_norm: {why}; use a schedule that flushes ({flushing}), or leave it out")


def _checked_metrics(metrics: Any) -> dict[str, Loss]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InputError(f"metrics: expected a dict of functions by name, found {type(metrics).__name__}")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not callable(metric):
            raise InputError(
                f"metrics: expected a function by name, found {name!r}: {type(metric).__name__}; give (outputs, labels) -> (sum, weight)"
            )
    return dict(metrics)


def _copy(tree: Tree) -> Tree:
    return jax.tree.map(jnp.copy, jax.tree.map(arrived, tree))
