"""Flax NNX modules as layers: a module is split into parameters and state, and merged again for each call."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpipe.errors import InputError, Problem, callers_code, cause, short
from jpipe.model._function_arguments import Modes, Randomness, arguments_of, modes
from jpipe.model._layer import Layer, key_spec
from jpipe.model.jaxprs._dependence import reached

Tree = Any
_ARRAYS = "an array"  # may change, because arrays are layer state
_FROZEN = ("deterministic", "use_running_average")  # the attributes that nnx.Module.train() and eval() set


def nnx_functions(where: str, constructor: Callable[..., nnx.Module], num_inputs: int | None = None) -> "NnxFunctions":
    """Return the functions of the module that a constructor makes. A whole model has `num_inputs` inputs; for a layer it is None."""
    traced: list[Any] = []

    def trace(key: jax.Array) -> Any:  # nnx.eval_shape would lose arrays that are in no nnx.Variable
        module = _build(where, constructor, key)
        graphs, arrays = _graphs(module)
        traced.append((type(module), graphs))
        return arrays

    with callers_code(lambda error: Problem(f"its constructor fails: {cause(error)}", where, change="fix the constructor")):
        specs = jax.eval_shape(trace, key_spec())
    kind, graphs = traced[0]
    return _functions(where, kind, graphs, lambda key: _split(_build(where, constructor, key))[1:], specs, num_inputs)


def built_functions(where: str, module: nnx.Module, num_inputs: int | None = None) -> "NnxFunctions":
    """Return the functions of a built module, or of an abstract module from `nnx.eval_shape`, without copying its arrays.

    The module is not changed; `num_inputs` is as in `nnx_functions`. Raise InputError if an abstract module has lost an array.
    """
    for path, part in nnx.iter_modules(module):
        for name, value in _attributes(part):
            if not isinstance(value, nnx.Pytree) and any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                raise InputError(
                    f"its array '{'.'.join(map(str, (*path, name)))}' is in no nnx.Variable, so nnx.eval_shape loses it",
                    where=where,
                    change=f"give the constructor instead, lambda rngs: {type(module).__name__}(…, rngs=rngs)",
                )
    graphs, arrays = _graphs(nnx.clone(module))
    specs = jax.eval_shape(lambda *arrays: arrays, *arrays)
    is_abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays))

    def make(key: jax.Array) -> Any:
        if is_abstract:
            raise abstract(where, f"the constructor lambda rngs: {type(module).__name__}(…, rngs=rngs)")
        return arrays

    functions = _functions(where, type(module), graphs, make, specs, num_inputs)
    return functions if is_abstract else dataclasses.replace(functions, arrays=arrays)


def abstract(where: str, instead: str) -> InputError:
    """Return the error for the initialization of a model without arrays; `instead` is what the user can pass."""
    return InputError("an abstract model has no arrays to begin with", where=where, change=f"give init(…, params=…), or {instead}")


def _functions(where: str, kind: type, graphs: Any, make: Callable[[jax.Array], Any], specs: Any, num_inputs: int | None) -> "NnxFunctions":
    # A parameter with the default None leaves the choice to the attribute of the same name, which train() and eval() set.
    call = functools.partial(getattr(kind, "__call__"), None)  # noqa: B004, B009 - the method, which takes the module
    mode = modes(where, call, lambda parameter: parameter.default is None, num_inputs)
    randomness = Randomness() if num_inputs is None else Randomness.of(call)
    params, rngs, state = specs
    takes_carry = callable(getattr(kind, "carried", None))
    return NnxFunctions(where, make, graphs, mode, randomness, params, rngs, state, num_inputs, takes_carry=takes_carry)


@dataclass(frozen=True)
class NnxFunctions:
    """A module as pure functions. Its `nnx.Param`s are trained; all other variables and arrays are layer state.

    Attributes:
        where: the name of the module, for messages.
        make: `key -> new arrays`.
        graphs: the static part of the module: in training (True), in evaluation (False), and unchanged (None).
        mode: a function from `train` to the arguments of a call that select training or evaluation.
        randomness: the parameter through which a call asks for random numbers.
        params_specs, rng_specs, state_specs: the specs of the arrays, as Flax splits them.
        num_inputs: the number of inputs of a whole model; None for a layer of a stack.
        arrays: the arrays of a built module, as Flax splits them; None for other modules.
        takes_carry: whether the module has a method `carried(x, carry) -> (y, carry)`; see `Layer.carried`.
    """

    where: str
    make: Callable[[jax.Array], Any]
    graphs: dict[bool | None, Any]
    mode: Modes
    randomness: Randomness
    params_specs: Any
    rng_specs: Any
    state_specs: Any
    num_inputs: int | None = None
    arrays: Any = None
    takes_carry: bool = False

    def layer(self) -> Layer:
        """Return the layer. While it is traced, it raises `InputError` if its forward changes an attribute that is not an array."""
        has_streams, asks = bool(jax.tree.leaves(self.rng_specs)), self.randomness
        draws_in_evaluation = has_streams or asks.is_needed
        draws = has_streams or asks.name is not None
        carried, axes = self.carried if self.takes_carry else None, _axes(self.params_specs)
        return Layer(self.init, self.apply, draws, axes=axes, draws_in_evaluation=draws_in_evaluation, carried=carried)

    @property
    def initial(self) -> tuple[Tree, Tree] | None:
        """The parameters and the state of a built module; None for other modules."""
        return None if self.arrays is None else (nnx.to_pure_dict(self.arrays[0]), nnx.to_pure_dict(self.arrays[2]))

    def init(self, key: jax.Array, x: Tree) -> tuple[Tree, Tree]:
        params, _, state = self.make(key)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(state)

    def apply(self, params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree]:
        return self._applied(params, state, x, key, train)

    def carried(self, params: Tree, state: Tree, x: Tree, carry: Tree, key: jax.Array | None, train: bool) -> tuple[Tree, Tree, Tree]:
        (y, left), new_state = self._applied(params, state, x, key, train, carry)
        return y, new_state, left

    def _applied(self, params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool, *carry: Tree) -> tuple[Tree, Tree]:
        y, module = self._forward(params, state, x, key, train, *carry)
        _, new_params, _, new_state = _split(module)
        if any(new is not old for new, old in zip(jax.tree.leaves(new_params), jax.tree.leaves(params), strict=True)):
            _reject_learning(self.where, lambda p, v: _split(self._forward(p, state, v, key, train, *carry)[1])[1], params, x)
        return y, nnx.to_pure_dict(new_state) if train else state

    def module(self, params: Tree, state: Tree) -> nnx.Module:
        """Return a new module with these arrays, and with the mode and the random streams of the original module."""
        return self._merged(None, params, self._rng_state(None) if self.arrays is None else jax.tree.leaves(self.arrays[1]), state)

    def _merged(self, mode: bool | None, params: Tree, rngs: list[Any], state: Tree) -> nnx.Module:
        specs = self.params_specs, self.rng_specs, self.state_specs
        leaves = jax.tree.leaves(params), rngs, jax.tree.leaves(state)
        parts = (jax.tree.unflatten(jax.tree.structure(spec), values) for spec, values in zip(specs, leaves, strict=True))
        return nnx.merge(self.graphs[mode], *parts)

    def _forward(self, params: Tree, state: Tree, x: Tree, key: jax.Array | None, train: bool, *carry: Tree) -> tuple[Tree, nnx.Module]:
        """Call the module, or its method `carried` with a carry, and return its output and the module after the call."""
        module: Any = self._merged(train, params, self._rng_state(key), state)
        before, variables = _static_attributes(module), _variables(module)
        call = module.carried if carry else module
        y = call(*arguments_of(x, self.num_inputs), *carry, **self.mode(train), **self.randomness.arguments(key, train))
        _reject_changed(self.where, before, _static_attributes(module))
        _reject_new(self.where, variables, _variables(module))
        return y, module

    def _rng_state(self, key: jax.Array | None) -> list[jax.Array]:
        """Return the state of every random stream, restarted from this microbatch's key with all counters at 0."""
        base = jax.random.key(0) if key is None else key  # without a key the module draws no random numbers

        def restarted(i: int, spec: Any) -> jax.Array:
            if not jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
                return jnp.zeros(spec.shape, spec.dtype)
            own = jax.random.fold_in(base, i)
            return jax.random.split(own, spec.shape) if spec.shape else own  # vmapped or scanned modules hold a stack of keys

        return [restarted(i, spec) for i, spec in enumerate(jax.tree.leaves(self.rng_specs))]


def _axes(params: Any) -> dict[str, tuple[str | None, ...]]:
    """Return the logical axes that a module names (`nnx.with_partitioning`), by path."""
    named = jax.tree_util.tree_flatten_with_path(
        nnx.to_pure_dict(nnx.get_partition_spec(params)), is_leaf=lambda leaf: isinstance(leaf, jax.sharding.PartitionSpec)
    )[0]
    return {"/".join(str(key.key) for key in path): tuple(spec) for path, spec in named if spec}


def _build(where: str, constructor: Callable[..., Any], key: jax.Array) -> nnx.Module:
    with nnx.use_eager_sharding(False):  # jpipe shards: modules only name logical axes
        module = constructor(rngs=nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise InputError(f"its constructor returned {type(module).__name__}, expected a flax.nnx.Module", where=where)
    _mark_arrays(module)
    return nnx.clone(module)  # the caller may keep a reference to it


def _graphs(module: nnx.Module) -> tuple[dict[bool | None, Any], Any]:
    """Return static parts by mode, unchanged (None), training (True), evaluation (False); and the arrays. The module is changed."""
    _mark_arrays(module)
    graphs: dict[bool | None, Any] = {None: _split(module)[0]}
    _set_to_train(module)
    graphs[True], *arrays = _split(module)
    module.eval()
    graphs[False] = _split(module)[0]
    return graphs, tuple(arrays)


def _split(module: nnx.Module) -> Any:
    """Split a module into its graph, parameters, state of random streams, and layer state."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def is_in_evaluation(module: nnx.Module) -> bool:
    """Return whether all parts with an evaluation mode are in this mode, as after `module.eval()`; False if no part has one."""
    flags = [getattr(part, name) for _, part in nnx.iter_modules(module) for name in _FROZEN if getattr(part, name, None) is not None]
    return bool(flags) and all(flags)


def _set_to_train(module: nnx.Module) -> None:
    """Call `module.train()`, but keep frozen the parts that a constructor has frozen."""
    frozen = [(part, name) for _, part in nnx.iter_modules(module) for name in _FROZEN if getattr(part, name, None) is True]
    module.train()
    for part, name in frozen:
        setattr(part, name, True)
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.MultiHeadAttention) and part.decode is None:  # a layer does not decode
            part.decode = False


def _mark_arrays(module: nnx.Module) -> None:
    """Mark attributes that are arrays, because Flax does not recognize them while they are traced."""
    for _, part in nnx.iter_modules(module):
        for name, value in list(_attributes(part)):
            if not nnx.is_data(value) and _holds_arrays(value):
                setattr(part, name, nnx.data(value))


def _attributes(part: nnx.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module, without Flax's internal ones."""
    return ((name, value) for name, value in vars(part).items() if not str(name).startswith(("_pytree__", "_object__")))


def _holds_arrays(value: Any) -> bool:
    return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(value))


def _static_attributes(module: nnx.Module) -> dict[str, Any]:
    """Return the attributes that are neither variables nor modules (numbers, text, None), by path. A mark replaces each array."""
    attributes: dict[str, Any] = {}
    for path, part in nnx.iter_modules(module):
        for name, value in _attributes(part):
            is_cache = isinstance(getattr(type(part), str(name), None), functools.cached_property)
            if isinstance(value, (nnx.Variable, nnx.Pytree)) or is_cache:
                continue
            attributes[".".join(map(str, (*path, name)))] = _ARRAYS if _holds_arrays(value) else _copied(value)
    return attributes


def _copied(value: Any) -> Any:
    """Copy containers recursively, but not the values in them."""
    if type(value) is dict:
        return {key: _copied(inner) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _reject_changed(where: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in {**before, **after}:
        if name not in before or name not in after or not _same(before[name], after[name]):
            was, now = (short(attributes[name]) if name in attributes else "nothing" for attributes in (before, after))
            raise InputError(
                f"its forward changes the attribute '{name}' from {was} to {now}, which would be lost, because a forward is compiled",
                where=where,
                change="store values that change as arrays in an nnx.Variable, such as nnx.BatchStat",
            )


def _variables(module: nnx.Module) -> dict[str, tuple[str, Any]]:
    """Return the kind of each variable, and the structure of its value, by path."""
    return {
        ".".join(map(str, path)): (type(node).__name__, jax.tree.structure(node.get_value()))
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Variable)
    }


def _reject_new(where: str, before: dict[str, tuple[str, Any]], after: dict[str, tuple[str, Any]]) -> None:
    """Raise `InputError` if a forward makes variables, as `nnx.Module.sow` does."""
    for name, (kind, _) in after.items():
        if before.get(name) != after[name]:
            raise InputError(
                f"its forward stores something new in the nnx.{kind} '{name}', as nnx.Module.sow does, but a pipeline cannot collect it",
                where=where,
                change="return the value as a part of the output, or remove the sow; if a layer carries values from forward to forward, "
                "make a variable in its constructor",
            )


def _reject_learning(where: str, written: Callable[[Tree, Tree], Tree], params: Tree, x: Tree) -> None:
    """Raise `InputError` if a forward writes values computed from its input into a parameter.

    `written` maps (parameters, input) to the parameters after a forward. Values that depend only on the weights (`nnx.WeightNorm`) are
    allowed: each forward computes them again.
    """
    jaxpr = jax.make_jaxpr(written)(params, x).jaxpr
    by_input = reached(jaxpr, [0] * len(jax.tree.leaves(params)) + [1] * len(jax.tree.leaves(x)))
    for (path, _), is_reached in zip(jax.tree_util.tree_flatten_with_path(params)[0], by_input, strict=True):
        if is_reached:
            raise InputError(
                f"its forward writes values computed from its input into the parameter {jax.tree_util.keystr(path)}, but they "
                "would be lost, because only the optimizer changes parameters",
                where=where,
                change="make it an nnx.Variable of another kind, such as nnx.BatchStat",
            )


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # a user's object that cannot be compared
        return False
