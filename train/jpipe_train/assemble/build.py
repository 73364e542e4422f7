"""From a config to a pipeline and its batches: plan, model, data, optimizer, each checked before a device works."""

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax
from jpipe_planner import balance, host_memory, usable_cores

import jpipe
from jpipe.files import expanded, read_text
from jpipe_train.assemble import labels, meshes, model
from jpipe_train.assemble.optimizer import optimizer
from jpipe_train.config.config import AUTO, MOST_MICROBATCHES, MOST_PLAN_BYTES, Config, ModelConfig, PlanConfig, PrecisionConfig
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data


def build(
    config: Config, reporter: Reporter, plan: jpipe.Plan | None = None, load: Callable[[Config], data.Data] | None = None
) -> tuple[jpipe.Pipeline, data.Data]:
    """What `config` describes, wherever it is to run. Nothing ran on a device.

    Args:
        config: of the run.
        reporter: prints what takes long.
        plan: where the config does not say which.
        load: reads its data, by default `jpipe_train.data.data.load`.

    Raises:
        jpipe.InputError: something in the config does not fit.
    """
    with named_as_in_the_config(config.plan.file):
        stack = model.layers(config.model, config.train.batch_size, config.precision.computes, config.logits_chunk)
        loss = model.loss(config.loss)
        plan = plan or make_plan(config.plan, stack.ids)
        check_microbatches(plan, config.train.batch_size)
        check_accumulation(plan, config.optimizer.accumulate_batches)
        check_carried(plan, config.model)
        plan.check_layers(stack.ids)
        meshes.check_heads(config.model, plan)
        with reporter.phase("reading the data"):
            batches = (load or data.load)(config)
        for remark in batches.remarks:
            reporter.say(remark)
        params = stack.ties.without_seconds(param_specs(stack, plan, batches.like))
        rule = optimizer(config.optimizer, config.train.steps, params)
        options = config.optimizer.of_pipeline | {"precision": precision(config.precision, reporter)}
        pipe = jpipe.Pipeline(stack, plan, loss, rule, **options)
    return pipe, batches


def check(config: Config, pipe: jpipe.Pipeline, batches: data.Data) -> data.Data:
    """Refuse what cannot run here: missing devices, too little memory, a loss or an optimizer that does not fit, labels out of range.

    Returns:
        The data, which refuses labels that are out of range in later batches too.

    Raises:
        jpipe.InputError: any of these.
    """
    batch = batches.like
    with named_as_in_the_config(config.plan.file):
        layers = layer_specs(pipe.stack, pipe.plan, batch)
        params = {layer_id: layer.params for layer_id, layer in layers.items()}
        check_memory(params, pipe.optimizer, pipe.plan, devices_that_start(pipe), pipe.precision.has_masters)
        pipe.check(batch, model.metrics(config.eval))
    return labels.checked(config, batches, layers[pipe.stack.ids[-1]].output)


def precision(config: PrecisionConfig, reporter: Reporter) -> jpipe.Precision:
    """The dtypes of a run; what is doubtful about them is printed."""
    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always")
        found = jpipe.Precision(**config.model_dump())
    for doubt in doubts:
        reporter.say(str(doubt.message))
    return found


def layer_specs(stack: jpipe.LayerStack, plan: jpipe.Plan, batch: Any) -> dict[str, jpipe.model.LayerSpec]:
    """Shapes and dtypes around each layer, by its id."""

    def microbatch_spec(rows: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(rows) // plan.microbatches, *rows.shape[1:]), jax.dtypes.canonicalize_dtype(rows.dtype))

    return stack.specs(jax.tree.map(microbatch_spec, batch[0]))


def param_specs(stack: jpipe.LayerStack, plan: jpipe.Plan, batch: Any) -> dict[str, Any]:
    """Shapes and dtypes of the parameters, by layer id."""
    return {layer_id: layer.params for layer_id, layer in layer_specs(stack, plan, batch).items()}


def make_plan(config: PlanConfig, layer_ids: Sequence[str]) -> jpipe.Plan:
    """The plan in `config.file`, or even stages: of equally many layers, or of equal cost where `config.layer_costs` names layers.

    Raises:
        jpipe.InputError: a file that cannot be read or is no plan; keys that make no legal plan.
    """
    if config.file is not None:
        return read_plan(config.file)
    plan = jpipe.Plan.even(layer_ids, **config.model_dump(exclude={"file", "layer_costs"}))
    if not config.layer_costs:
        return plan
    for layer_id in config.layer_costs:
        if layer_id not in plan.layers:
            raise jpipe.InputError(
                f"plan.layer_costs: layer '{layer_id}' is not in the model; {jpipe.errors.nearest(layer_id, plan.layers)}"
            )
    starts = balance([config.layer_costs.get(layer_id, 1.0) for layer_id in plan.layers], plan.depth)
    layers = (plan.layers[first:end] for first, end in itertools.pairwise((*starts, None)))
    stages = tuple(stage.model_copy(update={"layers": ids}) for stage, ids in zip(plan.stages, layers, strict=True))
    return plan.model_copy(update={"stages": stages})


def read_plan(file: str) -> jpipe.Plan:
    """The plan that `plan.file` names.

    Raises:
        jpipe.InputError: it cannot be read, or is no plan.
    """
    text = read_text(
        expanded(file, "plan.file"),
        MOST_PLAN_BYTES,
        f"plan.file: cannot read '{file}'",
        "give a plan's JSON file, or null",
        f"plan.file: expected a plan as JSON in '{file}', found text that is not UTF-8",
    )
    return jpipe.Plan.from_json(text, where=file)


@contextlib.contextmanager
def named_as_in_the_config(plan_file: str | None) -> Iterator[None]:
    """Errors about the plan inside name the file that it comes from, if any; those about options name the key of the config."""
    try:
        yield
    except jpipe.InputError as error:
        options = {f"plan: {key} ": f"plan.{key} " for key in PlanConfig.model_fields}
        options |= {"plan: rules.": "plan.rules.", "plan: shard_optimizer: ": "plan.shard_optimizer: "}
        options |= {"rules: ": "plan.rules: ", "param_axes: ": "plan.param_axes: "}
        where = options if plan_file in (None, AUTO) else {"plan: ": f"{plan_file}: "}
        where |= {f"{key}: ": f"optimizer.{key}: " for key in ("clip_global_norm", "skip_nonfinite", "ema_decay")}
        where |= {"precision: loss_scale: ": "precision.loss_scale: "}
        for library, config in where.items():
            if str(error).startswith(library):
                raise jpipe.InputError(*(line.replace(library, config, 1) for line in error.args)) from None
        raise


def check_microbatches(plan: jpipe.Plan, batch_size: int) -> None:
    """Refuse a plan (from a file, say) whose microbatches do not divide the batch, or are too many to be meant."""
    if batch_size % plan.microbatches:
        raise jpipe.InputError(
            f"plan: expected microbatches that divide train.batch_size {batch_size}, found {plan.microbatches}; change one of them"
        )
    if plan.microbatches > MOST_MICROBATCHES:
        raise jpipe.InputError(f"plan: expected at most {MOST_MICROBATCHES} microbatches, found {plan.microbatches}; use fewer")


def check_accumulation(plan: jpipe.Plan, batches: int) -> None:
    """Refuse to accumulate the gradients of several batches where stages update several times per batch."""
    if batches > 1 and plan.update_every != "batch":
        raise jpipe.InputError(
            f"optimizer.accumulate_batches: expected 1 for a plan with update_every '{plan.update_every}', whose stages update several "
            f"times per batch, found {batches}; leave it out, or use update_every: batch"
        )


def check_carried(plan: jpipe.Plan, model: ModelConfig) -> None:
    """Refuse replicas of a stage whose layers carry a state of each row from batch to batch: each would keep those of other rows."""
    if model.carries and max(plan.replicas) > 1:
        raise jpipe.InputError(
            f"plan.replicas: expected 1 for each stage of model.target {model.target}, whose layers carry state from batch to batch, "
            f"found {max(plan.replicas)}; use more stages instead, or set model.arguments.carries to false"
        )


def devices_that_start(pipe: jpipe.Pipeline) -> list[Sequence[jax.Device]]:
    """The devices of each worker: one, or those of its mesh.

    Raises:
        jpipe.InputError: JAX finds no devices of the kind that the config asks for, or the plan does not fit those that there are.
    """
    start_devices()
    return [place.devices for place in pipe.places]


def start_devices() -> None:
    """Let JAX start its devices; with several processes it waits until all have.

    Raises:
        jpipe.InputError: JAX finds no devices of the kind that the config asks for, or cannot start them.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter, without a message, where it has to use GPUs and finds none
        reason = (str(error).splitlines() or [f"none found for '{jax.config.values['jax_platforms']}'"])[0]
        raise jpipe.InputError(f"JAX has no devices to use: {reason}; see its variable JAX_PLATFORMS") from None


def check_memory(
    specs: Mapping[str, Any],
    rule: optax.GradientTransformation,
    plan: jpipe.Plan,
    devices: Sequence[Sequence[jax.Device]],
    has_masters: bool = False,
) -> None:
    """Refuse a model that cannot fit in all the memory there is. One that is not refused may be too large all the same.

    Args:
        specs: shapes and dtypes of the parameters, by layer id.
        rule: the optimizer.
        plan: each replica of a stage holds all of its layers.
        devices: of each worker; those of this process are looked at.
        has_masters: whether weights of half that size come on top of the parameters.
    """
    own = [(s, held) for (s, _), held in zip(plan.workers, devices, strict=True) if held[0].process_index == jax.process_index()]
    layers = [specs[layer_id] for s, _ in own for layer_id in plan.stages[s].layers]
    weights, have = bytes_of(layers), memory_of([device for _, held in own for device in held])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = bytes_of(jax.eval_shape(rule.init, specs))  # of all layers: a mask may name any of them
    versions = weights // 2 if has_masters else 0
    need = versions + 2 * weights + state * weights // max(bytes_of(specs), 1)
    if need > have:
        raise jpipe.InputError(
            f"model: expected one that fits in {have / 1e9:,.0f} GB, all the memory of the devices, found one that needs more than "
            f"{need / 1e9:,.0f} GB ({weights / 1e9:,.0f} GB of weights, their gradients, the optimizer's state); make it smaller"
        )


def bytes_of(specs: Any) -> int:
    """Bytes of all arrays of a tree, given their shapes and dtypes."""
    return sum(spec.size * spec.dtype.itemsize for spec in jax.tree.leaves(specs))


def memory_of(devices: Sequence[Any]) -> float:
    """Bytes of memory of these devices together; infinite where that is not known."""
    if devices[0].platform == "cpu":
        return host_memory()
    return float(sum((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in set(devices)))


def devices_of(plan: jpipe.Plan) -> int:
    """How many devices, of all processes, the plan asks for."""
    each = [plan.stages[stages[0]].devices_each for stages in plan.rank_stages]
    if plan.placement is None:
        return sum(each[p] for p, _ in plan.rank_places)
    return max(number + count for numbers, count in zip(plan.placement, each, strict=True) for number in numbers)


def prepare_devices(config: PlanConfig, num_processes: int = 1) -> None:
    """Where CPUs are the devices, have JAX make those of each rank when it starts, which code of the user's may cause.

    Several processes share them evenly. Where that does not divide, each has one device, and the pipeline says what fits.

    Raises:
        jpipe.InputError: the plan cannot be read, or has fewer devices than there are processes.
    """
    with named_as_in_the_config(config.file):
        if config.file == AUTO:  # one for each core, or one in each process
            count = usable_cores() if num_processes == 1 else num_processes
        else:
            count = config.devices if config.file is None else devices_of(read_plan(config.file))
        if num_processes > count:
            raise jpipe.InputError(
                f"plan: expected at least as many devices as processes, found {count} for {num_processes} processes; start fewer, or use "
                "more stages or replicas"
            )
    force_cpu_devices(1 if count % num_processes else count // num_processes)


def force_cpu_devices(count: int) -> None:
    """Where CPUs are the devices, make at least `count`, within reason. It changes nothing on a GPU, nor where JAX runs already."""
    count = min(count, 256)  # far more would take minutes and gigabytes; the pipeline reports what is missing then
    if jax.config.values["jax_num_cpu_devices"] < count:
        with contextlib.suppress(RuntimeError):  # JAX runs already (a notebook, a test): stages share what devices there are
            jax.config.update("jax_num_cpu_devices", count)
