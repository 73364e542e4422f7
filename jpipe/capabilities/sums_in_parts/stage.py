"""The stage in parts along its layers, as pure functions."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jpipe.capabilities.sums_in_parts.cut import Part, cut
from jpipe.capabilities.sums_in_parts.option import layers_by_part
from jpipe.ops import Op
from jpipe.stages.functions._accumulators import accumulate
from jpipe.stages.functions._stage import StageFunctions

Tree = Any


@dataclass(frozen=True)
class BackwardInParts:
    """A backward, perhaps with its forward, cut along the layers, from the last ones to the first.

    Attributes:
        results: `(params, reads, rng, scale) -> (numbers and changed state, [(entry, gradient)], message)`: what the first part returns,
            what the part of the entry does, and what the last one returns. `reads` is what the op reads.
        params, reads, rng, scale: specs of the arguments.
        part_of: the part of each entry.
        parts: how many there are.
        describe: returns what a warning calls the stage.
    """

    results: Callable[[Tree, Tree, Tree, Any], tuple[Tree, list[tuple[str, Tree]], Tree]]
    params: Tree
    reads: Tree
    rng: Tree
    scale: Any
    part_of: Mapping[str, int]
    parts: int
    describe: Callable[[], str]

    def run(self, number: int, params: Tree, held: Tree, rng: Tree, scale: Any) -> tuple[Tree, list[tuple[str, Tree]], Tree, list[Any]]:
        """Run one part.

        Args:
            number: of the part.
            params, rng, scale: as of the whole backward.
            held: what the op reads, or for a later part what `held` returned.

        Returns:
            As `results`, with None in place of what other parts return; the stash.
        """
        outputs, stash = self._cut[number].run(jax.tree.leaves((params, rng, scale)), jax.tree.leaves(held))
        early, gradients, late = self._specs
        wanted = (
            early if number == 0 else None,
            [g for g in gradients if self.part_of[g[0]] == number],
            late if self._is_last(number) else None,
        )
        leaves = iter(outputs)
        first, of_entries, last = jax.tree.map(lambda _: next(leaves), (wanted[0], [tree for _, tree in wanted[1]], wanted[2]))
        return first, [(entry, tree) for (entry, _), tree in zip(wanted[1], of_entries, strict=True)], last, stash

    def held(self, number: int, held: Tree, stash: Sequence[Any]) -> list[Any]:
        """Return what the part after this one reads, from what this one reads and its stash. Nothing is computed."""
        leaves = jax.tree.leaves(held)
        return [*(leaves[i] for i in self._cut[number].kept), *stash]

    def held_spec(self, number: int) -> list[Any]:
        """Shapes and dtypes of what a later part reads."""
        return list(self._cut[number].held)

    def _is_last(self, number: int) -> bool:
        return number == self.parts - 1

    @cached_property
    def _specs(self) -> tuple[Tree, list[tuple[str, Tree]], Tree]:
        names = list[str]()

        def results(*arguments: Any) -> Any:
            early, gradients, late = self.results(*arguments)
            names[:] = [entry for entry, _ in gradients]
            return early, [tree for _, tree in gradients], late

        early, trees, late = jax.eval_shape(results, self.params, self.reads, self.rng, self.scale)
        return early, list(zip(names, trees, strict=True)), late

    @cached_property
    def _cut(self) -> list[Part]:
        free, free_treedef = jax.tree.flatten((self.params, self.rng, self.scale))
        reads, treedef = jax.tree.flatten(self.reads)

        def function(*leaves: Any) -> list[Any]:
            params, rng, scale = jax.tree.unflatten(free_treedef, leaves[: len(free)])
            early, gradients, late = self.results(params, jax.tree.unflatten(treedef, leaves[len(free) :]), rng, scale)
            return jax.tree.leaves((early, [tree for _, tree in gradients], late))

        early, gradients, late = self._specs
        part_of = [0] * len(jax.tree.leaves(early))
        part_of += [self.part_of[entry] for entry, tree in gradients for _ in jax.tree.leaves(tree)]
        part_of += [self.parts - 1] * len(jax.tree.leaves(late))
        parts, error = cut(function, free, reads, part_of, self.parts)
        if error is not None:
            warnings.warn(
                f"{self.describe()}: its backward cannot be cut in parts: {error}; the first part computes all of it", stacklevel=2
            )
        return parts


class StageInParts:
    """The functions of a stage for its parts.

    Args:
        functions: those of the whole stage.
    """

    def __init__(self, functions: StageFunctions) -> None:
        self._functions, self._parts = functions, len(functions.stage.sum_parts)
        self._backwards: dict[str, BackwardInParts] = {}

    @classmethod
    def of(cls, functions: StageFunctions) -> "StageInParts":
        """Return those of a stage, which are made once."""
        made: StageInParts = functions.added.setdefault("sums_in_parts", cls(functions))
        return made

    @cached_property
    def part_of(self) -> dict[str, int]:
        """The part of each entry: the last to be computed of those whose layers use it."""
        f = self._functions
        return {entry: number for number, layers in enumerate(layers_by_part(f.stage)) for entry in f.stack.ties.entries(layers)}

    def accumulators(self, accumulators: Tree, number: int) -> Tree:
        """Select the accumulators (or specs) of one part of the stage. The first part has the numbers, too."""
        gradients = {entry: tree for entry, tree in accumulators["gradients"].items() if self.part_of[entry] == number}
        return {**accumulators, "gradients": gradients} if number == 0 else {"gradients": gradients}

    def run(self, op: Op, number: int, params: Tree, *arguments: Any) -> Any:
        """Run an op for one part of the stage.

        Args:
            op: what it does for this part.
            number: of the part, counted from that of the last layers.
            params: as for the whole op.
            arguments: what the part reads, the accumulators of the part, rng and scale.

        Returns:
            What the op leaves.
        """
        *reads, accumulators, rng, scale = arguments
        held = reads[0] if number else tuple(reads)
        early, gradients, message, stash = self.backward(op.function).run(number, params, held, rng, scale)
        numbers, changed = early or ((), None)
        added = accumulate(accumulators, gradients, numbers, self._functions.scale_of(scale))
        results = {"state": changed, "gradient": message, "accumulators": added, "stash": stash}
        left = tuple(results[kind] for kind in op.leaves)
        return left if len(left) > 1 else left[0]

    def backward(self, function: str) -> BackwardInParts:
        """Return an op that computes the gradients of the weights, cut in parts; `function` is the name of the whole or of one part."""
        name, _, _ = function.partition(" ")
        if name not in self._backwards:
            f, scale = self._functions, self._functions.scale_spec
            ops: dict[str, tuple[Any, Callable[[], Tree]]] = {
                "backward": (self._results_of_backward, lambda: f.between_specs),
                "forward_backward": (self._results_of_forward_backward, lambda: f.specs.arguments),
                "backward_weight": (self._results_of_weights, lambda: f.halves.stash_spec),
            }
            results, reads = ops[name]
            arguments = results, f.specs.params, reads(), f.specs.rng, None if scale is None else scale.value
            self._backwards[name] = BackwardInParts(*arguments, self.part_of, self._parts, lambda: f.description)
        return self._backwards[name]

    def _results_of_backward(self, params: Tree, reads: Tree, rng: Tree, scale: Any) -> Any:
        forward_arrays, saved, message = reads
        return self._results(self._functions.restored_vjp(params, forward_arrays, saved, rng), message, None, rng, scale)

    def _results_of_forward_backward(self, params: Tree, reads: Tree, rng: Tree, scale: Any) -> Any:
        (y, new_state), vjp = self._functions.linearize(params, reads, rng)
        return self._results(vjp, y, self._functions.changed.part(new_state), rng, scale)

    def _results_of_weights(self, params: Tree, reads: Tree, rng: Tree, scale: Any) -> Any:
        f, ((arrays, numbers), stash) = self._functions, reads
        gradients = f.halves.gradients_of_weights(params, arrays, stash, rng, scale)
        return (numbers, None), list(f.stack.ties.by_place(gradients)), None

    def _results(self, vjp: Any, message: Tree, changed: Tree, rng: tuple[Any, Any], scale: Any) -> Any:
        f = self._functions
        gradients, x_gradient = f.cotangents(vjp, message, scale)
        numbers = tuple(message) if f.last else (message[1],)
        return (numbers, changed), list(f.stack.ties.by_place(gradients)), f.sent_gradient(x_gradient, message[1], rng)
