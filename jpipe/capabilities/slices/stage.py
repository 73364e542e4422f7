"""The functions of stages for slices of rows, and checks that a model can be computed slice by slice."""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jpipe.capabilities.slices.option import ByCost, lengths_by_cost, lengths_of
from jpipe.context import Positions, noting_reads, tracing_at
from jpipe.errors import InputError, callers_code, cause, shortened
from jpipe.model._function_arguments import random_parameter
from jpipe.model._layer import LayerSpec, describe, key_spec
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._dependence import bodies, is_literal
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
    """Return the positions of each slice of the rows."""
    lengths, half = lengths_of(value, length := row_length(spec)), length // 2
    if isinstance(value, ByCost):
        halves = functions_of_slices(functions, spec, _positions((half, length - half), length))
        first, second = (sum(sum(count_products(f.residuals.forward.jaxpr).values()) for f in of_slice) for of_slice in halves)
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
            flow, of_layers = flows[f.stage.layers[0]], {layer_id: carries[layer_id] for layer_id in f.stage.layers if layer_id in carries}
            received = flow if f.first else f.exchange.specs("activation", flow)
            specs = replace(f.specs, x=(received, of_layers), input=(flow, of_layers), labels=labels if f.last else None)
            of_slice.append(replace(f, specs=specs, positions=positions))
        result.append(of_slice)
        carries = following
    return result


def check_model(functions: Sequence[StageFunctions], layers: Mapping[str, LayerSpec], labels: Tree) -> None:
    """Check that layers without a carry, and the loss, compute each position separately.

    Args:
        labels: the specs of the labels of a microbatch.
    """
    stack, loss = functions[0].stack, functions[-1].loss
    for f in functions:
        if changed := [layer_id for layer_id, tree in f.changed.part(f.specs.state).items() if jax.tree.leaves(tree)]:
            raise _refused("layers without state that forwards change", f"layer '{changed[0]}'")
    if random_parameter(loss) is not None:
        raise _refused("a loss that draws no random numbers", f"a loss with a parameter '{random_parameter(loss)}'")
    ids, loss_too = rows_together(stack, layers, labels, loss, 1)
    mixing = shortened([repr(layer_id) for layer_id in ids if stack.layers[layer_id].carried is None])
    if mixing:
        found = f"layers that mix positions: {mixing}"
        if stack.traced is not None:
            found = f"layers that were cut from a model and mix positions: {mixing}"
        raise _refused("layers that compute each position separately, or have a carry", found)
    if loss_too:
        raise _refused("a loss that is a sum over positions", "a loss that is more")
    if numbering := _numbering(stack, layers):
        expected = "layers that read jpipe.context.traced_positions() if a result depends on the number of a position"
        raise _refused(expected, f"layer '{numbering[0]}', which {numbering[1]} without it")


def _refused(expected: str, found: str) -> InputError:
    change = "give the layer a carry, or let it read jpipe.context.traced_positions(), as docs/how-to/long-rows.md shows; or remove slices"
    return InputError(where="plan", key="slices", expected=expected, found=found, change=change)


def _numbering(stack: LayerStack, layers: Mapping[str, LayerSpec]) -> tuple[str, str] | None:
    """Return a layer that depends on the number of a position, or of all positions, but does not read it, and why.

    Layers are traced for two numbers of positions. A layer that computes each position alone has the same operations and constants in both,
    and no arrays of positions but those that depend on its inputs, and repeated constants.
    """
    sizes = {size for leaf in jax.tree.leaves([(spec.x, spec.params) for spec in layers.values()]) for size in leaf.shape}
    counts = [count for count in COUNTS if count not in sizes][:2]
    inputs, known = [with_rows(layers[stack.ids[0]].x, count, 1) for count in counts], set[Any]()
    of_model = stack.traced is not None and _model_reads(stack, inputs[0], counts[0])
    for layer_id, spec in layers.items():
        layer, traced, read = stack.layers[layer_id], list[Any](), of_model
        with tracing_at(Positions(0, counts[0], counts[0])), noting_reads():
            is_new = (like := stack.like(layer_id, inputs[0])) not in known
        known.add(like)
        for n, count in enumerate(counts):
            arguments = spec.params, spec.state, inputs[n]
            with tracing_at(Positions(0, count, count)), noting_reads() as reads, callers_code(partial(_fixed_length, layer_id, count)):
                if layer.carried is None:
                    made, (inputs[n], _) = jax.make_jaxpr(partial(_applied, layer.apply), return_shape=True)(arguments, key_spec())
                else:
                    made, (inputs[n], *_) = jax.make_jaxpr(partial(_carried, layer.carried), return_shape=True)(arguments, None, key_spec())
            traced.append(made)
            read |= bool(reads)
        first, second = ((each.jaxpr, each.consts) for each in traced)
        if is_new and not read and (why := _of_positions(first, second, layer.carried is None)):
            return layer_id, why
    return None


def _model_reads(stack: LayerStack, x: Tree, count: int) -> bool:
    """Return whether a model that was cut into layers reads its positions."""
    assert stack.traced is not None
    whole = stack.traced.whole
    with tracing_at(Positions(0, count, count)), noting_reads() as reads, contextlib.suppress(Exception):  # an error names a layer below
        jax.eval_shape(partial(_applied, whole.layer.apply), (*whole.specs, x), key_spec())
    return bool(reads)


def _fixed_length(layer_id: str, count: int, error: BaseException) -> str:
    return f"plan.slices: layer '{layer_id}' does not accept {count} positions of longer rows: {cause(error)}; let it read " + (
        "jpipe.context.traced_positions(), as docs/how-to/long-rows.md shows, or remove slices"
    )


def _of_positions(first: tuple[Any, Sequence[Any]], second: tuple[Any, Sequence[Any]], without_carry: bool) -> str:
    """Say what in a jaxpr depends on the number of a position or of all positions, or return "".

    Args:
        first, second: the jaxpr and its constants, for two numbers of positions.
        without_carry: whether the layer has no carry; with one it may count positions itself, but not draw numbers for each.
    """
    (a, consts), (b, others) = first, second
    if without_carry and not all(map(_is_equal, consts, others)):
        return "has constants for each position"
    if [equation.primitive for equation in a.eqns] != [equation.primitive for equation in b.eqns]:
        return "computes otherwise for other numbers of positions" if without_carry else ""
    for one, two in zip(a.eqns, b.eqns, strict=True):
        inside = [*zip(bodies(one), bodies(two), strict=True)]
        if _differ(one.outvars, two.outvars) and not _differ(one.invars, two.invars) and not inside:
            if one.primitive.name == "random_bits":
                return "draws random numbers"
            if without_carry and one.primitive.name != "broadcast_in_dim":
                return "counts positions"
        if without_carry and not all(_is_equal(x.val, y.val) for x, y in zip(one.invars, two.invars, strict=True) if is_literal(x)):
            return "computes with the number of positions"
        if why := next((why for x, y in inside if (why := _of_positions(x, y, without_carry))), ""):
            return why
    return ""


def _differ(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return [var.aval.shape for var in first] != [var.aval.shape for var in second]


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or (np.shape(a) == np.shape(b) and bool(np.all(a == b)))


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
