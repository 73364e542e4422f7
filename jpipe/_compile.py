"""The programs of one stage compiled ahead of time for its device."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jpipe._layers import Layer, LayerSpec, LayerStack, key_spec
from jpipe._program import Backward, Forward, ForwardBackward, Program, SumSquares, Update
from jpipe._stage import StageFunctions, norm_of

Tree = Any
UpdateKind = Literal["in_place", "into_retired", "into_new"]


def update_kind(update: Update) -> UpdateKind:
    """Which memory an update writes the new version into: the version it reads, another one that retires with it, or new memory."""
    if update.retires is None:
        return "into_new"
    return "in_place" if update.retires == update.batch else "into_retired"


@dataclass(frozen=True)
class CompiledStage:
    """What the runtime calls, by name: `forward`, `backward`, `forward_backward`, `evaluate`, an update for each kind that is used.

    Each but `evaluate` returns (result, done): `done` is an array of one byte that nothing else uses, there when the computation
    is over. Where gradients are clipped there is `sum_squares`, and at the first stage `norm`.
    """

    functions: StageFunctions
    device: jax.Device
    calls: dict[str, jax.stages.Compiled]

    @property
    def temporary_bytes(self) -> int:
        """The largest scratch memory of any of the programs; 0 where the backend does not say."""
        analyses = [call.memory_analysis() for call in self.calls.values()]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)


def compile_stages(stages: list[tuple[StageFunctions, jax.Device]], programs: Iterable[Program]) -> list[CompiledStage]:
    """Compile, for each stage, what the programs use and its evaluation. Traces one after the other, compiles side by side."""
    used: list[set[str]] = [{"evaluate"} for _ in stages]
    for program in programs:
        for instruction in program.instructions:
            match instruction:
                case Forward():
                    used[instruction.worker].add("forward")
                case Backward():
                    used[instruction.worker].add("backward")
                case ForwardBackward():
                    used[instruction.worker].add("forward_backward")
                case SumSquares():
                    used[instruction.worker] |= {"sum_squares", "norm"} if instruction.worker == 0 else {"sum_squares"}
                case Update():
                    used[instruction.worker].add(update_kind(instruction))
    layers = [len(functions.stage.layers) for functions, _ in stages]
    lowered = [
        {name: _lower_call(functions, device, name, layers) for name in sorted(names)}
        for (functions, device), names in zip(stages, used, strict=True)
    ]
    compiled = _compile_side_by_side([call for calls in lowered for call in calls.values()])
    return [
        CompiledStage(functions, device, {name: compiled.pop(0) for name in calls})
        for (functions, device), calls in zip(stages, lowered, strict=True)
    ]


def compile_initializers(
    stack: LayerStack, specs: Mapping[str, LayerSpec], device_of: Mapping[str, jax.Device]
) -> dict[str, jax.stages.Compiled]:
    """For each layer `key -> (params, state)` on its device; equal layers of a device share one program.

    A program a layer, not a stage: the bits of the weights do not depend on the cut.
    """
    shared: dict[tuple[str, jax.Device], jax.stages.Lowered] = {}
    name_of = {}
    for layer_id, device in device_of.items():
        key = _on(device, key_spec())
        lowered = jax.jit(_initializer(stack.layers[layer_id], specs[layer_id].x)).lower(key)
        name_of[layer_id] = lowered.as_text(), device
        shared.setdefault(name_of[layer_id], lowered)
    compiled = dict(zip(shared, _compile_side_by_side(list(shared.values())), strict=True))
    return {layer_id: compiled[name] for layer_id, name in name_of.items()}


def _compile_side_by_side(lowered: Sequence[jax.stages.Lowered]) -> list[jax.stages.Compiled]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # XLA compiles outside Python's lock
        return list(pool.map(lambda call: call.compile(), lowered))


def _initializer(layer: Layer, x: Tree) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    return lambda key: layer.init(key, jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), x))


def _lower_call(functions: StageFunctions, device: jax.Device, name: str, layers: Sequence[int]) -> jax.stages.Lowered:
    f, specs = functions, functions.specs
    sums = jax.eval_shape(f.zero_sums, specs.params)
    optimizer_state = jax.eval_shape(f.init_optimizer, specs.params)
    weight = jax.ShapeDtypeStruct((), f.loss_dtype)
    unweighted = {name: part for name, part in sums.items() if name != "weight"}
    norm = None if f.clip_global_norm is None else weight
    arguments: dict[str, Callable[[], tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]]] = {
        "forward": lambda: (f.forward, (), (specs.params, *specs.arguments, specs.draw)),
        "backward": lambda: (f.backward, (4,), (specs.params, *_backward_inputs(f), sums, specs.draw)),
        "forward_backward": lambda: (f.forward_backward, (4,), (specs.params, *specs.arguments, sums, specs.draw)),
        "in_place": lambda: (f.update, (0, 1, 2), (specs.params, optimizer_state, unweighted, weight, norm)),
        "into_new": lambda: (f.update, (1, 2), (specs.params, optimizer_state, unweighted, weight, norm)),
        "into_retired": lambda: (_update_into(f), (0, 2, 3), (specs.params, specs.params, optimizer_state, unweighted, weight, norm)),
        "sum_squares": lambda: (f.sum_squares, (), (sums["gradients"], weight)),
        "norm": lambda: (norm_of, (), (tuple(jax.ShapeDtypeStruct((n,), weight.dtype) for n in layers),)),
        "evaluate": lambda: (f.evaluate, (), (specs.params, *specs.arguments)),
    }
    function, donated, inputs = arguments[name]()
    if name in ("forward", "backward", "forward_backward", *get_args(UpdateKind)):
        function = _with_done(function)
    jitted = jax.jit(function, donate_argnums=donated, keep_unused=name == "into_retired")
    return jitted.lower(*jax.tree.map(lambda spec: _on(device, spec), inputs))


def _with_done(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: (function(*arguments), jnp.zeros((), jnp.bool_))


def _backward_inputs(f: StageFunctions) -> tuple[Any, Any, Any]:
    """Specs of what a backward takes over from the forward, and of the gradient message it gets."""
    y, new_state, saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.draw)
    kept = f.residuals.keep(f.specs.arguments, (y, new_state))
    if f.last:
        return kept, saved, y
    return kept, saved, [leaf for leaf in jax.tree.leaves(y) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _update_into(f: StageFunctions) -> Callable[..., Any]:
    def update(retired: Tree, params: Tree, optimizer_state: Tree, sums: Tree, weight: jax.Array, norm: Any) -> Any:
        return f.update(params, optimizer_state, sums, weight, norm)

    return update


def _on(device: jax.Device, spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
