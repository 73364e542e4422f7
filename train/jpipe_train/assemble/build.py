"""Build a pipeline and its batches from a config, and check both before anything runs on a device."""

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import optax

import jpipe
from jpipe.files import expanded, read_text
from jpipe.plan import excluded
from jpipe_planner.machine.local import host_memory, usable_cores
from jpipe_planner.search.balance import balance
from jpipe_train.assemble import labels, model
from jpipe_train.assemble.delay import words_by_stage
from jpipe_train.assemble.frozen import part_of, trains_part
from jpipe_train.assemble.metrics import metrics
from jpipe_train.assemble.optimizer import checked_arguments, optimizer
from jpipe_train.config.config import AUTO, MOST_MICROBATCHES, MOST_PLAN_BYTES, Config, OptimizerConfig, PlanConfig, PrecisionConfig
from jpipe_train.console.progress import Reporter
from jpipe_train.data import data


def build(
    config: Config,
    reporter: Reporter,
    plan: jpipe.Plan | None = None,
    load: Callable[[Config], data.Data] | None = None,
) -> tuple[jpipe.Pipeline, data.Data]:
    """Build the pipeline and the data that `config` describes, without running anything on a device.

    `reporter` prints the phases that take long. `plan` and `load` replace the plan in the config and `jpipe_train.data.data.load`. Raise
    jpipe.InputError if the config is invalid.
    """

    @functools.cache
    def read() -> data.Data:
        with reporter.phase("reading the data"):
            return (load or data.load)(config)

    with errors_name_config_keys(config.plan.file):
        stack, loss = model.layers(config, lambda: read().like[0]), model.loss(config)
        stack, plan = jpipe.model.with_added_layers(stack, plan or make_plan(config.plan, stack.ids))
        check_plan(config, plan)
        plan.check_layers(stack.ids)
        batches = read()
        for remark in (*batches.remarks, *config.model.remarks(config)):
            reporter.say(remark)
        steps = batches.steps or config.train.length
        if remark := last_agreement(plan, steps):
            reporter.say(remark)
        params = stack.ties.without_seconds(param_specs(stack, plan, batches.like))
        rule = trains_part(optimizer(config.optimizer, steps, params), config.tune, params)
        options = config.optimizer.of_pipeline | {"precision": precision(config.precision, reporter)}
        pipe = jpipe.Pipeline(stack, plan, loss, rule, **options)
    return pipe, batches


def check_by_reading(config: Config, path: str | None = None) -> None:
    """Check a config and the files that it names. No device starts, no data are read, and the model is not traced.

    `path` names data that replace the data of the run, as in `jpipe_train.data.data.held_out`. Raise jpipe.InputError if a file is missing
    or no installed library reads it; a function does not exist or has other arguments; or a size does not divide another.
    """
    metrics(config.eval, config.model, model.loss(config))
    checked_arguments(config.optimizer, config.train.length)
    with errors_name_config_keys(config.plan.file):
        plan = None if config.plan.file in (None, AUTO) else read_plan(config.plan.file)
        if config.model.target is not None:
            model.check_target(config.model)
        else:
            stack = model.layers(config)
            plan = make_plan(config.plan, stack.ids) if config.plan.file is None else plan
            if plan is not None:
                stack, plan = jpipe.model.with_added_layers(stack, plan)
                plan.check_layers(stack.ids)
        if plan is not None:
            check_plan(config, plan)
    data.check_files(config, path)


def check_plan(config: Config, plan: jpipe.Plan) -> None:
    """Check that a plan is compatible with the other sections of the config."""
    check_microbatches(plan, config.train.batch_size)
    check_delay(plan, config.plan.max_delay)
    if problem := excluded(plan, **config.optimizer.of_plans):
        raise jpipe.InputError(problem)
    check_per_stage(plan, config.optimizer.per_stage)
    config.model.check_plan(plan)


def check(config: Config, pipe: jpipe.Pipeline, batches: data.Data) -> data.Data:
    """Check that a pipeline can run here: its devices, memory, loss and optimizer, and the range of the labels.

    Return the data, with checks of the labels of later batches.
    """
    batch = batches.like
    with errors_name_config_keys(config.plan.file):
        layers = layer_specs(pipe.stack, pipe.plan, batch)
        params = pipe.stack.ties.without_seconds({layer_id: layer.params for layer_id, layer in layers.items()})
        devices, is_trained = started_devices(pipe), config.tune.trained()
        check_memory(params, pipe.optimizer, pipe.plan, devices, pipe.precision.has_masters, is_trained)
        functions = metrics(config.eval, config.model, pipe.loss)
        pipe.check(batch, functions if functions or len(batches.validation) else None)
    return labels.check_labels(config, batches, layers[pipe.stack.ids[-1]].output)


def precision(config: PrecisionConfig, reporter: Reporter) -> jpipe.Precision:
    """Return the dtypes of a run, and print warnings about them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dtypes = jpipe.Precision(**config.model_dump())
    for warning in caught:
        reporter.say(str(warning.message))
    return dtypes


def layer_specs(stack: jpipe.LayerStack, plan: jpipe.Plan, batch: Any) -> dict[str, jpipe.model.LayerSpec]:
    """Return a dict from layer ids to the shapes and dtypes of the layer's parameters, state, input and output."""

    def microbatch_spec(rows: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(rows) // plan.microbatches, *rows.shape[1:]), jax.dtypes.canonicalize_dtype(rows.dtype))

    return stack.specs(jax.tree.map(microbatch_spec, batch[0]))


def param_specs(stack: jpipe.LayerStack, plan: jpipe.Plan, batch: Any) -> dict[str, Any]:
    """Return a dict from layer ids to the shapes and dtypes of the layer's parameters."""
    return {layer_id: layer.params for layer_id, layer in layer_specs(stack, plan, batch).items()}


def make_plan(config: PlanConfig, layer_ids: Sequence[str]) -> jpipe.Plan:
    """Read the plan in `config.file`, or divide the layers evenly by number or, if `config.layer_costs` is set, by cost.

    Raise jpipe.InputError if the file cannot be read or is not a plan, or the keys describe an illegal plan.
    """
    if config.file is not None:
        return read_plan(config.file)
    plan = jpipe.Plan.even(layer_ids, **config.of_even_stages)
    if not config.layer_costs:
        return plan
    for layer_id in config.layer_costs:
        if layer_id not in plan.layers:
            raise jpipe.InputError(
                f"layer '{layer_id}' is not in the model", where="plan.layer_costs", change=jpipe.errors.nearest(layer_id, plan.layers)
            )
    starts = balance([config.layer_costs.get(layer_id, 1.0) for layer_id in plan.layers], plan.depth)
    layers = (plan.layers[first:end] for first, end in itertools.pairwise((*starts, None)))
    stages = tuple(stage.with_layers(ids) for stage, ids in zip(plan.stages, layers, strict=True))
    return plan.model_copy(update={"stages": stages})


def read_plan(file: str) -> jpipe.Plan:
    """Read the plan that `plan.file` names. Raise jpipe.InputError if the file cannot be read, or is not a plan."""
    text = read_text(
        expanded(file, "plan.file"),
        MOST_PLAN_BYTES,
        f"plan.file: cannot read '{file}'",
        "give a plan's JSON file, or null",
        f"plan.file: expected a plan as JSON in '{file}', found text that is not UTF-8",
    )
    return jpipe.Plan.from_json(text, where=file)


@contextlib.contextmanager
def errors_name_config_keys(plan_file: str | None) -> Iterator[None]:
    """In errors from this context, give the place as a config key, or as the plan file if there is one."""
    try:
        yield
    except jpipe.InputError as error:
        in_plan = _PLAN_KEYS if plan_file is None or plan_file == AUTO else {"plan": plan_file}
        raise error.renamed(in_plan | _KEYS) from error.__cause__


_PLAN_KEYS = {f"plan.{key}": f"plan.{key}" for key in PlanConfig.model_fields} | {key: f"plan.{key}" for key in ("rules", "param_axes")}
_KEYS = {key: f"optimizer.{key}" for key in OptimizerConfig().of_plans} | {
    "from_model": "model.target",
    "the model": "model.target",
    "precision.loss_scale": "precision.loss_scale",
}
"""The config key for each place in the library's errors. Without a plan file, `_PLAN_KEYS` are added."""


def last_agreement(plan: jpipe.Plan, steps: int) -> str:
    """Return a remark if pipelines agree rarely and some stages do not agree after the last step, otherwise ""."""
    if plan.agree is None:
        return ""
    every, lost = plan.agree.every, [steps - plan.agree.last(s, plan.depth, steps) for s in range(plan.depth)]
    if not any(lost):
        return ""
    start = f"plan.agree: the pipelines agree after every {every} steps, and the run has {steps} steps, so the last "
    if plan.agree.fragments in (None, 1):
        return f"{start}{lost[0]} are not in the weights that are evaluated and exported; use {steps + every - lost[0]} steps"
    missing = words_by_stage(["" if not number else str(number) for number in lost])
    return f"{start}{missing} are not in the weights that are evaluated and exported; fragments agree at different steps"


def check_microbatches(plan: jpipe.Plan, batch_size: int) -> None:
    """Check that the microbatches of a plan divide the batch and that their number is plausible."""
    if batch_size % plan.microbatches:
        raise jpipe.InputError(
            where="plan",
            expected=f"microbatches that divide train.batch_size {batch_size}",
            found=plan.microbatches,
            change="change one of them",
        )
    if plan.microbatches > MOST_MICROBATCHES:
        raise jpipe.InputError(
            where="plan", expected=f"at most {MOST_MICROBATCHES} microbatches", found=plan.microbatches, change="use fewer"
        )


def check_delay(plan: jpipe.Plan, most: float | None) -> None:
    """Check that the mean delay of a plan is at most `most` updates; None allows any delay."""
    if most is not None and plan.mean_delay > most + 1e-9:
        raise jpipe.InputError(
            where="plan.max_delay",
            expected=f"a plan with a mean delay of at most {most:g} updates",
            found=f"{plan.schedule} with {plan.mean_delay:.3g}",
            change="use a schedule that flushes, or more microbatches, or raise max_delay",
        )


def check_per_stage(plan: jpipe.Plan, arguments: Mapping[str, Sequence[float]]) -> None:
    """Check that each argument in `optimizer.per_stage` has one value for each stage."""
    for name, values in arguments.items():
        if len(values) != plan.depth:
            raise jpipe.InputError(
                where="optimizer.per_stage",
                key=name,
                expected=f"one value for each of the {plan.depth} stages of the plan",
                found=len(values),
            )


def started_devices(pipe: jpipe.Pipeline) -> list[Sequence[jax.Device]]:
    """Start JAX's devices and return the device or mesh of each worker.

    Raise jpipe.InputError if JAX finds no devices of the requested kind, or too few for the plan.
    """
    start_devices()
    return [place.devices for place in pipe.places]


def start_devices() -> None:
    """Start JAX's devices; several processes wait for each other.

    Raise jpipe.InputError if JAX finds no devices of the requested kind, or cannot start them.
    """
    try:
        jax.devices()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # JAX raises an AssertionError without a message if GPUs are required and there are none
        reason = (str(error).splitlines() or [f"none found for '{jax.config.values['jax_platforms']}'"])[0]
        raise jpipe.InputError(f"JAX has no devices to use: {reason}; check the environment variable JAX_PLATFORMS") from None


def check_memory(
    specs: Mapping[str, Any],
    rule: optax.GradientTransformation,
    plan: jpipe.Plan,
    devices: Sequence[Sequence[jax.Device]],
    has_masters: bool = False,
    is_trained: Callable[[str], bool] | None = None,
) -> None:
    """Reject a model that certainly exceeds the memory of this process's devices. A model that passes may still be too large.

    If `specs` are master weights (`has_masters`), a copy of the trained weights with half their bytes is needed as well. Parameters that
    are not trained, by name, have no gradients and no masters; by default all are trained.
    """
    local = [(s, group) for (s, _), group in zip(plan.workers, devices, strict=True) if group[0].process_index == jax.process_index()]
    layers = [{layer_id: specs[layer_id]} for s, _ in local for layer_id in plan.stages[s].layers]
    weights, available = bytes_of(layers), memory_of([device for _, group in local for device in group])
    changing = weights if is_trained is None else bytes_of([part_of(layer, is_trained) for layer in layers])
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = bytes_of(jax.eval_shape(rule.init, specs))  # for all layers, because a mask may name any of them
    versions = changing // 2 - (weights - changing) // 2 if has_masters else 0
    need = versions + weights + changing + state * weights // max(bytes_of(specs), 1)
    if need > available:
        raise jpipe.InputError(
            f"model: expected a model that fits into {available / 1e9:,.0f} GB, the memory of all devices, found a model that needs more "
            f"than {need / 1e9:,.0f} GB ({weights / 1e9:,.0f} GB of weights, their gradients, the optimizer's state); make it smaller"
        )


def bytes_of(specs: Any) -> int:
    """Return the total bytes of all arrays in a tree of shapes and dtypes."""
    return sum(spec.size * spec.dtype.itemsize for spec in jax.tree.leaves(specs))


def memory_of(devices: Sequence[Any]) -> float:
    """Return the total memory of the devices in bytes, or infinity if it is unknown."""
    if devices[0].platform == "cpu":
        return host_memory()
    return float(sum((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in set(devices)))


def devices_of(plan: jpipe.Plan) -> int:
    """Return the number of devices that a plan uses in all processes together."""
    each = [plan.stages[stages[0]].devices_each for stages in plan.pipeline_ranks]
    if plan.placement is None:
        return sum(each[p] for p, _ in plan.rank_positions)
    return max(number + count for numbers, count in zip(plan.placement, each, strict=True) for number in numbers)


def prepare_devices(config: PlanConfig, num_processes: int = 1) -> None:
    """Configure the number of CPU devices for the plan. Call this before the user's functions, because those may start JAX.

    Each process has the same number of devices. If that is impossible, each has one device, and the pipeline later reports which numbers of
    processes are possible. Raise jpipe.InputError if the plan cannot be read, or has fewer devices than there are processes.
    """
    with errors_name_config_keys(config.file):
        if config.file == AUTO:  # one device per core, or one per process
            count = usable_cores() if num_processes == 1 else num_processes
        else:
            count = config.devices if config.file is None else devices_of(read_plan(config.file))
        if num_processes > count:
            raise jpipe.InputError(
                where="plan",
                expected="at least as many devices as processes",
                found=f"{count} for {num_processes} processes",
                change="start fewer processes, or use more stages or replicas",
            )
    force_cpu_devices(1 if count % num_processes else count // num_processes)


def force_cpu_devices(count: int) -> None:
    """Configure at least `count` CPU devices, up to 256. This has no effect on a GPU or after JAX has started."""
    count = min(count, 256)  # more devices would take minutes and gigabytes; the pipeline reports missing devices later
    if jax.config.values["jax_num_cpu_devices"] < count:
        with contextlib.suppress(RuntimeError):  # JAX has started already, as in a notebook; stages then share the existing devices
            jax.config.update("jax_num_cpu_devices", count)
