"""The shares of a layer that tensor parallelism shards, found by following its parameters' logical axes through its forward.

The walk shards arrays as XLA does, but for a single axis of a mesh, and only as precisely as shares need. A matrix product over a sharded
dim gives a partial sum, which is summed over the devices at once. Arrays that are computed element by element from sharded arrays are
sharded as well.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

import jpipe
from jpipe.model import product_flops
from jpipe_planner.profile.model import tree_bytes
from jpipe_planner.profile.profile import TensorProfile

AXIS = "model"
Dims = tuple[bool, ...]
"""Whether each dim of an array is sharded."""


@dataclass
class Walk:
    """The result of a walk through a forward.

    Attributes:
        divides: the greatest common divisor of the sizes of all sharded dims; 0: none is sharded.
        reduced: bytes of the arrays that are summed over the devices.
        reductions: the number of these arrays.
        flops: FLOPs of matrix products that are divided among the devices.
        all_flops: FLOPs of all matrix products.
        exchanged: bytes of the tokens that choose some of several kernels, such as experts.
        per_token: the number of kernels that each token chooses; 0 if there are no such kernels.
        chosen: the numbers of rows in the products with chosen kernels.
    """

    divides: int = 0
    reduced: int = 0
    reductions: int = 0
    flops: float = 0.0
    all_flops: float = 0.0
    exchanged: int = 0
    per_token: int = 0
    chosen: set[int] = field(default_factory=set)
    _runs: int = 1
    """How often the equations run that the walk goes through."""
    _choices: tuple[int, int] = 1, 0
    """The number of kernels for each token, and the number of tokens with products that the walk has not reached yet."""

    def run(self, jaxpr: Any, arguments: Sequence[Dims]) -> list[Dims]:
        """Walk through a jaxpr with these dims of its arguments sharded. Return which dims of each result are sharded."""
        known = dict(zip(jaxpr.invars, arguments, strict=True))

        def dims(var: Any) -> Dims:
            return (False,) * len(var.aval.shape) if hasattr(var, "val") else known.get(var, (False,) * len(var.aval.shape))

        for equation in jaxpr.eqns:
            results = self._step(equation, [dims(var) for var in equation.invars])
            for var, sharded in zip(equation.outvars, results, strict=True):
                known[var] = sharded
                for size in itertools.compress(var.aval.shape, sharded):
                    self.divides = math.gcd(self.divides, size)
        return [dims(var) for var in jaxpr.outvars]

    def _step(self, equation: Any, inputs: list[Dims]) -> list[Dims]:
        """Return for each result of one equation which dims are sharded."""
        name, params = equation.primitive.name, equation.params
        if name == "top_k":
            *tokens, per_token = equation.outvars[0].aval.shape
            self._choices = per_token, math.prod(tokens)
        if name == "split":
            return inputs[:1] * len(equation.outvars)
        if name in _RULES:
            return [_RULES[name](self, equation, inputs)]
        body = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if name == "scan":
            return self._scan(equation, inputs)
        if body is not None and name != "while":
            body = getattr(body, "jaxpr", body)
            if len(body.invars) == len(inputs):
                return self.run(body, inputs)
        return [_like_inputs(equation, out, inputs) for out in equation.outvars]

    def _scan(self, equation: Any, inputs: list[Dims]) -> list[Dims]:
        """Walk through the body of a scan once, and count it for each iteration; outside its arrays have one dim more."""
        length, jaxpr = equation.params["length"], equation.params["jaxpr"]
        body = getattr(jaxpr, "jaxpr", jaxpr)  # JAX 0.12 has an open jaxpr here

        def is_sliced(outside: Any, inside: Any) -> bool:
            return len(outside.aval.shape) > len(inside.aval.shape)

        into, out = (
            [is_sliced(*pair) for pair in zip(*pairs, strict=True)]
            for pairs in ((equation.invars, body.invars), (equation.outvars, body.outvars))
        )
        outside, self._runs = self._runs, length * self._runs
        results = self.run(body, [dims[1:] if sliced else dims for dims, sliced in zip(inputs, into, strict=True)])
        self._runs = outside
        return [(False, *dims) if sliced else dims for dims, sliced in zip(results, out, strict=True)]

    def sum(self, out: Any, shared_by: int = 1) -> None:
        """Count an array that is summed over the devices, after groups of `shared_by` of its rows are added."""
        self.reduced += self._runs * (math.prod(out.aval.shape) * out.aval.dtype.itemsize // shared_by)
        self.reductions += self._runs

    def multiply(self, equation: Any, *, is_divided: bool) -> None:
        """Count the FLOPs of a product, which the devices divide or all compute."""
        flops = self._runs * product_flops(equation)
        self.all_flops += flops
        self.flops += flops if is_divided else 0.0

    def multiply_chosen(self, rows: Any) -> int:
        """Count the tokens of a product of groups of rows, each with its own kernel. Return the number of kernels for each token."""
        per_token, tokens = self._choices
        self.per_token = max(self.per_token, per_token)
        self.chosen.add(rows.aval.shape[0])
        self.exchanged += tokens * rows.aval.shape[-1] * rows.aval.dtype.itemsize
        self._choices = per_token, 0
        return per_token


def _like_inputs(equation: Any, out: Any, inputs: Sequence[Dims]) -> Dims:
    """Shard a result that is computed element by element like the inputs of the same shape."""
    shape = tuple(getattr(out.aval, "shape", ()))
    same = [dims for var, dims in zip(equation.invars, inputs, strict=True) if tuple(getattr(var.aval, "shape", ())) == shape]
    return tuple(map(any, zip(*same, strict=True))) if same else (False,) * len(shape)


def _product(walk: Walk, equation: Any, inputs: list[Dims]) -> Dims:
    (left, right), (left_batch, right_batch) = equation.params["dimension_numbers"]
    left_dims, right_dims = inputs
    out = [left_dims[i] or right_dims[j] for i, j in zip(left_batch, right_batch, strict=True)]
    out += [sharded for i, sharded in enumerate(left_dims) if i not in (*left, *left_batch)]
    out += [sharded for j, sharded in enumerate(right_dims) if j not in (*right, *right_batch)]
    contracted = any(left_dims[i] for i in left) or any(right_dims[j] for j in right)
    walk.multiply(equation, is_divided=contracted or any(out))
    if contracted:
        walk.sum(equation.outvars[0])
        return (False,) * len(out)
    return tuple(out)


def _grouped_product(walk: Walk, equation: Any, inputs: list[Dims]) -> Dims:
    """Shard a product of groups of rows, each with its own kernel; partial sums are summed after a token's results are added."""
    (left, right), _ = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    out, (left_dims, right_dims) = equation.outvars[0], inputs[:2]
    contracted = left_dims[left[0]] or right_dims[right[0]]
    walk.multiply(equation, is_divided=contracted or right_dims[-1])
    per_token = walk.multiply_chosen(equation.invars[0])
    if contracted:
        walk.sum(out, per_token)
        return False, False
    return left_dims[0], right_dims[-1]


def _reshaped(walk: Walk, equation: Any, inputs: list[Dims]) -> Dims:
    """Return how a reshaped array is sharded. If dims are joined or split, the outermost one is sharded."""
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    result, i, j = [False] * len(new), 0, 0
    while i < len(old) and j < len(new):
        first_old, first_new, old_size, new_size = i, j, old[i], new[j]
        while old_size != new_size:
            if old_size < new_size:
                i += 1
                old_size *= old[i]
            else:
                j += 1
                new_size *= new[j]
        sharded = [n for n in range(first_old, i + 1) if inputs[0][n]]
        wide = [n for n in range(first_new, j + 1) if new[n] > 1]
        if sharded and wide:
            result[wide[0]] = True
        i, j = i + 1, j + 1
    return tuple(result)


def _reduced(walk: Walk, equation: Any, inputs: list[Dims]) -> Dims:
    axes = equation.params["axes"]
    if any(inputs[0][axis] for axis in axes):
        walk.sum(equation.outvars[0])
    return tuple(sharded for n, sharded in enumerate(inputs[0]) if n not in axes)


def _gathered(walk: Walk, equation: Any, inputs: list[Dims]) -> Dims:
    """Shard the rows that are read from a table. If the table is sharded by rows, each device reads its rows, and a sum joins them."""
    numbers, out = equation.params["dimension_numbers"], equation.outvars[0]
    result = [False] * len(out.aval.shape)
    window_dims = [n for n in range(len(inputs[0])) if n not in numbers.collapsed_slice_dims]
    for dim, n in zip(numbers.offset_dims, window_dims, strict=False):
        result[dim] = inputs[0][n] and equation.params["slice_sizes"][n] == equation.invars[0].aval.shape[n]
    if any(inputs[0][n] for n in numbers.start_index_map):
        walk.sum(out)
    return tuple(result)


def _broadcast(walk: Walk, equation: Any, inputs: list[Dims]) -> Dims:
    result = [False] * len(equation.outvars[0].aval.shape)
    for n, dim in enumerate(equation.params["broadcast_dimensions"]):
        result[dim] = inputs[0][n]
    return tuple(result)


def _same_rank(walk: Walk, equation: Any, inputs: list[Dims]) -> Dims:
    """Shard a slice of an array, or a concatenation of arrays."""
    rank = len(equation.outvars[0].aval.shape)
    return tuple(any(dims[n] for dims in inputs if len(dims) == rank) for n in range(rank))


_RULES: Mapping[str, Callable[[Walk, Any, list[Dims]], Dims]] = {
    "dot_general": _product,
    "ragged_dot_general": _grouped_product,
    "reshape": _reshaped,
    "transpose": lambda walk, equation, inputs: tuple(inputs[0][n] for n in equation.params["permutation"]),
    "broadcast_in_dim": _broadcast,
    "squeeze": lambda walk, equation, inputs: tuple(
        sharded for n, sharded in enumerate(inputs[0]) if n not in equation.params["dimensions"]
    ),
    "gather": _gathered,
    "slice": _same_rank,
    "dynamic_slice": _same_rank,
    "concatenate": _same_rank,
    "pad": _same_rank,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"), _reduced),
}


@dataclass(frozen=True)
class Array:
    """An array in a tree: its bytes, its shape, and which dims are sharded."""

    size: int
    shape: tuple[int, ...]
    dims: Dims

    @classmethod
    def of(cls, spec: Any, dims: Dims) -> "Array":
        """Return the array for a shape and dtype."""
        return cls(math.prod(spec.shape) * spec.dtype.itemsize, tuple(spec.shape), dims)


def sharded_params(layer_id: str, spec: jpipe.model.LayerSpec) -> Any:
    """Return a layer's parameters as `Array`s, with the dim marked that `jpipe.plan.RULES` shards over the mesh axis "model"."""

    def array(path: Any, leaf: Any) -> Array:
        sharded = [jpipe.plan.RULES.get(axis or "") == AXIS for axis in _axes(spec, path)]
        first = sharded.index(True) if any(sharded) else -1  # an axis of a mesh shards one dim of an array
        return Array.of(leaf, tuple(n == first for n in range(len(leaf.shape))))

    return jax.tree_util.tree_map_with_path(array, spec.params)


def _expert_bytes(spec: jpipe.model.LayerSpec) -> tuple[int, float]:
    """Return the number of experts of a layer, and their share of the layer's bytes, from the axes of its parameters."""
    leaves = [(_axes(spec, path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(spec.params)]
    of_experts = [(leaf.shape[axes.index("expert")], leaf) for axes, leaf in leaves if "expert" in axes]
    total, bytes_ = (tree_bytes([leaf for _, leaf in part]) for part in (leaves, of_experts))
    return math.gcd(*(count for count, _ in of_experts)), bytes_ / total if total else 0.0


def _axes(spec: jpipe.model.LayerSpec, path: Any) -> tuple[str | None, ...]:
    """Return the logical axes of the parameter at a path in the parameters of a layer."""
    return spec.axes.get(jax.tree_util.keystr(path, simple=True, separator="/"), ())


def tensor_profile(
    stage: Callable[[str], jpipe.stages.StandaloneStage], layer_id: str, rows: int, policies: Sequence[str], device: jax.Device
) -> TensorProfile:
    """Return the shares of a layer that tensor parallelism shards. `stage` returns the layer as a stage with a recomputation policy."""
    plain = stage("none")
    params = sharded_params(layer_id, plain.specs[layer_id])
    walk, y, saved = _walked(plain, layer_id, params, device)
    of_policies = {"none": saved} | {policy: _walked(stage(policy), layer_id, params, device)[2] for policy in policies if policy != "none"}
    experts, of_experts = _expert_bytes(plain.specs[layer_id])
    share = _share(params)
    return TensorProfile(
        weights=share,
        compute=walk.flops / walk.all_flops if walk.all_flops else share,
        outputs=_share(y),
        residuals={policy: _share(arrays) for policy, arrays in of_policies.items()},
        reduced=walk.reduced / rows,
        reductions=walk.reductions,
        divides=walk.divides,
        experts=experts,
        of_experts=of_experts,
        per_token=walk.per_token if experts else 0,
        exchanged=walk.exchanged / rows if experts else 0.0,
        chosen={policy: _share(arrays, walk.chosen) for policy, arrays in of_policies.items()} if experts else {},
    )


def _walked(stage: jpipe.stages.StandaloneStage, layer_id: str, params: Any, device: jax.Device) -> tuple[Walk, Any, Any]:
    """Walk through the forward of a stage of one layer. Return the walk, and the outputs and the residuals as trees of `Array`s."""
    traced = stage.trace("forward", device)
    arguments = [array.dims for array in jax.tree.leaves(stage.stack.ties.split({layer_id: params}, [layer_id]))]
    jaxpr, walk = traced.jaxpr.jaxpr, Walk()
    for array in jax.tree.leaves(params):
        walk.divides = math.gcd(walk.divides, *itertools.compress(array.shape, array.dims))
    results = walk.run(jaxpr, [*arguments, *((False,) * len(var.aval.shape) for var in jaxpr.invars[len(arguments) :])])
    specs, treedef = jax.tree.flatten(traced.out_info)
    (y, new_state, saved), _ = jax.tree.unflatten(treedef, list(map(Array.of, specs, results)))
    inputs = jax.tree.map(lambda info: Array.of(info, ()), traced.args_info[0][1:4])
    return walk, y, (saved, stage.keep(inputs, (y, new_state)))


def _share(tree: Any, of_rows: Collection[int] | None = None) -> float:
    """Return the sharded share of the bytes of a tree of `Array`s; with `of_rows`, only of arrays with one of these numbers of rows."""
    arrays = jax.tree.leaves(tree)
    total = sum(array.size for array in arrays)
    chosen = [array.size for array in arrays if (any(array.dims) if of_rows is None else array.shape and array.shape[0] in of_rows)]
    return sum(chosen) / total if total else 0.0
