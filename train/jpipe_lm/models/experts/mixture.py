"""Mixtures of experts: a router chooses some of several MLPs for each token.

No token is dropped: tokens are sorted by expert, and the kernel of each expert is multiplied by the tokens that chose this expert.

Reference: Shazeer et al. 2017, "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer".

Letters in shapes: b rows, s positions, w width, n tokens (of all rows), e experts, k experts of a token, m width of an expert.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jpipe.context import traced_mesh
from jpipe_lm.config.model.experts_section import ExpertsConfig
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.experts import exchange
from jpipe_lm.models.experts.activations import activated
from jpipe_lm.models.experts.choice import choose
from jpipe_lm.models.metadata import named
from jpipe_train.losses.cross_entropy import wider

Linear = Callable[..., nnx.Linear]
"""Constructs a linear layer. The arguments are the sizes of inputs and outputs, and metadata for Flax."""


class Experts(nnx.Module):
    """The experts of a block, their router and, if the config has one, an MLP for all tokens.

    Args:
        config: the config of the experts.
        model: the config of the model. It gives the width, the dtype, the activation and whether the MLPs are gated.
        into: constructs the first linear layers of an MLP, without biases.
        back: constructs the last linear layer of an MLP, without bias.
        rngs: initializes the parameters.
    """

    def __init__(self, config: ExpertsConfig, model: ModelConfig, into: Linear, back: Linear, *, rngs: nnx.Rngs):
        self.config, self.activation, self.dtype = config, model.activation, model.compute_dtype
        width, inner, count = model.width, config.mlp_width, config.count
        of_router = {"kernel_metadata": named("embed", None), "bias_metadata": named(None)}
        self.router = into(width, count, dtype=wider(self.dtype), use_bias=config.bias, **of_router)
        if config.correction:
            self.correction = nnx.Param(jnp.zeros(count), **named(None))
        self.expand = Kernels(into, config, width, inner, ("expert", "embed", "mlp"), rngs=rngs)
        self.gate = Kernels(into, config, width, inner, ("expert", "embed", "mlp"), rngs=rngs) if model.gated_mlp else None
        self.contract = Kernels(back, config, inner, width, ("expert", "mlp", "embed"), rngs=rngs)
        if config.shared_mlp_width is not None:
            self.shared = Shared(config, model, into, back)

    def __call__(self, x: Float[Array, "b s w"], counted: Bool[Array, "b s"] | None) -> tuple[Float[Array, "b s w"], tuple[Any, Any, Any]]:
        """Return the outputs, and for each row the counts, probabilities and squares of `Routing`. Only `counted` tokens are counted."""
        parts = {name: part for name in ("expand", "gate", "contract") if (part := getattr(self, name)) is not None}
        kernels = {name: part.kernel[...].astype(self.dtype) for name, part in parts.items()}
        of_router: dict[str, Any] = {"kernel": self.router.kernel}
        if self.config.bias:
            kernels |= {f"{name}/bias": part.bias[...].astype(self.dtype) for name, part in parts.items()}
            of_router["bias"] = self.router.bias
        if self.config.correction:
            of_router["correction"] = self.correction
        router = {name: param[...].astype(wider(self.dtype)) for name, param in of_router.items()}
        is_counted = jnp.ones(x.shape[:2], bool) if counted is None else counted
        y, *choices = on_stage(self.config, self.activation)(x.astype(self.dtype), is_counted, router, kernels)
        if self.config.shared_mlp_width is not None:
            y = y + self.shared(x)
        return y, tuple(choices)


class Kernels(nnx.Module):
    """The kernels (e, in, out), initialized as in a single linear layer, and biases (e, out) of one linear layer in each expert."""

    def __init__(self, linear: Linear, config: ExpertsConfig, inputs: int, outputs: int, names: tuple[str, ...], *, rngs: nnx.Rngs):
        keys = jax.random.split(rngs.params(), config.count)
        kernels = jax.vmap(lambda key: linear(inputs, outputs, rngs=nnx.Rngs(params=key)).kernel[...])(keys)
        self.kernel = nnx.Param(kernels, **named(*names))
        if config.bias:
            self.bias = nnx.Param(jnp.zeros((config.count, outputs)), **named(names[0], names[2]))


class Shared(nnx.Module):
    """An MLP for all tokens. With the config's `shared_gate`, a gate from 0 to 1 for each token multiplies its output."""

    def __init__(self, config: ExpertsConfig, model: ModelConfig, into: Linear, back: Linear):
        assert config.shared_mlp_width is not None
        self.activation, inner, width, names = model.activation, config.shared_mlp_width, model.width, named("embed", "mlp")
        self.expand = into(width, inner, kernel_metadata=names)
        self.gate = into(width, inner, kernel_metadata=names) if model.gated_mlp else None
        self.contract = back(inner, width, kernel_metadata=named("mlp", "embed"))
        self.share = into(width, 1, kernel_metadata=named("embed", None)) if config.shared_gate else None

    def __call__(self, x: Float[Array, "b s w"]) -> Float[Array, "b s w"]:
        y = self.contract(activated(self.activation, self.expand(x), None if self.gate is None else self.gate(x)))
        return y if self.share is None else nnx.sigmoid(self.share(x)) * y


# Computing ---------------------------------------------------------------------------------------------------------------


def on_stage(config: ExpertsConfig, activation: str) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Return the function that computes routed experts on one device, or on the mesh of the stage that is traced.

    On a mesh, each device routes its own rows. If experts and rows are sharded over the same axis, `jpipe_lm.models.experts.exchange` sends
    tokens to experts. If the rows are not sharded over the axis of the experts, the outputs are summed over this axis. If `mlp` is sharded,
    the outputs are also summed over the axis of `mlp`.

    The function of (x, is_counted, parameters of the router, kernels and biases by name) returns the outputs, and the counts,
    probabilities and squares of one block that `Routing` describes.
    """
    stage = traced_mesh()
    if stage is None:
        return partial(_mixture, config, activation, None, None, ())
    over, inner = stage.axes.get("expert"), stage.axes.get("mlp")
    rows, into = P(stage.rows or None), P(over, None, inner)
    kernels = {"expand": into, "gate": into, "contract": P(over, inner)}
    kernels |= {"expand/bias": P(over, inner), "gate/bias": P(over, inner), "contract/bias": P(over)}

    def on_mesh(x: Any, is_counted: Any, router: Any, of_experts: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
        local = partial(_mixture, config, activation, over, inner, stage.rows)
        specs = rows, rows, P(), {name: kernels[name] for name in of_experts}
        return jax.shard_map(local, mesh=stage.mesh, in_specs=specs, out_specs=rows)(x, is_counted, router, of_experts)

    return on_mesh


def _mixture(
    config: ExpertsConfig,
    activation: str,
    over: str | None,
    inner: str | None,
    rows: tuple[str, ...],
    x: Float[Array, "b s w"],
    is_counted: Bool[Array, "b s"],
    router: dict[str, Any],
    kernels: dict[str, Any],
) -> tuple[Any, Any, Any, Any]:
    """Route and compute the tokens of one device.

    The experts are sharded over the mesh axis `over`, and each of them over `inner`, if these are not None. Other arguments are as in
    the result of `on_stage`.
    """
    logits = jnp.einsum("bsw,we->bse", x.astype(router["kernel"].dtype), router["kernel"])
    logits = logits + router["bias"][None, None] if config.bias else logits
    weights, chosen, probabilities = choose(config, logits, router.get("correction"))
    tokens: list[Any] = [array.reshape(-1, array.shape[-1]) for array in (x, weights.astype(x.dtype), chosen)]
    count = kernels["contract"].shape[0]
    if inner is not None and config.bias:  # each device has a part of the inputs of `contract`, but only one adds its bias
        kernels = {**kernels, "contract/bias": kernels["contract/bias"] * (jax.lax.axis_index(inner) == 0).astype(x.dtype)}

    def compute(x: Any, weights: Any, chosen: Any) -> Any:
        here = chosen if over is None else chosen - jax.lax.axis_index(over) * count
        y = computed(config, x, weights, here, kernels, activation, over is not None)
        return y if inner is None else jax.lax.psum(y, inner)

    if over is None:
        y = compute(*tokens)
    elif over in rows:
        y = exchange.by_platform()(compute, *tokens, over=over, rows=rows, count=count)
    else:  # pcast explicitly: with JAX's own cast in the gather of rows, gradients from other devices would be lost
        y = jax.lax.psum(compute(*(jax.lax.pcast(array, (over,), to="varying") for array in tokens)), over)
    return (y.reshape(x.shape), *_of_rows(logits, probabilities, chosen, is_counted))


def _of_rows(logits: Any, probabilities: Any, chosen: Any, is_counted: Any) -> tuple[Any, Any, Any]:
    """Return the counts, probabilities and squares of each row that `Routing` describes."""
    hits = jax.nn.one_hot(chosen, logits.shape[-1], dtype=jnp.bool_) & is_counted[..., None, None]
    share = is_counted.astype(logits.dtype)
    share = share / jnp.maximum(share.sum(1, keepdims=True), 1)
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    return hits.sum((1, 2), dtype=jnp.int32), jnp.einsum("bs,bse->be", share, probabilities), (share * squares).sum(1)


def computed(
    config: ExpertsConfig,
    x: Float[Array, "n w"],
    weights: Float[Array, "n k"],
    chosen: Int[Array, "n k"],
    kernels: dict[str, Any],
    activation: str,
    are_some: bool,
) -> Float[Array, "n w"]:
    """Return for each token the weighted sum of the outputs of the experts that it chose, or their sum for weighted inputs.

    Tokens are sorted by expert, and each group of tokens is multiplied by the kernels of its expert. The result has the tokens in their
    original order. `kernels` has kernels (e, in, out) and biases (e, out) by name. With `are_some`, `chosen` may contain numbers outside 0
    to e - 1, for experts without kernels; their outputs count as zero.
    """
    (n, k), count = chosen.shape, kernels["contract"].shape[0]
    numbers = chosen.reshape(-1)
    if are_some:
        numbers = jnp.where((numbers >= 0) & (numbers < count), numbers, count)  # sorted to the end
    order, sizes = jnp.argsort(numbers, stable=True), jnp.bincount(numbers, length=count)
    valid = (jnp.arange(n * k) < sizes.sum())[:, None] if are_some else None
    rows = _only(valid, x[order // k])

    def linear(name: str, rows: Any) -> Any:
        y = grouped(rows, kernels[name], sizes)
        return y + kernels[f"{name}/bias"].at[numbers[order]].get(mode="fill", fill_value=0) if config.bias else y

    if config.weighs_inputs:
        rows, weights = rows * weights.reshape(-1)[order][:, None], jnp.ones_like(weights)
    middle = activated(activation, linear("expand", rows), linear("gate", rows) if "gate" in kernels else None)
    outputs = _only(valid, linear("contract", middle))[jnp.argsort(order)].reshape(n, k, -1)
    return jnp.einsum("nkw,nk->nw", outputs, weights, preferred_element_type=wider(x.dtype)).astype(x.dtype)


def _only(valid: Bool[Array, "r 1"] | None, rows: Float[Array, "r w"]) -> Float[Array, "r w"]:
    """Replace rows outside all groups by zeros, because a grouped product and its gradient may have any values there."""
    return rows if valid is None else jnp.where(valid, rows, jnp.zeros((), rows.dtype))


def grouped(rows: Float[Array, "r i"], kernels: Float[Array, "e i o"], sizes: Int[Array, " e"]) -> Float[Array, "r o"]:
    """Multiply each group of rows by the kernel of the group. The groups are consecutive and have these sizes."""
    return jax.lax.ragged_dot(rows, kernels, sizes)
