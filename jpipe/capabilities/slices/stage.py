"""The functions of stages for slices of rows, and checks that a model can be computed slice by slice."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jpipe.capabilities.slices.option import ByCost, lengths_by_cost, lengths_of
from jpipe.context import Positions, noting_reads, tracing_at
from jpipe.errors import InputError
from jpipe.model._function_arguments import random_parameter
from jpipe.model._layer import LayerSpec, describe, key_spec
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._dependence import bodies
from jpipe.model.jaxprs._products import count_products
from jpipe.model.jaxprs._rows import COUNTS, rows_together, with_rows
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


def row_length(batch: Tree) -> int:
    """Return the number of positions of the rows: the second dim of all arrays of a batch.

    Raises:
        InputError: an array has no such dim, or another one.
    """
    leaves = jax.tree.leaves(batch)
    lengths = {leaf.shape[1] if len(leaf.shape) > 1 else 0 for leaf in leaves}
    if len(lengths) != 1 or 0 in lengths:
        expected = "arrays with the positions of the rows in their second dim, because the plan cuts rows into slices"
        raise InputError(where="batch", expected=expected, found=describe(batch), change="give each array this dim, or remove plan.slices")
    return int(lengths.pop())


def positions_of(value: Any, functions: Sequence[StageFunctions], spec: tuple[Tree, Tree]) -> list[Positions]:
    """Return the positions of each slice of the rows.

    Args:
        value: the value of the option in a plan.
        functions, spec: as in `functions_of_slices`.
    """
    lengths, half = lengths_of(value, length := row_length(spec)), length // 2
    if isinstance(value, ByCost):
        halves = functions_of_slices(functions, spec, _positions((half, length - half), length))
        first, second = (sum(count_products(f.residuals.forward.jaxpr) for f in of_slice) for of_slice in halves)
        if second:
            lengths = lengths_by_cost(value.count, length, first / half, second / (length - half))
    return _positions(lengths, length)


def _positions(lengths: Sequence[int], length: int) -> list[Positions]:
    ends = [*itertools.accumulate(lengths)]
    return [Positions(start, stop, length) for start, stop in zip([0, *ends], ends, strict=False)]


def functions_of_slices(
    functions: Sequence[StageFunctions], spec: tuple[Tree, Tree], slices: Sequence[Positions]
) -> list[list[StageFunctions]]:
    """Return for each slice the functions of all stages.

    Args:
        functions: the functions of all stages for whole rows.
        spec: the shapes and dtypes of one microbatch, (inputs, labels).
        slices: the positions of each slice.

    Raises:
        InputError: the model cannot be computed slice by slice.
    """
    stack, carries, result = functions[0].stack, dict[str, Tree](), list[list[StageFunctions]]()
    layers = stack.specs(spec[0])
    check_model(functions, layers, spec[1])
    for positions in slices:
        inputs, labels = with_rows(spec, positions.stop - positions.start, 1)
        flows, following = _flows(stack, layers, inputs, carries, positions)
        of_slice = []
        for f in functions:
            received = flows[f.stage.layers[0]], {layer_id: carries[layer_id] for layer_id in f.stage.layers if layer_id in carries}
            specs = replace(f.specs, x=received, input=received, labels=labels if f.last else None)
            of_slice.append(replace(f, specs=specs, positions=positions))
        result.append(of_slice)
        carries = following
    return result


def check_model(functions: Sequence[StageFunctions], layers: Mapping[str, LayerSpec], labels: Tree) -> None:
    """Check that layers without a carry, and the loss, compute each position separately.

    Args:
        functions: the functions of all stages for whole rows.
        layers: the specs of all layers for whole rows.
        labels: the specs of the labels of a microbatch.

    Raises:
        InputError: they do not, or the model is of a kind that cannot be cut into slices.
    """
    stack, loss = functions[0].stack, functions[-1].loss
    if stack.traced is not None:
        raise _refused("a dict of layers, in which those that mix positions have a carry", "layers that were cut from a model")
    for f in functions:
        if changed := [layer_id for layer_id, tree in f.changed.part(f.specs.state).items() if jax.tree.leaves(tree)]:
            raise _refused("layers without state that forwards change", f"layer '{changed[0]}'")
    if random_parameter(loss) is not None:
        raise _refused("a loss that draws no random numbers", f"a loss with a parameter '{random_parameter(loss)}'")
    ids, loss_too = rows_together(stack, layers, labels, loss, 1)
    if mixing := [layer_id for layer_id in ids if stack.layers[layer_id].carried is None]:
        raise _refused("layers that compute each position separately, or have a carry", f"layer '{mixing[0]}', which mixes positions")
    if loss_too:
        raise _refused("a loss that is a sum over positions", "a loss that is more")
    if numbering := _numbering(stack, layers):
        expected = "layers that read jpipe.context.traced_positions() if a result depends on the number of a position"
        raise _refused(expected, f"layer '{numbering[0]}', which {numbering[1]} without it")


def _refused(expected: str, found: str) -> InputError:
    return InputError(where="plan", key="slices", expected=expected, found=found, change="change the model, or remove slices")


def _numbering(stack: LayerStack, layers: Mapping[str, LayerSpec]) -> tuple[str, str] | None:
    """Return a layer that counts positions or draws numbers for each, but does not read which positions it gets, and what it does."""
    sizes = {size for leaf in jax.tree.leaves([(spec.x, spec.params) for spec in layers.values()]) for size in leaf.shape}
    count = next(count for count in COUNTS if count not in sizes)
    x, known = with_rows(layers[stack.ids[0]].x, count, 1), set[Any]()
    for layer_id, spec in layers.items():
        layer, kinds = stack.layers[layer_id], {"random_bits": "draws random numbers"}
        arguments, is_new = (spec.params, spec.state, x), (like := stack.like(layer_id, x)) not in known
        known.add(like)
        with tracing_at(Positions(0, count, count)), noting_reads() as reads:
            if layer.carried is None:
                kinds["iota"] = "counts positions"
                traced, (x, _) = jax.make_jaxpr(partial(_applied, layer.apply), return_shape=True)(arguments, key_spec())
            else:
                traced, (x, *_) = jax.make_jaxpr(partial(_carried, layer.carried), return_shape=True)(arguments, None, key_spec())
        if is_new and not reads and (kind := _first_of(traced.jaxpr, kinds, count)):
            return layer_id, kinds[kind]
    return None


def _first_of(jaxpr: Any, kinds: Collection[str], count: int) -> str:
    """Return the first primitive of these kinds in a jaxpr that has a result with a dim of this size, or ""."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in kinds and any(count in getattr(var.aval, "shape", ()) for var in equation.outvars):
            return str(name)
        if inner := next((name for body, _ in bodies(equation) if (name := _first_of(body, kinds, count))), ""):
            return inner
    return ""


def _flows(
    stack: LayerStack, layers: Mapping[str, LayerSpec], x: Tree, carries: Mapping[str, Tree], positions: Positions
) -> tuple[dict[str, Tree], dict[str, Tree]]:
    """Return the inputs of all layers for a slice, and the carries that they leave for the next one."""
    inputs, left = dict[str, Tree](), dict[str, Tree]()
    for layer_id, spec in layers.items():
        inputs[layer_id], layer = x, stack.layers[layer_id]
        arguments, key = (spec.params, spec.state, x), key_spec() if layer.stochastic else None
        with tracing_at(positions):
            if layer.carried is None:
                x, _ = jax.eval_shape(partial(_applied, layer.apply), arguments, key)
            else:
                carry = carries.get(layer_id)
                x, _, left[layer_id] = jax.eval_shape(partial(_carried, layer.carried), arguments, carry, key)
    return inputs, left


def _applied(apply: Any, arguments: tuple[Tree, Tree, Tree], key: Any) -> Any:
    return apply(*arguments, key, True)


def _carried(carried: Any, arguments: tuple[Tree, Tree, Tree], carry: Tree, key: Any) -> Any:
    return carried(*arguments, carry, key, True)
