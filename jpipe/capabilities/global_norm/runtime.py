"""How updates use norms: a stage sums squares, the first stage computes the norm, and updates clip or skip by it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.capabilities.global_norm.option import Norms
from jpipe.capabilities.global_norm.program import SumSquares
from jpipe.capabilities.protocol import RuntimeHooks, TransportHooks, UpdateHooks
from jpipe.model._precision import LossScale
from jpipe.plan import Plan
from jpipe.programs._instructions import Compute, Instruction, Send, Update
from jpipe.programs._route import route_of
from jpipe.runtime._metrics import Metrics, MetricsExchange
from jpipe.runtime._trace import key_of
from jpipe.runtime._transport import arrived
from jpipe.runtime._worker import RunResults, Worker
from jpipe.runtime.timing._transfer_times import Computation, that_leave
from jpipe.schedules import SCHEDULES
from jpipe.stages._arrays import Arrays
from jpipe.stages._bytes import nbytes
from jpipe.stages._calls import Call
from jpipe.stages.functions._loss import divisor, loss_dtype, mean
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


class GlobalNorm(NamedTuple):
    """What an update needs to know about the gradients of all stages, as scalars."""

    # the square root of the sum of the squares of the mean gradients. With `clip_stage_norm` an update gets only the norm of its stage, see
    # `with_stage_norm`.
    norm: Any
    nonfinite: Any  # the number of elements of these gradients that are NaN or infinite; None if updates do not use this count


def norms_of(f: StageFunctions) -> Norms:
    """Return how the updates of a stage use norms."""
    return f.capabilities["global_norm"]


# Functions of a stage --------------------------------------------------------------------------------------------------


def sum_squares(f: StageFunctions, accumulators: Tree) -> GlobalNorm:
    """For each layer's mean gradient, sum the squares (field `norm`) and count the elements that are not finite (field `nonfinite`)."""
    weight = divisor(accumulators["weight"])
    means = {layer_id: mean(gradient, weight) for layer_id, gradient in accumulators["gradients"].items()}
    leaves = [[leaf.astype(loss_dtype()) for leaf in jax.tree.leaves(means[entry])] for entry in f.counted]
    zero = jnp.zeros((), loss_dtype())
    squares = [sum((jnp.square(leaf).sum() for leaf in layer), zero) for layer in leaves]
    nonfinite = [sum(((~jnp.isfinite(leaf)).sum(dtype=loss_dtype()) for leaf in layer), zero) for layer in leaves]
    return GlobalNorm(jnp.stack(squares), jnp.stack(nonfinite))


def norm_of(squares: tuple[GlobalNorm, ...]) -> GlobalNorm:
    """Return the norm from the `sum_squares` of all stages. Layers are added one by one, so the cut into stages changes no bit."""
    total = jnp.zeros((), squares[0].norm.dtype)
    for layer in jnp.concatenate([stage.norm for stage in squares]):
        total += layer
    return GlobalNorm(jnp.sqrt(total), jnp.concatenate([stage.nonfinite for stage in squares]).sum())


def with_stage_norm(f: StageFunctions, accumulators: Tree, norm: GlobalNorm | None) -> GlobalNorm:
    """Return what an update gets with `clip_stage_norm`: the norm of the stage's mean gradient, and `nonfinite` for all stages.

    `accumulators` has all trained parameters of the stage, including those that other replicas update.
    """
    return GlobalNorm(norm_of((sum_squares(f, accumulators),)).norm, None if norm is None else norm.nonfinite)


def next_scale(f: StageFunctions, scale: LossScale, norm: GlobalNorm) -> LossScale:
    """Return the dynamic loss scale for the version that an update makes; `scale` belongs to the version before."""
    assert f.precision.dynamic_scale is not None
    return f.precision.dynamic_scale.after(scale, norm.nonfinite == 0)


def clip(f: StageFunctions, norm: GlobalNorm, gradient: Tree) -> Tree:
    """Clip like `optax.clip_by_global_norm`. If the norm is NaN, all gradients become NaN."""
    largest = norms_of(f).largest
    if largest is None:
        return gradient
    return jax.tree.map(lambda g: jnp.where(norm.norm < largest, g, g / norm.norm.astype(g.dtype) * largest), gradient)


def step_or_skip(f: StageFunctions, step: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return the optimizer step, or one that changes nothing if the batch is skipped."""

    def step_if_finite(params: Tree, optimizer_state: Tree, accumulators: Tree, others: Mapping[str, Tree], position: Any) -> Tree:
        # With `where`, XLA would round the update differently than without `skip_nonfinite`.
        arguments = params, optimizer_state, accumulators, others, dict(position)
        return jax.lax.cond(others["global_norm"].nonfinite == 0, step, lambda *unchanged: unchanged[:2], *arguments)

    return step_if_finite if norms_of(f).skips else step


# Specs and programs ----------------------------------------------------------------------------------------------------


def _number(a: Arrays) -> Tree:
    return a.whole(jax.ShapeDtypeStruct((), loss_dtype()))


def _norm(a: Arrays) -> GlobalNorm | None:
    """Return the specs of the norm of all gradients, if updates use it."""
    return GlobalNorm(_number(a), _number(a)) if norms_of(a.functions).of_all else None


def _squares(a: Arrays, counts: Iterable[int]) -> tuple[GlobalNorm, ...]:
    """Return the specs of the sums of squares of stages that count these numbers of entries."""
    numbers = [a.whole(jax.ShapeDtypeStruct((count,), loss_dtype())) for count in counts]
    return tuple(GlobalNorm(number, number) for number in numbers)


def spec(a: Arrays) -> GlobalNorm | None:
    """Return the specs of what an update gets: with `clip_stage_norm` the norm of its stage, otherwise the norm of all stages."""
    norms = norms_of(a.functions)
    return GlobalNorm(_number(a), _number(a) if norms.of_all else None) if norms.of_stage else _norm(a)


def calls(a: Arrays) -> dict[str, Call]:
    """Return the programs of norms."""
    f, counts = a.functions, norms_of(a.functions).counts
    return {
        "sum_squares": Call(partial(sum_squares, f), (), (a.accumulators,), _squares(a, [len(f.counted)])[0]),
        "norm": Call(norm_of, (), (_squares(a, counts),), _norm(a)),
        "stage_norm": Call(partial(with_stage_norm, f), (), (a.accumulators, _norm(a)), spec(a)),
        "next_scale": Call(partial(next_scale, f), (), (a.scale, _norm(a)), a.scale),
    }


def used_calls(f: StageFunctions, i: Instruction) -> tuple[str, ...]:
    """Return the programs that an instruction needs."""
    if isinstance(i, Update):
        return (*(("stage_norm",) if norms_of(f).of_stage else ()), *(("next_scale",) if f.scale_spec is not None else ()))
    return ("sum_squares", "norm") if f.first else ("sum_squares",)


# Instructions ----------------------------------------------------------------------------------------------------------


def run_sum_squares(worker: Worker, i: SumSquares) -> None:
    """Sum the squares of the gradients of a batch, and append the sums that later stages have sent; the first stage computes the norm."""
    update = i.batch + worker.version_shift
    later = arrived(worker.state.updates.get(update, {}).get("squares", ()))
    squares = worker.calls["sum_squares"](worker.complete(update)), *later
    if worker.functions.first:
        worker.change_update(update, squares=None, norm=worker.calls["norm"](squares))
    else:
        worker.change_update(update, squares=squares)


def send_squares(worker: Worker, i: Send, update: int) -> Tree:
    """Return the sums of squares to send, and free them."""
    squares = worker.state.updates[update]["squares"]
    worker.change_update(update, squares=None)
    return squares


def norm_for_update(worker: Worker, update: int, accumulators: Tree) -> GlobalNorm | None:
    """Return the norm that an update gets. Keep the norm of all stages until the next update, because it may have to be forwarded."""
    norms, norm = norms_of(worker.functions), None
    if norms.of_all:
        if update - 1 in worker.state.updates:
            worker.change_update(update - 1, norm=None)
        norm = arrived(worker.state.updates[update]["norm"])
        worker.change_update(update, norm=norm)
        if scales := worker.state.loss_scales:
            scales[update + 1] = worker.calls["next_scale"](scales[update], norm)
        if worker.functions.last and (worker.replica == 0 or worker.plan.has_parallel_pipelines):
            worker.results.others["norms"][update, worker.replica] = (*norm, scales[update + 1].value) if scales else norm
    if not norms.of_stage:
        return norm
    of_stage: GlobalNorm = worker.calls["stage_norm"](accumulators, norm)
    if worker.replica == 0:
        worker.results.others["stage norms"][update, worker.stage] = of_stage.norm
    return of_stage


# Numbers of a run ------------------------------------------------------------------------------------------------------


def report(
    exchange: MetricsExchange, f: StageFunctions, updated: Sequence[Sequence[int]], results: RunResults, metrics: Metrics
) -> list[dict[int, Any]] | None:
    """Put the norms, the counts of elements that are not finite, and the loss scales into the metrics.

    If updates that are not finite are skipped, return for each pipeline, by batch, how many elements of its gradient are not finite.
    """
    norms, of_pipelines = norms_of(f), list[dict[int, Any]]()
    for pipeline, worker in enumerate(exchange.reporting) if norms.of_all else ():
        local = {t: partial(tuple, norm) for (t, number), norm in results.others["norms"].items() if number == pipeline}
        into, nonfinite = Metrics.empty() if pipeline else metrics, dict[int, Any]()
        fields = [into.norms, nonfinite, *([into.loss_scales] if f.scale_spec is not None else [])]
        exchange.check_complete("gradient norm", worker, updated[-1], local)
        exchange.share(f"gradient norm of pipeline {pipeline}" if pipeline else "gradient norm", worker, updated[-1], local, fields)
        of_pipelines.append(nonfinite)
    for batch in updated[-1] if of_pipelines else ():
        metrics.nonfinite[batch] = exchange.sum_of([nonfinite[batch] for nonfinite in of_pipelines])
    for s, batches in enumerate(updated) if norms.of_stage else ():
        rate, by_batch = exchange.plan.updates_per_batch(s), dict[int, Any]()
        of_stage = {g // rate: partial(tuple, [norm]) for (g, stage), norm in results.others["stage norms"].items() if stage == s}
        exchange.share(f"gradient norm of stage {s}", exchange.plan.stage_workers[s][0], batches, of_stage, [by_batch])
        metrics.stage_norms.update({(batch, s): norm for batch, norm in by_batch.items()})
    return of_pipelines if norms.skips else None


def waits_for(plan: Plan, instructions: Iterable[Compute | Update]) -> dict[Computation, list[Computation]]:
    """For each update, return the first-stage computations of the last gradients in its norm, for which the update waits."""
    waits: dict[Computation, list[Computation]] = {}
    for i in instructions:
        if isinstance(i, Update):
            (s, replica), each = plan.workers[i.worker], plan.row_slices  # the backward of the first slice of a row is the last one
            end = (i.batch + 1) * plan.microbatches_per_update(s)
            last = [] if SCHEDULES[plan.schedule].flushes_after(plan, i.batch) else [end - each + route_of(plan).delay]
            microbatches = [*range(end - plan.replicas[0] * each, end, each), *last]
            if plan.has_parallel_pipelines:
                microbatches = [end - (plan.replicas[s] - replica) * each]
            waits[key_of(i)] = [key for k in microbatches for key in that_leave("accumulators", plan, 0, k)]
    return waits


RUNTIME = RuntimeHooks(
    handlers={SumSquares: run_sum_squares},
    messages={
        "squares": TransportHooks(
            send_squares,
            lambda source, to: tuple(_squares(a, norms_of(a.functions).counts[source.functions.number :]) for a in (source, to)),
        ),
        "norm": TransportHooks(
            lambda worker, i, update: arrived(worker.state.updates[update]["norm"]),
            lambda source, to: (_norm(source), _norm(to)),
        ),
    },
    calls=calls,
    used_calls=dict.fromkeys((SumSquares, Update), used_calls),
    update=UpdateHooks(spec, norm_for_update, clip, step_or_skip),
    costs=lambda a: {"squares": nbytes(_squares(a, [len(a.functions.counted)]))},
    report=report,
    waits_for=waits_for,
)
