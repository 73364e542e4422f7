"""The programs of a stage before they are compiled: the function, arguments, donations and results of each."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jpipe.capabilities.protocol import hooks
from jpipe.capabilities.registry import runtimes_for
from jpipe.model.jaxprs._cpu_products import with_swapped_products
from jpipe.model.jaxprs._wanted import without_effects
from jpipe.ops import OPS, Leaves, Op
from jpipe.stages._arrays import ANY_LAYOUT, Arrays, shardings_of
from jpipe.stages.functions._evaluation import evaluate, predict
from jpipe.stages.functions._loss import loss_dtype, mean_loss
from jpipe.stages.functions._stage_functions import StageFunctions
from jpipe.stages.functions._update import (
    add,
    finish,
    mean_state,
    update,
)

Tree = Any
UpdateKind = Literal["in_place", "into_retired", "into_new"]

_DONE = jax.ShapeDtypeStruct((), jnp.bool_)


def ops_by_call() -> dict[str, Op]:
    """Return the ops of training by the name of the call that computes them, such as `forward`."""
    return {op.function: op for op in OPS.values() if op.trains}


def ops_of_stage(f: StageFunctions) -> dict[str, Op]:
    """Return the ops of training by the name of the call that computes them, including the parts of ops that capabilities add."""
    more = (ops(f) for ops in hooks("ops", runtimes_for(f.capabilities).values()))
    return reduce(or_, more, ops_by_call())


class Call(NamedTuple):
    """A program of a stage before it is traced."""

    function: Callable[..., Any]  # the function that the program computes
    donated: tuple[int, ...]  # the positions of the donated arguments
    inputs: tuple[Any, ...]  # the specs of the arguments, with shardings
    outputs: Any  # the specs of the results, with shardings; None in place of a result for which XLA chooses the sharding


def trace_call(arrays: Arrays, name: str, *, with_effects: bool = True, call: Call | None = None) -> jax.stages.Traced:
    """Trace the call of a `CompiledStage` that has this name, or another `call` in its place.

    Without `with_effects` side effects that no result needs, such as host callbacks, are dropped.
    """
    call, place = call or call_of(arrays, name), arrays.place
    function, outputs, op = call.function, call.outputs, ops_of_stage(arrays.functions).get(name)
    if op is not None and arrays.functions.platform == "cpu" and not place.mesh:
        function = with_swapped_products(function)
    if op is not None or name in get_args(UpdateKind):
        function, outputs = _with_done(function), (outputs, place.specs(_DONE))
    function = _named(function, name)
    options: dict[str, Any] = {"donate_argnums": call.donated, "keep_unused": name.startswith(("in_place", "into_retired"))}
    unplaced = name in ("zero_accumulators", "init_optimizer")  # they use no argument, so JAX would place them on the first device
    if place.mesh or arrays.any_layout or unplaced:
        options["out_shardings"] = shardings_of(outputs)
    if arrays.any_layout and op is not None and op.reads == "residuals" and "saved" not in arrays.chosen:
        options["in_shardings"] = (None, None, ANY_LAYOUT, *(None for _ in call.inputs[3:]))
    traced = jax.jit(function, **options).trace(*call.inputs)
    if with_effects or not traced.jaxpr.effects:
        return traced
    return jax.jit(_named(without_effects(function), name), **options).trace(*call.inputs)


def call_of(a: Arrays, name: str) -> Call:
    """Return the call of a stage that has this name."""
    f = a.functions
    if (op := ops_by_call().get(name)) is not None:
        return _call_of_op(a, op)
    params, optimizer, gradients = map(f.without_apart, (a.updated(a.trained), a.optimizer, a.accumulators["gradients"]))
    updated = params, optimizer, {**a.accumulators, "gradients": gradients}
    number = a.whole(jax.ShapeDtypeStruct((), loss_dtype()))
    loss = (number, number) if f.last else None
    calls: dict[str, Callable[[], Call]] = {
        "mean_loss": lambda: Call(mean_loss, (), (a.accumulators,), (number, number)),
        "init_optimizer": lambda: Call(f.init_optimizer, (), (a.updated(a.fresh),), a.optimizer),
        "first_version": lambda: Call(f.first_version, (), (a.fresh,), a.params),
        "zero_accumulators": lambda: Call(f.zero_accumulators, (), (a.params,), a.accumulators),
        "sum_devices": lambda: sum_devices(a, a.accumulators),
        "add_state": lambda: Call(add, (), (a.averaged, a.averaged), a.averaged),
        "mean_state": lambda: Call(partial(mean_state, f), (), (a.averaged,), a.averaged),
        "evaluate": lambda: Call(
            partial(evaluate, f), (), (a.params, a.state, a.x, a.labels, a.evaluation_rng), number if f.last else a.outputs
        ),
        "predict": lambda: Call(partial(predict, f), (), (a.params, a.state, a.x, None, a.evaluation_rng), None),
    }
    if name in calls:
        return calls[name]()
    if name in get_args(UpdateKind):
        return update_calls(partial(update, f), updated, (a.others, *a.position), (*updated, loss))[name]
    for added in hooks("calls", runtimes_for(f.capabilities).values()):
        if name in (more := added(a)):
            return more[name] if isinstance(more[name], Call) else more[name]()
    return _calls_for_sums(a)[name]


def _call_of_op(a: Arrays, op: Op) -> Call:
    """Return the call of an op, with the arguments and results that `jpipe.ops.OPS` lists for it."""
    scale = None if a.scale is None else a.scale.value
    results = tuple(_result_of_op(a, op, kind) for kind in op.leaves)
    arguments = a.read_by(op.reads)
    sums, donated = ((a.accumulators,), (1 + len(arguments),)) if op.finishes else ((), ())
    inputs = a.params, *arguments, *sums, a.rng, *(() if op.parts == "F" else (scale,))
    return Call(getattr(a.functions, op.function), donated, inputs, results if len(results) > 1 else results[0])


def _result_of_op(a: Arrays, op: Op, kind: Leaves) -> Any:
    """Return the specs of one kind of result of an op; `Arrays.open` in place of specs that XLA is to choose."""
    if kind == "residuals":
        return a.saved if "saved" in a.chosen else a.open
    if kind == "stash":
        stash = a.stash[1] if "stash" in a.chosen else a.open
        if not op.begins:
            return stash
        is_chosen = {"saved", "stash"} <= {*a.chosen}
        return a.outputs, *(([a.saved[i] for i in a.functions.halves.late_saved], stash) if is_chosen else (a.open, a.open))
    results = {"output": a.outputs, "state": a.changed, "gradient": a.gradient, "accumulators": a.accumulators}
    return results[kind]


def sum_devices(a: Arrays, accumulators: Tree) -> Call:
    """Return the call that adds up accumulators over the devices of the rows."""
    return Call(a.functions.sum_devices, (0,), (accumulators,), accumulators)


def _calls_for_sums(a: Arrays) -> dict[str, Call]:
    """Return the calls with which replicas sum the arrays that an update needs."""
    calls: dict[str, Call] = {}
    for piece, reduced in a.sums.items():
        calls[f"add{piece}"] = Call(add, (), (reduced, reduced), reduced)
        calls[f"finish{piece}"] = Call(partial(finish, a.functions), (0,), (reduced,), (*reduced, loss_specs(a, reduced[0])))
    return calls


def loss_specs(a: Arrays, accumulators: Tree) -> tuple[Any, Any] | None:
    """Return the specs of (mean loss, weight) of a batch, or None if these accumulators have no loss."""
    number = a.whole(jax.ShapeDtypeStruct((), loss_dtype()))
    return (number, number) if "loss" in accumulators else None


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function under another name, which the compiled program and its profiles show."""

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = named.__qualname__ = name.replace(" ", "_")
    return named


def _with_done(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a second result of one byte, which is ready when the computation has finished."""
    return lambda *arguments: (function(*arguments), jnp.zeros((), jnp.bool_))


def update_calls(update: Callable[..., Any], updated: Sequence[Tree], others: Sequence[Tree], results: Tree) -> dict[str, Call]:
    """Return the calls of each kind of an update.

    `updated` are the specs of its first arguments: a version, optimizer state, accumulators; `others` are for the remaining ones.
    """

    def into_retired(retired: Tree, *arguments: Tree) -> Tree:
        return update(*arguments)

    return {
        "in_place": Call(update, (0, 1, 2), (*updated, *others), results),
        "into_new": Call(update, (1, 2), (*updated, *others), results),
        "into_retired": Call(into_retired, (0, 2, 3), (updated[0], *updated, *others), results),
    }
