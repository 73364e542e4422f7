"""The programs of one stage compiled ahead of time for the devices of its workers."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from jpipe.errors import callers_code, cause
from jpipe.meshes._place import Place
from jpipe.model._layer import Layer, LayerSpec, key_spec
from jpipe.model._losses import Loss
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._wanted import without_effects
from jpipe.ops import OPS, Leaves, Op
from jpipe.plan import Plan
from jpipe.programs._instructions import (
    AddShared,
    AllReduce,
    Compute,
    Instruction,
    Program,
    SumSquares,
    TakeShared,
    Update,
)
from jpipe.stages._arrays import Arrays, Share, shardings_of
from jpipe.stages._functions import StageFunctions, norm_of

Tree = Any


class Call(NamedTuple):
    """A program of a stage before it is traced.

    Attributes:
        function: what it computes.
        donated: which of its arguments.
        inputs: the specs of all of them, with shardings.
        outputs: the specs of what it gives, with shardings; None in place of what XLA is to shard as it likes.
    """

    function: Callable[..., Any]
    donated: tuple[int, ...]
    inputs: tuple[Any, ...]
    outputs: Any


UpdateKind = Literal["in_place", "into_retired", "into_new"]
CompiledPrograms = dict[tuple[Place, str], jax.stages.Compiled]
"""Compiled programs by their place and the hash of their text."""


def _computations() -> dict[str, Op]:
    """Return the ops of training by the name of their call: `forward`, `backward`, …"""
    return {op.function: op for op in OPS.values() if op.trains}


def _choosing() -> dict[str, Op]:
    """Return the ops that leave arrays for a later op, which XLA shards as it likes, in the order in which they choose."""
    return {name: op for name, op in _computations().items() if {"residuals", "stash"} & {*op.leaves}}


def update_kind(update: Update) -> UpdateKind:
    """Where an update writes the new version: over the version it reads, over another version that it retires, or into new memory."""
    if update.retires is None:
        return "into_new"
    return "in_place" if update.retires == update.batch else "into_retired"


@dataclass(frozen=True)
class CompiledStage:
    """What the runtime calls, by name: the functions of `jpipe.ops.OPS` and an update of each kind, those that are used.

    Each except `evaluate` returns (result, done), where `done` is an array of one byte that is ready when the computation is finished.
    With the global norm there is also `sum_squares`, and at the first stage `norm`; with a dynamic loss scale `next_scale`; if gradients
    are set aside, `zero_accumulators` and at the last stage `mean_loss`; if replicas sum them, `add` and `finish`; if they average their
    layer state when it is read, `add_state` and `mean_state`. With a `share`, updates are of this part of the weights.
    """

    functions: StageFunctions
    place: Place
    calls: dict[str, Any]  # of `jax.stages.Compiled`, or of what stands for them
    share: Share | None = None

    @property
    def chosen(self) -> dict[str, Sequence[Any]]:
        """How XLA sharded what stays from one program to a later one, as in `Arrays`; nothing on one device."""
        found: dict[str, Sequence[Any]] = {}
        for name in _choosing() if self.place.mesh else ():
            if name in self.calls:
                found = {**_choices(self.functions, name, self.calls[name]), **found}
        return found

    def update(
        self, kind: UpdateKind, retired: Sequence[Tree], params: Tree, optimizer: Tree, accumulators: Tree, norm: Any
    ) -> tuple[tuple[Tree, Tree, Tree, Any], jax.Array]:
        """Call an update: ((new params, new optimizer state, zero accumulators, (mean loss, weight)), done).

        With a share the new params are those of the share alone. Frozen parameters are the arrays of `params`, which no program gets.

        Args:
            kind: of the update.
            retired: the version into whose memory it writes, if it does.
            params, optimizer, accumulators, norm: of `StageFunctions.update`.
        """
        trained = self.functions.trained
        if self.share is not None:
            *retired, params = (self.share.part(tree) for tree in (*retired, params))
        frozen = trained.others(params)
        *retired, params = (trained.part(tree) for tree in (*retired, params))
        (new, *others), done = self._updated(kind, retired, params, optimizer, accumulators, norm)
        return (trained.joined(new, frozen), *others), done

    def _updated(
        self, kind: UpdateKind, retired: Sequence[Tree], params: Tree, optimizer: Tree, accumulators: Tree, norm: Any
    ) -> tuple[tuple[Tree, Tree, Tree, Any], jax.Array]:
        """As `update`, of what the updates of this replica change."""
        groups = self.functions.sharing.groups_of(self.functions.number)
        if not groups:
            found, done = self.calls[kind](*retired, params, optimizer, accumulators, norm)
            return found, done
        gradients, parts = accumulators["gradients"], []
        for group, names in groups.items():
            held = ({name: tree[name] for name in names} for tree in (*retired, params, optimizer, gradients))
            parts.append(self.calls[f"{kind} shared {group}"](*held, accumulators["weight"], norm))
        own = [_own(self.functions, tree) for tree in (*retired, params, optimizer, gradients)]
        (*updated, zeros, loss), done = self.calls[kind](*own[:-1], {**accumulators, "gradients": own[-1]}, norm)
        parts.append((*updated, zeros["gradients"]))
        versions, states, blank = ({entry: tree for part in parts for entry, tree in part[i].items()} for i in range(3))
        return (versions, states, {**zeros, "gradients": blank}, loss), done

    @property
    def temporary_bytes(self) -> int:
        """The largest scratch memory of any of the programs; 0 where the backend does not say."""
        analyses = [call.memory_analysis() for call in self.calls.values()]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)


def compile_workers(
    workers: Mapping[int, tuple[StageFunctions, Place, Share | None]],
    programs: Iterable[Program],
    counts: Sequence[int],
    like: Mapping[int, CompiledStage] | None = None,
) -> dict[int, CompiledStage]:
    """Compile the calls that the programs need for each of these workers, and its evaluation; replicas in one place share them.

    Calls are traced one after the other and compiled in parallel.

    Args:
        workers: functions, place and share of each.
        programs: what will run.
        counts: the numbers of entries that each stage counts in the norm.
        like: the same workers compiled for microbatches of other shapes. What does not depend on these is taken from there.
    """
    keys = {w: (f.stage.layers, place, share) for w, (f, place, share) in workers.items()}
    of_key = {key: f for w, (f, _, _) in workers.items() for key in (_for_all(keys[w]), keys[w])}
    used: dict[Any, set[str]] = {key: set() for key in of_key}
    for w, (f, _, _) in workers.items():
        averages, scales = f.averages_when_read, f.scale_spec is not None
        always = {"evaluate", *(("add_state", "mean_state") if averages else ()), *(("next_scale",) if scales else ())}
        used[_for_all(keys[w])].update(always if like is None else {"evaluate"})
    for program in programs:
        for instruction in program.instructions:
            if instruction.worker in workers:
                for name in _calls(instruction, program):
                    if like is not None and name not in _computations():
                        continue
                    key = keys[instruction.worker]
                    used[key if name in get_args(UpdateKind) else _for_all(key)].add(name)
    stages = [(f, *key[1:], sorted(used[key])) for key, f in of_key.items()]
    compiled = dict(zip(of_key, _compile_in_turns(stages, counts), strict=True))
    found = {
        key: CompiledStage(of_key[key], place, compiled[_for_all(key)] | compiled[key], share)
        for key in dict.fromkeys(keys.values())
        for _, place, share in (key,)
    }
    if like is None:
        return {w: found[key] for w, key in keys.items()}
    return {w: replace(found[key], calls=like[w].calls | found[key].calls) for w, key in keys.items()}


def _for_all(key: tuple[tuple[str, ...], Place, Share | None]) -> tuple[tuple[str, ...], Place, Share | None]:
    """The key of what replicas call whatever their share is."""
    return (*key[:2], None)


def _compile_in_turns(
    stages: Sequence[tuple[StageFunctions, Place, Share | None, list[str]]],
    counts: Sequence[int],
    before: Sequence[Mapping[str, jax.stages.Lowered]] = (),
    known: CompiledPrograms | None = None,
) -> list[dict[str, jax.stages.Compiled]]:
    """The named calls of each stage compiled. On a mesh the calls of `_choosing` come before those that take what they give.

    `before` are calls that are lowered already, for nothing chosen. Programs in `known` are not compiled again; new ones are added.
    """
    found: list[dict[str, jax.stages.Compiled]] = [{} for _ in stages]
    chosen: list[dict[str, Sequence[Any]]] = [{} for _ in stages]
    for turn in (*_choosing(), None):
        lowered = {}
        for i, (f, place, share, names) in enumerate(stages):
            for name in names:
                if name not in found[i] and (turn is None or (place.mesh and name == turn)):
                    earlier = before[i].get(name) if before and not chosen[i] else None
                    lowered[i, name] = earlier or _lower_call(f, place, name, counts, dict(chosen[i]), share)
        if known is None:
            calls = _compile_side_by_side(list(lowered.values()))
        else:
            keys = [(stages[i][1], hashlib.sha256(call.as_text().encode()).hexdigest()) for (i, _), call in lowered.items()]
            missing = {key: call for key, call in zip(keys, lowered.values(), strict=True) if key not in known}
            known.update(zip(missing, _compile_side_by_side(list(missing.values())), strict=True))
            calls = [known[key] for key in keys]
        for (i, name), call in zip(lowered, calls, strict=True):
            found[i][name] = call
            if turn is not None:
                chosen[i] = {**_choices(stages[i][0], turn, call), **chosen[i]}
    return [{name: programs[name] for name in names} for programs, (*_, names) in zip(found, stages, strict=True)]


def _choices(f: StageFunctions, name: str, call: jax.stages.Compiled) -> dict[str, Sequence[Any]]:
    """How a compiled call shards what stays for later calls, as `Arrays.chosen`."""
    result, _ = call.output_shardings
    op = _computations()[name]
    left = result[op.leaves.index("residuals" if "residuals" in op.leaves else "stash")]
    if "residuals" in op.leaves:
        return {"saved": left}
    if not op.begins:
        return {"stash": left}
    _, own, stash = left
    # What the halves do not read is in no array that is given: any sharding will do in its place.
    held = dict(zip(f.rest_of_saved, own, strict=True))
    return {"saved": [held.get(i) for i in range(f.residuals.count)], "stash": stash}


def with_metrics(workers: Mapping[int, CompiledStage], metrics: Mapping[str, Loss]) -> dict[int, CompiledStage]:
    """These workers of the last stage, with evaluations that also compute these metrics."""
    measuring = {w: replace(stage, functions=replace(stage.functions, metrics=metrics)) for w, stage in workers.items()}
    return _evaluating_by(measuring, "evaluate")


def with_outputs(workers: Mapping[int, CompiledStage]) -> dict[int, CompiledStage]:
    """These workers of the last stage, with evaluations that give the outputs of the model in place of the loss."""
    return _evaluating_by(workers, "predict")


def _evaluating_by(workers: Mapping[int, CompiledStage], name: str) -> dict[int, CompiledStage]:
    """The workers with this call in place of their evaluation."""
    lowered = {stage.place: _lower_call(stage.functions, stage.place, name, (), {}, None) for stage in workers.values()}
    compiled = dict(zip(lowered, _compile_side_by_side(list(lowered.values())), strict=True))
    return {w: replace(stage, calls=stage.calls | {"evaluate": compiled[stage.place]}) for w, stage in workers.items()}


def compile_stages(
    plan: Plan,
    functions: Sequence[StageFunctions],
    programs: Iterable[Program],
    places: Mapping[int, Place],
    shares: Sequence[Share | None],
    known: CompiledPrograms | None = None,
) -> dict[int, CompiledStage]:
    """The stages that have a place, with what their workers call, but for evaluations, compiled only to be looked at; equal ones once.

    Of replicas that share the optimizer state one stands for all: that with the share in `shares`. Programs in `known` are not compiled
    again; new ones are added.
    """
    names: list[set[str]] = [set() for _ in functions]
    for program in programs:
        for instruction in program.instructions:
            names[plan.workers[instruction.worker][0]].update(_calls(instruction, program))
    counts = [len(f.counted) for f in functions]
    lowered, texts = {}, {}
    for s, place in places.items():
        lowered[s] = {name: _lower_call(functions[s], place, name, counts, {}, shares[s]) for name in sorted(names[s])}
        texts[s] = place, tuple(call.as_text() for call in lowered[s].values())
    distinct = {text: s for s, text in reversed(texts.items())}
    stages = [(functions[s], places[s], shares[s], sorted(names[s])) for s in distinct.values()]
    compiled = dict(zip(distinct, _compile_in_turns(stages, counts, [lowered[s] for s in distinct.values()], known), strict=True))
    return {s: CompiledStage(functions[s], place, compiled[texts[s]], shares[s]) for s, place in places.items()}


def _calls(instruction: Instruction, program: Program) -> tuple[str, ...]:
    """The computations that an instruction needs."""
    stage = program.plan.workers[instruction.worker][0]
    match instruction:
        case Compute(op=op):
            return (OPS[op].function,)
        case AllReduce():
            return "add", "finish"
        case TakeShared():
            return ("take_shared",)
        case AddShared(group=group):
            return (f"add_shared {group}",)
        case SumSquares():
            return ("sum_squares",) if stage else ("sum_squares", "norm")
        case Update():
            aside = ("zero_accumulators", "mean_loss") if stage == program.plan.depth - 1 else ("zero_accumulators",)
            kind = update_kind(instruction)
            shared = (f"{kind} shared {group}" for group, stages in enumerate(program.shared) if stage in stages)
            return (kind, *shared, *(aside if program.sets_aside[stage] else ()))
    return ()


def compile_initializers(
    stack: LayerStack, specs: Mapping[str, LayerSpec], places: Iterable[tuple[str, Place]]
) -> dict[tuple[str, Place], jax.stages.Compiled]:
    """For each (layer id, place) `key -> (params, state)`, whole on the first device; equal layers of a device share one program.

    One program per layer, not per stage and not sharded, so that the bits of the weights depend on neither the cut nor the mesh.
    """
    shared: dict[tuple[str, jax.Device], jax.stages.Lowered] = {}
    name_of = {}
    for layer_id, place in dict.fromkeys(places):
        lowered = _lower_initializer(stack.layers[layer_id], specs[layer_id].x, place.first)
        name_of[layer_id, place] = lowered.as_text(), place.first
        shared.setdefault(name_of[layer_id, place], lowered)
    compiled = dict(zip(shared, _compile_side_by_side(list(shared.values()), _RUN_ONCE), strict=True))
    return {place: compiled[name] for place, name in name_of.items()}


def compile_start(functions: StageFunctions, place: Place, share: Share | None) -> Callable[[Tree], tuple[Tree, Tree, Tree]]:
    """`params -> (weight version, optimizer state, accumulators)` of a stage before training, from parameters as the layers make them."""
    names = ["init_optimizer", "zero_accumulators"] + ["first_version"] * functions.precision.has_masters
    lowered = [_lower_call(functions, place, name, (), {}, share) for name in names]
    init_optimizer, zero_accumulators, *first_version = _compile_side_by_side(lowered)

    def start(fresh: Tree) -> tuple[Tree, Tree, Tree]:
        version = first_version[0](fresh) if first_version else fresh
        return version, init_optimizer(fresh if share is None else share.part(fresh)), zero_accumulators(version)

    return start


_RUN_ONCE: Mapping[str, str | bool] = MappingProxyType({"xla_backend_optimization_level": "1"})
"""For programs that run once: they are compiled in half the time, and give the same bits."""


def _compile_side_by_side(
    lowered: Sequence[jax.stages.Lowered], options: Mapping[str, str | bool] | None = None
) -> list[jax.stages.Compiled]:
    # Not where XLA optimizes by other means, or is told to do even less.
    is_usual = jax.default_backend() == "cpu" and not jax.config.values["jax_disable_most_optimizations"]
    chosen = dict(options) if options and is_usual else None
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA releases Python's lock while it compiles
        return list(pool.map(lambda call: call.compile(chosen), lowered))


def _initializer(init: Callable[[jax.Array, Tree], tuple[Tree, Tree]], x: Tree) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    return lambda key: init(key, jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), x))


def _lower_initializer(layer: Layer, x: Tree, device: jax.Device) -> jax.stages.Lowered:
    key = Place((device,)).specs(key_spec())
    traced = jax.jit(_initializer(layer.init, x)).trace(key)
    if traced.jaxpr.effects:  # a Linen module runs its forward on the zeros
        traced = jax.jit(_initializer(without_effects(layer.init, (False, True)), x)).trace(key)
    return traced.lower()


def _lower_call(
    functions: StageFunctions, place: Place, name: str, counts: Sequence[int], chosen: Mapping[str, Sequence[Any]], share: Share | None
) -> jax.stages.Lowered:
    traced = trace_call(functions, place, name, counts, chosen, share)
    if not traced.jaxpr.effects:
        return traced.lower()

    def message(error: BaseException) -> str:
        if place.mesh:
            where, remedy = " on a mesh", "make it unordered (ordered=False), or give the stage one device"
        else:
            where, remedy = "", "leave it out, or for a check of checkify wrap what contains it in checkify.checkify"
        return f"{functions.words}: a side effect of it cannot run{where}: {cause(error)}; {remedy}"

    with callers_code(message):
        return traced.lower()


def trace_call(
    functions: StageFunctions,
    place: Place,
    name: str,
    counts: Sequence[int] = (),
    chosen: Mapping[str, Sequence[Any]] | None = None,
    share: Share | None = None,
    *,
    with_effects: bool = True,
) -> jax.stages.Traced:
    """One of the calls of a `CompiledStage`, by name, traced for a place.

    Args:
        functions: of the stage.
        place: where it runs.
        name: of the call.
        counts: the number of entries that each stage counts in the norm.
        chosen, share: as in `Arrays`.
        with_effects: whether with side effects, such as host callbacks, that no result needs.
    """
    call = _call(Arrays(functions, place, {} if chosen is None else chosen, share), name, counts)
    function, outputs = call.function, call.outputs
    if name in (*_computations(), *get_args(UpdateKind)):
        function, outputs = _with_done(function), (outputs, place.specs(_DONE))
    options: dict[str, Any] = {"donate_argnums": call.donated, "keep_unused": name.startswith(("in_place", "into_retired"))}
    if place.mesh or name in ("zero_accumulators", "init_optimizer"):  # without arguments that are used JAX would take the first device
        options["out_shardings"] = shardings_of(outputs)
    traced = jax.jit(function, **options).trace(*call.inputs)
    if with_effects or not traced.jaxpr.effects:
        return traced
    return jax.jit(without_effects(function), **options).trace(*call.inputs)


def _call(a: Arrays, name: str, counts: Sequence[int]) -> Call:
    """A call by name."""
    f = a.functions
    if name in (computations := _computations()):
        return _call_of_op(a, computations[name])
    own_params, own_optimizer, own_gradients = (_own(f, tree) for tree in (a.updated(a.trained), a.optimizer, a.accumulators["gradients"]))
    own = own_params, own_optimizer, {**a.accumulators, "gradients": own_gradients}
    number = a.whole(jax.ShapeDtypeStruct((), f.loss_dtype))
    loss = (number, number) if f.last else None
    updated = (*own, loss)
    calls: dict[str, Callable[[], Call]] = {
        "in_place": lambda: Call(f.update, (0, 1, 2), (*own, a.norm), updated),
        "into_new": lambda: Call(f.update, (1, 2), (*own, a.norm), updated),
        "into_retired": lambda: Call(_into(f.update), (0, 2, 3), (own_params, *own, a.norm), updated),
        "sum_squares": lambda: Call(f.sum_squares, (), (a.accumulators,), a.whole(f.squares_spec([len(f.counted)])[0])),
        "next_scale": lambda: Call(f.next_scale, (), (a.scale, a.norm), a.scale),
        "norm": lambda: Call(norm_of, (), (a.whole(f.squares_spec(counts)),), a.norm),
        "take_shared": lambda: Call(f.take_shared, (), (a.accumulators,), f.take_shared_spec(a.accumulators)),
        "mean_loss": lambda: Call(f.mean_loss, (), (a.accumulators,), (number, number)),
        "init_optimizer": lambda: Call(f.init_optimizer, (), (a.updated(a.fresh),), a.optimizer),
        "first_version": lambda: Call(f.first_version, (), (a.fresh,), a.params),
        "zero_accumulators": lambda: Call(f.zero_accumulators, (), (a.params,), a.accumulators),
        "add_state": lambda: Call(_added, (), (a.averaged, a.averaged), a.averaged),
        "mean_state": lambda: Call(f.mean_state, (), (a.averaged,), a.averaged),
        "add": lambda: Call(_added, (), (a.reduced, a.reduced), a.reduced),
        "finish": lambda: Call(f.finish, (0,), (a.reduced,), (*a.reduced, loss)),
        "evaluate": lambda: Call(f.evaluate, (), (a.params, *a.arguments, a.evaluation_rng), number if f.last else a.outputs),
        "predict": lambda: Call(f.predict, (), (a.params, a.state, a.x, None, a.evaluation_rng), None),
    }
    shared = _calls_for_shared(a)
    return shared[name] if name in shared else calls[name]()


def _call_of_op(a: Arrays, op: Op) -> Call:
    """Return the call of an op, with the arguments and results that its row of the table says."""
    f, scale = a.functions, None if a.scale is None else a.scale.value
    reads = {"inputs": lambda: a.arguments, "residuals": lambda: a.between, "stash": lambda: a.stash}[op.reads]()
    results = tuple(_result_of_op(a, op, kind) for kind in op.leaves)
    sums, donated = ((a.accumulators,), (1 + len(reads),)) if op.finishes else ((), ())
    inputs = a.params, *reads, *sums, a.rng, *(() if op.parts == "F" else (scale,))
    return Call(getattr(f, op.function), donated, inputs, results if len(results) > 1 else results[0])


def _result_of_op(a: Arrays, op: Op, kind: Leaves) -> Any:
    """Return the specs of one kind of result of an op; None for what XLA is to shard as it likes."""
    if kind == "residuals":
        return a.saved if "saved" in a.chosen else None
    if kind == "stash":
        stash = a.stash[1] if "stash" in a.chosen else None
        if not op.begins:
            return stash
        chosen = "saved" in a.chosen and stash is not None
        return a.outputs, *(([a.saved[i] for i in a.functions.rest_of_saved], stash) if chosen else (None, None))
    results = {"output": a.outputs, "state": a.changed, "gradient": a.gradient, "accumulators": a.accumulators}
    return results[kind]


def _calls_for_shared(a: Arrays) -> dict[str, Call]:
    """The calls for each group of parameters that other stages hold, too."""
    found: dict[str, Call] = {}
    f, gradients, weight = a.functions, a.accumulators["gradients"], a.accumulators["weight"]
    for group, names in f.sharing.groups_of(f.number).items():
        others = {s: f.shared_with(s, gradients) for s in f.sharing.groups[group][0] if s != f.number}
        params, optimizer_state, taken = ({name: tree[name] for name in names} for tree in (a.trained, a.optimizer, gradients))
        updated = params, optimizer_state, taken
        given = *updated, weight, a.norm
        found[f"add_shared {group}"] = Call(functools.partial(f.add_shared, group), (0,), (a.accumulators, others), a.accumulators)
        found[f"in_place shared {group}"] = Call(f.update_shared, (0, 1, 2), given, updated)
        found[f"into_new shared {group}"] = Call(f.update_shared, (1, 2), given, updated)
        found[f"into_retired shared {group}"] = Call(_into(f.update_shared), (0, 2, 3), (params, *given), updated)
    return found


_DONE = jax.ShapeDtypeStruct((), jnp.bool_)


def _added(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)


def _with_done(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: (function(*arguments), jnp.zeros((), jnp.bool_))


def _own(f: StageFunctions, tree: Mapping[str, Tree]) -> dict[str, Tree]:
    """The entries of a tree that no other stage holds."""
    shared = {name for names in f.sharing.groups_of(f.number).values() for name in names}
    return {entry: part for entry, part in tree.items() if entry not in shared}


def _into(update: Callable[..., Any]) -> Callable[..., Any]:
    """The update with a first argument besides, the retired version, into whose memory it writes."""
    return lambda retired, *arguments: update(*arguments)
