"""The table of ops. An op is a computation of a stage on a microbatch, such as a forward or a backward.

All code that depends on the kind of computation reads this table. To add an op, add a row here and a method to the stage's functions
(`jpipe.stages`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

__all__ = ["OPS", "Op"]

Reads = Literal["inputs", "residuals", "stash"]
Leaves = Literal["output", "state", "residuals", "gradient", "stash", "accumulators"]


@dataclass(frozen=True)
class Op:
    """A computation of a stage on a microbatch, done by one compiled program.

    The program takes the weights, what `reads` names, the accumulators if `leaves` names them, the random numbers and, if it computes
    gradients, the loss scale. It returns what `leaves` names, in this order; a single result is returned without a tuple.

    Attributes:
        name: the capital letters that stand for the op in orders and timelines.
        function: the method of the stage's functions that computes it.
        reads: "inputs": the stage input, and at the last stage the labels; "residuals": the residuals of a forward, and the output
            gradient; or "stash": what the first half of a backward has left for the second half.
        leaves: "output": the stage output; "state": the layer state; "residuals" and "stash": data for a later op; "gradient": the gradient
            of the stage input; "accumulators": the sums of weight gradients, including this microbatch's.
        label: the op's name in reports and pictures.
    """

    name: str
    function: str
    reads: Reads
    leaves: tuple[Leaves, ...]
    label: str

    @cached_property
    def trains(self) -> bool:
        """Whether the op is part of training, rather than evaluation."""
        return self.leaves != ("output",)

    @cached_property
    def begins(self) -> bool:
        """Whether the microbatch enters the stage with this op."""
        return self.reads == "inputs"

    @cached_property
    def gives_gradient(self) -> bool:
        """Whether the op computes the gradient of the stage input."""
        return "gradient" in self.leaves

    @cached_property
    def finishes(self) -> bool:
        """Whether the op computes the gradients of the weights, which completes the stage's work on the microbatch."""
        return "accumulators" in self.leaves

    @cached_property
    def parts(self) -> str:
        """Which parts the op computes: forward (F), backward for inputs (I), backward for weights (W); for example "FI"."""
        return "F" * self.begins + "I" * self.gives_gradient + "W" * self.finishes

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The separate ops that together do what this op does: a forward, then a whole backward or one of its halves."""
        backward = {"IW": "B"}.get(after := self.parts.removeprefix("F"), after)
        return tuple(name for name in ("F" * self.begins, backward) if name)


_ROWS = (
    Op("F", "forward", "inputs", ("output", "state", "residuals"), "forward"),
    Op("B", "backward", "residuals", ("gradient", "accumulators"), "backward"),
    Op("FB", "forward_backward", "inputs", ("gradient", "accumulators", "state"), "both in one"),
    Op("I", "backward_input", "residuals", ("gradient", "stash"), "backward for inputs"),
    Op("W", "backward_weight", "stash", ("accumulators",), "backward for weights"),
    Op("FI", "forward_backward_input", "inputs", ("gradient", "state", "stash"), "forward and backward for inputs"),
    Op("E", "evaluate", "inputs", ("output",), "evaluation"),
)

OPS: dict[str, Op] = {op.name: op for op in _ROWS}
"""The ops by name."""
