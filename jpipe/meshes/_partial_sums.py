"""Gradients as sums of parts: each device sums the gradients of its own rows, and the devices add them up once per update.

Without this, XLA adds up a gradient over the devices of the rows in each backward. Here the backward is evaluated from its jaxpr. Where an
operation sums over the rows, each device computes its part, and linear operations that follow, such as a cast or a transposition, are
applied to the parts. If anything else reads the sum, its parts are added up first, as XLA would do it. So the numbers are the same up to
the order of the additions.

Between two microbatches the sums of a batch are arrays that JAX takes for equal on all devices of the rows, but each device has its own
part (`jax.P(unreduced=…)` says this only for meshes with explicit axes). They are read by nothing but `add` and `total`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jpipe._frozen import FrozenMapping
from jpipe.meshes._partition import WHOLE, axes_in, without_devices
from jpipe.model._subset import is_float
from jpipe.model.jaxprs._dependence import body_of, is_call, is_literal, scan_parts
from jpipe.model.jaxprs._row_dims import Dim, inputs_of, row_dims, scan_inputs
from jpipe.model.jaxprs._wanted import bind, scan_like

Tree = Any

_SUMS = ("add", "add_any", "concatenate", "select_n", "stack", "sub")
"""Operations that are linear in all their operands together. A `select_n` is so without its condition."""
_LINEAR: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("mul", "dot_general"), (0, 1)),
    **dict.fromkeys(("broadcast_in_dim", "convert_element_type", "copy", "cumsum", "div", "dynamic_slice", "gather", "neg", "pad"), (0,)),
    **dict.fromkeys(("reduce_precision", "reduce_sum", "reshape", "rev", "slice", "split", "squeeze"), (0,)),
    **dict.fromkeys(("transpose", "unstack"), (0,)),
}
"""Operations that are linear in each of these operands, by position."""
_DEVICE_SUMS = ("psum", "psum2", "psum_invariant")
"""Sums over devices in the body of a `shard_map`."""


@dataclass(frozen=True)
class Parts:
    """An array as the sum of its parts. The first dim counts the parts, one for each device of the rows."""

    arrays: Any


@dataclass(frozen=True)
class PartialSums:
    """How the devices of a mesh sum over its rows."""

    mesh: FrozenMapping[int]  # the sizes of the mesh axes
    axes: tuple[str, ...]  # the axes over which the rows are sharded

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], dims: Sequence[Dim], late: Sequence[bool]) -> list[Any]:
        """Evaluate a jaxpr with inputs that are arrays or `Parts`; the results that are `late` may be `Parts`.

        `dims` has for each input the dim of its rows, or None.
        """
        rows, only_summed = row_dims(jaxpr, dims), _only_summed(jaxpr, late)
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))

        def read(var: Any) -> Any:
            return var.val if is_literal(var) else values[var]

        for equation in jaxpr.eqns:
            is_late = [var in only_summed for var in equation.outvars]
            results = self._results(equation, list(map(read, equation.invars)), inputs_of(equation, rows), is_late)
            values.update(zip(equation.outvars, results, strict=True))
        return [value if is_late else self._whole(value) for value, is_late in zip(map(read, jaxpr.outvars), late, strict=True)]

    def spread(self, value: Any) -> Any:
        """Return the arrays of `Parts`. All of a whole array becomes the part of the first device."""
        if isinstance(value, Parts):
            return value.arrays
        is_first = jax.lax.broadcasted_iota(jnp.int32, (self._count, *[1] * jnp.ndim(value)), 0) == 0
        arrays = jnp.where(is_first, value[None], jnp.zeros((), value.dtype))
        return jax.lax.with_sharding_constraint(arrays, NamedSharding(without_devices(self.mesh), PartitionSpec(self.axes)))

    def add(self, total: jax.Array, arrays: jax.Array) -> jax.Array:
        """Add the arrays of `Parts` to a sum; each device adds its part to its own sum."""
        return self._on_devices(lambda total, arrays: total + arrays[0], (WHOLE, PartitionSpec(self.axes)), WHOLE)(total, arrays)

    def total(self, sums: Sequence[jax.Array]) -> list[jax.Array]:
        """Add up sums over the devices."""
        return self._on_devices(lambda sums: jax.lax.psum(sums, self.axes), (WHOLE,), WHOLE)(list(sums))

    @property
    def _count(self) -> int:
        return math.prod(self.mesh[axis] for axis in self.axes)

    def _on_devices(self, function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        mesh, axes = without_devices(self.mesh), set(self.axes)
        return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, axis_names=axes, check_vma=False)

    def _whole(self, value: Any) -> Any:
        return jnp.sum(value.arrays, axis=0, dtype=value.arrays.dtype) if isinstance(value, Parts) else value

    def _results(self, equation: Any, operands: list[Any], into: Sequence[Dim], late: Sequence[bool]) -> list[Any]:
        """Return the results of an equation: arrays or, if they are late, `Parts`."""
        name, parts = equation.primitive.name, [i for i, value in enumerate(operands) if isinstance(value, Parts)]
        if any(late) and is_call(equation):
            if equation.params.get("prevent_cse"):  # XLA would otherwise keep what is to be recomputed
                operands = _barrier(operands)
            return self.evaluate(*body_of(equation), operands, into, late)
        if any(late) and name == "scan":
            return self._scan(equation, operands, into, late)
        if any(late) and name == "shard_map":
            return self._shard_map(equation, list(map(self._whole, operands)), late)
        if any(late) and name == "optimization_barrier":
            kept = [value if is_late else self._whole(value) for value, is_late in zip(operands, late, strict=True)]
            return _barrier(kept)
        if any(late) and not parts and (over := self._summed_dims(equation, into)) is not None:
            return [self._apart(equation, operands, over)]
        if any(late) and parts and name in _SUMS:
            condition = int(name == "select_n")
            numbers = [Parts(self.spread(value)) for value in operands[condition:]]
            return self._each(equation, [*operands[:condition], *numbers])
        if any(late) and len(parts) == 1 and parts[0] in _linear_in(equation):
            return self._each(equation, operands)
        return bind(equation, list(map(self._whole, operands)))

    def _summed_dims(self, equation: Any, into: Sequence[Dim]) -> list[Dim] | None:
        """Return, if an equation sums over the rows, for each operand the dim of the rows over which it sums; None otherwise."""
        over = _summed_dims(equation, into)
        sizes = [equation.invars[i].aval.shape[dim] for i, dim in enumerate(over or ()) if dim is not None]
        return over if sizes and all(size and size % self._count == 0 for size in sizes) else None

    def _apart(self, equation: Any, operands: list[Any], over: Sequence[Dim]) -> Parts:
        """Sum over the rows of each device."""
        specs = [WHOLE if dim is None else PartitionSpec(*[None] * dim, self.axes) for dim in over]
        adds = equation.primitive.name.startswith("scatter")  # to its first operand
        if adds:
            operands, specs[0] = [self.spread(operands[0]), *operands[1:]], PartitionSpec(self.axes)

        def local(*arrays: Any) -> Any:
            return bind(equation, [arrays[0][0], *arrays[1:]] if adds else list(arrays))[0][None]

        return Parts(self._on_devices(local, tuple(specs), PartitionSpec(self.axes))(*operands))

    def _scan(self, equation: Any, operands: list[Any], into: Sequence[Dim], late: Sequence[bool]) -> list[Any]:
        """Evaluate a scan. Sums that it carries only to add to them, and sums that it stacks, are late."""
        body, consts = body_of(equation)
        (fixed, carried), late, dims = scan_parts(equation, body), _late_in_scan(equation, late), scan_inputs(equation, into)
        wrap = [Parts if is_late else (lambda value: value) for is_late in late]
        unwrap = [self.spread if is_late else self._whole for is_late in late]
        whole = [*map(self._whole, operands[:fixed])]

        def step(carry: tuple[Any, ...], x: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            arguments = [*whole, *(each(value) for each, value in zip(wrap, carry, strict=False)), *x]
            results = [each(value) for each, value in zip(unwrap, self.evaluate(body, consts, arguments, dims, late), strict=True)]
            return tuple(results[:carried]), tuple(results[carried:])

        start = [each(value) for each, value in zip(unwrap, operands[fixed : fixed + carried], strict=False)]
        carry, ys = scan_like(equation, step, start, tuple(map(self._whole, operands[fixed + carried :])))
        stacked = [jnp.moveaxis(y, 1, 0) if is_late else y for y, is_late in zip(ys, late[carried:], strict=True)]
        return [each(value) for each, value in zip(wrap, [*carry, *stacked], strict=True)]

    def _shard_map(self, equation: Any, operands: list[Any], late: Sequence[bool]) -> list[Any]:
        """Evaluate a `shard_map`. Late results that its body adds up over the devices of the rows stay parts."""
        (body, consts), params, inside = body_of(equation), equation.params, _OnDevice(self.mesh, self.axes)
        late = [is_late and axes_in(spec).isdisjoint(self.axes) for is_late, spec in zip(late, params["out_specs"], strict=True)]
        if not any(late):
            return bind(equation, operands)

        def local(*arrays: Any) -> list[Any]:
            results = inside.evaluate(body, consts, arrays, [None] * len(arrays), late)
            return [inside.spread(value)[None] if is_late else value for value, is_late in zip(results, late, strict=True)]

        specs = [PartitionSpec(self.axes, *spec) if is_late else spec for is_late, spec in zip(late, params["out_specs"], strict=True)]
        manual = params.get("newly_manual_axes", params.get("manual_axes"))  # the name depends on the version of JAX
        options = {"mesh": params["mesh"], "axis_names": {*manual}, "check_vma": params["check_vma"]}
        results = jax.shard_map(local, in_specs=params["in_specs"], out_specs=specs, **options)(*operands)
        return [Parts(value) if is_late else value for value, is_late in zip(results, late, strict=True)]

    def _each(self, equation: Any, operands: list[Any]) -> list[Parts]:
        """Apply an operation to each part.

        With one operand each device applies it to its part without the first dim, because XLA then fuses a transposition with its product.
        """
        if len(operands) == 1 and isinstance(operands[0], Parts):

            def local(part: Any) -> list[Any]:
                return [result[None] for result in bind(equation, [part[0]])]

            spec = PartitionSpec(self.axes)
            return list(map(Parts, self._on_devices(local, (spec,), spec)(operands[0].arrays)))
        arrays = {i: getattr(value, "arrays", value) for i, value in enumerate(operands) if not is_literal(equation.invars[i])}
        axes = tuple(0 if isinstance(operands[i], Parts) else None for i in arrays)

        def run(*values: Any) -> list[Any]:
            of_position = dict(zip(arrays, values, strict=True))
            return bind(equation, [of_position.get(i) for i in range(len(operands))])

        return list(map(Parts, jax.vmap(run, axes)(*arrays.values())))


@dataclass(frozen=True)
class _OnDevice(PartialSums):
    """The same in the body of a `shard_map`, where `Parts` have the part of this device, without the first dim."""

    def spread(self, value: Any) -> Any:
        if isinstance(value, Parts):
            return value.arrays
        return jnp.where(jax.lax.axis_index(self.axes) == 0, value, jnp.zeros_like(value))

    def _whole(self, value: Any) -> Any:
        return jax.lax.psum(value.arrays, self.axes) if isinstance(value, Parts) else value

    def _results(self, equation: Any, operands: list[Any], into: Sequence[Dim], late: Sequence[bool]) -> list[Any]:
        axes = equation.params.get("axes", ())
        if all(late) and equation.primitive.name in _DEVICE_SUMS and {*self.axes} <= {*axes}:
            others = tuple(axis for axis in axes if axis not in self.axes)
            terms = list(map(self._whole, operands))
            return list(map(Parts, jax.lax.psum(terms, others) if others else terms))
        return super()._results(equation, operands, into, late)

    def _each(self, equation: Any, operands: list[Any]) -> list[Parts]:
        return list(map(Parts, bind(equation, [getattr(value, "arrays", value) for value in operands])))


def _barrier(values: Sequence[Any]) -> list[Any]:
    arrays = jax.lax.optimization_barrier([getattr(value, "arrays", value) for value in values])
    return [Parts(array) if isinstance(value, Parts) else array for array, value in zip(arrays, values, strict=True)]


def _summed_dims(equation: Any, into: Sequence[Dim]) -> list[Dim] | None:
    name, params = equation.primitive.name, equation.params
    numbers = params.get("dimension_numbers")
    if name == "dot_general":
        pairs = zip(*numbers[0], strict=True)
        return next(([left, right] for left, right in pairs if into[0] == left or into[1] == right), None)
    if name == "reduce_sum":
        return [into[0]] if into[0] in params["axes"] else None
    if name == "scatter-add" and not numbers.operand_batching_dims:
        rows = [dim for dim in range(equation.invars[2].aval.ndim) if dim not in numbers.update_window_dims]
        number = into[1] if into[1] is not None else rows.index(into[2]) if into[2] in rows else None
        return None if number is None or number >= len(rows) else [None, number, rows[number]]
    if name == "conv_general_dilated" and params["feature_group_count"] == params["batch_group_count"] == 1:
        left, right = numbers.lhs_spec[1], numbers.rhs_spec[1]
        return [left, right] if into[0] == left or into[1] == right else None
    return None


def _only_summed(jaxpr: Any, late: Sequence[bool]) -> set[Any]:
    """Return the variables that reach late results through linear operations, and that nothing else reads."""
    results = [(var, is_late) for var, is_late in zip(jaxpr.outvars, late, strict=True) if not is_literal(var)]
    summed, others = ({var for var, is_late in results if is_late == each} for each in (True, False))
    for equation in reversed(jaxpr.eqns):
        is_late = [var in summed and var not in others for var in equation.outvars]
        for var, passes in zip(equation.invars, _passes(equation, is_late), strict=True):
            if not is_literal(var):
                (summed if passes else others).add(var)
    return summed - others


def _passes(equation: Any, late: Sequence[bool]) -> list[bool]:
    """Return for each operand of an equation whether its parts can give the parts of the late results."""
    name, body = equation.primitive.name, body_of(equation)[0]
    if not any(late):
        return [False] * len(equation.invars)
    if is_call(equation):
        summed = _only_summed(body, late)
        return [var in summed for var in body.invars]
    if name == "scan":
        fixed, carried = scan_parts(equation, body)
        passes = [False] * len(equation.invars)
        passes[fixed : fixed + carried] = _late_in_scan(equation, late)[:carried]
        return passes
    if name == "optimization_barrier":
        return list(late)
    if name in _SUMS:
        return [i >= (name == "select_n") and not any(map(is_literal, equation.invars)) for i in range(len(equation.invars))]
    return [i in _linear_in(equation) for i in range(len(equation.invars))]


def _linear_in(equation: Any) -> tuple[int, ...]:
    """Return the positions of the operands that an equation is linear in, each by itself."""
    name = equation.primitive.name
    if name == "pad" and not (is_literal(equation.invars[1]) and equation.invars[1].val == 0):
        return ()
    return _LINEAR.get(name, ()) if is_float(equation.outvars[0].aval) else ()


def _late_in_scan(equation: Any, late: Sequence[bool]) -> list[bool]:
    """Return which results of a scan may be `Parts`: a carried result only if a step does nothing but add to it."""
    body, _ = body_of(equation)
    fixed, carried = scan_parts(equation, body)
    late = list(late)
    while True:
        summed = _only_summed(body, late)
        unfit = [i for i in range(carried) if late[i] and body.invars[fixed + i] not in summed]
        if not unfit:
            return late
        for i in unfit:
            late[i] = False
