"""The model as an ordered mapping of layers, each a pure `init` and `apply`; adapters for Flax NNX, Flax Linen and plain functions."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jpipe._errors import InputError, cause, shortened

Tree = Any  # a pytree of arrays


@dataclass(frozen=True)
class Layer:
    """The smallest unit that is never cut: two pure functions.

    Attributes:
        init: `(key, x) -> (params, state)`; `x` is an example of the input. `params` are trained, `state` is what forwards
            carry on (batch statistics, say); `{}` where there is none.
        apply: `(params, state, x, key, train) -> (y, state)`; `key` is a random key of this layer and microbatch, None
            unless `stochastic`; `train` is False in evaluation.
        stochastic: whether `apply` draws random numbers in training (dropout).
        owner: the object whose reuse in a second layer would mean shared parameters, if any.
    """

    init: Callable[[jax.Array, Tree], tuple[Tree, Tree]]
    apply: Callable[[Tree, Tree, Tree, jax.Array | None, bool], tuple[Tree, Tree]]
    stochastic: bool = False
    owner: Any = None


@dataclass(frozen=True)
class LayerSpec:
    """Shapes and dtypes around one layer, found without allocating anything.

    Attributes:
        x: its input.
        params: its parameters.
        state: its state.
        output: its output.
    """

    x: Tree
    params: Tree
    state: Tree
    output: Tree


class LayerStack:
    """The model: layers by id, in order; what flows from one to the next is any pytree.

    A layer is given as
    - a callable with a parameter named `rngs`: the constructor of a Flax NNX module, `lambda rngs: nnx.Linear(4, 8, rngs=rngs)`;
    - a Flax Linen module (called as `module(x)`, or `module(x, train=...)` if its `__call__` has a parameter `train`);
    - any other callable: a function of the layer's input, without parameters;
    - a `Layer`, for everything else.

    Initialization and dropout depend on (key, layer id, microbatch) only, never on where the stack is cut.

    Args:
        layers: the layers by id, a non-empty string; parameters, checkpoints and error messages are keyed by it.

    Raises:
        InputError: a layer that is none of the above, no layer at all, or a parameter shared by two layers.

    Example:
        >>> stack = LayerStack({"in": lambda rngs: nnx.Linear(4, 8, rngs=rngs), "act": jnp.tanh})
        >>> stack.ids
        ('in', 'act')
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        if not layers:
            raise InputError("LayerStack: expected at least one layer, found none")
        for layer_id in layers:
            if not isinstance(layer_id, str) or not layer_id:
                raise InputError(f"LayerStack: a layer id is a non-empty string, found {layer_id!r}")
        _refuse_shared_modules(layers)
        self.layers: dict[str, Layer] = {layer_id: _without_weak_types(_adapt(layer_id, layer)) for layer_id, layer in layers.items()}
        _refuse_shared_owners(self.layers)

    @property
    def ids(self) -> tuple[str, ...]:
        """The layer ids, in order."""
        return tuple(self.layers)

    def __repr__(self) -> str:
        return f"LayerStack({shortened(self.ids)})"

    def init_key(self, layer_id: str, key: jax.Array) -> jax.Array:
        """The key that a layer is initialized with; it depends on the key of the run and the layer's id only.

        Args:
            layer_id: which layer.
            key: the random key of the run.
        """
        return _fold(jax.random.fold_in(key, 0), layer_id)

    def init_layer(self, layer_id: str, key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        """(parameters, state) of one layer.

        Args:
            layer_id: which layer.
            key: the random key of the run.
            x: an input of the layer, or any arrays of its shapes and dtypes.
        """
        return self.layers[layer_id].init(self.init_key(layer_id, key), x)

    def apply(
        self, ids: Sequence[str], params: Tree, state: Tree, x: Tree, *, key: jax.Array | None, microbatch: Any, train: bool
    ) -> tuple[Tree, Tree]:
        """Run consecutive layers.

        Args:
            ids: which layers, in order.
            params: parameters by layer id.
            state: layer state by layer id.
            x: the input of the first of them, for one microbatch.
            key: the random key of the run; needed in training if a layer draws random numbers.
            microbatch: counted from the beginning of the run; dropout depends on it.
            train: False in evaluation: nothing is drawn, batch statistics are used as they are.

        Returns:
            The output of the last layer, and the new state by layer id.
        """
        new_state = {}
        for layer_id in ids:
            layer = self.layers[layer_id]
            drawn = None
            if train and layer.stochastic:
                assert key is not None
                drawn = jax.random.fold_in(_fold(jax.random.fold_in(key, 1), layer_id), microbatch)
            x, new_state[layer_id] = layer.apply(params[layer_id], state[layer_id], x, drawn, train)
        return x, new_state

    def is_stochastic(self, ids: Sequence[str]) -> bool:
        """Whether any of the layers `ids` draws random numbers in training."""
        return any(self.layers[layer_id].stochastic for layer_id in ids)

    def specs(self, inputs: Tree, ids: Sequence[str] | None = None) -> dict[str, LayerSpec]:
        """Shapes and dtypes of every layer's input, parameters, state and output, by layer id; allocates nothing.

        Args:
            inputs: one microbatch of inputs, or `jax.ShapeDtypeStruct`s like it.
            ids: only these consecutive layers; `inputs` are those of the first of them. All by default.

        Raises:
            InputError: a layer cannot take the output of the one before (names both, with shapes); its parameters are not
                real floating point; its state or its output in evaluation has other shapes than in training.
        """
        found: dict[str, LayerSpec] = {}
        key = key_spec()
        before, x = "the batch", jax.tree.map(spec_of, inputs)
        for layer_id in self.layers if ids is None else ids:
            layer = self.layers[layer_id]
            try:
                params, state = jax.eval_shape(layer.init, key, x)
                y, new_state = jax.eval_shape(lambda p, s, v, k, layer=layer: layer.apply(p, s, v, k, True), params, state, x, key)
                evaluated, _ = jax.eval_shape(lambda p, s, v, layer=layer: layer.apply(p, s, v, None, False), params, state, x)
            except InputError:
                raise
            except Exception as error:
                is_of_shapes = isinstance(error, (TypeError, ValueError))
                fit = f"make the output of '{before}' fit the input of '{layer_id}', or " if is_of_shapes else ""
                raise InputError(
                    f"layer '{layer_id}' does not take what '{before}' gives it: {describe(x)}; it says: {cause(error)}; "
                    f"{fit}mend '{layer_id}'"
                ) from error
            _refuse_untrainable(layer_id, params)
            _require_equal(f"layer '{layer_id}': the state that a forward returns", new_state, "the state it was given", state)
            _require_equal(f"layer '{layer_id}': its output in evaluation", evaluated, "its output in training", y)
            found[layer_id] = LayerSpec(x, params, state, y)
            before, x = layer_id, y
        return found


def key_spec() -> jax.ShapeDtypeStruct:
    """What a random key looks like."""
    return jax.eval_shape(lambda: jax.random.key(0))


def _without_weak_types(layer: Layer) -> Layer:
    return replace(layer, init=lambda key, x: _strong(layer.init(key, x)), apply=lambda *arguments: _strong(layer.apply(*arguments)))


def _strong(tree: Tree) -> Tree:
    """The same arrays without JAX's weak types, which would be lost at the end of a stage, so that the cut changed the numbers."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf, tree)


def spec_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype that an array (NumPy's or JAX's) has on a device."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ShapeDtypeStruct(jnp.shape(x), jax.dtypes.canonicalize_dtype(jnp.result_type(x)))


def describe(tree: Tree) -> str:
    """A pytree of arrays in few words: `float32[4,8]`, or the leaves with their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    words = [f"{jax.tree_util.keystr(path)} {_describe_leaf(leaf)}".strip() for path, leaf in leaves]
    return ", ".join(words) if words else "nothing"


def _describe_leaf(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__


def _fold(key: jax.Array, layer_id: str) -> jax.Array:
    digest = hashlib.blake2b(layer_id.encode(), digest_size=8).digest()  # 64 bits, in the two halves that a key takes
    for half in (digest[:4], digest[4:]):
        key = jax.random.fold_in(key, int.from_bytes(half, "little"))
    return key


def _require_equal(what: str, found: Tree, like: str, expected: Tree) -> None:
    if jax.tree.map(spec_of, found) != jax.tree.map(spec_of, expected):
        raise InputError(f"{what} has other shapes or dtypes than {like}: expected {describe(expected)}, found {describe(found)}")


def _refuse_untrainable(layer_id: str, params: Tree) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        is_complex = jnp.issubdtype(leaf.dtype, jnp.complexfloating)
        remedy = "keep its real and imaginary parts as two parameters" if is_complex else "make it layer state"
        name = f"{layer_id}{jax.tree_util.keystr(path)}"
        raise InputError(f"parameter {name} is {leaf.dtype}: only real floating-point parameters can be trained; {remedy}")


# Adapters -------------------------------------------------------------------------------------------------------------


def _adapt(layer_id: str, layer: Any) -> Layer:
    if isinstance(layer, Layer):
        return layer
    if isinstance(layer, linen.Module):
        return _linen(layer)
    if isinstance(layer, nnx.Module):
        raise InputError(
            f"layer '{layer_id}' is an NNX module that is built already; give its constructor instead, "
            f"lambda rngs: {type(layer).__name__}(..., rngs=rngs), so that planning allocates nothing"
        )
    if callable(layer):
        return _nnx(layer_id, layer) if _has_parameter(layer, "rngs") else _function(layer)
    raise InputError(
        f"layer '{layer_id}' is {type(layer).__name__}; expected an NNX constructor (a callable with a parameter 'rngs'), "
        "a Linen module, a function of the input, or a jpipe.Layer"
    )


def _has_parameter(function: Callable[..., Any], name: str) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):  # a class: flax's metaclass hides the signature of its constructor
        function = getattr(function, "__init__")  # noqa: B009 - read, never called
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables of C have no signature: they are functions of the input
        return False


def _function(function: Callable[[Tree], Tree]) -> Layer:
    return Layer(init=lambda key, x: ({}, {}), apply=lambda params, state, x, key, train: (function(x), state))


def _linen(module: linen.Module) -> Layer:
    takes_train = _has_parameter(type(module).__call__, "train")

    def mode(train: bool) -> dict[str, Any]:
        return {"train": train} if takes_train else {}

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        state = dict(module.init(keys, x, **mode(True)))
        return state.pop("params", {}), state

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        rngs = {"dropout": key} if key is not None else {}
        variables = {"params": params, **state}
        if not train or not state:
            return module.apply(variables, x, rngs=rngs, **mode(train)), state
        y, new_state = module.apply(variables, x, rngs=rngs, mutable=list(state), **mode(train))
        return y, {**state, **new_state}

    # Linen asks for a "dropout" key only when it needs one: whether it does shows when it is traced, so it always gets one.
    return Layer(init, apply, stochastic=takes_train, owner=module)


def _nnx(layer_id: str, constructor: Callable[..., nnx.Module]) -> Layer:
    def build(key: jax.Array) -> Any:  # checked below: the constructor is the caller's
        module = constructor(rngs=nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise InputError(f"layer '{layer_id}': its constructor returned {type(module).__name__}, expected a flax.nnx.Module")
        return module

    def split(module: nnx.Module) -> Any:
        return nnx.split(module, nnx.Param, nnx.RngState, ...)

    try:
        module = nnx.eval_shape(build, key_spec())
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"layer '{layer_id}': its constructor fails: {cause(error)}; mend it there") from error
    graphs = {}
    graphs[True], *abstract = split(module)  # as it was built: what its author has frozen stays frozen in training
    module.eval()
    graphs[False] = split(module)[0]
    params_form, rng_form, state_form = (jax.tree.structure(part) for part in abstract)
    rng_specs = jax.tree.leaves(abstract[1])

    def init(key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        _, params, _, state = split(build(key))
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    def rng_state(key: jax.Array | None) -> list[jax.Array]:
        """Every random stream of the module restarted from this microbatch's key, all counters at 0."""
        base = jax.random.key(0) if key is None else key  # in evaluation nothing is drawn
        return [
            _keys_like(spec, jax.random.fold_in(base, i))
            if jnp.issubdtype(spec.dtype, jax.dtypes.prng_key)
            else jnp.zeros(spec.shape, spec.dtype)
            for i, spec in enumerate(rng_specs)
        ]

    def apply(params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        parts = (
            jax.tree.unflatten(params_form, jax.tree.leaves(params)),
            jax.tree.unflatten(rng_form, rng_state(key)),
            jax.tree.unflatten(state_form, jax.tree.leaves(state)),
        )
        module = nnx.merge(graphs[train], *parts)
        y = module(x)
        return y, nnx.to_pure_dict(split(module)[3]) if train else state

    return Layer(init, apply, stochastic=bool(rng_specs))


def _keys_like(spec: Any, key: jax.Array) -> jax.Array:
    """As many keys as `spec` has (modules that are vmapped or scanned hold a stack of them), from one."""
    return jax.random.split(key, spec.shape) if spec.shape else key


def _refuse_shared_modules(layers: Mapping[str, Any]) -> None:
    """Two NNX constructors that hand out the same module or variable (a closure over one) share its parameters."""
    seen: dict[int, str] = {}
    alive = []  # keeps the built modules alive, so that an id() is not used twice
    for layer_id, layer in layers.items():
        if isinstance(layer, (Layer, nnx.Module, linen.Module)) or not callable(layer) or not _has_parameter(layer, "rngs"):
            continue

        def record(key: jax.Array, layer_id: str = layer_id, layer: Any = layer) -> None:
            module = layer(rngs=nnx.Rngs(key))
            alive.append(module)
            for path, node in nnx.iter_graph(module):
                if not isinstance(node, nnx.Param):
                    continue
                if seen.setdefault(id(node), layer_id) != layer_id:
                    name = ".".join(str(part) for part in path)
                    raise _shared(seen[id(node)], layer_id, name)

        try:
            jax.eval_shape(record, key_spec())
        except InputError:
            raise
        except Exception:  # noqa: S112 - a constructor that fails is reported by the adapter, with its layer id
            continue


def _refuse_shared_owners(layers: Mapping[str, Layer]) -> None:
    seen: dict[int, str] = {}
    for layer_id, layer in layers.items():
        if layer.owner is not None and seen.setdefault(id(layer.owner), layer_id) != layer_id:
            raise _shared(seen[id(layer.owner)], layer_id, type(layer.owner).__name__)


def _shared(first: str, second: str, name: str) -> InputError:
    return InputError(
        f"layers '{first}' and '{second}' share the parameter or module '{name}'; shared parameters (tied weights) are not supported, "
        f"because two stages would train two copies of it; give '{second}' its own (for a Linen module: module.clone())"
    )
