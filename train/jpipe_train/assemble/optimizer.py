"""The optimizer that a config names: an optax one or the user's own, its learning-rate schedule, and which parameters decay."""

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
from jpipe_train.config.arguments import LARGEST, check_names, converted, parameters_of
from jpipe_train.config.config import OptimizerConfig

Tree = Any
_STRETCH = 1024  # updates whose learning rates are asked for together
MASKS = ("mask", "weight_decay_mask")  # what optax calls the argument for `decay`


def optimizer(config: OptimizerConfig, steps: int, params: Tree) -> optax.GradientTransformation:
    """The optimizer with its learning-rate schedule over a run. (`jpipe.Pipeline` finds out whether it suits a pipeline.)

    Args:
        config: its name and arguments.
        steps: the batches of the run.
        params: shapes and dtypes of the model's parameters, by layer id.

    Raises:
        InputError: arguments that it does not have, lacks or refuses; a pattern of `decay` that no parameter matches.
    """
    own = ":" in config.name
    factory = entry_point.load(config.name, "optimizer.name") if own else optax_names.optimizers()[config.name]
    parameters = parameters_of(factory)
    mask = next((name for name in MASKS if name in parameters), None)
    filled = {"learning_rate": "is optimizer.learning_rate"} | ({mask: "is optimizer.decay"} if mask else {})
    with entry_point.placed("optimizer.arguments"):
        check_names(factory, config.name, config.arguments, filled)
        arguments = dict(config.arguments) if own else converted(factory, config.name, config.arguments)
    if "learning_rate" in parameters:
        arguments["learning_rate"] = _rate(config, steps, factory)
    else:
        _refuse_rate(config)
    if mask:
        arguments[mask] = _decays(config.decay)
    elif config.decay is not None:
        raise InputError(
            f"optimizer.decay: '{config.name}' cannot choose what decays (it has none of the arguments {' and '.join(MASKS)}); leave it out"
        )
    _refuse_idle(config.decay or (), params)
    if config.inject_hyperparams:
        numbers = {"learning_rate"} | {name for name, value in config.arguments.items() if isinstance(value, float)}
        factory = optax.inject_hyperparams(factory, static_args=set(parameters) - numbers)
    with entry_point.reported(f"optimizer: '{config.name}' refuses its arguments"):
        rule = factory(**arguments)
    if not isinstance(rule, optax.GradientTransformation):
        raise InputError(f"optimizer.name: expected '{config.name}' to return an optax.GradientTransformation, found {type(rule).__name__}")
    return rule if config.accumulate_batches == 1 else optax.MultiSteps(rule, config.accumulate_batches).gradient_transformation()


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[int], float] | None:
    """The learning rate of each batch, by how many came before; None where that is not known. (Those of one update have one rate.)

    It is not of an optimizer of the user's own, nor of one that has none.

    Args:
        config: of an optimizer that `optimizer` has taken.
        steps: as there.
    """
    factory = None if ":" in config.name else optax_names.optimizers()[config.name]
    if factory is None or "learning_rate" not in parameters_of(factory):
        return None
    rate = _rate(config, steps, factory)
    if not callable(rate):
        return lambda _: rate

    @functools.lru_cache(maxsize=2)
    def stretch(number: int) -> list[float]:
        """Many at once: to ask a device for each would wait for its work."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            found = jax.vmap(rate)(np.arange(number * _STRETCH, (number + 1) * _STRETCH, dtype=np.int32))
        return [float(f"{value:.6g}") for value in np.broadcast_to(np.asarray(found, np.float64), _STRETCH)]

    def of_batch(batch: int) -> float:
        update = batch // config.accumulate_batches
        return stretch(update // _STRETCH)[update % _STRETCH]

    return of_batch


def lr_schedule(config: OptimizerConfig, updates: int, peak: float) -> optax.Schedule:
    """From near 0 up to `peak` over `warmup_steps` updates, then constant, down a cosine to a tenth of it at `updates`, or as optax has it.

    Raises:
        InputError: arguments that the schedule does not have, lacks or refuses.
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
            with entry_point.placed("optimizer.lr_arguments"):
                check_names(schedule, name, config.lr_arguments, {rate: "is optimizer.learning_rate"})
                arguments = converted(schedule, name, config.lr_arguments)
            with entry_point.reported(f"optimizer.lr_arguments: '{name}' refuses them"):
                after = schedule(**{rate: peak}, **arguments)
    # The first update uses peak / (warmup + 1), not 0: an update that changes nothing is a step wasted.
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), after], [warmup]) if warmup else after


def _rate(config: OptimizerConfig, steps: int, factory: Callable[..., Any]) -> float | optax.Schedule:
    """A number where it never changes, for some optimizers take nothing else, or a schedule."""
    parameter = parameters_of(factory)["learning_rate"]
    own_default = parameter.default if isinstance(parameter.default, float) else 1e-3
    peak = min(config.learning_rate or own_default, LARGEST)
    schedule = lr_schedule(config, steps // config.accumulate_batches, peak)
    if config.lr_schedule == "constant" and not config.warmup_steps:
        return peak
    if not optax_names.takes_schedule(parameter) and not config.inject_hyperparams:
        raise InputError(
            f"optimizer.lr_schedule: '{config.name}' takes one learning rate for the whole run; "
            "use constant without warmup_steps, or inject_hyperparams: true"
        )
    return schedule


def _refuse_rate(config: OptimizerConfig) -> None:
    default = OptimizerConfig()
    for key in ("learning_rate", "lr_schedule", "lr_arguments", "warmup_steps"):
        if getattr(config, key) != getattr(default, key):
            raise InputError(f"optimizer.{key}: '{config.name}' has no argument learning_rate; leave it out")


def _decays(patterns: list[str] | None) -> Callable[[Tree], Tree]:
    """Which leaves decay, as optax's masks want it: matrices (not biases and norms), or those that the patterns choose."""
    wanted = [pattern for pattern in patterns or () if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns or () if pattern.startswith("!")]

    def decays(path: Any, leaf: Any) -> bool:
        name = _name(path)
        chosen = any(fnmatchcase(name, pattern) for pattern in wanted) if wanted else leaf.ndim >= 2
        return chosen and not any(fnmatchcase(name, pattern) for pattern in unwanted)

    return lambda params: jax.tree_util.tree_map_with_path(decays, params)


def _refuse_idle(patterns: Sequence[str], params: Mapping[str, Tree]) -> None:
    """A pattern that matches nothing is a typo."""
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)] if patterns else []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0)
            raise InputError(f"optimizer.decay: no parameter matches '{pattern}'; the nearest are {', '.join(near)}")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
