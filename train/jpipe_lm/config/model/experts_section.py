"""The key `model.experts` of a config: a mixture of experts replaces the MLPs of some blocks."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jpipe import InputError
from jpipe_train.config.section import Count, Section

_Factor = Annotated[float, Field(ge=0, le=1e6)]


class ExpertsConfig(Section):
    """A mixture of `count` experts replaces the MLP of a block. A router chooses `per_token` experts to compute each token.

    An expert is an MLP of hidden width `mlp_width`; with `bias` experts and router have biases. The `score` of an expert is its softmax
    over all experts or its own sigmoid. Experts with the highest scores are chosen, with `correction` after a constant of each expert is
    added; if the experts are in `groups`, only experts of the `groups_per_token` groups with the two best scores together. `renormalize`
    divides the scores of the chosen experts by their sum, and `scale` multiplies them. They weight the outputs of the experts or, with
    `weighs_inputs`, the inputs. With `shared_mlp_width` a shared MLP of this hidden width also computes every token; `shared_gate`
    multiplies its output by a learned number between 0 and 1. `layers` is a pattern of blocks with experts that repeats along the depth;
    null means all blocks. The loss of a microbatch includes `balance_loss` times the load-balancing loss, and `z_loss` times the mean
    square of the logarithm of the router's partition function.
    """

    count: Annotated[int, Field(ge=2, le=4096)]
    per_token: Count
    mlp_width: Annotated[int, Field(ge=1, le=10**7)]
    bias: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: Count = 1
    groups_per_token: Count = 1
    renormalize: bool = True
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    weighs_inputs: bool = False
    shared_mlp_width: Annotated[int, Field(ge=1, le=10**7)] | None = None
    shared_gate: bool = False
    layers: Annotated[list[bool], Field(min_length=1, max_length=1000)] | None = None
    balance_loss: _Factor = 0.01
    z_loss: _Factor = 0.0

    @model_validator(mode="after")
    def _fits(self) -> "ExpertsConfig":
        if self.per_token > self.count:
            raise InputError(f"per_token {self.per_token} is more than count {self.count}", change="change one of them")
        if self.groups > 1 and (self.count % self.groups or self.count == self.groups):
            raise InputError(
                key="groups",
                expected=f"groups of equally many experts, at least two, of {self.count} (count)",
                found=self.groups,
                change="change one of them",
            )
        size = self.count // self.groups
        if self.groups_per_token > self.groups or self.per_token > size * self.groups_per_token:
            raise InputError(
                f"groups_per_token {self.groups_per_token} of {self.groups} groups of {size} experts cannot give {self.per_token} experts "
                "(per_token)",
                change="change one of them",
            )
        if self.shared_gate and self.shared_mlp_width is None:
            raise InputError("shared_gate has no effect without shared_mlp_width", change="set shared_mlp_width, or remove shared_gate")
        if self.layers is not None and not any(self.layers):
            raise InputError(
                key="layers",
                expected="at least one block with experts",
                found="none",
                change="set one to true, or set model.experts to null",
            )
        return self


def replace_all_mlps(given: Any) -> bool:
    """Return whether this value of `experts` gives experts to all blocks, so that `mlp_width` has no effect."""
    return isinstance(given, dict) and given.get("layers") is None
