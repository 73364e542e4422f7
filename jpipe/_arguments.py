"""Checks of the arguments of a pipeline. Each function raises `InputError` for an invalid argument."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jpipe._numbers import is_int, is_number
from jpipe.capabilities.registry import OPTIONS
from jpipe.errors import InputError, nearest, short
from jpipe.model._added_layers import with_added_layers
from jpipe.model._function_arguments import Loss
from jpipe.model._layer import LayerSpec, key_spec
from jpipe.model._precision import Precision
from jpipe.model._stack import LayerStack
from jpipe.model.layerwise._transformation import has_nesterov
from jpipe.plan import Plan, excluded
from jpipe.runtime._executor import To, Weights
from jpipe.runtime._plain import filled

Tree = Any


def as_key(key: Any) -> jax.Array:
    """Return a typed random key of JAX's default kind; wrap a key that `jax.random.PRNGKey` has made."""
    if isinstance(key, jax.Array) and key.dtype == jnp.uint32 and key.shape == jax.random.key_data(jax.random.key(0)).shape:
        return jax.random.wrap_key_data(key)
    if not isinstance(key, jax.Array) or key.dtype != key_spec().dtype or key.shape != ():
        actual = f"{key.dtype}{list(key.shape)}" if isinstance(key, jax.Array) else type(key).__name__
        raise InputError(f"init: expected a random key like jax.random.key(0), of JAX's default kind {key_spec().dtype}, found {actual}")
    return key


def initial_arrays(params: Tree | None, stack: LayerStack, specs: Mapping[str, LayerSpec]) -> dict[str, tuple[Tree, Tree]]:
    """Return (parameters, state) by layer id: arrays of `params`, else the model's own arrays, else specs of arrays to initialize."""
    known = stack.by_layer(params), stack.initial
    for layer_id in known[0]:
        if layer_id not in specs:
            raise InputError(f"params: the model has no layer {layer_id!r}; {nearest(str(layer_id), specs)}")
    by_layer = {
        layer_id: (
            _first_arrays(spec.params, [_params(arrays.get(layer_id, ({}, None))[0], spec.params, layer_id) for arrays in known]),
            _first_arrays(spec.state, [arrays[layer_id][1] for arrays in known if layer_id in arrays]),
        )
        for layer_id, spec in specs.items()
    }
    initial = {layer_id: params for layer_id, (params, _) in by_layer.items()}
    stack.ties.check_values(initial)
    firsts = stack.ties.with_firsts(initial)
    result = {layer_id: (firsts[layer_id], state) for layer_id, (_, state) in by_layer.items()}
    if stack.traced is not None and not stack.traced.fresh:
        _reject_missing({layer_id: trees for layer_id, trees in result.items() if layer_id not in stack.ids_of_added})
    return result


def _first_arrays(specs: Tree, trees: Sequence[Tree]) -> Tree:
    """Replace each spec by the array at the same path in the first tree that has one; keep the others."""
    arrays: dict[Any, Any] = {}
    for tree in trees:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        arrays = {path: leaf for path, leaf in leaves if not isinstance(leaf, jax.ShapeDtypeStruct)} | arrays
    return jax.tree_util.tree_map_with_path(lambda path, spec: arrays.get(path, spec), specs)


def _reject_missing(initial: Mapping[str, tuple[Tree, Tree]]) -> None:
    """Raise `InputError` if an abstract model has an array that the user has not passed: only a concrete model can initialize it."""
    for layer_id, trees in initial.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(trees)[0]:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
                raise InputError(
                    f"params: layer '{layer_id}': '{name}' is missing, and an abstract model cannot initialize it; give all arrays of the "
                    "layer"
                )


def _params(params: Any, expected: Tree, layer_id: str) -> Tree:
    """Return the parameters of a layer as a plain tree, with specs for those that are missing.

    For an NNX module or an `nnx.State` these are the `nnx.Param`s.

    Raises:
        InputError: `params` contains NNX variables that are neither parameters nor random streams, or all collections of a Linen module.
    """
    if isinstance(params, nnx.Module):
        params = nnx.state(params)
    if isinstance(params, nnx.State):
        weights, _, extra_variables = nnx.split_state(params, nnx.Param, nnx.RngState, ...)
        if extra_variables:
            path, variable = nnx.to_flat_state(extra_variables)[0]
            raise InputError(
                f"params: layer '{layer_id}': expected nnx.Param variables, found '{'/'.join(map(str, path))}', a "
                f"{type(variable).__name__}, which is layer state and begins fresh; give nnx.state(module, nnx.Param)"
            )
        params = nnx.to_pure_dict(weights)
    elif isinstance(params, Mapping) and "params" in params and not (isinstance(expected, Mapping) and "params" in expected):
        raise InputError(
            f"params: layer '{layer_id}': expected the layer's parameters, found all collections of its variables; give only the value of "
            "the key 'params'"
        )
    return filled(expected, params, f"params: layer '{layer_id}'")


def checked_model(stack: Any, plan: Any, loss: Any) -> tuple[LayerStack, Plan]:
    """Check the types of model, plan and loss, and that the plan fits the model; return both with the layers that the plan adds."""
    if not isinstance(stack, LayerStack):
        raise InputError(f"stack: expected a jpipe.LayerStack, found {type(stack).__name__}; wrap the layers in LayerStack(…)")
    if not isinstance(plan, Plan):
        raise InputError(where="plan", expected="a jpipe.Plan", found=type(plan).__name__, change="make one with Plan.even(stack.ids, …)")
    if not callable(loss):
        raise InputError(where="loss", expected="a function (outputs, labels) -> (sum, weight)", found=type(loss).__name__)
    stack, plan = with_added_layers(stack, plan)
    plan.check_layers(stack.ids)
    if stack.carries_rows and max(plan.replicas) > 1:
        raise InputError(
            where="plan.replicas",
            expected="1 for each stage, because layers carry the state of each row from batch to batch",
            found=max(plan.replicas),
            change="use more stages instead, or layers without such a state",
        )
    return stack, plan


def checked_batch(name: str, batch: Any) -> int:
    """Return the batch number in the argument `name`."""
    if not is_int(batch) or batch < 0:
        raise InputError(where=name, expected="the number of a batch, 0 or more", found=repr(batch))
    return int(batch)


def check_observer(observe: Any) -> None:
    if observe is not None and not callable(observe):
        raise InputError(where="observe", expected="a function of an Event, such as a Tracer or a Snapshot", found=type(observe).__name__)


def checked_arguments(plan: Plan, precision: Precision, **arguments: Any) -> dict[str, Any]:
    """Check that the options of a pipeline, None or False if not set, fit each other and the plan; return them as in `excluded`."""
    arguments["precision: params"] = precision.params if precision.has_masters else None
    arguments["precision: loss_scale: dynamic"] = precision.dynamic_scale is not None
    for option in OPTIONS:
        if option.check_arguments is not None:
            option.check_arguments(arguments)
    if problem := excluded(plan, **arguments):
        raise InputError(problem)
    return arguments


def check_ties(plan: Plan, stack: LayerStack) -> None:
    """If several stages of a plan hold copies of the same parameters, check that the plan allows it."""
    entries = stack.ties.in_stages([stage.layers for stage in plan.stages])
    if problem := excluded(plan, ties=entries.in_several or None):
        raise InputError(problem)
    for option in OPTIONS:
        if option.check_model is not None:
            option.check_model(plan, entries)


def check_ema_decay(ema_decay: Any) -> None:
    if ema_decay is not None and not (is_number(ema_decay) and 0 <= ema_decay < 1):
        raise InputError(where="ema_decay", expected="a number of at least 0 and below 1, such as 0.999", found=repr(ema_decay))


_LARGEST_FACTOR = 100


def checked_delay_factor(delay_correction: Any) -> float | None:
    """Return the factor of the prediction, or None without correction."""
    if delay_correction is None or delay_correction == "predict":
        return None if delay_correction is None else 1.0
    number = delay_correction.item() if getattr(delay_correction, "shape", None) == () else delay_correction
    if not is_number(number) or not 0 <= number <= _LARGEST_FACTOR:
        raise InputError(
            where="delay_correction",
            expected=f"'predict', or a number from 0 to {_LARGEST_FACTOR} such as 0.5",
            found=short(delay_correction),
        )
    return float(number)


def log_correction(plan: Plan, optimizer: optax.GradientTransformation, factor: float) -> None:
    """Log a warning if a correction is known to overshoot, and a note if it has no effect."""
    log = logging.getLogger("jpipe")
    if not any(plan.delays):
        log.info("delay_correction: it has no effect, because no gradients are late under the schedule '%s'", plan.schedule)
    elif factor > 0.5 and max(plan.delays) > 1 and has_nesterov(optimizer):
        log.warning(
            "delay_correction: %g was not measured with Nesterov's momentum, which looks ahead itself, and delays above one update, found "
            "%g; use 0.5, or more microbatches",
            factor,
            max(plan.delays),
        )


def check_weights(weights: Any, ema_decay: float | None) -> None:
    if weights not in get_args(Weights):
        raise InputError(where="weights", expected="'newest' or 'ema'", found=repr(weights))
    if weights == "ema" and ema_decay is None:
        raise InputError("weights: this pipeline keeps no average of the weights; give ema_decay to Pipeline, such as 0.999")


def check_to(to: Any) -> None:
    if to not in get_args(To):
        raise InputError(where="to", expected="'all' or 'first'", found=repr(to))


def checked_metrics(metrics: Any) -> dict[str, Loss]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InputError(where="metrics", expected="a dict of functions by name", found=type(metrics).__name__)
    for name, metric in metrics.items():
        if not isinstance(name, str) or not callable(metric):
            raise InputError(
                f"metrics: expected a function by name, found {name!r}: {type(metric).__name__}; give (outputs, labels) -> (sum, weight)"
            )
    return dict(metrics)
