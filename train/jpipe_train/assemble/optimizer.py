"""Build the optimizer that a config names (from optax, jpipe or the user), its learning-rate schedule and its weight-decay mask."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import optax

import jpipe
from jpipe import InputError
from jpipe_train.config.config import OptimizerConfig
from jpipe_train.config.functions import entry_point, optax_names
from jpipe_train.config.functions.arguments import LARGEST, check_names, convert, kind_of, parameters_of

Tree = Any
_BLOCK = 1024  # the learning rates of this many updates are computed together
MASKS = ("mask", "weight_decay_mask")  # optax's names for the argument that selects the parameters with weight decay


def optimizer(config: OptimizerConfig, steps: int, params: Tree) -> optax.GradientTransformation:
    """Return the optimizer with its learning-rate schedule for `steps` batches; `jpipe.Pipeline` checks that a pipeline can use it.

    `params` are specs by layer id. Raise InputError if arguments are unknown, missing or rejected; or a pattern of `decay` matches no
    parameter.
    """
    factory, arguments, of_stages = checked_arguments(config, steps, params)
    _check_patterns(config.decay or (), params)
    if config.inject_hyperparams:
        numbers = {"learning_rate"} | {name for name, value in config.arguments.items() if isinstance(value, float)}
        factory = optax.inject_hyperparams(factory, static_args=set(parameters_of(factory)) - numbers)
    with entry_point.user_errors(f"optimizer: '{config.name}' does not accept its arguments"):
        factory = functools.partial(factory, **arguments)
        rule = jpipe.optimizers.per_stage(factory, **of_stages) if of_stages else factory()
    if not isinstance(rule, optax.GradientTransformation):
        raise InputError(f"optimizer.name: expected '{config.name}' to return an optax.GradientTransformation, found {type(rule).__name__}")
    if config.lr_delay_steps is not None:
        rule = optax.chain(rule, jpipe.optimizers.scale_by_delay(config.lr_delay_steps))
    return rule if config.accumulate_batches == 1 else _accumulated(rule, config.accumulate_batches)


def checked_arguments(
    config: OptimizerConfig, steps: int, params: Mapping[str, Tree] = MappingProxyType({})
) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """Return the optimizer's constructor, its arguments, and the arguments that differ between stages. The constructor is not called.

    `steps` counts the batches of the run; `params`, by layer id, are for weight decay: without them the arguments can only be checked.
    Raise InputError if the function does not exist, or arguments are unknown or missing.
    """
    is_of_user = ":" in config.name
    factory = entry_point.load(config.name, "optimizer.name") if is_of_user else optax_names.optimizers()[config.name]
    parameters = parameters_of(factory)
    mask = next((name for name in MASKS if name in parameters), None)
    reserved = {"learning_rate": "is optimizer.learning_rate"} | ({mask: "is optimizer.decay"} if mask else {})
    of_stages = _per_stage(config, steps, factory, reserved)
    with entry_point.errors_about("optimizer.arguments"):
        check_names(factory, config.name, [*config.arguments, *(of_stages.keys() - reserved.keys())], reserved)
        arguments = dict(config.arguments) if is_of_user else convert(factory, config.name, config.arguments)
    if "learning_rate" in parameters:
        arguments |= {} if "learning_rate" in of_stages else {"learning_rate": _rate(config, steps, factory)}
    else:
        _check_no_rate(config)
    if mask:
        arguments[mask] = _decay_mask(config.decay, params)
    elif config.decay is not None:
        raise InputError(
            f"optimizer.decay: '{config.name}' cannot select parameters for weight decay (it has none of the arguments "
            f"{' and '.join(MASKS)}); remove decay"
        )
    return factory, arguments, of_stages


def same_at_all_stages(config: OptimizerConfig) -> OptimizerConfig:
    """Return a config without `per_stage`, for any number of stages. The optimizer has the same state and work per parameter."""
    first = {name: values[0] for name, values in config.per_stage.items()}
    rate = first.pop("learning_rate", config.learning_rate)
    return config.model_copy(update={"per_stage": {}, "learning_rate": rate, "arguments": config.arguments | first})


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[int], float] | None:
    """Return a function from a batch number to the learning rate, or None if the rate is unknown.

    The rate is unknown for a user's optimizer, for an optimizer without a learning rate, and for rates that differ between stages. All
    batches of one update have the same rate. `optimizer` must have accepted the config and `steps`, the number of batches.
    """
    factory = None if ":" in config.name else optax_names.optimizers()[config.name]
    if factory is None or "learning_rate" not in parameters_of(factory) or "learning_rate" in config.per_stage:
        return None
    rate = _rate(config, steps, factory)
    if not callable(rate):
        return lambda _: rate

    @functools.lru_cache(maxsize=2)
    def rates_of_block(number: int) -> list[float]:
        """Compute many rates at once, because each call waits for the device."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            rates = jax.vmap(rate)(np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int32))
        return [float(f"{value:.6g}") for value in np.broadcast_to(np.asarray(rates, np.float64), _BLOCK)]

    def of_batch(batch: int) -> float:
        update = batch // config.accumulate_batches
        return rates_of_block(update // _BLOCK)[update % _BLOCK]

    return of_batch


def lr_schedule(config: OptimizerConfig, updates: int, peak: float) -> optax.Schedule:
    """Return a schedule that rises to `peak` over `warmup_steps` updates and then follows `config.lr_schedule`.

    The schedule is constant, a cosine down to a tenth of the peak at `updates`, or a schedule of optax. Raise InputError if its arguments
    are unknown, missing or rejected.
    """
    warmup = config.warmup_steps
    match config.lr_schedule:
        case "constant" | "cosine" if config.lr_arguments:
            raise InputError(f"optimizer.lr_arguments: '{config.lr_schedule}' takes none; remove lr_arguments, or name a schedule of optax")
        case "constant":
            after = optax.constant_schedule(peak)
        case "cosine":
            after = optax.cosine_decay_schedule(peak, max(updates - warmup, 1), alpha=0.1)
        case name:
            schedule = optax_names.schedules()[name]
            rate = optax_names.rate_of(schedule)
            assert rate is not None
            with entry_point.errors_about("optimizer.lr_arguments"):
                check_names(schedule, name, config.lr_arguments, {rate: "is optimizer.learning_rate"})
                arguments = convert(schedule, name, config.lr_arguments)
            with entry_point.user_errors(f"optimizer.lr_arguments: '{name}' does not accept them"):
                after = schedule(**{rate: peak}, **arguments)
    # The first update uses peak / (warmup + 1), because a rate of 0 would waste a step.
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]) if warmup else after


def _rate(config: OptimizerConfig, steps: int, factory: Callable[..., Any]) -> float | optax.Schedule:
    """Return a schedule, or a number if the rate never changes, because some optimizers accept only numbers."""
    parameter = parameters_of(factory)["learning_rate"]
    factory_default = parameter.default if isinstance(parameter.default, float) else 1e-3
    rate = _rate_with_peak(config, steps, config.learning_rate or factory_default)
    if callable(rate) and not optax_names.takes_schedule(parameter) and not config.inject_hyperparams:
        raise InputError(
            f"optimizer.lr_schedule: the learning rate of '{config.name}' must be a number, not a schedule; "
            "use constant without warmup_steps, or inject_hyperparams: true"
        )
    return rate


def _rate_with_peak(config: OptimizerConfig, steps: int, peak: float) -> float | optax.Schedule:
    schedule = lr_schedule(config, steps // config.accumulate_batches, min(peak, LARGEST))
    return min(peak, LARGEST) if config.lr_schedule == "constant" and not config.warmup_steps else schedule


def _per_stage(config: OptimizerConfig, steps: int, factory: Callable[..., Any], reserved: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return the arguments that differ between stages, each with one number or schedule per stage.

    Raise InputError if an argument is unknown, does not take a number, or is also set for all stages.
    """
    if config.per_stage and config.inject_hyperparams:
        raise InputError("optimizer.inject_hyperparams: it keeps one value for all stages; remove it, or remove optimizer.per_stage")
    parameters = parameters_of(factory)
    reserved = {key: words for key, words in reserved.items() if key != "learning_rate"}
    named = [key for key, p in parameters.items() if key not in reserved and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [key for key in named if parameters[key].default is inspect.Parameter.empty]
    for name in config.per_stage:
        if config.learning_rate is not None if name == "learning_rate" else name in config.arguments:
            key = name if name == "learning_rate" else f"arguments.{name}"
            raise InputError(f"optimizer.per_stage: expected {name} here or as optimizer.{key}, found both; remove one of them")
        with entry_point.errors_about("optimizer.per_stage"):
            check_names(factory, config.name, {name, *required}, reserved)
            if ":" not in config.name:
                _check_number(config.name, name, parameters[name])
    peaks = {"learning_rate": [_rate_with_peak(config, steps, peak) for peak in config.per_stage.get("learning_rate", ())]}
    return {name: peaks.get(name, values) for name, values in config.per_stage.items()}


def _check_number(optimizer: str, name: str, parameter: inspect.Parameter) -> None:
    kind = kind_of(parameter)
    if kind is None or kind[0] != "a number":
        raise ValueError(f"'{name}' of '{optimizer}' is not a number, so it cannot differ between stages; move it to optimizer.arguments")


def _accumulated(rule: optax.GradientTransformation, batches: int) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that updates once every `batches` batches. A delay of that many batches is then a delay of one update."""
    steps = optax.MultiSteps(rule, batches)

    def update(updates: Tree, state: Any, params: Tree = None, *, delay: Any = 0.0, **extra_args: Any) -> tuple[Tree, Any]:
        return steps.update(updates, state, params, delay=delay / batches, **extra_args)

    return optax.GradientTransformationExtraArgs(steps.init, update)


def _check_no_rate(config: OptimizerConfig) -> None:
    default = OptimizerConfig()
    for key in ("learning_rate", "lr_schedule", "lr_arguments", "warmup_steps"):
        if getattr(config, key) != getattr(default, key):
            raise InputError(f"optimizer.{key}: '{config.name}' has no argument learning_rate; remove {key}")


def _decay_mask(patterns: list[str] | None, params: Mapping[str, Tree]) -> Callable[[Tree], Tree]:
    """Return an optax mask for weight decay. It selects matrices (not biases and norms), or the leaves that match the patterns.

    The names that patterns match begin with a layer id, and the mask is a dict from layer ids. If a whole model was cut into layers, the
    mask needs the tree of the layers, not the model's own tree.
    """
    wanted = [pattern for pattern in patterns or () if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns or () if pattern.startswith("!")]

    def decays(path: Any, leaf: Any) -> bool:
        name = _name(path)
        chosen = any(fnmatchcase(name, pattern) for pattern in wanted) if wanted else leaf.ndim >= 2 and not name.endswith("bias")
        return chosen and not any(fnmatchcase(name, pattern) for pattern in unwanted)

    masks = jax.tree_util.tree_map_with_path(decays, dict(params))
    return lambda tree: {layer_id: masks[layer_id] for layer_id in tree}


def _check_patterns(patterns: Sequence[str], params: Mapping[str, Tree]) -> None:
    """Check that every pattern matches a parameter."""
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)] if patterns else []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0)
            raise InputError(f"optimizer.decay: no parameter matches '{pattern}'; the most similar names are {', '.join(near)}")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
