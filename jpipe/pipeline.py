"""The class `Pipeline`: a model, a plan, a loss and an optimizer as functions from state to state."""

import contextlib
import importlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, SupportsFloat, SupportsIndex, overload

import jax
import numpy as np
import optax

from jpipe._arguments import (
    as_key,
    check_ema_decay,
    check_observer,
    check_ties,
    check_to,
    check_weights,
    checked_arguments,
    checked_batch,
    checked_delay_factor,
    checked_metrics,
    checked_model,
    initial_arrays,
    log_correction,
)
from jpipe._interrupts import Outcome, consuming, current_state, delayed_signals
from jpipe._numbers import as_python
from jpipe.capabilities.registry import uses_by, variants_of
from jpipe.context import Positions, traced_platform, tracing_for
from jpipe.errors import InputError
from jpipe.meshes._place import Place
from jpipe.model._function_arguments import Loss
from jpipe.model._precision import PLAIN, Precision, cast_layers, check_precision
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._rows import warn_of_mixed_rows
from jpipe.plan import Plan
from jpipe.programs._costs import StageCost
from jpipe.programs._steps import Steps
from jpipe.programs.lowering import lower
from jpipe.runtime._executor import Executor, To, Weights
from jpipe.runtime._interpreter import Observer
from jpipe.runtime._join import join_processes
from jpipe.runtime._metrics import DelayNorms, Evaluation, Metrics
from jpipe.runtime._placement import checked_devices, place, place_on
from jpipe.runtime._plain import Plain
from jpipe.runtime._snapshot import Snapshot, fitting, for_stage, restored_worker
from jpipe.runtime.state import State, WorkerState, check_state, fresh_worker, initialized_at, is_fresh
from jpipe.stages._arrays import Arrays, shares_of
from jpipe.stages._batch import (
    Batch,
    Bucket,
    bucket_of,
    bucket_of_inputs,
    check_buckets,
    describe_shapes,
    in_microbatches,
    microbatch_spec,
    rows_of,
)
from jpipe.stages._builder import StageBuilder
from jpipe.stages._bytes import joined_costs, measure_stages
from jpipe.stages._compile import CompiledPrograms, compile_initializers, compile_stages, count_calls
from jpipe.stages._compiled_stage import CompiledStage
from jpipe.stages._whole_step import trace_whole_step
from jpipe.stages.functions._evaluation import check_evaluation
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any

_LOG = logging.getLogger("jpipe")


@contextlib.contextmanager
def isolated_context() -> Iterator[None]:
    """Run a method of a pipeline without the mesh and the transfer guard that the user has set.

    Other settings of JAX still apply, such as `jax.default_matmul_precision` while `init` compiles. Raise InputError if `jax.disable_jit`
    is on, or the call is inside a function that JAX traces.
    """
    if getattr(jax.config, "jax_disable_jit", False):  # not in the types of all versions
        raise InputError(
            "jax_disable_jit is on, but a pipeline runs programs that are compiled ahead; turn it off; to inspect a layer, use "
            "jax.debug.print, or call LayerStack.apply without a pipeline"
        )
    try:
        outside = jax.set_mesh(None)
    except ValueError:
        raise InputError(
            "a method of a pipeline was called inside a function that JAX traces (jax.jit, jax.grad, …): a pipeline compiles programs of "
            "its own; call it outside"
        ) from None
    with outside, jax.transfer_guard("allow"):  # the pipeline transfers small arrays to devices, such as numbers of microbatches
        yield


class Pipeline:
    """Trains a model through a pipeline according to a plan. It holds compiled programs, but no training state.

    `init` verifies the programs of the plan (see `simulate`) before it compiles anything. In a run of several processes (after
    `jax.distributed.initialize`) all processes make the same pipeline and call the same methods in the same order; each process runs the
    workers on its own devices.

    Args:
        stack: the model.
        plan: the stages, schedule, microbatches and recomputation. "auto" becomes the policy for the platform of the devices.
        loss: `(outputs, labels) -> (sum of the losses, weight)` of one microbatch, two scalars. The gradient of a batch is divided by the
            batch's total weight, so a loss can leave out padded or masked positions. A third parameter, if the loss has one, gets the
            microbatch's `flax.nnx.Rngs` if it is named `rngs`, or the microbatch's random key if it is named `key`.
        optimizer: an optax transformation that treats layers separately; `init` rejects any other. Masks and labels are trees by layer id,
            or trees like the model's own parameters if the layers were cut from a model.
        devices: the device of each rank, in order; for a rank with a mesh, all devices of the mesh. The default is the plan's placement
            among the devices of all processes. With too few devices, neighbouring ranks share one. (Without chunks a rank is one replica of
            a stage.)
        clip_global_norm: clip the mean gradient of each batch to this norm over all stages, as `optax.clip_by_global_norm` does. The result
            does not depend on the cut. It cannot be used with `pipedream`, except with `vertical_sync`. Under schedules that do not flush
            no worker waits for the norm: it updates when the norm arrives.
        clip_stage_norm: clip the mean gradient of each stage to this norm, under any schedule. The result depends on the cut, so prefer
            `clip_global_norm` if the schedule allows it. The two cannot be combined, and stages must not share trained parameters.
        skip_nonfinite: if any gradient of a batch is NaN or infinite, change no weights and no optimizer state at any stage;
            `Metrics.nonfinite` reports such batches. Layer state, such as batch statistics, does change. Only schedules that allow
            `clip_global_norm` allow this. A dynamic loss scale includes it.
        ema_decay: keep an exponential moving average of the weights, `decay * average + (1 - decay) * weights` after each update, from the
            initial weights on, in float32 for weights of lower precision. `evaluate` and `params` use the average with `weights="ema"`. The
            decay is at least 0 and below 1. It cannot be combined with `Plan.shard_optimizer`.
        precision: the dtypes of parameters, computations and accumulated gradients, and the loss scale.
        delay_correction: correct the delay of gradients under schedules that do not flush: "predict", or a number that replaces 1 as the
            factor of `jpipe.optimizers.predict_delay`. With "predict" each update adds λ times itself to the weights, where λ is the
            stage's delay in updates (`Plan.delay`), and removes what the previous update had added. `evaluate`, `predict`, `params` and the
            moving average use the weights without this prediction. The optimizer must have momentum; with Nesterov's momentum and delays
            above one update use 0.5. Each stage with a delay holds one more copy of its parameters; other stages do not change.

    Raises:
        InputError: the plan does not fit the model or the devices; the schedule cannot clip or skip batches; both norms to clip to are set;
            or a decay or correction is invalid.

    Example:
        >>> import jax.numpy as jnp
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
        clip_global_norm: SupportsFloat | None = None,
        clip_stage_norm: SupportsFloat | None = None,
        skip_nonfinite: bool = False,
        ema_decay: SupportsFloat | None = None,
        precision: Precision = PLAIN,
        delay_correction: Literal["predict"] | SupportsFloat | None = None,
    ) -> None:
        stack, plan = checked_model(stack, plan, loss)
        check_precision(precision)
        check_ema_decay(ema_decay)
        if plan.order is not None:
            lower(plan, 1, workers=())  # raises an error if the order deadlocks, before anything is compiled
        self._explicit_devices = None if devices is None else checked_devices(devices)
        plan = plan.resolved(self._explicit_devices[0].platform if self._explicit_devices else traced_platform())
        self.stack, self.plan, self.loss, self.optimizer = cast_layers(stack, precision), plan, loss, optimizer
        self.clip_global_norm, self.clip_stage_norm = as_python(clip_global_norm), as_python(clip_stage_norm)
        self.skip_nonfinite, self.precision = skip_nonfinite, precision
        self.ema_decay = None if ema_decay is None else float(ema_decay)
        self.delay_factor = checked_delay_factor(delay_correction)
        norms = {"clip_global_norm": self.clip_global_norm, "clip_stage_norm": self.clip_stage_norm}
        others = {"skip_nonfinite": skip_nonfinite, "ema_decay": self.ema_decay, "delay_correction": self.delay_factor}
        arguments = checked_arguments(plan, precision, **norms, **others)
        check_ties(plan, self.stack)
        self._builder = StageBuilder(self.stack, plan, loss, optimizer, precision, self.ema_decay, self.delay_factor, arguments)
        self._bucket_built: Bucket | None = None  # the last one, because tracing the slices of rows takes long
        self._steps: Steps | None = None
        self._begun: tuple[jax.Array, Batch, Sequence[Batch]] | None = None  # the key, the shapes of a batch and buckets of the last start
        self._executor: Executor | None = None  # set when `init` or `restore` has compiled

    def __repr__(self) -> str:
        where = "not compiled yet" if self._executor is None else f"compiled for microbatches of {describe_shapes(self._executor.specs)}"
        numbers = {name: getattr(self, name) for name in ("clip_global_norm", "clip_stage_norm", "ema_decay")} | {
            "delay_correction": self.delay_factor
        }
        options = "".join(f", {name}={value:g}" for name, value in numbers.items() if value is not None)
        skip = ", skip_nonfinite=True" if self.skip_nonfinite else ""
        precision = "" if self.precision == PLAIN else f", {self.precision}"
        return f"Pipeline({self.plan!r}{options}{skip}{precision}, {where})"

    @property
    def uses_global_norm(self) -> bool:
        """Whether updates use the norm of the gradients of all stages: to clip, to skip batches, or for a dynamic loss scale."""
        return self.clip_global_norm is not None or self.skip_nonfinite or self.precision.dynamic_scale is not None

    # What a user calls -------------------------------------------------------------------------------------------------

    @isolated_context()
    def check(self, batch: Batch, metrics: Mapping[str, Loss] | None = None) -> None:
        """Raise InputError if batches like this one could not run. Only the optimizer is run, on tiny arrays.

        Args:
            batch: as in `init`.
            metrics: as in `evaluate`; None checks only training.

        Raises:
            InputError: the batch is not a pair (inputs, labels), or its rows are not divisible by the microbatches; layers do not fit the
                inputs; the optimizer cannot be applied layer by layer; the loss or a metric does not fit the outputs; or the rows or layers
                do not fit the slices of the plan.
        """
        bucket = self._bucket(microbatch_spec(batch, self.plan.microbatches))
        if metrics is not None:
            check_evaluation(bucket.functions[-1], checked_metrics(metrics))

    @isolated_context()
    def init(self, key: jax.Array, batch: Batch, params: Tree | None = None, *, buckets: Sequence[Batch] = ()) -> State:
        """Compile for batches like this one, and place fresh weights, or the given `params`, on the devices.

        If the pipeline has already compiled for batches of this shape under the same settings of JAX, it does not compile again.

        If a layer mixes rows, as batch normalization does, or the loss is not a sum over rows, one warning is logged: the layer or loss
        sees only the rows of a microbatch, not the rows of the whole batch.

        Args:
            key: seed of initialization and dropout.
            batch: (inputs, labels) as in `step`; only the shapes and dtypes are used.
            params: initial parameters by layer id, as the method `params` returns them: nested dicts of arrays of any kind, an NNX module
                or its `nnx.state`. If the layers were cut from a model, `params` may also be the model or its own tree of parameters. The
                arrays are copied. Missing layers or parameters get the model's arrays if it has any, and fresh arrays otherwise. All
                optimizer state is fresh.
            buckets: batches of the other shapes that steps and evaluations will get, such as longer sentences; only the shapes and dtypes
                are used. Each step uses the programs compiled for its batch's shape. Every bucket must have as many rows as `batch`, and
                the parameters and state of all layers must have the same shapes for it.

        Returns:
            The state before batch 0.

        Raises:
            InputError: an error of `check`, also for `buckets`; the key is of another kind; devices do not exist; the plan differs between
                processes; the model does not have the parameters, or has them in another shape or dtype; a tie has different arrays in its
                two places; or buckets differ in their rows or array names, or change the parameters or state of a layer.
        """
        key = as_key(key)
        spec = microbatch_spec(batch, self.plan.microbatches)
        specs = self.stack.specs(spec[0])
        initial = initial_arrays(params, self.stack, specs)
        executor = self._compile(batch, buckets, {"key": _bits(key)})
        warn_of_mixed_rows(self.stack, specs, spec[1], self.loss, rows_of(spec), self.plan.microbatches)
        places = [(layer_id, stage.place) for stage in executor.stages.values() for layer_id in initialized_at(stage)]
        initializers = executor.initializers
        missing = [each for each in places if is_fresh(initial[each[0]]) and each not in initializers]
        initializers.update(compile_initializers(self.stack, specs, missing))
        self._begun = key, microbatch_spec(batch, 1), [microbatch_spec(bucket, 1) for bucket in buckets]
        return self._start(executor, [fresh_worker(stage, initializers, key, initial) for stage in executor.stages.values()], 0)

    @isolated_context()
    def restore(
        self,
        key: jax.Array,
        batch: Batch,
        layers: Mapping[str, Plain],
        at: SupportsIndex,
        *,
        fresh_optimizer: bool = False,
        buckets: Sequence[Batch] = (),
    ) -> State:
        """Compile as `init` does, and return the state before batch `at` of the run that a `Snapshot` has saved.

        Under the same plan the run continues as if it had not ended, bit for bit. The plan may also differ in cuts, replicas, schedule,
        recomputation or processes. If the plan reads weight versions that the snapshot lacks, the newest version replaces them. If a stage
        has another number of replicas, each begins with the mean of the former replicas' layer state; without `sync_state`, new replica i
        begins with the state of former replica i mod n, of n former replicas.

        Args:
            key: the random key of the run, as passed to `init`.
            batch: as in `init`.
            layers: the layers from `Snapshot.layers`, with arrays of any kind; at least the layers of this process's workers.
            at: the batch of the snapshot.
            fresh_optimizer: begin with new optimizer state; set it if the optimizer differs from the snapshot's.
            buckets: as in `init`.

        Raises:
            InputError: an error of `init`; a layer is missing or has another shape; or the optimizer state is another optimizer's.
        """
        key, at = as_key(key), checked_batch("at", at)
        executor = self._compile(batch, buckets, {"key": _bits(key), "first batch": str(at)})
        self._begun = key, microbatch_spec(batch, 1), [microbatch_spec(bucket, 1) for bucket in buckets]
        workers = [restored_worker(self.plan, w, stage, layers, at, key, fresh_optimizer) for w, stage in executor.stages.items()]
        return self._start(executor, workers, at)

    @isolated_context()
    def check_layers(self, batch: Batch, layers: Mapping[str, Plain], at: SupportsIndex, *, fresh_optimizer: bool = False) -> None:
        """Raise InputError if `restore` cannot use the layers, without compiling or waiting for other processes.

        Args:
            batch: (inputs, labels); only shapes and dtypes are used.
            layers: as in `restore`.
            at: the batch of the snapshot.
            fresh_optimizer: do not check the optimizer state, because `restore` will not use it.

        Raises:
            InputError: a layer is missing or has another shape, or the optimizer state is another optimizer's.
        """
        functions, at = self.stage_functions(batch), checked_batch("at", at)
        for w, (s, _) in enumerate(self.plan.workers):
            if self.places[w].process_index == jax.process_index():
                f = functions[s]
                fitting(self.plan, w, f, for_stage(f, layers, fresh_optimizer), at, fresh_optimizer)

    @isolated_context()
    def snapshot(self, at: SupportsIndex | State) -> Snapshot:
        """Return a `Snapshot` of this run. Call `init` or `restore` first.

        Args:
            at: the number of a batch: the snapshot will copy the state before it, while `step` and `drain` have the snapshot as `observe`.
                Or a state: the snapshot is complete. Work in flight is finished in a copy of the state, which takes time and the memory of
                a second state; the run itself is not drained. In a run of several processes all processes call this with their state.

        Raises:
            InputError: neither `init` nor `restore` has been called; `at` is not an integer of 0 or more; or the state was consumed.
        """
        if isinstance(at, State):
            executor, state = self._running(at)
            with self._undivided():
                return executor.snapshot(state)
        batch = checked_batch("snapshot", at)
        if self._executor is None:
            raise InputError("snapshot: this pipeline has no run yet; call init or restore first")
        return Snapshot(self.plan, batch, self._executor.stages)

    def save(self, folder: str | Path, state: State, *, facts: Any = None, keep: int | None = None) -> None:
        """Write a checkpoint of any state of a run, such as `checkpoints/40` after 40 batches. On return it is on disk.

        The state is not changed; `snapshot` describes what this takes. To write while the run trains, see `jpipe.checkpoints`. In a run of
        several processes, all must call this.

        Args:
            folder: the folder of the run, which all processes share.
            state: a state that is not consumed.
            facts: anything of JSON types, for `jpipe.checkpoints.Checkpoint.facts`.
            keep: the number of newest checkpoints to keep; older ones are removed. None keeps all.

        Raises:
            InputError: an error of `snapshot`, or of `jpipe.checkpoints.save`, which lists further errors.
        """
        if not isinstance(state, State):
            raise InputError(where="save", key="state", expected="a state of this pipeline", found=type(state).__name__)
        _checkpoints().save(folder, self.snapshot(state), facts=facts, keep=keep)

    def load(
        self,
        folder: str | Path,
        key: jax.Array | None = None,
        batch: Batch | None = None,
        *,
        step: SupportsIndex | None = None,
        fresh_optimizer: bool = False,
        buckets: Sequence[Batch] = (),
    ) -> State:
        """Return the state of a checkpoint of `save`, or of a run of `jpipe train`. The run continues as if it had not ended, bit for bit.

        The plan of this pipeline may differ from the plan of the run; `restore` describes what is restored then.

        Args:
            folder: the folder of the run.
            key: the random key of the run, as passed to `init`; by default the key of the last `init` or `load` of this pipeline.
            batch: as in `init`; by default the batch and the buckets of the last `init` or `load`.
            step: the number of batches before the checkpoint; None: the newest complete checkpoint.
            fresh_optimizer: begin with new optimizer state, for another optimizer or learning rate; the weights are the checkpoint's.
            buckets: as in `init`, if `batch` is given.

        Raises:
            InputError: `key` or `batch` is missing, and neither `init` nor `load` was called; there is no such checkpoint; or an error of
                `jpipe.checkpoints.load`.
        """
        if key is None or batch is None:
            if self._begun is None:
                raise InputError("load: this pipeline has not been initialized; give the key and a batch, as for init", where="pipe")
            key = self._begun[0] if key is None else key
            batch, buckets = self._begun[1:] if batch is None else (batch, buckets)
        at = None if step is None else checked_batch("load", step)
        state: State | None = _checkpoints().load(self, folder, key, batch, at, fresh_optimizer=fresh_optimizer, buckets=buckets)
        if state is None:
            raise InputError("there is no complete checkpoint; call init to begin a run", where=str(folder))
        return state

    def step(self, state: State, batch: Batch, *, observe: Observer | None = None) -> tuple[State, Metrics]:
        """Feed one batch: its m microbatches enter the pipeline, and every computation that is ready is dispatched.

        Asynchronous schedules do not finish the batch: the remaining work stays in flight in the state.

        Ctrl-C does not lose the state. Before the step begins to overwrite arrays, KeyboardInterrupt is raised at once, and `state` is
        unchanged. Later, or if `observe` raises an error, the step is first dispatched to its end. The caller still has `state`. If `step`
        is called again with `state` and the same batch, it returns the result of the interrupted step. With another batch `step` continues
        from that result, and the metrics are for both steps. `drain`, `evaluate` and `params` continue from that result, too.

        A second Ctrl-C after three seconds does not wait, and loses the state. A computation that fails (out of memory, for example) loses
        the state, too: the next call with this state raises an InputError that names the cause. SIGTERM is treated like Ctrl-C if a Python
        function handles it. In a run of several processes each process completes its own part, so that the other processes can continue.

        Args:
            state: the current state, which is consumed; use the returned state from here on.
            batch: (inputs, labels), pytrees of arrays. The first dim holds the rows of the batch; the plan's number of microbatches divides
                it. A leaf may be any object that has a shape and a dtype and returns slices of rows: only the rows that this process's
                workers need are read. In a run of several processes all processes pass the same batch; the step compares some rows of NumPy
                and JAX arrays.
            observe: called with an `Event` after each instruction is dispatched; see `Tracer`.

        Returns:
            The next state, and the losses of the batches that this step finished.

        Raises:
            InputError: the state was already consumed, or lost by a failed step; or the batch is unlike the batches of `init`.
        """
        if observe is not None:
            check_observer(observe)
        outcome: Outcome | None = None
        try:
            with isolated_context():
                executor, current = self._running(state)
                bucket = bucket_of(batch, self.plan.microbatches, executor.specs)
                if (interrupted := state._outcome) is not None and interrupted.is_of(batch, self.plan.microbatches):
                    return interrupted.result
                read = executor.read(current, batch, bucket)
                with consuming(state, current, observe) as (outcome, observer):
                    outcome.result = executor.step(current, read, bucket, observer)
            result = outcome.result
            assert result is not None
            outcome.result = None  # Python runs no signal handler from here to the caller's assignment
            return result
        except BaseException:
            if outcome is not None:
                outcome.note_batch(batch, self.plan.microbatches)
            raise

    @overload
    def drain(self, state: State, *, observe: Observer | None = ...) -> State: ...
    @overload
    def drain(self, state: State, *, observe: Observer | None = ..., with_metrics: Literal[True]) -> tuple[State, Metrics]: ...
    @overload
    def drain(self, state: State, *, observe: Observer | None = ..., with_metrics: bool = ...) -> State | tuple[State, Metrics]: ...

    def drain(self, state: State, *, observe: Observer | None = None, with_metrics: bool = False) -> State | tuple[State, Metrics]:
        """Finish all work in flight, including pending updates. Training may continue afterwards, with the same numbers.

        Under a schedule that does not flush each replica has its own layer state. Unless the plan sets `sync_state` to false, `drain`
        replaces these states by their mean, and layers that read their state while they train continue from the mean.

        Ctrl-C and errors of `observe` wait until `drain` is complete, as in `step`; call `drain` again to get the result.

        Args:
            state: the current state, which is consumed if anything is in flight; use the returned state from here on.
            observe: as in `step`.
            with_metrics: also return the metrics that are known only after the drain: the last norms, if updates wait for norms.

        Returns:
            The state with nothing in flight, or (state, metrics).

        Raises:
            InputError: the state was already consumed.
        """
        if observe is not None:
            check_observer(observe)
        with isolated_context():
            executor, current = self._running(state)
            if current is state and current.start == current.batch:  # nothing is consumed
                with delayed_signals():
                    averaged = executor.average(state)
                return (averaged, Metrics.empty()) if with_metrics else averaged
            with consuming(state, current, observe) as (outcome, observer):
                after, metrics = executor.drain(current, observer)
                outcome.result = executor.average(after), metrics
        result = outcome.result
        assert result is not None
        outcome.result = None  # as in `step`
        return result if with_metrics else result[0]

    @isolated_context()
    def evaluate(self, state: State, batch: Batch, metrics: Mapping[str, Loss] | None = None, *, weights: Weights = "newest") -> Evaluation:
        """Compute the loss and the metrics of a batch in evaluation mode, with one weight version for all stages; the state is not changed.

        Random numbers depend only on the key of the run and the position of the microbatch in the batch, so the same call gives the same
        numbers. The keys differ from those in training.

        The version is the newest that all replicas of all stages hold. While microbatches are in flight there may be none, for example
        under `pipedream` without replicas, or mostly under 2BW with replicas. Then a copy of the state is drained, which takes memory
        for the copy during the call. This also happens for the average of the weights, and with `delay_correction`. With `Plan.agree` the
        weights are the last on which the pipelines have agreed, after such a drain. Layer state (batch statistics) is the present state of
        each stage, which is ahead of that version by the microbatches in flight; over replicas it is the mean, unless the plan has
        `sync_state` false.

        Args:
            state: any state that is not consumed.
            batch: as in `step`, with any number of rows. Rows that do not fill a microbatch are repeated until they fill microbatches, all
                equally often, and their sums and weights are divided by this number.
            metrics: functions by name. Each is `(outputs, labels) -> (sum, weight)` of one microbatch, two scalars like the loss. They run
                at the last stage, and get random numbers as the loss does. They are compiled at first use, so pass the same function
                objects each time. They must be the same in all processes.
            weights: "newest", or "ema" for the moving average of the weights, in the dtypes of the parameters.

        Returns:
            The mean of the loss and of each metric.

        Raises:
            InputError: the state was already consumed; the batch is unlike the batches of `init`; the loss or a metric does not accept the
                model's outputs in evaluation; or weights="ema" without `ema_decay`.

        Example:
            >>> def accuracy(logits, labels):
            ...     return (logits.argmax(-1) == labels).sum(), labels.size
            >>> evaluation = pipe.evaluate(state, batch, metrics={"accuracy": accuracy})  # doctest: +SKIP
            >>> float(evaluation.metrics["accuracy"].mean)  # doctest: +SKIP
            0.75
        """
        check_weights(weights, self.ema_decay)
        (executor, state), metrics = self._running(state), checked_metrics(metrics)
        evaluated = in_microbatches(batch, rows_of(executor.specs[0]))
        bucket = bucket_of(evaluated.batch, evaluated.microbatches, executor.specs)
        with self._undivided():
            return executor.evaluate(state, evaluated, bucket, metrics, weights)

    @overload
    def predict(self, state: State, batch: Tree, *, weights: Weights = ..., to: Literal["all"] = ...) -> Tree: ...
    @overload
    def predict(self, state: State, batch: Tree, *, weights: Weights = ..., to: To) -> Tree | None: ...

    @isolated_context()
    def predict(self, state: State, batch: Tree, *, weights: Weights = "newest", to: To = "all") -> Tree | None:
        """Return the outputs of the last layer for each row, in evaluation mode; the state is not changed.

        The weight version and the layer state are the same as in `evaluate`. Copies of the last rows fill the last microbatch: layers that
        mix rows see these copies, but their outputs are dropped. The programs are compiled at the first call.

        Args:
            state: any state that is not consumed.
            batch: inputs of any number of rows, or (inputs, labels) as in `step`; the labels are not read.
            weights: as in `evaluate`.
            to: which processes of a run get the outputs: "all", or "first", which is process 0. All processes must pass the same value.

        Returns:
            The outputs as NumPy arrays, in the order of the rows and in the structure that the last layer returns in evaluation; None in a
            process that does not get them.

        Raises:
            InputError: the state was already consumed; the inputs are unlike the inputs of `init`; the outputs do not have one row for each
                input row; or weights="ema" without `ema_decay`.

        Example:
            >>> import jax.numpy as jnp
            >>> stack = LayerStack({"double": lambda x: 2 * x, "add": lambda x: {"y": x + 1}})
            >>> plan = Plan.even(stack.ids, num_stages=2, schedule="gpipe", microbatches=2)
            >>> pipe = Pipeline(stack, plan, lambda y, labels: (((y["y"] - labels) ** 2).sum(), labels.size), optax.sgd(0.1))
            >>> state = pipe.init(jax.random.key(0), (jnp.ones((4, 1)), jnp.zeros((4, 1))))
            >>> pipe.predict(state, jnp.arange(3.0).reshape(3, 1))["y"].ravel()
            array([1., 3., 5.], dtype=float32)
        """
        check_weights(weights, self.ema_decay)
        check_to(to)
        executor, state = self._running(state)
        specs = [spec for spec, _ in executor.specs]
        is_batch = isinstance(batch, tuple) and len(batch) == 2 and jax.tree.structure(batch[0]) == jax.tree.structure(specs[0])  # type: ignore[operator]
        inputs = batch[0] if is_batch else batch
        with self._undivided():
            return executor.predict(state, inputs, bucket_of_inputs(inputs, specs), weights, to)

    @isolated_context()
    def params(self, state: State, *, weights: Weights = "newest") -> Tree:
        """Return the parameters of all layers at one version (as in `evaluate`), by layer id; arrays stay on their devices.

        If all layers were cut from a model (`LayerStack.from_model`), the result is the model's own tree of parameters, with a
        `jax.ShapeDtypeStruct` for each parameter that this process does not have.

        The arrays are copies, because the next step may overwrite the originals. In a run of several processes each process gets the layers
        of its own workers. If `precision` keeps masters, the float32 masters are returned. Only the newest version has masters: if
        microbatches are in flight, a copy of the state is drained, and its last masters are returned. With `Plan.shard_optimizer` each
        process gets masters (and with `delay_correction` weights without prediction) only for the layers that its replicas update.

        Args:
            state: any state that is not consumed.
            weights: as in `evaluate`.

        Raises:
            InputError: the state was already consumed; or weights="ema" without `ema_decay`.
        """
        check_weights(weights, self.ema_decay)
        executor, state = self._running(state)
        with self._undivided():
            params = executor.params(state, weights)
        return self.stack.whole_params(params)

    @isolated_context()
    def model(self, state: State, *, weights: Weights = "newest", device: jax.Device | None = None) -> Any:
        """Return the model of `LayerStack.from_model` with the trained weights, for code that does not use pipelines.

        For an NNX module the result is a module of the same class, for a Linen module its variables, for a callable pytree the pytree, and
        for a function its parameters, or (parameters, state) if it has layer state. The weight version and the layer state are the same as
        in `evaluate`; the arrays are copies. In a run of several processes no process has all arrays: save a checkpoint and load it in one
        process.

        Args:
            state: any state that is not consumed.
            weights: as in `evaluate`.
            device: the device for the arrays, such as `jax.devices("cpu")[0]` for a model that is larger than one accelerator; by default
                JAX's default device.

        Raises:
            InputError: the layers were not cut from a model; this process does not have all layers; the state was already consumed; or
                weights="ema" without `ema_decay`.
        """
        check_weights(weights, self.ema_decay)
        executor, state = self._running(state)
        with self._undivided():
            return self.stack.whole_model(executor.params(state, weights), executor.layer_state(state), device)

    @isolated_context()
    def delay_norms(self, state: State) -> DelayNorms:
        """Return the norms of the delay correction and of the distance between weight versions, which show the effect of the delay.

        The call reads all weights, so do not make it at every step. In a run of several processes all processes call it.

        Args:
            state: any state that is not consumed.

        Returns:
            The norms over the parameters of all stages. The distance is NaN if no stage holds two versions between two steps, as under
            schedules that flush, and under `pipedream` with many microbatches.

        Raises:
            InputError: the state was already consumed.
        """
        executor, state = self._running(state)
        with self._undivided():
            return executor.delay_norms(state)

    @isolated_context()
    def costs(
        self,
        batch: Batch,
        *,
        compiled_for: jax.Device | Sequence[jax.Device] | None = None,
        stages: Collection[int] | None = None,
        programs: CompiledPrograms | None = None,
    ) -> tuple[StageCost, ...]:
        """Compute from shapes the exact bytes that the stages hold and move for batches like this one, for `jpipe.simulate`.

        If the plan cuts rows into slices, these are the costs of the mean slice, and `by_slice` has each slice's: their times are in
        proportion to the products in their forwards, such as the pairs of queries and keys.

        Times are in units: a forward takes 1, a backward 2, each half of a backward 1, and recomputation 1 more. Temporaries are known only
        after `init` has compiled, or with `compiled_for`. On a mesh the bytes are for each device of the stage. Before compilation,
        residuals count as sharded only over the rows; afterwards, they count as XLA shards them.

        Args:
            batch: as in `init`; the leaves may be `jax.ShapeDtypeStruct`s.
            compiled_for: compile the stages for this device instead of the plan's own devices, only to measure their temporaries. Stages on
                meshes are compiled for the first devices of the same kind in this process, or for the first ones of a sequence of devices.
                The devices need not exist: they may come from `jax.experimental.topologies`.
            stages: with `compiled_for`, compile only these stages; all by default. The temporaries of the other stages are 0.
            programs: a dict that keeps the programs compiled with `compiled_for`; pass an empty one first. Other plans of this model then
                reuse the programs of equal stages.

        Raises:
            InputError: the batch or the layers do not fit; see `check`.
        """
        if compiled_for is not None:
            parts = self._compile_for(batch, compiled_for, stages, programs)
        else:
            bucket = self._bucket(microbatch_spec(batch, self.plan.microbatches))
            known: Sequence[Mapping[int, CompiledStage]] = [{} for _ in bucket.trained]
            if self._executor is not None:
                known = self._executor.compiled_for(bucket.spec[0])
            compiled = [{self.plan.workers[w][0]: stage for w, stage in each.items()} for each in known]
            parts = list(zip(bucket.trained, compiled, strict=True))
        return joined_costs([functions for functions, _ in parts], [measure_stages(self.plan, *part) for part in parts])

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """For each worker, in order, the device or the mesh of devices where it computes."""
        return place(self.plan, self._explicit_devices)

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The device of each worker, in order; for a worker on a mesh, the first device of the mesh."""
        return tuple(place.first for place in self.places)

    @property
    def transfers(self) -> str | None:
        """How processes exchange messages, "collectives" or "device_put"; None in one process, and before `init` or `restore`.

        The collectives are programs of jpipe. JAX's `device_put` is used if a probe at the start shows that it works between all processes.
        """
        return None if self._executor is None else self._executor.transfers

    # Inside ------------------------------------------------------------------------------------------------------------

    def stage_functions(self, batch: Batch) -> list[StageFunctions]:
        """Return the pure functions of each stage (forward, backward, update, …) for batches of this shape. Tools use them."""
        return self._builder.build(microbatch_spec(batch, self.plan.microbatches))

    @isolated_context()
    def positions(self, batch: Batch) -> list[Positions]:
        """Return the positions of each slice into which the plan cuts the rows of batches of this shape; empty for whole rows.

        Raises:
            InputError: as `check`.
        """
        return self._bucket(microbatch_spec(batch, self.plan.microbatches)).positions

    @isolated_context()
    def compiled_calls(
        self, batch: Batch, compiled_for: jax.Device | Sequence[jax.Device], programs: CompiledPrograms | None = None
    ) -> list[dict[str, tuple[jax.stages.Compiled, int]]]:
        """Compile the stages as `costs` does, for tools that read programs.

        Returns:
            For each stage its programs by name, such as `forward`, each with the number of its calls in a step of the steady state.

        Raises:
            InputError: the plan cuts rows into slices, which have their own programs.
        """
        (functions, stages), *slices = self._compile_for(batch, compiled_for, None, programs)
        if slices:
            raise InputError("this needs the programs of whole rows, found a plan with slices; remove slices from the plan")
        counts = count_calls(self._steps_of(functions).steady, functions)
        return [{name: (stages[s].calls[name], calls) for name, calls in sorted(counts[s].items())} for s in range(self.plan.depth)]

    @isolated_context()
    def lower_whole_step(self, batch: Batch, device: jax.Device) -> jax.stages.Lowered:
        """Lower a train step of a plan with one stage as one program for a device, which may not be here, for tools."""
        with tracing_for(device.platform):
            (functions,) = self.stage_functions(batch)
            return trace_whole_step(Arrays(functions, Place((device,))), self.plan.microbatches).lower()

    def _compile_for(
        self,
        batch: Batch,
        compiled_for: jax.Device | Sequence[jax.Device],
        stages: Collection[int] | None,
        programs: CompiledPrograms | None,
    ) -> list[tuple[Sequence[StageFunctions], Mapping[int, CompiledStage]]]:
        """Return for each slice, or for whole rows, the functions of all stages, and those stages compiled as `costs` describes."""
        first = compiled_for if isinstance(compiled_for, jax.Device) else compiled_for[0]
        with tracing_for(first.platform):
            bucket = self._bucket(microbatch_spec(batch, self.plan.microbatches))
            chosen, known = range(self.plan.depth) if stages is None else stages, {} if programs is None else programs
            parts: list[tuple[Sequence[StageFunctions], Mapping[int, CompiledStage]]] = []
            for functions in bucket.trained:
                arrays = {
                    s: Arrays(f := functions[s], place_on(compiled_for, f.partition.mesh), share=shares_of(self.plan, f)[0]) for s in chosen
                }
                parts.append((functions, compile_stages(self.plan, arrays, self._steps_of(functions).verified_runs, known)))
            return parts

    def _compile(self, batch: Batch, other_batches: Sequence[Batch], facts: Mapping[str, str]) -> Executor:
        """Compile the stages, or reuse the compiled stages of the last run if the shapes and JAX's settings are the same.

        The processes compare `facts` and the arguments of this pipeline, which must be the same in all of them.
        """
        specs = [microbatch_spec(each, self.plan.microbatches) for each in (batch, *other_batches)]
        distinct = [spec for i, spec in enumerate(specs) if spec not in specs[:i]]
        depends_on = distinct, traced_platform(), {name: getattr(jax.config, name, None) for name in jax.config.values}
        before = self._executor if self._executor is not None and self._executor.depends_on == depends_on else None
        buckets = before.buckets if before is not None else [self._bucket(spec) for spec in distinct]
        check_buckets(buckets)
        for where in filter(None, (f.repeated_effects for f in buckets[0].functions if jax.process_index() == 0)):
            _LOG.warning(
                "%s: recomputation runs its side effects (host callbacks, prints) once more in each backward; with recompute 'none' they "
                "run once",
                where,
            )
        if self.delay_factor is not None and jax.process_index() == 0:
            log_correction(self.plan, self.optimizer, self.delay_factor)
        options = ("clip_global_norm", "clip_stage_norm", "skip_nonfinite", "ema_decay", "precision", "delay_factor")
        facts = {**{name: str(getattr(self, name)) for name in options}, **facts}
        steps = self._steps_of(buckets[0].functions)
        return Executor(self.plan, steps, buckets, self.places, join_processes(), facts, depends_on, before)

    def _bucket(self, spec: Batch) -> Bucket:
        """Return the functions of all stages for microbatches of these shapes."""
        functions = self._builder.build(spec)
        if self._bucket_built is None or self._bucket_built.functions is not functions:
            self._bucket_built = Bucket(spec, functions, variants_of(self.plan, spec, functions))
        return self._bucket_built

    def _steps_of(self, functions: Sequence[StageFunctions]) -> Steps:
        """Return the programs of the plan."""
        uses = uses_by(functions[0].capabilities)
        if self._steps is None or self._steps.uses != uses:
            self._steps = Steps(self.plan, uses)
        return self._steps

    def _start(self, executor: Executor, workers: Sequence[WorkerState], batch: int) -> State:
        """Connect the processes and return the state of a run that begins with `batch`."""
        executor.connect()
        self._executor = executor
        return executor.state(executor.at_rest(workers), batch, batch)

    def _undivided(self) -> contextlib.AbstractContextManager[None]:
        """In a run of several processes, delay Ctrl-C even if the call changes no state, because others wait for the whole call."""
        return contextlib.nullcontext() if self.transfers is None else delayed_signals()

    def _running(self, state: State) -> tuple[Executor, State]:
        """Return the executor and the state to run: the result of an interrupted call on this state, or the state itself."""
        check_state(state, None if self._executor is None else self._executor.fingerprint)
        assert self._executor is not None
        return self._executor, current_state(state)


def _checkpoints() -> Any:
    """Return `jpipe.checkpoints`. It imports this module, and Orbax, which `import jpipe` does not import."""
    return importlib.import_module("jpipe.checkpoints")


def _bits(key: jax.Array) -> str:
    """Return the kind of a random key and its bits, as text."""
    return f"{key.dtype} {np.asarray(jax.random.key_data(key)).tobytes().hex()}"
