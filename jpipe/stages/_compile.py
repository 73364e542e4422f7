"""The programs of one stage compiled ahead of time for its device."""

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jpipe.model._layer import Layer, LayerSpec, key_spec
from jpipe.model._stack import LayerStack
from jpipe.plan import Plan
from jpipe.programs._instructions import (
    AddShared,
    AllReduce,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    ForwardBackward,
    ForwardBackwardInput,
    Instruction,
    Program,
    SumSquares,
    TakeShared,
    Update,
)
from jpipe.stages._functions import Loss, StageFunctions, floats_of, norm_of

Tree = Any
Call = tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]
"""A function, which of its arguments are donated, and the specs of all."""
UpdateKind = Literal["in_place", "into_retired", "into_new"]


_COMPUTATIONS = ("forward", "backward", "forward_backward", "backward_input", "backward_weight", "forward_backward_input")


def update_kind(update: Update) -> UpdateKind:
    """Where an update writes the new version: over the version it reads, over another version that it retires, or into new memory."""
    if update.retires is None:
        return "into_new"
    return "in_place" if update.retires == update.batch else "into_retired"


@dataclass(frozen=True)
class CompiledStage:
    """What the runtime calls, by name: `evaluate`, the computations and an update of each kind that are used.

    The computations are `forward`, `backward`, `forward_backward`, `backward_input`, `backward_weight` and `forward_backward_input`.

    Each except `evaluate` returns (result, done), where `done` is an array of one byte that is ready when the computation is finished.
    With the global norm there is also `sum_squares`, and at the first stage `norm`; with a dynamic loss scale `next_scale`; if gradients
    are set aside, `zero_accumulators` and at the last stage `mean_loss`; if replicas sum them, `add` and `finish`; if they average their
    layer state when it is read, `add_state` and `mean_state`.
    """

    functions: StageFunctions
    device: jax.Device
    calls: dict[str, jax.stages.Compiled]

    def update(
        self, kind: UpdateKind, retired: Sequence[Tree], params: Tree, optimizer: Tree, accumulators: Tree, norm: Any
    ) -> tuple[tuple[Tree, Tree, Tree, Any], jax.Array]:
        """Call an update: ((new params, new optimizer state, zero accumulators, (mean loss, weight)), done).

        Args:
            kind: of the update.
            retired: the version into whose memory it writes, if it does.
            params, optimizer, accumulators, norm: of `StageFunctions.update`.
        """
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
    workers: Mapping[int, tuple[StageFunctions, jax.Device]], programs: Iterable[Program], counts: Sequence[int]
) -> dict[int, CompiledStage]:
    """Compile the calls that the programs need for each of these workers, and its evaluation; replicas on one device share them.

    Calls are traced one after the other and compiled in parallel. `counts` are the numbers of entries that each stage counts in the norm.
    """
    sharing = {w: (functions.stage.layers, device) for w, (functions, device) in workers.items()}
    of_key = {sharing[w]: workers[w] for w in workers}
    used: dict[Any, set[str]] = {}
    for key, (functions, _) in of_key.items():
        averages, scales = functions.averages_when_read, functions.scale_spec is not None
        used[key] = {"evaluate", *(("add_state", "mean_state") if averages else ()), *(("next_scale",) if scales else ())}
    for program in programs:
        for instruction in program.instructions:
            if instruction.worker in workers:
                used[sharing[instruction.worker]].update(_calls(instruction, program))
    lowered = {key: {name: _lower_call(*of_key[key], name, counts) for name in sorted(names)} for key, names in used.items()}
    compiled = iter(_compile_side_by_side([call for calls in lowered.values() for call in calls.values()]))
    stages = {key: CompiledStage(*of_key[key], {name: next(compiled) for name in calls}) for key, calls in lowered.items()}
    return {w: stages[key] for w, key in sharing.items()}


def with_metrics(workers: Mapping[int, CompiledStage], metrics: Mapping[str, Loss]) -> dict[int, CompiledStage]:
    """These workers of the last stage, with evaluations that also compute these metrics."""
    measuring = {w: replace(stage, functions=replace(stage.functions, metrics=metrics)) for w, stage in workers.items()}
    lowered = {stage.device: _lower_call(stage.functions, stage.device, "evaluate", ()) for stage in measuring.values()}
    compiled = dict(zip(lowered, _compile_side_by_side(list(lowered.values())), strict=True))
    return {w: replace(stage, calls=stage.calls | {"evaluate": compiled[stage.device]}) for w, stage in measuring.items()}


def temporary_bytes(plan: Plan, functions: Sequence[StageFunctions], programs: Iterable[Program], device: jax.Device) -> tuple[int, ...]:
    """For each stage the largest scratch memory of any program, compiled for `device`; equal stages are compiled once."""
    names: list[set[str]] = [set() for _ in functions]
    for program in programs:
        for instruction in program.instructions:
            names[plan.workers[instruction.worker][0]].update(_calls(instruction, program))
    counts = [len(f.counted) for f in functions]
    texts: list[list[str]] = []
    distinct: dict[str, jax.stages.Lowered] = {}
    for f, calls in zip(functions, names, strict=True):
        lowered = [_lower_call(f, device, name, counts) for name in sorted(calls)]
        texts.append([call.as_text() for call in lowered])
        distinct.update(zip(texts[-1], lowered, strict=True))
    compiled = dict(zip(distinct, _compile_side_by_side(list(distinct.values())), strict=True))
    return tuple(
        CompiledStage(f, device, {text: compiled[text] for text in own}).temporary_bytes for f, own in zip(functions, texts, strict=True)
    )


def _calls(instruction: Instruction, program: Program) -> tuple[str, ...]:
    """The computations that an instruction needs."""
    stage = program.plan.workers[instruction.worker][0]
    match instruction:
        case Forward():
            return ("forward",)
        case Backward():
            return ("backward",)
        case ForwardBackward():
            return ("forward_backward",)
        case BackwardInput():
            return ("backward_input",)
        case BackwardWeight():
            return ("backward_weight",)
        case ForwardBackwardInput():
            return ("forward_backward_input",)
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
    stack: LayerStack, specs: Mapping[str, LayerSpec], places: Iterable[tuple[str, jax.Device]]
) -> dict[tuple[str, jax.Device], jax.stages.Compiled]:
    """For each (layer id, device) `key -> (params, state)`; equal layers of a device share one program.

    One program per layer, not per stage, so that the bits of the weights do not depend on the cut.
    """
    shared: dict[tuple[str, jax.Device], jax.stages.Lowered] = {}
    name_of = {}
    for layer_id, device in dict.fromkeys(places):
        lowered = _lower_initializer(stack.layers[layer_id], specs[layer_id].x, device)
        name_of[layer_id, device] = lowered.as_text(), device
        shared.setdefault(name_of[layer_id, device], lowered)
    compiled = dict(zip(shared, _compile_side_by_side(list(shared.values())), strict=True))
    return {place: compiled[name] for place, name in name_of.items()}


def compile_start(functions: StageFunctions, device: jax.Device) -> Callable[[Tree], tuple[Tree, Tree, Tree]]:
    """`params -> (weight version, optimizer state, accumulators)` of a stage before training, from parameters as the layers make them."""
    names = ["init_optimizer", "zero_accumulators"] + ["first_version"] * functions.precision.has_masters
    init_optimizer, zero_accumulators, *first_version = _compile_side_by_side([_lower_call(functions, device, name, ()) for name in names])

    def start(fresh: Tree) -> tuple[Tree, Tree, Tree]:
        version = first_version[0](fresh) if first_version else fresh
        return version, init_optimizer(fresh), zero_accumulators(version)

    return start


def _compile_side_by_side(lowered: Sequence[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA releases Python's lock while it compiles
        return list(pool.map(lambda call: call.compile(), lowered))


def _initializer(layer: Layer, x: Tree) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    return lambda key: layer.init(key, jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), x))


def _lower_initializer(layer: Layer, x: Tree, device: jax.Device) -> jax.stages.Lowered:
    return jax.jit(_initializer(layer, x)).lower(_on(device, key_spec()))


def _lower_call(functions: StageFunctions, device: jax.Device, name: str, counts: Sequence[int] = ()) -> jax.stages.Lowered:
    return trace_call(functions, device, name, counts).lower()


def trace_call(functions: StageFunctions, device: jax.Device, name: str, counts: Sequence[int] = ()) -> jax.stages.Traced:
    """One of the calls of a `CompiledStage`, by name, traced for a device; the norm needs the number of entries that each stage counts."""
    f, specs = functions, functions.specs
    accumulators, optimizer_state = f.accumulators_spec, f.optimizer_spec
    own_params, own_optimizer, own_gradients = (_own(f, tree) for tree in (specs.params, optimizer_state, accumulators["gradients"]))
    own_accumulators = {**accumulators, "gradients": own_gradients}
    norm = f.norm_spec if f.global_norm else None
    scale = None if f.scale_spec is None else f.scale_spec.value
    arguments: dict[str, Callable[[], Call]] = {
        "forward": lambda: (f.forward, (), (specs.params, *specs.arguments, specs.rng)),
        "backward": lambda: (f.backward, (4,), (specs.params, *f.between_specs, accumulators, specs.rng, scale)),
        "backward_input": lambda: (f.backward_input, (), (specs.params, *f.between_specs, specs.rng, scale)),
        "backward_weight": lambda: (f.backward_weight, (3,), (specs.params, *f.stash_spec, accumulators, specs.rng, scale)),
        "forward_backward_input": lambda: (f.forward_backward_input, (), (specs.params, *specs.arguments, specs.rng, scale)),
        "forward_backward": lambda: (f.forward_backward, (4,), (specs.params, *specs.arguments, accumulators, specs.rng, scale)),
        "in_place": lambda: (f.update, (0, 1, 2), (own_params, own_optimizer, own_accumulators, norm)),
        "into_new": lambda: (f.update, (1, 2), (own_params, own_optimizer, own_accumulators, norm)),
        "into_retired": lambda: (_into(f.update), (0, 2, 3), (own_params, own_params, own_optimizer, own_accumulators, norm)),
        "sum_squares": lambda: (f.sum_squares, (), (accumulators,)),
        "next_scale": lambda: (f.next_scale, (), (f.scale_spec, norm)),
        "norm": lambda: (norm_of, (), (f.squares_spec(counts),)),
        "take_shared": lambda: (f.take_shared, (), (accumulators,)),
        "mean_loss": lambda: (f.mean_loss, (), (accumulators,)),
        "init_optimizer": lambda: (f.init_optimizer, (), (specs.fresh,)),
        "first_version": lambda: (f.first_version, (), (specs.fresh,)),
        "zero_accumulators": lambda: (f.zero_accumulators, (), (specs.params,)),
        "add_state": lambda: (lambda a, b: jax.tree.map(jnp.add, a, b), (), (floats_of(specs.state), floats_of(specs.state))),
        "mean_state": lambda: (f.mean_state, (), (floats_of(specs.state),)),
        "add": lambda: (lambda a, b: jax.tree.map(jnp.add, a, b), (), (reduced_spec(f), reduced_spec(f))),
        "finish": lambda: (f.finish, (0,), (reduced_spec(f),)),
        "evaluate": lambda: (f.evaluate, (), (specs.params, *specs.arguments)),
    }
    calls_for_shared = _calls_for_shared(f)
    function, donated, inputs = calls_for_shared[name] if name in calls_for_shared else arguments[name]()
    if name in (*_COMPUTATIONS, *get_args(UpdateKind)):
        function = _with_done(function)
    jitted = jax.jit(function, donate_argnums=donated, keep_unused=name.startswith(("in_place", "into_retired")))
    return jitted.trace(*jax.tree.map(lambda spec: _on(device, spec), inputs))


def _calls_for_shared(f: StageFunctions) -> dict[str, Call]:
    """The calls for each group of parameters that other stages hold, too."""
    found: dict[str, Call] = {}
    gradients, weight, norm = f.accumulators_spec["gradients"], f.accumulators_spec["weight"], f.norm_spec if f.global_norm else None
    for group, names in f.sharing.groups_of(f.number).items():
        others = {s: f.shared_with(s, gradients) for s in f.sharing.groups[group][0] if s != f.number}
        params, optimizer_state, taken = ({name: tree[name] for name in names} for tree in (f.specs.params, f.optimizer_spec, gradients))
        specs = params, optimizer_state, taken, weight, norm
        found[f"add_shared {group}"] = functools.partial(f.add_shared, group), (0,), (f.accumulators_spec, others)
        found[f"in_place shared {group}"] = f.update_shared, (0, 1, 2), specs
        found[f"into_new shared {group}"] = f.update_shared, (1, 2), specs
        found[f"into_retired shared {group}"] = _into(f.update_shared), (0, 2, 3), (params, *specs)
    return found


def reduced_spec(f: StageFunctions) -> tuple[Tree, list[jax.ShapeDtypeStruct]]:
    """What replicas sum for an update: their accumulators, and their layer state if they average it with each update."""
    return f.accumulators_spec, floats_of(f.specs.state) if f.average_state == "update" else []


def _with_done(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: (function(*arguments), jnp.zeros((), jnp.bool_))


def _own(f: StageFunctions, tree: Mapping[str, Tree]) -> dict[str, Tree]:
    """The entries of a tree that no other stage holds."""
    shared = {name for names in f.sharing.groups_of(f.number).values() for name in names}
    return {entry: part for entry, part in tree.items() if entry not in shared}


def _into(update: Callable[..., Any]) -> Callable[..., Any]:
    """The update with a first argument besides, the retired version, into whose memory it writes."""
    return lambda retired, *arguments: update(*arguments)


def _on(device: jax.Device, spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
