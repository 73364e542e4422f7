"""Rules for the origins of the results of each primitive: the rows from which its elements are computed."""

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jpipe.model.jaxprs._origins import NO_ROW, Origin, is_whole, mixed, origin_of, over, together, whole

_Arrange = Callable[[np.ndarray], np.ndarray]


def origins_of(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    """Return the origins of the results of an equation without a body, from the origins of its arguments."""
    name = equation.primitive.name
    if name in _ARRANGE:
        arrange = _ARRANGE[name](equation)
        numbers = arguments[0].numbers
        return [Origin(arrange(arguments[0].rows), None if numbers is None else arrange(numbers))]
    if name in _RULES:
        return _RULES[name](equation, arguments)
    if name in _REDUCTIONS or (name.startswith("reduce_") and "axes" in equation.params):
        return _reduce(equation, arguments)
    if name.startswith("scatter"):
        return _scatter(equation, arguments)
    if name.startswith("reduce_window"):
        return _reduce_window(equation, arguments)
    return [_aligned(equation, arguments, out) for out in equation.outvars]


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(var.aval.shape)


# Elementwise, and unknown ------------------------------------------------------------------------------------------------

_LINEAR = {"add", "add_any", "sub", "neg", "convert_element_type", "reduce_precision", "copy", "sharding_constraint", "real", "imag"}


def _aligned(equation: Any, arguments: Sequence[Origin], out: Any) -> Origin:
    """Return the origin of an elementwise result. An unknown primitive is assumed to keep the rows along the first dim."""
    shape, parts = _shape(out), []
    for var, argument in zip(equation.invars, arguments, strict=True):
        rank = len(_shape(var))
        if rank == len(shape) and all(size in (1, whole_size) for size, whole_size in zip(_shape(var), shape, strict=True)):
            parts.append(argument.rows)
        elif argument.depends:
            is_first = rank and shape and _shape(var)[0] == shape[0]
            kept = over(argument.rows, range(1 if is_first else 0, rank))
            parts.append(kept.reshape(2, *(kept.shape[1:2] if is_first else ()), *[1] * (len(shape) - bool(is_first))))
    rows = together([origin_of(shape).rows, *parts])
    return Origin(rows if _is_linear(equation, arguments) else mixed(rows), _numbers(equation, arguments, out))


def _is_linear(equation: Any, arguments: Sequence[Origin]) -> bool:
    """Return whether an equation is linear in the arguments that depend on rows."""
    name, depends = equation.primitive.name, [argument.depends for argument in arguments]
    match name:
        case "mul" | "dot_general" | "conv_general_dilated":
            return sum(depends) < 2
        case "div":
            return not depends[1]
        case "select_n":
            return not depends[0]
    return name in _LINEAR


_NUMBERS: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "min": np.minimum, "max": np.maximum, "rem": np.fmod},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal},
    **{"and": np.logical_and, "or": np.logical_or, "not": np.logical_not, "sign": np.sign, "convert_element_type": np.positive},
    "div": lambda a, b: np.trunc(a / b),
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
    "clamp": lambda low, x, high: np.clip(x, low, high),
}


def _numbers(equation: Any, arguments: Sequence[Origin], out: Any) -> np.ndarray | None:
    """Return the values of integers that are computed from known values, or None."""
    name, dtype, shape = equation.primitive.name, out.aval.dtype, _shape(out)
    values: list[Any] = [each.numbers for each in arguments]
    if name == "select_n" and arguments[0].numbers is not None:  # values of cases that are never chosen may be unknown
        is_known = [True, *(np.isin(i, arguments[0].numbers) for i in range(len(arguments) - 1))]
        values = [each.numbers if is_read else np.zeros(1) for each, is_read in zip(arguments, is_known, strict=True)]
    is_bitwise = name in ("and", "or", "not") and jnp.issubdtype(dtype, jnp.integer)
    if name not in _NUMBERS or any(value is None for value in values) or not is_whole(dtype) or is_bitwise:
        return None
    aligned = [value if value.ndim == len(shape) + 1 else value.reshape(1, *[1] * len(shape)) for value in values]
    with np.errstate(all="ignore"):
        unknown = np.isnan(sum([0 * value for value in aligned]))
        result = _NUMBERS[name](*(np.nan_to_num(value) for value in aligned))
    return np.where(unknown, np.nan, result)


# Arrangements ------------------------------------------------------------------------------------------------------------


def _reshape(equation: Any) -> _Arrange:
    old, new = _shape(equation.invars[0]), _shape(equation.outvars[0])
    ends, new_ends = (list(itertools.accumulate(sizes, operator.mul)) for sizes in (old, new))
    groups = list(itertools.pairwise(sorted({0, math.prod(old), *ends} & {0, math.prod(new), *new_ends})))  # of equal numbers of elements

    def arrange(array: np.ndarray) -> np.ndarray:
        before, after = list[int](), list[int]()
        for first, last in groups:
            dims, new_dims = ([dim for dim, end in enumerate(each) if first < end <= last] for each in (ends, new_ends))
            is_equal = all(array.shape[dim + 1] == 1 for dim in dims)
            before += [1 if is_equal else old[dim] for dim in dims]
            after += [1 if is_equal else new[dim] for dim in new_dims]
        return whole(array, before).reshape(-1, *after)

    return arrange if 0 not in old else lambda array: array[(slice(None), *[slice(1)] * len(old))].reshape(-1, *[1] * len(new))


def _broadcast(equation: Any) -> _Arrange:
    rank, dims = len(_shape(equation.outvars[0])), equation.params["broadcast_dimensions"]
    return lambda array: array.reshape(len(array), *(array.shape[1 + dims.index(dim)] if dim in dims else 1 for dim in range(rank)))


def _slice(equation: Any) -> _Arrange:
    params = equation.params
    strides = params["strides"] or [1] * len(params["start_indices"])
    slices = list(map(slice, params["start_indices"], params["limit_indices"], strides))
    return lambda array: _take(array, slices)


def _take(array: np.ndarray, slices: Sequence[slice]) -> np.ndarray:
    return array[(slice(None), *(each if size > 1 else slice(1) for each, size in zip(slices, array.shape[1:], strict=True)))]


def _transpose(equation: Any) -> _Arrange:
    return lambda array: array.transpose(0, *(dim + 1 for dim in equation.params["permutation"]))


def _times(array: np.ndarray, reps: Sequence[Any]) -> list[int]:
    return [times if size > 1 else 1 for times, size in zip((1, *reps), array.shape, strict=True)]


_ARRANGE: dict[str, Callable[[Any], _Arrange]] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "transpose": _transpose,
    "squeeze": lambda equation: lambda array: array.squeeze(tuple(dim + 1 for dim in equation.params["dimensions"])),
    "expand_dims": lambda equation: lambda array: np.expand_dims(array, tuple(dim + 1 for dim in equation.params["dimensions"])),
    "tile": lambda equation: lambda array: np.tile(array, _times(array, equation.params["reps"])),
    "rev": lambda equation: lambda array: np.flip(array, tuple(dim + 1 for dim in equation.params["dimensions"])),
}


def _iota(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    shape, dim = _shape(equation.outvars[0]), equation.params["dimension"]
    numbers = np.arange(shape[dim], dtype=np.float64).reshape(1, *(size if i == dim else 1 for i, size in enumerate(shape)))
    return [Origin(origin_of(shape).rows, numbers)]


def _concatenate(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    dim, shapes = equation.params["dimension"], list(map(_shape, equation.invars))

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        others = np.broadcast_shapes(*((*array.shape[1 : dim + 1], 1, *array.shape[dim + 2 :]) for array in arrays))
        sizes = ((*others[:dim], shape[dim], *others[dim + 1 :]) for shape in shapes)
        return np.concatenate(list(map(whole, arrays, sizes)), axis=dim + 1)

    numbers = None
    if any(argument.numbers is not None for argument in arguments):
        unknown = np.full((1, *[1] * len(shapes[0])), np.nan)
        numbers = joined([unknown if argument.numbers is None else argument.numbers for argument in arguments])
    return [Origin(joined([argument.rows for argument in arguments]), numbers)]


def _stack(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    return [Origin(np.stack(np.broadcast_arrays(*(argument.rows for argument in arguments)), axis=equation.params["axis"] + 1))]


def _unstack(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    rows = np.moveaxis(arguments[0].rows, equation.params["axis"] + 1, 0)
    return [Origin(rows[number if len(rows) > 1 else 0]) for number in range(len(equation.outvars))]


def _split(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    (argument,), axis, bounds = arguments, equation.params["axis"], np.cumsum([0, *equation.params["sizes"]])
    rank = len(_shape(equation.invars[0]))
    slices = [[slice(a, b) if dim == axis else slice(None) for dim in range(rank)] for a, b in itertools.pairwise(bounds)]
    return [Origin(_take(argument.rows, each)) for each in slices]


def _pad(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    array = arguments[0].rows
    for dim, (low, high, interior) in enumerate(equation.params["padding_config"]):
        size = array.shape[dim + 1]
        if size > 1 or (_shape(equation.invars[0])[dim] == 1 and (low or high)):
            spread = np.full((2, *array.shape[1 : dim + 1], size + (size - 1) * interior, *array.shape[dim + 2 :]), NO_ROW, array.dtype)
            at = (slice(None),) * (dim + 1)
            spread[(*at, slice(None, None, interior + 1))] = array
            spread = spread[(*at, slice(max(-low, 0), spread.shape[dim + 1] - max(-high, 0)))]
            sides = [(max(low, 0), max(high, 0)) if axis == dim + 1 else (0, 0) for axis in range(array.ndim)]
            array = np.pad(spread, sides, constant_values=NO_ROW)
    return [Origin(together([array, arguments[1].rows.reshape(2, *[1] * (array.ndim - 1))]))]


# Sums, sorts and products --------------------------------------------------------------------------------------------------

_REDUCTIONS = {"argmax", "argmin", "reduce"}


def _combined(arguments: Sequence[Origin], dims: Iterable[int], *, is_sum: bool = False) -> np.ndarray:
    """Return the rows of a sum, or of another function, of all elements of several arrays along some dims, which get size 1."""
    rows = over(together([argument.rows for argument in arguments]), list(dims))
    return rows if is_sum else mixed(rows)


def _reduce(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    dims = [int(dim) for dim in equation.params.get("axes", equation.params.get("dimensions", ()))]
    count = len(equation.outvars)
    rows = _combined(arguments[:count], dims, is_sum=equation.primitive.name == "reduce_sum")
    return [Origin(rows.squeeze(tuple(dim + 1 for dim in dims)))] * count


def _along(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    """Return the origins of a sort, or of a selection of the largest elements, along one dim."""
    params, rank = equation.params, len(_shape(equation.invars[0]))
    dim = next((params[name] for name in ("dimension", "axis", "reduction_dimension") if name in params), -1) % rank
    return [Origin(_combined(arguments, [dim]))] * len(equation.outvars)


def _cumulate(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    axis, step = equation.params["axis"] + 1, -1 if equation.params["reverse"] else 1
    turn = (*[slice(None)] * axis, slice(None, None, step))
    array = np.minimum.accumulate(arguments[0].rows[turn], axis)[turn]
    return [Origin(array if equation.primitive.name == "cumsum" else mixed(array))]


def _reduce_window(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    """Return the origins of a windowed reduction. Every window along a dim counts as the whole dim."""
    shapes, count = (_shape(equation.invars[0]), _shape(equation.outvars[0])), len(equation.outvars)
    windows = equation.params.get("window_dimensions", shapes[0])
    dims = [i for i, (size, before, after) in enumerate(zip(windows, *shapes, strict=True)) if size > 1 or before != after]
    return [Origin(_combined(arguments[:count], dims, is_sum=equation.primitive.name == "reduce_window_sum"))] * count


def _of_matrices(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    """Return the origins of results of linear algebra on whole matrices or vectors. Their leading dims are the same in all arrays."""
    batch = max(len(_shape(var)) for var in equation.invars) - 2
    return _of_leading(equation, arguments, batch)


def _fft(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    return _of_leading(equation, arguments, len(_shape(equation.invars[0])) - len(equation.params["fft_lengths"]))


def _of_leading(equation: Any, arguments: Sequence[Origin], count: int) -> list[Origin]:
    parts = [over(argument.rows, range(count, argument.rows.ndim - 1)) for argument in arguments]
    rows = mixed(together([part.reshape(2, *part.shape[1 : count + 1]) for part in parts]))
    return [Origin(rows.reshape(*rows.shape, *[1] * (len(_shape(out)) - count))) for out in equation.outvars]


def _dot_general(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    contracted, batch = equation.params["dimension_numbers"]
    ranks = [len(_shape(var)) for var in equation.invars]
    free = [[dim for dim in range(ranks[i]) if dim not in (*contracted[i], *batch[i])] for i in (0, 1)]
    parts = []
    for i, argument in enumerate(arguments):
        array = argument.rows.transpose(0, *(dim + 1 for dim in (*batch[i], *free[i], *contracted[i])))
        first, last = 1 + len(batch[i]), array.ndim - len(contracted[i])
        ones = [1] * len(free[1 - i])
        middle = (*array.shape[first:last], *ones) if i == 0 else (*ones, *array.shape[first:last])
        parts.append(array.reshape(*array.shape[:first], *middle, *array.shape[last:]))
    whole(parts[0], np.broadcast_shapes(*(part.shape for part in parts))[1:])  # checks the size
    products = together(parts) if _is_linear(equation, arguments) else mixed(together(parts))
    return [Origin(products.min(tuple(range(products.ndim - len(contracted[0]), products.ndim))))]


def _conv(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    """Return the origins of a convolution. Every window along a dim counts as the whole dim; each group of features reads only its own."""
    params, out = equation.params, _shape(equation.outvars[0])
    spec, groups = params["dimension_numbers"], params["feature_group_count"]
    rows, kernel = (
        over(argument.rows.transpose(0, *(dim + 1 for dim in dims)), range(2, len(dims))).reshape(
            2, *map(argument.rows.shape.__getitem__, (dims[0] + 1, dims[1] + 1))
        )
        for argument, dims in zip(arguments, (spec.lhs_spec, spec.rhs_spec), strict=True)
    )  # (pair, rows, features) and (pair, features that it makes, features)
    if groups > 1 and rows.shape[2] > 1:
        rows = np.repeat(rows.reshape(*rows.shape[:2], groups, -1).min(-1), out[spec.out_spec[1]] // groups, axis=2)
    else:
        rows = over(rows, [1])
    rows = over(rows, [0]) if params["batch_group_count"] > 1 else rows
    products = together([rows, over(kernel, [1]).reshape(2, 1, -1)])
    products = products if _is_linear(equation, arguments) else mixed(products)
    return [Origin(products.reshape(*products.shape, *[1] * (len(out) - 2)).transpose(0, *(i + 1 for i in np.argsort(spec.out_spec))))]


# Look-ups ------------------------------------------------------------------------------------------------------------------


class _Windows(NamedTuple):
    """The windows that a gather reads, or a scatter writes."""

    shape: tuple[int, ...]  # the shape of the operand
    sizes: Sequence[Any]  # the size of a window along each dim of the operand
    rank: int  # the rank of the array that is read or written
    window_dims: Sequence[Any]  # the dims of this array that are dims of windows; the others are dims of the indices
    absent: Sequence[Any]  # the dims of the operand that windows do not have
    indexed: Sequence[Any]  # the dims of the operand along which the indices are positions
    batch: tuple[Sequence[Any], Sequence[Any]]  # pairs of a dim of the operand and a dim of the indices that belong together, as two lists

    def positions(self, indices: Origin) -> list[np.ndarray | None]:
        """Return for each dim of the operand the position of each element; None for a dim with unknown positions."""
        outer = [dim for dim in range(self.rank) if dim not in self.window_dims]
        windows, positions = iter(self.window_dims), list[np.ndarray | None]()
        for dim, (size, window) in enumerate(zip(self.shape, self.sizes, strict=True)):
            position: np.ndarray | None = np.zeros([1] * self.rank, np.int64)
            if dim in self.batch[0]:
                position = self._along(outer[self.batch[1][self.batch[0].index(dim)]], size)
            elif dim not in self.absent:
                position = self._along(next(windows), window)
            if dim in self.indexed and window < size:
                start = self._starts(indices, self.indexed.index(dim), outer)
                position = None if start is None else position + np.clip(start, 0, size - window)
            positions.append(position)
        return positions

    def _along(self, place: Any, size: Any) -> np.ndarray:
        return np.arange(size).reshape([-1 if i == place else 1 for i in range(self.rank)])

    def _starts(self, indices: Origin, component: int, outer: Sequence[Any]) -> np.ndarray | None:
        if indices.numbers is None:
            return None
        starts = indices.numbers[0, ..., component if indices.numbers.shape[-1] > 1 else 0]
        sizes = dict(zip(outer, starts.shape, strict=True))
        return None if np.isnan(starts).any() else starts.astype(np.int64).reshape([sizes.get(i, 1) for i in range(self.rank)])

    def read(self, operand: Origin, indices: Origin) -> Origin:
        """Return the origin of the array that is read."""
        positions, rows = self.positions(indices), operand.rows
        if unknown := [dim for dim, position in enumerate(positions) if position is None]:
            rows = mixed(over(rows, unknown))  # any element along these dims
        nowhere = np.zeros([1] * self.rank, np.int64)
        index = [nowhere if p is None or rows.shape[dim + 1] == 1 else p for dim, p in enumerate(positions)]
        whole(nowhere[None], np.broadcast_shapes(nowhere.shape, *(each.shape for each in index)))  # checks the size
        return Origin(self._with_indices(rows[(slice(None), *index)] if index else rows.reshape(2, *nowhere.shape), indices))

    def write(self, operand: Origin, indices: Origin, updates: Origin) -> np.ndarray:
        """Return the rows after a write to known positions, or to any positions along a dim. The old elements count, too."""
        rows, nowhere, places = self._with_indices(updates.rows, indices), np.zeros([1] * self.rank, np.int64), iter(self.window_dims)
        index, target = [], []
        for dim, position in enumerate(self.positions(indices)):
            is_whole = dim not in self.absent and rows.shape[next(places) + 1] == 1 and self.sizes[dim] == self.shape[dim]
            index.append(nowhere if position is None or is_whole else position)
            target.append(1 if position is None or is_whole else self.shape[dim])
        written = np.full((2, *target), NO_ROW, np.int16)
        for pair, values in zip(written, rows, strict=True):
            *where, values = np.broadcast_arrays(*index, values)
            np.minimum.at(pair, tuple(where), values)
        return together([operand.rows, written])

    def _with_indices(self, rows: np.ndarray, indices: Origin) -> np.ndarray:
        """Return the rows of elements that are read or written, combined with the rows of the indices."""
        if not indices.depends:
            return rows
        sizes = iter(indices.rows.shape[1:])
        own = over(indices.rows, [indices.rows.ndim - 2])
        return mixed(together([rows, own.reshape(2, *(1 if dim in self.window_dims else next(sizes) for dim in range(self.rank)))]))


def _gather(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    dims, shape, out = equation.params["dimension_numbers"], _shape(equation.invars[0]), _shape(equation.outvars[0])
    batch = dims.operand_batching_dims, dims.start_indices_batching_dims
    absent = (*dims.collapsed_slice_dims, *batch[0])
    windows = _Windows(shape, equation.params["slice_sizes"], len(out), dims.offset_dims, absent, dims.start_index_map, batch)
    return [windows.read(*arguments)]


def _scatter(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    (operand, indices, updates), dims = arguments, equation.params["dimension_numbers"]
    shape, _, update_shape = map(_shape, equation.invars)
    batch = dims.operand_batching_dims, dims.scatter_indices_batching_dims
    absent, places = (*dims.inserted_window_dims, *batch[0]), iter(dims.update_window_dims)
    sizes = [1 if dim in absent else update_shape[next(places)] for dim in range(len(shape))]
    windows = _Windows(shape, sizes, len(update_shape), dims.update_window_dims, absent, dims.scatter_dims_to_operand_dims, batch)
    rows = windows.write(operand, indices, updates)
    is_sum = equation.primitive.name in ("scatter-add", "scatter-sub") and not indices.depends
    return [Origin(rows if is_sum else mixed(rows))]


def _dynamic_slice(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    operand, *starts = arguments
    return [_window(_shape(equation.invars[0]), equation.params["slice_sizes"]).read(operand, _indices(starts))]


def _dynamic_update_slice(equation: Any, arguments: Sequence[Origin]) -> list[Origin]:
    operand, update, *starts = arguments
    rows = _window(*map(_shape, equation.invars[:2])).write(operand, _indices(starts), update)
    return [Origin(mixed(rows) if any(start.depends for start in starts) else rows)]


def _window(shape: tuple[int, ...], sizes: Sequence[Any]) -> _Windows:
    """Return `_Windows` with a single window, which has all dims of the operand."""
    dims = range(len(shape))
    return _Windows(shape, sizes, len(shape), dims, (), dims, ((), ()))


def _indices(starts: Sequence[Origin]) -> Origin:
    """Return the origin of the index of a window, from the origins of its components."""
    if not starts:
        return origin_of((0,))
    numbers = [np.full(1, np.nan) if start.numbers is None else start.numbers for start in starts]
    return Origin(np.stack([start.rows for start in starts], -1), np.stack(numbers, -1))


_RULES: dict[str, Callable[[Any, Sequence[Origin]], list[Origin]]] = {
    "iota": _iota,
    "concatenate": _concatenate,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "pad": _pad,
    "dot_general": _dot_general,
    "conv_general_dilated": _conv,
    "gather": _gather,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "fft": _fft,
    "optimization_barrier": lambda equation, arguments: [Origin(argument.rows, argument.numbers) for argument in arguments],
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), _along),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulate),
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "qr", "geqrf", "householder_product", "eigh", "eig", "svd"), _of_matrices),
    **dict.fromkeys(("geqp3", "ormqr", "schur", "hessenberg", "tridiagonal", "tridiagonal_solve", "custom_linear_solve"), _of_matrices),
}
