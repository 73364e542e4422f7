"""The backward of a stage in two halves: the gradients of the inputs, and the gradients of the weights."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jpipe.model.jaxprs._split import Halves, NotSplittable, split, undivided
from jpipe.stages.functions._residuals import Residuals

Tree = Any
LateInputs = tuple[list[Any], tuple[Any, ...]]


@dataclass(frozen=True)
class SplitBackward:
    """The two halves of a backward, `gradients_of_input` and `gradients_of_weights`.

    The second half reads the *stash*, which the first half returns, and its *late inputs*: the residuals and the parts of the gradient
    message that the second half needs. All other arrays can be freed after the first half.

    Attributes:
        backward: `(params, forward_arrays, saved, message, rng, scale) -> (gradients of inputs, gradients of weights)`.
        params: the specs of the parameters.
        between: the specs of (forward_arrays, saved, message).
        rng, scale: the specs of (microbatch, key) and of the dynamic loss scale, or Nones.
        input_count: the number of gradients of inputs.
        gradients: the specs of the gradients of the weights.
        residuals: the residuals of the stage.
        numbers_of: returns the numbers of a gradient message: (weight,), or at the last stage (loss, weight).
        describe: returns the name of the stage for a warning.
    """

    backward: Callable[..., tuple[list[Any], Tree]]
    params: Tree
    between: tuple[Any, Any, Any]
    rng: Tree
    scale: Any
    input_count: int
    gradients: Tree
    residuals: Residuals
    numbers_of: Callable[[Tree], tuple[Any, ...]]
    describe: Callable[[], str]

    def gradients_of_input(
        self, params: Tree, forward_arrays: Any, saved: Tree, message: Tree, rng: Tree, scale: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Run the first half; return the gradients of the floating-point leaves of the stage input, and the stash."""
        return self._halves.first(jax.tree.leaves((params, forward_arrays, saved, message, rng, scale)))

    def gradients_of_weights(self, params: Tree, late: Sequence[Any], stash: Sequence[Any], rng: Tree, scale: Any) -> Tree:
        """Run the second half, and return the gradients of the trained parameters, keyed by layer id."""
        leaves = jax.tree.leaves((params, self.between, rng, scale))
        for position, leaf in zip(self._late_positions, late, strict=True):
            leaves[position] = leaf
        gradients = self._halves.second([leaves[i] for i in self._halves.arguments], stash)
        return jax.tree.unflatten(jax.tree.structure(self.gradients), gradients)

    def late_inputs(self, forward_arrays: Any, saved: Tree, message: Tree) -> LateInputs:
        """Select the arrays that the second half reads in addition to the stash, and the numbers of the message. Nothing is computed."""
        leaves = dict(enumerate(jax.tree.leaves((self.params, forward_arrays, saved, message))))
        return [leaves[i] for i in self._late_positions], self.numbers_of(message)

    def stash_of(self, arguments: tuple[Tree, Tree, Tree], new_state: Tree, results: Any) -> tuple[LateInputs, list[Any]]:
        """Return (late inputs, stash) after a fused forward and first half on (state, x, labels). Nothing is computed.

        `results` is the last result of `StageFunctions.forward_backward_input`.
        """
        y, late_saved, stash = results
        saved = dict(zip(self.late_saved, late_saved, strict=True))
        forward_arrays = self.residuals.keep(arguments, (y, new_state))
        unread = 0  # a None would not be a leaf
        return self.late_inputs(forward_arrays, tuple(saved.get(i, unread) for i in range(self.residuals.count)), y), stash

    @cached_property
    def late(self) -> frozenset[tuple[str, int]]:
        """The residuals that the second half reads, each as the kind and the position of a `Source`."""
        of_kinds = {"argument": self.residuals.arguments, "output": self.residuals.outputs, "saved": range(len(self.between[1]))}
        all_of_them = [(kind, position) for kind, positions in of_kinds.items() for position in positions]
        begin = len(jax.tree.leaves(self.params))
        return frozenset(residual for i, residual in enumerate(all_of_them, begin) if i in self._late_positions)

    @cached_property
    def late_saved(self) -> tuple[int, ...]:
        """The positions, among the saved arrays of a forward, that the second half reads."""
        return tuple(sorted(position for kind, position in self.late if kind == "saved"))

    @property
    def stash_spec(self) -> tuple[LateInputs, list[Any]]:
        """The shapes and dtypes of (late inputs, stash), which are held between the two halves."""
        return self.late_inputs(*self.between), list(self._halves.stash)

    @cached_property
    def _halves(self) -> Halves:
        arguments = self.params, *self.between, self.rng, self.scale
        specs, treedef = jax.tree.flatten(arguments)

        def backward(*leaves: Any) -> list[Any]:
            x_gradient, gradients = self.backward(*jax.tree.unflatten(treedef, leaves))
            return [*x_gradient, *jax.tree.leaves(gradients)]

        outputs = self.input_count + len(jax.tree.leaves(self.gradients))
        counts = [len(jax.tree.leaves(part)) for part in (self.params, self.between, (self.rng, self.scale))]
        free = [True] * counts[0] + [False] * counts[1] + [True] * counts[2]
        in_first = [i < self.input_count for i in range(outputs)]
        try:
            return split(backward, specs, in_first, free)
        except NotSplittable as error:
            warnings.warn(
                f"{self.describe()}: its backward cannot be split: {error}; the whole backward runs instead of the backward for inputs",
                stacklevel=2,
            )
            return undivided(backward, specs, in_first)

    @cached_property
    def _late_positions(self) -> tuple[int, ...]:
        """The positions that the second half reads among the leaves of (params, forward_arrays, saved, message), except parameters."""
        params, between = len(jax.tree.leaves(self.params)), len(jax.tree.leaves(self.between))
        return tuple(i for i in self._halves.arguments if params <= i < params + between)
