"""A stage cut into parts along its layers, as pure functions."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jpipe.capabilities.sums_in_parts.option import layers_by_part
from jpipe.model.jaxprs._split import Halves, NotSplittable, split, undivided
from jpipe.ops import Op
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any
_Flat = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class FunctionPart:
    """One part of a function. It reads *free* arguments, which all parts can read, and *held* arrays, which are kept for it."""

    # `(free arguments, held arrays) -> (results of this part, stash)`
    run: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    held: tuple[Any, ...]  # the shapes and dtypes of the held arrays; for the first part, the other arguments of the function
    # the positions of the held arrays that the next part also holds. The next part holds these and then the stash.
    kept: tuple[int, ...] = ()


def cut(
    function: _Flat, free: Sequence[Any], held: Sequence[Any], part_of: Sequence[int], parts: int
) -> tuple[list[FunctionPart], NotSplittable | None]:
    """Cut a pure function of flat arguments, the free ones first, so that few bytes are held from part to part (see `split`).

    `free` and `held` are the specs of the arguments, and `part_of` has for each result the part that computes it. Return the parts, and an
    error or None. If the function cannot be cut because of side effects, part 0 computes everything, and the error gives the reason.
    """
    result, error = list[FunctionPart](), None
    for n in range(parts - 1):
        specs, in_first = [*free, *held], [number == n for number in part_of]
        try:
            halves = split(function, specs, in_first, [True] * len(free) + [False] * len(held))
        except NotSplittable as reason:
            halves, error = undivided(function, specs, in_first), reason
        kept = tuple(i - len(free) for i in halves.arguments if i >= len(free))
        result.append(FunctionPart(_first(halves), tuple(held), kept))
        function = _remaining(halves, len(free), kept)
        held = [*(held[i] for i in kept), *halves.stash]
        part_of = [number for number in part_of if number != n]
    return [*result, FunctionPart(_last(function), tuple(held))], error


def _first(halves: Halves) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]:
    return lambda free, held: halves.first([*free, *held])


def _last(function: _Flat) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]:
    return lambda free, held: (list(function(*free, *held)), [])


def _remaining(halves: Halves, free: int, kept: Sequence[int]) -> _Flat:
    """Return the second half as a function of the free arguments, the kept arguments and the stash."""
    place = {free + position: free + number for number, position in enumerate(kept)} | {i: i for i in range(free)}

    def second(*arguments: Any) -> list[Any]:
        return halves.second([arguments[place[i]] for i in halves.arguments], arguments[free + len(kept) :])

    return second


class StageInParts:
    """The functions of a stage, divided into its parts.

    Args:
        functions: the functions of the whole stage.
    """

    def __init__(self, functions: StageFunctions) -> None:
        self._functions, self._backwards = functions, dict[str, BackwardInParts]()
        self.count = len(functions.stage.sum_parts)

    @classmethod
    def of(cls, functions: StageFunctions) -> "StageInParts":
        """Return the parts of a stage; they are made only once."""
        return functions.added.setdefault("sums_in_parts", cls(functions))

    @cached_property
    def part_of(self) -> dict[str, int]:
        """The part of each entry. If several parts have layers that use the entry, it is the one that is computed last."""
        f = self._functions
        return {entry: number for number, layers in enumerate(layers_by_part(f.stage)) for entry in f.stack.ties.entries(layers)}

    def accumulators(self, accumulators: Tree, number: int) -> Tree:
        """Select the accumulators (or specs) of one part of the stage. Part 0 also has the numbers."""
        gradients = {entry: tree for entry, tree in accumulators["gradients"].items() if self.part_of[entry] == number}
        return {**accumulators, "gradients": gradients} if number == 0 else {"gradients": gradients}

    def backward(self, function: str) -> "BackwardInParts":
        """Return an op that computes gradients of weights, cut into parts; `function` is the name of the whole op."""
        if function not in self._backwards:
            self._backwards[function] = BackwardInParts(self._functions, self.part_of, self.count, function)
        return self._backwards[function]


class BackwardInParts:
    """A backward, perhaps fused with its forward, cut into parts along the layers, from the last layers to the first.

    Args:
        functions: the functions of the stage.
        part_of: the part of each entry.
        parts: the number of parts.
        function: the name of the whole op.
    """

    def __init__(self, functions: StageFunctions, part_of: dict[str, int], parts: int, function: str) -> None:
        self._functions, self._part_of, self._parts, f = functions, part_of, parts, functions
        ops: dict[str, tuple[Any, Callable[[], Tree]]] = {
            "backward": (self._of_backward, lambda: f.between_specs),
            "forward_backward": (self._of_forward_backward, lambda: f.specs.arguments),
            "backward_weight": (self._of_backward_weight, lambda: f.halves.stash_spec),
        }
        self._results, reads = ops[function]
        scale = None if f.scale_spec is None else f.scale_spec.value
        self._arguments = f.specs.params, reads(), f.specs.rng, scale

    def run(self, op: Op, number: int, params: Tree, *arguments: Any) -> Any:
        """Run one part of an op, counted from the last layers, and return the results of the op.

        `arguments` are what the part reads (after part 0, the result of `held`), the accumulators of the part, rng and scale.
        """
        *reads, sums, rng, scale = arguments
        held = reads[0] if number else tuple(reads)
        outputs, stash = self._cut[number].run(jax.tree.leaves((params, rng, scale)), jax.tree.leaves(held))
        early, gradients, late = self._specs
        wanted = [g for g in gradients if self._part_of[g[0]] == number]
        trees = early if number == 0 else None, [tree for _, tree in wanted], late if number == self._parts - 1 else None
        leaves = iter(outputs)
        first, found, message = jax.tree.map(lambda _: next(leaves), trees)
        numbers, changed = first or ((), None)
        entries = [(entry, tree) for (entry, _), tree in zip(wanted, found, strict=True)]
        added = self._functions.accumulate(sums, entries, numbers, scale)
        results = {"state": changed, "gradient": message, "accumulators": added, "stash": stash}
        left = tuple(results[kind] for kind in op.leaves)
        return left if len(left) > 1 else left[0]

    def held(self, number: int, held: Tree, stash: Sequence[Any]) -> list[Any]:
        """Select the arrays that the next part reads, from the arrays that this part reads and its stash. Nothing is computed."""
        leaves = jax.tree.leaves(held)
        return [*(leaves[i] for i in self._cut[number].kept), *stash]

    def held_spec(self, number: int) -> list[Any]:
        """Return the shapes and dtypes of the arrays that a later part reads."""
        return list(self._cut[number].held)

    # The following methods return the results of the whole op: (numbers, changed state) for part 0, (entry, gradient) pairs, and for the
    # last part the message to the previous stage.

    def _of_backward(self, params: Tree, reads: Tree, rng: Tree, scale: Any) -> Any:
        forward_arrays, saved, message = reads
        f = self._functions
        return self._with_gradients(f, f.restored_vjp(params, forward_arrays, saved, rng), message, None, rng, scale)

    def _of_forward_backward(self, params: Tree, reads: Tree, rng: Tree, scale: Any) -> Any:
        f = self._functions.at_once
        (y, new_state), vjp = f.linearized(params, reads, rng)
        return self._with_gradients(f, vjp, y, f.changed.part(new_state), rng, scale)

    def _of_backward_weight(self, params: Tree, reads: Tree, rng: Tree, scale: Any) -> Any:
        f, ((arrays, numbers), stash) = self._functions, reads
        gradients = f.halves.gradients_of_weights(params, arrays, stash, rng, scale)
        return (numbers, None), list(f.stack.ties.by_place(gradients)), None

    @staticmethod
    def _with_gradients(f: StageFunctions, vjp: Any, message: Tree, changed: Tree, rng: tuple[Any, Any], scale: Any) -> Any:
        gradients, x_gradient = f.cotangents(vjp, message, scale)
        numbers = tuple(message) if f.last else (message[1],)
        return (numbers, changed), list(f.stack.ties.by_place(gradients)), f.sent_gradient(x_gradient, message[1], rng)

    @cached_property
    def _specs(self) -> tuple[Tree, list[tuple[str, Tree]], Tree]:
        names = list[str]()

        def results(*arguments: Any) -> Any:
            early, gradients, late = self._results(*arguments)
            names[:] = [entry for entry, _ in gradients]
            return early, [tree for _, tree in gradients], late

        early, trees, late = jax.eval_shape(results, *self._arguments)
        return early, list(zip(names, trees, strict=True)), late

    @cached_property
    def _cut(self) -> list[FunctionPart]:
        params, reads, rng, scale = self._arguments
        free, free_treedef = jax.tree.flatten((params, rng, scale))
        held, treedef = jax.tree.flatten(reads)

        def function(*leaves: Any) -> list[Any]:
            params, rng, scale = jax.tree.unflatten(free_treedef, leaves[: len(free)])
            early, gradients, late = self._results(params, jax.tree.unflatten(treedef, leaves[len(free) :]), rng, scale)
            return jax.tree.leaves((early, [tree for _, tree in gradients], late))

        early, gradients, late = self._specs
        part_of = [0] * len(jax.tree.leaves(early))
        part_of += [self._part_of[entry] for entry, tree in gradients for _ in jax.tree.leaves(tree)]
        part_of += [self._parts - 1] * len(jax.tree.leaves(late))
        parts, error = cut(function, free, held, part_of, self._parts)
        if error is not None:
            what = self._functions.description
            warnings.warn(f"{what}: its backward cannot be cut into parts: {error}; the first part computes everything", stacklevel=2)
        return parts
