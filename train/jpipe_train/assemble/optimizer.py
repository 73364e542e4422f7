"""The optimizer that a config names, from optax or the user's, its learning-rate schedule, and the parameters that decay."""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import numpy as np
import optax

from jpipe import InputError
from jpipe_train.config import entry_point, optax_names
from jpipe_train.config.arguments import LARGEST, check_names, convert, parameters_of
from jpipe_train.config.config import OptimizerConfig

Tree = Any
_BLOCK = 1024  # updates whose learning rates are computed together
MASKS = ("mask", "weight_decay_mask")  # optax's names for the argument that selects what decays


def optimizer(config: OptimizerConfig, steps: int, params: Tree) -> optax.GradientTransformation:
    """Return the optimizer with its learning-rate schedule; `jpipe.Pipeline` checks whether it suits a pipeline.

    Args:
        config: the section `optimizer`.
        steps: the number of batches of the run.
        params: shapes and dtypes of the model's parameters, by layer id.

    Raises:
        InputError: arguments are unknown, missing or rejected; a pattern of `decay` matches no parameter.
    """
    is_of_user = ":" in config.name
    factory = entry_point.load(config.name, "optimizer.name") if is_of_user else optax_names.optimizers()[config.name]
    parameters = parameters_of(factory)
    mask = next((name for name in MASKS if name in parameters), None)
    reserved = {"learning_rate": "is optimizer.learning_rate"} | ({mask: "is optimizer.decay"} if mask else {})
    with entry_point.errors_about("optimizer.arguments"):
        check_names(factory, config.name, config.arguments, reserved)
        arguments = dict(config.arguments) if is_of_user else convert(factory, config.name, config.arguments)
    if "learning_rate" in parameters:
        arguments["learning_rate"] = _rate(config, steps, factory)
    else:
        _check_no_rate(config)
    if mask:
        arguments[mask] = _decay_mask(config.decay)
    elif config.decay is not None:
        raise InputError(
            f"optimizer.decay: '{config.name}' cannot choose what decays (it has none of the arguments {' and '.join(MASKS)}); leave it out"
        )
    _check_patterns(config.decay or (), params)
    if config.inject_hyperparams:
        numbers = {"learning_rate"} | {name for name, value in config.arguments.items() if isinstance(value, float)}
        factory = optax.inject_hyperparams(factory, static_args=set(parameters) - numbers)
    with entry_point.user_errors(f"optimizer: '{config.name}' does not accept its arguments"):
        rule = factory(**arguments)
    if not isinstance(rule, optax.GradientTransformation):
        raise InputError(f"optimizer.name: expected '{config.name}' to return an optax.GradientTransformation, found {type(rule).__name__}")
    return rule if config.accumulate_batches == 1 else optax.MultiSteps(rule, config.accumulate_batches).gradient_transformation()


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[int], float] | None:
    """Return a function from the number of a batch to its learning rate, or None if that is not known.

    It is unknown for an optimizer of the user's and for one without a learning rate. All batches of one update have the same rate.

    Args:
        config: the section `optimizer`, which `optimizer` has accepted.
        steps: the number of batches of the run.
    """
    factory = None if ":" in config.name else optax_names.optimizers()[config.name]
    if factory is None or "learning_rate" not in parameters_of(factory):
        return None
    rate = _rate(config, steps, factory)
    if not callable(rate):
        return lambda _: rate

    @functools.lru_cache(maxsize=2)
    def rates_of_block(number: int) -> list[float]:
        """Compute many rates at once, because each request would wait for the device's work."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            rates = jax.vmap(rate)(np.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=np.int32))
        return [float(f"{value:.6g}") for value in np.broadcast_to(np.asarray(rates, np.float64), _BLOCK)]

    def of_batch(batch: int) -> float:
        update = batch // config.accumulate_batches
        return rates_of_block(update // _BLOCK)[update % _BLOCK]

    return of_batch


def lr_schedule(config: OptimizerConfig, updates: int, peak: float) -> optax.Schedule:
    """Return a schedule that rises to `peak` over `warmup_steps` updates and then follows `config.lr_schedule`.

    That is constant, a cosine down to a tenth of the peak at `updates`, or a schedule of optax.

    Raises:
        InputError: arguments of the schedule are unknown, missing or rejected.
    """
    warmup = config.warmup_steps
    match config.lr_schedule:
        case "constant" | "cosine" if config.lr_arguments:
            raise InputError(f"optimizer.lr_arguments: '{config.lr_schedule}' takes none; leave them out, or name a schedule of optax")
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
    # The first update uses peak / (warmup + 1), not 0, which would waste a step.
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]) if warmup else after


def _rate(config: OptimizerConfig, steps: int, factory: Callable[..., Any]) -> float | optax.Schedule:
    """Return a number if the rate never changes, because some optimizers accept nothing else, or else a schedule."""
    parameter = parameters_of(factory)["learning_rate"]
    factory_default = parameter.default if isinstance(parameter.default, float) else 1e-3
    peak = min(config.learning_rate or factory_default, LARGEST)
    schedule = lr_schedule(config, steps // config.accumulate_batches, peak)
    if config.lr_schedule == "constant" and not config.warmup_steps:
        return peak
    if not optax_names.takes_schedule(parameter) and not config.inject_hyperparams:
        raise InputError(
            f"optimizer.lr_schedule: '{config.name}' takes one learning rate for the whole run; "
            "use constant without warmup_steps, or inject_hyperparams: true"
        )
    return schedule


def _check_no_rate(config: OptimizerConfig) -> None:
    default = OptimizerConfig()
    for key in ("learning_rate", "lr_schedule", "lr_arguments", "warmup_steps"):
        if getattr(config, key) != getattr(default, key):
            raise InputError(f"optimizer.{key}: '{config.name}' has no argument learning_rate; leave it out")


def _decay_mask(patterns: list[str] | None) -> Callable[[Tree], Tree]:
    """Return a mask for optax of the leaves that decay: matrices (not biases and norms), or those that the patterns select."""
    wanted = [pattern for pattern in patterns or () if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns or () if pattern.startswith("!")]

    def decays(path: Any, leaf: Any) -> bool:
        name = _name(path)
        chosen = any(fnmatchcase(name, pattern) for pattern in wanted) if wanted else leaf.ndim >= 2
        return chosen and not any(fnmatchcase(name, pattern) for pattern in unwanted)

    return lambda params: jax.tree_util.tree_map_with_path(decays, params)


def _check_patterns(patterns: Sequence[str], params: Mapping[str, Tree]) -> None:
    """Check that every pattern matches a parameter."""
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)] if patterns else []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0)
            raise InputError(f"optimizer.decay: no parameter matches '{pattern}'; the nearest are {', '.join(near)}")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
