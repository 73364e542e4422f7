"""Check each computation for NaN and infinity, while `jax_debug_nans` or `jax_debug_infs` is on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.errors import shortened
from jpipe.ops import OPS, Op
from jpipe.plan import Plan
from jpipe.stages._calls import ops_of_stage
from jpipe.stages._compiled_stage import CompiledStage

Tree = Any


def checked(plan: Plan, stages: Mapping[int, Sequence[CompiledStage]]) -> dict[int, list[CompiledStage]]:
    """Return copies of the stages in which each call waits for its results and checks them.

    JAX itself checks only the first results of a compiled program.
    """

    def of(w: int, stage: CompiledStage) -> CompiledStage:
        return replace(stage, calls={name: _Checked(plan.workers[w][0], stage, name, call) for name, call in stage.calls.items()})

    return {w: [of(w, stage) for stage in of_worker] for w, of_worker in stages.items()}


@dataclass(frozen=True)
class _Checked:
    """A call of a stage that raises `FloatingPointError`, as JAX does, if its results contain NaN or infinity."""

    number: int
    stage: CompiledStage
    name: str
    call: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        wanted = _wanted()
        with jax.debug_nans(False), jax.debug_infs(False):
            results = self.call(*arguments)
            if values := _nonfinite(self._visible(results), wanted):
                where = f"stage {self.number} (layers {shortened(self.stage.functions.stage.layers)})"
                raise FloatingPointError(f"{where}: {values} in the results of {self.name}; {self._begins(arguments, results, wanted)}")
        return results

    def _visible(self, results: Any) -> Any:
        """Drop the arrays that a forward saves for its backward: they may hold NaN that is masked later."""
        if self._op is None or not self._op.trains or len(self._op.leaves) == 1:
            return results
        return [result for kind, result in zip(self._op.leaves, results[0], strict=True) if kind not in ("residuals", "stash")]

    @property
    def _op(self) -> Op | None:
        """The op that this call computes; None if it computes no op."""
        if self.name == OPS["E"].function:
            return OPS["E"]
        return ops_of_stage(self.stage.functions).get(self.name)

    def _begins(self, arguments: tuple[Any, ...], results: Any, wanted: "Wanted") -> str:
        """Describe where NaN or infinity first occurs in this call, with the layer if it is known."""
        op = self._op
        if op is not None and op.begins and (origin := self._in_forward(op, arguments, wanted)):
            return origin
        sums: Mapping[str, Any] = {}
        if op is not None and op.finishes:
            sums = results[0] if len(op.leaves) == 1 else results[0][op.leaves.index("accumulators")]
        layers = [entry for entry, gradient in sums.get("gradients", {}).items() if _nonfinite(gradient, wanted)]
        if layers:
            return f"the last layer with it in its gradients is '{layers[-1]}'"
        return "it first occurs in the backward" if "backward" in self.name else "it first occurs there"

    def _in_forward(self, op: Op, arguments: tuple[Any, ...], wanted: "Wanted") -> str:
        """Run the layers one by one and describe where NaN or infinity first occurs; return "" if it does not occur."""
        f, (params, state, x) = self.stage.functions, arguments[:3]
        number, train = 5 if op.finishes else 4, op.trains
        microbatch, key = arguments[number] if number < len(arguments) else (None, None)
        if _nonfinite(x, wanted):
            return "the stage's input already has it"
        for layer_id in f.stage.layers:
            whole = f.stack.ties.whole(layer_id, params)
            if _nonfinite(whole, wanted):
                return f"the parameters of layer '{layer_id}' already have it"
            try:
                x, new_state = f.stack.apply([layer_id], {layer_id: whole}, state, x, key=key, microbatch=microbatch, train=train)
            except Exception:  # a layer may run only where it is compiled
                return ""
            if _nonfinite((x, new_state), wanted):
                return f"it first occurs in the forward of layer '{layer_id}'"
        return "it first occurs in the loss" if f.last and not train else ""


Wanted = Mapping[str, Callable[[Any], Any]]
"""The values to look for: for each name a function that tests the entries of an array."""


def _wanted() -> Wanted:
    config: Any = jax.config
    known = {"NaN": (config.jax_debug_nans, jnp.isnan), "infinity": (config.jax_debug_infs, jnp.isinf)}
    return {name: test for name, (is_asked, test) in known.items() if is_asked}


def _nonfinite(tree: Tree, wanted: Wanted) -> str:
    """Return the name of a wanted value in the floating-point arrays of a tree; "" if there is none."""
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            for name, test in wanted.items():
                if any(np.any(shard.data) for shard in test(leaf).addressable_shards):  # the devices of a mesh sum gradients apart
                    return name
    return ""
