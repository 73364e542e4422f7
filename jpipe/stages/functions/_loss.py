"""The sum and the weight that losses and metrics return, checked."""

from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import InputError, callers_code, cause
from jpipe.model._layer import describe, key_spec
from jpipe.model._losses import Loss, call_with_randomness

Tree = Any


def loss_dtype() -> Any:
    """Return the dtype in which losses and weights are summed: float32, or float64 where JAX has it enabled."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def call_loss(function: Loss, where: str, outputs: Tree, labels: Tree, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Call a loss or a metric and check its result.

    Args:
        function: the loss or metric.
        where: "loss", or where the configuration names the metric; error messages begin with it.
        outputs, labels: of the model, for one microbatch.
        key: a random key, if the function asks for one.

    Returns:
        The sum and the weight, scalars of `loss_dtype()`.

    Raises:
        InputError: the result is not two real scalars.
    """
    result = call_with_randomness(function, outputs, labels, key)
    of = "sum of the losses" if where == "loss" else "sum"
    if not (isinstance(result, tuple) and len(result) == 2 and all(_is_scalar(part) for part in result)):
        values = "losses" if where == "loss" else "values"
        raise InputError(f"{where}: expected ({of}, weight), two scalars, found {describe(result)}; return {values}.sum(), count")
    total, weight = result
    kind = jnp.floating if where == "loss" else jnp.number
    if not jnp.issubdtype(jnp.result_type(total), kind) or jnp.iscomplexobj(total):
        expected = "a real floating-point number, which has a gradient" if where == "loss" else "a real number"
        raise InputError(f"{where}: expected the {of} to be {expected}, found {jnp.result_type(total)}; convert it to float32")
    if jnp.iscomplexobj(weight):
        raise InputError(f"{where}: expected the weight to be a real number, found {jnp.result_type(weight)}; return a count")
    return jnp.asarray(total, loss_dtype()), jnp.asarray(weight, loss_dtype())


def check_loss(function: Loss, where: str, layer: str, outputs: Tree, labels: Tree) -> None:
    """Check by tracing that a loss or a metric takes the outputs and labels of the last stage.

    Args:
        function, where: as in `call_loss`.
        layer: the last layer, for messages.
        outputs, labels: specs for one microbatch.

    Raises:
        InputError: the function fails on them, or does not return two scalars.
    """

    def message(error: BaseException) -> str:
        return (
            f"{where}: it does not take outputs {describe(outputs)} of layer {layer} and labels {describe(labels)}; "
            f"it says: {cause(error)}; fix the function"
        )

    with callers_code(message):
        jax.eval_shape(lambda y, labels, key: call_loss(function, where, y, labels, key), outputs, labels, key_spec())


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) or (hasattr(value, "dtype") and jnp.shape(value) == ())
