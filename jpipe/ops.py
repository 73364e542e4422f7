"""The ops: one row for each program that a stage runs on a microbatch. Everything that depends on the kind of computation asks this table.

A new op is a row and a method of the stage's functions (`jpipe.stages`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

__all__ = ["OPS", "Op"]

Reads = Literal["inputs", "residuals", "stash"]
Leaves = Literal["output", "state", "residuals", "gradient", "stash", "accumulators"]


@dataclass(frozen=True)
class Op:
    """What a stage computes of a microbatch in one program.

    The program takes the weights, what the op reads, the accumulators if it leaves them, the random numbers and, if it computes gradients,
    the loss scale. It returns what the op leaves, in this order; a single result stands alone.

    Attributes:
        name: capital letters, in orders and timelines.
        function: the method of the stage's functions that computes it.
        reads: "inputs", the stage input and at the last stage the labels; "residuals", from a forward, and the output gradient; or
            "stash", what the first half of a backward has left for the second.
        leaves: "output", the stage output; "state", the layer state; "residuals" and "stash", to be read by a later op; "gradient", the
            gradient of the stage input; "accumulators", with the microbatch's gradients of the weights.
        label: its name in reports and pictures.
    """

    name: str
    function: str
    reads: Reads
    leaves: tuple[Leaves, ...]
    label: str

    @cached_property
    def trains(self) -> bool:
        """Whether it is part of training, rather than of an evaluation."""
        return self.leaves != ("output",)

    @cached_property
    def begins(self) -> bool:
        """Whether the microbatch enters the stage."""
        return self.reads == "inputs"

    @cached_property
    def gives_gradient(self) -> bool:
        """Whether it computes the gradient of the stage input."""
        return "gradient" in self.leaves

    @cached_property
    def finishes(self) -> bool:
        """Whether it computes the gradients of the weights, after which nothing remains to be done for the microbatch."""
        return "accumulators" in self.leaves

    @cached_property
    def parts(self) -> str:
        """What it does of a forward (F), a backward for inputs (I) and a backward for weights (W), such as "FI"."""
        return "F" * self.begins + "I" * self.gives_gradient + "W" * self.finishes

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """The ops that together compute the same, where a whole backward counts as one op. They determine its time and its picture."""
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
